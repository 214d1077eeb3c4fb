"""The form of a run: builds rows from the config's schema, checks what was typed, and assigns errors to rows.

A draft is a preset and the values that differ from it. The page and the notebook show the rows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic_core import to_jsonable_python

from trainer.config import families, yaml12
from trainer.config.fields import Slot, all_names, label_with_unit, slot
from trainer.config.load import (
    COMMAND_LINE,
    ConfigError,
    ConfigFile,
    load_config,
    load_config_text,
)
from trainer.config.schema import RunConfig, rules
from trainer.config.sections import Section, family_names
from trainer.launcher import capacity, preflight, torchrun
from trainer.plan.memory import MemoryPlan
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError, Problem
from trainer.system.gpus import Gpu
from trainer.system.installation import program

Kind = Literal["choice", "switch", "text", "lines", "yaml"]
"""How a row is edited: `choice` from a list of words, `switch` on or off, `text` for a word, number or path, `lines`
for one text per line, `yaml` for anything else."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": ("model", "quantize"),
    "Adapter": ("adapter",),
    "Data": ("data",),
    "Training": ("train", "optim", "objective"),
    "Sampling": ("sample",),
    "Saving": ("name", "checkpoint", "export", "trackers"),
    "Hardware": (
        "parallel",
        "train.precision",
        "train.checkpointing",
        "train.compile",
        "train.compile_backend",
        "train.attention",
    ),
    "Cluster": ("cluster", "parallel.nodes", "parallel.rendezvous", "parallel.max_restarts", "parallel.timeout"),
}
"""{group of the form: sections and fields of the config}. A field belongs to the longest name that it starts with."""

MOST_USED = (
    *("model.path", "data.path", "data.trigger", "data.validation", "adapter.type", "adapter.rank"),
    *("adapter.block_size", "train.steps", "optim.lr", "train.batch_size", "sample.prompts", "sample.every"),
    *("data.resolution", "data.length", "name", "checkpoint.keep"),
    *("data.folders", "data.repeats", "data.regularization", "data.regularization_weight"),
)
"""Fields that matter in most runs, or belong to the images. The page shows them on its cards and all others under
"More"."""

CARRIED = ("name", "data", "sample.prompts")
"""Sections and fields whose edits survive the choice of another preset, but for OF_THE_MODEL."""

OF_THE_MODEL = (
    *("data.resolution", "data.resolutions", "data.at_resolutions", "data.max_aspect", "data.seen_resolution"),
    *("data.length", "data.pack_tokens", "data.chat_template"),
)
"""Fields of CARRIED that fit one model rather than one set of data."""

ENTRY = re.compile(r"[\[.](\d+)\]?\.(\w+)")
"""A position in a list of sections, as in `data.folders[0].path` or `data.folders.0.masks`, and a field there."""

COMPANIONS: Mapping[str, Any] = {
    **dict.fromkeys(("data.masks", "data.references", "data.rejected")),
    "data.validation": 0,
    "sample.references": [],
}
"""{field: its value without any} of the folders and files that belong to the images of `data.path`: by their names, or
as images of the same subject. Regularization images are of its class, and go with any subject of the class."""


@dataclass(frozen=True)
class Row:
    """One field of the config as an input.

    Attributes:
        value: Content of the input.
        choices: The allowed words, given the other fields' values.
        in_front: Whether the preset or the user sets the field; other rows are shown by "more".
        placeholder: The model's own value, which an empty input selects; "" where the model has none.
    """

    field: str
    kind: Kind
    value: str | bool
    help: str
    choices: tuple[str, ...] = ()
    in_front: bool = False
    is_visible: bool = True
    error: str = ""
    placeholder: str = ""

    @property
    def label(self) -> str:
        """The field's name in words, with its unit."""
        return label_with_unit(self.field)


@dataclass(frozen=True)
class Draft:
    """The state of a form.

    Attributes:
        values: {field: YAML value} of the fields that differ from the preset, in the order of their changes.
    """

    preset: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    def typed(self, name: str, text: str | bool) -> Draft:
        """Return the draft after `text` was typed into the row of a field.

        When the `type` of a section changes, values of fields that the new type does not have are dropped. Of steps and
        epochs, the one that was typed last gives the length of the run.
        """
        value = _value(_slot(name), text)
        values = {key: kept for key, kept in self.values.items() if key != name and not _drops(name, value, key)}
        return replace(self, values=values | {name: value})

    @property
    def overrides(self) -> list[str]:
        """The values as `key=value` of the command line."""
        return [f"{name}={_as_override(value, kind_of(name))}" for name, value in self.values.items()]


@dataclass(frozen=True)
class Checked:
    """A draft with the result of its checks.

    Attributes:
        loaded: The config of the draft's valid values.
        errors: {field: error}; the empty field stands for the whole config.
        waiting: A sentence about a check that is still running; "" when all are done.
        advice: What this machine's user should know before the start.
        is_scanned: Whether the images were read, and `errors` has what is wrong with them.
    """

    draft: Draft
    preset: ConfigFile
    loaded: ConfigFile
    errors: Mapping[str, str]
    waiting: str = ""
    advice: tuple[str, ...] = ()
    is_scanned: bool = False

    @property
    def can_start(self) -> bool:
        return not self.errors and not self.waiting

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def warnings(self) -> tuple[str, ...]:
        """Advice to read before the start. It does not prevent the start."""
        return (*preflight.advice(self.config), *self.advice)

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """{field: (preset's value, value)} of the fields that differ from the preset."""
        return changed_fields(self.preset.config, self.config)


def from_overrides(preset: Path, overrides: Sequence[str]) -> Draft:
    """Return the draft of a preset with `key=value` overrides. Raises ConfigError with every problem."""
    loaded = load_config(preset, overrides)
    values = loaded.config.model_dump(mode="json")
    given = [_row_of(name) for name, origin in loaded.origins.items() if origin == str(COMMAND_LINE)]
    return Draft(preset, {name: value_at(values, name) for name in given if name})


def check(draft: Draft) -> Checked:
    """Check a draft against the schema and its rules. Raises ConfigError when the preset itself is wrong."""
    preset = load_config(draft.preset)
    errors: dict[str, str] = {}
    valid = dict(draft.values)
    while True:
        try:
            loaded = load_config(draft.preset, replace(draft, values=valid).overrides)
        except ConfigError as error:
            if not valid:  # the preset's file was changed just now
                raise
            errors = _by_row(error.problems) | errors
            wrong = [name for name in valid if name in errors] or list(valid)[-1:]
            valid = {name: value for name, value in valid.items() if name not in wrong}
        else:
            return Checked(draft, preset, _with_the_rest(draft, loaded, valid, errors), errors)


def _with_the_rest(draft: Draft, loaded: ConfigFile, valid: Mapping[str, Any], errors: Mapping[str, str]) -> ConfigFile:
    """The config with the values that were dropped along with wrong ones, though they are right themselves."""
    for name in [name for name in draft.values if name not in valid and name not in errors]:
        values = {key: value for key, value in draft.values.items() if key in valid or key == name}
        try:
            loaded = load_config(draft.preset, replace(draft, values=values).overrides)
        except ConfigError:  # it is wrong with the others only
            continue
        valid = values
    return loaded


def edited(draft: Draft, edits: Mapping[str, str | bool]) -> Draft:
    """Return the draft after texts were typed into rows: {field: text}. The preset's own value is not an edit."""
    for name, text in edits.items():
        draft = draft.typed(name, text)
    try:
        own = load_config(draft.preset).config.model_dump(mode="json")
    except ConfigError:  # the form says so
        return draft
    # Fields of a section of another type have other defaults than the preset's.
    same = {name for name in edits if f"{name.partition('.')[0]}.type" not in {*draft.values} - {name}}
    same = {name for name in same if name in draft.values and draft.values[name] == value_at(own, name)}
    return replace(draft, values={name: value for name, value in draft.values.items() if name not in same})


def without_companions(draft: Draft, former: Draft) -> tuple[Draft, dict[str, str]]:
    """Take the companions that a draft has from `former` out of it, where that has other images: names repeat.

    Texts keep theirs: different texts are often compared by one that is held out.

    Where the former images are the preset's, of the companions that were chosen only those that are called after their
    folder go with them: any other was chosen for images that were to follow.

    Args:
        draft: The draft.
        former: A draft of the same preset.

    Returns:
        The draft, and {field: path} of what was taken out.
    """
    try:
        config = load_config(draft.preset).config
    except ConfigError:  # the form says so
        return draft, {}
    own = config.model_dump(mode="json")
    before, now = _folder_of(former, own), _folder_of(draft, own)
    if before is None or before == now or families.trains_on(config) == "text":
        return draft, {}
    is_chosen = "data.path" in former.values
    values, gone = dict(draft.values), {}
    for name, nothing in COMPANIONS.items():
        preset_has = value_at(own, name)
        value = draft.values.get(name, preset_has)
        paths = _paths(value)
        if not paths or value != former.values.get(name, preset_has):
            continue
        if _paths(preset_has):
            values[name] = nothing
        elif is_chosen or paths[0].startswith(before):
            del values[name]
        else:
            continue
        gone[name] = "\n".join(paths)
    return replace(draft, values=values), gone


def _paths(value: Any) -> list[str]:
    """The paths in the value of a companion; none in a number of images."""
    values = value if isinstance(value, list) else [value]
    return [path for path in values if isinstance(path, str) and path]


def _folder_of(draft: Draft, own: Mapping[str, Any]) -> str | None:
    """The folder of a draft's images. own: the config of its preset."""
    path = draft.values.get("data.path", value_at(own, "data.path"))
    return os.path.abspath(os.path.expanduser(files.pasted(path))) if isinstance(path, str) and path else None


def check_with_files(checked: Checked) -> Checked:
    """Also check that the dataset folders, files and models named in the config exist."""
    try:
        preflight.check_named(checked.loaded)
    except ConfigError as error:
        return replace(checked, errors=_by_row(error.problems) | dict(checked.errors))
    return checked


def check_machine(
    checked: Checked, runs: Path, gpus: Sequence[Gpu], plan: Callable[[RunConfig, Path], MemoryPlan | None]
) -> Checked:
    """Also check that this machine has what the run needs: model, packages, GPUs, memory and disk.

    Args:
        checked: The draft so far.
        runs: Folder of the runs.
        gpus: This machine's GPUs.
        plan: Returns the plan of a config without a GPU, as `capacity.unplaced_plan` does.
    """
    problems = list(capacity.problems(checked.config, runs, gpus, plan))
    try:
        preflight.check_machine(checked.loaded)
    except ConfigError as error:
        problems += error.problems
    except InputError as error:
        field, _, message = str(error).partition(": ")
        problems.append(Problem(field, message) if field in all_names() else Problem("", str(error)))
    advice = tuple(capacity.warnings(checked.config, runs, gpus))
    return replace(checked, errors=_by_row(problems) | dict(checked.errors), advice=advice)


def kind_of(name: str) -> Kind:
    """Return how a field is edited."""
    return _kind(name, _slot(name))


def as_typed(name: str, value: Any) -> str | bool:
    """Return a value of a field as it is typed into its row."""
    return _text(kind_of(name), to_jsonable_python(value))


def rows(checked: Checked) -> tuple[Row, ...]:
    """Return a row for every field of the config except `stages`, in the order of the schema."""
    config, values = checked.config, checked.config.model_dump(mode="json")
    # The placeholder of these two is the model's own value, which no field holds.
    sample = preflight.sample_settings(config.model, config.sample.model_copy(update={"steps": None, "guidance": None}))
    defaults = {"sample.steps": f"{sample.steps}", "sample.guidance": f"{sample.guidance:g}"}
    return tuple(
        replace(_row(name, checked, values), placeholder=defaults.get(name, ""))
        for name in all_names()
        if name != "stages"
    )


def group_of(name: str) -> str:
    """Return the group of the form that a field belongs to."""
    found = [(len(part), group) for group, parts in GROUPS.items() for part in parts if _is_below(name, part)]
    return max(found)[1]


@dataclass(frozen=True)
class Switch:
    """A draft after the choice of another preset.

    Attributes:
        left: Fields whose edits were left behind, because they belong to the former preset.
        refused: {field: reason} of edits that would have been carried along and that the new preset does not take.
    """

    draft: Draft
    left: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def switched(draft: Draft, preset: Path) -> Switch:
    """Choose another preset and carry the edits of CARRIED along.

    Raises ConfigError when the preset itself is wrong.
    """
    carried = {
        name: value
        for name, value in draft.values.items()
        if name not in OF_THE_MODEL and any(_is_below(name, part) for part in CARRIED)
    }
    checked = check(Draft(preset, carried))
    wrong = {name: checked.errors[name] for name in carried if name in checked.errors}
    wrong |= {name: "this model does not read it" for name in carried if not _exists(name, checked.config)}
    kept = {name: value for name, value in carried.items() if name not in wrong}
    left = tuple(name for name in draft.values if name not in carried)
    return Switch(without_companions(Draft(preset, kept), Draft(preset))[0], left, wrong)


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def from_yaml(checked: Checked, text: str, file: Path) -> Draft:
    """Return the draft of a whole config in YAML.

    Args:
        file: Where the text is saved.

    Raises:
        ConfigError: The text is not a valid config.
    """
    files.replace(file, text)
    config = load_config_text(text, (), file).config
    changed = changed_fields(checked.preset.config, config)
    if config.train.epochs is not None:  # of two lengths on one command line, none would count
        changed.pop("train.steps", None)
    return Draft(checked.draft.preset, {name: value for name, (_, value) in changed.items()})


def changed_fields(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return {field: (value before, value after)} of the fields that differ and have an effect in `after`."""
    one, other = before.model_dump(mode="json"), after.model_dump(mode="json")
    values = {name: (value_at(one, name), value_at(other, name)) for name in all_names()}
    # Defaults of the adapter's fields depend on its type.
    fields = type(after.adapter).model_fields
    defaults = {f"adapter.{key}": field.get_default(call_default_factory=True) for key, field in fields.items()}
    return {
        name: (old, new)
        for name, (old, new) in values.items()
        if old != new and _exists(name, after) and not (old is None and new == defaults.get(name))
    }


def headless_command(draft: Draft) -> str:
    """Return the command that trains the draft without the page."""
    return shlex.join([*program().split(), "--headless", str(draft.preset), *draft.overrides])


def torchrun_command(config: RunConfig, runs: Path) -> str:
    """Return the command that the start of the run executes."""
    run = RunDir(runs / f"{config.name}-<time>-<random>")
    return shlex.join(torchrun.command(config.parallel, run, "trainer", 0, bool(config.stages)))


def _row(name: str, checked: Checked, values: Mapping[str, Any]) -> Row:
    spec, config = _slot(name), checked.config
    kind = _kind(name, spec)
    value = value_at(values, name)
    typed = checked.draft.values.get(name, value)
    known = [(word, _value(spec, word)) for word in _words(name, spec)]
    choices = tuple(word for word, meant in known if meant == value or _fits(name, meant, config))
    other = _other_value(spec, value)
    has_sections = isinstance(other, list) and any(isinstance(one, dict) for one in other)
    changed = config if has_sections else _with(config, name.split("."), other)
    is_visible = len(choices) > 1 if kind == "choice" else _accepts(name, changed)
    return Row(
        field=name,
        kind=kind,
        value=_text(kind, typed),
        help=spec.help,
        choices=choices,
        in_front=name in checked.loaded.origins,
        is_visible=name in checked.errors or (_exists(name, config) and is_visible),
        error=checked.errors.get(name, ""),
    )


def _slot(name: str) -> Slot:
    spec = slot(tuple(name.split(".")))
    if spec is None:  # in the draft of another version
        raise InputError(f"{name!r} is not a field of a config")
    return spec


def _drops(name: str, value: Any, key: str) -> bool:
    """Whether a value typed for `name` replaces that of `key`: fields that another type of a section does not have, and
    the other length of the run."""
    if {name, key} == {"train.steps", "train.epochs"}:
        return value is not None
    section, _, leaf = name.partition(".")
    kind = _slot(section).tags.get(value) if leaf == "type" and isinstance(value, str) else None
    above, _, inner = key.partition(".")
    return kind is not None and above == section and inner not in kind.model_fields


def _words(name: str, spec: Slot) -> tuple[str, ...]:
    """The words to choose from: true and false too where they are values next to words."""
    if name == "model.family":
        return family_names()
    return (*spec.words, "true", "false") if spec.words and bool in spec.options else spec.words


def _kind(name: str, spec: Slot) -> Kind:
    is_word = [kind is bool or get_origin(kind) is Literal or name == "model.family" for kind in spec.options]
    if _words(name, spec) and all(is_word):
        return "choice"
    if spec.options == (bool,) and not spec.may_be_empty:
        return "switch"
    if spec.options == (tuple[str, ...],):
        return "lines"
    return "yaml" if any(get_origin(kind) in (dict, tuple) for kind in spec.options) else "text"


def _exists(name: str, config: RunConfig) -> bool:
    """Whether the adapter has the field and the family reads it."""
    if name.startswith("adapter."):
        return name.partition(".")[2] in type(config.adapter).model_fields
    known = families.of(config.model.family)
    return known is None or known.reads(name)


def _fits(name: str, value: Any, config: RunConfig) -> bool:
    """Whether all rules of the config accept this value of the field together with the other fields' values."""
    if name == "adapter.type" or not _exists(name, config):
        return True
    return _accepts(name, _with(config, name.split("."), value))


def _accepts(name: str, config: RunConfig) -> bool:
    """Whether no rule of the config refuses the value of a field."""
    return not any(_row_of(problem.field) == name or name.startswith(f"{problem.field}.") for problem in rules(config))


def _with(section: Section, keys: Sequence[str], value: Any) -> Any:
    first, *below = keys
    inner = _with(vars(section)[first], below, value) if below else value
    return section.model_copy(update={first: inner})


def _other_value(spec: Slot, value: Any) -> Any:
    """Another valid value, to find out whether any value of the field has an effect."""
    if bool in spec.options:
        return not value
    if {int, float} & set(spec.options) and not spec.words:
        bounds = [limit.bound for limit in spec.limits if limit.symbol in (">=", "<=")]
        return next((bound for bound in bounds if bound != value), 1 if value != 1 else 2)
    return value


def _value(spec: Slot, text: str | bool) -> Any:
    """The YAML value of typed text. Text that is not YAML stays text, which the schema then refuses."""
    if isinstance(text, bool):
        return text
    if spec.options == (tuple[str, ...],):
        return [line.strip() for line in text.splitlines() if line.strip()]
    if spec.is_text:
        return text.strip() or (None if spec.may_be_empty else "")
    if not text.strip() and not spec.may_be_empty:
        empty: dict[Any, Any] = {dict: {}, tuple: []}
        return next((empty[get_origin(kind)] for kind in spec.options if get_origin(kind) in empty), None)
    try:
        return yaml12.parse(text).value
    except yaml12.YamlError:
        return text


def _text(kind: Kind, value: Any) -> str | bool:
    """The content of the input for a value."""
    if kind == "switch" and (value is None or isinstance(value, bool)):
        return bool(value)
    if value is None or value == {} or value == []:
        return ""
    if isinstance(value, str):
        return value
    if kind == "lines" and isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        return yaml12.dump(value).strip()
    return json.dumps(value)


def _as_override(value: Any, kind: Kind) -> str:
    """The value as YAML on one line, without quotes where they are not needed.

    A text that is not YAML is quoted, so that its field says what it needs; where lists and sections are written, the
    error of YAML says more.
    """
    if isinstance(value, str) and kind != "yaml" and not _is_yaml(value):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and value and value == value.strip() and _value(Slot(object), value) == value:
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _is_yaml(text: str) -> bool:
    try:
        yaml12.parse(text)
    except yaml12.YamlError:
        return False
    return True


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field in a dumped config, or None where the section does not have the field."""
    node: Any = values
    for key in name.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _by_row(problems: Iterable[Problem]) -> dict[str, str]:
    """{field: message} with the first problem of each row. In a list of sections, the message names the entry."""
    found = {}
    for problem in reversed(list(problems)):
        row = _row_of(problem.field)
        entry = ENTRY.match(problem.field.removeprefix(row))
        found[row] = f"{int(entry[1]) + 1}, {entry[2]}: {problem.message}" if entry else problem.message
    return found


def _row_of(part: str) -> str:
    """The field whose row shows `part`, such as `model.train.transformer` or `data.folders[0].path`; '' for none."""
    known = set(all_names())
    name = part.partition("[")[0]
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name
