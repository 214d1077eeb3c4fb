// What the parts of the screen New run share.
// @ts-check
import * as studio from './core.js';

export const TYPING_PAUSE_MS = 250, PATH_PAUSE_MS = 500;
/** {field: its row, input, help and facts} */
export const inputs = /** @type {Record<string, any>} */ ({});
export const field = name => studio.facts.form.fields[name];
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
export const $ = id => current.root.querySelector(`#${id}`);

/** The server's answer, what was typed, and what is under way. */
export const current = {
  root: /** @type {HTMLElement} */ (/** @type {unknown} */ (null)),
  state: /** @type {any} */ (null),
  models: /** @type {any[]} */ ([]),
  target: '',
  wantsAll: false,
  chosenGpus: /** @type {any} */ (null),
  pending: /** @type {Record<string, any>} */ ({}),
  sent: /** @type {Record<string, any>} */ ({}),
  answered: /** @type {Record<string, any>} */ ({}),
  isSending: false,
  isLost: false,
  numAnswers: 0,
  timer: 0,
  typingPath: '',
  shownThumbnails: '',
  lastNeed: /** @type {number | undefined} */ (undefined),
  recordTimer: 0,
  wantsStep: false,
  step: /** @type {any} */ (null),
  numStepsAsked: 0,
  wrongLines: /** @type {any[]} */ ([]),
  replaced: '',
  lookedFor: '',
  fitter: /** @type {any} */ (null),
};
