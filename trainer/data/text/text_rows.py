"""Counts the rows of an epoch of text, which are known only once all of it was tokenized."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.data.encode import StopRequested
from trainer.distributed.context import RankContext
from trainer.models.base import TextFamily
from trainer.models.parts.chat.chat_template import read_template
from trainer.run.events import StatusEvent
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.index import Index

FORMAT = 1
"""Version of the number: raise it when equal files and settings make other rows."""
KIND = f"rows {FORMAT}"
"""Of the records in the index."""
ROUND = 512
"""Rows after which the ranks agree whether to stop."""
SAID_EVERY_S = 5.0


def num_rows(rows: Iterable[object], key: str, context: RankContext) -> int:
    """Count the rows of one epoch, or take their number from the cache of runs if any rank finds it there. Collective.

    Every rank counts, as every rank reads the whole stream in training: they stay together, and none waits long.

    Args:
        rows: The rows of one epoch.
        key: The result of `key_of`.
        context: This rank's part of the run.

    Raises:
        StopRequested: A stop was requested; raised on every rank.
        InputError: As iterating over `rows`.
    """
    index = Index(context.cache)
    found: list[int | None] = context.world.gather(_number(index.get(KIND, key)))
    known = next((number for number in found if number is not None), None)
    if known is not None:
        return known
    context.world.heartbeat.enter("counting rows", moves=False)
    number = _counted(rows, context)
    # Ranks that end their epochs at different steps would hang in the last one.
    if len(set(context.world.gather(number))) > 1:
        raise InputError("data.path: the ranks count different numbers of rows; give every machine the same files")
    if context.world.local_rank == 0:
        index.put(KIND, {key: b"%d" % number})
    return number


def key_of(cfg: RunConfig, family: TextFamily, data: str) -> str:
    """Return the key of everything that the number of rows depends on.

    Args:
        cfg: The config.
        family: Its family.
        data: Digest of the files.
    """
    names = sorted(name for name in family.tokenizer_files if (family.folder / name).is_file())
    tokenizer = [(name, _digest(family.folder / name)) for name in names]
    template = read_template(cfg.data.chat_template) if cfg.data.chat_template else ""
    sections = {
        "data": cfg.data.model_dump(mode="json", exclude={"cache", "validation", "validation_every"}),
        "model": cfg.model.model_dump(mode="json", exclude={"path", "base"}),
        "adapter": cfg.adapter.model_dump(mode="json", exclude={"start"}),
        "objective": cfg.objective.model_dump(mode="json"),
    }
    parts = [FORMAT, cfg.train.seed, data, tokenizer, template, family.packs_documents, sections]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _counted(rows: Iterable[object], context: RankContext) -> int:
    context.emit(StatusEvent(state="encoding", message="counting the rows of an epoch"))
    number, said_at = 0, time.monotonic()
    for number, _ in enumerate(rows, 1):
        if number % ROUND:
            continue
        context.world.heartbeat.beat()
        if time.monotonic() - said_at > SAID_EVERY_S:
            said_at = time.monotonic()
            context.emit(StatusEvent(state="encoding", message=f"counting the rows of an epoch: {number:,}"))
        if any(context.world.gather(context.is_stopping())):
            raise StopRequested
    return number


def _number(record: bytes | None) -> int | None:
    """A number of the index; None where there is none, or what a stranger wrote."""
    return int(record) if record and record.isdigit() and len(record) < 19 else None


def _digest(file: Path) -> str:
    with files.opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
