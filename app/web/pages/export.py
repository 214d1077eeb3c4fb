"""The page Export: write a run's checkpoint as files, verify and download them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import gradio as gr
from markupsafe import Markup

from app.html import alert, attempted, note
from app.monitor import RunView, explained
from app.studio import Studio
from app.web.pages.parts import QUIET, table
from app.web.pages.renew import SKIP, Lazy, Tick, choices
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig, export_formats
from trainer.config.sections import ExportConfig
from trainer.run.folder import RunDir

DTYPES = get_args(ExportConfig.model_fields["dtype"].annotation)


def build(studio: Studio, run: gr.Dropdown) -> Tick:
    """Lay out the page, inside a `gr.Blocks`."""
    with gr.Row():
        what = gr.Dropdown([], label="What", elem_id="export-what")
        format = gr.Dropdown([], label="Format", elem_id="export-format")
        dtype = gr.Dropdown(list(DTYPES), value="bf16", label="Precision", elem_id="export-dtype")
        start = gr.Button("Export", variant="primary", elem_id="export")
    message = gr.HTML(elem_id="export-message")
    files = gr.HTML(elem_id="exports")
    with gr.Row():
        file = gr.Dropdown([], label="File", elem_id="export-file")
        checksum = gr.Button("Checksum", elem_id="checksum")
        download = gr.DownloadButton("Download", elem_id="download", interactive=False)
    start.click(_exporter(studio), [run, what, format, dtype], message, **QUIET)
    checksum.click(_checksum(studio), [run, file], message, **QUIET)
    inputs, outputs = [run, what, format, file], [what, format, files, file, download, message]
    return Tick(_shower(studio), inputs, outputs, (what.input, file.input))


def exported(run: RunDir) -> list[Path]:
    """Return the exported files of a run, sorted by name. Links to files outside the folder are left out."""
    home = run.export.resolve()
    return sorted(file for file in run.export.rglob("*") if file.is_file() and file.resolve().is_relative_to(home))


def allowed(config: RunConfig) -> tuple[str, ...]:
    """Return the kinds of export that a config supports."""
    return ("full",) if config.adapter.type == "none" else ("adapter", "merged")


def _shower(studio: Studio) -> Callable[[str, str | None, str | None, str | None], list[Any]]:
    def show(name: str, what: str | None, format: str | None, file: str | None) -> list[Any]:
        try:
            run = studio.run(name)
        except InputError:
            return [SKIP] * 6
        try:
            follower = studio.follower(run)
            config, rows, state = follower.config, _rows(run, follower.view()), _state(studio, run)
        except (InputError, OSError) as error:
            return [SKIP, SKIP, alert(explained(error)), *[SKIP] * 3]
        possible, names = allowed(config), [row[0] for row in rows]
        wanted = what if what in possible else possible[0]
        chosen = file if file in names else next(iter(names), None)
        return [
            choices(possible, what, wanted),
            choices(export_formats(config.adapter.type, wanted), format, "auto"),
            _listing(rows),
            choices(names, file, chosen),
            Lazy((rows, name, chosen), lambda: _offer(studio, run, chosen)),
            Lazy((state, name), lambda: state),
        ]

    return show


def _state(studio: Studio, run: RunDir) -> Markup:
    try:
        state = studio.export_state(run)
    except InputError as error:
        return alert(str(error))
    return note(state) if state else Markup()


def _listing(files: Sequence[tuple[str, str, str]]) -> Markup:
    head = ("File", "Size", "Relative difference after reload")
    return table(head, files) if files else Markup("<p>No exports yet.</p>")


def _rows(run: RunDir, view: RunView) -> list[tuple[str, str, str]]:
    """File, size, and relative difference of the reloaded weights from the trained ones."""
    differences = {run.path / event.path: event.difference for event in view.exports}
    rows = []
    for file in exported(run):
        known = [differences[place] for place in (file, *file.parents) if place in differences]
        shown = f"{known[0]:.1e}" if known and math.isfinite(known[0]) else ""
        rows.append((str(file.relative_to(run.export)), f"{file.stat().st_size / 1e6:,.2f} MB", shown))
    return rows


def _exporter(studio: Studio) -> Callable[[str, str, str, str], Markup]:
    def start(name: str, what: str, format: str, dtype: str) -> Markup:
        try:
            run = studio.run(name)
            studio.export(run, what, format, dtype)
        except (InputError, OSError) as error:
            return alert(str(error))
        return _state(studio, run)

    return start


def _checksum(studio: Studio) -> Callable[[str, str], Markup]:
    def compute(name: str, file: str) -> str:
        with _file(studio.run(name), file).open("rb") as content:
            return f"SHA-256 of {file}: {hashlib.file_digest(content, 'sha256').hexdigest()}"

    return lambda name, file: attempted(lambda: compute(name, file))


def _offer(studio: Studio, run: RunDir, file: str | None) -> dict[str, Any]:
    """The download button, disabled without a file."""
    try:
        offered = studio.downloads.offer(_file(run, file))
    except InputError:
        return gr.update(value=None, interactive=False)
    return gr.update(value=str(offered), interactive=True)


def _file(run: RunDir, name: str | None) -> Path:
    """An exported file by its name. Raises InputError when there is none."""
    files = {str(file.relative_to(run.export)): file for file in exported(run)}
    if not name or name not in files:
        raise InputError(f"'{name}' is not an exported file of {run.path.name}")
    return files[name]
