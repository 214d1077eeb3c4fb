"""Traces a family's encoders: runs them on the fake device and notes what they allocate.

For a process of its own that loads torch (see `fake_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import nn

from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig
from trainer.models.base import ImageFamily, ModelFamily
from trainer.models.build import place_encoder, prepare_encoder
from trainer.models.objectives.base import Example
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import COMPUTE_DTYPE
from trainer.plan.record import fake_device
from trainer.plan.record.memory_tracker import ACTIVATIONS, MemoryTracker
from trainer.plan.record.trace import MomentRecorder, bytes_on, merge_equal, units_of, watched_groups
from trainer.plan.simulate.steps import ModelPass, Unit
from trainer.plan.simulate.tables import Encoders, sides_of
from trainer.weights.files import WeightFiles

CAPTION = "1" * 480
"""With its template about the 512 tokens of a long caption: tokenizers make one token of each digit."""


def trace_encoders(cfg: RunConfig, family: ModelFamily, device: torch.device) -> Encoders:
    """Trace the encoders' passes, without FSDP's own memory. Families that train on text have none.

    Args:
        cfg: The run's config; its sharding and number of ranks do not matter.
        family: The run's family.
        device: The fake device.
    """
    if not isinstance(family, ImageFamily):
        nothing = (0.0, 0.0, 0.0)
        return Encoders(ModelPass((), (), 0), 0, 0, 0, sides_of(cfg), nothing, nothing, nothing)
    cfg = cfg.model_copy(update={"parallel": ParallelConfig(devices=2, strategy="full")})
    tracer = _EncoderTracer(cfg, family, device)
    with tracer.text() as (_, moments, units, run):
        run()  # allocates the tensors that are made only once
        with moments.record({unit.name: number for number, unit in enumerate(units)}) as marks:
            caption = run()
            moments.mark("end", "")
        text = ModelPass(units, tuple(marks), tracer.buffers())
        whole = tracer.whole()
    image, encoding, decoding, latents = _EncoderTracer(cfg, family, device).image(sides_of(cfg))
    guides = _EncoderTracer(cfg, family, device).guides()
    return Encoders(text, whole, _size(caption), image, sides_of(cfg), encoding, decoding, latents, guides)


def trace_captions(cfg: RunConfig, family: ImageFamily, device: torch.device) -> int:
    """Return the most bytes on rank 0 while a caption is encoded."""
    with _EncoderTracer(cfg, family, device).text() as (tracker, _, _, run):
        tracker.reset()
        for _ in range(2):
            run()
        return tracker.highest


class _EncoderTracer:
    """Loads encoders to the fake device and measures them. cfg: says over how many ranks they are sharded."""

    def __init__(self, cfg: RunConfig, family: ImageFamily, device: torch.device) -> None:
        self.cfg, self.family, self.device = cfg, family, device
        self.loaded: list[tuple[nn.Module, Sequence[str]]] = []

    def load(self, module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        """Load an encoder for the family: it stays on the meta device, the only one where it can be changed."""
        prepare_encoder(module, self.cfg, blocks)
        self.loaded.append((module, blocks))
        return module

    @contextmanager
    def text(self) -> Iterator[tuple[MemoryTracker, MomentRecorder, tuple[Unit, ...], Callable[[], Example]]]:
        """Inside, the text encoders are on the device. Yields their memory tracker, moments, units and pass."""
        encoder = self.family.text_encoder(self.load)
        sharded = [(module, blocks) for module, blocks in self.loaded if blocks]
        model = nn.ModuleDict({f"text encoder {number}": m for number, (m, _) in enumerate(sharded, 1)})
        with self._placed() as tracker, watched_groups(model, moments := MomentRecorder(tracker)):
            units: list[Unit] = []
            for (name, module), (_, blocks) in zip(model.items(), sharded, strict=True):
                units += units_of(nn.ModuleDict({name: module}), blocks, COMPUTE_DTYPE[self.cfg.train.precision])
            run = partial(self.family.encode_text, encoder, CAPTION)
            yield tracker, moments, merge_equal([units])[0], run

    def buffers(self) -> int:
        """Return the bytes of the buffers of sharded encoders."""
        return bytes_on([b for module, blocks in self.loaded if blocks for b in module.buffers()], self.device)

    def whole(self) -> int:
        """Return the bytes of encoders that are not sharded."""
        return sum(_bytes_of(module, self.device) for module, blocks in self.loaded if not blocks)

    def guides(self) -> int:
        """Return the bytes of the components that guide samples."""
        return sum(
            parameter.nbytes for guide in self.family.guides(self.load).values() for parameter in guide.parameters()
        )

    def image(self, sides: Sequence[int]) -> tuple[int, tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Return the bytes of the autoencoder; and for each side those of encoding, of decoding, and of the latents."""
        encoder = self.family.image_encoder(self.load)
        with self._placed() as tracker:
            encoding, decoding, latents = zip(*(self._of_image(encoder, side, tracker) for side in sides), strict=True)
            return _bytes_of(encoder, self.device), encoding, decoding, latents

    @contextmanager
    def _placed(self) -> Iterator[MemoryTracker]:
        """Inside, the loaded encoders are on the device."""
        ranks = self.cfg.parallel.world_size
        with fake_device.ranks(ranks, self.device) as world:
            is_sharded = ranks > 1 or self.cfg.parallel.cpu_offload
            mesh = device_mesh(self.cfg.parallel, world, "full") if is_sharded else None
            with MemoryTracker(self.device.type) as tracker, fake_device.fake_tensors(self.device, tracker.observe):
                with tracker.making("weights"):
                    for module, blocks in self.loaded:
                        place_encoder(module, self.cfg, blocks, mesh if blocks else None, self.device)
                yield tracker

    def _of_image(self, encoder: Any, side: int, tracker: MemoryTracker) -> tuple[float, float, float]:
        raw: list[torch.Tensor] = []
        encode = encoder.encode

        def kept(*args: Any, **kwargs: Any) -> Any:
            found = encode(*args, **kwargs)
            raw.append(found.latent_dist.mode())
            return found

        encoder.encode = kept
        tracker.reset_peak()
        try:
            example = self.family.encode_image(encoder, Image.new("RGB", (side, side)))
        finally:
            encoder.encode = encode
        encoding = tracker.peak_of[ACTIVATIONS]
        tracker.reset_peak()
        before = tracker.current[ACTIVATIONS]
        with torch.no_grad():
            encoder.decode(raw.pop(), return_dict=False)
        return encoding, tracker.peak_of[ACTIVATIONS] - before, _size(example)


def _bytes_of(module: nn.Module, device: torch.device) -> int:
    return bytes_on([*module.parameters(), *module.buffers()], device)


def _size(example: Example) -> int:
    return sum(tensor.nbytes for tensor in example.values())
