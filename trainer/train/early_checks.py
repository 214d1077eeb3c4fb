"""Mistakes that a stage would end with later, looked for before the first one trains.

The models are built without weights, and the rows of small text files are read, in one process before a rank starts
(`launcher.preflight`): `python -m trainer.train.early_checks CACHE` reads the configs of the stages from stdin. Rank 0
reads the rows of larger files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.data.encode import StopRequested
from trainer.data.row_files import has_rows
from trainer.data.text.text_documents import read_documents
from trainer.data.text.text_files import TextFolder, check_preferences, digest, folders_of, has_plain_text, of_config
from trainer.data.text.text_rows import key_of
from trainer.data.text.text_source import check_length, encoder_of, stream_of
from trainer.distributed.context import RankContext
from trainer.export.check import check_export
from trainer.models import families
from trainer.models.base import ModelFamily, TextFamily
from trainer.models.build import build_model
from trainer.models.objectives import kinds as objectives
from trainer.models.start import check_start
from trainer.run.events import StatusEvent
from trainer.system.errors import InputError
from trainer.system.index import Index
from trainer.system.terminal import say

MOST_CHECKED = 64 * 2**20
"""Bytes of a file whose rows are read before the first stage. The rest is read when it is trained."""
TURN_S = 2.0
"""Seconds for the rows of a stage before a rank starts, and after which rank 0 tells the others that it still reads."""
CHECKED = "checked"
"""Kind of records in the index: of rows that were read."""
_CONFIGS = TypeAdapter(tuple[RunConfig, ...])


def main() -> int:
    """Print the number of the first stage that is refused, and why; then the exit code is 2."""
    for number, cfg in enumerate(_CONFIGS.validate_json(sys.stdin.buffer.read())):
        try:
            family = check_model(cfg, Path(sys.argv[1]))
            next(_read(cfg, Path(sys.argv[1])), None)
            if isinstance(family, TextFamily):
                check_fitting(cfg, family)
        except InputError as error:
            say(f"{number} {error}")
            return 2
    return 0


def check_model(cfg: RunConfig, cache: Path) -> ModelFamily:
    """Build a model without weights, with its adapter, as a rank would before it reads data.

    Args:
        cfg: The config of a run without stages, or of a stage.
        cache: Folder shared by runs.

    Returns:
        The model's family.

    Raises:
        InputError: A rank would refuse it.
    """
    family = families.make(cfg, cache)
    objective = objectives.make(cfg, family)
    built = build_model(cfg, family)
    objective.check(built)
    check_export(cfg, family, built.trainables)
    check_start(built, cfg, family)
    if isinstance(family, TextFamily):
        check_length(cfg, family)
    return family


def check_fitting(cfg: RunConfig, family: TextFamily) -> None:
    """Raise InputError if every document of the text, or of what is held out, is left out. Tries for `TURN_S`."""
    until = time.monotonic() + TURN_S
    one_by_one = cfg.model_copy(update={"data": cfg.data.model_copy(update={"shuffle_window": 1})})

    def left_out(epoch: int, first: str, why: str) -> None:
        if time.monotonic() > until:
            raise TimeoutError

    def noted(epoch: int, first: str, why: str) -> None:
        """Rank 0 says it."""

    _, held_out = of_config(cfg.data)
    for folders, epochs in ((folders_of(cfg.data), None), ((TextFolder(held_out),), 1)):
        files = [file for folder in folders for file in folder.files]
        if files and not has_plain_text(files):
            with suppress(TimeoutError):
                next(stream_of(one_by_one, family, folders, epochs, left_out, noted).rows(), None)


@dataclass(frozen=True)
class _Turn:
    """State of rank 0. message: what it reads; problem: what is wrong; "" for nothing."""

    message: str = ""
    problem: str = ""
    is_last: bool = False


def check_rows(stages: Sequence[tuple[str, RunConfig]], context: RankContext) -> None:
    """Read the rows of all text files of the stages, on rank 0. Collective.

    Rows that were read before, with the same tokenizer and options, are not read again.

    Args:
        stages: (name, config) of the stages that are still to be trained, on rank 0.
        context: This rank's part of the run.

    Raises:
        StopRequested: A stop was requested; raised on every rank.
        InputError: A row cannot be trained on; raised on every rank.
    """
    world = context.world
    world.heartbeat.enter("reading rows", moves=False)
    turns = _turns(stages, context.cache) if world.rank == 0 else iter(())
    while True:
        # Rank 0 reads while the others wait here, one turn at a time: all of them stop or fail at the same one.
        turn = world.gather(next(turns, _Turn()))[0]
        if turn.problem:
            raise InputError(turn.problem)
        if turn.is_last:
            return
        if world.rank == 0:
            context.emit(StatusEvent(state="encoding", message=turn.message))
        world.heartbeat.beat()
        if any(world.gather(context.is_stopping())):
            raise StopRequested


def _turns(stages: Sequence[tuple[str, RunConfig]], cache: Path) -> Iterator[_Turn]:
    try:
        for name, cfg in stages:
            of_stage = f"stage {name}: " if name else ""
            for message in _read(cfg, cache):
                yield _Turn(f"{of_stage}{message}")
    except InputError as error:
        yield _Turn(problem=f"{of_stage}{error}")
    yield _Turn(is_last=True)


def _read(cfg: RunConfig, cache: Path) -> Iterator[str]:
    """Read the rows of a stage, and yield what was read now and then."""
    if trains_on(cfg) != "text":  # all that is wrong with images was said before a rank started
        return
    trained, held_out = of_config(cfg.data)
    paths = [file for file in (*trained, *held_out) if has_rows(file)]
    compares = cfg.objective.compares_pairs
    check_preferences((*trained, *held_out), compares)
    if not paths:
        return
    family = families.make(cfg, cache)
    assert isinstance(family, TextFamily)
    index, key = Index(cache), key_of(cfg, family, digest(paths))
    if index.get(CHECKED, key) is not None:
        return
    encoder, began, count = encoder_of(family, compares), time.monotonic(), 0
    for path in paths:
        size = path.stat().st_size
        for document, _, share in read_documents(path, 0, encoder):
            document()
            count += 1
            if time.monotonic() - began > TURN_S:
                began = time.monotonic()
                yield f"reading rows: {count:,}"
            if share * size > MOST_CHECKED:
                break
    index.put(CHECKED, {key: b""})


if __name__ == "__main__":
    sys.exit(main())
