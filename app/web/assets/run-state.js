// What the parts of the screen of one run share.
// @ts-check

export const TABS = [['', 'Overview'], ['samples', 'Samples'], ['files', 'Files']];
export const parts = {};

/** What the screen shows: the run, its parts as they came, and what is under way. */
export const current = {
  name: '',
  tab: '',
  data: /** @type {Record<string, any>} */ ({}),
  known: /** @type {Record<string, any>} */ ({}),
  isGone: false,
  log: /** @type {any} */ (null),
  strip: /** @type {any} */ (null),
  saving: /** @type {any} */ (null),
  turn: Promise.resolve(),
};
