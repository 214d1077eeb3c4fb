"""Prints counts as a line of JSON, in a process of its own, since the fake device cannot be removed.

python -m tests.benchmarks.counted blocks FOLDER            elementwise bytes of blocks, and with one pass more
python -m tests.benchmarks.counted flops FOLDER FAMILY ...  operations of tiny models, by two counters
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.kernel_count import BACKWARD, ELEMENTWISE, FORWARD, StepCount, count_pass, count_step
from tests.plan.common import run
from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig
from trainer.models import families
from trainer.models.build import build_model, materialize, shard_model
from trainer.models.parts.published import published_folder
from trainer.plan.record.trace import batch_of
from trainer.plan.simulate.sizes import input_of
from trainer.rng import SampleRng

TINY = ("flux2", "sd3", "sdxl", "causal_lm")


def block_bytes(folder: Path) -> dict[str, int]:
    """Return {block and phase: elementwise bytes} of one block of each kind of FLUX.2 klein-4B.

    A LoRA of rank 16, one image of 1024 pixels and 512 tokens of text, without recompute. Each is the difference
    between two models of which one has a block more.
    """
    base = elementwise_bytes(_klein(folder, double=1, single=1), folder)
    double = elementwise_bytes(_klein(folder, double=2, single=1), folder)
    return _differences("double", double, base) | single_block_bytes(folder, base)


def single_block_bytes(folder: Path, base: dict[str, int] | None = None) -> dict[str, int]:
    """Return the single block's part of `block_bytes`. base: bytes of a model with one block of each kind."""
    base = base or elementwise_bytes(_klein(folder, double=1, single=1), folder)
    return _differences("single", elementwise_bytes(_klein(folder, double=1, single=2), folder), base)


def elementwise_bytes(cfg: RunConfig, folder: Path) -> dict[str, int]:
    """Return {phase: bytes} of a step's elementwise passes."""
    by_phase = count_pass(cfg, folder).by(lambda kernel: kernel.phase if kernel.kind == ELEMENTWISE else "")
    return {phase: by_phase[phase].num_bytes for phase in (FORWARD, BACKWARD)}


def _differences(block: str, longer: dict[str, int], shorter: dict[str, int]) -> dict[str, int]:
    return {f"{block}, {phase}": longer[phase] - shorter[phase] for phase in longer}


def _klein(folder: Path, double: int, single: int) -> RunConfig:
    """A run of klein-4B with fewer blocks, of their real width."""
    copy = folder / f"klein-{double}-{single}"
    if not copy.exists():
        published = ModelConfig(family="flux2", options={"architecture": "klein-4b"})  # type: ignore[arg-type]
        shutil.copytree(published_folder(published, folder), copy)
        config = copy / "transformer" / "config.json"
        fewer = {"num_layers": double, "num_single_layers": single}
        config.write_text(json.dumps(json.loads(config.read_text()) | fewer))
    fields = (f"model.path={copy}", "model.options.architecture=null", "adapter.rank=16", "parallel.devices=1")
    return run("flux2 klein-4b", *fields, "parallel.strategy=none", "train.checkpointing=none")


@contextmanager
def pass_added() -> Iterator[None]:
    """Inside, a single block reads and writes its output once more."""
    original: Callable[..., Any] = Flux2SingleTransformerBlock.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 1

    with mock.patch.object(Flux2SingleTransformerBlock, "forward", forward):
        yield


def both_flops(name: str, folder: Path) -> dict[str, Any]:
    """Return the operations of a tiny model's step: ours on the fake device, and torch's own count of a real step on
    this CPU, where attention is written out as matrix products."""
    lines = (f"model.family={name}", "model.path=tiny", "parallel.strategy=none", "parallel.devices=1")
    size = "length: 64" if name == "causal_lm" else "resolution: 64"
    text = f"data: {{path: ., {size}}}\ntrain: {{precision: fp32, checkpointing: none, batch_size: 2, micro_batch: 2}}"
    cfg = load_config_text(text, lines, Path("tiny.yaml")).config
    return {"model": name, "torch": _real_flops(cfg, folder), "ours": _ours(count_step(cfg, folder))}


def _product_flops(added: Sequence[int], one: Sequence[int], other: Sequence[int], **_: Any) -> int:
    """Operations of a product of two matrices of these shapes, as torch counts `addmm`."""
    return 2 * one[0] * one[1] * other[1]


def _real_flops(cfg: RunConfig, folder: Path) -> int:
    family, cpu = families.make(cfg, folder), torch.device("cpu")
    built = build_model(cfg, family)
    shard_model(built.module, cfg, family, "none", None)
    materialize(built.module, cfg, cpu)
    # torch has no formula for products that are added to a tensor in place.
    in_place = {torch.ops.aten.addmm_: _product_flops}
    size, counter = input_of(cfg), FlopCounterMode(display=False, custom_mapping=in_place)
    batch = batch_of(family, size, torch.float32, cpu)
    with sdpa_kernel(SDPBackend.MATH), counter:
        family.loss(built.module, batch, SampleRng(0, tuple(range(size.batch)), cpu)).total.backward()
    return int(counter.get_total_flops())


def _ours(count: StepCount) -> dict[str, int]:
    return {kind: part.flops for kind, part in count.by(lambda kernel: kernel.kind).items() if part.flops} | {
        "useful": count.useful_flops
    }


def main(what: str, folder: Path, names: Sequence[str]) -> None:
    """Print what is asked for."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if what == "flops":
        print(json.dumps([both_flops(name, folder) for name in names]))
        return
    found = block_bytes(folder)
    with pass_added():
        print(json.dumps({"found": found, "with a pass": single_block_bytes(folder)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
