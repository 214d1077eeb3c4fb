// The newest samples of a run, and the prompts to come.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { lightbox } from './lightbox.js';
import { parts, current } from './run-state.js';
import { refresh } from './run.js';

const MOST_SHOWN = 12;

// --- newest samples -------------------------------------------------------------------------------------------------

export function saySampleSteps() {
  const next = current.data.head?.next_sample, shown = current.strip.chosen;
  studio.say(parts.when, shown === null ? '' : shown ? `step ${studio.count(shown)}` : 'before training');
  studio.say(parts.next, next ? `The next at step ${studio.count(next.step)}, in about ${studio.duration(next.eta_s)}.`
    : '');
}

export function drawSteps({ steps, num_steps, num_samples }) {
  const numbers = steps.map(one => one.step), newest = numbers.at(-1),
    wasNewest = current.strip.chosen === null || current.strip.chosen === current.strip.newest;
  current.strip.newest = newest;
  current.strip.answers.clear(); // files may have been drawn again
  studio.say(parts.tabs.querySelector('.count'), num_samples ? studio.count(num_samples) : '');
  parts.samplesCard.hidden = false;
  studio.fill(parts.steps, [numbers, num_steps], () => [
    ...numbers.map(step => h('button', { type: 'button', data: { step }, onclick: () => pick(step) },
      studio.count(step))),
  ]);
  parts.steps.hidden = numbers.length < 2;
  parts.all.hidden = num_steps <= numbers.length;
  parts.all.href = studio.link('runs', current.name, 'samples');
  studio.say(parts.all, `all ${studio.count(num_steps)}`);
  pick(numbers.length ? (wasNewest || !numbers.includes(current.strip.chosen) ? newest : current.strip.chosen) : null);
}

export async function pick(step) {
  current.strip.chosen = step;
  for (const chip of parts.steps.children) chip.setAttribute('aria-pressed',
    String(Number(chip.dataset.step) === step));
  saySampleSteps();
  const of = current.data.samples.steps.find(one => one.step === step);
  if (!of) return drawStrip([], []);
  const asked = current.strip, cells = of.cells.slice(0, MOST_SHOWN);
  let answers = current.strip.answers.get(step);
  if (!answers) {
    try {
      answers = await studio.call('samples_images',
        { name: current.name, cells: cells.map(({ index, prompt }) => ({ index, prompt, step })) });
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      if (error.lost) { asked.isOwed = true; return; }
      answers = cells.map(() => ({ problem: error.message }));
    }
    if (asked !== current.strip || current.strip.chosen !== step) return;
    current.strip.answers.set(step, answers);
  }
  drawStrip(cells, answers, of.cells.length);
}

function drawStrip(cells, answers, count = 0) {
  studio.fill(parts.strip, [cells, answers],
    () => cells.map((cell, at) => figure(cell, answers[at], () => open(cells, answers, at))));
  parts.strip.classList.toggle('texts', cells.some(cell => cell.kind === 'text'));
  current.strip.counts = [cells.length, count];
  sayStripNote();
}

export function sayStripNote() {
  if (!current.strip.counts) return;
  const [shown, count] = current.strip.counts;
  const running = current.data.head.has_prompts ? 'No samples yet. Sample generates some after this step.'
    : 'This run has no prompts to generate samples from.';
  studio.say(parts.stripNote,
    shown ? (count > shown ? `${shown} of ${studio.count(count)} prompts` : '') : current.data.head.is_running ? running
      : 'No samples were generated.');
  parts.stripNote.hidden = !parts.stripNote.textContent;
}

function figure(cell, answer, act) {
  const caption = h('figcaption', { title: cell.prompt }, cell.prompt || '(no prompt)');
  if (answer.problem) return h('figure', {}, h('div.missing', { title: answer.problem }, 'missing'), caption);
  const shown = studio.sample(answer, `${cell.prompt}, step ${studio.count(cell.step)}`);
  return h('figure', {}, h('button.enlarge', { type: 'button', title: 'Open in full size', onclick: act }, shown),
    caption);
}

function open(cells, answers, index) {
  const run = current.name, shown = cells.map((cell, at) => ({ cell, answer: answers[at] }))
    .filter(({ answer }) => !answer.problem);
  const items = shown.map(({ cell: { index: number, prompt, step }, answer }) => ({
    title: step ? `Step ${studio.count(step)}` : 'Before training', text: prompt, written: answer.text,
    played: studio.played(run, answer),
    load: async () => {
      try {
        return (await studio.call('samples_images',
          { name: run, cells: [{ index: number, prompt, step }], is_full: true }))[0].src || null;
      } catch (error) {
        if (!(error instanceof studio.Refused)) throw error;
        return null;
      }
    } }));
  lightbox(items, shown.findIndex(({ cell }) => cell === cells[index]));
}

// --- prompts to come ------------------------------------------------------------------------------------------------

export function drawPrompts({ asked }) {
  studio.say(parts.asked, asked ? `The next samples are of ${studio.counted(asked.length, 'other prompt')}.` : '');
}

export function editPrompts() {
  const { now, asked } = current.data.prompts, rows = h('div.prompt-rows'), place = h('div');
  let shown = JSON.stringify(asked || now); // what the dialog was made from
  const remove = row => {
    const next = row.nextElementSibling || row.previousElementSibling;
    row.remove();
    (next?.firstElementChild || more).focus();
  };
  const add = text => rows.append(
    h('div.prompt-row', {}, h('textarea', { rows: 2, value: text, 'aria-label': `Prompt ${rows.children.length + 1}` }),
      h('button.btn.s', { type: 'button', title: 'Remove this prompt', 'aria-label': 'Remove this prompt',
        onclick: event => remove(event.currentTarget.parentElement) }, '×')));
  const save = h('button.btn.main#prompts-save', { type: 'button', onclick: () => studio.act(save, place, async () => {
    const prompts = [...rows.querySelectorAll('textarea')].map(box => box.value).filter(text => text.trim());
    await refresh();
    const other = current.data.prompts.asked || current.data.prompts.now;
    if (JSON.stringify(other) !== shown) {
      shown = JSON.stringify(other); // a second press means it
      throw new studio.Refused(
        `Another window has changed the prompts meanwhile: ${other.map(text => `“${text}”`)
          .join(', ')}. Press again to use yours instead.`);
    }
    await studio.call('run_prompts', { name: current.name, prompts });
    dialog.close();
    await refresh();
  }) }, 'Use these from now on');
  const more = h('button.btn.s', { type: 'button', onclick: () => {
    add('');
    rows.querySelector(':scope > :last-child > *').focus();
  } }, 'Add a prompt');
  const dialog = h('dialog.dialog#prompts',
    { 'aria-label': 'Prompts of the samples to come', onclose: () => dialog.remove() },
    h('h2', {}, 'Prompts of the samples to come'),
    h('p', {}, 'They hold for the rest of this run. Its config and the samples so far stay as they are.'), rows,
    more, place,
    h('div.row-end', {}, h('button.btn', { type: 'button', onclick: () => dialog.close() }, 'Cancel'), save));
  (asked || now).forEach(add);
  if (!rows.children.length) add('');
  document.body.append(dialog);
  dialog.showModal();
}
