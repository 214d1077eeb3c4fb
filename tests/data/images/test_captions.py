"""Captions that are longer than a model reads: what is said of them, once, whether they are cached or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.runs import alone, make_pictures, run_config
from trainer.config.schema import RunConfig
from trainer.data.encode import encode_data
from trainer.data.images.captions import measure
from trainer.data.images.image_files import scan
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models import families
from trainer.models.base import ImageFamily
from trainer.models.build import encoder_loader
from trainer.run.events import StatusEvent, WarningEvent

LONG = "1" * 60
"""Tokenizers take each digit as one token."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models lie."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures, of which the second and third have long captions."""
    folder = make_pictures(tmp_path / "pictures", 3)
    (folder / "01.txt").write_text(LONG)
    (folder / "02.txt").write_text(LONG + "1")
    return folder


def said(world: World, cfg: RunConfig, cache: Path) -> tuple[list[str], int]:
    """The warnings of a rank while a run's data are encoded, and how often it said how far that is."""
    events: list[Any] = []
    encode_data(families.make(cfg, cache), encoder_loader(cfg, world), RankContext(cfg, world, cache, events.append))
    progress = [event for event in events if isinstance(event, StatusEvent)]
    return [event.message for event in events if isinstance(event, WarningEvent)], len(progress)


def warnings_of(cfg: RunConfig, cache: Path) -> list[str]:
    """The same without encoding."""
    family = families.make(cfg, cache)
    assert isinstance(family, ImageFamily)
    return list(measure(family, cfg, scan(cfg.data).train).warnings)


def test_captions_and_prompts_that_are_cut_are_reported_with_the_first_and_the_remedy_also_from_the_cache(
    pictures: Path, tmp_path: Path
) -> None:
    sample = {"sample__prompts": ("one", f"[trigger]{LONG}"), "sample__negative": LONG, "data__trigger": "fox"}
    cfg = run_config(pictures, **sample)
    first, encoding = said(alone(), cfg, tmp_path / "cache")
    again, cached = said(alone(), cfg, tmp_path / "cache")
    assert first == [
        f"2 of 3 captions are longer than the model reads, and the end is truncated: first {pictures}/01.png with 92 "
        "tokens, of which text_encoder reads 48; shorten them, or set model.options.max_tokens: 93",
        "sample.prompts.1, sample.negative: longer than the model reads, and the end is truncated: sample.prompts.1 "
        "with 90 tokens, of which text_encoder reads 48; shorten them, or set model.options.max_tokens: 90",
    ]
    assert again == first
    assert (encoding > 0, cached) == (True, 0)
    assert said(alone(), run_config(pictures, model__options={"max_tokens": 93}), tmp_path / "cache")[0] == []


@pytest.mark.slow
def test_of_two_ranks_one_says_it_of_all_captions(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2)
    (first, _), (second, _) = run_ranks(2, said, cfg, tmp_path / "cache")
    assert [sentence.partition(" are longer")[0] for sentence in first] == ["2 of 3 captions"]
    assert second == []


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        (
            "sdxl",
            {},
            "2 of 3 captions are longer than the model reads, and the end is truncated: first {first} with 62 "
            "tokens, of which text_encoder reads 32; shorten them, or set model.options.text_windows: 3",
        ),
        ("sdxl", {"text_windows": 3}, None),
        (
            "sdxl",
            {"text_windows": 2},
            "1 of 3 captions is longer than the model reads, and the end is truncated: first {last} with 63 "
            "tokens, of which text_encoder reads 62; shorten it, or set model.options.text_windows: 3",
        ),
        (
            "sd3",
            {"max_tokens": 64},
            "2 captions are read whole by text_encoder_3 only: text_encoder the first 32 tokens, text_encoder_2 the "
            "first 32 tokens; shorten what all of them should read",
        ),
        (
            "sd3",
            {"without": ("text_encoder_3",)},
            "2 of 3 captions are longer than the model reads, and the end is truncated: first {first} with 62 "
            "tokens, of which text_encoder reads 32; shorten them",
        ),
        ("flux1", {"max_tokens": 64}, None),
        ("bagel", {}, None),
    ],
)
def test_what_is_said_follows_the_encoders_of_the_family(
    pictures: Path, cache: Path, family: str, options: dict[str, Any], expected: str | None
) -> None:
    cfg = run_config(pictures, model={"family": family, "options": options})
    found = [] if expected is None else [expected.format(first=pictures / "01.png", last=pictures / "02.png")]
    assert warnings_of(cfg, cache) == found
