// The screen of one run: state, figures and buttons, newest samples, charts, memory, events, log and notes.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { chart as newChart } from './charts.js';
import { drawTitle, drawHead, renameThis, seconds } from './run-head.js';
import { pick, drawSteps, drawPrompts, editPrompts } from './run-samples.js';
import { current, parts, TABS } from './run-state.js';

const SAVED_AFTER_MS = 1000, LOG_LENGTH = 200_000;
const charts = {}, chartCards = {};
const unsaved = new Map(); // notes that could not be saved before another run was opened: {run: {text, version}}

// --- what there is --------------------------------------------------------------------------------------------------

/** Ask for what changed since the last answer, and draw it. One after the other: two at once would draw it twice. */
export function refresh() {
  return (current.turn = current.turn.then(ask, ask));
}

async function ask() {
  const asked = current.strip, isOverview = current.tab === '';
  const values = { name: current.name, known: current.known, log: isOverview ? wish() : null, only_head: !isOverview };
  // another run may be opened meanwhile
  const answer = await studio.fetched('run_view', values, () => asked === current.strip, complain);
  if (!answer) return;
  current.isGone = Boolean(answer.is_gone);
  parts.gone.hidden = !current.isGone;
  parts.run.hidden = current.isGone;
  for (const part of [parts.rename, parts.state, parts.about, parts.id]) part.hidden = current.isGone;
  if (current.isGone) { studio.say(parts.title, current.name); return; }
  drawTitle(answer);
  // the server was started again, or this is another run of the same name
  const isOther = answer.parts.run && current.known.run;
  for (const [part, { key, value }] of Object.entries(answer.parts)) [current.known[part], current.data[part]] =
    [key, value];
  for (const [part, { value }] of Object.entries(answer.parts)) DRAW[part](value);
  if (current.strip.isOwed && current.data.samples) { // the server did not answer when they were asked for
    current.strip.isOwed = false;
    pick(current.strip.chosen);
  }
  if (isOther) current.log = null; // the answer goes on where the former log ended: the next one begins anew
  else if (answer.log) drawLog(answer.log);
}

const DRAW = { run: () => {}, head: drawHead, memory: drawMemory, samples: drawSteps, events: drawEvents,
  prompts: drawPrompts, notes: drawNotes, curves: drawCurves };

function complain(text) {
  studio.fill(parts.problem, text, () => (text ? studio.alert(text) : []));
}

function forget() {
  [current.data, current.known, current.log, current.isGone] = [{}, {}, null, false];
  current.strip = { chosen: null, answers: new Map() };
  current.saving = { version: '', timer: 0, isDirty: false };
  current.turn = Promise.resolve();
  for (const place of [parts.message, parts.problem, parts.events, parts.figures, parts.steps, parts.conflict]) {
    place.replaceChildren();
    delete place.dataset.key;
  }
  Object.assign(parts.notes, { value: '' });
  Object.assign(parts.log, { textContent: '' });
  studio.say(parts.saved, '');
  studio.say(parts.tabs.querySelector('.count'), '');
  parts.run.hidden = parts.gone.hidden = true;
}

// --- charts, memory, time -------------------------------------------------------------------------------------------

/** A small chart after the others, or the large one. */
function addChart({ title, ylabel = studio.facts.run.units[title] }, home, small) {
  const card = h('section.card', { id: `chart-${title.toLowerCase().replaceAll(' ', '-')}`, 'aria-label': title });
  home.append(card);
  chartCards[title] = card;
  charts[title] = newChart(card, { title, ylabel, small });
}

function drawCurves(curves) {
  for (const title of Object.keys(curves))
    if (!(title in charts)) addChart({ title }, parts.minis, true);
  for (const title of Object.keys(charts)) chartCards[title].hidden = !(title in curves);
  for (const [title, text] of Object.entries(curves)) charts[title].set(text);
}

function drawMemory({ ranks, imbalance, gpus, slow }) {
  const gib = bytes => (bytes / 2 ** 30).toFixed(1),
    share = (bytes, limit) => `${Math.min(100, 100 * bytes / Math.max(limit, 1))}%`;
  studio.fill(parts.ranks, ranks, () => [
    h('li.rank-heads', { 'aria-hidden': 'true' },
      ['', '', 'allocated', 'reserved', 'limit'].map(word => h('span', {}, word))),
    ...ranks.map(one => {
      const words =
        `rank ${one.rank}: ${gib(one.allocated)} GiB allocated, ${gib(one.reserved)} reserved, ${gib(
          one.peak)} peak, of ${gib(one.limit)}`;
      return h(`li.rank${one.late_s === null ? '' : '.late'}`, { title: words, data: { rank: one.rank } },
        h('span', {}, 'rank ', h('b', {}, String(one.rank))),
        h('div.rank-bar', { role: 'img', 'aria-label': words },
          h('i.reserved', { style: { width: share(one.reserved, one.limit) } }),
          h('i.allocated', { style: { width: share(one.allocated, one.limit) } }),
          h('u', { style: { left: share(one.peak, one.limit) } })),
        [one.allocated, one.reserved, one.limit].map(bytes => h('span', {}, gib(bytes))),
        one.late_s === null ? null : h('span.rank-late', {}, `silent for ${studio.duration(one.late_s)}`));
    })]);
  const note = ranks.length > 1 && imbalance > 1.005 ? `The largest peak is ${imbalance.toFixed(2)} × the mean.` : '';
  studio.say(parts.imbalance, note);
  parts.memoryKeys.hidden = !ranks.length;
  parts.noRanks.hidden = ranks.length > 0;
  studio.say(parts.noRanks,
    current.data.head.is_running ? 'The ranks report their memory once they have started.'
      : 'No rank has reported its memory.');
  parts.ranks.hidden = !ranks.length;
  studio.fill(parts.slow, slow, () => slow.map(studio.note));
  parts.gpuPart.hidden = !gpus.length;
  studio.fill(parts.gpus, gpus, () => gpus.map(one => h('li', {}, h('b', {}, `${one.index} `), `${one.name} `,
    h('span.dim', {}, [`${(one.memory_used / 1024).toFixed(1)} of ${(one.memory / 1024).toFixed(1)} GiB`,
      one.busy < 0 ? '' : `${one.busy} % busy`, one.celsius < 0 ? '' : `${one.celsius} °C`].filter(Boolean)
      .join(', ')))));
}

export function drawSplit({ split, waited_s, figures }) {
  const found = Object.entries(split), whole = found.reduce((sum, [, value]) => sum + value, 0);
  parts.splitCard.hidden = !(whole > 0);
  if (parts.splitCard.hidden) return;
  studio.say(parts.splitTitle, `A step: ${seconds(figures.step_s)}`);
  studio.fill(parts.split, [found, waited_s], () => [
    h('div.mem', { role: 'img', 'aria-label': found.map(([part, value]) => `${part} ${seconds(value)}`).join(', ') },
      found.map(([, value], at) => h(`i.part-${at}`, { style: { width: `${100 * value / whole}%` } }))),
    h('ul.keys', {},
      found.map(([part, value], at) => h('li', {}, h(`i.part-${at}`), `${part} `, h('b', {}, seconds(value))))),
    waited_s > 0 ? h('p.sm.dim', {}, 'of which waiting for other ranks ', h('b', {}, seconds(waited_s))) : null]);
}

// --- events and log -------------------------------------------------------------------------------------------------

function drawEvents({ is_fresh, rows }) {
  const list = parts.events;
  if (is_fresh) list.replaceChildren();
  for (const { time, mood, group, text, step } of rows) {
    const top = list.firstElementChild;
    if (group && top?.dataset.group === group) { // the samples of a step, or the progress in a state
      top.dataset.count = Number(top.dataset.count) + 1;
      studio.say(top.lastElementChild,
        group.startsWith('sample') ? `Step ${studio.count(step)}: ${top.dataset.count} samples` : text);
    } else {
      list.prepend(h(`li${mood && '.' + mood}`, { data: { group, count: 1 } },
        h('time', { title: new Date(time * 1e3).toLocaleString() }, studio.when(time)), h('span', {}, text)));
    }
  }
  while (list.children.length > 400) list.lastElementChild.remove();
  parts.noEvents.hidden = list.children.length > 0;
}

const wish = () =>
  ({ source: parts.source.value || 'torchrun', level: parts.level.dataset.level, file: current.log?.file || '',
    offset: current.log?.offset || 0 });

function drawLog(found) {
  const isSame = current.log && !found.is_fresh,
    atEnd = parts.log.scrollTop + parts.log.clientHeight >= parts.log.scrollHeight - 4;
  parts.source.hidden = parts.level.hidden = !found.sources.length;
  studio.fill(parts.source, found.sources, () => found.sources.map(source => h('option', { value: source }, source)));
  parts.source.value = found.source;
  const before = isSame ? current.log.text : '', text = (before + found.text).slice(-LOG_LENGTH);
  current.log = { file: found.file, offset: found.offset, text };
  const level = parts.level.dataset.level, shown = text + found.rest;
  const empty = found.problem
    || (!found.sources.length
      ? `There are no logs${current.data.head.state === 'created' ? ': the run was not started yet'
        : ' in the run folder'}.`
      : level === 'all' ? 'Nothing was written to this log. That is how it should be for a run without trouble.'
      : `No ${level} in this log.`);
  studio.say(parts.noLog, shown ? '' : empty);
  parts.noLog.hidden = Boolean(shown);
  parts.log.hidden = !shown;
  if (parts.log.textContent === shown) return;
  parts.log.textContent = shown;
  if (atEnd || !isSame) parts.log.scrollTop = parts.log.scrollHeight;
}

async function chooseLog(level = parts.level.dataset.level) {
  parts.level.dataset.level = level;
  for (const choice of parts.level.children) choice.setAttribute('aria-pressed',
    String(choice.dataset.choice === level));
  current.log = null;
  await refresh();
}

export async function showLog(source) {
  if ([...parts.source.options].some(option => option.value === source)) parts.source.value = source;
  await chooseLog('all');
  parts.logCard.scrollIntoView({ block: 'nearest' });
  parts.source.focus();
}

// --- notes ----------------------------------------------------------------------------------------------------------

function drawNotes({ text, version, problem }) {
  parts.notes.disabled = Boolean(problem);
  if (problem) return studio.say(parts.saved, problem);
  if (current.saving.isDirty) return; // what is typed stays; saving it says that there is a newer text
  const kept = unsaved.get(current.name);
  if (kept) {
    unsaved.delete(current.name);
    Object.assign(current.saving, { version: kept.version, isDirty: true });
    parts.notes.value = kept.text;
    return saveNotes();
  }
  current.saving.version = version;
  if (parts.notes.value !== text) parts.notes.value = text;
}

function typedNotes() {
  current.saving.isDirty = true;
  studio.say(parts.saved, '');
  clearTimeout(current.saving.timer);
  current.saving.timer = setTimeout(saveNotes, SAVED_AFTER_MS);
}

async function saveNotes() {
  if (!current.saving?.isDirty) return;
  const state = current.saving, run = current.name, text = parts.notes.value;
  clearTimeout(state.timer);
  let answer;
  try {
    answer = await studio.call('run_notes', { name: run, text, version: state.version });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (state === current.saving) {
      studio.say(parts.saved, `Not saved: ${error.message}`);
      state.timer = setTimeout(saveNotes, 5 * SAVED_AFTER_MS);
    }
    return;
  }
  if (state !== current.saving) return;
  if (!answer.is_saved) return drawConflict(answer.notes);
  state.version = answer.notes.version;
  state.isDirty = parts.notes.value !== text;
  if (state.isDirty) return typedNotes();
  studio.say(parts.saved, 'Saved.');
}

/** The notes were changed elsewhere: show both, and let the person choose. */
function drawConflict(other) {
  const take = isMine => () => {
    parts.conflict.replaceChildren();
    current.saving.version = other.version;
    if (isMine) return saveNotes();
    Object.assign(parts.notes, { value: other.text });
    current.saving.isDirty = false;
  };
  parts.conflict.replaceChildren(
    h('div.notice.warn', { role: 'alert' }, h('p', {}, 'The notes were changed elsewhere meanwhile. The text there:'),
      h('pre.written', { tabIndex: 0 }, other.text || '(empty)'),
      h('div.run-acts', {}, h('button.btn.s#notes-other', { type: 'button', onclick: take(false) }, 'Take that text'),
        h('button.btn.s#notes-mine', { type: 'button', onclick: take(true) }, 'Keep mine'))));
}

// --- built once -----------------------------------------------------------------------------------------------------

function build(root) {
  Object.assign(parts, {
    title: h('h1#run-title'), rename: h('button.btn.s#rename', { type: 'button', onclick: renameThis }, 'Rename'),
    state: h('span.tag#run-state'), about: h('span.dim'), id: h('span.key'),
    message: h('div#message'), problem: h('div#run-problem'), problems: h('div'),
    sentence: h('p.sentence#run-sentence'), pending: h('div.notice#run-pending', { role: 'status', hidden: true }),
    gone: h('div.card.empty#run-gone', { hidden: true }, h('h2', {}, 'This run is not there'),
      h('p', {}, 'It was moved or deleted (Runs lists deleted ones), or the address has a typing error.'),
      h('a.btn', { href: studio.link('runs') }, 'Runs')),
    error: h('section.notice.bad#run-error', { role: 'alert', hidden: true }),
    done: h('section.notice.ok#run-done', { 'aria-label': 'Finished', hidden: true }),
    tabs: h('nav.tabs', { 'aria-label': 'Parts of this run' },
      TABS.map(([key, title]) =>
        h(`a#tab-${key || 'overview'}`, {}, title, key === 'samples' ? [' ', h('span.count')] : null))),
  });
  parts.panels = Object.fromEntries(TABS.map(([key]) => [key, h(`div#run-${key || 'overview'}`, { hidden: true })]));
  parts.run = h('div#run', { hidden: true }, parts.problems, parts.done, parts.error, buildStatus(), parts.tabs,
    Object.values(parts.panels));
  const crumbs = h('div.head', {}, h('a', { href: studio.link('runs') }, 'Runs'), h('span.dim', {}, '/'), parts.title,
    parts.state, parts.about, parts.id, parts.rename);
  root.append(crumbs, parts.problem, parts.message, parts.gone, parts.run);
  parts.panels[''].append(h('div.run-main', {}, buildSamples(), buildCharts(), buildLog()),
    h('div.run-side', {}, buildMemory(), buildSplit(), buildEvents(), buildNotes()));
  for (const [key] of TABS) if (key) studio.runTabs[key]?.build(parts.panels[key]);
  addEventListener('pagehide', saveNotes);
}

function buildStatus() {
  Object.assign(parts, { step: h('b'), of: h('span'), figures: h('dl.figures'), actions: h('div.run-acts#run-actions'),
    fill: h('i'), marks: h('span.marks'), markNote: h('span'), time: h('span'), last: h('span') });
  parts.progress = h('div.run-progress', { role: 'progressbar', 'aria-label': 'Steps', 'aria-valuemin': '0' },
    parts.fill, parts.marks);
  return h('section.card.run-status', { 'aria-label': 'State' }, h('div.bign', {}, parts.step, ' ', parts.of),
    parts.figures, parts.actions,
    parts.progress, h('div.run-scale', {}, parts.time, parts.markNote, parts.last), parts.sentence, parts.pending);
}

function buildSamples() {
  Object.assign(parts, { when: h('span.dim'),
    steps: h('div.seg', { role: 'group', 'aria-label': 'Step of the samples' }), all: h('a.sm', { hidden: true }),
    strip: h('div.run-strip'), stripNote: h('p.sm.dim'), next: h('p.sm.dim'), asked: h('p.sm.dim') });
  parts.edit = h('button.btn.s#edit-prompts', { type: 'button', onclick: () => current.data.prompts && editPrompts() },
    'Edit prompts');
  parts.samplesCard = h('section.card#newest', { 'aria-label': 'Newest samples', hidden: true },
    h('div.ttl', {}, h('h2', {}, 'Newest samples'), parts.when, h('span.grow'), parts.steps, parts.all, parts.edit),
    parts.strip, parts.stripNote, parts.next, parts.asked);
  return parts.samplesCard;
}

function buildCharts() {
  const [large, ...small] = studio.facts.run.charts;
  parts.charts = h('div.run-charts', { hidden: true });
  parts.minis = h('div.minis');
  parts.noCharts = h('section.card.dim');
  addChart(large, parts.charts, false);
  parts.charts.append(parts.minis);
  for (const chart of small) addChart(chart, parts.minis, true);
  return [parts.charts, parts.noCharts];
}

function buildMemory() {
  Object.assign(parts, { ranks: h('ul#ranks'), imbalance: h('p.sm.dim'), gpus: h('ul.gpus'), noRanks: h('p.sm.dim'),
    slow: h('div#run-slow') });
  parts.memoryKeys = h('ul.keys', {}, h('li', {}, h('i.allocated'), 'allocated'),
    h('li', {}, h('i.reserved'), 'reserved'), h('li', {}, h('u'), 'peak'));
  parts.gpuPart = h('div#run-gpus', { hidden: true }, h('h3', {}, 'GPUs of this machine'), parts.gpus);
  return h('section.card', { 'aria-label': 'Memory of each rank' },
    h('div.ttl', {}, h('h2', {}, 'Memory of each rank'), h('span.dim', {}, 'GiB')),
    parts.slow, parts.ranks, parts.noRanks, parts.memoryKeys, parts.imbalance, parts.gpuPart);
}

function buildSplit() {
  Object.assign(parts, { splitTitle: h('h2'), split: h('div#split') });
  parts.splitCard = h('section.card', { 'aria-label': 'Time of a step', hidden: true },
    h('div.ttl', {}, parts.splitTitle, h('span.dim', {}, 'the parts add up')), parts.split);
  return parts.splitCard;
}

function buildEvents() {
  Object.assign(parts, { events: h('ul#events', { tabIndex: 0, 'aria-label': 'Events' }),
    noEvents: h('p.sm.dim', {}, 'Nothing has happened yet.') });
  const link = h('button.btn.ghost.s', { type: 'button', onclick: () => showLog(parts.source.value) }, 'Log');
  return h('section.card', { 'aria-label': 'Events' }, h('div.ttl', {}, h('h2', {}, 'Events'), h('span.grow'), link),
    parts.events, parts.noEvents);
}

function buildLog() {
  parts.source = h('select#log-of', { 'aria-label': 'Log of', onchange: () => chooseLog() });
  parts.level = h('div.seg#log-level', { role: 'group', 'aria-label': 'Lines of the log', data: { level: 'all' } },
    ['all', 'warnings', 'errors'].map(level =>
      h('button', { type: 'button', data: { choice: level }, 'aria-pressed': String(level === 'all'),
        onclick: () => chooseLog(level) }, level)));
  Object.assign(parts, { log: h('pre.code#log', { tabIndex: 0, 'aria-label': 'Log' }), noLog: h('p.sm.dim#no-log') });
  parts.logCard = h('section.card.run-log', { 'aria-label': 'Log' },
    h('div.ttl', {}, h('h2', {}, 'Log'), h('span.grow'), parts.source, parts.level), parts.log, parts.noLog);
  return parts.logCard;
}

function buildNotes() {
  Object.assign(parts, { saved: h('span.dim', { role: 'status' }), conflict: h('div'),
    notes: h('textarea#notes',
      { rows: 4, 'aria-label': 'Notes on this run', placeholder: 'Notes to remember about this run',
        oninput: typedNotes, onblur: saveNotes }) });
  return h('section.card', { 'aria-label': 'Notes' }, h('div.ttl', {}, h('h2', {}, 'Notes'), parts.saved), parts.notes,
    parts.conflict);
}

// --- address --------------------------------------------------------------------------------------------------------

async function show(place) {
  const wanted = TABS.some(([key]) => key && key === place[2]) ? place[2] : '';
  if (place[1] !== current.name) {
    await saveNotes();
    if (current.saving?.isDirty) {
      clearTimeout(current.saving.timer);
      unsaved.set(current.name, { text: parts.notes.value, version: current.saving.version });
      studio.toast(`The notes on ${current.name} are not saved yet. Open that run to save them.`, true);
    }
    current.name = place[1];
    studio.say(parts.title, current.name);
    forget();
  }
  current.isGone = false;
  current.tab = wanted;
  for (const [key, panel] of Object.entries(parts.panels)) panel.hidden = key !== current.tab;
  for (const [at, [key]] of TABS.entries()) {
    parts.tabs.children[at].classList.toggle('on', key === current.tab);
    if (key === current.tab) parts.tabs.children[at].setAttribute('aria-current', 'page');
    else parts.tabs.children[at].removeAttribute('aria-current');
  }
  await refresh();
  if (current.tab && !current.isGone) await studio.runTabs[current.tab]?.show(current.name);
}

async function tick() {
  await refresh(); // also of a run that is gone: it may have been moved for a while only
  if (current.tab && !current.isGone) await studio.runTabs[current.tab]?.tick(current.name);
}

studio.screens.run = { title: 'Run', build, show, tick };
