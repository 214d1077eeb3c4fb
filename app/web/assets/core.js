// What every screen of the page uses: elements, requests to the server, the address, formats, shortcuts.
// @ts-check
import { kept } from './formats.js';
export * from './elements.js';
export * from './formats.js';
export * from './requests.js';

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
 * Every shortcut, in the order in which they were registered.
 * @type {import('./types.d.ts').Shortcut[]}
 */
export const shortcuts = [];
/** Name of the screen that is shown. */
export let shown = '';
/** @param {string} name */
export const setShown = name => { shown = name; };

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
