// The screen Data: the draft's images with captions that are saved as they are typed, and what is to be looked at.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, counted, call, link } from './core.js';
import { captioning } from './captioning.js';
import { load, enlarge, forgetReplaced, settle, delayed, later, pending, saveAll, keep } from './data-captions.js';
import { drawUnsaved, drawCards } from './data-cards.js';
import { cards, current, $, addresses, EVERYTHING } from './data-state.js';
import { drawShapes, showTimesteps } from './data-shapes.js';
import { drawTagPanel, edited, isTagged, tagPanel } from './data-tags.js';
import { every } from './frame.js';
import { look as looks } from './look.js';
import { mask as masks } from './mask.js';
import { upload as uploads } from './upload.js';

const SEARCHED_AFTER_MS = 250, RETRY_EVERY_S = 2;
const SHOWS = [['all', 'All'], ['uncaptioned', 'No caption'], ['problems', 'Problems'], ['held_out', 'Held out'],
  ['alike', 'Nearly equal']];

// --- figures, filters, what is to be looked at --------------------------------------------------------------------

const figure = (name, value) => h('div', {}, h('span', {}, name), h('b.num', {}, value));

function drawFigures() {
  fill($('folder'), current.data.folders,
    () => current.data.folders.length ? current.data.folders.map(folder => h('code', {}, folder))
      : 'No folder is chosen.');
  const captions = current.data.counts ? current.data.counts.captions : null,
    key = [current.data.num_images, captions, current.data.shapes.length, current.data.num_held_out,
      current.data.num_questions, current.data.trigger,
      current.data.resolution, current.data.num_texts, current.data.text_bytes, current.data.num_documents,
      current.data.is_complete];
  fill($('figures'), key, () => !current.data.is_complete ? [] : current.data.is_text
    ? [figure('text files', studio.count(current.data.num_texts)),
      current.data.num_documents === null ? null : figure('documents', studio.count(current.data.num_documents)),
      figure('size', studio.size(current.data.text_bytes))]
    : [figure('images', studio.count(current.data.num_images)),
      captions === null ? null : figure('captions', studio.count(captions)),
      figure('shapes', studio.count(current.data.shapes.length)),
      figure('held out', studio.count(current.data.num_held_out)),
      current.data.num_questions ? figure('questions to train on', studio.count(current.data.num_questions)) : null,
      current.data.trigger ? figure('[trigger] becomes', current.data.trigger) : null,
      figure('scaled to about', current.data.resolution)]);
  const words = current.data.is_text ? counted(current.data.num_texts, 'text file')
    : [counted(current.data.num_images, 'image'), captions === null ? null : counted(captions, 'caption'),
      counted(current.data.shapes.length, 'shape'), `${current.data.num_held_out} held out`].filter(Boolean).join(', ');
  say($('counted'), current.data.is_complete ? words
    : `${counted(current.data.num_files, 'file')} so far; reading the images …`);
}

function drawFilters() {
  const counts = current.data.counts,
    number = { all: current.data.num_images, uncaptioned: counts?.uncaptioned, problems: counts?.problems,
      held_out: current.data.num_held_out };
  fill($('shows'), [number, current.filter.show],
    () => SHOWS.map(([name, word]) =>
      h('button', { type: 'button', data: { show: name }, 'aria-pressed': String(current.filter.show === name),
        disabled: number[name] === 0 && current.filter.show !== name, onclick: () => choose({ show: name }) },
        number[name] === undefined ? word : `${word} ${studio.count(number[name])}`)));
  fill($('words'), [counts?.words, current.filter.search],
    () => counts?.words.length
      ? counts.words.map(([word, count]) =>
        h('button.chip', { type: 'button', data: { word }, 'aria-pressed': String(current.filter.search === word),
          title: `in ${counted(count, 'caption')}`,
          onclick: () => searchFor(current.filter.search === word ? '' : word) },
          word, ' ', h('span.dim', {}, studio.count(count))))
    : h('p.dim', {}, counts ? 'No captions yet.' : 'Not counted for so many images.'));
  const { mark, tag } = current.filter, only = (text, changes) => h('button.chip',
    { type: 'button', 'aria-pressed': 'true', title: 'Show all images', onclick: () => choose(changes) }, text);
  fill($('marked'), [mark, tag], () => [mark ? only('Only those of “Look closer” ✕', { mark: '' }) : null,
    tag ? only(`Only “${tag}” ✕`, { tag: '' }) : null]);
  const count = current.data.num_replaceable, button = $('data-replace'), undo = $('data-undo'),
    focused = studio.focused();
  drawTagPanel();
  button.disabled = !current.filter.search || !count;
  say(button, current.filter.search ? `Replace in ${counted(count, 'caption')}` : 'Replace');
  say($('replace-help'), current.filter.search
    ? `“${current.filter.search}” is in ${counted(count, 'caption')}, written like this.`
    : 'Write the text to replace into the search field.');
  undo.disabled = !current.data.num_undoable;
  say(undo, current.data.num_undoable ? `Undo (${counted(current.data.num_undoable, 'caption')})` : 'Undo');
  // a tick's answer may come after that of a press
  if ([button, undo].includes(focused)) studio.refocus(focused, $('data-open-replace'));
  const last = Math.min(current.data.first + current.data.per_page, current.data.num_chosen);
  $('data-before').disabled = current.data.first === 0;
  $('data-after').disabled = last >= current.data.num_chosen;
  say($('data-range'), current.data.num_chosen
    ? `${studio.count(current.data.first + 1)}–${studio.count(last)} of ${studio.count(current.data.num_chosen)}` : '');
  const numPages = Math.ceil(current.data.num_chosen / current.data.per_page), box = $('data-page');
  $('data-pages').hidden = numPages < 2;
  box.closest('label').hidden = numPages < 3;
  box.max = numPages;
  if (box !== studio.focused()) box.value = current.page + 1;
}

function drawIssues() {
  const item = kind => text =>
    h('li', {}, h(`i.dot.${kind}`), h('span', {}, h('b.sr', {}, kind === 'bad' ? 'Error: ' : 'Warning: '), text));
  fill($('data-problems'), [current.data.problems, current.data.warnings, current.data.history_problem], () => [
    current.data.problems.length ? h('div', { role: 'alert' }, h('ul.iss', {}, current.data.problems.map(item('bad'))))
      : null,
    current.data.warnings.length || current.data.history_problem
      ? h('ul.iss', {}, [...current.data.warnings, current.data.history_problem].filter(Boolean).map(item('warn')))
      : null,
    current.data.problems.length || current.data.warnings.length ? null
      : h('p', {}, h('span.tag.ok', {}, 'ok'), ' No problems in the files.')]);
  const lengths = current.data.lengths;
  fill($('data-cut'), lengths,
    () => !lengths ? [] : lengths.is_waiting ? h('p.dim', { role: 'status' }, 'Measuring the captions in tokens.')
      : lengths.failure ? studio.alert(lengths.failure)
    : lengths.sentences.length ? h('ul.iss', {}, lengths.sentences.map(item('warn')))
    : h('p', {}, h('span.tag.ok', {}, 'ok'), ' No caption is truncated.'));
  const number = current.data.problems.length + current.data.warnings.length + (lengths?.sentences.length || 0);
  fill($('num-issues'), number,
    () => number ? h(current.data.problems.length ? 'span.tag.bad' : 'span.tag.warn', {}, String(number)) : []);
}

function drawTexts() {
  const more = current.data.num_texts - current.data.texts.length;
  fill($('texts'), [current.data.texts, more, current.data.conversation],
    () =>
      [
        h('table.wide', {}, h('tbody', {},
          current.data.texts.map(([name, size]) =>
            h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, studio.size(size)))))),
            more > 0 ? h('p.dim', {}, `and ${studio.count(more)} more`) : null,
        current.data.conversation.length
          ? [h('p.dim', {}, 'The first conversation; the assistant’s words are in the loss:'),
            ...current.data.conversation.map(([role, content]) => h('p', {}, h('b', {}, `${role}: `), content))]
            : null]);
}

function draw(isChosen) {
  drawFigures();
  uploads.shown(current.data);
  looks.shown(current.data);
  captioning.shown(current.data);
  const hasImages = current.data.is_complete && current.data.num_images > 0;
  $('editor').hidden = !hasImages;
  $('card-texts').hidden = !current.data.is_complete || !current.data.num_texts;
  $('data-empty').hidden = !current.data.is_complete || hasImages || !!current.data.num_texts;
  $('data-reading').hidden = current.data.is_complete;
  for (const id of ['card-shapes', 'card-words', 'card-held', 'card-captioning']) $(id).hidden = !hasImages;
  $('card-issues').hidden = !current.data.is_complete;
  $('card-tags').hidden ||= !hasImages;
  drawUnsaved();
  if (!current.data.is_complete) return;
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
export async function look(isChosen = false, isFresh = false) {
  if (!current.root) return; // not shown yet: a caption of before a reload was sent
  current.isOther ||= isChosen || !!current.after; // also where a later question overtakes this one
  const number = current.asked += 1, wasComplete = current.data?.is_complete, folder = current.data?.folders.join();
  const { filter, page, after } = current;
  let found;
  try {
    found = await call('data_view', { ...filter, page, after, is_fresh: isFresh });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    current.isOwed = error.lost; // asked again when the server is back
    if (!error.lost) tell(studio.alert(error.message));
    return;
  }
  if (number !== current.asked) return;
  // A caption that was typed has the files read again: what is shown stays, with the keyboard's focus in it.
  current.isOwed = !found.is_complete && !!wasComplete && found.key === current.data.key;
  if (current.isOwed) {
    $('data-reading').hidden = false;
    later('fresh', SEARCHED_AFTER_MS, () => look());
    return;
  }
  if (after === current.after) current.after = '';
  current.data = found;
  forgetReplaced(current.data);
  if (current.data.is_complete) current.page = Math.floor(current.data.first / current.data.per_page);
  draw(current.isOther || !wasComplete || current.data.folders.join() !== folder);
  current.isOther = false;
  if (after) arrive(cards.get(found.next) || cards.get(after), !found.next);
}

/** Go to a caption by the keyboard. */
function arrive(card, isEnd = false) {
  if (isEnd) studio.toast('That was the last caption.');
  if (!card) return;
  const box = isTagged() ? card.tagInput : card.box;
  box.focus({ preventScroll: true });
  box.setSelectionRange(box.value.length, box.value.length);
  card.element.scrollIntoView({ block: 'nearest' });
}

/** Go on to the next caption, or to the one before it, on other pages too. What is typed is saved on the way. */
async function advance(isBack) {
  const all = /** @type {HTMLElement[]} */ ([...$('grid').querySelectorAll('.pc')]);
  const from = all.findIndex(element => element.contains(studio.focused()));
  const order = isBack ? all.slice(0, Math.max(0, from)).reverse() : all.slice(from + 1);
  const next = order.map(element => cards.get(element.dataset.image)).find(card => !card.box.disabled);
  if (next || from < 0) { arrive(next); return; }
  if (isBack && !current.page) return;
  $('grid').focus(); // what is typed until the next page is here is for none of these captions
  current.isTurning = true;
  if (!isBack) current.after = all[from].dataset.image || '';
  await choose({}, current.page - Number(isBack));
  current.isTurning = false;
  if (isBack) arrive([...cards.values()].at(-1));
}

export async function choose(changes, toPage = 0) {
  tell(null);
  current.filter = { ...current.filter, ...changes };
  current.page = toPage;
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
  await look(true, true); // an image may have no caption now
  studio.refocus(button, $('data-open-replace'));
}

const turn = by => {
  const to = current.page + by;
  if (current.data?.is_complete && to >= 0 && to * current.data.per_page < current.data.num_chosen) choose({}, to);
};

const side = (id, title, note, ...children) =>
  h(`section.card#card-${id}`, { 'aria-labelledby': `h-${id}`, hidden: true },
    h('div.ttl', {}, h(`h2#h-${id}`, {}, title), note ? h('span.dim', {}, note) : null), ...children);

function editor() {
  const search = h('input#data-search',
    { type: 'search', placeholder: 'Search captions', 'aria-label': 'Search captions',
      oninput: () => later('search', SEARCHED_AFTER_MS, () => choose({ search: search.value })) });
  const replaceRow = h('div#replace-row', { hidden: true }, h('div.bar2', {},
    h('input#data-replacement', { type: 'text', placeholder: 'Replace with', 'aria-label': 'Replace with' }),
    h('button.btn#data-replace', { type: 'button', onclick: event => act(event.currentTarget, async () =>
      edited(await call('data_replace',
        { key: current.data.key, search: current.filter.search, replacement: $('data-replacement').value }))) },
    'Replace'), h('span.dim.sm#replace-help')),
  h('div.bar2', {}, h('input#data-text', { type: 'text', value: '[trigger]', 'aria-label': 'Text for all captions' }),
    [['front', 'Put in front of all'], ['end', 'Append to all']].map(([place, word]) =>
      h(`button.btn#data-${place}`, { type: 'button', onclick: event => act(event.currentTarget, async () =>
        edited(await call('data_extend',
          { key: current.data.key, text: $('data-text').value, is_behind: place === 'end' }))) }, word)),
    h('span.dim.sm', {}, 'With a comma between; captions that begin or end with it stay.')));
  const crop = h('input#data-crop', { type: 'checkbox', checked: studio.kept('crop') !== 'off', onchange: () => {
    studio.kept('crop', crop.checked ? 'on' : 'off');
    $('grid').classList.toggle('no-crop', !crop.checked);
  } });
  const asTags = h('input#data-as-tags', { type: 'checkbox', checked: studio.kept('as-tags') === 'on', onchange: () => {
    studio.kept('as-tags', asTags.checked ? 'on' : 'off');
    $('grid').classList.toggle('as-tags', asTags.checked);
  } });
  const kinds = [!crop.checked && '.no-crop', asTags.checked && '.as-tags'].filter(Boolean).join('');
  return h('div#editor', { hidden: true }, h('div.bar2', {}, search, h('span.grow'),
    h('button.btn.s#data-open-replace',
      { type: 'button', 'aria-expanded': 'false', 'aria-controls': 'replace-row', onclick: event => {
        replaceRow.hidden = !replaceRow.hidden;
        event.currentTarget.setAttribute('aria-expanded', String(!replaceRow.hidden));
      } }, 'Change all …'),
    h('button.btn.s#data-undo',
      { type: 'button', disabled: true,
        onclick: event => act(event.currentTarget, async () => {
          const count = await call('data_undo', { key: current.data.key });
          current.filter.tag = ''; // it may have been a new name
          return `${counted(count, 'caption')} restored.`;
        }) }, 'Undo')),
          replaceRow,
  h('div.bar2', {}, h('span.seg#shows', { role: 'group', 'aria-label': 'Filter' }), h('span#marked'), h('span.grow'),
    h('label.crop.sm', { title: 'Show captions as the tags between their commas' }, asTags, 'Tags'),
    masks.toggle(), h('label.crop.sm', { title: 'Show what the crop to the bucket keeps' }, crop, 'Crop')),
  h(`div.grid${kinds}#grid`, { tabIndex: -1, onkeydown: event => { // typed ahead, while the next page is on its way
    if (current.isTurning && event.target === event.currentTarget) event.stopPropagation();
  } }),
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
    current.root = section;
    masks.connect(() => look());
    uploads.connect({ settle, refresh: () => look(true, true), forget: image => keep(image, null),
      key: () => current.data?.key || '' });
    current.root.append(h('div.head', {}, h('h1', {}, 'Data'), h('span.dim#counted', { role: 'status' }),
      h('span.grow'),
      h('button.btn#data-again', { type: 'button', onclick: () => {
        addresses.clear();
        tell(null);
        look(true, true);
      } }, 'Read again'), h('a.btn.main', { href: link('new') }, 'To New run')),
      h('section.card', { 'aria-label': 'Folder' },
        h('div.path', {}, h('b', {}, 'Folder'), h('span.folders#folder'),
          h('a', { href: link('new') }, 'Change it in New run')), h('div.figures#figures')),
      h('div#data-upload'),
      looks.notice({ load, enlarge, choose: mark => choose({ mark }), mark: () => current.filter.mark,
        redraw: () => look(),
        refresh: () => look(false, true), key: () => current.data?.key || '' }),
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
          side('tags', 'Tags', 'between commas; click to filter', tagPanel({ choose, act, later })),
          side('words', 'Words', 'most frequent; click to search', h('div.chips#words')))));
    studio.shortcut('/', 'Search captions', () => $('data-search').focus(), 'data');
    studio.shortcut('ArrowLeft', 'Previous page', () => turn(-1), 'data');
    studio.shortcut('ArrowRight', 'Next page', () => turn(1), 'data');
    studio.shortcut('Ctrl Enter', 'Next caption; with Shift, the one before', event => { advance(event.shiftKey); },
      'data');
  },
  async show([, place]) {
    uploads.mount($('data-upload'));
    addresses.clear();
    tell(null);
    if (place === 'uncaptioned') current.filter = { ...current.filter, ...EVERYTHING, show: place };
    await Promise.all([look(true, true), uploads.look()]);
    await Promise.all([captioning.look(), looks.look()]);
    if (place === 'uncaptioned') $('grid').querySelector('textarea')?.focus();
    if (place === 'caption') $('caption-model').focus();
  },
  async tick() {
    await Promise.all([captioning.tick(), looks.tick()]);
    if (!current.data || !current.data.is_complete || current.data.lengths?.is_waiting || current.isOwed) await look();
  },
};
