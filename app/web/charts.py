"""Line charts for the page: their content as one JSON string, and the script that draws it on a canvas.

A string, because gradio observes every number of a list: at 10,000 points that took 12 times as long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from trainer.run.report import Line

DIGITS = 5


def chart_json(title: str, lines: Sequence[Line], axis: str = "step", is_log: bool = False) -> str:
    """Return the value of a chart.

    Args:
        axis: Label of the x axis.
        is_log: Whether the y axis is logarithmic.
    """
    return json.dumps(
        {
            "title": title,
            "axis": axis,
            "log": is_log,
            "summary": summary(title, lines, axis),
            "lines": [{"label": line.label, "points": _rounded(line.points)} for line in lines],
        },
        separators=(",", ":"),
    )


def summary(title: str, lines: Sequence[Line], axis: str) -> str:
    """Return the chart as a sentence, for screen readers."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return f"{title}: no data yet."
    last = ", ".join(f"{line.label} {_short(line.points[-1][1])}" for line in drawn)
    return f"{title} up to {axis} {_short(drawn[0].points[-1][0])}. Last: {last}."


def _rounded(points: Sequence[tuple[float, float]]) -> list[tuple[float, float | None]]:
    return [(float(_short(x)), float(_short(y)) if math.isfinite(y) else None) for x, y in points]


def _short(value: float) -> str:
    return f"{value:.{DIGITS}g}"


TEMPLATE = """<figure class="chart"><figcaption><b></b><ul></ul></figcaption>
<canvas role="img" tabindex="0"></canvas><output aria-hidden="true"></output><p class="sr"></p></figure>"""

CSS = """
.chart { margin: 0; position: relative; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: baseline; }
.chart ul { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0; list-style: none; font-size: .85em; }
.chart li::before { content: ""; display: inline-block; width: 1.2em; margin-right: .35em; vertical-align: middle;
  border-top: 2px var(--dash) var(--ink); }
.chart canvas { width: 100%; height: 220px; display: block; }
.chart output { position: absolute; right: 8px; top: 2em; font-size: .8em; pointer-events: none; white-space: pre;
  background: var(--background-fill-primary); padding: 0 .4em; }
.chart .sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); margin: 0; }
"""

SCRIPT = """
const LEFT = 56, RIGHT = 10, TOP = 8, BOTTOM = 24;
const DASHES = [[], [8, 3], [2, 4], [12, 4, 2, 4], [4, 4], []];
const canvas = element.querySelector('canvas'), output = element.querySelector('output');
let chart = null, scale = null;
const colour = index => getComputedStyle(document.body).getPropertyValue(`--line-${index % 6}`).trim() || '#c2410c';
const short = value => {
  const rounded = Number(value.toPrecision(4));
  return rounded && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : rounded.toString();
};
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw), found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(v);
  return found;
}
function draw() {
  if (!chart || !canvas.clientWidth) return;
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const pen = canvas.getContext('2d'); pen.scale(ratio, ratio);
  const value = chart.log ? y => y > 0 ? Math.log10(y) : null : y => y;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity, count = 0;
  for (const line of chart.lines) for (const [x, raw] of line.points) {
    const y = raw === null ? null : value(raw);
    if (x < x0) x0 = x; if (x > x1) x1 = x;
    if (y !== null) { count++; if (y < y0) y0 = y; if (y > y1) y1 = y; }
  }
  canvas.dataset.n = count; canvas.dataset.last = count ? x1 : '';
  if (!count) { scale = null; return; }
  const room = (y1 - y0) * 0.05 || Math.abs(y0) * 0.05 || 1;
  y0 -= room; y1 += room; if (x1 <= x0) x1 = x0 + 1;
  const X = x => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  const Y = y => TOP + (y1 - y) / (y1 - y0) * (height - TOP - BOTTOM);
  scale = { X, Y, value };
  const style = getComputedStyle(canvas), ink = style.color;
  pen.font = `12px ${style.fontFamily}`; pen.fillStyle = ink; pen.strokeStyle = ink; pen.textBaseline = 'middle';
  pen.lineWidth = 1; pen.textAlign = 'right';
  for (const v of ticks(y0, y1, 4)) {
    pen.globalAlpha = 0.15; pen.beginPath(); pen.moveTo(LEFT, Y(v)); pen.lineTo(width - RIGHT, Y(v)); pen.stroke();
    pen.globalAlpha = 1; pen.fillText(short(chart.log ? 10 ** v : v), LEFT - 6, Y(v));
  }
  pen.textAlign = 'center';
  for (const v of ticks(x0, x1, Math.max(2, width / 90))) pen.fillText(short(v), X(v), height - 9);
  chart.lines.forEach((line, index) => {
    pen.strokeStyle = colour(index); pen.setLineDash(DASHES[index % 6]); pen.lineWidth = index === 1 ? 2 : 1.25;
    pen.beginPath(); let down = false;
    for (const [x, raw] of line.points) {
      const y = raw === null ? null : value(raw);
      if (y === null) { down = false; continue; }
      if (down) pen.lineTo(X(x), Y(y)); else { pen.moveTo(X(x), Y(y)); pen.lineTo(X(x) + 0.5, Y(y)); }
      down = true;
    }
    pen.stroke();
  });
  pen.setLineDash([]);
}
function show() {
  if (!props.value) return;
  chart = JSON.parse(props.value);
  element.querySelector('b').textContent = chart.title + (chart.log ? ' (log)' : '');
  element.querySelector('.sr').textContent = chart.summary;
  canvas.setAttribute('aria-label', chart.summary);
  const legend = element.querySelector('ul'), labels = chart.lines.map(line => line.label);
  if (legend.dataset.labels !== JSON.stringify(labels)) {
    legend.dataset.labels = JSON.stringify(labels);
    legend.replaceChildren(...labels.map((label, index) => {
      const item = document.createElement('li'); item.textContent = label;
      item.style.setProperty('--ink', `var(--line-${index % 6})`);
      item.style.setProperty('--dash', DASHES[index % 6].length ? 'dashed' : 'solid');
      return item;
    }));
  }
  draw();
}
canvas.addEventListener('mousemove', event => {
  if (!scale) return;
  const rows = [];
  for (const line of chart.lines) {
    let best = null, nearest = Infinity;
    for (const [x, y] of line.points) {
      const away = Math.abs(scale.X(x) - event.offsetX);
      if (y !== null && away < nearest) { best = [x, y]; nearest = away; }
    }
    if (best) rows.push(`${chart.axis} ${short(best[0])}  ${line.label} ${short(best[1])}`);
  }
  output.textContent = rows.join('\\n');
});
canvas.addEventListener('mouseleave', () => { output.textContent = ''; });
new ResizeObserver(draw).observe(canvas);
new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ['class'] });
watch('value', show); show();
"""
