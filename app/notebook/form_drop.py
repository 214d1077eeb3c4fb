"""Drop and name in a notebook: pictures and one word for them become a folder of their own and the form's settings."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ipywidgets as widgets

from app.data.upload.selection import Given, put
from app.data.upload.uploads import Placed
from app.form import proposals
from app.notebook import panels
from app.notebook.form_parts import BUTTON, SHOWN, TEXT, Notice, box, html
from app.notebook.panels import TEMPLATES
from app.runs.monitor import explained
from app.studio import Studio
from app.web.pages import drop, new_run, upload
from trainer.system.errors import InputError

POLL_S = 0.2


class Drop:
    """The folded part of a form that takes pictures.

    Attributes:
        files: The files that were chosen.
        word: The word for what they show.
        go: The button that takes them; disabled meanwhile.
        said: What became of them.
    """

    def __init__(self, studio: Studio, lock: AbstractContextManager[Any], change: Callable[..., None]) -> None:
        """Create it. change: calls a function of the screen New run and shows its answer."""
        self._studio, self._lock, self._change = studio, lock, change
        self._last = "", ""  # word and folder
        self.files = widgets.FileUpload(
            multiple=True, accept=upload.facts()["accept"], description="Choose files", layout=SHOWN, style=BUTTON
        )
        self.word = widgets.Text(
            description="One word for what they are", placeholder="milo", continuous_update=False, style=TEXT
        )
        self.go = widgets.Button(description="Go on", layout=SHOWN, style=BUTTON)
        self.go.on_click(lambda _: self._begin())
        self.said = Notice()
        buttons = widgets.HBox([self.files, self.go], layout=SHOWN).add_class("shardstudio-buttons")
        parts = [html(TEMPLATES.part("form.html", "drop")), box(self.word, name="field"), buttons, self.said.box]
        self.box = widgets.Accordion([box(*parts)], titles=["Drop and name: your pictures and a word"], layout=SHOWN)

    def _begin(self) -> None:
        """Take the files on a thread: each is decoded once, and the form stays usable."""
        given = [
            Given(file["name"], bytes(file["content"]), int(1000 * file["last_modified"].timestamp()))
            for file in self.files.value
        ]
        self.go.disabled = True
        threading.Thread(target=self._take, args=(self.word.value.strip(), given), name="drop", daemon=True).start()

    def _take(self, word: str, given: Sequence[Given]) -> None:
        try:
            proposals.named(word)
            if not given:
                self.said.show(TEMPLATES.part("form.html", "no_files"))
                return
            with self._lock:
                folder, undo = self._folder(word)
            found = []
            for one in put(self._studio.uploads, folder, given):
                found.append(one)
                self.said.show(TEMPLATES.part("panels.html", "note", f"{len(found)} of {len(given)} files"))
            self.files.value = ()  # else a saved notebook would have them
            self._change(new_run.read_again)
            missing = self._propose(folder)
            sentence = TEMPLATES.part("form.html", "dropped", folder, *_told(found), missing, bool(undo))
            self.said.show(sentence, {"Bring them back": partial(self._bring_back, undo)} if undo else {})
        except (InputError, OSError) as error:
            self.said.show(panels.alert(explained(error)))
        finally:
            self.go.disabled = False

    def _folder(self, word: str) -> tuple[str, Mapping[str, Any] | None]:
        """Return the folder that a word names, and what brings the former form back; the same word again adds to it."""
        former = self._studio.draft()
        if (word, former.values.get("data.path")) == self._last:
            return self._last[1], None
        folder = drop.make_folder(self._studio, word)
        self._last = word, folder
        if not former.values and former.preset == self._studio.draft().preset:
            return folder, None
        return folder, self._studio.undo(former)

    def _propose(self, folder: str) -> int | None:
        """Take what is proposed for the images of a folder once they are read, while the form has them.

        Returns how many have no caption, where that is known.
        """
        while self._studio.draft().values.get("data.path") == folder:
            checked, found = self._studio.check_with_images(self._studio.draft())
            if found.is_complete:
                self._change(new_run.edit, proposals.completed(checked, found))
                return drop.num_uncaptioned(found, folder)
            time.sleep(POLL_S)
        return None

    def _bring_back(self, former: Mapping[str, Any]) -> None:
        self._change(new_run.restore, **former, is_whole=True)
        self.said.show()


def _told(found: Sequence[tuple[str, Placed | InputError]]) -> tuple[Counter[str], Mapping[str, list[str]]]:
    """Return what became of files: {in a few words: how many}, and what is to be said of some, {sentence: names}."""
    counts, notes = Counter[str](), defaultdict[str, list[str]](list)
    for name, placed in found:
        if isinstance(placed, InputError):
            counts["not taken"] += 1
            notes[str(placed).removeprefix(f"{name}: ")].append(name)
            continue
        counts["added" if placed.is_new else "there already"] += 1
        if placed.is_new and placed.name != name:
            notes[f"is called {placed.name} here"].append(name)
        if placed.is_alone:
            notes["no image has its name, so it is not a caption yet"].append(name)
    return counts, notes
