"""Dropout that follows the sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trainer.adapters.dropout import Rows, SampleDropout
from trainer.rng import derived_seed


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


def test_windows_of_a_sample_drop_together_what_they_drop_alone_and_each_something_else() -> None:
    dropout = SampleDropout(0.25, "layer")
    windows = torch.ones(6, 50, 40)
    dropout.set_samples(7, (4, 9))
    together = dropout(windows)
    for place, index in enumerate((4, 9)):
        dropout.set_samples(7, (index,))
        assert torch.equal(together[3 * place :][:3], dropout(windows[:3]))
    assert not torch.equal(together[0], together[1])
    assert torch.equal(together[:1], masks(dropout, (4,)))


def rows(*owners: int) -> Rows:
    return Rows.of(torch.tensor(owners), max(owners) + 1)


def test_rows_of_several_samples_in_any_order_drop_what_each_sample_drops_alone() -> None:
    dropout = SampleDropout(0.25, "layer")
    x = torch.ones(6, 40)
    dropout.set_samples(7, (4, 9), rows(1, 0, 1, 0, 0, 1))
    together = dropout(x)
    for index, of_sample in ((4, [1, 3, 4]), (9, [0, 2, 5])):
        dropout.set_samples(7, (index,), rows(0, 0, 0))
        assert torch.equal(together[of_sample], dropout(x[:3]))


def test_rows_one_sample_after_the_other_drop_what_items_drop() -> None:
    dropout = SampleDropout(0.25, "layer")
    items = masks(dropout, (4, 9))
    dropout.set_samples(7, (4, 9), rows(*[0] * 50, *[1] * 50))
    assert torch.equal(dropout(torch.ones(100, 40)), items.flatten(0, 1))
    assert torch.equal(dropout(torch.ones(2, 50, 40)), items)
    with pytest.raises(RuntimeError, match="layer: dropout of 99 rows, but the samples have 100"):
        dropout(torch.ones(99, 40))


def test_tokens_first_with_items_behind_drop_what_items_first_drop() -> None:
    dropout = SampleDropout(0.25, "layer")
    items = masks(dropout, (4, 9))
    dropout.set_samples(7, (4, 9), Rows.of(torch.arange(2).expand(50, 2), 2))
    assert torch.equal(dropout(torch.ones(50, 2, 40)), items.transpose(0, 1))
    with pytest.raises(RuntimeError, match="layer: dropout of 98 rows, but the samples have 100"):
        dropout(torch.ones(49, 2, 40))


def test_compiled_dropout_is_one_graph_for_all_seeds() -> None:
    dropout = SampleDropout(0.25, "layer")
    compiled = torch.compile(dropout, backend="eager", fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for indices in ((4, 9), (5, 11), (6, 7)):
        dropout.set_samples(7, indices)
        x = torch.ones(2, 3, 4, requires_grad=True)
        found = compiled(x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        dropout.set_samples(7, indices)
        assert torch.equal(found, dropout(x)) and torch.equal(gradient, found)
    assert counters["stats"]["unique_graphs"] - before == 1


def test_a_mask_comes_from_a_generator_that_is_seeded_by_its_sample() -> None:
    dropout = SampleDropout(0.25, "layer")
    found = masks(dropout, (4,))[0]
    source = torch.Generator().manual_seed(derived_seed(7, 4, "dropout", "layer"))
    assert torch.equal(found != 0, torch.rand(50, 40, generator=source) >= 0.25)
