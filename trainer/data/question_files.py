"""Reads questions about images, with their answers. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.sections import DataConfig, half_character
from trainer.data.image_files import MAX_SHOWN_PROBLEMS, MOST_WRONG_ROWS
from trainer.data.image_io import ImageFile, read_header
from trainer.data.text_files import rows

FIELDS = ("image", "question", "answer")


@dataclass(frozen=True)
class Question:
    """A question about an image, and the answer that is learned."""

    image: ImageFile
    question: str
    answer: str


@dataclass(frozen=True)
class Questions:
    """The questions of a config.

    Attributes:
        train: The questions to train on.
        validation: The last questions of the file, set aside.
        warnings: Messages about rows that were left out.
    """

    train: tuple[Question, ...]
    validation: tuple[Question, ...]
    warnings: tuple[str, ...]


def of_config(cfg: DataConfig) -> Questions:
    """Read the questions of `data.questions`; none if the field is empty. Only headers of images are read.

    Raises:
        InputError: Lists all problems, the first 20 of them in words.
    """
    if cfg.questions is None:
        return Questions((), (), ())
    file = Path(cfg.questions).expanduser()
    questions, problems, warnings = _read(file, cfg.bad_image == "warn")
    hidden = len(problems) - MAX_SHOWN_PROBLEMS
    if problems:
        raise InputError("\n".join(problems[:MAX_SHOWN_PROBLEMS] + ([f"and {hidden} more"] if hidden > 0 else [])))
    count = cfg.validation if isinstance(cfg.validation, int) else 0
    if count >= len(questions):
        raise InputError(
            f"data.validation: {count} of the {len(questions)} questions of {file} leaves none to train on; "
            + (f"use at most {len(questions) - 1}" if questions else "write some into it")
        )
    border = len(questions) - count
    return Questions(tuple(questions[:border]), tuple(questions[border:]), tuple(warnings))


def _read(file: Path, leaves_out: bool) -> tuple[list[Question], list[str], list[str]]:
    """Questions, problems and warnings. leaves_out: whether an unreadable image is a warning, not a problem."""
    try:
        lines = [(number, offset, line) for number, offset, line in rows(file)]
    except InputError as error:
        return [], [str(error)], []
    except OSError as error:
        return [], [f"data.questions: {file}: cannot be read ({error.strerror}); name a .jsonl file"], []
    questions: list[Question] = []
    problems: list[str] = []
    warnings: list[str] = []
    images: dict[Path, ImageFile] = {}
    for number, offset, line in lines:
        if len(problems) >= MOST_WRONG_ROWS:
            problems.append(f"{file}: {MOST_WRONG_ROWS} rows are wrong; the rest of them was not read")
            break
        try:
            path, question, answer = _row(line.decode().removeprefix("\ufeff"), file.parent)
        except UnicodeDecodeError as error:
            problems.append(f"{file}: byte {offset + error.start} is not UTF-8; save the file as UTF-8")
            continue
        except InputError as error:
            problems.append(f"{file}:{number}: {error}")
            continue
        try:
            if path not in images:
                images[path] = read_header(path)
        except InputError as error:
            message = f"{file}:{number}: {error}"
            (warnings if leaves_out else problems).append(
                f"left out: {message}" if leaves_out else f"{message}, or set data.bad_image: warn"
            )
            continue
        questions.append(Question(images[path], question, answer))
    return questions, problems, warnings


def _row(line: str, folder: Path) -> tuple[Path, str, str]:
    """Image, question and answer. Raises InputError with the reason and the remedy, without file and line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a JSON object ({error}); each line is one, with {', '.join(FIELDS)}") from error
    for name in FIELDS:
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, str) or not value.strip():
            raise InputError(f'no "{name}"; each line is a JSON object with {", ".join(FIELDS)}, all texts')
        if half := half_character(value):
            raise InputError(f'"{name}" {half}')
    return Path(os.path.normpath(folder / row["image"])), row["question"].strip(), row["answer"].strip()
