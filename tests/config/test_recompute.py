"""What `train.checkpointing` means for each block."""

from __future__ import annotations

import pytest

from trainer.config.recompute import checkpointing_of, mixture, modes_of


@pytest.mark.parametrize(
    ("value", "modes"),
    [
        ("none", "nnnnn"),
        ("selective", "sssss"),
        ("full", "fffff"),
        (1, "fffff"),
        (2, "fnfnf"),
        (9, "fnnnn"),
        ("selective 2", "ssnnn"),
        ("full 2, selective", "ffsss"),
        ("full 2, selective 1", "ffsnn"),
        ("full 2,none", "ffnnn"),
        ("selective 1, full", "sffff"),
        ("full 9, selective", "fffff"),
    ],
)
def test_every_value_gives_each_block_its_mode(value: str | int, modes: str) -> None:
    assert "".join(mode[0] for mode in modes_of(value, 5)) == modes


@pytest.mark.parametrize(
    "text",
    ["", "auto", "some", "full full", "full, selective", "full 0", "full 2, full 3", "full -1", "full 2;none", "2"],
)
def test_other_texts_are_no_mixtures(text: str) -> None:
    assert mixture(text) is None


def test_amounts_go_from_nothing_to_everything_one_block_at_a_time() -> None:
    found = [modes_of(checkpointing_of(amount, 3), 3) for amount in range(7)]
    order = ("none", "selective", "full")
    levels = [sum(map(order.index, modes)) for modes in found]
    assert levels == list(range(7))
