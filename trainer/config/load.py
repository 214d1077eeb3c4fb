"""A config file and `key=value` overrides, to a RunConfig, and back.

Everything that is wrong is reported at once, sorted by line, as `file:line: field: reason; did you mean 'x'?`.
`python -m trainer.config.load` writes presets/schema.json.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainer.config import aliases, files, yaml12
from trainer.config.errors import InputError, Problem, RuleError
from trainer.config.fields import ROOT, Slot, name, nearest, shown, slot
from trainer.config.installation import CHECKOUT, PRESETS
from trainer.config.schema import RunConfig, advice
from trainer.config.sections import MODEL_WORDS, NAME_HELP, NAME_PATTERN, half_character
from trainer.config.yaml12 import Loc

MOST_GUESSES = 20
"""Unknown fields for which one that is spelled like it is looked for."""
MOST_FINDINGS = 200
"""Values of a wrong type that are named at once."""
MOST_STAGES = 32
"""Each is checked as a config of its own."""
SCHEMA = PRESETS / "schema.json"


class ConfigError(InputError):
    """All that is wrong with a config file and its overrides, one problem per line.

    problems: the same by field, none where the file as a whole is no config.
    """

    def __init__(self, text: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class ConfigFile:
    """A loaded config. source: the file as given.

    notes: a sentence per foreign spelling that was understood, per field that was left out, and per piece of advice.
    """

    config: RunConfig
    source: Path
    notes: tuple[str, ...]
    places: Mapping[str, str] = dataclasses.field(repr=False)
    """{name of a field that was given: where}"""

    def where(self, field: str) -> str:
        """`presets/x.yaml:6`, `command line` for an override, the file alone for a default."""
        return self.places.get(field, str(self.source))

    def refuse(self, problems: Sequence[Problem]) -> None:
        """Raises ConfigError with the place of each of the problems, if there are any."""
        if problems:
            text = "\n".join(_on_one_line(f"{self.where(problem.field)}: {problem}") for problem in problems)
            raise ConfigError(text, problems)


def load_config(path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read a YAML file, apply `key=value` overrides (dotted keys, YAML values), validate.

    Relative paths in the file are relative to its folder, those in overrides to the current folder; so are those of an
    installed preset that lead out of its folder.
    Raises ConfigError with every problem there is.
    """
    return load_config_text(_read_text(path), overrides, path)


def load_config_text(text: str, overrides: Sequence[str], path: Path) -> ConfigFile:
    """What `load_config` makes of a file that holds this text and lies at `path`, whether it does or not."""
    draft = _Draft(str(path))
    draft.add(_parsed(text, draft), Path(os.path.abspath(path)).parent)
    for override in overrides:
        _add_override(override, draft)
    draft.leave_out_other_types()
    config = _validate(draft)
    if config is not None and len(config.stages) > MOST_STAGES:
        draft.report(("stages",), f"has {len(config.stages)} stages, the most are {MOST_STAGES}; leave some out")
    elif config is not None:
        _report_stages(config, draft)
    if draft.findings or config is None:
        findings = sorted(draft.findings)
        problems = [Problem(finding.field, finding.message) for finding in findings]
        raise ConfigError("\n".join(map(str, findings)), problems)
    draft.notes += _advice(config, draft)
    places = {name(loc): str(place) for loc, place in draft.places.items()}
    return ConfigFile(config, path, tuple(draft.notes), places)


def stage_config(cfg: RunConfig, index: int, given: Sequence[str] = ()) -> RunConfig:
    """The config of one stage of a run, without stages. given: further fields, as `key=value`.

    Raises ConfigError for what is wrong with it.
    """
    overrides = [f"{field}={json.dumps(value)}" for field, value in cfg.stages[index].set.items()]
    text = yaml12.dump(cfg.model_dump(mode="json", exclude={"stages"}))
    return load_config_text(text, [*overrides, *given], Path(f"stages[{index}]")).config


def stage_configs(cfg: RunConfig) -> list[RunConfig]:
    """The configs of the stages in their order, or the whole config of a run without stages."""
    return [stage_config(cfg, index) for index in range(len(cfg.stages))] or [cfg]


def _on_one_line(sentence: str) -> str:
    """The sentence with what a terminal would not show, as line breaks in a value, written as in Python."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in sentence)


def dump_config(config: RunConfig) -> str:
    """The config as YAML, complete with all defaults. `load_config` of it gives an equal config."""
    return yaml12.dump(config.model_dump(mode="json"))


def write_schema(path: Path) -> None:
    """Write the JSON Schema of a config file: types, ranges, defaults, units and descriptions, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    files.replace(path, json.dumps(schema, indent=1, ensure_ascii=False) + "\n")


class Place(NamedTuple):
    """Where something was given; line 0 for a source as a whole. The command line sorts after the file."""

    override: bool
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


COMMAND_LINE = Place(True, 0, "command line")


class Finding(NamedTuple):
    """A problem and its place. Sorts by place."""

    place: Place
    field: str
    message: str

    def __str__(self) -> str:
        return _on_one_line(f"{self.place}: {self.field}: {self.message}")


class _Draft:
    """A config while it is read: what was given, where, and what is wrong with it so far.

    values: {field: value}; a list or mapping that is the value of one field is kept whole.
    places: {location: place} of all that was written, sections and list items too.
    broken: names of fields whose value is unknown: it is wrong, or a misspelt key was perhaps meant to give it.
    """

    def __init__(self, source: str) -> None:
        self.file = Place(False, 0, source)
        self.values: dict[Loc, Any] = {}
        self.places: dict[Loc, Place] = {}
        self._named: dict[str, Place] = {}
        self._num_unknown = 0
        self.broken: set[str] = set()
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def add(self, tree: Mapping[str, Any], folder: Path) -> None:
        """Take over what a source gives. folder: what its relative paths are relative to."""
        leaves = {loc: value for loc, value in _leaves(tree, self) if not self._is_unwritable(loc, value)}
        given: dict[Loc, Any] = {}
        implied: dict[Loc, Any] = {}
        for loc in sorted(leaves, key=lambda loc: slot(loc) is None):  # ours first: a foreign key must not repeat one
            target = loc if slot(loc) else self._foreign_target(loc, given)
            meant = self._translated(loc, target, leaves[loc]) if target else {}
            implied.update(meant)
            given.update({key: value for key, value in meant.items() if key == target})
            self.put({key: self.place(name(loc)) for key in meant if key not in leaves})
        for loc, value in (implied | given).items():
            if loc == ("stages",) and isinstance(value, list):
                self.values[loc] = [_stage_resolved(stage, folder) for stage in value]
            else:
                self.values[loc] = _resolved(slot(loc), value, folder)

    def put(self, places: Mapping[Loc, Place]) -> None:
        """Note where something was given."""
        self.places.update(places)
        self._named.update({name(loc): place for loc, place in places.items()})

    def forget_places(self, above: Loc) -> None:
        """Forget where all that is at or below a location was given."""
        self.places = {loc: place for loc, place in self.places.items() if loc[: len(above)] != above}
        self._named = {name(loc): place for loc, place in self.places.items()}

    def report(self, loc: Loc, message: str, below: Loc = ()) -> None:
        """Note a problem at `loc`, and that its value is unknown. below: what was given of it, if it has no place."""
        self.broken.add(name(loc))
        self.findings.append(Finding(self.place(name(loc), name(below)), name(loc), message))

    def _is_unwritable(self, loc: Loc, value: Any) -> bool:
        """Whether a text of the value is none that a file can hold; reports it."""
        for text in _texts(value):
            if fault := "holds a null byte; remove it" if "\0" in text else half_character(text):
                self.report(loc, fault)
                return True
        return False

    def report_unknown(self, loc: Loc) -> None:
        """Note a field that does not exist, once for all that is below it."""
        first = next(loc[:end] for end in range(1, len(loc) + 1) if slot(loc[:end]) is None)
        if name(first) in self.broken:
            return
        self._num_unknown += 1
        # A comparison with all fields takes milliseconds, and a file of thousands of them is not a config.
        meant = nearest(first) if self._num_unknown <= MOST_GUESSES else None
        hint = ""
        if meant:
            self.broken.add(name(meant))
            hint = f"; did you mean '{meant[-1] if meant[:-1] == first[:-1] else name(meant)}'?"
        self.report(first, f"unknown field{hint}", loc)

    def place(self, *fields: str) -> Place:
        """Where the first of the fields that was given stands, else the nearest section above the first."""
        places = self._named
        given = next((places[field] for field in fields if field in places), None)
        above = fields[0]
        while given is None and above:
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
            given = places.get(above)
        return given or self.file

    def tree(self) -> dict[str, Any]:
        """The values as nested sections. A section whose `type` is not given gets that of the default."""
        root: dict[str, Any] = {}
        for (*above, key), value in self.values.items():
            section = root
            for part in above:
                section = section.setdefault(str(part), {})
            section[str(key)] = value
        for key in _typed_sections():
            if key in root:
                root[key].setdefault("type", RunConfig.model_fields[key].default.type)
        return root

    def drop(self, loc: Loc) -> None:
        """Forget the value at `loc`, or the field it is part of."""
        for given in list(self.values):
            if given[: len(loc)] == loc or loc[: len(given)] == given:
                del self.values[given]

    def leave_out_other_types(self) -> None:
        """When the command line changes a section's `type`, the file's fields for the old type go with it."""
        for key, tags in _typed_sections().items():
            tag = self.values.get((key, "type"))
            if not isinstance(tag, str) or tag not in tags or not self.place(f"{key}.type").override:
                continue
            for loc in [loc for loc in self.values if loc[0] == key and loc[1] not in tags[tag].model_fields]:
                place = self.place(name(loc))  # of a field of free keys perhaps only one key has a place
                if not place.override:
                    self.notes.append(f"{place}: {name(loc)} is left out: {key}.type is {tag}")
                    del self.values[loc]

    def _foreign_target(self, loc: Loc, given: Mapping[Loc, Any]) -> Loc | None:
        """The field that a key of another trainer means; reports a key that means nothing here."""
        refusal = next((why for key in loc if (why := aliases.refused_key(str(key)))), None)
        meant = aliases.field_of(str(loc[-1]))
        if refusal:
            self.report(loc, refusal)
        elif not meant:
            self.report_unknown(loc)
        elif tuple(meant.split(".")) in given:
            self.report(loc, f"means {meant}, which is given too; remove one of them")
        else:
            return tuple(meant.split("."))
        return None

    def _translated(self, loc: Loc, target: Loc, value: Any) -> dict[Loc, Any]:
        """{field: value}: what `value`, written at `loc` for the field `target`, means in our words."""
        field = name(target)
        refusal = aliases.refused_value(field, value)
        if refusal:
            self.report(loc, f"{shown(value)} {refusal}")
            return {}
        meant = aliases.values_of(field, value) or {field: _same_word(slot(target), value)}
        if loc == target and meant == {field: value}:
            return {loc: value}
        words = " and ".join(f"{key} {shown(word)}" for key, word in meant.items())
        self.notes.append(f"{self.place(name(loc))}: {name(loc)} {shown(value)} is read as {words}")
        return {tuple(key.split(".")): word for key, word in meant.items()}


def _leaves(
    tree: Mapping[str, Any], draft: _Draft, here: Slot | None = ROOT, loc: Loc = ()
) -> Iterator[tuple[Loc, Any]]:
    """(field, value) of all that is given below `loc`; reports what stands where a section belongs."""
    for key, value in tree.items():
        at, below = (*loc, key), here.child(key) if here else None
        if isinstance(value, dict) and (below.sections if below else value):
            yield from _leaves(value, draft, below, at)
        elif below is None or not below.sections:
            yield at, value
        elif value is not None or below.tags:
            draft.report(at, below.reason(value))


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(part)


def _typed_sections() -> dict[str, dict[str, Any]]:
    """{key of a section of which there are several types: {type: class}}"""
    tags = {key: here.tags for key in RunConfig.model_fields if (here := slot((key,)))}
    return {key: found for key, found in tags.items() if found}


def _same_word(here: Slot | None, value: Any) -> Any:
    """The word that is written in other letter case where only some words may stand."""
    if here and isinstance(value, str) and value not in here.words and value.lower() in here.words:
        return value.lower()
    return value


def _report_stages(cfg: RunConfig, draft: _Draft) -> None:
    """Report what is wrong with the fields of a stage."""
    for index in range(len(cfg.stages)):
        try:
            stage_config(cfg, index)
        except ConfigError as error:
            for problem in error.problems:
                field = f"stages[{index}].set.{problem.field}"
                draft.findings.append(Finding(draft.place(field), field, problem.message))


def _advice(cfg: RunConfig, draft: _Draft) -> list[str]:
    """A sentence per piece of advice on the run, or on its stages."""
    found = dict.fromkeys(one for part in stage_configs(cfg) for one in advice(part))
    return [f"{draft.place(one.field)}: {one}" for one in found]


def _stage_resolved(stage: Any, folder: Path) -> Any:
    """A stage with its fields in one mapping of dotted names, paths made absolute."""
    if not isinstance(stage, dict) or not isinstance(stage.get("set"), dict):
        return stage
    fields = dict(_dotted(stage["set"]))
    return stage | {
        "set": {key: _resolved(slot(tuple(key.split("."))), value, folder) for key, value in fields.items()}
    }


def _dotted(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        field = f"{above}{key}"
        here = slot(tuple(field.split(".")))
        if isinstance(value, dict) and here and here.sections:
            yield from _dotted(value, f"{field}.")
        else:
            yield field, value


def _resolved(here: Slot | None, value: Any, folder: Path) -> Any:
    """The value with its paths made absolute. What may also be a model's name stays when it is no path."""
    if isinstance(value, list):
        return [_resolved(here.child(0) if here else None, item, folder) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(here.child(key) if here else None, item, folder) for key, item in value.items()}
    if here is None or not here.path or not isinstance(value, str) or not value:
        return value
    path = _absolute(value, folder)
    if here.path == "model" and (value in MODEL_WORDS or not os.path.exists(path)):
        return value
    return path


def _absolute(value: str, folder: Path) -> str:
    """A path as a file in `folder` names it.

    A shipped preset names the user's own data beside its folder, as `../my-images`. In a checkout that is its root; an
    installation's neighbours are packages, and the data is in the current folder.
    """
    if CHECKOUT is None and folder == PRESETS and value.startswith("../"):
        return os.path.abspath(value.removeprefix("../"))
    return os.path.normpath(folder / os.path.expanduser(value))


def _parsed(text: str, draft: _Draft) -> dict[str, Any]:
    """The text as nested mappings; its lines go into the draft. Raises ConfigError when it is no YAML mapping."""
    path = draft.file.source
    try:
        parsed = yaml12.parse(text)
    except yaml12.YamlError as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from error
    if not parsed.value:
        raise ConfigError(f"{path}: is empty; name at least data.path")
    if not isinstance(parsed.value, dict):
        raise ConfigError(f"{path}:1: needs lines of field: value, not {shown(parsed.value)}")
    draft.put({loc: draft.file._replace(line=line) for loc, line in parsed.lines.items()})
    for loc, line in parsed.repeated:
        message = f"is given twice, first in line {parsed.lines[loc]}; remove one"
        draft.findings.append(Finding(draft.file._replace(line=line), name(loc), message))
    return parsed.value


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a YAML file in it")
    try:
        data = files.read(path, 4 * yaml12.MAX_LENGTH)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file{similar_name(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except InputError as error:
        raise ConfigError(str(error)) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from error


def similar_name(path: Path) -> str:
    """Hint at the file or folder next to `path` whose name is nearest, empty where none is."""
    names = sorted(entry.name for entry in path.parent.glob("*"))
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean '{path.with_name(near[0])}'?" if near else ""


def _add_override(text: str, draft: _Draft) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        message = "is no override; write field=value, as train.steps=100"
        draft.findings.append(Finding(COMMAND_LINE, shown(text), message))
        return
    loc = _override_loc(key.strip())
    here, above = slot(loc), slot(loc[:-1])
    if not (here and here.sections):  # the fields of a section that are not given stay as the file has them
        draft.forget_places(loc)
    draft.put({loc: COMMAND_LINE})
    if above and not above.sections and not above.child(loc[-1]):
        draft.report_unknown(loc)
        return
    try:
        value = _override_value(raw, loc, draft)
    except yaml12.YamlError as error:
        draft.report(loc, str(error))
        return
    if value is None and here and here.sections:
        draft.report(loc, f"is empty; name a field of it, as {name(loc)}.{here.keys[0]}, or leave it out")
        return
    draft.add(_nested(loc, value, draft), Path.cwd())


def _override_loc(key: str) -> Loc:
    """The dotted key as a location. What follows a field of free keys is one key: `adapter.rank_pattern.attn.to_q`."""
    parts = key.split(".")
    for end in range(1, len(parts)):
        here = slot(tuple(parts[:end]))
        if here and not here.sections:
            return (*parts[:end], ".".join(parts[end:]))
    return tuple(parts)


def _override_value(raw: str, loc: Loc, draft: _Draft) -> Any:
    """The YAML value. A field of text takes `2024` as it is: a shell removes the quotes that YAML would need."""
    parsed = yaml12.parse(raw)
    draft.put({(*loc, *below): COMMAND_LINE for below in parsed.lines})
    for below, _ in parsed.repeated:
        draft.report((*loc, *below), "is given twice; remove one")
    here, value = slot(loc), parsed.value
    if not here or not here.is_text or isinstance(value, str | list | dict) or (value is None and here.may_be_empty):
        return value
    return raw.strip()


def _nested(loc: Loc, value: Any, draft: _Draft) -> dict[str, Any]:
    """The value in the sections above it. One key of a field of free keys keeps the others."""
    above = slot(loc[:-1])
    if above and not above.sections:
        others = draft.values.get(loc[:-1])
        loc, value = loc[:-1], {**(others if isinstance(others, dict) else {}), loc[-1]: value}
    for key in reversed(loc):
        value = {key: value}
    tree: dict[str, Any] = value
    return tree


def _validate(draft: _Draft) -> RunConfig | None:
    """The config, or None where it is wrong; the draft holds what is.

    What is invalid is left out and the rest is tried again, so that one mistake hides no other.
    """
    while True:
        try:
            return RunConfig.model_validate(draft.tree())
        except ValidationError as error:
            errors = error.errors()[:MOST_FINDINGS]
        rule = errors[0].get("ctx", {}).get("error")
        if isinstance(rule, RuleError):
            _report_rules(rule.problems, draft)
            return None
        problems = {_own_loc(error): error for error in errors}
        for loc, invalid in problems.items():
            _report_invalid(loc, invalid, draft)
        count = len(draft.values)
        for loc in problems:
            draft.drop(loc)
        assert len(draft.values) < count, "pydantic reports a field that was not given"


def _own_loc(error: Mapping[str, Any]) -> Loc:
    """The location of what is wrong, without the types of sections and the members of unions that pydantic tried."""
    plain: Loc = ()
    for key in error["loc"]:
        here = slot(plain)
        if here and key in here.tags:
            continue
        if here and not here.sections and not here.child(key):
            break
        plain = (*plain, key)
    return (*plain, "type") if error["type"] == "union_tag_invalid" else plain


def _report_invalid(loc: Loc, error: Mapping[str, Any], draft: _Draft) -> None:
    here, value = slot(loc), error["input"]
    match error["type"]:
        case "extra_forbidden" if here:
            section, tag = str(loc[0]), draft.tree()[str(loc[0])]["type"]
            draft.report(loc, f"is no field of {section}.type {tag}; remove it or change the type")
        case "extra_forbidden":
            draft.report_unknown(loc)
        case "missing" if here:
            draft.report(loc, f"is needed: {here.help}")
        case "union_tag_invalid" if here:
            draft.report(loc, here.reason(value["type"]))
        case "string_pattern_mismatch":
            is_name = error["ctx"]["pattern"] == NAME_PATTERN
            draft.report(loc, f"{shown(value)} is not {NAME_HELP if is_name else 'a path from the root; begin with /'}")
        case _ if here:
            draft.report(loc, here.reason(value))


def _report_rules(problems: Sequence[Problem], draft: _Draft) -> None:
    """Report what does not go together, except where a field it depends on is itself unknown."""
    for problem in problems:
        fields = (problem.field, *problem.depends_on)
        if not any(_overlap(one, other) for one in fields for other in draft.broken):
            draft.findings.append(Finding(draft.place(*fields), problem.field, problem.message))


def _overlap(one: str, other: str) -> bool:
    """Whether two fields are the same, or one holds the other."""
    short, long = sorted((one, other), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}["))


if __name__ == "__main__":
    write_schema(SCHEMA)
