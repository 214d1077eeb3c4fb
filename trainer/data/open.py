"""The data of a run, by the kind of its model."""

from __future__ import annotations

from trainer.data.encode import encode_data
from trainer.data.image_source import ImageSource
from trainer.data.mixed_source import MixedSource
from trainer.data.source import Source
from trainer.data.text_source import TextSource
from trainer.distributed.context import RankContext
from trainer.models.base import ImageFamily, LoadModule, ModelFamily, MultimodalFamily, TextFamily


def open_source(family: ModelFamily, load: LoadModule, context: RankContext) -> Source:
    """Everything a run trains on, encoded where encoders do that. Collective.

    load: loads an encoder of the family.  Raises what `encode_data` raises.
    """
    match family:
        case TextFamily():
            return TextSource(context.cfg, family, context.world)
        case MultimodalFamily():
            return MixedSource(context.cfg, family, load, encode_data(family, load, context), context.emit)
        case ImageFamily():
            return ImageSource(context.cfg, family, load, encode_data(family, load, context))
    raise TypeError(f"{type(family).__name__} is neither")
