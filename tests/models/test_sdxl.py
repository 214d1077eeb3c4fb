import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    StableDiffusionXLPipeline,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.audit.families import REFERENCES
from tests.audit.reference import Draws
from tests.models.common import (
    SAME,
    assert_original_file_is_read,
    assert_same_picture,
    batch_of,
    edit_json,
    examples,
    load,
    make,
    model_of,
    picture,
    recorded_decodes,
    refusal,
    without_bar,
)
from tests.models.test_published import published
from tests.runs import run_config
from trainer.adapters import adapted_layers
from trainer.config.sections import ModelConfig, ModelOptions, ObjectiveConfig, SampleConfig
from trainer.export.metadata import adapter_metadata
from trainer.models.families.sdxl import ARCHITECTURES, Sdxl
from trainer.rng import SampleRng, generator
from trainer.system.errors import InputError
from trainer.weights.files import read_tensor

CAPTIONS = ["a red fox", "", "a long caption " * 40, "100% of <|endoftext|> & é!"]
MIXES = [("text_encoder",), ("text_encoder_2",), ("text_encoder", "text_encoder_2")]


@pytest.fixture(scope="module")
def sdxl(cache) -> Sdxl:
    return make("sdxl", cache)


@pytest.fixture(scope="module")
def reference(sdxl) -> Any:
    return REFERENCES["sdxl"](sdxl.folder, {})


@pytest.fixture(scope="module")
def pipeline(reference) -> StableDiffusionXLPipeline:
    return reference.pipeline


@pytest.fixture
def copied(sdxl, tmp_path) -> Path:
    """A diffusers folder that a test may change."""
    return Path(shutil.copytree(sdxl.folder, tmp_path / "model"))


def training(cache: Path, live: Sequence[str] = (), windows: int = 1, **objective: Any) -> Sdxl:
    """The tiny model with some text encoders in training."""
    train = {"unet": "adapter", **dict.fromkeys(live, "adapter")}
    model = ModelConfig(family="sdxl", train=train, options=ModelOptions(text_windows=windows))
    return Sdxl(model, ObjectiveConfig(**objective), cache)


def with_scheduler(cache: Path, folder: Path, objective: ObjectiveConfig | None = None, **changes: Any) -> Sdxl:
    edit_json(folder / "scheduler" / "scheduler_config.json", **changes)
    return make("sdxl", cache, str(folder), objective=objective)


def conditions(family: Sdxl, caption: str) -> tuple[Tensor, Tensor]:
    """(L, D1 + D2) and (P,) of frozen encoders."""
    found = family.encode_text(family.text_encoder(load), caption)
    return torch.cat([found["text_encoder.states"], found["text_encoder_2.states"]], 1), found["text_encoder_2.pooled"]


# Recipe: equal to diffusers' own pipeline


# numpy 2 warns of how the pipeline's scheduler makes its noise levels.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize(
    ("guidance", "negative", "force_zeros"),
    [(1.0, "", True), (5.0, "", True), (5.0, "", False), (5.0, "dull", True)],
    ids=["unguided", "zeros", "empty caption", "negative prompt"],
)
def test_sample_equals_the_pipelines_picture_for_the_same_noise(cache, copied, guidance, negative, force_zeros):
    edit_json(copied / "model_index.json", force_zeros_for_empty_prompt=force_zeros)
    family = make("sdxl", cache, str(copied))
    pipeline = without_bar(StableDiffusionXLPipeline.from_pretrained(copied, local_files_only=True))
    vae, texts, rng = family.image_encoder(load), family.text_encoder(load), SampleRng(3, [0])
    decoded = recorded_decodes(vae), recorded_decodes(pipeline.vae)
    cfg = SampleConfig(size=(64, 96), steps=4, guidance=guidance, negative=negative)
    text, unwanted = family.encode_text(texts, "a fox"), family.encode_text(texts, negative)
    image = family.sample(model_of(family), vae, text, unwanted, cfg, rng)
    expected = pipeline(
        prompt="a fox",
        negative_prompt=negative or (None if force_zeros else ""),
        latents=rng.normal("sample", (4, 12, 8)),
        width=64,
        height=96,
        num_inference_steps=4,
        guidance_scale=guidance,
    ).images[0]
    torch.testing.assert_close(decoded[0][-1], decoded[1][-1], atol=1e-5, rtol=1e-5)
    assert_same_picture(image, expected)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("gamma", [None, 5.0])
def test_loss_is_that_of_diffusers_scheduler_target_weight_and_time_ids(cache, copied, prediction, zero_snr, gamma):
    objective = ObjectiveConfig(min_snr_gamma=gamma)
    family = with_scheduler(cache, copied, objective, prediction_type=prediction, rescale_betas_zero_snr=zero_snr)
    reference = REFERENCES["sdxl"](copied, {"min_snr_gamma": gamma})
    items = examples(family, 2)
    loss = family.loss(model_of(family), batch_of(family, items), SampleRng(5, [8, 9]))
    expected = [reference.loss(item["latents"], item, Draws(5, i)) for item, i in zip(items, (8, 9), strict=True)]
    assert loss.total.item() == pytest.approx(sum(expected), abs=1e-5, rel=1e-5)
    assert loss.weight.item() == 2


def test_zero_terminal_snr_leaves_no_signal_at_the_last_timestep_and_a_finite_loss(cache, copied):
    objective = ObjectiveConfig(min_snr_gamma=5.0)
    family = with_scheduler(cache, copied, objective, rescale_betas_zero_snr=True, num_train_timesteps=2)
    model, seen = model_of(family), []
    model["unet"].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    rng = SampleRng(0, [next(i for i in range(10) if SampleRng(0, [i]).uniform("timestep") >= 0.5)])
    assert family.loss(model, batch_of(family, examples(family, 1)), rng).total.isfinite()
    assert seen[0].equal(rng.normal("noise", (4, 4, 8)))


def test_objective_prediction_overrides_the_schedulers_in_loss_and_sample(cache, copied):
    wanted = make("sdxl", cache, objective=ObjectiveConfig(prediction="v_prediction"))
    expected = with_scheduler(cache, copied, prediction_type="v_prediction")
    results = []
    for family in (wanted, expected, make("sdxl", cache)):
        model, items = model_of(family), examples(family, 1)
        cfg, rng = SampleConfig(size=(32, 32), steps=2), SampleRng(0, [0])
        image = family.sample(model, family.image_encoder(load), items[0], None, cfg, rng)
        results.append((family.loss(model, batch_of(family, items), rng).total.item(), image.tobytes()))
    assert results[0] == results[1]
    assert results[0][0] != results[2][0] and results[0][1] != results[2][1]


# Windows of text


def windowed(pipeline: Any, captions: Sequence[str], count: int) -> tuple[Tensor, Tensor]:
    """Embeddings as ComfyUI and A1111 make them of long prompts, by transformers' models: whole windows follow one
    another, and the first is pooled."""
    states = []
    for tokenizer, encoder in (
        (pipeline.tokenizer, pipeline.text_encoder),
        (pipeline.tokenizer_2, pipeline.text_encoder_2),
    ):
        rows = []
        for caption in captions:
            ids = tokenizer(caption, add_special_tokens=False, verbose=False).input_ids
            for part in (ids[30 * number : 30 * number + 30] for number in range(count)):
                row = torch.full((32,), tokenizer.pad_token_id)
                row[: len(part) + 2] = torch.tensor([tokenizer.bos_token_id, *part, tokenizer.eos_token_id])
                rows.append(encoder(row[None], output_hidden_states=True))
        hidden = torch.cat([row.hidden_states[-2] for row in rows])
        states.append(hidden.reshape(len(captions), 32 * count, -1))
        pooled = torch.cat([row[0] for row in rows[::count]])
    return torch.cat(states, dim=-1), pooled


@pytest.mark.parametrize("caption", CAPTIONS)
@torch.no_grad()
def test_each_window_of_a_long_caption_is_read_by_itself_and_the_first_is_pooled(cache, pipeline, caption):
    states, pooled = conditions(training(cache, windows=3), caption)
    expected = windowed(pipeline, [caption], 3)
    torch.testing.assert_close(states, expected[0][0], **SAME)
    torch.testing.assert_close(pooled, expected[1][0], **SAME)
    assert (states.shape, pooled.shape) == ((96, 16 + 24), (32,))


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("negative", ["", "a dull picture of many words " * 3])
@torch.no_grad()
def test_loss_and_picture_of_three_windows_are_those_of_the_pipeline_with_such_embeddings(cache, pipeline, negative):
    family, rng = training(cache, windows=3), SampleRng(3, [0])
    vae, texts, prompt = family.image_encoder(load), family.text_encoder(load), "a red fox in the snow " * 5
    (states, unwanted), (pooled, unwanted_pooled) = windowed(pipeline, [prompt, negative], 3)
    if not negative:
        unwanted, unwanted_pooled = torch.zeros_like(states), torch.zeros_like(pooled)
    cfg = SampleConfig(size=(64, 96), steps=4, guidance=5.0, negative=negative)
    text, other = family.encode_text(texts, prompt), family.encode_text(texts, negative)
    image = family.sample(model_of(family), vae, text, other, cfg, rng)
    expected = pipeline(
        prompt_embeds=states[None],
        pooled_prompt_embeds=pooled[None],
        negative_prompt_embeds=unwanted[None],
        negative_pooled_prompt_embeds=unwanted_pooled[None],
        latents=rng.normal("sample", (4, 12, 8)),
        width=64,
        height=96,
        num_inference_steps=4,
        guidance_scale=5.0,
    ).images[0]
    assert_same_picture(image, expected)
    items = [{**family.encode_image(vae, picture(64, 32)), **text}]
    loss = family.loss(model_of(family), batch_of(family, items), rng)
    scheduler = DDPMScheduler.from_pretrained(family.folder, subfolder="scheduler")
    noise, timesteps = rng.normal("noise", (4, 4, 8)), (rng.uniform("timestep") * 1000).long()
    ids = pipeline._get_add_time_ids((32, 64), (0, 0), (32, 64), states.dtype, text_encoder_projection_dim=32)
    noisy = scheduler.add_noise(items[0]["latents"][None], noise, timesteps)
    kwargs = {"text_embeds": pooled[None], "time_ids": ids}
    predicted = pipeline.unet(noisy, timesteps, states[None], added_cond_kwargs=kwargs).sample
    torch.testing.assert_close(loss.total, (predicted - noise).square().mean(), **SAME)


@torch.no_grad()
def test_a_caption_that_fills_two_windows_and_one_that_is_cut_to_them_are_the_same(cache):
    family = training(cache, windows=2)
    texts, caption = family.text_encoder(load), "1" * 60
    whole, cut, shorter = (family.encode_text(texts, text) for text in (caption, caption + "2", caption[:-1]))
    assert all(whole[key].equal(cut[key]) for key in whole)
    assert not whole["text_encoder.states"].equal(shorter["text_encoder.states"])


def test_other_windows_are_cached_apart(cache):
    assert len({training(cache, windows=count).fingerprint() for count in (1, 2, 3)}) == 3


def test_an_adapter_file_names_the_tokens_of_its_windows_as_kohya_does(cache, tmp_path):
    cfg = run_config(tmp_path, model__family="sdxl")
    found = [adapter_metadata(cfg, training(cache, windows=count), 1).get("ss_max_token_length") for count in (1, 3)]
    assert found == [None, "225"]


# Text encoders in training


@pytest.mark.parametrize(("live", "windows"), [*((mix, 1) for mix in MIXES), (MIXES[-1], 3)])
def test_encoders_in_training_give_the_loss_and_picture_of_cached_embeddings(cache, live, windows):
    results = []
    for family in (training(cache, windows=windows), training(cache, live, windows)):
        items, model, rng = examples(family, 2), model_of(family), SampleRng(0, [0, 1])
        vae, texts = family.image_encoder(load), family.text_encoder(load)
        negative = family.encode_text(texts, "dull")
        cfg = SampleConfig(size=(32, 32), steps=2, guidance=5.0, negative="dull")
        image = family.sample(model, vae, items[0], negative, cfg, SampleRng(0, [0]))
        results.append((family.loss(model, batch_of(family, items), rng).total, image))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    assert_same_picture(results[0][1], results[1][1])


@pytest.mark.parametrize("live", MIXES, ids="+".join)
def test_encoders_in_training_are_not_loaded_for_encoding_and_their_captions_stay_token_ids(cache, live):
    family, loaded = training(cache, live), []

    def recording(module, files, blocks):
        loaded.append(type(module).__name__)
        return load(module, files, blocks)

    example = family.encode_text(family.text_encoder(recording), "a fox")
    assert len(loaded) == 2 - len(live)
    for name in ("text_encoder", "text_encoder_2"):
        assert (f"{name}.ids" in example, f"{name}.states" in example) == (name in live, name not in live)


def test_every_weight_of_the_three_models_gets_a_gradient_but_those_never_trained(cache):
    family = training(cache, MIXES[-1])
    model = model_of(family).requires_grad_(True)
    family.loss(model, batch_of(family, examples(family, 2)), SampleRng(0, [0, 1])).total.backward()
    largest = {
        name: 0.0 if weight.grad is None else weight.grad.abs().max().item()
        for component in model.values()
        for name, weight in component.named_parameters()
    }
    silent = {name for name, gradient in largest.items() if gradient < 1e-7}
    never = {name for name in largest if any(re.fullmatch(pattern, name) for pattern in Sdxl.never_trained)}
    assert silent == never
    assert "final_layer_norm.weight" in never and "text_model.final_layer_norm.weight" not in never


# Model


def test_weight_files_of_older_programs_are_read_by_todays_names(cache, sdxl, copied):
    text = copied / "text_encoder" / "model.safetensors"
    older = {f"text_model.{name}": tensor for name, tensor in load_file(text).items()}
    save_file({**older, "text_model.embeddings.position_ids": torch.arange(32).unsqueeze(0)}, text)
    vae = copied / "vae" / "diffusion_pytorch_model.safetensors"
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    save_file({renamed(name, names): tensor for name, tensor in load_file(vae).items()}, vae)
    family = make("sdxl", cache, str(copied))
    for component in ("text_encoder", "vae"):
        assert family.weights(component).entries.keys() == sdxl.weights(component).entries.keys()


def renamed(name: str, names: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], name)


def test_the_published_unet_has_2_567_463_684_parameters_and_722_layers_for_adapters(tmp_path):
    family = published("sdxl base", tmp_path)
    unet = family.build("unet")
    assert sum(weight.numel() for weight in unet.parameters()) == 2_567_463_684
    linear = [name for name, module in unet.named_modules() if isinstance(module, nn.Linear)]
    matched = [name for name in linear if matches(name, "unet", Sdxl.adapter_targets)]
    assert matched == [name for name in linear if ".attentions." in name]
    assert len(matched) == 722
    assert len({fused.name for fused in family.layout("unet")}) == len(unet.state_dict()) == 1680


def matches(name: str, component: str, targets: Any) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in targets[component])


def test_conv_targets_are_all_convolutions_but_the_first_and_the_last(sdxl):
    convolutions = [name for name, module in sdxl.build("unet").named_modules() if isinstance(module, nn.Conv2d)]
    matched = [name for name in convolutions if matches(name, "unet", Sdxl.conv_targets)]
    assert matched == [name for name in convolutions if name not in ("conv_in", "conv_out")]
    kinds = {name.split(".", 2)[-1].split(".", 2)[-1] for name in matched}
    assert kinds >= {"conv1", "conv2", "conv_shortcut"} and any("downsamplers" in name for name in matched)


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2"])
def test_encoder_targets_are_all_linear_layers_of_the_blocks(sdxl, component):
    linear = [name for name, module in sdxl.build(component).named_modules() if isinstance(module, nn.Linear)]
    assert [name for name in linear if matches(name, component, Sdxl.adapter_targets)] == [
        name for name in linear if ".layers." in name
    ]


def test_fingerprint_follows_the_encoders_and_which_of_them_are_trained(cache, copied):
    prints = [training(cache, live).fingerprint() for live in ((), *MIXES)]
    assert len(set(prints)) == 4
    first = make("sdxl", cache, str(copied)).fingerprint()
    (copied / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"other")
    assert make("sdxl", cache, str(copied)).fingerprint() == first
    file = copied / "text_encoder_2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert make("sdxl", cache, str(copied)).fingerprint() != first


# Files of other programs


def weights_of(family: Sdxl, component: str) -> dict[str, Tensor]:
    return {name: read_tensor(entry) for name, entry in family.weights(component).entries.items()}


def test_a_single_file_by_the_layouts_gives_the_same_weights_here_and_in_diffusers(cache, sdxl, copied, tmp_path):
    """Random weights throughout: norms and biases of the tiny model are all ones and zeros."""
    for file in copied.rglob("*.safetensors"):
        save_file({name: randn(tensor.shape, name) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    family = make("sdxl", cache, str(copied))
    original = {}
    for component in Sdxl.single_file:
        stored = weights_of(family, component)
        for fused in family.layout(component):
            parts = [stored[part] for part in fused.parts]
            whole = fused.join(parts)
            assert whole.shape == fused.shape([part.shape for part in parts])
            assert [part.tolist() for part in fused.split(whole, [len(p) for p in parts])] == [
                p.tolist() for p in parts
            ]
            original[fused.name] = whole.contiguous()
    save_file(original, tmp_path / "one.safetensors")
    base = make("sdxl", cache, str(tmp_path / "one.safetensors"), base=str(sdxl.folder))
    for component in Sdxl.single_file:
        expected, found = (weights_of(one, component) for one in (family, base))
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
    read = StableDiffusionXLPipeline.from_single_file(
        str(tmp_path / "one.safetensors"), config=str(copied), local_files_only=True
    )
    for component in Sdxl.single_file:
        expected, found = weights_of(family, component), getattr(read, component).state_dict()
        assert found.keys() == expected.keys()
        assert [name for name in expected if not found[name].equal(expected[name])] == []


def test_a_file_of_the_unet_alone_leaves_the_encoders_to_the_folder(cache, sdxl, copied, tmp_path):
    assert_original_file_is_read(sdxl, tmp_path)
    made = make("sdxl", cache, str(tmp_path / "single.safetensors"), base=str(copied))
    assert made.weights("text_encoder_2").entries == make("sdxl", cache, str(copied)).weights("text_encoder_2").entries
    assert made.fingerprint() == sdxl.fingerprint()


def test_the_fingerprint_follows_the_encoders_of_a_single_file(cache, sdxl, tmp_path):
    prints = set()
    for value in (0.0, 1.0):
        file = tmp_path / "mine.safetensors"
        tensor = torch.full((514, 16), value)
        save_file({"conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight": tensor}, file)
        prints.add(make("sdxl", cache, str(file), base=str(sdxl.folder)).fingerprint())
    assert len(prints | {sdxl.fingerprint()}) == 3


def test_original_names_are_those_of_the_published_file(sdxl):
    layout = {part: fused for component in Sdxl.single_file for fused in sdxl.layout(component) for part in fused.parts}
    names = {
        "add_embedding.linear_1.weight": "model.diffusion_model.label_emb.0.0.weight",
        "up_blocks.0.upsamplers.0.conv.bias": "model.diffusion_model.output_blocks.1.2.conv.bias",
        "final_layer_norm.weight": "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight",
        "text_projection.weight": "conditioner.embedders.1.model.text_projection",
        "decoder.mid_block.attentions.0.to_q.weight": "first_stage_model.decoder.mid.attn_1.q.weight",
    }
    assert {part: layout[part].name for part in names} == names
    assert layout["decoder.mid_block.attentions.0.to_q.weight"].shape([(16, 16)]) == (16, 16, 1, 1)


@pytest.mark.parametrize("style", ["diffusers", "kohya"])
def test_a_lora_file_of_unet_and_encoders_is_loaded_as_in_diffusers(cache, tmp_path, style):
    family = training(cache, MIXES[-1])
    model, tensors = model_of(family), {}
    for component, module in model.items():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and matches(name, component, Sdxl.adapter_targets):
                tensors |= LORA_NAMES[style](component, name, layer)
    save_file(tensors, tmp_path / "lora.safetensors", {"format": "pt"})
    family.load_adapter_file(model, tmp_path / "lora.safetensors")
    loaded = adapted_layers(model)
    assert len(loaded) == 4 * 12 + 6 + 12
    for layer in loaded.values():
        (name,) = layer.lora_A
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        assert down.equal(randn(down.shape, "down")) and up.equal(randn(up.shape, "up"))
        assert layer.scaling[name] == 1.0


def diffusers_lora(component: str, name: str, layer: nn.Linear) -> dict[str, Tensor]:
    down, up = randn((4, layer.in_features), "down"), randn((layer.out_features, 4), "up")
    return {f"{component}.{name}.lora_A.weight": down, f"{component}.{name}.lora_B.weight": up}


def kohya_lora(component: str, name: str, layer: nn.Linear) -> dict[str, Tensor]:
    place = f"{Sdxl.kohya_prefixes[component]}_{name.replace('.', '_')}"
    down, up = diffusers_lora(component, name, layer).values()
    return {f"{place}.lora_down.weight": down, f"{place}.lora_up.weight": up, f"{place}.alpha": torch.tensor(4.0)}


LORA_NAMES = {"diffusers": diffusers_lora, "kohya": kohya_lora}


def randn(shape: Sequence[int], name: str) -> Tensor:
    return torch.randn(*shape, generator=generator("test", name))


# Errors


@pytest.mark.parametrize(
    "name", ["text_encoder_2/config.json", "tokenizer_2/tokenizer_config.json", "model_index.json"]
)
def test_a_folder_that_lacks_a_part_is_refused(cache, copied, name):
    (copied / name).unlink()
    assert refusal("sdxl", cache, str(copied)) == (
        f"model.path {copied}: no {name}; expected a diffusers folder. Download it or set model.path: tiny"
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"addition_embed_type": None}, "4 input channels and addition_embed_type None"),
        ({"in_channels": 9}, "9 input channels and addition_embed_type text_time"),
    ],
    ids=["SD 1.5", "inpainting"],
)
def test_a_unet_of_another_model_is_refused(cache, copied, changes, found):
    edit_json(copied / "unet" / "config.json", **changes)
    assert refusal("sdxl", cache, str(copied)) == (
        f"model.path {copied}: unet/config.json has {found}, SDXL's has 4 and text_time; "
        "set model.path to SDXL base or a model made from it"
    )


def test_text_encoders_of_another_width_are_refused(cache, copied):
    edit_json(copied / "text_encoder" / "config.json", hidden_size=32)
    assert refusal("sdxl", cache, str(copied)) == (
        f"model.path {copied}: unet/config.json reads text of 40 features, the text encoders give 56; "
        "download the folder again"
    )


def test_a_prediction_that_is_not_trained_is_refused(cache, copied):
    edit_json(copied / "scheduler" / "scheduler_config.json", prediction_type="sample")
    assert refusal("sdxl", cache, str(copied)) == (
        f"model.path {copied}: scheduler/scheduler_config.json has prediction_type sample; "
        "set objective.prediction to epsilon or v_prediction"
    )


def test_another_architecture_than_the_folders_is_refused(cache, copied):
    assert refusal("sdxl", cache, str(copied), architecture="base") == (
        f"model.options.architecture: base has {ARCHITECTURES['base']}, but {copied} has levels of [16, 24] channels "
        "with [1, 1] transformer layers; leave it empty or set model.path to base"
    )


def test_a_unet_file_of_another_model_is_refused(cache, copied, tmp_path):
    file = tmp_path / "mine.safetensors"
    save_file({"model.diffusion_model.out.0.weight": torch.zeros(32)}, file)
    with pytest.raises(InputError) as caught:
        make("sdxl", cache, str(file), base=str(copied)).weights("unet")
    assert str(caught.value) == (
        f"{file}: 'model.diffusion_model.out.0.weight' has shape [32], the model needs [16]; "
        "the file and the folder's config.json belong to different models"
    )
