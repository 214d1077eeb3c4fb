"""The model card of a run: the README.md of its repository on the Hugging Face hub. No torch.

It says nothing of the machine: no paths, no names of users or hosts. Prompts of the newest samples are in it.
"""

from __future__ import annotations

import glob
import html
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config import yaml12
from trainer.config.families import FamilyFacts, of, trains_on
from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.sections import HUB_ID, MODEL_WORDS, LowRankAdapter, NoAdapter, RankAdapter
from trainer.config.titles import METHODS, size_title
from trainer.data.images import image_files
from trainer.data.text import text_files
from trainer.run import stages
from trainer.run.events import EventReader, ExportEvent, SampleEvent, latest_steps
from trainer.run.folder import RunDir
from trainer.run.samples import FilmedPrompt, film_of
from trainer.system import files
from trainer.system.errors import InputError

PROJECT = "ShardStudio"
SAMPLE_FOLDER = "samples"
OFFERED = "downloads"
"""Folder next to the runs with a hard link to each export that was downloaded from the page."""
SECOND_NAME = (
    "has a second name (a hard link), so that it may be a file from outside the run; export again, or put a copy in "
    "its place"
)
MOST_BYTES = 2**27
"""The largest published tokenizer.json has 33 MB."""
RELATIONS = {"adapter": "adapter", "merged": "merge", "full": "finetune"}
"""{export.what: `base_model_relation` of the hub's model cards}"""
PACKAGES = ("shardstudio", "torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Published:
    """The published part of a run.

    Attributes:
        what: adapter, merged or full.
        format: `export.format` of the exports.
        exports: The exported files and folders, the main one first.
        step: Optimizer steps of the main one.
        samples: The newest sample of each prompt that is not of a later step.
        film: The film of the run, by prompt.
    """

    what: str
    format: str
    exports: tuple[Path, ...]
    step: int
    samples: tuple[SampleEvent, ...]
    film: tuple[FilmedPrompt, ...] = ()

    def files(self, run: RunDir) -> dict[str, Path]:
        """Return {path in the repository: file} of exports, film, and samples that are not read in the card itself.

        Raises:
            InputError: A file leads out of the run, or is a second name of what may be outside.
        """
        found: dict[str, Path] = {}
        for export in self.exports:
            inside = sorted(file for file in export.rglob("*") if file.is_file()) if export.is_dir() else [export]
            found |= {str(file.relative_to(export.parent)): file for file in inside}
        found |= {name_of(sample): run.own_file(sample.path) for sample in self.samples if not sample.kind.is_text}
        found |= {f"{run.film.name}/{name}": run.film / name for one in self.film for name in one.files}
        for file in found.values():
            if files.leads_out(file, run.path):
                raise InputError(f"{file}: leads out of the run folder; remove it, and nothing of it is uploaded")
            if _has_second_name(file, run.path.parent / OFFERED):
                raise InputError(f"{file}: {SECOND_NAME}")
        return found


def _has_second_name(file: Path, offered: Path) -> bool:
    """Whether a file has hard links in addition to those by which the page offers exports for download."""
    status = file.stat()
    if status.st_nlink == 1:
        return False
    names = (link for folder in offered.glob("*") for link in folder.glob(glob.escape(file.name)))
    return status.st_nlink > 1 + sum(os.path.samestat(status, name.lstat()) for name in names)


def published(run: RunDir) -> Published:
    """Return the newest exports of a run that are all of the same kind, the samples of their time, and its film.

    Raises:
        InputError: Nothing was exported, the files are gone, or what they are is not known.
    """
    events = EventReader(run.events_file).read()
    home = run.export.resolve()
    exports: dict[Path, ExportEvent] = {}
    for event in events:
        if isinstance(event, ExportEvent):
            file = run.own_file(event.path)
            exports.pop(file, None)
            if file.exists() and file.is_relative_to(home):
                exports[file] = event
    if not exports:
        raise InputError(f"{run.path}: nothing was exported, or the files are gone; export the run first")
    newest = list(exports.values())[-1]
    if newest.what not in RELATIONS:
        known = ", ".join(RELATIONS)
        raise InputError(f"{run.events_file}: an export of {newest.what!r}; only exports of {known} have a model card")
    same = [file for file, event in exports.items() if (event.what, event.format) == (newest.what, newest.format)]
    trained = latest_steps(events)
    step = newest.step or (trained[-1].step if trained else 0)
    samples = [event for event in events if isinstance(event, SampleEvent)]
    samples = [sample for sample in samples if sample.step <= step] or samples
    last = max((sample.step for sample in samples), default=0)
    latest = {sample.index: sample for sample in samples if sample.step == last}
    shown = tuple(sample for _, sample in sorted(latest.items()) if _is_shown(run, sample))
    film, filmed = film_of(run), []
    for one in film.prompts:
        with suppress(InputError):  # removed or changed since it was made
            for name in one.files:
                film.file(run, name)
            filmed.append(one)
    return Published(newest.what, newest.format, tuple(same[::-1]), step, shown, tuple(filmed))


def _is_shown(run: RunDir, sample: SampleEvent) -> bool:
    kind = sample.kind
    return kind.is_text or (sample.path.endswith(kind.suffix) and run.own_file(sample.path).is_file())


def name_of(sample: SampleEvent) -> str:
    """The path of a sample's file in the repository."""
    return f"{SAMPLE_FOLDER}/{Path(sample.path).name}"


def model_card(run: RunDir, repo: str = "OWNER/NAME", licence: str | None = None) -> str:
    """Return the model card of a run: Markdown with YAML in front, as the hub reads it.

    Args:
        run: A run with an export.
        repo: The repository that the card is for.
        licence: Licence as the hub names it, for example `apache-2.0`; None for that of the base model, where it is
            known.

    Raises:
        InputError: As `published`.
    """
    what, cfg = published(run), stages.current(run, run.config()).config
    card = _Card(run, cfg, what, base_of(run, what), repo)
    front = yaml12.dump(card.front(licence))
    parts = [f"---\n{front}---", f"# {_plain(cfg.name)}", *card.sections()]
    return "\n\n".join(parts) + "\n"


def base_of(run: RunDir, what: Published) -> str | None:
    """Return the hub id of the base model; None for one that is not on the hub.

    A merged or full model comes from the base of the first stage. An adapter may belong to the result of a stage.
    """
    cfg = run.config()
    if what.what == "adapter":
        cfg = stages.current(run, cfg).config
    for path in (cfg.model.path, cfg.model.base):
        if path and path not in MODEL_WORDS and HUB_ID.fullmatch(path):
            return path
    return None


@dataclass(frozen=True)
class _Card:
    """base: hub id of the base model, if it has one."""

    run: RunDir
    cfg: RunConfig
    what: Published
    base: str | None
    repo: str

    @property
    def is_text(self) -> bool:
        return trains_on(self.cfg) == "text"

    @property
    def facts(self) -> FamilyFacts | None:
        return of(self.cfg.model.family)

    @property
    def main(self) -> Path:
        """The main export."""
        return self.what.exports[0]

    @property
    def library(self) -> str:
        if self.is_text:
            return "peft" if self.what.what == "adapter" else "transformers"
        return "diffusers"

    def front(self, licence: str | None) -> dict[str, Any]:
        """The fields that the hub reads."""
        task = "text-generation" if self.is_text else "text-to-image"
        relation = RELATIONS[self.what.what]
        kind = [] if isinstance(self.cfg.adapter, NoAdapter) else [self.cfg.adapter.type]
        front: dict[str, Any] = {
            **({"base_model": self.base, "base_model_relation": relation} if self.base else {}),
            **self._licence(licence),
            "library_name": self.library,
            "pipeline_tag": task,
            "tags": [*kind, self.library, task, "shardstudio"],
        }
        if self.cfg.data.trigger and not self.is_text:
            front["instance_prompt"] = self.cfg.data.trigger
        widget = [self._widget(sample) for sample in self.what.samples]
        return front | ({"widget": widget} if widget else {})

    def _licence(self, given: str | None) -> dict[str, str]:
        if given:
            return {"license": given}
        known = published_models().get(self.base or "")
        return known.card_licence if known else {}

    def _widget(self, sample: SampleEvent) -> dict[str, Any]:
        output = {"text": sample.text} if sample.kind.is_text else {"url": name_of(sample)}
        return {"text": sample.prompt, "output": output}

    def sections(self) -> Iterator[str]:
        yield self._summary()
        if self.what.film:
            yield "\n\n".join(map(self._filmed, self.what.film))
        yield f"## Use\n\n{self._use()}"
        if self.what.samples:
            shown = "\n\n".join(map(self._sample, self.what.samples))
            yield f"## Samples\n\nGenerated after {self.what.samples[0].step} steps, all from the same seed.\n\n{shown}"
        rows = "\n".join(f"| {name} | {value} |" for name, value in self._settings().items())
        yield f"## Training\n\n| | |\n|---|---|\n{rows}"

    def _summary(self) -> str:
        base = (
            f"[{self.base}](https://huggingface.co/{self.base})" if self.base else "a base model that is not on the hub"
        )
        method = METHODS[self.cfg.adapter.type]
        kind = {
            "adapter": f"A {method} adapter of {base}",
            "merged": f"{base} merged with a {method} adapter" if self.base else "A merged model",
            "full": f"A fine-tune of {base}",
        }[self.what.what]
        trigger = self.cfg.data.trigger
        word = (
            f" Write `{_code(trigger)}` in a prompt to use what it was trained on."
            if trigger and not self.is_text
            else ""
        )
        return f"{kind}, trained with {PROJECT}.{word}"

    def _use(self) -> str:
        name, base = self.main.name, self.base or "BASE"
        stage = stages.base_stage(self.run, self.cfg) if self.what.what == "adapter" else None
        result = f", the result of stage {stage} of this run" if stage else ""
        needs_base = "" if self.base else f"\n\nReplace `BASE` with the folder of the base model{result}."
        if self.is_text:
            names = " or ".join(f"`{_code(name)}`" for name in self._stops)
            ends = f"\n\nTexts end at {names}." if names else ""
            return f"```python\n{self._text_code(base)}\n```{needs_base}{ends}"
        if self.what.what == "adapter" and self._is_read_by_diffusers:
            return (
                f"```python\n{self._adapter_code(base)}\n```{needs_base}\n\nComfyUI: put `{name}` into `models/loras`."
            )
        if self.main.is_dir() and self.what.what != "adapter" and self.facts:
            return f"```python\n{self._model_code(base)}\n```{needs_base}"
        folder = "loras" if self.what.what == "adapter" else "diffusion_models"
        return f"ComfyUI: put `{name}` into `models/{folder}`."

    @property
    def _is_read_by_diffusers(self) -> bool:
        answers = self.facts is not None and "questions" in self.facts.data_fields  # diffusers has no such pipeline
        return self.cfg.adapter.in_diffusers and self.what.format in ("auto", "diffusers") and not answers

    def _adapter_code(self, base: str) -> str:
        return (
            "import torch\nfrom diffusers import DiffusionPipeline\n\n"
            f'pipe = DiffusionPipeline.from_pretrained("{base}", dtype=torch.bfloat16)\n'
            f'pipe.load_lora_weights("{self.repo}", weight_name={json.dumps(self.main.name)})\n{self._drawing_code}'
        )

    def _model_code(self, base: str) -> str:
        component = self.facts.components[0] if self.facts else ""
        nested, dtype = self.main / component, "dtype=torch.bfloat16"
        folder = f"{self.main.name}/{component}" if nested.is_dir() else self.main.name
        return (
            "import torch\nfrom diffusers import AutoModel, DiffusionPipeline\n\n"
            f'{component} = AutoModel.from_pretrained("{self.repo}", subfolder="{folder}", {dtype})\n'
            f'pipe = DiffusionPipeline.from_pretrained("{base}", {component}={component}, {dtype})\n'
            f"{self._drawing_code}"
        )

    @property
    def _drawing_code(self) -> str:
        prompt = next((sample.prompt for sample in self.what.samples), self.cfg.data.trigger or "a prompt")
        return (
            "pipe.enable_model_cpu_offload()\n"
            f"image = pipe(prompt={json.dumps(prompt, ensure_ascii=False)}).images[0]\n"
            'image.save("image.png")'
        )

    def _text_code(self, base: str) -> str:
        name = json.dumps(self.main.name)
        if self.what.what == "adapter":
            has_tokenizer = (self.main / "tokenizer_config.json").is_file()
            source = f'"{self.repo}", subfolder={name}' if has_tokenizer else f'"{base}"'
            grows = "model.resize_token_embeddings(max(len(tokenizer), model.get_input_embeddings().num_embeddings))\n"
            # A program that loads an adapter stops where its base does, unless it is asked to read the adapter's own.
            stops = f'\nmodel.generation_config = GenerationConfig.from_pretrained("{self.repo}", subfolder={name})'
            more = ", GenerationConfig" if self._stops else ""
            return (
                f"from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer{more}\n\n"
                f"tokenizer = AutoTokenizer.from_pretrained({source})\n"
                f'model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")\n'
                f"{grows if self.cfg.model.options.new_tokens else ''}"
                f'model = PeftModel.from_pretrained(model, "{self.repo}", subfolder={name})'
                f"{stops if self._stops else ''}"
            )
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{self.repo}", subfolder={name}, dtype="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{self.repo}", subfolder={name})'
        )

    @cached_property
    def _stops(self) -> tuple[str, ...]:
        """The tokens at which generation ends, by the export's files; empty for files that do not say it."""
        try:
            ids = json.loads(files.read(self.main / "generation_config.json", MOST_BYTES))["eos_token_id"]
            added = json.loads(files.read(self.main / "tokenizer.json", MOST_BYTES))["added_tokens"]
            names = {token["id"]: str(token["content"]) for token in added}
            return tuple(names.get(one, f"token {one}") for one in (ids if isinstance(ids, list) else [ids]))
        except (InputError, OSError, ValueError, KeyError, TypeError):
            return ()

    def _sample(self, sample: SampleEvent) -> str:
        if sample.kind.is_text:
            return f"```text\n{sample.text.replace('```', '` ` `')}\n```"
        if sample.kind.is_played:
            return f'<video controls src="{html.escape(name_of(sample))}"></video>\n\n*{_plain(sample.prompt)}*'
        return f"![{_plain(sample.prompt)}]({name_of(sample)})\n\n*{_plain(sample.prompt)}*"

    def _filmed(self, one: FilmedPrompt) -> str:
        """The sheet of a prompt, which the loop of the first one precedes, with links to both."""
        folder, prompt = self.run.film.name, _plain(one.prompt)
        loop = f"![{prompt}]({folder}/{one.loop})\n\n" if one is self.what.film[0] else ""
        links = {"loop": one.loop, "video": one.video}
        named = ", ".join(f"[{word}]({folder}/{name})" for word, name in links.items() if name)
        return f"{loop}![Before, during and after training: {prompt}]({folder}/{one.sheet})\n\n*{prompt}* ({named})"

    def _settings(self) -> dict[str, str]:
        """The rows of the table: numbers and names of the program, never a path."""
        cfg = self.cfg
        rows: dict[str, object] = {"Method": METHODS[cfg.adapter.type]}
        if isinstance(cfg.adapter, RankAdapter):
            rows |= {
                "Rank": cfg.adapter.rank,
                "Alpha": cfg.adapter.rank if cfg.adapter.alpha is None else cfg.adapter.alpha,
            }
        if isinstance(cfg.adapter, LowRankAdapter) and cfg.adapter.rank_stabilized:
            rows["Scale"] = "alpha / sqrt(rank)"
        if cfg.adapter.takes_from_base:
            rows["Start"] = "largest singular values (PiSSA); the exported rank is twice as large"
        rows |= {
            "Steps": self.what.step,
            "Batch size": cfg.train.batch_size,
            "Learning rate": f"{cfg.optim.lr:g}, {cfg.optim.schedule}",
            "Optimizer": cfg.optim.type,
            "Precision": cfg.train.precision,
            "Base stored as": cfg.train.precision if cfg.quantize.format == "none" else cfg.quantize.format,
            "Seed": cfg.train.seed,
        }
        rows |= (
            {"Length": f"{cfg.data.length} tokens"} if self.is_text else {"Resolution": size_title(cfg.data.all_sides)}
        )
        rows |= dataset_size(cfg)
        rows["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
        return {name: str(value) for name, value in rows.items()}


def dataset_size(cfg: RunConfig) -> dict[str, str]:
    """Return {"Dataset": its size}; {} if the data cannot be read any more."""
    try:
        if trains_on(cfg) == "text":
            trained, held_out = text_files.of_config(cfg.data)
            sizes = text_files.sizes((*trained, *held_out))
            return {"Dataset": f"{_counted(len(sizes), 'file')} of text, {sum(sizes.values()) / 1e6:,.1f} MB"}
        found = image_files.scan(cfg.data)
    except (InputError, OSError):
        return {}
    return {"Dataset": f"{_counted(len(found.train) + len(found.validation), 'image')} with captions"}


def versions() -> Mapping[str, str]:
    """{package: installed version}"""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # the program runs from a checkout
            continue
    return installed


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _plain(text: str) -> str:
    """Return text in one line that Markdown and HTML show as it is."""
    line = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]()!|~#])", r"\\\1", line)


def _code(text: str) -> str:
    """Return text for a code span."""
    return " ".join(text.replace("`", "'").split())
