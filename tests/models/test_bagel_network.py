"""BAGEL's network against the models it was made from, packed and sharded, and its published file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed import run_ranks
from tests.distributed.gradients import whole_gradients
from trainer.config.sections import ParallelConfig, TrainConfig
from trainer.distributed.world import World
from trainer.models.parts.bagel.bagel_network import (
    BAGEL_7B_MOT,
    BLOCKS,
    Bagel,
    BagelSizes,
    VisionSizes,
    grid_waves,
    published_layout,
    rotary_waves,
    timestep_waves,
)
from trainer.models.parts.bagel.bagel_packing import (
    ConditioningPiece,
    DrawnPiece,
    Marks,
    Piece,
    TextPiece,
    pack,
    patched,
    unpatched,
)
from trainer.models.parts.folder import fill_random
from trainer.parallel.fsdp_rules import weight_problems
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import ShardSpec, blocks_of, parallelize
from trainer.weights.files import WeightFiles, read_tensor

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


MARKS = Marks(text_begin=60, text_end=61, image_begin=62, image_end=63)


def text(length: int, in_loss: bool = False) -> TextPiece:
    return TextPiece(torch.arange(length) * 7 % 60, in_loss)


def conditioning(rows: int, columns: int) -> ConditioningPiece:
    size = TINY.vision.patch_size
    return ConditioningPiece(waves(3, size * rows, size * columns))


def drawn(rows: int, columns: int, sigma: float = 0.3) -> DrawnPiece:
    return DrawnPiece(waves(TINY.latent_numbers // 4, 2 * rows, 2 * columns), torch.tensor(sigma))


def waves(*shape: int) -> Tensor:
    """Numbers that differ everywhere."""
    return torch.sin(torch.arange(math.prod(shape)) * 1.7).reshape(shape)


LOOKING: list[Piece] = [conditioning(2, 3), text(2), text(3, in_loss=True)]
DRAWING: list[Piece] = [text(4), drawn(3, 2)]
BOTH: list[Piece] = [text(2), conditioning(2, 2), text(3, in_loss=True), drawn(2, 2)]


def outputs(*sequences: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = made()(**pack(sequences, MARKS, TINY).arguments)
    return found


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_packed_sequences_give_what_each_gives_alone() -> None:
    sequences = [LOOKING, DRAWING, BOTH]
    alone = [outputs(sequence) for sequence in sequences]
    for found, parts in zip(outputs(*sequences), zip(*alone, strict=True), strict=True):
        close(found, torch.cat(parts))


def mask_of(*sequences: Sequence[Piece]) -> list[str]:
    arguments = pack(sequences, MARKS, TINY).arguments
    whole = torch.zeros(len(arguments["back"]), len(arguments["back"]), dtype=torch.int64)
    for row, mask, places in zip(arguments["rows"], arguments["mask"], by_rows(arguments), strict=True):
        whole[row[:places, None], row[None, :places]] = mask[:places, :places].long()
        assert mask[places:].any(1).all()
        assert not mask[:places, places:].any()
    return ["".join(map(str, row)) for row in whole.tolist()]


def by_rows(arguments: dict[str, Tensor]) -> list[int]:
    """How many tokens each row has."""
    length = arguments["rows"].shape[1]
    return torch.bincount(arguments["back"] // length, minlength=len(arguments["rows"])).tolist()


def test_text_sees_what_came_before_it_and_a_picture_all_of_itself_but_nothing_sees_a_picture_that_is_drawn() -> None:
    # In the network's order: begin, token, end; the marks around both pictures; one patch; two patches of latents.
    assert mask_of([text(1), conditioning(1, 1), drawn(1, 2)]) == [
        "1000000000",
        "1100000000",
        "1110000000",
        "1111100100",
        "1111100100",
        "1111111111",
        "1111111111",
        "1111100100",
        "1111111111",
        "1111111111",
    ]
    assert mask_of([drawn(1, 1), text(0)]) == ["11001", "11001", "00100", "00110", "11001"]


def test_other_sequences_do_not_see_each_other() -> None:
    assert mask_of([text(0)], [text(1)]) == ["10000", "11000", "00100", "00110", "00111"]


def test_tokens_stand_where_the_published_model_was_trained_to_find_them() -> None:
    packed = pack([[conditioning(1, 2), text(2), text(1, in_loss=True), drawn(2, 1, 0.25)]], MARKS, TINY)
    found = packed.arguments
    assert found["text"].tolist() == [62, 63, 60, 0, 7, 61, 60, 0, 61, 62, 63]
    assert found["positions"].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 0, 0, 8, 8]
    assert found["predicted"].tolist() == [6, 7]
    assert packed.labels.tolist() == [0, 61]
    assert found["patch_cells"].tolist() == [0, 1]
    assert found["latent_cells"].tolist() == [0, TINY.latent_side]
    assert found["sigma"].tolist() == [0.25, 0.25]


def test_patches_hold_rows_then_columns_then_channels() -> None:
    pixels = torch.arange(3 * 4 * 8.0).reshape(3, 4, 8)
    found = pack([[ConditioningPiece(pixels)]], MARKS, TINY).arguments["patches"]
    assert torch.equal(found[1], pixels[:, :, 4:].permute(1, 2, 0).flatten())
    latents = torch.arange(4 * 4 * 6.0).reshape(4, 4, 6)
    assert torch.equal(patched(latents)[4], latents[:, 2:, 2:4].permute(1, 2, 0).flatten())
    assert torch.equal(unpatched(patched(latents), 4, 6), latents)


def test_each_label_knows_its_sequence() -> None:
    packed = pack([[text(1)], [text(1, in_loss=True)], [text(0, in_loss=True)]], MARKS, TINY)
    assert packed.label_sequences.tolist() == [1, 1, 2]


def test_a_picture_larger_than_the_models_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="an image of 1 x 7 patches is larger than the model's 6 x 6"):
        pack([[drawn(1, 7)]], MARKS, TINY)


def published_below(model: Bagel, prefix: str) -> dict[str, Tensor]:
    """Tensors whose published name begins so, by the rest of it."""
    names = {tensor.name: tensor.parts[0] for tensor in published_layout(model) if tensor.name.startswith(prefix)}
    return {theirs.removeprefix(prefix): model.state_dict()[ours] for theirs, ours in names.items()}


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
    whole = published_below(ours, "language_model.")
    state = {name: tensor for name, tensor in whole.items() if "moe_gen" not in name}
    left = theirs.load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert {name.rpartition("self_attn.")[2] for name in left.missing_keys} == {"o_proj.bias"}
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.o_proj.bias.zero_()
        packed = pack([[text(9, in_loss=True)]], MARKS, TINY)
        expected = theirs(input_ids=packed.arguments["text"][None]).logits[0]
        close(ours(**packed.arguments)[0], expected[:-1])


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
    state = published_below(ours, "vit_model.vision_model.")
    patch = "embeddings.patch_embedding.weight"
    state[patch] = state[patch].unflatten(1, (sizes.patch_size, sizes.patch_size, 3)).permute(0, 3, 1, 2)
    own = theirs.state_dict()
    inside = "vision_model." if any(name.startswith("vision_model.") for name in own) else ""
    theirs.load_state_dict({f"{inside}{name}": tensor for name, tensor in state.items()})
    side, pixels = sizes.max_side, torch.randn(1, 3, config.image_size, config.image_size)
    size = sizes.patch_size
    patches = pixels[0].reshape(3, side, size, side, size).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
    assert torch.equal(patched(pixels[0], size), patches)
    count = len(patches)
    with torch.no_grad():
        numbers = torch.arange(count)
        found = ours.vision(patches, numbers, (numbers[None], numbers, torch.ones(1, 1, count, dtype=torch.bool)))
        close(found, theirs(pixel_values=pixels).last_hidden_state[0])


def test_pictures_of_several_shapes_do_not_see_each_other() -> None:
    vision, arguments = made().vision, pack([[conditioning(2, 3), conditioning(1, 4)]], MARKS, TINY).arguments
    assert arguments["patch_mask"].tolist() == [[[True] * 6], [[True] * 4 + [False] * 2]]

    def features(arguments: dict[str, Tensor]) -> Tensor:
        rows = tuple(arguments[f"patch_{name}"] for name in ("rows", "back", "mask"))
        found: Tensor = vision(arguments["patches"], arguments["patch_cells"], rows)
        return found

    with torch.no_grad():
        together = features(arguments)
        close(together[:6], features(pack([[conditioning(2, 3)]], MARKS, TINY).arguments))
        close(together[6:], features(pack([[conditioning(1, 4)]], MARKS, TINY).arguments)[-4:])


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


@pytest.mark.slow
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
    packed = pack(sequences, MARKS, TINY)
    logits, velocity = model(**packed.arguments)
    text = F.cross_entropy(logits, packed.labels, reduction="sum")
    found: Tensor = text / 10 + (velocity - packed.arguments["latents"]).square().sum() / 10
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every weight has one."""
    found = whole_gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    return found


@pytest.mark.parametrize("sequence", [LOOKING, DRAWING, [text(3)]])
def test_a_batch_without_pictures_or_without_latents_still_reaches_every_weight(sequence: Sequence[Piece]) -> None:
    model = made()
    loss_of(model, [sequence]).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_fsdp2_can_follow_every_call_of_it() -> None:
    model = made()
    assert weight_problems(model, blocks_of(model, BLOCKS), lambda: loss_of(model, [BOTH])) == []


def test_all_of_it_is_sharded_block_by_block() -> None:
    assert len(blocks_of(made(), BLOCKS)) == TINY.num_layers + TINY.vision.num_layers


BATCHES: list[list[Sequence[Piece]]] = [[LOOKING, BOTH], [DRAWING], [[text(4)]], [BOTH, DRAWING]]
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
        model = parallelize(made(), ShardSpec(BLOCKS), train, parallel, strategy, mesh)  # type: ignore[arg-type]
        loss_of(model, BATCHES[world.rank]).backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
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
