// The panel of New run: whether it can start, memory, time and space.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, link } from './core.js';
import { takeProposals } from './form-data.js';
import { take, change } from './form-draft.js';
import { linkTo } from './form-more.js';
import { withRemedies } from './form-remedies.js';
import { current, $ } from './form-state.js';
import { stepPicture } from './step.js';

const FIELDS_OF_STEP = { 'step-1': ['model.path'], 'step-2': ['data.path', 'data.trigger', 'data.validation'],
  'step-3': ['adapter.type', 'sample.prompts'] };
/** Methods that are passed with the arrow keys are not worked out. */
const RECORD_PAUSE_MS = 1000;
const KIND_WORDS = { weights: 'weights', optimizer: 'optimizer', gathered: 'gathered blocks',
  activations: 'activations', reserve: 'reserve' };

// --- the panel ----------------------------------------------------------------------------------------------------

export function drawStart() {
  const isBusy = Boolean(Object.keys(current.pending).length || current.isSending),
    isReady = Boolean(current.state?.ready) && !isBusy;
  $('start').disabled = !current.state || (!current.state.ready && !isBusy);
  $('enqueue').disabled = $('start').disabled;
  $('rehearse').parentElement.hidden = Boolean(current.state?.is_text);
  if (isBusy || !current.state) { $('why').dataset.busy = 'true'; return; }
  delete $('why').dataset.busy;
  const { errors, waiting, problem, warnings, kept_words: kept, looked_at: looked } = current.state;
  $('why').className = `notice ${errors.length ? 'bad' : waiting ? '' : 'ok'}`;
  $('why').dataset.state = isReady ? 'ready' : errors.length ? 'refused' : 'waiting';
  fill($('why'), [errors, waiting, problem, looked], () => {
    if (errors.length)
      return [h('b', {}, `Start waits for ${errors.length === 1 ? 'one thing' : `${errors.length} things`}`),
        h('ul', {},
          errors.map(error => h('li', {}, error.label ? [linkTo(error.field, error.label), ': '] : '',
            withRemedies(error.text))))];
    return [h('p', {}, ...(waiting ? [waiting] : [h('b', {}, 'Ready. '), looked]))];
  });
  fill($('warnings'), [warnings, problem, kept],
    () => [...(problem ? [h('p.notice.bad', { role: 'alert' }, problem)] : []),
      ...warnings.map(text => h('p.notice.warn', {}, withRemedies(text))),
      ...(kept ? [h('p.notice.warn', {}, `${kept} `, takeProposals('Take those that fit them'))] : [])]);
  say($('phone-note'), errors.length ? `waits for ${errors.length}` : waiting || 'Ready');
  for (const [id, fields] of Object.entries(FIELDS_OF_STEP)) {
    $(id).classList.toggle('no', errors.some(error => fields.includes(error.field)));
  }
}

export function drawGpus() {
  const gpus = current.state.gpus;
  $('gpus').hidden = gpus.length < 2;
  fill($('gpus'), [gpus], () =>
    [h('p.l', {}, 'Queued run on GPUs'), h('div.gpu-list', {}, gpus.map(({ index, name }) => h('label', { title: name },
      h('input', { type: 'checkbox', checked: !current.chosenGpus || current.chosenGpus.has(index), onchange: event => {
        current.chosenGpus = current.chosenGpus || new Set(gpus.map(gpu => gpu.index));
        if (event.target.checked) current.chosenGpus.add(index); else current.chosenGpus.delete(index);
      } }), String(index))))]);
}

export function drawPlan() {
  const plan = current.state.plan;
  say($('plan-title'), plan.on_cpu ? 'Memory of each rank' : 'Memory of each GPU');
  current.fitter.draw(current.state.fit);
  fill($('plan'), [plan, current.target], () => {
    if (plan.need === undefined) return [...unknown(plan), current.fitter.element];
    current.lastNeed = plan.need;
    const whole = Math.max(plan.need, plan.limit || 0),
      spoken = plan.kinds.map(([kind, size]) => `${KIND_WORDS[kind]} ${studio.gib(size)}`).join(', ');
    const parts = [
      h('p', {}, h('span.big', {}, studio.gib(plan.need)),
        h('span.dim', {}, plan.limit ? ` of ${studio.gib(plan.limit)} at the fullest moment`
          : ' at the fullest moment')),
      h('div.mem', { role: 'img', 'aria-label': spoken, data: { verdict: plan.verdict } },
        plan.kinds.map(([kind, size]) =>
          h('i', { title: KIND_WORDS[kind],
            style: { width: `${100 * size / whole}%`, background: `var(--${kind})` } }))),
      h('ul.keys', {},
        plan.kinds.map(([kind, size]) =>
          h('li', {}, h('i', { style: { background: `var(--${kind})` } }), studio.term(KIND_WORDS[kind]), ' ',
            h('b', {}, size < 0.005 * 2 ** 30 ? '< 0.01' : (size / 2 ** 30).toFixed(size < 2 ** 30 ? 2 : 1))))),
      h(plan.verdict === 'does not fit' ? 'p.notice.bad' : plan.verdict === 'tight' ? 'p.notice.warn' : 'p.sm.dim', {},
        studio.sentence(plan.sentence)),
      ...plan.fixes.map((fix, index) =>
        h('button.btn.s.fix', { type: 'button', id: `fix-${index}`,
          onclick: async () => take(await change('new_fix', { changes: fix.changes })) },
          `Make it fit: ${fix.text}${fix.effect && ` (${fix.effect})`}`)),
      current.fitter.element,
      h('details.sm', {}, h('summary', {}, 'More about memory'), h('p', {}, `Fullest in ${plan.moment}.`),
        h('ul', {},
          plan.items.map(item => h('li', {}, h('b', {}, `${item.name} ${studio.gib(item.size)}`), `: ${item.text}`))),
        h('p', {}, 'Other moments: ' + plan.phases.map(phase => `${phase.name} ${studio.gib(phase.need)}`)
          .join(', ') + '.'),
        h('p', {},
          `On the host, each rank: ${plan.host.map(item => `${item.name} ${studio.gib(item.size)}`).join(', ')
            || 'nothing'}. Sharding: ${plan.strategy}. Reserve and time are estimates.`),
        plan.checked ? h('p', {}, studio.sentence(plan.checked)) : null,
        plan.can_verify ? h('button.btn.s#verify',
          { type: 'button', onclick: async () => take(await change('new_verify')) },
          'Verify with a full trace, a minute or more') : null),
      h('details.sm#step-memory', { open: current.wantsStep, ontoggle: event => {
        current.wantsStep = event.target.open;
        if (current.wantsStep) drawStep();
      } },
        h('summary', {}, 'Memory over one step'),
        h('div#step-picture', {}, current.step ? stepPicture(current.step) : null)),
    ];
    return parts;
  });
}

/** The panel while there is no plan: the former figure, marked as such, and how far the new one is. */
function unknown(plan) {
  const share = Math.round(100 * plan.share), isNext = plan.can_record && !plan.has_failed;
  if (isNext) workOutSoon();
  return [
    current.lastNeed === undefined ? null : h('p.former', {}, h('span.big', {}, studio.gib(current.lastNeed)),
      ' before the last change'),
    plan.is_waiting || isNext ? h('span.bar#record-bar',
      { role: 'progressbar', 'aria-label': 'Memory is being worked out', 'aria-valuemin': 0, 'aria-valuemax': 100,
        'aria-valuenow': share }, h('i', { style: { width: `${share}%` } })) : null,
    h('p', {}, plan.is_waiting ? plan.note
      : isNext ? 'Memory of this combination is worked out once, which takes about 20 s.'
        : `Memory is not known for this combination. ${plan.note}`),
    plan.has_failed ? h('button.btn.s#record',
      { type: 'button', onclick: async () => take(await change('new_record')) }, 'Try again') : null];
}

/** Have the server work out the memory of what the form shows, once nothing was changed for a moment. */
function workOutSoon() {
  clearTimeout(current.recordTimer);
  current.recordTimer = setTimeout(async () => {
    const plan = current.state.plan;
    if (current.isSending || Object.keys(current.pending).length) workOutSoon();
    else if (plan.can_record && !plan.has_failed) take(await change('new_record'));
  }, RECORD_PAUSE_MS);
}

/** Ask for the memory over a step of the plan that is shown, and draw it. The former picture stays until then. */
async function drawStep() {
  const number = ++current.numStepsAsked, box = $('step-picture');
  try {
    const found = await call('new_step', { target: current.target });
    if (number !== current.numStepsAsked) return;
    current.step = found;
    fill(box, found, () => found ? stepPicture(found) : h('p', {}, 'Not known yet.'));
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (number === current.numStepsAsked) fill(box, error.message, () => studio.alert(error.message));
  }
}


/** A duration as it is said when it is estimated: "2 min". */
const roughly = seconds => seconds < 55 ? `${Math.max(5, 5 * Math.round(seconds / 5))} s`
  : studio.duration(seconds < 5400 ? 60 * Math.max(1, Math.round(seconds / 60)) : 300 * Math.round(seconds / 300));
/** Two values in words, as one where they are the same. */
const between = (low, high, word) => [...new Set([low, high].map(word))].join(' to ');
const perStep = seconds => seconds < 10 ? seconds.toFixed(seconds < 1 ? 2 : 1) : Math.round(seconds);
const day = unix => {
  const date = new Date(unix * 1e3);
  return date.toLocaleDateString('en-GB',
    { day: 'numeric', month: 'short',
      ...(date.getFullYear() === new Date().getFullYear() ? {} : { year: 'numeric' }) });
};

/** [name, value] of what is known of the time and space that a run takes. state: an answer of the form. */
export function timeRows({ plan, disk, earlier }) {
  const rows = [], ends = seconds => studio.when(Date.now() / 1e3 + seconds),
    steps = plan.steps ? studio.count(plan.steps) : plan.length;
  if (earlier?.seconds !== undefined) {
    const source = h('a', { href: link('runs', earlier.run), title: earlier.run }, earlier.name);
    rows.push(
      ['Whole run', [`about ${roughly(earlier.seconds)}, as in `, source,
        ` of ${day(earlier.began)}${earlier.host ? ` on ${earlier.host}` : ''}${earlier.has_samples ? ''
          : ', without samples'}`]],
      ['Steps', `${steps} × ${perStep(earlier.step_s)} s`],
      ['Ends, if started now', `about ${ends(earlier.seconds)}`]);
  } else if (plan.whole) {
    const [low, high] = plan.whole, each = plan.whole.map(seconds => seconds / plan.steps);
    rows.push(['Whole run', between(low, high, studio.duration)],
      ['Steps', `${steps} × ${between(...each, perStep)} s, ${plan.speed}`],
      ['Ends, if started now', between(low, high, ends)]);
  }
  else rows.push(['Steps', steps],
    ['Whole run', earlier?.is_looking ? 'looking at earlier runs …' : 'not known yet; a first run measures it']);
  rows.push(['Disk', disk.need
    ? [h(disk.need > disk.free ? 'b.bad-text' : 'span', {}, studio.size(disk.need)),
      disk.need > disk.free ? `, ${studio.size(disk.free)} free` : ` of ${studio.size(disk.free)} free`]
      : `${studio.size(disk.free)} free`]);
  return rows;
}

export function drawTime() {
  const { plan, disk, earlier } = current.state, minute = Math.floor(Date.now() / 60e3);
  fill($('time'), [plan.seconds, plan.whole, plan.steps, plan.length, earlier, disk, minute], () =>
    timeRows(current.state).map(([name, value]) =>
      h('div.facts', {}, h('span.dim', {}, name), h('span', {}, value))));
}
