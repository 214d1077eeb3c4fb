"""What only Ideogram 4 does; the rest is the contract of test_flow_transformers.py."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.ideogram4 import pipeline_ideogram4
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.common import (
    assert_padding_is_read_by_no_token,
    load,
    make,
    model_of,
    refusal,
    write_original,
)
from tests.runs import alone, make_pictures, make_run, run_config
from trainer.config.sections import ObjectiveConfig, SampleConfig
from trainer.models.objectives.flow_matching import shift_factor, shift_sigma, sigma_at
from trainer.models.parts.image.euler import logit_normal_sigmas
from trainer.rng import SampleRng
from trainer.train.loop import Trainer

GUIDE = "unconditional_transformer"


@pytest.fixture
def copied(cache: Path, tmp_path: Path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(make("ideogram4", cache).folder, tmp_path / "model"))


def published_levels(side: int, num_steps: int) -> Tensor:
    """The noise levels of the pipeline for a square image."""
    mean = pipeline_ideogram4._resolution_aware_mu(side, side, 0.0)
    return pipeline_ideogram4._logit_normal_sigmas(num_steps, mean, std=1.5)


@pytest.mark.parametrize("side", [32, 512, 1024, 2048])
@pytest.mark.parametrize("num_steps", [1, 4, 48])
def test_samples_are_drawn_at_the_noise_levels_of_the_pipeline(cache: Path, side: int, num_steps: int) -> None:
    scheduler = make("ideogram4", cache).sampler(torch.zeros(16, side // 16, side // 16), num_steps)
    torch.testing.assert_close(scheduler.sigmas[:-1], published_levels(side, num_steps), atol=1e-7, rtol=0)
    assert scheduler.sigmas[-1] == 0


def test_the_lowest_and_the_highest_level_are_clamped() -> None:
    low, high = (logit_normal_sigmas(1000, mean, 1.5)[[-1, 0]] for mean in (-20.0, 20.0))
    assert torch.tensor(low).tolist() == pytest.approx([1 / (1 + math.exp(7.5)), 1 / (1 + math.exp(-9))])
    assert torch.tensor(high).tolist() == pytest.approx([1 / (1 + math.exp(-9))] * 2)


@pytest.mark.parametrize("side", [512, 1024, 2048])
def test_the_presets_objective_draws_quantiles_of_the_samplers_noise_levels(cache: Path, side: int) -> None:
    objective = ObjectiveConfig(density="logit_normal", logit_std=1.5)
    factor = shift_factor(objective, make("ideogram4", cache).shift, (side // 16) ** 2)
    assert factor == pytest.approx(side / 512)
    inner = torch.linspace(1, 0, 9)[1:-1]
    drawn = shift_sigma(sigma_at(objective, inner), factor)
    torch.testing.assert_close(drawn, published_levels(side, 8)[1:], atol=1e-6, rtol=0)


def called(family: Any, guidance: float) -> list[tuple[str, int]]:
    """The components that a sample of three steps calls, and the tokens that each call reads besides the caption's."""
    model, calls = model_of(family), []
    assert set(model) == {"transformer", GUIDE}

    text = family.encode_text(family.text_encoder(load), "a fox")
    words = {"transformer": len(text["prompt_embeds"]), GUIDE: 0}

    def note(name: str) -> Any:
        return lambda module, args, given: calls.append((name, given["hidden_states"].shape[1] - words[name]))

    for name, module in model.items():
        module.register_forward_pre_hook(note(name), with_kwargs=True)
    cfg = SampleConfig(size=(32, 48), steps=3, guidance=guidance)
    family.sample(model, family.image_encoder(load), text, text, cfg, SampleRng(0, [0]))
    return calls


def test_the_second_transformer_reads_the_image_alone_and_only_with_guidance(cache: Path) -> None:
    family = make("ideogram4", cache)
    assert called(family, 1.0) == [("transformer", 6)] * 3
    assert called(family, 4.0) == [("transformer", 6), (GUIDE, 6)] * 3


@pytest.mark.parametrize(("guidance", "loaded"), [(1.0, 0), (4.0, 1)])
def test_a_run_loads_the_second_transformer_for_a_round_of_guided_samples_and_never_trains_it(
    tmp_path: Path, guidance: float, loaded: int
) -> None:
    samples = {"sample__prompts": ["a fox"], "sample__size": (32, 32), "sample__steps": 2, "sample__guidance": guidance}
    cfg = run_config(make_pictures(tmp_path / "pictures", 2), model__family="ideogram4", **samples)
    trainer = Trainer(cfg, make_run(tmp_path, cfg, "run"), alone(), tmp_path / "cache", lambda event: None)
    try:
        assert set(trainer.model) == {"transformer"}
        assert not any(GUIDE in name for name in trainer.trainables)
        guides, family = [], trainer.family
        loading = family.guides
        family.guides = lambda load: guides.append(loading(load)) or guides[-1]
        trainer.train_step()
        (file,) = trainer.generate_samples()
        assert file.is_file()
        assert set(trainer.model) == {"transformer"}
        assert [set(one) for one in guides] == [{GUIDE}] * loaded
        assert not any(p.requires_grad for one in guides for p in one[GUIDE].parameters())
    finally:
        trainer.close()


def test_a_single_file_replaces_the_first_transformer_and_not_the_second(cache: Path, tmp_path: Path) -> None:
    tiny = make("ideogram4", cache)
    state = write_original(tiny, tmp_path / "single.safetensors")
    family = make("ideogram4", cache, str(tmp_path / "single.safetensors"), base=str(tiny.folder))
    read = model_of(family)
    name = "layers.0.attention.to_k.weight"
    assert read["transformer"].state_dict()[name].equal(state[name].float())
    second = load_file(tiny.folder / GUIDE / "diffusion_pytorch_model.safetensors")
    assert {key: tensor.equal(second[key]) for key, tensor in read[GUIDE].state_dict().items()} == dict.fromkeys(
        second, True
    )


def test_the_published_folder_in_8_bit_floats_with_a_scale_per_row_and_joined_attention_is_read(
    cache: Path, copied: Path
) -> None:
    """As ideogram-ai/ideogram-4-fp8 stores both transformers."""
    family = make("ideogram4", cache)
    expected: dict[str, dict[str, Tensor]] = {}
    for component in ("transformer", GUIDE):
        file = copied / component / "diffusion_pytorch_model.safetensors"
        stored, original = load_file(file), {}
        for fused in family.layout(component):
            whole = fused.join([stored[part] for part in fused.parts])
            if whole.dim() == 2 and "indicator" not in fused.name:
                scale = whole.abs().amax(dim=1) / 448
                codes = (whole / scale[:, None]).to(torch.float8_e4m3fn)
                original |= {fused.name: codes, f"{fused.name}_scale": scale}
                whole = codes.float() * scale[:, None]
            else:
                original[fused.name] = whole
            rows = [len(stored[part]) for part in fused.parts]
            expected.setdefault(component, {}).update(zip(fused.parts, whole.split(rows), strict=True))
        assert {"layers.0.attention.qkv.weight", "layers.1.attention.o.weight_scale"} <= original.keys()
        save_file(original, file)
    read = model_of(make("ideogram4", cache, str(copied)))
    for component, tensors in expected.items():
        found = read[component].state_dict()
        assert {name: found[name].equal(tensor) for name, tensor in tensors.items()} == dict.fromkeys(found, True)


def test_padding_to_the_longest_caption_of_a_batch_is_read_by_no_token_and_makes_nothing_nan(cache: Path) -> None:
    family = make("ideogram4", cache)
    assert_padding_is_read_by_no_token(family, model_of(family), (16, 4, 4))


def test_a_folder_without_the_second_transformer_is_refused_before_anything_is_loaded(
    cache: Path, copied: Path
) -> None:
    (copied / GUIDE / "diffusion_pytorch_model.safetensors").unlink()
    assert refusal("ideogram4", cache, str(copied)) == (
        f"{copied / GUIDE}: neither diffusion_pytorch_model.safetensors nor "
        "diffusion_pytorch_model.safetensors.index.json; expected the weights of this component"
    )
    shutil.rmtree(copied / GUIDE)
    assert refusal("ideogram4", cache, str(copied)) == (
        f"model.path {copied}: no {GUIDE}/config.json; expected a diffusers folder. Download it or set model.path: tiny"
    )
