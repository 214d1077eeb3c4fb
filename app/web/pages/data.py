"""The page Dataset: the draft's images with editable captions, their buckets, and errors in the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup

from app import captions as caption_files
from app import form, html
from app.caption_lengths import LengthsResult
from app.captions import Captions, Card
from app.html import alert, attempted, note
from app.scans import ScanResult
from app.studio import Studio
from app.web.pages.parts import QUIET, WAITING_S, column_heads, listed, thumbnail
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.data.measured import CutCaption
from trainer.plan.storage import amount

PER_PAGE = 12
MAX_REST = 600
"""Characters shown of the truncated part of a caption."""
MEASURING = "Measuring the captions in tokens."


def build(studio: Studio) -> list[Any]:
    """Lay out the page, inside a `gr.Blocks`. Returns [handler, inputs, outputs] that read the images again."""
    captions = Captions(studio.runs / "drafts" / "captions.jsonl")
    message = gr.HTML(elem_id="dataset-message")
    problems = gr.HTML(elem_id="dataset-problems")
    with gr.Row():
        search = gr.Textbox(label="Search in captions", elem_id="search", max_lines=1)
        replacement = gr.Textbox(label="Replace with", elem_id="replacement", max_lines=1)
        replace = gr.Button("Replace all", elem_id="replace")
        undo = gr.Button("Undo", elem_id="undo")
    with gr.Row():
        page = gr.Number(1, label="Page", minimum=1, precision=0, elem_id="page")
        counted = gr.HTML(elem_id="counted")
    cut = gr.HTML(elem_id="cut")
    files: list[gr.State] = []
    images: list[gr.HTML] = []
    texts: list[gr.Textbox] = []
    ends: list[gr.HTML] = []
    for row in range(PER_PAGE // 4):
        with gr.Row():
            for column in range(4):
                with gr.Column(min_width=160):
                    index = 4 * row + column
                    files.append(gr.State(""))
                    images.append(gr.HTML(elem_classes="card", padding=False))
                    texts.append(
                        gr.Textbox(label=f"Caption {index + 1}", lines=2, visible=False, elem_id=f"card-{index}")
                    )
                    ends.append(gr.HTML(elem_id=f"end-{index}", padding=False))
    compute = gr.Button("Show timesteps per bucket", elem_id="compute-timesteps")
    timesteps = gr.HTML(elem_id="timesteps")
    compute.click(lambda: _timesteps(studio), None, timesteps, **QUIET)
    waiting = gr.Timer(WAITING_S, active=False)
    measuring = gr.Timer(WAITING_S, active=False)
    measured = [measuring, cut, *ends]
    outputs = [message, waiting, counted, problems, *files, *images, *texts, *measured]
    renew, read_again = _renewer(studio), _renewer(studio, is_fresh=True)
    page.change(renew, page, outputs, **QUIET)
    waiting.tick(renew, page, outputs, trigger_mode="once", **QUIET)
    replace.click(_replacer(studio, captions, read_again), [search, replacement, page], outputs, **QUIET)
    undo.click(_undoer(captions, read_again), page, outputs, **QUIET)
    measuring.tick(_measurer(studio), files, measured, trigger_mode="once", **QUIET)
    for file, text in zip(files, texts, strict=True):
        written = [message, measuring, cut]
        text.input(_writer(studio, captions), [file, text], written, trigger_mode="always_last", **QUIET)
    return [read_again, page, outputs]


def _found(studio: Studio, is_fresh: bool) -> tuple[RunConfig, ScanResult]:
    config = form.check(studio.draft()).config
    return config, studio.scans.of(config, is_fresh)


def _renewer(studio: Studio, is_fresh: bool = False) -> Callable[..., list[Any]]:
    def renew(page: float, message: str = "") -> list[Any]:
        try:
            config, found = _found(studio, is_fresh)
            first = (max(1, int(page or 1)) - 1) * PER_PAGE
            shown = caption_files.cards(found.images[first : first + PER_PAGE])
        except InputError as error:
            return [alert(str(error)), *(gr.skip() for _ in range(5 + 4 * PER_PAGE))]
        message = message if message or is_fresh else gr.skip()
        if not found.is_complete:
            if is_fresh:
                studio.lengths.forget()
            counted = note(f"{found.num_files} files so far; reading images.")
            return [message, gr.Timer(active=True), counted, *(gr.skip() for _ in range(3 + 4 * PER_PAGE))]
        empty = PER_PAGE - len(shown)
        text = f"{len(found.images)} images, {first + 1} to {first + len(shown)} shown" if shown else _others(found)
        return [
            message,
            gr.Timer(active=False),
            Markup("<p>{}</p>").format(text) + _notes(found, config.data.trigger) + _buckets(found.buckets),
            _problems(found),
            *(str(card.image) for card in shown),
            *[""] * empty,
            *(thumbnail(studio, card.image, card.image.name) for card in shown),
            *[""] * empty,
            *(gr.update(value=card.caption, label=card.image.name, visible=True) for card in shown),
            *[gr.update(value="", visible=False)] * empty,
            *_measured(studio, config, found, [*(str(card.image) for card in shown), *[""] * empty], is_fresh),
        ]

    return renew


def _measurer(studio: Studio, is_fresh: bool = False) -> Callable[..., list[Any]]:
    def measure(*files: str) -> list[Any]:
        try:
            config, found = _found(studio, is_fresh=False)
        except InputError as error:
            return [gr.Timer(active=False), alert(str(error)), *[""] * len(files)]
        return _measured(studio, config, found, files, is_fresh)

    return measure


def _measured(studio: Studio, config: RunConfig, found: ScanResult, files: Sequence[str], is_fresh: bool) -> list[Any]:
    """Updates of the timer, of the sentences about all captions, and of the truncated part of each file's caption."""
    if found.problems or not found.images:
        return [gr.Timer(active=False), "", *[""] * len(files)]
    known = studio.lengths.of(config, is_fresh)
    if known.measured is None:
        return [gr.Timer(active=known.is_waiting), _unmeasured(known), *[""] * len(files)]
    ends = {caption.image: _end(caption) for caption in known.measured.cut}
    whole = "No caption is truncated."
    sentences = Markup().join(map(Markup("<p>{}</p>").format, known.measured.warnings or (whole,)))
    summary = _unmeasured(known) if known.is_waiting else sentences
    return [gr.Timer(active=known.is_waiting), summary, *(ends.get(file, "") for file in files)]


def _unmeasured(known: LengthsResult) -> Markup:
    return alert(known.failure) if known.failure and not known.is_waiting else note(MEASURING)


def _end(caption: CutCaption) -> Markup:
    """The truncated part of a caption, with the words before it."""
    more = "…" if len(caption.rest) > MAX_REST else ""
    return Markup(
        '<p class="cut" tabindex="0">Truncated: {0.encoder} reads {0.read} of {0.needed} tokens.<br>'
        "…{0.before}<del>{1}{2}</del></p>"
    ).format(caption, caption.rest[:MAX_REST], more)


def _writer(studio: Studio, captions: Captions) -> Callable[[str, str], list[Any]]:
    def write(file: str, text: str) -> str:
        image = Path(file)
        captions.write(Card(image, ""), text.strip())
        return _with_problem(f"Caption of {image.name} saved.", captions)

    measure_again = _measurer(studio, is_fresh=True)
    return lambda file, text: [attempted(lambda: write(file, text)) if file else "", *measure_again()]


def _replacer(studio: Studio, captions: Captions, renew: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def replace(search: str, replacement: str) -> str:
        _, found = _found(studio, is_fresh=False)
        if not found.is_complete:
            raise InputError("The images are still being read; try again when that is done")
        count = captions.replace(caption_files.cards(found.images), search, replacement)
        return _with_problem(f"Replaced in {count} captions.", captions)

    return lambda search, replacement, page: renew(page, attempted(lambda: replace(search, replacement)))


def _undoer(captions: Captions, renew: Callable[..., list[Any]]) -> Callable[[float], list[Any]]:
    def undo() -> str:
        return _with_problem(f"{captions.undo()} captions restored.", captions)

    return lambda page: renew(page, attempted(undo))


def _with_problem(done: str, captions: Captions) -> str:
    return f"{done} {captions.problem}".rstrip()


def _notes(found: ScanResult, trigger: str) -> Markup:
    """The number of questions and the trigger, where there are any."""
    notes = Markup()
    if found.num_questions:
        notes += Markup("<p>{} questions about images to train on.</p>").format(found.num_questions)
    if trigger:
        notes += Markup("<p>[trigger] in a caption becomes <b>{}</b>.</p>").format(trigger)
    return notes


def _others(found: ScanResult) -> str:
    """The files of a language model's data, shown where there are no images."""
    files = found.texts
    if not files:
        return "No images here."
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{counted} of text, {amount(sum(files.values()))}, first {next(iter(files)).name}"


def _buckets(counts: Mapping[tuple[int, int], int]) -> Markup:
    if not counts:
        return Markup()
    most = max(counts.values())
    bar = Markup('<li><span>{} x {}</span><i style="width:{:.0f}%"></i><span>{}</span></li>')
    bars = Markup().join(bar.format(*size, 60 * count / most, count) for size, count in counts.items())
    return Markup('<h2>Images per bucket</h2><ul class="buckets">{}</ul>').format(bars)


def _timesteps(studio: Studio) -> Markup:
    """A table of the effective shift and the distribution of timesteps per bucket."""
    try:
        rows = studio.timesteps(studio.draft())
    except (InputError, OSError) as error:
        return alert(str(error))
    if not rows:
        return Markup("<p>Text has no timesteps.</p>")
    line = Markup(
        '<tr><th scope="row">{width} x {height}</th><td>{images}</td><td>{shift:.2f}</td><td>{drawn}</td></tr>'
    )
    cells = Markup().join(line.format(**row, drawn=_histogram(row["timesteps"])) for row in rows)
    head = column_heads(("Bucket", "Images", "Shift", "Timesteps, image to noise"))
    return Markup('<div class="wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        head, cells
    )


def _histogram(shares: Sequence[float]) -> Markup:
    most, middle = max(shares), sum((at + 0.5) * share for at, share in enumerate(shares)) / len(shares)
    bars = Markup().join(Markup('<i style="height:{:.0f}%"></i>').format(100 * share / most) for share in shares)
    return Markup('<span class="histogram" role="img" aria-label="mean {:.2f}">{}</span>').format(middle, bars)


def _problems(found: ScanResult) -> Markup:
    if found.problems:
        return html.blockers(listed(found.problems))
    if found.warnings:
        return Markup("<h2>Warnings</h2><ul>{}</ul>").format(listed(found.warnings))
    return Markup("<p>No problems in the files.</p>")
