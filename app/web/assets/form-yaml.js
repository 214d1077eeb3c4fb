// What differs from the preset in New run, and the config as YAML.
// @ts-check
import * as studio from './core.js';
import { h, fill, call } from './core.js';
import { settled, take, change, complain, typedAgain, offerUndo } from './form-draft.js';
import { loadModels } from './form-model.js';
import { linkTo } from './form-more.js';
import { current, $ } from './form-state.js';

export function drawChanges() {
  fill($('changes'), [current.state.changes, current.state.preset], () => current.state.changes.length
    ? current.state.changes.map(change => h('div.facts', {}, linkTo(change.field, change.label),
      h('span.dim', {}, change.old === '–' ? change.new : `${change.old} → ${change.new}`)))
    : [h('p.dim', {}, `As in the preset ${current.state.preset}.`)]);
  $('reset').hidden = !current.state.changes.length;
  fill($('commands'), [current.state.commands],
    () => current.state.commands.map(
      ([title, text]) => h('details', {}, h('summary', {}, title), h('pre.code', { tabIndex: 0 }, text),
        copyButton(() => text))));
  drawYaml();
}

/** Undo every edit; one click brings them back. */
export async function reset() {
  try { await settled(); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    complain(error.message);
    return;
  }
  const values = Object.fromEntries(
    current.state.changes.map(change => [change.field, current.state.rows[change.field].value]));
  const answer = await change('new_reset');
  if (!answer) return;
  take(answer);
  offerUndo('The form is as in the preset again. ', () => typedAgain(values));
}

export const copyButton = text =>
  h('button.btn.s', { type: 'button',
    onclick: async () => await studio.copy(text()) ? studio.toast('Copied.')
      : studio.toast('The browser lets no page copy here: select the text and press Ctrl C.', true) }, 'Copy');

function drawYaml() {
  const area = $('yaml');
  if (area.dataset.given !== current.state.yaml && area.value === (area.dataset.given || '')) showYaml();
  drawLines();
}

/** Put the config into the editor, in place of what is there. */
export function showYaml() {
  const area = $('yaml');
  area.value = area.dataset.given = current.state.yaml;
  area.rows = Math.min(28, current.state.yaml.split('\n').length);
  current.wrongLines = [];
  $('yaml-wrong').replaceChildren();
  drawLines();
}

/** The numbers of the lines, marked where the config differs from the preset or is wrong. */
export function drawLines() {
  const text = $('yaml').value, count = text.split('\n').length,
    marks = text === current.state.yaml ? current.state.marks : [],
    wrong = current.wrongLines;
  $('discard-yaml').hidden = text === current.state.yaml;
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

export async function applyYaml() {
  try { await settled(); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    complain(error.message);
    return;
  }
  if ($('yaml').dataset.given !== current.state.yaml && current.replaced !== current.state.yaml) {
    current.replaced = current.state.yaml; // a second press means it
    $('yaml-wrong')
      .replaceChildren(studio.alert(
        'The form was changed after this text was begun, here or in another window. Apply again to replace what ' +
        'was changed there by this text; Discard shows the config of the form.'));
    return;
  }
  const answer = await change('new_apply_yaml', { text: $('yaml').value });
  if (!answer) return;
  if (answer.wrong) {
    current.wrongLines = answer.wrong.map(error => error.line);
    drawLines();
    if (current.wrongLines.some(Boolean)) toLine(current.wrongLines.find(Boolean));
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

export async function savePreset() {
  const name = h('input', { type: 'text', id: 'preset-name', placeholder: 'my-preset' }), wrong = h('div');
  const save = h('button.btn.main', { type: 'submit' }, 'Save');
  const dialog = h('dialog.dialog#save-dialog', { 'aria-label': 'Save as preset', onclose: () => dialog.remove() },
    h('form', { onsubmit: async event => {
      event.preventDefault();
      try {
        await settled();
        take(await call('new_save_preset', { name: name.value, target: current.target }));
      } catch (error) {
        if (!(error instanceof studio.Refused)) throw error;
        wrong.replaceChildren(studio.alert(error.message));
        return;
      }
      dialog.close();
      await loadModels();
      studio.toast(`Saved as ${current.state.saved}`);
    } }, h('h2', {}, 'Save as preset'), h('label', { htmlFor: 'preset-name' }, 'Name of the preset'), name, wrong,
      h('div.row-end', {}, h('button.btn', { type: 'button', onclick: () => dialog.close() }, 'Cancel'), save)));
  document.body.append(dialog);
  dialog.showModal();
}
