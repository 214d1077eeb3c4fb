"""Draws the memory of a training step over its computing, as SVG without scripts. No torch.

Each part of the computing is drawn at its fullest moment: how memory changes within a block is not known. Parts that
are too narrow to be seen are drawn together, at the fullest of them, so that the peak is always in the picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from trainer.plan.memory import MemoryPlan
from trainer.plan.simulate.phases import by_kind
from trainer.plan.simulate.timeline import Point
from trainer.system.amounts import GIB
from trainer.view.chart import Axis
from trainer.view.colors import MEMORY_KINDS
from trainer.view.render import VIEW
from trainer.view.svg import Shape, dot, path, rect, text

NUM_BARS = 320
"""Most parts of the computing that are drawn."""
KIND_WORDS: Mapping[str, str] = {
    "weights": "weights",
    "optimizer": "optimizer, gradients",
    "gathered": "gathered blocks",
    "activations": "activations",
    "reserve": "reserve",
}
"""{kind of memory: its name in the legend}"""
MOST_NAMED_PASSES = 3
"""Forward and backward of more passes are too narrow for their names."""
OPTIMIZER = "optimizer"
WIDTH, HEIGHT = 800, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 62, 58
STUB, GAP = 14, 4
"""Width of the optimizer, whose computing is too short to be seen, and of the gap before it."""
MOST_TICKS = 6
SMALLEST_SHOWN = 1 / 500
"""A kind of memory with less than this share of the peak is too low to be seen, and not in the legend."""
OUT_OF_SIGHT = 2.5
"""A card or reserve that would make the picture higher than this multiple of the rest is not drawn."""


@dataclass(frozen=True)
class Bar:
    """A part of a step's computing, at its fullest moment.

    Attributes:
        start: Where it begins, as a share of the step's operations.
        end: Where it ends, likewise. The optimizer begins and ends at 1.
        peak: Most bytes at once.
        kinds: Bytes of each of `colors.MEMORY_KINDS` then.
        after: Bytes that are allocated when it is over.
        words: The fullest moment in words.
    """

    start: float
    end: float
    peak: float
    kinds: tuple[float, ...]
    after: float
    words: str


@dataclass(frozen=True)
class Span:
    """A forward or backward of the step, or all of its passes. Begin and end are shares of the step's operations."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Outline:
    """The memory of a step as it is drawn.

    Attributes:
        bars: Parts of the computing, in their order; the last one is the optimizer.
        spans: Forward and backward of each pass.
    """

    bars: tuple[Bar, ...]
    spans: tuple[Span, ...]

    @property
    def fullest(self) -> Bar:
        """The bar with the peak."""
        return max(self.bars, key=lambda bar: bar.peak)


@dataclass(frozen=True)
class Limit:
    """Limits of the step's memory. Sizes in bytes.

    Attributes:
        reserve: Bytes of the allocator and the driver; 0 for none.
        memory: That of the card; None where it is not known.
        card: Name of the card.
    """

    reserve: float = 0.0
    memory: float | None = None
    card: str = ""

    @classmethod
    def of(cls, plan: MemoryPlan) -> Limit:
        """Return that of a plan's training step."""
        step, card = plan.training, plan.card
        return cls(step.need - step.peak, card.memory if card else None, card.name if card else "")

    def seen(self, peak: float) -> Limit:
        """Return what is drawn with a peak: without what is so much larger that the peak would be too low to read."""
        reserve = self.reserve if self.reserve <= peak * (OUT_OF_SIGHT - 1) else 0.0
        is_near = self.memory is not None and self.memory <= OUT_OF_SIGHT * (peak + reserve)
        return Limit(reserve, self.memory if is_near else None, self.card)


def outline(points: Sequence[Point], num_bars: int = NUM_BARS) -> Outline:
    """Return at most about `num_bars` bars that have the outline of all points."""
    *computing, last = points
    whole = last.flops or 1.0
    bars = list(_bars(computing, whole, 1 / num_bars))
    return Outline((*bars, _bar([last], 1.0, 1.0)), tuple(_spans(computing, whole)))


def _bars(points: Sequence[Point], whole: float, narrowest: float) -> Iterator[Bar]:
    """Yield the bars; a moment without computing belongs to the computing that follows it."""
    begin, group = 0.0, list[Point]()
    for at, point in enumerate(points):
        group.append(point)
        rest = whole - point.flops
        is_last = at == len(points) - 1
        if is_last or (point.flops - begin >= narrowest * whole and rest >= narrowest * whole):
            yield _bar(group, begin / whole, 1.0 if is_last else point.flops / whole)
            begin, group = point.flops, []


def _bar(points: Sequence[Point], start: float, end: float) -> Bar:
    most = max(points, key=lambda point: point.peak)
    kinds = tuple(by_kind(most.highest).values())
    return Bar(start, end, most.peak, kinds, sum(points[-1].after.values()), most.words)


def _spans(points: Sequence[Point], whole: float) -> Iterator[Span]:
    """Yield forward and backward of each pass; one span for many passes."""
    if points[-1].number >= MOST_NAMED_PASSES:
        yield Span(f"{points[-1].number + 1} passes, each forward and backward", 0.0, 1.0)
        return
    begin = 0.0
    inside = (point for point in points if point.moment)
    for is_forward, group in groupby(inside, key=lambda point: point.moment.startswith("forward")):
        end = list(group)[-1].flops
        if end > begin:
            yield Span("forward" if is_forward else "backward", begin / whole, end / whole)
        begin = end


def sentence(found: Outline, limit: Limit) -> str:
    """Return what the picture shows, for those who do not see it."""
    most = found.fullest
    text = f"Memory over one training step: at most {_gib(most.peak)} of tensors, in {most.words}"
    if limit.reserve:
        text += f", {_gib(most.peak + limit.reserve)} with the reserve"
    return text + (f", of the {_gib(limit.memory)} of {limit.card}." if limit.memory else ".")


def draw(points: Sequence[Point], limit: Limit) -> Markup:
    """Return the picture as one SVG element, which follows the light or dark of what shows it."""
    found = outline(points)
    peak = found.fullest.peak
    seen = limit.seen(peak)
    axes = _Axes(1.06 * max(peak + seen.reserve, seen.memory or 0.0, 1.0))
    shapes = (
        *axes.grid(),
        *_legend(found, limit, seen),
        *_areas(found, axes),
        *_names_of_spans(found),
        *_reserve_and_card(found, seen, axes),
        *_tooltips(found),
        *_peak(found, axes),
    )
    return VIEW.part("chart.html", "step_memory", (WIDTH, HEIGHT), sentence(found, limit), shapes)


@dataclass(frozen=True)
class _Axes:
    """top: bytes at the upper edge."""

    top: float

    def y(self, num_bytes: float) -> float:
        return HEIGHT - BOTTOM - num_bytes / self.top * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> Iterator[Shape]:
        """Yield the lines and numbers of both axes, and their names."""
        marks = Axis(0.0, self.top / GIB).marks(MOST_TICKS)
        digits = max(0, -math.floor(math.log10(marks[1]) + 1e-9))
        for mark in marks:
            y = self.y(mark * GIB)
            yield path("grid", f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}")
            yield text(LEFT - 6, y + 4, f"{mark:.{digits}f}", "end")
        for share in (0, 25, 50, 75, 100):
            yield text(_x(share / 100), HEIGHT - BOTTOM + 15, f"{share} %", "middle" if share else "start")
        yield text(LEFT, HEIGHT - 6, "share of the step\u2019s computing")
        yield text(LEFT - 6, TOP - 10, "GiB", "end")


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT - STUB - GAP)


def _edges(bar: Bar) -> tuple[float, float]:
    """Return where a bar begins and ends in the picture."""
    if bar.start == bar.end:
        return WIDTH - RIGHT - STUB, WIDTH - RIGHT
    return _x(bar.start), _x(bar.end)


def _areas(found: Outline, axes: _Axes) -> Iterator[Shape]:
    """Yield the area of each kind with all kinds below it, the highest first: those below are drawn over it."""
    *computing, optimizer = found.bars
    for at in reversed(range(len(MEMORY_KINDS))):
        if not any(bar.kinds[at] for bar in found.bars):
            continue
        paths = "".join(_steps(bars, at, axes) for bars in (computing, [optimizer]) if bars)
        yield path(MEMORY_KINDS[at], paths)


def _steps(bars: Sequence[Bar], at: int, axes: _Axes) -> str:
    """Return the outline of the first `at + 1` kinds, down to the axis."""
    heights = [(round(axes.y(sum(bar.kinds[: at + 1])), 1), _edges(bar)[1]) for bar in bars]
    lines = []
    for height, group in groupby(heights, key=lambda pair: pair[0]):
        lines.append(f"V{height:g}H{list(group)[-1][1]:.1f}")
    return f"M{_edges(bars[0])[0]:.1f} {HEIGHT - BOTTOM}{''.join(lines)}V{HEIGHT - BOTTOM}Z"


def _names_of_spans(found: Outline) -> Iterator[Shape]:
    """Yield the names of the spans below the axis, each with a line over its width."""
    y = HEIGHT - BOTTOM + 34
    for span in found.spans:
        start, end = _x(span.start) + 1, _x(span.end) - 1
        yield path("span", f"M{start:.1f} {y - 13}H{end:.1f}")
        yield text((start + end) / 2, y, span.name, "middle")
    yield path("span", f"M{WIDTH - RIGHT - STUB} {y - 13}H{WIDTH - RIGHT}")
    yield text(WIDTH - RIGHT, HEIGHT - 6, OPTIMIZER, "end")


def _reserve_and_card(found: Outline, limit: Limit, axes: _Axes) -> Iterator[Shape]:
    """Yield the reserve on top of the peak, and the line of the card's memory where it is in the picture."""
    peak = found.fullest.peak
    if limit.reserve:
        top, bottom = axes.y(peak + limit.reserve), axes.y(peak)
        words = f"{_gib(peak + limit.reserve)} with the reserve: gaps of the allocator, CUDA\u2019s context"
        yield rect("band", (LEFT, top), (WIDTH - RIGHT, bottom), words)
    if limit.memory:
        y = axes.y(limit.memory)
        yield path("card", f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}")


def _legend(found: Outline, limit: Limit, seen: Limit) -> Iterator[Shape]:
    """Yield the kinds that are in the picture, and the card."""
    least = found.fullest.peak * SMALLEST_SHOWN
    shown = [kind for at, kind in enumerate(MEMORY_KINDS[:-1]) if max(bar.kinds[at] for bar in found.bars) >= least]
    shown += ["reserve"] if seen.reserve else []
    x = float(LEFT)
    for kind in shown:
        look = "band" if kind == "reserve" else kind
        yield rect(look, (x, 7), (x + 10, 17))
        yield text(x + 15, 16, KIND_WORDS[kind])
        x += 28 + 6.2 * len(KIND_WORDS[kind])
    if seen.memory:
        yield path("card", f"M{x:.0f} 12h14")
        yield text(x + 19, 16, f"{seen.card}, {_gib(seen.memory)}")
    elif limit.memory:
        yield text(WIDTH - RIGHT, 16, f"of {_gib(limit.memory)}, {limit.card}", "end")


def _tooltips(found: Outline) -> Iterator[Shape]:
    """Yield what the pointer shows of each bar, over its whole height."""
    for bar in found.bars:
        start, end = _edges(bar)
        parts = ", ".join(
            f"{KIND_WORDS[kind]} {size / GIB:.2f}"
            for kind, size in zip(MEMORY_KINDS, bar.kinds, strict=True)
            if size >= GIB / 200
        )
        words = f"{bar.words}: {_gib(bar.peak)} ({parts}), {bar.after / GIB:.2f} after it"
        yield rect("tip", (start, TOP), (end, HEIGHT - BOTTOM), words)


def _peak(found: Outline, axes: _Axes) -> Iterator[Shape]:
    """Yield a mark at the peak and its name above the picture."""
    most = found.fullest
    x, y = sum(_edges(most)) / 2, axes.y(most.peak)
    words = f"{_gib(most.peak)}: {most.words}"
    half = 3.4 * len(words)
    anchor = "start" if x - half < LEFT else "end" if x + half > WIDTH - RIGHT else "middle"
    yield path("mark", f"M{x:.1f} {TOP - 14}V{y:.1f}")
    yield dot("dot", x, y, 3.5)
    yield text(x, TOP - 19, words, anchor, "peak")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
