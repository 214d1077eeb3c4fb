"""What the tests of all families need: weights loaded without sharding, pictures, batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig, ModelOptions, ObjectiveConfig, SampleConfig
from trainer.models import families
from trainer.models.base import ImageFamily, ModelFamily, MultimodalFamily, SequencePart, TextFamily
from trainer.models.families import get, names
from trainer.models.flow_transformer import FlowTransformer
from trainer.models.objectives.base import Batch, Example
from trainer.rng import SampleRng, generator
from trainer.system.errors import InputError
from trainer.weights.files import WeightFiles, give_storage, read_tensor, stored_tensors

IMAGES = tuple(
    name for name in names() if issubclass(get(name), ImageFamily) and not issubclass(get(name), MultimodalFamily)
)
"""Families that only draw."""
SAME = {"atol": 1e-6, "rtol": 0}


def load(module: nn.Module, files: WeightFiles, blocks: Sequence[str]) -> nn.Module:
    """A `LoadModule` on one process: every tensor of the module whole, from disk."""
    give_storage(module, torch.device("cpu"))
    for name, tensor in stored_tensors(module).items():
        tensor.copy_(read_tensor(files.entries[name]))
    return module.eval().requires_grad_(False)


def make(
    name: str,
    cache: Path,
    path: str = "tiny",
    base: str | None = None,
    objective: ObjectiveConfig | None = None,
    **options: Any,
) -> Any:
    """A family. options: those of `model.options`."""
    model = ModelConfig(family=name, path=path, base=base, options=ModelOptions(**options))
    sections = {"model": model, "objective": objective or ObjectiveConfig(), "data": {"path": "."}}
    return families.make(RunConfig.model_validate(sections), cache)


def refusal(name: str, cache: Path, *args: Any, **options: Any) -> str:
    """The message with which such a family is refused."""
    with pytest.raises(InputError) as caught:
        make(name, cache, *args, **options)
    return str(caught.value)


def model_of(family: ModelFamily) -> nn.ModuleDict:
    """The live components with their weights, and those that guide samples."""
    model = nn.ModuleDict({name: load(family.build(name), family.weights(name), ()) for name in family.live})
    for name, component in model.items():
        for buffer, values in family.computed_buffers(name).items():
            component.get_buffer(buffer).copy_(values)
    if isinstance(family, ImageFamily):
        model.update(family.guides(load))
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def examples(family: ModelFamily, count: int) -> list[Example]:
    if isinstance(family, TextFamily):
        return [row_of(family, f"row {seed} of some text", f"and {seed} more") for seed in range(count)]
    assert isinstance(family, ImageFamily)
    vae, text = family.image_encoder(load), family.text_encoder(load)
    return [
        {**family.encode_image(vae, picture(64, 32, seed)), **family.encode_text(text, f"picture {seed}")}
        for seed in range(count)
    ]


def row_of(family: TextFamily, *documents: str) -> Example:
    """A row of 48 tokens that holds the documents."""
    row = {key: tensor.expand(48).clone() for key, tensor in family.blank_row(1).items()}
    row["loss_mask"][:], row["documents"][:] = False, -1
    begin = 0
    for number, document in enumerate(documents):
        ids = [*family.begin_of_text, *family.tokenize(document), family.end_of_text]
        end = begin + len(ids)
        row["tokens"][begin:end], row["documents"][begin:end] = torch.tensor(ids), number
        row["loss_mask"][begin + 1 : end] = True
        begin = end
    return row


def batch_of(family: ModelFamily, items: Sequence[Example]) -> Batch:
    return {**family.collate(items), "weight": torch.ones(len(items))}


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def recorded_decodes(vae: Any) -> list[Tensor]:
    """What the VAE is given to decode, from now on."""
    seen: list[Tensor] = []
    decode = vae.decode
    vae.decode = lambda latents, *args, **kwargs: seen.append(latents) or decode(latents, *args, **kwargs)
    return seen


def assert_same_picture(ours: Image.Image, theirs: Image.Image) -> None:
    difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
    assert ours.size == theirs.size
    assert difference.max() <= 1, "beyond what rounding to 8 bits explains"


def write_original(family: ModelFamily, file: Path) -> dict[str, Tensor]:
    """A denoiser as the family's layout names and joins its tensors. Returns them as they were.

    They are bf16, and differ within a tensor and between tensors.
    """
    state = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16).random_(256, generator=generator("values", name))
        for name, tensor in family.build(family.components[0]).state_dict().items()
    }
    layout = family.layout(family.components[0])
    save_file({t.name: t.join([state[part] for part in t.parts]).contiguous() for t in layout}, file)
    return state


def assert_diffusers_reads_the_layout(family: ModelFamily, model_class: Any, folder: Path) -> None:
    """A file written by the family's layout is the same model to diffusers."""
    file = folder / "single.safetensors"
    state = write_original(family, file)
    read = model_class.from_single_file(
        str(file),
        config=str(family.folder),
        subfolder=family.components[0],
        local_files_only=True,
        torch_dtype=torch.bfloat16,
    ).state_dict()
    assert read.keys() == state.keys()
    assert [name for name, tensor in state.items() if not tensor.equal(read[name])] == []


def assert_original_file_is_read(family: Any, folder: Path, **options: Any) -> None:
    """A file written by the family's layout, beside a folder without the denoiser's weights, is the same model."""
    component, file = family.components[0], folder / "single.safetensors"
    state = write_original(family, file)
    base = shutil.copytree(family.folder, folder / "base")
    for weights in (base / component).glob("diffusion_pytorch_model*"):
        weights.unlink()
    made = make(family.config.family, family.cache, str(file), base=str(base), **options)
    read = load(made.build(component), made.weights(component), ()).state_dict()
    assert [name for name, tensor in state.items() if not tensor.equal(read[name])] == []


def assert_captions_of_any_length_share_a_batch(family: ModelFamily) -> None:
    """And each costs together with others what it costs alone."""
    encoder, model = family.text_encoder(load), model_of(family)
    captions = ["fox", "a red fox in the snow", "a long caption of many words"]
    items = [
        {"latents": item["latents"], **family.encode_text(encoder, caption)}
        for item, caption in zip(examples(family, 3), captions, strict=True)
    ]
    assert_they_cost_together_what_they_cost_alone(family, model, items)


def assert_they_cost_together_what_they_cost_alone(
    family: ModelFamily, model: nn.ModuleDict, items: Sequence[Example]
) -> None:
    """items: three, with captions of three lengths."""
    assert len({len(item["prompt_embeds"]) for item in items}) == 3
    assert len({family.batch_key(item) for item in items}) == 1
    together = family.loss(model, batch_of(family, items), SampleRng(0, [4, 5, 6])).total
    alone = [
        family.loss(model, batch_of(family, [item]), SampleRng(0, [index])).total
        for index, item in zip((4, 5, 6), items, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone).sum(), atol=1e-5, rtol=0)


def assert_padding_is_read_by_no_token(
    family: FlowTransformer, model: nn.ModuleDict, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Batch, Tensor]:
    """Two captions of other lengths: what stands behind the shorter one changes nothing.

    shape: of the latents.  Returns (noisy latents, sigma, batch with other padding, prediction).
    """
    encoder = family.text_encoder(load)
    items = [
        {"latents": torch.zeros(shape), **family.encode_text(encoder, caption)}
        for caption in ("fox", "a red fox in the snow of a long winter")
    ]
    batch = family.collate(items)
    noisy, sigma = torch.randn(2, *shape), torch.tensor([0.3, 0.8])
    before = family.predict(model, noisy, sigma, batch, 1.0)
    batch["prompt_embeds"][0, len(items[0]["prompt_embeds"]) :] = 1e3
    after = family.predict(model, noisy, sigma, batch, 1.0)
    assert torch.isfinite(before).all()
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
    alone = family.predict(model, noisy[:1], sigma[:1], family.collate(items[:1]), 1.0)
    torch.testing.assert_close(after[:1], alone, atol=1e-5, rtol=0)
    return noisy, sigma, batch, after


def sampled_times(family: ModelFamily, argument: str, size: int, steps: int) -> list[float]:
    """What the denoiser is given as `argument` at each step of a square sample, to five digits."""
    seen: list[float] = []
    model = model_of(family)
    model[family.components[0]].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(round(kwargs[argument].item(), 5)), with_kwargs=True
    )
    text, cfg = family.encode_text(family.text_encoder(load), "a fox"), SampleConfig(size=(size, size), steps=steps)
    family.sample(model, family.image_encoder(load), text, None, cfg, SampleRng(0, [0]))
    return seen


def without_bar(pipeline: Any) -> Any:
    """A pipeline of diffusers that draws no progress bar."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def question_of(family: MultimodalFamily, image: Image.Image, question: str, answer: str) -> Example:
    """The example of an answer about an image."""
    parts = [SequencePart("conditioning", image), SequencePart("text", question), SequencePart("target", answer)]
    return family.encode_sequence(parts)
