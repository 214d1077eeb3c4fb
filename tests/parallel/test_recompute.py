"""Selective recompute: the same numbers as without, and nothing expensive computed twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.architectures import write_model
from tests.distributed import run_ranks
from tests.distributed.matrix import METHODS
from tests.runs import alone, difference, make_pictures, make_run, make_text, run_config, steps_of, text_config, train
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.parallel.recompute import _expensive_functions, recompute_cheap
from trainer.plan.record.memory_tracker import is_quantized
from trainer.run.events import AnyEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer

aten = torch.ops.aten


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recompute")
    make_pictures(folder / "pictures", 4)
    make_text(folder / "text")
    return folder


def config(root: Path, family: str = "flux2", **changes: Any) -> RunConfig:
    """Three steps on one rank."""
    fields = {"train__steps": 3, "parallel__strategy": "none", "export__what": "none"} | changes
    if family == "causal_lm":
        return text_config(root / "text", **fields)
    return run_config(root / "pictures", model={"family": family}, **fields)


class Expensive(TorchDispatchMode):
    """Counts products with matrices of these shapes, and attention."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes, self.found = shapes, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        weight = {aten.mm: 1, aten.addmm: 2, aten.convolution: 1}.get(packet)
        is_product = weight is not None and tuple(args[weight].shape) in self._shapes
        if is_product or is_quantized(func) or "attention" in packet.__name__ or "grouped" in packet.__name__:
            self.found[str(packet)] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """expensive: operations of the second step, forward and backward.  trained: losses and gradient norms."""

    expensive: Counter[str]
    trained: list[tuple[float, float]]
    weights: dict[str, Tensor]


def counted(root: Path, name: str, cfg: RunConfig) -> Counted:
    """Train in this process and count."""
    run, events = make_run(root, cfg, re.sub(r"[ ,]+", "-", name)), list[AnyEvent]()
    trainer = Trainer(cfg, run, alone(), run.path.parent / "cache", events.append)
    layers = [module for module in trainer.model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    frozen = [layer.weight for layer in layers if cfg.adapter.type == "none" or not layer.weight.requires_grad]
    shapes = {tuple(weight.shape) for weight in frozen}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2}
    try:
        trainer.train_step()
        with Expensive(shapes) as counting:
            trainer.train_step()
        trainer.train()
        trained = [(event.loss, event.grad_norm) for event in steps_of(events)]
        return Counted(counting.found, trained, trainer.trained_weights())
    finally:
        trainer.close()


def assert_the_same_bits(one: Counted, other: Counted) -> None:
    assert len(one.trained) == 3
    assert one.trained == other.trained
    assert difference(one.weights, other.weights) == 0


ADAPTERS: dict[str, dict[str, Any]] = {
    **METHODS,
    "lora with dropout": {"type": "lora", "rank": 4, "dropout": 0.1},
    "dense loha": {"type": "loha", "rank": 24},
}
FAMILIES = (
    "flux2",
    "sdxl",
    "flux1",
    "sd3",
    "qwen_image",
    "qwen_image_21",
    "z_image",
    "chroma",
    "auto",
    "ernie_image",
    "ideogram4",
    "krea2",
    "bagel",
    "causal_lm",
)
BASES = {"none": 0, "nf4": 3, "int8": 4}
"""{base: the family with which its first adapter is trained}: SDXL meets no loha or lokr here, whose own convolutions
have the shape of the base's and are computed again."""
CASES = [
    (FAMILIES[(number + first) % len(FAMILIES)], method, base, ("fp32", "bf16")[(number // 4 + first) % 2])
    for base, first in BASES.items()
    for number, method in enumerate(method for method in ADAPTERS if base == "none" or method != "full")
]
"""Every adapter and every family on every base."""


@pytest.mark.parametrize(
    ("family", "method", "base", "precision"),
    [("flux2", "lora", "nf4", "bf16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_no_product_of_the_base_and_no_attention_runs_twice_and_no_bit_changes(
    root: Path, family: str, method: str, base: str, precision: str
) -> None:
    changes = {"adapter": ADAPTERS[method], "quantize__format": base, "train__precision": precision}
    name = f"{family}-{method}-{base}-{precision}"
    plain, selective, full = (
        counted(root, f"{name}-{mode}", config(root, family, **changes, train__checkpointing=mode))
        for mode in ("none", "selective", "full")
    )
    assert selective.expensive == plain.expensive
    assert full.expensive.total() > plain.expensive.total(), "the count sees what is computed again"
    assert_the_same_bits(selective, plain)


def outcome_on(world: World, cfgs: list[RunConfig], runs: list[RunDir]) -> list[Any]:
    return [train(world, cfg, run) for cfg, run in zip(cfgs, runs, strict=True)]


@pytest.mark.parametrize(
    "strategy", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grad_op", "ddp"))]
)
@pytest.mark.parametrize("mode", ["selective", pytest.param("full 1, selective", marks=pytest.mark.slow)])
def test_no_bit_changes_on_two_ranks(root: Path, strategy: str, mode: str) -> None:
    base = {"parallel__strategy": strategy, "parallel__devices": 2, "quantize__format": "nf4"}
    cfgs = [config(root, **base, train__checkpointing=value) for value in ("none", mode)]
    name = f"ranks-{strategy}-{re.sub(r'[ ,]+', '-', mode)}"
    runs = [make_run(root, cfg, f"{name}-{number}") for number, cfg in enumerate(cfgs)]
    plain, selective = run_ranks(2, outcome_on, cfgs, runs)[0]
    assert selective.losses == plain.losses
    assert difference(selective.weights, plain.weights) == 0


def mixture(root: Path, kind: str) -> Path:
    """The folder of a tiny mixture of experts."""
    if not (root / kind).exists():
        write_model(kind, root / kind)
    return root / kind


EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "olmoe", "llama4_text")
MIXTURES = [
    *((kind, "lora", base, "selective") for kind in EXPERTS for base in ("nf4", "int8", "fp8")),
    *(("mixtral", method, "nf4", "selective") for method in ("dora", "boft", "lokr", "lora with dropout")),
    *((kind, "lora", "nf4", "full 1, selective") for kind in ("qwen3_moe", "gpt_oss")),
]


@pytest.mark.parametrize(
    ("kind", "method", "base", "mode"),
    [MIXTURES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MIXTURES[1:])],
)
def test_no_bit_changes_on_experts_that_are_stored_as_bytes(
    root: Path, kind: str, method: str, base: str, mode: str
) -> None:
    changes = {"model__path": str(mixture(root, kind)), "adapter": ADAPTERS[method], "quantize__format": base}
    once, kept, twice = (
        counted(
            root,
            f"{kind}-{method}-{base}-{mode}-{value}-{number}",
            config(root, "causal_lm", **changes, train__checkpointing=value),
        )
        for number, value in enumerate(("none", mode, "full"))
    )
    if mode == "selective":
        assert kept.expensive == once.expensive
    else:
        assert once.expensive.total() < kept.expensive.total()
    assert kept.expensive.total() < twice.expensive.total()
    assert_the_same_bits(kept, once)


class Block(nn.Module):
    """A linear layer, what `between` makes of its output, a norm, and another layer."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.layer_norm(self.between(self.first(x)), [8]))
        return out


def gradients(block: Block, x: Tensor) -> list[Tensor]:
    block(x).square().sum().backward()
    return [p.grad for p in block.parameters() if p.grad is not None]


def selectively(block: Block) -> Block:
    recompute_cheap([block], (), is_compiled=False)
    return block


def products(block: Block, x: Tensor) -> tuple[list[Tensor], int]:
    with Expensive({(8, 8)}) as counting:
        found = gradients(block, x)
    return found, counting.found.total()


def test_an_output_that_is_changed_in_place_is_computed_again() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    kinds = {"changed": lambda y: y.mul_(2), "kept": lambda y: y.mul(2)}
    expected, count = products(Block(kinds["kept"]), x)
    for name, between in kinds.items():
        found, again = products(selectively(Block(between)), x)
        assert all(map(torch.equal, found, expected))
        assert again == count + (name == "changed")


def test_attention_runs_once_though_the_bias_made_of_its_mask_is_larger_than_its_result() -> None:
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()

    def attend(y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(y[None, None], y[None, None].sin(), y[None, None].cos(), mask)[0, 0]

    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    expected, count = products(Block(attend), x)
    found, again = products(selectively(Block(attend)), x)
    assert all(map(torch.equal, found, expected))
    assert again == count


NAMES = [name for _, name in _expensive_functions()]


@pytest.mark.parametrize("between", [lambda y: y, lambda y: y.mul_(2)], ids=["kept", "changed"])
@pytest.mark.parametrize("inner", [*NAMES, "layer"])
@pytest.mark.parametrize("outer", [*NAMES, "layer"])
def test_a_kept_call_inside_a_kept_call_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, outer: str, inner: str, between: Callable[[Tensor], Tensor]
) -> None:
    """Each function of the list, and a layer, calls each other one: as experts in few bits call a grouped product."""
    modules = {name: module for module, name in _expensive_functions()}

    def called(name: str, inside: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        """A layer, and how it or the function of this name is called; it computes `inside` among others."""
        layer = Around(inside)
        if name == "layer":
            return layer, layer
        monkeypatch.setattr(modules[name], name, layer.forward)
        return layer, lambda y: getattr(modules[name], name)(y)

    def block() -> Block:
        part, call = called(inner, torch.sin)
        whole, call = called(outer, call if outer != inner or inner == "layer" else torch.sin)
        made = Block(lambda y: between(call(y)).exp())
        made.parts = nn.ModuleList([part, whole])
        return made

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected, found = gradients(block(), x), gradients(selectively(block()), x)
    assert len(expected) > 4
    assert all(map(torch.equal, found, expected))


class Around(nn.Linear):
    """A layer that computes something else between two products."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(1)
        super().__init__(8, 8)
        self._inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self._inside(x @ self.weight).sigmoid() @ self.weight + self.bias


def test_an_output_that_is_changed_after_the_block_is_computed_again_too() -> None:
    x, block, plain = torch.ones(4, 8), selectively(Returning()), Returning()
    for one in (block, plain):
        inner, out = one(x)
        inner.mul_(3)
        (inner.sum() + out.square().sum()).backward()
    pairs = zip(block.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine.grad, its.grad) for mine, its in pairs if mine.grad is not None)


class Returning(Block):
    """Returns the first layer's output as well, of which autograd has saved nothing."""

    def __init__(self) -> None:
        super().__init__(lambda y: y * 2)

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        return first, self.last(torch.sigmoid(self.between(first)))


def test_an_input_that_is_changed_after_the_block_is_refused() -> None:
    x = torch.ones(4, 8)
    out = selectively(Block(torch.exp))(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="an input of a block that recomputes was changed in place"):
        out.sum().backward()


def test_a_tensor_that_backward_needs_and_that_was_changed_in_place_is_refused_as_torch_refuses_it() -> None:
    def spoil(y: Tensor) -> Tensor:
        out = y.exp()
        y.square()  # saves y
        with torch.no_grad():
            y.mul_(2)
        return out + y.detach()

    block = selectively(Block(lambda y: y.square() + spoil(y)))
    with pytest.raises(RuntimeError, match="changed in place after forward used it"):
        gradients(block, torch.ones(4, 8))


def test_a_second_backward_is_refused_with_what_to_do() -> None:
    block = selectively(Block(torch.exp))
    loss = block(torch.ones(4, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"backward ran twice .*; run forward again"):
        loss.backward()


def test_a_forward_that_computes_something_else_the_second_time_is_refused() -> None:
    shapes = iter((8, 4))
    block = selectively(Block(lambda y: y[..., : next(shapes)].exp().repeat(1, 2)[..., :8]))
    with pytest.raises(RuntimeError, match=r"forward saved .* when it ran again"):
        gradients(block, torch.ones(4, 8))


def test_without_gradients_nothing_is_kept() -> None:
    block = selectively(Block(torch.exp))
    with torch.no_grad():
        assert not block(torch.ones(4, 8)).requires_grad


class Graphs:
    """A backend of torch.compile that counts products and attention in what it compiles, but those of a LoRA."""

    def __init__(self, rank: int) -> None:
        self._rank, self.found = rank, Counter[str]()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        split = min_cut_rematerialization_partition
        return aot_autograd(fw_compiler=self._count, bw_compiler=self._count, partition_fn=split)(graph, inputs)

    def _count(self, graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            name = str(node.target)
            inputs = [arg.meta["val"] for arg in node.all_input_nodes if "val" in arg.meta]
            sides = [side for value in inputs if isinstance(value, Tensor) for side in value.shape]
            if ("mm.default" in name and self._rank not in sides) or "attention" in name or "shardstudio" in name:
                self.found[name] += 1
        return make_boxed_func(graph.forward)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("family", "base"), [("flux2", "none"), ("flux2", "nf4"), ("causal_lm", "nf4")])
def test_compiled_blocks_compute_nothing_expensive_twice_either(root: Path, family: str, base: str) -> None:
    rank, found, losses = 5, {}, {}
    changes: dict[str, Any] = {"adapter": {"type": "lora", "rank": rank}, "quantize__format": base}
    changes |= {"train__precision": "bf16", "train__compile": True}
    is_mixture = family == "causal_lm"
    changes |= {"model__path": str(mixture(root, "qwen3_moe"))} if is_mixture else {"data__max_aspect": 1}
    for mode in ("none", "selective", "full"):
        backend, name = Graphs(rank), f"graphs_{family}_{base}_{mode}"
        register_backend(backend, name)  # type: ignore[arg-type]
        cfg = config(root, family, **changes, train__checkpointing=mode, train__compile_backend=name)
        torch._dynamo.reset()
        counters.clear()
        losses[mode] = train(alone(), cfg, make_run(root, cfg, name)).losses
        assert counters["graph_break"] == {}
        found[mode] = backend.found
        if is_mixture:  # the product of a router is small, and none of a linear layer
            del found[mode]["aten.mm.default"]
    assert found["selective"] == found["none"]
    assert found["full"].total() > found["none"].total()
    assert losses["selective"] == pytest.approx(losses["none"], rel=1e-3)
