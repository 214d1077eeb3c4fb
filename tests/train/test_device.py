"""A whole run on an accelerator: `pytest -m gpu`; with `--device cpu` the same tests say that they themselves work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from tests.commands import PRESET, launch_py
from tests.runs import make_pictures, steps_of
from trainer.run.events import EventReader, ExportEvent, RankReader, StepEvent
from trainer.run.folder import RunDir

pytestmark = pytest.mark.gpu

STEPS = 6
PRECISIONS = ("bf16", "fp32")
EVERY_RUN = (f"train.steps={STEPS}", "parallel.devices=1", "parallel.strategy=none", "optim.lr=1e-3")
EVERY_RUN += ("train.compile=false",)  # compiling takes half a minute of each start


@dataclass(frozen=True)
class Trained:
    """A run that ended well."""

    run: RunDir
    steps: list[StepEvent]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset with its pictures; all runs share its cache."""
    folder = tmp_path_factory.mktemp("device")
    make_pictures(folder / "pictures", 4)
    (folder / "fox.yaml").write_text(PRESET, encoding="utf-8")
    words = PRESET.replace("family: flux2", "family: causal_lm").replace("resolution: 64", "length: 128")
    (folder / "words.yaml").write_text(words, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, device: str) -> Run:
    """run(name, overrides): train on the device to the end."""
    return lambda name, *overrides, **options: train(folder, name, f"parallel.device={device}", *overrides, **options)


@pytest.fixture(scope="module")
def plain(run: Run) -> Trained:
    """The fp32 run without anything special."""
    return run("plain")


def train(folder: Path, name: str, *overrides: str, preset: str = "fox.yaml") -> Trained:
    done = launch_py(folder, "--headless", preset, "--run-dir", name, *EVERY_RUN, *overrides)
    assert done.returncode == 0, done.stderr
    return finished(folder / name)


def finished(path: Path) -> Trained:
    return Trained(RunDir.open(path), steps_of(EventReader(path / "events.jsonl").read()))


def test_the_losses_are_those_of_the_cpu(folder: Path, plain: Trained) -> None:
    on_cpu = train(folder, "cpu", "parallel.device=cpu")
    assert plain.losses == pytest.approx(on_cpu.losses, rel=1e-4)


def test_a_run_ends_with_an_export_that_diffusers_reads_back(plain: Trained) -> None:
    exports = [e for e in EventReader(plain.run.events_file).read() if isinstance(e, ExportEvent)]
    assert [(plain.run.path / export.path).is_file() for export in exports] == [True]


def test_the_phases_of_a_step_fill_it(plain: Trained) -> None:
    for step in plain.steps:
        phases = step.seconds_data + step.seconds_forward + step.seconds_backward + step.seconds_optimizer
        assert 0.5 * step.seconds <= phases <= 1.05 * step.seconds


def test_the_memory_of_the_device_is_recorded(plain: Trained) -> None:
    last = RankReader(plain.run.rank_file(0)).read()[-1]
    assert 0 < last.allocated <= last.peak <= last.limit


def test_bf16_trains_with_almost_the_losses_of_fp32(run: Run, plain: Trained) -> None:
    losses = run("bf16", "train.precision=bf16").losses
    assert losses == pytest.approx(plain.losses, rel=0.1)
    assert losses != plain.losses


@pytest.mark.parametrize("preset", ["fox.yaml", "words.yaml"])
def test_compiled_blocks_train_with_the_losses_of_uncompiled_ones(
    folder: Path, run: Run, device: str, preset: str
) -> None:
    rows = (write_rows(folder, f"rows-{preset}", [{"messages": talk(number)} for number in range(24)]),)
    changes = (*rows, "data.chat_template=chatml") if preset == "words.yaml" else ()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiling = ("train.compile=true", f"train.compile_backend={backend}")
    uncompiled = run(f"uncompiled-{preset}", *changes, preset=preset)
    compiled = run(f"compiled-{preset}", *changes, *compiling, preset=preset)
    assert compiled.losses == pytest.approx(uncompiled.losses, rel=1e-4)


@pytest.mark.parametrize("adapter", ["dora", "loha", "lokr", "diag-oft", "boft"])
def test_every_adapter_trains_in_bf16_with_almost_the_losses_of_fp32(run: Run, adapter: str) -> None:
    kind = (f"adapter.type={adapter}", "optim.lr=1e-4", "train.steps=3")
    losses = [run(f"{adapter}-{precision}", *kind, f"train.precision={precision}").losses for precision in PRECISIONS]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


def test_a_unet_trains_its_convolutions_and_text_encoders(run: Run) -> None:
    parts = "model.train={unet: adapter, text_encoder: adapter, text_encoder_2: adapter}"
    trained = run("unet", "model.family=sdxl", parts, "adapter.type=locon", "train.precision=bf16", "optim.lr=1e-4")
    assert all(math.isfinite(loss) for loss in trained.losses)


@pytest.mark.parametrize(
    "changes",
    [
        ("train.checkpointing=full",),
        ("parallel.strategy=full",),
        ("parallel.strategy=full", "parallel.cpu_offload=true"),
        ("parallel.offload_blocks=1.0",),
        ("parallel.strategy=full", "parallel.offload_blocks=0.5"),
    ],
    ids=["checkpointing", "sharded", "offloaded", "all-blocks", "half-the-blocks-sharded"],
)
def test_what_saves_memory_changes_no_loss(run: Run, plain: Trained, changes: tuple[str, ...]) -> None:
    losses = run("-".join(changes).replace("=", "-"), *changes).losses
    assert losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_run_goes_on_where_it_ended(folder: Path, run: Run, plain: Trained) -> None:
    half = run("resumed", f"train.steps={STEPS // 2}").run
    done = launch_py(folder, "--resume", half.path, f"train.steps={STEPS}")
    assert done.returncode == 0, done.stderr
    again = run("again")
    # Two runs may differ by the order in which a GPU adds numbers up: then a resumed one may, too.
    noise = max(abs(a - b) for a, b in zip(again.losses, plain.losses, strict=True))
    resumed = finished(half.path)
    assert [step.step for step in resumed.steps] == list(range(1, STEPS + 1))
    assert all(
        math.isclose(a, b, abs_tol=4 * noise, rel_tol=0) for a, b in zip(resumed.losses, plain.losses, strict=True)
    )


def test_a_model_that_draws_and_answers_trains_and_samples_as_on_the_cpu(folder: Path, run: Run) -> None:
    rows = [{"image": f"pictures/{i:02d}.png", "question": f"What is {i}?", "answer": "red"} for i in range(4)]
    asked = folder / "questions.jsonl"
    asked.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    changes = (
        *("model.family=bagel", f"data.questions={asked}", "train.batch_size=2", "train.micro_batch=2"),
        *("sample.every=3", 'sample.questions=["What is it?"]', "sample.tokens=4"),
        f"sample.images=[{folder / 'pictures' / '00.png'}]",
    )
    found = run("answers", *changes)
    on_cpu = train(folder, "answers-cpu", "parallel.device=cpu", *changes)
    assert found.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    assert {path.suffix for path in found.run.samples.iterdir()} == {".txt"}


def talk(number: int) -> list[dict[str, str]]:
    """A question and its answer."""
    return [{"role": "user", "content": f"{number} + 1"}, {"role": "assistant", "content": f"It is {number + 1}."}]


def write_rows(folder: Path, name: str, rows: list[dict[str, object]]) -> str:
    """A folder with these rows, as data.path."""
    (folder / name).mkdir()
    (folder / name / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return f"data.path={name}"


def test_a_language_model_trains_on_packed_conversations_and_samples_as_on_the_cpu(folder: Path, run: Run) -> None:
    data = write_rows(folder, "talks", [{"messages": talk(number)} for number in range(24)])
    changes = (
        *(data, "data.chat_template=chatml", "sample.every=3", 'sample.prompts=["1 + 1"]', "sample.tokens=4"),
        *("sample.temperature=0", "sample.chat=on"),
    )
    found = run("talks-run", *changes, preset="words.yaml")
    on_cpu = train(folder, "talks-cpu", "parallel.device=cpu", *changes, preset="words.yaml")
    assert found.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    quantized = ("quantize.format=nf4", "train.precision=bf16", "train.checkpointing=full")
    assert run("talks-nf4", *changes, *quantized, preset="words.yaml").losses == pytest.approx(found.losses, rel=0.1)


def test_preferences_between_answers_train_as_on_the_cpu(folder: Path, run: Run) -> None:
    rows = [{"prompt": f"{i} + 1 = ", "chosen": f"{i + 1}.", "rejected": f"{i}?"} for i in range(24)]
    changes = (write_rows(folder, "pairs", rows), "objective.dpo_beta=0.5")
    found = run("answers-dpo", *changes, preset="words.yaml")
    on_cpu = train(folder, "answers-dpo-cpu", "parallel.device=cpu", *changes, preset="words.yaml")
    assert found.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    assert found.losses[0] == pytest.approx(math.log(2), rel=1e-5)


def test_preferences_between_images_train_as_on_the_cpu(folder: Path, run: Run) -> None:
    (folder / "rejected").mkdir()
    for file in (folder / "pictures").glob("*.png"):
        ImageOps.invert(Image.open(file)).save(folder / "rejected" / file.name)
    changes = ("data.rejected=rejected", "objective.dpo_beta=0.5")
    found = run("images-dpo", *changes)
    on_cpu = train(folder, "images-dpo-cpu", "parallel.device=cpu", *changes)
    assert found.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    assert found.losses[0] == pytest.approx(math.log(2), rel=1e-5)
