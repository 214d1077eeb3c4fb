"""Name, trigger word and prompts for a user's own images, in place of those that a preset has for others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from app.data import captions
from app.data.scans import ScanResult
from app.form.draft import Checked
from trainer.config import families
from trainer.config.sections import NAME_PATTERN, TRIGGER_PLACE, as_name, has_trigger_place
from trainer.system.errors import InputError

NUM_PROMPTS = 4
MOST_READ = 32
"""Captions that are read for them: those of a thousand images may be the same."""
MOST_LETTERS = 300
"""Of a caption that is longer, the first words are the prompt."""


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
            prompt = prompt[:MOST_LETTERS].rpartition(" ")[0]
        if is_triggered and not has_trigger_place(prompt):  # as the trainer completes a caption
            prompt = f"{TRIGGER_PLACE}, {prompt}" if prompt else TRIGGER_PLACE
        if prompt and prompt not in yielded:
            yielded.add(prompt)
            yield prompt
        if len(yielded) == NUM_PROMPTS:
            return
