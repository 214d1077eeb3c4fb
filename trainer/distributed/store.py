"""Values that ranks leave for each other outside their collectives: they can be read while those hang."""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=5)


class KeyValueStore:
    """Keys and values that every rank of an attempt reads and writes, kept by the store of the rendezvous.

    Values are JSON. A call blocks while the machine with the store cannot be reached: never make one on a thread that
    must not wait.
    """

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: the other one is taken while a rank waits for the others in it.
        own = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(PATIENCE)
        self._store = dist.PrefixStore("board", own)

    def set(self, key: str, value: Any) -> None:
        """Write a value, or replace it."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value, None while there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
