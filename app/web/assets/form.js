// The screen New run. The server keeps the draft: what is typed is sent there, and its answer is shown.
// @ts-check
import * as studio from './core.js';
import { call, h, link } from './core.js';
import { fitter as newFitter } from './fit.js';
import { drawData, browse } from './form-data.js';
import { settled, complain, edited, take, change } from './form-draft.js';
import { moreFolders } from './form-folders.js';
import { importButton } from './form-import.js';
import { showRow, idOf, row, inputOf, paint } from './form-inputs.js';
import { drawModels, loadModels, skeletons } from './form-model.js';
import { drawMethods, drawGroups, groups, filterGroups, linkTo } from './form-more.js';
import { drawStart, drawGpus, drawPlan, drawTime } from './form-plan.js';
import { current, $, inputs, field } from './form-state.js';
import { rehearsalHelp, rehearseButton } from './rehearsal.js';
import { drawChanges, reset, copyButton, showYaml, drawLines, applyYaml, savePreset } from './form-yaml.js';

async function start() {
  const button = $('start');
  if (button.dataset.busy) return;
  button.dataset.busy = 'true';
  try {
    await settled();
    drawStart();
    if (!current.state?.ready) { $('why').scrollIntoView({ block: 'center' }); return; }
    complain('');
    const run = await call('new_start');
    studio.go('runs', run);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    complain(error.message);
  } finally {
    delete button.dataset.busy;
  }
}

async function enqueue() {
  const gpus = current.chosenGpus ? [...current.chosenGpus].sort((a, b) => a - b) : [];
  await studio.act($('enqueue'), $('outcome'), async () => { await settled(); return call('new_enqueue', { gpus }); });
  drawStart();
}

// --- the screen ---------------------------------------------------------------------------------------------------

export function draw() {
  for (const name of Object.keys(inputs)) showRow(name);
  drawModels(); drawData(); drawMethods(); drawGroups(); drawStart(); drawGpus(); drawPlan(); drawTime(); drawChanges();
  current.root.dataset.key = current.state.key;
  current.root.dataset.preset = current.state.preset;
}

function cards() {
  const path = inputOf('data.path', field('data.path'), idOf('data.path'));
  const slider = h('input#rank-slider', { type: 'range', min: 0, max: 8, step: 1, 'aria-label': 'Rank', oninput: () => {
    inputs['adapter.rank'].input.value = String(2 ** Number(slider.value));
    paint(slider); edited('adapter.rank', inputs['adapter.rank'].input.value); } });
  const rank = row('adapter.rank');
  rank.querySelector('.stepper').after(slider);
  return [
    h('section.card#card-model', { 'aria-labelledby': 'h-model' },
      h('div.ttl', {}, h('span.step#step-1', { 'aria-hidden': 'true' }, '1'), h('h2#h-model', {}, 'Model'),
        h('span.grow'), h('span.seg#model-filter', { role: 'group', 'aria-label': 'Which models' })),
      h('div.tiles#tiles', {}, skeletons()), h('div.get#model-facts'), h('div#left.left-behind'),
      h('p.lab', {}, h('span.l', {}, 'How it is trained '), h('span.dim.sm#presets-note')), h('div.presets#presets'),
      h('details.own-model', {}, h('summary.sm', {}, 'Another model of this family, from a folder or the hub'),
        row('model.path'))),
    h('section.card#card-data', { 'aria-labelledby': 'data-title' },
      h('div.ttl', {}, h('span.step#step-2', { 'aria-hidden': 'true' }, '2'), h('h2#data-title', {}, 'Pictures'),
        h('span#data-tag'), h('span.grow'), h('a.sm', { href: link('data') }, 'Open in Data')),
      h('div.g2', {}, h('div.all', {},
        row('data.path',
          { control: h('span.path', {}, path,
            h('button.btn#browse', { type: 'button', onclick: () => browse() }, 'Browse …')) }),
              h('div.chips#recent', { role: 'group', 'aria-label': 'Recent folders' }),
              h('div#left-images.left-behind'), h('div#pair-hint', { 'aria-live': 'polite' })),
        row('data.trigger'), row('data.validation')),
      moreFolders(), h('div.thumbs#thumbs'), h('div.notice#proposals', { hidden: true, role: 'status' }),
      h('div.data-facts#data-facts')),
    h('section.card#card-method', { 'aria-labelledby': 'h-method' },
      h('div.ttl', {}, h('span.step#step-3', { 'aria-hidden': 'true' }, '3'), h('h2#h-method', {}, 'Method'),
        h('span.dim', {}, 'The most important settings; all others are under More.')),
      h('div.meths#methods', { role: 'radiogroup', 'aria-label': 'Method' }), h('p.help.bad-text#method-error'),
      h('div.g4', {}, rank, row('adapter.block_size'), row('train.steps'), row('optim.lr'), row('train.batch_size')),
      h('div.g2.prompts', {}, row('sample.prompts'),
        h('div.g2.tight', {}, row('sample.every'), row('data.resolution'), row('data.length'),
          row('checkpoint.keep')))),
    h('section.card#card-more', { 'aria-labelledby': 'h-more' },
      h('div.ttl', {}, h('h2#h-more', {}, 'More'), h('span.dim#more-note'), h('span.grow'),
        h('input#search', { type: 'search', placeholder: 'Search: VRAM, warm-up, seed …',
          'aria-label': 'Search settings', oninput: filterGroups })), h('p.sm#found-above', { role: 'status' }),
          h('div#groups', {}, groups()), h('p.dim#no-match', { hidden: true }, 'No setting has these words.')),
  ];
}

function panel() {
  const targets = studio.facts.form.targets;
  return h('aside.side', { 'aria-label': 'Start' },
    h('div.card#card-start', {}, row('name'),
      h('button.btn.main.start#start', { type: 'button', disabled: true, onclick: start }, 'Start'),
      h('div#outcome'), h('div.notice#why', { role: 'status' }, 'Looking …'), h('div#warnings'),
      h('div#gpus', { hidden: true }),
      h('button.btn.wide-btn#enqueue', { type: 'button', disabled: true, onclick: enqueue }, 'Add to queue'),
      h('div.rehearse', {}, h('span.sm.dim', {}, rehearsalHelp()),
        rehearseButton('rehearse', '', settled, complain))),
    h('div.card', {}, h('div.ttl', {}, h('h2#plan-title', {}, 'Memory of each GPU'), h('span.grow'),
      h('select.target#plan-for', { 'aria-label': 'Plan for', onchange: async event => {
        current.target = event.target.value;
        await refresh();
      } },
        targets.map(name => h('option', { value: name }, name)))), h('div#plan')),
    h('div.card', {}, h('h2', {}, 'Time and space'), h('div#time')),
    h('div.card', {}, h('div.ttl', {}, h('h2', {}, 'Differs from the preset'), h('span.grow'),
      h('button.btn.s#reset', { type: 'button', hidden: true, onclick: reset }, 'Back to the preset')),
      h('div#changes'), h('details#yaml-drawer', {}, h('summary', {}, 'YAML'),
      h('div.yaml', {}, h('div#yaml-lines', { 'aria-hidden': 'true' }),
        h('textarea#yaml', { 'aria-label': 'Config as YAML', spellcheck: false, wrap: 'off', onscroll: () => {
          $('yaml-lines').scrollTop = $('yaml').scrollTop;
        }, oninput: () => {
          current.wrongLines = [];
          drawLines();
        } })),
      h('div#yaml-wrong'), h('div.chips', {},
        h('button.btn.s#apply-yaml', { type: 'button', onclick: applyYaml }, 'Apply'),
        h('button.btn.s#discard-yaml', { type: 'button', hidden: true, onclick: () => {
          showYaml();
          $('yaml').focus();
        } }, 'Discard'), copyButton(() => $('yaml').value))), h('div#commands')));
}

/** Fetch the state anew, for example for other GPUs. */
async function refresh(known = '') {
  if (current.isSending || Object.keys(current.pending).length) return;
  const before = current.numAnswers;
  const answer = await call('new_state', { known, typing: Boolean(current.typingPath), target: current.target });
  if (before === current.numAnswers && !current.isSending && !Object.keys(current.pending).length) take(answer);
}

studio.screens.new = {
  rail: { key: 'n', icon: 'M10 4v12M4 10h12' },
  title: 'New run',
  build(section) {
    current.root = section;
    current.target = studio.facts.form.this_machine;
    current.fitter =
      newFitter({ settled, change, take, linkTo, target: () => current.target, preset: () => current.state.preset,
        value: name => current.state.rows[name].value });
    current.root.append(h('div.head', {}, h('h1', {}, 'New run'), h('span.grow'),
      h('a.btn', { href: link('drop') }, 'Drop and name'),
      h('a.btn', { href: link('runs') }, 'Copy a run …'), importButton(),
      h('button.btn#save-preset', { type: 'button', onclick: savePreset }, 'Save as preset')),
      h('div#imported.left-behind'), h('div.cols', {}, h('div.left', {}, cards()), panel()),
      h('div.phone', {}, h('button.btn.main', { type: 'button', onclick: start }, 'Start'), h('span.sm#phone-note')));
    studio.shortcut('Ctrl Enter', 'Start the run', start, 'new');
    studio.shortcut('/', 'Search the settings', () => $('search').focus(), 'new');
    loadModels().catch(error => complain(error.message));
  },
  async show() {
    try { await refresh(); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      complain(error.message);
    }
  },
  async tick() {
    try { await refresh(current.state?.key || ''); if (current.state) drawTime(); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
    }
  },
};
