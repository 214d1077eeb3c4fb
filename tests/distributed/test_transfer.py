"""Files that one rank sends and another writes."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import run_ranks
from trainer.distributed import transfer
from trainer.distributed.world import World

SIZES = {"nothing": 0, "one": 1, "one_message": 1000, "several": 2500}


def carry(world: World, folder: Path) -> list[str]:
    """Rank 0 sends each file, one that is not there, and one to a place that is not there. Returns what failed."""
    transfer.CHUNK = 1000
    failures = []
    for name, target in [*((name, name) for name in SIZES), ("missing", "missing"), ("several", "no/folder")]:
        try:
            if world.rank == 0:
                transfer.send(folder / "there" / name, 1, world.background)
            else:
                transfer.receive(folder / "here" / target, 0, world.background)
        except OSError as error:
            failures.append(str(error))
    return failures


def test_files_of_any_size_arrive_and_what_fails_on_one_side_does_not_hang_the_other(tmp_path: Path) -> None:
    for side in ("there", "here"):
        (tmp_path / side).mkdir()
    for name, size in SIZES.items():
        (tmp_path / "there" / name).write_bytes(bytes(number % 251 for number in range(size)))
    sender, receiver = run_ranks(2, carry, tmp_path)
    for name in SIZES:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    assert len(sender) == 1
    assert "missing" in sender[0]
    assert receiver[0] == "missing could not be read by rank 0"
    assert receiver[1].startswith("[Errno 2] No such file or directory")
