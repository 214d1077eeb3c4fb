"""What the benchmarks train: FLUX.2 transformers of any size with random weights, on generated examples.

No encoder is ever built: the cache is filled with numbers of the right shapes, and the trainer finds it full.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.data.encode import encode_data
from trainer.data.images.image_source import EncodedData
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models.base import LoadModule
from trainer.models.families.flux2 import Flux2
from trainer.models.objectives.base import Example
from trainer.models.parts.image.text_encoder import write_tiny_tokenizer
from trainer.run.folder import RunDir
from trainer.train.log import emitter
from trainer.train.loop import Trainer

NUM_PICTURES = 4
NUM_WEIGHT_FILES = 4
TEXT_LAYERS = 3  # hidden states the published recipe stacks


@dataclass(frozen=True)
class Workload:
    """A transformer and what it is fed. heads: of `head_size` numbers.  text_width: features per text token.

    double, single: number of blocks.  pixels: side of the square images.
    """

    double: int
    single: int
    heads: int
    head_size: int
    text_width: int
    text_tokens: int
    pixels: int

    @property
    def transformer(self) -> dict[str, Any]:
        """Its config, as diffusers takes it."""
        return {
            "in_channels": 128,
            "num_layers": self.double,
            "num_single_layers": self.single,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_size,
            "axes_dims_rope": [self.head_size // 4] * 4,
            "joint_attention_dim": self.text_width,
            "guidance_embeds": False,
        }

    def build(self) -> Flux2Transformer2DModel:
        """The transformer on the meta device."""
        with torch.device("meta"):
            return Flux2Transformer2DModel(**self.transformer)


TINY = Workload(double=1, single=2, heads=2, head_size=32, text_width=96, text_tokens=16, pixels=64)
LITTLE = Workload(double=1, single=2, heads=8, head_size=64, text_width=384, text_tokens=64, pixels=256)
"""18.8 M parameters."""
KLEIN_SMALL = Workload(double=2, single=4, heads=8, head_size=128, text_width=384, text_tokens=64, pixels=256)
"""128.8 M parameters."""
KLEIN_MEDIUM = Workload(double=2, single=6, heads=16, head_size=128, text_width=384, text_tokens=64, pixels=256)
"""622.6 M parameters, 1.25 GB."""
KLEIN_4B = Workload(double=5, single=20, heads=24, head_size=128, text_width=7680, text_tokens=512, pixels=1024)
"""FLUX.2 klein-4B as published: 3.876 B parameters."""


class GeneratedExamples(Flux2):
    """Encodes to noise. Same fingerprint as the real family, so that what it caches is found by the trainer."""

    def __init__(self, cfg: RunConfig, cache: Path, text_tokens: int) -> None:
        super().__init__(cfg.model, cfg.objective, cache / "models")
        self._text_tokens = text_tokens

    def text_encoder(self, load: LoadModule) -> Any:
        return None

    def image_encoder(self, load: LoadModule) -> Any:
        return None

    def encode_text(self, encoder: Any, caption: str) -> Example:
        return {"prompt_embeds": torch.randn(self._text_tokens, self._architecture.joint_attention_dim).bfloat16()}

    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        side = (self._architecture.in_channels, image.height // self.size_multiple, image.width // self.size_multiple)
        return {"latents": torch.randn(side)}


@dataclass(frozen=True)
class Bench:
    """A folder with a model, pictures and a cache. Made by `prepare`."""

    root: Path
    workload: Workload

    def config(self, **sections: dict[str, Any]) -> RunConfig:
        """A rank-16 LoRA run, one image per step. sections: fields that differ, by section."""
        values: dict[str, dict[str, Any]] = {
            "model": {"family": "flux2", "path": str(self.model)},
            "data": {"path": str(self.root / "pictures"), "resolution": self.workload.pixels},
            "train": {"steps": 10_000_000},
            "checkpoint": {"every": 0},
        }
        for section, changes in sections.items():
            values[section] = values.get(section, {}) | changes
        return RunConfig.model_validate({"name": "bench", **values})

    @property
    def model(self) -> Path:
        """The diffusers folder."""
        return self.root / "model"

    def trainer(self, name: str, cfg: RunConfig, world: World) -> Trainer:
        """A trainer as torchrun would start it, its events on disk in the run folder `name`. Collective."""
        path = self.root / name
        if world.rank == 0:
            RunDir.create(self.root, cfg, path)
        world.barrier()
        run = RunDir.open(path)
        self.examples(cfg, world)
        return Trainer(cfg, run, world, self.root / "cache", emitter(run, world))

    def examples(self, cfg: RunConfig, world: World) -> EncodedData:
        """What the run is fed, generated where it is not cached. Collective."""
        family = GeneratedExamples(cfg, self.root / "cache", self.workload.text_tokens)
        return encode_data(family, _no_encoder, RankContext(cfg, world, self.root / "cache", lambda event: None))


def prepare(root: Path, workload: Workload, device: str = "cpu", model: Path | None = None) -> Bench:
    """Write everything a run needs below `root`.

    Args:
        device: Where the weights are drawn.
        model: A folder that was written before for the same transformer, used instead of another.
    """
    bench = Bench(root, workload)
    if model is None:
        _write_model(bench.model, workload, torch.device(device))
    else:
        root.mkdir(parents=True)
        bench.model.symlink_to(model)
    _write_pictures(root / "pictures", workload.pixels)
    return bench


def _no_encoder(module: nn.Module, files: object, blocks: Sequence[str]) -> nn.Module:
    raise AssertionError("generated examples need no encoder")


def _write_model(folder: Path, workload: Workload, device: torch.device) -> None:
    """A diffusers folder whose transformer has bf16 weights and whose other models are configs only."""
    transformer = folder / "transformer"
    transformer.mkdir(parents=True)
    model = workload.build()
    numbers = torch.Generator(device).manual_seed(0)
    parts = [list(model.state_dict().items())[number::NUM_WEIGHT_FILES] for number in range(NUM_WEIGHT_FILES)]
    names: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"diffusion_pytorch_model-{number:05d}-of-{NUM_WEIGHT_FILES:05d}.safetensors"
        save_file({name: _draw(tensor.shape, numbers) for name, tensor in part}, transformer / file, {"format": "pt"})
        names |= {name: file for name, _ in part}
    index = {"metadata": {"total_size": 2 * model.num_parameters()}, "weight_map": names}
    _write_json(transformer / "diffusion_pytorch_model.safetensors.index.json", index)
    _write_json(transformer / "config.json", {"_class_name": type(model).__name__, **workload.transformer})
    text_encoder = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": workload.text_width // TEXT_LAYERS}
    _write_json(folder / "text_encoder/config.json", text_encoder)
    _write_json(folder / "vae/config.json", {})
    _write_json(folder / "scheduler/scheduler_config.json", {})
    write_tiny_tokenizer(folder / "tokenizer", vocabulary=1024, max_tokens=512)


def _draw(shape: Sequence[int], numbers: torch.Generator) -> Tensor:
    """A bf16 weight on the CPU that keeps the variance of its input; vectors are norms' scales, 1."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=numbers.device)
    return drawn.normal_(0, 1 / math.sqrt(shape[1]), generator=numbers).cpu()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_pictures(folder: Path, pixels: int) -> None:
    folder.mkdir(parents=True)
    for number in range(NUM_PICTURES):
        Image.new("RGB", (pixels, pixels), (60 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture number {number}", encoding="utf-8")
