// What every screen of the page uses: elements, requests to the server, the address, formats, shortcuts.
// @ts-check

/**
 * {name: screen}, by the first part of its address. The order is that of the rail.
 * @type {Record<string, import('./types.d.ts').Screen>}
 */
export const screens = {};
/**
 * {name: tab} of the screen of a run.
 * @type {Record<string, import('./types.d.ts').Tab>}
 */
export const runTabs = {};
/**
 * What the server says once, in the page itself.
 * @type {import('./types.d.ts').Facts}
 */
export const facts = JSON.parse(document.querySelector('#facts')?.textContent ?? '{}');
/**
 * Every shortcut, in the order in which they were registered.
 * @type {import('./types.d.ts').Shortcut[]}
 */
export const shortcuts = [];
/** Name of the screen that is shown. */
export let shown = '';
/** @param {string} name */
export const setShown = name => { shown = name; };

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
const identity = ({ tagName, id, type, value, dataset, textContent }) =>
  JSON.stringify([tagName, id, type, value, dataset, Object.keys(dataset).length ? '' : textContent]);
/**
 * @param {HTMLElement} element
 * @param {string} who
 * @returns {HTMLElement[]}
 */
const alike = (element, who) =>
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
 * Show a short sentence at the foot of the window.
 * @param {string} text
 * @param {boolean} [isBad]
 */
export function toast(text, isBad = false) {
  const element = h(isBad ? 'div.toast.bad' : 'div.toast', { role: isBad ? 'alert' : 'status' }, text);
  document.querySelector('#toasts').append(element);
  setTimeout(() => element.remove(), isBad ? 9000 : 4000);
}

// --- requests -------------------------------------------------------------------------------------------------------

/** What the server refused, as a sentence; `lost` when it did not answer at all. */
export class Refused extends Error {
  /**
   * @param {string} sentence
   * @param {boolean} [lost]
   */
  constructor(sentence, lost = false) { super(sentence); this.lost = lost; }
}

const MOST_SENT = 4e6; // bytes of a body that security.Guard lets in, less what is around it
const NO_ANSWER = 'The page’s server does not answer. Is ShardStudio still running in its terminal?';
/**
 * Call a function of the server.
 * @param {string} name
 * @param {Record<string, unknown>} [values] Its arguments.
 * @returns {Promise<import('./types.d.ts').Answer>}
 * @throws {Refused} At once while the server is known to hang: what is sent then would be done later, unasked.
 */
export async function call(name, values = {}) {
  if (JSON.stringify(values).length > MOST_SENT)
    throw new Refused('This is too long to be sent: shorten it to 4 million characters.');
  if (isHanging) throw new Refused(NO_ANSWER, true);
  const answer = await sent(name, values);
  if (!answer) {
    const reason = await closed();
    reached(false, reason || '');
    throw new Refused(reason || NO_ANSWER, true);
  }
  numAnswers++;
  isHanging = false;
  reached(true);
  if (answer.error !== undefined) throw new Refused(answer.error);
  return answer.value;
}

// A server that hangs closes no connection, and some answers take long: after a while the server is asked a question
// that it answers at once.
// No call is given up: when the server goes on, it answers what it was sent.
const SLOW_AFTER_MS = 4000, PROBED_FOR_MS = 8000, PROBED_AGAIN_MS = 2000;
const slow = new Set(); // calls that wait for so long
let isHanging = false, isProbing = false, numAnswers = 0;

/**
 * What the server answers to a call; undefined without an answer, and for a refusal by status.
 * @param {string} name
 * @param {Record<string, unknown>} values
 */
async function sent(name, values) {
  const own = {}, timer = setTimeout(() => { slow.add(own); probe(); }, SLOW_AFTER_MS);
  try {
    const headers = { 'content-type': 'application/json' };
    const answer = await fetch(`/calls/${name}`, { method: 'POST', headers, body: JSON.stringify(values) });
    return answer.ok ? await answer.json() : undefined;
  } catch { return undefined; } finally { clearTimeout(timer); slow.delete(own); }
}

/** Ask whether the server is there for as long as a call waits, and show what it says. */
async function probe() {
  if (isProbing) return;
  isProbing = true;
  while (slow.size) {
    const before = numAnswers, reason = await closed();
    if (slow.size && before === numAnswers) {
      isHanging = reason === null;
      reached(reason === '', reason || '');
    }
    await new Promise(resolve => setTimeout(resolve, PROBED_AGAIN_MS));
  }
  isProbing = isHanging = false;
}

/**
 * Ask for what a place shows. Undefined when it was refused, or when the place shows something else meanwhile
 * (`isStill()` is false).
 * @param {string} name
 * @param {Record<string, unknown>} values
 * @param {() => boolean} isStill
 * @param {(sentence: string) => void} complain Is given the sentence of a refusal, and "" when there was none.
 * @returns {Promise<import('./types.d.ts').Answer>}
 */
export async function fetched(name, values, isStill, complain) {
  let answer;
  try {
    answer = await call(name, values);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (isStill() && !error.lost) complain(error.message);
    return undefined;
  }
  if (!isStill()) return undefined;
  complain('');
  return answer;
}

/**
 * Show or hide the bar that says that the server does not answer.
 * @param {boolean} is Whether it answers.
 * @param {string} [closed] Why it does not answer this browser.
 */
export function reached(is, closed = '') {
  const bar = document.querySelector('#lost');
  bar.hidden = is;
  if (is) return;
  const how = closed.startsWith('Log in')
    ? ['You are logged out. ', h('a', { href: '/', target: '_blank' }, 'Log in again'), ' in another tab.'] : closed;
  fill(bar, closed,
    () => (closed ? ['This page was closed. ', how, ' What you typed is kept here, and this tab goes on then.']
      : 'The page’s server does not answer. What you typed is kept here; running jobs go on. Trying again …'));
}

/**
 * Why the server lets this browser in no longer: after another token or password. "" where it does, null where it does
 * not answer.
 */
async function closed() {
  try {
    const answer = await fetch('/open', { cache: 'no-store', signal: AbortSignal.timeout(PROBED_FOR_MS) });
    return answer.status === 401 ? await answer.text() : '';
  } catch { return null; }
}

/**
 * Do something on a click and say at a place near it what came of it; the button waits meanwhile.
 * @param {HTMLButtonElement} button
 * @param {HTMLElement} place
 * @param {() => Promise<string | null | undefined | void>} action
 */
export async function act(button, place, action) {
  const hadFocus = document.activeElement === button, who = identity(button),
    at = alike(document.body, who).indexOf(button);
  button.disabled = true;
  try {
    const sentence = await action();
    place.replaceChildren(...(sentence ? [note(sentence)] : []));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    place.replaceChildren(alert(error.message));
  } finally {
    button.disabled = false;
    // a disabled one loses it, and it may have been drawn anew
    if (hadFocus) refocus(button, alike(document.body, who)[at]);
  }
}

// --- address --------------------------------------------------------------------------------------------------------

/**
 * The parts of the address: ["runs", "NAME", "samples"].
 * @returns {import('./types.d.ts').Place}
 */
export const place = () => {
  const parts = location.hash.replace(/^#\/?/, '').split('/').filter(Boolean);
  try { return parts.length ? parts.map(decodeURIComponent) : ['new']; } catch { return ['new']; }
};
/** @param {...string} parts */
export const link = (...parts) => '#/' + parts.map(encodeURIComponent).join('/');
/** @param {...string} parts */
export const go = (...parts) => { location.hash = link(...parts); };

// --- formats --------------------------------------------------------------------------------------------------------

/** @param {number | string} number */
export const count = number => Number(number).toLocaleString('en-US');
/**
 * @param {number} number
 * @param {string} one
 * @param {string} [many]
 */
export const counted = (number, one, many = one + 's') => `${count(number)} ${number === 1 ? one : many}`;
/** @param {number} value */
export const short = value => {
  const rounded = Number(value.toPrecision(4));
  if (rounded && (Math.abs(rounded) < 1e-3 || Math.abs(rounded) >= 1e7)) return rounded.toExponential();
  return rounded.toLocaleString('en-US', { maximumFractionDigits: 6 });
};
/** @param {number} bytes */
export const gib = bytes => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB`;
/** @param {number} bytes */
export const size = bytes => {
  for (const [unit, one] of /** @type {[string, number][]} */ ([['GB', 1e9], ['MB', 1e6], ['kB', 1e3]])) {
    if (bytes >= one) return `${(bytes / one).toFixed(bytes < 10 * one ? 1 : 0)} ${unit}`;
  }
  return `${bytes} B`;
};
/** @param {number} seconds */
export const duration = seconds => {
  if (!Number.isFinite(seconds)) return '–';
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s < 600 && s % 60 ? ` ${s % 60} s` : ''}`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
};
/** @param {number | null | undefined} unix */
export const when = unix => {
  if (!unix) return '–';
  const date = new Date(unix * 1e3), today = new Date(), time = date.toTimeString().slice(0, 5);
  if (date.toDateString() === today.toDateString()) return time;
  const day = `${date.getFullYear()}-${String(date.getMonth() + 1).padStart(2, '0')}-${String(date.getDate())
    .padStart(2, '0')}`;
  return `${day} ${time}`;
};
/**
 * Copy a text. Resolves to whether it was: without https browsers refuse, except on the same machine.
 * @param {string} text
 */
export const copy = async text => await navigator.clipboard?.writeText(text).then(() => true, () => false) ?? false;
/**
 * What the browser remembers; nothing where it may not.
 * @param {string} name
 * @param {string} [value] What it is to remember.
 */
export const kept = (name, value) => {
  try {
    if (value === undefined) return localStorage.getItem(`studio-${name}`);
    localStorage.setItem(`studio-${name}`, value);
  } catch { /* private windows of some browsers refuse */ }
  return null;
};

// --- light and dark -------------------------------------------------------------------------------------------------

const night = matchMedia('(prefers-color-scheme: dark)');
/**
 * Choose a theme.
 * @param {string} theme "light", "dark" or "" for what the system says.
 */
export function setTheme(theme) {
  kept('theme', theme);
  applyTheme();
}
function applyTheme() {
  const theme = kept('theme') || '', isDark = theme ? theme === 'dark' : night.matches;
  document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
  document.documentElement.dataset.choice = theme || 'system';
  document.documentElement.classList.toggle('dark', isDark);
  document.body?.classList.toggle('dark', isDark); // gradio sets it from the system's choice
  dispatchEvent(new Event('studio-theme'));
}
night.addEventListener('change', applyTheme);
applyTheme();

// --- shortcuts ------------------------------------------------------------------------------------------------------

/**
 * Register a shortcut. See `Shortcut` in types.d.ts.
 * @param {string} keys
 * @param {string} text
 * @param {(event: KeyboardEvent) => unknown} action
 * @param {string} [screen]
 */
export const shortcut = (keys, text, action, screen = '') => shortcuts.push({ keys, text, action, screen });
let pressed = '';
addEventListener('keydown', event => {
  const isTyping = /** @type {Element} */ (event.target)
    .closest?.('input:not([type=checkbox], [type=radio], [type=range]), textarea, select, [contenteditable]');
  const name = `${event.ctrlKey || event.metaKey ? 'Ctrl ' : ''}${event.key === ' ' ? 'Space' : event.key}`;
  if ((isTyping && !name.startsWith('Ctrl ')) || document.querySelector('dialog[open]') || event.altKey) return;
  const sequence = pressed ? `${pressed} ${name}` : name, places = ['', shown, `${shown} ${place()[2]}`];
  const found = shortcuts.filter(key => places.includes(key.screen))
    .find(key => key.keys === sequence || key.keys === name);
  pressed = shortcuts.some(key => key.keys.startsWith(name + ' ')) && !found ? name : '';
  if (!found) return;
  if (found.action(event) !== false) event.preventDefault();
});
