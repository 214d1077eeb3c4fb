"""A debug log per rank, for finding out what went wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from trainer.config.sections import TrackersConfig
from trainer.run.folder import RunDir

LEVELS = {"trainer": logging.DEBUG, "torch.distributed": logging.INFO}


@contextmanager
def debug_log(cfg: TrackersConfig, run: RunDir, rank: int) -> Iterator[None]:
    """Inside, with `trackers.debug`, our loggers and torch.distributed's also write to `logs/debug-rank<k>.log`.

    Their other outputs, such as stderr, do not change. A resumed run appends.
    """
    if not cfg.debug:
        yield
        return
    file = _LossyFile(run.logs / f"debug-rank{rank}.log", rank)
    with ExitStack() as undo:
        undo.callback(file.close)
        for name, level in LEVELS.items():
            _add(file, name, level, undo)
        yield


class _LossyFile(logging.Handler):
    """Appends each line by one write. A full disk loses lines: logging's own file handler would raise on close."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        line = f"%(asctime)s.%(msecs)03d rank {rank} %(threadName)s %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            os.write(self._file, f"{self.format(record)}\n".encode(errors="replace"))

    def close(self) -> None:
        os.close(self._file)
        super().close()


def _add(file: logging.Handler, name: str, level: int, undo: ExitStack) -> None:
    """Have a logger and its descendants write to the file from `level` on, until `undo`."""
    logger = logging.getLogger(name)
    before = logger.getEffectiveLevel()
    # The logger, and its descendants that do not propagate, as several of torch's.
    known = (logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(f"{logger.name}."))
    for each in [logger, *(each for each in known if not each.propagate)]:
        # Other handlers still do not get what was below their level before.
        for handler in _handlers(each):
            keep = _Keep(name, before)
            handler.addFilter(keep)
            undo.callback(handler.removeFilter, keep)
        each.addHandler(file)
        undo.callback(each.removeHandler, file)
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(min(level, before))


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """All handlers that a record of this logger reaches."""
    handlers = list(logger.handlers)
    while logger.propagate and logger.parent:
        logger = logger.parent
        handlers += logger.handlers
    return handlers


class _Keep(logging.Filter):
    """Passes records of other loggers than the named one, and those of at least this level."""

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name)
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self._level or not super().filter(record)
