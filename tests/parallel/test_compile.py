"""What a run says of torch.compile."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.distributed import run_ranks
from tests.runs import make_pictures, make_run, run_config, train
from trainer.parallel import compile as compiling
from trainer.parallel.compile import compile_blocks, describe_compiled
from trainer.run.events import StatusEvent, WarningEvent


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break(msg="on purpose")
        return x + 1


def test_what_was_left_uncompiled_is_said_with_its_reason() -> None:
    torch._dynamo.reset()
    counters.clear()
    compile_blocks([whole := Whole()], "eager")
    whole(torch.ones(2))
    assert describe_compiled() == ("compiled the blocks into 1 graph", "")
    compile_blocks([broken := Broken()], "eager")
    broken(torch.ones(2))
    compiled, left = describe_compiled()
    assert compiled == "compiled the blocks into 2 graphs"
    assert left.startswith("torch.compile left code uncompiled in 1 places, which run as without it: ")
    counters.clear()
    assert describe_compiled()[1].endswith(": no block was compiled")


class Shaped(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


def test_a_limit_of_graphs_that_was_hit_is_said() -> None:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=2), mock.patch.object(compiling, "GRAPHS_OF_A_CLASS", 2):
        compile_blocks([block := Shaped()], "eager")
        for length in range(2, 8):
            block(torch.ones(1, *[1] * length), length / 2)
    assert "left code uncompiled" in describe_compiled()[1]


@pytest.mark.slow
def test_a_run_says_after_its_first_step_what_was_compiled(tmp_path: Path) -> None:
    pictures = make_pictures(tmp_path / "pictures")
    cfg = run_config(pictures, train__compile=True, train__compile_backend="aot_eager", data__max_aspect=1)
    events = run_ranks(1, train, cfg, make_run(tmp_path, cfg, "compiled"))[0].events
    notes = [event for event in events if isinstance(event, StatusEvent) and event.message.startswith("compiled")]
    assert [note.step for note in notes] == [1]
    assert "graphs; the first step took" in notes[0].message
    assert not any("torch.compile" in event.message for event in events if isinstance(event, WarningEvent))
