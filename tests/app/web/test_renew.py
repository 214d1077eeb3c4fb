"""What a browser is sent: what it lacks, and all of it after an answer that did not reach it."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest

from app.web.pages.renew import SKIP, Lazy, Sent, choices, renewed


def never() -> Any:
    raise AssertionError("was made for nobody")


def test_only_what_changed_is_sent_and_made():
    first, answer = renewed(Sent(), "", ["a", Lazy(1, lambda: "drawn")])
    assert answer == ["a", "drawn"]
    same, answer = renewed(first, first.token, ["a", Lazy(1, never)])
    assert (same, answer) == (first, [SKIP, SKIP])
    second, answer = renewed(first, first.token, ["b", Lazy(1, never)])
    assert answer == ["b", SKIP]
    assert second.token != first.token


def test_what_a_handler_skips_stays_as_it_was():
    first, _ = renewed(Sent(), "", ["a", "b"])
    second, answer = renewed(first, first.token, [SKIP, "c"])
    assert answer == [SKIP, "c"]
    _, answer = renewed(second, second.token, ["a", "c"])
    assert answer == [SKIP, SKIP]


def test_before_there_is_a_run_nothing_is_sent():
    assert renewed(Sent(), "", [SKIP, SKIP]) == (Sent(), [SKIP, SKIP])
    assert renewed(Sent(), "", ["a", SKIP])[1] == ["a", SKIP]


@pytest.mark.parametrize("shown", ["", "of before the server was started"])
def test_after_an_answer_that_was_lost_everything_is_sent_again(shown: str):
    first, _ = renewed(Sent(), "", ["a", "b"])
    second, _ = renewed(first, first.token, ["c", "b"])
    third, answer = renewed(second, shown, ["c", Lazy("b", lambda: "b")])
    assert answer == ["c", "b"]
    assert renewed(third, third.token, ["c", Lazy("b", never)])[1] == [SKIP, SKIP]


def test_a_server_that_was_started_again_sends_everything_to_a_page_that_was_open():
    assert renewed(Sent(), "of before", ["a"])[1] == ["a"]


def test_what_is_chosen_stays_while_it_is_there():
    assert choices(["a", "b"], "b", "a") == gr.update(choices=["a", "b"])
    assert choices(["a"], "b", "a") == gr.update(choices=["a"], value="a")
    assert choices(["a", "b"], ["a"], []) == gr.update(choices=["a", "b"])
    assert choices(["a"], ["a", "b"], ["a"]) == gr.update(choices=["a"], value=["a"])
