"""What lies in a folder of images and is not read is named; what other programs write under other names is read."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.data.images.test_image_files import add_image, captions_of, data, problems_of
from trainer.config.sections import DataConfig
from trainer.data.images.image_files import scan
from trainer.data.images.image_source import with_trigger
from trainer.data.images.known_files import KnownFiles
from trainer.data.images.scan_memory import ScanMemory
from trainer.data.mixed import question_files
from trainer.system.errors import InputError

COMPOSED = unicodedata.normalize("NFC", "café")
APART = unicodedata.normalize("NFD", "café")
"""The same name as macOS writes it."""


def warnings_of(folder: Path, **fields: Any) -> list[str]:
    """What is said of a folder, without its path."""
    return [warning.replace(f"{folder}/", "") for warning in scan(data(folder, **fields)).warnings]


def test_a_jpeg_is_read_under_all_of_its_names(tmp_path: Path) -> None:
    for number, suffix in enumerate(("jpg", "JPEG", "jpe", "jfif", "PJPEG", "pjp")):
        add_image(tmp_path / f"{number}.{suffix}", caption=suffix, format="JPEG", size=(40 + number, 20))
    assert captions_of(data(tmp_path)) == ["jpg", "JPEG", "jpe", "jfif", "PJPEG", "pjp"]
    assert warnings_of(tmp_path) == []


def test_files_with_a_caption_that_are_not_images_that_are_read_are_counted(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    for name in ("b.nef", "c.ppm", "d.JPG_large", "e"):
        (tmp_path / name).write_bytes(b"picture")
        (tmp_path / name).with_suffix(".txt").write_text("a cat")
    (tmp_path / "f.mp4").write_bytes(b"film")
    (tmp_path / "Thumbs.db").write_bytes(b"")
    (tmp_path / "README.md").write_text("about")
    assert warnings_of(tmp_path) == [
        "data.path: 4 files have a caption, but are not images of a kind that is read: first b.nef (.nef, .ppm, "
        ".JPG_large, without a suffix); convert to png or jpg, or remove with the caption",
        "data.path: 1 file of another kind is not read: first f.mp4",
    ]


def test_captions_of_no_image_and_captions_in_other_files_are_counted(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    (tmp_path / "license.txt").write_text("free")
    for name in ("a license.txt", "list.txt", "captions.csv", "meta_cap.json", "sub/rows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a cat")
    (tmp_path / "b.heic").write_bytes(b"")
    (tmp_path / "b.txt").write_text("its image is named by another sentence")
    assert warnings_of(tmp_path, bad_image="warn") == [
        "left out: b.heic: .heic images are not read; convert it to png or jpg, or remove it",
        "data.path: 2 captions belong to no image that is read: first a license.txt; give a caption the name of its "
        "image",
        "data.path: 3 files that may hold captions are not read: first captions.csv; write captions into .txt files "
        "named as their images, or into a metadata.jsonl or metadata.csv with file_name and text",
    ]


def test_the_companions_of_images_may_have_captions_that_are_not_read(tmp_path: Path) -> None:
    add_image(tmp_path / "photos" / "a.png")
    add_image(tmp_path / "before" / "a.png", caption="another", size=(20, 40))
    (tmp_path / "before" / "a.mp4").write_bytes(b"film")
    assert warnings_of(tmp_path / "photos", references=str(tmp_path / "before")) == [
        f"data.references: 1 file of another kind is not read: first {tmp_path}/before/a.mp4"
    ]


@pytest.mark.parametrize("folder", ["geo_cache", "cache", ".thumbs"])
def test_a_folder_with_images_that_is_passed_over_is_named_also_by_a_scan_that_is_remembered(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**18))
    add_image(tmp_path / "data" / "a.png")
    (tmp_path / "data" / folder).mkdir()
    (tmp_path / "data" / folder / "x.safetensors").write_bytes(b"")
    cfg = data(tmp_path / "data")
    assert ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles).warnings == ()
    add_image(tmp_path / "data" / folder / "deep" / "b.png")
    add_image(tmp_path / "data" / ".trash-shardstudio" / "1" / "b.png")
    said = (
        f"data.path: 1 folder with images is not read, hidden or named as a cache: first {tmp_path}/data/{folder}; "
        "rename it to train on its images",
    )
    for _ in range(2):
        assert ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles).warnings == said


def test_a_run_inside_of_the_data_is_not_data(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    for run in ("run", "runs/b"):
        for name in ("samples/step-1-0.png", "drawings/1/with.png", "export/card.png"):
            add_image(tmp_path / run / name, caption=None)
        for name in ("config.yaml", "events.jsonl"):
            (tmp_path / run / name).write_text("")
    add_image(tmp_path / "like" / "b.png", size=(20, 20))
    (tmp_path / "like" / "config.yaml").write_text("")
    assert [image.path.name for image in scan(data(tmp_path)).train] == ["a.png", "b.png"]
    assert warnings_of(tmp_path) == [
        "data.path: 2 folders are those of runs, whose images are not trained on: first run",
        "data.path: 1 file of another kind is not read: first like/config.yaml",
    ]


def test_a_hidden_link_to_a_folder_does_not_hide_the_folder(tmp_path: Path) -> None:
    add_image(tmp_path / "b" / "a.png")
    (tmp_path / ".a").symlink_to(tmp_path / "b")
    assert [image.path.name for image in scan(data(tmp_path)).train] == ["a.png"]


def test_images_trained_without_a_caption_are_counted_with_a_file_that_may_hold_theirs(tmp_path: Path) -> None:
    for name in ("im0.png", "im1.png", "im2.png", "im3.jpg"):
        add_image(tmp_path / name, caption=None, size=(40, 20 + int(name[2])))
    for name in ("im0.caption", "im1.TXT", "im2.png.txt", "IM3.txt"):
        (tmp_path / name).write_text("a fox")
    assert captions_of(data(tmp_path, missing_caption="empty")) == ["", "a fox", "", ""]
    hint = "im0.caption is not read, a caption is read from im0.txt"
    assert warnings_of(tmp_path, missing_caption="empty") == [
        f"data.path: 3 of 4 images have no caption and are trained without one: first im0.png; {hint}"
    ]
    assert problems_of(data(tmp_path)) == [
        f"data.path: 3 of 4 images have no caption: first {tmp_path}/im0.png; write it into im0.txt, or set "
        f"data.missing_caption: empty; {tmp_path}/{hint}"
    ]


def test_the_only_image_without_a_caption_is_named_with_the_file_that_may_hold_it(tmp_path: Path) -> None:
    add_image(tmp_path / "im.png", caption=None)
    (tmp_path / "im.png.txt").write_text("a fox")
    assert problems_of(data(tmp_path)) == [
        f"{tmp_path}/im.png: no caption; write it into im.txt, or set data.missing_caption: empty; "
        f"{tmp_path}/im.png.txt is not read, a caption is read from im.txt"
    ]


def test_second_captions_of_an_image_are_named(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        add_image(tmp_path / f"{name}.png", caption=f"file {name}", size=(40, 20 + number))
    for name in ("a.TXT", "z.txt", "z.TXT"):
        (tmp_path / name).write_text("another")
    for name in ("d", "e"):
        add_image(tmp_path / f"{name}.png", caption=None, size=(30, 20 + ord(name)))
    rows = [("b", "row b"), ("c", "file c"), ("d", "first"), ("d", "last"), ("e", "e"), ("e", "e")]
    points = [{"file_name": "d.png", "focus": [0, 0]}]
    lines = [json.dumps(row) for row in [{"file_name": f"{name}.png", "text": text} for name, text in rows] + points]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    assert captions_of(data(tmp_path)) == ["file a", "file b", "file c", "last", "e"]
    assert warnings_of(tmp_path) == [
        "data.path: 2 images have another caption than the .txt, which is not used: first a.TXT; remove one of them",
        "data.path: 1 image is listed again with another caption, and the last one is used: first d.png; remove the "
        "other rows",
        "data.path: 1 caption belongs to no image that is read: first z.txt; give a caption the name of its image",
    ]


def test_a_folder_that_is_listed_twice_is_not_full_of_copies(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png")
    own = {"path": str(tmp_path), "caption_prefix": "closely,"}
    assert captions_of(data(tmp_path, folders=[own])) == ["a cat", "closely, a cat"]
    assert warnings_of(tmp_path, folders=[own]) == []


@pytest.mark.parametrize(("image", "other"), [(COMPOSED, APART), (APART, COMPOSED)])
def test_names_are_the_same_however_their_accents_are_written(tmp_path: Path, image: str, other: str) -> None:
    for name in ("a", "b"):
        add_image(tmp_path / "photos" / f"{name}{image}.png", caption=None, size=(40, 20 + ord(name)))
    (tmp_path / "photos" / f"a{other}.txt").write_text("from a file")
    row = {"file_name": f"b{other}.png", "text": "from a row", "focus": [0, 1]}
    (tmp_path / "photos" / "metadata.jsonl").write_text(json.dumps(row), encoding="utf-8")
    for folder in ("masks", "before", "worse"):
        for name in ("a", "b"):
            width = 41 if folder == "before" else 40  # a reference is another image
            add_image(tmp_path / folder / f"{name}{other}.png", caption=None, size=(width, 20 + ord(name)))
    found = scan(
        data(
            tmp_path / "photos",
            masks=str(tmp_path / "masks"),
            references=str(tmp_path / "before"),
            rejected=str(tmp_path / "worse"),
        )
    )
    assert [one.caption for one in found.train] == ["from a file", "from a row"]
    assert found.train[1].focus == (0, 1) and found.warnings == ()
    assert all(one.mask and one.references and one.rejected for one in found.train)


def test_a_table_finds_images_however_their_accents_are_written(tmp_path: Path) -> None:
    add_image(tmp_path / "photos" / f"{APART}.png", caption=None)
    (tmp_path / "list.csv").write_text(f"file_name,text\nphotos/{COMPOSED}.png,a cat\n", encoding="utf-8")
    assert captions_of(data(tmp_path / "list.csv")) == ["a cat"]
    row = {"image": f"photos/{COMPOSED}.png", "question": "What?", "answer": "A cat."}
    (tmp_path / "list.jsonl").write_text(json.dumps(row), encoding="utf-8")
    assert len(question_files.of_config(DataConfig(questions=str(tmp_path / "list.jsonl"))).train) == 1
    (tmp_path / "list.jsonl").write_text(json.dumps(row | {"image": "é" * 200}), encoding="utf-8")
    with pytest.raises(InputError, match=r"list.jsonl:1: .*é: cannot be read \(File name too long\)"):
        question_files.of_config(DataConfig(questions=str(tmp_path / "list.jsonl")))


def test_folders_named_as_kohya_s_scripts_name_them_say_how_often_their_images_occur(tmp_path: Path) -> None:
    add_image(tmp_path / "10_ohwx woman" / "a.png", caption="a woman, ohwx")
    add_image(tmp_path / "10_ohwx woman" / "sub" / "b.png", caption=None, size=(20, 20))
    add_image(tmp_path / "1_style" / "c.png", size=(20, 30))
    for number, name in enumerate(("01_portraits", "2023_trip", "5 apples", "x/7_deep")):
        add_image(tmp_path / name / "d.png", size=(20, 40 + number))
    add_image(tmp_path / "kept" / "10_woman" / "e.png", caption=None, size=(20, 50))
    add_image(tmp_path / "8_f.png", size=(20, 60))
    add_image(tmp_path / "held" / "9_woman" / "g.png", size=(20, 70))
    found = scan(
        data(
            tmp_path,
            repeats=2,
            regularization=str(tmp_path / "kept"),
            validation=str(tmp_path / "held"),
            trigger="ohwx",
        )
    )
    weights = {one.path.parent.name: one.weight for one in found.train}
    assert weights.pop("10_woman") == 64 and weights.pop(tmp_path.name) == 2
    assert weights == {"10_ohwx woman": 20, "sub": 20, "7_deep": 14} | {
        name: 2 for name in ("1_style", "01_portraits", "2023_trip", "5 apples")
    }
    assert {one.caption for one in found.train if one.weight == 20} == {"a woman, ohwx", "ohwx woman"}
    assert found.train[-1].caption == "woman"
    assert found.warnings == (
        "data.path: images occur in an epoch as often as the names of their folders say, as in kohya's scripts: "
        "10_ohwx woman 10 times, x/7_deep 7 times; to change this, "
        "rename a folder or give it a weight in data.folders",
        "data.path: 1 image has no caption but the text of the folder's name, as in kohya's scripts: first "
        f"{tmp_path}/10_ohwx woman/sub/b.png",
        "data.regularization: 1 image has no caption but the text of the folder's name, as in kohya's scripts: first "
        f"{tmp_path}/kept/10_woman/e.png",
    )


def test_a_folder_of_the_config_may_itself_be_named_as_kohya_s_scripts_name_it(tmp_path: Path) -> None:
    dog, woman = tmp_path / "5_sks dog", tmp_path / "10_ohwx woman"
    add_image(dog / "a.png", caption=None)
    add_image(dog / "b.png", caption="a dog, sks", size=(20, 20))
    add_image(dog / "3_sks puppy" / "c.png", caption=None, size=(20, 30))
    add_image(dog / "sub" / "4_old" / "9_older" / "d.png", caption=None, size=(20, 40))
    add_image(woman / "e.png", caption=None, size=(20, 50))
    found = scan(data(dog, repeats=2, folders=[{"path": str(woman)}]))
    assert [(one.path.name, one.weight, one.caption) for one in found.train] == [
        ("c.png", 6, "sks puppy"),
        ("a.png", 10, "sks dog"),
        ("b.png", 10, "a dog, sks"),
        ("d.png", 8, "old"),
        ("e.png", 20, "ohwx woman"),
    ]
    said = ("3_sks puppy 3 times, 5_sks dog 5 times, sub/4_old 4 times;", f"{dog}/3_sks puppy/c.png")
    said += ("data.folders.0.path: ", f"{woman}/e.png")
    assert all(part in warning for part, warning in zip(said, found.warnings, strict=True))


@pytest.mark.parametrize("number", [256, 512, 768])
def test_a_resolution_in_a_folder_s_name_is_not_a_number_of_repeats(tmp_path: Path, number: int) -> None:
    faces = tmp_path / f"{number}_faces"
    add_image(faces / "a.png", caption=None)
    add_image(faces / "3_sks dog" / "b.png", caption=None, size=(20, 30))
    for path in (tmp_path, faces):
        found = scan(data(path, repeats=2))
        assert {one.path.name: (one.weight, one.caption) for one in found.train} == {
            "a.png": (2, "faces"),
            "b.png": (6, "sks dog"),
        }
        assert (
            "data.path: numbers that are resolutions, or count folders from 0 or 1 on, are not read as repeats: "
            f"{number}_faces; where they are meant, give these folders a weight in data.folders"
        ) in found.warnings


@pytest.mark.parametrize("start", [0, 1])
def test_numbers_of_classes_in_folders_names_are_not_numbers_of_repeats(tmp_path: Path, start: int) -> None:
    names = [f"{number}_{name}" for number, name in enumerate(("cat", "dog", "fox", "owl"), start)]
    for number, name in enumerate(names):
        add_image(tmp_path / "train" / name / "a.png", size=(20, 20 + number))
    add_image(tmp_path / "train" / names[3] / "5_sks owl" / "b.png", size=(30, 20))
    for path, before in ((tmp_path, "train/"), (tmp_path / "train", "")):
        found = scan(data(path))
        weights = {one.path.parent.name: one.weight for one in found.train}
        assert weights == {**dict.fromkeys(names, 1), "5_sks owl": 5}
        unread = [f"{before}{name}" for name in names[2 - start :]]
        assert found.warnings[1:] == (
            "data.path: numbers that are resolutions, or count folders from 0 or 1 on, are not read as repeats: "
            f"{', '.join(unread)}; where they are meant, give these folders a weight in data.folders",
        )
    # The folders of a config may be such siblings too.
    folders = [{"path": str(tmp_path / "train" / name)} for name in names]
    weights = [one.weight for one in scan(DataConfig(folders=[folders[0] | {"weight": 3}, *folders[1:]])).train]
    assert weights == [3, 1, 1, 5, 1]
    weights = [one.weight for one in scan(data(tmp_path, folders=[folders[1] | {"weight": 3}])).train]
    assert sorted(weights) == [1, 1, 1, 3, 5]


@pytest.mark.parametrize(
    "names", [("1_a", "2_b"), ("1_a", "2_b", "4_c"), ("1_a", "1_b", "2_c", "3_d"), ("2_a", "3_b", "4_c")]
)
def test_numbers_that_do_not_count_the_folders_are_repeats(tmp_path: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        add_image(tmp_path / name / "a.png", size=(20, 20 + number))
    assert [one.weight for one in scan(data(tmp_path)).train] == [int(name[0]) for name in names]


def test_a_weight_in_the_config_replaces_the_repeats_of_that_folder_s_name(tmp_path: Path) -> None:
    woman = tmp_path / "10_ohwx woman"
    add_image(woman / "a.png", caption=None)
    add_image(woman / "2_near" / "b.png", size=(20, 30))
    found = scan(DataConfig(folders=[{"path": str(woman), "weight": 1.5}]))
    assert [(one.path.name, one.weight, one.caption) for one in found.train] == [
        ("b.png", 3, "a cat"),
        ("a.png", 1.5, "ohwx woman"),
    ]
    (woman / "a.txt").write_text("a woman")
    for field in ("regularization", "validation"):
        held = scan(data(add_image(tmp_path / "x" / "c.png", size=(9, 9)).parent, **{field: str(woman)}))
        found = [one for one in (*held.train, *held.validation) if one.path.name == "a.png"]
        assert [(one.weight, one.caption) for one in found] == [(0.5 if field == "regularization" else 1, "a woman")]


def test_a_trigger_that_stands_in_the_caption_is_not_put_in_front_once_more(tmp_path: Path) -> None:
    captions = ("a Risograph print", "[Trigger] fox", "risographs", "a fox")
    captions += ("一张risograph狐狸", "risographの狐", "risographé")
    for number, caption in enumerate(captions):
        add_image(tmp_path / f"{number}.png", caption=caption, size=(40, 20 + number))
    assert captions_of(data(tmp_path, trigger="risograph")) == [
        "a Risograph print",
        "risograph fox",
        "risograph, risographs",
        "risograph, a fox",
        "一张risograph狐狸",
        "risographの狐",
        "risograph, risographé",
    ]
    assert with_trigger(["[TRIGGER] owl"], DataConfig(trigger=r"\1 risograph")) == [r"\1 risograph owl"]


def test_captions_saved_on_windows_are_those_saved_on_linux(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption=None)
    add_image(tmp_path / "b.png", caption=None, size=(20, 20))
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\r\n")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "one\\r\\ntwo\\rthree"}')
    assert captions_of(data(tmp_path)) == ["one\ntwo\nthree"] * 2
    (tmp_path / "list.csv").write_bytes(b'file_name,text\r\na.png,"one\r\ntwo\rthree"\r\n')
    assert captions_of(data(tmp_path / "list.csv")) == ["one\ntwo\nthree"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            "\ufefffile_name;text",
            "none of its columns file_name;text is called file_name; rename it, or save the file with commas "
            "between its fields",
        ),
        ("image,text", "none of its columns image, text is called file_name; rename it"),
        ("file_name,words", "none of its columns file_name, words is called text or caption; rename it"),
    ],
)
def test_a_metadata_csv_without_its_columns_is_refused_with_those_it_has(
    tmp_path: Path, header: str, said: str
) -> None:
    add_image(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text(f"{header}\r\na.png;hello\r\n", encoding="utf-8")
    assert problems_of(data(tmp_path)) == [f"{tmp_path}/metadata.csv: {said}"]


@pytest.mark.parametrize("folder", ["plain", "10_ohwx man"])
def test_masks_of_onetrainer_among_the_images_are_not_trained(tmp_path: Path, folder: str) -> None:
    add_image(tmp_path / folder / "a.png", caption="ohwx")
    add_image(tmp_path / folder / "a-masklabel.png", caption="", mode="L")
    add_image(tmp_path / folder / "b-masklabel.png", caption="a picture of this name")
    problems = problems_of(data(tmp_path, missing_caption="empty"))
    assert problems == [
        f"data.path: 1 mask lies among the images, as OneTrainer has them: first {tmp_path}/{folder}/a-masklabel.png; "
        "move them into a folder of their own, under the names of their images, and name it in data.masks"
    ]


@pytest.mark.parametrize("name", ["captions.csv", "metadata.parquet", "all.json"])
def test_a_file_that_may_hold_the_captions_is_named_where_they_are_missing(tmp_path: Path, name: str) -> None:
    for number in range(2):
        add_image(tmp_path / f"{number}.png", caption=None, size=(20 + number, 20))
    (tmp_path / name).write_bytes(b"file_name,text\n")
    [problem] = problems_of(data(tmp_path))
    assert problem.endswith(
        f"; {tmp_path}/{name} is not read, captions of several images are read from a metadata.jsonl or metadata.csv "
        "with file_name and text"
    )


def test_a_row_of_an_image_that_is_left_out_is_no_mistake(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption=None)
    (tmp_path / "b.gif").write_bytes(b"GIF89a")
    rows = [{"file_name": "a.png", "text": "a fox"}, {"file_name": "b.gif", "text": "a hare"}]
    (tmp_path / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert captions_of(data(tmp_path, bad_image="warn")) == ["a fox"]
    [problem] = problems_of(data(tmp_path))
    assert ".gif images are not read" in problem


def test_one_list_of_captions_serves_folders_that_the_config_names_separately(tmp_path: Path) -> None:
    for name in ("train/a.png", "val/b.png"):
        add_image(tmp_path / name, caption=None)
    rows = [{"file_name": "train/a.png", "text": "a fox"}, {"file_name": "val/b.png", "text": "a hare"}]
    (tmp_path / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = scan(data(tmp_path, validation=str(tmp_path / "val")))
    assert [[image.caption for image in part] for part in (found.train, found.validation)] == [["a fox"], ["a hare"]]
    (tmp_path / "val" / "b.png").rename(tmp_path / "val" / "c.png")
    problems = problems_of(data(tmp_path, validation=str(tmp_path / "val")))
    assert f"{tmp_path}/metadata.jsonl:2: no such image: val/b.png; correct file_name or remove the line" in problems


def test_an_empty_text_file_hides_no_caption_of_a_list(tmp_path: Path) -> None:
    add_image(tmp_path / "a.png", caption="\n")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a fox"}))
    assert captions_of(data(tmp_path)) == ["a fox"]
    assert warnings_of(tmp_path) == []


@pytest.mark.parametrize(("at", "weight"), [("each", 3.0), ("largest", 1.0)])
def test_regularization_images_occur_as_often_as_all_others_at_their_resolutions(
    tmp_path: Path, at: str, weight: float
) -> None:
    for name in ("own/a.png", "own/b.png", "class/c.png", "class/d.png"):
        add_image(tmp_path / name, caption="fox", size=(20 + ord(name[-5]), 20))
    folder = {"path": str(tmp_path / "own"), "resolutions": [64, 96, 128]}
    cfg = DataConfig(folders=(folder,), regularization=str(tmp_path / "class"), at_resolutions=at, resolution=64)
    assert [image.weight for image in scan(cfg).train] == [1.0, 1.0, weight, weight]
