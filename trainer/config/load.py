"""Load a config file with `key=value` overrides into a RunConfig, and dump it.

All problems are reported at once, sorted by line, as `file:line: field: reason; did you mean 'x'?`.
`python -m trainer.config.load` writes presets/schema.json.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainer.config import aliases, yaml12
from trainer.config.fields import ROOT, Slot, name, nearest, shown, slot
from trainer.config.schema import RunConfig, advice
from trainer.config.sections import MODEL_WORDS, NAME_HELP, NAME_PATTERN, TEMPLATE_SUFFIX, half_character
from trainer.config.yaml12 import Loc
from trainer.system import files
from trainer.system.errors import InputError, Problem, RuleError
from trainer.system.installation import CHECKOUT, PRESETS
from trainer.system.terminal import shortened

MOST_GUESSES = 20
"""Number of unknown fields for which a field of similar spelling is searched."""
MOST_NAMES = 5000
"""Number of files next to a missing one that are compared with its name."""
MOST_FINDINGS = 200
"""Number of invalid values that are reported at once."""
MOST_SHOWN = 1500
"""Letters of a problem that are shown, whatever a value holds."""
MOST_STAGES = 32
"""Largest number of stages. Each is checked as a separate config."""
SCHEMA = PRESETS / "schema.json"


class ConfigError(InputError):
    """Every problem with a config file and its overrides, one per line.

    Attributes:
        problems: The same problems by field; empty if the file as a whole is not a config.
    """

    def __init__(self, text: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class ConfigFile:
    """A loaded config.

    Attributes:
        config: The config.
        source: The file, as given.
        notes: A sentence for each foreign spelling that was translated, each field that was left out, and each advice.
        origins: {name of a field that was given: its file and line, or `command line`}.
    """

    config: RunConfig
    source: Path
    notes: tuple[str, ...]
    origins: Mapping[str, str] = dataclasses.field(repr=False)

    def where(self, field: str) -> str:
        """Return where a field was given: `presets/x.yaml:6`, `command line`, or the file alone for a default."""
        return self.origins.get(field, str(self.source))

    def refuse(self, problems: Sequence[Problem]) -> None:
        """Raise ConfigError with the origin of each problem, if there are any."""
        if problems:
            text = "\n".join(_on_one_line(f"{self.where(problem.field)}: {problem}") for problem in problems)
            raise ConfigError(text, problems)


def load_config(path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read a YAML file, apply overrides and validate.

    Relative paths in the file are relative to its folder. Those in overrides, and those in an installed preset that
    lead out of its folder, are relative to the current folder.

    Args:
        path: The file.
        overrides: `key=value` with dotted keys and YAML values. `stages.NAME.key=value` changes one stage.

    Raises:
        ConfigError: It holds every problem.
    """
    return load_config_text(_read_text(path), overrides, path)


def load_config_text(text: str, overrides: Sequence[str], path: Path) -> ConfigFile:
    """Do the same as `load_config` for a file at `path` with this text. The file need not exist."""
    reader = _ConfigReader(str(path))
    reader.add(_parsed(text, reader), Path(os.path.abspath(path)).parent)
    for override in overrides:
        _add_override(override, reader)
    reader.leave_out_other_types()
    reader.choose_length()
    config = _validate(reader)
    if config is not None and len(config.stages) > MOST_STAGES:
        reader.report(("stages",), f"has {len(config.stages)} stages, at most {MOST_STAGES} are allowed; remove some")
    elif config is not None:
        _report_stages(config, reader)
    if reader.findings or config is None:
        findings = sorted(reader.findings)
        problems = [Problem(finding.field, finding.message) for finding in findings]
        raise ConfigError("\n".join(map(str, findings)), problems)
    advised = dict.fromkeys(problem for part in stage_configs(config) for problem in advice(part))
    reader.notes += [f"{reader.origin_of(problem.field)}: {problem}" for problem in advised]
    origins = {name(loc): str(origin) for loc, origin in reader.origins.items()}
    return ConfigFile(config, path, tuple(reader.notes), origins)


def stage_config(cfg: RunConfig, index: int, given: Sequence[str] = ()) -> RunConfig:
    """Return the config of one stage of a run, itself without stages.

    Args:
        cfg: Config of the run.
        index: Index of the stage.
        given: Further fields, as `key=value`.

    Raises:
        ConfigError: It holds every problem of this stage.
    """
    overrides = [f"{field}={json.dumps(value)}" for field, value in cfg.stages[index].set.items()]
    text = yaml12.dump(cfg.model_dump(mode="json", exclude={"stages"}))
    return load_config_text(text, [*overrides, *given], Path(f"stages[{index}]")).config


def stage_configs(cfg: RunConfig) -> list[RunConfig]:
    """Return the configs of all stages in order, or the config itself for a run without stages."""
    return [stage_config(cfg, index) for index in range(len(cfg.stages))] or [cfg]


def _on_one_line(sentence: str) -> str:
    """Return the sentence with unprintable characters, such as line breaks in a value, escaped as in Python; of a very
    long one, its beginning and end."""
    return shortened("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in sentence), MOST_SHOWN)


def dump_config(config: RunConfig) -> str:
    """Return the config as YAML with all defaults. `load_config` reads it back as an equal config."""
    return yaml12.dump(config.model_dump(mode="json"))


def write_schema(path: Path) -> None:
    """Write the JSON Schema of a config file: types, ranges, defaults, units and descriptions, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    files.replace(path, json.dumps(schema, indent=1, ensure_ascii=False) + "\n")


class Origin(NamedTuple):
    """Where a value was given: a line of the file, or the command line, which sorts after the file.

    Attributes:
        override: Whether it was given on the command line.
        line: Line in the file, from 1; 0 for the source as a whole.
        source: The file, or "command line".
    """

    override: bool
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


COMMAND_LINE = Origin(True, 0, "command line")


class Finding(NamedTuple):
    """A problem and its origin, by which findings are sorted."""

    origin: Origin
    field: str
    message: str

    def __str__(self) -> str:
        return _on_one_line(f"{self.origin}: {self.field}: {self.message}")


class _ConfigReader:
    """Collects the values of a config from its sources, their origins, and the problems found so far.

    Attributes:
        file: Origin that stands for the file as a whole.
        values: {location of a field: value}. A list or mapping that is the value of one field is one entry.
        origins: {location: origin} of everything that was given, including sections and list items.
        broken: Names of fields whose value is unknown: it is invalid, or a misspelt key may have been meant to set it.
        findings: The problems.
        notes: As in ConfigFile.
    """

    def __init__(self, source: str) -> None:
        self.file = Origin(False, 0, source)
        self.values: dict[Loc, Any] = {}
        self.origins: dict[Loc, Origin] = {}
        self._named: dict[str, Origin] = {}
        self._num_unknown = 0
        self.broken: set[str] = set()
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def add(self, tree: Mapping[str, Any], folder: Path) -> None:
        """Add the values of a source. Its relative paths are relative to `folder`."""
        leaves = {loc: value for loc, value in _leaves(tree, self) if not self._is_unwritable(loc, value)}
        given: dict[Loc, Any] = {}
        implied: dict[Loc, Any] = {}
        for loc in sorted(
            leaves, key=lambda loc: slot(loc) is None
        ):  # our fields first, so that a foreign key that repeats one is found
            target = loc if slot(loc) else self._foreign_target(loc, given)
            meant = self._translated(loc, target, leaves[loc]) if target else {}
            implied.update(meant)
            given.update({key: value for key, value in meant.items() if key == target})
            self.record_origins({key: self.origin_of(name(loc)) for key in meant if key not in leaves})
        for loc, value in (implied | given).items():
            if loc == ("stages",) and isinstance(value, list):
                self.values[loc] = [_stage_resolved(stage, folder) for stage in value]
            else:
                self.values[loc] = _resolved(slot(loc), value, folder)

    def set_in_stage(self, loc: Loc, value: Any) -> None:
        """Set a field of one stage, at ("stages", index, "set", field), from the command line."""
        _, index, _, field = loc
        if self._is_unwritable(loc, value):
            return
        stage = self.values[("stages",)][index]
        own = {} if stage.get("set") is None else stage["set"]
        if not isinstance(own, dict):  # it is reported with the other mistakes of the file
            return
        # A field with free keys is replaced whole, as in a run without stages.
        others = {key: one for key, one in own.items() if key != field and not str(key).startswith(f"{field}.")}
        stage["set"] = others | _stage_resolved({"set": {field: value}}, Path.cwd())["set"]

    def record_origins(self, origins: Mapping[Loc, Origin]) -> None:
        """Record where locations were given."""
        self.origins.update(origins)
        self._named.update({name(loc): origin for loc, origin in origins.items()})

    def forget_origins(self, above: Loc) -> None:
        """Remove the origins of a location and everything below it."""
        self.origins = {loc: origin for loc, origin in self.origins.items() if loc[: len(above)] != above}
        self._named = {name(loc): origin for loc, origin in self.origins.items()}

    def report(self, loc: Loc, message: str, below: Loc = ()) -> None:
        """Record a problem at `loc`, whose value is then unknown.

        Args:
            loc: The location.
            message: What is wrong.
            below: A location below it that was given, for the origin if `loc` itself has none.
        """
        self.broken.add(name(loc))
        self.findings.append(Finding(self.origin_of(name(loc), name(below)), name(loc), message))

    def _is_unwritable(self, loc: Loc, value: Any) -> bool:
        """Whether the value holds text that a file cannot hold; reports it."""
        for text in _texts(value):
            if fault := "holds a null byte; remove it" if "\0" in text else half_character(text):
                self.report(loc, fault)
                return True
        return False

    def report_unknown(self, loc: Loc) -> None:
        """Record a field that does not exist, once for everything below it."""
        first = next(loc[:end] for end in range(1, len(loc) + 1) if slot(loc[:end]) is None)
        if name(first) in self.broken:
            return
        self._num_unknown += 1
        # A comparison with all fields takes milliseconds, and a file with thousands of unknown fields is not a config.
        meant = nearest(first) if self._num_unknown <= MOST_GUESSES else None
        hint = ""
        if meant:
            self.broken.add(name(meant))
            hint = f"; did you mean '{name(meant)}'?"
        self.report(first, f"unknown field{hint}", loc)

    def origin_of(self, *fields: str) -> Origin:
        """Return the origin of the first of the fields that was given, else of the nearest section above the first."""
        origins = self._named
        given = next((origins[field] for field in fields if field in origins), None)
        above = fields[0]
        while given is None and above:
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
            given = origins.get(above)
        return given or self.file

    def tree(self) -> dict[str, Any]:
        """Return the values as nested sections. A section without a `type` gets the default one."""
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
        """Remove the value at `loc`, or of the field that contains it."""
        for given in list(self.values):
            if given[: len(loc)] == loc or loc[: len(given)] == given:
                del self.values[given]

    def leave_out_other_types(self) -> None:
        """If the command line changes a section's `type`, leave out the file's fields for the old type."""
        for key, tags in _typed_sections().items():
            tag = self.values.get((key, "type"))
            if not isinstance(tag, str) or tag not in tags or not self.origin_of(f"{key}.type").override:
                continue
            for loc in [loc for loc in self.values if loc[0] == key and loc[1] not in tags[tag].model_fields]:
                origin = self.origin_of(name(loc))  # in a field with free keys, only some keys may have an origin
                if not origin.override:
                    self.notes.append(f"{origin}: {name(loc)} is left out: {key}.type is {tag}")
                    del self.values[loc]

    def choose_length(self) -> None:
        """Refuse steps with epochs on one command line; steps on it replace the epochs of the file."""
        steps, epochs = ("train", "steps"), ("train", "epochs")
        if self.values.get(steps) is None or self.values.get(epochs) is None:
            return
        if not self.origin_of(name(steps)).override:
            return
        origin = self.origin_of(name(epochs))
        if origin.override:
            message = f"cannot be combined with train.steps {shown(self.values[steps])}; leave one of them out"
            self.report(epochs, message)
        else:
            self.notes.append(f"{origin}: train.epochs is left out: train.steps is {shown(self.values[steps])}")
            del self.values[epochs]

    def _foreign_target(self, loc: Loc, given: Mapping[Loc, Any]) -> Loc | None:
        """Return our field for a key of another trainer, or None and report a key without one."""
        refusal = next((why for key in loc if (why := aliases.refused_key(str(key)))), None)
        meant = aliases.field_of(str(loc[-1]))
        if refusal:
            self.report(loc, refusal)
        elif not meant:
            self.report_unknown(loc)
        elif tuple(meant.split(".")) in given:
            self.report(loc, f"means {meant}, which is also given; remove one of them")
        else:
            return tuple(meant.split("."))
        return None

    def _translated(self, loc: Loc, target: Loc, value: Any) -> dict[Loc, Any]:
        """Return {location: our value} for a `value` that was given at `loc` and is meant for the field `target`."""
        field = name(target)
        refusal = aliases.refused_value(field, value)
        if refusal:
            self.report(loc, f"{shown(value)} {refusal}")
            return {}
        meant = aliases.values_of(field, value) or {field: _same_word(slot(target), value)}
        if loc == target and meant == {field: value}:
            return {loc: value}
        words = " and ".join(f"{key} {shown(word)}" for key, word in meant.items())
        self.notes.append(f"{self.origin_of(name(loc))}: {name(loc)} {shown(value)} is read as {words}")
        return {tuple(key.split(".")): word for key, word in meant.items()}


def _leaves(
    tree: Mapping[str, Any], reader: _ConfigReader, here: Slot | None = ROOT, loc: Loc = ()
) -> Iterator[tuple[Loc, Any]]:
    """Yield (location, value) of every field given below `loc`; report values where a section is expected."""
    for key, value in tree.items():
        at, below = (*loc, key), here.child(key) if here else None
        if isinstance(value, dict) and (below.sections if below else value):
            yield from _leaves(value, reader, below, at)
        elif below is None or not below.sections:
            yield at, value
        elif value is not None or below.tags:
            reader.report(at, below.reason(value))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(part)


def _typed_sections() -> dict[str, dict[str, Any]]:
    """Return {key of a section with several types: {type: class}}."""
    tags = {key: here.tags for key in RunConfig.model_fields if (here := slot((key,)))}
    return {key: types for key, types in tags.items() if types}


def _same_word(here: Slot | None, value: Any) -> Any:
    """Return a word in lower case if only that is an accepted word here; else the value unchanged."""
    if here and isinstance(value, str) and value not in here.words and value.lower() in here.words:
        return value.lower()
    return value


def _report_stages(cfg: RunConfig, reader: _ConfigReader) -> None:
    """Report the problems of every stage."""
    for index in range(len(cfg.stages)):
        try:
            stage_config(cfg, index)
        except ConfigError as error:
            for problem in error.problems:
                field = f"stages[{index}].set.{problem.field}"
                reader.findings.append(Finding(reader.origin_of(field), field, problem.message))


def _stage_resolved(stage: Any, folder: Path) -> Any:
    """Return a stage with its fields as one mapping of dotted names, and with absolute paths."""
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
    """Return the value with absolute paths. Names of models and of our own chat templates are kept."""
    if isinstance(value, list):
        return [_resolved(here.child(0) if here else None, item, folder) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(here.child(key) if here else None, item, folder) for key, item in value.items()}
    if here is None or not here.path or not isinstance(value, str) or not value:
        return value
    value = files.pasted(value)
    path = _absolute(value, folder)
    if here.path == "model" and (value in MODEL_WORDS or not os.path.exists(path)):
        return value
    if here.path == "template" and not value.endswith(TEMPLATE_SUFFIX):
        return value
    return path


def _absolute(value: str, folder: Path) -> str:
    """Return the absolute path of `value` in a file in `folder`.

    A shipped preset names the user's data next to its folder, for example `../my-images`. In a checkout that is the
    root; next to an installed preset are packages, and the data is looked for in the current folder.
    """
    if CHECKOUT is None and folder == PRESETS and value.startswith("../"):
        return os.path.abspath(value.removeprefix("../"))
    return os.path.normpath(folder / os.path.expanduser(value))


def _parsed(text: str, reader: _ConfigReader) -> dict[str, Any]:
    """Parse the text into nested mappings and record their lines. Raises ConfigError if it is not a YAML mapping."""
    path = reader.file.source
    try:
        parsed = yaml12.parse(text)
    except yaml12.YamlError as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from error
    if not parsed.value:
        raise ConfigError(f"{path}: is empty; name at least data.path")
    if not isinstance(parsed.value, dict):
        raise ConfigError(f"{path}:1: needs lines of field: value, not {shown(parsed.value)}")
    reader.record_origins({loc: reader.file._replace(line=line) for loc, line in parsed.lines.items()})
    for loc, line in parsed.repeated:
        message = f"is given twice, first in line {parsed.lines[loc]}; remove one"
        reader.findings.append(Finding(reader.file._replace(line=line), name(loc), message))
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
    """Return a hint at the file or folder next to `path` with the most similar name; empty if none is similar.

    At most MOST_NAMES of its neighbours are compared: a form asks while its user types.
    """
    try:
        with os.scandir(path.parent) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MOST_NAMES))
    except OSError:  # there is no such folder, or its names cannot be read: nothing to suggest
        return ""
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean '{path.with_name(near[0])}'?" if near else ""


def _add_override(text: str, reader: _ConfigReader) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        message = "is not an override; write field=value, for example train.steps=100"
        reader.findings.append(Finding(COMMAND_LINE, shown(text), message))
        return
    if found := _stage_field(key.strip(), reader):
        _change_stage(*found, raw, reader)
        return
    loc = _override_loc(key.strip())
    here, above = slot(loc), slot(loc[:-1])
    if not (here and here.sections):  # fields of a section that are not given keep the file's values
        reader.forget_origins(loc)
    reader.record_origins({loc: COMMAND_LINE})
    if above and not above.sections and not above.child(loc[-1]):
        reader.report_unknown(loc)
        return
    try:
        value = _override_value(raw, loc, reader)
    except yaml12.YamlError as error:
        reader.report(loc, str(error))
        return
    if value is None and here and here.sections:
        reader.report(loc, f"is empty; give one of its fields, for example {name(loc)}.{here.keys[0]}, or leave it out")
        return
    reader.add(_nested(loc, value, reader), Path.cwd())


def _stage_field(key: str, reader: _ConfigReader) -> tuple[int, str] | None:
    """Return the index of a stage and its field for a key such as `stages.chat.train.steps`; None for another key."""
    stages = reader.values.get(("stages",))
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        above = f"stages.{stage.get('name')}." if isinstance(stage, dict) else ""
        field = key.removeprefix(above)
        if field != key and (here := slot(_override_loc(field))) and not here.sections:
            return index, field
    return None


def _change_stage(index: int, field: str, raw: str, reader: _ConfigReader) -> None:
    """Set a field of one stage to a YAML value."""
    loc = ("stages", index, "set", field)
    reader.record_origins({loc: COMMAND_LINE})
    try:
        value = _override_value(raw, _override_loc(field), reader)
    except yaml12.YamlError as error:
        reader.report(loc, str(error))
        return
    reader.set_in_stage(loc, value)


def _override_loc(key: str) -> Loc:
    """Return the location of a dotted key. After a field with free keys, the rest is one key, as in
    `adapter.rank_pattern.attn.to_q`."""
    parts = key.split(".")
    for end in range(1, len(parts)):
        here = slot(tuple(parts[:end]))
        if here and not here.sections:
            return (*parts[:end], ".".join(parts[end:]))
    return tuple(parts)


def _override_value(raw: str, loc: Loc, reader: _ConfigReader) -> Any:
    """Parse the YAML value. In a text field, `2024` stays text, because a shell removes the quotes YAML would need.

    See DECISIONS 9.
    """
    parsed = yaml12.parse(raw)
    reader.record_origins({(*loc, *below): COMMAND_LINE for below in parsed.lines})
    for below, _ in parsed.repeated:
        reader.report((*loc, *below), "is given twice; remove one")
    here, value = slot(loc), parsed.value
    if not here or not here.is_text or isinstance(value, str | list | dict) or (value is None and here.may_be_empty):
        return value
    return raw.strip()


def _nested(loc: Loc, value: Any, reader: _ConfigReader) -> dict[str, Any]:
    """Return the value nested in its sections. A single key of a field with free keys keeps the other keys."""
    above = slot(loc[:-1])
    if above and not above.sections:
        others = reader.values.get(loc[:-1])
        loc, value = loc[:-1], {**(others if isinstance(others, dict) else {}), loc[-1]: value}
    for key in reversed(loc):
        value = {key: value}
    tree: dict[str, Any] = value
    return tree


def _validate(reader: _ConfigReader) -> RunConfig | None:
    """Return the config, or None if it has problems, which are reported.

    Invalid values are left out and the rest is validated again, so that one mistake does not hide others.
    """
    while True:
        try:
            return RunConfig.model_validate(reader.tree())
        except ValidationError as error:
            errors = error.errors()[:MOST_FINDINGS]
        rule = errors[0].get("ctx", {}).get("error")
        if isinstance(rule, RuleError):
            # A rule that depends on a field whose value is unknown is not reported.
            for problem in rule.problems:
                fields = (problem.field, *problem.depends_on)
                if not any(_overlap(one, other) for one in fields for other in reader.broken):
                    reader.findings.append(Finding(reader.origin_of(*fields), problem.field, problem.message))
            return None
        problems = {_own_loc(error): error for error in errors}
        for loc, invalid in problems.items():
            _report_invalid(loc, invalid, reader)
        count = len(reader.values)
        for loc in problems:
            reader.drop(loc)
        assert len(reader.values) < count, "pydantic reports a field that was not given"


def _own_loc(error: Mapping[str, Any]) -> Loc:
    """Return the location of a pydantic error, without the section types and union members that pydantic tried."""
    plain: Loc = ()
    for key in error["loc"]:
        here = slot(plain)
        if here and key in here.tags:
            continue
        if here and not here.sections and not here.child(key):
            break
        plain = (*plain, key)
    return (*plain, "type") if error["type"] == "union_tag_invalid" else plain


def _report_invalid(loc: Loc, error: Mapping[str, Any], reader: _ConfigReader) -> None:
    here, value = slot(loc), error["input"]
    match error["type"]:
        case "extra_forbidden" if here:
            section, tag = str(loc[0]), reader.tree()[str(loc[0])]["type"]
            reader.report(loc, f"is not a field of {section}.type {tag}; remove it or change the type")
        case "extra_forbidden":
            reader.report_unknown(loc)
        case "missing" if here:
            reader.report(loc, f"is needed: {here.help}")
        case "union_tag_invalid" if here:
            reader.report(loc, here.reason(value["type"]))
        case "string_pattern_mismatch":
            is_name = error["ctx"]["pattern"] == NAME_PATTERN
            reader.report(
                loc, f"{shown(value)} is not {NAME_HELP if is_name else 'a path from the root; begin with /'}"
            )
        case _ if here:
            reader.report(loc, here.reason(value))


def _overlap(one: str, other: str) -> bool:
    """Whether two fields are the same, or one contains the other."""
    short, long = sorted((one, other), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}["))


if __name__ == "__main__":
    write_schema(SCHEMA)
