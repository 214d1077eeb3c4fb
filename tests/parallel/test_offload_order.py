"""Which blocks are offloaded, and which of them are on the device."""

from __future__ import annotations

import itertools

import pytest

from trainer.parallel.offload_order import BlockResidency, Direction, Moves, offloaded_blocks


@pytest.mark.parametrize(
    ("wanted", "blocks", "expected"),
    [
        (0, 6, ()),
        ("auto", 6, ()),
        (1, 6, (3,)),
        (2, 6, (1, 4)),
        (3, 6, (1, 3, 5)),
        (0.5, 6, (1, 3, 5)),
        (0.5, 5, (0, 2, 4)),
        (6, 6, (0, 1, 2, 3, 4, 5)),
        (1.0, 6, (0, 1, 2, 3, 4, 5)),
        (99, 6, (0, 1, 2, 3, 4, 5)),
        (4, 0, ()),
    ],
)
def test_the_offloaded_blocks_lie_evenly_among_the_others(
    wanted: int | float | str, blocks: int, expected: tuple[int, ...]
) -> None:
    assert offloaded_blocks(wanted, blocks) == expected


def test_between_two_offloaded_blocks_are_as_many_others_as_anywhere_or_one_more() -> None:
    for blocks in range(1, 60):
        for count in range(1, blocks + 1):
            chosen = offloaded_blocks(count, blocks)
            gaps = [later - earlier for earlier, later in itertools.pairwise(chosen)]
            assert len(chosen) == count
            assert max(gaps, default=1) - min(gaps, default=1) <= 1
            # As far from the first block as from the one after the last.
            assert abs(chosen[0] - (blocks - 1 - chosen[-1])) <= 1


def test_a_share_is_rounded_up_to_whole_blocks() -> None:
    for blocks in range(1, 101):
        for percent in range(1, 101):
            assert len(offloaded_blocks(percent / 100, blocks)) == -(-percent * blocks // 100)


def moves(residency: BlockResidency, *uses: tuple[int, Direction], trains: bool = True) -> list[tuple[Moves, bool]]:
    """What each use of a block moves, and whether the block is freed at its end."""
    return [(residency.begin(block, direction, trains), residency.end(block)) for block, direction in uses]


def test_a_step_copies_each_block_once_in_each_direction_but_the_one_that_it_turns_at() -> None:
    residency = BlockResidency(3, is_needed_again=True)
    step: list[tuple[int, Direction]] = [(0, "forward"), (1, "forward"), (2, "forward")]
    step += [(2, "backward"), (1, "backward"), (0, "backward")]
    moves(residency, *step)
    assert moves(residency, *step) == [
        (Moves(copies=(1,)), True),
        (Moves(copies=(2,)), True),
        (Moves(), False),
        (Moves(copies=(1,)), True),
        (Moves(copies=(0,)), True),
        (Moves(), False),
    ]
    assert residency.present == {0}


def test_passes_without_backward_begin_again_with_the_first_block() -> None:
    residency = BlockResidency(3, is_needed_again=True)
    step: list[tuple[int, Direction]] = [(0, "forward"), (1, "forward"), (2, "forward")]
    moves(residency, *step, trains=False)
    found = moves(residency, *step, trains=False)
    assert [copied.copies for copied, _ in found] == [(1,), (2,), (0,)]
    assert all(freed for _, freed in found)


def test_a_block_that_a_pass_skips_is_freed_for_the_next_one() -> None:
    residency = BlockResidency(4, is_needed_again=True)
    found = moves(residency, (0, "forward"), (2, "forward"), (3, "forward"))
    assert found[1] == (Moves(frees=(1,), copies=(2, 3)), True)
    assert found[2] == (Moves(), False)


def test_a_block_that_is_in_use_is_not_freed_for_another() -> None:
    residency = BlockResidency(5, is_needed_again=True)
    residency.begin(0, "forward")
    assert residency.begin(3, "forward", busy=(0,)) == Moves(frees=(1,), copies=(3, 4))
    assert residency.present == {0, 3, 4}


def test_an_only_offloaded_block_does_not_stay() -> None:
    residency = BlockResidency(1, is_needed_again=True)
    assert moves(residency, (0, "forward"), (0, "backward")) == [(Moves(copies=(0,)), True)] * 2
