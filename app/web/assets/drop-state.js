// What the parts of the screen Drop and name share, and how they ask the server.
// @ts-check
import * as studio from './core.js';
import { call, h, fill } from './core.js';

const AGAIN_MS = 2000;

/** What the server answered, and what is under way. */
export const current = {
  root: /** @type {HTMLElement} */ (/** @type {unknown} */ (null)),
  state: /** @type {any} */ (null),
  /** What is proposed for the pictures of the address; the last of it where the server has others now. */
  lines: /** @type {any} */ (null),
  models: /** @type {any[]} */ ([]),
  /** The folder that the address names; "" before there is one. */
  folder: '',
  /** Number of files that wait for the word, and what goes on when it is given. */
  numFiles: 0,
  found: /** @type {((folder: string) => void) | null} */ (null),
  place: /** @type {Promise<string> | null} */ (null),
  /** Whether the word was given before the files. */
  isNamed: false,
  /** Whether the lines of the word that was given are still to be shown: then the keyboard goes on in them. */
  isArriving: false,
  /** Who writes the captions, where that was chosen. */
  writer: /** @type {string | null} */ (null),
  /** Id of a start that was asked for and not seen to happen. */
  starting: '',
  /** {field: text} that was typed and not taken by the server yet. */
  typed: /** @type {Record<string, string>} */ ({}),
};

/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
export const $ = id => current.root.querySelector(`#drop-${id}`);

/**
 * Say what was refused, or nothing.
 * @param {string} text
 */
export const say = text => fill($('said'), text, () => text ? studio.alert(text) : []);

/** An id for a thing to be done once, however often it is asked for. */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(16))]
  .map(byte => byte.toString(16).padStart(2, '0')).join('');

/**
 * Ask the server until it answers: what was dropped and typed waits here.
 * @param {string} name
 * @param {Record<string, unknown>} values
 * @returns {Promise<import('./types.d.ts').Answer>}
 * @throws {studio.Refused} For what it refuses.
 */
export async function again(name, values) {
  for (;;) {
    try { return await call(name, values); } catch (error) {
      if (!(error instanceof studio.Refused && error.lost)) throw error;
    }
    fill($('said'), 'lost', () => h('div.notice', { role: 'status' },
      h('p', {}, 'The page’s server does not answer. What was dropped and typed is kept here; trying again …')));
    await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
    say('');
  }
}
