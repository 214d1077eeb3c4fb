// Images of samples: a few at a time, those next to the chosen step first.
// @ts-check
import * as studio from './core.js';
import { drawPair } from './samples-pair.js';
import { answers, current, keyOf, cards, SETTLED_MS, parts } from './samples-state.js';
import { drawRows, rowKey, columns } from './samples.js';

const PER_REQUEST = 4, MOST_KEPT = 2000;

// --- images: a few at a time, those next to the chosen step first ----------------------------------------------------

export async function load() {
  if (current.isLoading || !current.data) return;
  current.isLoading = true;
  try {
    for (let batch = wanted(); batch.length; batch = wanted()) {
      const asked = current.name, version = current.data.version,
        cells = batch.map(({ row, step }) => ({ index: row.index, prompt: row.prompt, step }));
      const found = await studio.call('samples_images', { name: asked, cells, is_full: batch[0].isFull });
      if (asked !== current.name || version !== current.data?.version) continue;
      if (answers.size > MOST_KEPT) answers.clear();
      batch.forEach(({ row, step, isFull }, at) => answers.set(keyOf(row, step, isFull), found[at]));
      current.inPair ? drawPair() : drawRows();
    }
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error; // the next tick asks again
  } finally {
    current.isLoading = false;
  }
}

/** The next few samples to ask for. */
function wanted() {
  if (!current.data || !isShown()) return [];
  const all = (current.inPair ? wantedByPair() : wantedByRows()).filter(({ row, step, isFull }) =>
    row.has.has(step) && !row.gone.has(step) && !(isFull && row.kind === 'text')
      && !answers.has(keyOf(row, step, isFull)));
  return all.filter(cell => cell.isFull === all[0].isFull).slice(0, PER_REQUEST);
}

function wantedByRows() {
  const rows = current.data.rows.filter(row => cards.get(rowKey(row))?.isVisible);
  const cells = rows.flatMap(row => columns(row)
    .map(at => ({ row, step: current.steps[at], isFull: false, distance: Math.abs(at - current.chosen) })));
  return cells.sort((a, b) => a.distance - b.distance);
}

function wantedByPair() {
  const row = current.data.rows[current.pairRow],
    sides = isFull => [current.steps[current.chosen], current.steps[current.left]].map(step => ({ row, step, isFull }));
  const isSettled = performance.now() - current.movedAt > SETTLED_MS;
  return [...sides(false), ...(isSettled ? sides(true) : []),
    ...current.data.rows.map(other => ({ row: other, step: current.steps[current.chosen], isFull: false }))];
}

export const isShown = () => parts.root.offsetParent !== null;
export const answerOf = (row, step) => answers.get(keyOf(row, step, true)) || answers.get(keyOf(row, step, false));
