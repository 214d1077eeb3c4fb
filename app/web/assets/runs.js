// The screens Runs, a table of all runs, and compare, two to five of them next to each other.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { drawDeleted, restore } from './runs-deleted.js';
import { rename } from './rename.js';
import { open, choose, lineOf, loadImages } from './runs-rows.js';
import { current, rows, chosen, lines, COLUMNS, CHUNK, MOST_COMPARED } from './runs-state.js';

let root;
const ENDS = ['finished', 'stopped', 'failed'], QUIET = ['created', 'unread', 'damaged'];
const GROUPS = [['all', 'All'], ['running', 'Running'], ['finished', 'Finished'], ['stopped', 'Stopped'],
  ['failed', 'Failed'],
  ['created', 'Not started'], ['damaged', 'Damaged']];

// --- what is known ------------------------------------------------------------------------------------------------

const groupOf = row => (ENDS.includes(row.state) || QUIET.includes(row.state) ? row.state : 'running');
export const isRunning = row => groupOf(row) === 'running';
const textOf = row => [row.title, row.name, row.model, row.adapter, row.state, ...row.tags].join(' ').toLowerCase();
const VALUES = {
  name: row => row.title.toLowerCase(), state: row => GROUPS.findIndex(([name]) => name === groupOf(row)),
  loss: row => row.loss,
  best: row => row.best && row.best[0], duration: row => row.duration_s, size: row => row.size,
  started: row => row.started || row.launched,
};

/** Ask for what changed, until all runs are read. */
function load() {
  return (current.loading ??= read().finally(() => { current.loading = null; }));
}

/**
 * Ask at every tick while something runs or is being read, and at every second one otherwise: an answer costs the
 * server 10 ms.
 */
function tick() {
  current.numTicks++;
  const isQuiet = current.answer && ![...rows.values()].some(row => isRunning(row) || row.state === 'unread'
    || row.size === null);
  return isQuiet && current.numTicks % 2 ? null : load();
}

/** Ask again, for an answer that knows what was done just now. */
export async function reload() {
  await current.loading;
  await load();
}

async function read() {
  try {
    do {
      current.answer = await studio.call('runs_list', { token: current.token });
      take(current.answer);
      drawDeleted(current.answer.deleted);
      if (current.answer.is_whole || current.answer.rows.length || current.answer.gone.length) draw();
      else say('#runs-problem', current.answer.problem);
    } while (current.answer.num_unread && studio.shown === 'runs');
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (!error.lost) say('#runs-problem', error.message);
  }
}

function take(changes) {
  current.token = changes.token;
  const names = new Set(changes.rows.map(row => row.name));
  const gone = changes.is_whole ? [...rows.keys()].filter(name => !names.has(name)) : changes.gone;
  for (const name of gone) {
    rows.delete(name);
    chosen.delete(name);
    lines.delete(name);
  }
  for (const row of changes.rows) rows.set(row.name, { ...row, search: textOf(row) });
}

function found() {
  const [key, direction] = current.sort, value = VALUES[key], parts = current.words.split(/\s+/).filter(Boolean);
  const list = [...rows.values()].filter(row => (current.group === 'all' || groupOf(row) === current.group)
    && parts.every(part => row.search.includes(part)));
  const compared = (a, b) => (a < b ? -direction : a > b ? direction : 0);
  return list.map(row => [value(row), row]).sort(([a, one], [b, other]) =>
    Number(a === null) - Number(b === null) || compared(a, b) || other.launched - one.launched
      || (one.name < other.name ? -1 : 1)).map(([, row]) => row);
}

// --- the table ----------------------------------------------------------------------------------------------------

const at = selector => root.querySelector(selector);
const say = (selector, text) => studio.fill(at(selector), text, () => (text ? studio.alert(text) : null));

function build(section) {
  root = section;
  const filter = h('input#runs-filter',
    { type: 'search', placeholder: 'Filter: name, model, adapter, tag', 'aria-label': 'Filter the runs',
      oninput: event => { current.words = event.target.value.trim().toLowerCase(); again(); } });
  const order = h('select#runs-sort', { onchange: event => setSort(...JSON.parse(event.target.value)) },
    COLUMNS.map(([key, title, direction]) =>
      h('option', { value: JSON.stringify([key, direction]) }, key === 'started' ? 'Newest' : title)));
  const heads = COLUMNS.map(([key, title, direction]) => h(`th.c-${key}`, { scope: 'col', data: { sort: key } },
    h('button', { type: 'button', onclick: () => setSort(key, current.sort[0] === key ? -current.sort[1] : direction) },
      title,
      h('i', { 'aria-hidden': 'true' }))));
  const all = h('input#runs-all',
    { type: 'checkbox', 'aria-label': 'Choose all runs that are shown', onchange: event => {
      for (const row of found()) if (event.target.checked) chosen.add(row.name); else chosen.delete(row.name);
      draw();
    } });
  root.append(
    h('div.head', {}, h('h1', {}, 'Runs'), h('span.dim#runs-count'), h('span.grow'),
      h('a.btn', { href: studio.link('drop') }, 'Drop and name'),
      h('a.btn.main', { href: studio.link('new') }, 'New run')),
    h('div#runs-problem'),
    h('div.bar2', {}, filter, h('div.seg#runs-groups', { role: 'group', 'aria-label': 'State' }), h('span.grow'),
      h('label.by', {}, 'Sort by ', order)),
    h('div.card.list#runs-card', {},
      h('table#runs', {}, h('thead', {},
        h('tr', {}, h('th.c-check', { scope: 'col' }, all),
          h('th.c-image', { scope: 'col' }, h('span.sr', {}, 'Last sample')), heads)),
        h('tbody', { onclick: open, onchange: choose })),
      h('div#runs-empty')),
    h('div#runs-more', { hidden: true }, h('button.btn', { type: 'button', onclick: more }, 'Show more')),
    h('details.card#deleted-runs', { hidden: true }), bar());
  new IntersectionObserver(entries => entries.some(entry => entry.isIntersecting) && more(), { rootMargin: '600px' })
    .observe(at('#runs-more'));
  studio.shortcut('/', 'Filter the runs', () => filter.focus(), 'runs');
  studio.shortcut('c', 'Compare the chosen runs', compare, 'runs');
  studio.shortcut('Escape', 'Choose none', () => { chosen.clear(); draw(); }, 'runs');
}

function setSort(key, direction) {
  current.sort = [key, direction];
  again();
}

/** Draw from the top: another filter, state or order. */
function again() {
  current.shown = CHUNK;
  draw();
}

function more() {
  if (current.shown >= found().length) return;
  current.shown += CHUNK;
  draw();
}

export function draw() {
  const list = found(), part = list.slice(0, current.shown), body = at('tbody');
  const focused = studio.focused(), place = focused.closest('#runs tr');
  drawHead(list);
  const kept = new Set(part.map(lineOf));
  for (const line of [...body.children]) if (!kept.has(line)) line.remove();
  let next = body.firstElementChild;
  for (const line of kept) {
    if (line === place) while (next !== place) { // the line with the focus is not moved: it would lose it
      const other = next;
      next = next.nextElementSibling;
      body.append(other);
    }
    if (line === next) next = next.nextElementSibling;
    else body.insertBefore(line, next);
  }
  at('#runs').hidden = !part.length;
  at('#runs-more').hidden = part.length === list.length;
  studio.fill(at('#runs-empty'), [part.length > 0, rows.size > 0, current.answer === null],
    () => (part.length ? null : empty()));
  drawBar();
  // its row may have moved or gone
  if (place) studio.refocus(focused, ...(place.getClientRects().length ? [] : [at('#runs-all'), at('#runs-filter')]));
  loadImages();
}

function empty() {
  if (rows.size) return h('div.empty', {}, h('h2', {}, 'No run matches'),
    h('p', {}, 'Change the filter, or show all runs.'),
    h('button.btn', { type: 'button', onclick: () => {
      current.words = at('#runs-filter').value = '';
      current.group = 'all';
      again();
    } }, 'Show all'));
  return h('div.empty', {}, h('h2', {}, 'No runs yet'),
    h('p', {}, 'Your runs appear here, with last sample, loss and best validation loss.'),
    h('a.btn.main', { href: studio.link('drop') }, 'Drop and name pictures'));
}

function drawHead(list) {
  const all = [...rows.values()], counts = Object.fromEntries(GROUPS.map(([name]) => [name, 0]));
  for (const row of all) if (groupOf(row) in counts) counts[groupOf(row)]++;
  counts.all = all.length;
  const size = all.reduce((sum, row) => sum + (row.size || 0), 0), free = current.answer?.free;
  studio.say(at('#runs-count'),
    all.length ? `${studio.counted(all.length, 'run')}${size ? `, ${studio.size(size)}` : ''}${free
      ? ` · ${studio.size(free)} free` : ''}` : '');
  if (current.answer) say('#runs-problem', current.answer.problem);
  const groups = GROUPS.filter(([name], index) => index < 5 || counts[name] || name === current.group);
  studio.fill(at('#runs-groups'), [current.group, groups.map(([name]) => counts[name])],
    () => groups.map(([name, title]) => h('button', { type: 'button',
      data: { group: name }, 'aria-pressed': String(name === current.group), onclick: () => {
        current.group = name;
        again();
        at(`[data-group=${name}]`).focus();
      } },
      `${title} ${studio.count(counts[name])}`)));
  for (const head of root.querySelectorAll('th[data-sort]')) {
    const isOn = head.dataset.sort === current.sort[0];
    if (isOn) head.setAttribute('aria-sort', current.sort[1] > 0 ? 'ascending' : 'descending');
    else head.removeAttribute('aria-sort');
    studio.say(head.querySelector('i'), isOn ? (current.sort[1] > 0 ? ' ↑' : ' ↓') : '');
  }
  at('#runs-sort').value = JSON.stringify([current.sort[0], COLUMNS.find(([key]) => key === current.sort[0])?.[2]]);
  const numChosen = list.filter(row => chosen.has(row.name)).length, box = at('#runs-all');
  box.checked = numChosen > 0 && numChosen === list.length;
  box.indeterminate = numChosen > 0 && numChosen < list.length;
}

// --- the bar of chosen runs ---------------------------------------------------------------------------------------

function bar() {
  const button = (id, text, action) =>
    h(`button.btn#${id}`, { type: 'button',
      onclick: event => studio.act(event.target, at('#runs-message'), action).then(drawBar) }, text);
  return h('div.chosen#runs-bar', { role: 'region', 'aria-label': 'Chosen runs', hidden: true }, h('div#runs-message'),
    h('div.row', {},
      h('span#runs-chosen', { role: 'status' }),
      h('button.btn.main#runs-compare', { type: 'button', onclick: compare }, 'Compare'),
      button('runs-tag', 'Tag …', tagChosen), button('runs-rename', 'Rename …', renameChosen),
      button('runs-copy', 'Copy to a new run', copy), button('runs-resume', 'Resume', resume),
      button('runs-delete', 'Delete …', remove),
      h('button.btn.ghost#runs-none',
        { type: 'button', 'aria-label': 'Choose none', title: 'Choose none', onclick: () => {
          chosen.clear();
          draw();
        } }, '×')));
}

const chosenRows = () => [...chosen].map(name => rows.get(name)).filter(Boolean);

function drawBar() {
  const list = chosenRows(), [one] = list, visible = new Set(found().map(row => row.name)),
    numHidden = list.filter(row => !visible.has(row.name)).length;
  const wasShown = !at('#runs-bar').hidden;
  at('#runs-bar').hidden = !list.length;
  if (!list.length) at('#runs-message').replaceChildren();
  if (!list.length && wasShown) studio.refocus(at('#runs-all'), at('#runs-filter'));
  studio.say(at('#runs-chosen'), `${list.length} chosen${numHidden ? `, ${numHidden} not shown` : ''}`);
  const comparing = at('#runs-compare');
  studio.say(comparing, `Compare (${list.length})`);
  comparing.disabled = list.length < 2 || list.length > MOST_COMPARED;
  comparing.title = comparing.disabled ? `Choose 2 to ${MOST_COMPARED} runs to compare them` : '';
  at('#runs-rename').hidden = list.length !== 1;
  at('#runs-copy').hidden = list.length !== 1 || one.state === 'damaged';
  at('#runs-resume').hidden = list.length !== 1 || !['stopped', 'failed', 'created'].includes(one.state);
  studio.say(at('#runs-resume'), one?.state === 'created' ? 'Start' : 'Resume');
}

function compare() {
  const names = chosenRows().map(row => row.name);
  if (names.length >= 2 && names.length <= MOST_COMPARED) location.hash =
    `#/compare/${names.map(encodeURIComponent).map(encodeURIComponent).join(',')}`;
}

async function copy() {
  await studio.call('new_copy', { run: chosenRows()[0].name });
  studio.go('new');
}

async function resume() {
  const [row] = chosenRows();
  await studio.call('runs_resume', { run: row.name });
  studio.go('runs', row.name);
}

async function tagChosen() {
  const list = chosenRows(), box = { id: 'runs-new-tag', 'aria-label': 'Tag', placeholder: 'tag, another' };
  const added = await studio.askText(`Tag ${studio.counted(list.length, 'run')}`, box, 'Add');
  if (!added?.trim()) return;
  await studio.call('runs_tag', { runs: list.map(row => row.name), added });
  await reload();
}

async function renameChosen() {
  const [row] = chosenRows();
  if (await rename(row.name, row.title)) await reload();
}

async function remove() {
  const list = chosenRows(), sizes = list.map(row => row.size),
    total = sizes.reduce((sum, size) => sum + (size || 0), 0);
  const names = list.slice(0, 8).map(row => row.name)
    .join(', ') + (list.length > 8 ? ` and ${list.length - 8} more` : '');
  const size = sizes.includes(null) ? `at least ${studio.size(total)}` : studio.size(total);
  const text = [h('b', {}, names), h('br'),
    `Moved to the deleted runs, below this table: ${size}, with all checkpoints, samples, exports and logs. `
    + 'They stay on the disk until you empty these.', h('br'),
    'Kept: your images and captions, the model, presets, and other runs.'];
  const title = list.length === 1 ? `Delete ${list[0].title}?` : `Delete ${studio.count(list.length)} runs?`;
  if (await studio.ask(title, text, ['Delete', 'Cancel'], 'stop')) return '';
  const { deletions, refused } = await studio.call('runs_delete', { runs: list.map(row => row.name) });
  await reload();
  if (deletions.length) studio.toast(`${studio.counted(deletions.length, 'run')} deleted. `, false,
    () => restore(deletions));
  if (refused.length) throw new studio.Refused(refused.join('\n'));
  return '';
}

studio.screens.runs = { rail: { key: 'r', icon: 'M3 5.5h14M3 10h14M3 14.5h9' }, title: 'Runs', build, show: load,
  tick };
