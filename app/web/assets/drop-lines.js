// The lines of Drop and name: what is proposed for the pictures, each to be changed.
// @ts-check
import * as studio from './core.js';
import { call, h, fill, counted, link } from './core.js';
import { $, again, current, say } from './drop-state.js';
import { timeRows } from './form-plan.js';
import { refresh } from './drop.js';
import { rehearsalHelp, rehearseButton } from './rehearsal.js';
import { upload } from './upload.js';

const FIELDS = ['name', 'data.trigger', 'sample.prompts'], NO_WRITER = '',
  UNCAPTIONED = /^data\.path: .*images? (has|have) no caption/; // its line says so

/** A line: what it is, its control, and what is said of it. */
const line = (id, what, control, ...more) =>
  h('div.line', {}, h('label.what', { htmlFor: `drop-${id}` }, what), h('div', {}, control, more));

const box = (kind, id, field, more = {}) => h(`${kind}#drop-${id}`, { spellcheck: false, autocomplete: 'off', ...more,
  data: { field }, onchange: event => type(field, event.target.value) });

/** The lines, without what is in them. */
export const lines = () => [
  h('div.line', {}, h('span.what', {}, 'Pictures'),
    h('div', {}, h('div#drop-count', { role: 'status' }), h('div.thumbs#drop-thumbs'), h('div#drop-warnings'))),
  line('writer', 'Captions', h('span.both', {}, h('select#drop-writer', { onchange: event => {
    current.writer = event.target.value;
    drawLines();
  } }), h('button.btn#drop-write', { type: 'button', onclick: write }, 'Write them now')), h('p.sm', {},
    h('span#drop-writing'), ' ', h('a', { href: link('data', 'caption') }, 'Other models and styles'))),
  line('name', 'Run name', box('input', 'name', 'name', { type: 'text' })),
  line('trigger', 'Trigger word', box('input', 'trigger', 'data.trigger', { type: 'text' }),
    h('p.sm', {}, 'A word that means nothing yet. It stands for the pictures in captions and prompts.')),
  line('prompts', 'Prompts', box('textarea', 'prompts', 'sample.prompts', { rows: 4 }), h('p.sm#drop-prompts-note')),
  line('preset', 'Model and preset', h('select#drop-preset', { onchange: event => choose(event.target.value) }),
    h('p.sm#drop-preset-note')),
  h('div.line', {}, h('span.what', {}, 'Time and price'), h('div', {}, h('p#drop-time'), h('span.both.sm', {},
    h('label#drop-costs', { htmlFor: 'drop-price' }, 'A GPU hour costs $'),
    h('input#drop-price', { type: 'number', min: 0, step: 'any', inputMode: 'decimal',
      value: studio.kept('price') || '', oninput: event => {
        studio.kept('price', event.target.value);
        drawTime();
      } }), h('span#drop-cost', { role: 'status' })))),
  h('div.line', {}, h('span.what', {}, 'To see it first'), h('div', {},
    rehearseButton('drop-rehearse', '', takeAll, say), h('p.sm', {}, rehearsalHelp()))),
];

// --- what is in them ----------------------------------------------------------------------------------------------

/**
 * The model that writes captions: the one that was chosen, else the first that is not for pictograms only. Without a
 * GPU none is proposed that has to be downloaded: it would take minutes for a picture.
 */
export function writer() {
  const { missing, writers } = current.lines.captions;
  if (missing === 0) return NO_WRITER;
  const isProposed = one => one.model !== 'demo' && (current.lines.num_gpus || !one.num_bytes);
  return current.writer ?? writers.find(isProposed)?.model ?? NO_WRITER;
}

export function drawLines() {
  const state = current.lines, { images } = state;
  fill($('count'), [images, state.waiting, current.folder], () => !images.is_complete
    ? [state.waiting || 'Reading the pictures …']
    : [h('b', {}, counted(images.count, 'picture')), ` in ${current.folder}`,
      images.held_out ? h('span.dim', {}, `, ${images.held_out} held out to measure progress`) : '']);
  drawWarnings();
  drawThumbnails();
  drawCaptions();
  for (const field of FIELDS) {
    const input = current.root.querySelector(`[data-field='${field}']`),
      value = current.typed[field] ?? state.rows[field];
    if (input !== studio.focused() && input.value !== value) input.value = value;
  }
  drawPreset();
  drawTime();
}

function drawWarnings() {
  const { looks, images, warnings } = current.lines, see = link('data');
  const said = [looks.copies
    && `${counted(looks.copies, 'picture is a near copy', 'pictures are near copies')} of others.`,
    looks.leaks && 'Copies of held-out pictures are trained on, so that validation measures memory.',
    looks.blurred && `${counted(looks.blurred, 'picture is', 'pictures are')} blurred.`,
    looks.flat && `${counted(looks.flat, 'picture has', 'pictures have')} little contrast.`];
  const read = images.warnings.filter(text => !UNCAPTIONED.test(text));
  const all = [...read, ...warnings, ...said].filter(Boolean).map(text => text.replace('data.path: ', ''));
  fill($('warnings'), all, () => all.length
    ? h('div.notice.warn', {}, all.map(text => h('p', {}, text)), h('a', { href: see }, 'Look at them in Data')) : []);
}

let shown = '';
async function drawThumbnails() {
  const { images } = current.lines, key = JSON.stringify([current.folder, images.is_complete && images.count]);
  if (shown === key) return;
  shown = key;
  const found = images.is_complete && images.count ? await call('new_thumbnails').catch(() => []) : [];
  if (shown !== key) return;
  $('thumbs').replaceChildren(...found.map(image =>
    h('img.image', { src: image.src, alt: image.name, loading: 'lazy' })));
}

function drawCaptions() {
  const { missing, writers, job } = current.lines.captions, number = current.lines.images.count;
  const select = $('writer'), names = writers.map(({ model, num_bytes: bytes }) =>
    [model, model === 'demo' ? 'demo, which knows pictograms only'
      : `${model.split('/').at(-1)} writes them${bytes ? `, ${studio.size(bytes)} to download` : ''}`]);
  const none = missing === 0 ? 'All pictures have one' : 'None, only the trigger word';
  fill(select, [missing === 0, names], () => [[NO_WRITER, none], ...names].map(([value, text]) =>
    h('option', { value }, text)));
  select.value = writer();
  const { seconds, num_bytes: toDownload, licence } = writers.find(one => one.model === writer()) ?? {},
    isWritten = missing !== 0 && writer() !== NO_WRITER;
  $('write').hidden = !isWritten || !!job || toDownload > 0 || upload.isBusy();
  const takes = seconds ? `about ${studio.duration(seconds * missing)}, as its last job here took`
      : 'how long is known after the first few',
    first = isWritten ? `: ${takes}; Start ${toDownload ? `downloads ${studio.size(toDownload)} and ` : ''}`
      + 'has them written first' : '';
  studio.say($('writing'), job
    ? `${studio.count(job.answered)} of ${counted(job.total, 'caption')} written${job.left_s
      ? `, ${studio.duration(job.left_s)} left` : ''}.`
    : missing === 0 || !number ? '' : missing === null ? 'Too many pictures to count their captions.'
    : `${studio.count(missing)} of ${counted(number, 'picture')} ${missing === 1 ? 'has' : 'have'} no caption${first}.${
      isWritten && toDownload && licence ? ` Its licence is ${licence}.` : ''}`);
  studio.say($('prompts-note'), isWritten
    ? 'One a line, drawn while it trains. Those of the captions of held-out pictures follow when these are written.'
    : missing === number ? 'One a line, drawn while it trains. With captions, they are those of held-out pictures.'
    : 'One a line, drawn while it trains; from captions of held-out pictures, to be compared with these.');
}

function drawPreset() {
  const { preset, note } = current.lines, { models } = current, select = $('preset');
  fill(select, [models, preset], () => {
    const isListed = models.some(model => model.presets.some(([name]) => name === preset));
    return [...(isListed ? [] : [h('option', { value: preset }, preset)]), ...models.map(model =>
      h('optgroup', { label: model.name }, model.presets.map(([value, words]) => h('option', { value }, words))))];
  });
  select.value = preset;
  studio.say($('preset-note'), note);
}

/** How long the run takes, and what it costs where a GPU hour has a price. */
function drawTime() {
  const { plan, earlier, num_gpus: numGpus } = current.lines, rows = timeRows(current.lines);
  fill($('time'), rows.map(([name, value]) => [name, [value].flat().map(part => part.textContent ?? part)]),
    () => rows.filter(([name]) => name !== 'Disk').map(([name, value], at) =>
      [at ? ' · ' : '', h('span.dim', {}, `${name} `), value]));
  const seconds = earlier?.seconds ?? plan.whole?.[1], price = Number($('price').value);
  $('costs').hidden = $('price').hidden = !numGpus;
  studio.say($('cost'), !numGpus ? 'The processor trains it: no GPU is paid for.'
    : seconds && price ? `the run up to $${(seconds / 3600 * numGpus * price).toFixed(2)}` : '');
}

// --- changing them ------------------------------------------------------------------------------------------------

/** Take what was typed; it stays here until the server has it. */
async function type(field, text) {
  const { folder } = current;
  current.typed[field] = text;
  try {
    await again('drop_edit', { folder, edits: { [field]: text } });
    say('');
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    say(error.message);
  }
  if (current.typed[field] === text) delete current.typed[field];
  await refresh();
}

/** Send what was typed and is not there yet. */
export async function settled() {
  for (const [field, text] of Object.entries(current.typed)) await type(field, text);
}

/** Put all that is proposed into the form. */
export async function takeAll() {
  await settled();
  const { folder, lines: { offered } } = current;
  const taken = Object.entries(offered).filter(([field]) => field !== 'sample.prompts' || writer() === NO_WRITER);
  if (taken.length) await again('drop_edit', { folder, edits: Object.fromEntries(taken) });
}

async function choose(name) {
  try {
    const left = await again('drop_preset', { folder: current.folder, chosen: name });
    say(left.length ? `Left behind, as they belong to the former preset: ${left.join(', ')}.` : '');
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    say(error.message);
  }
  await refresh();
}

async function write() {
  await studio.act($('write'), $('said'), async () => {
    await call('captioning_start', { folder: current.folder,
      values: { model: writer(), trigger: !!current.lines.rows['data.trigger'] } });
  });
  await refresh();
}
