"""The images of the draft: their captions to edit, their buckets, and what would stop a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup

from app import captions as caption_files
from app import form, html
from app.caption_lengths import Known
from app.captions import Captions, Card
from app.html import alert, attempted, note
from app.scans import Found
from app.studio import Studio
from app.web.pages.parts import QUIET, WAITING_S, column_heads, listed, picture
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.data.measured import CutCaption
from trainer.plan.storage import amount

PER_PAGE = 12
SHOWN_REST = 600
"""Characters of what is cut of a caption."""
MEASURING = "The captions are being compared with what the model reads."


def build(studio: Studio) -> list[Any]:
    """Lay out the page, inside a `gr.Blocks`. Returns [handler, inputs, outputs] of what reads the images again."""
    captions = Captions(studio.runs / "drafts" / "captions.jsonl")
    said = gr.HTML(elem_id="dataset-said")
    problems = gr.HTML(elem_id="dataset-problems")
    with gr.Row():
        search = gr.Textbox(label="Search in captions", elem_id="search", max_lines=1)
        replacement = gr.Textbox(label="Replace it by", elem_id="replacement", max_lines=1)
        replace = gr.Button("Replace all", elem_id="replace")
        undo = gr.Button("Undo", elem_id="undo")
    with gr.Row():
        page = gr.Number(1, label="Page", minimum=1, precision=0, elem_id="page")
        counted = gr.HTML(elem_id="counted")
    cut = gr.HTML(elem_id="cut")
    files: list[gr.State] = []
    pictures: list[gr.HTML] = []
    texts: list[gr.Textbox] = []
    ends: list[gr.HTML] = []
    for row in range(PER_PAGE // 4):
        with gr.Row():
            for column in range(4):
                with gr.Column(min_width=160):
                    index = 4 * row + column
                    files.append(gr.State(""))
                    pictures.append(gr.HTML(elem_classes="card", padding=False))
                    texts.append(
                        gr.Textbox(label=f"Caption {index + 1}", lines=2, visible=False, elem_id=f"card-{index}")
                    )
                    ends.append(gr.HTML(elem_id=f"end-{index}", padding=False))
    compute = gr.Button("Show the noise they are trained at", elem_id="compute-recipe")
    noise = gr.HTML(elem_id="recipe")
    compute.click(lambda: _recipe(studio), None, noise, **QUIET)
    waiting = gr.Timer(WAITING_S, active=False)
    measuring = gr.Timer(WAITING_S, active=False)
    measured = [measuring, cut, *ends]
    outputs = [said, waiting, counted, problems, *files, *pictures, *texts, *measured]
    renew, read_again = _renewer(studio), _renewer(studio, is_fresh=True)
    page.change(renew, page, outputs, **QUIET)
    waiting.tick(renew, page, outputs, trigger_mode="once", **QUIET)
    replace.click(_replacer(studio, captions, read_again), [search, replacement, page], outputs, **QUIET)
    undo.click(_undoer(captions, read_again), page, outputs, **QUIET)
    measuring.tick(_measurer(studio), files, measured, trigger_mode="once", **QUIET)
    for file, text in zip(files, texts, strict=True):
        written = [said, measuring, cut]
        text.input(_writer(studio, captions), [file, text], written, trigger_mode="always_last", **QUIET)
    return [read_again, page, outputs]


def _found(studio: Studio, is_fresh: bool) -> tuple[RunConfig, Found]:
    config = form.check(studio.draft()).config
    return config, studio.scans.of(config, is_fresh)


def _renewer(studio: Studio, is_fresh: bool = False) -> Callable[..., list[Any]]:
    def renew(page: float, said: str = "") -> list[Any]:
        try:
            config, found = _found(studio, is_fresh)
            first = (max(1, int(page or 1)) - 1) * PER_PAGE
            shown = caption_files.cards(found.images[first : first + PER_PAGE])
        except InputError as error:
            return [alert(str(error)), *(gr.skip() for _ in range(5 + 4 * PER_PAGE))]
        told = said if said or is_fresh else gr.skip()
        if not found.is_complete:
            if is_fresh:
                studio.lengths.forget()
            counted = note(f"{found.num_files} files so far; their images are being read.")
            return [told, gr.Timer(active=True), counted, *(gr.skip() for _ in range(3 + 4 * PER_PAGE))]
        empty = PER_PAGE - len(shown)
        text = f"{len(found.images)} images, {first + 1} to {first + len(shown)} shown" if shown else _others(found)
        return [
            told,
            gr.Timer(active=False),
            Markup("<p>{}</p>").format(text) + _asked(found) + _trigger(config.data.trigger) + _buckets(found.buckets),
            _problems(found),
            *(str(card.image) for card in shown),
            *[""] * empty,
            *(picture(studio, card.image, card.image.name) for card in shown),
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


def _measured(studio: Studio, config: RunConfig, found: Found, files: Sequence[str], is_fresh: bool) -> list[Any]:
    """Whether to look again soon, what is said of all captions, and of each file's what of it is cut."""
    if found.problems or not found.images:
        return [gr.Timer(active=False), "", *[""] * len(files)]
    known = studio.lengths.of(config, is_fresh)
    if known.measured is None:
        return [gr.Timer(active=known.is_waiting), _unmeasured(known), *[""] * len(files)]
    ends = {caption.image: _end(caption) for caption in known.measured.cut}
    whole = "The model reads every caption whole."
    sentences = Markup().join(map(Markup("<p>{}</p>").format, known.measured.warnings or (whole,)))
    said = _unmeasured(known) if known.is_waiting else sentences
    return [gr.Timer(active=known.is_waiting), said, *(ends.get(file, "") for file in files)]


def _unmeasured(known: Known) -> Markup:
    return alert(known.failure) if known.failure and not known.is_waiting else note(MEASURING)


def _end(caption: CutCaption) -> Markup:
    """The cut in a caption, with the words before it."""
    more = "…" if len(caption.rest) > SHOWN_REST else ""
    return Markup(
        '<p class="cut" tabindex="0">Cut: {0.encoder} reads {0.read} of {0.needed} tokens.<br>'
        "…{0.before}<del>{1}{2}</del></p>"
    ).format(caption, caption.rest[:SHOWN_REST], more)


def _writer(studio: Studio, captions: Captions) -> Callable[[str, str], list[Any]]:
    def write(file: str, text: str) -> str:
        image = Path(file)
        captions.write(Card(image, ""), text.strip())
        return _with_trouble(f"Caption of {image.name} saved.", captions)

    measure_again = _measurer(studio, is_fresh=True)
    return lambda file, text: [attempted(lambda: write(file, text)) if file else "", *measure_again()]


def _replacer(studio: Studio, captions: Captions, renew: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def replace(search: str, replacement: str) -> str:
        _, found = _found(studio, is_fresh=False)
        if not found.is_complete:
            raise InputError("The images are still being read; try again when they are counted")
        count = captions.replace(caption_files.cards(found.images), search, replacement)
        return _with_trouble(f"Replaced in {count} captions.", captions)

    return lambda search, replacement, page: renew(page, attempted(lambda: replace(search, replacement)))


def _undoer(captions: Captions, renew: Callable[..., list[Any]]) -> Callable[[float], list[Any]]:
    def undo() -> str:
        return _with_trouble(f"{captions.undo()} captions are as before.", captions)

    return lambda page: renew(page, attempted(undo))


def _with_trouble(done: str, captions: Captions) -> str:
    return f"{done} {captions.trouble}".rstrip()


def _asked(found: Found) -> Markup:
    asked = Markup("<p>{} questions about images to train on.</p>")
    return asked.format(found.num_questions) if found.num_questions else Markup()


def _others(found: Found) -> str:
    """Where there are no images: what a language model is trained on."""
    files = found.texts
    if not files:
        return "No images here."
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{counted} of text, {amount(sum(files.values()))}, first {next(iter(files)).name}"


def _trigger(word: str) -> Markup:
    return Markup("<p>[trigger] in a caption becomes <b>{}</b>.</p>").format(word) if word else Markup()


def _buckets(counts: Mapping[tuple[int, int], int]) -> Markup:
    if not counts:
        return Markup()
    most = max(counts.values())
    bar = Markup('<li><span>{} x {}</span><i style="width:{:.0f}%"></i><span>{}</span></li>')
    bars = Markup().join(bar.format(*size, 60 * count / most, count) for size, count in counts.items())
    return Markup('<h2>Images per bucket</h2><ul class="buckets">{}</ul>').format(bars)


def _recipe(studio: Studio) -> Markup:
    """Per bucket the effective shift, and how often each noise level is drawn."""
    try:
        rows = studio.recipe(studio.draft())
    except (InputError, OSError) as error:
        return alert(str(error))
    if not rows:
        return Markup("<p>Text has no noise levels.</p>")
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


def _problems(found: Found) -> Markup:
    if found.problems:
        return html.waits_for(listed(found.problems))
    if found.warnings:
        return Markup("<h2>Worth knowing</h2><ul>{}</ul>").format(listed(found.warnings))
    return Markup("<p>Nothing is wrong with the files.</p>")
