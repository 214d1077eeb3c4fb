// More folders of images, each with its settings, and prior images: rows of the card Pictures of New run.
// @ts-check
import * as studio from './core.js';
import { h, say } from './core.js';
import { browse } from './form-data.js';
import { edited } from './form-draft.js';
import { row } from './form-inputs.js';
import { TYPING_PAUSE_MS, current, field, inputs, $ } from './form-state.js';

const NAME = 'data.folders';
/** Columns that each row shows; the others are behind its "Settings". */
const SHOWN = ['path', 'weight'];

export function moreFolders() {
  const list = h('div.entries#folders'), error = h('p.help#folders-error');
  const element = h('div.field.all', { id: 'row-folders', data: { field: NAME } }, list, error,
    h('button.btn.s#add-folder', { type: 'button', onclick: () => {
      list.append(entry({}));
      number();
      list.lastElementChild?.querySelector('input')?.focus();
    } }, 'Add a folder'));
  const input = /** @type {HTMLElement} */ (element.querySelector('#add-folder'));
  input.setAttribute('aria-describedby', error.id);
  inputs[NAME] = { element, input, help: error, facts: field(NAME), text: '', sent: undefined, draw: drawFolders };
  return h('details.more-folders#more-folders', {},
    h('summary', {}, 'More folders, repeats and prior images ', h('span.dim.sm#num-folders')),
    h('div.g2', {}, element, row('data.repeats'), row('data.regularization'), row('data.regularization_weight')));
}

/** The inputs of one folder. */
function entry(values) {
  const columns = field(NAME).columns, shown = columns.filter(({ key }) => SHOWN.includes(key));
  const others = columns.filter(({ key }) => !SHOWN.includes(key));
  const element = h('div.entry', { role: 'group' }, shown.map(column => cell(column, values[column.key])),
    h('button.btn.ghost.s', { type: 'button', data: { remove: '' }, onclick: () => {
      element.remove();
      number();
      send(0);
      studio.refocus($('add-folder'));
    } }, 'Remove'),
    h('details', { open: others.some(({ key }) => key in values) }, h('summary.sm', {}, 'Settings of its own'),
      h('div.g2', {}, others.map(column => cell(column, values[column.key])))));
  return element;
}

let numCells = 0;
function cell(column, value) {
  const id = `entry-${++numCells}`, data = { key: column.key };
  const isPath = Boolean(column.path);
  const listeners = isPath ? { onchange: () => send(0) } : { oninput: () => send() };
  const input = column.is_switch
    ? h('select', { id, data, onchange: () => send(0) },
      [['', 'as for all'], ['true', 'yes'], ['false', 'no']].map(([word, text]) =>
        h('option', { value: word, selected: word === String(value ?? '') }, text)))
    : h('input', { type: 'text', id, data, spellcheck: false, autocomplete: 'off',
      inputMode: column.number ? 'decimal' : 'text', placeholder: String(column.default ?? ''),
      value: Array.isArray(value) ? value.join(', ') : String(value ?? ''), ...listeners });
  const taken = path => {
    /** @type {HTMLInputElement} */ (input).value = path;
    send(0);
  };
  const control = column.path !== 'folder' ? input : h('span.path', {}, input,
    h('button.btn', { type: 'button', onclick: () => browse(input.value, taken) }, 'Browse …'));
  return h(column.key === 'path' ? 'div.field.all' : 'div.field', { title: column.help },
    h('label.lab', { htmlFor: id }, h('span.l', {}, column.label,
      column.unit ? h('span.of', {}, `, ${column.unit}`) : null), h('span.key', {}, column.key)), control);
}

/** What is typed, as the config has it; a folder without a path is not sent yet. */
function typed() {
  const columns = Object.fromEntries(field(NAME).columns.map(column => [column.key, column]));
  return [...$('folders').children].map(element => Object.fromEntries(
    [...element.querySelectorAll('[data-key]')].filter(input => input.value.trim())
      .map(input => [input.dataset.key, valueOf(columns[input.dataset.key], input.value.trim())])))
    .filter(values => values.path);
}

/** A text that is no number stays text, which the server refuses with what it needs. */
function valueOf(column, text) {
  const numeric = part => part !== '' && Number.isFinite(Number(part)) ? Number(part) : part;
  if (column.is_list) return text.replace(/[[\]]/g, '').split(',').map(part => numeric(part.trim()));
  if (column.is_switch) return text === 'true';
  return column.number ? numeric(text) : text;
}

const send = (pause = TYPING_PAUSE_MS) => edited(NAME, typed().length ? JSON.stringify(typed()) : '', pause);

function number() {
  [...$('folders').children].forEach((element, at) => element.setAttribute('aria-label', `Folder ${at + 1}`));
}

function drawFolders(now) {
  const list = $('folders'), count = now.entries.length;
  say($('num-folders'), [count ? studio.counted(count, 'more folder') : '',
    current.state.rows['data.regularization']?.value ? 'prior images' : ''].filter(Boolean).join(', '));
  const isTyped = NAME in current.pending || NAME in current.sent || list.contains(studio.focused());
  if (isTyped || JSON.stringify(typed()) === JSON.stringify(now.entries)) return;
  list.replaceChildren(...now.entries.map(entry));
  number();
  if (count) $('more-folders').open = true;
}
