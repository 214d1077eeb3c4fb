"""The quickstart as a person runs it, with fewer steps: one command, and everything it leaves behind."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image, ImageStat
from torch import Tensor

from tests.commands import launch_py
from trainer.checkpoint.restore import StoredWeights
from trainer.config.sections import DEMO
from trainer.run.events import AnyEvent, EventReader, RankReader, StatusEvent, StepEvent, ValidationEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import complete

ROOT = Path(__file__).parents[2]
STEPS = 24
FEWER = (
    *(f"train.steps={STEPS}", "data.validation_every=12", f"sample.every={STEPS}", "checkpoint.every=12"),
    "sample.steps=8",
    "sample.prompts=['fox face [trigger]', 'fox face [trigger]']",
)


@dataclass(frozen=True)
class Demo:
    """A finished quickstart."""

    code: int
    out: Sequence[str]
    err: str
    run: RunDir

    def events(self, kind: type | None = None) -> list[Any]:
        events: list[AnyEvent] = EventReader(self.run.events_file).read()
        return [event for event in events if kind is None or isinstance(event, kind)]

    @property
    def export(self) -> Path:
        return Path(self.out[-1])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    done = launch_py(folder, "--headless", ROOT / "presets" / "quickstart.yaml", *FEWER)
    [path] = (folder / "runs").glob("quickstart-*")
    return Demo(done.returncode, done.stdout.splitlines(), done.stderr, RunDir.open(path))


def test_it_ends_with_the_path_of_the_exported_file_on_the_last_line(demo):
    assert (demo.code, demo.err) == (0, "")
    assert demo.export == demo.run.export / "quickstart.safetensors"
    assert demo.export.is_file()


def test_its_events_tell_the_whole_story_in_order(demo):
    states = [event.state for event in demo.events(StatusEvent)]
    assert list(dict.fromkeys(states)) == [
        *("starting", "encoding", "loading", "sampling", "training", "saving", "exporting", "finished")
    ]
    rare = [(event.type, event.step) for event in demo.events() if event.type not in ("status", "step", "warning")]
    assert sorted(rare) == [
        *(("checkpoint", 12), ("checkpoint", 24), ("export", 24), ("length", 0)),
        *(("sample", 0), ("sample", 0), ("sample", 24), ("sample", 24)),
        *(("validation", 12), ("validation", 24)),
    ]
    assert [event.step for event in demo.events(StepEvent)] == list(range(1, STEPS + 1))
    assert [checkpoint.name for checkpoint in complete(demo.run.checkpoints)] == ["step-000012", "step-000024"]


def test_both_ranks_tell_their_memory(demo):
    for rank in range(2):
        reader = RankReader(demo.run.rank_file(rank))
        lines = reader.read()
        whole = demo.run.rank_file(rank).read_text()
        assert reader.num_skipped == 0, whole
        assert {line.rank for line in lines} == {rank}
        assert {line.phase for line in lines} == {"starting", "loading", "sampling", "training", "saving"}, whole
        assert (lines[0].step, lines[-1].step) == (0, STEPS)
        assert all(2**20 < line.allocated <= line.peak <= line.limit for line in lines)


def test_the_model_learns(demo):
    losses = [event.loss for event in demo.events(StepEvent)]
    assert statistics.fmean(losses[-10:]) < statistics.fmean(losses[:10]) - 0.1
    first, last = (event.loss for event in demo.events(ValidationEvent))
    assert last < first


def likeness(one: Path, other: Path) -> float:
    """Correlation of the brightness of two pictures, whatever their colours."""
    with Image.open(one) as a, Image.open(other) as b:
        assert a.size == b.size == (64, 64)
        return float(np.corrcoef(*(np.asarray(image.convert("L")).ravel() for image in (a, b)))[0, 1])


def test_a_sample_at_the_end_comes_from_the_noise_of_the_one_at_the_start(demo):
    """Two foxes: each is later more like itself than like the other."""
    before, after = ([demo.run.samples / f"step-{step:06d}-{index}.png" for index in range(2)] for step in (0, STEPS))
    for index in range(2):
        assert likeness(before[index], after[index]) > likeness(before[1 - index], after[index])


def ground(picture: Path) -> list[float]:
    """Mean colour of the upper left corner, RGB of 255."""
    with Image.open(picture) as image:
        return ImageStat.Stat(image.crop((0, 0, 8, 8))).mean


def test_the_samples_take_the_style(demo):
    """The paper of what is not among the pictures turns from white to yellow, whose blue is 80."""
    assert min(ground(demo.run.samples / "step-000000-0.png")) > 235
    red, green, blue = ground(demo.run.samples / f"step-{STEPS:06d}-0.png")
    assert min(red, green) > 150 > blue


def test_the_report_is_one_file_with_curves_pictures_and_the_config(demo):
    page = demo.run.report.read_text(encoding="utf-8")
    assert re.findall(r"""(?:src|href)=["']?(?!["']?data:image/png;base64,)|@import|url\(""", page) == []
    assert page.count("data:image/png;base64,") == 4
    assert "loss" in page
    assert "checkpointing: none" in page


@torch.no_grad()
def test_diffusers_own_pipeline_adds_to_the_base_exactly_what_was_trained(demo):
    pipeline = Flux2KleinPipeline.from_pretrained(DEMO / "flux2", local_files_only=True)
    numbers = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 16, 128, generator=numbers),
        "encoder_hidden_states": torch.randn(1, 12, 384, generator=numbers),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.cartesian_prod(*map(torch.arange, (1, 4, 4, 1))),
        "txt_ids": torch.cartesian_prod(*map(torch.arange, (1, 1, 1, 12))),
        "return_dict": False,
    }
    [untrained] = pipeline.transformer(**inputs)
    add_trained_updates(dict(pipeline.transformer.named_parameters()), demo.run)
    [trained] = pipeline.transformer(**inputs)

    pipeline = Flux2KleinPipeline.from_pretrained(DEMO / "flux2", local_files_only=True)
    pipeline.load_lora_weights(demo.export.parent, weight_name=demo.export.name, local_files_only=True)
    [loaded] = pipeline.transformer(**inputs)
    assert (trained - untrained).norm() > 0.05 * untrained.norm()
    assert (loaded - trained).norm() < 0.01 * (trained - untrained).norm()


def add_trained_updates(base: dict[str, Tensor], run: RunDir) -> None:
    """W + B A, from the newest checkpoint's own tensors; alpha is the rank, so the scale is 1."""
    weights = StoredWeights(complete(run.checkpoints)[-1])
    for name in weights:
        layer, is_down, _ = name.partition(".lora_A.")
        if is_down:
            parameter = base[f"{layer.removeprefix('transformer.')}.weight"]
            parameter += weights[name.replace(".lora_A.", ".lora_B.")] @ weights[name]
