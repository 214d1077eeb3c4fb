"""The data of a run, by the kind of its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.data.encode import encode_data
from trainer.data.image_source import ImageSource
from trainer.data.mixed_source import MixedSource
from trainer.data.source import Source
from trainer.data.text_source import TextSource
from trainer.distributed.world import World
from trainer.models.base import ImageFamily, LoadModule, ModelFamily, MultimodalFamily, TextFamily
from trainer.run.events import Emit


def open_source(
    cfg: RunConfig,
    family: ModelFamily,
    load: LoadModule,
    cache: Path,
    world: World,
    say: Emit,
    stopping: Callable[[], bool],
) -> Source:
    """Everything a run trains on, encoded where encoders do that. Collective. The arguments are those of
    `encode_data`, as is what it raises."""
    match family:
        case TextFamily():
            return TextSource(cfg, family, world)
        case MultimodalFamily():
            data = encode_data(cfg, family, load, cache, world, say, stopping)
            return MixedSource(cfg, family, load, data, say)
        case ImageFamily():
            data = encode_data(cfg, family, load, cache, world, say, stopping)
            return ImageSource(cfg, family, load, data)
    raise TypeError(f"{type(family).__name__} is neither")
