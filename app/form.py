"""The form of a run: rows made from the config's schema, what was typed to a checked config, errors to their rows.

A draft is a preset and the values that differ from it. Nothing here knows of the page that shows the rows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_origin

from trainer.config import families, files, yaml12
from trainer.config.errors import Problem
from trainer.config.fields import Slot, all_names, slot
from trainer.config.installation import program
from trainer.config.load import (
    COMMAND_LINE,
    ConfigError,
    ConfigFile,
    load_config,
    load_config_text,
)
from trainer.config.schema import RunConfig, rules
from trainer.config.sections import Section, family_names
from trainer.launcher import preflight, torchrun
from trainer.models import distilled
from trainer.run.folder import RunDir

Kind = Literal["choice", "switch", "text", "lines", "yaml"]
"""choice: one of some words.  switch: on or off.  text: a word, a number, a path.  lines: a text per line.
yaml: anything else, as YAML."""

STEPS: Mapping[str, tuple[str, ...]] = {
    "Model": ("model", "quantize"),
    "Adapter": ("adapter",),
    "Dataset": ("data",),
    "Hardware": (
        *("name", "parallel", "train", "optim", "objective", "sample"),
        *("checkpoint", "export", "trackers", "cluster"),
    ),
}
"""{step of the wizard: sections of the config}"""


@dataclass(frozen=True)
class Row:
    """One field. value: what the input shows.  choices: the words that go together with the other fields' values.

    in_front: whether the preset or the user gives it; the others stand behind "more".  own: what an empty input stands
    for, where the model decides that.
    """

    field: str
    kind: Kind
    value: str | bool
    help: str
    unit: str
    choices: tuple[str, ...] = ()
    in_front: bool = False
    is_visible: bool = True
    error: str = ""
    own: str = ""

    @property
    def label(self) -> str:
        return f"{self.field} ({self.unit})" if self.unit else self.field


@dataclass(frozen=True)
class Draft:
    """values: {field: YAML value} of what differs from the preset, in the order it was changed."""

    preset: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    def typed(self, name: str, text: str | bool) -> Draft:
        """The draft after `text` was typed into the row of a field.

        What was typed for fields that a section of another `type` does not have is gone with them.
        """
        value = _value(_slot(name), text)
        values = {key: kept for key, kept in self.values.items() if key != name and not _leaves_out(name, value, key)}
        return replace(self, values=values | {name: value})

    @property
    def overrides(self) -> list[str]:
        """The values as `key=value` of the command line."""
        return [f"{name}={_as_override(value)}" for name, value in self.values.items()]


@dataclass(frozen=True)
class Checked:
    """A draft that was looked at. loaded: the config of what is valid in it.

    errors: {field: what is wrong with it}, the empty field for the whole.  waiting: what is not known yet.
    """

    draft: Draft
    preset: ConfigFile
    loaded: ConfigFile
    errors: Mapping[str, str]
    waiting: str = ""

    @property
    def can_start(self) -> bool:
        return not self.errors and not self.waiting

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should read before the start, which it does not keep from starting."""
        return distilled.warnings(self.config)

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """{field: (preset's value, value)} of what differs from the preset."""
        return changes(self.preset.config, self.config)


def from_overrides(preset: Path, overrides: Sequence[str]) -> Draft:
    """The draft that is a preset with `key=value` of the command line. Raises ConfigError with all that is wrong."""
    loaded = load_config(preset, overrides)
    values = loaded.config.model_dump(mode="json")
    given = [_row_of(name) for name, origin in loaded.origins.items() if origin == str(COMMAND_LINE)]
    return Draft(preset, {name: value_at(values, name) for name in given if name})


def check(draft: Draft) -> Checked:
    """Look at a draft. Raises ConfigError when the preset itself is wrong."""
    preset = load_config(draft.preset)
    errors: dict[str, str] = {}
    valid = dict(draft.values)
    while True:
        try:
            loaded = load_config(draft.preset, replace(draft, values=valid).overrides)
        except ConfigError as error:
            errors = _by_row(error.problems) | errors
            wrong = [name for name in valid if name in errors] or list(valid)[-1:]
            valid = {name: value for name, value in valid.items() if name not in wrong}
        else:
            return Checked(draft, preset, loaded, errors)


def check_with_files(checked: Checked) -> Checked:
    """Also look for the dataset folders, files and models that are named."""
    try:
        preflight.check_named(checked.loaded)
    except ConfigError as error:
        return replace(checked, errors=_by_row(error.problems) | dict(checked.errors))
    return checked


def rows(checked: Checked) -> tuple[Row, ...]:
    """A row for every field of the config, `stages` aside, in the order of the schema."""
    values, own = checked.config.model_dump(mode="json"), _own(checked.config)
    return tuple(
        replace(_row(name, checked, values), own=own.get(name, "")) for name in all_names() if name != "stages"
    )


def step_of(name: str) -> str:
    """The step of the wizard a field belongs to."""
    section = name.partition(".")[0]
    return next(step for step, sections in STEPS.items() if section in sections)


def from_yaml(checked: Checked, text: str, at: Path) -> Draft:
    """The draft that is the YAML of a whole config. at: where the text is kept. Raises ConfigError naming the lines."""
    files.replace(at, text)
    differing = changes(checked.preset.config, load_config_text(text, (), at).config)
    return Draft(checked.draft.preset, {name: value for name, (_, value) in differing.items()})


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """{field: (value before, value after)} of the fields that differ and mean something in `after`."""
    one, other = before.model_dump(mode="json"), after.model_dump(mode="json")
    values = {name: (value_at(one, name), value_at(other, name)) for name in all_names()}
    told = _defaults(after)
    return {
        name: (old, new)
        for name, (old, new) in values.items()
        if old != new and _exists(name, after) and not (old is None and new == told.get(name))
    }


def headless_command(draft: Draft) -> str:
    """What trains the draft without the page."""
    return shlex.join([*program().split(), "--headless", str(draft.preset), *draft.overrides])


def torchrun_command(config: RunConfig, runs: Path) -> str:
    """What the start of the run will execute."""
    run = RunDir(runs / f"{config.name}-<time>-<random>")
    return shlex.join(torchrun.command(config.parallel, run, "trainer", 0, bool(config.stages)))


def _row(name: str, checked: Checked, values: Mapping[str, Any]) -> Row:
    here, config = _slot(name), checked.config
    kind = _kind(name, here)
    value = value_at(values, name)
    typed = checked.draft.values.get(name, value) if name in checked.errors else value
    choices = tuple(word for word in _words(name, here) if word == value or _fits(name, word, config))
    is_visible = len(choices) > 1 if kind == "choice" else _fits(name, _other_value(here, value), config)
    return Row(
        field=name,
        kind=kind,
        value=_text(kind, typed),
        help=here.help,
        unit=here.unit,
        choices=choices,
        in_front=name in checked.loaded.origins,
        is_visible=name in checked.errors or (_exists(name, config) and is_visible),
        error=checked.errors.get(name, ""),
    )


def _own(config: RunConfig) -> dict[str, str]:
    """{field: the model's own value}, as an empty input shows it."""
    sample = distilled.complete_sample(config.model, config.sample.model_copy(update={"steps": None, "guidance": None}))
    return {"sample.steps": f"{sample.steps}", "sample.guidance": f"{sample.guidance:g}"}


def _slot(name: str) -> Slot:
    here = slot(tuple(name.split(".")))
    assert here is not None, name
    return here


def _leaves_out(name: str, value: Any, key: str) -> bool:
    """Whether the value of this field is the type of a section that has no field `key`."""
    section, _, leaf = name.partition(".")
    kind = _slot(section).tags.get(value) if leaf == "type" and isinstance(value, str) else None
    above, _, inner = key.partition(".")
    return kind is not None and above == section and inner not in kind.model_fields


def _words(name: str, here: Slot) -> tuple[str, ...]:
    return family_names() if name == "model.family" else here.words


def _kind(name: str, here: Slot) -> Kind:
    if _words(name, here) and all(get_origin(kind) is Literal or name == "model.family" for kind in here.options):
        return "choice"
    if here.options == (bool,) and not here.may_be_empty:
        return "switch"
    if here.options == (tuple[str, ...],):
        return "lines"
    return "yaml" if any(get_origin(kind) in (dict, tuple) for kind in here.options) else "text"


def _exists(name: str, config: RunConfig) -> bool:
    """Whether the adapter has such a field and the family reads it."""
    if name.startswith("adapter."):
        return name.partition(".")[2] in type(config.adapter).model_fields
    known = families.of(config.model.family)
    return known is None or known.reads(name)


def _fits(name: str, value: Any, config: RunConfig) -> bool:
    """Whether no rule of the config refuses this value of the field beside the other fields' values."""
    if name == "adapter.type" or not _exists(name, config):
        return True
    changed = _with(config, name.split("."), value)
    return not any(_row_of(problem.field) == name or name.startswith(f"{problem.field}.") for problem in rules(changed))


def _with(section: Section, keys: Sequence[str], value: Any) -> Any:
    first, *below = keys
    inner = _with(vars(section)[first], below, value) if below else value
    return section.model_copy(update={first: inner})


def _other_value(here: Slot, value: Any) -> Any:
    """A value that is not the one that stands there, to find out whether the field means anything."""
    if bool in here.options:
        return not value
    if {int, float} & set(here.options) and not here.words:
        bounds = [limit.bound for limit in here.limits if limit.symbol in (">=", "<=")]
        return next((bound for bound in bounds if bound != value), 1 if value != 1 else 2)
    return value


def _value(here: Slot, text: str | bool) -> Any:
    """What was typed, as the YAML value it stands for. What is no YAML stays text, which the schema refuses."""
    if isinstance(text, bool):
        return text
    if here.options == (tuple[str, ...],):
        return [line.strip() for line in text.splitlines() if line.strip()]
    if here.is_text:
        return text.strip() or (None if here.may_be_empty else "")
    if not text.strip() and not here.may_be_empty:
        empty: dict[Any, Any] = {dict: {}, tuple: []}
        return next((empty[get_origin(kind)] for kind in here.options if get_origin(kind) in empty), None)
    try:
        return yaml12.parse(text).value
    except yaml12.YamlError:
        return text


def _text(kind: Kind, value: Any) -> str | bool:
    """A value as its input shows it."""
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


def _as_override(value: Any) -> str:
    """YAML of one line; a word without quotes where it stays one."""
    if isinstance(value, str) and value and value == value.strip() and _value(Slot(object), value) == value:
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _defaults(config: RunConfig) -> dict[str, Any]:
    """{field: default} of the adapter, whose fields depend on its type."""
    fields = type(config.adapter).model_fields
    return {f"adapter.{key}": field.get_default(call_default_factory=True) for key, field in fields.items()}


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """The value of a field in a dumped config; None where the section has none."""
    here: Any = values
    for key in name.split("."):
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


def _by_row(problems: Iterable[Problem]) -> dict[str, str]:
    """{field of a row: what is wrong}, the first problem of each."""
    return {_row_of(problem.field): problem.message for problem in reversed(list(problems))}


def _row_of(part: str) -> str:
    """The field whose row shows a part of it, as `model.train.transformer` or `data.folders[0].path`; none's is ''."""
    known = set(all_names())
    name = part.partition("[")[0]
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name
