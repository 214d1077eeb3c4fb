// The tab Samples of a run: all steps on a scrubber, a row per prompt, and two steps of one prompt side by side.
// @ts-check
import * as studio from './core.js';
import { h, svg } from './core.js';
import { lightbox } from './lightbox.js';

const PER_REQUEST = 4, PLAY_EVERY_MS = 300, SETTLED_MS = 250, TICK_EVERY_PX = 5, MOST_KEPT = 2000;
const parts = {}, cards = new Map(), answers = new Map();
let name = '', data = /** @type {any} */ (null), steps = [], missing = new Set(), chosen = 0, left = 0, inPair = false,
  pairRow = 0;
let timer = 0, movedAt = 0, isLoading = false;

const last = () => steps.length - 1;
const stepWord = step => step ? `step ${studio.count(step)}` : 'before training';
const keyOf = (row, step, isFull) => JSON.stringify([row.index, row.prompt, step, Boolean(isFull)]);
const address = (...path) => ['', 'runs', name, ...path].map(encodeURIComponent).join('/');

// --- what there is ------------------------------------------------------------------------------------------------

async function refresh() {
  const asked = name;
  const found = await studio.fetched('samples_list', { name: asked, known: data ? data.version : '' },
    () => asked === name, complain);
  if (found) take(found);
}

function complain(text) {
  studio.fill(parts.message, text, () => (text ? studio.alert(text) : []));
}

/** Take a new list. The step that was chosen stays, and whoever looked at the last one sees the new last one. */
function take(found) {
  const former = { chosen: steps[chosen], left: steps[left], wasLast: !data || chosen === last() };
  data = found;
  data.rows.forEach(row => { row.has = new Set(row.steps); row.gone = new Set(row.missing); });
  steps = [...new Set(data.rows.flatMap(row => row.steps))].sort((a, b) => a - b);
  missing = new Set(data.rows.flatMap(row => row.missing));
  chosen = former.wasLast ? last() : nearest(former.chosen);
  left = former.left === undefined ? 0 : nearest(former.left);
  pairRow = Math.min(pairRow, data.rows.length - 1);
  answers.clear(); // files may have been drawn again
  draw();
}

function nearest(step) {
  const after = steps.findIndex(other => other >= step);
  return after < 0 ? last() : after;
}

function choose(index) {
  if (!steps.length) return;
  chosen = Math.max(0, Math.min(last(), index));
  movedAt = performance.now();
  draw();
  setTimeout(load, SETTLED_MS + 10);
}

// --- images: a few at a time, those next to the chosen step first ----------------------------------------------------

async function load() {
  if (isLoading || !data) return;
  isLoading = true;
  try {
    for (let batch = wanted(); batch.length; batch = wanted()) {
      const asked = name, version = data.version,
        cells = batch.map(({ row, step }) => ({ index: row.index, prompt: row.prompt, step }));
      const found = await studio.call('samples_images', { name: asked, cells, is_full: batch[0].isFull });
      if (asked !== name || version !== data?.version) continue;
      if (answers.size > MOST_KEPT) answers.clear();
      batch.forEach(({ row, step, isFull }, at) => answers.set(keyOf(row, step, isFull), found[at]));
      inPair ? drawPair() : drawRows();
    }
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error; // the next tick asks again
  } finally {
    isLoading = false;
  }
}

/** The next few samples to ask for. */
function wanted() {
  if (!data || !isShown()) return [];
  const all = (inPair ? wantedByPair() : wantedByRows()).filter(({ row, step, isFull }) =>
    row.has.has(step) && !row.gone.has(step) && !(isFull && row.kind === 'text')
      && !answers.has(keyOf(row, step, isFull)));
  return all.filter(cell => cell.isFull === all[0].isFull).slice(0, PER_REQUEST);
}

function wantedByRows() {
  const rows = data.rows.filter(row => cards.get(rowKey(row))?.isVisible);
  const cells = rows.flatMap(row => columns(row)
    .map(at => ({ row, step: steps[at], isFull: false, distance: Math.abs(at - chosen) })));
  return cells.sort((a, b) => a.distance - b.distance);
}

function wantedByPair() {
  const row = data.rows[pairRow], sides = isFull => [steps[chosen], steps[left]].map(step => ({ row, step, isFull }));
  const isSettled = performance.now() - movedAt > SETTLED_MS;
  return [...sides(false), ...(isSettled ? sides(true) : []),
    ...data.rows.map(other => ({ row: other, step: steps[chosen], isFull: false }))];
}

const isShown = () => parts.root.offsetParent !== null;
const answerOf = (row, step) => answers.get(keyOf(row, step, true)) || answers.get(keyOf(row, step, false));

// --- drawing --------------------------------------------------------------------------------------------------------

function draw() {
  const isEmpty = !steps.length;
  parts.empty.hidden = !isEmpty;
  for (const part of [parts.head, parts.scrub, parts.help]) part.hidden = isEmpty;
  parts.rows.hidden = isEmpty || inPair;
  parts.pair.hidden = isEmpty || !inPair;
  if (isEmpty) return drawEmpty();
  drawHead();
  drawScrub();
  inPair ? drawPair() : drawRows();
  load();
}

function drawEmpty() {
  const running =
    'The first samples are generated at the next step of sample.every. The button Sample generates some now.';
  const ended =
    'Set “sample.prompts” and “sample.every” in the form of a new run, and it generates samples while it trains.';
  studio.fill(parts.empty, data.is_running,
    () => [h('h2', {}, 'No samples yet'), h('p', {}, data.is_running ? running : ended)]);
}

function drawHead() {
  const counts = { samples: 0, missing: 0 };
  for (const row of data.rows) { counts.samples += row.steps.length; counts.missing += row.missing.length; }
  studio.say(parts.summary,
    `${studio.counted(steps.length, 'step')} × ${studio.counted(data.rows.length,
      'prompt')}, ${studio.counted(counts.samples, 'sample')}`);
  parts.missing.hidden = !counts.missing;
  studio.say(parts.missing, `${studio.counted(counts.missing, 'file')} missing`);
  parts.all.href = address('samples.zip');
  studio.say(parts.size, studio.size(data.size));
  for (const button of parts.views.children) button.setAttribute('aria-pressed',
    String((button.dataset.view === 'pair') === inPair));
  studio.say(parts.settings, data.settings);
}

function drawScrub() {
  const step = steps[chosen];
  studio.say(parts.number, studio.count(step));
  studio.say(parts.of, `of ${data.num_steps ? studio.counted(data.num_steps, 'step') : data.length}`);
  setRange(parts.range, chosen, last(), `${stepWord(step)}${missing.has(step) ? ', a file is missing' : ''}`);
  const focused = studio.focused();
  parts.before.disabled = chosen === 0;
  parts.after.disabled = chosen === last();
  if ([parts.before, parts.after].includes(focused) && focused.disabled) parts.range.focus();
  studio.fill(parts.ticks, [steps, [...missing], parts.ticks.clientWidth], ticks);
  parts.ticks.classList.toggle('gone', missing.has(step));
  parts.ticks.style.setProperty('--at', last() ? chosen / last() : 0);
  studio.say(parts.play, timer ? '❚❚' : '▶');
  parts.play.setAttribute('aria-label', timer ? 'Pause' : 'Play');
}

function setRange(range, value, max, text) {
  range.max = max;
  range.value = value;
  range.setAttribute('aria-valuetext', text);
  range.style.setProperty('--p', `${max ? 100 * value / max : 0}%`);
}

function ticks() {
  const width = 1000, x = at => Number((last() ? at / last() * width : 0).toFixed(1)),
    every = Math.ceil(steps.length * TICK_EVERY_PX / (parts.ticks.clientWidth || 500));
  const path = indices => [...new Set(indices.map(x))].map(at => `M${at} 0V10`).join('');
  const all = steps.map((_, at) => at), some = all.filter(at => at % every === 0 || at === last());
  const labels = [...new Set([0, 1, 2, 3, 4].map(part => Math.round(part * last() / 4)))];
  return [
    svg('svg', { viewBox: `0 0 ${width} 10`, preserveAspectRatio: 'none', 'aria-hidden': 'true' },
      svg('path', { d: path(some) }),
      svg('path', { d: path(all.filter(at => missing.has(steps[at]))), class: 'gone' })),
    h('i.now'), labels.map(at => h('span', { style: { left: `${x(at) / 10}%` } }, studio.count(steps[at])))];
}

const rowKey = row => JSON.stringify([row.index, row.prompt]);

function drawRows() {
  const keys = data.rows.map(rowKey);
  if (studio.fill(parts.rows, keys, () => data.rows.map(row => cardOf(row).element)))
    for (const key of cards.keys()) if (!keys.includes(key)) cards.delete(key);
  for (const row of data.rows) drawRow(cards.get(rowKey(row)), row);
}

function cardOf(row) {
  const key = rowKey(row);
  if (cards.has(key)) return cards.get(key);
  const card = { isVisible: false, figures: new Map(), note: h('p.sm.dim'), strip: h('div.strip'),
    save: h('a.btn.s', { hidden: true, download: '' }) };
  card.element = h('section.card.sample-row', { data: { key }, 'aria-label': `Samples of ${row.prompt}` },
    h('div.about', {}, h('h3', {}, row.prompt || '(no prompt)'), card.note, card.save), card.strip);
  cards.set(key, card);
  parts.watcher.observe(card.element);
  return card;
}

/** Positions in `steps` that a row shows: the first, and those around the chosen one. */
function columns(row) {
  const most = row.kind === 'text' ? (innerWidth < 1000 ? 1 : 3) : innerWidth < 700 ? 3 : innerWidth < 1180 ? 5 : 7;
  if (most === 1) return [chosen];
  if (steps.length <= most) return steps.map((_, at) => at);
  const from = Math.max(1, Math.min(chosen - Math.ceil((most - 1) / 2), last() - most + 2));
  return [0, ...Array.from({ length: most - 1 }, (_, at) => from + at)];
}

function drawRow(card, row) {
  const shown = columns(row), focused = studio.focused();
  studio.say(card.note, noteOf(row));
  card.strip.style.setProperty('--columns', String(shown.length));
  card.strip.classList.toggle('texts', row.kind === 'text');
  const figures = shown.map(at => figureOf(card, row, at));
  if (studio.fill(card.strip, shown.map(at => steps[at]), () => figures.map(figure => figure.element))
    && card.strip.contains(focused)) focused.focus();
  for (const [step] of card.figures) if (!shown.some(at => steps[at] === step)) card.figures.delete(step);
  setSave(card.save, row);
}

function noteOf(row) {
  const [first, end] = [row.steps[0], row.steps.at(-1)], notes = [`prompt ${row.index + 1}, seed ${data.seed}`];
  if (first > steps[0]) notes.push(`since step ${studio.count(first)}`);
  if (end < steps[last()]) notes.push(`until step ${studio.count(end)}`);
  return notes.join(' · ');
}

function setSave(link, row) {
  const answer = answerOf(row, steps[chosen]);
  link.hidden = !answer?.file;
  if (!answer?.file) return;
  link.href = address('samples', answer.file);
  studio.say(link, `Download ${stepWord(steps[chosen])}`);
}

function figureOf(card, row, at) {
  const step = steps[at];
  if (!card.figures.has(step)) {
    const place = h('div.sample');
    const caption = h('button.pick',
      { type: 'button', title: `Go to ${stepWord(step)}`, onclick: () => choose(steps.indexOf(step)) },
      step ? studio.count(step) : 'before');
    card.figures.set(step, { place, caption,
      element: h('figure', { data: { step } }, place, h('figcaption', {}, caption)) });
  }
  const figure = card.figures.get(step);
  figure.element.classList.toggle('now', at === chosen);
  figure.caption.setAttribute('aria-pressed', String(at === chosen));
  fillSample(figure.place, row, step, answers.get(keyOf(row, step)));
  return figure;
}

/** Show a sample, or why there is none. An image that is shown stays until it is known that there is another one. */
function fillSample(place, row, step, answer) {
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
  const shown = columns(row).map(at => steps[at]).filter(other => row.has.has(other) && !row.gone.has(other));
  const cells = shown.map(other => ({ index: row.index, prompt: row.prompt, step: other }));
  const found = await studio.call('samples_images', { name, cells, is_full: true });
  const items = cells.map(
    (cell, at) =>
      ({ src: found[at].src, played: studio.played(name, found[at]), title: `Step ${studio.count(cell.step)}`,
        step: cell.step,
        text: `${row.prompt} · step ${studio.count(cell.step)} · seed ${data.seed}, prompt ${row.index + 1}` }))
        .filter(item => item.src || item.played);
  lightbox(items, items.findIndex(item => item.step === step));
}

// --- two steps of one prompt ---------------------------------------------------------------------------------------

function drawPair() {
  const row = data.rows[pairRow], [from, to] = [steps[left], steps[chosen]];
  parts.slide.classList.toggle('texts', row.kind === 'text');
  side(parts.leftSide, row, from);
  side(parts.rightSide, row, to);
  studio.say(parts.leftWord, stepWord(from));
  studio.say(parts.rightWord, stepWord(to));
  parts.share.setAttribute('aria-valuetext', `${parts.share.value} % ${stepWord(from)}, the rest ${stepWord(to)}`);
  studio.say(parts.facts,
    `${row.prompt} · ${stepWord(from)} and ${stepWord(to)} · seed ${data.seed}, prompt ${row.index + 1}`);
  setRange(parts.leftRange, left, last(), stepWord(from));
  studio.say(parts.leftLabel, `Left side: ${stepWord(from)}`);
  studio.fill(parts.prompts, data.rows.map(rowKey), () => data.rows.map((other, at) => h('button', {
    type: 'button', onclick: () => {
      pairRow = at;
      fitPair();
      draw();
    } }, h('span.small'), h('span.words', { title: other.prompt }, other.prompt || '(no prompt)'))));
  [...parts.prompts.children].forEach((button, at) => {
    button.setAttribute('aria-pressed', String(at === pairRow));
    const answer = answers.get(keyOf(data.rows[at], to));
    if (answer?.src) studio.fill(button.firstChild, answer.src, () => h('img.image', { src: answer.src, alt: '' }));
  });
  setSave(parts.save, row);
}

/**
 * Show one side of the pair. The image element stays, so that the former image is shown until the next one is there.
 */
function side(place, row, step) {
  const answer = answerOf(row, step), img = place.querySelector('img');
  if (row.kind === 'text' || !answer?.src || !row.has.has(step) || row.gone.has(step)) {
    if (answer || !row.has.has(step) || row.gone.has(step)) fillSample(place, row, step, answer);
  } else if (!img) studio.fill(place, ['image', rowKey(row)], () => imageOf(row, step, answer));
  else if (img.getAttribute('src') !== answer.src) Object.assign(img,
    { src: answer.src, alt: `${row.prompt}, ${stepWord(step)}` });
}

const imageOf = (row, step, answer) =>
  h('img', { src: answer.src, alt: `${row.prompt}, ${stepWord(step)}`, draggable: false });

/** A prompt that was not drawn at the two steps is shown at its own first and last one. */
function fitPair() {
  const row = data.rows[pairRow];
  if (!row.has.has(steps[left])) left = steps.indexOf(row.steps[0]);
  if (!row.has.has(steps[chosen])) chosen = steps.indexOf(row.steps.at(-1));
}

function setView(isPair) {
  inPair = isPair;
  movedAt = performance.now();
  if (!steps.length) return;
  if (inPair) fitPair();
  draw();
  setTimeout(load, SETTLED_MS + 10);
}

// --- playing and keys -----------------------------------------------------------------------------------------------

function stop() {
  if (!timer) return;
  clearInterval(timer);
  timer = 0;
  if (steps.length) drawScrub();
}

function play() {
  if (timer || !steps.length) return stop();
  if (chosen === last()) choose(0);
  timer = setInterval(() => {
    if (chosen === last() || !isShown() || document.hidden) stop();
    else if (isLoaded()) choose(chosen + 1);
  }, PLAY_EVERY_MS);
  drawScrub();
}

/** Whether all samples of the chosen step that can be seen are there, or never will be. */
function isLoaded() {
  const step = steps[chosen],
    rows = inPair ? [data.rows[pairRow]] : data.rows.filter(row => cards.get(rowKey(row)).isVisible);
  return rows.every(row => !row.has.has(step) || row.gone.has(step) || answerOf(row, step));
}

function nextMissing() {
  const after = steps.findIndex((step, at) => at > chosen && missing.has(step));
  stop();
  choose(after < 0 ? steps.findIndex(step => missing.has(step)) : after);
}

function registerKeys() {
  const isElsewhere = event => !steps.length || (event.target.type === 'range' && event.target !== parts.range);
  const move = to => event => {
    if (isElsewhere(event)) return false;
    stop();
    choose(to(event.shiftKey ? 10 : 1));
    return true;
  };
  const add = (keys, text, action) => studio.shortcut(keys, text, action, 'run samples');
  add('ArrowLeft', 'Step before; with Shift ten steps', move(by => chosen - by));
  add('ArrowRight', 'Step after; with Shift ten steps', move(by => chosen + by));
  add('Home', 'First step', move(() => 0));
  add('End', 'Last step', move(() => last()));
  add('Space', 'Play or pause', event => !event.target.closest('button, a, summary') && (play(), true));
  add('p', 'Two steps of one prompt, or all prompts', () => setView(!inPair));
  add('d', 'Download the sample of the pair', () => inPair && !parts.save.hidden && (parts.save.click(), true));
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
  parts.all = h('a.btn#samples-all', { download: '' }, 'Download all ', parts.size);
  return h('div.head.samples-head', {}, h('h2.sr', {}, 'Samples'), parts.summary, parts.missing, h('span.grow'),
    parts.views, parts.all);
}

function buildScrub() {
  const button = (id, text, label, action) =>
    h(`button.btn#samples-${id}`, { type: 'button', 'aria-label': label, onclick: action }, text);
  const to = by => () => { stop(); choose(chosen + by); };
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
    facts: h('p.sm'), prompts: h('div.prompts'), leftLabel: h('span.l'),
    save: h('a.btn#samples-save', { download: '', hidden: true }),
    share: h('input#samples-share',
      { type: 'range', min: 0, max: 100, value: 50, 'aria-label': 'Share of the left sample', oninput: event => {
        parts.slide.style.setProperty('--x', `${event.target.value}%`); drawPair(); } }),
    leftRange: h('input#samples-left',
      { type: 'range', min: 0, 'aria-label': 'Step of the left side', oninput: event => {
        left = Number(event.target.value);
        movedAt = performance.now(); drawPair(); setTimeout(load, SETTLED_MS + 10); load(); } }) });
  parts.slide = h('div.slide', { style: { '--x': '50%' } }, parts.leftSide, parts.rightSide, parts.share, h('u'),
    parts.leftWord, parts.rightWord);
  return h('section.card.pair#samples-pair', { 'aria-label': 'Two steps of one prompt' },
    h('div', {}, parts.slide, parts.facts),
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
  addEventListener('resize', () => data && isShown() && draw());
  registerKeys();
}

async function show(run) {
  if (run !== name) {
    stop();
    name = run;
    data = null;
    [steps, missing, chosen, left, pairRow] = [[], new Set(), 0, 0, 0];
    answers.clear();
    cards.clear();
    delete parts.rows.dataset.key;
    parts.rows.replaceChildren();
    for (const part of [parts.head, parts.scrub, parts.pair, parts.help, parts.empty]) part.hidden = true;
  }
  await refresh();
  if (data && steps.length) draw();
}

studio.runTabs.samples = { build, show, tick: async () => { await refresh(); load(); } };
