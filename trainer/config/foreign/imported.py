"""A config of another trainer as one of ours, with a list of what was taken, changed and left out, and why."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import families, yaml12
from trainer.config.foreign import base_models
from trainer.config.foreign.ai_toolkit import AI_TOOLKIT
from trainer.config.foreign.conversion import NO_FOLDERS, OF_ALL, Conversion, Line
from trainer.config.foreign.diffusion_pipe import DIFFUSION_PIPE
from trainer.config.foreign.kohya import KOHYA
from trainer.config.foreign.onetrainer import ONETRAINER
from trainer.config.foreign.reading import parsed
from trainer.config.foreign.simpletuner import SIMPLETUNER
from trainer.config.foreign.table import Part, Tool
from trainer.config.load import ConfigError, ConfigFile, load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import family_names
from trainer.system.errors import InputError
from trainer.system.terminal import printable

TOOLS = (AI_TOOLKIT, ONETRAINER, SIMPLETUNER, DIFFUSION_PIPE, KOHYA)
"""In the order in which a file is looked at: some of kohya's keys are SimpleTuner's too."""
DAMAGE = (TypeError, ValueError, AttributeError, KeyError)
"""Raised by a table's functions for a section of another type."""
MOST_ROUNDS = 100
MOST_NAME = 255
"""Letters of a file's name: a longer one is no file."""
"""Times that what is refused is taken out."""


class UnknownModel(InputError):
    """The base model of a config is none that ShardStudio knows by its name."""


@dataclass(frozen=True)
class Imported:
    """A config of another trainer as one of ours.

    Attributes:
        tool: Name of the other trainer.
        loaded: The config, as `load_config` returns it.
        text: The config as YAML, without our defaults.
        preset: Name of a preset of the same model, or of one of its family.
        taken: Keys that mean the same, perhaps in another unit.
        changed: Keys whose meaning changed.
        left_out: Keys without a counterpart, and values that are refused here.
    """

    tool: str
    loaded: ConfigFile
    text: str
    preset: str
    taken: tuple[Line, ...]
    changed: tuple[Line, ...]
    left_out: tuple[Line, ...]

    def lists(self) -> dict[str, list[str]]:
        """Return {name of a list: its lines}; keys that were left out for one reason share a line.

        A line has no line breaks, whatever the keys hold: it is a comment of the preset too.
        """
        reasons: dict[str, list[str]] = {}
        for line in self.left_out:
            reasons.setdefault(line.why, []).append(line.key)
        left = [f"{', '.join(keys)}: {why}" for why, keys in reasons.items()]
        lists = {"taken": [*map(str, self.taken)], "changed": [*map(str, self.changed)], "left out": left}
        return {name: [" ".join(line.split()) for line in lines] for name, lines in lists.items()}

    @property
    def names_folders(self) -> bool:
        """Whether the config says where the images are."""
        return all(line.key != NO_FOLDERS for line in self.changed)

    def file(self) -> str:
        """Return the content of a preset: the config under a head with what differs."""
        lists = self.lists()
        head = [f"Imported from a config of {self.tool}."]
        head += [f"{name}: {line}" for name in ("changed", "left out") for line in lists[name]]
        return "".join(f"# {printable(line)}\n" for line in head) + self.text


def imported(files: Mapping[str, str], folder: Path, overrides: Sequence[str] = ()) -> Imported:
    """Return a config of another trainer as one of ours.

    Args:
        files: {name: text} of the config, and of further files that belong to it: folders of images, prompts.
        folder: Relative paths in them are relative to this one.
        overrides: `key=value` of our fields, which replace those of the files.

    Raises:
        InputError: They are not a config of a trainer that is known, or ShardStudio does not train its model.
    """
    name, tool, parts = _together(files)
    try:
        found = Conversion(tool, parts)
    except DAMAGE as error:
        raise InputError(f"{name}: a section of it, or of a file with it, is not as {tool.name} writes it") from error
    for _ in range(MOST_ROUNDS):
        text = yaml12.dump(found.tree())
        try:
            loaded = load_config_text(text, overrides, folder / "imported.yaml")
            problems = [*families.refused(loaded.config)]
        except ConfigError as error:
            if any(problem.field == "model.family" for problem in error.problems):
                raise UnknownModel(
                    f"{name}: its base model is none that ShardStudio knows by its name; name it after the file, for "
                    f"example model.family={family_names()[-1]} model.path=FOLDER"
                ) from error
            problems = [*error.problems]
            if not problems:
                raise
        if not problems:
            break
        if not [problem for problem in problems if found.refuse(problem)]:
            raise InputError("\n".join(map(str, problems)))
    # Paths are written from the root, so that the file can be moved.
    tree = found.tree()
    for override in overrides:
        section = tree
        *above, key = override.partition("=")[0].strip().split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[key] = None
    text = yaml12.dump(_resolved(tree, loaded.config.model_dump(mode="json")))
    lines = found.lines.values()
    return Imported(
        tool=tool.name,
        loaded=loaded,
        text=text,
        preset=base_models.nearest_preset(loaded.config.model),
        taken=tuple(line for line in lines if not line.why),
        changed=tuple(line for line in lines if line.why),
        left_out=tuple(found.left_out),
    )


def further_files(name: str, text: str) -> list[str]:
    """Return the names of files that a config names and that belong to it, without their folders."""
    tool, part, tree = _recognized(name, text)
    try:
        given = tool.given({"run": tree}) if part == "run" else {}
    except DAMAGE:  # `imported` says so
        given = {}
    texts = [value for key in tool.files if isinstance(value := given.get(key), str)]
    named = [re.split(r"[\\/]", value)[-1] for value in texts]
    return [one for one in named if one.lower().endswith((".toml", ".json", ".txt")) and len(one) <= MOST_NAME]


def words_of(field: str) -> str:
    """Return the keys by which other trainers know a field, for the form's search."""
    return " ".join(_words().get(field, ()))


@functools.cache
def missing_words() -> Mapping[str, str]:
    """Return {why there is no field: keys of other trainers, separated by spaces}, for the form's search."""
    found: dict[str, dict[str, None]] = {}
    for tool in TOOLS:
        for key, why in tool.left_out.items():
            if "*" not in key:
                found.setdefault(why, {})[key] = None
    return {why: " ".join(keys) for why, keys in found.items()}


def _together(files: Mapping[str, str]) -> tuple[str, Tool, dict[Part, Any]]:
    """Return the name of the config, its tool, and {part: values} of all files."""
    runs: list[tuple[str, Tool, Any]] = []
    others: list[str] = []
    for name, text in files.items():
        try:
            tool, part, tree = _recognized(name, text)
        except InputError:
            if len(files) == 1:
                raise
            others.append(name)
            continue
        if part == "run":
            runs.append((name, tool, tree))
        else:
            others.append(name)
    if len(runs) > 1:
        raise InputError(f"{' and '.join(name for name, _, _ in runs)}: are two configs; import one at a time")
    if not runs:
        raise InputError(
            f"{', '.join(files)}: no config of a run; a file of folders, prompts or an adapter's settings is imported "
            "together with the config that names it"
        )
    [(name, tool, tree)] = runs
    parts: dict[Part, Any] = {"run": tree}
    for other in others:
        if other.lower().endswith(".txt") and "prompts" in tool.files.values():
            parts["prompts"] = files[other]
            continue
        _, part, values = _recognized(other, files[other], (tool,))
        parts[part] = values
    return name, tool, parts


def _recognized(name: str, text: str, tools: Sequence[Tool] = TOOLS) -> tuple[Tool, Part, Any]:
    """Return the tool that wrote a file, what the file holds, and its values. Raises InputError."""
    tree = parsed(name, text)
    for tool in tools:
        if part := tool.part(tree):
            return tool, part, tree
    model = tree.get("model") if isinstance(tree, dict) else None
    if isinstance(model, dict) and "family" in model and tree.keys() <= RunConfig.model_fields.keys():
        raise InputError(f"{name}: is a config of ShardStudio already; use it as it is")
    known = ", ".join(tool.name for tool in tools)
    raise InputError(f"{name}: is not a config of {known}")


def _resolved(tree: Any, whole: Any) -> Any:
    """Return the values of `tree` as they are in the whole config."""
    if isinstance(tree, dict) and isinstance(whole, dict):
        return {key: _resolved(value, whole.get(key)) for key, value in tree.items()}
    if isinstance(tree, list) and isinstance(whole, list) and tree and isinstance(tree[0], dict):
        return [_resolved(one, other) for one, other in zip(tree, whole, strict=True)]
    return whole


@functools.cache
def _words() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for tool in TOOLS:
        rows = {
            key: to.field if "." in to.field else OF_ALL.get(to.field, f"data.{to.field}")
            for key, to in tool.row_fields.items()
        }
        for key, field in (*((key, to.field) for key, to in tool.fields.items()), *rows.items()):
            if key not in found.setdefault(field, []):
                found[field].append(key)
    return found
