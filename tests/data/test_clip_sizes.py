"""The size of a clip on its way from a file to bucket, cache, plan and sample, with a toy family that makes clips."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.models.common import model_of
from tests.plan.common import planned, run
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.config import families as facts
from trainer.config.families import refused
from trainer.config.size import Size
from trainer.data.encode import encode_data
from trainer.data.images.buckets import Buckets, bucket_sizes, images_per_bucket
from trainer.data.images.image_io import ImageFile
from trainer.data.images.image_source import EncodedData, ImageSampler
from trainer.data.prompts import PromptEncoder
from trainer.data.source import Generate
from trainer.distributed.context import RankContext
from trainer.models import families
from trainer.models.base import ImageFamily
from trainer.models.build import encoder_loader
from trainer.models.families.flux2 import Flux2
from trainer.models.objectives.base import Example
from trainer.plan.simulate.phases import SAMPLING
from trainer.plan.simulate.sizes import sample_input_of
from trainer.run.events import AnyEvent, SampleEvent, StatusEvent
from trainer.run.samples import CLIP, IMAGE, Sample
from trainer.train.log import RunLog
from trainer.train.sampling import SampleSchedule

FRAMES = 9


@dataclass(frozen=True, slots=True)
class ClipFile(ImageFile):
    """A file with several frames."""

    @property
    def size(self) -> Size:
        return Size(self.width, self.height, FRAMES)


class Loops(Flux2):
    """Trains each image as a clip in which it stands still."""

    frames = (1, 5, FRAMES)

    def drawn_size(self, size: Size, resolution: int) -> Size:
        return Size(resolution, resolution, FRAMES)

    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        still = super().encode_image(encoder, image)["latents"]
        return {"latents": still.unsqueeze(1).repeat(1, FRAMES, 1, 1)}


class LoopSampler(ImageSampler):
    def prepare(self) -> Generate:
        still = super().prepare()
        return lambda model, index, rng: Sample(self.kind(index), b"a clip", still(model, index, rng).content)


def test_a_clip_goes_to_the_bucket_of_its_shape_with_all_of_its_frames() -> None:
    buckets = Buckets({side: bucket_sizes(side, 16, 2.0) for side in (64, 128)})
    clip, still = ClipFile("a.mp4", 600, 300), ImageFile("a.png", 600, 300)
    assert buckets.of_image(still, (64, 128)) == ((64, Size(80, 48)), (128, Size(160, 96)))
    assert buckets.of_image(clip, (64, 128)) == ((64, Size(80, 48, FRAMES)), (128, Size(160, 96, FRAMES)))


def test_clips_are_counted_apart_from_the_stills_of_their_bucket() -> None:
    sizes = bucket_sizes(64, 16, 2.0)
    tall, wide = sizes[0], sizes[-1]
    chosen = [Size(*wide.frame, 9), wide, tall, Size(*wide.frame, 5), wide]
    counted = images_per_bucket(chosen, sizes)
    assert list(counted.items()) == [(tall, 1), (wide, 2), (Size(*wide.frame, 5), 1), (Size(*wide.frame, 9), 1)]


@dataclass(frozen=True)
class Bench:
    """Encodes the same pictures for one family after another."""

    pictures: Path
    root: Path

    def encode(self, kind: type[ImageFamily], **changes: Any) -> tuple[EncodedData, ImageSampler, list[AnyEvent]]:
        cfg, said, world = run_config(self.pictures, **changes), [], alone()
        context = RankContext(cfg, world, self.root / "cache", said.append)
        family, load = kind(cfg.model, cfg.objective, self.root / "cache" / "models"), encoder_loader(cfg, world)
        data = encode_data(family, load, context)
        encoder = PromptEncoder(family, context, data.cache, data.origin)
        return data, LoopSampler(cfg, family, load, data, encoder), said


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("clips")
    return Bench(make_pictures(root / "pictures", 3), root)


def keys_by_hand(data: EncodedData, sizes: Mapping[int, str], *more: str) -> list[str]:
    digests = [hashlib.sha256(one.image.path.read_bytes()).hexdigest() for one in data.train]
    texts = ["\x1f".join((data.origin, "image", digest, sizes[at], *more)) for at, digest in enumerate(digests)]
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_the_key_of_a_clip_has_its_frames_and_that_of_a_still_is_unchanged(bench: Bench) -> None:
    stills, _, _ = bench.encode(Flux2)
    clips, _, _ = bench.encode(Loops)
    assert [one.pixels.latents for one in stills.train] == keys_by_hand(
        stills, dict(enumerate(("(64, 64)", "(80, 48)", "(48, 80)")))
    )
    assert [one.pixels.latents for one in clips.train] == keys_by_hand(
        clips, dict.fromkeys(range(3), f"(64, 64, {FRAMES})"), "whole"
    )
    assert clips.cache.read(clips.train[0].pixels.latents)["latents"].shape[1] == FRAMES


def test_a_second_start_finds_clips_in_their_sizes(bench: Bench) -> None:
    first, _, _ = bench.encode(Loops)
    second, _, said = bench.encode(Loops)
    assert [event for event in said if isinstance(event, StatusEvent)] == []
    assert [one.size for one in second.train] == [Size(64, 64, FRAMES)] * 3
    assert [one.pixels for one in second.train] == [one.pixels for one in first.train]


def test_a_plan_counts_the_pixels_of_all_frames_of_a_sample() -> None:
    drawn = ("sample.every=10", "sample.prompts=[a]", "sample.size=[640,320]", "train.checkpointing=full")
    assert sample_input_of(run("flux2 klein-4b", *drawn)).pixels == 640 * 320
    assert sample_input_of(run("flux2 klein-4b", *drawn, "sample.frames=9")).pixels == 9 * 640 * 320
    still, clip, large = (
        next(phase.peak for phase in planned("flux2 klein-4b", *drawn, more).phases if phase.name == SAMPLING)
        for more in ("sample.frames=1", "sample.frames=9", "sample.size=[1920,960]")
    )
    assert still < clip == large


def test_a_clip_is_written_with_the_suffix_and_the_picture_of_its_kind(bench: Bench) -> None:
    sample = {"every": 2, "prompts": ["a fox"], "size": (32, 32), "steps": 1}
    _, stills, _ = bench.encode(Loops, sample=sample)
    _, clips, _ = bench.encode(Loops, sample=sample | {"frames": FRAMES})
    assert (stills.kind(0), clips.kind(0)) == (IMAGE, CLIP)
    cfg, events, world = run_config(bench.pictures, sample=sample), [], alone()
    folder = make_run(bench.root, cfg, "run")
    schedule = SampleSchedule(clips, 0, folder, world, RunLog(folder, world, events.append), before=0)
    model = model_of(families.make(cfg, bench.root / "cache"))
    (file,) = schedule.generate(model, clips.prepare(), step=2)
    assert (file.name, file.read_bytes()) == ("step-000002-0.mp4", b"a clip")
    with Image.open(f"{file}.png") as poster:
        assert poster.size == (32, 32)
    assert [event.path for event in events if isinstance(event, SampleEvent)] == [f"samples/{file.name}"]


@pytest.mark.parametrize("name", families.names())
def test_a_family_of_stills_refuses_a_sample_of_several_frames_in_a_sentence(name: str, tmp_path: Path) -> None:
    cfg = run_config(tmp_path, model__family=name, sample__frames=9)
    (sentence,) = (str(one) for one in refused(cfg) if one.field == "sample.frames")
    if families.get(name).trains_on == "text":
        assert sentence == f"sample.frames: has no effect for {name}, which is trained on text; leave it out"
    else:
        assert sentence == f"sample.frames: {name} has no samples of 9 frames; use 1"
    known = facts.of(name)
    assert known is not None and not known.reads("sample.frames")


def test_a_family_of_clips_names_the_number_of_frames_that_is_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts.of("flux2")
    assert known is not None
    known = replace(known, frames=Loops.frames)
    monkeypatch.setattr(facts, "of", lambda name: known)
    found = [list(map(str, refused(run_config(tmp_path, sample__frames=frames)))) for frames in (5, 8)]
    assert found == [[], ["sample.frames: flux2 has no samples of 8 frames; use 9"]]
    assert known.reads("sample.frames")
