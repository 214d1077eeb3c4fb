"""Which kernel computes attention: a CPU has one, so what is tried on GPUs is shown by what torch is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,
    current_flash_attention_impl,
    register_flash_attention_impl,
)

from trainer.parallel import attention
from trainer.parallel.attention import KERNELS, preferred

CPU = torch.device("cpu")


class Card:
    """A GPU, whose tensors are those of a CPU."""

    type = "cuda"


@contextmanager
def on_a_card() -> Iterator[None]:
    made = {name: getattr(torch, name) for name in ("empty", "ones")}

    def on_cpu(name: str) -> Any:
        return lambda *args, device=None, **kwargs: made[name](*args, **kwargs)

    with mock.patch.object(torch, "empty", on_cpu("empty")), mock.patch.object(torch, "ones", on_cpu("ones")):
        yield


def said(wanted: str, device: Any) -> tuple[list[str], list[str], list[SDPBackend]]:
    """(notes, warnings, the kernels that torch may use inside)."""
    notes: list[str] = []
    warnings: list[str] = []
    with on_a_card(), preferred(wanted, device, torch.float32, notes.append, warnings.append):
        inside = _cur_sdpa_kernel_backends()
    return notes, warnings, inside


@pytest.mark.parametrize("wanted", KERNELS)
def test_a_cpu_has_one_kernel(wanted: str) -> None:
    before = _cur_sdpa_kernel_backends()
    notes, warnings, inside = said(wanted, CPU)
    assert notes == []
    assert warnings == [f"train.attention: {wanted} is a kernel of GPUs; torch's own choice is used"]
    assert inside == before
    assert said("auto", CPU)[:2] == ([], [])


def test_the_kernel_that_torch_chooses_is_named() -> None:
    assert said("auto", Card())[:2] == (["attention is computed by torch's flash kernel"], [])


@pytest.mark.parametrize("wanted", ["cudnn", "efficient", "flash3"])
def test_a_kernel_that_does_not_run_is_named_with_its_reason(wanted: str) -> None:
    """On the CPU behind this card only flash and math run; the package of flash3 is not installed."""
    before = _cur_sdpa_kernel_backends()
    notes, warnings, inside = said(wanted, Card())
    assert notes == ["attention is computed by torch's flash kernel"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"train.attention: this GPU cannot use {wanted} (")
    assert warnings[0].endswith("); torch's own choice is used")
    assert inside == before


def test_a_kernel_that_runs_comes_first_and_others_stay_for_masks() -> None:
    before = _cur_sdpa_kernel_backends()
    notes, warnings, inside = said("flash", Card())
    assert (len(notes), warnings) == (1, [])
    assert notes[0].startswith("attention is computed by flash, ")
    assert set(inside) == {*KERNELS.values(), SDPBackend.MATH}
    assert _cur_sdpa_kernel_backends() == before


class Handle:
    """Of a package that torch was given."""

    def remove(self) -> None:
        pass


def test_flash3_that_is_installed_and_does_not_run_leaves_torch_s_own_choice() -> None:
    """As on an A100: the package can be imported, and its kernels are for Hopper."""
    register_flash_attention_impl("flash of tests", register_fn=Handle)
    warnings: list[str] = []
    refused = RuntimeError("FA3 requires compute capability 9.0")
    with (
        on_a_card(),
        mock.patch.object(attention, "_FLASH3", "flash of tests"),
        mock.patch.object(F, "scaled_dot_product_attention", side_effect=refused),
        preferred("flash3", Card(), torch.float32, lambda note: None, warnings.append),  # type: ignore[arg-type]
    ):
        assert current_flash_attention_impl() is None
    assert warnings == [
        f"train.attention: this GPU cannot use flash3 (RuntimeError: {refused}); torch's own choice is used"
    ]


def test_memory_that_runs_out_is_not_taken_for_a_missing_kernel() -> None:
    with (
        mock.patch.object(F, "scaled_dot_product_attention", side_effect=torch.OutOfMemoryError("CUDA out of memory")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        said("flash", Card())


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["auto", "flash", "efficient", "cudnn"])
def test_a_gpu_computes_with_the_kernel_that_is_wanted(wanted: str) -> None:
    device, notes, warnings = torch.device("cuda"), list[str](), list[str]()
    query = torch.randn(1, 2, 64, 128, device=device, dtype=torch.bfloat16)
    exact = F.scaled_dot_product_attention(query.cpu().double(), query.cpu().double(), query.cpu().double())
    with preferred(wanted, device, torch.bfloat16, notes.append, warnings.append):
        found = F.scaled_dot_product_attention(query, query, query)
    assert len(notes) == 1
    assert (found.cpu().double() - exact).abs().max() < 0.03
    assert attention.chosen(device, torch.bfloat16) in ("flash", "cuDNN", "memory-efficient")
