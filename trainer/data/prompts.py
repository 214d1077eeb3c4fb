"""Encodes prompts that were not known when the data were encoded, while a model is in training."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from PIL.Image import Resampling
from torch import nn

from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.data.cache import ExampleCache, key_of
from trainer.data.images.image_io import ImageFile, load_resized
from trainer.data.images.known_files import KnownFiles
from trainer.distributed.context import RankContext
from trainer.models.base import ImageFamily, LoadModule
from trainer.models.build import encoder_loader
from trainer.models.objectives.base import Example
from trainer.run.events import StatusEvent
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles
from trainer.weights.quantization import VERSION

CACHE_VERSION = 1
"""Part of every key: raise it when equal images or captions are encoded differently than before."""
HOST_SHARE = 0.9
"""Share of the free host memory that the encoders may take."""
POLL_S = 0.2


def origin_of(cfg: RunConfig, family: ImageFamily) -> str:
    """The part of a key that all encodings of the family depend on."""
    return f"{CACHE_VERSION} {cfg.model.family} {family.fingerprint()}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A reference image as a text encoder sees it.

    Attributes:
        file: The image.
        digest: Digest of its file's bytes.
        size: The size it is scaled to.
        background: The colour behind what is transparent.
    """

    file: ImageFile
    digest: str
    size: Size
    background: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a text encoder reads: a text, and the reference images that it sees with it."""

    text: str
    seen: tuple[Seen, ...] = ()


def prompt_keys(cfg: RunConfig, origin: str, prompts: Iterable[Prompt]) -> dict[Prompt, str]:
    """{prompt: key of its embeddings in the cache}. Quantized encoders give other embeddings. origin: `origin_of`."""
    quantize, precision = cfg.quantize, cfg.train.precision
    types = (precision, quantize.format, VERSION) if quantize.encoders else (precision,)
    return {
        prompt: key_of(
            *(origin, "text", *types, prompt.text),
            *((one.digest, one.size.values, one.background) for one in prompt.seen),
        )
        for prompt in prompts
    }


def encode_prompt(family: ImageFamily, encoder: Any, prompt: Prompt, known: KnownFiles) -> Example:
    """Encode a prompt, as `ImageFamily.encode_text`.

    Raises:
        InputError: An image cannot be read, or its bytes are no longer those of its digest; before the encoder, which
            may be sharded, is called.
    """
    if not prompt.seen:
        return family.encode_text(encoder, prompt.text)
    images = [load_resized(one.file, one.size.frame, one.background, Resampling.LANCZOS) for one in prompt.seen]
    for one in prompt.seen:
        known.require_unchanged(one.file.path, one.digest)
    return family.encode_edit(encoder, prompt.text, images)


@torch.no_grad()
def encode_prompts(family: ImageFamily, load: LoadModule, cache: ExampleCache, prompts: Mapping[Prompt, str]) -> None:
    """Write the embeddings of {prompt: key} into the cache, with encoders that are loaded and freed here."""
    encoder, known = family.text_encoder(load), KnownFiles()
    for prompt, key in prompts.items():
        cache.write(key, encode_prompt(family, encoder, prompt, known))
    del encoder
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class PromptEncoder:
    """Encodes prompts on the CPU of rank 0, while the model and its optimizer fill the GPUs.

    The memory of the GPUs is planned for training without encoders, which are therefore loaded into host memory,
    whole, by one rank. The others wait; none of them calls a sharded encoder.

    Args:
        origin: The result of `origin_of`, which reads the encoders' files.
    """

    def __init__(self, family: ImageFamily, context: RankContext, cache: ExampleCache, origin: str) -> None:
        self._family, self._context, self._cache, self._origin = family, context, cache, origin
        self._count = 0

    def encode(self, prompts: Iterable[Prompt]) -> dict[Prompt, str]:
        """Encode what the cache lacks. Collective; `prompts` must be equal on every rank.

        Returns:
            {prompt: key in the cache}

        Raises:
            InputError: The encoders cannot be loaded, or the cache cannot be written; raised on every rank.
        """
        keys = prompt_keys(self._context.cfg, self._origin, prompts)
        missing = self._missing(keys)
        if missing:
            step = self._context.world.heartbeat.step
            count = "1 new prompt" if len(missing) == 1 else f"{len(missing)} new prompts"
            message = f"{count}, on the CPU of rank 0"
            self._context.emit(StatusEvent(step=step, state="encoding", message=message))
            self._encode_on_rank_0(missing)
            for key in self._missing(keys).values():
                self._send(key)
        return keys

    def _missing(self, keys: Mapping[Prompt, str]) -> dict[Prompt, str]:
        """The part of {prompt: key} that some rank does not find in the cache. Collective."""
        lacking = self._context.world.gather([prompt for prompt in keys if not self._cache.has(keys[prompt])])
        missing = {prompt for part in lacking for prompt in part}
        return {prompt: key for prompt, key in keys.items() if prompt in missing}

    def _encode_on_rank_0(self, missing: Mapping[Prompt, str]) -> None:
        world = self._context.world
        self._count += 1
        done = f"prompts encoded {self._count}"
        world.heartbeat.enter("encoding prompts", moves=False)
        problem = ""
        if world.rank == 0:
            try:
                self._encode_alone(missing)
            except (OSError, RuntimeError, InputError) as error:  # a prompt is not worth the run
                problem = " ".join(str(error).split())
            world.store.set(done, True)
        else:
            # Not in a collective, which the watchdog would end: rank 0 may read a large encoder for minutes.
            while not world.store.get(done):
                world.heartbeat.beat()
                time.sleep(POLL_S)
        self._agree(problem)

    def _encode_alone(self, missing: Mapping[Prompt, str]) -> None:
        cfg, cpu = self._context.cfg, torch.device("cpu")
        alone = replace(
            self._context.world,
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            device=cpu,
            remote_ranks=(),
            remote_leaders=(),
        )
        with _all_threads():
            load = within_host_memory(encoder_loader(cfg, alone, self._context.cache), cfg)
            encode_prompts(self._family, load, self._cache, missing)

    def _send(self, key: str) -> None:
        """Write an example of rank 0's cache into those of machines that have their own. One at a time: they may be
        large, and every rank receives them."""
        world, problem = self._context.world, ""
        example = world.gather(self._cache.read(key) if world.rank == 0 else None)[0]
        if world.local_rank == 0 and not self._cache.has(key):
            try:
                self._cache.write(key, example)
            except OSError as error:
                problem = str(error)
        self._agree(problem)

    def _agree(self, problem: str) -> None:
        """Raise InputError on every rank if one has a problem."""
        problems = [one for one in self._context.world.gather(problem) if one]
        if problems:
            raise InputError(problems[0])


def within_host_memory(load: LoadModule, cfg: RunConfig) -> LoadModule:
    """Return `load`, which refuses a module that does not fit into the free memory of the host."""

    def check_and_load(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        width = 2 if blocks and cfg.train.precision == "bf16" else 4
        need, free = sum(p.numel() for p in module.parameters()) * width, psutil.virtual_memory().available
        if need > HOST_SHARE * free:
            raise InputError(
                f"{type(module).__name__}, which encodes prompts, takes {need / 2**30:.1f} GiB of host memory during a "
                f"run, and {free / 2**30:.1f} GiB are free"
            )
        return load(module, files, blocks)

    return check_and_load


@contextmanager
def _all_threads() -> Iterator[None]:
    """Inside, this process computes with all cores: the launcher gives each rank one, and the other ranks wait."""
    former = torch.get_num_threads()
    torch.set_num_threads(max(former, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(former)
