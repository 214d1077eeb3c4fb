"""The data that the runs read: pictures with all that may accompany them, texts of every kind, questions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps

from tests.benchmarks.architectures import write_model
from tests.runs import make_pictures, make_text

MIXTURES = ("qwen3_moe", "gpt_oss")
"""Language models with experts, which are written with the data."""


def make_data(root: Path) -> Path:
    """Write all of it once."""
    if (root / "done").exists():
        return root
    _make_images(root)
    _make_texts(root)
    for kind in MIXTURES:
        write_model(kind, root / kind)
    (root / "done").touch()
    return root


def _make_images(root: Path) -> None:
    pictures = make_pictures(root / "pictures", 6)
    files = sorted(pictures.glob("*.png"))
    for file in files:
        file.with_suffix(".txt").write_text(f"picture {file.stem}\nanother text of {file.stem}\n", encoding="utf-8")
    shutil.copytree(pictures, root / "usual")
    (root / "more").mkdir()
    for file in sorted(pictures.iterdir()):
        shutil.copy(file, root / "more" / f"more-{file.name}")  # images with masks differ in their names
    for name in ("masks", "rejected", "before"):
        (root / name).mkdir()
    rows = []
    for number, file in enumerate(files):
        for name in (file.name, f"more-{file.name}", f"{number}.png"):  # the last names a row of the table
            with Image.open(file) as image:
                _half(image.size).save(root / "masks" / name)
                ImageOps.invert(image).save(root / "rejected" / name)
                ImageOps.mirror(image).save(root / "before" / name)
        rows.append({"image": {"bytes": file.read_bytes(), "path": None}, "text": f"row {file.stem}"})
    (root / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), root / "table" / "rows.parquet")
    names = [file.name for file in files]
    _write_lines(
        pictures / "questions.jsonl",
        [
            {"image": name, "question": f"What is {n}?", "answer": ("red", "a blue one")[n % 2]}
            for n, name in enumerate(names)
        ],
    )
    _write_lines(pictures / "sequences.jsonl", [_sequence(names, n) for n in range(6)])


def _half(size: tuple[int, int]) -> Image.Image:
    mask = Image.new("L", size, 0)
    mask.paste(255, (0, 0, size[0] // 2, size[1]))
    return mask


def _sequence(names: Sequence[str], number: int) -> dict[str, Any]:
    """An edit, a conversation about two images, or a text."""
    one, other = (names[(number + step) % len(names)] for step in (0, 1))
    edit = [{"image": one, "as": "both"}, {"text": f"edit {number}"}, {"image": other, "as": "drawn"}]
    turns = [{"from": "human", "value": "<image><image> which?"}, {"from": "gpt", "value": "this " * number + "that"}]
    text = [{"text": "hello"}, {"text": "good day " * (number + 1), "learned": True}]
    return [{"sequence": edit}, {"image": [one, other], "conversations": turns}, {"sequence": text}][number % 3]


def _make_texts(root: Path) -> None:
    make_text(root / "texts", 12)
    (root / "talks").mkdir()
    talks = [[("user", f"{n} + 1"), ("assistant", f"It is {n + 1}.")] for n in range(12)]
    _write_lines(
        root / "talks" / "a.jsonl",
        [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks],
    )
    (root / "answers").mkdir()
    _write_lines(
        root / "answers" / "a.jsonl",
        [{"prompt": f"Is {n} even? ", "completion": "yes" if n % 2 == 0 else "no"} for n in range(12)],
    )
    (root / "pairs").mkdir()
    _write_lines(
        root / "pairs" / "a.jsonl",
        [{"prompt": f"Is {n} even? ", "chosen": "yes, it is", "rejected": f"maybe {n}"} for n in range(12)],
    )

    for name in ("texts", "talks", "answers", "pairs"):
        shutil.copytree(root / name, root / "held out" / name)
    shutil.copytree(root / "texts", root / "held out" / "folders")


def _write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
