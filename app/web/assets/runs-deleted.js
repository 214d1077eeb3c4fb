// The deleted runs below the table of runs: restored, or removed from the disk for good.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { reload } from './runs.js';

const $ = () => document.querySelector('#deleted-runs');

export function drawDeleted(deleted) {
  $().hidden = !deleted.length;
  const size = deleted.reduce((sum, run) => sum + run.size, 0);
  studio.fill($(), deleted, () => [
    h('summary', {}, `Deleted runs (${studio.count(deleted.length)}, ${studio.size(size)})`),
    h('ul', {}, deleted.map(run => h('li', {},
      h('span', {}, run.title, ' ', h('span.dim', {}, `${run.title === run.run ? '' : `${run.run} · `}${
        studio.size(run.size)} · deleted ${studio.when(run.deleted_at)}`)),
      h('button.btn.s', { type: 'button', 'aria-label': `Restore ${run.title}`, data: { deletion: run.name },
        onclick: () => restore([run.name]) }, 'Restore')))),
    h('button.btn.s.stop#empty-runs', { type: 'button', onclick: () => empty(deleted, size) },
      'Empty for good …')]);
}

/** Move deleted runs back to where they were. */
export async function restore(deletions) {
  const answer = await answered('runs_restore', { deletions });
  if (!answer) return;
  if (answer.runs.length) studio.toast(`${studio.counted(answer.runs.length, 'run')} restored.`);
  if (answer.refused.length) studio.toast(answer.refused.join('\n'), true);
}

async function empty(deleted, size) {
  const text = `${studio.counted(deleted.length, 'deleted run')} with all checkpoints, samples, exports and logs. `
    + `It frees ${studio.size(size)}. This cannot be undone.`;
  if (await studio.ask('Remove the deleted runs for good?', text, ['Remove for good', 'Keep them'], 'stop')) return;
  const removed = await answered('runs_empty', { deletions: deleted.map(run => run.name) });
  if (removed) studio.toast(`${studio.counted(removed, 'run')} removed, ${studio.size(size)} freed.`);
}

/** Call the server, show why it refuses, and then what there is. */
async function answered(name, values) {
  let answer = null;
  try {
    answer = await studio.call(name, values);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
  }
  if (studio.shown === 'runs') await reload();
  studio.refocus($().querySelector('summary'), document.querySelector('#runs-filter'));
  return answer;
}
