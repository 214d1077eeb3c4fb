// The head of the screen of one run: state, figures, buttons, and how the run ended.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { askToNotify, notices } from './frame.js';
import * as rehearsal from './rehearsal.js';
import { rename } from './rename.js';
import * as results from './results.js';
import { saySampleSteps, sayStripNote } from './run-samples.js';
import { TABS, parts, current } from './run-state.js';
import { drawSplit, refresh, showLog } from './run.js';

const MOST_MARKS = 40;
const WORDS = { created: 'not started', encoding: 'encoding', stuck: 'no sign of life' };
const MOODS = { training: 'ok', finished: 'ok', failed: 'bad', stopped: 'warn', stuck: 'warn', created: '' };

// --- head -----------------------------------------------------------------------------------------------------------

export function drawTitle({ title, id }) {
  studio.say(parts.title, title);
  studio.say(parts.id, id);
  if (studio.shown === 'run') document.title = `${title} · ShardStudio`;
  for (const [at, [key]] of TABS.entries()) parts.tabs.children[at].href =
    studio.link('runs', current.name, ...(key ? [key] : []));
}

/** Give the run another name. */
export function renameThis() {
  return studio.act(parts.rename, parts.message, async () => {
    if (await rename(current.name, parts.title.textContent)) await refresh();
  });
}

export function drawHead(head) {
  const state = head.is_stuck ? 'stuck' : head.state, word = WORDS[state] || state;
  Object.assign(parts.run.dataset, { run: current.name, state: head.state, step: head.step });
  parts.run.classList.toggle('stuck', head.is_stuck);
  studio.fill(parts.state, [state, head.is_running],
    () => [head.is_running && !head.is_stuck ? h('i.dot') : null, word]);
  parts.state.className = `tag ${MOODS[state] ?? 'acc'}`;
  studio.say(parts.about, head.about);
  studio.say(parts.sentence, head.sentence);
  // said by figures and cards
  parts.sentence.hidden = !head.is_stuck && ['training', 'finished', 'failed'].includes(head.state)
    && !(head.state === 'failed' && !head.error);
  studio.fill(parts.problems, head.problems, () => head.problems.map(studio.alert));
  studio.fill(parts.pending, head.pending, () => head.pending.map(words => h('p', {}, words)));
  parts.pending.hidden = !head.pending.length;
  drawFigures(head);
  drawProgress(head);
  drawActions(head);
  drawError(head.error);
  drawDone(head);
  rehearsal.draw(current.name, head, parts.panels['']);
  drawSplit(head);
  parts.edit.hidden = !head.is_running;
  saySampleSteps();
  sayStripNote();
  parts.charts.hidden = head.figures.loss === null && !head.step;
  parts.noCharts.hidden = !parts.charts.hidden;
  studio.say(parts.noCharts,
    head.is_running ? 'The charts begin with the first step.' : 'No step was trained, so there are no charts.');
}

function drawFigures({ step, num_steps, length, epoch, figures, is_running, state }) {
  const clock = seconds => new Date(seconds * 1e3).toTimeString().slice(0, 5);
  const rows = [];
  if (is_running) rows.push(figures.eta_s === null ? ['left', '–']
    : ['left, about', studio.duration(figures.eta_s), state === 'training' ? `ends ${ends(figures.eta_s)}` : '']);
  else if (figures.last_event_s) rows.push(['ended', studio.when(figures.last_event_s)]);
  if (figures.diverged_at === null) rows.push(
    ['loss, smoothed', figures.loss === null ? '–' : studio.short(figures.loss)]);
  else rows.push(['loss', 'not a number', `since step ${studio.count(figures.diverged_at)}`, '', 'bad']);
  if (figures.best) rows.push(
    ['best validation', studio.short(figures.best.loss), `step ${studio.count(figures.best.step)}`, 'validation']);
  rows.push(['speed', figures.rate === null ? '–' : studio.short(Number(figures.rate.toPrecision(3))),
    figures.rate === null ? '' : `${figures.unit}/s`]);
  rows.push(['a step', figures.step_s === null ? '–' : seconds(figures.step_s)]);
  studio.say(parts.step, studio.count(step));
  studio.say(parts.of, [`/ ${num_steps ? studio.count(num_steps) : length}`, epoch].filter(Boolean).join(', '));
  studio.fill(parts.figures, rows,
    () => rows.map(([label, value, note, term, mood]) => h(`div${mood ? '.' + mood : ''}`, {},
      h('dt', {}, term ? [label.replace(term, ''), studio.term(term)] : label),
      h('dd', {}, h('span.num', {}, value), note ? h('small', {}, ` ${note}`) : null))));
  function ends(left) {
    const at = Date.now() / 1e3 + left;
    return left < 82800 ? clock(at) : studio.when(at);
  }
}

export const seconds = value =>
  (value >= 60 ? studio.duration(value)
    : `${value.toFixed(value >= 10 ? 0 : value >= 1 ? 1 : value >= 0.0995 ? 2 : value >= 0.0005 ? 3 : 0)} s`);

function drawProgress({ step, num_steps, length, marks, stages, figures, is_running }) {
  parts.progress.setAttribute('aria-valuenow', step);
  parts.progress.setAttribute('aria-valuemax', num_steps || step);
  parts.fill.style.width = `${num_steps ? Math.min(100, 100 * step / num_steps) : 0}%`;
  const every = marks.checkpoint,
    ends = stages ? stages.steps.map((_, at) => stages.steps.slice(0, at + 1).reduce((a, b) => a + b)) : [];
  const regular = every && num_steps / every <= MOST_MARKS
    ? Array.from({ length: Math.ceil(num_steps / every) - 1 }, (_, at) => (at + 1) * every) : [];
  const at = !num_steps ? [] : stages ? ends.slice(0, -1) : regular;
  studio.fill(parts.marks, [at, num_steps],
    () => at.map(mark => h('b', { style: { left: `${100 * mark / num_steps}%` } })));
  const note = stages ? `stage ${stages.number} of ${stages.names.length}: ${stages.names[stages.number - 1]}`
    : at.length ? `a checkpoint every ${studio.counted(every, 'step')}` : '';
  studio.say(parts.markNote, note);
  studio.say(parts.time, figures.duration_s >= 1
    ? `${is_running ? 'running for' : 'ran for'} ${studio.duration(figures.duration_s)}` : '0');
  studio.say(parts.last, num_steps ? studio.count(num_steps) : length);
}

// --- buttons --------------------------------------------------------------------------------------------------------

function drawActions(head) {
  studio.fill(parts.actions, [head.is_running, head.is_alive, head.more, head.has_prompts, notices()],
    () => (head.is_running ? running(head.has_prompts) : head.is_alive ? h('span.dim', {}, 'Ending …')
      : ended(head.more, head.is_rehearsal)));
}

function button(id, text, action, kind = '', title = '') {
  const made = h(`button.btn${kind}#${id}`,
    { type: 'button', title, onclick: () => studio.act(made, parts.message, async () => {
      const said = await action();
      await refresh();
      return said;
    }) }, text);
  return made;
}

const running = hasPrompts => [
  notices() === 'granted' ? null
    : button('notify', 'Notify me', async () => {
      const said = await askToNotify();
      drawActions(current.data.head);
      return said;
    }, '', 'Let this browser tell you when a run ends, while this page is open'),
  Object.assign(button('sample', 'Sample', () => request('sample'), '',
    hasPrompts ? 'Generate samples after this step' : 'It has no prompts: write some under Edit prompts'),
    { disabled: !hasPrompts }),
  button('save', 'Save', () => request('save'), '', 'Write a checkpoint after this step'),
  button('stop', 'Stop', stop, '.stop', 'Stop after this step, with a checkpoint')];

const request = async what => { await studio.call('run_request', { name: current.name, what }); };

async function stop() {
  const { step, num_steps, length } = current.data.head;
  const text = `It is at step ${studio.count(step)} of ${num_steps ? studio.count(num_steps)
    : length}. It finishes this step and writes a checkpoint, from which it can be resumed.`;
  if (await studio.ask('Stop this run?', text, ['Stop', 'Keep training'], 'stop') === 0) await request('stop');
}

function ended(more, isRehearsal) {
  const from = more.saved ? `From the checkpoint of step ${studio.count(more.saved)}`
    : 'There is no checkpoint: from the first step';
  const ways = {
    resume: () => button('resume', 'Resume', resume, '.main', from),
    start: () => button('resume', 'Start', resume, '.main'),
    extend: () => button('extend', 'Go on for …', extend),
  };
  return [ways[more.kind]?.() || null, isRehearsal ? null : button('copy', 'Copy to a new run', copy)];
}

async function resume() {
  await studio.call('run_resume', { name: current.name });
}

async function copy() {
  await studio.call('new_copy', { run: current.name });
  studio.go('new');
}

async function retry() {
  await studio.call('new_retry', { run: current.name });
  studio.go('new');
}

async function extend() {
  const steps = await askSteps();
  if (steps) await studio.call('run_extend', { name: current.name, steps });
}

/** Ask for a number of steps. Resolves to 0 when it was dismissed. */
function askSteps() {
  return new Promise(resolve => {
    const { num_steps, more, stages } = current.data.head,
      box = h('input#extend-steps',
        { type: 'number', min: 1, step: 1, value: stages?.steps.at(-1) || num_steps || more.saved, required: true });
    const done = value => { dialog.remove(); resolve(value); };
    const dialog = h('dialog.dialog', { 'aria-label': 'Go on for more steps', onclose: () => done(0) },
      h('h2', {}, 'Go on for more steps'),
      h('form', { onsubmit: event => { event.preventDefault(); done(Math.round(Number(box.value))); } },
        h('p', {},
          stages
            ? `It has trained ${studio.counted(num_steps,
              'step')}. Its last stage, ${stages.names.at(-1)}, goes on from its step ${studio.count(
                more.saved)}, in the same folder; the other stages stay as they are.`
          : `It has trained ${studio.counted(num_steps,
            'step')} and goes on from the checkpoint of step ${studio.count(more.saved)}, in the same folder.`,
            ' What it exported is written again at the end.'),
        h('label', {}, h('span.l', {}, 'Steps in addition'), box),
        h('div.row-end', {}, h('button.btn', { type: 'button', onclick: () => done(0) }, 'Cancel'),
          h('button.btn.main#extend-go', { type: 'submit' }, 'Go on'))));
    document.body.append(dialog);
    dialog.showModal();
    box.select();
  });
}

// --- how it ended ---------------------------------------------------------------------------------------------------

function drawError(error) {
  parts.error.hidden = !error;
  studio.fill(parts.error, error, () => {
    if (!error) return [];
    const where = `${error.rank === null ? '' : ` on rank ${error.rank}`} at step ${studio.count(error.step)}`;
    const retries = error.retry.length ? [button('retry', `Retry with ${error.retry.join(', ')}`, retry, '.main')] : [];
    const link = error.source
      ? h('button.btn#error-log', { type: 'button', onclick: () => showLog(error.source) }, 'Show the log') : null;
    return [h('h2', {}, `Failed${where}`), h('p', {}, error.message),
      error.remedy ? h('p', {}, h('b', {}, 'What to do: '), error.remedy) : null,
      error.log ? h('p.sm', {}, 'Log: ', h('code', {}, error.log)) : null, h('div.run-acts', {}, retries, link)];
  });
}

function drawDone({ state, exports: [file, ...others], figures, is_text: isText, better,
  is_rehearsal: isRehearsal }) {
  parts.done.hidden = state !== 'finished' || isRehearsal;
  if (parts.done.hidden) return;
  const time = figures.duration_s >= 1 ? ` in ${studio.duration(figures.duration_s)}` : '';
  studio.fill(parts.done, [file, others, time, better], () => {
    const words = file ? [h('b', {}, `Finished${time}: ${file.name} `),
      h('span', { class: file.is_verified ? '' : 'bad' },
        [studio.size(file.size), file.check].filter(Boolean).join(', '))]
      : [h('b', {}, `Finished${time}.`), ' No export is in the run folder.'];
    const more = others.length
      ? h('ul.sm#other-exports', {},
        others.map(other => h('li', {}, `${other.name} `,
          h('span', { class: other.is_verified ? 'dim' : 'bad' },
            [studio.size(other.size), other.check].filter(Boolean).join(', ')),
          other.is_file ? h('button.btn.s',
            { type: 'button', 'aria-label': `Download ${other.name}`, onclick: () => download(other.name) }, 'Download')
            : null))) : null;
    const isExported = others.some(other => other.step === better?.step);
    const best = better ? h('p#better', {}, `The validation loss was lower at step ${studio.count(better.step)}: ${
      studio.short(better.loss)}${better.last === null ? '' : `, ${studio.short(better.last)} at the end`}.`) : null;
    return [h('p', {}, words), best, h('div.run-acts', {},
      better && !isExported
        ? button('export-best', `Export step ${studio.count(better.step)}`, () => exportBest(better.step)) : null,
      file?.is_file ? button('download', 'Download', () => download(file.name), '.main') : null,
      button('draw', isText ? 'Write with it' : 'Draw with it', () => results.draw(current.name, isText)),
      h('a.btn#export-as', { href: studio.link('runs', current.name, 'files') }, 'Export as …'),
      button('upload', 'Publish …', () => results.upload(current.name))), more];
  });
}

/** Export a checkpoint as the run's own export is, and show how that goes. */
async function exportBest(step) {
  const { usual } = await studio.call('files_list', { name: current.name });
  await studio.call('files_export', { name: current.name, ...usual, step });
  studio.go('runs', current.name, 'files');
}

async function download(file) {
  const address = await studio.call('files_offer', { name: current.name, file });
  const link = h('a', { href: address, download: file.split('/').at(-1) });
  document.body.append(link); // Firefox follows no link that is not in the document
  link.click();
  link.remove();
}
