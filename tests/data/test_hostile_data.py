"""Folders of data that a stranger packed: what never ends, what is too much, and what is something else than its name.

Each is refused within seconds by a sentence that names the file.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.commands import launch_py, preset_folder
from tests.data.images.test_image_files import add_image, data
from trainer.config.sections import DataConfig
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import load_rgb, read_header
from trainer.data.mixed import question_files
from trainer.data.text import text_files
from trainer.data.text.text_documents import Encoder
from trainer.data.text.text_stream import TextStream
from trainer.system.errors import InputError

AT_MOST_S = 5.0
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"
NOT_REGULAR = "not a regular file; remove it, or put a file in its place"


def refused(act: Callable[[], object], within_s: float = AT_MOST_S) -> list[str]:
    """The sentences of the InputError that `act` ends with, in time. It is left to itself where it hangs."""
    caught: list[BaseException | None] = []

    def attempt() -> None:
        try:
            act()
            caught.append(None)
        except BaseException as error:  # noqa: BLE001 - looked at below
            caught.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(within_s)
    assert caught, f"it did not end within {within_s} s"
    assert isinstance(caught[0], InputError), repr(caught[0])
    sentences = str(caught[0]).split("\n")
    assert all(len(sentence) < 1000 for sentence in sentences)
    return sentences


def in_a_small_process(code: str, *arguments: object) -> str:
    """What Python code prints, in a process of at most 2.5 GiB that has 20 s."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (5 * 2**29, 5 * 2**29))

    argv = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20, preexec_fn=limit)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def png_of(width: int, height: int, colour: int = 2, num_rows: int | None = None) -> bytes:
    """A picture of one colour as a PNG of a few kilobytes, however large.

    colour: its colour type, 2 RGB, 6 RGBA.  num_rows: of pixels that are there; None for all.
    """

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = bytes(1 + {2: 3, 6: 4}[colour] * width)
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(row) for _ in range(height if num_rows is None else num_rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once anybody started a program by the name of Ghostscript."""
    mark, folder = tmp_path / "called", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f'#!/bin/sh\necho "$@" >> {mark}\nexit 1\n')
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return mark


@pytest.mark.parametrize("name", ["b.png", "b.jpg", "b.tif"])
def test_a_picture_that_is_postscript_starts_no_program_and_is_named(tmp_path: Path, called: Path, name: str) -> None:
    file = tmp_path / "pictures" / name
    add_image(tmp_path / "pictures" / "a.png")
    file.write_bytes(POSTSCRIPT)
    file.with_suffix(".txt").write_text("a cat")

    def train() -> None:
        for photo in scan(data(file.parent)).train:
            load_rgb(photo, (16, 16))

    [sentence] = refused(train)
    assert sentence == (
        f"{file}: cannot be read (not an image of a known format); replace or remove it, or set data.bad_image: warn"
    )
    assert not called.exists()


@pytest.mark.parametrize("kind", ["GIF", "AVIF"])
def test_pictures_as_the_web_names_them_wrongly_are_still_read(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.jpg", kind)
    picture = read_header(tmp_path / "a.jpg")
    red, green, blue = load_rgb(picture, (8, 8)).getpixel((4, 4))
    assert (picture.width, picture.height) == (40, 20) and red > 240 and max(green, blue) < 16


def test_pictures_with_any_byte_damaged_are_read_or_refused_by_a_sentence(tmp_path: Path) -> None:
    """The first 60 bytes of each kind, each set to 0 and 255."""
    wrong = []
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"):
        file = tmp_path / f"{kind}.png"
        Image.radial_gradient("L").resize((8, 8)).convert("RGB").save(file, kind)
        whole = file.read_bytes()
        for place in range(min(len(whole), 60)):
            for value in (0, 255):
                file.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
                try:
                    load_rgb(read_header(file), (8, 8))
                except InputError as error:
                    if not str(error).startswith(f"{file}: ") or "\n" in str(error) or "()" in str(error):
                        wrong.append((kind, place, str(error)))
                except Exception as error:  # noqa: BLE001 - counted
                    wrong.append((kind, place, repr(error)))
    assert wrong == []


def test_pipes_devices_and_loops_among_the_pictures_are_named_and_keep_nobody_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for name in ("a", "b", "c", "d", "e"):
        add_image(folder / f"{name}.png", f"caption {name}")
    for name in ("b.png", "c.txt", "metadata.jsonl"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "d.png").unlink()
    (folder / "d.png").symlink_to("/dev/zero")
    (folder / "e.txt").unlink()
    (folder / "e.txt").symlink_to("/dev/zero")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "loop.txt").write_text("a cat")
    (folder / "again").symlink_to(folder)
    assert sorted(refused(lambda: scan(data(folder)))) == [
        f"{folder}/b.png: {NOT_REGULAR}, or set data.bad_image: warn",
        f"{folder}/c.txt: {NOT_REGULAR}",
        f"{folder}/d.png: {NOT_REGULAR}, or set data.bad_image: warn",
        f"{folder}/e.txt: {NOT_REGULAR}",
        f"{folder}/loop.png: {NOT_REGULAR}, or set data.bad_image: warn",
        f"{folder}/metadata.jsonl: {NOT_REGULAR}",
    ]


def test_masks_that_never_end_are_named(tmp_path: Path) -> None:
    add_image(tmp_path / "pictures" / "a.png")
    (tmp_path / "masks").mkdir()
    os.mkfifo(tmp_path / "masks" / "a.png")
    cfg = data(tmp_path / "pictures", masks=str(tmp_path / "masks"))
    assert refused(lambda: scan(cfg)) == [f"{tmp_path}/masks/a.png: {NOT_REGULAR}, or set data.bad_image: warn"]


ROWS_IN_A_SMALL_PROCESS = """
import sys
from pathlib import Path
from trainer.system.errors import InputError
from trainer.config.sections import DataConfig
from trainer.data.images import image_files; from trainer.data.mixed import question_files
for folder in map(Path, sys.argv[1:]):
    asked = folder / "questions.jsonl"
    cfg = DataConfig(path=str(folder), questions=str(asked) if asked.is_symlink() or asked.exists() else None)
    try:
        image_files.scan(cfg), question_files.of_config(cfg)
    except InputError as error:
        print(error)
"""


@pytest.mark.parametrize("name", ["metadata.jsonl", "questions.jsonl"])
def test_rows_without_an_end_or_a_depth_are_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    device, zeros, line, deep, wrong = files = [tmp_path / kind / name for kind in "dzlew"]
    for file in files:
        add_image(file.parent / "a.png")
    device.symlink_to("/dev/zero")
    with zeros.open("wb") as stream:
        stream.truncate(100 * 2**30)  # takes no room on the disk
    with line.open("wb") as stream:
        stream.write(b"\n\n")
        stream.truncate(200 * 2**20)
    deep.write_text("[" * 200_000)
    wrong.write_text("none\n" * 200_000)
    said = in_a_small_process(ROWS_IN_A_SMALL_PROCESS, *(file.parent for file in files)).splitlines()
    assert said[:3] == [
        f"{device}: {NOT_REGULAR}",
        f"{zeros}:1: the line is longer than 1 MiB; shorten or remove it",
        f"{line}:3: the line is longer than 1 MiB; shorten or remove it",
    ]
    assert said[3].startswith(f"{deep}:1: not a JSON object") and len(said[3]) < 300
    assert said[4].startswith(f"{wrong}:1: not a JSON object") and len(said) == 9
    assert said[7] == f"and 997 more like these: {wrong}:4 to {wrong}:1000"


def test_a_name_of_a_megabyte_does_not_fill_the_message(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    row = json.dumps({"file_name": "n" * 1_000_000, "text": "a cat"})
    (tmp_path / "metadata.jsonl").write_text(row)
    [sentence] = refused(lambda: scan(data(tmp_path)))
    assert sentence.startswith(f"{tmp_path}/metadata.jsonl:1: no such image: nnn")
    (tmp_path / "metadata.jsonl").rename(tmp_path / "questions.jsonl")
    row = json.dumps({"image": "n" * 900_000, "question": "a", "answer": "b"})
    (tmp_path / "questions.jsonl").write_text(row)
    cfg = data(tmp_path, questions=str(tmp_path / "questions.jsonl"))
    [sentence] = refused(lambda: question_files.of_config(cfg))
    assert sentence.startswith(f"{tmp_path}/questions.jsonl:1: ")


def test_folders_within_each_other_without_an_end_are_refused(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    (tmp_path / "/".join("d" * 500)).mkdir(parents=True)
    for found in (lambda: scan(data(tmp_path)), lambda: text_files.of_config(data(tmp_path))):
        assert refused(found) == [
            f"data.path: {tmp_path}: its folders are nested more than 100 deep; move the files up"
        ]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy"])
def test_text_that_is_a_pipe_or_a_device_is_refused_before_a_run_starts(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        cfg = DataConfig(path=str(path))
        assert refused(lambda cfg=cfg: text_files.of_config(cfg)) == [f"data.path: {tmp_path}/{name}: {NOT_REGULAR}"]
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    cfg = DataConfig(path=str(tmp_path))
    assert refused(lambda: text_files.of_config(cfg)) == [f"data.path: {tmp_path}/{name}: {NOT_REGULAR}"]


def rows(file: Path) -> object:
    encoder = Encoder(lambda text: [1] * len(text), 0, 10)
    return next(TextStream([text_files.TextFolder((file,))], encoder, seed=0, length=8).rows())


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy", "a.parquet"])
def test_text_that_became_a_pipe_after_it_was_found_keeps_no_rank_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert refused(lambda: rows(tmp_path / name)) == [f"{tmp_path}/{name}: {NOT_REGULAR}"]


def test_text_in_one_line_of_gigabytes_is_refused_by_a_short_sentence(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(50 * 2**30)
    [document] = refused(lambda: rows(tmp_path / "a.txt"))
    assert document == f"{tmp_path}/a.txt: longer than 1024 MiB; a .txt is one document: cut it into several files"
    [line] = refused(lambda: rows(tmp_path / "a.jsonl"))
    assert line == f"{tmp_path}/a.jsonl:1: the line is longer than 64 MiB; shorten or remove it"


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (10**30,)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (-3,)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (0,)}",
        "{'descr': [('a', '<i4', (9999999999,))], 'fortran_order': False, 'shape': (3,)}",
        "(" * 5000,
        "{" * 200,
        "\0",
    ],
)
def test_arrays_of_tokens_with_a_hostile_header_are_a_sentence(tmp_path: Path, head: str) -> None:
    file = tmp_path / "a.npy"
    content = head.encode().ljust(len(head) + 53) + b"\n"
    file.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(content)) + content + bytes(12))
    [sentence] = refused(lambda: rows(file))
    assert sentence.startswith(f"{file}: ")


def test_the_command_line_refuses_a_hostile_folder_at_once_in_sentences(tmp_path: Path, called: Path) -> None:
    folder = preset_folder(tmp_path) / "pictures"
    (folder / "00.png").write_bytes(POSTSCRIPT)
    (folder / "01.png").unlink()
    os.mkfifo(folder / "01.png")
    done = launch_py(tmp_path, "--headless", "preset.yaml")
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (
        2,
        "",
        [
            f"{folder}/00.png: cannot be read (not an image of a known format); replace or remove it, "
            "or set data.bad_image: warn",
            f"{folder}/01.png: {NOT_REGULAR}, or set data.bad_image: warn",
        ],
    )
    assert not called.exists() and not (tmp_path / "runs").exists()
