// The screen Queue: runs that wait for their GPUs, and those that the queue has started.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, link } from './core.js';

const STATES = { finished: 'ok', failed: 'bad', stopped: 'warn', training: 'acc', starting: 'acc', created: '',
  deleted: '' };
/** @type {HTMLElement} */
let root;
let state = /** @type {any} */ (null), numActs = 0, isLost = false;
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
const $ = id => root.querySelector(`#${id}`);

function show(found) {
  state = found;
  draw();
}

/** Change the queue and show what came of it. */
async function act(name, values = {}) {
  numActs += 1;
  try {
    show(await call(name, values));
    $('queue-message').replaceChildren();
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    isLost = error.lost;
    if (error.lost && name === 'queue_state') return; // the bar at the top says it
    $('queue-message').replaceChildren(studio.alert(error.message));
  }
}

async function move(key, by) {
  await act('queue_move', { key, by });
  root.querySelector(`tr[data-key="${key}"]`)?.focus();
}

async function remove(row) {
  const text = `${row.name} will not be trained, and the settings that it waits with are lost.`;
  if (await studio.ask('Remove it from the queue?', text, ['Remove', 'Keep'], 'stop') === 0) {
    const [, at] = chosen();
    await act('queue_remove', { key: row.key });
    if (at >= 0) root.querySelectorAll('#waiting tr[data-key]')[Math.min(at, state.waiting.length - 1)]?.focus();
    studio.refocus($('queue-waiting').querySelector('a'), $('pause'));
  }
}

/** The waiting run whose row has the keyboard, and its place. */
function chosen() {
  const key = studio.focused()?.closest('#waiting tr[data-key]')?.dataset.key;
  const at = state ? state.waiting.findIndex(row => row.key === key) : -1;
  return [state?.waiting[at], at];
}

function moveChosen(by) {
  const [row, at] = chosen();
  if (row && at + by >= 0 && at + by < state.waiting.length) move(row.key, by);
}

const gpus = row => row.gpus.length ? row.gpus.join(', ') : state.num_gpus ? 'all' : 'CPU';
const waited = (from, to) =>
  h('td', { data: { from: from || '', head: 'Wait' } }, from ? studio.duration((to || Date.now() / 1e3) - from) : '–');
const cell = (head, ...children) => h('td', { data: { head } }, ...children);

function waitingRow(row, at, all) {
  const mover = (sign, by, word, isOff) =>
    h('button.btn.s', { type: 'button', disabled: isOff, 'aria-label': `${row.name}: ${word}`, title: word,
      onclick: () => move(row.key, by) }, sign);
  return h('tr', { tabIndex: 0, data: { key: row.key, name: row.name } }, h('td.place', {}, String(at + 1)),
    h('th', { scope: 'row' }, row.name, row.problem ? h('p.notice.bad', {}, row.problem) : null),
    cell('Model', row.model), cell('Method', row.method), cell('GPUs', gpus(row)),
    cell('State', h('span.tag', {}, state.is_paused ? 'paused' : at ? 'waiting' : 'next')),
    cell('Queued', studio.when(row.queued_at)), waited(row.queued_at),
    h('td.acts', {}, mover('↑', -1, 'Move up', at === 0), mover('↓', 1, 'Move down', at === all.length - 1),
      h('button.btn.s.stop', { type: 'button', 'aria-label': `${row.name}: Remove`, onclick: () => remove(row) },
        'Remove')));
}

function takenRow(row) {
  const name = row.run && row.state !== 'deleted' ? h('a', { href: link('runs', row.run) }, row.name) : row.name;
  return h('tr', { data: { name: row.name } }, h('th', { scope: 'row' }, name), cell('Model', row.model),
    cell('Method', row.method), cell('GPUs', gpus(row)),
    cell('State', row.error || !(row.state in STATES) ? h('p.notice.bad', {}, row.error || row.state)
      : h(STATES[row.state] ? `span.tag.${STATES[row.state]}` : 'span.tag', {}, row.state)),
    cell('Started', studio.when(row.taken_at)),
    row.queued_at ? waited(row.queued_at, row.taken_at) : cell('Waited', '–'));
}

/** Heads that only a screen reader says: what stands below needs no word. */
const HIDDEN = ['Place', 'Actions'];

const table = (id, heads, rows) =>
  h('div.scroll', {}, h(`table.wide#${id}`, {},
    h('thead', {}, h('tr', {}, heads.map(head =>
      h('th', { scope: 'col' }, HIDDEN.includes(head) ? h('span.sr', {}, head) : head)))), h('tbody', {}, rows)));

function settings() {
  const choose = (kind, word) =>
    h('button', { type: 'button', 'aria-pressed': String(state.after_failure === kind), data: { after: kind },
      onclick: () => act('queue_change', { after_failure: kind }) }, word);
  return [
    h('span.after', {}, 'After a failure',
      h('span.seg#after', { role: 'group', 'aria-label': 'After a failure' }, choose('go on', 'start the next run'),
        choose('pause', 'pause the queue'))),
    h(state.is_paused ? 'button.btn.main#pause' : 'button.btn#pause',
      { type: 'button', onclick: () => act('queue_change', { is_paused: !state.is_paused }) },
      state.is_paused ? 'Resume the queue' : 'Pause the queue')];
}

function draw() {
  const focused = chosen()[0]?.key;
  fill($('queue-problems'), state.problems, () => state.problems.map(studio.alert));
  fill($('queue-settings'), [state.is_paused, state.after_failure], settings);
  $('queue-paused').hidden = !state.is_paused || !!state.waiting.length;
  fill($('queue-waiting'), [state.waiting, state.num_gpus, state.is_paused], () => state.waiting.length
    ? table('waiting', ['Place', 'Run', 'Model', 'Method', 'GPUs', 'State', 'Queued', 'Wait', 'Actions'],
      state.waiting.map(waitingRow))
    : h('div.empty', {}, h('h2', {}, 'Nothing is waiting.'),
      h('p', {}, 'Fill in ', h('a', { href: link('new') }, 'New run'),
        ' and press “Add to queue”. Runs start one after the other, as their GPUs become free.')));
  if (focused && !chosen()[0]) root.querySelector(`tr[data-key="${focused}"]`)?.focus();
  for (const cell of root.querySelectorAll('#waiting [data-from]'))
    if (cell.dataset.from) say(cell, studio.duration(Date.now() / 1e3 - cell.dataset.from));
  say($('queue-next'), state.next);
  $('queue-taken-card').hidden = !state.taken.length;
  fill($('queue-taken'), [state.taken, state.num_gpus],
    () => table('started', ['Run', 'Model', 'Method', 'GPUs', 'State', 'Started', 'Waited'],
      state.taken.map(takenRow)));
  say($('queue-earlier'), state.num_earlier
    ? `${studio.counted(state.num_earlier, 'earlier run')} not shown: they are in Runs.` : '');
}

studio.screens.queue = {
  rail: { key: 'q', icon: 'M4 4h12v4H4zM4 12h12M4 16h8' },
  title: 'Queue',
  build(section) {
    root = section;
    root.append(h('div.head', {}, h('h1', {}, 'Queue'), h('span.grow'), h('div.settings#queue-settings')),
      h('div#queue-message'), h('div#queue-problems'),
      h('p.notice.warn#queue-paused', { hidden: true, role: 'status' },
        'Paused: no run is started until you resume the queue.'),
      h('section.card', { 'aria-label': 'Waiting runs' }, h('div#queue-waiting'),
        h('p.dim.sm#queue-next', { role: 'status' })),
      h('section.card#queue-taken-card', { hidden: true, 'aria-labelledby': 'h-taken' },
        h('div.ttl', {}, h('h2#h-taken', {}, 'Started by the queue')), h('div#queue-taken'),
        h('p.dim.sm#queue-earlier')));
    studio.shortcut('Ctrl ArrowUp', 'Move the run of the chosen row up', () => moveChosen(-1), 'queue');
    studio.shortcut('Ctrl ArrowDown', 'Move the run of the chosen row down', () => moveChosen(1), 'queue');
    studio.shortcut('Delete', 'Remove the run of the chosen row', () => {
      const [row] = chosen();
      if (row) remove(row);
    }, 'queue');
  },
  async show() { await act('queue_state'); },
  async tick() {
    const before = numActs;
    let found;
    try { found = await call('queue_state'); } catch (error) {
      if (error instanceof studio.Refused) return;
      throw error;
    }
    if (isLost) $('queue-message').replaceChildren();
    isLost = false;
    if (before === numActs) show(found); // else it may be older than what was done meanwhile
  },
};
