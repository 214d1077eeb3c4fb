// The memory over one training step, as a picture with a sentence below it.
// @ts-check
import * as studio from './core.js';
import { h, svg } from './core.js';

const WIDTH = 320, HEIGHT = 190, LEFT = 30, RIGHT = 4, TOP = 18, BOTTOM = 32, STUB = 8, GAP = 3, MOST_TICKS = 5,
  GIB = 2 ** 30;
const base = HEIGHT - BOTTOM, x = share => LEFT + share / 1e4 * (WIDTH - LEFT - RIGHT - STUB - GAP);
const text = (left, top, anchor, words, kind = '') =>
  svg('text', { x: left.toFixed(1), y: top.toFixed(1), 'text-anchor': anchor, class: kind }, words);

/** Left and right of each part of the step. The last one is the optimizer, whose computing has no width. */
const edges = found => found.ends.map((end, index, ends) => index === ends.length - 1
  ? [WIDTH - RIGHT - STUB, WIDTH - RIGHT] : [x(index ? ends[index - 1] : 0), x(end)]);

/** The first `count` kinds of every part, down to the axis. */
function area(found, count, parts, y) {
  const sums = found.ends.map((_, index) => found.kinds.slice(0, count)
    .reduce((sum, [, sizes]) => sum + sizes[index] * 1024, 0));
  const steps = parts.map(
    ([left, right], index) =>
      `${index === parts.length - 1 ? `V${base}H${left.toFixed(1)}`
        : ''}V${y(sums[index]).toFixed(1)}H${right.toFixed(1)}`);
  return svg('path', { class: found.kinds[count - 1][0], d: `M${LEFT} ${base}${steps.join('')}V${base}Z` });
}

function grid(top, y) {
  const least = top / MOST_TICKS / GIB, power = 10 ** Math.floor(Math.log10(least)),
    tick = power * ([1, 2, 5, 10].find(factor => factor * power >= least) ?? 10);
  const lines = [];
  for (let size = 0; size * GIB <= top; size += tick)
    lines.push(svg('path', { class: 'grid', d: `M${LEFT} ${y(size * GIB).toFixed(1)}H${WIDTH - RIGHT}` }),
      text(LEFT - 4, y(size * GIB) + 3, 'end', size.toFixed(Math.max(0, -Math.floor(Math.log10(tick) + 1e-9)))));
  return [...lines, text(LEFT - 4, TOP - 8, 'end', 'GiB')];
}

function spans(found) {
  const named = found.spans.flatMap(([name, start, end]) => [
    svg('path', { class: 'span', d: `M${(x(start) + 1).toFixed(1)} ${base + 4}H${(x(end) - 1).toFixed(1)}` }),
    x(end) - x(start) > 5 * name.length ? text((x(start) + x(end)) / 2, base + 15, 'middle', name) : '']);
  return [...named, text(LEFT, HEIGHT - 3, 'start', 'share of the step’s computing'),
    text(WIDTH - RIGHT, HEIGHT - 3, 'end', 'optimizer')];
}

/** Draw what form_answers.step sends. */
export function stepPicture(found) {
  const parts = edges(found), highest = 1.06 * Math.max(found.peak + found.reserve, found.limit || 0, 1),
    y = size => base - size / highest * (base - TOP);
  // the highest first: those below are drawn over it
  const areas = found.kinds.map((_, index) => area(found, found.kinds.length - index, parts, y));
  const [left, right] = parts[found.at], middle = (left + right) / 2, peak = y(found.peak);
  const tips = parts.map(([from, to], index) =>
    svg('rect', { class: 'tip', x: from, y: TOP, width: to - from, height: base - TOP },
      svg('title', {},
        `${found.words[index]}: ${studio.gib(found.kinds.reduce((sum, [, sizes]) => sum + sizes[index] * 1024, 0))}`)));
  return h('figure.step-picture', {}, svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, 'aria-hidden': 'true' },
    ...grid(highest, y), ...areas, ...spans(found),
    found.reserve ? svg('rect',
      { class: 'band', x: LEFT, y: y(found.peak + found.reserve), width: WIDTH - LEFT - RIGHT,
        height: peak - y(found.peak + found.reserve) }) : '',
    found.limit ? svg('path', { class: 'limit', d: `M${LEFT} ${y(found.limit).toFixed(1)}H${WIDTH - RIGHT}` }) : '',
    ...tips,
    svg('path', { class: 'to-peak', d: `M${middle.toFixed(1)} ${TOP - 4}V${peak.toFixed(1)}` }),
    svg('circle', { cx: middle, cy: peak, r: 2.5 }),
    text(middle, TOP - 7, middle < LEFT + 30 ? 'start' : middle > WIDTH - 40 ? 'end' : 'middle', studio.gib(found.peak),
      'name')),
  h('figcaption', {}, found.sentence));
}
