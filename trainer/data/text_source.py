"""Data of a run that trains on text: rows of tokens from files, and texts that the model continues as samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes
from trainer.data.source import DataSource, Draw, SampleDrawer
from trainer.data.text_files import digest, of_config, sizes
from trainer.data.text_stream import START, PackedRow, StreamPosition, TextStream
from trainer.distributed.world import World
from trainer.models.base import TextFamily
from trainer.models.objectives import Example
from trainer.rng import SampleRng
from trainer.run.manifest import RECIPE, Progress

POSITIONS_KEPT = 4
"""Number of last steps whose positions are kept: batches are read ahead, and a run may be saved before or after the
next one is read."""


class TextSource(DataSource):
    """The text files of the section `data`. Rows are read as they are needed; those held out are kept in memory.

    Raises:
        InputError: Files that cannot be used; on every rank if ranks find different files.
    """

    unit = "tokens"
    changed_message = "the text files have changed since the checkpoint: training continues with their next epoch"

    def __init__(self, cfg: RunConfig, family: TextFamily, world: World) -> None:
        check_length(cfg, family)
        self._cfg, self._family = cfg, family
        self._files, held_out = of_config(cfg.data)
        self.digest = world.gather(digest(self._files))[0]
        _check_same(self._files, world)
        self._held_out_files = held_out
        self._batch_sampler: TextBatchSampler | None = None
        self.follow_recipe(RECIPE)

    def follow_recipe(self, recipe: int) -> None:
        self._family.follow_recipe(recipe)
        self._is_packed = recipe < 3 or self._family.packs_documents
        rows = self._stream(self._held_out_files, 1).rows() if self._held_out_files else ()
        self._held_out = tuple(row for row, _ in rows)
        self.num_held_out = len(self._held_out)

    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> TextBatchSampler:
        step, position = (saved.step, self._position_in(saved)) if saved else (0, START)
        self._batch_sampler = TextBatchSampler(self._stream(self._files, None), sizes, step, position)
        return self._batch_sampler

    def example(self, item: PackedRow) -> Example:
        return example_of(item)

    def position(self, step: int) -> Mapping[str, int]:
        return {} if self._batch_sampler is None else asdict(self._batch_sampler.position(step))

    def held_out(self, index: int) -> Example:
        return example_of(self._held_out[index])

    def _position_in(self, saved: Progress) -> StreamPosition:
        position = StreamPosition(**saved.place) if saved.place else START
        # A position in other files has no meaning.
        return position if saved.data == self.digest else replace(START, epoch=position.epoch + 1)

    def _stream(self, files: tuple[Path, ...], epochs: int | None) -> TextStream:
        family, cfg = self._family, self._cfg
        return TextStream(
            files,
            tokenize=family.tokenize,
            end_of_text=family.end_of_text,
            vocabulary=family.vocabulary,
            seed=cfg.train.seed,
            length=cfg.data.length,
            shuffle_window=cfg.data.shuffle_window,
            epochs=epochs,
            begin=family.begin_of_text,
            is_packed=self._is_packed,
        )


class TextDrawer(SampleDrawer):
    """Draws texts: each prompt with its continuation by the model."""

    def __init__(self, cfg: RunConfig, family: TextFamily) -> None:
        self.prompts = cfg.sample.prompts
        self._cfg, self._family = cfg, family

    def change_prompts(self, prompts: Sequence[str]) -> None:
        self.prompts = tuple(prompts)

    def suffix(self, index: int) -> str:
        return ".txt"

    def prepare(self) -> Draw:
        def draw(model: nn.ModuleDict, index: int, rng: SampleRng) -> bytes:
            prompt = self.prompts[index]
            return (prompt + self._family.generate(model, prompt, self._cfg.sample, rng)).encode()

        return draw


class TextBatchSampler:
    """Rows of a stream in batches, from a position on. step: optimizer steps before that position."""

    def __init__(self, stream: TextStream, sizes: BatchSizes, step: int, position: StreamPosition) -> None:
        self.sizes = sizes
        self._stream = stream
        self._begin = step, position
        self._rows: Iterator[tuple[PackedRow, StreamPosition]] = iter(())
        self._batch: tuple[PackedRow, ...] = ()
        self._next = 0
        self._positions: dict[int, StreamPosition] = {}
        self._start(step, position)

    def batch(self, step: int) -> tuple[PackedRow, ...]:
        """The rows of an optimizer step. Fast for the same and the next step, else it counts up."""
        if step < self._next - 1:
            self._start(*(self._begin if step >= self._begin[0] else (0, START)))
        while self._next <= step:
            rows = [next(self._rows) for _ in range(self.sizes.of(self._next))]
            self._batch = tuple(row for row, _ in rows)
            self._next += 1
            self._positions[self._next] = rows[-1][1]
            for old in sorted(self._positions)[:-POSITIONS_KEPT]:
                del self._positions[old]
        return self._batch

    def position(self, step: int) -> StreamPosition:
        """Where the rows of an optimizer step begin: one of the last steps whose batch was read, or the next one."""
        return self._positions[step]

    def _start(self, step: int, position: StreamPosition) -> None:
        self._rows, self._batch, self._next = self._stream.rows(position), (), step
        self._positions = {step: position}


def example_of(row: PackedRow) -> Example:
    """Convert a row to tensors (length,): "tokens" and "documents" int64, "learned" bool."""
    return {
        "tokens": torch.from_numpy(row.tokens),
        "learned": torch.from_numpy(row.learned),
        "documents": torch.from_numpy(row.documents),
    }


def check_length(cfg: RunConfig, family: TextFamily) -> None:
    """Raise InputError for rows that are longer than the model's positions."""
    if family.longest is not None and cfg.data.length > family.longest:
        raise InputError(
            f"data.length: {cfg.data.length} tokens, but the model was made for {family.longest} at most; lower it"
        )


def _check_same(files: tuple[Path, ...], world: World) -> None:
    own = [(file.name, size) for file, size in sizes(files).items()]
    for rank, others in enumerate(world.gather(own)):
        if others != own:
            name = min({*others} ^ {*own} or own)[0]
            raise InputError(
                f"data.path: {name} differs between rank {rank} and rank {world.rank}; "
                "give every machine the same files"
            )
