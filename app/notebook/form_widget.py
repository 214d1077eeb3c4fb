"""The form of a run as widgets of a notebook: the page's cards, with the answers of the page's screen New run.

See DECISIONS 231.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython.display import HTML, DisplayHandle, display
from markupsafe import escape

from app.form import draft as form
from app.form import model_answers
from app.form.draft import Draft
from app.form.form_answers import FIELDS, GROUPS, METHODS
from app.form.model_choices import ModelChoices
from app.form.plan_preview import TARGETS, THIS_MACHINE
from app.notebook import panels
from app.notebook.form_drop import Drop
from app.notebook.form_parts import BUTTON, SHOWN, Notice, Row, Tiles, box, fill, html
from app.notebook.form_start import Starter
from app.notebook.lessons import data_url
from app.notebook.panels import TEMPLATES
from app.runs.monitor import explained
from app.studio import Studio
from app.web.pages import new_run
from trainer.config.foreign.imported import TOOLS, missing_words
from trainer.config.load import ConfigFile, load_config
from trainer.run.folder import RunDir
from trainer.system.amounts import rounded_size
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS
from trainer.view.numbers import format_duration

POLL_S = 0.5
CODE_WIDTH = 100
NUM_SUGGESTED = 8
NUM_THUMBNAILS, SIDE, ART_SIDE = 8, 64, 160
"""Images of the data that are shown, their longer side and that of a model's picture: the notebook's file has them."""
MOST_FOUND, MOST_FOLDERS = 12, 60
"""Settings that a search shows, and folders in a folder."""
CONFIGS = ".toml,.yaml,.yml,.json,.txt"
FOREIGN = f"A config of {', '.join(tool.name for tool in TOOLS)}, with the files that it names"
PLACES = {
    "data": ("data.path", "data.trigger", "data.validation"),
    "method": ("adapter.rank", "adapter.block_size", "train.steps", "optim.lr", "train.batch_size"),
    "samples": ("sample.prompts", "sample.every", "data.resolution", "data.length", "checkpoint.keep"),
    "start": ("name",),
}
"""{part of a card: its fields}"""
OWN_MODEL = {"Another model of this family, from a folder or the hub": ("model.path",)}
FOLDERS = {
    "More folders, repeats and prior images": (
        *("data.folders", "data.repeats", "data.regularization", "data.regularization_weight"),
    )
}
OTHERS = {
    group: tuple(name for name, facts in FIELDS.items() if facts["group"] == group and not facts["is_front"])
    for group in GROUPS
}
"""{title of what is folded: its fields}"""


class FormStudio(Studio):
    """What the functions of the screen New run work on, with a draft of its own in place of the page's."""

    def __init__(self, runs: Path, draft: Draft) -> None:
        super().__init__(runs)
        self.models = _models(runs)
        self._file, self._own = draft.preset, draft

    def presets(self) -> dict[str, Path]:
        return super().presets() | {self._file.stem: self._file}

    def draft(self) -> Draft:
        return self._own

    def change_draft(self, change: Callable[[Draft], Draft]) -> Draft:
        self._own = change(self._own)
        return self._own


_models = functools.cache(ModelChoices)  # planning all presets takes two seconds


class Form:
    """A form of a run, shown below a cell that ends with it.

    Attributes:
        widget: The form as a widget, for use inside other widgets.
    """

    def __init__(self, preset: Path, overrides: Sequence[str], runs: Path, named: str = "") -> None:
        """Create the form.

        Args:
            preset: File of the preset.
            overrides: Changes of it, as `key=value`.
            runs: Folder of the runs that it starts.
            named: Name of the preset in `code`; default: its file.

        Raises:
            ConfigError: The preset or an override is wrong.
        """
        draft = form.from_overrides(preset, overrides)
        self._given, self._named = preset, named or str(preset)
        self._studio = FormStudio(runs, draft)
        self._lock = threading.RLock()
        self._is_showing = self._is_followed = False
        self._target = THIS_MACHINE
        self._offered: list[dict[str, Any]] | None = None
        self._images: tuple[tuple[Path, ...], list[tuple[str, str]]] = (), []
        self._kept: DisplayHandle | None = None
        self._rows: dict[str, Row] = {}
        self._state: dict[str, Any] = new_run.state(self._studio) or {}
        self._build()
        self._show(self._state)
        self._follow()

    # --- what a notebook asks of it ---

    @property
    def inputs(self) -> dict[str, widgets.ValueWidget]:
        """{field: widget} of the rows created so far. Setting a `value` has the effect of typing it."""
        return {name: row.input for name, row in self._rows.items()}

    @property
    def run(self) -> RunDir | None:
        """The run that the button Start has started last."""
        return self.starter.run

    @property
    def overrides(self) -> list[str]:
        """The changed values as `key=value`."""
        return self._studio.draft().overrides

    @property
    def config(self) -> ConfigFile:
        """The current config. Raises ConfigError with every problem."""
        return load_config(self._studio.draft().preset, self.overrides)

    @property
    def code(self) -> str:
        """The call that recreates this form."""
        now = self._studio.draft().preset
        named = self._named if now == self._given else self._studio.name_of(now)
        arguments = [repr(text) for text in (named, *self.overrides)]
        line = f"notebook.form({', '.join(arguments)})"
        if len(line) <= CODE_WIDTH:
            return line
        return "\n".join(["notebook.form(", *(f"    {argument}," for argument in arguments), ")"])

    def _ipython_display_(self) -> None:
        self._kept = self._kept or DisplayHandle()
        display(panels.live(self.widget, "What it shows stands below as code."), raw=True)
        self._kept.display(self._saved_output())

    def _saved_output(self) -> HTML:
        """The output that remains of the form when the kernel has ended. It is hidden below a live form."""
        run = self.starter.shown
        attached = f"notebook.dashboard(notebook.attach({str(run.path)!r}))" if run else ""
        return HTML(TEMPLATES.part("form.html", "saved", self.code, attached))

    def _keep(self) -> None:
        if self._kept:
            self._kept.update(self._saved_output())

    # --- its parts ---

    def _build(self) -> None:
        """Make the cards, which `_show` fills."""
        self.models, self.presets = Tiles(self._choose_model), Tiles(self.choose_preset, "presets")
        self.methods = Tiles(partial(self._type, "adapter.type"), "presets")
        self._filter = widgets.ToggleButtons(options=[], layout=SHOWN).add_class("shardstudio-filter")
        self.facts, self.left, self.problems, self.proposals, self.folder = (Notice() for _ in range(5))
        self._close_browser()
        self.why, self.warnings, self.refusal, self.plan, self.changes = (Notice() for _ in range(5))
        self.search = widgets.Text(placeholder="Search: VRAM, warm-up, seed …", layout=SHOWN)
        for widget in (self._filter, self.search):
            widget.observe(lambda _: self._show(self._state), "value")
        self.imports = widgets.FileUpload(
            multiple=True, accept=CONFIGS, description="Import a config …", tooltip=FOREIGN, layout=SHOWN, style=BUTTON
        )
        self.imports.observe(lambda change: self._import(change["new"]), "value")
        self.own_model, self.folders = self._folded(OWN_MODEL), self._folded(FOLDERS)
        self.groups = self._folded(OTHERS)
        self.plan_for = widgets.Dropdown(options=TARGETS, description="Plan for", layout=SHOWN)
        self.plan_for.observe(lambda change: self._plan_for(change["new"]), "value")
        self.starter = Starter(self._studio, self._lock, self.refusal, self._keep)
        self.drop = Drop(self._studio, self._lock, self._change)
        self._model, self._how, self._data, self._pictures = (html() for _ in range(4))
        self._more, self._missing, self._time = (html() for _ in range(3))
        self._found, self._wrong = box(name="rows"), box(name="rows")

        titled = partial(TEMPLATES.part, "form.html", "title")
        cards = [
            [self._model, self._filter, self.models.box, self.facts.box, self.left.box],
            [self._data, self.drop.box, self._fields("data"), self.folder.box, self.folders, self._pictures],
            [html(titled("3", "Method")), self.methods.box, self._fields("method"), self._fields("samples")],
            [self._more, self.search, self._missing, self._found, self.groups],
        ]
        cards[0] += [self._how, self.presets.box, self.own_model, self.imports]
        cards[1] += [self.proposals.box, self.problems.box]
        start = self.starter
        side = [
            [self._fields("start"), start.start, self.refusal.box, self.why.box, self._wrong, self.warnings.box],
            [self.plan_for, self.plan.box],
            [html(titled("", "Time and space")), self._time],
            [html(titled("", "Differs from the preset")), self.changes.box],
        ]
        side[0].append(start.others)
        columns = [box(*(box(*parts, name="card") for parts in column), name="column") for column in (cards, side)]
        style = widgets.HTML(TEMPLATES.part("panels.html", "style", "form.css"), layout={"display": "none"})
        self.widget = box(style, start.board, box(*columns, name="columns"), name="form").add_class("shardstudio")

    def _fields(self, place: str) -> widgets.VBox:
        return box(*(self._row(name).box for name in PLACES[place]), name="rows").add_class(f"shardstudio-{place}")

    def _folded(self, places: Mapping[str, Sequence[str]]) -> widgets.Accordion:
        """Return places whose rows are made when they are opened."""
        found = widgets.Accordion([box(name="rows") for _ in places], titles=[*places], layout=SHOWN)

        def opened(change: dict[str, Any]) -> None:
            if change["new"] is not None:
                names = [*places.values()][change["new"]]
                with self._lock:
                    found.children[change["new"]].children = [self._row(name).box for name in names]

        found.observe(opened, "selected_index")
        return found

    def _row(self, name: str) -> Row:
        if name not in self._rows:
            self._rows[name] = Row(name, self._type, self._state)
        return self._rows[name]

    # --- what its user does ---

    def _type(self, name: str, value: str | bool) -> None:
        with self._lock:
            if not self._is_showing:  # otherwise the form itself sets the value
                self._change(new_run.edit, {name: value})

    def _choose_model(self, path: str) -> None:
        self.choose_preset(next(model for model in self._offered or [] if model["path"] == path)["presets"][0]["name"])

    def choose_preset(self, name: str, is_forced: bool = False) -> None:
        """Choose another preset, as a press on its tile does."""
        answer = self._call(new_run.preset, name, is_forced)
        if answer is None:
            return
        if "refused" in answer:
            sentence = TEMPLATES.part("form.html", "refused", name, answer["refused"])
            forced = partial(self.choose_preset, name, True)
            self.left.show(sentence, {"Change the model": forced, "Keep this one": self.left.show})
            return
        self._show(answer)
        if answer["left"]:  # else what was left behind before can still be brought back
            self._leave("preset", answer["left"], partial(self._change, new_run.restore, **answer["undo"]))
        self._follow()

    def _leave(self, former: str, labels: Sequence[str], undo: Callable[[], None]) -> None:
        """Say what was left behind, with a button that takes it back."""
        self._offer_undo(TEMPLATES.part("form.html", "left", former, labels), undo)

    def _offer_undo(self, sentence: str, undo: Callable[[], None]) -> None:
        def take_back() -> None:
            undo()
            self.left.show()

        self.left.show(sentence, {"Undo": take_back})

    def _import(self, chosen: Sequence[Mapping[str, Any]]) -> None:
        """Take a config of another trainer, and the files that it names."""
        texts = {file["name"]: bytes(file["content"]).decode("utf-8-sig", "replace") for file in chosen}
        self.imports.value = ()
        answer = self._call(new_run.import_config, texts) if texts else None
        if answer is None:
            return
        self._show(answer)
        former = partial(self._change, new_run.restore, **answer["undo"], is_whole=True)
        self._offer_undo(TEMPLATES.part("form.html", "imported", answer["imported"]), former)
        self._follow()

    def _browse(self, path: str = "") -> None:
        """Show what is in a folder, with buttons for those in it, above it, and to take it."""
        found = self._call(lambda studio, target: new_run.browse(studio, path))
        if found is None:
            return
        here, folders = found["path"], found["folders"]
        near = [*([found["above"]] if found["above"] else found["roots"]), *(f"{here}/{name}" for name in folders)]
        actions: dict[str, Callable[[], None]] = {
            "Take this folder": partial(self._type, "data.path", here),
            "Close": self._close_browser,
            **{folder: partial(self._browse, folder) for folder in near[:MOST_FOLDERS] if folder != here},
        }
        self.folder.show(TEMPLATES.part("form.html", "browsed", found, len(near) > MOST_FOLDERS), actions)

    def _close_browser(self) -> None:
        self.folder.show("", {"Browse for a folder …": self._browse})

    def _plan_for(self, target: str) -> None:
        self._target = target
        self._change(new_run.state)

    def _take_proposals(self) -> None:
        self._change(new_run.edit, {offer["field"]: offer["value"] for offer in self._state["proposals"]})

    def _change(self, function: Callable[..., Any], *values: Any, **named: Any) -> None:
        """Call a function of the screen New run and show its answer."""
        answer = self._call(function, *values, **named)
        if answer is None:
            return
        self._show(answer)
        images = answer.get("left_images", {"labels": []})
        if images["labels"]:
            self._leave("images", images["labels"], partial(self._change, new_run.edit, images["edits"]))
        self._follow()

    def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> dict[str, Any] | None:
        """Call a function of the screen New run; show what it refuses, and return None then."""
        with self._lock:
            try:
                answer: dict[str, Any] = function(self._studio, *values, target=self._target, **named)
            except (InputError, OSError) as error:
                self.refusal.show(panels.alert(explained(error)))
                self._keep()
                return None
            if function is not new_run.state:
                self.refusal.show()
            return answer

    # --- what changes by itself ---

    def _follow(self) -> None:
        """Look again from time to time while images are read, a model is loaded or memory is estimated."""
        with self._lock:
            if self._is_followed or not self._is_waiting():
                return
            self._is_followed = True
        threading.Thread(target=self._look_again, name="form", daemon=True).start()

    def _is_waiting(self) -> bool:
        state = self._state
        is_looking = bool(state["earlier"] and state["earlier"].get("is_looking"))
        is_running = any(map(_is_running, state["downloads"].values()))
        is_busy = bool(state["waiting"]) or state["plan"]["is_waiting"] or is_running
        return self._offered is None or is_looking or is_busy

    def _look_again(self) -> None:
        if self._offered is None:
            self._offered = self._read_models()
        while True:
            with self._lock:
                self._change(new_run.state)
                if not self._is_waiting():
                    self._is_followed = False
                    return
            time.sleep(POLL_S)

    def _read_models(self) -> list[dict[str, Any]]:
        image = data_url(min((PRESETS / "quickstart").glob("*.png")), ART_SIDE)
        return model_answers.models(self._studio.model_choices(), image)

    def _show(self, state: dict[str, Any]) -> None:
        """Show a state of the form, in place, so that the focus is kept."""
        with self._lock:
            if self._is_showing:
                return
            self._is_showing, self._state = True, state
            try:
                self._show_model(state)
                self._show_data(state)
                row = state["rows"]["adapter.type"]
                methods = {
                    kind: (title, TEMPLATES.part("form.html", "method", title, line))
                    for kind, title, line in METHODS
                    if kind in row["choices"]
                }
                self.methods.show(methods, row["value"])
                self._show_more(state)
                self._show_start(state)
                self._show_plan(state)
                for row in self._rows.values():
                    row.show(state)
            finally:
                self._is_showing = False
            self._keep()

    def _show_model(self, state: dict[str, Any]) -> None:
        downloads, offered = state["downloads"], self._offered or []
        if any(not model["is_here"] and downloads.get(model["path"], {}).get("state") == "done" for model in offered):
            offered = self._offered = self._read_models()
        own = next((one for one in offered if any(it["name"] == state["preset"] for it in one["presets"])), None)
        options = ("Suggested", f"All {len(offered)}")
        if self._filter.options != options:
            self._filter.options = options
            self._filter.index = 0
        suggested = [model for model in offered if model["is_known"] or model is own][:NUM_SUGGESTED]
        listed = suggested if self._filter.index == 0 else offered
        tiles = {}
        for model in listed:
            content = TEMPLATES.part("form.html", "tile", model, downloads.get(model["path"]))
            tiles[model["path"]] = model["name"], content
        note = "" if offered else "reading the presets …"
        self._model.value = TEMPLATES.part("form.html", "title", "1", "Model", note)
        self.models.show(tiles, own["path"] if own else None)
        if own:
            path, found = own["path"], downloads.get(own["path"])
            word, act = "Continue" if found else "Download", new_run.download
            if _is_running(found):
                word, act = "Pause", new_run.pause
            is_offered = own["download"] and not own["is_here"]
            facts = TEMPLATES.part("form.html", "facts", own, found if is_offered else None)
            self.facts.show(facts, {word: partial(self._change, act, path)} if is_offered else {})
        presets = own["presets"] if own else []
        shown = {one["name"]: (one["title"], TEMPLATES.part("form.html", "preset", one)) for one in presets}
        self.presets.show(shown, state["preset"])
        self._how.value = TEMPLATES.part("form.html", "how", own, state["preset"])

    def _show_data(self, state: dict[str, Any]) -> None:
        found, shown = state["data"], self._images
        if found and found["is_complete"]:
            with suppress(InputError):  # the preset has been changed just now
                images = self._studio.scans.of(form.check(self._studio.draft()).config).images[:NUM_THUMBNAILS]
                if images != shown[0]:
                    shown = images, list(_thumbnails(images))
        self._images = shown
        title = "Texts" if state["is_text"] else "Pictures"
        self._data.value = TEMPLATES.part("form.html", "title", "2", title, "", found and found["badge"])
        self._pictures.value = TEMPLATES.part("form.html", "data", found, shown[1])
        offered = state["proposals"]
        self.proposals.show(
            TEMPLATES.part("form.html", "proposals", offered) if offered else "",
            {"Take them": self._take_proposals} if offered else {},
        )
        sentences = [*found["others"][:4], *found["warnings"][:4]] if found and found["is_complete"] else []
        self._tell(self.problems, sentences, "warnings")

    def _show_more(self, state: dict[str, Any]) -> None:
        for at, (group, hint) in enumerate(GROUPS.items()):
            rows = [state["rows"][name] for name in OTHERS[group]]
            counts = (sum("changed" in row for row in rows), "changed"), (sum("error" in row for row in rows), "wrong")
            title = ", ".join([f"{group}: {hint}", *(f"{count} {word}" for count, word in counts if count)])
            if self.groups.get_title(at) != title:
                self.groups.set_title(at, title)
        others = [*chain(*OTHERS.values())]
        changed = sum("changed" in state["rows"][name] for name in others)
        note = f"{len(others)} settings, {f'{changed} changed' if changed else 'all as in the preset'}"
        names = [name for name in _named(self.search.value) if "hidden" not in state["rows"][name]]
        fill(self._found, (self._row(name).box for name in names[:MOST_FOUND]))
        self._missing.value = "" if names or not self.search.value.strip() else escape(_missing(self.search.value))
        self._more.value = TEMPLATES.part("form.html", "title", "", "More", note)

    def _show_start(self, state: dict[str, Any]) -> None:
        self.starter.show(state)
        self._tell(self.why, [error["text"] for error in state["errors"]], "why", state)
        self._tell(self.warnings, [*state["warnings"], *filter(None, [state["kept_words"]])], "warnings")
        folded = {*chain(*FOLDERS.values(), *OTHERS.values())}
        fill(self._wrong, (self._row(error["field"]).box for error in state["errors"] if error["field"] in folded))

    def _tell(self, notice: Notice, sentences: Sequence[str], macro: str, *values: object) -> None:
        """Show sentences with the changes that they name as buttons, which stand for their words on them."""
        remedies: Mapping[str, list[dict[str, str]]] = self._state["remedies"]
        actions: dict[str, Callable[[], None]] = {}
        for change in (change for sentence in sentences for change in remedies.get(sentence, ())):
            field, value = change["field"], change["value"]
            words = "Train without" if field == "data.missing_caption" else f"{change['label']}: {value}"
            actions[words] = partial(self._type, field, value)
        brief = [sentence.split("; ")[0] if sentence in remedies else sentence for sentence in sentences]
        notice.show(TEMPLATES.part("form.html", macro, brief, "Train without" in actions, *values), actions)

    def _show_plan(self, state: dict[str, Any]) -> None:
        plan = state["plan"]
        actions: dict[str, Callable[[], None]] = {}
        for fix in plan["fixes"]:
            effect = f" ({fix['effect']})" if fix["effect"] else ""
            actions[f"Make it fit: {fix['text']}{effect}"] = partial(self._change, new_run.fix, fix["changes"])
        if plan["can_record"]:
            actions["Estimate now, about 30 s"] = partial(self._change, new_run.record)
        if plan["can_verify"]:
            actions["Verify with a full trace, a minute or more"] = partial(self._change, new_run.verify)
        self.plan.show(TEMPLATES.part("form.html", "plan", plan, state["fit"] is not None), actions)
        self._time.value = TEMPLATES.part("form.html", "facts_list", list(_times(state)))
        reset = {"Back to the preset": partial(self._change, new_run.reset)} if state["changes"] else {}
        self.changes.show(TEMPLATES.part("form.html", "changes", state["changes"], self.code), reset)


def _is_running(download: Mapping[str, Any] | None) -> bool:
    return download is not None and download["state"] in ("waiting", "downloading")


def _thumbnails(images: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield (address, name) of small copies. The problems of the data name what cannot be read."""
    for image in images:
        try:
            yield data_url(image, SIDE), image.name
        except InputError:
            continue


def _named(text: str) -> list[str]:
    """The fields that words are about, those under More first: their words here and in other programs."""
    words = text.lower().replace("-", " ").split()

    def is_meant(name: str) -> bool:
        facts = FIELDS[name]
        found = " ".join((facts["label"], name, facts["help"], facts["group"], facts["words"])).lower()
        found = f"{found} {found.replace('-', '')}"
        return all(word in found or (len(word) > 3 and word.removesuffix("s") in found) for word in words)

    names = [name for name in FIELDS if words and is_meant(name)]
    return sorted(names, key=lambda name: FIELDS[name]["is_front"])


def _missing(text: str) -> str:
    """Explain why a search finds no setting."""
    words = text.lower().replace("-", " ").split()
    known = ((key, why) for why, keys in missing_words().items() for key in keys.split())
    found = [(key, why) for key, why in known if all(word in key.lower() for word in words)]
    return f"No setting: {found[0][0]}: {found[0][1]}." if found else "No setting has these words."


def _times(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known of time and space, in words."""
    plan, disk, earlier = state["plan"], state["disk"], state["earlier"] or {}
    steps = f"{plan['steps']:,}" if plan["steps"] else plan["length"]
    if "seconds" in earlier:
        samples = "" if earlier["has_samples"] else ", without samples"
        yield "Whole run", f"about {format_duration(earlier['seconds'])}, as in {earlier['name']}{samples}"
        yield "Steps", f"{steps} × {earlier['step_s']:.2g} s"
    elif plan.get("whole"):
        low, high = plan["whole"]
        yield "Whole run", " to ".join(dict.fromkeys(map(format_duration, (low, high))))
        yield "Steps", f"{steps} × {low / plan['steps']:.2g} to {high / plan['steps']:.2g} s, {plan['speed']}"
    else:
        is_looking = earlier.get("is_looking")
        yield "Steps", steps
        yield "Whole run", "looking at earlier runs …" if is_looking else "not known yet; a first run measures it"
    free = f"{rounded_size(disk['free'])} free"
    yield "Disk", f"{rounded_size(disk['need'])} of {free}" if disk["need"] else free
