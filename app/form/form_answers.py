"""The form as JSON, for the page's script: fields in words, values, errors, the plan, and the config as text."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from app.data import folders
from app.data.scans import ScanResult
from app.form import draft as form
from app.form.draft import Checked
from app.form.plan_preview import PlanPreview
from app.form.proposals import proposed
from trainer.config import families
from trainer.config.fields import Slot, all_names, label, slot, unit
from trainer.config.foreign.imported import words_of
from trainer.config.load import COMMAND_LINE, dump_config, load_config_text, similar_name
from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, Section
from trainer.launcher import capacity, preflight
from trainer.launcher.jobs.downloads import DownloadState
from trainer.plan import picture
from trainer.plan.memory import MemoryPlan, verdict
from trainer.plan.picture import Limit, Outline
from trainer.plan.search.ladder import nothing_left
from trainer.plan.simulate.phases import Item, by_kind, moment
from trainer.run.length import RunLength
from trainer.system.amounts import counted, rounded_size
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

if TYPE_CHECKING:
    from app.studio import Studio

MOST_SHAPES = 4
MOST_TOLD = 20
"""Problems and warnings of the images that are listed."""
LINE = re.compile(r"^\S*?:(\d+): ?(.*)$")
REMEDY = re.compile(r"\b(?:set|or) ([a-z]+\.[a-z_.]*[a-z]): (\w[\w.]*\b)")
"""A field and a value that a sentence tells people to set."""


ON_CARDS: Mapping[str, tuple[str, str]] = {
    "name": ("Of the run, and of the file it ends with.", ""),
    "data.path": (
        "Each image with its caption in a .txt file of the same name.",
        "A folder or file: a document in each .txt file, or in each row of other files, such as .jsonl and .parquet.",
    ),
    "data.trigger": ("A word that means nothing yet. It is put where a caption says [trigger].", ""),
    "data.validation": (
        "Images that are not trained on, to measure progress: a number, or a folder.",
        "A file or folder of texts that are not trained on, to measure progress.",
    ),
    "data.resolution": ("Images are scaled to about this value squared.", ""),
    "train.batch_size": ("Images per step, of all GPUs together.", "Texts per step, of all GPUs together."),
    "sample.prompts": (
        "One a line. Samples show how far the run is; [trigger] becomes the trigger word.",
        "One a line. The model goes on from each, to show how far the run is.",
    ),
    "model.path": (
        "A diffusers folder, a single .safetensors or .sft file, a downloaded Hugging Face id, demo (a small built-in "
        "model that generates pictograms of 64 x 64 pixels), or tiny (random weights, trains in seconds on a CPU).",
        "A transformers folder, a downloaded Hugging Face id, or random for random weights in the full size of "
        "model.options.architecture or model.base.",
    ),
    "train.micro_batch": (
        "Images per rank and forward pass. Gradients are accumulated until train.batch_size is reached.",
        "Sequences of text per rank and forward pass. Gradients are accumulated until train.batch_size is reached.",
    ),
    "sample.every": (
        "Steps between two sets of sample images. 0 = no samples.",
        "Steps between two sets of sample texts. 0 = no samples.",
    ),
    "objective.dpo_beta": (
        "Preference training (DPO, arXiv 2311.12908) on pairs of a preferred and a rejected image: how strongly the "
        "adapter is kept near the base model, usually 2000 to 5000. Empty: off.",
        "Preference training (DPO, arXiv 2305.18290) on pairs of a preferred and a rejected answer: how strongly the "
        "adapter is kept near the base model, usually 0.1. Empty: off.",
    ),
}
"""{field: (help in the form, the same for texts)}, where it is shorter than the field's own, which speaks of all
families."""


def _field(name: str) -> dict[str, Any]:
    spec = slot(tuple(name.split(".")))
    assert spec is not None, name
    return {
        **_facts(spec, name),
        "words": " ".join((spec.keywords, *spec.words, words_of(name))),
        "kind": form.kind_of(name),
        "group": form.group_of(name),
        "is_front": name in form.MOST_USED,
        "help_on_card": ON_CARDS.get(name, ("", "")),
        "suggested": list(spec.words) if form.kind_of(name) == "text" else [],
        "columns": _columns(name),
    }


def _columns(name: str) -> list[dict[str, Any]]:
    """The fields of each entry of a list of sections; empty for any other field. `default` is the value of an empty
    input, `is_list` whether several values are separated by commas."""
    section = _section_of(name)
    if section is None:
        return []
    return [
        {
            **_facts(column, f"{name}.{key}"),
            "key": key,
            "label": column.title or key.replace("_", " ").capitalize(),
            "default": section.model_fields[key].default if column.options == (float,) else None,
            "is_list": get_origin(column.annotation) is tuple,
            "is_switch": bool in column.options,
        }
        for key in section.model_fields
        if (column := Slot(section).child(key)) is not None
    ]


def _section_of(name: str) -> type[Section] | None:
    """The section of each entry of a field that is a list of sections."""
    spec = slot((*name.split("."), 0))
    return spec.sections[0] if spec is not None and spec.sections else None


def _facts(spec: Slot, name: str) -> dict[str, Any]:
    bounds = {limit.symbol: limit.bound for limit in spec.limits}
    # "int" or "float" for a field that takes nothing but a number, else "".
    options = [option for option in spec.options if option in (int, float)]
    return {
        "label": label(name),
        "help": spec.help.replace("`", ""),  # shown as plain text
        "unit": unit(name),
        "number": options[0].__name__ if len(options) == len(spec.options) == 1 else "",
        "min": bounds.get(">=", bounds.get(">")),
        "max": bounds.get("<=", bounds.get("<")),
        "path": spec.path,
    }


FIELDS: Mapping[str, Mapping[str, Any]] = {name: _field(name) for name in all_names() if name != "stages"}
GROUPS: Mapping[str, str] = {
    "Model": "family, components, quantization",
    "Adapter": "layers, alpha, dropout",
    "Data": "captions, shapes, masks, validation",
    "Training": "optimizer, schedule, batch, seed, timesteps",
    "Sampling": "size, steps, guidance, negative prompt",
    "Saving": "checkpoints, export, trackers",
    "Hardware": "GPUs, sharding, offload, precision",
    "Cluster": "machines, SLURM, Kubernetes",
}
"""{group: what is in it}"""
METHODS = [[kind, adapter.title, adapter.line] for kind, adapter in ADAPTERS.items()]


def rows(checked: Checked) -> dict[str, dict[str, Any]]:
    """Return {field: what its input shows}; what is empty or false is left out."""
    changed = _changed(checked)
    return {
        row.field: {
            "value": row.value,
            **({"entries": _entries(row.field, checked)} if FIELDS[row.field]["columns"] else {}),
            **({"error": row.error} if row.error else {}),
            **({"choices": row.choices} if row.kind == "choice" else {}),
            **({} if row.is_visible else {"hidden": True}),
            **({"placeholder": row.placeholder} if row.placeholder else {}),
            **({"changed": True} if row.field in changed else {}),
        }
        for row in form.rows(checked)
    }


def _entries(name: str, checked: Checked) -> list[dict[str, Any]]:
    """The sections in a list as they were typed, without what is as by default."""
    typed = checked.draft.values.get(name, form.value_at(checked.config.model_dump(mode="json"), name))
    section = _section_of(name)
    defaults = section.model_construct().model_dump(mode="json") if section else {}
    return [
        {key: value for key, value in entry.items() if value not in (None, "", [], defaults.get(key))}
        for entry in (typed if isinstance(typed, list) else [])
        if isinstance(entry, dict)
    ]


def _changed(checked: Checked) -> dict[str, tuple[Any, Any]]:
    """{field: (preset's value, value)} of what differs from the preset, also of values that are wrong."""
    before = checked.preset.config.model_dump(mode="json")
    typed = {name: (form.value_at(before, name), value) for name, value in checked.draft.values.items()}
    wrong = {name: pair for name, pair in typed.items() if name in checked.errors and pair[0] != pair[1]}
    return {**checked.changes, **wrong}


def errors(checked: Checked, downloads: Mapping[str, DownloadState]) -> list[dict[str, str]]:
    """Return what keeps the run from starting, each with the field to go to.

    Of a model that is offered for download, it says only that.
    """
    sentences, model = dict(checked.errors), checked.config.model
    known = published_models().get(model.path or "")
    is_offered = known is not None and known.download_command and "model.path" not in _changed(checked)
    if "model.path" in sentences and known and is_offered and not preflight.has_model(model):
        is_running = known.id in downloads and downloads[known.id].is_running
        size = rounded_size(known.num_bytes)
        sentences["model.path"] = (
            f"{known.name} is being downloaded."
            if is_running
            else f"{known.name} is not on this machine yet; download it on the first card, {size}."
        )
    return [{"field": name, "label": label(name) if name else "", "text": text} for name, text in sentences.items()]


def looked_at(found: Mapping[str, Any] | None, gpus: Sequence[Gpu]) -> str:
    """Return what was checked of a form that is ready. found: what `data` returns."""
    data = counted(found["num_images"], "picture") if found and found["num_images"] else "data"
    return f"Checked: model, {data}, {counted(len(gpus), 'GPU') if gpus else 'CPU'}, disk."


def remedies(sentences: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """Return {sentence: the changes that it names}, as "set data.missing_caption: empty" in an error or a warning.

    A change is a field, its label, and one of the field's words, or a number, as it is typed.
    """
    found = {}
    for sentence in sentences:
        named = [(name, word) for name, word in REMEDY.findall(sentence) if name in FIELDS and _takes(name, word)]
        if named:
            found[sentence] = [{"field": name, "label": label(name), "value": word} for name, word in named]
    return found


def _takes(name: str, word: str) -> bool:
    """Whether a field takes a word that a sentence names: a text may be a placeholder, or a path."""
    spec = slot(tuple(name.split(".")))
    return spec is not None and (word in spec.words or (word.isdigit() and int in spec.options))


def notes(checked: Checked) -> list[str]:
    """Return remarks of the config, for example on a field that was renamed."""
    return [text.removeprefix(f"{COMMAND_LINE}: ") for text in checked.loaded.notes]


def changes(checked: Checked) -> list[dict[str, str]]:
    """Return what differs from the preset, in words."""
    return [
        {"field": name, "label": label(name), "old": field_in_words(name, old), "new": field_in_words(name, new)}
        for name, (old, new) in _changed(checked).items()
    ]


def field_in_words(name: str, value: Any) -> str:
    """Return the value of a field as the form writes it. Where it is a number or a share, all is 1.0 and not 1."""
    if name == "sample.size":
        return " × ".join(map(str, value))
    spec = slot(tuple(name.split(".")))
    is_share = isinstance(value, float) and spec is not None and int in spec.options
    return str(value) if is_share else in_words(value)


def in_words(value: Any) -> str:
    """Return a value as the form writes it: yes, no, `512, 768`, and `–` for empty."""
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {in_words(inner)}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def config_text(checked: Checked) -> dict[str, Any]:
    """Return the config as YAML, and the lines that differ from the preset."""
    text, changed = dump_config(checked.config), checked.changes
    origins = _origins(text) if changed else {}
    lines = [int(origins[name].rpartition(":")[2]) for name in changed if ":" in origins.get(name, "")]
    return {"yaml": text, "marks": sorted(set(lines))}


@lru_cache(4)
def _origins(text: str) -> Mapping[str, str]:
    """{field: file and line} of a config as YAML."""
    return load_config_text(text, (), Path("config.yaml")).origins


def by_line(message: str) -> list[dict[str, Any]]:
    """Return the sentences of a config's error, each with the line of the text that it is about; 0 for none."""
    found = []
    for sentence in message.splitlines():
        match = LINE.match(sentence)
        found.append({"line": int(match[1]) if match else 0, "text": match[2] if match else sentence})
    return found


def plan(
    preview: PlanPreview, cfg: RunConfig, gpus: list[Gpu], steps: Sequence[int | None], whole: Sequence[float] | None
) -> dict[str, Any]:
    """Return the memory of each GPU by kind, whether it fits, and what would make it fit.

    Args:
        preview: The plan.
        cfg: Its config.
        gpus: The GPUs of this machine.
        steps: Steps of each stage; None where they are not known.
        whole: Least and most seconds of the whole run; None where they are not known.
    """
    answer: dict[str, Any] = {
        "note": preview.note,
        "can_record": preview.can_record,
        "can_verify": preview.can_verify,
        "checked": preview.checked,
        "is_waiting": preview.is_waiting,
        "has_failed": preview.has_failed,
        "share": preview.share,
        "steps": 0 if None in steps else sum(number or 0 for number in steps),
        "length": str(RunLength(cfg)),
        "fixes": [
            {
                "text": str(fix),
                "changes": {name: form.as_typed(name, value) for name, value in fix.changes.items()},
                "effect": "" if fix.effect == "same" else fix.in_words,
            }
            for fix in preview.fixes
        ],
    }
    found = preview.plan
    if found is None:
        return answer
    lack = f"; {nothing_left(cfg)}" if found.verdict == "does not fit" and not preview.fixes else ""
    on_cpu = found.card is None and cfg.parallel.device == "cpu"
    sizes = [[kind, size] for kind, size in kinds(found) if not on_cpu or kind != "reserve"]  # it is CUDA's
    return answer | {
        "on_cpu": on_cpu,
        "need": sum(size for _, size in sizes),
        "limit": found.card.memory if found.card else None,
        "card": found.card.name if found.card else "",
        "verdict": found.verdict or "",
        "sentence": "" if on_cpu else verdict(found) + lack,
        "kinds": sizes,
        "items": [_item(item) for item in found.fullest.items if not on_cpu or item.name != "reserve"],
        "moment": moment(found.fullest),
        "phases": [{"name": phase.name, "need": phase.need} for phase in found.phases],
        "strategy": found.strategy,
        "host": [_item(item) for item in found.host],
        "disk": [_item(item) for item in found.disk],
        "seconds": [found.time.low, found.time.high] if found.time else None,
        "speed": found.time.origin if found.time else "",
        "whole": list(whole) if whole else None,
    }


def step(found: MemoryPlan, drawn: Outline, cfg: RunConfig) -> dict[str, str]:
    """Return the memory over a training step as a picture, and as a sentence."""
    limit = Limit() if found.card is None and cfg.parallel.device == "cpu" else Limit.of(found)
    return {"picture": picture.draw(drawn, limit, picture.SMALL), "sentence": picture.sentence(drawn, limit)}


def kinds(found: MemoryPlan) -> list[list[Any]]:
    """Return [kind, bytes] of the fullest moment, in a fixed order."""
    sizes = by_kind({item.name: item.size for item in found.fullest.items})
    return [[kind, size] for kind, size in sizes.items() if size]


def _item(item: Item) -> dict[str, Any]:
    return {"name": item.name, "size": item.size, "text": item.sentence}


def disk(preview: PlanPreview, cfg: RunConfig, runs: Path) -> dict[str, Any]:
    """Return the bytes that are free where the runs are or will be, and those that the run will take; 0 if unknown."""
    need = capacity.disk_need(cfg, preview.plan) if preview.plan else 0.0
    free = shutil.disk_usage(next(folder for folder in (runs, *runs.parents) if folder.is_dir())).free
    return {"free": int(float(f"{free:.2g}")), "need": need}  # two digits: every change makes the windows draw anew


def earlier(studio: Studio, cfg: RunConfig, steps: Sequence[int | None]) -> dict[str, Any]:
    """Return the time of the run as an earlier one of its kind took it; only `is_looking` where none is known."""
    found = studio.earlier.estimate(cfg, steps)
    return asdict(found) if found else {"is_looking": studio.earlier.is_looking}


def data(studio: Studio, checked: Checked) -> dict[str, Any] | None:
    """Return what was found in the draft's folder; None while it is not known or cannot be read."""
    if not checked.is_scanned and any(name.startswith("data.") for name in checked.errors if name != "data.path"):
        return None
    if "data.path" in checked.errors and not os.path.isdir(checked.config.data.path or ""):
        return None
    found = studio.scans.of(checked.config)
    return {
        "is_complete": found.is_complete,
        "badge": _badge(found, families.trains_on(checked.config) == "text"),
        "facts": list(_in_words(found)),
        "num_images": len(found.images),
        "problems": list(found.problems[:MOST_TOLD]),
        "others": [text for text in found.problems[:MOST_TOLD] if not any(map(text.endswith, checked.errors.values()))],
        "warnings": list(found.warnings[:MOST_TOLD]),
    }


def _badge(found: ScanResult, is_text: bool) -> tuple[str, str]:
    """Return the mood and the words of the mark on the card."""
    if not found.is_complete:
        return "acc", f"reading: {found.num_files:,} files"
    if is_text:
        return "ok", f"{counted(len(found.texts), 'file')}, {rounded_size(sum(found.texts.values()))}"
    wrong = f", {counted(len(found.problems[:MOST_TOLD]), 'problem')}" if found.problems else ""
    mood = "bad" if wrong else "ok" if found.images else "warn"
    return mood, f"{counted(len(found.images), 'picture')}{wrong}"


def _in_words(found: ScanResult) -> Iterator[tuple[str, str]]:
    """Yield what was found, each as its first words and the rest of its sentence."""
    if not found.is_complete:
        return
    if found.buckets:
        most = sorted(found.buckets.items(), key=lambda item: -item[1])[:MOST_SHAPES]
        sizes = [f"{' × '.join(map(str, size.frame))} ({count})" for size, count in most]
        yield counted(len(found.buckets), "shape"), " · ".join(sizes)
    if found.held_out:
        yield f"{len(found.held_out)} held out", "to measure progress"
    if found.num_questions:
        yield counted(found.num_questions, "question"), ""


def proposals(checked: Checked, found: ScanResult) -> list[dict[str, str]]:
    """Return what `proposals.proposed` offers for the draft's own images, with the labels of the fields."""
    offered = proposed(checked, found)
    return [{"field": name, "label": label(name), "value": value} for name, value in offered.items()]


def kept_words(checked: Checked, offered: Sequence[Mapping[str, str]]) -> str:
    """Return in a sentence which words of the preset the draft still has for other images; empty without.

    Args:
        checked: The draft.
        offered: What `proposals` returns.
    """
    if not offered:
        return ""
    config = checked.config
    values = {"name": config.name, "data.trigger": config.data.trigger}
    kept = [" ".join(filter(None, (one["label"].lower(), values.get(one["field"])))) for one in offered]
    return f"These pictures would be trained with the preset's words: {', '.join(kept)}."


def glance(path: str) -> dict[str, Any]:
    """Return {"images", "captions", "folders"} of a folder that is being typed, or {"wrong": reason}.

    Only that one folder is listed; the one above it where it does not exist, for a similar name.
    """
    if not path.strip():
        return {"wrong": ""}
    try:
        return _glance(path, folders.typed_folder(path))
    except InputError as error:
        return {"wrong": str(error)}


def _glance(path: str, folder: Path) -> dict[str, Any]:
    if os.path.isfile(folder):
        return {"wrong": f"'{path}' is a file; name the folder with the images"}
    if not os.path.isdir(folder):
        return {"wrong": f"no folder '{path}'{similar_name(folder)}"}
    found = folders.listed(folder)
    more = "+" if found.is_cut else ""
    return {
        "images": f"{found.num_images}{more}",
        "captions": f"{found.num_captions}{more}",
        "folders": len(found.folders),
    }
