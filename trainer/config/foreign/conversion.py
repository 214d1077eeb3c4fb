"""Values of another trainer's config to values of ours, by its table, with a line on each key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trainer.config import families, yaml12
from trainer.config.fields import slot
from trainer.config.foreign import base_models
from trainer.config.foreign.table import Changed, Given, LeftOut, Part, To, Tool
from trainer.system.errors import Problem
from trainer.system.terminal import shortened

SECRET = re.compile(
    r"(?i)(^|[._-])(secrets?\.|((hf|hub|huggingface|auth|access|bearer|wandb)_?)?token$|passw(or)?d|credentials?|"
    r"webhooks?($|_(config|url)))|api_?key|access_key|secret($|_)"
)
"""Keys whose value must not be written, shown or logged."""
SECRET_VALUE = re.compile(r"\b(hf|gh[opsu]|github_pat)_[A-Za-z0-9_]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bAKIA[A-Z0-9]{16}")
ADDRESS = re.compile(r"https?://\S+")
SECRET_IN_ADDRESS = re.compile(r"webhook|hooks\.|:[^/:\s]*@|[?&][\w-]*(token|key|secret|sig(nature)?)=")
MOST_SHOWN = 60
"""Characters of a value in a line."""
UNKNOWN = "not a key that ShardStudio knows: of another version, or misspelt"
BY_DEFAULT = " (by default)"
NO_FOLDERS = "folders of images"
PLACEHOLDER = "my-images"
"""Folder that our presets name too, for a config without one."""
LENGTH = ("train.steps", "train.epochs")
"""Two fields for one thing."""
OF_ALL = {"path": "data.path", "weight": "data.repeats", "micro_batch": "train.micro_batch"}
"""{field of a folder: the field of the config for a single folder}, where that is not `data` with the same name"""
ROLES = ("regularization", "validation", "masks", "references")
"""Fields of `data` that name a folder which is not trained on."""


@dataclass(frozen=True)
class Line:
    """What became of a key.

    Attributes:
        key: Their key.
        why: Why it is not the same here; "" for one that was taken.
        before: Their value.
        field: Our field; "" for a key that was left out.
        after: Our value.
    """

    key: str
    why: str = ""
    before: str = ""
    field: str = ""
    after: str = ""

    def __str__(self) -> str:
        if not self.field:
            return f"{self.key}: {self.why}"
        value = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{self.key} -> {self.field}: {value}" + (f"; {self.why}" if self.why else "")


class Conversion:
    """The values that were taken so far.

    Attributes:
        values: {our field: value}; a field of a folder is named `data.folders[0].path`.
        lines: {our field: its line}.
        left_out: Lines of keys without a field.
    """

    def __init__(self, tool: Tool, parts: Mapping[Part, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.lines: dict[str, Line] = {}
        self.left_out: dict[Line, None] = {}  # there may be thousands, each once
        self._tool, self._parts = tool, parts
        self._given, self._rows = tool.given(parts), tool.rows(parts)
        self._encoders: dict[str, str] = {}  # {component, or "" for all: the key that says so}
        self._take_model()
        self._take_fields()
        self._take_folders()
        self._train_encoders()

    def refuse(self, problem: Problem) -> bool:
        """Leave out the field of a problem, or one that it depends on. Returns whether there was one."""
        names = [re.sub(r"\.(\d+)(?=\.)", r"[\1]", name) for name in (problem.field, *problem.depends_on)]
        names += [own for own in self.values if own in problem.message]  # as one that needs another, which is not given
        for field in names:
            found = [own for own in self.values if own == field or own.startswith((f"{field}.", f"{field}["))]
            found = found or [own for own in self.values if field.startswith((f"{own}.", f"{own}["))]
            # Without its model a config is nothing, and its folders have a place that says where they were.
            found = [own for own in found if own not in ("model.family", "model.path")]
            for own in found:
                line, why = self.lines.pop(own), problem.message.partition("; leave it out")[0]
                if self.values.pop(own) != PLACEHOLDER and re.fullmatch(r"data(\.folders\[\d+\])?\.path", own):
                    self._put(line.key, own, PLACEHOLDER, line.before, why)
                elif BY_DEFAULT not in line.key:
                    self.left_out[Line(line.key, f"{own}: {why}")] = None
            if found:
                return True
        return False

    def tree(self) -> dict[str, Any]:
        """Return the values as nested sections."""
        root: dict[str, Any] = {}
        for name, value in self.values.items():
            if match := re.fullmatch(r"data\.folders\[(\d+)\]\.(\w+)", name):
                rows = root.setdefault("data", {}).setdefault("folders", [])
                rows += [{} for _ in range(int(match[1]) + 1 - len(rows))]
                rows[int(match[1])][match[2]] = value
                continue
            section = root
            *above, key = name.split(".")
            for part in above:
                section = section.setdefault(part, {})
            section[key] = value
        return root

    def _take_model(self) -> None:
        key, section, why = base_models.found(self._tool, self._given)
        named = {key, *self._tool.model.path, *self._tool.model.base, *filter(self._is_kind, self._given)}
        if secrets := sorted(name for name in named if is_secret(name, self._given.get(name))):
            for name in secrets:
                self._leave(name, "a secret")
            return
        if not section and key:
            self._leave(key, "no model that ShardStudio knows by its name; model.family and model.path say which")
        kind = next((name for name in self._given if self._is_kind(name)), key)
        for name, value in section.items():
            own = {"model.path": key or kind, "model.family": kind}.get(name, f"{key or kind}{BY_DEFAULT}")
            self._put(own, name, value, self._given.get(own, value), why if name == "model.path" else "")
        for name in (*self._tool.model.path, *self._tool.model.base):
            if name != key and self._given.get(name) and self._given[name] != section.get("model.base"):
                self._leave(name, "another file of the model: it comes with model.path, or from model.base")

    def _is_kind(self, key: str) -> bool:
        """Whether a key says of which architecture the model is."""
        return any(fnmatchcase(key, pattern) for pattern in self._tool.model.kind_keys)

    def _take_fields(self) -> None:
        tool, given = self._tool, self._given
        fields_given = {to.field for key, to in tool.fields.items() if key in given}
        for key, value in tool.defaults.items():
            if key not in given and tool.fields[key].field not in fields_given:
                self._take(key, value, tool.fields[key], {**given, **tool.defaults}, BY_DEFAULT)
        for key, to in tool.fields.items():
            if key in given:
                self._take(key, given[key], to, given)
        named = {*tool.model.path, *tool.model.base, *tool.fields}
        for key, value in given.items():
            part = tool.files.get(key)
            if part and part not in self._parts:
                self._leave(key, "the file that it names was not given; import both together")
            elif key not in named and not self._is_kind(key):
                self._leave_out(key, value)

    def _take_folders(self) -> None:
        """Put the rows that are trained on into `data.path`, or into `data.folders` where there are several."""
        found: list[tuple[str, dict[str, tuple[str, Any, Any, str]]]] = []
        for place, row in self._rows:
            folder: dict[str, tuple[str, Any, Any, str]] = {}
            for key, value in row.items():
                to = self._tool.row_fields.get(key)
                if to is None:
                    if key not in self._given:
                        self._leave_out(key, value)
                    continue
                for field, meant, why in self._converted(f"{place}.{key}", value, to, row):
                    if "." in field:
                        self._put(f"{place}.{key}", field, meant, value, why)
                    else:
                        folder[field] = f"{place}.{key}", meant, value, why
            found.append((place, folder))
        trained = []
        for place, folder in found:
            role = "off" if (folder.pop("off", ("", False)))[1] is True else folder.pop("role", ("", "train"))[1]
            role = "regularization" if folder.pop("regularization", ("", False))[1] is True else role
            if role == "train" and "path" in folder:
                trained.append(folder)
            elif role in ROLES and "path" in folder and f"data.{role}" not in self.values:
                key, path, before, why = folder["path"]
                self._put(key, f"data.{role}", path, before, why)
            else:
                self._leave(place, "no folder of images, or one more of its kind")
        weights = [folder.get("weight", ("", 1, 1, ""))[1] for folder in trained]
        is_one = len(trained) == 1 and "caption_prefix" not in trained[0] and weights[0] == int(weights[0])
        resolutions = [folder.get("resolutions", ("", None))[1] for folder in trained]
        if len(trained) > 1 and resolutions[0] and resolutions.count(resolutions[0]) == len(trained):
            key, value, before, why = trained[0]["resolutions"]
            self._put(key, "data.resolutions", value, before, why)
            for folder in trained:
                del folder["resolutions"]
        for at, folder in enumerate(trained):
            for name, (key, value, before, why) in folder.items():
                alone = OF_ALL.get(name, f"data.{name}")
                self._put(key, alone if is_one else f"data.folders[{at}].{name}", value, before, why)
        if not trained:
            self._put(NO_FOLDERS, "data.path", PLACEHOLDER, "none", "the config names none; put yours in its place")

    def _train_encoders(self) -> None:
        """Say in `model.train` which text encoders are trained along."""
        if not self._encoders:
            return
        known = families.of(str(self.values.get("model.family")))
        encoders = [name for name in (known.components if known else ()) if "encoder" in name]
        trained = [name for name in encoders if name in self._encoders or "" in self._encoders]
        if trained:
            mode = "full" if self.values.get("adapter.type") == "none" else "adapter"
            denoiser = next(name for name in known.components if name not in encoders) if known else ""
            for name in (denoiser, *trained):
                key = self._encoders.get(name, next(iter(self._encoders.values())))
                self._put(key, f"model.train.{name}", mode, True, "")
        elif any(BY_DEFAULT not in key for key in self._encoders.values()):
            for key in self._encoders.values():
                self._leave(key, "models of this family train no text encoder")

    def _take(self, key: str, value: Any, to: To, given: Given, note: str = "") -> None:
        for field, meant, why in self._converted(key + note, value, to, given):
            if field.startswith("text_encoders"):
                if meant is True:
                    self._encoders[field.partition(".")[2]] = key + note
            else:
                self._put(key + note, field, meant, value, why)

    def _converted(self, key: str, value: Any, to: To, given: Given) -> list[tuple[str, Any, str]]:
        """Return (our field, our value, why it changed) of a value; none for one that is left out."""
        if is_secret(key, value):
            self._leave(key, "a secret")
            return []
        if value in (None, "", [], {}):
            return []
        try:
            meant = to.conversion(value, given) if to.conversion else value
        except LeftOut as error:
            if BY_DEFAULT not in key:
                self._leave(key, str(error))
            return []
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError):
            self._leave(key, f"its value is not one that {self._tool.name} writes")
            return []
        found = meant if isinstance(meant, dict) else {to.field: meant}
        return [
            (field, one.value, one.why) if isinstance(one, Changed) else (field, one, "")
            for field, one in found.items()
        ]

    def _put(self, key: str, field: str, value: Any, before: Any, why: str) -> None:
        if field == "data.resolutions" and len(value) == 1:
            field, value = "data.resolution", value[0]
        here = slot(tuple(field.split(".")))
        if isinstance(value, str) and here is not None and not here.is_text and not here.words:
            value = yaml12.parse(value).value if re.fullmatch(r"[\w.+-]{1,40}", value) else value
        for same in LENGTH if field in LENGTH else (field,):
            former = self.lines.pop(same, None)
            self.values.pop(same, None)
            is_same = former is None or former.key == key or (former.field, former.after) == (field, shown(value))
            if former and not is_same and BY_DEFAULT not in former.key:
                self.left_out[Line(former.key, f"{key} says it instead")] = None
        self.values[field] = value
        self.lines[field] = Line(key, why, shown(before), field, shown(value))

    def _leave_out(self, key: str, value: Any) -> None:
        """Leave out a key that no field is known for, with the reason of the table."""
        if is_secret(key, value):
            self._leave(key, "a secret")
        elif value not in (None, "", [], {}):
            table, leaf = self._tool.left_out, key.rpartition(".")[2]
            why = table.get(key) or table.get(leaf)
            why = why or next((table[p] for p in table if "*" in p and fnmatchcase(key, p)), UNKNOWN)
            self._leave(key, "it is off" if is_off(value) and why != UNKNOWN else why)

    def _leave(self, key: str, why: str) -> None:
        # A list of arguments may have a secret where a key stands.
        name = "a key" if looks_secret(key) else shortened(key, MOST_SHOWN)
        self.left_out[Line(name, why)] = None


def is_off(value: Any) -> bool:
    """Whether a value switches something off."""
    return str(value).lower() in ("false", "0", "0.0", "none", "off")


def is_secret(key: str, value: Any) -> bool:
    """Whether a value must not be written, shown or logged, by its key or by what it looks like."""
    if value in (None, "", False):
        return False
    return bool(SECRET.search(key)) or looks_secret(f"{key} {value}")


def looks_secret(text: str) -> bool:
    """Whether a text has a token, or an address with one. Takes time in proportion to its length, whatever it holds."""
    addresses = ADDRESS.findall(text)
    return bool(SECRET_VALUE.search(text)) or any(map(SECRET_IN_ADDRESS.search, addresses))


def shown(value: Any) -> str:
    """Return a value on one short line."""
    if value is None:
        return "none"
    if isinstance(value, list):
        value = ", ".join(shown(item) for item in value)
    text = f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    return shortened(" ".join(text.split()), MOST_SHOWN)
