"""Names of latent diffusion's tensors in the original single file and in older versions of diffusers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.weights.files import Fused

UNET_PREFIX = "model.diffusion_model."
FIRST_CLIP_PREFIX = "conditioner.embedders.0.transformer.text_model."
SECOND_CLIP_PREFIX = "conditioner.embedders.1.model."
VAE_PREFIX = "first_stage_model."

_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def unet_layout(unet: Any) -> Iterator[Fused]:
    """Map the U-Net's tensors. The original numbers count resnets and the samplers between them through all levels."""
    modules = dict(_UNET_ENDS)
    modules |= _numbered_down(unet.down_blocks) | _numbered_up(unet.up_blocks)
    middle = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
    modules |= {f"mid_block.{ours}": f"middle_block.{theirs}" for ours, theirs in middle.items()}
    for name in unet.state_dict():
        module = next(module for module in modules if name.startswith(f"{module}."))
        inside = name.removeprefix(f"{module}.")
        if ".resnets." in name:
            inside = _renamed(inside, _UNET_RESNET)
        yield Fused(f"{UNET_PREFIX}{modules[module]}.{inside}", (name,))


def _numbered_down(blocks: Any) -> dict[str, str]:
    modules: dict[str, str] = {}
    number = 1
    for level, block in enumerate(blocks):
        for i in range(len(block.resnets)):
            modules[f"down_blocks.{level}.resnets.{i}"] = f"input_blocks.{number}.0"
            modules[f"down_blocks.{level}.attentions.{i}"] = f"input_blocks.{number}.1"
            number += 1
        if block.downsamplers is not None:
            modules[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    return modules


def _numbered_up(blocks: Any) -> dict[str, str]:
    modules: dict[str, str] = {}
    number = 0
    for level, block in enumerate(blocks):
        for i in range(len(block.resnets)):
            modules[f"up_blocks.{level}.resnets.{i}"] = f"output_blocks.{number}.0"
            modules[f"up_blocks.{level}.attentions.{i}"] = f"output_blocks.{number}.1"
            number += 1
        sampler = 2 if "attentions" in dict(block.named_children()) else 1
        modules[f"up_blocks.{level}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{sampler}.conv"
    return modules


def clip_layout(names: Iterable[str]) -> Iterator[Fused]:
    """Map the first text encoder's tensors `names`; the original uses transformers' older names."""
    for name in names:
        yield Fused(FIRST_CLIP_PREFIX + name, (name,))


def open_clip_layout(num_layers: int) -> Iterator[Fused]:
    """Map to open_clip's names: q, k and v are one matrix, and the projection is transposed."""
    ours, theirs = "text_model", SECOND_CLIP_PREFIX
    yield Fused(f"{theirs}token_embedding.weight", (f"{ours}.embeddings.token_embedding.weight",))
    yield Fused(f"{theirs}positional_embedding", (f"{ours}.embeddings.position_embedding.weight",))
    yield Fused(f"{theirs}text_projection", ("text_projection.weight",), transposed=True)
    for kind in ("weight", "bias"):
        yield Fused(f"{theirs}ln_final.{kind}", (f"{ours}.final_layer_norm.{kind}",))
        for i in range(num_layers):
            layer, block = f"{ours}.encoder.layers.{i}", f"{theirs}transformer.resblocks.{i}"
            qkv = tuple(f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv")
            yield Fused(f"{block}.attn.in_proj_{kind}", qkv)
            for name, original in _CLIP_LAYER.items():
                yield Fused(f"{block}.{original}.{kind}", (f"{layer}.{name}.{kind}",))


def vae_layout(vae: Any, prefix: str = VAE_PREFIX) -> Iterator[Fused]:
    """Map the autoencoder's tensors. The original counts the decoder's levels from the image, and its linear layers are
    convolutions of one pixel."""
    last = len(vae.decoder.up_blocks) - 1
    for name, tensor in vae.state_dict().items():
        original = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
        original = original.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        original = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", original)
        original = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", original)
        original = re.sub(r"up_blocks\.(\d+)\.resnets", lambda n: f"up.{last - int(n[1])}.block", original)
        original = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda n: f"up.{last - int(n[1])}.upsample", original)
        side, is_attention, inside = original.partition(".mid_block.attentions.0.")
        if is_attention:
            original = f"{side}.mid.attn_1.{_renamed(inside, _VAE_ATTENTION)}"
        yield Fused(prefix + original, (name,), pointwise=bool(is_attention) and tensor.dim() == 2)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`conv1.weight` -> `in_layers.2.weight`."""
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}"


_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def vae_key(key: str) -> str:
    """The current name of an autoencoder's tensor; older files have other names for its attention."""
    return re.sub(r"(?<=\.attentions\.0\.)(query|key|value|proj_attn)\b", lambda old: _OLD_ATTENTION[old[0]], key)
