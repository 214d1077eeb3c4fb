"""SDXL: what its files say of the noise schedule, the samplers of its folder, and the sizes of enlarged images."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.common import (
    assert_same_picture,
    batch_of,
    edit_json,
    load,
    make,
    model_of,
    recorded_decodes,
    refusal,
    without_bar,
)
from tests.runs import alone, make_pictures, make_run, run_config, train
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.data.encode import encode_data
from trainer.data.loader import ImageItem
from trainer.distributed.context import RankContext
from trainer.export.export import export
from trainer.models import families
from trainer.models.build import encoder_loader
from trainer.models.families.sdxl import Sdxl
from trainer.plan.record.trace import on_this_machine
from trainer.rng import SampleRng
from trainer.run.events import WarningEvent
from trainer.system.errors import RuleError
from trainer.weights.files import read_tensor

VELOCITY = ("v_pred", "ztsnr")
SCHEDULER = "scheduler/scheduler_config.json"
SLOW = pytest.mark.slow
# numpy 2 warns of how diffusers' schedulers make their noise levels.
pytestmark = pytest.mark.filterwarnings("ignore:__array_")


@pytest.fixture(scope="module")
def sdxl(cache: Path) -> Sdxl:
    return make("sdxl", cache)


@pytest.fixture(scope="module")
def pipeline(sdxl: Sdxl) -> Any:
    return without_bar(StableDiffusionXLPipeline.from_pretrained(sdxl.folder, local_files_only=True))


@pytest.fixture
def copied(sdxl: Sdxl, tmp_path: Path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(sdxl.folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def original(sdxl: Sdxl) -> dict[str, Tensor]:
    """The tensors of the tiny model's U-Net in the original layout."""
    stored = {name: read_tensor(entry) for name, entry in sdxl.weights("unet").entries.items()}
    return {fused.name: fused.join([stored[part] for part in fused.parts]) for fused in sdxl.layout("unet")}


def single_file(file: Path, tensors: dict[str, Tensor], markers: Sequence[str]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()} | dict.fromkeys(markers, torch.empty(0)), file)
    return file


# What a single file says of itself


@pytest.mark.parametrize(
    ("markers", "sampler"),
    [
        (VELOCITY, "EulerDiscreteScheduler"),
        pytest.param(("v_pred",), "EulerDiscreteScheduler", marks=SLOW),
        pytest.param(VELOCITY, "EulerAncestralDiscreteScheduler", marks=SLOW),
        pytest.param(VELOCITY, "DDIMScheduler", marks=SLOW),
        pytest.param(VELOCITY, "DPMSolverMultistepScheduler", marks=SLOW),
    ],
)
def test_a_file_with_markers_is_drawn_as_in_diffusers_at_the_matching_scheduler_config(
    cache: Path, copied: Path, pipeline: Any, original: Any, tmp_path: Path, markers: tuple[str, ...], sampler: str
) -> None:
    name_sampler(copied, sampler)
    family = make("sdxl", cache, str(single_file(tmp_path / "mine.safetensors", original, markers)), str(copied))
    changes: dict[str, Any] = {"prediction_type": "v_prediction"}
    if "ztsnr" in markers:
        changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    pipeline.scheduler = getattr(diffusers, sampler).from_pretrained(copied, subfolder="scheduler", **changes)
    assert_draws_as(pipeline, family)


def name_sampler(folder: Path, name: str, **settings: Any) -> None:
    edit_json(folder / "model_index.json", scheduler=["diffusers", name])
    edit_json(folder / SCHEDULER, **{"_class_name": name, **settings})


def assert_draws_as(pipeline: Any, family: Sdxl, steps: int = 4) -> Image.Image:
    """The family's picture is the pipeline's, from the same noise. Returns it."""
    vae, texts, rng = family.image_encoder(load), family.text_encoder(load), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    cfg = SampleConfig(size=(64, 32), steps=steps, guidance=5.0, negative="dull")
    text, negative = (family.encode_text(texts, words) for words in ("a fox", "dull"))
    image = family.sample(model_of(family), vae, text, negative, cfg, rng)
    (generator,) = rng.generators("sampler")
    expected = pipeline(
        prompt="a fox",
        negative_prompt="dull",
        latents=rng.normal("sample", (4, 4, 8)),
        generator=generator,
        width=64,
        height=32,
        num_inference_steps=steps,
        guidance_scale=5.0,
    ).images[0]
    # To rounding: the first step's noise is 4096 times that of the last where there is zero-terminal SNR.
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-3, rtol=1e-4)
    assert_same_picture(image, expected)
    return image


def test_a_file_in_diffusers_names_and_one_without_prefix_may_hold_markers(
    cache: Path, sdxl: Sdxl, original: Any, tmp_path: Path
) -> None:
    named = load_file(sdxl.folder / "unet" / "diffusion_pytorch_model.safetensors")
    bare = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in original.items()}
    for tensors in (named, bare):
        file = single_file(tmp_path / "mine.safetensors", tensors, VELOCITY)
        family = make("sdxl", cache, str(file), str(sdxl.folder))
        assert family.weights("unet").entries.keys() == sdxl.weights("unet").entries.keys()
        assert family.file_markers == VELOCITY


VELOCITY_FOLDER = {"prediction_type": "v_prediction"}
ZERO_FOLDER = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
FILE, BASE = "model.path {file}", "model.base {base}: scheduler/scheduler_config.json"
SAID: dict[str, tuple[tuple[str, ...] | None, dict[str, Any], dict[str, Any], tuple[str, str, bool]]] = {
    "both markers": (
        VELOCITY,
        {},
        {},
        (f"{FILE}: has the markers v_pred and ztsnr; it is trained and sampled as one that predicts velocity, with "
         "zero-terminal SNR", "v_prediction", True),
    ),
    "v_pred alone counts more than the folder": (
        ("v_pred",),
        {},
        ZERO_FOLDER,
        (f"{FILE}: has the marker v_pred; it is trained and sampled as one that predicts velocity, without "
         "zero-terminal SNR", "v_prediction", False),
    ),
    "the field counts more than the markers": (
        VELOCITY,
        {"zero_terminal_snr": "off"},
        {},
        (f"{FILE}: has the markers v_pred and ztsnr; it is trained and sampled as one that predicts velocity, without "
         "zero-terminal SNR", "v_prediction", False),
    ),
    "ztsnr alone and a prediction": (
        ("ztsnr",),
        {"prediction": "v_prediction"},
        {},
        (f"{FILE}: has the marker ztsnr; it is trained and sampled as one that predicts velocity, with zero-terminal "
         "SNR", "v_prediction", True),
    ),
    "v_pred against the field": (
        VELOCITY,
        {"prediction": "epsilon"},
        {},
        (f"{FILE}: has the markers v_pred and ztsnr; it is trained and sampled as one that predicts noise, without "
         f"zero-terminal SNR\nobjective.prediction: epsilon contradicts the marker v_pred of {FILE}, which says that "
         "it predicts velocity; leave the field out unless you mean to change what the model predicts",
         "epsilon", False),
    ),
    "a folder that says more than the file": (
        (),
        {},
        ZERO_FOLDER,
        (f"{FILE}: has no marker v_pred, but {BASE} has prediction_type v_prediction; it is trained and sampled as "
         "one that predicts velocity, with zero-terminal SNR. Set objective.prediction: epsilon if the file predicts "
         "noise", "v_prediction", True),
    ),
    "a field that says so": ((), {"prediction": "v_prediction"}, {}, ("", "v_prediction", False)),
    "nothing": ((), {}, {}, ("", "epsilon", False)),
    "a folder of its own": (None, {}, ZERO_FOLDER, ("", "v_prediction", True)),
    "a folder whose last timestep teaches nothing": (
        None,
        {},
        {"rescale_betas_zero_snr": True},
        (f"{BASE.replace('base', 'path', 1)} has rescale_betas_zero_snr, but noise is predicted: the last timestep "
         "is noise alone and teaches nothing; set objective.zero_terminal_snr: off, or objective.prediction: "
         "v_prediction if the model predicts velocity", "epsilon", True),
    ),
    "a field against the folder": (
        None, {"zero_terminal_snr": "off"}, ZERO_FOLDER, ("", "v_prediction", False)
    ),
    "a field beyond the folder": (
        None, {"zero_terminal_snr": "on"}, VELOCITY_FOLDER, ("", "v_prediction", True)
    ),
}  # fmt: skip
"""{case: (markers of a file, None for a folder; objective; changes of the folder; sentences, prediction, zero?)}"""


@pytest.mark.parametrize(("markers", "objective", "folder", "expected"), SAID.values(), ids=SAID)
def test_objective_file_and_folder_decide_in_this_order_and_what_differs_is_said(
    cache: Path, copied: Path, tmp_path: Path, markers: Any, objective: Any, folder: Any, expected: Any
) -> None:
    edit_json(copied / SCHEDULER, **folder)
    file = single_file(tmp_path / "mine.safetensors", {}, markers or ())
    path = (str(copied),) if markers is None else (str(file), str(copied))
    family = make("sdxl", cache, *path, objective=ObjectiveConfig(**objective))
    said, prediction, is_zero = expected
    cfg = run_config(tmp_path, model={"family": "sdxl"})
    assert "\n".join(family.warnings(cfg)) == said.format(file=file, base=copied)
    assert family.file_metadata == {"modelspec.prediction_type": {"v_prediction": "v"}.get(prediction, prediction)}
    assert (family._alpha_bar[-1].item() == 0) is is_zero
    assert family.file_markers == (VELOCITY[: 1 + is_zero] if prediction == "v_prediction" else ())


@pytest.mark.parametrize(
    ("markers", "objective", "message"),
    [
        (("ztsnr",), {}, f"{FILE}: has the marker ztsnr (zero-terminal SNR) without v_pred, so what it predicts is not "
         "known; set objective.prediction: v_prediction, as for all known models with zero-terminal SNR, or epsilon, "
         "as ComfyUI reads it"),
        ((), {"zero_terminal_snr": "on"}, "objective.zero_terminal_snr: on needs a model that predicts velocity, but "
         f"{BASE} has prediction_type epsilon; set objective.prediction: v_prediction, or set this to auto"),
        (("edm_mean", "edm_std"), {}, f"{FILE}: its tensor 'edm_mean' marks a model of EDM (continuous noise levels), "
         "which is not trained here; name a model that predicts noise or velocity"),
    ],
    ids=["ztsnr alone", "noise with zero-terminal SNR", "EDM"],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(
    cache: Path, sdxl: Sdxl, tmp_path: Path, markers: Any, objective: Any, message: str
) -> None:
    file = single_file(tmp_path / "mine.safetensors", {}, markers)
    found = refusal("sdxl", cache, str(file), str(sdxl.folder), ObjectiveConfig(**objective))
    assert found == message.format(file=file, base=sdxl.folder)


@pytest.mark.slow
def test_a_run_on_a_file_with_markers_says_so_once_and_exports_what_is_read_and_drawn_the_same(
    sdxl: Sdxl, original: Any, tmp_path: Path
) -> None:
    file = single_file(tmp_path / "mine.safetensors", original, VELOCITY)
    model = {"family": "sdxl", "path": str(file), "base": str(sdxl.folder)}
    cfg = run_config(make_pictures(tmp_path / "pictures", 1), model=model, train__steps=1, train__batch_size=1)
    run = make_run(tmp_path, cfg, "run")
    said = [event.message for event in train(alone(), cfg, run).events if isinstance(event, WarningEvent)]
    assert said == [
        f"model.path {file}: has the markers v_pred and ztsnr; it is trained and sampled as one that predicts "
        "velocity, with zero-terminal SNR"
    ]
    cache = tmp_path / "cache"
    adapter, single, folder = (
        export(cfg.exporting(what, format, "fp32"), run, cache)[0].path
        for what, format in (("adapter", "auto"), ("merged", "single_file"), ("merged", "auto"))
    )
    for written in (adapter, single):
        with safe_open(written, "pt") as opened:
            assert opened.metadata()["modelspec.prediction_type"] == "v"
    assert set(VELOCITY) <= load_file(single).keys()
    again = make("sdxl", cache, str(single), str(sdxl.folder))
    assert again.file_markers == VELOCITY
    drawn = StableDiffusionXLPipeline.from_pretrained(
        sdxl.folder,
        unet=UNet2DConditionModel.from_pretrained(folder),
        scheduler=EulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler"),
        local_files_only=True,
    )
    assert_draws_as(without_bar(drawn), again)
    kept = {name: drawn.scheduler.config[name] for name in ("beta_end", "rescale_betas_zero_snr", "timestep_spacing")}
    assert kept == {"beta_end": 0.012, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    base = StableDiffusionXLPipeline.from_single_file(str(single), config=str(sdxl.folder), local_files_only=True)
    assert all(tensor.equal(drawn.unet.state_dict()[name]) for name, tensor in base.unet.state_dict().items())


def test_the_field_cannot_be_set_with_a_prediction_of_noise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on needs a model that predicts velocity, because the last timestep is"):
        run_config(tmp_path, model={"family": "sdxl"}, objective={"prediction": "epsilon", "zero_terminal_snr": "on"})


def test_a_published_model_is_planned_without_the_file_that_says_what_it_predicts(tmp_path: Path) -> None:
    away = {"family": "sdxl", "path": "noob.safetensors", "base": "a/b", "options": {"architecture": "base"}}
    cfg = run_config(tmp_path, model=away, objective={"zero_terminal_snr": "on"})
    family = families.make(on_this_machine(cfg, tmp_path), tmp_path)
    assert family.build("unet").conv_in.weight.shape == (320, 4, 3, 3)


# Samplers


SAMPLERS = [
    ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}),
    *(
        pytest.param(name, settings, marks=SLOW)
        for name, settings in [
            ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
            ("DPMSolverSinglestepScheduler", {}),
            ("DDPMScheduler", {"clip_sample": False}),
            ("DEISMultistepScheduler", {}),
            ("HeunDiscreteScheduler", {}),
            ("KDPM2AncestralDiscreteScheduler", {}),
            ("LCMScheduler", {}),
            ("PNDMScheduler", {"skip_prk_steps": True}),
            ("UniPCMultistepScheduler", {}),
        ]
    ),
]


@pytest.mark.parametrize(("name", "settings"), SAMPLERS)
def test_samples_are_drawn_as_the_folders_own_pipeline_draws(
    cache: Path, pipeline: Any, copied: Path, name: str, settings: dict[str, Any]
) -> None:
    name_sampler(copied, name, **settings)
    family = make("sdxl", cache, str(copied))
    pipeline.scheduler = getattr(diffusers, name).from_pretrained(copied, subfolder="scheduler")
    image = assert_draws_as(pipeline, family, steps=5)
    assert family.warnings(run_config(copied, model={"family": "sdxl"}, sample__prompts=["a fox"])) == ()
    assert drawn(family, SampleConfig(size=(64, 32), steps=5, guidance=5.0, negative="dull")) == image.tobytes()


def drawn(family: Sdxl, cfg: SampleConfig) -> bytes:
    texts = family.text_encoder(load)
    text, negative = (family.encode_text(texts, words) for words in ("a fox", cfg.negative))
    return family.sample(model_of(family), family.image_encoder(load), text, negative, cfg, SampleRng(3, [0])).tobytes()


def test_euler_draws_as_before_whatever_the_folder_names(cache: Path, sdxl: Sdxl, copied: Path) -> None:
    name_sampler(copied, "EulerAncestralDiscreteScheduler")
    family, size = make("sdxl", cache, str(copied)), (32, 32)
    euler = drawn(family, SampleConfig(size=size, steps=3, scheduler="euler"))
    assert euler == drawn(sdxl, SampleConfig(size=size, steps=3))
    assert euler != drawn(family, SampleConfig(size=size, steps=3))


VERSION = diffusers.__version__
UNUSABLE = {
    "MySamplerScheduler": f"diffusers {VERSION} has no sampler MySamplerScheduler",
    "FlowMatchEulerDiscreteScheduler": "FlowMatchEulerDiscreteScheduler does not sample with the noise schedule of "
    "such a model and a number of steps alone",
    "RePaintScheduler": "RePaintScheduler does not sample with the noise schedule of such a model and a number of "
    "steps alone",
    "LCMScheduler": "LCMScheduler refuses 60 steps or its settings",
    "HeunDiscreteScheduler": f"diffusers {VERSION}'s HeunDiscreteScheduler has no zero-terminal SNR",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_sampler_that_cannot_be_used_is_replaced_by_eulers_method_and_the_reason_is_said(
    cache: Path, sdxl: Sdxl, copied: Path, name: str
) -> None:
    name_sampler(copied, name)
    zero = name == "HeunDiscreteScheduler"
    objective = ObjectiveConfig(prediction="v_prediction", zero_terminal_snr="on") if zero else None
    family, plain = make("sdxl", cache, str(copied), objective=objective), make("sdxl", cache, objective=objective)
    sample = {"prompts": ["a fox"], "steps": 60, "size": [32, 32]}
    cfg = run_config(copied, model={"family": "sdxl"}, sample=sample)
    (sentence,) = family.warnings(cfg)
    reason, _, remedy = sentence.partition("; set ")
    # LCM was distilled from 50 steps. How diffusers says that is not for us to say.
    assert reason.partition(" (The combination")[0] == f"samples are generated with Euler's method: {UNUSABLE[name]}"
    assert remedy == f"sample.scheduler: euler, or name another sampler in {copied / 'model_index.json'}"
    for without in ({"prompts": []}, {"scheduler": "euler"}):
        assert family.warnings(run_config(copied, model={"family": "sdxl"}, sample=sample | without)) == ()
    if zero:
        assert family.changed_configs[SCHEDULER]["_class_name"] == "EulerDiscreteScheduler"
    if name != "LCMScheduler":  # which refuses no fewer steps
        short = cfg.sample.model_copy(update={"steps": 2})
        assert drawn(family, short) == drawn(plain, short)


def test_other_families_refuse_a_sampler(tmp_path: Path) -> None:
    with pytest.raises(RuleError) as caught:
        families.make(run_config(tmp_path, sample={"scheduler": "euler"}), tmp_path)
    assert str(caught.value).startswith("sample.scheduler: has no effect for flux2")


# Sizes of images


@pytest.mark.slow
def test_an_enlarged_image_is_told_its_own_size_and_others_that_of_their_bucket(
    sdxl: Sdxl, pipeline: Any, tmp_path: Path
) -> None:
    """In buckets of 64 x 64 and, for the last one, 128 x 32."""
    sizes = {"large": (128, 128), "exact": (64, 64), "small": (48, 40), "low": (160, 30)}
    for name, size in sizes.items():
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(name)
    cfg, world = run_config(tmp_path, model={"family": "sdxl"}, data__validation=1, data__max_aspect=4), alone()
    cache = tmp_path / "cache"
    family = families.make(cfg, cache)
    data = encode_data(family, encoder_loader(cfg, world), RankContext(cfg, world, cache, lambda event: None))
    model, seen = model_of(family), []
    model["unet"].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["added_cond_kwargs"]["time_ids"]), with_kwargs=True
    )
    names = [one.image.path.stem for one in data.train]
    items = {name: data.example(ImageItem(index, False)) for index, name in enumerate(names)}
    items[data.validation[0].image.path.stem] = data.held_out(0)
    assert items["low"]["original_size"].tolist() == [30, 160]
    family.loss(model, batch_of(family, [items["large"], items["exact"], items["small"]]), SampleRng(0, [0, 1, 2]))
    family.loss(model, batch_of(family, [items["low"]]), SampleRng(0, [0]))
    drawn_without = {key: tensor for key, tensor in items["small"].items() if key != "original_size"}
    family.loss(model, batch_of(family, [drawn_without]), SampleRng(0, [0]))
    expected = [
        [((64, 64), (64, 64)), ((64, 64), (64, 64)), ((40, 48), (64, 64))],
        [((30, 160), (32, 128))],
        [((64, 64), (64, 64))],
    ]
    for rows, sizes_of in zip(seen, expected, strict=True):
        wanted = [
            pipeline._get_add_time_ids(original, (0, 0), target, torch.int64, text_encoder_projection_dim=32)[0]
            for original, target in sizes_of
        ]
        assert rows.dtype == torch.int64
        assert rows.tolist() == torch.stack(wanted).tolist()
