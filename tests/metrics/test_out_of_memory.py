"""What becomes of an error that says that memory ran out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.distributed.heartbeat import Heartbeat
from trainer.metrics.memory import MemoryReading
from trainer.metrics.out_of_memory import OomContext, OutOfMemoryError, explain_out_of_memory
from trainer.system.amounts import GIB


class Meter:
    """A rank that holds 6 of 24 GiB and has taken 10."""

    def read(self) -> MemoryReading:
        return MemoryReading(6 * GIB, 10 * GIB, 8 * GIB, 24 * GIB)


def explained(error: Exception, meter: object = None) -> str:
    """What an error in a step is turned into."""
    context = OomContext(nn.Linear(1, 1), (), False, Heartbeat())
    context.enter("forward")
    with pytest.raises(Exception) as raised:  # noqa: SIM117
        with explain_out_of_memory(context, meter or Meter()):  # type: ignore[arg-type]
            raise error
    assert isinstance(raised.value, OutOfMemoryError), raised.value
    return str(raised.value)


NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call failed.\nLast error:\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(f"{NCCL}Cuda failure 2 'out of memory'"), "Cuda failure 2 'out of memory'"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling\nmore"), "CUDA error: CUBLAS_STATUS"),
        (torch.OutOfMemoryError("Tried to take 2 GiB"), "Tried to take 2 GiB"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_it_is_known_by_any_line_and_the_line_is_quoted(error: Exception, said: str) -> None:
    message = explained(error)
    assert message.startswith("out of memory in forward: peak 8.00 of 24.00 GiB")
    assert f"({said}" in message


def test_memory_that_was_taken_in_pieces_too_small_is_told() -> None:
    assert "; 2.00 GiB more were taken, in pieces that did not fit (" in explained(MemoryError())

    class Full:
        def read(self) -> MemoryReading:
            return MemoryReading(22 * GIB, 23 * GIB, 23 * GIB, 24 * GIB)

    assert "pieces" not in explained(MemoryError(), Full())


def test_any_other_error_stays_as_it_is() -> None:
    with pytest.raises(AssertionError, match="shapes do not match"):
        explained(RuntimeError("shapes do not match"))
