"""Faults that are planted into models and their files: the certificate must name each, and none where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.audit.run import Model, write_picture
from tests.certificates import BASES, SIZE, Base, examined, ready
from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, ModelConfig, ObjectiveConfig
from trainer.data.images.image_source import EncodedData, ImageSampler
from trainer.models.families import flux1, flux2, qwen_image
from trainer.models.flow_transformer import FlowTransformer
from trainer.models.objectives.base import Batch, Example
from trainer.train.certificate import MOST_PICTURES, Examiner, pictures_within, static_findings
from trainer.view.certificate import FILE, compared, recorded
from trainer.weights import quantization

BY_NAME = {base.name: base for base in BASES}
DEMO, KLEIN, KONTEXT, QWEN = (
    BY_NAME[name]
    for name in (
        "flux2 demo",
        "flux2 klein-4b tiny edits",
        "flux1 kontext tiny edits",
        "qwen_image qwen-image-edit-2511 tiny edits",
    )
)
Patch = pytest.MonkeyPatch
NUM_SEEDS = 50


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        name: What is wrong.
        base: The model in which.
        kind: `Finding.kind` that names it.
        plant: Plants it in the code.
        sections: Those of the config that are wrong, or are needed.
        edits: {JSON file of the model's folder: what is changed in it}; the model is then a folder of its own.
    """

    name: str
    base: Base
    kind: str
    plant: Callable[[Patch], None] = lambda patch: None
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    edits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_quick: bool = False


def changes_result(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """The fault that a function returns something else."""
    right = getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return change(right(*args, **kwargs))

    return lambda patch: patch.setattr(owner, name, wrong)


def changes_call(family: type[FlowTransformer], change: Callable[..., tuple[Any, ...]]) -> Callable[[Patch], None]:
    """The fault that `predict` gets something else. change: (latents, sigma, batch, guidance) -> the same, wrong."""
    right = family.predict

    def wrong(self: Any, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        return right(self, model, *change(latents, sigma, batch, guidance))

    return lambda patch: patch.setattr(family, "predict", wrong)


def swaps_references(patch: Patch) -> None:
    """Each training image gets the reference of the next."""
    right = EncodedData.example

    def wrong(self: EncodedData, item: Any) -> Example:
        other = replace(item, index=(item.index + 1) % len(self.train))
        return right(self, item) | {"reference_0": right(self, other)["reference_0"]}

    patch.setattr(EncodedData, "example", wrong)


def spoils_weights(value: float) -> Callable[[Patch], None]:
    """A layer of the transformer holds one number: 0, as of a file that was cut, or none."""
    right = Examiner.certificate

    def wrong(self: Examiner, *args: Any) -> Any:
        with torch.no_grad():
            self._model["transformer"].single_transformer_blocks[1].attn.to_out.weight.fill_(value)
        return right(self, *args)

    return lambda patch: patch.setattr(Examiner, "certificate", wrong)


def without_references(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if not name.startswith("reference_")}


def halves(example: Example) -> Example:
    return {"latents": example["latents"] / 2}


def rolled(text: Example) -> Example:
    return {"prompt_embeds": text["prompt_embeds"].roll(64, -1)}


def without_images(patch: Patch) -> None:
    """The text encoder of an edit model sees no reference."""
    right = qwen_image.QwenImage.encode_edit
    patch.setattr(
        qwen_image.QwenImage, "encode_edit", lambda self, encoder, caption, images: right(self, encoder, caption, ())
    )


LIGHTNING = {"base_shift": 1.0986, "max_shift": 1.0986, "shift_terminal": None}
FAULTS = (
    Fault("shift of the demo", DEMO, "schedule", sections={"objective": {"shift": "constant", "shift_factor": 3.0}}),
    Fault("shift", KLEIN, "shift", sections={"objective": {"shift": "constant", "shift_factor": 9.0}}, is_quick=True),
    Fault("scheduler of a twin", QWEN, "scheduler", edits={"scheduler/scheduler_config.json": LIGHTNING}),
    Fault("distilled base", KLEIN, "distilled", edits={"model_index.json": {"is_distilled": True}}),
    Fault("scale of latents", DEMO, "autoencoder", changes_result(FlowTransformer, "encode_image", halves)),
    Fault("scale of latents, edits", KONTEXT, "autoencoder", changes_result(FlowTransformer, "encode_image", halves)),
    Fault(
        "rows and columns", DEMO, "img_ids", changes_result(flux2, "image_ids", lambda ids: ids[:, [0, 2, 1, 3]] * 2)
    ),
    Fault(
        "reference as the image",
        KONTEXT,
        "img_ids",
        changes_result(flux1.flux_blocks, "image_ids", lambda ids: ids * torch.tensor([0, 1, 1])),
        is_quick=True,
    ),
    Fault(
        "template", QWEN, "text", lambda patch: patch.setitem(qwen_image.TEMPLATES, True, ("<|im_start|>user\n{}", 3))
    ),
    Fault(
        "prompt without its images",
        QWEN,
        "text",
        without_images,
        is_quick=True,
    ),
    Fault(
        "layers of the text encoder",
        DEMO,
        "text",
        changes_result(flux2.Flux2, "encode_text", rolled),
    ),
    Fault("guidance", KONTEXT, "guidance", changes_call(flux1.Flux1, lambda x, s, batch, g: (x, s, batch, g * 3.5))),
    Fault("time", DEMO, "timestep", changes_call(flux2.Flux2, lambda x, s, batch, g: (x, s * 1000, batch, g))),
    Fault(
        "data and noise exchanged",
        QWEN,
        "timestep",
        changes_call(qwen_image.QwenImage, lambda x, s, b, g: (x, 1 - s, b, g)),
    ),
    Fault("order of tokens", DEMO, "hidden_states", changes_result(flux2, "pack", lambda tokens: tokens.flip(1))),
    Fault("swapped references", KLEIN, "references", swaps_references, is_quick=True),
    Fault(
        "references left out",
        KONTEXT,
        "references",
        changes_call(flux1.Flux1, lambda x, s, batch, g: (x, s, without_references(batch), g)),
    ),
    Fault(
        "captions left out",
        DEMO,
        "captions",
        changes_call(
            flux2.Flux2, lambda x, s, b, g: (x, s, b | {"prompt_embeds": torch.zeros_like(b["prompt_embeds"])}, g)
        ),
    ),
    Fault("weights", DEMO, "losses", spoils_weights(0.0)),
    Fault("weights that are no numbers", DEMO, "drawn", spoils_weights(math.nan)),
    Fault(
        "quantization",
        DEMO,
        "losses",
        changes_result(quantization, "decode_records", lambda weight: weight.roll(1, 0)),
        sections={"quantize": {"format": "int8"}},
    ),
    Fault("missed layers", QWEN, "targets", sections={"adapter": {"targets": ["attn.to_q"]}}),
    Fault("trigger", KLEIN, "trigger", sections={"data": {"trigger": "zq7x9v3kw2"}}),
)


@pytest.mark.parametrize(
    "fault", [pytest.param(one, id=one.name, marks=[] if one.is_quick else [pytest.mark.slow]) for one in FAULTS]
)
def test_a_planted_fault_is_named(fault: Fault, tmp_path: Path, monkeypatch: Patch) -> None:
    sections = dict(fault.sections)
    if fault.edits:
        base = fault.base
        model = Model(base.name, base.family, base.architecture, edits=fault.edits)
        sections["path"] = {"is": str(model.write(tmp_path / "folder"))}
    fault.plant(monkeypatch)
    with examined(fault.base, tmp_path, **sections) as (_, certificate):
        kinds = [finding.kind for finding in certificate.findings]
    assert fault.kind in kinds[:1], certificate.findings
    assert not certificate.is_green and fault.kind in certificate.lines()[0]


@pytest.mark.parametrize(
    "base", [pytest.param(one, id=one.name, marks=[] if one is KONTEXT else [pytest.mark.slow]) for one in BASES]
)
def test_a_right_model_is_green_and_as_recorded(base: Base, tmp_path: Path) -> None:
    with examined(base, tmp_path) as (_, certificate):
        assert certificate.is_green, certificate.findings
    same = [one for one in recorded() if (one.base, one.conditions) == (certificate.base, certificate.conditions)]
    assert len(same) == 1
    assert certificate.lines()[0].startswith("certificate: no fault found")


def test_a_held_out_near_copy_of_a_training_image_is_named(tmp_path: Path) -> None:
    for number, seed in enumerate((0, 5, 6)):
        write_picture(tmp_path / "unseen" / f"{number}.png", SIZE, "a square", seed)
    held_out = {"validation": str(tmp_path / "unseen")}
    with examined(BY_NAME["flux2 klein-4b tiny"], tmp_path, data=held_out) as (_, certificate):
        assert [finding.kind for finding in certificate.findings] == ["held-out"]
        assert certificate.findings[0].sentence == (
            "1 of 3 images held out (data.validation) have near copies among the training images, first "
            f"{tmp_path}/unseen/0.png in {tmp_path}/data/0.png: the validation loss then measures what was memorized; "
            "remove one of each, or hold out others"
        )
        (tmp_path / "unseen" / "0.png").unlink()
    with examined(BY_NAME["flux2 klein-4b tiny"], tmp_path / "again", data=held_out) as (_, certificate):
        assert certificate.is_green, certificate.findings


def test_the_scheduler_of_a_folder_is_compared_with_that_of_its_own_sizes(tmp_path: Path) -> None:
    """The folder is not of the family's default architecture, and none is named."""
    schnell = Model("flux1 schnell", "flux1", "schnell")
    for edits, kinds in (({}, []), ({"scheduler/scheduler_config.json": {"shift": 3.0}}, ["scheduler"])):
        path = replace(schnell, edits=edits).write(tmp_path / f"folder {kinds}")
        config = ModelConfig(family="flux1", path=str(path), options={"distilled": False})
        cfg = RunConfig(model=config, data=DataConfig(path=str(tmp_path)))
        family = flux1.Flux1(config, ObjectiveConfig(), tmp_path)
        assert [finding.kind for finding in static_findings(cfg, family)] == kinds


def test_a_run_that_trains_a_text_encoder_alone_misses_no_layers(tmp_path: Path) -> None:
    parts = {"train": {"unet": "frozen", "text_encoder": "adapter"}}
    with examined(BY_NAME["sdxl tiny"], tmp_path, model=parts) as (_, certificate):
        assert certificate.is_green, certificate.findings


@pytest.mark.slow
@pytest.mark.parametrize("base", [DEMO, KLEIN, KONTEXT, QWEN], ids=lambda base: base.name)
def test_no_seed_raises_a_false_alarm(base: Base, tmp_path: Path) -> None:
    """The noise of every seed, against the certificate of one."""
    alarms = []
    with examined(base, tmp_path) as (trainer, certificate):
        sampler = trainer.sampler
        assert isinstance(sampler, ImageSampler)
        drawn = []
        for path in sorted(trainer.run.samples.glob("*.png")):
            with Image.open(path) as image:
                drawn.append(image.convert("RGB"))
        with trainer._evaluating():
            for seed in range(1, NUM_SEEDS + 1):
                where = (trainer.cfg, trainer.family, trainer.model, sampler.load_autoencoder(), trainer.world, seed)
                found = Examiner(*where).certificate(sampler.data, drawn, MOST_PICTURES)
                # The loss of one picture alone is compared at one seed.
                stages = {stage: found.stages[stage] for stage in found.stages if stage != "losses"}
                found = compared(replace(found, stages=stages, conditions=certificate.conditions), recorded())
                alarms += [(seed, finding) for finding in found.findings]
    assert not alarms


def test_a_run_spends_at_most_a_fiftieth_on_its_certificate() -> None:
    assert pictures_within(steps=100, passes=1, has_references=False) == 0
    assert pictures_within(steps=10_000, passes=1, has_references=True) == MOST_PICTURES
    for steps in range(1, 3000, 7):
        count = pictures_within(steps, 1, has_references=True)
        # Four noise levels of each picture and of one more, the effects of captions and references, and the inputs.
        forwards = count * (4 + 3) + 4 + 1
        assert count == 0 or forwards <= 0.02 * 3 * steps


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1000, 10])
def test_a_real_base_is_examined_before_its_first_step_unless_the_run_is_short(steps: int, tmp_path: Path) -> None:
    """A folder of one's own counts as a real model."""
    path = str(Model(KLEIN.name, KLEIN.family, KLEIN.architecture).write(tmp_path / "folder"))
    with ready(KLEIN, tmp_path, path={"is": path}, train={"steps": steps}) as trainer:
        trainer.run.request("stop")
        assert trainer.train() == "stopped"
        assert trainer.step == 1
        assert (trainer.run.path / FILE).exists() == (steps == 1000)
