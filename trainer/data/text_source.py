"""Text as a run is trained on it: rows of tokens from files, and what a language model writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes
from trainer.data.source import Draw, Source
from trainer.data.text_files import digest, of_config, sizes
from trainer.data.text_stream import START, Place, Row, TextStream
from trainer.distributed.world import World
from trainer.models.base import TextFamily
from trainer.models.objectives import Example
from trainer.rng import SampleRng
from trainer.run.manifest import Progress

PLACES_KEPT = 4
"""Of the last steps: batches are read ahead, and a run may be saved before or after the next one is."""


class TextSource(Source):
    """The text files of the section `data`. Rows are read as they are needed; those held out are kept in memory.

    Raises InputError for files that cannot be used, and on every rank where ranks find different ones.
    """

    unit = "tokens"
    is_changed = "the text files are not as before: training goes on with their next epoch"

    def __init__(self, cfg: RunConfig, family: TextFamily, world: World) -> None:
        check_length(cfg, family)
        self._cfg, self._family = cfg, family
        self._files, held_out = of_config(cfg.data)
        self.digest = world.gather(digest(self._files))[0]
        _check_same(self._files, world)
        self.prompts = cfg.sample.prompts
        rows = self._stream(held_out, 1).rows() if held_out else ()
        self._held_out = tuple(row for row, _ in rows)
        self.num_held_out = len(self._held_out)
        self._plan: RowPlan | None = None

    def follow_recipe(self, recipe: int) -> None:
        """Text is the same in every recipe."""

    def plan(self, sizes: BatchSizes, saved: Progress | None) -> RowPlan:
        step, place = (saved.step, self._place_in(saved)) if saved else (0, START)
        self._plan = RowPlan(self._stream(self._files, None), sizes, step, place)
        return self._plan

    def example(self, item: Row) -> Example:
        return example_of(item)

    def place(self, step: int) -> Mapping[str, int]:
        return {} if self._plan is None else asdict(self._plan.place(step))

    def held_out(self, index: int) -> Example:
        return example_of(self._held_out[index])

    def suffix(self, index: int) -> str:
        return ".txt"

    def drawing(self) -> Draw:
        def draw(model: nn.ModuleDict, index: int, rng: SampleRng) -> bytes:
            prompt = self.prompts[index]
            return (prompt + self._family.write_on(model, prompt, self._cfg.sample, rng)).encode()

        return draw

    def _place_in(self, saved: Progress) -> Place:
        place = Place(**saved.place) if saved.place else START
        # A place in other files means nothing.
        return place if saved.data == self.digest else replace(START, epoch=place.epoch + 1)

    def _stream(self, files: tuple[Path, ...], epochs: int | None) -> TextStream:
        family, cfg = self._family, self._cfg
        return TextStream(
            files,
            family.tokenize,
            family.end_of_text,
            family.vocabulary,
            cfg.train.seed,
            cfg.data.length,
            cfg.data.shuffle_window,
            epochs,
            family.begin_of_text,
        )


class RowPlan:
    """Rows of a stream in batches, from a place on. step: optimizer steps before it."""

    def __init__(self, stream: TextStream, sizes: BatchSizes, step: int, place: Place) -> None:
        self.sizes = sizes
        self._stream = stream
        self._begin = step, place
        self._rows: Iterator[tuple[Row, Place]] = iter(())
        self._batch: tuple[Row, ...] = ()
        self._next = 0
        self._places: dict[int, Place] = {}
        self._start(step, place)

    def batch(self, step: int) -> tuple[Row, ...]:
        """The rows of an optimizer step. Fast for the same and the next step, else it counts up."""
        if step < self._next - 1:
            self._start(*(self._begin if step >= self._begin[0] else (0, START)))
        while self._next <= step:
            rows = [next(self._rows) for _ in range(self.sizes.of(self._next))]
            self._batch = tuple(row for row, _ in rows)
            self._next += 1
            self._places[self._next] = rows[-1][1]
            for old in sorted(self._places)[:-PLACES_KEPT]:
                del self._places[old]
        return self._batch

    def place(self, step: int) -> Place:
        """Where the rows of an optimizer step begin, of one of the last that were asked for, or of the next."""
        return self._places[step]

    def _start(self, step: int, place: Place) -> None:
        self._rows, self._batch, self._next = self._stream.rows(place), (), step
        self._places = {step: place}


def example_of(row: Row) -> Example:
    """A row as tensors of its length: "tokens" and "documents" int64, "learned" bool."""
    return {
        "tokens": torch.from_numpy(row.tokens),
        "learned": torch.from_numpy(row.learned),
        "documents": torch.from_numpy(row.documents),
    }


def check_length(cfg: RunConfig, family: TextFamily) -> None:
    """Raises InputError for rows that are longer than the model's positions."""
    if family.longest is not None and cfg.data.length > family.longest:
        raise InputError(
            f"data.length: {cfg.data.length} tokens, but the model was made for {family.longest} at most; lower it"
        )


def _check_same(files: tuple[Path, ...], world: World) -> None:
    found = [(file.name, size) for file, size in sizes(files).items()]
    for rank, others in enumerate(world.gather(found)):
        if others != found:
            name = min({*others} ^ {*found} or found)[0]
            raise InputError(
                f"data.path: {name} on rank {rank} is not what rank {world.rank} finds; "
                "give every machine the same files"
            )
