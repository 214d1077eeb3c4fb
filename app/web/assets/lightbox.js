// Samples in full size, over the page: `lightbox(items, index)`. An item has a `title`, a `text` below it, and one
// of `src` (an address), `load` (returns one later, or null), `written` (a sample that is text) and `played` ({ src,
// type } of
// one with a duration; `src` of the item is its poster).
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';

export function lightbox(items, index = 0) {
  const before = studio.focused(), image = h('img', { alt: '' }), written = h('pre.written', { tabIndex: 0 }),
    player = h('video', { controls: true, loop: true });
  const title = h('b'), text = h('p'), problem = h('div.missing', {}, 'missing');
  const step = by => () => show((index + by + items.length) % items.length);
  const arrow = (name, sign, by) =>
    h('button.btn', { type: 'button', title: name, 'aria-label': name, hidden: items.length < 2, onclick: step(by) },
      sign);
  const dialog = h('dialog.lightbox#lightbox', { 'aria-label': 'Sample in full size', onclose: () => {
    dialog.remove();
    before?.focus?.();
  },
    onclick: event => event.target === dialog && dialog.close(),
    onkeydown: event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || items.length < 2) return;
      event.preventDefault();
      step(by)();
    } },
  h('div.stage', {}, image, player, written, problem),
  h('div.foot', {}, arrow('Back', '←', -1), arrow('Next', '→', 1), h('div.words', { role: 'status' }, title, text),
    h('button.btn', { type: 'button', onclick: () => dialog.close() }, 'Close')));

  async function show(at) {
    index = at;
    const item = items[at];
    studio.say(title, items.length > 1 ? `${item.title} · ${at + 1} of ${items.length}` : item.title);
    studio.say(text, item.text || '');
    const isText = item.written !== undefined;
    written.hidden = !isText;
    image.hidden = problem.hidden = player.hidden = true;
    player.removeAttribute('src');
    player.load(); // ends what was played
    if (item.played) {
      Object.assign(player, { hidden: false, poster: item.src || '', src: item.played.src });
      return;
    }
    if (isText) { written.textContent = item.written; return; }
    item.src ??= await item.load();
    if (index !== at || !dialog.open) return;
    image.hidden = !item.src;
    problem.hidden = Boolean(item.src);
    if (item.src) { image.src = item.src; image.alt = item.text || item.title; }
  }

  document.body.append(dialog);
  dialog.showModal();
  show(index);
  dialog.querySelector('.foot .btn:last-child').focus();
}
