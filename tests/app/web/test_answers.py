"""How the page's scripts call functions: arguments are checked, and what is refused travels as a sentence."""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

from app.studio import Studio
from app.web.answers import MOST_DEPTH, answering
from app.web.panels import PANELS
from trainer.system.errors import InputError


def scale(value: float, by: int = 2) -> float:
    return value * by


def refuse() -> None:
    raise InputError("train.steps: is 0")


def lose() -> None:
    raise FileNotFoundError(2, "No such file or directory", "/runs/a/config.yaml")


def fail() -> None:
    raise KeyError("secret")


def echo(values: dict[str, Any]) -> dict[str, Any]:
    return values


ANSWERS = answering(
    [{"scale": scale, "refuse": refuse, "lose": lose}, {"fail": fail, "echo": echo, "not_its_name": scale}]
)


LOST = "/runs/a/config.yaml: cannot be read (No such file or directory); repair or remove it"


@pytest.mark.parametrize(
    ("name", "values", "answer"),
    [
        ("scale", {"value": 3}, {"value": 6.0}),
        ("not_its_name", {"value": 3, "by": 3}, {"value": 9.0}),
        ("scale", {}, {"error": "scale: value: Missing required argument; reload the page"}),
        ("scale", {"value": 1, "more": 2}, {"error": "scale: more: Unexpected keyword argument; reload the page"}),
        ("scale", None, {"error": "scale: the arguments are not an object; reload the page"}),
        ("scale", [1], {"error": "scale: the arguments are not an object; reload the page"}),
        ("refuse", {}, {"error": "train.steps: is 0"}),
        ("lose", {}, {"error": LOST}),
        (
            "echo",
            {"values": {"a": "\ud83d"}},
            {"error": "the text holds \\ud83d, which is half a character; remove it"},
        ),
        ("echo", {"values": {"\ud83d": 1}}, {"error": "the text holds \\ud83d, which is half a character; remove it"}),
        ("echo", {"values": {"a": "\U0001f642 \0"}}, {"value": {"a": "\U0001f642 \0"}}),
    ],
)
def test_a_function_is_answered_or_refused_with_a_sentence(name: str, values: Any, answer: dict[str, Any]):
    assert ANSWERS[name](values) == answer


def test_a_name_of_a_file_that_is_not_utf8_leaves_an_answer_that_can_be_sent():
    """As Python reads b"b\\xffd.png" from a folder."""
    found = {"b\udcffd.png": ["x", ("b\udcffd.png", 1)], "\U0001f642": None}
    listed = answering([{"listed": lambda: found}])["listed"]
    assert listed({}) == {"value": {"b\ufffdd.png": ["x", ["b\ufffdd.png", 1]], "\U0001f642": None}}


def test_a_wrong_type_names_the_argument():
    answer = ANSWERS["scale"]({"value": "many"})
    assert answer["error"].startswith("scale: value: Input should be a valid number")
    assert answer["error"].endswith("; reload the page")


def test_what_is_nested_too_deeply_is_refused():
    nested: Any = 1
    for _ in range(MOST_DEPTH - 2):
        nested = [nested]
    assert ANSWERS["echo"]({"values": {"a": nested}}) == {"value": {"a": nested}}
    for _ in range(MOST_DEPTH):
        nested = [nested]
    assert "nested deeper than 30 levels" in ANSWERS["echo"]({"values": {"a": nested}})["error"]


def test_a_fault_of_the_program_is_named_without_what_it_holds_and_shown_in_the_terminal(
    capfd: pytest.CaptureFixture[str],
):
    assert ANSWERS["fail"]({}) == {"error": "fail: KeyError, a fault of ShardStudio; its terminal says where"}
    assert "KeyError: 'secret'" in capfd.readouterr().err


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.__name__.rpartition(".")[2])
def test_a_panel_gives_its_functions_first_what_they_take_first(panel: ModuleType, tmp_path: Path):
    for name, function in panel.calls(Studio(tmp_path)).items():
        if isinstance(function, partial):
            kinds = get_type_hints(function.func)
            taken = zip(signature(function.func).parameters, function.args, strict=False)
            assert all(isinstance(value, kinds[parameter]) for parameter, value in taken), name
