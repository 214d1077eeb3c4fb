"""What decides whether a cached encoding is used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import alone, make_pictures, run_config
from trainer import encode, families
from trainer.config import RunConfig
from trainer.encode import EncodedData, encode_data
from trainer.events import AnyEvent, StatusEvent
from trainer.families.base import ModelFamily
from trainer.modules import encoder_loader


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("encode") / "pictures", 3)


def encoded(cfg: RunConfig) -> tuple[EncodedData, list[AnyEvent]]:
    """The data of a run, and what was said while it was encoded."""
    cache = Path(cfg.data.path or "").parent / "cache"
    said: list[AnyEvent] = []
    world = alone()
    data = encode_data(cfg, families.make(cfg, cache), encoder_loader(cfg, world), cache, world, said.append)
    return data, said


def test_captions_are_encoded_anew_in_another_precision_and_photos_are_not(pictures: Path) -> None:
    single, _ = encoded(run_config(pictures))
    half, _ = encoded(run_config(pictures, train__precision="bf16"))
    assert single.cache.read(single.empty)["prompt_embeds"].dtype == torch.float32
    assert half.cache.read(half.empty)["prompt_embeds"].dtype == torch.bfloat16
    assert [photo.latents for photo in half.train] == [photo.latents for photo in single.train]


def test_a_second_run_loads_no_encoder(pictures: Path) -> None:
    encoded(run_config(pictures))
    _, said = encoded(run_config(pictures))
    assert [event for event in said if isinstance(event, StatusEvent)] == []


def test_another_way_of_encoding_uses_nothing_of_the_old(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = encoded(run_config(pictures))
    monkeypatch.setattr(encode, "CACHE_VERSION", encode.CACHE_VERSION + 1)
    after, _ = encoded(run_config(pictures))
    assert {photo.latents for photo in after.train}.isdisjoint(photo.latents for photo in before.train)
    assert after.empty != before.empty


def test_the_encoders_are_fingerprinted_once_however_many_photos_there_are(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families.get(run_config(pictures).model.family)
    asked: list[ModelFamily] = []
    fingerprint = family.fingerprint

    def counted(self: ModelFamily) -> str:
        asked.append(self)
        return fingerprint(self)

    monkeypatch.setattr(family, "fingerprint", counted)
    encoded(run_config(pictures))
    assert len(asked) == 1


def test_a_stop_request_while_encoding_keeps_what_is_encoded(tmp_path: Path) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures", 3))
    world, cache, said = alone(), tmp_path / "cache", []
    family, load = families.make(cfg, cache), encoder_loader(cfg, world)
    with pytest.raises(encode.StopRequested):
        encode_data(cfg, family, load, cache, world, said.append, stopping=lambda: len(said) == 3)
    assert len(list((cache / "examples").rglob("*.safetensors"))) == 2
    assert len(encode_data(cfg, family, load, cache, world, said.append).train) == 3
