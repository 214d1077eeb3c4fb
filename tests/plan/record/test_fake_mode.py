"""Operations on tensors without values: what is remembered of one is what torch finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainer.plan.record import fake_mode
from trainer.plan.record.fake_mode import FakeMode

ROOT = Path(__file__).parents[3]


class Forgetful(dict[Any, Any]):
    """Remembers nothing: each operation is run."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


def described(out: Any, inputs: tuple[Tensor, ...]) -> Any:
    """All that matters of an operation's result: shapes, and with which input it shares memory."""
    if not isinstance(out, Tensor):
        return [described(value, inputs) for value in out] if isinstance(out, (tuple, list)) else out
    same = [number for number, tensor in enumerate(inputs) if tensor is out]
    shared = [n for n, t in enumerate(inputs) if t.untyped_storage()._cdata == out.untyped_storage()._cdata]
    size = out.untyped_storage().nbytes()
    return tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.device, size, same, shared


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a product": lambda a, b: a @ b,
    "a sum in place": lambda a, b: a.add_(1),
    "a transposed view": lambda a, b: a.t(),
    "pieces": lambda a, b: a.split([2, 4]),
    "a list of tensors": lambda a, b: torch.cat([a, a], 1),
    "a norm with its statistics": lambda a, b: torch.native_layer_norm(a, [6], None, None, 1e-5),
    "one of two types": lambda a, b: (a.int() + 1, a.int() + 1.0, a.int() + True),
    "a copy of another type": lambda a, b: a.to(torch.bfloat16, copy=True),
    "a part of new memory": lambda a, b: torch.ops.aten.split_with_sizes_copy(a, [2, 4], 1),
    "numbers that are conjugated": lambda a, b: torch.view_as_complex(a.view(6, 3, 2)).conj() * 2,
    "another shape in place": lambda a, b: a.clone().resize_(2, 3),
    "other memory in place": lambda a, b: a.clone().set_(b),  # type: ignore[call-overload]
    "the gradient of a window": lambda a, b: torch.constant_pad_nd(a[1:3, ::2], (0, 1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_returns_the_same_when_it_is_remembered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []

    def results(times: int) -> list[Any]:
        found = []
        with FakeMode(lambda func, *_: watched.append(str(func))):
            for _ in range(times):
                inputs = torch.empty(6, 6), torch.empty(6, 6)
                watched.clear()
                found.append((described(OPERATIONS[name](*inputs), inputs), tuple(watched)))
        return found

    monkeypatch.setattr(fake_mode, "_KNOWN", Forgetful())
    [expected] = results(1)
    monkeypatch.setattr(fake_mode, "_KNOWN", {})
    assert results(3) == [expected] * 3


def test_tensors_with_values_and_other_devices_are_not_mistaken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_mode, "_KNOWN", {})
    with FakeMode(lambda *_: None):
        assert [torch.tensor(value).item() for value in (1, 2, 3)] == [1, 2, 3]
        assert (torch.ones(2) * torch.tensor(2.0)).dtype == torch.float32
        with unset_fake_temporarily():
            real = torch.arange(4)
        for _ in range(2):
            assert (torch.ones(4) * real).shape == (4,) and real.view(2, 2).untyped_storage().nbytes() == 32
            assert (torch.ones(4, dtype=torch.int64) + real[:1]).dtype == torch.int64
        weight = torch.ones(2, 2, requires_grad=True)
        (weight @ torch.ones(2, 2)).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None and weight.grad.shape == (2, 2)


@pytest.mark.slow
def test_a_trace_is_the_same_when_every_operation_is_run(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.plan.forgetful", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 12 and all(found.values()), found
