// What is typed in New run: it is sent to the server, which keeps the draft.
// @ts-check
import * as studio from './core.js';
import { call, h } from './core.js';
import { loadModels } from './form-model.js';
import { drawStart } from './form-plan.js';
import { TYPING_PAUSE_MS, current, inputs, $ } from './form-state.js';
import { draw } from './form.js';

const AGAIN_MS = 2000;

// --- what is typed ------------------------------------------------------------------------------------------------

/** Remember an edit and send it soon. An edit of the same field that waits is replaced. */
export function edited(name, value, pause = TYPING_PAUSE_MS) {
  current.pending[name] = value;
  clearTimeout(current.timer);
  current.timer = setTimeout(send, pause);
  drawStart();
}

/** Send what was typed; what is typed meanwhile follows when the answer is there. */
async function send() {
  clearTimeout(current.timer);
  if (current.isSending || !Object.keys(current.pending).length) return;
  const edits = current.sent = current.pending;
  current.pending = {};
  current.isSending = true;
  try {
    const answer = await call('new_edit', { edits, typing: Boolean(current.typingPath), target: current.target });
    if (current.isLost) complain('');
    [current.isLost, current.sent] = [false, {}];
    take(answer, edits);
    if ('data.path' in edits) $('left-images').replaceChildren();
    if (answer.left_images.labels.length) offerUndo(
      `Left behind, as it belongs to the former images: ${answer.left_images.labels.join(', ')}. `,
      () => typedAgain(answer.left_images.edits), 'left-images', () => inputs['data.path'].input);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    current.isLost = error.lost;
    if (current.isLost) current.pending = { ...edits, ...current.pending };
    else complain(error.message);
  } finally {
    current.isSending = false;
    current.sent = {};
  }
  if (Object.keys(current.pending).length) current.timer = setTimeout(send, current.isLost ? AGAIN_MS : 0);
  drawStart();
}

/** Wait until everything typed has been answered. Throws `Refused` while the server does not answer. */
export async function settled() {
  if (current.typingPath) { // also where it was sent already: no window reads it before it is left
    const name = current.typingPath;
    current.typingPath = '';
    edited(name, inputs[name].input.value, 0);
  }
  current.isLost = false;
  while (Object.keys(current.pending).length || current.isSending) {
    await send();
    if (current.isLost) throw new studio.Refused('The page’s server does not answer. What you typed is kept here.',
      true);
    await new Promise(resolve => setTimeout(resolve, 30));
  }
}

/** Show an answer of the server. edits: what was sent with the question. */
export function take(answer, edits = {}) {
  if (!answer) return;
  current.numAnswers++;
  current.state = answer;
  current.answered = edits;
  draw();
  const isUnknown = current.models.length > 0 && current.lookedFor !== current.state.preset
    && !current.models.some(model => model.presets.some(preset => preset.name === current.state.preset));
  current.lookedFor = current.state.preset; // a preset that another window has saved is looked for once
  if (isUnknown || current.models.some(hasArrived)) loadModels().catch(error => {
    if (!(error instanceof studio.Refused)) throw error;
  });
}

/** Whether a model that was to be downloaded is here now: by the page, by another window, or by a command. */
function hasArrived(model) {
  if (model.is_here || !model.download) return false;
  const isDrafts = model.path === current.state.rows['model.path']?.value;
  return current.state.downloads[model.path]?.state === 'done'
    || (isDrafts && !current.state.waiting && !current.state.errors.some(error => error.field === 'model.path'));
}

/**
 * Ask the server to change the draft, between what was typed before and after. Says under Start, or elsewhere, what it
 * refuses.
 */
export async function change(name, values = {}, sayRefusal = complain) {
  try {
    await settled();
    current.isSending = true;
    const answer = await call(name, { ...values, target: current.target });
    sayRefusal('');
    return answer;
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    sayRefusal(error.message);
    return null;
  } finally {
    current.isSending = false;
    current.timer = setTimeout(send, 0);
  }
}

export const complain = text => $('outcome').replaceChildren(...(text ? [studio.alert(text)] : []));

export async function typedAgain(values) {
  for (const [name, value] of Object.entries(values)) edited(name, value, 0);
  await settled();
  return true;
}

/**
 * A sentence in `place` with a button that takes back what it tells of; `undo` resolves to whether it did. `after`
 * gives the element that the keyboard is at then.
 */
export function offerUndo(sentence, undo, place = 'left', after = () => $('tiles').querySelector('.on')) {
  $(place)
    .replaceChildren(h('div.notice', { role: 'status' },
      h('p', {}, sentence, h('button.btn.s', { type: 'button', onclick: async () => {
        if (!await undo()) return;
        $(place).replaceChildren();
        studio.refocus(after());
      } }, 'Undo'))));
  studio.refocus($(place).querySelector('button')); // what was pressed is hidden now
}
