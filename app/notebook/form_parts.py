"""The parts of a notebook's form: rows of fields, tiles of which one is chosen, and sentences with buttons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import ipywidgets as widgets
from ipywidgets.widgets.widget_bool import CheckboxStyle
from ipywidgets.widgets.widget_button import ButtonStyle
from ipywidgets.widgets.widget_description import DescriptionStyle
from ipywidgets.widgets.widget_string import HTMLStyle, TextStyle
from markupsafe import Markup

from app.form.form_answers import FIELDS
from app.notebook.panels import TEMPLATES
from trainer.config.fields import label_with_unit

TEXTAREA_ROWS = {"lines": 5, "yaml": 2}
SHOWN, HIDDEN = widgets.Layout(width="auto"), widgets.Layout(display="none")
"""Layouts and styles are shared by all parts: separate ones would take 1 kB each in a saved notebook."""
HTML, TEXT, CHOICE, SWITCH, BUTTON = HTMLStyle(), TextStyle(), DescriptionStyle(), CheckboxStyle(), ButtonStyle()


def shown_if(is_shown: bool) -> widgets.Layout:
    return SHOWN if is_shown else HIDDEN


def html(content: str = "") -> widgets.HTML:
    return widgets.HTML(content, layout=SHOWN, style=HTML)


def box(*children: widgets.Widget, name: str = "") -> widgets.VBox:
    """A box that form.css places by its name."""
    found = widgets.VBox(children, layout=SHOWN)
    return found.add_class(f"shardstudio-{name}") if name else found


class Row:
    """One field of the config: its input, and a note with its help or error.

    Attributes:
        typed: Called with the field and the value that was typed.
    """

    def __init__(self, name: str, typed: Callable[[str, str | bool], None], state: Mapping[str, Any]) -> None:
        self._name, self._facts = name, FIELDS[name]
        self.input = self._input(state["rows"][name])
        self._note = html()
        self.box = box(self.input, self._note, name="field")
        self.show(state)
        self.input.observe(lambda change: typed(name, change["new"]), "value")

    def show(self, state: Mapping[str, Any]) -> None:
        """Show the field in a state of the form."""
        row, error = state["rows"][self._name], state["rows"][self._name].get("error", "")
        with self.input.hold_sync():
            if isinstance(self.input, widgets.Dropdown):
                options = tuple(dict.fromkeys([*row["choices"], str(row["value"])]))  # also a value that is wrong
                if self.input.options != options:
                    self.input.options = options  # selects the first
            elif isinstance(self.input, widgets.Combobox):
                self.input.options = tuple(self._facts["suggested"] or state["recent"])
            self.input.value = row["value"]
            if isinstance(self.input, widgets.Text):
                self.input.placeholder = row.get("placeholder", "")
        self.box.layout = shown_if(bool(error) or "hidden" not in row)
        (self.box.add_class if error else self.box.remove_class)("shardstudio-bad")
        on_card, of_texts = self._facts["help_on_card"]
        help = (state["is_text"] and of_texts) or on_card or self._facts["help"]
        self._note.value = TEMPLATES.part("form.html", "note", error, help)

    def _input(self, row: Mapping[str, Any]) -> widgets.ValueWidget:
        common = {
            "description": TEMPLATES.part("form.html", "label", label_with_unit(self._name), self._name),
            "description_allow_html": True,
            "layout": SHOWN,
        }
        match self._facts["kind"]:
            case "choice":
                return widgets.Dropdown(options=(str(row["value"]),), style=CHOICE, **common)
            case "switch":
                return widgets.Checkbox(indent=False, style=SWITCH, **common)
            case "text":
                is_suggested = self._facts["suggested"] or self._name == "data.path"
                kind = widgets.Combobox if is_suggested else widgets.Text
                return kind(continuous_update=False, style=TEXT, **common)
            case kind:
                return widgets.Textarea(rows=TEXTAREA_ROWS[kind], continuous_update=False, style=TEXT, **common)


class Tiles:
    """Tiles to choose one of. A button fills each and has its name; where styles are not shown, it stands below."""

    def __init__(self, chosen: Callable[[str], None], name: str = "tiles") -> None:
        self._chosen = chosen
        self._tiles: dict[str, widgets.Box] = {}
        self.box = box(name=name)

    @property
    def buttons(self) -> dict[str, widgets.Button]:
        """{key: button} in the order of the tiles"""
        return {key: tile.children[1] for key, tile in self._tiles.items()}

    def show(self, tiles: Mapping[str, tuple[str, Markup]], chosen: str | None) -> None:
        """Show tiles as {key: (name, content)}. A tile stays the same while it is shown, so that no click is lost."""
        former, self._tiles = self._tiles, {}
        for key, (name, content) in tiles.items():
            tile = former.pop(key, None) or box(html(), _button("", partial(self._chosen, key)), name="tile")
            text, button = tile.children
            text.value, button.description = content, f"{name}, chosen" if key == chosen else name
            (tile.add_class if key == chosen else tile.remove_class)("shardstudio-on")
            self._tiles[key] = tile
        fill(self.box, self._tiles.values())
        for tile in former.values():
            _close(tile)


class Notice:
    """A sentence with buttons for what can be done about it, hidden while it is empty."""

    def __init__(self) -> None:
        self._text, self._row = html(), widgets.HBox(layout=SHOWN).add_class("shardstudio-buttons")
        self._actions: Mapping[str, Callable[[], None]] = {}
        self.box = box(self._text, self._row, name="notice")

    @property
    def buttons(self) -> dict[str, widgets.Button]:
        """{words: button}"""
        return dict(zip(self._actions, self._row.children, strict=True))

    @property
    def text(self) -> str:
        return str(self._text.value)

    def show(self, content: str = "", actions: Mapping[str, Callable[[], None]] | None = None) -> None:
        """Show a sentence and the actions, {words of the button: what it does}."""
        actions = actions or {}
        self._text.value = content
        is_same, self._actions = list(actions) == list(self._actions), actions
        if not is_same:
            former = self._row.children
            self._row.children = [_button(words, partial(self._press, words)) for words in actions]
            for button in former:
                button.close()
        self.box.layout = shown_if(bool(content or actions))

    def _press(self, words: str) -> None:
        self._actions[words]()


def _button(words: str, pressed: Callable[[], None]) -> widgets.Button:
    found = widgets.Button(description=words, layout=SHOWN, style=BUTTON)
    found.on_click(lambda _: pressed())
    return found


def fill(place: widgets.Box, children: Iterable[widgets.Widget]) -> None:
    """Put widgets into a box; what is there stays as it is."""
    now = tuple(children)
    if place.children != now:
        place.children = now


def _close(place: widgets.Box) -> None:
    """Close a box and what is in it, which would be kept with the kernel otherwise."""
    for child in place.children:
        child.close()
    place.close()
