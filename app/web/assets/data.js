// The screen Data: the draft's images with captions that are saved as they are typed, and what is to be looked at.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, link, counted } from './core.js';
import { captioning } from './captioning.js';
import { every } from './frame.js';
import { lightbox } from './lightbox.js';
import { look as looks } from './look.js';
import { mask as masks } from './mask.js';
import { upload as uploads } from './upload.js';

const SAVED_AFTER_MS = 500, SEARCHED_AFTER_MS = 250, FRESH_AFTER_MS = 400, RETRY_EVERY_S = 2, LOADS = 3;
const SHOWS = [['all', 'All'], ['uncaptioned', 'No caption'], ['problems', 'Problems'], ['held_out', 'Held out']];
/** @type {HTMLElement} */
let root;
let data = /** @type {any} */ (null), asked = 0, isOther = false, isOwed = false, page = 0,
  filter = { show: 'all', search: '', mark: '' };
const cards = new Map(), addresses = new Map(), stamps = new Map(), timers = new Map(), saving = new Map();
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
const $ = id => root.querySelector(`#${id}`);

// --- captions that are not saved yet ------------------------------------------------------------------------------

/**
 * {image: {text, before, problem, changed}}; `changed` is the file's text where another program changed it. Also in the
 * browser's memory, so that a reload without a server loses nothing.
 */
const pending = new Map(Object.entries(readKept()));

/** Captions that were not typed here: another window of this browser, or the page before its reload. */
const adopted = new Set(pending.keys());

function readKept() {
  try { return JSON.parse(studio.kept('captions') || '{}'); } catch { return {}; }
}

/** Remember or forget one caption; other windows keep theirs in the same place. */
function keep(image, value) {
  if (value) pending.set(image, value); else pending.delete(image);
  const all = readKept();
  if (value) all[image] = value; else delete all[image];
  studio.kept('captions', JSON.stringify(all));
}

function typed(image, text) {
  const known = pending.get(image), card = cards.get(image);
  adopted.delete(image);
  keep(image, { before: card.data.saved, ...known, text, problem: '' });
  drawState(image);
  clearTimeout(timers.get(image));
  timers.set(image, setTimeout(() => { timers.delete(image); save(image); }, SAVED_AFTER_MS));
}

const isReady = kept => kept && !kept.problem && kept.changed === undefined;

/** Send one caption, after the one that is on its way. What is typed meanwhile follows, so they arrive in order. */
async function save(image) {
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
function conflict(image) {
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

async function saveAll() {
  for (const image of new Set([...saving.keys(), ...pending.keys()])) if (!timers.has(image)) await save(image);
}

/** Send everything now, before something that reads or writes all captions. */
async function settle() {
  for (const timer of timers.values()) clearTimeout(timer);
  timers.clear();
  await saveAll();
}

/** {name: the timer of what is done later} */
const delayed = /** @type {Record<string, number>} */ ({});

function later(name, ms, action) {
  clearTimeout(delayed[name]);
  delayed[name] = setTimeout(action, ms);
}

// --- images -------------------------------------------------------------------------------------------------------

const waiting = [];
let loading = 0;

/** Fetch addresses of images a few at a time, in the order in which they are shown. */
async function load(image, element) {
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
function forgetReplaced({ cards = [], held_out: heldOut = [] }) {
  for (const { image, stamp } of [...cards, ...cards.flatMap(card => card.references), ...heldOut]) {
    if (stamps.get(image) !== stamp) addresses.delete(image);
    stamps.set(image, stamp);
  }
}

/** Show images in full size. shown: [{image, name, text}], of which the one of this path comes first. */
function enlarge(image, shown) {
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

const onPage = () => [...$('grid').querySelectorAll('.pc')].map(element => cards.get(element.dataset.image))
  .filter(card => card?.data.shape)
  .map(card => ({ image: card.data.image, name: card.data.name, text: card.box.value }));

// --- cards --------------------------------------------------------------------------------------------------------

function makeCard(image) {
  const card = { data: null, isSaved: false };
  card.frame = h('div.im');
  card.box = h('textarea',
    { placeholder: 'Write a caption', oninput: () => typed(image, card.box.value), onblur: () => {
      if (timers.has(image)) settle();
    } });
  card.end = h('div.end');
  card.conflict = h('div');
  card.name = h('b');
  card.state = h('span', { role: 'status' });
  card.remove = uploads.deleteButton(card);
  card.crop = looks.cropButton(card);
  card.mask = masks.button(card);
  card.sources = h('div.sources');
  card.element = h('article.card.pc', { data: { image } }, h('div.both', {}, card.sources, card.frame), card.box,
    card.conflict, card.end,
    h('div.ft', {}, card.name, card.state, h('div.acts', {}, card.crop, card.mask, h('span.grow'), card.remove)));
  return card;
}

function updateCard(card, fresh) {
  const before = card.data, { image, name, shape, flaw, stamp } = fresh, isTyping = pending.has(image);
  card.data = fresh;
  card.element.dataset.name = name;
  card.box.setAttribute('aria-label', `Caption of ${name}`);
  card.remove.setAttribute('aria-label', `Delete ${name}`);
  card.remove.hidden = fresh.is_fixed;
  card.crop.setAttribute('aria-label', `Crop of ${name}`);
  card.crop.hidden = !shape;
  looks.pair(card, fresh);
  card.box.disabled = fresh.is_fixed || (!!fresh.problem && fresh.saved === null && !!shape);
  card.box.title = fresh.is_fixed ? 'Captions of a table are edited in its file.' : '';
  if (isTyping) { if (card.box !== studio.focused()) card.box.value = pending.get(image).text; }
  else if (!before || card.box !== studio.focused() || card.box.value.trim() === before.caption) {
    if (card.box.value.trim() !== fresh.caption) card.box.value = fresh.caption;
  }
  say(card.name, name);
  card.name.title = image;
  fill(card.frame, [shape, name, stamp, flaw, fresh.problem, data.background], () => {
    if (!shape) return [h('span.missing', {}, 'cannot be shown')];
    const picture = h('img', { alt: '' }),
      [x, y] = shape.kept.map(
        (kept, side) => [shape.start[side], 1 - shape.start[side] - kept].map(share => `${100 * share}%`));
    load(image, picture);
    const frame = h('button.fr',
      { type: 'button', 'aria-label': `Enlarge ${name}`,
        style: { 'aspect-ratio': `${shape.width} / ${shape.height}`, '--aspect': shape.width / shape.height },
        onclick: () => enlarge(image, onPage()) }, picture,
      h('span.cr', { style: { inset: `${y[0]} ${x[1]} ${y[1]} ${x[0]}` } }));
    looks.borders(frame, shape, data.background);
    return [frame, h('span.tags')];
  });
  masks.update(card);
  drawTags(card);
  fill(card.end, [fresh.cut, fresh.problem], () => [
    fresh.cut ? h('p.cut', { tabIndex: 0 },
      `Truncated: ${fresh.cut.encoder} reads ${fresh.cut.read} of ${fresh.cut.needed} tokens.`, h('br'),
      `…${fresh.cut.before}`, h('del', {}, fresh.cut.rest)) : null,
    fresh.problem ? h('p.wrong', {}, fresh.problem) : null]);
  drawState(image);
}

function drawTags(card) {
  const isEmpty = !card.box.value.trim(), { flaw, is_held_out, problem, mask } = card.data,
    place = card.frame.querySelector('.tags');
  card.element.classList.toggle('bad', (isEmpty && data.needs_captions) || !!flaw?.is_error || !!card.data.problem);
  if (place) fill(place, [isEmpty, flaw, is_held_out, problem, !!mask], () => [
    isEmpty && !problem ? h(data.needs_captions ? 'span.tag.bad' : 'span.tag.warn', {}, 'no caption') : null,
    flaw ? h(flaw.is_error ? 'span.tag.bad' : 'span.tag.warn', {}, flaw.text) : null,
    is_held_out ? h('span.tag.acc', {}, 'held out') : null, mask ? h('span.tag.acc', {}, 'mask') : null]);
}

/** Say at a card whether its caption is saved. */
function drawState(image) {
  const card = cards.get(image), kept = pending.get(image);
  drawUnsaved();
  if (!card) return;
  const { shape } = card.data;
  const size = shape ? `${shape.width}×${shape.height}` : '';
  card.state.title = !shape ? '' : shape.sizes.length
    ? `trained at ${shape.sizes.map(([width, height]) => `${width} × ${height}`).join(', ')} pixels`
    : 'left out: the crop would be larger than data.most_cropped allows';
  fill(card.conflict, kept?.changed === undefined ? 0 : [kept.changed],
    () => kept?.changed === undefined ? [] : conflict(image));
  fill(card.state, [kept?.problem, !!kept, saving.has(image), card.isSaved, size], () => {
    if (kept?.problem) return retry(image);
    return [kept ? (saving.has(image) ? 'saving …' : 'not saved yet') : card.isSaved ? 'saved'
      : size].map(text => document.createTextNode(text));
  });
  drawTags(card);
}

/** Captions of images that are not on this page and are not saved: some are sent again, others need a decision. */
function drawUnsaved() {
  if (!root) return;
  const hidden = [...pending.keys()].filter(image => !cards.has(image) && !saving.has(image)),
    waiting = hidden.filter(image => isReady(pending.get(image)));
  const others = hidden.filter(image => !waiting.includes(image));
  $('data-unsaved').hidden = !hidden.length;
  fill($('data-unsaved'), [waiting.length, others.map(image => [image, pending.get(image)])], () => [
    waiting.length ? h('p', {},
      `${counted(waiting.length, 'caption')} of other images ${waiting.length === 1 ? 'is'
        : 'are'} not saved yet; sent again every few seconds.`) : null,
    others.map(image => h('div', {}, h('b', {}, image),
      pending.get(image).changed === undefined ? retry(image) : conflict(image)))]);
}

/** Why a caption was refused, and a button that sends it again. */
const retry = image => [h('span.wrong', {}, pending.get(image).problem, ' '),
  h('button.btn.s', { type: 'button', onclick: () => {
    keep(image, { ...pending.get(image), problem: '' });
    save(image);
  } }, 'Try again'), ' ',
  h('button.btn.s', { type: 'button', title: 'Forget what was typed', onclick: () => discard(image) }, 'Discard')];

/** Forget what was typed, for an image that is gone or a folder that cannot be written. */
function discard(image) {
  keep(image, null);
  const card = cards.get(image);
  if (card) card.box.value = card.data.caption;
  drawState(image);
}

/** Show the cards of an answer. Those that are shown stay until another page or filter is chosen. */
function drawCards(isChosen) {
  const images = data.cards.map(card => card.image),
    shown = [...$('grid').children].map(element => element.dataset.image);
  if (!isChosen && shown.some(image => cards.has(image))) {
    for (const fresh of data.cards) if (cards.has(fresh.image)) updateCard(cards.get(fresh.image), fresh);
    return;
  }
  for (const image of [...cards.keys()]) if (!images.includes(image)) cards.delete(image);
  for (const fresh of data.cards) {
    if (!cards.has(fresh.image)) cards.set(fresh.image, makeCard(fresh.image));
    updateCard(cards.get(fresh.image), fresh);
  }
  if (shown.join('\n') !== images.join('\n') || !images.length) $('grid')
    .replaceChildren(...(images.length ? images.map(image => cards.get(image).element)
      : [h('p.none', {}, 'No image matches.', ' ',
        h('button.btn.s', { type: 'button', onclick: () => {
          $('data-search').value = '';
          choose({ show: 'all', search: '', mark: '' });
        } }, 'Show all'))]));
  for (const image of images) { // pictures of cards that were not in the document yet
    const picture = cards.get(image).frame.querySelector('img');
    if (picture && !picture.getAttribute('src')) load(image, picture);
  }
}

// --- figures, filters, what is to be looked at --------------------------------------------------------------------

const figure = (name, value) => h('div', {}, h('span', {}, name), h('b.num', {}, value));

function drawFigures() {
  fill($('folder'), data.folders,
    () => data.folders.length ? data.folders.map(folder => h('code', {}, folder)) : 'No folder is chosen.');
  const captions = data.counts ? data.counts.captions : null,
    key = [data.num_images, captions, data.shapes.length, data.num_held_out, data.num_questions, data.trigger,
      data.resolution, data.num_texts, data.text_bytes, data.num_documents, data.is_complete];
  fill($('figures'), key, () => !data.is_complete ? [] : data.is_text
    ? [figure('text files', studio.count(data.num_texts)),
      data.num_documents === null ? null : figure('documents', studio.count(data.num_documents)),
      figure('size', studio.size(data.text_bytes))]
    : [figure('images', studio.count(data.num_images)),
      captions === null ? null : figure('captions', studio.count(captions)),
      figure('shapes', studio.count(data.shapes.length)), figure('held out', studio.count(data.num_held_out)),
      data.num_questions ? figure('questions to train on', studio.count(data.num_questions)) : null,
      data.trigger ? figure('[trigger] becomes', data.trigger) : null, figure('scaled to about', data.resolution)]);
  const words = data.is_text ? counted(data.num_texts, 'text file')
    : [counted(data.num_images, 'image'), captions === null ? null : counted(captions, 'caption'),
      counted(data.shapes.length, 'shape'), `${data.num_held_out} held out`].filter(Boolean).join(', ');
  say($('counted'), data.is_complete ? words : `${counted(data.num_files, 'file')} so far; reading the images …`);
}

function drawFilters() {
  const counts = data.counts,
    number = { all: data.num_images, uncaptioned: counts?.uncaptioned, problems: counts?.problems,
      held_out: data.num_held_out };
  fill($('shows'), [number, filter.show],
    () => SHOWS.map(([name, word]) =>
      h('button', { type: 'button', data: { show: name }, 'aria-pressed': String(filter.show === name),
        disabled: number[name] === 0 && filter.show !== name, onclick: () => choose({ show: name }) },
        number[name] === undefined ? word : `${word} ${studio.count(number[name])}`)));
  fill($('words'), [counts?.words, filter.search],
    () => counts?.words.length
      ? counts.words.map(([word, count]) =>
        h('button.chip', { type: 'button', data: { word }, 'aria-pressed': String(filter.search === word),
          title: `in ${counted(count, 'caption')}`, onclick: () => searchFor(filter.search === word ? '' : word) },
          word, ' ', h('span.dim', {}, studio.count(count))))
    : h('p.dim', {}, counts ? 'No captions yet.' : 'Not counted for so many images.'));
  fill($('marked'), filter.mark,
    () => filter.mark ? h('button.chip',
      { type: 'button', 'aria-pressed': 'true', title: 'Show all images', onclick: () => choose({ mark: '' }) },
      'Only those of “Look closer” ✕') : []);
  const count = data.num_replaceable, button = $('data-replace'), undo = $('data-undo'), focused = studio.focused();
  button.disabled = !filter.search || !count;
  say(button, filter.search ? `Replace in ${counted(count, 'caption')}` : 'Replace');
  say($('replace-help'), filter.search ? `“${filter.search}” is in ${counted(count, 'caption')}, written like this.`
    : 'Write the text to replace into the search field.');
  undo.disabled = !data.num_undoable;
  say(undo, data.num_undoable ? `Undo (${counted(data.num_undoable, 'caption')})` : 'Undo');
  // a tick's answer may come after that of a press
  if ([button, undo].includes(focused)) studio.refocus(focused, $('data-open-replace'));
  const last = Math.min(data.first + data.per_page, data.num_chosen);
  $('data-before').disabled = data.first === 0;
  $('data-after').disabled = last >= data.num_chosen;
  say($('data-range'), data.num_chosen
    ? `${studio.count(data.first + 1)}–${studio.count(last)} of ${studio.count(data.num_chosen)}` : '');
  const numPages = Math.ceil(data.num_chosen / data.per_page), box = $('data-page');
  $('data-pages').hidden = numPages < 2;
  box.closest('label').hidden = numPages < 3;
  box.max = numPages;
  if (box !== studio.focused()) box.value = page + 1;
}

function drawIssues() {
  const item = kind => text =>
    h('li', {}, h(`i.dot.${kind}`), h('span', {}, h('b.sr', {}, kind === 'bad' ? 'Error: ' : 'Warning: '), text));
  fill($('data-problems'), [data.problems, data.warnings, data.history_problem], () => [
    data.problems.length ? h('div', { role: 'alert' }, h('ul.iss', {}, data.problems.map(item('bad')))) : null,
    data.warnings.length || data.history_problem
      ? h('ul.iss', {}, [...data.warnings, data.history_problem].filter(Boolean).map(item('warn'))) : null,
    data.problems.length || data.warnings.length ? null
      : h('p', {}, h('span.tag.ok', {}, 'ok'), ' No problems in the files.')]);
  const lengths = data.lengths;
  fill($('data-cut'), lengths,
    () => !lengths ? [] : lengths.is_waiting ? h('p.dim', { role: 'status' }, 'Measuring the captions in tokens.')
      : lengths.failure ? studio.alert(lengths.failure)
    : lengths.sentences.length ? h('ul.iss', {}, lengths.sentences.map(item('warn')))
    : h('p', {}, h('span.tag.ok', {}, 'ok'), ' No caption is truncated.'));
  const number = data.problems.length + data.warnings.length + (lengths?.sentences.length || 0);
  fill($('num-issues'), number,
    () => number ? h(data.problems.length ? 'span.tag.bad' : 'span.tag.warn', {}, String(number)) : []);
}

function drawShapes() {
  fill($('shapes'), data.shapes, () => data.shapes.map(([width, height, count, cropped]) => {
    const scale = 40 / Math.max(width, height),
      kind = width === height ? 'square' : width > height ? 'landscape' : 'portrait';
    return h('div.sh', {}, h('i', { style: { width: `${width * scale}px`, height: `${height * scale}px` } }),
      h('span', {}, `${studio.count(width)} × ${studio.count(height)}`, h('br'),
        h('span.dim.sm', {}, kind,
          cropped >= 0.005 ? `, ${Math.round(100 * cropped)} % cut off` : ', nothing cut off')),
          h('b', {}, studio.count(count)));
  }));
  say($('trained'), data.shapes.length
    ? `${counted(data.num_images - data.num_held_out,
      'image')} to train on${data.num_trained > data.num_images - data.num_held_out
      ? `, ${studio.count(data.num_trained)} with each of their resolutions` : ''}${data.num_held_out
      ? `; ${studio.count(data.num_held_out)} held out` : ''}.` : 'Shown when images can be read.');
  $('card-held').hidden = !data.held_out.length;
  fill($('held'), data.held_out, () => data.held_out.map(({ image, name }) => {
    const picture = h('img.image', { alt: '', loading: 'lazy' });
    setTimeout(() => load(image, picture));
    return h('button.one', { type: 'button', 'aria-label': `Enlarge ${name}`,
      onclick: () => enlarge(image, data.held_out) }, picture, h('span.sm.dim', {}, name));
  }));
  const more = data.num_held_out - data.held_out.length;
  say($('held-more'), more > 0 ? `and ${studio.count(more)} more` : '');
}

function drawTexts() {
  const more = data.num_texts - data.texts.length;
  fill($('texts'), [data.texts, more, data.conversation],
    () =>
      [
        h('table.wide', {}, h('tbody', {},
          data.texts.map(([name, size]) =>
            h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, studio.size(size)))))),
            more > 0 ? h('p.dim', {}, `and ${studio.count(more)} more`) : null,
        data.conversation.length
          ? [h('p.dim', {}, 'The first conversation; the assistant’s words are in the loss:'),
            ...data.conversation.map(([role, content]) => h('p', {}, h('b', {}, `${role}: `), content))] : null]);
}

function draw(isChosen) {
  drawFigures();
  uploads.shown(data);
  looks.shown(data);
  captioning.shown(data);
  const hasImages = data.is_complete && data.num_images > 0;
  $('editor').hidden = !hasImages;
  $('card-texts').hidden = !data.is_complete || !data.num_texts;
  $('data-empty').hidden = !data.is_complete || hasImages || !!data.num_texts;
  $('data-reading').hidden = data.is_complete;
  for (const id of ['card-shapes', 'card-words', 'card-held', 'card-captioning']) $(id).hidden = !hasImages;
  $('card-issues').hidden = !data.is_complete;
  drawUnsaved();
  if (!data.is_complete) return;
  drawIssues();
  drawTexts();
  if (hasImages) {
    drawCards(isChosen);
    drawFilters();
    drawShapes();
  }
  uploads.drawn();
}

// --- asking -------------------------------------------------------------------------------------------------------

/** Ask for the page that is chosen. The answer of an earlier question is dropped. */
async function look(isChosen = false, isFresh = false) {
  if (!root) return; // not shown yet: a caption of before a reload was sent
  isOther ||= isChosen; // also where a later question overtakes this one
  const number = asked += 1, wasComplete = data?.is_complete, folder = data?.folders.join();
  let found;
  try {
    found = await call('data_view', { ...filter, page, is_fresh: isFresh });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    isOwed = error.lost; // asked again when the server is back
    if (!error.lost) tell(studio.alert(error.message));
    return;
  }
  if (number !== asked) return;
  isOwed = false;
  data = found;
  forgetReplaced(data);
  if (data.is_complete) page = Math.floor(data.first / data.per_page);
  draw(isOther || !wasComplete || data.folders.join() !== folder);
  isOther = false;
}

async function choose(changes, toPage = 0) {
  tell(null);
  filter = { ...filter, ...changes };
  page = toPage;
  await settle();
  await look(true);
}

/** Put a word into the search, as if it was typed. */
function searchFor(word) {
  clearTimeout(delayed.search);
  $('data-search').value = word;
  choose({ search: word });
}

const tell = element => $('data-message').replaceChildren(...(element ? [element] : []));

/** Do something with all captions after those that are typed are saved, and say what came of it. */
async function act(button, action) {
  await settle();
  await studio.act(button, $('data-message'), action);
  await look(true);
  studio.refocus(button, $('data-open-replace'));
}

const turn = by => {
  const to = page + by;
  if (data?.is_complete && to >= 0 && to * data.per_page < data.num_chosen) choose({}, to);
};

async function showTimesteps(button) {
  button.disabled = true;
  $('timesteps').replaceChildren(h('p.dim', { role: 'status' }, 'Computing …'));
  try {
    const rows = await call('data_timesteps');
    $('timesteps').replaceChildren(rows.length ? timestepTable(rows) : h('p.dim', {}, 'Text has no timesteps.'));
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    $('timesteps').replaceChildren(studio.alert(error.message));
  } finally {
    button.disabled = false;
    studio.refocus(button);
  }
}

function timestepTable(rows) {
  const histogram = shares => {
    const most = Math.max(...shares),
      mean = shares.reduce((sum, share, at) => sum + (at + 0.5) * share, 0) / shares.length;
    return h('span.histogram', { role: 'img', 'aria-label': `mean ${mean.toFixed(2)}` },
      shares.map(share => h('i', { style: { height: `${100 * share / most}%` } })));
  };
  return h('div.scroll', {},
    h('table.wide', {}, h('thead', {},
      h('tr', {}, ['Bucket', 'Shift', 'Timesteps, image to noise'].map(head => h('th', { scope: 'col' }, head)))),
      h('tbody', {},
        rows.map(row => h('tr', {}, h('th', { scope: 'row' }, `${row.width} × ${row.height}`),
          h('td', {}, row.shift.toFixed(2)), h('td', {}, histogram(row.timesteps)))))));
}

const side = (id, title, note, ...children) =>
  h(`section.card#card-${id}`, { 'aria-labelledby': `h-${id}`, hidden: true },
    h('div.ttl', {}, h(`h2#h-${id}`, {}, title), note ? h('span.dim', {}, note) : null), ...children);

function editor() {
  const search = h('input#data-search',
    { type: 'search', placeholder: 'Search captions', 'aria-label': 'Search captions',
      oninput: () => later('search', SEARCHED_AFTER_MS, () => choose({ search: search.value })) });
  const replaceRow = h('div.bar2#replace-row', { hidden: true },
    h('input#data-replacement', { type: 'text', placeholder: 'Replace with', 'aria-label': 'Replace with' }),
    h('button.btn#data-replace', { type: 'button', onclick: event => act(event.currentTarget, async () => {
      const count = await call('data_replace',
        { key: data.key, search: filter.search, replacement: $('data-replacement').value });
      return `Replaced in ${counted(count, 'caption')}.`;
    }) }, 'Replace'), h('span.dim.sm#replace-help'));
  const crop = h('input#data-crop', { type: 'checkbox', checked: studio.kept('crop') !== 'off', onchange: () => {
    studio.kept('crop', crop.checked ? 'on' : 'off');
    $('grid').classList.toggle('no-crop', !crop.checked);
  } });
  return h('div#editor', { hidden: true }, h('div.bar2', {}, search, h('span.grow'),
    h('button.btn.s#data-open-replace',
      { type: 'button', 'aria-expanded': 'false', 'aria-controls': 'replace-row', onclick: event => {
        replaceRow.hidden = !replaceRow.hidden;
        event.currentTarget.setAttribute('aria-expanded', String(!replaceRow.hidden));
      } }, 'Replace …'),
    h('button.btn.s#data-undo',
      { type: 'button', disabled: true,
        onclick: event => act(event.currentTarget,
          async () => `${counted(await call('data_undo', { key: data.key }), 'caption')} restored.`) }, 'Undo')),
          replaceRow,
  h('div.bar2', {}, h('span.seg#shows', { role: 'group', 'aria-label': 'Filter' }), h('span#marked'), h('span.grow'),
    masks.toggle(), h('label.crop.sm', { title: 'Show what the crop to the bucket keeps' }, crop, 'Crop')),
  h(crop.checked ? 'div.grid#grid' : 'div.grid.no-crop#grid'),
  h('nav.pages#data-pages', { 'aria-label': 'Pages of images' },
    h('button.btn#data-before', { type: 'button', onclick: () => turn(-1) }, 'Previous'),
    h('span.dim#data-range', { role: 'status' }),
    h('label.sm', { hidden: true }, 'Page ', h('input#data-page', { type: 'number', min: 1, onchange: event => {
      const to = Math.round(event.target.value) - 1;
      if (to >= 0) choose({}, to);
    } })),
    h('button.btn#data-after', { type: 'button', onclick: () => turn(1) }, 'Next')));
}

every(RETRY_EVERY_S, async () => { if (pending.size) await saveAll(); });

studio.screens.data = {
  rail: { key: 'd', icon: 'M3 4h14v12H3zM3 13l4-4 3.5 3.5L13 10l4 4' },
  title: 'Data',
  build(section) {
    root = section;
    masks.connect(() => look());
    root.append(h('div.head', {}, h('h1', {}, 'Data'), h('span.dim#counted', { role: 'status' }), h('span.grow'),
      h('button.btn#data-again', { type: 'button', onclick: () => {
        addresses.clear();
        tell(null);
        look(true, true);
      } }, 'Read again'), h('a.btn.main', { href: link('new') }, 'To New run')),
      h('section.card', { 'aria-label': 'Folder' },
        h('div.path', {}, h('b', {}, 'Folder'), h('span.folders#folder'),
          h('a', { href: link('new') }, 'Change it in New run')), h('div.figures#figures')),
      uploads.build(section, { settle, refresh: () => look(true, true), forget: image => keep(image, null),
        key: () => data?.key || '' }),
      looks.notice({ load, enlarge, choose: mark => choose({ mark }), mark: () => filter.mark, redraw: () => look(),
        refresh: () => look(false, true), key: () => data?.key || '' }),
      h('div#data-message'), h('div.notice.warn#data-unsaved', { hidden: true, role: 'status' }),
      h('p.notice#data-reading', { hidden: true, role: 'status' },
        'The files are being read. You can go on elsewhere meanwhile.'),
      h('section.card.empty#data-empty', { hidden: true }, h('h2', {}, 'No images here.'),
        h('p', {},
          'Add images above, or choose a folder of images in New run; each may have a caption in a text file of ' +
          'its name.'), h('a.btn.main', { href: link('new') }, 'New run')),
      h('div.two', {}, h('div', {}, side('texts', 'Text files', '', h('div#texts')), editor()),
        h('div.col', {}, captioning.panel(() => look(false, true)),
          h('section.card#card-issues', { 'aria-labelledby': 'h-issues', hidden: true },
            h('div.ttl', {}, h('h2#h-issues', {}, 'To look at'), h('span#num-issues')), h('div#data-problems'),
            h('div#data-cut')), looks.panel(),
          side('shapes', 'Shapes', 'what images are cropped to', h('div#shapes'), h('p.dim.sm#trained'),
            h('button.btn.s#compute-timesteps',
              { type: 'button', onclick: event => showTimesteps(event.currentTarget) }, 'Show timesteps per bucket'),
              h('div#timesteps', { 'aria-live': 'polite' })),
          side('held', 'Held out', 'not trained on, to measure progress', h('div.held#held'), h('p.dim.sm#held-more')),
          side('words', 'Words', 'most frequent; click to search', h('div.chips#words')))));
    studio.shortcut('/', 'Search captions', () => $('data-search').focus(), 'data');
    studio.shortcut('ArrowLeft', 'Previous page', () => turn(-1), 'data');
    studio.shortcut('ArrowRight', 'Next page', () => turn(1), 'data');
  },
  async show() {
    addresses.clear();
    tell(null);
    await Promise.all([look(true, true), uploads.look()]);
    await Promise.all([captioning.look(), looks.look()]);
  },
  async tick() {
    await Promise.all([captioning.tick(), looks.tick()]);
    if (!data || !data.is_complete || data.lengths?.is_waiting || isOwed) await look();
  },
};
