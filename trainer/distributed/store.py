"""A key-value store for messages between ranks outside their collectives: it works while those hang.

See DECISIONS 98.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=5)


class KeyValueStore:
    """Keys and values that every rank of an attempt reads and writes, kept in the rendezvous store.

    Values are JSON. A call blocks while the machine with the store cannot be reached: never call it on a thread that
    must not wait.
    """

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: the other one is busy while a rank waits in it for the others.
        own = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(TIMEOUT)
        self._store = dist.PrefixStore("messages", own)

    def set(self, key: str, value: Any) -> None:
        """Write or replace a value."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value, or None while there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return the sum. `get` does not read counters."""
        return int(self._store.add(key, amount))
