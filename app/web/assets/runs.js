// The screens Runs, a table of all runs, and compare, two to five of them next to each other.
// @ts-check
import * as studio from './core.js';
import { h, svg } from './core.js';
import { chart as newChart } from './charts.js';
import { lightbox } from './lightbox.js';

const MOST_COMPARED = 5, CHUNK = 60, IMAGES_AT_ONCE = 8;
const ENDS = ['finished', 'stopped', 'failed'], QUIET = ['created', 'unread', 'damaged'];
const GROUPS = [['all', 'All'], ['running', 'Running'], ['finished', 'Finished'], ['stopped', 'Stopped'],
  ['failed', 'Failed'],
  ['created', 'Not started'], ['damaged', 'Damaged']];
const WORDS = { created: 'not started', unread: 'being read' };
const MOODS = { finished: '', stopped: 'warn', failed: 'bad', damaged: 'bad', created: '', unread: '' };
const COLUMNS = [['name', 'Run', 1], ['state', 'State', 1], ['loss', 'Loss', 1], ['best', 'Best validation', 1],
  ['duration', 'Duration', -1],
  ['size', 'Size', -1], ['started', 'Started', -1]];
const NO_IMAGE = {}, rows = new Map(), images = new Map(), chosen = new Set();
let root, token = '', answer = /** @type {any} */ (null), group = 'all', words = '',
  sort = /** @type {[string, number]} */ (['started', -1]), shown = CHUNK, editing = '';
let loading = /** @type {any} */ (null), isFetching = false, numTicks = 0;
const lines = new Map(), drawn = new Map(), wanted = new Set();

// --- what is known ------------------------------------------------------------------------------------------------

const groupOf = row => (ENDS.includes(row.state) || QUIET.includes(row.state) ? row.state : 'running');
const isRunning = row => groupOf(row) === 'running';
const textOf = row => [row.name, row.model, row.adapter, row.state, ...row.tags].join(' ').toLowerCase();
const VALUES = {
  name: row => row.title.toLowerCase(), state: row => GROUPS.findIndex(([name]) => name === groupOf(row)),
  loss: row => row.loss,
  best: row => row.best && row.best[0], duration: row => row.duration_s, size: row => row.size,
  started: row => row.started || row.launched,
};

/** Ask for what changed, until all runs are read. */
function load() {
  return (loading ??= read().finally(() => { loading = null; }));
}

/**
 * Ask at every tick while something runs or is being read, and at every second one otherwise: an answer costs the
 * server 10 ms.
 */
function tick() {
  numTicks++;
  const isQuiet = answer && ![...rows.values()].some(row => isRunning(row) || row.state === 'unread'
    || row.size === null);
  return isQuiet && numTicks % 2 ? null : load();
}

/** Ask again, for an answer that knows what was done just now. */
async function reload() {
  await loading;
  await load();
}

async function read() {
  try {
    do {
      answer = await studio.call('runs_list', { token });
      take(answer);
      if (answer.is_whole || answer.rows.length || answer.gone.length) draw();
      else say('#runs-problem', answer.problem);
    } while (answer.num_unread && studio.shown === 'runs');
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (!error.lost) say('#runs-problem', error.message);
  }
}

function take(changes) {
  token = changes.token;
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
  const [key, direction] = sort, value = VALUES[key], parts = words.split(/\s+/).filter(Boolean);
  const list = [...rows.values()].filter(row => (group === 'all' || groupOf(row) === group)
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
      oninput: event => { words = event.target.value.trim().toLowerCase(); again(); } });
  const order = h('select#runs-sort', { onchange: event => setSort(...JSON.parse(event.target.value)) },
    COLUMNS.map(([key, title, direction]) =>
      h('option', { value: JSON.stringify([key, direction]) }, key === 'started' ? 'Newest' : title)));
  const heads = COLUMNS.map(([key, title, direction]) => h(`th.c-${key}`, { scope: 'col', data: { sort: key } },
    h('button', { type: 'button', onclick: () => setSort(key, sort[0] === key ? -sort[1] : direction) }, title,
      h('i', { 'aria-hidden': 'true' }))));
  const all = h('input#runs-all',
    { type: 'checkbox', 'aria-label': 'Choose all runs that are shown', onchange: event => {
      for (const row of found()) if (event.target.checked) chosen.add(row.name); else chosen.delete(row.name);
      draw();
    } });
  root.append(
    h('div.head', {}, h('h1', {}, 'Runs'), h('span.dim#runs-count'), h('span.grow'),
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
    bar());
  new IntersectionObserver(entries => entries.some(entry => entry.isIntersecting) && more(), { rootMargin: '600px' })
    .observe(at('#runs-more'));
  studio.shortcut('/', 'Filter the runs', () => filter.focus(), 'runs');
  studio.shortcut('c', 'Compare the chosen runs', compare, 'runs');
  studio.shortcut('Escape', 'Choose none', () => { chosen.clear(); draw(); }, 'runs');
}

function setSort(key, direction) {
  sort = [key, direction];
  again();
}

/** Draw from the top: another filter, state or order. */
function again() {
  shown = CHUNK;
  draw();
}

function more() {
  if (shown >= found().length) return;
  shown += CHUNK;
  draw();
}

function draw() {
  const list = found(), part = list.slice(0, shown), body = at('tbody');
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
  studio.fill(at('#runs-empty'), [part.length > 0, rows.size > 0, answer === null],
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
      words = at('#runs-filter').value = '';
      group = 'all';
      again();
    } }, 'Show all'));
  return h('div.empty', {}, h('h2', {}, 'No runs yet'),
    h('p', {}, 'Your runs appear here, with last sample, loss and best validation loss.'),
    h('a.btn.main', { href: studio.link('new') }, 'New run'));
}

function drawHead(list) {
  const all = [...rows.values()], counts = Object.fromEntries(GROUPS.map(([name]) => [name, 0]));
  for (const row of all) if (groupOf(row) in counts) counts[groupOf(row)]++;
  counts.all = all.length;
  const size = all.reduce((sum, row) => sum + (row.size || 0), 0), free = answer?.free;
  studio.say(at('#runs-count'),
    all.length ? `${studio.counted(all.length, 'run')}${size ? `, ${studio.size(size)}` : ''}${free
      ? ` · ${studio.size(free)} free` : ''}` : '');
  if (answer) say('#runs-problem', answer.problem);
  const groups = GROUPS.filter(([name], index) => index < 5 || counts[name] || name === group);
  studio.fill(at('#runs-groups'), [group, groups.map(([name]) => counts[name])],
    () => groups.map(([name, title]) => h('button', { type: 'button',
      data: { group: name }, 'aria-pressed': String(name === group), onclick: () => {
        group = name;
        again();
        at(`[data-group=${name}]`).focus();
      } },
      `${title} ${studio.count(counts[name])}`)));
  for (const head of root.querySelectorAll('th[data-sort]')) {
    const isOn = head.dataset.sort === sort[0];
    if (isOn) head.setAttribute('aria-sort', sort[1] > 0 ? 'ascending' : 'descending');
    else head.removeAttribute('aria-sort');
    studio.say(head.querySelector('i'), isOn ? (sort[1] > 0 ? ' ↑' : ' ↓') : '');
  }
  at('#runs-sort').value = JSON.stringify([sort[0], COLUMNS.find(([key]) => key === sort[0])?.[2]]);
  const numChosen = list.filter(row => chosen.has(row.name)).length, box = at('#runs-all');
  box.checked = numChosen > 0 && numChosen === list.length;
  box.indeterminate = numChosen > 0 && numChosen < list.length;
}

// --- one row ------------------------------------------------------------------------------------------------------

function lineOf(row) {
  let line = lines.get(row.name);
  if (!line) {
    line = h('tr', { data: { run: row.name } },
      ['check', 'image', ...COLUMNS.map(([key]) => key)].map(key => h(`td.c-${key}`)));
    lines.set(row.name, line);
  }
  const isChosen = chosen.has(row.name), thumbnail = images.get(row.name) || NO_IMAGE,
    state = [row, isChosen, thumbnail];
  if (drawn.get(row.name)?.every((value, index) => value === state[index])) return line;
  drawn.set(row.name, state);
  const cell = index => line.children[index];
  line.classList.toggle('sel', isChosen);
  line.dataset.state = row.state;
  studio.fill(cell(0), row.name, () => h('input', { type: 'checkbox', 'aria-label': `Choose ${row.title}` }));
  cell(0).firstChild.checked = isChosen;
  if (row.sample && thumbnail.sample !== row.sample) wanted.add(row.name);
  studio.fill(cell(1), [row.text, thumbnail.url], () => image(row, thumbnail));
  if (editing !== row.name) studio.fill(cell(2), [row.model, row.adapter, row.tags, row.problem], () => naming(row));
  studio.fill(cell(3), [row.state, row.step, row.length, row.is_stuck, row.reason], () => progress(row));
  studio.fill(cell(4), [row.curve, row.loss],
    () => [curve(row), h('small', {}, row.loss === null ? '' : studio.short(row.loss))]);
  studio.fill(cell(5), row.best,
    () => [h('b', {}, row.best ? studio.short(row.best[0]) : '–'),
      row.best ? h('small', {}, `step ${studio.count(row.best[1])}`) : null]);
  const size = row.size === null ? '…' : studio.size(row.size);
  studio.fill(cell(6), [Math.round(row.duration_s), row.eta_s && Math.round(row.eta_s), size],
    () => [h('span', {}, row.duration_s ? studio.duration(row.duration_s) : '–'),
      row.eta_s === null ? null : h('small', {}, `${studio.duration(row.eta_s)} left`),
      h('small.size', { 'aria-hidden': 'true' }, size)]);
  studio.fill(cell(7), size, () => size);
  studio.fill(cell(8), row.started, () => studio.when(row.started).split(' ').map(part => [h('span', {}, part), ' ']));
  return line;
}

function image(row, { url }) {
  if (row.text) return h('span.words', { title: row.text }, row.text);
  if (url) return h('img', { src: url, alt: `Last sample of ${row.title}`, width: 64, height: 64, loading: 'lazy' });
  return h('span.none', { 'aria-hidden': 'true' });
}

function naming(row) {
  const link = h('a.run-link', { href: studio.link('runs', row.name), title: row.name }, row.title);
  const facts = [row.model, row.adapter].filter(Boolean).join(' · ');
  return [link, facts ? h('span.about', {}, facts) : null, row.id ? h('span.key', {}, row.id) : null, tags(row),
    row.problem ? h('small.why', {}, row.problem) : null];
}

function tags(row) {
  return h('span.tags', {}, row.tags.map(tag => h('span.tag', {}, h('span.word', { title: tag }, tag),
    h('button.x', { type: 'button', 'aria-label': `Remove the tag ${tag} from ${row.title}`, title: 'Remove',
      onclick: () => change(row, { removed: tag }) }, '×'))),
  h('button.tag.add', { type: 'button', 'aria-label': `Add a tag to ${row.title}`, title: 'Add a tag',
    onclick: () => edit(row) }, '+'));
}

function progress(row) {
  const word = WORDS[row.state] || row.state;
  const steps = !row.length ? null : row.state === 'finished' ? studio.counted(row.step, 'step')
    : `${studio.count(row.step)} / ${row.num_steps ? studio.count(row.num_steps) : row.length}`;
  return [h(`span.tag${isRunning(row) ? (row.is_stuck ? '.warn' : '.ok') : MOODS[row.state] && `.${MOODS[row.state]}`}`,
    {}, row.is_stuck ? `${word}, silent` : word),
    steps ? h('small', {}, steps) : null, row.reason ? h('small.why', { title: row.reason }, row.reason) : null];
}

/** The smoothed loss over all planned steps. */
function curve({ curve: values, num_steps: numSteps }) {
  if (values.length < 2) return null;
  const low = Math.min(...values), high = Math.max(...values), parts = Math.min(40, numSteps);
  const points = values.map(
    (value, index) => `${(2 + 96 * index / Math.max(1, parts - 1))
      .toFixed(1)},${(26 - 24 * (value - low) / (high - low || 1)).toFixed(1)}`);
  return svg('svg', { viewBox: '0 0 100 28', width: 100, height: 28, 'aria-hidden': 'true', class: 'spark' },
    svg('polyline', { points: points.join(' ') }));
}

/** Fetch thumbnails of the rows that are drawn, a few at a time, first rows first. */
async function loadImages() {
  if (isFetching) return;
  isFetching = true;
  try {
    while (wanted.size && studio.shown === 'runs') {
      const names = [...wanted].slice(0, IMAGES_AT_ONCE), samples = names.map(name => rows.get(name)?.sample);
      const found = await studio.call('runs_images', { runs: names });
      names.forEach((name, index) => {
        wanted.delete(name);
        images.set(name, { sample: samples[index], url: found[name] });
        if (rows.has(name) && lines.has(name)) lineOf(rows.get(name));
      });
    }
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error; // asked again with the next change
  } finally {
    isFetching = false;
  }
}

function open(event) {
  const line = event.target.closest('tr');
  if (!line || event.target.closest('a, button, input, label') || String(getSelection())) return;
  if (event.target.closest('.c-check')) { line.querySelector('input').click(); return; }
  studio.go('runs', line.dataset.run);
}

function choose(event) {
  if (event.target.type !== 'checkbox') return;
  const name = event.target.closest('tr').dataset.run;
  if (event.target.checked) chosen.add(name); else chosen.delete(name);
  draw();
}

// --- tags ---------------------------------------------------------------------------------------------------------

function edit(row) {
  const place = lines.get(row.name).querySelector('.tags'),
    known = [...new Set([...rows.values()].flatMap(other => other.tags))].sort();
  const close = (added, isBack) => {
    if (editing !== row.name) return; // closed by a key: its blur comes when it is taken out
    editing = '';
    drawn.delete(row.name);
    delete lines.get(row.name)?.querySelector('.c-name').dataset.key; // the chips come back
    if (rows.has(row.name)) lineOf(rows.get(row.name));
    if (isBack) lines.get(row.name)?.querySelector('.add').focus();
    if (added.trim() && rows.has(row.name)) change(row, { added });
  };
  const list = h('datalist#runs-tags', {}, known.map(tag => h('option', { value: tag })));
  const box = h('input.tag-box',
    { type: 'text', 'aria-label': `New tag of ${row.title}`, placeholder: 'tag, another', list: 'runs-tags',
      onkeydown: event => {
        if (event.key !== 'Enter' && event.key !== 'Escape') return;
        event.preventDefault(); // the button that gets the focus would take it for a click
        close(event.key === 'Enter' ? event.target.value : '', true);
      },
      onblur: event => close(event.target.value, false) });
  editing = row.name;
  place.querySelector('.add').replaceWith(box, list);
  box.focus();
}

async function change(row, values) {
  try {
    await studio.call('runs_tag', { runs: [row.name], ...values });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
  }
  await reload();
  studio.refocus(lines.get(row.name)?.querySelector('.add'));
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
      button('runs-tag', 'Tag …', tagChosen), button('runs-copy', 'Copy to a new run', copy),
      button('runs-resume', 'Resume', resume),
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
  const list = chosenRows(),
    box = h('input#runs-new-tag', { type: 'text', 'aria-label': 'Tag', placeholder: 'tag, another' });
  const asked = studio.ask(`Tag ${studio.counted(list.length, 'run')}`, box, ['Add', 'Cancel']);
  box.addEventListener('keydown',
    event => event.key === 'Enter' && box.closest('dialog')?.querySelector('.btn.main').click());
  box.focus();
  if (await asked || !box.value.trim()) return;
  await studio.call('runs_tag', { runs: list.map(row => row.name), added: box.value });
  await reload();
}

async function remove() {
  const list = chosenRows(), sizes = list.map(row => row.size),
    total = sizes.reduce((sum, size) => sum + (size || 0), 0);
  const names = list.slice(0, 8).map(row => row.name)
    .join(', ') + (list.length > 8 ? ` and ${list.length - 8} more` : '');
  const size = sizes.includes(null) ? `at least ${studio.size(total)}` : studio.size(total);
  const text = [h('b', {}, names), h('br'),
    `Deleted: ${size}, with all checkpoints, samples, exports and logs of ${list.length === 1 ? 'this run'
      : 'these runs'}. `
    + 'This cannot be undone.', h('br'), 'Kept: your images and captions, the model, presets, and other runs.'];
  const title = list.length === 1 ? `Delete ${list[0].title}?` : `Delete ${studio.count(list.length)} runs?`;
  if (await studio.ask(title, text, ['Delete permanently', 'Cancel'], 'stop')) return '';
  const { num_deleted: numDeleted, refused } = await studio.call('runs_delete', { runs: list.map(row => row.name) });
  await reload();
  if (numDeleted) studio.toast(`${studio.counted(numDeleted, 'run')} deleted.`);
  if (refused.length) throw new studio.Refused(refused.join('\n'));
  return '';
}

studio.screens.runs = { rail: { key: 'r', icon: 'M3 5.5h14M3 10h14M3 14.5h9' }, title: 'Runs', build, show: load,
  tick };

// --- comparison ---------------------------------------------------------------------------------------------------

let page, chart, known = '', names = '', hasFailed = false;

function buildComparison(section) {
  page = section;
  const copied = event => studio.act(event.target, page.querySelector('#compare-message'), async () => {
    if (!await studio.copy(location.href))
      return 'The browser lets no page copy here: copy the address from its address bar.';
    studio.toast('The address is copied.');
    return '';
  });
  section.append(
    h('div.head', {}, h('h1', {}, 'Comparison'), h('span.dim#compare-count'), h('span.grow'),
      h('button.btn#compare-link', { type: 'button', onclick: copied }, 'Copy link'),
      h('a.btn', { href: studio.link('runs') }, 'Back to Runs')),
    h('div#compare-message'), h('div#compare-problems'),
    h('div.two', {}, h('div', {}, h('div.card#compare-loss'), h('div.card#compare-results')),
      h('div.card#compare-settings')), h('div.card#compare-samples'));
}

/** A name of the address, which is encoded once more where it has a comma or the like. */
function plain(name) {
  try { return decodeURIComponent(name); } catch { return name; }
}

async function showComparison([, list = '']) {
  if (list !== names) [names, known] = [list, ''];
  let found;
  try {
    found = await studio.call('compare_show', { runs: list.split(',').filter(Boolean).map(plain), known });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (error.lost) return;
    hasFailed = true;
    page.querySelector('#compare-message').replaceChildren(studio.alert(error.message));
    return;
  }
  if (list !== names) return;
  if (hasFailed) page.querySelector('#compare-message').replaceChildren();
  hasFailed = false;
  if (found.key !== known) drawComparison(found);
}

function drawComparison(found) {
  known = found.key;
  const part = name => page.querySelector(`#compare-${name}`), { runs } = found, isEnough = runs.length > 1;
  studio.say(page.querySelector('h1'), isEnough ? `Comparison of ${runs.length} runs` : 'Comparison');
  studio.say(part('count'),
    isEnough ? (found.settings.length
      ? `${studio.counted(found.settings.length, 'setting')} ${found.settings.length === 1 ? 'differs' : 'differ'}`
      : 'equal settings') : '');
  studio.fill(part('problems'), [found.problems, isEnough], () => [...found.problems.map(studio.alert),
    isEnough ? null : h('div.card.empty', {}, h('h2', {}, 'Choose at least two runs'),
      h('p', {}, `Mark 2 to ${MOST_COMPARED} runs in the table and press Compare.`),
      h('a.btn.main', { href: studio.link('runs') }, 'Choose runs'))]);
  for (const name of ['results', 'loss', 'settings', 'samples']) part(name).hidden = !isEnough;
  if (!isEnough) return;
  drawLoss(part('loss'), found.chart);
  studio.fill(part('results'), runs, () => results(runs));
  studio.fill(part('settings'), [found.settings, runs.map(run => run.label)], () => settings(runs, found.settings));
  studio.fill(part('samples'), [found.samples, runs], () => samples(runs, found.samples));
}

/** Draw the smoothed losses. `content` is JSON as app/web/charts.py makes it. */
function drawLoss(container, content) {
  chart ??= newChart(container, { title: 'Loss, smoothed', ylabel: 'loss' });
  chart.set(content);
}

function table(title, runs, rows) {
  const head = runs.map(run =>
    h('th', { scope: 'col' }, h('a', { href: studio.link('runs', run.name), title: run.name }, run.label)));
  return [h('div.ttl', {}, h('h2', {}, title)), h('div.scroll', { tabIndex: 0, role: 'region', 'aria-label': title },
    h('table.wide', {}, h('thead', {}, h('tr', {}, h('td'), head)), h('tbody', {}, rows)))];
}

function results(runs) {
  const bests = runs.map(run => run.best?.[0] ?? Infinity),
    lowest = new Set(bests).size > 1 ? Math.min(...bests) : null;
  const best = (run, index) =>
    (run.best ? [h('b', {}, studio.short(run.best[0])),
      bests[index] === lowest ? [' ', h('span.tag.ok', {}, 'lowest')] : null,
      h('small', {}, `step ${studio.count(run.best[1])}`)] : '–');
  const rows = /** @type {[string, (run: any, index: number) => any][]} */ (
    [['Best validation loss', best], ['Loss, smoothed', run => (run.loss === null ? '–' : studio.short(run.loss))],
      ['State',
        run => `${run.state}, ${run.step === run.num_steps ? studio.counted(run.step, 'step')
          : `${studio.count(run.step)} of ${run.num_steps ? `${studio.count(run.num_steps)} steps` : run.length}`}`],
      ['Duration', run => (run.duration_s ? studio.duration(run.duration_s) : '–')],
      ['Speed', run => (run.speed === null ? '–' : `${studio.short(run.speed)} ${run.unit} a second`)],
      ['Peak memory of a rank', run => (run.peak ? studio.gib(run.peak) : '–')]]);
  return table('Results', runs,
    rows.map(([label, value]) =>
      h('tr', {}, h('th', { scope: 'row' }, label), runs.map((run, index) => h('td', {}, value(run, index))))));
}

function settings(runs, list) {
  return table('What differs', runs, list.length ? list.map(setting => h('tr', { data: { field: setting.field } },
    h('th', { scope: 'row' }, setting.label, h('span.key', {}, setting.field)),
    setting.values.map(value => h('td', {}, h('div.value', {}, value)))))
    : h('tr', {}, h('td.dim', { colSpan: runs.length + 1 }, 'All settings are equal.')));
}

function samples(runs, rows) {
  const title = h('div.ttl', {}, h('h2', {}, 'Samples of the same prompt'),
    h('span.dim', {}, 'the last of each run; [trigger] stands for each run’s own word'));
  if (!rows.length) return [title,
    h('p.dim', {},
      'These runs have no prompt in common. Give them equal prompts under Sampling to compare their samples.')];
  return [title, h('div.scroll', { tabIndex: 0, role: 'region', 'aria-label': 'Samples' }, h('table.pairs', {},
    h('thead', {}, h('tr', {}, h('td'), runs.map(run => h('th', { scope: 'col' }, run.label)))),
    h('tbody', {},
      rows.map(row => h('tr', {}, h('th', { scope: 'row' }, row.prompt),
        row.cells.map((cell, index) => h('td', {}, sample(cell, runs[index], pairOf(row.cells, runs)))))))))];
}

function sample(cell, run, pair) {
  if (!cell) return h('span.missing', {}, 'no sample');
  const caption = h('small', {}, `step ${studio.count(cell.step)}`);
  if (cell.text !== undefined)
    return [h('pre.written', { tabIndex: 0, 'aria-label': `Sample of ${run.label}` }, cell.text), caption];
  if (cell.problem) return [h('span.missing', { title: cell.problem }, 'file is missing'), caption];
  return [h('button.zoom',
    { type: 'button', title: 'Full size',
      onclick: () => lightbox(pair, pair.findIndex(item => item.src === cell.full)) },
    h('img.image', { src: cell.small, alt: `${cell.prompt}, ${run.label}`, loading: 'lazy' })), caption];
}

/** What the lightbox shows of one prompt: the samples of all runs. */
const pairOf = (cells, runs) =>
  cells.map((cell, index) => cell && cell.full
    && { title: runs[index].label, text: `${cell.prompt} · step ${studio.count(cell.step)}`, src: cell.full })
  .filter(Boolean);

studio.screens.compare = { title: 'Comparison', build: buildComparison, show: showComparison, tick: showComparison };
