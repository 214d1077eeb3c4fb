// The screen of one run: state, figures and buttons, newest samples, charts, memory, events, log and notes.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { chart as newChart } from './charts.js';
import { lightbox } from './lightbox.js';
import * as results from './results.js';

const TABS = [['', 'Overview'], ['samples', 'Samples'], ['files', 'Files']], MOST_SHOWN = 12, MOST_MARKS = 40,
  SAVED_AFTER_MS = 1000, LOG_LENGTH = 200_000;
const WORDS = { created: 'not started', encoding: 'encoding', stuck: 'no sign of life' };
const MOODS = { training: 'ok', finished: 'ok', failed: 'bad', stopped: 'warn', stuck: 'warn', created: '' };
const parts = {}, charts = {}, chartCards = {};
const unsaved = new Map(); // notes that could not be saved before another run was opened: {run: {text, version}}
let name = '', tab = '', data = {}, known = {}, isGone = false, log = /** @type {any} */ (null),
  strip = /** @type {any} */ (null), saving = /** @type {any} */ (null), turn = Promise.resolve();

// --- what there is --------------------------------------------------------------------------------------------------

/** Ask for what changed since the last answer, and draw it. One after the other: two at once would draw it twice. */
function refresh() {
  turn = turn.then(ask, ask);
  return turn;
}

async function ask() {
  const asked = strip, isOverview = tab === '';
  const values = { name, known, log: isOverview ? wish() : null, only_head: !isOverview };
  // another run may be opened meanwhile
  const answer = await studio.fetched('run_view', values, () => asked === strip, complain);
  if (!answer) return;
  isGone = Boolean(answer.is_gone);
  parts.gone.hidden = !isGone;
  parts.run.hidden = isGone;
  for (const part of [parts.state, parts.about, parts.id]) part.hidden = isGone;
  if (isGone) { studio.say(parts.title, name); return; }
  if (!data.head) drawTitle(answer.title);
  // the server was started again, or this is another run of the same name
  const isOther = answer.parts.run && known.run;
  for (const [part, { key, value }] of Object.entries(answer.parts)) [known[part], data[part]] = [key, value];
  for (const [part, { value }] of Object.entries(answer.parts)) DRAW[part](value);
  if (strip.isOwed && data.samples) { // the server did not answer when they were asked for
    strip.isOwed = false;
    pick(strip.chosen);
  }
  if (isOther) log = null; // the answer goes on where the former log ended: the next one begins anew
  else if (answer.log) drawLog(answer.log);
}

const DRAW = { run: () => {}, head: drawHead, memory: drawMemory, samples: drawSteps, events: drawEvents,
  prompts: drawPrompts, notes: drawNotes, curves: drawCurves };

function complain(text) {
  studio.fill(parts.problem, text, () => (text ? studio.alert(text) : []));
}

function forget() {
  [data, known, log, isGone] = [{}, {}, null, false];
  strip = { chosen: null, answers: new Map() };
  saving = { version: '', timer: 0, isDirty: false };
  turn = Promise.resolve();
  for (const place of [parts.message, parts.problem, parts.events, parts.figures, parts.steps, parts.conflict]) {
    place.replaceChildren();
    delete place.dataset.key;
  }
  Object.assign(parts.notes, { value: '' });
  Object.assign(parts.log, { textContent: '' });
  studio.say(parts.saved, '');
  studio.say(parts.tabs.querySelector('.count'), '');
  parts.run.hidden = parts.gone.hidden = true;
}

// --- head -----------------------------------------------------------------------------------------------------------

function drawTitle(title) {
  studio.say(parts.title, title);
  studio.say(parts.id, name.slice(title.length).replace(/^-/, ''));
  for (const [at, [key]] of TABS.entries()) parts.tabs.children[at].href =
    studio.link('runs', name, ...(key ? [key] : []));
}

function drawHead(head) {
  const state = head.is_stuck ? 'stuck' : head.state, word = WORDS[state] || state;
  Object.assign(parts.run.dataset, { run: name, state: head.state, step: head.step });
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

const seconds = value =>
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
  studio.fill(parts.actions, [head.is_running, head.is_alive, head.more, head.has_prompts],
    () => (head.is_running ? running(head.has_prompts) : head.is_alive ? [] : ended(head.more)));
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
  Object.assign(button('sample', 'Sample', () => request('sample'), '',
    hasPrompts ? 'Generate samples after this step' : 'It has no prompts: write some under Edit prompts'),
    { disabled: !hasPrompts }),
  button('save', 'Save', () => request('save'), '', 'Write a checkpoint after this step'),
  button('stop', 'Stop', stop, '.stop', 'Stop after this step, with a checkpoint')];

const request = async what => { await studio.call('run_request', { name, what }); };

async function stop() {
  const { step, num_steps, length } = data.head;
  const text = `It is at step ${studio.count(step)} of ${num_steps ? studio.count(num_steps)
    : length}. It finishes this step and writes a checkpoint, from which it can be resumed.`;
  if (await studio.ask('Stop this run?', text, ['Stop', 'Keep training'], 'stop') === 0) await request('stop');
}

function ended(more) {
  const from = more.saved ? `From the checkpoint of step ${studio.count(more.saved)}`
    : 'There is no checkpoint: from the first step';
  const ways = {
    resume: () => button('resume', 'Resume', resume, '.main', from),
    start: () => button('resume', 'Start', resume, '.main'),
    extend: () => button('extend', 'Go on for …', extend),
  };
  return [ways[more.kind]?.() || null, button('copy', 'Copy to a new run', copy)];
}

async function resume() {
  await studio.call('run_resume', { name });
}

async function copy() {
  await studio.call('new_copy', { run: name });
  studio.go('new');
}

async function retry() {
  await studio.call('new_retry', { run: name });
  studio.go('new');
}

async function extend() {
  const steps = await askSteps();
  if (steps) await studio.call('run_extend', { name, steps });
}

/** Ask for a number of steps. Resolves to 0 when it was dismissed. */
function askSteps() {
  return new Promise(resolve => {
    const { num_steps, more, stages } = data.head,
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

function drawDone({ state, exports: [file, ...others], figures, is_text: isText }) {
  parts.done.hidden = state !== 'finished';
  if (parts.done.hidden) return;
  const time = figures.duration_s >= 1 ? ` in ${studio.duration(figures.duration_s)}` : '';
  studio.fill(parts.done, [file, others, time], () => {
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
    return [h('p', {}, words), h('div.run-acts', {},
      file?.is_file ? button('download', 'Download', () => download(file.name), '.main') : null,
      button('draw', isText ? 'Write with it' : 'Draw with it', () => results.draw(name, isText)),
      h('a.btn#export-as', { href: studio.link('runs', name, 'files') }, 'Export as …'),
      button('upload', 'Upload to the hub …', () => results.upload(name))), more];
  });
}

async function download(file) {
  const address = await studio.call('files_offer', { name, file });
  const link = h('a', { href: address, download: file.split('/').at(-1) });
  document.body.append(link); // Firefox follows no link that is not in the document
  link.click();
  link.remove();
}

// --- newest samples -------------------------------------------------------------------------------------------------

function saySampleSteps() {
  const next = data.head?.next_sample, shown = strip.chosen;
  studio.say(parts.when, shown === null ? '' : shown ? `step ${studio.count(shown)}` : 'before training');
  studio.say(parts.next, next ? `The next at step ${studio.count(next.step)}, in about ${studio.duration(next.eta_s)}.`
    : '');
}

function drawSteps({ steps, num_steps, num_samples }) {
  const numbers = steps.map(one => one.step), newest = numbers.at(-1),
    wasNewest = strip.chosen === null || strip.chosen === strip.newest;
  strip.newest = newest;
  strip.answers.clear(); // files may have been drawn again
  studio.say(parts.tabs.querySelector('.count'), num_samples ? studio.count(num_samples) : '');
  parts.samplesCard.hidden = false;
  studio.fill(parts.steps, [numbers, num_steps], () => [
    ...numbers.map(step => h('button', { type: 'button', data: { step }, onclick: () => pick(step) },
      studio.count(step))),
  ]);
  parts.steps.hidden = numbers.length < 2;
  parts.all.hidden = num_steps <= numbers.length;
  parts.all.href = studio.link('runs', name, 'samples');
  studio.say(parts.all, `all ${studio.count(num_steps)}`);
  pick(numbers.length ? (wasNewest || !numbers.includes(strip.chosen) ? newest : strip.chosen) : null);
}

async function pick(step) {
  strip.chosen = step;
  for (const chip of parts.steps.children) chip.setAttribute('aria-pressed',
    String(Number(chip.dataset.step) === step));
  saySampleSteps();
  const of = data.samples.steps.find(one => one.step === step);
  if (!of) return drawStrip([], []);
  const asked = strip, cells = of.cells.slice(0, MOST_SHOWN);
  let answers = strip.answers.get(step);
  if (!answers) {
    try {
      answers = await studio.call('samples_images',
        { name, cells: cells.map(({ index, prompt }) => ({ index, prompt, step })) });
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      if (error.lost) { asked.isOwed = true; return; }
      answers = cells.map(() => ({ problem: error.message }));
    }
    if (asked !== strip || strip.chosen !== step) return;
    strip.answers.set(step, answers);
  }
  drawStrip(cells, answers, of.cells.length);
}

function drawStrip(cells, answers, count = 0) {
  studio.fill(parts.strip, [cells, answers],
    () => cells.map((cell, at) => figure(cell, answers[at], () => open(cells, answers, at))));
  parts.strip.classList.toggle('texts', cells.some(cell => cell.kind === 'text'));
  strip.counts = [cells.length, count];
  sayStripNote();
}

function sayStripNote() {
  if (!strip.counts) return;
  const [shown, count] = strip.counts;
  const running = data.head.has_prompts ? 'No samples yet. Sample generates some after this step.'
    : 'This run has no prompts to generate samples from.';
  studio.say(parts.stripNote,
    shown ? (count > shown ? `${shown} of ${studio.count(count)} prompts` : '') : data.head.is_running ? running
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
  const run = name, shown = cells.map((cell, at) => ({ cell, answer: answers[at] }))
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

function drawPrompts({ asked }) {
  studio.say(parts.asked, asked ? `The next samples are of ${studio.counted(asked.length, 'other prompt')}.` : '');
}

function editPrompts() {
  const { now, asked } = data.prompts, rows = h('div.prompt-rows'), place = h('div');
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
    const other = data.prompts.asked || data.prompts.now;
    if (JSON.stringify(other) !== shown) {
      shown = JSON.stringify(other); // a second press means it
      throw new studio.Refused(
        `Another window has changed the prompts meanwhile: ${other.map(text => `“${text}”`)
          .join(', ')}. Press again to use yours instead.`);
    }
    await studio.call('run_prompts', { name, prompts });
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

// --- charts, memory, time -------------------------------------------------------------------------------------------

/** A small chart after the others, or the large one. */
function addChart({ title, ylabel }, home, small) {
  const card = h('section.card', { id: `chart-${title.toLowerCase().replaceAll(' ', '-')}`, 'aria-label': title });
  home.append(card);
  chartCards[title] = card;
  charts[title] = newChart(card, { title, ylabel, small });
}

function drawCurves(curves) {
  for (const title of Object.keys(curves))
    if (!(title in charts)) addChart({ title, ylabel: title.toLowerCase() }, parts.minis, true);
  for (const title of Object.keys(charts)) chartCards[title].hidden = !(title in curves);
  for (const [title, text] of Object.entries(curves)) charts[title].set(text);
}

function drawMemory({ ranks, imbalance, gpus }) {
  const gib = bytes => (bytes / 2 ** 30).toFixed(1),
    share = (bytes, limit) => `${Math.min(100, 100 * bytes / Math.max(limit, 1))}%`;
  studio.fill(parts.ranks, ranks, () => [
    h('li.rank-heads', { 'aria-hidden': 'true' },
      ['', '', 'allocated', 'reserved', 'limit'].map(word => h('span', {}, word))),
    ...ranks.map(one => {
      const words =
        `rank ${one.rank}: ${gib(one.allocated)} GiB allocated, ${gib(one.reserved)} reserved, ${gib(
          one.peak)} peak, of ${gib(one.limit)}`;
      return h(`li.rank${one.late_s === null ? '' : '.late'}`, { title: words, data: { rank: one.rank } },
        h('span', {}, 'rank ', h('b', {}, String(one.rank))),
        h('div.rank-bar', { role: 'img', 'aria-label': words },
          h('i.reserved', { style: { width: share(one.reserved, one.limit) } }),
          h('i.allocated', { style: { width: share(one.allocated, one.limit) } }),
          h('u', { style: { left: share(one.peak, one.limit) } })),
        [one.allocated, one.reserved, one.limit].map(bytes => h('span', {}, gib(bytes))),
        one.late_s === null ? null : h('span.rank-late', {}, `silent for ${studio.duration(one.late_s)}`));
    })]);
  const note = ranks.length > 1 && imbalance > 1.005 ? `The largest peak is ${imbalance.toFixed(2)} × the mean.` : '';
  studio.say(parts.imbalance, note);
  parts.memoryKeys.hidden = !ranks.length;
  parts.noRanks.hidden = ranks.length > 0;
  studio.say(parts.noRanks,
    data.head.is_running ? 'The ranks report their memory once they have started.'
      : 'No rank has reported its memory.');
  parts.ranks.hidden = !ranks.length;
  parts.gpuPart.hidden = !gpus.length;
  studio.fill(parts.gpus, gpus, () => gpus.map(one => h('li', {}, h('b', {}, `${one.index} `), `${one.name} `,
    h('span.dim', {}, [`${(one.memory_used / 1024).toFixed(1)} of ${(one.memory / 1024).toFixed(1)} GiB`,
      one.busy < 0 ? '' : `${one.busy} % busy`, one.celsius < 0 ? '' : `${one.celsius} °C`].filter(Boolean)
      .join(', ')))));
}

function drawSplit({ split, waited_s, figures }) {
  const found = Object.entries(split), whole = found.reduce((sum, [, value]) => sum + value, 0);
  parts.splitCard.hidden = !(whole > 0);
  if (parts.splitCard.hidden) return;
  studio.say(parts.splitTitle, `A step: ${seconds(figures.step_s)}`);
  studio.fill(parts.split, [found, waited_s], () => [
    h('div.mem', { role: 'img', 'aria-label': found.map(([part, value]) => `${part} ${seconds(value)}`).join(', ') },
      found.map(([, value], at) => h(`i.part-${at}`, { style: { width: `${100 * value / whole}%` } }))),
    h('ul.keys', {},
      found.map(([part, value], at) => h('li', {}, h(`i.part-${at}`), `${part} `, h('b', {}, seconds(value))))),
    waited_s > 0 ? h('p.sm.dim', {}, 'of which waiting for other ranks ', h('b', {}, seconds(waited_s))) : null]);
}

// --- events and log -------------------------------------------------------------------------------------------------

function drawEvents({ is_fresh, rows }) {
  const list = parts.events;
  if (is_fresh) list.replaceChildren();
  for (const { time, mood, group, text, step } of rows) {
    const top = list.firstElementChild;
    if (group && top?.dataset.group === group) { // the samples of a step, or the progress in a state
      top.dataset.count = Number(top.dataset.count) + 1;
      studio.say(top.lastElementChild,
        group.startsWith('sample') ? `Step ${studio.count(step)}: ${top.dataset.count} samples` : text);
    } else {
      list.prepend(h(`li${mood && '.' + mood}`, { data: { group, count: 1 } },
        h('time', { title: new Date(time * 1e3).toLocaleString() }, studio.when(time)), h('span', {}, text)));
    }
  }
  while (list.children.length > 400) list.lastElementChild.remove();
  parts.noEvents.hidden = list.children.length > 0;
}

const wish = () =>
  ({ source: parts.source.value || 'torchrun', level: parts.level.dataset.level, file: log?.file || '',
    offset: log?.offset || 0 });

function drawLog(found) {
  const isSame = log && !found.is_fresh,
    atEnd = parts.log.scrollTop + parts.log.clientHeight >= parts.log.scrollHeight - 4;
  parts.source.hidden = parts.level.hidden = !found.sources.length;
  studio.fill(parts.source, found.sources, () => found.sources.map(source => h('option', { value: source }, source)));
  parts.source.value = found.source;
  const before = isSame ? log.text : '', text = (before + found.text).slice(-LOG_LENGTH);
  log = { file: found.file, offset: found.offset, text };
  const level = parts.level.dataset.level, shown = text + found.rest;
  const empty = found.problem
    || (!found.sources.length
      ? `There are no logs${data.head.state === 'created' ? ': the run was not started yet' : ' in the run folder'}.`
      : level === 'all' ? 'Nothing was written to this log. That is how it should be for a run without trouble.'
      : `No ${level} in this log.`);
  studio.say(parts.noLog, shown ? '' : empty);
  parts.noLog.hidden = Boolean(shown);
  parts.log.hidden = !shown;
  if (parts.log.textContent === shown) return;
  parts.log.textContent = shown;
  if (atEnd || !isSame) parts.log.scrollTop = parts.log.scrollHeight;
}

async function chooseLog(level = parts.level.dataset.level) {
  parts.level.dataset.level = level;
  for (const choice of parts.level.children) choice.setAttribute('aria-pressed',
    String(choice.dataset.choice === level));
  log = null;
  await refresh();
}

async function showLog(source) {
  if ([...parts.source.options].some(option => option.value === source)) parts.source.value = source;
  await chooseLog('all');
  parts.logCard.scrollIntoView({ block: 'nearest' });
  parts.source.focus();
}

// --- notes ----------------------------------------------------------------------------------------------------------

function drawNotes({ text, version, problem }) {
  parts.notes.disabled = Boolean(problem);
  if (problem) return studio.say(parts.saved, problem);
  if (saving.isDirty) return; // what is typed stays; saving it says that there is a newer text
  const kept = unsaved.get(name);
  if (kept) {
    unsaved.delete(name);
    Object.assign(saving, { version: kept.version, isDirty: true });
    parts.notes.value = kept.text;
    return saveNotes();
  }
  saving.version = version;
  if (parts.notes.value !== text) parts.notes.value = text;
}

function typedNotes() {
  saving.isDirty = true;
  studio.say(parts.saved, '');
  clearTimeout(saving.timer);
  saving.timer = setTimeout(saveNotes, SAVED_AFTER_MS);
}

async function saveNotes() {
  if (!saving?.isDirty) return;
  const state = saving, run = name, text = parts.notes.value;
  clearTimeout(state.timer);
  let answer;
  try {
    answer = await studio.call('run_notes', { name: run, text, version: state.version });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (state === saving) {
      studio.say(parts.saved, `Not saved: ${error.message}`);
      state.timer = setTimeout(saveNotes, 5 * SAVED_AFTER_MS);
    }
    return;
  }
  if (state !== saving) return;
  if (!answer.is_saved) return drawConflict(answer.notes);
  state.version = answer.notes.version;
  state.isDirty = parts.notes.value !== text;
  if (state.isDirty) return typedNotes();
  studio.say(parts.saved, 'Saved.');
}

/** The notes were changed elsewhere: show both, and let the person choose. */
function drawConflict(other) {
  const take = isMine => () => {
    parts.conflict.replaceChildren();
    saving.version = other.version;
    if (isMine) return saveNotes();
    Object.assign(parts.notes, { value: other.text });
    saving.isDirty = false;
  };
  parts.conflict.replaceChildren(
    h('div.notice.warn', { role: 'alert' }, h('p', {}, 'The notes were changed elsewhere meanwhile. The text there:'),
      h('pre.written', { tabIndex: 0 }, other.text || '(empty)'),
      h('div.run-acts', {}, h('button.btn.s#notes-other', { type: 'button', onclick: take(false) }, 'Take that text'),
        h('button.btn.s#notes-mine', { type: 'button', onclick: take(true) }, 'Keep mine'))));
}

// --- built once -----------------------------------------------------------------------------------------------------

function build(root) {
  Object.assign(parts, {
    title: h('h1#run-title'), state: h('span.tag#run-state'), about: h('span.dim'), id: h('span.key'),
    message: h('div#message'), problem: h('div#run-problem'), problems: h('div'),
    sentence: h('p.sentence#run-sentence'), pending: h('div.notice#run-pending', { role: 'status', hidden: true }),
    gone: h('div.card.empty#run-gone', { hidden: true }, h('h2', {}, 'This run is not there'),
      h('p', {}, 'Its folder was deleted or moved, or the address has a typing error.'),
      h('a.btn', { href: studio.link('runs') }, 'Runs')),
    error: h('section.notice.bad#run-error', { role: 'alert', hidden: true }),
    done: h('section.notice.ok#run-done', { 'aria-label': 'Finished', hidden: true }),
    tabs: h('nav.tabs', { 'aria-label': 'Parts of this run' },
      TABS.map(([key, title]) =>
        h(`a#tab-${key || 'overview'}`, {}, title, key === 'samples' ? [' ', h('span.count')] : null))),
  });
  parts.panels = Object.fromEntries(TABS.map(([key]) => [key, h(`div#run-${key || 'overview'}`, { hidden: true })]));
  parts.run = h('div#run', { hidden: true }, parts.problems, parts.done, parts.error, buildStatus(), parts.tabs,
    Object.values(parts.panels));
  const crumbs = h('div.head', {}, h('a', { href: studio.link('runs') }, 'Runs'), h('span.dim', {}, '/'), parts.title,
    parts.state, parts.about, parts.id);
  root.append(crumbs, parts.problem, parts.message, parts.gone, parts.run);
  parts.panels[''].append(h('div.run-main', {}, buildSamples(), buildCharts(), buildLog()),
    h('div.run-side', {}, buildMemory(), buildSplit(), buildEvents(), buildNotes()));
  for (const [key] of TABS) if (key) studio.runTabs[key]?.build(parts.panels[key]);
  addEventListener('pagehide', saveNotes);
}

function buildStatus() {
  Object.assign(parts, { step: h('b'), of: h('span'), figures: h('dl.figures'), actions: h('div.run-acts#run-actions'),
    fill: h('i'), marks: h('span.marks'), markNote: h('span'), time: h('span'), last: h('span') });
  parts.progress = h('div.run-progress', { role: 'progressbar', 'aria-label': 'Steps', 'aria-valuemin': '0' },
    parts.fill, parts.marks);
  return h('section.card.run-status', { 'aria-label': 'State' }, h('div.bign', {}, parts.step, ' ', parts.of),
    parts.figures, parts.actions,
    parts.progress, h('div.run-scale', {}, parts.time, parts.markNote, parts.last), parts.sentence, parts.pending);
}

function buildSamples() {
  Object.assign(parts, { when: h('span.dim'),
    steps: h('div.seg', { role: 'group', 'aria-label': 'Step of the samples' }), all: h('a.sm', { hidden: true }),
    strip: h('div.run-strip'), stripNote: h('p.sm.dim'), next: h('p.sm.dim'), asked: h('p.sm.dim') });
  parts.edit = h('button.btn.s#edit-prompts', { type: 'button', onclick: () => data.prompts && editPrompts() },
    'Edit prompts');
  parts.samplesCard = h('section.card#newest', { 'aria-label': 'Newest samples', hidden: true },
    h('div.ttl', {}, h('h2', {}, 'Newest samples'), parts.when, h('span.grow'), parts.steps, parts.all, parts.edit),
    parts.strip, parts.stripNote, parts.next, parts.asked);
  return parts.samplesCard;
}

function buildCharts() {
  const [large, ...small] = studio.facts.run.charts;
  parts.charts = h('div.run-charts', { hidden: true });
  parts.minis = h('div.minis');
  parts.noCharts = h('section.card.dim');
  addChart(large, parts.charts, false);
  parts.charts.append(parts.minis);
  for (const chart of small) addChart(chart, parts.minis, true);
  return [parts.charts, parts.noCharts];
}

function buildMemory() {
  Object.assign(parts, { ranks: h('ul#ranks'), imbalance: h('p.sm.dim'), gpus: h('ul.gpus'), noRanks: h('p.sm.dim') });
  parts.memoryKeys = h('ul.keys', {}, h('li', {}, h('i.allocated'), 'allocated'),
    h('li', {}, h('i.reserved'), 'reserved'), h('li', {}, h('u'), 'peak'));
  parts.gpuPart = h('div#run-gpus', { hidden: true }, h('h3', {}, 'GPUs of this machine'), parts.gpus);
  return h('section.card', { 'aria-label': 'Memory of each rank' },
    h('div.ttl', {}, h('h2', {}, 'Memory of each rank'), h('span.dim', {}, 'GiB')), parts.ranks, parts.noRanks,
    parts.memoryKeys, parts.imbalance, parts.gpuPart);
}

function buildSplit() {
  Object.assign(parts, { splitTitle: h('h2'), split: h('div#split') });
  parts.splitCard = h('section.card', { 'aria-label': 'Time of a step', hidden: true },
    h('div.ttl', {}, parts.splitTitle, h('span.dim', {}, 'the parts add up')), parts.split);
  return parts.splitCard;
}

function buildEvents() {
  Object.assign(parts, { events: h('ul#events', { tabIndex: 0, 'aria-label': 'Events' }),
    noEvents: h('p.sm.dim', {}, 'Nothing has happened yet.') });
  const link = h('button.btn.ghost.s', { type: 'button', onclick: () => showLog(parts.source.value) }, 'Log');
  return h('section.card', { 'aria-label': 'Events' }, h('div.ttl', {}, h('h2', {}, 'Events'), h('span.grow'), link),
    parts.events, parts.noEvents);
}

function buildLog() {
  parts.source = h('select#log-of', { 'aria-label': 'Log of', onchange: () => chooseLog() });
  parts.level = h('div.seg#log-level', { role: 'group', 'aria-label': 'Lines of the log', data: { level: 'all' } },
    ['all', 'warnings', 'errors'].map(level =>
      h('button', { type: 'button', data: { choice: level }, 'aria-pressed': String(level === 'all'),
        onclick: () => chooseLog(level) }, level)));
  Object.assign(parts, { log: h('pre.code#log', { tabIndex: 0, 'aria-label': 'Log' }), noLog: h('p.sm.dim#no-log') });
  parts.logCard = h('section.card.run-log', { 'aria-label': 'Log' },
    h('div.ttl', {}, h('h2', {}, 'Log'), h('span.grow'), parts.source, parts.level), parts.log, parts.noLog);
  return parts.logCard;
}

function buildNotes() {
  Object.assign(parts, { saved: h('span.dim', { role: 'status' }), conflict: h('div'),
    notes: h('textarea#notes',
      { rows: 4, 'aria-label': 'Notes on this run', placeholder: 'Notes to remember about this run',
        oninput: typedNotes, onblur: saveNotes }) });
  return h('section.card', { 'aria-label': 'Notes' }, h('div.ttl', {}, h('h2', {}, 'Notes'), parts.saved), parts.notes,
    parts.conflict);
}

// --- address --------------------------------------------------------------------------------------------------------

async function show(place) {
  const wanted = TABS.some(([key]) => key && key === place[2]) ? place[2] : '';
  if (place[1] !== name) {
    await saveNotes();
    if (saving?.isDirty) {
      clearTimeout(saving.timer);
      unsaved.set(name, { text: parts.notes.value, version: saving.version });
      studio.toast(`The notes on ${name} are not saved yet. Open that run to save them.`, true);
    }
    name = place[1];
    studio.say(parts.title, name);
    forget();
  }
  isGone = false;
  tab = wanted;
  for (const [key, panel] of Object.entries(parts.panels)) panel.hidden = key !== tab;
  for (const [at, [key]] of TABS.entries()) {
    parts.tabs.children[at].classList.toggle('on', key === tab);
    if (key === tab) parts.tabs.children[at].setAttribute('aria-current', 'page');
    else parts.tabs.children[at].removeAttribute('aria-current');
  }
  await refresh();
  if (tab && !isGone) await studio.runTabs[tab]?.show(name);
}

async function tick() {
  await refresh(); // also of a run that is gone: it may have been moved for a while only
  if (tab && !isGone) await studio.runTabs[tab]?.tick(name);
}

studio.screens.run = { title: 'Run', build, show, tick };
