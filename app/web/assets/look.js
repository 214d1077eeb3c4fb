// A closer look at the images of the screen Data: the crop of one with its focus point, near copies and what differs
// from
// the others, and the images before an edit next to those after it.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, counted } from './core.js';

const MOVED_AFTER_MS = 300, STEP = 0.01, FAR = 0.1;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const LISTS = [['blurred', 'Blurred'], ['flat', 'Low contrast'], ['enlarged', 'Enlarged'], ['failed', 'Not readable']];
const percent = share => `${100 * share}%`, rounded = share => `${Math.round(100 * share)} %`;
/** @type {HTMLElement} */
let root;
let page = /** @type {any} */ (null), state = /** @type {any} */ (null), pair = /** @type {any} */ (null),
  shownKey = '', hinted = '', isAsking = false;
const parts = {};

// --- the crop of one image ----------------------------------------------------------------------------------------

/** Show how an image is cropped, and let a click or the arrow keys move what stays in the middle. */
async function crop(image, name) {
  const before = studio.focused();
  let now = /** @type {any} */ (null), point = [0.5, 0.5], chosen = 0, timer = 0, isChanged = false,
    saving = Promise.resolve();
  const picture = h('img', { alt: '', draggable: false }), frame = h('span.kept'), cross = h('span.cross'),
    inner = h('span.whole', {}, picture);
  const stage = h('div.stage', { tabIndex: 0, role: 'group', onclick: clicked, onkeydown: pressed }, inner, frame,
    cross);
  const sizes = h('div.seg', { role: 'group', 'aria-label': 'Size' }), words = h('p', { role: 'status' }),
    help = h('p.dim.sm'), message = h('div');
  const middle = h('button.btn', { type: 'button', onclick: () => {
    clearTimeout(timer);
    save(null);
  } }, 'Back to the middle');
  const undo = h('button.btn', { type: 'button', onclick: takeBack }, 'Undo');
  const close = h('button.btn.main', { type: 'button', onclick: () => dialog.close() }, 'Close');
  const dialog = h('dialog.dialog#crop', { 'aria-label': `Crop of ${name}`, onclose: ended }, h('h2', {}, 'Crop'),
    h('p.dim.sm.name', {}, name), h('div.view', {}, stage), sizes, words, help, message,
    h('div.row-end', {}, undo, middle, close));

  function ended() {
    dialog.remove();
    before?.focus?.();
    if (timer) { clearTimeout(timer); save(point); }
    saving.then(() => isChanged && page.redraw());
  }

  function clicked(event) {
    if (!now || now.fixed || !event.detail) return;
    const box = inner.getBoundingClientRect();
    move([(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height], 0);
  }

  function pressed(event) {
    const by = ARROWS[event.key];
    if (!by || !now || now.fixed) return;
    event.preventDefault();
    move(point.map((share, side) => share + by[side] * (event.shiftKey ? FAR : STEP)), MOVED_AFTER_MS);
  }

  /** Move the point at once, and save it when it has come to rest. */
  function move(to, ms) {
    point = to.map(share => Math.min(1, Math.max(0, share)));
    drawCross();
    clearTimeout(timer);
    timer = setTimeout(() => save(point), ms);
  }

  /** Save a point after the one that is on its way. */
  function save(to) {
    timer = 0;
    saving = saving.then(async () => {
      try {
        const answer = await call('look_focus', { image, point: to });
        isChanged = true;
        if (!timer) take(answer);
        message.replaceChildren();
      } catch (error) { complain(error); }
    });
  }

  async function takeBack() {
    await saving;
    try {
      const other = await call('look_undo', { key: page.key() });
      isChanged = true;
      if (other && other !== image) studio.toast(`Undone: the focus of ${other}`);
      take(await call('look_crop', { image }));
      message.replaceChildren();
    } catch (error) { complain(error); }
    studio.refocus(undo, stage);
  }

  function complain(error) {
    if (!(error instanceof studio.Refused)) throw error;
    message.replaceChildren(studio.alert(error.message));
    if (now) { point = now.focus; drawCross(); }
  }

  function take(answer) {
    now = { ...now, ...answer };
    point = now.focus;
    chosen = Math.min(chosen, Math.max(0, now.frames.length - 1));
    draw();
  }

  function draw() {
    const one = now.frames[chosen] || { start: [0, 0], kept: [1, 1] };
    const low = one.start.map(start => Math.min(0, start)),
      all = one.kept.map((kept, side) => Math.max(1, one.start[side] + kept) - low[side]);
    const box = (start, kept) =>
      ({ left: percent((start[0] - low[0]) / all[0]), top: percent((start[1] - low[1]) / all[1]),
        width: percent(kept[0] / all[0]), height: percent(kept[1] / all[1]) });
    const place = (element, styles) => Object.assign(element.style, styles);
    const aspect = now.width * all[0] / (now.height * all[1]);
    place(stage, { aspectRatio: String(aspect), background: now.fit === 'pad' ? now.background : 'none' });
    stage.style.setProperty('--aspect', String(aspect));
    place(inner, box([0, 0], [1, 1]));
    place(frame, box(one.start, one.kept));
    frame.classList.toggle('out', !!one.is_left_out);
    frame.classList.toggle('all', one.kept.every(kept => kept >= 1));
    if (!picture.getAttribute('src')) picture.src = now.address;
    fill(sizes, [now.frames.map(({ size }) => size), chosen],
      () => now.frames.map(({ size, is_left_out }, at) =>
        h(is_left_out ? 'button.out' : 'button',
          { type: 'button', 'aria-pressed': String(at === chosen), onclick: () => {
            chosen = at;
            draw();
          } }, size.join(' × '))));
    sizes.hidden = now.frames.length < 2;
    say(words, now.frames.length ? described(one) : 'It is not known at which sizes this image is trained.');
    say(help,
      now.fixed
        || 'Click on what shall stay in the middle, or move it with the arrow keys. It is saved at once, in ' +
          'metadata.jsonl of the folder.');
    middle.disabled = !!now.fixed || !now.is_set;
    undo.disabled = !now.undo;
    undo.title = now.undo ? `The last change was to ${now.undo}` : '';
    stage.classList.toggle('fixed', !!now.fixed);
    drawCross();
  }

  function drawCross() {
    const one = now.frames[chosen] || { start: [0, 0], kept: [1, 1] };
    const low = one.start.map(start => Math.min(0, start)),
      all = one.kept.map((kept, side) => Math.max(1, one.start[side] + kept) - low[side]);
    cross.hidden = !!now.fixed;
    Object.assign(cross.style,
      { left: percent((point[0] - low[0]) / all[0]), top: percent((point[1] - low[1]) / all[1]) });
    stage.setAttribute('aria-label',
      now.fixed ? `Crop of ${name}`
        : `Focus point, ${rounded(point[0])} from the left, ${rounded(
          point[1])} from the top. The arrow keys move it.`);
  }

  function described({ size, scale, cut, kept, is_left_out }) {
    const scaled = `${size.join(' × ')}: scaled × ${scale.toFixed(2)}${scale > 1.005 ? ' (enlarged)' : ''}`;
    if (is_left_out)
      return `${scaled}, ${rounded(cut)} would be cut off. Left out: data.most_cropped allows ${rounded(
        now.most_cropped)}.`;
    if (now.fit !== 'pad') return `${scaled}, ${cut >= 0.005 ? `${rounded(cut)} cut off` : 'nothing cut off'}.`;
    const border = Math.max(...kept) - 1;
    return `${scaled}, ${border >= 0.005
      ? `borders of ${rounded(border / (1 + border) / 2)} on each side, in ${now.background}`
      : 'no borders'}; nothing cut off.`;
  }

  document.body.append(dialog);
  dialog.showModal();
  try {
    take(await call('look_crop', { image }));
    stage.focus();
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    dialog.querySelector('.view').hidden = true;
    message.replaceChildren(studio.alert(error.message));
    undo.hidden = middle.hidden = true;
    close.focus();
  }
}

// --- near copies, and what differs from the others ----------------------------------------------------------------

function draw() {
  const isRunning = !!state?.is_running, mark = page.mark();
  parts.now.hidden = !isRunning;
  parts.start.hidden = isRunning;
  say(parts.start, state ? 'Look again' : 'Look at all images');
  parts.help.hidden = !!state;
  if (isRunning) {
    const { num_done, num_images } = state;
    say(parts.count, num_done < num_images ? `${studio.count(num_done)} of ${counted(num_images, 'image')}`
      : 'Comparing …');
    parts.bar.firstChild.style.width = percent(num_done / num_images);
    parts.bar.setAttribute('aria-valuenow', String(num_done));
    parts.bar.setAttribute('aria-valuemax', String(num_images));
  }
  fill(parts.found, isRunning || !state ? 0 : [state, mark], () => (isRunning || !state ? [] : results(mark)));
}

function results(mark) {
  const marks = [['leaks', 'Held-out copies', state.num_leaks], ['copies', 'Copies', state.num_groups],
    ...LISTS.map(([name, word]) => [name, word, state.lists[name].count])].filter(([, , count]) => count);
  const ended = state.is_complete ? ''
    : `Stopped after ${studio.count(state.num_done)} of ${counted(state.num_images,
      'image')}; what was seen is remembered. `;
  return [
    state.problem ? studio.alert(state.problem) : null,
    state.is_outdated ? h('p.notice.warn', {},
      'Images were added or removed since. Look again: only the new ones are read.') : null,
    state.num_leaks ? h('p.notice.bad', { role: 'alert' },
      `${counted(state.num_leaks, 'group')} of copies ${state.num_leaks === 1 ? 'has' : 'have'} an image that is ` +
      'held out and one that is trained on: the validation loss then shows what was memorized.') : null,
    h('p.dim.sm', { role: 'status' },
      `${ended}${marks.length ? ''
        : 'No near copies, nothing blurred, flat or enlarged. '}${counted(state.num_done,
          'image')} in ${studio.duration(state.seconds)}.`),
    marks.length ? h('div.chips', { role: 'group', 'aria-label': 'Show only' },
      marks.map(([name, word, count]) => chip(name, `${word} ${studio.count(count)}`, mark))) : null,
    state.failure ? h('p.sm.wrong', {}, state.failure) : null,
    state.groups.map((group, number) =>
      h('div.group', { data: { group: number } },
        h('div.line', {}, h('b', {}, group.leaks ? h('span.tag.bad', {}, 'held out') : null,
          ` ${counted(group.count, 'image')} alike`), chip(String(number), 'Show', mark)),
        h('div.alike', {}, group.images.map(one => tile(one, group.images))),
        group.count > group.images.length
          ? h('p.dim.sm', {}, `and ${studio.count(group.count - group.images.length)} more`) : null)),
    state.num_groups > state.groups.length
      ? h('p.dim.sm', {}, `and ${counted(state.num_groups - state.groups.length, 'group')} more`) : null,
    LISTS.filter(([name]) => name !== 'failed' && state.lists[name].count)
      .map(([name, word]) => h('details', { data: { list: name } },
        h('summary', {}, `${word}: ${counted(state.lists[name].count, 'image')}`),
        h('div.alike', {}, state.lists[name].images.map(one => tile(one, state.lists[name].images)))))];
}

const chip = (name, text, mark) =>
  h('button.chip', { type: 'button', data: { mark: name }, 'aria-pressed': String(mark === name),
    onclick: () => page.choose(mark === name ? '' : name) }, text);

function tile(one, all) {
  const picture = h('img.image', { alt: '', loading: 'lazy' }),
    role = [one.is_mirrored ? 'mirrored' : '',
      one.is_held_out ? 'held out' : one.is_own === false ? 'regularization' : ''].filter(Boolean).join(', ');
  setTimeout(() => page.load(one.image, picture));
  return h('button.one', { type: 'button', 'aria-label': `Enlarge ${one.name}`, title: one.name,
    onclick: () => page.enlarge(one.image, all) }, picture, h('span.sm.dim', {}, one.name),
    role ? h(one.is_held_out ? 'span.sm.role.acc' : 'span.sm.role', {}, role) : null);
}

async function ask() {
  if (!root || isAsking) return;
  isAsking = true;
  try {
    const wasRunning = !!state?.is_running;
    state = await call('look_state');
    if (wasRunning && !state?.is_running && page.mark()) page.choose('');
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    return;
  } finally { isAsking = false; }
  draw();
}

async function begin(button) {
  await studio.act(button, parts.said, async () => { await call('look_start', { key: page.key() }); return ''; });
  await ask();
  studio.refocus(parts.stop);
}

async function end(button) {
  await studio.act(button, parts.said, async () => { await call('look_stop'); return ''; });
  await ask();
  studio.refocus(parts.start, parts.stop);
}

// --- edit pairs ---------------------------------------------------------------------------------------------------

const question = ({ name, num_matched, num_images }) =>
  `The folder “${name}” has an image of the same name for ${studio.count(num_matched)} of ${counted(num_images,
    'image')}. Are those the images before an edit?`;

async function askPair() {
  try { pair = await call('look_suggestion'); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    pair = null;
  }
  parts.pair.hidden = !pair;
  fill(parts.pair, pair, () => !pair ? []
    : [h('p', {}, question(pair)),
      h('button.btn.s#use-pairs', { type: 'button', onclick: event => usePair(event.currentTarget) },
        'Train edits of them')]);
}

async function usePair(button) {
  await studio.act(button, parts.said, async () => { await call('look_use', { folder: pair.folder }); return ''; });
  await page.refresh();
  await askPair();
}

export const look = {
  crop,
  /** Make the notice about a folder of images before an edit. hooks: what this file asks of the screen. */
  notice(hooks) {
    page = hooks;
    return (parts.pair = h('div.notice#pair-notice', { hidden: true, role: 'status' }));
  },
  /** Make the panel "Look closer". */
  panel() {
    parts.said = h('div', { 'aria-live': 'polite' });
    parts.help = h('p.dim.sm', {},
      'Reads every image once, on one core: finds near copies, also mirrored and held-out ones, and images that ' +
      'are blurred, flat or enlarged.');
    parts.start = h('button.btn.s#look-start', { type: 'button', onclick: event => begin(event.currentTarget) },
      'Look at all images');
    parts.stop = h('button.btn.s#look-stop', { type: 'button', onclick: event => end(event.currentTarget) }, 'Stop');
    parts.bar = h('div.bar', { role: 'progressbar', 'aria-label': 'Images looked at', 'aria-valuemin': '0' }, h('i'));
    parts.now = h('div', { hidden: true }, h('div.line', {}, (parts.count = h('b', { role: 'status' })), parts.stop),
      parts.bar);
    parts.found = h('div#look-found');
    root = h('section.card#card-look', { 'aria-labelledby': 'h-look', hidden: true },
      h('div.ttl', {}, h('h2#h-look', {}, 'Look closer'), h('span.grow'), parts.start), parts.help, parts.now,
      parts.said, parts.found);
    return root;
  },
  /** The button of a card that opens its crop. */
  cropButton: card => h('button.look',
    { type: 'button', title: 'Crop and focus point of the image',
      onclick: () => crop(card.data.image, card.data.name) }, 'Crop'),
  /** Show the images that a card's image is made from in front of it. */
  pair(card, { references, name }) {
    card.element.classList.toggle('edit', !!references.length);
    fill(card.sources, [references, name], () => references.length ? [references.map((one, at) => {
      const picture = h('img', { alt: '' });
      setTimeout(() => page.load(one.image, picture));
      return h('button.before',
        { type: 'button', 'aria-label': `Enlarge ${one.name}, before the edit`, title: one.name,
          onclick: () => page.enlarge(one.image, references) }, picture,
          h('span.tag', {}, references.length > 1 ? `before ${at + 1}` : 'before'));
    }), h('span.arrow', { 'aria-hidden': 'true' }, '→')] : []);
  },
  /** Show the borders around the image of a card, where it is trained with some. */
  borders(button, { width, height, start, kept }, background) {
    if (!kept.some(share => share > 1)) return;
    const aspect = width * kept[0] / (height * kept[1]);
    button.classList.add('padded');
    const inside = { '--left': percent(-start[0] / kept[0]), '--top': percent(-start[1] / kept[1]),
      '--width': percent(1 / kept[0]), '--height': percent(1 / kept[1]) };
    for (const [name, value] of Object.entries(
      { 'aspect-ratio': String(aspect), '--aspect': aspect, background, ...inside })) button.style.setProperty(name,
      value);
  },
  /**
   * Suggest the folder before an edit in New run. key: what the answer depends on; nothing is asked while its last item
   * is empty.
   */
  async hint(place, key, use) {
    const text = JSON.stringify(key);
    if (hinted === text) return;
    hinted = text;
    const found = key.at(-1) ? await call('look_suggestion').catch(() => null) : null;
    if (hinted === text) fill(place, found,
      () => found
        ? [h('p.notice', {}, question(found), ' ',
          h('button.btn.s', { type: 'button', onclick: () => use(found.folder) }, 'Train edits of them'))] : []);
  },
  /** The screen shows this answer. */
  shown(data) {
    root.hidden = !data.is_complete || !data.num_images;
    parts.pair.hidden ||= !data.is_complete;
    const key = `${data.key} ${data.num_images}`;
    if (data.is_complete && key !== shownKey) { shownKey = key; ask(); askPair(); } else if (state) draw();
  },
  async look() { hinted = ''; if (shownKey) await Promise.all([ask(), askPair()]); },
  async tick() { if (state?.is_running) await ask(); },
};
