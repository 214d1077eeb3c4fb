"""Runs a family's encoders on a device that holds nothing, and writes down what they allocate.

For a process of its own that loads torch (see `virtual`).
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
from trainer.models.objectives import Example
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import COMPUTE_DTYPE
from trainer.plan import fake_device
from trainer.plan.memory_tracker import ACTIVATIONS, Ledger
from trainer.plan.steps import Step, Unit
from trainer.plan.tables import Encoders, sides_of
from trainer.plan.trace import Moments, held, units_of, watched_groups
from trainer.weights.files import WeightFiles

CAPTION = "1" * 480
"""With its template about the 512 tokens of a long caption: tokenizers take each digit as one."""


def record_encoders(cfg: RunConfig, family: ModelFamily, device: torch.device) -> Encoders:
    """Their passes, without FSDP's own memory. cfg: how it is sharded, and over how many ranks, does not matter.

    Where text is trained on there are none.
    """
    if not isinstance(family, ImageFamily):
        nothing = (0.0, 0.0, 0.0)
        return Encoders(Step((), (), 0), 0, 0, 0, sides_of(cfg), nothing, nothing, nothing)
    cfg = cfg.model_copy(update={"parallel": ParallelConfig(devices=2, strategy="full")})
    place = _Place(cfg, family, device)
    with place.text() as (_, moments, units, run):
        run()  # what is made once only
        with moments.recorded({unit.name: number for number, unit in enumerate(units)}) as marks:
            caption = run()
            moments.mark("end", "")
        text = Step(units, tuple(marks), place.buffers())
        whole = place.whole()
    image, encoding, decoding, latents = _Place(cfg, family, device).image(sides_of(cfg))
    return Encoders(text, whole, _size(caption), image, sides_of(cfg), encoding, decoding, latents)


def trace_captions(cfg: RunConfig, family: ImageFamily, device: torch.device) -> int:
    """Bytes on rank 0 at most while a caption is encoded."""
    with _Place(cfg, family, device).text() as (ledger, _, _, run):
        ledger.begin()
        for _ in range(2):
            run()
        return ledger.highest


class _Place:
    """Where encoders are loaded to. cfg: says over how many ranks."""

    def __init__(self, cfg: RunConfig, family: ImageFamily, device: torch.device) -> None:
        self.cfg, self.family, self.device = cfg, family, device
        self.loaded: list[tuple[nn.Module, Sequence[str]]] = []

    def load(self, module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
        """What families load their encoders with: they stay on the meta device, where alone they can be changed."""
        prepare_encoder(module, self.cfg, blocks)
        self.loaded.append((module, blocks))
        return module

    @contextmanager
    def text(self) -> Iterator[tuple[Ledger, Moments, tuple[Unit, ...], Callable[[], Example]]]:
        """Inside, the text encoders are on the device: what sees their bytes, their units, and their pass."""
        encoder = self.family.text_encoder(self.load)
        sharded = [(module, blocks) for module, blocks in self.loaded if blocks]
        model = nn.ModuleDict({f"text encoder {number}": m for number, (m, _) in enumerate(sharded, 1)})
        with self._placed() as ledger, watched_groups(model, moments := Moments(ledger)):
            units: list[Unit] = []
            for (name, module), (_, blocks) in zip(model.items(), sharded, strict=True):
                units += units_of(nn.ModuleDict({name: module}), blocks, COMPUTE_DTYPE[self.cfg.train.precision])
            run = partial(self.family.encode_text, encoder, CAPTION)
            yield ledger, moments, tuple(units), run

    def buffers(self) -> int:
        """Bytes of the buffers of what is sharded."""
        return held([b for module, blocks in self.loaded if blocks for b in module.buffers()], self.device)

    def whole(self) -> int:
        """Bytes of what is not sharded."""
        return sum(_bytes_of(module, self.device) for module, blocks in self.loaded if not blocks)

    def image(self, sides: Sequence[int]) -> tuple[int, tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Bytes of the autoencoder; for each side those of encoding, of decoding, and of the latents."""
        encoder = self.family.image_encoder(self.load)
        with self._placed() as ledger:
            encoding, decoding, latents = zip(*(self._of_image(encoder, side, ledger) for side in sides), strict=True)
            return _bytes_of(encoder, self.device), encoding, decoding, latents

    @contextmanager
    def _placed(self) -> Iterator[Ledger]:
        """Inside, what was loaded is on the device."""
        ranks = self.cfg.parallel.world_size
        with fake_device.ranks(ranks, self.device) as world:
            is_sharded = ranks > 1 or self.cfg.parallel.cpu_offload
            mesh = device_mesh(self.cfg.parallel, world, "full") if is_sharded else None
            with Ledger(self.device.type) as ledger, fake_device.fake_tensors(self.device, ledger.see):
                with ledger.making("weights"):
                    for module, blocks in self.loaded:
                        place_encoder(module, self.cfg, blocks, mesh if blocks else None, self.device)
                yield ledger

    def _of_image(self, encoder: Any, side: int, ledger: Ledger) -> tuple[float, float, float]:
        raw: list[torch.Tensor] = []
        encode = encoder.encode

        def kept(*args: Any, **kwargs: Any) -> Any:
            found = encode(*args, **kwargs)
            raw.append(found.latent_dist.mode())
            return found

        encoder.encode = kept
        ledger.mark()
        try:
            example = self.family.encode_image(encoder, Image.new("RGB", (side, side)))
        finally:
            encoder.encode = encode
        encoding = ledger.peak_of[ACTIVATIONS]
        ledger.mark()
        before = ledger.current[ACTIVATIONS]
        with torch.no_grad():
            encoder.decode(raw.pop(), return_dict=False)
        return encoding, ledger.peak_of[ACTIVATIONS] - before, _size(example)


def _bytes_of(module: nn.Module, device: torch.device) -> int:
    return held([*module.parameters(), *module.buffers()], device)


def _size(example: Example) -> int:
    return sum(tensor.nbytes for tensor in example.values())
