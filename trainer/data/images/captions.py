"""Finds captions that are longer than the model reads.

`python -m trainer.data.images.captions RUNS` reads names of config files, one per line, and prints an `Answer` in JSON
for each. It is a process of its own because families load torch, which the page does not import. It keeps running for
the next line, since loading takes seconds and measuring does not. See DECISIONS 82.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.config.sections import fill_trigger
from trainer.data.images.image_files import CaptionedImage, scan
from trainer.data.images.measured import Answer, CutCaption, Measured
from trainer.models import families
from trainer.models.base import ImageFamily, TextLength
from trainer.run.folder import shared_cache
from trainer.system.errors import InputError
from trainer.system.terminal import say

SHOWN_BEFORE = 60
"""Characters before a cut that are shown with it."""


def measure(family: ImageFamily, cfg: RunConfig, images: Sequence[CaptionedImage]) -> Measured:
    """Compare the captions and prompts of a run with the lengths its model reads. Loads the family's tokenizers."""
    filled = [fill_trigger(text, cfg.data.trigger) for text in cfg.sample.prompts]
    prompts = {f"sample.prompts.{number}": text for number, text in enumerate(filled)}
    prompts["sample.negative"] = cfg.sample.negative
    own = [(image, caption) for image in images for caption in image.captions]
    distinct = list(dict.fromkeys([*(caption for _, caption in own), *prompts.values()]))
    lengths = dict(zip(distinct, family.text_lengths(distinct), strict=True))
    captions = [(image, caption, lengths[caption]) for image, caption in own]
    sentences = []
    if cut := [one for one in captions if _is_cut(one[2])]:
        count = f"1 of {len(captions)} captions is" if len(cut) == 1 else f"{len(cut)} of {len(captions)} captions are"
        first, _, texts = cut[0]
        sentences.append(
            f"{count} longer than the model reads, and the end is truncated: first {first.path} "
            f"{_figures(texts)}; {_remedy(family, [texts for *_, texts in cut])}"
        )
    if partly := [texts for *_, texts in captions if not _is_cut(texts) and any(text.is_cut for text in texts)]:
        sentences.append(_partly_read(partly))
    if fields := {field: lengths[text] for field, text in prompts.items() if _is_cut(lengths[text])}:
        field, texts = next(iter(fields.items()))
        sentences.append(
            f"{', '.join(fields)}: longer than the model reads, and the end is truncated: {field} {_figures(texts)}; "
            f"{_remedy(family, fields.values())}"
        )
    found = tuple(_cut_caption(image, caption, _furthest(texts)) for image, caption, texts in cut)
    return Measured(found, tuple(sentences))


def _is_cut(lengths: Sequence[TextLength]) -> bool:
    """Whether every encoder cuts the text."""
    return bool(lengths) and all(length.is_cut for length in lengths)


def _furthest(lengths: Sequence[TextLength]) -> TextLength:
    """The length for the encoder that reads the largest part of a text."""
    return max(lengths, key=lambda length: length.read / length.needed)


def _cut_caption(image: CaptionedImage, caption: str, length: TextLength) -> CutCaption:
    before = caption.strip().removesuffix(length.rest)[-SHOWN_BEFORE:]
    return CutCaption(str(image.path), length.encoder, length.needed, length.read, before, length.rest)


def _figures(lengths: Sequence[TextLength]) -> str:
    length = _furthest(lengths)
    return f"with {length.needed} tokens, of which {length.encoder} reads {length.read}"


def _remedy(family: ImageFamily, cut: Collection[Sequence[TextLength]]) -> str:
    """The remedy for the longest text."""
    shorten = "shorten it" if len(cut) == 1 else "shorten them"
    longest = max(cut, key=lambda lengths: max(length.needed for length in lengths))
    settings = [setting for length in longest if (setting := family.longer_text(length))]
    return f"{shorten}, or set {settings[0]}" if settings else shorten


def _partly_read(texts: Sequence[Sequence[TextLength]]) -> str:
    """A sentence about captions that one encoder reads whole and another cuts."""
    count = "1 caption is" if len(texts) == 1 else f"{len(texts)} captions are"
    whole = next(length.encoder for length in texts[0] if not length.is_cut)
    cut = ", ".join(f"{length.encoder} the first {length.read} tokens" for length in texts[0] if length.is_cut)
    return f"{count} read whole by {whole} only: {cut}; shorten what all of them should read"


def answer(config: Path, runs: Path) -> Answer:
    """Measure the captions of a config file for its model. runs: the folder of runs."""
    try:
        cfg = load_config(config).config
        family = families.make(cfg, shared_cache(cfg, runs))
        if not isinstance(family, ImageFamily):
            return Answer(Measured((), ()))
        dataset = scan(cfg.data)
        return Answer(measure(family, cfg, (*dataset.train, *dataset.validation)))
    except (InputError, OSError) as error:
        return Answer(failure=str(error))


def main() -> None:
    """Answer every line of standard input."""
    for line in sys.stdin:
        say(json.dumps(dataclasses.asdict(answer(Path(line.rstrip("\n")), Path(sys.argv[1])))))


if __name__ == "__main__":
    main()
