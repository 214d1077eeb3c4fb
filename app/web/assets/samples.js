// The tab Samples of a run: all steps on a scrubber, a row per prompt, and two steps of one prompt side by side.
// @ts-check
import * as studio from './core.js';
import { h, svg } from './core.js';
import { lightbox } from './lightbox.js';
import * as results from './results.js';
import { load, answerOf, isShown } from './samples-images.js';
import { drawPair, setView } from './samples-pair.js';
import { current, parts, answers, last, SETTLED_MS, stepWord, cards, keyOf } from './samples-state.js';

const PLAY_EVERY_MS = 300, TICK_EVERY_PX = 5;
const address = (...path) => ['', 'runs', current.name, ...path].map(encodeURIComponent).join('/');

// --- what there is ------------------------------------------------------------------------------------------------

async function refresh() {
  const asked = current.name;
  const found = await studio.fetched('samples_list', { name: asked, known: current.data ? current.data.version : '' },
    () => asked === current.name, complain);
  if (found) take(found);
}

function complain(text) {
  studio.fill(parts.message, text, () => (text ? studio.alert(text) : []));
}

/** Take a new list. The step that was chosen stays, and whoever looked at the last one sees the new last one. */
function take(found) {
  const former = { chosen: current.steps[current.chosen], left: current.steps[current.left],
    wasLast: !current.data || current.chosen === last() };
  current.data = found;
  current.data.rows.forEach(row => { row.has = new Set(row.steps); row.gone = new Set(row.missing); });
  current.steps = [...new Set(current.data.rows.flatMap(row => row.steps))].sort((a, b) => a - b);
  current.missing = new Set(current.data.rows.flatMap(row => row.missing));
  current.chosen = former.wasLast ? last() : nearest(former.chosen);
  current.left = former.left === undefined ? 0 : nearest(former.left);
  current.pairRow = Math.min(current.pairRow, current.data.rows.length - 1);
  answers.clear(); // files may have been drawn again
  draw();
}

function nearest(step) {
  const after = current.steps.findIndex(other => other >= step);
  return after < 0 ? last() : after;
}

function choose(index) {
  if (!current.steps.length) return;
  current.chosen = Math.max(0, Math.min(last(), index));
  current.movedAt = performance.now();
  draw();
  setTimeout(load, SETTLED_MS + 10);
}

// --- drawing --------------------------------------------------------------------------------------------------------

export function draw() {
  const isEmpty = !current.steps.length;
  parts.empty.hidden = !isEmpty;
  for (const part of [parts.head, parts.scrub, parts.help]) part.hidden = isEmpty;
  parts.rows.hidden = isEmpty || current.inPair;
  parts.pair.hidden = isEmpty || !current.inPair;
  if (isEmpty) return drawEmpty();
  drawHead();
  drawScrub();
  current.inPair ? drawPair() : drawRows();
  load();
}

function drawEmpty() {
  const running =
    'The first samples are generated at the next step of sample.every. The button Sample generates some now.';
  const ended =
    'Set “sample.prompts” and “sample.every” in the form of a new run, and it generates samples while it trains.';
  studio.fill(parts.empty, current.data.is_running,
    () => [h('h2', {}, 'No samples yet'), h('p', {}, current.data.is_running ? running : ended)]);
}

function drawHead() {
  const counts = { samples: 0, missing: 0 };
  for (const row of current.data.rows) { counts.samples += row.steps.length; counts.missing += row.missing.length; }
  studio.say(parts.summary,
    `${studio.counted(current.steps.length, 'step')} × ${studio.counted(current.data.rows.length,
      'prompt')}, ${studio.counted(counts.samples, 'sample')}`);
  parts.missing.hidden = !counts.missing;
  studio.say(parts.missing, `${studio.counted(counts.missing, 'file')} missing`);
  parts.film.hidden = !current.data.rows.some(row => row.kind === 'image');
  parts.all.href = address('samples.zip');
  studio.say(parts.size, studio.size(current.data.size));
  for (const button of parts.views.children) button.setAttribute('aria-pressed',
    String((button.dataset.view === 'pair') === current.inPair));
  studio.say(parts.settings, current.data.settings);
}

function drawScrub() {
  const step = current.steps[current.chosen];
  studio.say(parts.number, studio.count(step));
  studio.say(parts.of,
    `of ${current.data.num_steps ? studio.counted(current.data.num_steps, 'step') : current.data.length}`);
  setRange(parts.range, current.chosen, last(),
    `${stepWord(step)}${current.missing.has(step) ? ', a file is missing' : ''}`);
  const focused = studio.focused();
  parts.before.disabled = current.chosen === 0;
  parts.after.disabled = current.chosen === last();
  if ([parts.before, parts.after].includes(focused) && focused.disabled) parts.range.focus();
  studio.fill(parts.ticks, [current.steps, [...current.missing], parts.ticks.clientWidth], ticks);
  parts.ticks.classList.toggle('gone', current.missing.has(step));
  parts.ticks.style.setProperty('--at', last() ? current.chosen / last() : 0);
  studio.say(parts.play, current.timer ? '❚❚' : '▶');
  parts.play.setAttribute('aria-label', current.timer ? 'Pause' : 'Play');
}

export function setRange(range, value, max, text) {
  range.max = max;
  range.value = value;
  range.setAttribute('aria-valuetext', text);
  range.style.setProperty('--p', `${max ? 100 * value / max : 0}%`);
}

function ticks() {
  const width = 1000, x = at => Number((last() ? at / last() * width : 0).toFixed(1)),
    every = Math.ceil(current.steps.length * TICK_EVERY_PX / (parts.ticks.clientWidth || 500));
  const path = indices => [...new Set(indices.map(x))].map(at => `M${at} 0V10`).join('');
  const all = current.steps.map((_, at) => at), some = all.filter(at => at % every === 0 || at === last());
  const labels = [...new Set([0, 1, 2, 3, 4].map(part => Math.round(part * last() / 4)))];
  return [
    svg('svg', { viewBox: `0 0 ${width} 10`, preserveAspectRatio: 'none', 'aria-hidden': 'true' },
      svg('path', { d: path(some) }),
      svg('path', { d: path(all.filter(at => current.missing.has(current.steps[at]))), class: 'gone' })),
    h('i.now'), labels.map(at => h('span', { style: { left: `${x(at) / 10}%` } }, studio.count(current.steps[at])))];
}

export const rowKey = row => JSON.stringify([row.index, row.prompt]);

export function drawRows() {
  const keys = current.data.rows.map(rowKey);
  if (studio.fill(parts.rows, keys, () => current.data.rows.map(row => cardOf(row).element)))
    for (const key of cards.keys()) if (!keys.includes(key)) cards.delete(key);
  for (const row of current.data.rows) drawRow(cards.get(rowKey(row)), row);
}

function cardOf(row) {
  const key = rowKey(row);
  if (cards.has(key)) return cards.get(key);
  const card = { isVisible: false, figures: new Map(), note: h('p.sm.dim'), strip: h('div.strip'),
    save: h('a.btn.s', { hidden: true, download: '' }) };
  card.element = h('section.card.sample-row', { data: { key }, 'aria-label': `Samples of ${row.prompt}` },
    h('div.about', {}, h('h3', {}, row.prompt || '(no prompt)'), card.note, studio.references(row.references),
      card.save), card.strip);
  cards.set(key, card);
  parts.watcher.observe(card.element);
  return card;
}

/** Positions in `steps` that a row shows: the first, and those around the chosen one. */
export function columns(row) {
  const most = row.kind === 'text' ? (innerWidth < 1000 ? 1 : 3) : innerWidth < 700 ? 3 : innerWidth < 1180 ? 5 : 7;
  if (most === 1) return [current.chosen];
  if (current.steps.length <= most) return current.steps.map((_, at) => at);
  const from = Math.max(1, Math.min(current.chosen - Math.ceil((most - 1) / 2), last() - most + 2));
  return [0, ...Array.from({ length: most - 1 }, (_, at) => from + at)];
}

function drawRow(card, row) {
  const shown = columns(row), focused = studio.focused();
  studio.say(card.note, noteOf(row));
  card.strip.style.setProperty('--columns', String(shown.length));
  card.strip.classList.toggle('texts', row.kind === 'text');
  const figures = shown.map(at => figureOf(card, row, at));
  if (studio.fill(card.strip, shown.map(at => current.steps[at]), () => figures.map(figure => figure.element))
    && card.strip.contains(focused)) focused.focus();
  for (const [step] of card.figures) if (!shown.some(at => current.steps[at] === step)) card.figures.delete(step);
  setSave(card.save, row);
}

function noteOf(row) {
  const [first, end] = [row.steps[0], row.steps.at(-1)], notes = [`prompt ${row.index + 1}, seed ${current.data.seed}`];
  if (first > current.steps[0]) notes.push(`since step ${studio.count(first)}`);
  if (end < current.steps[last()]) notes.push(`until step ${studio.count(end)}`);
  return notes.join(' · ');
}

export function setSave(link, row) {
  const answer = answerOf(row, current.steps[current.chosen]);
  link.hidden = !answer?.file;
  if (!answer?.file) return;
  link.href = address('samples', answer.file);
  studio.say(link, `Download ${stepWord(current.steps[current.chosen])}`);
}

function figureOf(card, row, at) {
  const step = current.steps[at];
  if (!card.figures.has(step)) {
    const place = h('div.sample');
    const caption = h('button.pick',
      { type: 'button', title: `Go to ${stepWord(step)}`, onclick: () => choose(current.steps.indexOf(step)) },
      step ? studio.count(step) : 'before');
    card.figures.set(step, { place, caption,
      element: h('figure', { data: { step } }, place, h('figcaption', {}, caption)) });
  }
  const figure = card.figures.get(step);
  figure.element.classList.toggle('now', at === current.chosen);
  figure.caption.setAttribute('aria-pressed', String(at === current.chosen));
  fillSample(figure.place, row, step, answers.get(keyOf(row, step)));
  return figure;
}

/** Show a sample, or why there is none. An image that is shown stays until it is known that there is another one. */
export function fillSample(place, row, step, answer) {
  const mark = (text, title) => h('div.missing', { title }, text);
  if (!row.has.has(step)) studio.fill(place, 'none',
    () => h('div.missing.none', { title: 'This prompt was not sampled at this step' }, 'not sampled'));
  else if (row.gone.has(step)) studio.fill(place, 'gone',
    () => mark('file missing', `The file of ${stepWord(step)} is not in the run folder`));
  else if (!answer) place.dataset.key || studio.fill(place, '', () => h('div.image.waiting'));
  else studio.fill(place, answer, () => {
    if (answer.problem) return mark('cannot be shown', answer.problem);
    const element = studio.sample(answer, `${row.prompt}, ${stepWord(step)}`);
    if (row.kind !== 'text')
      return h('button.open', { type: 'button', title: 'Open in full size', onclick: () => open(row, step) }, element);
    element.tabIndex = 0;
    element.setAttribute('aria-label', `Sample of ${stepWord(step)}`);
    return element;
  });
}

async function open(row, step) {
  const shown = columns(row).map(at => current.steps[at]).filter(other => row.has.has(other) && !row.gone.has(other));
  const cells = shown.map(other => ({ index: row.index, prompt: row.prompt, step: other }));
  const found = await studio.call('samples_images', { name: current.name, cells, is_full: true });
  const items = cells.map(
    (cell, at) =>
      ({ src: found[at].src, played: studio.played(current.name, found[at]), title: `Step ${studio.count(cell.step)}`,
        step: cell.step,
        text: `${row.prompt} · step ${studio.count(cell.step)} · seed ${current.data.seed}, prompt ${row.index + 1}` }))
        .filter(item => item.src || item.played);
  lightbox(items, items.findIndex(item => item.step === step));
}

// --- playing and keys -----------------------------------------------------------------------------------------------

function stop() {
  if (!current.timer) return;
  clearInterval(current.timer);
  current.timer = 0;
  if (current.steps.length) drawScrub();
}

function play() {
  if (current.timer || !current.steps.length) return stop();
  if (current.chosen === last()) choose(0);
  current.timer = setInterval(() => {
    if (current.chosen === last() || !isShown() || document.hidden) stop();
    else if (isLoaded()) choose(current.chosen + 1);
  }, PLAY_EVERY_MS);
  drawScrub();
}

/** Whether all samples of the chosen step that can be seen are there, or never will be. */
function isLoaded() {
  const step = current.steps[current.chosen],
    rows = current.inPair ? [current.data.rows[current.pairRow]]
      : current.data.rows.filter(row => cards.get(rowKey(row)).isVisible);
  return rows.every(row => !row.has.has(step) || row.gone.has(step) || answerOf(row, step));
}

function nextMissing() {
  const after = current.steps.findIndex((step, at) => at > current.chosen && current.missing.has(step));
  stop();
  choose(after < 0 ? current.steps.findIndex(step => current.missing.has(step)) : after);
}

function registerKeys() {
  const isElsewhere = event => !current.steps.length || (event.target.type === 'range' && event.target !== parts.range);
  const move = to => event => {
    if (isElsewhere(event)) return false;
    stop();
    choose(to(event.shiftKey ? 10 : 1));
    return true;
  };
  const add = (keys, text, action) => studio.shortcut(keys, text, action, 'run samples');
  add('ArrowLeft', 'Step before; with Shift ten steps', move(by => current.chosen - by));
  add('ArrowRight', 'Step after; with Shift ten steps', move(by => current.chosen + by));
  add('Home', 'First step', move(() => 0));
  add('End', 'Last step', move(() => last()));
  add('Space', 'Play or pause', event => !event.target.closest('button, a, summary') && (play(), true));
  add('p', 'Two steps of one prompt, or all prompts', () => setView(!current.inPair));
  add('d', 'Download the sample of the pair', () => current.inPair && !parts.save.hidden && (parts.save.click(), true));
}

// --- building -------------------------------------------------------------------------------------------------------

function buildHead() {
  const view = (key, text) =>
    h('button', { type: 'button', data: { view: key }, onclick: () => setView(key === 'pair') }, text);
  parts.summary = h('span.dim#samples-summary');
  parts.missing = h('button.tag.bad#samples-missing',
    { type: 'button', title: 'Go to the next step with a missing file', onclick: nextMissing });
  parts.views = h('span.seg#samples-view', { role: 'group', 'aria-label': 'View' }, view('rows', 'Rows'),
    view('pair', 'Pair'));
  parts.size = h('span.dim.sm');
  parts.film = h('button.btn#samples-film',
    { type: 'button', hidden: true, title: 'A loop and a sheet of the samples, to be shown to others',
      onclick: () => results.film(current.name) }, 'Film');
  parts.all = h('a.btn#samples-all', { download: '' }, 'Download all ', parts.size);
  return h('div.head.samples-head', {}, h('h2.sr', {}, 'Samples'), parts.summary, parts.missing, h('span.grow'),
    parts.views, parts.film, parts.all);
}

function buildScrub() {
  const button = (id, text, label, action) =>
    h(`button.btn#samples-${id}`, { type: 'button', 'aria-label': label, onclick: action }, text);
  const to = by => () => { stop(); choose(current.chosen + by); };
  Object.assign(parts, { number: h('span'), of: h('small'), ticks: h('div.ticks', { 'aria-hidden': 'true' }),
    before: button('before', '←', 'Step before', to(-1)), play: button('play', '▶', 'Play', play),
    after: button('after', '→', 'Step after', to(1)),
    range: h('input#samples-step', { type: 'range', min: 0, 'aria-label': 'Step of the samples', oninput: event => {
      const to = Number(event.target.value);
      stop();
      choose(to);
    } }) });
  return h('section.card.scrub#samples-scrub', { 'aria-label': 'Step' }, h('div.bign', {}, parts.number, parts.of),
    h('div.tk', {}, parts.ticks, parts.range), h('div.nav2', {}, parts.before, parts.play, parts.after));
}

function buildPair() {
  Object.assign(parts, { leftSide: h('div.a'), rightSide: h('div.b'), leftWord: h('em.l'), rightWord: h('em.r'),
    facts: h('p.sm'), references: h('div'), prompts: h('div.prompts'), leftLabel: h('span.l'),
    save: h('a.btn#samples-save', { download: '', hidden: true }),
    share: h('input#samples-share',
      { type: 'range', min: 0, max: 100, value: 50, 'aria-label': 'Share of the left sample', oninput: event => {
        parts.slide.style.setProperty('--x', `${event.target.value}%`); drawPair(); } }),
    leftRange: h('input#samples-left',
      { type: 'range', min: 0, 'aria-label': 'Step of the left side', oninput: event => {
        current.left = Number(event.target.value);
        current.movedAt = performance.now(); drawPair(); setTimeout(load, SETTLED_MS + 10); load(); } }) });
  parts.slide = h('div.slide', { style: { '--x': '50%' } }, parts.leftSide, parts.rightSide, parts.share, h('u'),
    parts.leftWord, parts.rightWord);
  return h('section.card.pair#samples-pair', { 'aria-label': 'Two steps of one prompt' },
    h('div', {}, parts.slide, parts.facts, parts.references),
    h('div.choice', {}, h('label', {}, parts.leftLabel, parts.leftRange), parts.prompts, parts.save));
}

function build(root) {
  parts.root = root;
  parts.message = h('div#samples-message');
  parts.empty = h('div.card.empty#samples-empty', { hidden: true });
  parts.rows = h('div#samples-rows');
  parts.settings = h('p#samples-settings');
  parts.watcher = new IntersectionObserver(entries => {
    for (const entry of entries) {
      const card = cards.get(/** @type {HTMLElement} */ (entry.target).dataset.key);
      if (card) card.isVisible = entry.isIntersecting;
    }
    load();
  }, { rootMargin: '200px' });
  const key = (...names) => names.map(one => h('kbd', {}, one));
  parts.help = h('div.sm.dim.keyline', {},
    h('p', {}, key('←', '→'), ' one step · ', key('Shift'), ' with them ten · ', key('Home', 'End'), ' first, last · ',
      key('Space'), ' play · ', key('P'), ' pair · ', key('D'), ' download in the pair'), parts.settings);
  Object.assign(parts, { head: buildHead(), scrub: buildScrub(), pair: buildPair() });
  for (const part of [parts.head, parts.scrub, parts.pair, parts.help]) part.hidden = true;
  root.append(parts.message, parts.head, parts.scrub, parts.empty, parts.rows, parts.pair, parts.help);
  addEventListener('resize', () => current.data && isShown() && draw());
  registerKeys();
}

async function show(run) {
  if (run !== current.name) {
    stop();
    current.name = run;
    current.data = null;
    [current.steps, current.missing, current.chosen, current.left, current.pairRow] = [[], new Set(), 0, 0, 0];
    answers.clear();
    cards.clear();
    delete parts.rows.dataset.key;
    parts.rows.replaceChildren();
    for (const part of [parts.head, parts.scrub, parts.pair, parts.help, parts.empty]) part.hidden = true;
  }
  await refresh();
  if (current.data && current.steps.length) draw();
}

studio.runTabs.samples = { build, show, tick: async () => { await refresh(); load(); } };
