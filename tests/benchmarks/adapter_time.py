"""Forward and backward of a block with each adapter, against the same with lora.

All kinds live in one process and take turns, so that the noise of a shared machine meets all of them. What counts is
CPU seconds of one thread, in fp32. Real layers are wider and see more tokens: both make every adapter cheaper.

    python -m tests.benchmarks.adapter_time        about 45 s; exit code 1 when a limit is exceeded by 15 %
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import Tensor, nn

from tests.commands import takes_no_arguments
from trainer import adapters
from trainer.config.sections import (
    AdapterSection,
    BoftAdapter,
    DiagOftAdapter,
    DoraAdapter,
    LohaAdapter,
    LokrAdapter,
    LoraAdapter,
)
from trainer.models.families.flux2 import Flux2, image_ids, text_ids

WIDTH = 1024
IMAGE_TOKENS = (16, 24)
TEXT_TOKENS = 128
ROUNDS = 7
NOISE = 1.15
"""What a ratio may be over its limit before the run fails."""


@dataclass(frozen=True)
class Case:
    """An adapter with its defaults. limit: largest time relative to lora."""

    cfg: AdapterSection
    limit: float


CASES = {
    case.cfg.type: case
    for case in (
        Case(LoraAdapter(), 1.0),
        Case(DoraAdapter(), 2.0),
        Case(LohaAdapter(), 2.2),
        Case(LokrAdapter(), 1.3),
        Case(DiagOftAdapter(), 1.3),
        Case(BoftAdapter(), 2.0),
    )
}

Pass = Callable[[], object]


def adapted(cfg: AdapterSection) -> nn.ModuleDict:
    """One double and one single block of FLUX.2, 1024 wide, with the adapter at random non-zero values."""
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=128,
            num_attention_heads=WIDTH // 128,
            joint_attention_dim=256,
            timestep_guidance_channels=64,
            guidance_embeds=False,
        )
    model = nn.ModuleDict({"transformer": transformer})
    targets = adapters.Targets(Flux2.adapter_targets, Flux2.conv_targets, Flux2.halves_swapped)
    adapters.inject(model, cfg, targets, "flux2")
    model.to_empty(device="cpu")
    values = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=values)
    return model.train()


def forward_and_backward(model: nn.ModuleDict, inputs: dict[str, Tensor]) -> Pass:
    """One pass of the model on the inputs, with a gradient for every parameter of the adapter."""

    def run() -> None:
        model.zero_grad()
        model["transformer"](**inputs, return_dict=False)[0].square().mean().backward()

    return run


def make_inputs() -> dict[str, Tensor]:
    """512 tokens, of which 384 of the image."""
    values = torch.Generator().manual_seed(1)
    height, width = IMAGE_TOKENS
    return {
        "hidden_states": torch.randn(1, height * width, 64, generator=values),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 256, generator=values),
        "timestep": torch.tensor([0.5]),
        "img_ids": image_ids(height, width),
        "txt_ids": text_ids(TEXT_TOKENS),
    }


def measure(passes: dict[str, Pass], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """CPU seconds of each pass, round by round: they take turns, beginning with another one each round."""
    for run in passes.values():
        run()
    names = list(passes)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.process_time()
            passes[name]()
            seconds[name].append(time.process_time() - began)
    return seconds


def main() -> int:
    """Print one row per adapter. Returns 1 when one is over its limit, noise allowed for."""
    torch.set_num_threads(1)
    inputs = make_inputs()
    seconds = measure({name: forward_and_backward(adapted(case.cfg), inputs) for name, case in CASES.items()})
    print(f"{'':12}{'seconds':>9}{'to lora':>9}{'limit':>7}   (CPU s of a forward and a backward, medians)")
    return int(not all([_row(name, case.limit, seconds) for name, case in CASES.items()]))


def _row(name: str, limit: float, seconds: dict[str, list[float]]) -> bool:
    """Print an adapter's figures; whether they are within its limit."""
    ratio = statistics.median(own / lora for own, lora in zip(seconds[name], seconds["lora"], strict=True))
    within = ratio <= limit * NOISE
    figures = f"{statistics.median(seconds[name]):>9.3f}{ratio:>9.2f}{limit:>7.1f}"
    print(f"{name:12}{figures}{'' if within else '   over'}", flush=True)
    return within


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    sys.exit(main())
