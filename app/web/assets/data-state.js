// What the parts of the screen Data share.
// @ts-check

export const cards = new Map(), addresses = new Map(), timers = new Map(), saving = new Map();
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
export const $ = id => current.root.querySelector(`#${id}`);

/** What the screen shows: the answer, the filter and what is asked. */
export const current = {
  root: /** @type {HTMLElement} */ (/** @type {unknown} */ (null)),
  data: /** @type {any} */ (null),
  asked: 0,
  isOther: false,
  isOwed: false,
  page: 0,
  after: '', // the image whose next one is asked for
  isTurning: false, // whether the keyboard is on its way to another page
  filter: { show: 'all', search: '', mark: '', tag: '', find: '' },
};

/** The filter that shows all images. */
export const EVERYTHING = { show: 'all', search: '', mark: '', tag: '' };
