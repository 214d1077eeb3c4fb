// The rows of the table of runs, and their tags.
// @ts-check
import * as studio from './core.js';
import { h, svg } from './core.js';
import { COLUMNS, chosen, current, lines, rows } from './runs-state.js';
import { isRunning, draw, reload } from './runs.js';

const IMAGES_AT_ONCE = 8;
const NO_IMAGE = {}, images = new Map();
const drawn = new Map(), wanted = new Set();
const WORDS = { created: 'not started', unread: 'being read' };
const MOODS = { finished: '', stopped: 'warn', failed: 'bad', damaged: 'bad', created: '', unread: '' };

// --- one row ------------------------------------------------------------------------------------------------------

export function lineOf(row) {
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
  studio.fill(cell(0), row.title, () => h('input', { type: 'checkbox', 'aria-label': `Choose ${row.title}` }));
  cell(0).firstChild.checked = isChosen;
  if (row.sample && thumbnail.sample !== row.sample) wanted.add(row.name);
  studio.fill(cell(1), [row.text, thumbnail.url], () => image(row, thumbnail));
  if (current.editing !== row.name) studio.fill(cell(2), [row.title, row.model, row.adapter, row.tags, row.problem],
    () => naming(row));
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
export async function loadImages() {
  if (current.isFetching) return;
  current.isFetching = true;
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
    current.isFetching = false;
  }
}

export function open(event) {
  const line = event.target.closest('tr');
  if (!line || event.target.closest('a, button, input, label') || String(getSelection())) return;
  if (event.target.closest('.c-check')) { line.querySelector('input').click(); return; }
  studio.go('runs', line.dataset.run);
}

export function choose(event) {
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
    if (current.editing !== row.name) return; // closed by a key: its blur comes when it is taken out
    current.editing = '';
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
  current.editing = row.name;
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
