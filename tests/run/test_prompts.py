"""Requests for other prompts, as the page writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, ModelConfig, SampleConfig, StageConfig
from trainer.run.events import PromptsEvent, SampleEvent, by_prompt
from trainer.run.folder import RunDir
from trainer.run.prompts import clear_prompts, prompts_in_force, request_prompts, requested_prompts
from trainer.system.errors import InputError


def make_run(root: Path, **changes: Any) -> RunDir:
    cfg = RunConfig(name="fox", model=ModelConfig(family="flux2"), data=DataConfig(path=str(root)), **changes)
    return RunDir.create(root, cfg, at=root / "run")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ((), "prompts: 0; give 1 to 100"),
        (("a",) * 101, "prompts: 101; give 1 to 100"),
        (("a", " \n"), "prompt 2: empty; write what the sample should show"),
        (("a" * 10_001,), "prompt 1: 10,001 characters; shorten it to 10,000"),
        (("a \ud83d",), "prompt 1: holds \\ud83d, which is half a character; remove it"),
        (
            ("a [trigger]",),
            "sample.prompts: [trigger] stands for data.trigger, which is empty; set it or remove [trigger]",
        ),
    ],
)
def test_prompts_that_the_run_cannot_draw_are_refused_where_they_are_written(
    tmp_path: Path, prompts: tuple[str, ...], message: str
) -> None:
    run = make_run(tmp_path)
    with pytest.raises(InputError) as error:
        request_prompts(run, prompts)
    assert str(error.value) == message
    assert requested_prompts(run) is None


def test_reference_images_keep_the_number_of_prompts(tmp_path: Path) -> None:
    run = make_run(tmp_path, sample=SampleConfig(prompts=("a", "b"), references=("/a.png", "/b.png")))
    with pytest.raises(InputError, match=r"sample\.references: 2 files for 1 prompts"):
        request_prompts(run, ("c",))
    request_prompts(run, ("c", "d"))


def test_a_request_is_read_back_and_removed_unless_it_was_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    request_prompts(run, ("ein Fuchs, \u2028 \U0001f98a",))
    taken = requested_prompts(run)
    assert taken == ("ein Fuchs, \u2028 \U0001f98a",)
    request_prompts(run, ("later",))
    clear_prompts(run, taken)
    assert requested_prompts(run) == ("later",)
    clear_prompts(run, ("later",))
    assert requested_prompts(run) is None


def test_the_rules_are_those_of_the_current_stage(tmp_path: Path) -> None:
    stage = StageConfig(name="one", set={"data.trigger": "fox"})
    run = make_run(tmp_path, stages=(stage,))
    request_prompts(run, ("a [trigger]",))
    assert requested_prompts(run) == ("a [trigger]",)


def test_prompts_of_a_changed_config_replace_those_requested_before(tmp_path: Path) -> None:
    cfg = make_run(tmp_path, sample=SampleConfig(prompts=("own",))).config()
    events = [PromptsEvent(prompts=(text,), instead_of=("own",)) for text in ("first", "second")]
    assert prompts_in_force((), cfg) == ("own",)
    assert prompts_in_force(events, cfg) == ("second",)
    assert prompts_in_force(events, cfg.with_prompts(("changed",))) == ("changed",)


def test_samples_are_grouped_by_their_own_prompt() -> None:
    old, new, second = (
        SampleEvent(step=step, index=index, prompt=prompt, path=prompt)
        for step, index, prompt in ((1, 0, "z old"), (2, 0, "a new"), (1, 1, "second"))
    )
    assert by_prompt([second, new, old]) == {
        (0, "z old"): {1: old},
        (0, "a new"): {2: new},
        (1, "second"): {1: second},
    }
