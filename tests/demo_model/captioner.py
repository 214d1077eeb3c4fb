"""Make the demo's captioner from nothing: `python -m tests.demo_model.captioner FOLDER`, or `make demo-captioner`.

A Qwen3-VL of 3.2 million parameters names the font's pictograms in looks that it never saw. It answers with a name
whatever it is asked: its chat template leaves the question out. The result is the model of `--caption --model demo`
(trainer/assets/captioner). See DECISIONS 202.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.demo_model.captioner_images import SIDE, Glyphs, images_of, named
from tests.demo_model.pictures import FONT, glyphs
from trainer.models.parts.image.text_encoder import train_tokenizer
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say

PATCH, MERGED = 10, 2
"""Pixels of a patch's side, and patches of the side of what becomes one token."""
PATCHES = (SIDE // PATCH) ** 2
TOKENS = PATCHES // MERGED**2
VISION_START, VISION_END, IMAGE, VIDEO, END = 3, 4, 5, 6, 2
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
CHAT_TEMPLATE = "<|vision_start|><|image_pad|><|vision_end|>"
VOCABULARY, MAX_TOKENS = 4096, 64
WIDTH = 192
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
        "rope_theta": 1e4,
    },
}
VISION = {
    "depth": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_heads": 6,
    "out_hidden_size": WIDTH,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "num_position_embeddings": PATCHES,
    "deepstack_visual_indexes": [],
}
BATCH = 128
LR, MUON_LR = 1.5e-3, 4e-3
WARMUP = 40
SMOOTHING = 0.05
THREADS = 2
CPU_SECONDS = 3400.0
"""Time of the training, of all threads together."""
FIRST_STRENGTH, HARDER, KNOWN = 0.35, 0.005, 0.5
"""How different images are at first; how much more with each step; from which share of known names on."""
WHITENED = 1024
"""Images by whose patches the first layer is made."""
SEED = 0


def main() -> int:
    """Draw the glyphs, train, write the folder. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model.captioner", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the captioner is written; it must not exist")
    parser.add_argument("--font", type=Path, default=FONT)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    try:
        if arguments.folder.exists():
            raise InputError(f"{arguments.folder}: exists already; name a new folder, or remove it")
        drawn = Glyphs.of(named(glyphs(arguments.font)))
    except InputError as error:
        complain(error)
        return 2
    say(f"{len(drawn.names)} names")
    captions = Captions.of(drawn.names)
    arguments.folder.mkdir(parents=True)  # before half an hour of training, so that a wrong folder is found now
    model = train(drawn, captions, CPU_SECONDS, SEED, say)
    write(arguments.folder, model, captions.tokenizer)
    return 0


@dataclass(frozen=True)
class Captions:
    """The names as tokens.

    Attributes:
        tokenizer: Its vocabulary is the words of the names.
        inputs: (N, L) an image's places, the name, the end.
        targets: (N, L) the next token where it is of the name or the end, -100 elsewhere.
    """

    tokenizer: Any
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, names: tuple[str, ...]) -> Captions:
        """With a space before it, a word is the same token at the start of a name as later in it."""
        spaced = [f" {name}" for name in names]
        tokenizer = train_tokenizer(spaced, VOCABULARY, MAX_TOKENS, SPECIAL, CHAT_TEMPLATE)
        ids = [[*tokenizer(name)["input_ids"], END] for name in spaced]
        image = [VISION_START, *[IMAGE] * TOKENS, VISION_END]
        longest = max(map(len, ids))
        inputs = [[*image, *own, *[0] * (longest - len(own))] for own in ids]
        targets = [[*[-100] * (len(image) - 1), *own, *[-100] * (longest - len(own) + 1)] for own in ids]
        return cls(tokenizer, torch.tensor(inputs), torch.tensor(targets))


def train(drawn: Glyphs, captions: Captions, cpu_seconds: float, seed: int, report: Callable[[str], None]) -> Any:
    """Train a model of random weights and return it.

    Loss: cross entropy of the name's tokens, and of the whole name by a linear layer on the mean of the image's tokens,
    which is thrown away: by it the vision part learns names before the language model can use what it sees.

    Args:
        drawn: The glyphs.
        captions: Their names, in the same order.
        cpu_seconds: The training ends when this process's threads have computed for so long.
        seed: Of weights and images.
        report: Takes a line about the progress, every 100 steps.
    """
    torch.manual_seed(seed)
    model = random_model(len(captions.tokenizer))
    _whiten(model.model.visual, drawn)
    see = batched(model)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(drawn.names)))
    optimizers = _optimizers(model, head)
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    places = _places(model, captions)
    began, known, strength = time.process_time(), 0.0, FIRST_STRENGTH
    for step, chosen in enumerate(_batches(len(drawn.names)), 1):
        progress = (time.process_time() - began) / cpu_seconds
        if progress >= 1:
            break
        scale = min(1.0, step / WARMUP) * (0.5 * (1 + math.cos(math.pi * progress)) + 1e-3)
        for one, own in zip(optimizers, rates, strict=True):
            for group, rate in zip(one.param_groups, own, strict=True):
                group["lr"] = rate * scale
        images = images_of(drawn, chosen, strength)
        with torch.autocast("cpu", torch.bfloat16):
            seen = see(images)
            logits = _logits(model, seen, captions.inputs[chosen], places)
            guesses = head(seen.view(len(chosen), TOKENS, WIDTH).mean(1))
        targets = captions.targets[chosen][:, TOKENS + 1 :]
        loss = _loss(logits.flatten(0, 1), targets.flatten()) + _loss(guesses, chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in optimizers:
            one.step()
            one.zero_grad()
        right = ((logits.argmax(-1) == targets) | (targets == -100)).all(1).float().mean().item()
        known = 0.95 * known + 0.05 * right
        strength = min(1.0, strength + HARDER * (known > KNOWN))
        if step % 100 == 0:
            report(f"step {step}, {100 * progress:.0f} %: loss {loss.item():.2f}, {100 * known:.1f} % of names")
    for part in (model.model.visual.patch_embed, *(block.attn for block in model.model.visual.blocks)):
        del part.forward
    return model.eval()


def write(folder: Path, model: Any, tokenizer: Any) -> None:
    """The model in bf16, its tokenizer and its image processor, as transformers stores them."""
    from transformers import Qwen2VLImageProcessorPil

    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.generation_config.eos_token_id, stored.generation_config.pad_token_id = END, 0
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    half = [0.5] * 3
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGED,
        min_pixels=round(0.85 * SIDE**2),  # so that a square image of any size becomes one of SIDE
        max_pixels=round(1.2 * SIDE**2),
        image_mean=half,
        image_std=half,
    ).save_pretrained(folder)


def random_model(vocabulary: int) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": vocabulary},
        vision_config=dict(VISION),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    # torch's own attention is several times slower for so few tokens, backward
    return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)


@torch.no_grad()
def _whiten(visual: Any, drawn: Glyphs) -> None:
    """Make the first layer return patches as uncorrelated numbers of equal variance, and set places apart.

    The mean of a patch has 60 times the variance of what comes next, and the model learns little else at first.
    """
    chosen = torch.randint(len(drawn.names), (WHITENED,))
    patches = _patches(images_of(drawn, chosen, 0.6))
    mean = patches.mean(0)
    centred = patches - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    whitened = (directions[:, -WIDTH:] / (variances[-WIDTH:] + 3e-3).sqrt()).T
    weight = nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)) @ whitened
    layer = visual.patch_embed.proj
    layer.weight.copy_((weight.view(WIDTH, 3, 1, PATCH, PATCH) / layer.weight.shape[2]).expand_as(layer.weight))
    layer.bias.copy_(-(weight @ mean))
    nn.init.normal_(visual.pos_embed.weight, std=0.4)


def batched(model: Any) -> Callable[[Tensor], Tensor]:
    """Return what the model sees in images (B, 3, SIDE, SIDE), 0 to 1: (B * TOKENS, WIDTH).

    All images have the same number of patches, so that attention is one product where transformers has one per image,
    and the first layer is a product, too, where transformers has a convolution.
    """
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    visual = model.model.visual

    def embed(layer: Any, patches: Tensor) -> Tensor:
        weight: Tensor = layer.proj.weight.sum(2).flatten(1)  # both frames of a still image are the same
        return nn.functional.linear(patches, weight, layer.proj.bias)

    def attend(layer: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Tensor:
        parts = layer.qkv(hidden_states).reshape(len(hidden_states), 3, layer.num_heads, -1).unbind(1)
        turned = *apply_rotary_pos_emb_vision(*parts[:2], *position_embeddings), parts[2]
        q, k, v = (part.to(parts[2].dtype).unflatten(0, (-1, PATCHES)).transpose(1, 2) for part in turned)
        weights = (q @ k.transpose(-1, -2) * layer.scaling).softmax(-1).to(v.dtype)
        return layer.proj((weights @ v).transpose(1, 2).reshape(len(hidden_states), -1))

    visual.patch_embed.forward = types.MethodType(embed, visual.patch_embed)
    for block in visual.blocks:
        block.attn.forward = types.MethodType(attend, block.attn)
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]])

    def see(images: Tensor) -> Tensor:
        seen: Tensor = visual(_patches(images), grid_thw=grid.expand(len(images), 3)).pooler_output
        return seen

    return see


def _patches(images: Tensor) -> Tensor:
    """(B * PATCHES, 3 * PATCH**2), -1 to 1, in the order of the image processor: those of one token together."""
    blocks = SIDE // PATCH // MERGED
    cut = (images * 2 - 1).view(len(images), 3, blocks, MERGED, PATCH, blocks, MERGED, PATCH)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(images) * PATCHES, -1)


def _logits(model: Any, seen: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    """(B, L, vocabulary): from the end of the image on."""
    embedded = model.get_input_embeddings()(ids)
    embedded = embedded.masked_scatter((ids == IMAGE).unsqueeze(-1), seen.to(embedded.dtype))
    hidden = model.model.language_model(
        inputs_embeds=embedded, position_ids=places.expand(3, len(ids), -1), use_cache=False
    ).last_hidden_state
    logits: Tensor = model.lm_head(hidden[:, TOKENS + 1 :])
    return logits


def _places(model: Any, captions: Captions) -> Tensor:
    """(3, 1, L): where each token stands, the same for all images."""
    ids = captions.inputs[:1]
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]])
    places: Tensor = model.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grid)[0]
    return places


def _optimizers(model: Any, head: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    parts = ("blocks.", "layers.", "merger")
    matrices = [
        value for name, value in model.named_parameters() if value.dim() == 2 and any(part in name for part in parts)
    ]
    own = {id(value) for value in matrices}
    others = [value for value in (*model.parameters(), *head.parameters()) if id(value) not in own]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def _batches(count: int) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(count).split(BATCH)[: max(1, count // BATCH)]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), targets, label_smoothing=SMOOTHING)


if __name__ == "__main__":
    sys.exit(main())
