"""The form of a run as widgets of a notebook: a tab per step, a row per field, and the code that recreates it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ipywidgets as widgets
from IPython.display import HTML, DisplayHandle, display
from ipywidgets.widgets.widget_bool import CheckboxStyle
from ipywidgets.widgets.widget_description import DescriptionStyle
from ipywidgets.widgets.widget_string import HTMLStyle, TextStyle

from app.form import draft as form
from app.form.draft import Row
from app.notebook.panels import TEMPLATES
from trainer.config.fields import shown
from trainer.config.load import ConfigError, ConfigFile, load_config

Typed = Callable[[str, str | bool], None]
"""Called with a field and the value typed into its row."""

TEXTAREA_ROWS = {"lines": 3, "yaml": 2}
CODE_WIDTH = 100
CODE = re.compile("`([^`]+)`")


class Form:
    """An editable preset with some values changed, shown below a cell that ends with it.

    Attributes:
        widget: The form as a widget, for use inside other widgets.
    """

    def __init__(self, preset: Path, overrides: Sequence[str] = (), named: str = "") -> None:
        """Create the form.

        Args:
            named: Name of the preset in `code`; default: its file.

        Raises:
            ConfigError: The preset or an override is wrong.
        """
        self._named = named or str(preset)
        self._draft = form.from_overrides(preset, overrides)
        self._is_showing = False
        self._kept: DisplayHandle | None = None
        looks = _Looks()
        self._steps = {name: _Step(looks, self._typed, self._show) for name in form.GROUPS}
        self._tabs = widgets.Tab([step.box for step in self._steps.values()], layout=looks.shown)
        self._review = widgets.HTML(layout=looks.shown, style=looks.html)
        style = widgets.HTML(TEMPLATES.part("form.html", "style"), layout=looks.hidden, style=looks.html)
        self.widget = widgets.VBox([style, self._tabs, self._review], layout=looks.shown)
        self.widget.add_class("shardstudio-form")
        self._show()

    @property
    def inputs(self) -> dict[str, widgets.ValueWidget]:
        """{field: widget} of the rows created so far. Setting a `value` has the effect of typing it."""
        return {name: line.input for step in self._steps.values() for name, line in step.lines.items()}

    @property
    def more(self) -> dict[str, widgets.ToggleButton]:
        """{step: button that shows its remaining fields}"""
        return {name: step.more for name, step in self._steps.items()}

    @property
    def overrides(self) -> list[str]:
        """The changed values as `key=value`."""
        return self._draft.overrides

    @property
    def config(self) -> ConfigFile:
        """The current config. Raises ConfigError with every problem."""
        return load_config(self._draft.preset, self.overrides)

    @property
    def code(self) -> str:
        """The call that recreates this form."""
        arguments = [repr(text) for text in (self._named, *self.overrides)]
        line = f"notebook.form({', '.join(arguments)})"
        if len(line) <= CODE_WIDTH:
            return line
        return "\n".join(["notebook.form(", *(f"    {argument}," for argument in arguments), ")"])

    def _ipython_display_(self) -> None:
        self._kept = self._kept or DisplayHandle()
        shown_without_widgets = {"text/plain": "A form, while its kernel is running."}
        display(self.widget._repr_mimebundle_() | shown_without_widgets, raw=True)
        self._kept.display(self._saved_output())

    def _saved_output(self) -> HTML:
        """The output that remains of the form when the kernel has ended. It is hidden below a live form."""
        return HTML(TEMPLATES.part("form.html", "saved", self.code))

    def _typed(self, name: str, value: str | bool) -> None:
        if not self._is_showing:  # otherwise the form itself sets the value
            self._draft = form.edited(self._draft, {name: value})
            self._show()

    def _show(self) -> None:
        """Update all widgets from the draft, in place, so that the focus is kept."""
        if self._is_showing:
            return
        if self._kept:
            self._kept.update(self._saved_output())
        try:
            checked = form.check_with_files(form.check(self._draft))
        except ConfigError as error:  # the preset's file has changed since
            self._review.value = TEMPLATES.part("form.html", "review", {"": str(error)}, [], self.code, ())
            return
        self._is_showing = True
        try:
            self._show_rows(form.rows(checked))
        finally:
            self._is_showing = False
        changes = [(name, shown(old), shown(new)) for name, (old, new) in checked.changes.items()]
        review = (checked.errors, changes, self.code, checked.warnings)
        self._review.value = TEMPLATES.part("form.html", "review", *review)

    def _show_rows(self, rows: Sequence[Row]) -> None:
        for index, (name, step) in enumerate(self._steps.items()):
            own = [row for row in rows if form.group_of(row.field) == name]
            step.show(own)
            wrong = sum(bool(row.error) for row in own)
            self._tabs.set_title(index, f"{name} ({wrong} wrong)" if wrong else name)


@dataclass(frozen=True)
class _Looks:
    """Layouts and styles shared by all widgets of a form. Separate ones would take 1 kB each in a saved notebook."""

    shown: widgets.Layout = field(default_factory=lambda: widgets.Layout(width="auto"))
    hidden: widgets.Layout = field(default_factory=lambda: widgets.Layout(display="none"))
    html: HTMLStyle = field(default_factory=HTMLStyle)
    text: TextStyle = field(default_factory=TextStyle)
    choice: DescriptionStyle = field(default_factory=DescriptionStyle)
    switch: CheckboxStyle = field(default_factory=CheckboxStyle)

    def layout(self, is_visible: bool) -> widgets.Layout:
        return self.shown if is_visible else self.hidden


class _Step:
    """The rows of a step: those in front, and below a button the others, which are created when it is first pressed.

    A row stays where it was first shown.
    """

    def __init__(self, looks: _Looks, typed: Typed, opened: Callable[[], None]) -> None:
        self._looks = looks
        self._typed = typed
        self._front: dict[str, _Line] = {}
        self._others: dict[str, _Line] = {}
        self._front_box, self._others_box = widgets.Box(layout=looks.shown), widgets.Box(layout=looks.hidden)
        self._front_box.add_class("shardstudio-rows")
        self._others_box.add_class("shardstudio-rows")
        self.more = widgets.ToggleButton(layout=looks.hidden)
        self.more.observe(lambda _: opened(), "value")
        self.box = widgets.VBox([self._front_box, self.more, self._others_box], layout=looks.shown)

    @property
    def lines(self) -> Mapping[str, _Line]:
        return self._front | self._others

    def show(self, rows: Sequence[Row]) -> None:
        self.more.value = self.more.value or any(row.error and row.field in self._others for row in rows)
        for row in rows:
            if row.field in self.lines:
                self.lines[row.field].show(row)
            elif row.is_visible and (row.in_front or row.error):
                self._front[row.field] = _Line(self._looks, row, self._typed)
            elif row.is_visible and self.more.value:
                self._others[row.field] = _Line(self._looks, row, self._typed)
        self._front_box.children = _in_order(rows, self._front)
        self._others_box.children = _in_order(rows, self._others)
        self._others_box.layout = self._looks.layout(self.more.value)
        count = sum(row.is_visible and row.field not in self._front for row in rows)
        self.more.description = f"{count} more settings"
        self.more.layout = self._looks.layout(count > 0)


class _Line:
    """One field: its input, and a note with its help and error."""

    def __init__(self, looks: _Looks, row: Row, typed: Typed) -> None:
        self._looks = looks
        self.input = _input(looks, row)
        self.note = widgets.HTML(layout=looks.shown, style=looks.html)
        self.input.observe(lambda change: typed(row.field, change["new"]), "value")
        self.show(row)

    def show(self, row: Row) -> None:
        with self.input.hold_sync():
            if row.kind == "choice" and self.input.options != _options(row):
                self.input.options = _options(row)  # selects the first option
            self.input.value = row.value
            if isinstance(self.input, widgets.Text):
                self.input.placeholder = row.placeholder
            self.input.layout = self._looks.layout(row.is_visible)
        if row.error:
            self.input.add_class("shardstudio-bad")
        else:
            self.input.remove_class("shardstudio-bad")
        self.note.value = TEMPLATES.part("form.html", "note", row.error, CODE.split(row.help))
        self.note.layout = self.input.layout


def _in_order(rows: Iterable[Row], lines: Mapping[str, _Line]) -> list[widgets.Widget]:
    made = [lines[row.field] for row in rows if row.field in lines]
    return [widget for line in made for widget in (line.input, line.note)]


def _input(looks: _Looks, row: Row) -> widgets.ValueWidget:
    common = {"value": row.value, "description": row.label, "layout": looks.shown}
    if row.kind == "choice":
        return widgets.Dropdown(options=_options(row), style=looks.choice, **common)
    if row.kind == "switch":
        return widgets.Checkbox(style=looks.switch, **common)
    if row.kind == "text":
        return widgets.Text(continuous_update=False, style=looks.text, **common)
    return widgets.Textarea(rows=TEXTAREA_ROWS[row.kind], continuous_update=False, style=looks.text, **common)


def _options(row: Row) -> tuple[str, ...]:
    """The words to choose from, including the current value even when it is wrong."""
    return tuple(dict.fromkeys([*row.choices, str(row.value)]))
