// The tags of captions on the screen Data: chips of a caption that are dragged, added and removed, and those of all
// captions.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, counted } from './core.js';
import { typed } from './data-captions.js';
import { current, $ } from './data-state.js';

/** The tags of a caption, each once, as `caption_texts.tags` has them. */
const tagsOf = caption => [...new Set(caption.split(',').map(tag => tag.trim()).filter(Boolean))];

/** Whether captions are shown as tags. */
export const isTagged = () => $('grid').classList.contains('as-tags');

/**
 * Let the arrow keys move the focus along elements of which Tab reaches only one.
 * @param {KeyboardEvent} event
 * @param {HTMLElement[]} stops
 */
export function rove(event, stops) {
  const at = stops.indexOf(studio.focused()), by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (at < 0 || !by || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  event.stopPropagation(); // they turn the page elsewhere
  const next = stops[(at + by + stops.length) % stops.length];
  onlyStop(stops, next);
  next.focus();
}

/**
 * Let Tab reach one of these elements only.
 * @param {HTMLElement[]} stops
 * @param {HTMLElement} [chosen] Else the one that it reaches now, or the first.
 */
export function onlyStop(stops, chosen) {
  const one = chosen || stops.find(stop => stop.tabIndex === 0) || stops[0];
  for (const stop of stops) stop.tabIndex = stop === one ? 0 : -1;
}

// --- the tags of one caption --------------------------------------------------------------------------------------

let dragged = /** @type {any} */ (null); // {card, at}

/** Make the chips of a card, and the field that adds to them. They show the text of its box, and change it. */
export function makeTags(card) {
  const list = h('ul.chips', { onkeydown: event => pressed(card, event) }), moves = h('div.moves');
  const input = h('input', { type: 'text', placeholder: 'Add a tag', autocomplete: 'off', onblur: () => addTyped(card),
    oninput: () => { if (input.value.includes(',')) addTyped(card); }, onkeydown: event => {
      if (event.isComposing) return;
      if (event.key === 'Escape') input.value = '';
      if (event.key === 'Enter') addTyped(card);
      const last = /** @type {HTMLElement | null} */ (list.querySelector('li:last-child button'));
      if ((event.key === 'Backspace' || event.key === 'ArrowLeft') && !input.value && last) {
        event.preventDefault();
        onlyStop(chipsOf(card), last);
        last.focus();
      }
    } });
  card.tagList = list;
  card.tagInput = input;
  card.tagMoves = moves;
  card.chosen = -1;
  // Only a chip of this card is taken; one that is dropped elsewhere stays where it was.
  const isOwn = () => dragged?.card === card;
  const placeOf = event => {
    const chip = event.target.closest?.('li');
    if (!chip) return tagsOf(card.box.value).length;
    const { left, width } = chip.getBoundingClientRect();
    return [...list.children].indexOf(chip) + Number(event.clientX > left + width / 2);
  };
  return h('div.tagged', {
    ondragover: event => { if (isOwn()) { event.preventDefault(); mark(card, placeOf(event)); } },
    ondragleave: () => mark(card, -1),
    ondrop: event => {
      if (!isOwn()) return;
      event.preventDefault();
      move(card, dragged.at, placeOf(event));
    },
  }, list, moves, input);
}

const chipsOf = card => [...card.tagList.querySelectorAll('button')];
const mark = (card, place) => [...card.tagList.children].forEach((chip, at, all) => {
  chip.classList.toggle('before', at === place);
  chip.classList.toggle('behind', at === place - 1 && place === all.length);
});

/** Show the tags of what is in a card's box. */
export function drawTagsOf(card) {
  const own = tagsOf(card.box.value), isFixed = card.box.disabled, { name } = card.data;
  if (card.chosen >= own.length) card.chosen = -1;
  card.tagInput.hidden = isFixed;
  card.tagInput.setAttribute('aria-label', `Add a tag to ${name}`);
  card.tagList.setAttribute('aria-label', `Tags of ${name}`);
  fill(card.tagList, [own, isFixed], () => own.map((tag, at) => h('li', {}, h('button.chip',
    { type: 'button', draggable: !isFixed, title: tag, disabled: isFixed, onclick: () => pick(card, at),
      ondragstart: event => {
        dragged = { card, at };
        event.dataTransfer.effectAllowed = 'move';
        event.dataTransfer.setData('application/x-tag', tag); // not a text, which any field would take
      }, ondragend: () => { mark(card, -1); dragged = null; } }, tag))));
  chipsOf(card).forEach((chip, at) => chip.setAttribute('aria-pressed', String(at === card.chosen)));
  onlyStop(chipsOf(card));
  const tag = own[card.chosen], to = (word, disabled, onclick) =>
    h('button.btn.s', { type: 'button', 'aria-label': `${word}: ${tag}`, disabled, onclick }, word);
  fill(card.tagMoves, [tag, card.chosen, own.length], () => tag === undefined ? [] : [
    to('Earlier', card.chosen === 0, () => move(card, card.chosen, card.chosen - 1)),
    to('Later', card.chosen === own.length - 1, () => move(card, card.chosen, card.chosen + 2)),
    to('Remove', false, () => remove(card, card.chosen))]);
}

function pick(card, at) {
  card.chosen = card.chosen === at ? -1 : at;
  drawTagsOf(card);
}

/** Keys on a chip: the arrows go on to the next one, with Shift they move the chip, Delete removes it. */
function pressed(card, event) {
  const chips = chipsOf(card), at = chips.indexOf(studio.focused()),
    by = { ArrowLeft: -1, ArrowRight: 2 }[event.key];
  if (at < 0) return;
  if (event.key === 'Delete' || event.key === 'Backspace') remove(card, at);
  else if (by && event.shiftKey) move(card, at, at + by);
  else if (event.key === 'ArrowRight' && at === chips.length - 1) card.tagInput.focus();
  else { rove(event, chips); return; }
  event.preventDefault();
  event.stopPropagation();
}

function write(card, own, at) {
  card.box.value = own.join(', ');
  if (card.chosen >= 0) card.chosen = at;
  typed(card.data.image, card.box.value);
  const chip = chipsOf(card)[at];
  if (chip) onlyStop(chipsOf(card), chip);
  if (card.chosen < 0) (chip || card.tagInput).focus();
}

/** Put a tag in front of the one that is at a place now. */
function move(card, at, to) {
  const own = tagsOf(card.box.value), place = to > at ? to - 1 : to;
  if (place === at || place < 0 || place >= own.length) return;
  own.splice(place, 0, ...own.splice(at, 1));
  write(card, own, place);
}

function remove(card, at) {
  const own = tagsOf(card.box.value);
  own.splice(at, 1);
  if (at >= own.length) card.chosen = -1;
  write(card, own, Math.min(at, own.length - 1));
}

function addTyped(card) {
  const own = tagsOf(card.box.value), all = tagsOf(`${card.box.value},${card.tagInput.value}`);
  card.tagInput.value = '';
  if (all.length === own.length) return;
  card.box.value = all.join(', ');
  typed(card.data.image, card.box.value);
}

// --- the tags of all captions -------------------------------------------------------------------------------------

/**
 * The card with the tags of all captions. asked: {choose, act} of the screen.
 * @param {any} asked
 */
export function tagPanel({ choose, act, later }) {
  const find = h('input#tag-find', { type: 'search', placeholder: 'Find a tag', 'aria-label': 'Find a tag',
    oninput: () => later('find', 250, () => choose({ find: find.value }, current.page)) });
  const name = h('input#tag-name', { type: 'text', 'aria-label': 'New name of the tag', onkeydown: event => {
    if (event.key === 'Enter' && !event.isComposing && !event.ctrlKey) $('tag-rename').click();
  } });
  const change = (event, to) => act(event.currentTarget, async () => {
    const { tag } = current.filter;
    const answer = await call('data_rename', { key: current.data.key, tag, name: to });
    current.filter.tag = tagsOf(to)[0] || '';
    return edited(answer);
  });
  return [find, h('div.chips#tags', { onclick: event => {
    const tag = event.target.closest('button')?.dataset.tag;
    if (tag === undefined) return;
    name.value = tag;
    choose({ tag: current.filter.tag === tag ? '' : tag });
  } }), h('p.dim.sm#tags-more'),
  h('div#tag-edit', { hidden: true }, h('p.sm#tag-chosen'), h('div.bar2', {}, name,
    h('button.btn.s#tag-rename', { type: 'button', onclick: event => change(event, name.value) }, 'Rename'),
    h('button.btn.s#tag-remove', { type: 'button', onclick: event => change(event, '') }, 'Remove from all')))];
}

/** What came of a change of all captions, as a sentence or with those that were left. */
export const edited = ({ changed, kept, num_kept }) => `${counted(changed, 'caption')} changed.`
  + (num_kept ? ` ${studio.count(num_kept)} left as ${num_kept === 1 ? 'it is' : 'they are'}: ${kept.join('; ')}${
    num_kept > kept.length ? `; and ${studio.count(num_kept - kept.length)} more` : ''}.` : '');

export function drawTagPanel() {
  const { counts } = current.data, { tag, find } = current.filter;
  $('card-tags').hidden = !counts || !(counts.num_tags || find || tag);
  if (!counts) return;
  fill($('tags'), [counts.tags, tag], () => counts.tags.length ? counts.tags.map(([one, count]) =>
    h('button.chip', { type: 'button', data: { tag: one }, 'aria-pressed': String(one === tag), title: one },
      one, ' ', h('span.dim', {}, studio.count(count)))) : h('p.dim', {}, 'No tag has this text.'));
  const more = counts.num_tags - counts.tags.length;
  say($('tags-more'), more > 0 ? `and ${studio.count(more)} more; find them by their text` : '');
  $('tag-edit').hidden = !tag;
  say($('tag-chosen'), tag && `“${tag}” in all captions; commas in the new name make several tags`);
}
