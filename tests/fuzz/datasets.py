"""Folders of data: pictures with damaged bytes, captions, metadata.jsonl, and texts of language models."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from app.data.thumbnails import Thumbnails
from tests.fuzz import target
from tests.fuzz.target import CHANGES, ODD_BYTES, Target, changed, refusals
from trainer.config.sections import DataConfig
from trainer.data.images import image_files
from trainer.data.images.image_io import load_rgb
from trainer.data.mixed import question_files

KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF"}
MOST_DECODED = 2**26
"""Pixels. Training reads four times as many, which may take 3.1 GiB by decision."""
NAMES = st.sampled_from([*(f"a.{suffix}" for suffix in KINDS), "a.txt", "metadata.jsonl", "questions.jsonl"])
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "file_name": st.sampled_from(["a.png", "../a.png", "/etc/passwd", "a.png\0", "", "\ud800", "b/" * 2000]),
        "text": st.one_of(st.text(max_size=20), st.none(), st.integers(), st.just([])),
        "image": st.sampled_from(["a.png", "/dev/zero", ".", "x"]),
        "question": st.one_of(st.text(max_size=9), st.none()),
        "answer": st.one_of(st.text(max_size=9), st.just({})),
    },
)
CONTENTS = st.one_of(
    st.tuples(st.just("bytes"), CHANGES),
    st.tuples(st.just("whole"), ODD_BYTES),
    st.tuples(st.just("place"), target.KINDS),
    st.tuples(st.just("rows"), st.lists(st.one_of(ROWS.map(json.dumps), st.text(max_size=20)), max_size=4)),
)


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    whole = folder / "whole"
    whole.mkdir()
    for number, (suffix, kind) in enumerate(KINDS.items()):
        stream = io.BytesIO()
        Image.new("RGB", (48 + number, 32), (200, number, 9)).save(stream, kind)
        (whole / f"a.{suffix}").write_bytes(stream.getvalue())
    Image.new("RGB", (32, 32)).save(whole / "b.png")
    (whole / "a.txt").write_text("a caption")
    (whole / "metadata.jsonl").write_text(json.dumps({"file_name": "b.png", "text": "another"}) + "\n")
    row = {"image": "b.png", "question": "what is it?", "answer": "black"}
    (whole / "questions.jsonl").write_text(json.dumps(row) + "\n")
    thumbnails = Thumbnails(folder / "thumbnails")
    data = folder / "data"

    def answer(value: Any) -> None:
        name, (kind, change) = value
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(whole, data)
        for other in KINDS:  # a caption belongs to one picture
            if name.partition(".")[2] in KINDS and name != f"a.{other}":
                (data / f"a.{other}").unlink()
        _damage(data / name, kind, change)
        _read(data, thumbnails)

    yield answer


def _damage(file: Path, kind: str, change: Any) -> None:
    match kind:
        case "place":
            target.put(file, change)
        case "rows":
            file.write_text("\n".join(change), encoding="utf-8", errors="surrogatepass")
        case "whole":
            file.write_bytes(change)
        case _:
            file.write_bytes(changed(file.read_bytes(), change))


def _read(data: Path, thumbnails: Thumbnails) -> None:
    """What the page and the ranks read of the folder."""
    config = DataConfig(path=str(data), questions=str(data / "questions.jsonl"))
    for file in data.glob("*.*"):
        if file.suffix[1:] in KINDS:
            with refusals():
                thumbnails.of(file)
    with refusals():
        question_files.of_config(config)
    with refusals():
        for photo in image_files.scan(config).train:
            if photo.width * photo.height <= MOST_DECODED:
                load_rgb(photo, (64, 64))


DATASETS = Target("data sets", st.tuples(NAMES, CONTENTS), _prepared)
