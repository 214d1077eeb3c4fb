"""What a run of a user's own images needs: name, trigger word, prompts, model, preset, and who writes the captions.

The page shows each proposal as a line that can be changed; a notebook may call the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from app.data import captions
from app.data.scans import ScanResult
from app.form import draft as form
from app.form.draft import Checked, Draft
from app.form.model_choices import ModelChoice, PresetChoice
from trainer.config import families
from trainer.config.models import captioners, published_models
from trainer.config.sections import NAME_PATTERN, TRIGGER_PLACE, ModelConfig, as_name, has_trigger_place
from trainer.launcher import preflight
from trainer.launcher.jobs.captioning import check_model
from trainer.run.captioning import jobs
from trainer.system.errors import InputError

MOST_WORD = 64
"""Letters of the word for what the images show, as of a run's name."""
NAMELESS = "my-pictures"
"""Name of a run whose word has no letter that a name may have, such as a Chinese one."""
NUM_PROMPTS = 4
MOST_READ = 32
"""Captions that are read for them: those of a thousand images may be the same."""
MOST_LETTERS = 300
"""Of a caption that is longer, the first words are the prompt."""


@dataclass(frozen=True)
class Writer:
    """A model that writes captions.

    Attributes:
        model: As of a `CaptionRequest`.
        seconds: Time of an image in its latest job here; 0 where it has written none.
        num_bytes: What is downloaded first; 0 for one on this machine.
        licence: Of one that is downloaded first, with its meaning.
    """

    model: str
    seconds: float
    num_bytes: int = 0
    licence: str = ""


def named(word: str) -> dict[str, Any]:
    """Return {field: value} of name and trigger word for images that a person calls by a word.

    Raises:
        InputError: Nothing can be called by it.
    """
    plain = "".join(filter(str.isprintable, " ".join(word.split()))).strip()
    if not plain:
        raise InputError("One word for what the pictures show is missing: write one, such as milo or inkstyle")
    if len(plain) > MOST_WORD:
        raise InputError(f"The word has {len(plain)} letters, the limit is {MOST_WORD}: write one such as milo")
    if not any(map(str.isalnum, plain)):
        raise InputError(f"'{plain}' has neither a letter nor a digit: write a word, such as milo or inkstyle")
    name = str(as_name(plain))
    name = name if re.fullmatch(NAME_PATTERN, name) else NAMELESS
    is_whole = sum(map(str.isalnum, name)) == sum(map(str.isalnum, plain))
    return {"name": name, "data.trigger": (name if is_whole else plain).lower()}


def fitting(models: Sequence[ModelChoice]) -> PresetChoice | None:
    """Return the preset to train images with: the fastest of the best model that fits this machine.

    A model that is here goes before one to download, one without a login before one with, the demo model last. None
    where no model of images fits.

    Args:
        models: As `ModelChoices.all` returns them.
    """

    def rank(choice: ModelChoice) -> tuple[bool, bool, bool]:
        known = published_models().get(choice.path)
        return choice.is_built_in, not _is_here(choice), known is not None and known.is_gated

    fits = [choice for choice in of_images(models) if choice.fits]
    return min(fits, key=rank).presets[0] if fits else None


def of_images(models: Sequence[ModelChoice]) -> list[ModelChoice]:
    """Return the models that are trained on images, those that this machine can train first."""
    found = [choice for choice in models if (facts := families.of(choice.family)) and facts.trains_on == "images"]
    return sorted(found, key=lambda choice: not choice.fits)


def model_note(models: Sequence[ModelChoice], preset: str) -> str:
    """Return what the choice of a preset takes: GPUs, time, a download, a login, a licence; "" for an unknown one."""
    images = of_images(models)
    for choice in images:
        for one in choice.presets:
            if one.name != preset:
                continue
            known = published_models().get(choice.path)
            said = [": ".join(filter(None, (one.needs, one.cost)))]
            if known and not _is_here(choice):
                said += [f"{known.num_bytes / 1e9:.0f} GB to download, which Start does first", known.login_advice]
            if choice.is_built_in and (larger := sum(not other.fits for other in images)):
                said.append(f"{larger} of the other models need more than this machine has")
            said.append(f"Licence: {known.licence}" if known and known.licence else "")
            return " ".join(f"{text[0].upper()}{text[1:].rstrip('.')}." for text in said if text)
    return ""


def _is_here(choice: ModelChoice) -> bool:
    model = ModelConfig(family=choice.family, path=choice.path, base=choice.base)
    return choice.is_built_in or preflight.has_model(model)


def writers(runs: Path) -> list[Writer]:
    """Return the models that can write captions: first those that are here, the one that did last before others, then
    those to download, the smallest first, and last the demo's, of pictograms."""
    seconds: dict[str, float] = {}
    for job in jobs(runs):
        model = job.request.model
        if not seconds.get(model):
            times = [line.seconds for line in job.captions().read() if line.caption]
            seconds[model] = sum(times) / len(times) / job.request.ranks if times else 0.0
    here, offered = [], []
    for model in dict.fromkeys([*(model for model in seconds if model != "demo"), *captioners()]):
        writer = Writer(model, seconds.get(model, 0.0))
        try:
            check_model(model)
            here.append(writer)
        except InputError:  # not on this machine, or not any more
            if known := captioners().get(model):
                offered.append(replace(writer, num_bytes=known.num_bytes, licence=known.licence_note))
    return [*here, *offered, Writer("demo", seconds.get("demo", 0.0))]


def completed(checked: Checked, found: ScanResult) -> dict[str, str]:
    """Return what `proposed` does, and fewer held-out images where a preset would hold out most of a few."""
    held_out, count, values = checked.config.data.validation, len(found.images), dict[str, str]()
    if isinstance(held_out, int) and "data.validation" not in checked.draft.values and 3 * held_out > count > 0:
        values["data.validation"] = str(count // 5)
        found = replace(found, held_out=frozenset(found.images[count - count // 5 :]))  # the last ones, as in a run
    return proposed(checked, found) | values


def with_proposals(checked: Checked, found: ScanResult) -> Draft:
    """Return the draft with all that is proposed for its images."""
    return form.edited(checked.draft, completed(checked, found))


def proposed(checked: Checked, found: ScanResult) -> dict[str, str]:
    """Return {field: value, as typed} for images that are not the preset's. Fields that somebody has set stay as set.

    The name and the trigger word are the folder's name. The prompts are captions of held-out images, whose samples can
    be compared with the images; then others. A preset without a trigger word gets none.

    Args:
        checked: The draft.
        found: What was read in its folder.
    """
    data, typed = checked.config.data, checked.draft.values
    if "data.path" not in typed or not found.images or families.trains_on(checked.config) == "text":
        return {}
    word = str(as_name(Path(data.path or "").name))
    word = word if re.fullmatch(NAME_PATTERN, word) else ""  # of signs alone, none is left
    trigger = word.lower() if data.trigger else ""
    prompts = [] if "sample.prompts" in typed else list(_prompts(found, bool(data.trigger)))
    values = {"name": word, "data.trigger": trigger, "sample.prompts": "\n".join(prompts)}
    own = {"name": checked.config.name, "data.trigger": data.trigger}
    return {field: value for field, value in values.items() if value and field not in typed and value != own.get(field)}


def _prompts(found: ScanResult, is_triggered: bool) -> Iterator[str]:
    """Yield the first NUM_PROMPTS different captions as prompts, those of held-out images first."""
    yielded: set[str] = set()
    held_out = (image for image in found.images if image in found.held_out)
    others = (image for image in found.images if image not in found.held_out)
    for image in islice(chain(held_out, others), MOST_READ):
        try:
            caption = captions.saved(image) or found.listed.get(image, "")
        except InputError:  # the problems of the data name it
            continue
        prompt = "".join(filter(str.isprintable, " ".join(caption.split())))
        if len(prompt) > MOST_LETTERS:
            cut = prompt[:MOST_LETTERS]
            words = cut.rpartition(" ")[0]
            prompt = words if len(words) > MOST_LETTERS // 2 else cut  # Chinese and Japanese have no spaces
        if is_triggered and not has_trigger_place(prompt):  # as the trainer completes a caption
            prompt = f"{TRIGGER_PLACE}, {prompt}" if prompt else TRIGGER_PLACE
        if prompt and prompt not in yielded:
            yielded.add(prompt)
            yield prompt
        if len(yielded) == NUM_PROMPTS:
            return
