"""A training loop as a good engineer writes it by hand, for `peers.py` and `step_time.py`: it imports nothing of this
project.

    python tests/benchmarks/bare_loop.py FOLDER bf16|fp32 one|ddp|fsdp

FOLDER holds a diffusers model in `model`, and `examples.safetensors`: tensors `latents` (n, C, H, W) and
`prompt_embeds` (n, L, D), positions `img_ids` and `txt_ids`. `targets.txt` is the pattern of the adapted layers.
One line of standard output for each finished step. With `ddp` and `fsdp` torchrun starts it, on two ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

RANK = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(folder: Path, precision: str, way: str) -> None:
    """Train until the process is ended."""
    torch.set_num_threads(1)
    dtype = DTYPES[precision]
    if way != "one":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    targets = (folder / "targets.txt").read_text(encoding="utf-8")
    inner = lora_model(folder / "model", targets, dtype, adapters=dtype if way == "fsdp" else torch.float32)
    model = _parallel(inner, way, dtype).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    examples = load_file(folder / "examples.safetensors")
    positions = {name: examples[name] for name in ("img_ids", "txt_ids")}
    for number in count():
        one = (2 * number + rank) % len(examples["latents"])
        batch = {name: examples[name][one : one + 1] for name in ("latents", "prompt_embeds")}
        autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32 and way != "fsdp")
        loss = training_step(model, optimizer, parameters, batch, positions, dtype, autocast)
        if rank == 0:
            print(loss.item(), flush=True)


def lora_model(
    folder: Path, targets: str, dtype: torch.dtype, adapters: torch.dtype = torch.float32
) -> Flux2Transformer2DModel:
    """The transformer as diffusers loads it, frozen in `dtype`, with adapters of a type on the layers of a pattern."""
    model = Flux2Transformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=dtype)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(adapters)
    return model


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    batch: Mapping[str, Tensor],
    positions: Mapping[str, Tensor],
    dtype: torch.dtype,
    autocast: torch.autocast,
) -> Tensor:
    """Train on a batch of one, on its device. Returns the loss."""
    latents = batch["latents"].flatten(2).transpose(1, 2)
    noise = torch.randn_like(latents)
    sigma = torch.sigmoid(torch.randn(1, device=latents.device))
    noisy = (1 - sigma) * latents + sigma * noise
    with autocast:
        prediction = model(
            hidden_states=noisy.to(dtype),
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            timestep=sigma.to(dtype),
            guidance=None,
            return_dict=False,
            **positions,
        )[0]
    loss = nn.functional.mse_loss(prediction.float(), noise - latents)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _parallel(model: Flux2Transformer2DModel, way: str, dtype: torch.dtype) -> nn.Module:
    """The model as the ranks share it: whole, replicated by DDP, or sharded by FSDP2 and kept whole after forward."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            fully_shard(block, mp_policy=mixed, reshard_after_forward=False)
        fully_shard(model, mp_policy=mixed, reshard_after_forward=False)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
