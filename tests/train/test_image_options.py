"""Several resolutions, settings of folders, crops, borders, mirrored images and several captions: what a run trains,
the same on any number of ranks and after a resume."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageOps
from pyarrow import parquet

from tests.distributed import run_ranks
from tests.runs import Outcome, alone, difference, in_two_parts, make_pictures, make_run, run_config, train
from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.data.images.image_source import ImageSource
from trainer.data.loader import BatchSizes, ImageItem, Loader
from trainer.run.events import AnyEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

ONE_RANK = {"parallel__devices": 1, "parallel__strategy": "none"}
RANKS = {
    2: {"parallel__devices": 2, "parallel__strategy": "full"},
    4: {"parallel__devices": 4, "parallel__strategy": "hybrid", "parallel__shard_size": 2},
}
STEPS = 6
PREFIXED = {"caption_prefix": "photo,", "caption_dropout": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pictures` with masks of the same names, and `more`: four with two captions each, and a focus."""
    root = tmp_path_factory.mktemp("image_options")
    pictures, more = make_pictures(root / "pictures"), make_pictures(root / "more", 4)
    (root / "masks").mkdir()
    for file in sorted(pictures.glob("*.png")):
        with Image.open(file) as image:
            mask = Image.new("L", image.size, 255)
        mask.paste(0, (0, 0, mask.width // 2, mask.height))
        mask.save(root / "masks" / file.name)
    rows = []
    for number, file in enumerate(sorted(more.glob("*.png"))):
        file.with_suffix(".txt").unlink()
        own = file.rename(more / f"more-{number}.png")
        text = [f"first of {number}", f"second of {number}"]
        rows.append({"file_name": own.name, "text": text, "focus": [0.2, 0.9]})
    _write_tables(root, pictures)
    (more / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return root


def _write_tables(root: Path, pictures: Path) -> None:
    """The pictures in two parquet files, with the next one as the image before an edit, and in a tar file."""
    files = sorted(pictures.glob("*.png"))
    contents = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    texts = [file.with_suffix(".txt").read_text(encoding="utf-8") for file in files]
    columns = {
        "image": contents,
        "before": [*contents[3:], *contents[:3]],
        "text": [[text, f"a {text}"] for text in texts],
    }
    (root / "shards").mkdir()
    for number in range(2):
        part = slice(4 * number, 4 * number + 4)
        table = pa.table({name: values[part] for name, values in columns.items()})
        parquet.write_table(table, root / "shards" / f"{number}.parquet", row_group_size=3)
    with tarfile.open(root / "pictures.tar", "w") as tar:
        for file in sorted(pictures.iterdir()):
            tar.add(file, file.name)


def cases(root: Path) -> dict[str, dict[str, Any]]:
    """{name: changes of the config}"""
    more = {"path": str(root / "more"), "weight": 1.5}
    return {
        "resolutions": {"data__resolutions": [32, 64], "data__flip": True},
        "by-size": {"data__resolutions": [32, 48, 64, 96], "data__at_resolutions": "largest", "data__fit": "pad"},
        "folders": {
            "data__masks": str(root / "masks"),
            "data__mask_background": 0.2,
            "data__max_aspect": 1.5,
            "data__folders": [more | {"resolutions": [32], "micro_batch": 2, "flip": True} | PREFIXED],
        },
        "parquet": {"data__path": str(root / "shards"), "data__reference_columns": ["before"], "data__flip": True},
        "tar": {"data__path": str(root / "pictures.tar"), "data__resolutions": [32, 64], "data__validation": 2},
        "captions": {"data__folders": [more], "data__caption_dropout": 0.2, "data__background": "#204080"},
    }


def run_of(root: Path, name: str, changes: dict[str, Any]) -> tuple[RunConfig, RunDir]:
    cfg = run_config(root / "pictures", **{"train__steps": STEPS, **ONE_RANK, **changes})
    return cfg, make_run(root / "runs", cfg, name)


@pytest.fixture(scope="module")
def alone_trained(folder: Path) -> Callable[[str], Outcome]:
    """Trains a case on one rank, once."""
    return cache(lambda name: train(alone(), *run_of(folder, name, cases(folder)[name])))


NAMES = ("resolutions", "by-size", "folders", "captions", "parquet", "tar")
QUICK = [name if name == "folders" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_trains_what_one_trains(
    folder: Path, alone_trained: Callable[[str], Outcome], name: str, ranks: int
) -> None:
    cfg, run = run_of(folder, f"{name}-{ranks}", cases(folder)[name] | RANKS[ranks])
    found, expected = run_ranks(ranks, train, cfg, run)[0], alone_trained(name)
    assert max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)) <= 1e-6
    assert difference(found.weights, expected.weights) <= 1e-6


@pytest.mark.parametrize("name", QUICK)
def test_a_run_that_goes_on_trains_what_it_would_have_bit_for_bit(
    folder: Path, alone_trained: Callable[[str], Outcome], name: str
) -> None:
    cfg, run = run_of(folder, f"{name}-resumed", cases(folder)[name])
    first, second = in_two_parts(alone(), cfg, run)
    assert first + second.losses == alone_trained(name).losses
    assert difference(second.weights, alone_trained(name).weights) == 0.0


# --- what is trained --------------------------------------------------------------------------------------------------


def source_of(root: Path, name: str, changes: dict[str, Any]) -> tuple[ImageSource, list[str]]:
    """The data of a run, and its warnings."""
    cfg, run = run_of(root, name, changes)
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, alone(), root / "runs" / "cache", events.append)
    trainer.close()
    assert isinstance(trainer.data, ImageSource)
    return trainer.data, [event.message for event in events if isinstance(event, WarningEvent)]


def drawn(source: ImageSource, steps: int) -> list[ImageItem]:
    """The items of the first steps of four samples."""
    batches = source.batch_sampler(BatchSizes(4), None)
    return [item for step in range(steps) for item in batches.batch(step)]


def test_each_image_occurs_once_at_each_resolution_and_half_of_them_are_mirrored(folder: Path) -> None:
    source, _ = source_of(folder, "occurrences", {"data__resolutions": [32, 64], "data__flip": True})
    images = source.data.train
    assert source.samples_of_an_epoch == 16
    assert Counter(one.image.path.name for one in images) == {f"{number:02d}.png": 2 for number in range(8)}
    assert sorted({one.size for one in images if one.image.path.name == "00.png"}) == [Size(32, 32), Size(64, 64)]
    items = drawn(source, 100)
    epochs = [sorted(item.index for item in items[first : first + 16]) for first in range(0, 400, 16)]
    assert epochs == [list(range(16))] * 25
    assert 150 <= sum(item.is_mirrored for item in items) <= 250
    assert len({(item.index, item.is_mirrored) for item in items}) == 32


def test_a_mirrored_item_is_the_mirrored_image_with_its_mirrored_mask(folder: Path, tmp_path: Path) -> None:
    for name in ("pictures", "masks"):
        (tmp_path / name).mkdir()
        for file in sorted((folder / name).glob("*.png")):
            with Image.open(file) as image:
                ImageOps.mirror(image).save(tmp_path / name / file.name)
    for file in (folder / "pictures").glob("*.txt"):
        shutil.copy(file, tmp_path / "pictures")
    plain, _ = source_of(folder, "flips", {"data__flip": True, "data__masks": str(folder / "masks")})
    turned, _ = source_of(tmp_path, "flips", {"data__masks": str(tmp_path / "masks")})
    for number in range(8):
        flipped = plain.example(ImageItem(number, False, is_mirrored=True))
        expected = turned.example(ImageItem(number, False))
        assert flipped.keys() == expected.keys()
        # Another process may have encoded some of them, with another number of threads.
        assert max(float((flipped[key] - expected[key]).abs().max()) for key in expected) < 1e-5


def test_each_sample_takes_one_of_an_image_s_captions(folder: Path) -> None:
    source, _ = source_of(folder, "texts", {"data__path": str(folder / "more")})
    assert [len(one.texts) for one in source.data.train] == [2] * 4
    assert len({text for one in source.data.train for text in one.texts}) == 8
    items = drawn(source, 50)
    assert {(item.index, item.caption) for item in items} == {(index, one) for index in range(4) for one in (0, 1)}
    first, second = (source.example(ImageItem(0, False, caption)) for caption in (0, 1))
    assert torch.equal(first["latents"], second["latents"])
    assert not torch.equal(first["prompt_embeds"], second["prompt_embeds"])


def test_borders_of_a_padded_image_have_no_weight(folder: Path) -> None:
    changes = {"data__fit": "pad", "data__max_aspect": 1}
    source, _ = source_of(folder, "borders", changes)
    names = [one.image.path.name for one in source.data.train]
    masks = {name: source.example(ImageItem(number, False))["mask"] for number, name in enumerate(names)}
    assert masks["00.png"].unique().tolist() == [1.0]
    height, width = masks["00.png"].shape
    wide = masks["01.png"]  # 96 x 48 in 64 x 64: a quarter of the height is border, above and below
    assert torch.equal(wide[: height // 4], torch.zeros(height // 4, width))
    assert torch.equal(wide[height // 4 : -height // 4], torch.ones(height // 2, width))


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_a_reference_is_framed_as_its_image_so_that_an_edit_keeps_its_place(folder: Path, fit: str) -> None:
    changes = {"data__path": str(folder / "more"), "data__references": str(folder / "more-before"), "data__fit": fit}
    if not (folder / "more-before").exists():
        (folder / "more-before").mkdir()
        for file in (folder / "more").glob("*.png"):
            shutil.copy(file, folder / "more-before")
    source, _ = source_of(folder, f"edits-{fit}", changes | {"data__max_aspect": 1.2})
    for number in range(4):
        example = source.example(ImageItem(number, False))
        assert torch.equal(example["latents"], example["reference_0"])


def test_images_that_lose_much_are_left_out_with_a_warning(folder: Path) -> None:
    changes = {"data__fit": "drop", "data__max_aspect": 1, "data__most_cropped": 0.4}
    source, warnings = source_of(folder, "dropped", changes)
    assert sorted(one.image.path.name for one in source.data.train) == ["00.png", "03.png", "06.png"]
    (said,) = [warning for warning in warnings if "drop" in warning]
    assert said == (
        "data.fit: drop leaves out 5 images of which the crop to a bucket would cut off more than 40%: first "
        f"{folder}/pictures/01.png; crop by hand, raise data.most_cropped, or set data.fit: pad"
    )


def test_a_cache_is_shared_by_runs_with_one_and_with_several_resolutions(folder: Path) -> None:
    source_of(folder, "small", {"data__resolution": 32})
    source_of(folder, "large", {"data__resolution": 64})
    examples = folder / "runs" / "cache" / "examples"
    before = sorted(file.name for file in examples.rglob("*.safetensors"))
    source_of(folder, "both", {"data__resolutions": [32, 64]})
    assert before and sorted(file.name for file in examples.rglob("*.safetensors")) == before


def test_passes_with_images_of_a_folder_are_as_large_as_it_says(folder: Path) -> None:
    more = {"path": str(folder / "more"), "micro_batch": 1, "resolutions": [32]}
    changes = {"data__folders": [more], "train__micro_batch": 4, "train__batch_size": 4}
    source, _ = source_of(folder, "passes", changes)
    loader = Loader(
        source.batch_sampler(BatchSizes(4), None), source.example, 0, 1, 4, own_micro_batch=source.micro_batch
    )
    items, passes = drawn(source, 20), {True: set[int](), False: set[int]()}
    with loader:
        for step in range(20):
            images = [source.data.train[item.index].image.path.parent.name for item in items[4 * step : 4 * step + 4]]
            passes["more" in images].add(len(loader.micro_batches(step)))
    assert passes == {True: {4}, False: {1}}
