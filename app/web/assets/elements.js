// Elements of the page, made of tags and texts: no text is read as HTML.
// @ts-check

/**
 * What the server says once, in the page itself.
 * @type {import('./types.d.ts').Facts}
 */
export const facts = JSON.parse(document.querySelector('#facts')?.value ?? '{}');

// --- elements -------------------------------------------------------------------------------------------------------

/**
 * Make an element. Text is never read as HTML.
 * @template {string} Kind
 * @param {Kind} kind "tag.class.class#id"
 * @param {Record<string, any>} [properties] Properties, attributes, listeners ("onclick"), `data` and `style`; null,
 *   undefined and false are left out.
 * @param {...import('./types.d.ts').Child} children
 * @returns {import('./types.d.ts').ElementOf<Kind>}
 */
export function h(kind, properties, ...children) {
  const [, tag, rest] = /** @type {string[]} */ (/^([a-z0-9]+)(.*)$/.exec(kind));
  /** @type {any} */
  const element = document.createElement(tag);
  for (const part of rest.match(/[.#][^.#]+/g) || []) {
    if (part[0] === '.') element.classList.add(part.slice(1));
    else element.id = part.slice(1);
  }
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'data') Object.assign(element.dataset, value);
    else if (name === 'style') for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name in element && !['list', 'form', 'role'].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(9).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * The element of a sample, as `samples_images` answers it: a text, a picture, or the name of what is only heard.
 * @param {import('./types.d.ts').Answer} answer
 * @param {string} alt
 */
export const sample = (answer, alt) => answer.text !== undefined ? h('pre.written', {}, answer.text)
  : answer.src ? h('img.image', { src: answer.src, alt, loading: 'lazy', decoding: 'async' })
  : h('div.missing.none', { title: alt }, answer.file);

/**
 * Reference images, small and named as such, next to what was made of them; null for none.
 * @param {string[]} [images] Their addresses; "" for one that cannot be shown.
 */
export const references = images => images?.length ? h('div.references', {}, images.map(src => h('figure', {},
  src ? h('img.image', { src, alt: 'reference', loading: 'lazy' }) : h('div.missing', {}, 'missing'),
  h('figcaption', {}, 'reference')))) : null;

/**
 * What the lightbox plays of a sample; undefined for one without a duration.
 * @param {string} run
 * @param {import('./types.d.ts').Answer} answer
 */
export const played = (run, answer) => answer.played && answer.file
  && { type: answer.played, src: ['', 'runs', run, 'samples', answer.file].map(encodeURIComponent).join('/') };

/**
 * Make an SVG element.
 * @param {string} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/**
 * Replace the children of an element, unless `key` says that they are there already. The keyboard's focus stays.
 * @param {HTMLElement} element
 * @param {unknown} key What the children depend on, as JSON.
 * @param {() => import('./types.d.ts').Child} make
 * @returns {boolean} Whether they were replaced.
 */
export function fill(element, key, make) {
  const text = JSON.stringify(key) ?? '';
  if (element.dataset.key === text) return false;
  element.dataset.key = text;
  const active = focused();
  const lost = element.contains(active) && active !== element ? active : null;
  const who = lost && identity(lost), at = lost && alike(element, who).indexOf(lost);
  element.replaceChildren(.../** @type {Node[]} */ ([make()].flat(9).filter(Boolean)));
  if (lost) alike(element, who)[at]?.focus({ preventScroll: true });
  return true;
}

/**
 * What an element is known by when it is drawn anew.
 * @param {any} element
 */
export const identity = ({ tagName, id, type, value, dataset, textContent }) =>
  JSON.stringify([tagName, id, type, value, dataset, Object.keys(dataset).length ? '' : textContent]);
/**
 * @param {HTMLElement} element
 * @param {string} who
 * @returns {HTMLElement[]}
 */
export const alike = (element, who) =>
  [...element.querySelectorAll('a, button, input, select, textarea, summary, [tabindex]')].filter(
    other => identity(other) === who);

/** The element with the keyboard's focus. */
export const focused = () => /** @type {any} */ (document.activeElement);

/**
 * Give the keyboard's focus to the first of these that is seen, where what had it is gone, hidden or disabled.
 * @param {...(HTMLElement | null | undefined)} places
 */
export function refocus(...places) {
  /** @param {any} element */
  const isSeen = element => element && element !== document.body && !element.disabled
    && element.getClientRects().length > 0;
  if (!isSeen(focused())) places.find(isSeen)?.focus();
}

/**
 * Change the text of an element only when it differs, so that a selection in it stays.
 * @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * A sentence about a failure, read aloud at once.
 * @param {string} text
 */
export const alert = text => h('div.notice.bad', { role: 'alert' }, h('p', {}, text));
/** @param {string} text */
export const note = text => h('div.notice', { role: 'status' }, h('p', {}, text));

/**
 * A word with its explanation behind it, from the glossary.
 * @param {string} word
 */
export const term = word => h('dfn', { tabIndex: 0, title: facts.glossary[word.toLowerCase()] || '' }, word);

/**
 * Ask a question in a dialog.
 * @param {string} title
 * @param {import('./types.d.ts').Child} text
 * @param {string[]} answers The first one is the main one.
 * @param {string} [kind] "stop" for what cannot be undone.
 * @returns {Promise<number>} The index of the answer, or -1 when it was dismissed.
 */
export function ask(title, text, answers, kind = '') {
  return new Promise(resolve => {
    const before = focused();
    /** @param {number} index */
    const done = index => { dialog.remove(); before?.focus(); resolve(index); };
    const buttons = answers.map((answer, index) =>
      h(index ? 'button.btn' : `button.btn.main${kind && '.' + kind}`, { type: 'button', onclick: () => done(index) },
        answer));
    const dialog = h('dialog.dialog', { 'aria-label': title, onclose: () => done(-1) },
      h('h2', {}, title), h('p', {}, text), h('div.row-end', {}, buttons.reverse()));
    document.body.append(dialog);
    dialog.showModal();
    (kind === 'stop' ? buttons[0] : buttons.at(-1))?.focus(); // Enter never deletes what was not read
  });
}

/**
 * Ask for a line of text in a dialog, which Enter takes.
 * @param {string} title
 * @param {Record<string, any>} box Properties of its input, as `h` has them.
 * @param {string} answer
 * @param {string} [note] A sentence below it.
 * @returns {Promise<string | null>} The text, or null when it was dismissed.
 */
export async function askText(title, box, answer, note) {
  const input = h('input', { type: 'text', onkeydown: event => {
    /** @type {HTMLElement | null | undefined} */
    const main = input.closest('dialog')?.querySelector('.btn.main');
    if (event.key === 'Enter' && !event.isComposing) main?.click();
  }, ...box });
  const asked = ask(title, [input, note && h('span.sm.dim', {}, note)], [answer, 'Cancel']);
  input.select();
  return await asked ? null : input.value;
}

/**
 * Show a short sentence at the foot of the window.
 * @param {string} text
 * @param {boolean} [isBad]
 * @param {() => unknown} [undo] What takes back what was done.
 */
export function toast(text, isBad = false, undo = undefined) {
  const element = h(isBad ? 'div.toast.bad' : 'div.toast', { role: isBad ? 'alert' : 'status' }, text,
    undo && h('button.btn.s', { type: 'button', onclick: () => { element.remove(); undo(); } }, 'Undo'));
  document.querySelector('#toasts').append(element);
  setTimeout(() => element.remove(), undo ? 12000 : isBad ? 9000 : 4000);
}
