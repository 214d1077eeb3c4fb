"""The panels of the page, each listed once: a module of `pages/`, and the scripts of `assets/` that call it.

See DECISIONS 116.
"""

from __future__ import annotations

from types import ModuleType

from app.web.pages import (
    captioning,
    data,
    drop,
    files,
    frame,
    look,
    machine,
    mask,
    new_run,
    queue,
    rehearsal,
    results,
    run,
    runs,
    samples,
    upload,
)

PANELS: dict[ModuleType, tuple[str, ...]] = {
    frame: ("frame", "charts", "lightbox"),
    new_run: ("step", "fit", "form"),
    drop: ("drop",),
    rehearsal: ("rehearsal",),
    run: ("run",),
    samples: ("samples",),
    files: ("files",),
    results: ("results",),
    runs: ("runs", "compare"),
    queue: ("queue",),
    captioning: ("captioning",),
    upload: ("upload",),
    look: ("look",),
    mask: ("mask",),
    data: ("data",),
    machine: ("machine",),
}
"""{module with a function `calls`: its scripts}. A script may have a style sheet of its name. The order is the order of
the rail, where a script registers a screen that has a `rail`."""
