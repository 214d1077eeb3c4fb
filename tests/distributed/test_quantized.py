"""Bytes in place of weights on several ranks: sharded, gathered, saved and loaded as they are."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from tests.runs import difference, make_pictures, make_run, run_config
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.metrics.memory import full_bytes, local_bytes
from trainer.models import families
from trainer.models.build import _coded, build_model, load_model
from trainer.parallel.load import load_weights
from trainer.parallel.parallelize import shard_units
from trainer.parallel.strategy import RESIDENT_SHARE
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer
from trainer.weights.files import WeightFiles
from trainer.weights.quantization import FORMATS, quantize_layers, quantized_layers

BYTES = {"none": 1.0, "nf4": 0.27, "int8": 0.52, "fp8": 0.52}
"""Bytes of the block's linear layers, relative to bf16."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    make_pictures(root / "pictures", 4)
    return root


def config(root: Path, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {"quantize__format": "nf4", "train__steps": 2, "export__what": "none"}
    return run_config(root / "pictures", **base | {"parallel__devices": 2, "parallel__strategy": "full"} | changes)


class Gathered(TorchDispatchMode):
    """Bytes that this rank gives to all-gathers of weights, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            self.bytes += args[1].numel() * args[1].element_size()
            self.count += 1
        return func(*args, **(kwargs or {}))


def moved(world: World, cfgs: list[RunConfig], runs: list[RunDir]) -> list[tuple[int, int, int]]:
    """(bytes gathered in a step, number of gathers, bytes of the linear layers here), for each run."""
    found = []
    for cfg, run in zip(cfgs, runs, strict=True):
        trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
        names = set(quantized_layers(trainer.model)) or {
            name for name, layer in trainer.model.named_modules() if name.endswith(".base_layer")
        }
        held = [p for name, p in trainer.model.named_parameters() if name.rpartition(".")[0] in names]
        with Gathered() as gathered:
            trainer.train_step()
        found.append((gathered.bytes, gathered.count, local_bytes(held)))
        trainer.close()
    return found


def test_a_rank_holds_and_gathers_the_bytes_of_its_format(root: Path) -> None:
    cfgs = [config(root, quantize__format=f, train__precision="bf16", train__batch_size=2) for f in BYTES]
    runs = [make_run(root, cfg, f"bytes-{cfg.quantize.format}") for cfg in cfgs]
    for found in run_ranks(2, moved, cfgs, runs):
        (all_bytes, gathers, linear), *_ = found
        # Each block in forward and in backward, the root once.
        others = all_bytes - 2 * linear
        assert others > 0
        for (gathered, count, held), share in zip(found, BYTES.values(), strict=True):
            assert count == gathers
            assert held <= share * linear
            assert gathered - others <= share * 2 * linear


@dataclass(frozen=True)
class Small(World):
    """Ranks with so many bytes of memory."""

    memory: int = 0


def chosen(world: World, cfgs: list[RunConfig], cache: Path, memory: int) -> list[str]:
    """The strategies that `auto` chooses on ranks with this much memory."""
    world = Small(**vars(world), memory=memory)
    built = [(cfg, families.make(cfg, cache)) for cfg in cfgs]
    return [load_model(build_model(cfg, family), cfg, family, world).strategy for cfg, family in built]


@pytest.mark.slow
def test_auto_keeps_copies_of_a_base_that_fits_in_fewer_bits_only(root: Path) -> None:
    cfgs = [
        config(root, quantize__format=format, parallel__strategy="auto", train__precision="bf16", adapter__rank=1)
        for format in BYTES
    ]
    models = [build_model(cfg, families.make(cfg, root / "cache")).module for cfg in cfgs]
    plain, nf4 = (full_bytes(model.parameters()) for model in models[:2])
    middle = int((plain + nf4) / 2 / RESIDENT_SHARE)
    assert run_ranks(2, chosen, cfgs[:2], root / "cache", middle)[0] == ["full", "ddp"]
    assert set(run_ranks(2, chosen, cfgs, root / "cache", 10 * middle)[0]) == {"ddp"}
    assert set(run_ranks(2, chosen, cfgs, root / "cache", middle // 10)[0]) == {"full"}


class Block(nn.Sequential):
    pass


def ragged(world: World, file: Path) -> list[tuple[bool, bool, bool]]:
    """Load layers whose rows the ranks do not divide evenly, one of them with an empty shard.

    Returns per format whether the loaded whole is what one process encodes, and output and gradient are the same.
    """
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    weights = load_file(file)
    found = []
    for format in FORMATS.values():
        with torch.device("meta"):
            model = nn.Sequential(Block(nn.Linear(100, 129), nn.Linear(129, 4))).requires_grad_(False)
        quantize_layers(model, {"0.0": format, "0.1": format})
        shard_units(model, [model[0]], mesh, True, torch.float32, OffloadPolicy())
        model.to_empty(device="cpu")
        load_weights(model, WeightFiles.read([file]), coded=_coded(model))
        whole = nn.Sequential(Block(nn.Linear(100, 129), nn.Linear(129, 4))).requires_grad_(False)
        whole.load_state_dict(weights)
        quantize_layers(whole, {"0.0": format, "0.1": format})
        loaded = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in model.state_dict().items()}
        same = all(torch.equal(loaded[key], tensor) for key, tensor in whole.state_dict().items())
        x = torch.randn(3, 100, requires_grad=True)
        outputs = [module(x) for module in (model, whole)]
        gradients = [torch.autograd.grad(output.sum(), x)[0] for output in outputs]
        found.append((same, torch.equal(*outputs), torch.equal(*gradients)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_the_ranks_do_not_divide_are_loaded_and_gathered_exactly(tmp_path: Path, ranks: int) -> None:
    model = nn.Sequential(Block(nn.Linear(100, 129), nn.Linear(129, 4)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for found in run_ranks(ranks, ragged, tmp_path / "model.safetensors"):
        assert found == [(True, True, True)] * len(FORMATS)


def saved_state(world: World, cfg: RunConfig, run: RunDir, folder: Path) -> dict[str, Tensor]:
    """The records, after they were saved by all ranks, wiped out, and loaded."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    trainer.close()
    state = {name: t for name, t in trainer.model.state_dict().items() if name.endswith("qweight")}
    if world.size == 2:
        dcp.save(state, checkpoint_id=folder)
    for tensor in state.values():
        tensor.zero_()
    dcp.load(state, checkpoint_id=folder)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_the_bytes_is_exact_on_another_number_of_ranks(root: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (2, 1, 3):
        cfg = config(root, parallel__devices=ranks)
        found.append(run_ranks(ranks, saved_state, cfg, make_run(root, cfg, f"dcp-{ranks}"), tmp_path)[0])
    assert any(tensor.any() for tensor in found[0].values())
    assert difference(found[0], found[1]) == 0
    assert difference(found[0], found[2]) == 0


def load_unlike(world: World, cfgs: list[RunConfig], runs: list[RunDir]) -> str:
    """The error when rank 1 has other weights."""
    try:
        Trainer(cfgs[world.rank], runs[world.rank], world, runs[0].path.parent / "cache", lambda event: None)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("format", "strategy"),
    [
        ("none", "full"),
        ("nf4", "ddp"),
        pytest.param("none", "ddp", marks=pytest.mark.slow),
        pytest.param("nf4", "full", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_loaded_other_weights_is_named_before_the_first_step(
    root: Path, tmp_path: Path, format: str, strategy: str
) -> None:
    cfg = config(root, quantize__format=format, parallel__strategy=strategy)
    folder = families.make(cfg, root / "cache").folder
    copy = shutil.copytree(folder, tmp_path / "other")
    file = next((copy / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    key = "transformer_blocks.0.attn.to_q.weight"
    save_file(weights | {key: weights[key] + 0.5}, file, metadata={"format": "pt"})
    cfgs = [cfg, config(root, quantize__format=format, parallel__strategy=strategy, model__path=str(copy))]
    runs = [make_run(tmp_path, each, f"rank{rank}") for rank, each in enumerate(cfgs)]
    for said in run_ranks(2, load_unlike, cfgs, runs):
        assert "transformer_blocks.0.attn.to_q" in said
        assert said.endswith("give every machine the same files, and remove the folder of quantize.cache")
