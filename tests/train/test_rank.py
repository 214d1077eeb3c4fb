"""What a rank does around its training."""

from __future__ import annotations

import gc

from trainer.system.imports import quick_imports


def test_imports_are_searched_for_garbage_neither_while_they_go_on_nor_later() -> None:
    searches: list[dict[str, int]] = []

    def count(phase: str, info: dict[str, int]) -> None:
        searches.append(info)

    gc.callbacks.append(count)
    try:
        before = gc.get_freeze_count()
        with quick_imports():
            kept = [[index] for index in range(100_000)]
        assert searches == []
        assert gc.get_freeze_count() - before >= len(kept)
    finally:
        gc.callbacks.remove(count)
    assert gc.isenabled()
