// The screen Machine: what it is good for, GPUs with their load, the disk, versions, checks with remedies, and notices.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call } from './core.js';

const WORDS = { ok: ['ok', 'ok'], warn: ['warn', 'warning'], fail: ['bad', 'error'] },
  RANK = { fail: 0, warn: 1, ok: 2 };
/** @type {HTMLElement} */
let root;
let found = /** @type {any} */ (null);
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
const $ = id => root.querySelector(`#${id}`);

/**
 * A bar with its figure in words behind it. `share` in percent, null where it is not known; from `full` on it has
 * another colour.
 */
function meter(name, share, text, full = 101) {
  const bar = share === null ? h('span.dim', {}, 'not reported')
    : h(share >= full ? 'span.bar.full' : 'span.bar',
      { role: 'meter', 'aria-label': name, 'aria-valuetext': text, 'aria-valuenow': Math.round(share),
        'aria-valuemin': 0, 'aria-valuemax': 100 },
      h('i', { style: { width: `${Math.max(0, Math.min(100, share))}%` } }));
  return h('div.meter', {}, h('span.dim', {}, name), bar, h('span', {}, share === null ? '' : text));
}

const known = (number, unit) => [number >= 0 ? number : null, `${number} ${unit}`];

function gpu(one, load) {
  const hasMemory = one.memory > 0 && one.memory_used >= 0;
  return h('section.card', { 'aria-label': `GPU ${one.index}` },
    h('div.ttl', {}, h('h2', {}, `GPU ${one.index}`), h('span.dim', {}, one.name)),
    meter('Memory', hasMemory ? 100 * one.memory_used / one.memory : null,
      `${(one.memory_used / 1024).toFixed(1)} of ${(one.memory / 1024).toFixed(1)} GiB`, 95),
    meter('Load', ...known(one.busy, '%')), meter('Temperature', ...known(one.celsius, '°C'), 85),
    load && load.watts >= 0 ? [meter('Power', 100 * load.watts / Math.max(load.limit_watts, 1),
      `${Math.round(load.watts)} of ${Math.round(load.limit_watts)} W`),
    h('div.facts', {}, h('span.dim', {}, 'Clock'), h('b', {}, `${load.mhz} MHz`))] : null);
}

function disk() {
  if (!found.disk) return h('p.dim', {}, 'Being measured …');
  const { free, total, runs } = found.disk, used = total - free;
  return [meter('In use', 100 * used / total, `${studio.size(used)} of ${studio.size(total)}`, 95),
    h('div.facts', {}, h('span.dim', {}, 'Free'), h('b', {}, studio.size(free))),
    h('div.facts', {}, h('span.dim', {}, 'Taken by the runs folder'), h('b', {}, studio.size(runs))),
    h('div.facts', {}, h('span.dim', {}, 'Runs folder'), h('code', {}, found.folder))];
}

function checkRow(check) {
  const [mood, word] = WORDS[check.verdict];
  return h('tr', { data: { verdict: check.verdict } },
    h('th', { scope: 'row' }, check.what === 'gpu' ? 'GPU' : check.what), h('td', {}, h(`span.tag.${mood}`, {}, word)),
    h('td', {}, check.fact, check.remedy && check.verdict !== 'ok'
      ? h('p.remedy', {}, h('b', {}, 'What to do: '), check.remedy) : null));
}

function draw() {
  const worst = found.checks.some(check => check.verdict === 'fail') ? 'bad'
    : found.checks.some(check => check.verdict === 'warn') ? 'warn' : 'ok';
  $('headline').className = found.failure ? 'notice bad' : found.headline ? `notice ${worst}` : 'notice';
  say($('headline'), found.failure || found.headline || 'Looking at this machine …');
  $('check-again').disabled = found.is_running;
  say($('checked'), found.is_running ? 'Checking …' : found.at ? `Checked at ${studio.when(found.at)}` : '');
  fill($('checks'), found.checks,
    () => [...found.checks].sort((one, other) => RANK[one.verdict] - RANK[other.verdict]).map(checkRow));
  fill($('versions'), found.versions,
    () => found.versions.map(([name, version]) => h('div.facts', {}, h('span.dim', {}, name), h('code', {}, version))));
  fill($('disk'), [found.disk, found.folder], disk);
}

/** Say what could not be done in place of the headline. */
async function attempt(action) {
  try {
    await action();
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (error.lost) return; // the bar at the top says it
    $('headline').className = 'notice bad';
    say($('headline'), error.message);
  }
}

async function look(isFresh) {
  found = await call('machine_checks', { is_fresh: isFresh });
  draw();
}

async function drawGpus() {
  const [gpus, now] = [await call('machine_gpus'), await call('machine_now')];
  const gib = bytes => (bytes / 2 ** 30).toFixed(1);
  fill($('host'), gib(now.host_used), () => [meter('In use', 100 * now.host_used / now.host_total,
    `${gib(now.host_used)} of ${gib(now.host_total)} GiB`, 95)]);
  say($('machine-slow'), now.slow.join(' '));
  $('machine-slow').hidden = !now.slow.length;
  fill($('machine-gpus'), [gpus, now.gpus],
    () => gpus.length ? gpus.map(one => gpu(one, now.gpus.find(({ index }) => index === one.index)))
      : h('section.card', { 'aria-label': 'GPUs' }, h('div.ttl', {}, h('h2', {}, 'GPUs')),
        h('p.dim', {}, 'No NVIDIA GPU was found. Training runs on the CPU.')));
}

// --- notices --------------------------------------------------------------------------------------------------------

const WAYS = ['webhook', 'command', 'mail'];

/** What a field is typed into. The server does not say what a withheld one holds: left empty, it stays. */
function noticeInput({ name, value, is_set, choices }) {
  const id = `notice-${name}`;
  if (choices.length) return h('select', { id, value }, choices.map(word =>
    h('option', { value: word, selected: word === value }, word)));
  if (typeof value === 'boolean') return h('input', { id, type: 'checkbox', checked: value });
  const isWithheld = is_set && !value;
  return h('input', { id, type: name === 'webhook' ? 'password' : 'text', autocomplete: 'off', spellcheck: false,
    value: name === 'page' && !is_set ? location.origin : value, data: isWithheld ? { kept: 'yes' } : {},
    placeholder: isWithheld ? 'Saved, and not shown. Type to replace it' : '' });
}

const small = (word, { name, title }, onclick) => h('button.btn.s',
  { type: 'button', 'aria-label': `${word} ${title}`, data: { [word.toLowerCase()]: name }, onclick }, word);

function drawNotices({ fields, file, problem }) {
  const rows = fields.map(field => {
    const { name, title, help } = field, input = noticeInput(field);
    const remove = input.dataset.kept ? small('Remove', field, () => {
      delete input.dataset.kept;
      input.setAttribute('placeholder', 'Will be removed');
      input.focus();
    }) : null;
    const attempt = WAYS.includes(name) ? small('Try', field, event =>
      studio.act(event.currentTarget, $('notice-said'), async () => {
        await saveNotices();
        return call('machine_try_notice', { way: name });
      })) : null;
    return h('div.notice-field', {}, h('label.l', { htmlFor: input.id }, title),
      h('div.notice-row', {}, input, remove, attempt), h('p.sm.dim', {}, help));
  });
  const save = h('button.btn.main#notices-save', { type: 'button',
    onclick: () => studio.act(save, $('notice-said'), async () => { await saveNotices(); return 'Saved.'; }) }, 'Save');
  $('notices').replaceChildren(
    h('p', {}, 'A run tells of its end by itself, also when this page is closed. Sent are its name, how it ended ',
      'and why, its last step and loss, the link and, if you wish, the newest sample: whoever runs or reads the ',
      'place that you name sees them. Anyone who knows the name of an ntfy topic can read it.'),
    h('p.sm.dim', {}, 'Kept in ', h('code', {}, file), ', which only you can read. Addresses are not shown again.'),
    problem ? studio.alert(problem) : '', ...rows, h('div.row-end', {}, save));
}

async function saveNotices() {
  /** @type {Record<string, string | boolean>} */
  const values = {};
  for (const input of /** @type {NodeListOf<any>} */ ($('notices').querySelectorAll('input, select')))
    if (!input.dataset.kept || input.value)
      values[input.id.replace('notice-', '')] = input.type === 'checkbox' ? input.checked : input.value.trim();
  drawNotices(await call('machine_save_notices', { values }));
}

// --- built once -----------------------------------------------------------------------------------------------------

const card = (id, title, ...children) =>
  h('section.card', { 'aria-labelledby': `h-${id}` }, h('div.ttl', {}, h(`h2#h-${id}`, {}, title)), ...children);

studio.screens.machine = {
  rail: { key: 'm', icon: 'M6 6h8v8H6zM8 2.5V6m4-3.5V6M8 14v3.5m4-3.5v3.5M2.5 8H6m-3.5 4H6m8-4h3.5M14 12h3.5' },
  title: 'Machine',
  build(section) {
    root = section;
    root.append(h('div.head', {}, h('h1', {}, 'Machine'), h('span.grow'), h('span.dim.sm#checked', { role: 'status' }),
      h('button.btn#check-again', { type: 'button', onclick: () => attempt(() => look(true)) }, 'Check again')),
      h('p.notice#headline', { role: 'status' }, 'Looking at this machine …'),
      h('p.notice.warn#machine-slow', { role: 'status', hidden: true }),
      h('div.cols', {}, h('div.col', {}, h('div#machine-gpus'),
        card('checks', 'Checks',
          h('div.scroll', {}, h('table.wide', {},
            h('thead', {}, h('tr', {}, ['Check', 'Result', 'Found'].map(head => h('th', { scope: 'col' }, head)))),
            h('tbody#checks')))),
        card('notices', 'Notices', h('div#notices'), h('div#notice-said'))),
      h('div.col', {}, card('host', 'Host memory', h('div#host')), card('disk', 'Disk', h('div#disk')),
        card('versions', 'Versions', h('div#versions')))));
  },
  async show() {
    await attempt(async () => {
      await look(true);
      await drawGpus();
      if (!$('notices').firstChild) drawNotices(await call('machine_notice_fields')); // what is typed stays
    });
  },
  async tick() { await attempt(async () => { if (!found || found.is_running) await look(false); await drawGpus(); }); },
};
