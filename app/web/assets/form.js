// The screen New run. The server keeps the draft: what is typed is sent there, and its answer is shown.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, link } from './core.js';
import { fitter as newFitter } from './fit.js';
import { askToNotify } from './frame.js';
import { look as looks } from './look.js';
import { stepPicture } from './step.js';

const TYPING_PAUSE_MS = 250, PATH_PAUSE_MS = 500, AGAIN_MS = 2000, MOST_SUGGESTED = 8;
const FIELDS_OF_STEP = { 'step-1': ['model.path'], 'step-2': ['data.path', 'data.trigger', 'data.validation'],
  'step-3': ['adapter.type', 'sample.prompts'] };
const KIND_WORDS = { weights: 'weights', optimizer: 'optimizer', gathered: 'gathered blocks',
  activations: 'activations', reserve: 'reserve' };
/** @type {HTMLElement} */
let root;
/** {field: its row, input, help and facts} */
const inputs = /** @type {Record<string, any>} */ ({});
let state = /** @type {any} */ (null), models = [], target = '', wantsAll = false,
  chosenGpus = /** @type {any} */ (null);
let pending = {}, sent = {}, answered = {}, isSending = false, isLost = false, numAnswers = 0, timer = 0,
  typingPath = '', shownThumbnails = '', wantsStep = false, step = /** @type {any} */ (null), numStepsAsked = 0,
  wrongLines = [], replaced = '', lookedFor = '', fitter = /** @type {any} */ (null);
const field = name => studio.facts.form.fields[name];
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
const $ = id => root.querySelector(`#${id}`);

// --- what is typed ------------------------------------------------------------------------------------------------

/** Remember an edit and send it soon. An edit of the same field that waits is replaced. */
function edited(name, value, pause = TYPING_PAUSE_MS) {
  pending[name] = value;
  clearTimeout(timer);
  timer = setTimeout(send, pause);
  drawStart();
}

/** Send what was typed; what is typed meanwhile follows when the answer is there. */
async function send() {
  clearTimeout(timer);
  if (isSending || !Object.keys(pending).length) return;
  const edits = sent = pending;
  pending = {};
  isSending = true;
  try {
    const answer = await call('new_edit', { edits, typing: Boolean(typingPath), target });
    if (isLost) complain('');
    [isLost, sent] = [false, {}];
    take(answer, edits);
    if ('data.path' in edits) $('left-images').replaceChildren();
    if (answer.left_images.labels.length) offerUndo(
      `Left behind, as it belongs to the former images: ${answer.left_images.labels.join(', ')}. `,
      () => typedAgain(answer.left_images.edits), 'left-images', () => inputs['data.path'].input);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    isLost = error.lost;
    if (isLost) pending = { ...edits, ...pending };
    else complain(error.message);
  } finally {
    isSending = false;
    sent = {};
  }
  if (Object.keys(pending).length) timer = setTimeout(send, isLost ? AGAIN_MS : 0);
  drawStart();
}

/** Wait until everything typed has been answered. Throws `Refused` while the server does not answer. */
async function settled() {
  if (typingPath) { // also where it was sent already: no window reads it before it is left
    const name = typingPath;
    typingPath = '';
    edited(name, inputs[name].input.value, 0);
  }
  isLost = false;
  while (Object.keys(pending).length || isSending) {
    await send();
    if (isLost) throw new studio.Refused('The page’s server does not answer. What you typed is kept here.', true);
    await new Promise(resolve => setTimeout(resolve, 30));
  }
}

/** Show an answer of the server. edits: what was sent with the question. */
function take(answer, edits = {}) {
  if (!answer) return;
  numAnswers++;
  state = answer;
  answered = edits;
  draw();
  const isUnknown = models.length > 0 && lookedFor !== state.preset
    && !models.some(model => model.presets.some(preset => preset.name === state.preset));
  lookedFor = state.preset; // a preset that another window has saved is looked for once
  if (isUnknown || models.some(hasArrived)) loadModels().catch(error => {
    if (!(error instanceof studio.Refused)) throw error;
  });
}

/** Whether a model that was to be downloaded is here now: by the page, by another window, or by a command. */
function hasArrived(model) {
  if (model.is_here || !model.download) return false;
  const isDrafts = model.path === state.rows['model.path']?.value;
  return state.downloads[model.path]?.state === 'done'
    || (isDrafts && !state.waiting && !state.errors.some(error => error.field === 'model.path'));
}

/**
 * Ask the server to change the draft, between what was typed before and after. Says under Start, or elsewhere, what it
 * refuses.
 */
async function change(name, values = {}, sayRefusal = complain) {
  try {
    await settled();
    isSending = true;
    const answer = await call(name, { ...values, target });
    sayRefusal('');
    return answer;
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    sayRefusal(error.message);
    return null;
  } finally {
    isSending = false;
    timer = setTimeout(send, 0);
  }
}

const complain = text => $('outcome').replaceChildren(...(text ? [studio.alert(text)] : []));

// --- inputs -------------------------------------------------------------------------------------------------------

const idOf = name => `field-${name.replaceAll('.', '-')}`;

/** The input of a field with its label, key, unit, help and place for an error. */
function row(name, options = {}) {
  const facts = field(name), id = idOf(name), element = h('div.field', { id: `row-${id}`, data: { field: name } });
  const control = options.control || inputOf(name, facts, id);
  const names = h('span.l', {}, options.label || facts.label,
    facts.unit && facts.number === 'int' ? h('span.of', {}, `, ${facts.unit}`) : null);
  const key = h('span.key', {}, name);
  const title = h('label.lab', { htmlFor: id }, names, key), help = h('p.help', { id: `${id}-help` });
  const input = control.matches('input, select, textarea') ? control : control.querySelector('input, select, textarea');
  input.setAttribute('aria-describedby', help.id);
  if (facts.kind === 'switch') element.append(h('label.check', { htmlFor: id }, control, h('span', {}, names, key)),
    help);
  else element.append(title, wrapped(name, facts, control), help);
  if (facts.suggested.length) help.before(suggestions(name, facts, input));
  inputs[name] = { element, input, help, facts, text: options.help ?? facts.help, textHelp: options.textHelp,
    sent: undefined };
  help.title = facts.help; // it has four lines where there is little room
  return element;
}

/** The words that a field takes in addition to what can be typed. */
const suggestions = (name, facts, input) =>
  h('div.chips', { role: 'group', 'aria-label': `${facts.label}: suggestions` }, facts.suggested.map(word =>
    h('button.chip', { type: 'button', 'aria-pressed': 'false', data: { word }, onclick: () => {
      input.value = word;
      edited(name, word, 0);
    } }, word)));

function inputOf(name, facts, id) {
  const say = () => edited(name, facts.kind === 'switch' ? element.checked : element.value,
    facts.path ? PATH_PAUSE_MS : TYPING_PAUSE_MS);
  let element;
  if (facts.kind === 'switch') element = h('input', { type: 'checkbox', id, onchange: say });
  else if (facts.kind === 'choice') element = h('select', { id, onchange: say });
  else if (facts.kind === 'text') element =
    h('input', { type: 'text', id, spellcheck: false, autocomplete: 'off', inputMode: facts.number ? 'decimal' : 'text',
      oninput: say });
  else element = h('textarea',
    { id, rows: facts.kind === 'lines' ? 3 : 2, spellcheck: facts.kind === 'lines', oninput: say });
  element.addEventListener('blur', () => {
    if (state && !(name in pending) && !(name in sent)) showValue(inputs[name], state.rows[name].value);
  });
  if (facts.path) {
    element.addEventListener('input', () => {
      typingPath = name;
      if (facts.path === 'folder') glanceSoon(name, element);
    });
    const typed = () => { typingPath = ''; edited(name, element.value, 0); };
    element.addEventListener('change', typed);
    // typed, and back to what it was: no change
    element.addEventListener('blur', () => { if (typingPath === name) typed(); });
  }
  return element;
}

/** Steppers, a slider or the unit around an input, where the field has them. */
function wrapped(name, facts, control) {
  if (facts.number === 'float' && facts.min === 0 && facts.max === 1) {
    const slider = h('input', { type: 'range', min: 0, max: 1, step: 0.01, 'aria-label': facts.label, oninput: () => {
      control.value = slider.value; paint(slider); edited(name, slider.value); } });
    control.addEventListener('input', () => { slider.value = control.value; paint(slider); });
    control.slider = slider;
    return h('span.with-slider', {}, slider, control);
  }
  if (facts.number !== 'int')
    return facts.unit && control.matches('input') ? h('span.unit', {}, control, h('i', {}, facts.unit)) : control;
  const step = up => {
    const now = Number(control.value) || 0, by = now >= 1000 ? 100 : now >= 100 ? 10 : 1;
    const next = Math.max(facts.min ?? 0, Math.min(facts.max ?? Infinity, up ? now + by : now - by));
    control.value = String(next);
    edited(name, control.value);
  };
  const buttons = /** @type {[string, string, boolean][]} */ ([['−', 'less', false], ['+', 'more', true]])
    .map(([sign, word, up]) =>
      h('button', { type: 'button', tabIndex: -1, 'aria-label': `${facts.label}: ${word}`, onclick: () => step(up) },
        sign));
  return h('span.stepper', {}, h('span.unit', {}, control), buttons);
}

const paint = slider => slider.style.setProperty('--p',
  `${100 * (slider.value - slider.min) / (slider.max - slider.min)}%`);

/** Show a field's value, unless it is being typed or waits to be sent. */
function showRow(name) {
  const shown = inputs[name], now = state.rows[name];
  if (!shown || !now) return;
  const { element, input, help, facts } = shown;
  element.toggleAttribute('hidden', Boolean(now.hidden) && !now.error);
  element.classList.toggle('wrong', Boolean(now.error));
  element.classList.toggle('changed', Boolean(now.changed));
  input.setAttribute('aria-invalid', String(Boolean(now.error)));
  for (const chip of element.querySelectorAll('.chip[data-word]')) chip.setAttribute('aria-pressed',
    String(chip.dataset.word === now.value));
  // else it says what the folder holds
  if (typingPath !== name || now.error) say(help, now.error || (state.is_text && shown.textHelp) || shown.text || '');
  if (facts.kind === 'choice' && input.matches('select')) {
    fill(input, now.choices, () => now.choices.map(word => h('option', { value: word }, word)));
    input.removeAttribute('data-value');
  }
  if (input.placeholder !== undefined) input.placeholder = now.placeholder || '';
  const isFocused = studio.focused() === input,
    isTyped = name in pending || name in sent || (isFocused && (name in answered || now.value === shown.sent));
  if (!isTyped) showValue(shown, now.value);
  shown.sent = now.value;
}

/** Put a value into an input. A number that is written otherwise, such as 1e-4, stays as it was typed. */
function showValue({ input, facts }, value) {
  if (facts.kind === 'switch') { input.checked = value; return; }
  const isEqual = input.value === value
    || (facts.number && input.value.trim() !== '' && Number(input.value) === Number(value));
  if (!isEqual) input.value = value;
  if (input.slider) { input.slider.value = Number(value) || 0; paint(input.slider); }
}

// --- card 1: the model --------------------------------------------------------------------------------------------

function drawModels() {
  const own = models.find(model => model.presets.some(preset => preset.name === state.preset));
  const listed = wantsAll ? models : models.filter(model => model.is_known || model === own).slice(0, MOST_SUGGESTED);
  fill($('tiles'), [listed, own?.path, own?.family], () => listed.map(model => tile(model, model === own)));
  for (const [at, model] of listed.entries()) fill($('tiles').children[at].querySelector('.state'),
    [isRunning(model), shareOf(model)], () => badge(model));
  fill($('model-filter'), [wantsAll, models.length, listed.length], () => [
    h('button', { type: 'button', 'aria-pressed': String(!wantsAll), onclick: () => {
      wantsAll = false;
      drawModels();
    } }, 'Suggested'),
    h('button', { type: 'button', 'aria-pressed': String(wantsAll), onclick: () => {
      wantsAll = true;
      drawModels();
    } }, `All ${models.length}`)]);
  $('model-filter').hidden = models.length <= MOST_SUGGESTED;
  drawFacts(own);
  fill($('presets'), [own?.presets, state.preset], () => (own ? own.presets : []).map(preset => presetTile(preset)));
  say($('presets-note'), own ? `${studio.counted(own.presets.length, 'preset')} for ${own.name}`
    : `from ${state.preset}`);
}

function tile(model, isOn) {
  const size = [model.parameters ? `${short(model.parameters)} parameters` : '',
    model.bytes ? studio.size(model.bytes) : ''];
  const best = model.presets[0];
  return h(isOn ? 'button.tile.on' : 'button.tile',
    { type: 'button', 'aria-pressed': String(isOn), data: { model: model.path },
      onclick: () => isOn || choosePreset(best.name) },
    art(model), h('span.t', {}, h('b', {}, model.name),
      h('span.sm', {}, size.filter(Boolean).join(' · ') || (model.is_built_in ? 'comes along, untrained' : model.path)),
      h('span.sm.licence', { title: `${model.licence}${model.licence_note ? `: ${model.licence_note}` : ''}` },
        model.licence || ' '), h('span.state')));
}

const short = number => number >= 1e9 ? `${+(number / 1e9).toFixed(1)} B` : `${Math.round(number / 1e6)} M`;

function badge(model) {
  const best = model.presets[0];
  if (isRunning(model)) return h('span.tag.acc', {}, `downloading, ${shareOf(model)} %`);
  if (model.is_built_in && best.verdict === 'fits') return h('span.tag.ok', {}, 'ready');
  if (!model.fits && best.verdict)
    return h('span.tag.warn', {}, best.verdict === 'no GPU' ? `needs ${best.needs}` : `too large: ${best.needs}`);
  return model.is_here ? h('span.tag.ok', {}, 'here') : h('span.tag', {}, model.bytes ? 'to download' : 'not here');
}

function modelFacts(model) {
  const here = model.is_built_in ? (model.is_known ? 'comes with ShardStudio' : 'no download: its weights are random')
    : model.is_here ? 'is on this machine' : model.bytes ? `${studio.size(model.bytes)} to download`
    : `is not on this machine: ${model.path}`;
  const licence = model.licence ? [h('span.grow'), model.page
    ? h('a.sm', { href: model.page, target: '_blank', rel: 'noopener noreferrer', title: model.licence_note },
      `Licence: ${model.licence}`)
    : h('span.sm.dim', { title: model.licence_note }, `Licence: ${model.licence}`)] : [];
  return [h('b', {}, model.name), h('span.sm.dim', {}, here), ...licence,
    ...(model.is_here || !model.download ? [] : downloadParts(model))];
}

const isRunning = model => ['waiting', 'downloading'].includes(state.downloads[model.path]?.state);

/** How much of a model is here, in percent; rounded down, so that 100 means all. */
function shareOf(model) {
  const found = state.downloads[model.path];
  return found?.total_bytes ? Math.floor(100 * found.num_bytes / found.total_bytes) : 0;
}

/**
 * The line about the chosen model. Its button stays the same element while numbers change, so that a press is not lost.
 */
function drawFacts(own) {
  const found = state.downloads[own?.path], hadFocus = studio.focused()?.id === 'download';
  const isNew = fill($('model-facts'), [own, found && (isRunning(own) ? 'running' : [found.state, found.message])],
    () => own ? modelFacts(own) : []);
  if (isNew && hadFocus) $('download')?.focus();
  const bar = $('download-bar');
  if (!bar) return;
  const rate = found.bytes_per_s,
    left = rate ? ` · ${studio.size(rate)}/s · ${studio.duration((found.total_bytes - found.num_bytes) / rate)} left`
      : '';
  bar.setAttribute('aria-valuenow', shareOf(own));
  bar.firstChild.style.width = `${shareOf(own)}%`;
  say($('download-size'), `${studio.size(found.num_bytes)} of ${studio.size(found.total_bytes)}${left}`);
}

/** How far the download of a model is, and the button that starts, pauses or continues it. */
function downloadParts(model) {
  const found = state.downloads[model.path], problem = h('div.problem'), running = isRunning(model);
  let isAsking = false;
  const ask = (name, word) => h('button.btn.s#download', { type: 'button', onclick: async () => {
    if (isAsking) return; // not disabled, which would take the focus from it
    isAsking = true;
    take(await change(name, { model: model.path },
      text => problem.replaceChildren(...(text ? [studio.alert(text)] : []))));
    isAsking = false;
  } }, word);
  const bar = () =>
    [h('span.bar#download-bar',
      { role: 'progressbar', 'aria-label': `Download of ${model.name}`, 'aria-valuemin': 0, 'aria-valuemax': 100 },
      h('i')), h('span.sm.dim#download-size')];
  return [h('span.download', { data: { state: found?.state || 'none' } },
    found ? bar() : h('span.sm.dim.grow', {}, linked(model.advice)),
    running ? ask('new_pause', 'Pause') : ask('new_download', found ? 'Continue' : 'Download')),
    !found?.message || running ? null : found.state === 'failed'
      ? h('div.notice.bad', { role: 'alert' }, h('p', {}, linked(found.message))) : h('p.sm.dim', {}, found.message),
      problem];
}

/** A text whose addresses of models on the hub are links. */
const linked = text => text.split(/(https:\/\/huggingface\.co\/[\w.-]+\/[\w.-]*\w)/).map((part, at) =>
  at % 2 ? h('a', { href: part, target: '_blank', rel: 'noopener noreferrer' }, part) : part);

function presetTile(preset) {
  const isOn = preset.name === state.preset, words = { fits: 'fits', tight: 'tight', 'no GPU': 'no GPU here' };
  const bar = preset.limit ? h('span.mem', { 'aria-hidden': 'true' }, preset.kinds.map(([kind, size]) =>
    h('i', { style: { width: `${100 * size / preset.limit}%`, background: `var(--${kind})` } }))) : null;
  const mood = { fits: 'ok', tight: 'warn', 'too large': 'warn', 'too few GPUs': 'warn' }[preset.verdict] || '';
  return h(isOn ? 'button.preset.on' : 'button.preset',
    { type: 'button', 'aria-pressed': String(isOn), data: { preset: preset.name }, title: preset.name,
      onclick: () => isOn || choosePreset(preset.name) },
    h('b', {}, preset.title), h('span.sm', {}, preset.needs), bar,
    h(mood ? `span.tag.${mood}` : 'span.tag', {}, words[preset.verdict] || preset.verdict || 'not estimated'));
}

/** A drawing for a model's tile: shards in hues of its name. */
function art(model) {
  if (model.image) return h('img.art', { src: model.image, alt: '' });
  let seed = [...model.path].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) >>> 0, 7);
  const random = () => { seed = (seed * 1664525 + 1013904223) >>> 0; return seed / 2 ** 32; };
  const hue = Math.round(random() * 360), shapes = [];
  for (let i = 0; i < 7; i++) {
    const x = random() * 160, y = random() * 90,
      points = [0, 1, 2].map(() =>
        `${(x + (random() - 0.5) * 120).toFixed(0)},${(y + (random() - 0.5) * 90).toFixed(0)}`);
    shapes.push(studio.svg('polygon',
      { points: points.join(' '), fill: `hsl(${(hue + i * 17) % 360} ${45 + 25 * random()}% ${38 + 34 * random()}%)`,
        opacity: 0.75 }));
  }
  return studio.svg('svg',
    { viewBox: '0 0 160 90', class: 'art', preserveAspectRatio: 'xMidYMid slice', 'aria-hidden': 'true' },
    studio.svg('rect', { width: 160, height: 90, fill: `hsl(${hue} 42% 30%)` }), ...shapes);
}

async function choosePreset(name) {
  let answer = await change('new_preset', { name });
  if (answer?.refused) {
    const lost = Object.entries(answer.refused).map(([label, reason]) => `${label}: ${reason}`).join('. ');
    if (await studio.ask('Leave these edits behind?', `${name} cannot take what you set. ${lost}.`,
      ['Change the model', 'Keep this one']) !== 0) return;
    answer = await change('new_preset', { name, is_forced: true });
  }
  if (!answer) return;
  take(answer);
  if (!answer.left.length) return; // what was left behind before can still be brought back
  offerUndo(`Left behind, as they belong to the former preset: ${answer.left.join(', ')}. `, async () => {
    const former = await change('new_restore', answer.undo);
    take(former);
    return Boolean(former);
  });
}

// --- card 2: the data ---------------------------------------------------------------------------------------------

let glanceTimer = 0;
/** While a folder is typed, look at that one folder when the typing rests. */
function glanceSoon(name, input) {
  clearTimeout(glanceTimer);
  glanceTimer = setTimeout(async () => {
    if (typingPath !== name) return;
    const found = await call('new_glance', { path: input.value }).catch(() => null), help = inputs[name].help;
    if (!found || typingPath !== name || found.path !== undefined) return;
    inputs[name].element.classList.toggle('wrong', Boolean(found.wrong));
    say(help, found.wrong !== undefined ? found.wrong
      : `${found.images} images, ${found.captions} with a caption, ${found.folders} folders in it. Press Enter to ` +
        `read it.`);
  }, PATH_PAUSE_MS);
}

function drawData() {
  const data = state.data, place = $('data-facts');
  say($('data-title'), state.is_text ? 'Texts' : 'Pictures');
  fill($('data-tag'), [data, state.waiting], () => {
    if (!data) return [];
    if (!data.is_complete) return [h('span.tag.acc', {}, `reading: ${studio.count(data.num_files)} files`)];
    if (data.is_text)
      return [h('span.tag.ok', {}, `${studio.counted(data.num_texts, 'file')}, ${studio.size(data.text_bytes)}`)];
    const mood = data.problems.length ? 'bad' : data.num_images ? 'ok' : 'warn';
    return [h(`span.tag.${mood}`, {},
      `${studio.counted(data.num_images, 'picture')}${data.problems.length
        ? `, ${studio.counted(data.problems.length, 'problem')}` : ''}`)];
  });
  fill(place, [data], () => {
    if (!data || !data.is_complete) return [];
    const parts = [];
    if (data.shapes.length) parts.push(
      h('span', {}, h('b', {}, studio.counted(data.shapes.length, 'shape')),
        h('span.dim', {}, ' ' + data.shapes.slice(0, 4).map(([w, t, n]) => `${w} × ${t} (${n})`).join(' · '))));
    if (data.held_out) parts.push(
      h('span', {}, h('b', {}, `${data.held_out} held out`), h('span.dim', {}, ' to measure progress')));
    if (data.num_questions) parts.push(h('span', {}, h('b', {}, studio.counted(data.num_questions, 'question'))));
    return [...parts, ...data.problems.slice(0, 4).map(text => h('p.notice.bad', {}, text)),
      ...data.warnings.slice(0, 4).map(text => h('p.notice.warn', {}, text))];
  });
  fill($('recent'), [state.recent],
    () => state.recent.map(path =>
      h('button.chip', { type: 'button', title: path, onclick: () => setPath(path) },
        path.split('/').slice(-2).join('/'))));
  drawThumbnails(data);
  looks.hint($('pair-hint'),
    [state.rows['data.path']?.value, state.rows['data.references']?.value, data?.is_complete && data.num_images],
    path => edited('data.references', path, 0));
}

async function drawThumbnails(data) {
  const key = JSON.stringify([data?.is_complete, data?.num_images, state.rows['data.path']?.value, data?.problems]);
  if (shownThumbnails === key) return;
  shownThumbnails = key;
  const shown = data?.is_complete && data.num_images ? await call('new_thumbnails').catch(() => []) : [];
  if (shownThumbnails !== key) return;
  $('thumbs')
    .replaceChildren(...shown.map(
      image => h('img.image', { src: image.src, alt: image.name, title: image.name, loading: 'lazy' })));
}

function setPath(path, name = 'data.path') {
  inputs[name].input.value = path;
  typingPath = '';
  edited(name, path, 0);
}

/** Choose a folder by a dialog that shows what is in each. */
async function browse() {
  const list = h('ul.folders'), here = h('p.key'), count = h('p.sm'), error = h('div');
  const choose = h('button.btn.main', { type: 'button', onclick: () => {
    setPath(dialog.dataset.path);
    dialog.close();
  } }, 'Take this folder');
  const dialog = h('dialog.dialog#picker', { 'aria-label': 'Choose a folder', onclose: () => dialog.remove() },
    h('h2', {}, 'Choose a folder'), here, count, error, list,
    h('div.row-end', {}, h('button.btn', { type: 'button', onclick: () => dialog.close() }, 'Cancel'), choose));
  const open = async path => {
    let found;
    try { found = await call('new_browse', { path }); } catch (refused) {
      error.replaceChildren(studio.alert(String(/** @type {any} */ (refused).message)));
      return;
    }
    error.replaceChildren();
    dialog.dataset.path = found.path;
    here.textContent = found.path;
    count.textContent = `${found.num_images} images, ${found.num_captions} with a caption${found.is_cut
      ? ' among the first 5,000 entries' : ''}`;
    const up = found.above
      ? [h('li', {}, h('button.btn.ghost', { type: 'button', onclick: () => open(found.above) }, '↑ ..'))] : [];
    const roots = found.roots.filter(at => at !== found.path)
      .map(at => h('li', {}, h('button.btn.ghost', { type: 'button', onclick: () => open(at) }, at)));
    list.replaceChildren(...up,
      ...found.folders.map(folder =>
        h('li', {}, h('button.btn.ghost', { type: 'button', onclick: () => open(`${found.path}/${folder}`) }, folder))),
      ...(found.above ? [] : roots));
    studio.refocus(list.querySelector('button'), choose); // the one that was pressed is gone
  };
  document.body.append(dialog);
  dialog.showModal();
  const typed = inputs['data.path'].input.value;
  await open(typed.startsWith('/') ? typed : '');
  if (!dialog.dataset.path) await open('');
}

// --- card 3: the method -------------------------------------------------------------------------------------------

function drawMethods() {
  const now = state.rows['adapter.type'];
  if (!now) return;
  const known = studio.facts.form.methods;
  fill($('methods'), [now.choices, now.value],
    () => known.filter(([kind]) => now.choices.includes(kind)).map(([kind, name, line]) =>
      h(kind === now.value ? 'label.meth.on' : 'label.meth', {},
        h('input', { type: 'radio', name: 'method', value: kind, checked: kind === now.value,
          onchange: () => edited('adapter.type', kind, 0) }),
          h('span', {}, h('b', {}, name), h('span.sm', {}, line)))));
  say($('method-error'), now.error || '');
  const rank = Number(state.rows['adapter.rank']?.value) || 0, slider = $('rank-slider');
  if (rank && studio.focused() !== slider) { slider.value = Math.log2(rank); paint(slider); }
}

// --- more ---------------------------------------------------------------------------------------------------------

function groups() {
  const names = Object.keys(studio.facts.form.fields).filter(name => !field(name).is_front);
  return Object.entries(studio.facts.form.groups)
    .map(([group, hint]) => h('details.grp', { id: `group-${group.toLowerCase()}`, data: { group } },
      h('summary', {}, h('span', {}, group), h('span.dim.sm', {}, hint), h('span.grow'),
        h('span.tag.acc.num-changed', { hidden: true }),
        h('span.reddot', { hidden: true, role: 'img', 'aria-label': 'holds an error' })),
      h('div.g2', {}, names.filter(name => field(name).group === group).map(name => row(name)))));
}

function drawGroups() {
  let total = 0, changedCount = 0;
  for (const group of root.querySelectorAll('details.grp')) {
    const names = [...group.querySelectorAll('.field')].map(element => element.dataset.field);
    const changed = names.filter(name => state.rows[name]?.changed).length,
      wrong = names.some(name => state.rows[name]?.error);
    total += names.length; changedCount += changed;
    const tag = group.querySelector('.num-changed');
    tag.hidden = !changed; say(tag, `${changed} changed`);
    group.querySelector('.reddot').hidden = !wrong;
  }
  say($('more-note'), `${total} settings, ${changedCount ? `${changedCount} changed` : 'all as in the preset'}`);
  filterGroups();
}

function filterGroups() {
  const words = $('search').value.toLowerCase().split(/[\s-]+/).filter(Boolean),
    matches = name => words.every(word => isIn(word, searched(name)));
  for (const group of root.querySelectorAll('details.grp')) {
    let found = 0;
    for (const element of group.querySelectorAll('.field')) {
      const isFound = matches(element.dataset.field);
      element.classList.toggle('filtered', !isFound);
      if (isFound && !element.hidden) found++;
    }
    group.hidden = words.length > 0 && !found;
    if (words.length && found && !group.dataset.searched) {
      group.dataset.searched = group.open ? 'open' : 'closed';
      group.open = true;
    }
    if (!words.length && group.dataset.searched) {
      group.open = group.dataset.searched === 'open';
      delete group.dataset.searched;
    }
  }
  const above = words.length
    ? Object.keys(studio.facts.form.fields)
    .filter(name => field(name).is_front && !inputs[name]?.element.hidden && matches(name)) : [];
  fill($('found-above'), [above],
    () => above.length ? ['On the cards above: ', ...above.flatMap((name, at) => [at ? ', ' : '', linkTo(name)]), '.']
      : []);
  $('no-match').hidden = !words.length || above.length > 0
    || [...root.querySelectorAll('details.grp')].some(group => !group.hidden);
}

/** What a field is found by: its words here and in other programs, with and without hyphens. */
function searched(name) {
  const facts = field(name), text = `${facts.label} ${name} ${facts.help} ${facts.group} ${facts.words}`.toLowerCase();
  return `${text} ${text.replaceAll('-', '')}`;
}

const isIn = (word, text) => text.includes(word)
  || (word.length > 3 && word.endsWith('s') && text.includes(word.slice(0, -1)));

/** A field's name that leads to its input. */
const linkTo = (name, text = field(name).label) => h('a', { href: '#', title: name, onclick: event => {
  event.preventDefault();
  goTo(name);
} }, text);

/** Open the group of a field and go to its input. */
function goTo(name) {
  const shown = name === 'adapter.type'
    ? { element: $('methods'), input: $('methods').querySelector('input:checked, input') } : inputs[name];
  if (!shown) return;
  if (shown.element.classList.contains('filtered')) { $('search').value = ''; filterGroups(); }
  const group = shown.element.closest('details');
  if (group) { group.hidden = false; group.open = true; }
  shown.element.scrollIntoView({ block: 'center' });
  (shown.input || shown.element).focus({ preventScroll: true });
}

// --- the panel ----------------------------------------------------------------------------------------------------

function drawStart() {
  const isBusy = Boolean(Object.keys(pending).length || isSending), isReady = Boolean(state?.ready) && !isBusy;
  $('start').disabled = !state || (!state.ready && !isBusy);
  $('enqueue').disabled = $('start').disabled;
  if (isBusy || !state) { $('why').dataset.busy = 'true'; return; }
  delete $('why').dataset.busy;
  const { errors, waiting, problem, warnings } = state;
  $('why').className = `notice ${errors.length ? 'bad' : waiting ? '' : 'ok'}`;
  $('why').dataset.state = isReady ? 'ready' : errors.length ? 'refused' : 'waiting';
  fill($('why'), [errors, waiting, problem, state.data?.num_images, state.gpus,
    models.map(model => [model.is_here, isRunning(model)])], () => {
    if (errors.length)
      return [h('b', {}, `Start waits for ${errors.length === 1 ? 'one thing' : `${errors.length} things`}`),
        h('ul', {},
          errors.map(error => h('li', {}, error.label ? [linkTo(error.field, error.label), ': '] : '',
            inBrief(error))))];
    if (waiting) return [h('p', {}, waiting)];
    const checked = ['model', state.data?.num_images ? studio.counted(state.data.num_images, 'picture') : 'data',
      state.gpus.length ? studio.counted(state.gpus.length, 'GPU') : 'CPU', 'disk'];
    return [h('p', {}, h('b', {}, 'Ready. '), `Checked: ${checked.join(', ')}.`)];
  });
  fill($('warnings'), [warnings, problem],
    () => [...(problem ? [h('p.notice.bad', { role: 'alert' }, problem)] : []),
      ...warnings.map(text => h('p.notice.warn', {}, text))]);
  say($('phone-note'), errors.length ? `waits for ${errors.length}` : waiting || 'Ready');
  for (const [id, fields] of Object.entries(FIELDS_OF_STEP)) {
    $(id).classList.toggle('no', errors.some(error => fields.includes(error.field)));
  }
}

/** What an error says; of a model that can be downloaded here, only that. */
function inBrief(error) {
  const model = models.find(model => model.presets.some(preset => preset.name === state.preset));
  if (error.field !== 'model.path' || !model?.download || model.is_here || state.rows['model.path'].changed)
    return error.text;
  if (isRunning(model)) return `${model.name} is being downloaded.`;
  return `${model.name} is not on this machine yet; download it on the first card, ${studio.size(model.bytes)}.`;
}

function drawGpus() {
  const gpus = state.gpus;
  $('gpus').hidden = gpus.length < 2;
  fill($('gpus'), [gpus], () =>
    [h('p.l', {}, 'Queued run on GPUs'), h('div.gpu-list', {}, gpus.map(({ index, name }) => h('label', { title: name },
      h('input', { type: 'checkbox', checked: !chosenGpus || chosenGpus.has(index), onchange: event => {
        chosenGpus = chosenGpus || new Set(gpus.map(gpu => gpu.index));
        if (event.target.checked) chosenGpus.add(index); else chosenGpus.delete(index);
      } }), String(index))))]);
}

function drawPlan() {
  const plan = state.plan;
  say($('plan-title'), plan.on_cpu ? 'Memory of each rank' : 'Memory of each GPU');
  fitter.draw(state.fit);
  fill($('plan'), [plan, target], () => {
    if (plan.need === undefined)
      return [h('p', {}, plan.is_waiting ? plan.note
        : ['Memory is not known for this combination yet. ', plan.can_record ? '' : plan.note]),
        plan.can_record ? h('button.btn.s#record',
          { type: 'button', onclick: async () => take(await change('new_record')) }, 'Estimate now, about 30 s') : null,
          fitter.element];
    const whole = Math.max(plan.need, plan.limit || 0),
      spoken = plan.kinds.map(([kind, size]) => `${KIND_WORDS[kind]} ${studio.gib(size)}`).join(', ');
    const parts = [
      h('p', {}, h('span.big', {}, studio.gib(plan.need)),
        h('span.dim', {}, plan.limit ? ` of ${studio.gib(plan.limit)} at the fullest moment`
          : ' at the fullest moment')),
      h('div.mem', { role: 'img', 'aria-label': spoken, data: { verdict: plan.verdict } },
        plan.kinds.map(([kind, size]) =>
          h('i', { title: KIND_WORDS[kind],
            style: { width: `${100 * size / whole}%`, background: `var(--${kind})` } }))),
      h('ul.keys', {},
        plan.kinds.map(([kind, size]) =>
          h('li', {}, h('i', { style: { background: `var(--${kind})` } }), studio.term(KIND_WORDS[kind]), ' ',
            h('b', {}, size < 0.005 * 2 ** 30 ? '< 0.01' : (size / 2 ** 30).toFixed(size < 2 ** 30 ? 2 : 1))))),
      h(plan.verdict === 'does not fit' ? 'p.notice.bad' : plan.verdict === 'tight' ? 'p.notice.warn' : 'p.sm.dim', {},
        sentence(plan.sentence)),
      ...plan.fixes.map((fix, index) =>
        h('button.btn.s.fix', { type: 'button', id: `fix-${index}`,
          onclick: async () => take(await change('new_fix', { changes: fix.changes })) },
          `Make it fit: ${fix.text}${fix.effect && ` (${fix.effect})`}`)),
      fitter.element,
      h('details.sm', {}, h('summary', {}, 'More about memory'), h('p', {}, `Fullest in ${plan.moment}.`),
        h('ul', {},
          plan.items.map(item => h('li', {}, h('b', {}, `${item.name} ${studio.gib(item.size)}`), `: ${item.text}`))),
        h('p', {}, 'Other moments: ' + plan.phases.map(phase => `${phase.name} ${studio.gib(phase.need)}`)
          .join(', ') + '.'),
        h('p', {},
          `On the host, each rank: ${plan.host.map(item => `${item.name} ${studio.gib(item.size)}`).join(', ')
            || 'nothing'}. Sharding: ${plan.strategy}. Reserve and time are estimates.`),
        plan.checked ? h('p', {}, sentence(plan.checked)) : null,
        plan.can_verify ? h('button.btn.s#verify',
          { type: 'button', onclick: async () => take(await change('new_verify')) },
          'Verify with a full trace, a minute or more') : null),
      h('details.sm#step-memory', { open: wantsStep, ontoggle: event => {
        wantsStep = event.target.open;
        if (wantsStep) drawStep();
      } },
        h('summary', {}, 'Memory over one step'), h('div#step-picture', {}, step ? stepPicture(step) : null)),
    ];
    return parts;
  });
}

/** Ask for the memory over a step of the plan that is shown, and draw it. The former picture stays until then. */
async function drawStep() {
  const number = ++numStepsAsked, box = $('step-picture');
  try {
    const found = await call('new_step', { target });
    if (number !== numStepsAsked) return;
    step = found;
    fill(box, found, () => found ? stepPicture(found) : h('p', {}, 'Not known yet.'));
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (number === numStepsAsked) fill(box, error.message, () => studio.alert(error.message));
  }
}

const sentence = text => text ? `${text[0].toUpperCase()}${text.slice(1)}.` : '';

/** A duration as it is said when it is estimated: "2 min". */
const roughly = seconds => seconds < 55 ? `${Math.max(5, 5 * Math.round(seconds / 5))} s`
  : studio.duration(seconds < 5400 ? 60 * Math.max(1, Math.round(seconds / 60)) : 300 * Math.round(seconds / 300));
/** Two values in words, as one where they are the same. */
const between = (low, high, word) => [...new Set([low, high].map(word))].join(' to ');
const perStep = seconds => seconds < 10 ? seconds.toFixed(seconds < 1 ? 2 : 1) : Math.round(seconds);
const day = unix => {
  const date = new Date(unix * 1e3);
  return date.toLocaleDateString('en-GB',
    { day: 'numeric', month: 'short',
      ...(date.getFullYear() === new Date().getFullYear() ? {} : { year: 'numeric' }) });
};

function drawTime() {
  const plan = state.plan, disk = state.disk, earlier = state.earlier, minute = Math.floor(Date.now() / 60e3);
  fill($('time'), [plan.seconds, plan.whole, plan.steps, plan.length, earlier, disk, minute], () => {
    const rows = [], ends = seconds => studio.when(Date.now() / 1e3 + seconds),
      steps = plan.steps ? studio.count(plan.steps) : plan.length;
    if (earlier?.seconds !== undefined) {
      const source = h('a', { href: link('runs', earlier.run), title: earlier.run }, earlier.name);
      rows.push(
        ['Whole run', [`about ${roughly(earlier.seconds)}, as in `, source,
          ` of ${day(earlier.began)}${earlier.host ? ` on ${earlier.host}` : ''}${earlier.has_samples ? ''
            : ', without samples'}`]],
        ['Steps', `${steps} × ${perStep(earlier.step_s)} s`],
        ['Ends, if started now', `about ${ends(earlier.seconds)}`]);
    } else if (plan.whole) {
      const [low, high] = plan.whole, each = plan.whole.map(seconds => seconds / plan.steps);
      rows.push(['Whole run', between(low, high, studio.duration)],
        ['Steps', `${steps} × ${between(...each, perStep)} s, ${plan.speed}`],
        ['Ends, if started now', between(low, high, ends)]);
    }
    else rows.push(['Steps', steps],
      ['Whole run', earlier?.is_looking ? 'looking at earlier runs …' : 'not known yet; a first run measures it']);
    rows.push(['Disk', disk.need
      ? [h(disk.need > disk.free ? 'b.bad-text' : 'span', {}, studio.size(disk.need)),
        disk.need > disk.free ? `, ${studio.size(disk.free)} free` : ` of ${studio.size(disk.free)} free`]
        : `${studio.size(disk.free)} free`]);
    return rows.map(([name, value]) => h('div.facts', {}, h('span.dim', {}, name), h('span', {}, value)));
  });
}

function drawChanges() {
  fill($('changes'), [state.changes, state.preset], () => state.changes.length
    ? state.changes.map(change => h('div.facts', {}, linkTo(change.field, change.label),
      h('span.dim', {}, change.old === '–' ? change.new : `${change.old} → ${change.new}`)))
    : [h('p.dim', {}, `As in the preset ${state.preset}.`)]);
  $('reset').hidden = !state.changes.length;
  fill($('commands'), [state.commands],
    () => state.commands.map(
      ([title, text]) => h('details', {}, h('summary', {}, title), h('pre.code', { tabIndex: 0 }, text),
        copyButton(() => text))));
  drawYaml();
}

/** Undo every edit; one click brings them back. */
async function reset() {
  try { await settled(); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    complain(error.message);
    return;
  }
  const values = Object.fromEntries(state.changes.map(change => [change.field, state.rows[change.field].value]));
  const answer = await change('new_reset');
  if (!answer) return;
  take(answer);
  offerUndo('The form is as in the preset again. ', () => typedAgain(values));
}

async function typedAgain(values) {
  for (const [name, value] of Object.entries(values)) edited(name, value, 0);
  await settled();
  return true;
}

/**
 * A sentence in `place` with a button that takes back what it tells of; `undo` resolves to whether it did. `after`
 * gives the element that the keyboard is at then.
 */
function offerUndo(sentence, undo, place = 'left', after = () => $('tiles').querySelector('.on')) {
  $(place)
    .replaceChildren(h('div.notice', { role: 'status' },
      h('p', {}, sentence, h('button.btn.s', { type: 'button', onclick: async () => {
        if (!await undo()) return;
        $(place).replaceChildren();
        studio.refocus(after());
      } }, 'Undo'))));
  studio.refocus($(place).querySelector('button')); // what was pressed is hidden now
}

const copyButton = text =>
  h('button.btn.s', { type: 'button',
    onclick: async () => await studio.copy(text()) ? studio.toast('Copied.')
      : studio.toast('The browser lets no page copy here: select the text and press Ctrl C.', true) }, 'Copy');

function drawYaml() {
  const area = $('yaml');
  if (area.dataset.given !== state.yaml && area.value === (area.dataset.given || '')) showYaml();
  drawLines();
}

/** Put the config into the editor, in place of what is there. */
function showYaml() {
  const area = $('yaml');
  area.value = area.dataset.given = state.yaml;
  area.rows = Math.min(28, state.yaml.split('\n').length);
  wrongLines = [];
  $('yaml-wrong').replaceChildren();
  drawLines();
}

/** The numbers of the lines, marked where the config differs from the preset or is wrong. */
function drawLines() {
  const text = $('yaml').value, count = text.split('\n').length, marks = text === state.yaml ? state.marks : [],
    wrong = wrongLines;
  $('discard-yaml').hidden = text === state.yaml;
  fill($('yaml-lines'), [count, marks, wrong], () => Array.from({ length: count }, (_, at) =>
    h(wrong.includes(at + 1) ? 'i.wrong' : marks.includes(at + 1) ? 'i.mark' : 'i', {}, String(at + 1))));
  $('yaml-lines').scrollTop = $('yaml').scrollTop;
}

/** Put the caret at the end of a line of the YAML, in the middle of what is seen of it. */
function toLine(number) {
  const area = $('yaml'), lines = area.value.split('\n'), end = lines.slice(0, number).join('\n').length;
  area.focus({ preventScroll: true });
  area.setSelectionRange(end, end);
  area.scrollTop = $('yaml-lines')
    .scrollTop = area.scrollHeight * (number - 0.5) / lines.length - area.clientHeight / 2;
  area.scrollIntoView({ block: 'nearest' });
}

async function applyYaml() {
  try { await settled(); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    complain(error.message);
    return;
  }
  if ($('yaml').dataset.given !== state.yaml && replaced !== state.yaml) {
    replaced = state.yaml; // a second press means it
    $('yaml-wrong')
      .replaceChildren(studio.alert(
        'The form was changed after this text was begun, here or in another window. Apply again to replace what ' +
        'was changed there by this text; Discard shows the config of the form.'));
    return;
  }
  const answer = await change('new_apply_yaml', { text: $('yaml').value });
  if (!answer) return;
  if (answer.wrong) {
    wrongLines = answer.wrong.map(error => error.line);
    drawLines();
    if (wrongLines.some(Boolean)) toLine(wrongLines.find(Boolean));
    $('yaml-wrong')
      .replaceChildren(h('div.notice.bad', { role: 'alert' },
        h('ul', {}, answer.wrong.map(error => h('li', {}, error.line ? h('a', { href: '#', onclick: event => {
          event.preventDefault();
          toLine(error.line);
        } }, h('b', {}, `Line ${error.line}`)) : '', error.line ? ': ' : '', error.text)))));
    return;
  }
  take(answer);
  showYaml();
}

async function savePreset() {
  const name = h('input', { type: 'text', id: 'preset-name', placeholder: 'my-preset' }), wrong = h('div');
  const save = h('button.btn.main', { type: 'submit' }, 'Save');
  const dialog = h('dialog.dialog#save-dialog', { 'aria-label': 'Save as preset', onclose: () => dialog.remove() },
    h('form', { onsubmit: async event => {
      event.preventDefault();
      try {
        await settled();
        take(await call('new_save_preset', { name: name.value, target }));
      } catch (error) {
        if (!(error instanceof studio.Refused)) throw error;
        wrong.replaceChildren(studio.alert(error.message));
        return;
      }
      dialog.close();
      await loadModels();
      studio.toast(`Saved as ${state.saved}`);
    } }, h('h2', {}, 'Save as preset'), h('label', { htmlFor: 'preset-name' }, 'Name of the preset'), name, wrong,
      h('div.row-end', {}, h('button.btn', { type: 'button', onclick: () => dialog.close() }, 'Cancel'), save)));
  document.body.append(dialog);
  dialog.showModal();
}

async function start() {
  const button = $('start');
  if (button.dataset.busy) return;
  button.dataset.busy = 'true';
  try {
    await settled();
    drawStart();
    if (!state?.ready) { $('why').scrollIntoView({ block: 'center' }); return; }
    complain('');
    const run = await call('new_start');
    askToNotify();
    studio.go('runs', run);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    complain(error.message);
  } finally {
    delete button.dataset.busy;
  }
}

async function enqueue() {
  const gpus = chosenGpus ? [...chosenGpus].sort((a, b) => a - b) : [];
  await studio.act($('enqueue'), $('outcome'), async () => { await settled(); return call('new_enqueue', { gpus }); });
  drawStart();
}

// --- the screen ---------------------------------------------------------------------------------------------------

function draw() {
  for (const name of Object.keys(inputs)) showRow(name);
  drawModels(); drawData(); drawMethods(); drawGroups(); drawStart(); drawGpus(); drawPlan(); drawTime(); drawChanges();
  root.dataset.key = state.key;
  root.dataset.preset = state.preset;
}

async function loadModels() {
  models = await call('new_models');
  if (!state) return;
  drawModels();
  drawStart();
}

function cards() {
  const path = inputOf('data.path', field('data.path'), idOf('data.path'));
  const slider = h('input#rank-slider', { type: 'range', min: 0, max: 8, step: 1, 'aria-label': 'Rank', oninput: () => {
    inputs['adapter.rank'].input.value = String(2 ** Number(slider.value));
    paint(slider); edited('adapter.rank', inputs['adapter.rank'].input.value); } });
  const rank = row('adapter.rank');
  rank.querySelector('.stepper').after(slider);
  return [
    h('section.card#card-model', { 'aria-labelledby': 'h-model' },
      h('div.ttl', {}, h('span.step#step-1', { 'aria-hidden': 'true' }, '1'), h('h2#h-model', {}, 'Model'),
        h('span.grow'), h('span.seg#model-filter', { role: 'group', 'aria-label': 'Which models' })),
      h('div.tiles#tiles'), h('div.get#model-facts'), h('div#left.left-behind'),
      h('p.lab', {}, h('span.l', {}, 'How it is trained '), h('span.dim.sm#presets-note')), h('div.presets#presets'),
      h('details.own-model', {}, h('summary.sm', {}, 'Another model of this family, from a folder or the hub'),
        row('model.path'))),
    h('section.card#card-data', { 'aria-labelledby': 'data-title' },
      h('div.ttl', {}, h('span.step#step-2', { 'aria-hidden': 'true' }, '2'), h('h2#data-title', {}, 'Pictures'),
        h('span#data-tag'), h('span.grow'), h('a.sm', { href: link('data') }, 'Open in Data')),
      h('div.g2', {}, h('div.all', {},
        row('data.path',
          { control: h('span.path', {}, path, h('button.btn#browse', { type: 'button', onclick: browse }, 'Browse …')),
            help: 'Each image with its caption in a .txt file of the same name.',
            textHelp:
              'A folder or file: a document in each .txt file, or in each row of other files, such as .jsonl and ' +
              '.parquet.' }), h('div.chips#recent', { role: 'group', 'aria-label': 'Recent folders' }),
              h('div#left-images.left-behind'), h('div#pair-hint', { 'aria-live': 'polite' })),
        row('data.trigger', { help: 'A word that means nothing yet. It is put where a caption says [trigger].' }),
        row('data.validation', { help: 'Images that are not trained on, to measure progress: a number, or a folder.',
          textHelp: 'A file or folder of texts that are not trained on, to measure progress.' })),
      h('div.thumbs#thumbs'), h('div.data-facts#data-facts')),
    h('section.card#card-method', { 'aria-labelledby': 'h-method' },
      h('div.ttl', {}, h('span.step#step-3', { 'aria-hidden': 'true' }, '3'), h('h2#h-method', {}, 'Method'),
        h('span.dim', {}, 'The most important settings; all others are under More.')),
      h('div.meths#methods', { role: 'radiogroup', 'aria-label': 'Method' }), h('p.help.bad-text#method-error'),
      h('div.g4', {}, rank, row('adapter.block_size'), row('train.steps'), row('optim.lr'), row('train.batch_size')),
      h('div.g2.prompts', {}, row('sample.prompts',
        { help: 'One a line. Samples show how far the run is; [trigger] becomes the trigger word.',
          textHelp: 'One a line. The model goes on from each, to show how far the run is.' }),
        h('div.g2.tight', {}, row('sample.every'), row('data.resolution'), row('data.length'), row('name'),
          row('checkpoint.keep')))),
    h('section.card#card-more', { 'aria-labelledby': 'h-more' },
      h('div.ttl', {}, h('h2#h-more', {}, 'More'), h('span.dim#more-note'), h('span.grow'),
        h('input#search', { type: 'search', placeholder: 'Search: VRAM, warm-up, seed …',
          'aria-label': 'Search settings', oninput: filterGroups })), h('p.sm#found-above', { role: 'status' }),
          h('div#groups', {}, groups()), h('p.dim#no-match', { hidden: true }, 'No setting has these words.')),
  ];
}

function panel() {
  const targets = studio.facts.form.targets;
  return h('aside.side', { 'aria-label': 'Start' },
    h('div.card#card-start', {},
      h('button.btn.main.start#start', { type: 'button', disabled: true, onclick: start }, 'Start'),
      h('div#outcome'), h('div.notice#why', { role: 'status' }, 'Looking …'), h('div#warnings'),
      h('div#gpus', { hidden: true }),
      h('button.btn.wide-btn#enqueue', { type: 'button', disabled: true, onclick: enqueue }, 'Add to queue')),
    h('div.card', {}, h('div.ttl', {}, h('h2#plan-title', {}, 'Memory of each GPU'), h('span.grow'),
      h('select.target#plan-for', { 'aria-label': 'Plan for', onchange: async event => {
        target = event.target.value;
        await refresh();
      } },
        targets.map(name => h('option', { value: name }, name)))), h('div#plan')),
    h('div.card', {}, h('h2', {}, 'Time and space'), h('div#time')),
    h('div.card', {}, h('div.ttl', {}, h('h2', {}, 'Differs from the preset'), h('span.grow'),
      h('button.btn.s#reset', { type: 'button', hidden: true, onclick: reset }, 'Back to the preset')),
      h('div#changes'), h('details#yaml-drawer', {}, h('summary', {}, 'YAML'),
      h('div.yaml', {}, h('div#yaml-lines', { 'aria-hidden': 'true' }),
        h('textarea#yaml', { 'aria-label': 'Config as YAML', spellcheck: false, wrap: 'off', onscroll: () => {
          $('yaml-lines').scrollTop = $('yaml').scrollTop;
        }, oninput: () => {
          wrongLines = [];
          drawLines();
        } })),
      h('div#yaml-wrong'), h('div.chips', {},
        h('button.btn.s#apply-yaml', { type: 'button', onclick: applyYaml }, 'Apply'),
        h('button.btn.s#discard-yaml', { type: 'button', hidden: true, onclick: () => {
          showYaml();
          $('yaml').focus();
        } }, 'Discard'), copyButton(() => $('yaml').value))), h('div#commands')));
}

/** Fetch the state anew, for example for other GPUs. */
async function refresh(known = '') {
  if (isSending || Object.keys(pending).length) return;
  const before = numAnswers;
  const answer = await call('new_state', { known, typing: Boolean(typingPath), target });
  if (before === numAnswers && !isSending && !Object.keys(pending).length) take(answer);
}

studio.screens.new = {
  rail: { key: 'n', icon: 'M10 4v12M4 10h12' },
  title: 'New run',
  build(section) {
    root = section;
    target = studio.facts.form.this_machine;
    fitter =
      newFitter({ settled, change, take, linkTo, target: () => target, preset: () => state.preset,
        value: name => state.rows[name].value });
    root.append(h('div.head', {}, h('h1', {}, 'New run'), h('span.grow'),
      h('a.btn', { href: link('runs') }, 'Copy a run …'),
      h('button.btn#save-preset', { type: 'button', onclick: savePreset }, 'Save as preset')),
      h('div.cols', {}, h('div.left', {}, cards()), panel()),
      h('div.phone', {}, h('button.btn.main', { type: 'button', onclick: start }, 'Start'), h('span.sm#phone-note')));
    studio.shortcut('Ctrl Enter', 'Start the run', start, 'new');
    studio.shortcut('/', 'Search the settings', () => $('search').focus(), 'new');
    loadModels().catch(error => complain(error.message));
  },
  async show() {
    try { await refresh(); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      complain(error.message);
    }
  },
  async tick() {
    try { await refresh(state?.key || ''); if (state) drawTime(); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
    }
  },
};
