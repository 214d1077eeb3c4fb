"""What an export holds of a model of 129 M parameters: one block and one file shard at most."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.benchmarks.memory import AnonymousPeak
from tests.benchmarks.workload import KLEIN_SMALL, Bench, prepare
from trainer.config.schema import RunConfig
from trainer.export import model as export_of_models
from trainer.export.adapter import export_adapter
from trainer.export.model import export_model
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.build import build_model
from trainer.run.manifest import Progress

SHARD_BYTES = 64 * 10**6
BLOCK_BYTES = 4 * 27_263_232
"""A double block in fp32, in which weights are merged."""
EXPORTS = [
    ("lora", "merged", "diffusers"),
    ("lora", "merged", "single_file"),
    ("dora", "merged", "single_file"),
    ("loha", "merged", "diffusers"),
    ("lokr", "merged", "diffusers"),
    ("boft", "merged", "diffusers"),
    ("none", "full", "diffusers"),
    ("none", "full", "single_file"),
]
ADAPTER_LIMIT = 8
"""Copies of the largest layer in fp32, beside the adapter: an adapter's file is compared through peft's own merge."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return prepare(tmp_path_factory.mktemp("memory"), KLEIN_SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "what", "format"), EXPORTS)
def test_a_whole_model_is_exported_within_a_block_and_a_shard(
    bench: Bench, adapter: str, what: str, format: str
) -> None:
    assert peak_of(bench, adapter, what, format) <= BLOCK_BYTES + SHARD_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "dora", "boft"])
def test_verifying_an_adapter_does_not_gather_the_model(bench: Bench, adapter: str) -> None:
    largest = 4 * 9_437_184
    assert peak_of(bench, adapter, "adapter", "auto") <= ADAPTER_LIMIT * largest


def peak_of(bench: Bench, *export: str) -> int:
    """Growth of anonymous memory in a process of its own, where freed memory is given back at once."""
    argv = [sys.executable, "-m", "tests.export.test_memory", str(bench.root), *export]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def measure(bench: Bench, adapter: str, what: str, format: str) -> int:
    """Export with random trained weights; of a full fine-tune those of the base, which are read one by one as well."""
    export_of_models.MAX_SHARD_BYTES = SHARD_BYTES
    cfg = bench.config(adapter={"type": adapter}, export={"what": what, "format": format})
    family = families.make(cfg, bench.root / "cache")
    weights = random_weights(cfg, family)
    peak = AnonymousPeak()
    with tempfile.TemporaryDirectory() as folder, peak.watching():
        if what == "adapter":
            export_adapter(cfg, Path(folder), family, weights, weights, Progress(1))
        else:
            export_model(cfg, Path(folder), family, weights, weights)
    return peak.growth


def random_weights(cfg: RunConfig, family: ModelFamily) -> dict[str, Tensor]:
    return {name: 0.01 * torch.randn(shape) for name, shape in build_model(cfg, family).adapter.parameters.items()}


if __name__ == "__main__":
    print(measure(Bench(Path(sys.argv[1]), KLEIN_SMALL), *sys.argv[2:]))
