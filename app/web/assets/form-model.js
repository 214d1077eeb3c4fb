// The card Model of New run: tiles, presets and downloads.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call } from './core.js';
import * as downloads from './downloads.js';
import { take, change, offerUndo, settled } from './form-draft.js';
import { drawStart } from './form-plan.js';
import { current, $ } from './form-state.js';
import { rehearseButton } from './rehearsal.js';

const MOST_SUGGESTED = 8;

// --- card 1: the model --------------------------------------------------------------------------------------------

/** Empty tiles, until the models are known. */
export const skeletons = () => Array.from({ length: MOST_SUGGESTED }, () =>
  h('span.skeleton', { 'aria-hidden': 'true' }, h('span.art'), h('i'), h('i')));

export function drawModels() {
  if (!current.models.length) return;
  const own = current.models.find(model => model.presets.some(preset => preset.name === current.state.preset));
  const listed = current.wantsAll ? current.models
    : current.models.filter(model => model.is_known || model === own).slice(0, MOST_SUGGESTED);
  fill($('tiles'), [listed, own?.path, own?.family], () => listed.map(model => tile(model, model === own)));
  for (const [at, model] of listed.entries()) fill($('tiles').children[at].querySelector('.state'),
    [isRunning(model), shareOf(model)], () => badge(model));
  fill($('model-filter'), [current.wantsAll, current.models.length, listed.length], () => [
    h('button', { type: 'button', 'aria-pressed': String(!current.wantsAll), onclick: () => {
      current.wantsAll = false;
      drawModels();
    } }, 'Suggested'),
    h('button', { type: 'button', 'aria-pressed': String(current.wantsAll), onclick: () => {
      current.wantsAll = true;
      drawModels();
    } }, `All ${current.models.length}`)]);
  $('model-filter').hidden = current.models.length <= MOST_SUGGESTED;
  drawFacts(own);
  fill($('presets'), [own?.presets, current.state.preset],
    () => (own ? own.presets : []).map(preset => presetTile(preset)));
  say($('presets-note'), own ? `${studio.counted(own.presets.length, 'preset')} for ${own.name}`
    : `from ${current.state.preset}`);
}

function tile(model, isOn) {
  const best = model.presets[0];
  return h(isOn ? 'button.tile.on' : 'button.tile',
    { type: 'button', 'aria-pressed': String(isOn), data: { model: model.path },
      onclick: () => isOn || choosePreset(best.name) },
    art(model), h('span.t', {}, h('b', {}, model.name),
      h('span.sm', {}, model.size),
      h('span.sm.licence', { title: `${model.licence}${model.licence_note ? `: ${model.licence_note}` : ''}` },
        model.licence || ' '), h('span.state')));
}

const tag = ([mood, words]) => h(mood ? `span.tag.${mood}` : 'span.tag', {}, words);

const badge = model => tag(isRunning(model) ? ['acc', `downloading, ${shareOf(model)} %`] : model.badge);

function modelFacts(model) {
  const licence = model.licence ? [h('span.grow'), model.page
    ? h('a.sm', { href: model.page, target: '_blank', rel: 'noopener noreferrer', title: model.licence_note },
      `Licence: ${model.licence}`)
    : h('span.sm.dim', { title: model.licence_note }, `Licence: ${model.licence}`)] : [];
  return [h('b', {}, model.name), h('span.sm.dim', {}, model.place), ...licence,
    ...(model.is_here || !model.download ? [] : downloadParts(model))];
}

export const isRunning = model => downloads.isRunning(current.state.downloads[model.path]);

const shareOf = model => downloads.shareOf(current.state.downloads[model.path]);

/**
 * The line about the chosen model. Its button stays the same element while numbers change, so that a press is not lost.
 */
function drawFacts(own) {
  const found = current.state.downloads[own?.path], hadFocus = studio.focused()?.id === 'download';
  const isNew = fill($('model-facts'), [own, found && (isRunning(own) ? 'running' : [found.state, found.message])],
    () => own ? modelFacts(own) : []);
  if (isNew && hadFocus) $('download')?.focus();
  const bar = $('download-bar');
  if (!bar) return;
  const rate = found.bytes_per_s,
    left = rate ? ` · ${studio.size(rate)}/s · ${studio.duration((found.total_bytes - found.num_bytes) / rate)} left`
      : '';
  downloads.showShare(bar, found);
  say($('download-size'), `${studio.size(found.num_bytes)} of ${studio.size(found.total_bytes)}${left}`);
}

/** How far the download of a model is, and the button that starts, pauses or continues it. */
function downloadParts(model) {
  const found = current.state.downloads[model.path], problem = h('div.problem'), running = isRunning(model);
  let isAsking = false;
  const ask = (name, word) => h('button.btn.s#download', { type: 'button', onclick: async () => {
    if (isAsking) return; // not disabled, which would take the focus from it
    isAsking = true;
    take(await change(name, { model: model.path },
      text => problem.replaceChildren(...(text ? [studio.alert(text)] : []))));
    isAsking = false;
  } }, word);
  const bar = () => [downloads.progressBar('span.bar#download-bar', model.name), h('span.sm.dim#download-size')];
  return [h('span.download', { data: { state: found?.state || 'none' } },
    found ? bar() : h('span.sm.dim.grow', {}, linked(model.advice)),
    running ? ask('new_pause', 'Pause') : ask('new_download', found ? 'Continue' : 'Download'),
    running && !current.state.is_text ? rehearseButton('rehearse-meanwhile', '.s', settled,
      text => problem.replaceChildren(...(text ? [studio.alert(text)] : []))) : null),
    !found?.message || running ? null : found.state === 'failed'
      ? h('div.notice.bad', { role: 'alert' }, h('p', {}, linked(found.message))) : h('p.sm.dim', {}, found.message),
      problem];
}

/** A text whose addresses of models on the hub are links. */
const linked = text => text.split(/(https:\/\/huggingface\.co\/[\w.-]+\/[\w.-]*\w)/).map((part, at) =>
  at % 2 ? h('a', { href: part, target: '_blank', rel: 'noopener noreferrer' }, part) : part);

function presetTile(preset) {
  const isOn = preset.name === current.state.preset;
  const bar = preset.limit ? h('span.mem', { 'aria-hidden': 'true' }, preset.kinds.map(([kind, size]) =>
    h('i', { style: { width: `${100 * size / preset.limit}%`, background: `var(--${kind})` } }))) : null;
  return h(isOn ? 'button.preset.on' : 'button.preset',
    { type: 'button', 'aria-pressed': String(isOn), data: { preset: preset.name }, title: preset.name,
      onclick: () => isOn || choosePreset(preset.name) },
    h('b', {}, preset.title), h('span.sm', {}, preset.line), bar, tag(preset.badge));
}

/** A picture for a model's tile, or a drawing of its blocks. */
const art = model => model.image ? h('img.art', { src: model.image, alt: '' })
  : studio.svg('svg',
    { viewBox: '0 0 160 70', class: 'art', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    ...model.art.map(([hue, d]) => studio.svg('path', { d, style: `fill: var(--${hue})` })));

async function choosePreset(name) {
  let answer = await change('new_preset', { name });
  if (answer?.refused) {
    const lost = Object.entries(answer.refused).map(([label, reason]) => `${label}: ${reason}`).join('. ');
    if (await studio.ask('Leave these edits behind?', `${name} cannot take what you set. ${lost}.`,
      ['Change the model', 'Keep this one']) !== 0) return;
    answer = await change('new_preset', { name, is_forced: true });
  }
  if (!answer) return;
  take(answer);
  if (!answer.left.length) return; // what was left behind before can still be brought back
  offerUndo(`Left behind, as they belong to the former preset: ${answer.left.join(', ')}. `, async () => {
    const former = await change('new_restore', answer.undo);
    take(former);
    return Boolean(former);
  });
}

export async function loadModels() {
  current.models = await call('new_models');
  if (!current.state) return;
  drawModels();
  drawStart();
}
