"""Pieces of HTML that several pages show, and how their handlers are connected. Every text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from app.panels import written
from app.studio import Studio
from app.thumbnails import FULL
from trainer.config import InputError, RunConfig
from trainer.events import SampleEvent

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
"""Options of every listener: no spinner over what is shown, no name in the programming interface.

Without the queue the answer comes with the request. The queue sends it over a stream that the browser may just be
closing; on busy cores some answers never came.
"""

WAITING_S = 1.0
"""Between two looks while the images are being read."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names its rows."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Sequence[str]) -> str:
    first, *others = row
    return f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)


def picture(studio: Studio, file: Path, text: str) -> str:
    """A thumbnail that shows the picture in full size, with the text, when it is clicked (VIEWER)."""
    try:
        small, full = studio.thumbnails.of(file), studio.thumbnails.of(file, FULL)
    except InputError as error:
        return escape(str(error))
    return (
        f'<a class="picture" href="{_address(full)}" target="_blank" rel="noopener" data-text="{escape(text)}">'
        f'<img src="{_address(small)}" loading="lazy" alt="{escape(text)}" title="{escape(text)}"></a>'
    )


def sample(studio: Studio, run: Path, event: SampleEvent, config: RunConfig) -> str:
    """What was drawn: a picture, or a text. run: its folder."""
    if event.is_text:
        return written(event)
    return picture(studio, run / event.path, sample_text(event, config))


def sample_text(sample: SampleEvent, config: RunConfig) -> str:
    """What made a sample: its prompt, step and seed."""
    return f"{sample.prompt} · step {sample.step} · seed {config.sample.seed}, prompt {sample.index + 1}"


VIEWER = """<dialog id="viewer" aria-label="Picture in full size"><form method="dialog">
<img alt=""><p></p><button autofocus>Close</button></form></dialog>"""

VIEWER_SCRIPT = """
const dialog = element.querySelector('dialog');
document.addEventListener('click', event => {
  const copy = event.target.closest('button.copy');
  if (copy) navigator.clipboard.writeText(copy.previousElementSibling.textContent);
  const link = event.target.closest('a.picture');
  if (!link || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  dialog.querySelector('img').src = link.href;
  dialog.querySelector('img').alt = dialog.querySelector('p').textContent = link.dataset.text;
  dialog.showModal();
});
"""


def _address(file: Path) -> str:
    return escape(f"/gradio_api/file={file}")
