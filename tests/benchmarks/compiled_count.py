"""Counts the kernels that torch.compile generates for the blocks of a step, and what they read and write.

Nothing runs: Inductor lowers each graph for the plan's fake device with its scheduling for Triton and the properties of
an H100, and its scheduler decides what is fused. `python -m tests.benchmarks.compiled_count` compares elementwise bytes
of steps with those of `kernel_count`. For a process of its own (see `trainer.plan.record.fake_device`).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, config, ir, scheduler, utils
from torch._inductor.codegen.common import (
    get_device_op_overrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import StarDep
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from tests.benchmarks.kernel_count import (
    BACKWARD,
    ELEMENTWISE,
    FORWARD,
    Kernel,
    KernelCounter,
    StepCount,
    count_step,
    decided_by_plan,
    is_elementwise,
)
from trainer.config.load import load_config
from trainer.parallel.compile import describe_compiled
from trainer.plan.record import fake_device

ROOT = Path(__file__).parents[2]
PRESETS = ("flux2-dev-lora-4gpu", "flux2-klein-4b-lora-1gpu")
BACKEND = "counted"
SMALL_BYTES = 2**20
"""A kernel that moves fewer bytes works on a vector or on the weights of an adapter, and takes about a launch."""


@dataclass(frozen=True)
class Graph:
    """A graph that Inductor has lowered.

    Attributes:
        phase: FORWARD, or BACKWARD with what it computes again.
        kernels: Those that are generated, and those of torch's that are neither products nor attention.
    """

    phase: str
    kernels: tuple[Kernel, ...]

    def describe(self) -> str:
        """Return how many kernels there are and what they move."""
        small = sum(kernel.num_bytes < SMALL_BYTES for kernel in self.kernels)
        moved = sum(kernel.num_bytes for kernel in self.kernels) / 1e9
        return f"{len(self.kernels)} generated kernels, {small} of them below 1 MiB, {moved:.3f} GB"


class CountingCompiler:
    """A backend of torch.compile: Inductor up to the scheduler's fusions. A graph then runs operation by operation, and
    its generated kernels are added to those that `counter` counts, in place of its elementwise operations.

    Attributes:
        counter: Counts the step.
        graphs: The graphs so far.
    """

    def __init__(self, counter: KernelCounter) -> None:
        self.counter = counter
        self.graphs: list[Graph] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = compile_fx.compile_fx(graph, inputs, inner_compile=self._lower)  # type: ignore[arg-type,assignment]
        return made

    def _lower(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        is_backward = bool(options.get("is_backward"))
        kernels = generated(graph, inputs, is_backward, bool(options.get("is_inference")))
        found = Graph(BACKWARD if is_backward else FORWARD, tuple(kernels))
        self.graphs.append(found)
        runnable = copy.deepcopy(graph)

        def run(*args: Any) -> Any:
            with self.counter.compiled(found.kernels):
                return runnable.forward(*args)

        return make_boxed_func(run)  # type: ignore[no-untyped-call]


def generated(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], is_backward: bool = False, is_inference: bool = False
) -> list[Kernel]:
    """Lower a graph of ATen operations as `torch._inductor` does and return its elementwise kernels.

    The graph is changed by Inductor's passes.
    """
    compile_fx.view_to_reshape(graph)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(graph, inputs)  # type: ignore[arg-type]
        compile_fx._recursive_record_original_output_strides(graph)
        with V.set_fake_mode(fake_mode), DebugContext():
            compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
            lowering = GraphLowering(
                graph,
                example_inputs=inputs,
                shape_env=fake_mode.shape_env,
                is_backward=is_backward,
                is_inference=is_inference,
            )
            lowering.freeze_runtime_asserts()
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
                lowering.run(*inputs)
                lowering.init_wrapper_code()
                lowering._update_scheduler()
                phase = BACKWARD if is_backward else FORWARD
                return [kernel for node in lowering.scheduler.nodes if (kernel := _kernel(node, phase))]


def _kernel(node: Any, phase: str) -> Kernel | None:
    """Return the kernel of a node of the scheduler, if it is an elementwise one."""
    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return None
    if not node.is_extern():
        return Kernel(phase, ELEMENTWISE, "generated", 0, _bytes(node))
    operator = node.node.op_overload
    if operator is None or not is_elementwise(operator):
        return None
    return Kernel(phase, ELEMENTWISE, operator._opname, 0, node.get_read_write_buffers_sizes())


def _bytes(node: Any) -> int:
    """Return the bytes that a generated kernel reads and writes: of each buffer what its indices reach, once.

    torch's own count takes a buffer whole where a fused kernel reads a part of it. What a kernel makes and only it
    uses stays in registers.
    """
    made = {dependency.name for dependency in node.read_writes.writes}
    inside = set(node.get_nodes())
    kept = {name for name in made if any(user.node not in inside for user in node.scheduler.name_to_buf[name].users)}
    reads = [dependency for dependency in node.read_writes.reads if dependency.name not in made]
    return _reached(reads) + _reached([write for write in node.read_writes.writes if write.name in kept])


def _reached(dependencies: Sequence[Any]) -> int:
    reached: Counter[str] = Counter()
    for dependency in dependencies:
        reached[dependency.name] += V.graph.get_dep_size_hint(dependency)
    return sum(min(found, V.graph.get_dep_size_hint(StarDep(name))) for name, found in reached.items())


_PROPERTIES = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)


class _Interface(DeviceInterface):
    """The functions of the fake device that Dynamo and Inductor ask."""

    class Worker:
        get_device_properties = staticmethod(lambda device=None: _PROPERTIES)
        current_device = staticmethod(lambda: 0)

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(lambda device=None: _PROPERTIES)  # type: ignore[assignment]
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    synchronize = staticmethod(lambda device=None: None)


@cache
def install() -> torch.device:
    """Make Inductor generate code for the fake device as for a GPU, and return the device."""
    device = fake_device.install()
    register_interface_for_device(device.type, _Interface)
    register_backend_for_device(device.type, TritonScheduling, PythonWrapperCodegen)
    register_device_op_overrides(device.type, get_device_op_overrides("cuda"))
    utils.GPU_TYPES.append(device.type)
    scheduler.has_triton = lambda: True  # Triton compiles what is generated, and nothing is
    torch.accelerator.is_available = lambda: False  # Dynamo would trace the streams of the device
    # Attention counts as random: what is saved for its dropout, which is off, is a few bytes on the host.
    partitioners.has_recomputable_rng_ops = lambda graph: False
    # Both would compute on the device: one folds constants, which kernels have as numbers anyway, and the other
    # measures whether a matrix product is faster with padded sides.
    config.joint_graph_constant_folding = config.shape_padding = False
    for passes in (joint_graph, post_grad):  # patterns are traced on the device; those of the CPU are the same
        passes.lazy_init = partial(passes.lazy_init, torch.device("cpu"))
    return device


@dataclass(frozen=True)
class CompiledStep:
    """A step with compiled blocks.

    Attributes:
        name: The preset's.
        count: Its kernels. Products and attention of a backward graph are of the phase BACKWARD, also those that are
            computed again.
        graphs: The graphs of its blocks.
        problem: The code that torch.compile left uncompiled and which is counted as without it; empty if none.
    """

    name: str
    count: StepCount
    graphs: tuple[Graph, ...]
    problem: str

    @property
    def elementwise(self) -> int:
        """Bytes of elementwise passes, in the blocks and outside of them."""
        return elementwise_bytes(self.count)


def elementwise_bytes(count: StepCount) -> int:
    """Return the bytes of a step's elementwise passes."""
    return count.by(lambda kernel: kernel.kind)[ELEMENTWISE].num_bytes


def compiled_step_of(preset: Path, fields: Sequence[str] = ()) -> CompiledStep:
    """Count the step of a preset with compiled blocks, once in a process. fields: overrides."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    install()
    made: list[CountingCompiler] = []

    def attach(counter: KernelCounter) -> str:
        made.append(CountingCompiler(counter))
        register_backend(made[0], BACKEND)  # type: ignore[arg-type]
        return BACKEND

    with tempfile.TemporaryDirectory() as cache:
        cfg, _ = decided_by_plan(load_config(preset, tuple(fields)).config, Path(cache))
        count = count_step(cfg, Path(cache), attach)
    return CompiledStep(preset.stem, count, tuple(made[0].graphs), describe_compiled()[1])


def eager_bytes(preset: Path, fields: Sequence[str] = ()) -> int:
    """Return the bytes of the elementwise passes of a preset's step without torch.compile."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as cache:
        cfg, _ = decided_by_plan(load_config(preset, tuple(fields)).config, Path(cache))
        return elementwise_bytes(count_step(cfg, Path(cache)))


def described(eager: int, step: CompiledStep) -> str:
    """Say what compiled blocks save, and of how many kernels each graph is."""
    found = step.elementwise
    lines = [f"{step.name}: {eager / 1e9:.1f} GB elementwise, compiled {found / 1e9:.1f} GB: {found / eager:.3f}"]
    lines += [f"  {graph.phase}: {graph.describe()}" for graph in step.graphs]
    return "\n".join([*lines, *([step.problem] if step.problem else [])])


def main(argv: Sequence[str]) -> int:
    """Compare steps of presets without and with torch.compile, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compiled_count")
    parser.add_argument("presets", nargs="*", default=PRESETS, help="names of presets")
    parser.add_argument("--fields", nargs="+", default=(), help="FIELD=VALUE that differ from the presets'")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each preset")
    options = parser.parse_args(argv)
    for name in options.presets:
        preset = ROOT / "presets" / f"{name}.yaml"
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            eager = pool.submit(eager_bytes, preset, options.fields).result()
            step = pool.submit(compiled_step_of, preset, options.fields).result()
        if options.json:
            found = {"preset": name, "eager": eager, "compiled": step.elementwise, "problem": step.problem}
            print(json.dumps(found | {"graphs": [len(graph.kernels) for graph in step.graphs]}), flush=True)
        else:
            print(described(eager, step), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
