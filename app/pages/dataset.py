"""The images of the draft: their captions to edit, their buckets, and what would stop a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from app import dataset, form
from app.dataset import Captions, Card
from app.pages.parts import QUIET, alert, attempted, picture, table
from app.studio import Studio
from trainer.config import InputError

PER_PAGE = 12


def build(studio: Studio) -> list[Any]:
    """Lay out the page, inside a `gr.Blocks`. Returns [handler, inputs, outputs] of what renews it."""
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
    files: list[gr.State] = []
    pictures: list[gr.HTML] = []
    texts: list[gr.Textbox] = []
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
    compute = gr.Button("Show the noise they are trained at", elem_id="compute-recipe")
    noise = gr.HTML(elem_id="recipe")
    compute.click(lambda: _recipe(studio), None, noise, **QUIET)
    outputs = [said, counted, problems, *files, *pictures, *texts]
    renew = _renewer(studio)
    page.change(renew, page, outputs, **QUIET)
    replace.click(_replacer(studio, captions, renew), [search, replacement, page], outputs, **QUIET)
    undo.click(_undoer(captions, renew), page, outputs, **QUIET)
    for file, text in zip(files, texts, strict=True):
        text.input(_writer(captions), [file, text], said, trigger_mode="always_last", **QUIET)
    return [renew, page, outputs]


def _cards(studio: Studio) -> list[Card]:
    path = form.check(studio.draft()).config.data.path
    return dataset.cards(Path(path)) if path else []


def _renewer(studio: Studio) -> Callable[..., list[Any]]:
    def renew(page: float, said: str = "") -> list[Any]:
        try:
            cards = _cards(studio)
            config = form.check(studio.draft()).config
            found = dataset.problems(config)
            buckets = {} if found else dataset.bucket_counts(config)
        except InputError as error:
            return [alert(str(error)), *(gr.skip() for _ in range(2 + 3 * PER_PAGE))]
        first = (max(1, int(page or 1)) - 1) * PER_PAGE
        shown = cards[first : first + PER_PAGE]
        empty = PER_PAGE - len(shown)
        text = (
            f"<p>{len(cards)} images, {first + 1} to {first + len(shown)} shown</p>" if shown else "<p>None here.</p>"
        )
        return [
            said,
            text + _trigger(config.data.trigger) + (_buckets(buckets) if buckets else ""),
            _problems(found, dataset.warnings(config)),
            *(str(card.image) for card in shown),
            *[""] * empty,
            *(picture(studio, card.image, card.image.name) for card in shown),
            *[""] * empty,
            *(gr.update(value=card.caption, label=card.image.name, visible=True) for card in shown),
            *[gr.update(value="", visible=False)] * empty,
        ]

    return renew


def _writer(captions: Captions) -> Callable[[str, str], str]:
    def write(file: str, text: str) -> str:
        image = Path(file)
        captions.write(Card(image, ""), text.strip())
        return f"Caption of {image.name} saved."

    return lambda file, text: attempted(lambda: write(file, text)) if file else ""


def _replacer(studio: Studio, captions: Captions, renew: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def replace(search: str, replacement: str) -> str:
        return f"Replaced in {captions.replace(_cards(studio), search, replacement)} captions."

    return lambda search, replacement, page: renew(page, attempted(lambda: replace(search, replacement)))


def _undoer(captions: Captions, renew: Callable[..., list[Any]]) -> Callable[[float], list[Any]]:
    return lambda page: renew(page, attempted(lambda: f"{captions.undo()} captions are as before."))


def _trigger(word: str) -> str:
    return f"<p>[trigger] in a caption becomes <b>{escape(word)}</b>.</p>" if word else ""


def _buckets(counts: dict[tuple[int, int], int]) -> str:
    most = max(counts.values())
    bars = "".join(
        f'<li><span>{width} x {height}</span><i style="width:{60 * count / most:.0f}%"></i><span>{count}</span></li>'
        for (width, height), count in counts.items()
    )
    return f'<h2>Images per bucket</h2><ul class="buckets">{bars}</ul>'


def _recipe(studio: Studio) -> str:
    """Per bucket the effective shift, and how often each noise level is drawn."""
    try:
        rows = studio.recipe(studio.draft())
    except (InputError, OSError) as error:
        return alert(str(error))
    cells = "".join(
        f'<tr><th scope="row">{row["width"]} x {row["height"]}</th><td>{row["images"]}</td>'
        f"<td>{row['shift']:.2f}</td><td>{_histogram(row['timesteps'])}</td></tr>"
        for row in rows
    )
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("Bucket", "Images", "Shift", "Timesteps, image to noise")
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div>'


def _histogram(shares: Sequence[float]) -> str:
    most, middle = max(shares), sum((at + 0.5) * share for at, share in enumerate(shares)) / len(shares)
    bars = "".join(f'<i style="height:{100 * share / most:.0f}%"></i>' for share in shares)
    return f'<span class="histogram" role="img" aria-label="mean {middle:.2f}">{bars}</span>'


def _problems(problems: list[str], warnings: list[str]) -> str:
    if problems:
        lines = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        return f'<div role="alert" class="alert"><p>Start waits for:</p><ul>{lines}</ul></div>'
    return table(("Worth knowing",), [(warning,) for warning in warnings]) if warnings else "<p>Nothing is wrong.</p>"
