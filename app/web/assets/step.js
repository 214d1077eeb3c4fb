// The memory over one training step: a picture that Python drew, with a sentence below it.
// @ts-check
import { h } from './core.js';

/**
 * Show what form_answers.step sends.
 * @param {{ picture: string, sentence: string }} found
 */
export function stepPicture({ picture, sentence }) {
  const drawn = new DOMParser().parseFromString(picture, 'image/svg+xml').documentElement;
  return h('figure.step-picture', {}, document.importNode(drawn, true), h('figcaption', {}, sentence));
}
