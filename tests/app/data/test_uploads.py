"""Files that come from a browser: what enters a folder of data, under which name, and what is refused."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.data import data_folders
from app.data.data_folders import DataFolders
from app.data.folders import Picker
from app.data.upload import upload_kinds, upload_names, uploads
from app.data.upload.selection import Given, put
from app.data.upload.uploads import MOST_CHUNK, Chosen, NotWritten, Placed, Unknown, Uploads, WrongOffset
from trainer.config.sections import DataConfig
from trainer.data.images import image_files
from trainer.data.images.image_files import MAX_CAPTION
from trainer.system import files
from trainer.system.errors import InputError


class Store:
    """A store with one root that holds a folder of data, one outside it, and a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.top = folder
        self.root = folder / "home"
        self.data = self.root / "data"
        self.outside = folder / "outside"
        self.runs = self.root / "runs"
        for made in (self.data, self.outside, self.runs):
            made.mkdir(parents=True)
        self.state = self.runs / "drafts" / "uploads"
        self.now = 1e9
        self.chosen: dict[str, Chosen] = {}
        self.uploads = self.opened()

    def opened(self) -> Uploads:
        """Return the store as it is after a restart."""
        return Uploads(DataFolders(Picker((self.root,)), self.runs), self.state, lambda: self.now)

    def send(self, name: str, content: bytes, folder: Path | None = None, **more: str | int) -> str:
        """Send a whole file, and return its name in the folder, with a + where it is new."""
        chosen = Chosen(str(folder or self.data), name, len(content), head=content[:64].hex(), **more)
        begun = self.uploads.begin(chosen)
        if begun.placed is None:
            for offset in range(begun.received, len(content), MOST_CHUNK):
                self.uploads.append(begun.id, offset, content[offset : offset + MOST_CHUNK])
        placed = begun.placed or self.uploads.finish(chosen)
        return f"{'+' if placed.is_new else ''}{placed.name}"

    def begin(self, name: str = "a.png", size: int = 100, folder: Path | str | None = None) -> str:
        chosen = Chosen(str(self.data if folder is None else folder), name, size)
        id = self.uploads.begin(chosen).id
        self.chosen[id] = chosen
        return id

    def finish(self, id: str) -> Placed:
        return self.uploads.finish(self.chosen[id])

    def listed(self) -> dict[str, bytes]:
        """Return every file below the whole folder but those of the store itself: links as what they lead to."""
        found = {}
        for path in sorted(self.top.rglob("*")):
            if path.is_symlink():
                found[str(path.relative_to(self.top))] = os.readlink(path).encode()
            elif path.is_file() and not path.is_relative_to(self.state):
                found[str(path.relative_to(self.top))] = path.read_bytes()
        return found

    def names(self) -> list[str]:
        return sorted(os.listdir(self.data))


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """The paths that this thread opens, lists, links or makes meanwhile: a scan of another test may go on."""
    found: list[str] = []
    own, is_over = threading.get_ident(), False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        watched = ("open", "os.listdir", "os.scandir", "os.link", "os.rename", "os.mkdir")
        if not is_over and threading.get_ident() == own and event in watched:
            found.extend(
                os.fsdecode(argument) for argument in arguments[:2] if isinstance(argument, str | bytes | Path)
            )

    sys.addaudithook(hook)
    yield found
    is_over = True


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def at_once(*windows: Callable[[], object]) -> None:
    """Call these in threads, and wait for all."""
    threads = [threading.Thread(target=window) for window in windows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def encoded(kind: str = "PNG", size: tuple[int, int] = (64, 48), mode: str = "RGB", colour: int = 90, **more) -> bytes:
    buffer = io.BytesIO()
    bands = 1 if mode.startswith("I") else len(Image.new(mode, (1, 1)).getbands())
    Image.new(mode, size, colour if bands == 1 else (colour,) * bands).save(buffer, kind, **more)
    return buffer.getvalue()


def noise(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((200, 150), 60).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=100)
    return buffer.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded("JPEG", exif=exif)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png(width: int, height: int) -> bytes:
    """A few kilobytes whose header announces many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(4_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def many_scans(count: int) -> bytes:
    """A JPEG whose last scan is repeated: a kilobyte of them may take a second."""
    content = encoded("JPEG", (800, 800), mode="L", progressive=True)
    return content[:-2] + content[content.rfind(b"\xff\xda") : -2] * count + content[-2:]


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200)
MOVIE = b"\0\0\0\x14ftypqt  \0\0\0\0qt  " + bytes(200)
NOT_READ = "which is not read here"
KINDS: list[tuple[str, Callable[[], bytes], str]] = [
    ("a.jpg", lambda: encoded("JPEG"), "a.jpg"),
    ("a.JPG", lambda: encoded("JPEG"), "a.JPG"),
    ("a.webp", lambda: encoded("WEBP"), "a.webp"),
    ("a.bmp", lambda: encoded("BMP"), "a.bmp"),
    ("a.tiff", lambda: encoded("TIFF"), "a.tiff"),
    ("cmyk.jpg", lambda: encoded("JPEG", mode="CMYK"), "cmyk.jpg"),
    ("deep.png", lambda: encoded(mode="I;16", colour=40_000), "deep.png"),
    ("clear.png", lambda: encoded(mode="RGBA"), "clear.png"),
    ("turned.jpg", turned, "turned.jpg"),
    ("moving.webp", lambda: animated("WEBP"), "moving.webp"),
    ("wrong.jpg", encoded, "wrong.png"),
    ("wrong.pdf", encoded, "wrong.png"),
    ("photo.heic", lambda: encoded("JPEG"), "photo.jpg"),
    ("nothing", encoded, "nothing.png"),
    ("two.parts.jpeg", lambda: encoded("WEBP"), "two.parts.webp"),
    ("polyglot.jpg", lambda: encoded("JPEG") + b"<script>alert(1)</script>PK\3\4", "polyglot.jpg"),
    ("scans.jpg", lambda: many_scans(20), "scans.jpg"),
    ("live.jpg", lambda: many_scans(0) + MOVIE + b"\xff\xda" * 500, "live.jpg"),
    ("endless.jpg", lambda: many_scans(200), "endless.jpg: more than 100 scans, which take hours to decode"),
    ("moving.gif", lambda: animated("GIF"), f"moving.gif: a GIF, {NOT_READ}; save one image"),
    ("a.avif", lambda: b"\0\0\0\x20ftypavif" + bytes(99), f"a.avif: an AVIF image, {NOT_READ}"),
    ("a.heic", lambda: HEIC, f"a.heic: a HEIC photo, {NOT_READ}; export it as JPEG"),
    ("a.png", lambda: HEIC, "a.png: a HEIC photo"),
    ("a.mov", lambda: MOVIE, "a.mov: a movie; save one image of it as PNG or JPEG"),
    ("a.mkv", lambda: b"\x1aE\xdf\xa3" + bytes(99), "a.mkv: a movie"),
    ("a.avi", lambda: b"RIFF\0\0\0\0AVI LIST" + bytes(99), "a.avi: a movie"),
    ("a.dng", lambda: encoded("TIFF"), f"a.dng: a raw photo, {NOT_READ}"),
    ("a.pdf", lambda: b"%PDF-1.7" + bytes(99), "a.pdf: a document, not an image"),
    ("a.zip", lambda: b"PK\3\4" + bytes(99), "a.zip: an archive; unpack it"),
    ("a.parquet", lambda: b"PAR1" + bytes(99), "a.parquet: a table, which is not taken here"),
    ("a.svg", lambda: b"<?xml version='1.0'?><svg onload='x()'/>", "a.svg: HTML, SVG or other markup"),
    ("html.png", lambda: b" \n<!doctype html><script>x()</script>", "html.png: HTML, SVG or other markup"),
    ("script.png", lambda: b"#!/bin/sh\nid\n", "script.png: not an image; expected bmp jfif"),
    ("words.png", lambda: b"BMW and other words", "words.png: cannot be read"),
    ("a.png", lambda: b"", "a.png: empty"),
    ("cut.png", lambda: encoded(size=(400, 400), mode="L", colour=1)[:-40], "cut.png: cannot be read"),
    ("cut.jpg", lambda: encoded("JPEG", (800, 600))[:-300], "cut.jpg: cannot be read"),
    ("cut.webp", lambda: noise("WEBP")[:-300], "cut.webp: cannot be read"),
    ("cut.bmp", lambda: noise("BMP")[:-300], "cut.bmp: cannot be read"),
    ("cut.tif", lambda: noise("TIFF")[:-9000], "cut.tif: cannot be read"),
    ("bomb.png", lambda: huge_png(40_000, 40_000), "bomb.png: cannot be read (1600.0 megapixels are more than 268.4"),
    ("float.tif", lambda: encoded("TIFF", mode="F"), "float.tif: cannot be read (its pixels have 32 bits"),
    ("long.txt", lambda: b"a" * (MAX_CAPTION + 1), f"long.txt: {MAX_CAPTION + 1} bytes are too many for a caption"),
    ("latin.txt", lambda: "caf\u00e9".encode("latin-1"), "latin.txt: byte 3 (0xe9) is not UTF-8"),
    ("zero.txt", lambda: b"a\0b", "zero.txt: holds the character NUL"),
    ("rows.jsonl", lambda: b"{}", "rows.jsonl: of .jsonl files only metadata.jsonl holds captions"),
]


@pytest.mark.parametrize(("name", "content", "expected"), KINDS, ids=[f"{name}-{said[:20]}" for name, _, said in KINDS])
def test_what_happens_to_each_kind_of_file(store: Store, name: str, content: Callable[[], bytes], expected: str):
    data = content()
    if ": " not in expected:
        assert store.send(name, data) == f"+{expected}"
        assert (store.data / expected).read_bytes() == data
        found = image_files.scan(DataConfig(path=str(store.data), missing_caption="empty"))
        assert [image.path.name for image in found.train] == [expected]
    else:
        for head in (data[:64], b""):  # refused before it is sent, and where only its content says so
            with pytest.raises(InputError) as refused:
                chosen = Chosen(str(store.data), name, len(data), head=head.hex())
                store.uploads.append(store.uploads.begin(chosen).id, 0, data)
                store.uploads.finish(chosen)
            assert str(refused.value).startswith(expected)
        assert store.names() == []
    assert list(store.state.glob("*.part")) == []


def test_an_image_that_is_too_large_to_show_is_taken_by_its_header_and_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(upload_kinds, "MOST_SHOWN", 64)
    noisy = os.urandom(200_000)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (250, 250), noisy[: 250 * 250 * 3]).save(buffer, "PNG")
    assert store.send("large.png", buffer.getvalue()) == "+large.png"
    with pytest.raises(InputError, match=r"^cut.png: cannot be read \(its end is missing\)"):
        store.send("cut.png", buffer.getvalue()[:100_000])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (".hidden.png", "hidden.png"),
        ("a\nb\x1b[31m.png", "a_b_[31m.png"),
        ("C:\\photos\\a.png", "C__photos_a.png"),
        ("con.png", "_con.png"),
        ("NUL", "_NUL.png"),
        ("com1.tar.png", "_com1.tar.png"),
        ("a?<b>|*.png", "a__b___.png"),
        ("cafe\u0301.png", "caf\u00e9.png"),
        ("a. .png", "a.png"),
        ("\u202egnp.exe.png", "_gnp.exe.png"),
        ("\udcff.png", "_.png"),
        ("\u00fc \U0001f98a.png", "\u00fc \U0001f98a.png"),
    ],
)
def test_a_name_becomes_one_that_every_system_can_keep(store: Store, given: str, kept: str):
    assert store.send(given, encoded()) == f"+{kept}"


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../a.png", "/etc/a.png", "a/b.png", "a\0.png"])
def test_what_names_a_folder_or_nothing_is_refused(store: Store, name: str):
    before = store.listed()
    with pytest.raises(InputError, match="not the name of a file; rename it"):
        store.send(name, encoded())
    assert store.listed() == before


def test_a_long_name_is_cut_and_its_caption_the_same_way(store: Store):
    first, second = "\u00e9" * 150 + "one", "\u00e9" * 150 + "two"
    image = store.send(f"{first}.png", encoded()).removeprefix("+")
    other = store.send(f"{second}.png", encoded(colour=1)).removeprefix("+")
    assert image != other and len(image.encode()) <= len(other.encode()) <= 200
    assert store.send(f"{first}.txt", b"a fox") == f"+{image[:-4]}.txt"
    assert store.send("x" * 296 + ".png", encoded(colour=2)).endswith(".png")
    assert max(len(name.encode()) for name in store.names()) <= 200


def test_nothing_is_overwritten_and_the_same_content_is_not_doubled(store: Store):
    one, two, three = encoded(colour=1), encoded("JPEG", colour=2), encoded(colour=3)
    assert store.send("A.png", one) == "+A.png"
    assert store.send("a.png", one, path="2") == "A.png"
    assert store.send("a.jpg", two) == "+a (2).jpg", "images of one stem would share a caption"
    assert store.send("a.png", three) == "+a (3).png"
    assert store.send("a.jpg", two, path="3") == "a (2).jpg"
    (store.data / "b.webp").symlink_to(store.outside / "nowhere")
    assert store.send("b.png", one) == "+b (2).png"
    (store.data / "c (2).txt").write_text("of a stranger")
    (store.data / "c.png").mkdir()
    assert store.send("c.png", one) == "+c (3).png"


def test_a_caption_follows_its_image_that_got_another_name(store: Store):
    (store.data / "a.png").write_bytes(encoded(colour=1))
    (store.data / "a.txt").write_text("of the first")
    image = store.send("a.png", encoded(colour=2)).removeprefix("+")
    assert image == "a (2).png"
    assert store.send("a.txt", b"of the second", image=image) == "+a (2).txt"
    assert (store.data / "a.txt").read_text() == "of the first"
    with pytest.raises(InputError, match=r"^a.txt: its image 'b.png' is not in "):
        store.send("a.txt", b"x", image="b.png")
    with pytest.raises(InputError, match=r"^a.txt: its image '../runs/x.png' is not in "):
        store.send("a.txt", b"x", image="../runs/x.png")


def test_a_caption_without_its_image_waits_for_it_and_overwrites_none(store: Store):
    assert store.send("Fox.txt", b"a fox") == "+Fox.txt"
    assert store.send("Fox.png", encoded()) == "+Fox.png"
    assert store.send("FOX.TXT", b"a fox", path="2") == "Fox.txt"
    with pytest.raises(InputError, match=r"^Fox.txt: the folder has another caption of this name, which stays"):
        store.send("fox.txt", b"a cat")
    assert (store.data / "Fox.txt").read_text() == "a fox"
    for name, is_alone in (("notes.txt", True), ("FOX.txt", False)):
        store.uploads.append(id := store.begin(name, 5), 0, b"a fox")
        assert store.finish(id).is_alone is is_alone
    store.send("DOG.png", encoded(colour=1))
    assert store.send("dog.txt", b"a dog") == "+DOG.txt", "a run looks for exactly this name"


def test_a_caption_without_its_image_prefers_the_image_of_exactly_its_name(store: Store):
    (store.data / "A.png").write_bytes(encoded())
    (store.data / "a.png").write_bytes(encoded(colour=1))
    assert store.send("a.txt", b"the second") == "+a.txt"
    with pytest.raises(InputError, match=r"^A.txt: the folder has another caption of this name, which stays"):
        store.send("A.txt", b"the first")  # the strictest system has one file of this name


def test_metadata_is_taken_once_and_only_with_rows_that_a_run_reads(store: Store):
    store.send("a.png", encoded())
    row = {"file_name": "a.png", "text": "a fox"}
    for wrong, said in {
        b"{": "metadata.jsonl:1: not a JSON object",
        b'{"file_name": "b.png", "text": "x"}': "metadata.jsonl:1: no such image: b.png",
        b'{"file_name": "../a.png", "text": "x"}': "metadata.jsonl:1: no such image",
        json.dumps(row).encode() + b'\n{"text": "x"}': 'metadata.jsonl:2: no "file_name"',
        b"\n\n": "metadata.jsonl: has no rows",
        b'"' + b"x" * 2**20 + b'"': "metadata.jsonl:1: the line is longer than 1 MiB",
    }.items():
        with pytest.raises(InputError) as refused:
            store.send("metadata.jsonl", wrong)
        assert str(refused.value).startswith(said)
    assert store.send("Metadata.jsonl", json.dumps(row).encode()) == "+metadata.jsonl"
    with pytest.raises(InputError, match=r"^metadata.jsonl: the folder has another one, which stays"):
        store.send("metadata.jsonl", json.dumps(row | {"text": "a cat"}).encode())
    [image] = image_files.scan(DataConfig(path=str(store.data))).train
    assert image.caption == "a fox"
    (store.data / "metadata.jsonl").rename(store.data / "metadata.csv")
    with pytest.raises(InputError, match=r"^metadata.jsonl: the folder has another one, which stays"):
        store.send("metadata.jsonl", json.dumps(row).encode(), path="2")


def test_a_folder_of_tables_gets_no_images_because_its_tables_would_not_be_read(store: Store):
    (store.data / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"its images are in train.parquet, which is not read once the folder has"):
        store.send("a.png", encoded())
    (store.data / "b.png").write_bytes(encoded(colour=1))
    assert store.send("a.png", encoded()) == "+a.png"


def test_an_upload_goes_on_after_a_restart(store: Store):
    content = encoded("BMP", (1200, 900))
    assert len(content) > MOST_CHUNK
    id = store.begin("a.bmp", len(content))
    store.uploads.append(id, 0, content[:1000])
    assert {file.stat().st_mode & 0o777 for file in store.state.iterdir()} == {0o600}
    assert store.state.stat().st_mode & 0o777 == 0o700
    store.uploads = store.opened()
    begun = store.uploads.begin(store.chosen[id])
    assert (begun.id, begun.received, begun.placed) == (id, 1000, None)


def test_an_image_that_is_there_is_not_sent_again_and_one_that_differs_is(store: Store):
    content = encoded("BMP", (1200, 900))
    marks = [
        f"{zlib.adler32(b''.join(content[at : at + 65536] for at in range(0, len(content), step))):x}"
        for step in (-(-len(content) // 16), 65536)
    ]
    own = {"modified_ms": 1_700_000_000_123, "mark": marks[0]}
    assert store.send("a.bmp", content, **own) == "+a.bmp"
    assert (store.data / "a.bmp").stat().st_mtime_ns // 1_000_000 == 1_700_000_000_123

    def again(**changes: Any) -> Placed | None:
        about = {"size": len(content), "head": content[:64].hex(), **own} | changes
        return store.uploads.begin(Chosen(str(store.data), "a.bmp", **about)).placed

    assert again() == again(path="other/a.bmp") == Placed("a.bmp", is_new=False)
    for change in ({"size": len(content) - 1}, {"modified_ms": 1_700_000_000_124}, {"mark": marks[1]}):
        assert again(**change) is None
    (store.data / "a.bmp").rename(store.outside / "a.bmp")
    (store.data / "a.bmp").symlink_to(store.outside / "a.bmp")
    assert again() is None
    (store.data / "a.bmp").unlink()
    assert store.send("a.bmp", content, **own) == "+a.bmp"


def test_a_file_gets_the_rights_of_its_folder(store: Store):
    for mode, expected in ((0o700, 0o600), (0o755, 0o644), (0o2775, 0o664)):
        store.data.chmod(mode)
        name = store.send(f"{mode}.png", encoded(colour=mode % 251)).removeprefix("+")
        assert (store.data / name).stat().st_mode & 0o777 == expected


def test_a_folder_on_another_disk_gets_the_whole_file_at_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    """A system call that fails stands for the other disk, as the kernel answers it."""
    link = os.link

    def refusing(source: object, *rest: object, **more: object) -> None:
        if str(source).endswith(".part") and "src_dir_fd" not in more:
            raise OSError(18, "Invalid cross-device link")
        link(source, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "link", refusing)
    assert store.send("a.png", encoded()) == "+a.png"
    assert store.names() == ["a.png"]


def test_an_upload_that_fills_the_disk_goes_on_when_there_is_room(store: Store):
    content = encoded("BMP", (400, 300))
    id = store.begin("a.bmp", len(content))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(NotWritten, match=r"^cannot be written to .*uploads \(File too large\); free some"):
            store.uploads.append(id, 0, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(WrongOffset) as wrong:
        store.uploads.append(id, 0, content)
    assert wrong.value.received == 100_000
    store.uploads.append(id, 100_000, content[100_000:])
    assert store.finish(id).name == "a.bmp"
    assert (store.data / "a.bmp").read_bytes() == content


def test_an_upload_that_its_folder_has_no_room_for_is_finished_later(store: Store, monkeypatch: pytest.MonkeyPatch):
    """A system call that fails stands for the full disk, as the kernel answers it."""
    content = encoded()
    id = store.begin("a.png", len(content))
    store.uploads.append(id, 0, content)

    def full(*paths: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(NotWritten) as refused:
        patch.setattr(files, "place_at", full)
        store.finish(id)
    assert str(refused.value) == (
        f"a.png: cannot be written to {store.data} (No space left on device); free some space, or change the folder's "
        "permissions, and choose it again; it is not sent again"
    )
    assert store.send("a.png", content) == "+a.png"


def test_a_file_that_is_cancelled_while_another_window_finishes_it_is_there_or_not(store: Store):
    content = encoded("BMP", (300, 300))
    for number in range(20):
        id = store.begin(f"{number}.bmp", len(content))
        store.uploads.append(id, 0, content)
        said: list[str] = []

        def finish(id: str = id, said: list[str] = said) -> None:
            try:
                said.append(store.finish(id).name)
            except InputError as error:
                said.append(str(error))

        at_once(finish, partial(store.uploads.cancel, id))
        assert said == [f"{number}.bmp"] if (store.data / f"{number}.bmp").exists() else "cancelled" in said[0]
    assert list(store.state.glob("*.part")) == []


def test_a_chunk_that_does_not_follow_is_refused_with_the_right_place(store: Store):
    content = encoded(size=(900, 900), mode="RGB")
    id = store.begin("a.png", len(content))
    assert store.uploads.append(id, 0, content[:500]) == 500
    for offset in (0, 499, 501, 10**9):
        with pytest.raises(WrongOffset) as wrong:
            store.uploads.append(id, offset, content[:10])
        assert wrong.value.received == 500
    with pytest.raises(InputError, match=r"^more than its \d+ bytes"):
        store.uploads.append(id, 500, content)
    with pytest.raises(InputError, match=r"^a chunk of \d+ bytes is larger than"):
        store.uploads.append(id, 500, bytes(MOST_CHUNK + 1))
    with pytest.raises(InputError, match=r"^a.png: 500 of its \d+ bytes are here; send the rest"):
        store.finish(id)
    assert store.uploads.append(id, 500, content[500:]) == len(content)
    assert store.finish(id).name == "a.png"
    for ask in (lambda: store.uploads.append(id, 0, b"x"), lambda: store.finish(id)):
        with pytest.raises(Unknown):
            ask()


def test_windows_that_send_and_finish_one_file_write_each_byte_and_put_it_there_once(store: Store):
    content = encoded("BMP", (300, 300))
    for number in range(8):
        id = store.begin(f"{number}.bmp", len(content))
        seen: list[str] = []

        def window(id: str = id, seen: list[str] = seen) -> None:
            offset = 0
            try:
                while offset < len(content):
                    try:
                        offset = store.uploads.append(id, offset, content[offset : offset + 70_001])
                    except WrongOffset as wrong:
                        offset = wrong.received
                seen.append(store.finish(id).name)
            except Unknown:
                seen.append("finished already")

        at_once(*[window] * 4)
        assert sorted(seen) == [f"{number}.bmp", *["finished already"] * 3]
    assert store.names() == [f"{number}.bmp" for number in range(8)]
    assert all((store.data / name).read_bytes() == content for name in store.names())


def test_images_of_one_name_that_are_finished_at_once_never_share_a_caption(store: Store):
    kinds = {"png": encoded(), "jpg": encoded("JPEG"), "bmp": encoded("BMP")}
    for number in range(12):
        ids = [store.begin(f"{number}.{suffix}", len(content)) for suffix, content in kinds.items()]
        for id, content in zip(ids, kinds.values(), strict=True):
            store.uploads.append(id, 0, content)
        at_once(*(partial(store.finish, id) for id in ids))
    assert sorted({Path(name).stem for name in store.names()}) == sorted(
        f"{number}{more}" for number in range(12) for more in ("", " (2)", " (3)")
    )


def test_the_two_thousandth_photo_that_is_called_image_is_placed_as_fast_as_others(store: Store):
    for number in range(2000):
        (store.data / ("image.png" if number == 0 else f"image ({number + 1}).png")).touch()
    began = time.monotonic()
    assert store.send("image.png", encoded()) == "+image (2001).png"
    assert time.monotonic() - began < 2, "one look at the folder takes 0.1 s, one for each name would take 10"


@pytest.mark.parametrize(
    "id",
    ["", "..", "../../../etc/passwd", *(f"{start}-9" for start in ("a" * 31, "A" * 32, "g" * 32, "0" * 32, "\0" * 32))],
)
def test_an_id_that_was_not_given_leads_to_no_file(store: Store, id: str):
    with pytest.raises(Unknown):
        store.uploads.append(id, 0, b"x")


def test_folders_outside_the_roots_hidden_ones_and_those_of_runs_get_nothing(store: Store):
    (store.data / "out").symlink_to(store.outside)
    (store.data / "runs").symlink_to(store.runs)
    (store.data / "file").write_text("x")
    for hidden in (store.root / ".ssh", store.data / ".trash-shardstudio"):
        hidden.mkdir()
    before = store.listed()
    refused = {
        store.outside: "outside ",
        store.data / "out": "outside ",
        store.data / ".." / ".." / "outside": "outside ",
        "/": "outside ",
        "/etc": "outside ",
        store.root / ".ssh": "a hidden folder",
        store.data / ".trash-shardstudio": "a hidden folder",
        store.runs: "a folder of runs",
        store.runs / "drafts": "a folder of runs",
        store.data / "runs": "a folder of runs",
        store.data / "file": "not a folder",
        store.data / "none": "not a folder",
        "data": "not the full path of a folder",
        "": "not the full path of a folder",
        f"{store.data}\0": "cannot hold the character NUL",
    }
    for folder, said in refused.items():
        with pytest.raises(InputError, match=said):
            store.begin(folder=folder)
    assert store.listed() == before


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "a\0", "out", "none"])
def test_a_folder_is_opened_by_names_only(store: Store, part: str):
    (store.data / "out").symlink_to(store.outside)
    with pytest.raises(InputError), data_folders.opened(store.data, (part,)):
        raise AssertionError("it was opened")


def test_the_programs_own_images_get_no_others():
    own = Path(image_files.__file__).parents[2] / "assets"
    with pytest.raises(InputError, match="images of the program itself, which stay as they are"):
        DataFolders(Picker((own.parents[1],)), Path("/nonexistent")).checked(str(own))


def test_a_new_folder_is_made_where_one_can_be_if_not_next_to_the_runs(tmp_path: Path):
    home, volume = tmp_path / "home", tmp_path / "volume"
    home.mkdir()
    (volume / "runs").mkdir(parents=True)
    folders = DataFolders(Picker((home, volume)), volume / "runs")
    assert folders.make_new("milo") == volume / "pictures" / "milo"
    shutil.rmtree(volume / "pictures")
    (volume / "pictures").write_text("a file")  # as where nothing can be written
    assert folders.make_new("milo") == home / "pictures" / "milo"
    (home / "pictures" / "milo").rmdir()
    (home / "pictures").rmdir()
    (home / "pictures").write_text("a file")
    with pytest.raises(InputError, match=f"^{volume}/pictures: not a folder"):
        folders.make_new("milo")


def test_what_takes_the_folders_place_redirects_nothing(store: Store):
    content = encoded()
    gone = "this upload is finished, cancelled or too old; choose the file again"
    for target, said in ((store.outside, "outside "), (store.runs, "a folder of runs"), (None, gone)):
        id = store.begin(f"{said[:3]}.png", len(content))
        store.uploads.append(id, 0, content)
        aside = store.data.rename(store.root / "aside")
        if target is None:
            store.data.mkdir()
        else:
            store.data.symlink_to(target)
        before = store.listed()
        with pytest.raises(InputError, match=said):
            store.finish(id)
        assert store.listed() == before
        store.data.unlink() if target else store.data.rmdir()
        aside.rename(store.data)


def test_no_file_beyond_the_roots_is_opened_for_any_of_this(store: Store, asked: list[str]):
    (store.outside / "a.png").write_bytes(encoded())
    (store.data / "out").symlink_to(store.outside)
    (store.data / "a.png").symlink_to(store.outside / "a.png")
    content, id = encoded(), store.begin("b.png", 10)
    asked.clear()
    assert store.send("a.png", content) == "+a (2).png"
    for folder in (store.outside, store.data / "out", store.data / "out" / "..", "/etc"):
        with pytest.raises(InputError):
            store.begin(folder=folder)
    store.uploads.append(id, 0, bytes(10))
    with pytest.raises(InputError):
        store.finish(id)
    allowed = (str(store.root), sys.prefix, sys.base_prefix, str(Path(upload_kinds.__file__).parents[3]))
    found = [path for path in asked if path.startswith("/")]
    assert any(path.startswith(str(store.state)) for path in found)
    assert [path for path in found if not path.startswith(allowed)] == []
    assert [path for path in asked if "outside" in path or path in ("out", "..")] == []


def test_a_link_in_the_place_of_a_part_is_not_written_through(store: Store):
    secret = store.outside / "secret"
    secret.write_bytes(b"secret")
    id = store.begin()
    part = store.state / f"{id}.part"
    part.unlink()
    part.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        store.uploads.append(id, 0, b"x")
    assert secret.read_bytes() == b"secret"


def test_a_flood_of_unfinished_uploads_ends_at_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uploads, "MOST_UNFINISHED", 5)
    ids = [store.begin(f"{number}.png") for number in range(5)]
    with pytest.raises(InputError, match=r"^a.png: 5 uploads are not finished, which is the limit; finish or cancel"):
        store.begin()
    assert store.begin("0.png") == ids[0]
    store.uploads.cancel(ids[1])
    store.begin()


def test_files_that_the_disk_has_no_room_for_are_refused_before_they_are_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uploads, "MOST_WAITING", 3000)
    store.begin("a.png", 2000)
    with pytest.raises(InputError, match=r"^b.png: unfinished uploads would take 0.0 GiB, the limit is"):
        store.begin("b.png", 2000)
    monkeypatch.setattr(uploads, "LEAST_FREE", 2**60)
    with pytest.raises(InputError, match=r"^c.png: needs 1073741824.0 GiB of free disk for .*data, which has"):
        store.begin("c.png", 10)
    with pytest.raises(InputError, match="bytes are more than the limit of 2147483648; save it smaller"):
        store.begin("d.png", 2**31 + 1)


def test_what_was_abandoned_is_removed_after_a_week(store: Store):
    store.now = os.stat(store.top).st_mtime
    id = store.begin("a.png")
    store.now += uploads.ABANDONED_S - 3600
    store.begin("b.png")
    assert (store.state / f"{id}.part").exists()
    store.now += 2 * 3600
    store.begin("c.png")
    assert not (store.state / f"{id}.part").exists()


def test_a_new_folder_is_made_below_a_root_only(store: Store):
    folders = store.uploads.folders
    made = folders.make(str(store.root), " my photos ")
    assert made == store.root / "my photos" and made.is_dir()
    with pytest.raises(InputError, match="is there already; choose it in New run, or another name"):
        folders.make(str(store.root), "my photos")
    before = sorted(store.top.rglob("*"))
    for name in ("", "..", "a/b", ".hidden", "con", "a\0", "cache", "x_cache", "x" * 300, "/etc/x", "a\nb"):
        with pytest.raises(InputError, match="not a name for a folder of images"):
            folders.make(str(store.root), name)
    for above in (store.outside, store.runs, Path("/tmp")):
        with pytest.raises(InputError):
            folders.make(str(above), "fine")
    assert sorted(store.top.rglob("*")) == before


def test_a_page_that_others_reach_without_a_password_takes_nothing(store: Store):
    id = store.begin()
    store.uploads.closed = "Uploads are off"
    for ask in (store.begin, lambda: store.uploads.append(id, 0, b"x"), lambda: store.finish(id)):
        with pytest.raises(InputError, match="Uploads are off"):
            ask()


def test_names_are_compared_as_the_strictest_system_compares_them():
    present = upload_names.by_stem(["A.PNG", "cafe\u0301.jpg", "b.txt", "c.heic"])
    assert upload_names.in_the_way(present, "a", is_first=True) == ["A.PNG"]
    assert upload_names.in_the_way(present, "caf\u00e9", is_first=True) == ["cafe\u0301.jpg"]
    assert upload_names.in_the_way(present, "b", is_first=True) == []
    assert upload_names.in_the_way(present, "b", is_first=False) == ["b.txt"]
    assert upload_names.in_the_way(present, "c", is_first=True) == ["c.heic"]


def test_of_a_selection_images_come_first_so_that_captions_and_rows_find_them_by_their_names(store: Store):
    (store.data / "b.png").write_bytes(encoded(colour=7))  # another picture of that name
    row = json.dumps({"file_name": "a.png", "text": "a row"}).encode()
    texts = {"Metadata.jsonl": row, "b.txt": b"of b", "c.txt": b"of c"}
    images = {"a.jpg": encoded(), "b.png": encoded(), "c.webp": b"RIFF"}
    given = [Given(name, content, 1_000_000) for name, content in (texts | images).items()]
    found = dict(put(store.uploads, str(store.data), given))
    assert {
        name: one.name if isinstance(one, Placed) else str(one).partition(";")[0] for name, one in found.items()
    } == {
        "a.jpg": "a.png",
        "b.png": "b (2).png",
        "c.webp": "c.webp: a movie",
        "b.txt": "b (2).txt",
        "c.txt": "not taken, because its image was refused",
        "Metadata.jsonl": "metadata.jsonl",
    }
    assert store.names() == ["a.png", "b (2).png", "b (2).txt", "b.png", "metadata.jsonl"]
    assert int((store.data / "a.png").stat().st_mtime) == 1000
