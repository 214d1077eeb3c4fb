"""Attention within documents: what it computes, against attention with a mask of all pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from tests.distributed import run_ranks
from tests.runs import Outcome, difference, make_run, make_text, text_config, train
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.models.families import causal_lm
from trainer.models.parts.language import document_attention
from trainer.models.parts.language.attention_probe import computes_within
from trainer.models.parts.language.document_attention import begins_mask, can_attend, document_begins, within_documents
from trainer.run.folder import RunDir

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, -1], [3, 3, 3, 3, 3, 3, 3, 3, 3, 3]])
"""Three documents and padding; one document, which begins a row."""


def test_documents_begin_where_their_number_changes_and_with_each_row() -> None:
    assert document_begins(DOCUMENTS).tolist() == [0, 3, 8, 9, 10, 20]
    assert document_begins(torch.tensor([[0, 0], [0, 0]])).tolist() == [0, 2, 4]


def by_mask(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
    """The same from its definition: a token sees those of its document before it, of the last `window` if given."""
    length = query.shape[2]
    place = torch.arange(length)
    seen = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_within_documents_is_that_of_a_mask(heads: int, window: int | None, scale: float | None) -> None:
    numbers = torch.Generator().manual_seed(0)
    shapes = [(2, count, 10, 8) for count in (4, heads, heads)]
    inputs = [torch.randn(shape, generator=numbers, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected = by_mask(inputs[0], inputs[1], inputs[2], window, scale)
    mask = begins_mask(document_begins(DOCUMENTS))
    found, _ = within_documents(nn.Module(), *inputs, mask, scaling=scale, sliding_window=window, position_ids=None)
    assert found.shape == expected.shape == (2, 10, 4, 8)
    assert torch.allclose(found, expected, atol=1e-12)
    weight = torch.randn(found.shape, generator=numbers, dtype=torch.float64)
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(ours, theirs, strict=True))


class Called(TorchDispatchMode):
    """Notes which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("width", "of_value", "by_kernel"),
    [(64, 64, True), (256, 256, True), (192, 128, False), (512, 512, False), (20, 20, False)],
)
def test_cuda_s_kernel_gets_only_heads_that_it_takes(width: int, of_value: int, by_kernel: bool) -> None:
    """DeepSeek-V3 has 192 and 128 numbers, and Gemma 4 heads of 512. The kernel takes up to 256, equally many."""
    shapes = (4, width), (2, width), (2, of_value)
    inputs = [torch.empty(2, heads, 10, size, device="meta", dtype=torch.bfloat16) for heads, size in shapes]
    with Called() as called:
        found, _ = within_documents(nn.Module(), *inputs, begins_mask(document_begins(DOCUMENTS)).to("meta"))
    assert found.shape == (2, 10, 4, of_value)
    assert any("varlen" in name for name in called.names) is by_kernel


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_that_no_kernel_takes_are_attended_to_with_a_mask(window: int | None, scale: float | None) -> None:
    numbers = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 10, size, generator=numbers, dtype=torch.float64) for size in (8, 8, 6))
    found = document_attention.by_mask(query, key, value, document_begins(DOCUMENTS), scale, window)
    assert torch.allclose(found.transpose(1, 2), by_mask(query, key, value, window, scale), atol=1e-12)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "qwen2_moe", "phi3", "gemma3_text", "deepseek_v3"])
def test_common_classes_attend_by_documents(kind: str) -> None:
    assert computes_within(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", ["gpt_oss", "mamba", "bloom"])
def test_classes_that_compute_otherwise_keep_their_own_attention(kind: str) -> None:
    """gpt-oss has no sdpa attention, mamba none at all, and bloom adds positions to a mask of its own."""
    assert not computes_within(AutoConfig.for_model(kind))


def ignores_windows(module: nn.Module, *args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    return within_documents(module, *args, **kwargs)


def test_a_window_that_is_ignored_is_seen() -> None:
    with mock.patch.object(document_attention, "within_documents", ignores_windows):
        assert not computes_within(AutoConfig.for_model("gemma3_text"))
        assert computes_within(AutoConfig.for_model("llama"))


@pytest.mark.parametrize(
    ("device", "dtype", "is_compiled", "expected"),
    [
        ("cpu", torch.float32, False, True),
        ("cpu", torch.bfloat16, True, False),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float32, False, False),
    ],
)
def test_where_rows_are_attended_to_by_documents(
    device: str, dtype: torch.dtype, is_compiled: bool, expected: bool
) -> None:
    assert can_attend(torch.device(device), dtype, is_compiled) is expected


ROW = 48


class Counted:
    """Counts calls of attention, and those with a mask for whole rows of the run; tiny copies have shorter ones."""

    def __init__(self) -> None:
        self.masked = self.all = 0
        self._attention = F.scaled_dot_product_attention

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        self.all += 1
        self.masked += attn_mask is not None and query.shape[2] == ROW
        return self._attention(query, key, value, attn_mask, **kwargs)


def trained(world: World, cfg: RunConfig, run: RunDir, is_masked: bool) -> tuple[Outcome, int, int]:
    counted = Counted()
    with mock.patch.object(F, "scaled_dot_product_attention", counted):
        if is_masked:
            with mock.patch.object(causal_lm, "can_attend", return_value=False):
                return train(world, cfg, run), counted.masked, counted.all
        return train(world, cfg, run), counted.masked, counted.all


@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_learns_what_it_learns_with_masks(tmp_path: Path, checkpointing: str, precision: str) -> None:
    text = make_text(tmp_path / "text")
    found = []
    for is_masked in (True, False):
        cfg = text_config(text, data__length=ROW, train__checkpointing=checkpointing, train__precision=precision)
        run = make_run(tmp_path, cfg, f"masked-{is_masked}")
        outcome, masked, calls = run_ranks(1, trained, cfg, run, is_masked)[0]
        assert calls > 0
        assert (masked > 0) is is_masked
        found.append(outcome)
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    assert found[0].losses == pytest.approx(found[1].losses, rel=tolerance)
    assert difference(found[0].weights, found[1].weights) <= (1e-5 if precision == "fp32" else 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_cuda_attends_within_documents(heads: int, window: int | None) -> None:
    numbers = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, count, 10, 64, generator=numbers).cuda().bfloat16() for count in (4, heads, heads)]
    mask = begins_mask(document_begins(DOCUMENTS)).cuda()
    found, _ = within_documents(nn.Module(), *inputs, mask, sliding_window=window)
    exact = by_mask(*(tensor.cpu().double() for tensor in inputs), window, None)
    assert (found.cpu().double() - exact).abs().max() < 0.03
