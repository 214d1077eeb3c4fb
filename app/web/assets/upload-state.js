// What the parts of the upload share.
// @ts-check
import * as studio from './core.js';
import { isOver } from './upload.js';

export const waiting = [], results = [];
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
export const $ = id => here.root.querySelector(`#${id}`);

// --- what the browser remembers of an upload that a reload interrupted ---------------------------------------------

export function left() {
  try { return JSON.parse(studio.kept('upload') || 'null'); } catch { return null; }
}
export const remember = () => studio.kept('upload',
  here.batch
    ? JSON.stringify({ folder: here.batch.folder, total: here.batch.items.length,
      done: here.batch.items.filter(isOver).length })
    : '');

/** The batch that is sent, and what the screen is. */
export const here = {
  root: /** @type {HTMLElement} */ (/** @type {unknown} */ (null)),
  /** What the screen Data gives, if it was shown; and how another screen finds the folder for so many files. */
  hooks: /** @type {any} */ (null),
  whereTo: /** @type {((number: number) => Promise<string>) | null} */ (null),
  state: /** @type {any} */ (null),
  batch: /** @type {any} */ (null),
  isRunning: false,
  reported: '', // the folder that the report is about
  suggested: 'images', // the name of a new folder, until one is typed
  asked: 0,
  drawn: 0,
  focusOn: /** @type {any} */ (null),
};
