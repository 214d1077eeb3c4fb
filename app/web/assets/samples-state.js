// What the parts of the tab Samples share.
// @ts-check
import * as studio from './core.js';

export const SETTLED_MS = 250;
export const parts = {}, cards = new Map(), answers = new Map();

export const last = () => current.steps.length - 1;
export const stepWord = step => step ? `step ${studio.count(step)}` : 'before training';
export const keyOf = (row, step, isFull) => JSON.stringify([row.index, row.prompt, step, Boolean(isFull)]);

/** What the tab shows: the run, its samples and the steps that are chosen. */
export const current = {
  name: '',
  data: /** @type {any} */ (null),
  steps: /** @type {any[]} */ ([]),
  missing: new Set(),
  chosen: 0,
  left: 0,
  inPair: false,
  pairRow: 0,
  timer: 0,
  movedAt: 0,
  isLoading: false,
};
