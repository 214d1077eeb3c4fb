// The inputs of New run: a row for each field of the config.
// @ts-check
import * as studio from './core.js';
import { h, fill, say } from './core.js';
import { glanceSoon } from './form-data.js';
import { edited } from './form-draft.js';
import { inputs, field, TYPING_PAUSE_MS, PATH_PAUSE_MS, current } from './form-state.js';

export const idOf = name => `field-${name.replaceAll('.', '-')}`;

/** The input of a field with its label, key, unit, help and place for an error. */
export function row(name, options = {}) {
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
  const [text, textHelp] = facts.help_on_card;
  inputs[name] = { element, input, help, facts, text: text || facts.help, textHelp, sent: undefined };
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

export function inputOf(name, facts, id) {
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
    if (current.state && !(name in current.pending) && !(name in current.sent)) showValue(inputs[name],
      current.state.rows[name].value);
  });
  if (facts.path) {
    element.addEventListener('input', () => {
      current.typingPath = name;
      if (facts.path === 'folder') glanceSoon(name, element);
    });
    const typed = () => { current.typingPath = ''; edited(name, element.value, 0); };
    element.addEventListener('change', typed);
    // typed, and back to what it was: no change
    element.addEventListener('blur', () => { if (current.typingPath === name) typed(); });
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

export const paint = slider => slider.style.setProperty('--p',
  `${100 * (slider.value - slider.min) / (slider.max - slider.min)}%`);

/** Show a field's value, unless it is being typed or waits to be sent. */
export function showRow(name) {
  const shown = inputs[name], now = current.state.rows[name];
  if (!shown || !now) return;
  const { element, input, help, facts } = shown;
  element.toggleAttribute('hidden', Boolean(now.hidden) && !now.error);
  element.classList.toggle('wrong', Boolean(now.error));
  element.classList.toggle('changed', Boolean(now.changed));
  input.setAttribute('aria-invalid', String(Boolean(now.error)));
  for (const chip of element.querySelectorAll('.chip[data-word]')) chip.setAttribute('aria-pressed',
    String(chip.dataset.word === now.value));
  // else it says what the folder holds
  if (current.typingPath !== name || now.error) say(help,
    now.error || (current.state.is_text && shown.textHelp) || shown.text || '');
  if (shown.draw) { shown.draw(now); return; }
  if (facts.kind === 'choice' && input.matches('select')) {
    fill(input, now.choices, () => now.choices.map(word => h('option', { value: word }, word)));
    input.removeAttribute('data-value');
  }
  if (input.placeholder !== undefined) input.placeholder = now.placeholder || '';
  const isFocused = studio.focused() === input,
    isTyped = name in current.pending || name in current.sent
      || (isFocused && (name in current.answered || now.value === shown.sent));
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
