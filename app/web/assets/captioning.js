// The panel "Caption with a model" of the screen Data: what a model is asked, how far it is, undo.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, counted } from './core.js';
import { isRunning, progressBar, showShare } from './downloads.js';

const STYLES = [['sentence', 'One or two sentences'], ['detailed', 'A paragraph'], ['tags', 'Tags']];
const WHICH = [['missing', 'Images without a caption'], ['model', 'Also captions that a model wrote'],
  ['all', 'All images; Undo brings captions back']];
const STORED = [['none', '16 bits'], ['fp8', 'fp8'], ['int8', 'int8'], ['nf4', '4 bits (nf4)']];
const DEVICES = [['auto', 'GPU, if there is one'], ['cuda', 'GPU'], ['cpu', 'Processor']];
const NO_WORDS = { starting: 'Starting …', loading: 'Loading the model …' };
/** @type {HTMLElement} */
let root;
let refreshCards = /** @type {any} */ (null), state = /** @type {any} */ (null), seen = '', isAsking = false,
  isOwed = false, wasFilled = false, shownImage = '', key = '';
const parts = {};

// --- the form -----------------------------------------------------------------------------------------------------

const options = choices => choices.map(([value, text]) => h('option', { value }, text));
const row = (label, control, help = '') =>
  h('label.field', {}, h('span', {}, label), control, help ? h('small.dim', {}, help) : null);
const choice = (id, choices) => (parts[id] = h(`select#caption-${id}`, {}, options(choices)));
const text = (id, placeholder, list) =>
  (parts[id] = h(`input#caption-${id}`,
    { type: 'text', placeholder, autocomplete: 'off', spellcheck: false, ...(list && { list }) }));
const check = (id, label) => h('label.check', {}, (parts[id] = h(`input#caption-${id}`, { type: 'checkbox' })), label);

function form() {
  parts.prompt = h('textarea#caption-prompt', { rows: 3, placeholder: 'As the style says' });
  parts.ranks = h('input#caption-ranks', { type: 'number', min: 1, max: 64, value: 1 });
  parts.start = h('button.btn.main#caption-start', { type: 'submit' }, 'Caption');
  return (parts.form = h('form', { oninput: () => { wasFilled = true; }, onsubmit: event => {
    event.preventDefault();
    start();
  } },
    row('Model', text('model', 'Qwen/Qwen2.5-VL-3B-Instruct', 'caption-models'),
      'A folder, or a downloaded Hugging Face id, of a vision-language model. To try it without one, type demo, ' +
      'which names pictograms and nothing else'),
    h('datalist#caption-models', {}, h('option', { value: 'demo' }, 'Names pictograms; comes with the program')),
    (parts.offers = h('ul#caption-offers', { 'aria-label': 'Models that write captions' })), parts.offered = h('div'),
    row('Style', choice('style', STYLES)), row('Do not mention', text('omit', 'watermark, the name of the person')),
    row('Which images', choice('overwrite', WHICH)),
    h('label.field#caption-folder-row', { hidden: true }, h('span', {}, 'Folder'),
      (parts.folder = h('select#caption-folder', { onchange: () => look() }))),
    check('trigger', 'Put [trigger] in front'),
    h('details', {}, h('summary', {}, 'Model and devices'), row('Instruction', parts.prompt),
      row('Stored in', choice('quantize', STORED), 'Fewer bits need less GPU memory'),
      row('Computes on', choice('device', DEVICES)),
      row('Processes', parts.ranks, 'One per GPU; each captions images of its own'),
      check('shard', 'The processes share one copy of the model')),
    h('div.row', {}, parts.start)));
}

const values = () =>
  ({ model: parts.model.value.trim(), style: parts.style.value, omit: parts.omit.value.trim(),
    overwrite: parts.overwrite.value, trigger: parts.trigger.checked, prompt: parts.prompt.value.trim(),
    quantize: parts.quantize.value, device: parts.device.value, ranks: Number(parts.ranks.value) || 1,
    shard: parts.shard.checked });

/** Show what was asked the last time, once, and never over what was typed. */
function fillForm(request) {
  if (wasFilled || !request) return;
  wasFilled = true;
  for (const name of ['model', 'style', 'omit', 'overwrite', 'prompt', 'quantize', 'device', 'ranks']) parts[
    name].value = request[name];
  for (const name of ['trigger', 'shard']) parts[name].checked = request[name];
}

// --- models that are offered ---------------------------------------------------------------------------------------

/** A line for each model: its size, its licence, and the button that downloads, pauses or takes it. */
function drawOffers() {
  const { models } = state;
  const kinds = models.map(({ id, is_here: isHere, download }) => [id, isHere, download?.state, download?.message]);
  fill(parts.offers, kinds, () => models.map(offer));
  for (const [at, model] of models.entries()) {
    const found = model.download, bar = parts.offers.children[at].querySelector('.bar');
    if (!bar) continue;
    showShare(bar, found);
    say(bar.nextSibling, `${studio.size(found.num_bytes)} of ${studio.size(found.total_bytes)}`);
  }
}

function offer(model) {
  const { id, name, bytes, licence, licence_note: note, page, is_here: isHere, download } = model;
  const ask = (word, action) => h('button.btn.s', { type: 'button', 'aria-label': `${word} ${name}`, onclick: event =>
    studio.act(event.currentTarget, parts.offered, async () => { await action(); return ''; }) }, word);
  const load = (word, done) => ask(word, async () => { await call(done, { model: id }); await look(); });
  return h('li', { data: { model: id } }, h('div.row', {}, h('b', { title: id }, name), h('span.grow'), isHere
    ? ask('Use', () => { parts.model.value = id; wasFilled = true; })
    : isRunning(download) ? load('Pause', 'captioning_pause')
    : load(download ? 'Continue' : 'Download', 'captioning_download')),
  h('span.sm.dim', {}, isHere ? 'is on this machine · ' : `${studio.size(bytes)} · `,
    h('a', { href: page, target: '_blank', rel: 'noopener noreferrer', title: note }, licence)),
  isHere || !download ? null : [
    progressBar('div.bar', name), h('span.sm.dim'),
    isRunning(download) || !download.message ? null : download.state === 'failed' ? studio.alert(download.message)
      : h('p.sm.dim', {}, download.message)]);
}

// --- what is going on ---------------------------------------------------------------------------------------------

function draw() {
  const { job, folders } = state;
  root.querySelector('#caption-folder-row').hidden = folders.length < 2;
  fill(parts.folder, folders, () => folders.map(folder => h('option', { value: folder }, folder)));
  parts.folder.value = state.folder;
  say(parts.start, `Caption ${state.folder.split('/').at(-1)}`);
  fillForm(job?.request);
  drawOffers();
  const isRunning = !!job?.is_running;
  parts.form.hidden = isRunning;
  parts.now.hidden = !isRunning;
  if (isRunning) drawNow(job);
  fill(parts.end, isRunning || !job ? 0
    : [job.name, job.state, job.is_undone, job.written, job.problems, job.kept, job.error, job.warnings],
    () => (isRunning || !job || job.is_undone ? [] : ended(job)));
}

function drawNow(job) {
  const isLooking = job.state === 'sampling';
  parts.stop.disabled = job.is_stopping;
  say(parts.stop, job.is_stopping ? 'Stopping …' : 'Stop');
  say(parts.count, isLooking ? `${studio.count(job.answered)} of ${counted(job.total, 'image')}` : NO_WORDS[job.state]);
  say(parts.rate, isLooking && job.rate
    ? `${studio.short(60 * job.rate)} per minute, ${studio.duration(job.left_s)} left` : '');
  parts.bar.firstChild.style.width = `${job.total ? 100 * job.answered / job.total : 0}%`;
  parts.bar.setAttribute('aria-valuenow', String(job.answered));
  parts.bar.setAttribute('aria-valuemax', String(job.total));
  parts.last.hidden = !job.last;
  if (!job.last) return;
  say(parts.text, job.last.text);
  say(parts.name, job.last.name);
  if (shownImage !== job.last.image) showImage(shownImage = job.last.image);
}

async function showImage(image) {
  try {
    const address = await call('data_thumbnail', { image });
    if (shownImage === image) parts.picture.src = address;
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    parts.picture.removeAttribute('src');
  }
}

function ended(job) {
  const words = { finished: '', stopped: ` Stopped at ${studio.count(job.answered)} of ${counted(job.total, 'image')}.`,
    failed: '' }[job.state] ?? '';
  return [
    job.state === 'failed' ? studio.alert(job.error || 'The job ended without a message.') : null,
    h(job.state === 'finished' ? 'div.notice.ok' : 'div.notice', { role: 'status' },
      h('p', {}, `${counted(job.written, 'caption')} written by ${job.request.model}.${words}`)),
    sentences(job.problems, job.num_problems, 'without a caption'),
    sentences(job.kept, job.num_kept, 'left as they are'),
    job.warnings.map(warning => h('p.sm.dim', {}, warning)),
    h('div.row', {}, job.state !== 'finished'
      ? h('button.btn.s#caption-resume',
        { type: 'button', onclick: event => act(event.currentTarget, 'captioning_resume') }, 'Continue') : null,
      job.written ? h('button.btn.s#caption-undo', { type: 'button', onclick: event => undo(event.currentTarget) },
        `Take back these ${counted(job.written, 'caption')}`) : null)];
}

const sentences = (list, number, what) => number
  ? h('details', {}, h('summary', {}, `${counted(number, 'image')} ${what}`),
    h('ul.sm', {}, list.map(sentence => h('li', {}, sentence)),
      number > list.length ? h('li', {}, `and ${studio.count(number - list.length)} more`) : null)) : null;

// --- asking -------------------------------------------------------------------------------------------------------

/**
 * Ask for the newest job. A question while another is on its way is asked after it: the answer on its way is of before.
 */
async function look() {
  if (!root) return;
  if (isAsking) { isOwed = true; return; }
  isAsking = true;
  try { do { isOwed = false; await ask(); } while (isOwed); } finally { isAsking = false; }
}

async function ask() {
  try {
    state = await call('captioning_state', { folder: parts.folder.value });
    fill(parts.message, '', () => []);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (!error.lost) fill(parts.message, error.message, () => studio.alert(error.message));
    return;
  }
  draw();
  const now = JSON.stringify([state.job?.name, state.job?.written, state.job?.is_running, state.job?.is_undone]),
    isFirst = seen === '';
  if (now === seen) return;
  seen = now;
  if (!isFirst) await refreshCards();
}

async function act(button, name) {
  const { folder, job } = state;
  await studio.act(button, parts.said, async () => { await call(name, { job: job.name, folder }); return ''; });
  await look();
}

async function start() {
  await studio.act(parts.start, parts.said, async () => {
    if (!values().model) throw new studio.Refused('Name a model: a folder, a downloaded Hugging Face id, or demo.');
    const job = await call('captioning_start', { folder: state.folder, values: values() });
    return job ? '' : 'Every image has a caption. Which images, below, can include those with one.';
  });
  await look();
  studio.refocus(parts.stop, parts.start);
}

async function undo(button) {
  const { folder, job } = state;
  const title = `Take back ${counted(job.written, 'caption')}?`,
    text = `${job.request.model} wrote them in ${folder}. Captions that were changed since stay.`;
  if (await studio.ask(title, text, ['Take back', 'Keep them'], 'stop') !== 0) return;
  await studio.act(button, parts.said, async () => {
    const [restored, left] = await call('captioning_undo', { job: job.name, folder });
    return `${counted(restored, 'caption')} taken back.`
      + (left ? ` ${studio.count(left)} were changed since and stay.` : '');
  });
  await look();
  studio.refocus(parts.start);
}

export const captioning = {
  /** Make the panel. refresh: called when captions were written or taken back. */
  panel(refresh) {
    refreshCards = refresh;
    parts.message = h('div');
    parts.said = h('div#caption-said', { 'aria-live': 'polite' });
    parts.end = h('div#caption-end');
    parts.bar = h('div.bar', { role: 'progressbar', 'aria-label': 'Images captioned', 'aria-valuemin': '0' }, h('i'));
    parts.stop = h('button.btn.s#caption-stop',
      { type: 'button', onclick: event => act(event.currentTarget, 'captioning_stop') }, 'Stop');
    parts.last = h('figure', { hidden: true }, (parts.picture = h('img', { alt: '' })),
      h('figcaption', {}, (parts.name = h('b.sm')), (parts.text = h('p'))));
    parts.now = h('div.now#caption-now', { hidden: true },
      h('div.row', {}, (parts.count = h('b.num', { role: 'status' })), h('span.grow'), parts.stop), parts.bar,
      (parts.rate = h('p.dim.sm')), parts.last,
      h('p.dim.sm', {}, 'It goes on when this page is closed.'));
    root = h('section.card#card-captioning', { 'aria-labelledby': 'h-captioning', hidden: true },
      h('div.ttl', {}, h('h2#h-captioning', {}, 'Caption with a model')), parts.message, parts.now, parts.end,
      parts.said, form());
    return root;
  },
  look,
  /** The screen shows other images now: nothing of a job of another folder stays. */
  shown(data) {
    if (!root || key === data.key) return;
    const isFirst = key === '';
    key = data.key;
    if (isFirst) return;
    parts.said.replaceChildren();
    parts.now.hidden = true;
    fill(parts.end, 0, () => []);
    look();
  },
  async tick() {
    if (state?.job?.is_running || state?.models?.some(model => isRunning(model.download))) await look();
  },
};
