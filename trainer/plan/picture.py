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
MOST_TICKS = 6
SMALLEST_SHOWN = 1 / 500
"""A kind of memory with less than this share of the peak is too low to be seen, and not in the legend."""
OUT_OF_SIGHT = 2.5
"""A card or reserve that would make the picture higher than this multiple of the rest is not drawn."""


@dataclass(frozen=True)
class Frame:
    """The sizes of a picture, in its own units.

    Attributes:
        width: Its width.
        height: Its height.
        left: Margin.
        right: Margin.
        top: Margin.
        bottom: Margin.
        stub: Width of the optimizer, whose computing is too short to be seen.
        gap: Width of the gap before it.
        is_small: Without legend, shares and long names: what shows it has them.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    stub: int
    gap: int
    is_small: bool = False


LARGE = Frame(800, 340, left=56, right=14, top=62, bottom=58, stub=14, gap=4)
SMALL = Frame(320, 190, left=30, right=4, top=18, bottom=32, stub=8, gap=3, is_small=True)


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


def draw(found: Outline, limit: Limit, frame: Frame = LARGE) -> Markup:
    """Return the picture as one SVG element, in the colours of what shows it."""
    seen = limit.seen(found.fullest.peak)
    highest = max(found.fullest.peak + seen.reserve, seen.memory or 0.0, 1.0)
    picture = _Picture(found, limit, seen, frame, 1.06 * highest)
    parts = (
        picture.grid(),
        () if frame.is_small else picture.legend(),
        picture.areas(),
        picture.spans(),
        picture.reserve_and_card(),
        picture.tooltips(),
        picture.peak(),
    )
    words = "" if frame.is_small else sentence(found, limit)  # the panel has it below the picture
    shapes = [shape for part in parts for shape in part]
    return VIEW.part("chart.html", "step_memory", frame, words, shapes)


@dataclass(frozen=True)
class _Picture:
    """What is drawn. seen: of the limits what is near enough to be drawn.  top: bytes at the upper edge."""

    found: Outline
    limit: Limit
    seen: Limit
    frame: Frame
    top: float

    @property
    def base(self) -> int:
        """Where 0 bytes are."""
        return self.frame.height - self.frame.bottom

    @property
    def end(self) -> int:
        """The right edge."""
        return self.frame.width - self.frame.right

    def y(self, num_bytes: float) -> float:
        return self.base - num_bytes / self.top * (self.base - self.frame.top)

    def x(self, share: float) -> float:
        return self.frame.left + share * (self.end - self.frame.left - self.frame.stub - self.frame.gap)

    def edges(self, bar: Bar) -> tuple[float, float]:
        """Return where a bar begins and ends in the picture."""
        return (self.end - self.frame.stub, self.end) if bar.start == bar.end else (self.x(bar.start), self.x(bar.end))

    def grid(self) -> Iterator[Shape]:
        """Yield the lines and numbers of both axes, and their names."""
        frame = self.frame
        marks = Axis(0.0, self.top / GIB).marks(MOST_TICKS)
        digits = max(0, -math.floor(math.log10(marks[1]) + 1e-9))
        for mark in marks:
            y = self.y(mark * GIB)
            yield path("grid", f"M{frame.left} {y:.1f}H{self.end}")
            yield text(frame.left - 5, y + 4, f"{mark:.{digits}f}", "end")
        for share in () if frame.is_small else (0, 25, 50, 75, 100):
            yield text(self.x(share / 100), self.base + 15, f"{share} %", "middle" if share else "start")
        yield text(frame.left, frame.height - 4, "share of the step\u2019s computing")
        yield text(frame.left - 5, frame.top - 9, "GiB", "end")

    def legend(self) -> Iterator[Shape]:
        """Yield the kinds that are in the picture, and the card."""
        bars, seen = self.found.bars, self.seen
        least = self.found.fullest.peak * SMALLEST_SHOWN
        shown = [kind for at, kind in enumerate(MEMORY_KINDS[:-1]) if max(bar.kinds[at] for bar in bars) >= least]
        shown += ["reserve"] if seen.reserve else []
        x = float(self.frame.left)
        for kind in shown:
            yield rect("band" if kind == "reserve" else kind, (x, 7), (x + 10, 17))
            yield text(x + 15, 16, KIND_WORDS[kind])
            x += 28 + 6.2 * len(KIND_WORDS[kind])
        if seen.memory:
            yield path("card", f"M{x:.0f} 12h14")
            yield text(x + 19, 16, f"{seen.card}, {_gib(seen.memory)}")
        elif self.limit.memory:
            yield text(self.end, 16, f"of {_gib(self.limit.memory)}, {self.limit.card}", "end")

    def areas(self) -> Iterator[Shape]:
        """Yield the area of each kind with all kinds below it, the highest first: those below are drawn over it."""
        *computing, optimizer = self.found.bars
        for at in reversed(range(len(MEMORY_KINDS))):
            if any(bar.kinds[at] for bar in self.found.bars):
                areas = [self._area(bars, at) for bars in (computing, [optimizer]) if bars]
                yield path(MEMORY_KINDS[at], "".join(areas))

    def _area(self, bars: Sequence[Bar], at: int) -> str:
        """Return the outline of the first `at + 1` kinds, down to the axis."""
        heights = [(round(self.y(sum(bar.kinds[: at + 1])), 1), self.edges(bar)[1]) for bar in bars]
        lines = []
        for height, group in groupby(heights, key=lambda pair: pair[0]):
            lines.append(f"V{height:g}H{list(group)[-1][1]:.1f}")
        return f"M{self.edges(bars[0])[0]:.1f} {self.base}{''.join(lines)}V{self.base}Z"

    def spans(self) -> Iterator[Shape]:
        """Yield a line below the axis for each span, and its name where there is room."""
        line = self.base + (4 if self.frame.is_small else 21)
        for span in self.found.spans:
            start, end = self.x(span.start) + 1, self.x(span.end) - 1
            yield path("span", f"M{start:.1f} {line}H{end:.1f}")
            if end - start > 5 * len(span.name):
                yield text((start + end) / 2, line + 12, span.name, "middle")
        yield path("span", f"M{self.end - self.frame.stub} {line}H{self.end}")
        yield text(self.end, self.frame.height - 4, OPTIMIZER, "end")

    def reserve_and_card(self) -> Iterator[Shape]:
        """Yield the reserve on top of the peak, and the line of the card's memory where it is in the picture."""
        peak, seen = self.found.fullest.peak, self.seen
        if seen.reserve:
            words = f"{_gib(peak + seen.reserve)} with the reserve: gaps of the allocator, CUDA\u2019s context"
            yield rect("band", (self.frame.left, self.y(peak + seen.reserve)), (self.end, self.y(peak)), words)
        if seen.memory:
            yield path("card", f"M{self.frame.left} {self.y(seen.memory):.1f}H{self.end}")

    def tooltips(self) -> Iterator[Shape]:
        """Yield what the pointer shows of each bar, over its whole height."""
        for bar in self.found.bars:
            start, end = self.edges(bar)
            words = f"{bar.words}: {_gib(bar.peak)}"
            if not self.frame.is_small:
                kinds = zip(MEMORY_KINDS, bar.kinds, strict=True)
                parts = [f"{KIND_WORDS[kind]} {size / GIB:.2f}" for kind, size in kinds if size >= GIB / 200]
                words += f" ({', '.join(parts)}), {bar.after / GIB:.2f} after it"
            yield rect("tip", (start, self.frame.top), (end, self.base), words)

    def peak(self) -> Iterator[Shape]:
        """Yield a mark at the peak and its name above the picture."""
        most, frame = self.found.fullest, self.frame
        x, y = sum(self.edges(most)) / 2, self.y(most.peak)
        words = _gib(most.peak) if frame.is_small else f"{_gib(most.peak)}: {most.words}"
        half = 3.4 * len(words)
        anchor = "start" if x - half < frame.left else "end" if x + half > self.end else "middle"
        yield path("mark", f"M{x:.1f} {frame.top - 4}V{y:.1f}")
        yield dot("dot", x, y, 2.5 if frame.is_small else 3.5)
        yield text(x, frame.top - 7, words, anchor, "peak")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
