// The cards of the images on the screen Data.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, counted } from './core.js';
import { typed, settle, pending, load, enlarge, onPage, conflict, isReady, keep, save } from './data-captions.js';
import { timers, current, cards, saving, $, EVERYTHING } from './data-state.js';
import { drawTagsOf, makeTags, onlyStop, rove } from './data-tags.js';
import { choose } from './data.js';
import { look as looks } from './look.js';
import { mask as masks } from './mask.js';
import { upload as uploads } from './upload.js';

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
  // Between two captions Tab stops once, at the buttons, and the arrow keys go on from there.
  card.element = h('article.card.pc', { data: { image }, onkeydown: event => rove(event, buttonsOf(card)) },
    h('div.both', {}, card.sources, card.frame), card.box, makeTags(card), card.conflict, card.end,
    h('div.ft', {}, card.name, card.state, h('div.acts', {}, card.crop, card.mask, h('span.grow'), card.remove)));
  return card;
}

/** The buttons of a card that are shown; Tab reaches the first of them. */
const buttonsOf = card => [card.crop, card.mask, card.remove, ...card.element.querySelectorAll('.fr')]
  .filter(button => !button.hidden);

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
  fill(card.frame, [shape, name, stamp, flaw, fresh.problem, current.data.background], () => {
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
    looks.borders(frame, shape, current.data.background);
    return [frame, h('span.tags')];
  });
  masks.update(card);
  onlyStop(buttonsOf(card));
  drawTags(card);
  fill(card.end, [fresh.cut, fresh.problem], () => [
    fresh.cut ? h('p.cut', { tabIndex: 0 },
      `Truncated: ${fresh.cut.encoder} reads ${fresh.cut.read} of ${fresh.cut.needed} tokens.`, h('br'),
      `…${fresh.cut.before}`, h('del', {}, fresh.cut.rest)) : null,
    fresh.problem ? h('p.wrong', {}, fresh.problem) : null]);
  drawState(image);
}

function drawTags(card) {
  const isEmpty = !card.box.value.trim(), { flaw, is_held_out, problem, mask, like, name } = card.data,
    place = card.frame.querySelector('.tags');
  drawTagsOf(card);
  card.element.classList.toggle('bad',
    (isEmpty && current.data.needs_captions) || !!flaw?.is_error || !!card.data.problem);
  if (place) fill(place, [isEmpty, flaw, is_held_out, problem, !!mask, like], () => [
    isEmpty && !problem ? h(current.data.needs_captions ? 'span.tag.bad' : 'span.tag.warn', {}, 'no caption') : null,
    flaw ? h(flaw.is_error ? 'span.tag.bad' : 'span.tag.warn', {}, flaw.text) : null,
    is_held_out ? h('span.tag.acc', {}, 'held out') : null, mask ? h('span.tag.acc', {}, 'mask') : null,
    like && like !== name ? h('span.tag.warn', {}, `like ${like}`) : null]);
}

/** Say at a card whether its caption is saved. */
export function drawState(image) {
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
export function drawUnsaved() {
  if (!current.root) return;
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
export function drawCards(isChosen) {
  const images = current.data.cards.map(card => card.image),
    shown = [...$('grid').children].map(element => element.dataset.image);
  if (!isChosen && shown.some(image => cards.has(image))) {
    for (const fresh of current.data.cards) if (cards.has(fresh.image)) updateCard(cards.get(fresh.image), fresh);
    return;
  }
  for (const image of [...cards.keys()]) if (!images.includes(image)) cards.delete(image);
  for (const fresh of current.data.cards) {
    if (!cards.has(fresh.image)) cards.set(fresh.image, makeCard(fresh.image));
    updateCard(cards.get(fresh.image), fresh);
  }
  if (shown.join('\n') !== images.join('\n') || !images.length) $('grid')
    .replaceChildren(...(images.length ? images.map(image => cards.get(image).element)
      : [h('p.none', {}, 'No image matches.', ' ',
        h('button.btn.s', { type: 'button', onclick: () => {
          $('data-search').value = '';
          choose(EVERYTHING);
        } }, 'Show all'))]));
  for (const image of images) { // pictures of cards that were not in the document yet
    const picture = cards.get(image).frame.querySelector('img');
    if (picture && !picture.getAttribute('src')) load(image, picture);
  }
}
