"""Images in parquet, csv and tar files: found with their captions and references, read from their place, and what is
wrong with such a file is said with its row."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.data.images.test_image_files import data, problems_of
from tests.data.test_hostile_data import in_a_small_process
from trainer.data import row_files
from trainer.data.images import image_members
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import load_rgb
from trainer.data.images.image_tables import Columns, TableRow, read_table
from trainer.data.images.known_files import KnownFiles
from trainer.system.index import Index
from trainer.system.terminal import shortened

COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255))


def encoded(colour: tuple[int, int, int], size: tuple[int, int] = (32, 48)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(file: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), file, **options)
    return file


def write_tar(file: Path, members: dict[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file


def of_hub(colours: Any = COLOURS) -> list[dict[str, Any]]:
    """Images as the datasets of the hub hold them."""
    return [{"bytes": encoded(colour), "path": f"{number}.png"} for number, colour in enumerate(colours)]


def seen(path: Path, **fields: Any) -> list[tuple[tuple[int, int, int], tuple[str, ...]]]:
    """(colour, captions) of each image that is trained."""
    return [(load_rgb(image, (8, 8)).getpixel((4, 4)), image.captions) for image in scan(data(path, **fields)).train]


EXPECTED = [(colour, (f"number {number}",)) for number, colour in enumerate(COLOURS)]
TEXTS = [f"number {number}" for number in range(3)]


NAMES = ["0.png", "1.png", "2.png"]
COLUMNS: dict[str, Any] = {
    "hub": of_hub(),
    "bytes": [encoded(one) for one in COLOURS],
    "names": NAMES,
    "dictionary": pa.array(NAMES).dictionary_encode(),
    "large": pa.array(NAMES, pa.large_string()),
    "view": pa.array(NAMES, pa.string_view()),
    "list": [[name] for name in NAMES],
    "fixed list": pa.array([[name] for name in NAMES], pa.list_(pa.string(), 1)),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_parquet_file_has_a_column_of_images_or_their_names_and_one_of_captions(tmp_path: Path, kind: str) -> None:
    for number, colour in enumerate(COLOURS):
        (tmp_path / f"{number}.png").write_bytes(encoded(colour))
    texts = pa.array(TEXTS).dictionary_encode() if kind == "dictionary" else TEXTS
    file = write_parquet(tmp_path / "a.parquet", {"image": COLUMNS[kind], "text": texts}, row_group_size=2)
    assert seen(file) == EXPECTED


def test_a_folder_of_shards_is_read_in_order_as_the_hub_has_it(tmp_path: Path) -> None:
    for number in range(3):
        columns = {"image": of_hub(COLOURS[number : number + 1]), "text": TEXTS[number : number + 1]}
        write_parquet(tmp_path / "data" / f"train-{number:05d}-of-00003.parquet", columns)
    (tmp_path / "README.md").write_text("a dataset", encoding="utf-8")
    assert seen(tmp_path) == EXPECTED


def test_columns_are_named_and_a_list_of_texts_is_several_captions(tmp_path: Path) -> None:
    columns = {"photo": of_hub(), "long": TEXTS, "text": ["unread"] * 3, "many": [["a", " b "], ["c"], ["d", "e", "f"]]}
    file = write_parquet(tmp_path / "a.parquet", columns)
    assert seen(file, image_column="photo", caption_column="long") == EXPECTED
    many = [captions for _, captions in seen(file, image_column="photo", caption_column="many")]
    assert many == [("a", "b"), ("c",), ("d", "e", "f")]


def test_references_are_columns_of_any_table(tmp_path: Path) -> None:
    for number, colour in enumerate(COLOURS):
        (tmp_path / f"{number}.png").write_bytes(encoded(colour))
    turned = of_hub(COLOURS[::-1])
    rows = "".join(f"{number}.png,{2 - number}.png,number {number}\n" for number in range(3))
    (tmp_path / "a.csv").write_text(f"image,before,text\n{rows}", encoding="utf-8")
    members: dict[str, bytes] = {}
    for number, colour in enumerate(COLOURS):
        members |= {f"{number}.png": encoded(colour), f"{number}.txt": TEXTS[number].encode()}
        members[f"{number}.before.png"] = encoded(COLOURS[2 - number])
    files = [
        (write_parquet(tmp_path / "a.parquet", {"image": of_hub(), "before": turned, "text": TEXTS}), ["before"]),
        (write_parquet(tmp_path / "b.parquet", {"image": of_hub(), "both": [[one] * 2 for one in turned]}), ["both"]),
        (tmp_path / "a.csv", ["before"]),
        (write_tar(tmp_path / "a.tar", members), ["before.png"]),
    ]
    for file, names in files:
        images = scan(data(file, reference_columns=names, missing_caption="empty")).train
        found = [[load_rgb(one, (8, 8)).getpixel((4, 4)) for one in image.references] for image in images]
        assert found == [[colour] * (2 if file.name == "b.parquet" else 1) for colour in COLOURS[::-1]]


def test_a_csv_names_files_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    rows = ["\ufefffile_name,caption"]
    for number, colour in enumerate(COLOURS):
        (tmp_path / "images" / f"{number}.png").write_bytes(encoded(colour))
        rows.append(f'images/{number}.png,"number {number}"')
    (tmp_path / "list.csv").write_text("\r\n".join(rows), encoding="utf-8")
    assert seen(tmp_path / "list.csv") == EXPECTED
    (tmp_path / "list.csv").rename(tmp_path / "metadata.csv")
    assert seen(tmp_path) == EXPECTED


@pytest.mark.parametrize("kind", ["txt", "json", "own"])
def test_a_tar_has_an_image_and_a_text_of_one_name(tmp_path: Path, kind: str) -> None:
    members: dict[str, bytes] = {}
    for number, colour in enumerate(COLOURS):
        texts = {"txt": TEXTS[number], "json": json.dumps({"caption": TEXTS[number]}), "own": TEXTS[number]}
        members |= {f"some/{number:04d}.png": encoded(colour), f"some/{number:04d}.{kind}": texts[kind].encode()}
    file = write_tar(tmp_path / "00000.tar", members)
    assert seen(file, caption_column="own" if kind == "own" else "") == EXPECTED
    assert seen(tmp_path, caption_column="own" if kind == "own" else "") == EXPECTED


def test_a_tar_is_read_in_the_order_and_under_the_names_that_the_program_tar_gives(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for number in (1, 0, 2):
        members[f"./{number}.png"] = encoded(COLOURS[number])
    members |= {f"./{number}.txt": TEXTS[number].encode() for number in range(3)}
    file = write_tar(tmp_path / "a.tar", members)
    assert seen(file) == [EXPECTED[number] for number in (1, 0, 2)]
    (tmp_path / "masks").mkdir()
    for number in range(3):
        Image.new("L", (32, 48)).save(tmp_path / "masks" / f"{number}.png")
    masks = [image.mask for image in scan(data(file, masks=str(tmp_path / "masks"))).train]
    assert [mask.path.name for mask in masks if mask] == ["1.png", "0.png", "2.png"]


def test_a_tar_s_caption_may_be_any_value_of_its_json_or_the_lines_of_its_txt(tmp_path: Path) -> None:
    values = json.dumps({"caption": "unread", "long": ["a", "b"]}).encode()
    file = write_tar(tmp_path / "a.tar", {"0.png": encoded(COLOURS[0]), "0.json": values})
    assert seen(file, caption_column="long") == [(COLOURS[0], ("a", "b"))]
    lines = write_tar(tmp_path / "b.tar", {"0.png": encoded(COLOURS[0]), "0.txt": b"a\n\n b \n"})
    assert seen(lines, caption_lines=True) == [(COLOURS[0], ("a", "b"))]
    assert seen(lines) == [(COLOURS[0], ("a\n\n b",))]


def test_a_tar_holds_images_of_every_suffix_that_a_folder_may_hold(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 48), COLOURS[0]).save(buffer, "TIFF")
    assert seen(write_tar(tmp_path / "a.tar", {"0.tif": buffer.getvalue(), "0.txt": b"number 0"})) == EXPECTED[:1]


@pytest.mark.parametrize("name", ["photos.tar", "photos.parquet"])
@pytest.mark.parametrize("inner", ["2024/07", "2024/summer"])
def test_a_folder_may_be_called_as_a_table(tmp_path: Path, name: str, inner: str) -> None:
    folder = tmp_path / name / inner
    folder.mkdir(parents=True)
    (folder / "0.png").write_bytes(encoded(COLOURS[0]))
    (folder / "0.txt").write_text(TEXTS[0], encoding="utf-8")
    assert seen(tmp_path) == EXPECTED[:1]


def test_masks_are_found_by_the_names_of_samples_and_by_the_numbers_of_rows(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for number, colour in enumerate(COLOURS):
        members |= {f"photo{number}.png": encoded(colour), f"photo{number}.txt": b"a"}
        for name in (f"photo{number}", str(number)):
            (tmp_path / f"masks-{name[:1]}").mkdir(exist_ok=True)
            Image.new("L", (32, 48)).save(tmp_path / f"masks-{name[:1]}" / f"{name}.png")
    tar = write_tar(tmp_path / "a.tar", members)
    rows = write_parquet(tmp_path / "a.parquet", {"image": of_hub(), "text": TEXTS})
    (tmp_path / "masks-n").mkdir()
    for number in range(3):
        (tmp_path / f"masks-{number}" / f"{number}.png").rename(tmp_path / "masks-n" / f"{number}.png")
    for file, masks in ((tar, "masks-p"), (rows, "masks-n")):
        found = [
            image.mask.path.parent.name for image in scan(data(file, masks=str(tmp_path / masks))).train if image.mask
        ]
        assert found == [masks] * 3


def test_what_was_read_of_a_table_is_not_read_again_and_a_replaced_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tar(tmp_path / "a.tar", {"a.png": encoded(COLOURS[0]), "a.txt": b"a"})
    config, opened = data(file), []
    known = KnownFiles(Index(tmp_path / "cache"))
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**12))
    first = scan(config, known=known)
    known.save()

    def read(path: Path) -> Any:
        opened.append(path)
        raise AssertionError(path)

    monkeypatch.setattr("trainer.data.images.known_files.read_header", read)
    assert scan(config, known=KnownFiles(Index(tmp_path / "cache"))) == first
    assert opened == []
    write_tar(file, {"a.png": encoded(COLOURS[0], (64, 64)), "a.txt": b"a"})
    with pytest.raises(AssertionError):
        scan(config, known=KnownFiles(Index(tmp_path / "cache")))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_column_that_is_missing_is_named_with_those_that_exist(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"image": of_hub(), "text": TEXTS})
    for field in ("image_column", "caption_column", "reference_columns"):
        value = ["pic"] if field == "reference_columns" else "pic"
        assert problems_of(data(file, **{field: value})) == [
            f"data.{field}: {file} has no column 'pic'; it has image, text"
        ]
    odd = write_parquet(tmp_path / "b.parquet", {"pic": of_hub(), "text": TEXTS})
    assert problems_of(data(odd)) == [
        f"{odd}: none of its columns pic, text is called image, jpg, jpeg, png or file_name; name the one with the "
        "images in data.image_column"
    ]


def test_columns_of_references_of_a_folder_of_images_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(encoded(COLOURS[0]))
    (tmp_path / "0.txt").write_text("a", encoding="utf-8")
    assert problems_of(data(tmp_path, reference_columns=["before"])) == [
        f"data.path: {tmp_path}: a folder of images has no columns, but data.reference_columns names some; name a file "
        "with these columns, or the images before the edit in data.references"
    ]


def test_a_tar_that_is_cut_short_is_named_wherever_it_is_cut(tmp_path: Path) -> None:
    members = {"a.png": encoded(COLOURS[0]), "a.txt": b"a", "b.png": encoded(COLOURS[1]), "b.txt": b"b"}
    whole = write_tar(tmp_path / "a.tar", members).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        last = tar.getmember("b.png")
        end = tar.getmember("b.txt").offset_data + 512
    for length in (0, 100, 512, last.offset, last.offset + 100, last.offset_data, last.offset_data + 50, end):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        (problem,) = problems_of(data(tmp_path / "a.tar"))
        assert problem.startswith(f"{tmp_path}/a.tar: ") and problem.endswith("copy it again"), (length, problem)


def test_a_parquet_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"image": of_hub(), "text": TEXTS})
    file.write_bytes(file.read_bytes()[:-20])
    (problem,) = problems_of(data(file))
    assert problem.startswith(f"{file}: not a parquet file, or damaged (")


def test_wrong_rows_are_named_and_the_others_read(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"image": [of_hub()[0], None, {"bytes": b"no image"}], "text": TEXTS})
    assert problems_of(data(file)) == [
        f"{file}/1/image/0: holds no image; the column image must have the bytes of an encoded image, or set "
        "data.bad_image: warn",
        f"{file}/2/image/0: cannot be read (not an image of a known format); replace or remove it, or set "
        "data.bad_image: warn",
    ]
    assert seen(file, bad_image="warn") == EXPECTED[:1]
    texts = write_parquet(tmp_path / "b.parquet", {"image": of_hub(), "text": [1, 2, 3]})
    assert problems_of(data(texts))[0] == (
        f"{texts}: row 1: its caption 1 is not a text or a list of texts; correct it"
    )
    empty = write_parquet(tmp_path / "c.parquet", {"image": of_hub(), "text": ["a", "", None]})
    assert problems_of(data(empty)) == [
        f"data.path: 2 of 3 images have no caption: first {empty}: row 2; write it into the row, or set "
        "data.missing_caption: empty"
    ]


def test_wrong_rows_of_a_csv_and_samples_of_a_tar_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(COLOURS[0]))
    listed = "file_name,text\na.png,fine\n,none\nhttps://host/a.png,far\nb.png,gone\n"
    (tmp_path / "a.csv").write_text(listed, encoding="utf-8")
    found = problems_of(data(tmp_path / "a.csv"))
    assert found[0] == f"{tmp_path}/a.csv:3: names no image file; correct or remove the row"
    assert found[1] == f"{tmp_path}/a.csv:4: https://host/a.png is an address; download the image and name its file"
    assert "b.png" in found[2] and "No such file" in found[2]
    (tmp_path / "b.csv").write_text("file_name,text\na.png,one,two\n", encoding="utf-8")
    assert problems_of(data(tmp_path / "b.csv")) == [
        f"{tmp_path}/b.csv:2: has more fields than the header; put texts in quotes"
    ]
    file = write_tar(tmp_path / "a.tar", {"a.png": encoded(COLOURS[0]), "a.json": b"{", "b.txt": b"b"})
    assert problems_of(data(file))[0].startswith(f"{file}: a: its .json cannot be read (")
    assert problems_of(data(file))[1] == (
        f"{file}: b: has no image, only txt; add it or remove the sample, or set data.bad_image: warn"
    )


def test_columns_that_cannot_be_told_apart_or_found_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(of_hub()), pa.array(TEXTS), pa.array(TEXTS)], ["image", "text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    assert problems_of(data(tmp_path / "a.parquet")) == [
        f"{tmp_path}/a.parquet: has several columns 'text'; rename all but one of them"
    ]
    odd = write_parquet(tmp_path / "b.parquet", {"my/image": of_hub(), "text": TEXTS})
    assert problems_of(data(odd, image_column="my/image")) == [
        f"{odd}: images in a column with / in its name, my/image, are not found; rename it"
    ]
    (tmp_path / "b.csv").write_text("file_name,text,text\na.png,a,b\n", encoding="utf-8")
    assert problems_of(data(tmp_path / "b.csv")) == [
        f"{tmp_path}/b.csv: has several columns 'text'; rename all but one of them"
    ]
    (tmp_path / "a.csv").write_text("file_name;text\na.png;a\n", encoding="utf-8")
    assert problems_of(data(tmp_path / "a.csv"))[0].endswith(", or save the file with commas between its fields")


def test_lists_of_images_are_counted_without_reading_them(tmp_path: Path) -> None:
    noise = [[{"bytes": os.urandom(2**20), "path": "a.png"}] for _ in range(32)]
    texts = [f"image {number}" for number in range(32)]
    file = write_parquet(tmp_path / "a.parquet", {"image": noise, "text": texts}, compression="none")
    read_before = psutil.Process().io_counters().read_chars
    rows = list(read_table(file, Columns()))
    assert [row.captions for row in rows if isinstance(row, TableRow)] == [(text,) for text in texts]
    assert psutil.Process().io_counters().read_chars - read_before < 2**22


def test_paths_without_bytes_in_a_parquet_file_are_named_with_the_remedy(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"image": [{"bytes": None, "path": "0.png"}], "text": ["a"]})
    assert problems_of(data(file)) == [
        f"{file}/0/image/0: the column image has the path of an image without its bytes; write the images into the "
        "file, or their paths as plain texts, or set data.bad_image: warn"
    ]


def test_a_row_without_its_reference_is_named_in_every_kind_of_table(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(encoded(COLOURS[0]))
    (tmp_path / "a.csv").write_text("image,before,text\n0.png,0.png,a\n0.png,,b\n", encoding="utf-8")
    assert problems_of(data(tmp_path / "a.csv", reference_columns=["before"])) == [
        f"{tmp_path}/a.csv:3: its column before names no image, and data.reference_columns names it; fill or remove it"
    ]
    listed = {"image": of_hub(), "before": [of_hub()[:1], [], None], "text": TEXTS}
    file = write_parquet(tmp_path / "a.parquet", listed)
    assert problems_of(data(file, reference_columns=["before"])) == [
        f"{file}: row {number}: its column before holds no image, and data.reference_columns names it; remove the row"
        for number in (2, 3)
    ]


@pytest.mark.parametrize("cell", [".", "/", "..", "images"])
def test_a_cell_that_names_a_folder_is_a_problem_of_its_row(tmp_path: Path, cell: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "a.csv").write_text(f"file_name,text\n{cell},a\n", encoding="utf-8")
    (problem,) = problems_of(data(tmp_path / "a.csv"))
    assert problem.endswith("or set data.bad_image: warn")


@pytest.mark.parametrize("caption", ["ein schöner Fuchs, " * 20, "a beautiful fox, " * 20, "a/" * 3000])
def test_a_caption_in_the_column_of_names_is_no_name_of_a_file(tmp_path: Path, caption: str) -> None:
    (tmp_path / "0.png").write_bytes(encoded(COLOURS[0]))
    (tmp_path / "d.csv").write_text(f'file_name,text\n0.png,a\n"{caption}",b\n', encoding="utf-8")
    listed = {"image": [["0.png"], [caption]], "text": ["a", "b"]}
    file = write_parquet(tmp_path / "d.parquet", listed)
    said = (
        f"holds {shortened(caption)}, which is too long for the name of a file; correct the row, or name the columns "
        "of images in data.image_column and data.reference_columns"
    )
    assert problems_of(data(tmp_path / "d.csv")) == [f"{tmp_path}/d.csv:3: its column file_name {said}"]
    assert problems_of(data(file)) == [f"{file}: row 2: its column image {said}"]
    write_parquet(file, {"image": ["0.png", "0.png"], "before": ["0.png", caption]})
    assert problems_of(data(file, reference_columns=["before"], missing_caption="empty")) == [
        f"{file}: row 2: its column before {said}"
    ]


def test_tables_without_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("file_name,text\n", encoding="utf-8")
    none = write_parquet(
        tmp_path / "a.parquet", {"image": pa.array([], pa.binary()), "text": pa.array([], pa.string())}
    )
    for file in (tmp_path / "a.csv", none):
        assert problems_of(data(file)) == [f"data.path: {file}: holds no rows; name a file with images"]


def test_compressed_tar_files_are_refused_with_the_remedy_whatever_their_suffix(tmp_path: Path) -> None:
    why = "is compressed, and images are read from their place in it; unpack it to a .tar"
    for mode in ("gz", "bz2", "xz"):
        with tarfile.open(tmp_path / "a.tar", f"w:{mode}"):  # type: ignore[call-overload]
            pass
        assert problems_of(data(tmp_path / "a.tar")) == [f"{tmp_path}/a.tar: {why}"]
    (tmp_path / "a.tar").rename(tmp_path / "a.tar.gz")
    for path in (tmp_path, tmp_path / "a.tar.gz"):
        assert problems_of(data(path))[0] == f"data.path: {tmp_path}/a.tar.gz: {why}"


def test_other_files_next_to_tables_are_counted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"image": of_hub(), "text": ["a", "b", "c"]})
    for name in ("README.md", "list.jsonl", "more.zip", "phone.heic", "sub/film.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert scan(data(tmp_path)).warnings == (
        f"data.path: 4 files next to tables of images are not read: first {tmp_path}/list.jsonl (.jsonl, .zip, .heic, "
        ".mp4)",
    )
    assert scan(data(tmp_path / "a.parquet")).warnings == ()


def test_lists_about_tar_files_are_not_tables_but_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "00000.tar", {"0.png": encoded(COLOURS[0]), "0.txt": b"number 0"})
    write_parquet(tmp_path / "00000.parquet", {"url": ["https://host/0.png"], "caption": ["a"], "key": ["0"]})
    (tmp_path / "00000_stats.json").write_text("{}", encoding="utf-8")
    (tmp_path / "stats.csv").write_text("count,failed\n1,0\n", encoding="utf-8")
    assert seen(tmp_path) == EXPECTED[:1]
    assert scan(data(tmp_path)).warnings == (
        f"data.path: 3 files next to tables of images are not read: first {tmp_path}/00000.parquet (.parquet, .json, "
        ".csv)",
    )


def test_a_csv_next_to_parquet_files_is_a_table_only_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.png").write_bytes(encoded(COLOURS[1]))
    folder = tmp_path / "shards"
    write_parquet(folder / "a.parquet", {"image": of_hub()[:1], "text": TEXTS[:1]})
    (folder / "list.csv").write_text("file_name,text\n../photos/0.png,number 1\n", encoding="utf-8")
    assert seen(folder) == EXPECTED[:1]
    assert scan(data(folder)).warnings == (
        f"data.path: 1 file next to tables of images is not read: first {folder}/list.csv",
    )
    assert seen(folder, folders=[{"path": str(folder / "list.csv")}]) == EXPECTED[:2]


def test_files_of_a_tar_that_belong_to_no_sample_are_counted(tmp_path: Path) -> None:
    members = {"0.png": encoded(COLOURS[0]), "0.txt": b"number 0", "README.md": b"about", "sub/LICENSE.txt": b"free"}
    file = write_tar(tmp_path / "a.tar", members | {"dataset_info.json": b"{}", "1.cls": b"3", "Makefile": b""})
    assert seen(file) == EXPECTED[:1]
    assert scan(data(file)).warnings == (
        f"data.path: 5 files in tar files belong to no image and are not read: first {file}/README.md (.md, .txt, "
        ".json, .cls, without a suffix)",
    )


def test_a_sample_without_its_image_is_a_bad_image(tmp_path: Path) -> None:
    members = {"0.png": encoded(COLOURS[0]), "0.txt": b"number 0", "1.txt": b"a", "2.json": b"{}", "3.heic": b""}
    members |= {"3.txt": b"b", "my.photo.1.jpg": encoded(COLOURS[1]), "my.photo.1.txt": b"c", "4.before.png": b""}
    file = write_tar(tmp_path / "a.tar", members)
    dots = ", since the name of a sample ends at the first dot"
    said = [
        f"{file}: {sample}: has no image, only {only}; add it or remove the sample"
        for sample, only in (
            ("1", "txt"),
            ("2", "json"),
            ("3", "heic, txt"),
            ("my", f"photo.1.jpg, photo.1.txt{dots}"),
            ("4", f"before.png{dots}"),
        )
    ]
    assert problems_of(data(file))[:3] == [f"{one}, or set data.bad_image: warn" for one in said[:3]]
    assert seen(file, bad_image="warn") == EXPECTED[:1]
    assert scan(data(file, bad_image="warn")).warnings == (
        *(f"left out: {one}" for one in said[:3]),
        f"and 2 more like these: {file}",
    )


def test_names_with_several_dots_in_a_tar_are_explained(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", {"my.photo.1.jpg": encoded(COLOURS[0]), "my.photo.1.txt": b"a"})
    assert problems_of(data(file)) == [
        f"{file}: holds no images: the name of a sample ends at the first dot, so that my.photo.1.jpg has the suffix "
        "photo.1.jpg; rename the files without further dots, or name a suffix that all have in data.image_column"
    ]
    texts = write_tar(tmp_path / "b.tar", {"0.txt": b"a", "README.md": b"b"})
    assert problems_of(data(texts)) == [
        f"{texts}: holds no images; a sample is an image and a text of one name, as in 000.jpg and 000.txt"
    ]


def test_a_second_image_of_a_tar_s_sample_is_named(tmp_path: Path) -> None:
    names = ("0.jpg", "0.png", "1.png", "2.png", "2.webp", "2.tif", "3.png", "3.mask.png")
    images = {name: encoded((number, 0, 0)) for number, name in enumerate(names)}
    file = write_tar(tmp_path / "a.tar", images | {f"{number}.txt": b"a cat" for number in range(4)})
    assert [colour[0] for colour, _ in seen(file)] == [0, 2, 3, 6]
    warnings = [one for one in scan(data(file)).warnings if "sample" in one]
    assert warnings == [
        f"data.path: 2 samples have further images, which are not trained: first {file}: 0.png; give each image a "
        "sample of its own, or name the suffix that is trained in data.image_column"
    ]
    assert scan(data(file, image_column="png")).warnings == ()


def test_a_table_next_to_images_is_not_read_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(COLOURS[0]))
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    file = write_parquet(tmp_path / "x.parquet", {"image": of_hub(), "text": TEXTS})
    found = scan(data(tmp_path))
    assert len(found.train) == 1
    assert found.warnings == (
        f"data.path: 1 file is not read, since the folder has images of its own: first {file}; name it in place of the "
        "folder",
    )


# --- files that would fill the memory ---------------------------------------------------------------------------------

SCAN_IN_A_SMALL_PROCESS = """
import sys, tracemalloc
import pyarrow
from trainer.system.errors import InputError
from trainer.config.sections import DataConfig
from trainer.data.images import image_files; from trainer.data.mixed import question_files
from trainer.system.index import Index
name, path = sys.argv[1:]
try:
    cfg = DataConfig(**{name: path})
    found = image_files.scan(cfg).train if name == "path" else question_files.of_config(cfg).train
    print(len(found))
except InputError as error:
    print(error)
print(pyarrow.default_memory_pool().max_memory() >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["path", "questions"])
def test_a_parquet_file_of_images_that_unpack_to_thousand_times_its_size_is_refused_unread(
    tmp_path: Path, name: str
) -> None:
    images = [{"bytes": bytes([number]) * 2**22, "path": None} for number in range(40)]
    texts = {"text": ["a"] * 40} if name == "path" else {"captions": ['{"a": "b"}'] * 40}
    file = write_parquet(tmp_path / "a.parquet", {"image": images, **texts}, compression="zstd")
    assert file.stat().st_size < 20_000
    said, most = in_a_small_process(SCAN_IN_A_SMALL_PROCESS, name, file).splitlines()
    assert said.startswith(f"{file}: row group 1 of the column image has 0.0 MiB that become 160; encoded images")
    assert int(most) < 10


@pytest.mark.slow
def test_row_groups_of_many_images_do_not_stay_in_memory(tmp_path: Path) -> None:
    """Four groups of 100 images, of which each is a whole page: a page and its decompressed form, and half of what is
    kept, are in memory, not four groups."""
    noise = os.urandom(2**20)
    images = [{"bytes": encoded(COLOURS[0]) + bytes([number % 256]) + noise, "path": None} for number in range(400)]
    columns = {"image": images, "text": [str(number) for number in range(400)]}
    file = write_parquet(tmp_path / "a.parquet", columns, row_group_size=100)
    count, most = in_a_small_process(SCAN_IN_A_SMALL_PROCESS, "path", file).splitlines()
    assert count == "400" and int(most) < 300
    assert [row.caption for row in scan(data(file)).train][::133] == ["0", "133", "266", "399"]


def test_images_of_a_parquet_file_are_found_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "BYTES_AT_ONCE", 500)
    monkeypatch.setattr(image_members, "BYTES_KEPT", 1000)  # a few images, so that groups are read in parts
    contents = [encoded(COLOURS[number % 3]) + bytes([number]) for number in range(20)]
    columns = {"image": [{"bytes": one, "path": None} for one in contents], "text": [str(n) for n in range(20)]}
    file = write_parquet(tmp_path / "a.parquet", columns, row_group_size=8)
    for order in (range(20), reversed(range(20)), [7, 8, 0, 19, 3, 11, 4, 4]):
        for row in order:
            assert image_members.opened_image(image_members.member(file, row, "image")).read() == contents[row]


@pytest.mark.parametrize("columns", [("image",), ("image", "before"), ("image", "before", "after")])
def test_columns_that_are_read_in_turn_do_not_push_each_other_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...]
) -> None:
    monkeypatch.setattr(row_files, "BYTES_AT_ONCE", 1000)  # less than a row group, so that it is read in parts
    monkeypatch.setattr(image_members, "BYTES_KEPT", 2000)
    read, parts = image_members._read, []

    def counted(*args: Any) -> tuple[list[Any], int]:
        parts.append(read(*args))
        return parts[-1]

    monkeypatch.setattr(image_members, "_read", counted)
    contents = {name: [os.urandom(100) for _ in range(40)] for name in columns}
    file = write_parquet(tmp_path / "a.parquet", contents)
    for row in range(40):
        for name in columns:
            assert image_members.opened_image(image_members.member(file, row, name)).read() == contents[name][row]
    # Parts of 9 rows, and with three columns of 6, after larger ones of the first two before the third was known.
    assert len(parts) == {1: 5, 2: 10, 3: 23}[len(columns)]
    assert max(size for _, size in parts) <= 1000


def test_a_tar_file_with_a_name_of_gigabytes_and_a_member_that_is_no_image_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 20 * 2**30
    with file.open("wb") as stream:
        stream.write(header.tobuf(tarfile.GNU_FORMAT))
        stream.truncate(20 * 2**30 + 4096)  # takes no room on the disk
    assert problems_of(data(file)) == [
        f"{file}: not a tar file, or cut off (a header of 21474836480 bytes); copy it again"
    ]
    member = tarfile.TarInfo("large.png")
    member.size = 30 * 2**30
    with file.open("wb") as stream:
        stream.write(member.tobuf(tarfile.GNU_FORMAT))
        stream.truncate(30 * 2**30 + 2048)
    assert problems_of(data(file)) == [
        f"{file}: large: .png: 30720 MiB are too many for an image, the limit is 1024 MiB; remove it"
    ]


def test_thousands_of_samples_without_an_image_are_a_few_sentences(tmp_path: Path) -> None:
    members = {f"{number:05}.txt": b"a" for number in range(3000)}
    file = write_tar(tmp_path / "a.tar", {"a.png": encoded(COLOURS[0]), "a.txt": b"a", **members})
    said = problems_of(data(file))
    assert len(said) == 5 and said[0] == (
        f"{file}: 00000: has no image, only txt; add it or remove the sample, or set data.bad_image: warn"
    )
    assert said[3:] == [
        f"and 997 more like these: {file}",
        f"{file}: 1000 rows are wrong; the rest of them was not read",
    ]
