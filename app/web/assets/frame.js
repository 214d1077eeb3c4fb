// The frame: the rail with the pages, the live job at its foot, and the screen that the address names.
// @ts-check
import * as studio from './core.js';
import { h, svg } from './core.js';

/** [name, screen] of the screens that the rail leads to, in the order in which they were registered. */
const pages = () => /** @type {[string, any][]} */ (Object.entries(studio.screens)).filter(([, screen]) => screen.rail);
const LIVE_EVERY_S = 2, THEMES = [['', 'System'], ['light', 'Light'], ['dark', 'Dark']];
/** {screen without a link in the rail: the one that is marked for it} */
const LISTED_AS = { run: 'runs', compare: 'runs', drop: 'new' };
const KEYS = { ArrowLeft: '←', ArrowRight: '→' };
const ENDED = { finished: 'has finished', failed: 'has failed', stopped: 'was stopped' };
let live = /** @type {any} */ (null);
const known = /** @type {Record<string, string>} */ ({}), built = /** @type {Record<string, HTMLElement>} */ ({});

const icon = (path, size = 20) =>
  svg('svg', { viewBox: '0 0 20 20', width: size, height: size, 'aria-hidden': 'true', class: 'icon' },
    svg('path', { d: path }));

function brand() {
  const mark = svg('svg', { viewBox: '0 0 24 24', width: 24, height: 24, 'aria-hidden': 'true', class: 'mark' },
    ...[['M12 2 20.5 7 12 12z', 1], ['M12 2 3.5 7l8.5 5z', 0.55], ['M3.5 9v8l7.5 5v-8.5z', 0.75],
      ['M20.5 9v8L13 22v-8.5z', 0.9]].map(
      ([d, opacity]) => svg('path', { d, opacity })));
  return h('a.brand', { href: studio.link('new'), 'aria-label': 'ShardStudio, new run' }, mark,
    h('span', {}, 'ShardStudio'));
}

function rail() {
  const link = ([name, { title, rail }]) => h(`a.nav#nav-${name}`, { href: studio.link(name), title },
    icon(rail.icon), h('span', {}, title), h('b', { hidden: true }));
  const themes = h('div.seg.themes', { role: 'group', 'aria-label': 'Light or dark' }, THEMES.map(([name, title]) =>
    h('button', { type: 'button', data: { theme: name || 'system' }, onclick: () => studio.setTheme(name) }, title)));
  const swap = h('button.btn.ghost.swap',
    { type: 'button', 'aria-label': 'Switch between light and dark', title: 'Light or dark',
      onclick: () => studio.setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark') }, '◐');
  const help = h('button.btn.ghost.s.help-key', { type: 'button', title: 'Keyboard shortcuts', onclick: showShortcuts },
    'Shortcuts ', h('kbd', {}, '?'));
  return h('nav.rail#rail', { 'aria-label': 'Pages' }, brand(), pages().map(link), h('div.grow'),
    h('a.job#job', { hidden: true }), help, themes, swap);
}

function showShortcuts() {
  const rows = studio.shortcuts.map(
    key => h('tr', {}, h('td', {}, key.keys.split(' ').map(k => h('kbd', {}, KEYS[k] || k))),
      h('td', {}, key.text, key.screen ? h('span.dim', {}, ` (${key.screen})`) : null)));
  const dialog = h('dialog.dialog', { 'aria-label': 'Keyboard shortcuts', onclose: () => dialog.remove() },
    h('h2', {}, 'Keyboard shortcuts'),
    h('table', {}, h('tbody', {}, rows)), h('form.row-end', { method: 'dialog' }, h('button.btn', {}, 'Close')));
  document.body.append(dialog);
  dialog.showModal();
}

/**
 * Which screen an address belongs to: one run has another screen than all runs. Undefined for an address that leads
 * nowhere.
 */
function screenOf(place) {
  const [first, second] = place;
  if (first === 'runs' && second) return 'run';
  return first !== 'run' && Object.hasOwn(studio.screens, first) ? first : undefined;
}

const scrolled = new Map(); // {address: how far its screen was scrolled when it was left}
let last = ''; // the screen that was shown
let here = ''; // the address that is shown; the browser scrolls for the next one before it is

/** Show another screen from its top, and one that was left as it was. */
function scroll(name, place) {
  const [, run] = name === 'run' ? place : [], now = JSON.stringify([name, run]);
  if (last && last !== now) scrollTo(0, scrolled.get(location.hash) || 0);
  last = now;
  here = location.hash;
}

/** Show what the address names; without one, New run, or Drop and name as long as there are no runs. */
async function home() {
  const isHome = !location.hash && await studio.call('drop_is_home').catch(() => false);
  if (isHome) history.replaceState(null, '', studio.link('drop'));
  await route();
}

async function route() {
  const place = studio.place(), name = screenOf(place);
  if (!name) {
    studio.toast(`No page has the address ${location.hash.slice(0, 80)}.`, true);
    history.replaceState(null, '', studio.link('new'));
    return route();
  }
  const screen = studio.screens[name];
  for (const dialog of document.querySelectorAll('dialog[open]')) dialog.close(); // it is about what was shown before
  studio.setShown(name);
  document.documentElement.dataset.screen = name;
  for (const [page] of pages()) {
    const link = document.querySelector(`#nav-${page}`),
      isOn = page === (LISTED_AS[name] || name);
    link.classList.toggle('on', isOn);
    if (isOn) link.setAttribute('aria-current', 'page'); else link.removeAttribute('aria-current');
  }
  if (!built[name]) {
    built[name] = h(`section.page#page-${name}`, { 'aria-label': screen.title });
    document.querySelector('#pages').append(built[name]);
    screen.build(built[name]);
  }
  for (const [other, section] of Object.entries(built)) section.hidden = other !== name;
  document.title = `${name === 'run' ? place[1] : screen.title} · ShardStudio`;
  scroll(name, place);
  await screen.show(place);
}

/** Ask the server what runs and waits; tell of runs that ended since the last time. */
async function beat() {
  try {
    live = await studio.call('live');
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    return;
  }
  drawJob();
  const badge = document.querySelector('#nav-queue b');
  badge.hidden = !live.num_waiting;
  studio.say(badge, String(live.num_waiting));
  badge.setAttribute('aria-label', `${live.num_waiting} waiting`);
  for (const run of live.runs) known[run.name] = run.title;
  for (const { name, state, sentence, image } of live.ended) {
    if (known[name]) notify(name, known[name], state, sentence, image);
    delete known[name];
  }
}

function drawJob() {
  const place = document.querySelector('#job'), all = [...live.runs, ...live.at_work], [run] = all;
  place.hidden = !run;
  if (!run) return;
  const share = run.num_steps ? 100 * run.step / run.num_steps : 0, more = all.length - 1;
  const left = run.eta_s === null ? run.state : `${studio.duration(run.eta_s)} left`;
  place.href = studio.link('runs', run.name);
  place.dataset.run = run.name;
  const whole = run.num_steps ? studio.count(run.num_steps) : run.length,
    steps = run.length ? `${studio.count(run.step)} / ${whole}` : '';
  place.setAttribute('aria-label', run.length
    ? `${run.state}: ${run.title}, step ${run.step} of ${run.num_steps || run.length}, ${left}`
    : `${left}: ${run.title}`);
  place.style.setProperty('--share', `${share}%`);
  studio.fill(place, [run, more], () => [
    h('span.job-name', {}, h('i.dot'), h('b', {}, run.title), more ? h('span.tag', {}, `+${more}`) : null),
    h('span.bar', {}, h('i', { style: { width: `${share}%` } })),
    h('span.job-facts', {}, h('span', {}, steps), h('span', {}, left)),
    h('span.job-share', {}, run.step === null ? '' : `${Math.round(share)} %`)]);
}

/** Whether this browser shows notifications of this page: granted, default (it was not asked), denied or none. */
export const notices = () => (window.isSecureContext && window.Notification?.permission) || 'none';
const mayNotify = () => notices() === 'granted';

function notify(name, title, state, sentence, image) {
  const headline = `${title} ${ENDED[state] || 'has ended'}`;
  studio.toast(`${headline}.`, state === 'failed');
  if (!mayNotify()) return;
  try {
    // by their tag, the notices of several windows are one
    const shown = new Notification(headline, { body: sentence, tag: name, icon: image });
    shown.onclick = () => { window.focus(); studio.go('runs', name); shown.close(); };
  } catch { /* Android shows none of a page without a service worker */ }
}

/** Ask the browser whether it may tell of the end of a run, and say what came of it. Called by a click. */
export async function askToNotify() {
  if (notices() === 'default') await Notification.requestPermission();
  if (mayNotify()) return 'This browser tells you when a run ends, also while you look at another tab of it.';
  throw new studio.Refused(notices() === 'none'
    ? 'This browser shows notifications of pages on localhost and by https only. Machine has ways that need no browser.'
    : 'This browser does not allow notifications of this page: allow them beside its address, and try again.');
}

/** Run an action every few seconds, never twice at once. `isWanted` says whether an unseen window runs it too. */
export function every(seconds, action, isWanted = () => false) {
  let isBusy = false;
  const go = async () => {
    if (isBusy || (document.hidden && !isWanted())) return;
    isBusy = true;
    try { await action(); } finally { isBusy = false; }
  };
  setInterval(go, seconds * 1e3);
  document.addEventListener('visibilitychange', go);
  return go;
}

/** Draw the frame into the element that gradio has made for it, and the screen of the address. */
function mount(element) {
  const content = h('div#pages', { tabIndex: -1 }); // gradio has everything in a main, of which a page has one
  element.replaceChildren(h('div#studio', {},
    h('a.skip', { href: '#pages', onclick: event => {
      event.preventDefault(); // an address of that form names a screen
      content.focus();
    } }, 'Skip to the content'),
    h('div#lost', { role: 'alert', hidden: true }),
    rail(), content, h('div#toasts')));
  if (studio.facts.unwritable) document.querySelector('#pages')
    .prepend(h('div#unwritable', {}, studio.alert(studio.facts.unwritable)));
  for (const [name, { title, rail: { key } }] of pages()) studio.shortcut(`g ${key}`, title, () => studio.go(name));
  studio.shortcut('?', 'Show the shortcuts', showShortcuts);
  addEventListener('hashchange', route);
  addEventListener('scroll', () => scrolled.set(here, scrollY), { passive: true });
  home();
  every(LIVE_EVERY_S, beat, mayNotify)(); // a notice is for whoever looks elsewhere
  every(LIVE_EVERY_S, async () => { await studio.screens[studio.shown].tick?.(studio.place()); });
  new MutationObserver(() =>
    document.body.classList.contains('dark') === (document.documentElement.dataset.theme === 'dark')
    || studio.setTheme(studio.kept('theme') || ''))
    .observe(document.body, { attributes: true, attributeFilter: ['class'] });
}

/** Wait for gradio's element. When the document is parsed, all scripts in it have registered their screens. */
addEventListener('DOMContentLoaded', () => {
  const seen = new MutationObserver(mountOnce);
  function mountOnce() {
    const element = document.querySelector('#place');
    if (!element) return;
    seen.disconnect();
    mount(element);
  }
  seen.observe(document.body, { childList: true, subtree: true });
  mountOnce();
});
