"""Frozen blocks in host memory: what is trained is the same bit for bit, and two of them at most are on the device."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.pairs.array import covering
from tests.runs import make_pictures, make_run, run_config, steps_of
from trainer.config.recompute import Recompute
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.metrics.memory import local_bytes
from trainer.models import families
from trainer.models.parts.folder import save_module
from trainer.parallel.compile import compile_blocks
from trainer.parallel.offload import OffloadedBlocks
from trainer.parallel.offload_order import offloaded_blocks
from trainer.parallel.parallelize import checkpoint_activations
from trainer.run.events import AnyEvent
from trainer.run.folder import RunDir
from trainer.system.pinned import pin
from trainer.train.loop import Trainer

WIDTH = 8
BLOCK_BYTES = WIDTH * (WIDTH + 1) * 4


class Block(nn.Module):
    def __init__(self, number: int, log: list[tuple[str, int]], width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.trained = nn.Parameter(torch.ones(width))
        self.number, self.log, self.fails = number, log, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise MemoryError
        return x + torch.tanh(self.frozen(x * self.trained))


class Net(nn.Module):
    """Blocks that log when they have computed, in each direction."""

    def __init__(self, count: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.log: list[tuple[str, int]] = []
        self.blocks = nn.ModuleList(Block(number, self.log, width) for number in range(count))

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in skipped:
                if x.requires_grad:
                    x.register_hook(lambda _, number=number: self.log.append(("backward", number)))
                x = block(x)
                self.log.append(("forward", number))
        return x


class Logged(OffloadedBlocks):
    """Logs copies and frees by the number of the block in the whole net."""

    def __init__(self, net: Net, chosen: Sequence[int]) -> None:
        self.net, self.chosen, self.most = net, chosen, 0
        super().__init__(
            net, list(net.blocks), [net.blocks[number] for number in chosen], [], torch.device("cpu"), Tensor.clone
        )

    def _copy(self, number: int) -> None:
        super()._copy(number)
        self.net.log.append(("copy", self.chosen[number]))
        held = local_bytes(p for p in self.net.parameters() if not p.requires_grad)
        resident = len(self.net.blocks) - len(self.chosen)
        self.most = max(self.most, held // BLOCK_BYTES - resident)


def offloaded(count: int, wanted: int) -> tuple[Net, Logged]:
    net = Net(count)
    return net, Logged(net, offloaded_blocks(wanted, count))


def gradients(net: Net, *passes: Sequence[int]) -> list[Tensor]:
    """The gradients of some passes, each of which skips some blocks."""
    for parameter in net.parameters():
        parameter.grad = None
    for index, skipped in enumerate(passes):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(index), requires_grad=True)
        net(x, skipped).square().sum().backward()
    return [torch.zeros(1) if block.trained.grad is None else block.trained.grad for block in net.blocks]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))


@pytest.mark.parametrize("wanted", [1, 2, 3, 5, 6])
def test_gradients_are_the_same_bits_and_two_blocks_at_most_are_present(wanted: int) -> None:
    net, host = offloaded(6, wanted)
    for _ in range(2):
        assert same(gradients(net, (), ()), gradients(Net(6), (), ()))
    assert host.most == min(wanted, 2)
    assert host.num_bytes == wanted * BLOCK_BYTES


@pytest.mark.parametrize("wanted", [3, 6])
def test_the_next_block_is_copied_before_the_one_at_work_has_computed(wanted: int) -> None:
    net, host = offloaded(6, wanted)
    gradients(net, ())
    net.log.clear()
    gradients(net, ())
    for direction, order in (("forward", host.chosen), ("backward", host.chosen[::-1])):
        for at_work, following in itertools.pairwise(order):
            computed = net.log.index((direction, at_work))
            copies = [index for index, entry in enumerate(net.log) if entry == ("copy", following)]
            assert any(index < computed for index in copies)
    copied = sum(entry[0] == "copy" for entry in net.log)
    assert copied == 2 * (wanted - 1), "the blocks at which the direction changes are kept"


def test_passes_that_skip_blocks_or_have_no_backward_change_nothing() -> None:
    net, host = offloaded(6, 4)
    passes = ((), (0, 1), (5,), (2, 3, 4), (), (0, 1, 2, 3, 4))
    with torch.no_grad():
        expected = Net(6)(torch.ones(1, WIDTH))
        for skipped in passes:
            net(torch.ones(1, WIDTH), skipped)
            assert torch.equal(net(torch.ones(1, WIDTH)), expected)
    assert same(gradients(net, *passes), gradients(Net(6), *passes))
    assert host.most == 2


def test_two_forward_passes_before_their_backward_passes_change_nothing() -> None:
    found = []
    for net in (offloaded(5, 4)[0], Net(5)):
        first, second = (net(torch.full((1, WIDTH), value, requires_grad=True)).sum() for value in (0.5, 2.0))
        with torch.no_grad():
            net(torch.ones(1, WIDTH))
        first.backward()
        second.backward()
        found.append([block.trained.grad for block in net.blocks])
    assert same(*found)


def test_frozen_blocks_before_the_first_that_is_trained_have_no_backward() -> None:
    found = []
    for net, host in (offloaded(6, 6), (Net(6), None)):
        for block in net.blocks[:3]:
            block.trained.requires_grad_(False)
        for _ in range(2):
            net(torch.ones(1, WIDTH)).sum().backward()
        found.append([block.trained.grad for block in net.blocks[3:]])
        assert host is None or len(host.present) <= 2
    assert same(*found)


class TwoStreams(Block):
    """Changes one of its two inputs and returns the other as it is."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        changed = super().forward(x if self.number % 2 else y)
        return (changed, y) if self.number % 2 else (x, changed)


class TwoStreamNet(Net):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TwoStreams(number, self.log, WIDTH) for number in range(count))

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        y = 2 * x
        for block in self.blocks:
            x, y = block(x, y)
        return x * y


@pytest.mark.parametrize("wanted", [2, 5])
def test_blocks_that_return_an_input_as_it_is_change_nothing(wanted: int) -> None:
    net = TwoStreamNet(5)
    host = Logged(net, offloaded_blocks(wanted, 5))
    assert same(gradients(net, (), ()), gradients(TwoStreamNet(5), (), ()))
    assert host.most == 2


@pytest.mark.parametrize("trained_from", [0, 2])
def test_an_only_offloaded_block_at_the_end_is_present_in_every_backward(trained_from: int) -> None:
    found = []
    for net in (Net(3), Net(3)):
        for block in net.blocks[:trained_from]:
            block.trained.requires_grad_(False)
        if found:
            Logged(net, (trained_from,))
        for _ in range(3):
            net(torch.ones(1, WIDTH)).sum().backward()
        found.append([block.trained.grad for block in net.blocks[trained_from:]])
    assert same(*found)


def test_a_pass_after_one_that_failed_is_right() -> None:
    net, host = offloaded(6, 4)
    net.blocks[3].fails = True
    with pytest.raises(MemoryError):
        net(torch.ones(1, WIDTH, requires_grad=True))
    net.blocks[3].fails = False
    host.most = 0
    assert same(gradients(net, ()), gradients(Net(6), ()))
    assert host.most == 2


def test_a_copy_that_failed_leaves_nothing_behind() -> None:
    net, host = offloaded(6, 6)
    tensor, values = host._weights[1].tensors[0]
    host._weights[1].tensors[0] = (tensor, values[:3])
    with pytest.raises(RuntimeError, match="must match the size"):
        net(torch.ones(1, WIDTH))
    host._weights[1].tensors[0] = (tensor, values)
    assert host.present == []
    assert local_bytes(p for p in net.parameters() if not p.requires_grad) == 0
    assert same(gradients(net, ()), gradients(Net(6), ()))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_blocks_are_present_while_they_are_computed_again(recompute: Recompute) -> None:
    net = Net(6)
    checkpoint_activations(list(net.blocks), [recompute] * 6, (), False)
    host = Logged(net, (1, 3, 5))
    assert same(gradients(net, (), ()), gradients(Net(6), (), ()))
    assert host.most == 2


def test_compiled_blocks_are_compiled_as_without_it() -> None:
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    graphs = []
    for wanted in (0, 4):
        reset()
        counters.clear()
        net = Net(6)
        compile_blocks(list(net.blocks), "aot_eager")
        if wanted:
            Logged(net, offloaded_blocks(wanted, 6))
        assert same(gradients(net, ()), gradients(Net(6), ()))
        graphs.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert graphs[0] == graphs[1]
    assert graphs[1][1] == {}


def test_a_state_dict_has_all_values_while_all_are_present() -> None:
    net, host = offloaded(4, 3)
    expected = Net(4).state_dict()
    with host.all_present():
        held = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert same(list(held.values()), list(expected.values()))
    assert (host.present, local_bytes(net.parameters())) == ([], BLOCK_BYTES + 4 * WIDTH * 4)


def test_weights_that_another_part_of_the_model_shares_stay() -> None:
    net = Net(4)
    net.head = nn.Linear(WIDTH, WIDTH)
    net.head.weight = net.blocks[1].frozen.weight
    Logged(net, (1, 2))
    assert net.head.weight is net.blocks[1].frozen.weight
    assert local_bytes([net.head.weight]) == WIDTH * WIDTH * 4
    assert local_bytes([net.blocks[1].frozen.bias, net.blocks[2].frozen.weight]) == 0


@pytest.mark.gpu
def test_on_a_device_the_peak_falls_by_all_but_two_of_the_offloaded_blocks_and_no_bit_changes(device: str) -> None:
    count, width, place = 16, 1024, torch.device(device)
    found, peaks = zip(
        *(gradients_and_peak(wanted, count, width, place) for wanted in (0, count // 2, count)), strict=True
    )
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    if place.type == "cuda":
        saved = [(peaks[0] - peak) / (width * (width + 1) * 4) for peak in peaks[1:]]
        assert saved == pytest.approx([count // 2 - 2, count - 2], abs=0.5)


def gradients_and_peak(wanted: int, count: int, width: int, place: torch.device) -> tuple[list[Tensor], int]:
    """The last gradients of a network with so many of its blocks offloaded, and the device's peak memory in bytes."""
    gc.collect()  # hooks and blocks of the network before hold each other, and the device's memory
    net = Net(count, width)
    chosen = [net.blocks[number] for number in offloaded_blocks(wanted, count)]
    for module in net.modules():
        if not any(module in set(block.modules()) for block in chosen):
            module._apply(lambda tensor: tensor.to(place), recurse=False)
    for block in chosen:
        block.trained.data = block.trained.data.to(place)
    if chosen:
        OffloadedBlocks(net, list(net.blocks), chosen, [], place, partial(pin, device=place))
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(10):  # the host runs ahead of the device: a copy that came too late would be seen
        x = torch.randn(64, width, generator=torch.Generator().manual_seed(step)).to(place).requires_grad_()
        net(x).square().mean().backward()
    peak = torch.cuda.max_memory_allocated() if place.type == "cuda" else 0
    return [block.trained.grad.cpu() for block in net.blocks], peak


@dataclass(frozen=True)
class Bench:
    """Runs of one folder, whose model has six blocks."""

    root: Path
    model: Path

    def config(self, ranks: int, strategy: str, wanted: float, **changes: Any) -> RunConfig:
        base: dict[str, Any] = {"parallel__shard_size": 2} if strategy == "hybrid" else {}
        base |= {"train__steps": 2, "train__batch_size": 4, "export__what": "none", "model__path": str(self.model)}
        base |= {"parallel__devices": ranks, "parallel__strategy": strategy, "parallel__offload_blocks": wanted}
        return run_config(self.root / "pictures", **base | changes)

    def runs(self, configs: Sequence[RunConfig]) -> list[tuple[RunConfig, RunDir]]:
        count = len(list(self.root.iterdir()))
        return [(cfg, make_run(self.root, cfg, f"run-{count}-{index}")) for index, cfg in enumerate(configs)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("offload")
    make_pictures(root / "pictures", 4)
    family = families.make(run_config(root / "pictures"), root / "cache")
    folder = root / "model"
    folder.mkdir()
    for entry in family.folder.iterdir():
        if entry.name != "transformer":
            (folder / entry.name).symlink_to(entry)
    sizes = family.tiny()["transformer"] | {"num_layers": 2, "num_single_layers": 4}
    torch.manual_seed(0)
    save_module(folder / "transformer", Flux2Transformer2DModel(**sizes))
    return Bench(root, folder)


@dataclass(frozen=True)
class Watched:
    """losses, weights: what was trained.  most: offloaded blocks on the device at once.  resident: bytes of weights
    after a step."""

    losses: list[float]
    weights: dict[str, Tensor]
    most: int
    resident: int


def watched(world: World, runs: Sequence[tuple[RunConfig, RunDir]]) -> list[Watched]:
    return [_watched(world, cfg, run) for cfg, run in runs]


def _watched(world: World, cfg: RunConfig, run: RunDir) -> Watched:
    events: list[AnyEvent] = []
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", events.append)
    host, most = trainer.loaded.offloaded, 0

    def copy(number: int) -> None:
        nonlocal most
        assert host is not None
        OffloadedBlocks._copy(host, number)
        most = max(most, len(host.present))

    if host is not None:
        host._copy = copy  # type: ignore[method-assign]
    try:
        for _ in range(cfg.train.steps):
            trainer.train_step()
        weights = trainer.trained_weights()
        resident = local_bytes(trainer.model.parameters())
        return Watched([event.loss for event in steps_of(events)], weights, most, resident)
    finally:
        trainer.close()


def compare(bench: Bench, ranks: int, strategy: str, shares: Sequence[float], **changes: Any) -> list[Watched]:
    """Train the same with these shares of the blocks offloaded, and with none: the bits must be the same."""
    runs = bench.runs([bench.config(ranks, strategy, share, **changes) for share in (0, *shares)])
    plain, *found = run_ranks(ranks, watched, runs)[0]
    for share, other in zip(shares, found, strict=True):
        assert other.losses == plain.losses, share
        assert same(list(other.weights.values()), list(plain.weights.values())), share
        assert other.most <= 2
        assert other.resident < plain.resident
    return [plain, *found]


METHODS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 4},
    "dora": {"type": "dora", "rank": 4},
    "loha": {"type": "loha", "rank": 2},
    "boft": {"type": "boft", "block_size": 4},
}
NF4: dict[str, Any] = {"quantize__format": "nf4", "train__precision": "bf16"}
BF16: dict[str, Any] = {"train__precision": "bf16"}
AGAIN: dict[str, Any] = {"train__checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"train__checkpointing": "selective"}
BASES = {"bf16": BF16, "nf4": NF4}
RECOMPUTE: dict[str, dict[str, Any]] = {"kept": {}, "recomputed": AGAIN, "selective": SELECTIVE}


@pytest.mark.parametrize(
    ("ranks", "strategy", "shares", "changes"),
    [
        (1, "none", (1.0,), NF4 | AGAIN | {"train__micro_batch": 2}),
        (2, "full", (0.5,), NF4 | SELECTIVE),
        pytest.param(2, "ddp", (1.0,), BF16 | {"adapter": METHODS["dora"]}, marks=pytest.mark.slow),
        # Three ranks divide no rows evenly.
        pytest.param(3, "full", (0.5, 1.0), {"train__batch_size": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_offloaded_blocks_train_what_resident_ones_do(
    bench: Bench, ranks: int, strategy: str, shares: Sequence[float], changes: dict[str, Any]
) -> None:
    compare(bench, ranks, strategy, shares, **changes)


STRATEGIES = [(1, "none"), (1, "full"), (2, "full"), (2, "grad_op"), (4, "hybrid"), (2, "ddp")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy", "method", "base", "again"),
    [(*of_ranks, *rest) for of_ranks, *rest in covering(STRATEGIES, METHODS, BASES, RECOMPUTE)],
)
def test_every_method_trains_the_same_with_any_number_of_blocks_offloaded_under_every_strategy(
    bench: Bench, ranks: int, strategy: str, method: str, base: str, again: str
) -> None:
    compare(bench, ranks, strategy, (1, 0.5, 1.0), adapter=METHODS[method], **BASES[base], **RECOMPUTE[again])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__prefetch_forward": 2, "parallel__prefetch_backward": 2},
        {"parallel__reshard_after_forward": 2},
        {"parallel__reshard_after_forward": False},
        {"train__compile": True, "train__compile_backend": "aot_eager"},
        {"adapter__modules_to_save": ["single_transformer_blocks.1.attn.to_out"]},
    ],
    ids=str,
)
def test_other_ways_to_gather_and_to_compute_train_the_same(bench: Bench, changes: dict[str, Any]) -> None:
    ranks = 4 if changes.get("parallel__reshard_after_forward") == 2 else 2
    runs = bench.runs([bench.config(ranks, "full", share, **NF4, **changes) for share in (0, 0.5, 1.0)])
    plain, *found = run_ranks(ranks, watched, runs)[0]
    for other in found:
        assert other.losses == plain.losses
        assert same(list(other.weights.values()), list(plain.weights.values()))
