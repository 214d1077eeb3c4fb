"""Rows of the queue for the page: what each run trains, since when it waits, and what the next start waits for."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.config.load import load_config_text
from trainer.config.titles import method_title, model_title
from trainer.launcher.queue import Entry, Queue
from trainer.system.errors import InputError


def row(entry: Entry, state: str = "waiting") -> dict[str, Any]:
    """Return a run of the queue as the page shows it.

    Returns:
        Among others `key`, which stays with the run when it is moved, while its number does not; times are unix
        seconds.
    """
    model, method, problem = _described(entry.config, entry.name)
    return {
        "key": key(entry),
        "number": entry.number,
        "name": entry.name,
        "model": model,
        "method": method,
        "problem": problem,
        "gpus": list(entry.gpus),
        "state": state,
        "run": entry.run,
        "error": entry.error,
        "queued_at": entry.queued_at,
        "taken_at": entry.taken_at,
    }


def key(entry: Entry) -> str:
    """Return what stays the same when the order changes. Only equal runs that were queued at once share a key."""
    return hashlib.sha256(repr((entry.name, entry.config, entry.gpus, entry.queued_at)).encode()).hexdigest()[:16]


def find(queue: Queue, wanted: str) -> Entry:
    """Return the waiting run with this key. Raises InputError where it has been started or removed."""
    found = next((entry for entry in queue.waiting() if key(entry) == wanted), None)
    if found is None:
        raise InputError("This run does not wait any more: it was started, or removed in another window.")
    return found


def next_start(queue: Queue) -> str:
    """Return what the first waiting run waits for, as a sentence; "" where none waits."""
    waiting = queue.waiting()
    if not waiting:
        return ""
    if queue.settings.is_paused:
        return "Paused: no run is started until you resume the queue."
    if blockers := queue.blockers(waiting[0]):
        ended = "has ended" if len(blockers) == 1 else "have ended"
        return f"{waiting[0].name} starts when {' and '.join(entry.run for entry in blockers)} {ended}."
    return f"{waiting[0].name} starts within a few seconds."


@lru_cache(maxsize=256)
def _described(config: str, name: str) -> tuple[str, str, str]:
    """Return (model, method, problem) of a config in YAML, which takes milliseconds to parse."""
    try:
        parsed = load_config_text(config, (), Path(f"{name}.yaml")).config
    except InputError as error:
        return "", "", str(error)
    return model_title(parsed.model.path, parsed.model.family), method_title(parsed), ""
