// The tab Files of a run: exports with their checks, checkpoints, the report and the folder.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import * as results from './results.js';

const KINDS = { adapter: 'Adapter', merged: 'Merged model', full: 'Full model' };
const KIND_HELP = { adapter: 'A small file that is loaded on top of the base model.',
  merged: 'The base model with the adapter in it: as large as the base model.',
  full: 'All weights of the model.' };
const FORMATS = { auto: 'Automatic', diffusers: 'diffusers', comfyui: 'ComfyUI', kohya: 'kohya', lycoris: 'LyCORIS',
  peft: 'PEFT', single_file: 'Single file' };
const FORMAT_HELP =
  {
    auto:
      'Loads in diffusers and in ComfyUI; two files where one cannot do both. Language models: for peft and ' +
      'transformers.' };
const parts = {}, sums = new Map();
let name = '', data = /** @type {any} */ (null), made = '';

async function refresh() {
  const asked = name;
  const found = await studio.fetched('files_list', { name: asked }, () => asked === name, complain);
  if (!found) return;
  data = found;
  draw();
}

function complain(text) {
  studio.fill(parts.message, text, () => (text ? studio.alert(text) : []));
}

function draw() {
  parts.body.hidden = false;
  if (made !== name) { made = name; fillChoices(data.usual); }
  drawExport();
  drawExported();
  drawCheckpoints();
  studio.say(parts.folder, data.folder);
  parts.film.hidden = data.is_text;
  parts.report.href = ['', 'runs', name, 'report'].map(encodeURIComponent).join('/');
}

// --- export ---------------------------------------------------------------------------------------------------------

/** Fill the three lists so that only what can be combined is offered; `wanted` is kept where it is possible. */
function fillChoices(wanted) {
  const pick = (select, values, words, value) => {
    const chosen = values.includes(value) ? value : values[0];
    studio.fill(select, [name, values], () => values.map(one => h('option', { value: one }, words[one] || one)));
    select.value = chosen;
    return chosen;
  };
  const what = pick(parts.what, Object.keys(data.choices), KINDS, wanted.what);
  const format = pick(parts.format, Object.keys(data.choices[what]), FORMATS, wanted.format);
  pick(parts.dtype, data.choices[what][format], {}, wanted.dtype);
  studio.say(parts.whatHelp, KIND_HELP[what] || '');
  studio.say(parts.formatHelp, FORMAT_HELP[format] || '');
}

const wanted = () => ({ what: parts.what.value, format: parts.format.value, dtype: parts.dtype.value });

function drawExport() {
  const { text, is_going: isGoing, is_failed: isFailed } = data.export;
  parts.start.disabled = isGoing || !data.step;
  studio.say(parts.source,
    data.step ? `From the newest checkpoint, step ${studio.count(data.step)}; from another one by its row below.`
      : 'There is no complete checkpoint to export yet.');
  if (text) studio.fill(parts.state, data.export,
    () => (isFailed ? studio.alert(text)
      : h(isGoing ? 'div.notice' : 'div.notice.ok', { role: 'status' }, h('p', {}, text))));
}

/** Export the checkpoint of a step, or the newest. */
async function start(step = null) {
  parts.start.disabled = true;
  try {
    data.export = await studio.call('files_export', { name, ...wanted(), step });
    drawExport();
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.fill(parts.state, error.message, () => studio.alert(error.message));
    parts.start.disabled = !data.step;
  }
}

// --- exported files ------------------------------------------------------------------------------------------------

function drawExported() {
  const { files, unfinished } = data;
  studio.fill(parts.files, [files, unfinished, [...sums], name], () => {
    if (!files.length && !unfinished.length)
      return h('p.dim', {},
        'No exports yet. A run exports when it ends; a checkpoint can be exported above at any time.');
    return [unfinished.map(unfinishedNote),
      files.length ? table(['File', 'Content', 'Size', 'Written', 'Check', ''], files.map(fileRow)) : null];
  });
}

function unfinishedNote(one) {
  const size = studio.size(one.size);
  return h(one.is_writing ? 'div.notice' : 'div.notice.warn', {}, h('p', {}, one.is_writing
    ? `${one.name} is being written: ${size} so far. It is listed once it is complete and verified.`
    : `An export of ${one.name} was interrupted at ${studio.when(
      one.written)} (${size}). It is not offered; the next export replaces it.`));
}

const table = (heads, rows) =>
  h('div.scroll', {}, h('table.wide', {},
    h('thead', {}, h('tr', {}, heads.map(head => h('th', { scope: 'col' }, head || h('span.sr', {}, 'Actions'))))),
    h('tbody', {}, rows)));
const cell = (label, ...children) => h('td', { data: { label } }, ...children);

function fileRow(file) {
  const step = file.step ? `step ${studio.count(file.step)}` : '';
  const content = [KINDS[file.what] || file.what, FORMATS[file.format] || file.format, file.dtype, step].filter(Boolean)
    .join(' · ');
  const check = file.check ? h(file.is_verified ? 'span.verified' : 'span.unverified', {}, file.check)
    : h('span.dim', {}, 'no record of a check');
  const place = h('div.answer'), sum = sums.get(sumKey(file));
  const download = h('button.btn.s.download', { type: 'button', onclick: event => save(event.target, file, place) },
    file.is_being_replaced ? 'Download the old file' : 'Download');
  const checksum = h('button.btn.s.checksum', { type: 'button', onclick: event => digest(event.target, file, place) },
    'Checksum');
  return h('tr', { data: { file: file.name } }, h('th', { scope: 'row' }, file.name),
    cell('Content', content || '–'), cell('Size', studio.size(file.size)), cell('Written', studio.when(file.written)),
    cell('Check', check, file.is_being_replaced
      ? h('p.replaced', {},
        `A newer file of this name is being written; this is the one of ${studio.when(file.written)}.`) : null,
      sum ? h('p.sum', {}, `SHA-256 ${sum}`) : null, place),
    h('td.actions', {}, download, checksum));
}

const sumKey = file => JSON.stringify([name, file.name, file.written, file.size]);

const save = (button, file, place) => studio.act(button, place, async () => {
  const address = await studio.call('files_offer', { name, file: file.name });
  h('a', { href: address.split('/').map(encodeURIComponent).join('/').replace('%3D', '='),
    download: file.name.split('/').at(-1) }).click();
  return '';
});

const digest = (button, file, place) => studio.act(button, place, async () => {
  place.replaceChildren(h('p.dim', { role: 'status' }, 'Reading the whole file …'));
  sums.set(sumKey(file), await studio.call('files_checksum', { name, file: file.name }));
  drawExported();
  return '';
});

// --- checkpoints ---------------------------------------------------------------------------------------------------

function drawCheckpoints() {
  const { checkpoints } = data, total = checkpoints.reduce((sum, one) => sum + one.size, 0);
  studio.say(parts.total, checkpoints.length
    ? `${studio.counted(checkpoints.length, 'checkpoint')}, ${studio.size(total)}` : '');
  studio.fill(parts.checkpoints, [checkpoints, name], () => {
    if (!checkpoints.length)
      return h('p.dim', {},
        'None yet. A run saves them every checkpoint.every steps, when it is stopped, and at its end.');
    return table(['Step', 'Size', 'Saved', 'Validation loss', ''], checkpoints.map(checkpointRow));
  });
}

function checkpointRow(one) {
  const place = h('div.answer'), title = `step ${studio.count(one.step)}`;
  const remove = h('button.btn.s.delete',
    { type: 'button', disabled: Boolean(one.refusal), title: one.refusal,
      'aria-label': `Delete the checkpoint of ${title}`,
      onclick: event => removeAfterQuestion(event.target, one, place) }, 'Delete');
  const uses = one.is_usable ? [
    use('export', 'Export', `Export ${title}`, () => exportIt(one.step)),
    use('draw', data.is_text ? 'Write' : 'Draw', `${data.is_text ? 'Write' : 'Draw'} with ${title}`,
      () => results.draw(name, data.is_text, [one.step])),
    data.checkpoints.filter(other => other.is_usable).length > 1
      ? use('compare', 'Compare', `Compare ${title} with another checkpoint`,
        () => results.draw(name, data.is_text, compared(one))) : null,
    data.branch ? use('continue', 'Continue …', `Continue from ${title} as a new run`,
      () => results.branch(name, one.step, data.branch)) : null] : [];
  return h('tr', { data: { checkpoint: one.name } },
    h('th', { scope: 'row' }, one.stage ? `${one.stage}, ` : '', studio.count(one.step),
      one.is_best ? h('span.tag.ok.best', {}, 'best') : null,
      one.problem ? h('p.unverified', {}, `not complete: ${one.problem}`) : null),
    cell('Size', studio.size(one.size)), cell('Saved', studio.when(one.saved)),
    cell('Validation loss', one.validation_loss === null ? '–' : studio.short(one.validation_loss)),
    h('td.actions', {}, one.refusal ? h('span.dim.sm', {}, one.refusal) : null, uses, remove, place));
}

const use = (kind, text, label, onclick) =>
  h(`button.btn.s.use-${kind}`, { type: 'button', 'aria-label': label, onclick }, text);

async function exportIt(step) {
  parts.state.scrollIntoView({ block: 'center' });
  await start(step);
}

/** The steps of a checkpoint and of the one that it is compared with: the best, or the newest. */
function compared(one) {
  const usable = data.checkpoints.filter(other => other.is_usable && other !== one);
  const other = usable.find(found => found.is_best) || usable[0];
  return [one.step, other.step].sort((a, b) => a - b);
}

async function removeAfterQuestion(button, one, place) {
  const asked = name, title = `Delete the checkpoint of step ${studio.count(one.step)}?`;
  const answer = await studio.ask(title, `${one.consequence} It frees ${studio.size(one.size)}. This cannot be undone.`,
    ['Delete', 'Keep it'], 'stop');
  if (answer !== 0) return;
  await studio.act(button, place, async () => {
    await studio.call('files_delete_checkpoint', { name: asked, checkpoint: one.name });
    return '';
  });
  if (place.hasChildNodes()) return;
  await refresh();
  studio.refocus(...parts.checkpoints.querySelectorAll('.delete'), parts.report);
}

// --- folder and report ---------------------------------------------------------------------------------------------

async function copyFolder() {
  if (await studio.copy(data.folder)) return studio.toast('Copied.');
  getSelection()?.selectAllChildren(parts.folder);
  return studio.toast('It is selected; press Ctrl C to copy it.');
}

function buildExport() {
  const list = (part, text, help) => {
    parts[part] = h(`select#files-${part}`, { onchange: () => fillChoices(wanted()) });
    return h('label', {}, h('span.l', {}, text), parts[part], help || null);
  };
  parts.whatHelp = h('span.help');
  parts.formatHelp = h('span.help');
  parts.start = h('button.btn.main#files-export', { type: 'button', onclick: () => start() }, 'Export');
  parts.source = h('span.dim.sm#files-source');
  parts.state = h('div#files-state');
  return h('section.card', { 'aria-label': 'Export' }, h('div.ttl', {}, h('h2', {}, 'Export'), parts.source),
    h('div.export', {}, list('what', 'Content', parts.whatHelp), list('format', 'Format', parts.formatHelp),
      list('dtype', 'Precision'), parts.start), parts.state);
}

function build(root) {
  Object.assign(parts, { message: h('div#files-message'), files: h('div#files-exported'),
    checkpoints: h('div#files-checkpoints'), total: h('span.dim'), folder: h('code#files-folder') });
  parts.report = h('a.btn#files-report', { target: '_blank', rel: 'noopener' }, 'Open the report');
  parts.film = h('div.folder', {},
    h('button.btn#files-film', { type: 'button', onclick: () => results.film(name) }, 'Film'),
    h('span.dim.sm', {}, 'A loop and a sheet of the samples, to be shown to others.'));
  parts.body = h('div.stack', { hidden: true }, buildExport(),
    h('section.card', { 'aria-label': 'Exported files' }, h('div.ttl', {}, h('h2', {}, 'Exported files')), parts.files),
    h('section.card', { 'aria-label': 'Checkpoints' }, h('div.ttl', {}, h('h2', {}, 'Checkpoints'), parts.total),
      parts.checkpoints),
    h('section.card', { 'aria-label': 'Run folder' }, h('div.ttl', {}, h('h2', {}, 'Run folder')),
      h('div.folder', {}, parts.folder, h('button.btn.s#files-copy', { type: 'button', onclick: copyFolder }, 'Copy')),
      h('p.dim.sm', {},
        'Config, events, logs, samples, checkpoints and exports of the run: copy this folder to keep all of it.'),
      h('div.folder', {}, parts.report,
        h('span.dim.sm', {},
          'Figures, charts, samples and config in one page, report.html, which can be sent or archived.')),
      parts.film));
  root.append(parts.message, parts.body);
}

async function show(run) {
  if (run !== name) {
    name = run;
    data = null;
    parts.body.hidden = true;
    for (const part of [parts.state, parts.files, parts.checkpoints]) {
      part.replaceChildren();
      delete part.dataset.key;
    }
  }
  await refresh();
}

studio.runTabs.files = { build, show, tick: refresh };
