"""Runs of a model that draws and answers: as one process trains them, continued, sampled, exported."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.bench import Bench
from tests.distributed import run_ranks
from tests.models.common import batch_of, edit_json, examples, model_of, picture, question_of
from tests.runs import Outcome, alone, difference, make_pictures, run_config, steps_of, train
from trainer.checkpoint.restore import StoredWeights
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes, ImageBatchSampler
from trainer.data.mixed import question_files
from trainer.data.mixed.mixed_batches import DrawnItem, MixedBatchSampler, QuestionItem
from trainer.export.export import export
from trainer.models import families
from trainer.models.base import MultimodalFamily
from trainer.models.build import build_model
from trainer.rng import SampleRng
from trainer.run import manifest
from trainer.run.events import SampleEvent, StepEvent, ValidationEvent
from trainer.system.errors import InputError

TOLERANCE = 1e-6
ANSWERS = ("red", "green", "a blue one")


def make_questions(pictures: Path, count: int = 9) -> Path:
    """A .jsonl next to the pictures."""
    names = sorted(file.name for file in pictures.glob("*.png"))
    rows = [
        {"image": names[i % len(names)], "question": f"What is {i}?", "answer": ANSWERS[i % len(ANSWERS)]}
        for i in range(count)
    ]
    file = pictures / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def both_config(pictures: Path, **changes: Any) -> RunConfig:
    """A run of seconds of a tiny model that draws and answers. changes: as `run_config` has them."""
    base: dict[str, Any] = {"model": {"family": "bagel"}, "data__questions": str(pictures / "questions.jsonl")}
    return run_config(pictures, **base | changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("both")
    pictures = make_pictures(root / "pictures")
    make_questions(pictures)
    return Bench(root, pictures, both_config, KINDS)


KINDS: dict[str, dict[str, Any]] = {"full": {"adapter__type": "none", "optim__ema": 0.9}}


def test_two_ranks_train_what_one_process_trains(bench: Bench) -> None:
    found = bench.trained("two", 2, parallel__strategy="full", train__checkpointing="full", **KINDS["full"])
    expected = bench.reference("full")
    assert found.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
    # They are averages: each rank keeps those of its shards.
    assert difference(seen(found), seen(expected)) <= TOLERANCE
    assert [event.losses for event in steps_of(found.events)] == [
        pytest.approx(event.losses, abs=1e-5, rel=1e-5) for event in steps_of(expected.events)
    ]


def seen(outcome: Outcome) -> dict[str, Tensor]:
    """Without the encoder's key biases, which add the same to all that a softmax compares: their gradient is nothing
    but rounding, which Adam makes steps of."""
    return {
        name: tensor for name, tensor in outcome.weights.items() if ".vision." not in name or "to_k.bias" not in name
    }


def mean(steps: Sequence[StepEvent], name: str) -> float:
    values = [step.losses[name] for step in steps]
    return sum(values) / len(values)


@pytest.mark.slow
def test_both_losses_fall_in_thirty_steps(bench: Bench) -> None:
    changes = {"adapter__type": "none", "optim__lr": 3e-3, "train__steps": 30, "train__batch_size": 8}
    found = steps_of(bench.trained("falling", 2, **changes).events)
    assert len(found) == 30
    for name, most in (("images", 0.85), ("text", 0.5)):
        assert mean(found[-5:], name) < most * mean(found[:5], name)
    weighted = [event.losses["images"] + event.losses["text"] for event in found]
    assert [event.loss for event in found] == pytest.approx(weighted, abs=1e-5)


def test_the_weights_of_images_and_answers_are_the_configs(bench: Bench) -> None:
    changes = {"objective__text_weight": 2.0, "objective__mse_weight": 0.5}
    (event,) = steps_of(bench.trained_here("heavy", **changes, train__steps=1).events)
    assert event.loss == pytest.approx(0.5 * event.losses["images"] + 2 * event.losses["text"], abs=1e-5)


@pytest.mark.parametrize("field", ["data__questions", "data__path"])
def test_one_kind_of_data_is_enough(bench: Bench, field: str) -> None:
    found = steps_of(bench.trained_here(f"without-{field}", **{field: None}, train__steps=2).events)
    assert {*found[-1].losses} == {"images" if field == "data__questions" else "text"}


@pytest.mark.slow
def test_pictures_and_answers_are_samples_on_every_number_of_ranks(bench: Bench) -> None:
    changes = {
        "sample__every": 2,
        "sample__prompts": ["one", "two"],
        "sample__size": (64, 48),
        "sample__steps": 2,
        "sample__questions": ["What is it?"],
        "sample__images": [str(bench.data / "00.png")],
        "sample__tokens": 6,
        "train__steps": 2,
        "data__validation": 2,
        "data__validation_every": 2,
    }
    answers: list[list[tuple[int, str, str]]] = []
    for ranks in (1, 2):
        cfg, run = bench.run(f"samples-{ranks}", parallel__devices=ranks, **changes)
        events = run_ranks(ranks, train, cfg, run)[0].events
        samples = [event for event in events if isinstance(event, SampleEvent)]
        assert [(event.step, event.index) for event in samples] == [(step, i) for step in (0, 2) for i in range(3)]
        with Image.open(run.path / samples[0].path) as image:
            assert image.size == (64, 48)
        assert Path(samples[2].path).suffix == ".txt"
        assert (run.path / samples[2].path).read_text() == samples[2].text
        answers.append([(event.step, event.prompt, event.text) for event in samples])
        (held_out,) = [event for event in events if isinstance(event, ValidationEvent)]
        assert held_out.loss == pytest.approx(held_out.losses["images"] + held_out.losses["text"])
    assert answers[0] == answers[1]


def trained_parameters(bench: Bench, **changes: Any) -> set[str]:
    cfg = bench.config(**changes)
    return {*build_model(cfg, families.make(cfg, bench.root / "cache")).trainables}


def test_each_part_is_trained_as_the_config_says(bench: Bench) -> None:
    everything = trained_parameters(bench, adapter__type="none")
    parts = {part: trained_parameters(bench, adapter__type="none", model__train={part: "full"}) for part in PARTS}
    assert everything == set().union(*parts.values())
    assert len(everything) == sum(map(len, parts.values()))
    for part, prefix in PARTS.items():
        assert any(prefix in name for name in parts[part])
    mixed = trained_parameters(bench, model__train={"generation": "adapter", "vision": "full"})
    assert {name for name in mixed if ".vision." in name} == parts["vision"]
    others = mixed - parts["vision"]
    assert others and all(".generation." in name and "lora" in name for name in others)


PARTS = {
    "understanding": "layers.1.understanding.to_q",
    "generation": "layers.1.generation.gate",
    "vision": "vision.layers.0.up",
    "connectors": "vision_connector.0",
}


def test_an_adapter_for_a_layer_of_a_frozen_part_is_refused(bench: Bench) -> None:
    changes = {"model__train": {"generation": "adapter"}, "adapter__targets": ["vision_connector.0"]}
    with pytest.raises(InputError, match=r"model\.train or adapter\.modules_to_save trains it in another way"):
        trained_parameters(bench, **changes)


def tensors_of(file: Path) -> dict[str, Tensor]:
    return load_file(file)


def test_a_full_fine_tune_is_written_as_the_published_folder_and_trained_further(bench: Bench) -> None:
    cfg, run = bench.run("published", adapter__type="none", export__dtype="fp32", train__steps=2)
    weights = train(alone(), cfg, run).weights
    (exported,) = export(cfg, run, bench.root / "cache")
    source = families.make(cfg, bench.root / "cache").folder
    with safe_open(source / "ema.safetensors", "pt") as before:
        assert {*tensors_of(exported.path / "ema.safetensors")} == {*before.keys()}
    assert {file.name for file in exported.path.iterdir()} == {file.name for file in source.iterdir()}
    again = bench.config(model__path=str(exported.path), adapter__type="none")
    family = families.make(again, bench.root / "cache")
    component = family.components[0]
    entries = family.weights(component).entries
    for name, tensor in weights.items():
        stored = tensors_of(entries[name.removeprefix(f"{component}.")].file)[
            entries[name.removeprefix(f"{component}.")].key
        ]
        assert torch.equal(stored, tensor)
    assert len(bench.trained_here("further", model__path=str(exported.path), train__steps=1).losses) == 1


def test_an_adapter_goes_on_from_its_file_and_merges_into_the_published_file(bench: Bench) -> None:
    cfg, run = bench.run("adapter", export__dtype="fp32", optim__lr=1e-2)
    weights = train(alone(), cfg, run).weights
    (file, *_) = export(cfg, run, bench.root / "cache")
    with safe_open(file.path / "adapter_model.safetensors", "pt") as stored:
        assert {
            "base_model.model.language_model.model.layers.0.self_attn.q_proj_moe_gen.lora_A.weight",
            "base_model.model.vit_model.vision_model.encoder.layers.1.mlp.fc2.lora_B.weight",
        } < {*stored.keys()}
    _, other = bench.run("goes-on", adapter={"type": "lora", "rank": 4, "start": str(file.path)}, optim__lr=1e-9)
    went_on = train(alone(), other.config(), other)
    assert difference(went_on.weights, weights) <= 1e-6
    merged = export(cfg.exporting("merged", None, None), run, bench.root / "cache", folder=bench.root / "merged")
    found = bench.trained_here("merged-one", model__path=str(merged[0].path), train__steps=1, optim__lr=1e-9)
    assert found.losses == pytest.approx(went_on.losses[:1], abs=1e-5)
    assert {*StoredWeights(manifest.complete(run.checkpoints)[-1])} == {*weights}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", 'no "image"'),
        ('{"image": "00.png", "question": "what?"}', 'no "answer"; each line is a JSON object with image'),
        ('{"image": "00.png", "question": " ", "answer": "a"}', 'no "question"'),
        ('{"image": "none.png", "question": "q", "answer": "a"}', "none.png: cannot be read"),
    ],
)
def test_a_question_that_cannot_be_used_is_named_with_its_line(bench: Bench, line: str, message: str) -> None:
    good = '{"image": "00.png", "question": "q", "answer": "a"}'
    file = bench.data / "bad.jsonl"
    file.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        question_files.of_config(bench.config(data__questions=str(file)).data)
    assert str(error.value).startswith(f"{file}:3: ")
    assert message in str(error.value)


def test_an_image_that_cannot_be_read_may_be_left_out(bench: Bench) -> None:
    file = bench.data / "left.jsonl"
    rows = [{"image": name, "question": "q", "answer": "a"} for name in ("none.png", "00.png")]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    found = question_files.of_config(bench.config(data__questions=str(file), data__bad_image="warn").data)
    assert [image.path.name for row in found.train for image in row.images] == ["00.png"]
    assert found.warnings[0].startswith(f"left out: {file}:1: ")


def test_setting_all_questions_aside_is_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"data\.validation: 9 of the 9 questions of .* leaves none to train on"):
        question_files.of_config(bench.config(data__validation=9).data)


def test_questions_are_spread_evenly_and_do_not_depend_on_the_batch_size() -> None:
    def sampler(size: int, *former: tuple[int, int]) -> MixedBatchSampler:
        drawn, asked = (ImageBatchSampler(lambda item: None, [1.0] * count, BatchSizes(1), 0) for count in (5, 4))
        return MixedBatchSampler(drawn, asked, 0.25, BatchSizes(size, former))

    ones = [sampler(1).batch(step)[0] for step in range(24)]
    assert [isinstance(item, QuestionItem) for item in ones] == [False, False, False, True] * 6
    assert {item.image.index for item in ones if isinstance(item, DrawnItem)} == set(range(5))
    assert {item.number for item in ones if isinstance(item, QuestionItem)} == set(range(4))
    fours = sampler(4)
    assert [item for step in range(6) for item in fours.batch(step)] == ones
    assert fours.batch(2) == tuple(ones[8:12])
    assert sampler(2, (4, 3), (8, 1)).batch(4) == tuple(ones[20:22])


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"data__resolution": 1040}, "data.resolution"), ({"sample__size": (64, 1280)}, "sample.size")],
)
def test_a_picture_larger_than_the_network_can_draw_is_refused(
    bench: Bench, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError, match=f"{field}: .* is more than the 1024 pixels that bagel supports; lower it"):
        families.make(bench.config(**changes), bench.root / "cache")


def test_a_mask_weights_the_errors_of_its_pixels(bench: Bench) -> None:
    family = families.make(bench.config(), bench.root / "cache")
    model, rng = model_of(family), SampleRng(0, [0, 1])
    drawn, asked = {**examples(family, 1)[0]}, question_of(family, picture(32, 32), "what?", "a fox")
    whole = family.loss(model, batch_of(family, [asked, drawn]), rng).parts
    height, width = drawn["latents"].shape[-2:]
    halves = [torch.zeros(height, width), torch.zeros(height, width)]
    halves[0][:, :1], halves[1][:, 1:] = 1, 1
    parts = [family.loss(model, batch_of(family, [asked, {**drawn, "mask": half}]), rng).parts for half in halves]
    torch.testing.assert_close(parts[0][0, 0] + parts[1][0, 0], whole[0, 0], atol=1e-5, rtol=0)
    assert all(0 < part[0, 0] < whole[0, 0] and part[1, 0] == whole[1, 0] for part in parts)


def test_a_folder_that_is_no_such_model_is_refused_with_what_is_missing(bench: Bench, tmp_path: Path) -> None:
    folder = families.make(bench.config(), bench.root / "cache").folder

    def refusal(change: Callable[[Path], None]) -> str:
        copy = shutil.copytree(folder, tmp_path / str(len(list(tmp_path.iterdir()))))
        change(copy)
        with pytest.raises(InputError) as error:
            family = families.make(bench.config(model__path=str(copy)), bench.root / "cache")
            assert isinstance(family, MultimodalFamily)
            question_of(family, picture(32, 32), "what?", "a fox")
            family.loss(model_of(family), batch_of(family, examples(family, 1)), SampleRng(0, [0]))
        return str(error.value)

    assert "has no hidden_size" in refusal(lambda copy: (copy / "llm_config.json").write_text("{}") and None)
    assert "latent_patch_size is 4" in refusal(lambda copy: edit_json(copy / "config.json", latent_patch_size=4))
    assert "max_latent_size is 32" in refusal(lambda copy: edit_json(copy / "config.json", max_latent_size=32))
    assert "neither ema.safetensors" in refusal(lambda copy: (copy / "ema.safetensors").unlink())
    assert "belong to different models" in refusal(
        lambda copy: edit_json(copy / "llm_config.json", num_hidden_layers=1)
    )
    other = "model.options.architecture: 7b-mot has 28 layers of width 3584"
    with pytest.raises(InputError, match=re.escape(other)):
        options = {"architecture": "7b-mot"}
        families.make(bench.config(model__path=str(folder), model__options=options), bench.root / "cache")


def test_other_models_refuse_questions(bench: Bench) -> None:
    cfg = run_config(bench.data, data__questions=str(bench.data / "questions.jsonl"))
    with pytest.raises(InputError, match=r"data\.questions: has no effect for flux2"):
        families.make(cfg, bench.root / "cache")
