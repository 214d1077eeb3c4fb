// Captions that are not saved yet, and where images come from.
// @ts-check
import * as studio from './core.js';
import { call, h } from './core.js';
import { drawState } from './data-cards.js';
import { cards, timers, saving, addresses, $ } from './data-state.js';
import { look } from './data.js';
import { lightbox } from './lightbox.js';

const SAVED_AFTER_MS = 500, FRESH_AFTER_MS = 400, LOADS = 3;
const stamps = new Map();

// --- captions that are not saved yet ------------------------------------------------------------------------------

/**
 * {image: {text, before, problem, changed}}; `changed` is the file's text where another program changed it. Also in the
 * browser's memory, so that a reload without a server loses nothing.
 */
export const pending = new Map(Object.entries(readKept()));

/** Captions that were not typed here: another window of this browser, or the page before its reload. */
const adopted = new Set(pending.keys());

function readKept() {
  try { return JSON.parse(studio.kept('captions') || '{}'); } catch { return {}; }
}

/** Remember or forget one caption; other windows keep theirs in the same place. */
export function keep(image, value) {
  if (value) pending.set(image, value); else pending.delete(image);
  const all = readKept();
  if (value) all[image] = value; else delete all[image];
  studio.kept('captions', JSON.stringify(all));
}

export function typed(image, text) {
  const known = pending.get(image), card = cards.get(image);
  adopted.delete(image);
  keep(image, { before: card.data.saved, ...known, text, problem: '' });
  drawState(image);
  clearTimeout(timers.get(image));
  timers.set(image, setTimeout(() => { timers.delete(image); save(image); }, SAVED_AFTER_MS));
}

export const isReady = kept => kept && !kept.problem && kept.changed === undefined;

/** Send one caption, after the one that is on its way. What is typed meanwhile follows, so they arrive in order. */
export async function save(image) {
  if (saving.has(image)) return saving.get(image);
  if (!isReady(pending.get(image))) return undefined;
  const done = send(image).finally(() => { saving.delete(image); drawState(image); });
  saving.set(image, done);
  drawState(image);
  return done;
}

/** Send one caption, and again until the last text is saved, refused or the server does not answer. */
async function send(image) {
  // its window has sent it, or has a newer text
  if (adopted.delete(image) && readKept()[image]?.text !== pending.get(image).text) {
    pending.delete(image);
    later('fresh', FRESH_AFTER_MS, () => look());
    return;
  }
  while (isReady(pending.get(image))) {
    const sent = pending.get(image);
    try {
      const answer = await call('data_save', { image, before: sent.before, caption: sent.text });
      const now = pending.get(image);
      if ('changed' in answer) keep(image, { ...now, changed: answer.changed });
      else saved(image, answer, now.text === sent.text);
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      if (error.lost) return;
      keep(image, { ...pending.get(image), problem: error.message });
    }
  }
}

function saved(image, answer, isAll) {
  const card = cards.get(image);
  keep(image, isAll ? null : { ...pending.get(image), before: answer.saved });
  if (card) card.data = { ...card.data, saved: answer.saved, caption: answer.saved ?? '' };
  if (card && isAll) card.isSaved = true;
  later('fresh', FRESH_AFTER_MS, () => look());
}

/** Both texts of a caption that was changed elsewhere since it was loaded, and buttons that choose one. */
export function conflict(image) {
  const { changed } = pending.get(image);
  const mine = () => { keep(image, { ...pending.get(image), before: changed, changed: undefined }); save(image); };
  const theirs = () => {
    clearTimeout(timers.get(image));
    timers.delete(image);
    keep(image, null);
    const card = cards.get(image);
    if (card) {
      card.data = { ...card.data, saved: changed, caption: changed ?? '' };
      card.box.value = changed ?? '';
    }
    drawState(image);
    later('fresh', FRESH_AFTER_MS, () => look());
  };
  return h('div.conflict', { role: 'alert' },
    h('p', {}, changed === null ? 'Not saved: the caption’s file was removed meanwhile.'
      : `Not saved: the file was changed meanwhile. It says: “${changed}”`),
    h('button.btn.s', { type: 'button', onclick: mine }, 'Use mine'),
    h('button.btn.s', { type: 'button', onclick: theirs }, 'Use the file’s'));
}

export async function saveAll() {
  for (const image of new Set([...saving.keys(), ...pending.keys()])) if (!timers.has(image)) await save(image);
}

/** Send everything now, before something that reads or writes all captions. */
export async function settle() {
  for (const timer of timers.values()) clearTimeout(timer);
  timers.clear();
  await saveAll();
}

/** {name: the timer of what is done later} */
export const delayed = /** @type {Record<string, number>} */ ({});

export function later(name, ms, action) {
  clearTimeout(delayed[name]);
  delayed[name] = setTimeout(action, ms);
}

// --- images -------------------------------------------------------------------------------------------------------

const waiting = [];
let loading = 0;

/** Fetch addresses of images a few at a time, in the order in which they are shown. */
export async function load(image, element) {
  if (addresses.has(image)) { element.src = addresses.get(image); return; }
  waiting.push([image, element]);
  while (loading < LOADS && waiting.length) {
    loading += 1;
    const [next, target] = waiting.shift();
    try {
      if (target.isConnected) {
        for (let stamp; !addresses.has(next);) { // a file that was replaced meanwhile is asked for once more
          stamp = stamps.get(next);
          const address = await call('data_thumbnail', { image: next });
          if (stamps.get(next) === stamp) addresses.set(next, address);
        }
        target.src = addresses.get(next);
      }
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      if (!error.lost) target.replaceWith(h('span.missing', {}, error.message));
    } finally { loading -= 1; }
  }
}

/** Forget the addresses of images whose file is another one now. */
export function forgetReplaced({ cards = [], held_out: heldOut = [] }) {
  for (const { image, stamp } of [...cards, ...cards.flatMap(card => card.references), ...heldOut]) {
    if (stamps.get(image) !== stamp) addresses.delete(image);
    stamps.set(image, stamp);
  }
}

/** Show images in full size. shown: [{image, name, text}], of which the one of this path comes first. */
export function enlarge(image, shown) {
  const load = async path => {
    try { return await call('data_thumbnail', { image: path, is_full: true }); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      studio.toast(error.message, true);
      return null;
    }
  };
  lightbox(shown.map(item => ({ title: item.name, text: item.text, load: () => load(item.image) })),
    shown.findIndex(item => item.image === image));
}

export const onPage = () => [...$('grid').querySelectorAll('.pc')].map(element => cards.get(element.dataset.image))
  .filter(card => card?.data.shape)
  .map(card => ({ image: card.data.image, name: card.data.name, text: card.box.value }));
