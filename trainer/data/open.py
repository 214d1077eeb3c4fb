"""The data of a run, by the kind of its model."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.encode import encode_data, encode_samples, require_same
from trainer.data.images.image_source import ImageSampler, ImageSource
from trainer.data.mixed import question_files
from trainer.data.mixed.mixed_source import EditSampler, MixedSampler, MixedSource
from trainer.data.prompts import PromptEncoder
from trainer.data.source import DataSource, Sampler
from trainer.data.text.text_source import TextSampler, TextSource
from trainer.distributed.context import RankContext
from trainer.models.base import ImageFamily, LoadModule, ModelFamily, MultimodalFamily, TextFamily


def open_data(family: ModelFamily, load: LoadModule, context: RankContext) -> tuple[DataSource, Sampler]:
    """Open the data of a run; images and captions are encoded first where the family has encoders. Collective.

    Args:
        family: The model family; its kind selects the classes.
        load: Loads an encoder of the family.
        context: This rank's part of the run.

    Raises:
        InputError: Data that cannot be used.
        StopRequested: As `encode_data`.
    """
    cfg = context.cfg
    match family:
        case TextFamily():
            return TextSource(cfg, family, context.world, context.emit), TextSampler(cfg, family)
        case MultimodalFamily():
            questions = question_files.of_config(cfg.data)
            rows = (*questions.train, *questions.validation)
            # One pass over the encoders for images and rows: each is loaded, sharded and freed once.
            data = encode_data(family, load, context, [image for row in rows for image in row.encoded])
            encoder = PromptEncoder(family, context, data.cache, data.origin)
            mixed = MixedSource(cfg, family, data, questions, context.emit)
            require_same(context.world, mixed.digest)
            return mixed, MixedSampler(cfg, family, EditSampler(cfg, family, load, data, encoder))
        case ImageFamily():
            data = encode_data(family, load, context)
            encoder = PromptEncoder(family, context, data.cache, data.origin)
            source = ImageSource(cfg, family, data)
            require_same(context.world, source.digest)
            return source, ImageSampler(cfg, family, load, data, encoder)
    raise TypeError(f"{type(family).__name__} is neither a text, an image nor a multimodal family")


def open_samples(
    family: ModelFamily, load: LoadModule, context: RankContext, references: Sequence[Sequence[str]]
) -> Sampler:
    """Open the prompts of `sample` without the run's data. They and their references are encoded first.

    Args:
        family: As for `open_data`, as are `load` and `context`.
        references: Reference images of each prompt, which replace `sample.references`.

    Raises:
        InputError: A reference image cannot be read.
    """
    if isinstance(family, TextFamily):
        return TextSampler(context.cfg, family)
    if not isinstance(family, ImageFamily):
        raise TypeError(f"{type(family).__name__} is neither a text nor an image family")
    data = encode_samples(family, load, context, references)
    encoder = PromptEncoder(family, context, data.cache, data.origin)
    if isinstance(family, MultimodalFamily):
        return EditSampler(context.cfg, family, load, data, encoder)
    return ImageSampler(context.cfg, family, load, data, encoder)
