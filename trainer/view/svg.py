"""Charts as SVG, and the parts of a step as a bar, for files that load no script. `chart.css` styles them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainer.run.events import StepEvent
from trainer.view import render
from trainer.view.chart import Axis, Chart, Curve, Point, thin
from trainer.view.colors import LINES
from trainer.view.numbers import short
from trainer.view.steps import seconds_waited, step_parts

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 80, 12, 12, 46


@dataclass(frozen=True)
class Shape:
    """An element of a picture. Values are escaped where it is drawn.

    Attributes:
        tag: Its tag.
        attributes: Its attributes, of which those that are None are left out.
        text: Its text.
        title: What the pointer shows of it; "" for nothing.
    """

    tag: str
    attributes: Mapping[str, object]
    text: str = ""
    title: str = ""


def path(kind: str, lines: str) -> Shape:
    return Shape("path", {"class": kind, "d": lines})


def dot(kind: str, x: float, y: float, radius: float) -> Shape:
    return Shape("circle", {"class": kind, "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": radius})


def rect(kind: str, corner: Point, opposite: Point, title: str = "") -> Shape:
    """Return a rectangle between its upper left and its lower right corner."""
    (left, top), (right, bottom) = corner, opposite
    sizes = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    return Shape("rect", {"class": kind} | {name: f"{size:.1f}" for name, size in sizes.items()}, title=title)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "label") -> Shape:
    return Shape("text", {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}, words)


def draw(chart: Chart) -> Markup:
    """Return a chart as a figure with inline SVG; nothing if no line has a finite value."""
    lines = [line for line in chart.lines if any(math.isfinite(value) for _, value in line.points)]
    if not lines:
        return Markup()
    shown = Chart(chart.title, lines, chart.unit or chart.title.lower())
    points = [point for line in lines for point in line.in_view]
    axes = _Axes(Axis.of_steps([step for step, _ in points]), Axis.of_values([value for _, value in points]))
    curves = [(at % len(LINES), curve) for at, line in enumerate(lines) for curve in line.curves]
    shapes = [*axes.shapes(shown.unit), *(shape for color, curve in curves for shape in axes.curve(curve, color))]
    return render.VIEW.part("chart.html", "chart", shown, (WIDTH, HEIGHT), shapes, curves)


@dataclass(frozen=True)
class _Axes:
    """Maps steps and values to coordinates in the SVG."""

    steps: Axis
    values: Axis

    def x(self, step: float) -> float:
        return LEFT + self.steps.share(step) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.values.share(value) * (HEIGHT - TOP - BOTTOM)

    def shapes(self, unit: str) -> list[Shape]:
        """Return the grid at round values of both axes, and their titles."""
        found = []
        for value in self.values.marks():
            y = self.y(value)
            found += [path("grid", f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}"), text(LEFT - 8, y + 4, short(value), "end")]
        for step in self.steps.marks():
            if step == round(step):
                x = self.x(step)
                anchor = "end" if x > WIDTH - 40 else "middle"  # a label is never cut by the edge
                found.append(text(x, HEIGHT - BOTTOM + 18, f"{step:,.0f}", anchor))
        upright = {"class": "axis", "transform": f"translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"}
        found.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "step", "middle", "axis"))
        return [*found, Shape("text", upright | {"text-anchor": "middle"}, unit)]

    def curve(self, curve: Curve, color: int) -> list[Shape]:
        found = [path(f"c{color} {curve.kind}", self._lines(thin(curve.points)))]
        if curve.kind == "dots":
            points = [(self.x(step), self.y(value)) for step, value in curve.points if math.isfinite(value)]
            found += [dot("dots", x, y, 3) for x, y in points]
        return found

    def _lines(self, points: Sequence[Point]) -> str:
        """Return the path with a gap where a value is not finite. `h0` makes an isolated point visible."""
        commands, pen = [], "M"
        for step, value in points:
            if not math.isfinite(value):
                pen = "M"
                continue
            commands.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}" + ("h0" if pen == "M" else ""))
            pen = "L"
        return "".join(commands)


def step_split(steps: Sequence[StepEvent]) -> Markup:
    """Return the mean seconds of a step as a bar of parts that add up, and in words."""
    parts = step_parts(steps)
    return render.VIEW.part("chart.html", "split", parts, sum(parts.values()), seconds_waited(steps))
