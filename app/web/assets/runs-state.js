// What the parts of the screen Runs share: the rows as they came, and what is chosen.
// @ts-check

export const MOST_COMPARED = 5, CHUNK = 60;
export const COLUMNS = [['name', 'Run', 1], ['state', 'State', 1], ['loss', 'Loss', 1], ['best', 'Best validation', 1],
  ['duration', 'Duration', -1],
  ['size', 'Size', -1], ['started', 'Started', -1]];
export const rows = new Map(), chosen = new Set();
export const lines = new Map();

/** What the screen shows: the answer, filter, order and what is under way. */
export const current = {
  token: '',
  answer: /** @type {any} */ (null),
  group: 'all',
  words: '',
  sort: /** @type {[string, number]} */ (['started', -1]),
  shown: CHUNK,
  editing: '',
  loading: /** @type {any} */ (null),
  isFetching: false,
  numTicks: 0,
};
