"""What a device does at best: matrix products, copies, attention, and the decoding of a quantized base.

Shapes are those of FLUX.2: one image of 1024 px with 512 tokens of text is a sequence of 4608.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.gpu_report import Place, Report, Row
from trainer.models.parts.language.document_attention import begins_mask, document_begins, within_documents
from trainer.parallel.attention import KERNELS, preferred
from trainer.weights.quantization import FORMATS, decode_in_pieces

TOKENS = 4608
# (outputs, inputs) of linear layers: of a block of klein-4B and of a block of dev.
LAYERS = {
    "klein single in": (27648, 3072),
    "klein single out": (3072, 12288),
    "klein double mlp": (18432, 3072),
    "dev single in": (55296, 6144),
    "dev single out": (6144, 24576),
    "dev double mlp": (36864, 6144),
}
TRIES, WARM_UP = 10, 3
APART = 0.02
"""Most that documents without a mask differ from masked ones, of the largest number: bf16 has 8 significant bits."""


def matrices(place: Place, report: Report) -> None:
    """Matrix products in bf16, and in 8 bits where the device has them."""
    shapes = {"8192": (8192, 8192, 8192)}
    shapes |= {name: (TOKENS, *LAYERS[name]) for name in ("klein single in", "dev single in")}
    for name, (rows, outputs, inputs) in shapes.items():
        if place.tiny:
            rows, outputs, inputs = (size // 64 for size in (rows, outputs, inputs))
        flop = 2 * rows * outputs * inputs
        for kind, product in _products(rows, outputs, inputs, place.here).items():
            label = f"matrix {name}, {kind}"
            with report.measuring(label):
                try:
                    rate = flop / seconds(product, place) / 1e12
                except (RuntimeError, NotImplementedError) as error:
                    report.add(_lacking(label, error))
                else:
                    report.add(Row(label, f"{rate:.1f} TFLOP/s", numbers={"tflops": rate}))


def _products(rows: int, outputs: int, inputs: int, device: torch.device) -> Mapping[str, Callable[[], object]]:
    """Each makes its operands at its first call: a type that the device lacks is an error of that row alone."""
    x, weight = _random(rows, inputs, device), _random(outputs, inputs, device)
    made: dict[str, tuple[Tensor, ...]] = {}

    def fp8() -> object:
        if "fp8" not in made:
            ones = [torch.ones(size, device=device) for size in ((rows, 1), (1, outputs))]
            made["fp8"] = (x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), *ones)
        a, b, of_rows, of_columns = made["fp8"]
        return torch._scaled_mm(a, b.t(), scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16)

    def int8() -> object:
        if "int8" not in made:
            made["int8"] = ((x * 30).to(torch.int8), (weight * 30).to(torch.int8))
        a, b = made["int8"]
        return torch._int_mm(a, b.t())

    return {"bf16": lambda: F.linear(x, weight), "fp8": fp8, "int8": int8}


def copies(place: Place, report: Report) -> None:
    """Copies within the device and to and from the host."""
    numbers = 2**18 if place.tiny else 2**30
    here = torch.empty(numbers, dtype=torch.uint8, device=place.here)
    other = torch.empty_like(here)
    is_cuda = place.device == "cuda"
    pinned = torch.empty(numbers, dtype=torch.uint8, pin_memory=is_cuda)
    pageable = torch.empty(numbers, dtype=torch.uint8)
    kinds: dict[str, tuple[Callable[[], object], int]] = {
        "within the device": (lambda: other.copy_(here), 2),
        "pinned to device": (lambda: here.copy_(pinned, non_blocking=True), 1),
        "device to pinned": (lambda: pinned.copy_(here, non_blocking=True), 1),
        "pageable to device": (lambda: here.copy_(pageable), 1),
    }
    for kind, (copy, passes) in kinds.items():
        with report.measuring(f"copy {kind}"):
            rate = passes * numbers / seconds(copy, place) / 1e9
            report.add(Row(f"copy {kind}", f"{rate:.1f} GB/s", numbers={"gb_per_s": rate}))


def attention(place: Place, report: Report) -> None:
    """Each value of `train.attention`, forward and with backward; then the documents of packed rows."""
    shapes = {"klein": (1, 24, TOKENS, 128), "dev": (1, 48, TOKENS, 128), "text, causal": (1, 16, 4096, 128)}
    for name, shape in shapes.items():
        if place.tiny:
            shape = (*shape[:2], 64, 32)
        for wanted in ("auto", *KERNELS):
            label, said = f"attention {name}, {wanted}", list[str]()
            with report.measuring(label), preferred(wanted, place.here, torch.bfloat16, print, said.append):
                if said:
                    report.add(Row(label, f"not on this device: {said[0][:120]}"))
                else:
                    _attend(label, shape, "causal" in name, place, report)
    with report.measuring("attention text, documents"):
        _documents((1, 16, 64, 32) if place.tiny else shapes["text, causal"], place, report)


def _attend(name: str, shape: tuple[int, ...], is_causal: bool, place: Place, report: Report) -> None:
    inputs = [_random(*shape, place.here).requires_grad_() for _ in range(3)]
    found = _forward_and_both(lambda: F.scaled_dot_product_attention(*inputs, is_causal=is_causal), inputs, place)
    batch, heads, length, size = shape
    flop = 4 * batch * heads * length * length * size * (0.5 if is_causal else 1)
    rates = flop / found["forward_s"] / 1e12, 3.5 * flop / found["both_s"] / 1e12
    figure = f"{found['forward_s'] * 1e3:.2f} ms forward ({rates[0]:.0f} TFLOP/s), "
    report.add(Row(name, f"{figure}{found['both_s'] * 1e3:.2f} ms both ({rates[1]:.0f})", numbers=found))


def _documents(shape: tuple[int, ...], place: Place, report: Report) -> None:
    """Eight documents of a packed row: without a mask of all pairs, and with one, which must give the same."""
    length = shape[2]
    documents = torch.arange(length) // (length // 8)
    begins = begins_mask(document_begins(documents[None])).to(place.here)
    mask = (documents[:, None] == documents[None]).tril()[None, None].to(place.here)
    inputs = [_random(*shape, place.here).requires_grad_() for _ in range(3)]
    ways: dict[str, Callable[[], Tensor]] = {
        "without a mask": lambda: within_documents(nn.Identity(), *inputs, begins)[0].transpose(1, 2),
        "with a mask": lambda: F.scaled_dot_product_attention(*inputs, mask),
    }
    outputs, texts, numbers = [], [], dict[str, float]()
    for name, way in ways.items():
        outputs.append(way().detach().float())
        found = _forward_and_both(way, inputs, place)
        numbers |= {f"{name}: {key}": value for key, value in found.items()}
        texts.append(f"{name} {found['forward_s'] * 1e3:.2f} ms forward, {found['both_s'] * 1e3:.2f} ms both")
    off = ((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()).item()
    figure = f"{'; '.join(texts)}; {off:.2%} apart"
    report.add(Row("attention text, documents", figure, f"<= {APART:.0%}", off <= APART, numbers | {"off": off}))


def _forward_and_both(forward: Callable[[], Tensor], inputs: list[Tensor], place: Place) -> dict[str, float]:
    """Seconds of forward, and of forward and backward."""
    gradient = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), inputs, gradient)

    return {"forward_s": seconds(forward, place), "both_s": seconds(both, place)}


def decode(place: Place, report: Report) -> None:
    """How fast a quantized weight is decoded: piece by piece, and by the kernel, which must give the same bits."""
    for format in FORMATS:
        for name, (outputs, inputs) in LAYERS.items():
            if place.tiny:
                outputs, inputs = 64, 128
            rows = FORMATS[format].encode(_random(64, inputs, place.here))
            records = rows.repeat(-(-outputs // 64), 1)[:outputs]
            weights = [torch.empty(outputs, inputs, dtype=torch.bfloat16, device=place.here) for _ in range(2)]
            found: dict[str, float] = {}
            ways = {"pieces": decode_in_pieces} | ({"kernel": _kernel} if place.device == "cuda" else {})
            for (kind, way), weight in zip(ways.items(), weights, strict=False):
                with report.measuring(f"decode {format}, {name}, {kind}"):
                    found[kind] = seconds(partial(way, records, weight, format), place, no_gradient=True)
            moved = 2 * outputs * inputs + records.numel()
            texts = [f"{kind} {took * 1e3:.3f} ms ({moved / took / 1e9:.0f} GB/s)" for kind, took in found.items()]
            equal = "kernel" not in found or torch.equal(*weights)
            report.add(Row(f"decode {format}, {name}", ", ".join(texts), "equal bits", equal, found))


def _kernel(records: Tensor, weight: Tensor, format: str) -> None:
    """Decode by the kernel: imported here, since Triton comes with torch for GPUs only."""
    from trainer.weights import kernels

    kernels.decode(records, weight, format)


def _lacking(name: str, error: Exception) -> Row:
    """A row that is not a failure: the device lacks what would be measured."""
    return Row(name, f"not on this device: {(str(error).strip().splitlines() or [''])[0][:120]}")


def seconds(step: Callable[[], object], place: Place, no_gradient: bool = False) -> float:
    """Median seconds of a step on the device."""
    times = []
    with torch.set_grad_enabled(not no_gradient):
        for turn in range(WARM_UP + TRIES):
            place.synchronize()
            if place.device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                step()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end) / 1e3
            else:
                began = time.perf_counter()
                step()
                took = time.perf_counter() - began
            times += [took] if turn >= WARM_UP else []
    return statistics.median(times)


def _random(*shape_and_device: object) -> Tensor:
    *shape, device = shape_and_device
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)  # type: ignore[call-overload, no-any-return]
