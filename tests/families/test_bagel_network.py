"""BAGEL's network against the models it was made from, packed and sharded, and its published file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.distributed import run_ranks
from trainer.config import ParallelConfig, TrainConfig
from trainer.families._bagel import (
    BAGEL_7B_MOT,
    BLOCKS,
    Bagel,
    BagelSizes,
    VisionSizes,
    attention_mask,
    grid_waves,
    published_layout,
    rotary_waves,
    timestep_waves,
)
from trainer.families._folder import fill_random
from trainer.parallel.calls import check_calls
from trainer.parallel.mesh import device_mesh
from trainer.parallel.shard import blocks_of, parallelize
from trainer.weights import WeightFiles, read_tensor
from trainer.world import World

TINY = BagelSizes(
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_width=48,
    vocabulary=64,
    vision=VisionSizes(width=24, num_layers=2, num_heads=3, hidden_width=40, patch_size=4, max_side=6),
    latent_side=6,
    latent_numbers=16,
)


def made() -> Bagel:
    """With the same weights every time."""
    with torch.device("meta"):
        model = Bagel(TINY)
    fill_random(model, "bagel")
    model.vision_positions.grid.copy_(grid_waves(TINY.vision.max_side, TINY.width))
    model.latent_positions.grid.copy_(grid_waves(TINY.latent_side, TINY.width))
    return model


class Text(NamedTuple):
    """Some tokens, by their number."""

    length: int


class Looked(NamedTuple):
    """A picture of rows x columns patches that is looked at."""

    rows: int
    columns: int


class Drawn(NamedTuple):
    """A picture of rows x columns patches of latents that is drawn."""

    rows: int
    columns: int


Piece = Text | Looked | Drawn


def packed(sequences: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """Arguments of the network for sequences of pieces; contents depend on the place in the sequence only."""
    tokens: dict[str, list[tuple[Any, ...]]] = {"text": [], "patches": [], "latents": []}
    for number, pieces in enumerate(sequences):
        place = position = 0
        for index, piece in enumerate(pieces):
            kind, count = ("text", piece[0]) if isinstance(piece, Text) else ("", piece[0] * piece[1])
            kind = kind or ("patches" if isinstance(piece, Looked) else "latents")
            for part in range(count):
                at = position + part if kind == "text" else position
                grid = 0 if isinstance(piece, Text) else part // piece.columns * 6 + part % piece.columns
                tokens[kind].append((number, place + part, index, kind != "text", kind == "latents", at, grid))
            place += count
            position += count if kind == "text" else 1
    order = [*tokens["text"], *tokens["patches"], *tokens["latents"]]
    number, place, index, whole, noisy, position, _ = (torch.tensor(column) for column in zip(*order, strict=True))
    patches, latents = tokens["patches"], tokens["latents"]

    def content(places: list[tuple[Any, ...]], width: int) -> Tensor:
        rows = [torch.sin(torch.arange(width) * 1.7 + 3 * token[1] + token[6]) for token in places]
        return torch.stack(rows) if rows else torch.zeros(0, width)

    def grid(places: list[tuple[Any, ...]]) -> Tensor:
        return torch.tensor([token[6] for token in places], dtype=torch.long)

    return {
        "text": torch.tensor([7 * token[1] % TINY.vocabulary for token in tokens["text"]]),
        "predicted": torch.arange(len(tokens["text"])),
        "patches": content(patches, TINY.vision.patch_numbers),
        "patch_places": grid(patches),
        "patch_pictures": torch.tensor([100 * token[0] + token[2] for token in patches], dtype=torch.long),
        "latents": content(latents, TINY.latent_numbers),
        "latent_places": grid(latents),
        "sigma": torch.tensor([0.2 + 0.01 * token[6] for token in latents]),
        "positions": position,
        "mask": attention_mask(number, place, index, whole, noisy),
    }


LOOKING: list[Piece] = [Looked(2, 3), Text(5)]
DRAWING: list[Piece] = [Text(4), Drawn(3, 2)]
BOTH: list[Piece] = [Text(2), Looked(2, 2), Text(3), Drawn(2, 2)]


def outputs(*sequences: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = made()(**packed(sequences))
    return found


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_packed_sequences_give_what_each_gives_alone() -> None:
    sequences = [LOOKING, DRAWING, BOTH]
    alone = [outputs(sequence) for sequence in sequences]
    for found, parts in zip(outputs(*sequences), zip(*alone, strict=True), strict=True):
        close(found, torch.cat(parts))


def test_text_sees_what_came_before_it_and_a_picture_all_of_itself_but_nothing_sees_a_picture_that_is_drawn() -> None:
    pieces = [Text(2), Looked(1, 2), Drawn(1, 2), Text(2)]
    arguments = packed([pieces])
    # In the network's order: four of text, two of patches, two of latents.
    expected = """
        10000000
        11000000
        11101100
        11111100
        11001100
        11001100
        11001111
        11001111
    """
    rows = [[digit == "1" for digit in line] for line in expected.split()]
    assert arguments["mask"].tolist() == rows


def test_other_sequences_do_not_see_each_other() -> None:
    mask = packed([[Text(2)], [Text(1), Drawn(1, 1)]])["mask"]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_the_understanding_expert_is_the_language_model_it_was_made_from() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ours = made()
    config = Qwen3Config(
        vocab_size=TINY.vocabulary,
        hidden_size=TINY.width,
        intermediate_size=TINY.hidden_width,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_width,
        rms_norm_eps=TINY.eps,
        rope_parameters={"rope_type": "default", "rope_theta": TINY.rope_theta},
        attention_bias=True,  # of the output too, where ours has none
        tie_word_embeddings=False,
    )
    theirs = Qwen3ForCausalLM(config).eval()
    prefix = "language_model."
    state = {
        tensor.name.removeprefix(prefix): ours.state_dict()[tensor.parts[0]]
        for tensor in published_layout(ours)
        if tensor.name.startswith(prefix) and "moe_gen" not in tensor.name
    }
    left = theirs.load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert {name.rpartition("self_attn.")[2] for name in left.missing_keys} == {"o_proj.bias"}
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.o_proj.bias.zero_()
        arguments = packed([[Text(9)]])
        expected = theirs(input_ids=arguments["text"][None]).logits[0]
        close(ours(**arguments)[0], expected)


def test_the_vision_encoder_is_the_siglip_it_was_made_from() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    ours, sizes = made(), TINY.vision
    config = SiglipVisionConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden_width,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        image_size=sizes.patch_size * sizes.max_side,
        patch_size=sizes.patch_size,
        layer_norm_eps=sizes.eps,
        hidden_act="gelu_pytorch_tanh",
        vision_use_head=False,
    )
    theirs = SiglipVisionModel(config).eval()
    prefix = "vit_model.vision_model."
    state = {
        tensor.name.removeprefix(prefix): ours.state_dict()[tensor.parts[0]]
        for tensor in published_layout(ours)
        if tensor.name.startswith(prefix)
    }
    patch = "embeddings.patch_embedding.weight"
    state[patch] = state[patch].unflatten(1, (sizes.patch_size, sizes.patch_size, 3)).permute(0, 3, 1, 2)
    own = theirs.state_dict()
    inside = "vision_model." if any(name.startswith("vision_model.") for name in own) else ""
    theirs.load_state_dict({f"{inside}{name}": tensor for name, tensor in state.items()})
    side, pixels = sizes.max_side, torch.randn(1, 3, config.image_size, config.image_size)
    size = sizes.patch_size
    patches = pixels[0].reshape(3, side, size, side, size).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
    count = len(patches)
    with torch.no_grad():
        found = ours.vision(patches, torch.arange(count), torch.zeros(count))
        close(found, theirs(pixel_values=pixels).last_hidden_state[0])


def test_pictures_of_several_shapes_do_not_see_each_other() -> None:
    vision, arguments = made().vision, packed([[Looked(2, 3)], [Looked(1, 4)]])
    parts = [arguments[name] for name in ("patches", "patch_places", "patch_pictures")]
    with torch.no_grad():
        together = vision(*parts)
        close(together[:6], vision(*(part[:6] for part in parts)))
        close(together[6:], vision(*(part[6:] for part in parts)))


def test_places_and_timesteps_are_written_as_in_the_sources() -> None:
    grid = get_2d_sincos_pos_embed(32, 6, base_size=6, output_type="pt").float()
    torch.testing.assert_close(grid_waves(6, 32), grid, atol=1e-6, rtol=0)
    sigma = torch.tensor([0.0, 0.3, 1.0])
    expected = get_timestep_embedding(sigma, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    torch.testing.assert_close(timestep_waves(sigma), expected, atol=1e-6, rtol=0)
    assert rotary_waves(torch.arange(3), TINY)[0].shape == (3, TINY.head_width)


PUBLISHED = {
    "language_model.model.embed_tokens.weight": (152064, 3584),
    "language_model.model.layers.27.self_attn.q_proj.bias": (3584,),
    "language_model.model.layers.27.self_attn.k_proj_moe_gen.weight": (512, 3584),
    "language_model.model.layers.0.self_attn.q_norm_moe_gen.weight": (128,),
    "language_model.model.layers.0.mlp_moe_gen.down_proj.weight": (3584, 18944),
    "language_model.model.layers.0.post_attention_layernorm_moe_gen.weight": (3584,),
    "language_model.model.norm_moe_gen.weight": (3584,),
    "language_model.lm_head.weight": (152064, 3584),
    "vit_model.vision_model.embeddings.patch_embedding.weight": (1152, 588),
    "vit_model.vision_model.embeddings.position_embedding.weight": (4900, 1152),
    "vit_model.vision_model.encoder.layers.25.mlp.fc1.weight": (4304, 1152),
    "vit_model.vision_model.post_layernorm.bias": (1152,),
    "connector.fc1.weight": (3584, 1152),
    "vit_pos_embed.pos_embed": (4900, 3584),
    "time_embedder.mlp.0.weight": (3584, 256),
    "vae2llm.weight": (3584, 64),
    "llm2vae.bias": (64,),
    "latent_pos_embed.pos_embed": (4096, 3584),
}
"""Some tensors of the published file."""


def test_the_published_model_is_built_on_the_meta_device_with_its_published_size() -> None:
    with torch.device("meta"):
        model = Bagel(BAGEL_7B_MOT)
    shapes = {tensor.name: tuple(model.state_dict()[tensor.parts[0]].shape) for tensor in published_layout(model)}
    assert PUBLISHED.items() <= shapes.items()
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    assert numbers == 14_607_260_128
    # Two bytes each are the published 29.2 GB of ema.safetensors.
    assert round(2 * numbers / 1e9, 1) == 29.2


def test_every_tensor_goes_to_a_file_in_the_published_layout_and_comes_back_bit_by_bit(tmp_path: Path) -> None:
    model = made().to(torch.bfloat16)
    state, layout = model.state_dict(), published_layout(model)
    assert len({tensor.name for tensor in layout}) == len(state)
    save_file({tensor.name: state[tensor.parts[0]].contiguous() for tensor in layout}, tmp_path / "ema.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = WeightFiles.read([tmp_path / "ema.safetensors"]).by_our_names(layout, shapes)
    assert found.entries.keys() == state.keys()
    assert all(torch.equal(read_tensor(found.entries[name]), tensor) for name, tensor in state.items())


def loss_of(model: nn.Module, sequences: Sequence[Sequence[Piece]]) -> Tensor:
    """Of both kinds, so that every weight has a gradient."""
    arguments = packed(sequences)
    logits, velocity = model(**arguments)
    text = F.cross_entropy(logits, (arguments["text"] + 1) % TINY.vocabulary, reduction="sum")
    found: Tensor = text / 10 + (velocity - arguments["latents"]).square().sum() / 10
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert missing == []
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in found.items()
        if gradient is not None
    }


@pytest.mark.parametrize("sequence", [LOOKING, DRAWING, [Text(3)]])
def test_a_batch_without_pictures_or_without_latents_still_reaches_every_weight(sequence: Sequence[Piece]) -> None:
    model = made()
    loss_of(model, [sequence]).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_fsdp2_can_follow_every_call_of_it() -> None:
    model = made()
    check_calls(model, blocks_of(model, BLOCKS), (), lambda: loss_of(model, [BOTH]))


def test_all_of_it_is_sharded_block_by_block() -> None:
    assert len(blocks_of(made(), BLOCKS)) == TINY.num_layers + TINY.vision.num_layers


BATCHES: list[list[Sequence[Piece]]] = [[LOOKING, BOTH], [DRAWING], [[Text(4)]], [BOTH, DRAWING]]
"""Of four ranks: what one looks at another does not."""
CASES = [
    (strategy, offload, checkpointing)
    for strategy, offload in (("full", False), ("grad_op", False), ("full", True))
    for checkpointing in ("none", "full")
]


def sharded_gradients(world: World) -> list[dict[str, Tensor]]:
    """Of every case, after forward and backward of this rank's batch."""
    found = []
    for strategy, offload, checkpointing in CASES:
        parallel = ParallelConfig(devices=world.size, strategy=strategy, cpu_offload=offload)  # type: ignore[arg-type]
        train = TrainConfig(precision="fp32", checkpointing=checkpointing)  # type: ignore[arg-type]
        mesh = device_mesh(parallel, world, strategy)  # type: ignore[arg-type]
        model = parallelize(made(), train, parallel, strategy, mesh, BLOCKS)  # type: ignore[arg-type]
        loss_of(model, BATCHES[world.rank]).backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_forward_and_backward_on_several_ranks_give_the_gradients_of_one_process(ranks: int) -> None:
    model = made()
    for batch in BATCHES[:ranks]:
        (loss_of(model, batch) / ranks).backward()
    expected = gradients(model)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for rank, cases in enumerate(run_ranks(ranks, sharded_gradients)):
        for case, found in zip(CASES, cases, strict=True):
            assert found.keys() == expected.keys()
            worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
            assert worst <= 1e-6 * largest, f"rank {rank}, {case}: {worst / largest:.1e}"
