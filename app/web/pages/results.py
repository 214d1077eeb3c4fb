"""Uses of a run's result: a drawing with it, an upload to the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from app.data.thumbnails import FULL
from app.runs.results import Results
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config.families import trains_on
from trainer.launcher.jobs import uploads
from trainer.run.drawings import Drawing, DrawingRequest
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

MOST_DRAWINGS = 12


def calls(studio: Studio) -> Calls:
    """Return the functions of the script."""
    functions: list[Callable[..., Any]] = [draw, drawings, start_upload, upload_state, stop]
    results = Results()
    calls = {f"result_{function.__name__}": partial(function, studio, results) for function in functions}
    return calls | {"result_upload_question": partial(upload_question, studio)}


def draw(
    studio: Studio,
    results: Results,
    run: str,
    prompt: str,
    seed: int | None = None,
    size: tuple[int, int] | None = None,
) -> None:
    """Start to sample a prompt with and without what the run has trained."""
    results.draw(studio.run(run), DrawingRequest(prompt, seed, size=size))


def stop(studio: Studio, results: Results, run: str, kind: Literal["drawing", "upload"]) -> None:
    """End the drawing or the upload that is running."""
    results.stop(kind, studio.run(run))


def drawings(studio: Studio, results: Results, run: str) -> dict[str, Any]:
    """Return the state of the drawing that was started last, and the finished ones."""
    found = studio.run(run)
    finished = [_drawing(studio, found, drawing) for drawing in results.drawings(found)[:MOST_DRAWINGS]]
    config = found.config()
    is_text = trains_on(config) == "text"
    return {
        "state": asdict(results.drawing(found)),
        "drawings": finished,
        "seed": config.sample.seed,
        "is_text": is_text,
        "size": None if is_text else config.sample.size,
        "prompts": [prompt.replace("[trigger]", config.data.trigger) for prompt in config.sample.prompts],
    }


def _drawing(studio: Studio, run: RunDir, drawing: Drawing) -> dict[str, Any]:
    texts = {"trained": "", "base": ""}
    addresses = dict(texts)
    for name, path in (("trained", drawing.trained), ("base", drawing.base)):
        try:
            file = run.own_file(path)
            if drawing.kind.is_text:
                texts[name] = file.read_text(encoding="utf-8", errors="replace")[:20_000]
            elif picture := drawing.kind.picture(path):
                addresses[name] = address(studio.thumbnails.of(run.own_file(picture), FULL))
            else:
                texts[name] = path
        except (InputError, OSError, ValueError):  # shown as missing
            continue
    return {
        "prompt": drawing.prompt,
        "seed": drawing.seed,
        "seconds": drawing.seconds,
        "time": drawing.time,
        "kind": drawing.kind.name,
        "texts": texts,
        "images": addresses,
    }


def upload_question(studio: Studio, run: str, repo: str, is_private: bool, overwrites: bool) -> dict[str, str]:
    """Return what would be uploaded, who would see it, and the model card."""
    found = studio.run(run)
    return {
        "text": uploads.question(found, repo, is_private, overwrites),
        "card": uploads.model_card(found, repo),
    }


def start_upload(studio: Studio, results: Results, run: str, repo: str, is_private: bool, overwrites: bool) -> None:
    """Upload the run's exported files. The user has agreed to what `upload_question` said."""
    results.upload(studio.run(run), repo, is_private, overwrites)


def upload_state(studio: Studio, results: Results, run: str) -> dict[str, Any]:
    """Return how the upload that was started last is doing."""
    return asdict(results.uploaded(studio.run(run)))
