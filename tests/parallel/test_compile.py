"""What a run says of torch.compile, and that it goes on where something cannot be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters

from tests.distributed import run_ranks
from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.config.sections import TrainConfig
from trainer.parallel import compile as compiling
from trainer.parallel.compile import compile_blocks, compiler_problem, compiles, describe_compiled
from trainer.run.events import StatusEvent, WarningEvent


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.dict(compiling._classes, clear=True), torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break(msg="on purpose")
        return x + 1


def test_what_was_left_uncompiled_is_said_with_its_block_and_reason() -> None:
    compile_blocks([whole := Whole()], "eager")
    whole(torch.ones(2))
    assert describe_compiled() == ("compiled the blocks into 1 graph", "")
    compile_blocks([broken := Broken()], "eager")
    broken(torch.ones(2))
    compiled, left = describe_compiled()
    assert compiled == "compiled the blocks into 2 graphs"
    assert left == (
        "torch.compile left code uncompiled in 1 place of Broken, which run as without it: "
        "Call to `torch._dynamo.graph_break()`"
    )


def test_blocks_that_never_ran_are_not_called_compiled() -> None:
    compile_blocks([Whole()], "eager")
    assert describe_compiled()[1] == "torch.compile compiled no block: none has run"


class Shaped(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


def test_a_limit_of_graphs_that_was_hit_is_said() -> None:
    with torch._dynamo.config.patch(recompile_limit=2), mock.patch.object(compiling, "GRAPHS_OF_A_CLASS", 2):
        compile_blocks([block := Shaped()], "eager")
        for length in range(2, 8):
            block(torch.ones(1, *[1] * length), length / 2)
    assert "left code uncompiled in " in describe_compiled()[1]
    assert "Shaped" in describe_compiled()[1]


def broken_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    raise RuntimeError("no compiler was found\nand more lines")


def test_a_backend_that_fails_leaves_the_block_as_it_is_traced() -> None:
    compile_blocks([block := Whole()], "broken_backend")
    x = torch.ones(2, requires_grad=True)
    with mock.patch.object(torch._dynamo, "lookup_backend", return_value=broken_backend):
        found = block(x)
    found.sum().backward()
    assert found.tolist() == [2.0, 2.0]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]
    assert describe_compiled()[1] == (
        "torch.compile left code uncompiled in 1 place of Whole, which run as without it: "
        "RuntimeError: no compiler was found"
    )


def test_an_error_of_the_tracer_itself_leaves_the_block_as_it_is() -> None:
    compile_blocks([block := Whole()], "eager")
    with mock.patch.object(InstructionTranslator, "run", side_effect=RuntimeError("a fault of torch")):
        assert block(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "of Whole, which run as without it: " in describe_compiled()[1]


def test_memory_that_runs_out_while_compiling_is_no_fault_of_the_compiler() -> None:
    compile_blocks([block := Whole()], "eager")
    raised = torch.OutOfMemoryError("CUDA out of memory")
    with (
        mock.patch.object(torch._dynamo, "lookup_backend", side_effect=raised),
        torch._dynamo.config.patch(suppress_errors=False),
        pytest.raises(Exception, match="out of memory"),
    ):
        block(torch.ones(2))


@pytest.mark.slow
def test_a_lora_in_blocks_that_torch_leaves_uncompiled_learns_what_it_learns_without_compiling(tmp_path: Path) -> None:
    """Selective checkpointing is then torch's own, which keeps the output of the base."""
    pictures = make_pictures(tmp_path / "pictures", 4)
    norms = []
    for compiled in (False, True):
        changes = {"train__compile": compiled, "train__compile_backend": "aot_eager", "train__steps": 3}
        cfg = run_config(pictures, train__checkpointing="selective", optim__lr=1e-2, **changes)
        with mock.patch.object(InstructionTranslator, "run", side_effect=RuntimeError("a fault of torch")):
            norms.append(train(alone(), cfg, make_run(tmp_path, cfg, f"compiled-{compiled}")).grad_norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [({"CC": "/nowhere/cc", "CXX": "/nowhere/cxx", "PATH": "/nowhere"}, "compile"), ({}, "")],
    ids=["no compiler", "all there"],
)
@pytest.mark.slow
def test_whether_torch_can_compile_is_tried(tmp_path: Path, variables: dict[str, str], reason: str) -> None:
    """On a CPU, as on a GPU: the trial is of one kernel, by the compiler that would compile the blocks."""
    code = (
        "import torch; from trainer.parallel import compile as c\n"
        "class Card:\n    type = 'cuda'\n"
        "ones = torch.ones\n"
        "torch.ones = lambda *a, device=None, **k: ones(*a, **k)\n"
        "print(c.compiler_problem(Card(), 'inductor'))"
    )
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | variables
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    said = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""
    if reason:
        assert said.startswith("blocks are not compiled, which makes steps slower: torch.compile does not work here (")
    else:
        assert said == ""


@pytest.mark.parametrize(
    ("wanted", "device", "before", "expected"),
    [
        ("auto", "cuda", None, True),
        ("auto", "cpu", None, False),
        ("auto", "cuda", False, False),
        ("auto", "cuda", True, True),
        ("auto", "cpu", True, False),
        (True, "cpu", False, True),
        (False, "cuda", True, False),
    ],
)
def test_auto_compiles_on_gpus_and_a_resumed_run_stays_as_it_was(
    wanted: Any, device: str, before: bool | None, expected: bool
) -> None:
    assert compiles(TrainConfig(compile=wanted), torch.device(device), before) is expected


def test_nothing_is_tried_on_a_cpu_or_for_another_backend() -> None:
    assert compiler_problem(torch.device("cpu"), "inductor") == ""
    assert compiler_problem(torch.device("cuda"), "aot_eager") == ""


@pytest.mark.slow
def test_a_run_says_after_its_first_step_what_was_compiled(tmp_path: Path) -> None:
    pictures = make_pictures(tmp_path / "pictures")
    cfg = run_config(pictures, train__compile=True, train__compile_backend="aot_eager", data__max_aspect=1)
    events = run_ranks(1, train, cfg, make_run(tmp_path, cfg, "compiled"))[0].events
    notes = [event for event in events if isinstance(event, StatusEvent) and event.message.startswith("compiled")]
    assert [note.step for note in notes] == [1]
    assert "graphs; the first step took" in notes[0].message
    assert [event.message for event in events if isinstance(event, WarningEvent) and "compile" in event.message] == []
