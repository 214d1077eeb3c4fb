"""HTML elements and event options that several pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from app.html import text_sample
from app.studio import Studio
from app.web.served_files import FULL
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.run.events import SampleEvent
from trainer.run.folder import RunDir

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
"""Options of every listener: no spinner, no API endpoint, no queue.

Without the queue the response arrives with the request. The queue sends it over a stream that the browser may be
closing; on busy cores some responses never arrived.
"""

WAITING_S = 1.0
"""Interval of updates while images are being read."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table whose first column holds the row heads."""
    cell, top = Markup("<td>{}</td>"), column_heads(head)
    body = Markup().join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(first, Markup().join(map(cell.format, others)))
        for first, *others in rows
    )
    return Markup('<div class="wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        top, body
    )


def matrix(head: Sequence[str], rows: Iterable[tuple[str, Sequence[Markup]]]) -> Markup:
    """Return a table of samples. Each row is a prompt and its cells."""
    lines = [
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            prompt, Markup().join(map(Markup("<td>{}</td>").format, cells))
        )
        for prompt, cells in rows
    ]
    return Markup('<div class="wide"><table class="matrix"><tr><td></td>{}</tr>{}</table></div>').format(
        column_heads(head), Markup().join(lines)
    )


def column_heads(names: Iterable[str]) -> Markup:
    """Return the head cells of a table."""
    return Markup().join(map(Markup('<th scope="col">{}</th>').format, names))


def listed(lines: Iterable[str]) -> Markup:
    """Return the items of a list."""
    return Markup().join(map(Markup("<li>{}</li>").format, lines))


def thumbnail(studio: Studio, file: Path, text: str) -> Markup:
    """Return a thumbnail that opens the image in full size, with the text, when it is clicked (VIEWER)."""
    try:
        small, full = studio.thumbnails.of(file), studio.thumbnails.of(file, FULL)
    except InputError as error:
        return escape(str(error))
    return Markup(
        '<a class="thumbnail" href="{full}" target="_blank" rel="noopener" data-text="{text}">'
        '<img src="{small}" loading="lazy" alt="{text}" title="{text}"></a>'
    ).format(full=_address(full), small=_address(small), text=text)


def sample(studio: Studio, run: Path, event: SampleEvent, config: RunConfig) -> Markup:
    """Return a sample, image or text, of the run in the folder `run`."""
    if event.is_text:
        return text_sample(event)
    try:
        file = RunDir(run).own_file(event.path)
    except (InputError, OSError, ValueError) as error:
        return escape(str(error))
    return thumbnail(studio, file, sample_text(event, config))


def sample_text(sample: SampleEvent, config: RunConfig) -> str:
    """Return a caption with the sample's prompt, step and seed."""
    return f"{sample.prompt} · step {sample.step} · seed {config.sample.seed}, prompt {sample.index + 1}"


VIEWER = """<dialog id="viewer" aria-label="Image in full size"><form method="dialog">
<img alt=""><p></p><button autofocus>Close</button></form></dialog>"""

VIEWER_SCRIPT = """
const dialog = element.querySelector('dialog');
document.addEventListener('click', event => {
  const copy = event.target.closest('button.copy');
  if (copy) navigator.clipboard.writeText(copy.previousElementSibling.textContent);
  const link = event.target.closest('a.thumbnail');
  if (!link || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  dialog.querySelector('img').src = link.href;
  dialog.querySelector('img').alt = dialog.querySelector('p').textContent = link.dataset.text;
  dialog.showModal();
});
"""


def _address(file: Path) -> str:
    return f"/gradio_api/file={file}"
