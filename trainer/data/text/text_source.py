"""Data of a run that trains on text: rows of tokens from files, and texts that the model continues as samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig
from trainer.data.epochs import rounded_up
from trainer.data.loader import BatchSizes
from trainer.data.row_forms import CHAT, TEXT
from trainer.data.source import DataSource, Generate, Sampler
from trainer.data.text.text_documents import Encoder
from trainer.data.text.text_files import (
    TextFolder,
    check_preferences,
    digest,
    folders_of,
    kinds,
    named,
    of_config,
    sizes,
    warnings_of,
)
from trainer.data.text.text_rows import key_of, num_rows
from trainer.data.text.text_stream import START, LeftOut, PackedRow, Packing, StreamPosition, TextStream
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models.base import TextFamily
from trainer.models.objectives.base import Example
from trainer.rng import SampleRng
from trainer.run import samples
from trainer.run.events import Emit, StatusEvent, WarningEvent
from trainer.run.manifest import Progress
from trainer.run.samples import Sample, SampleKind
from trainer.system.errors import InputError

POSITIONS_KEPT = 4
"""Number of last steps whose positions are kept: batches are read ahead, and a run may be saved before or after the
next one is read."""


class TextSource(DataSource):
    """The text files of the section `data`. Rows are read as they are needed; those held out are kept in memory.

    Args:
        cfg: The config of the run.
        family: The model, which tokenizes.
        world: The ranks.
        emit: Takes warnings about documents that are left out.

    Raises:
        InputError: Files that cannot be used; on every rank if ranks find different files.
    """

    unit = "tokens"
    changed_message = "the text files have changed since the checkpoint: training continues with their next epoch"

    def __init__(self, cfg: RunConfig, family: TextFamily, world: World, emit: Emit = lambda event: None) -> None:
        check_length(cfg, family)
        self._cfg, self._family, self._emit = cfg, family, emit
        self._folders = folders_of(cfg.data)
        files, self._held_out_files = of_config(cfg.data)
        # Digest of the files and of how often their documents occur.
        found, mixed = digest(files), [(len(folder.files), folder.weight) for folder in self._folders]
        plain = len(mixed) == 1 and mixed[0][1] == 1
        self.digest = world.gather(found if plain else hashlib.sha256(f"{found} {mixed}".encode()).hexdigest())[0]
        _check_same(files, world)
        check_preferences((*files, *self._held_out_files), cfg.objective.compares_pairs)
        emit(StatusEvent(state="loading", message=f"texts are read from {named(files)}"))
        about_chats = family.chat_warnings(cfg) if CHAT in kinds(files) else ()
        for message in (*warnings_of(cfg.data), *about_chats):
            emit(WarningEvent(message=message))
        self._batch_sampler: TextBatchSampler | None = None
        self._rows_of_an_epoch = math.nan
        self._held_out = self._read_held_out()
        self.num_held_out = len(self._held_out)

    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> TextBatchSampler:
        step, position = (saved.step, self._position_in(saved)) if saved else (0, START)
        stream = self._stream(self._folders, None, self._emit)
        self._batch_sampler = TextBatchSampler(stream, sizes, step, position)
        return self._batch_sampler

    def num_samples(self, epochs: float, context: RankContext) -> int:
        """Every epoch counts as many rows as the first, whose order decides how its documents fill rows."""
        key = key_of(self._cfg, self._family, self.digest)
        stream = self._stream(self._folders, 1, lambda event: None)
        self._rows_of_an_epoch = num_rows(stream.rows(), key, context)
        if not self._rows_of_an_epoch:  # weights below 1, of few documents
            raise InputError("train.epochs: the first epoch holds no document; raise the weights, or set train.steps")
        return max(1, rounded_up(epochs * self._rows_of_an_epoch))

    @property
    def samples_of_an_epoch(self) -> float:
        return self._rows_of_an_epoch

    def _read_held_out(self) -> tuple[PackedRow, ...]:
        if not self._held_out_files:
            return ()
        stream = self._stream((TextFolder(self._held_out_files),), 1, self._emit)
        return tuple(row for row, _ in stream.rows())

    def example(self, item: PackedRow) -> Example:
        return example_of(item)

    def position(self, step: int) -> Mapping[str, int]:
        return {} if self._batch_sampler is None else self._batch_sampler.position(step).as_place()

    def held_out(self, index: int) -> Example:
        return example_of(self._held_out[index])

    def _position_in(self, saved: Progress) -> StreamPosition:
        position = StreamPosition.from_place(saved.place) if saved.place else START
        # A position in other files has no meaning.
        return position if saved.data == self.digest else replace(START, epoch=position.epoch + 1)

    def _stream(self, folders: Sequence[TextFolder], epochs: int | None, emit: Emit) -> TextStream:
        left_out = Counted(emit, "this document is left out: ", "documents are left out")
        noted = Counted(emit, "", "conversations")
        return stream_of(self._cfg, self._family, folders, epochs, left_out, noted)


class Counted:
    """Warns of documents that are not used, or not in full: of the first for each reason, and of how many there are in
    the first epoch.

    Args:
        emit: Takes the warnings.
        one: What is said of one document, before the reason.
        many: What is said of several, after their number.
    """

    def __init__(self, emit: Emit, one: str, many: str) -> None:
        self._emit, self._one, self._many = emit, one, many
        self._epoch: int | None = None
        self._counts: dict[str, int] = {}

    def __call__(self, epoch: int, first: str, why: str) -> None:
        """Count a document. first: where the first one with this reason is."""
        if self._epoch is None:
            self._epoch = epoch
        if epoch != self._epoch:
            for reason, number in self._counts.items():
                self._warn(f"{number} {self._many} of each epoch: {reason}")
            self._counts = {}
            return
        number = self._counts[why] = self._counts.get(why, 0) + 1
        if number == 1:
            self._warn(f"{first}: {self._one}{why}")
        elif str(number).strip("0") == "1":
            self._warn(f"{number} {self._many} so far: {why}")

    def _warn(self, message: str) -> None:
        self._emit(WarningEvent(message=message))


class TextSampler(Sampler):
    """Generates texts: each prompt with its continuation by the model, or with the assistant's answer to it."""

    def __init__(self, cfg: RunConfig, family: TextFamily) -> None:
        self.prompts = cfg.sample.prompts
        self._cfg, self._family = cfg, family
        self._answers = answers(cfg)

    def change_prompts(self, prompts: Sequence[str]) -> None:
        self.prompts = tuple(prompts)

    def kind(self, index: int) -> SampleKind:
        return samples.TEXT

    def prepare(self) -> Generate:
        def generate(model: nn.ModuleDict, index: int, rng: SampleRng) -> Sample:
            prompt, cfg = self.prompts[index], self._cfg.sample
            if self._answers:
                text = f"{prompt}\n\n{self._family.reply(model, prompt, cfg, rng).strip()}"
            else:
                text = prompt + self._family.generate(model, prompt, cfg, rng)
            return Sample(samples.TEXT, text.encode())

        return generate


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
    """Convert a row to tensors (length,): "tokens" and "documents" int64, "loss_mask" bool."""
    return {
        "tokens": torch.from_numpy(row.tokens),
        "loss_mask": torch.from_numpy(row.loss_mask),
        "documents": torch.from_numpy(row.documents),
    }


def stream_of(
    cfg: RunConfig,
    family: TextFamily,
    folders: Sequence[TextFolder],
    epochs: int | None,
    left_out: LeftOut,
    noted: LeftOut,
) -> TextStream:
    """The documents of folders as rows for a model.

    Args:
        cfg: The config.
        family: Its model.
        folders: As for `TextStream`.
        epochs: As for `TextStream`.
        left_out: As for `TextStream`.
        noted: As for `TextStream`.
    """
    data = cfg.data
    return TextStream(
        folders,
        encoder_of(family, cfg.objective.compares_pairs),
        seed=cfg.train.seed,
        length=data.length,
        shuffle_window=data.shuffle_window,
        epochs=epochs,
        packing=packing_of(data, folders),
        is_shared=family.packs_documents,
        too_long=data.too_long,
        left_out=left_out,
        noted=noted,
    )


def encoder_of(family: TextFamily, compares: bool = False) -> Encoder:
    """How a model reads documents.

    Args:
        family: The model.
        compares: Whether it is preference training.
    """
    return Encoder(
        tokenize=family.tokenize,
        end_of_text=family.end_of_text,
        vocabulary=family.vocabulary,
        begin=family.begin_of_text,
        pair=family.encode_pair,
        chat=family.encode_chat,
        notes=family.take_notes,
        compares=compares,
    )


def packing_of(data: DataConfig, folders: Sequence[TextFolder]) -> Packing:
    """`data.packing` with `auto` resolved by what the files hold."""
    if data.packing != "auto":
        return data.packing
    held = kinds([file for folder in folders for file in folder.files])
    return "split" if held <= {TEXT} else "whole"


def answers(cfg: RunConfig) -> bool:
    """Whether samples are answers to users: `sample.chat` with `auto` resolved by what the files hold."""
    if cfg.sample.chat != "auto":
        return cfg.sample.chat == "on"
    try:
        return CHAT in kinds(of_config(cfg.data)[0])
    except InputError:  # a sample can also be generated after the data of its run were moved
        return False


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
