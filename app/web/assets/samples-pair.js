// Two steps of one prompt side by side.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { answerOf, load } from './samples-images.js';
import { parts, answers, current, last, stepWord, keyOf, SETTLED_MS } from './samples-state.js';
import { draw, setRange, rowKey, setSave, fillSample } from './samples.js';

export function drawPair() {
  const row = current.data.rows[current.pairRow],
    [from, to] = [current.steps[current.left], current.steps[current.chosen]];
  parts.slide.classList.toggle('texts', row.kind === 'text');
  side(parts.leftSide, row, from);
  side(parts.rightSide, row, to);
  studio.say(parts.leftWord, stepWord(from));
  studio.say(parts.rightWord, stepWord(to));
  parts.share.setAttribute('aria-valuetext', `${parts.share.value} % ${stepWord(from)}, the rest ${stepWord(to)}`);
  studio.say(parts.facts,
    `${row.prompt} · ${stepWord(from)} and ${stepWord(to)} · seed ${current.data.seed}, prompt ${row.index + 1}`);
  studio.fill(parts.references, row.references, () => [studio.references(row.references)]);
  setRange(parts.leftRange, current.left, last(), stepWord(from));
  studio.say(parts.leftLabel, `Left side: ${stepWord(from)}`);
  studio.fill(parts.prompts, current.data.rows.map(rowKey), () => current.data.rows.map((other, at) => h('button', {
    type: 'button', onclick: () => {
      current.pairRow = at;
      fitPair();
      draw();
    } }, h('span.small'), h('span.words', { title: other.prompt }, other.prompt || '(no prompt)'))));
  [...parts.prompts.children].forEach((button, at) => {
    button.setAttribute('aria-pressed', String(at === current.pairRow));
    const answer = answers.get(keyOf(current.data.rows[at], to));
    if (answer?.src) studio.fill(button.firstChild, answer.src, () => h('img.image', { src: answer.src, alt: '' }));
  });
  setSave(parts.save, row);
}

/**
 * Show one side of the pair. The image element stays, so that the former image is shown until the next one is there.
 */
function side(place, row, step) {
  const answer = answerOf(row, step), img = place.querySelector('img');
  if (row.kind === 'text' || !answer?.src || !row.has.has(step) || row.gone.has(step)) {
    if (answer || !row.has.has(step) || row.gone.has(step)) fillSample(place, row, step, answer);
  } else if (!img) studio.fill(place, ['image', rowKey(row)], () => imageOf(row, step, answer));
  else if (img.getAttribute('src') !== answer.src) Object.assign(img,
    { src: answer.src, alt: `${row.prompt}, ${stepWord(step)}` });
}

const imageOf = (row, step, answer) =>
  h('img', { src: answer.src, alt: `${row.prompt}, ${stepWord(step)}`, draggable: false });

/** A prompt that was not drawn at the two steps is shown at its own first and last one. */
function fitPair() {
  const row = current.data.rows[current.pairRow];
  if (!row.has.has(current.steps[current.left])) current.left = current.steps.indexOf(row.steps[0]);
  if (!row.has.has(current.steps[current.chosen])) current.chosen = current.steps.indexOf(row.steps.at(-1));
}

export function setView(isPair) {
  current.inPair = isPair;
  current.movedAt = performance.now();
  if (!current.steps.length) return;
  if (current.inPair) fitPair();
  draw();
  setTimeout(load, SETTLED_MS + 10);
}
