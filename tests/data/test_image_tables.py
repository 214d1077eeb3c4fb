"""Images in parquet, csv and tar files: found with their captions and references, read from their place, and what is
wrong with such a file is said with its row."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.data.test_image_files import data, problems_of
from trainer.data.image_files import scan
from trainer.data.image_io import load_rgb
from trainer.data.known_files import KnownFiles

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


@pytest.mark.parametrize("kind", ["hub", "bytes", "names"])
def test_a_parquet_file_has_a_column_of_images_and_one_of_captions(tmp_path: Path, kind: str) -> None:
    for number, colour in enumerate(COLOURS):
        (tmp_path / f"{number}.png").write_bytes(encoded(colour))
    images = {"hub": of_hub(), "bytes": [encoded(one) for one in COLOURS], "names": ["0.png", "1.png", "2.png"]}[kind]
    file = write_parquet(tmp_path / "a.parquet", {"image": images, "text": TEXTS}, row_group_size=2)
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
    known = KnownFiles.of(config, tmp_path / "cache")
    monkeypatch.setattr("trainer.data.known_files.COARSEST_NS", -(10**12))
    first = scan(config, known=known)
    known.save()

    def read(path: Path) -> Any:
        opened.append(path)
        raise AssertionError(path)

    monkeypatch.setattr("trainer.data.known_files.read_header", read)
    assert scan(config, known=KnownFiles.of(config, tmp_path / "cache")) == first
    assert opened == []
    write_tar(file, {"a.png": encoded(COLOURS[0], (64, 64)), "a.txt": b"a"})
    with pytest.raises(AssertionError):
        scan(config, known=KnownFiles.of(config, tmp_path / "cache"))


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
        f"{empty}: row {number}: no caption; write it into the row, or set data.missing_caption: empty"
        for number in (2, 3)
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
    assert problems_of(data(file))[1] == f"{file}: b: has no image, only txt; add it or remove the sample"


def test_compressed_tar_files_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz"):
        pass
    for path in (tmp_path, tmp_path / "a.tar.gz"):
        assert problems_of(data(path))[0] == (
            f"data.path: {tmp_path}/a.tar.gz: is compressed, and images are read from their place in it; unpack it to "
            "a .tar"
        )


def test_a_table_next_to_images_is_not_read_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(COLOURS[0]))
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    file = write_parquet(tmp_path / "x.parquet", {"image": of_hub(), "text": TEXTS})
    found = scan(data(tmp_path))
    assert len(found.train) == 1
    assert found.warnings == (
        f"data.path: 1 file is not read, since the folder has images of its own: first {file}; name it in data.folders",
    )
