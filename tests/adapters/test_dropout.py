"""Dropout that follows the sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.adapters.dropout import SampleDropout


def masks(dropout: SampleDropout, indices: tuple[int, ...]) -> Tensor:
    dropout.set_samples(7, indices)
    return dropout(torch.ones(len(indices), 50, 40))


def test_dropout_gives_a_sample_the_same_mask_in_any_batch() -> None:
    dropout = SampleDropout(0.25, "layer")
    together = masks(dropout, (4, 9, 11))
    assert torch.equal(together[1:2], masks(dropout, (9,)))
    assert not torch.equal(together[0], together[1])


def test_dropout_drops_its_share_keeps_the_mean_and_does_nothing_in_eval_mode() -> None:
    dropout = SampleDropout(0.25, "layer")
    kept = masks(dropout, (1, 2, 3))
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    dropout.eval()
    assert torch.equal(dropout(kept), kept)


def test_dropout_refuses_a_batch_it_was_not_told_of() -> None:
    dropout = SampleDropout(0.5, "block.to_q")
    dropout.set_samples(0, (1, 2))
    with pytest.raises(RuntimeError, match=r"block\.to_q: dropout of 3 items, but 2 samples are set"):
        dropout(torch.ones(3, 4))
