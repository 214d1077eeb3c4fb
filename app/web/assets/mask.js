// The dialog Mask of the screen Data: which part of an image counts in the loss, painted over the image. Nothing is
// written before Save, and what is not saved is there again when the dialog is opened the next time.
// @ts-check
import * as studio from './core.js';
import { h, say, call } from './core.js';

const MOST_UNDO = 256 * 2 ** 20; // bytes of levels
const MOST_ZOOM = 16, ZOOM = 1.25, SIZE = 1.2, MOST_SIZE = 800, LEARNED_AFTER_MS = 150;
const SHADE = 'rgb(214, 26, 84)';
let current = /** @type {any} */ (null), refresh = () => {}; // the dialog that is open, and what draws the screen again

/** {image: {levels, digest}} of masks that were painted and not saved. */
const unsaved = new Map();
addEventListener('beforeunload', event => { if (unsaved.size || current?.isChanged) event.preventDefault(); });

// --- PNG ------------------------------------------------------------------------------------------------------------

const CRC = Uint32Array.from({ length: 256 }, (_, number) => {
  for (let bit = 0; bit < 8; bit++) number = number & 1 ? 0xedb88320 ^ (number >>> 1) : number >>> 1;
  return number;
});

function chunk(type, body) {
  const bytes = new Uint8Array(12 + body.length), view = new DataView(bytes.buffer);
  view.setUint32(0, body.length);
  bytes.set([...type].map(letter => letter.charCodeAt(0)), 4);
  bytes.set(body, 8);
  let sum = ~0;
  for (let at = 4; at < bytes.length - 4; at++) sum = CRC[(sum ^ bytes[at]) & 255] ^ (sum >>> 8);
  view.setUint32(bytes.length - 4, ~sum >>> 0);
  return bytes;
}

/** The levels as an 8-bit grayscale PNG, which a canvas itself cannot write, in base64. */
async function encoded(levels, width, height) {
  const rows = new Uint8Array((width + 1) * height), head = new Uint8Array(13), sizes = new DataView(head.buffer);
  for (let y = 0, to = 0, from = 0; y < height; y++) {
    rows[to++] = 2; // each row as its difference to the one above
    for (let x = 0; x < width; x++, from++) rows[to++] = levels[from] - (y ? levels[from - width] : 0);
  }
  sizes.setUint32(0, width);
  sizes.setUint32(4, height);
  head[8] = 8;
  const packed = new Uint8Array(
    await new Response(new Blob([rows]).stream().pipeThrough(new CompressionStream('deflate'))).arrayBuffer());
  const png = [[137, 80, 78, 71, 13, 10, 26, 10], chunk('IHDR', head), chunk('IDAT', packed), chunk('IEND', [])];
  const bytes = new Uint8Array(await new Blob(png.map(part => Uint8Array.from(part))).arrayBuffer()), letters = [];
  for (let at = 0; at < bytes.length; at += 32768) letters.push(String.fromCharCode(...bytes.subarray(at, at + 32768)));
  return btoa(letters.join(''));
}

const loaded = src => new Promise((resolve, reject) => {
  const image = new Image();
  image.onload = () => resolve(image);
  image.onerror = () => reject(new studio.Refused('The image cannot be shown; read the folder again.'));
  image.src = src;
});

const canvas = (width, height) => Object.assign(document.createElement('canvas'), { width, height });

/** The levels of a mask that the server sent; all 0 where there is none. */
async function levelsOf(src, width, height) {
  const levels = new Uint8Array(width * height);
  if (!src) return levels;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas(width, height)
    .getContext('2d', { willReadFrequently: true }));
  context.drawImage(await loaded(src), 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  for (let at = 0; at < levels.length; at++) levels[at] = data[4 * at];
  return levels;
}

// --- painting -------------------------------------------------------------------------------------------------------

/**
 * What is painted, as the alpha of a canvas, with everything that can be undone. `changed` is called with the rectangle
 * [x, y, width, height] of each change.
 */
class Painting {
  /** @type {any} */ now; /** @type {any} */ before; /** @type {any} */ width; /** @type {any} */ height;
  /** @type {any} */ changed; /** @type {any} */ stroke; /** @type {any} */ past; /** @type {any} */ future;

  constructor(width, height, levels, changed) {
    Object.assign(this, { width, height, changed, past: [], future: [] });
    // `now` is painted on; `before` is the same without the stroke that is being painted.
    [this.now, this.before] = [0, 1].map(() => canvas(width, height).getContext('2d', { willReadFrequently: true }));
    this.put([0, 0, width, height], levels);
  }

  get whole() { return [0, 0, this.width, this.height]; }

  levels(rectangle = this.whole, from = this.now) {
    const { data } = from.getImageData(...rectangle), levels = new Uint8Array(data.length / 4);
    for (let at = 0; at < levels.length; at++) levels[at] = data[4 * at + 3];
    return levels;
  }

  put(rectangle, levels) {
    const [x, y, width, height] = rectangle, image = new ImageData(width, height);
    image.data.fill(255);
    for (let at = 0; at < levels.length; at++) image.data[4 * at + 3] = levels[at];
    for (const context of [this.now, this.before]) context.putImageData(image, x, y);
    this.changed(rectangle);
  }

  /** Paint a line of round ends; a point where both ends are the same. */
  line([fromX, fromY], [toX, toY], size, isErasing) {
    const context = this.now, radius = size / 2;
    context.globalCompositeOperation = isErasing ? 'destination-out' : 'source-over';
    context.beginPath();
    if (fromX === toX && fromY === toY) {
      context.arc(toX, toY, radius, 0, 2 * Math.PI);
      context.fillStyle = '#fff';
      context.fill();
    } else {
      Object.assign(context, { lineCap: 'round', lineWidth: size, strokeStyle: '#fff' });
      context.moveTo(fromX, fromY);
      context.lineTo(toX, toY);
      context.stroke();
    }
    const edge = radius + 2, left = Math.floor(Math.min(fromX, toX) - edge),
      top = Math.floor(Math.min(fromY, toY) - edge);
    const part = this.inside(
      [left, top, Math.ceil(Math.max(fromX, toX) + edge) - left, Math.ceil(Math.max(fromY, toY) + edge) - top]);
    if (!part) return;
    this.stroke = this.stroke ? around(this.stroke, part) : part;
    this.changed(part);
  }

  /** @param {number[]} part */
  inside([x, y, width, height]) {
    const left = Math.max(0, x), top = Math.max(0, y), right = Math.min(this.width, x + width),
      bottom = Math.min(this.height, y + height);
    return right > left && bottom > top ? [left, top, right - left, bottom - top] : null;
  }

  /** End a stroke: from now on it can be undone. */
  end() {
    const part = this.stroke;
    this.stroke = null;
    if (!part) return;
    const before = this.levels(part, this.before), after = this.levels(part);
    if (before.every((level, at) => level === after[at])) return;
    this.put(part, after);
    this.note({ part, before, after });
  }

  /** Take back the stroke that is being painted. */
  drop() {
    if (this.stroke) this.put(this.stroke, this.levels(this.stroke, this.before));
    this.stroke = null;
  }

  /** Change all levels by a function of each and its index. */
  apply(change) {
    this.end();
    const before = this.levels(), after = before.map(change);
    if (before.every((level, at) => level === after[at])) return;
    this.put(this.whole, after);
    this.note({ part: this.whole, before, after });
  }

  note(edit) {
    this.past.push(edit);
    this.future = [];
    let size = 0;
    const first = this.past.findLastIndex(({ before }) => (size += 2 * before.length) > MOST_UNDO);
    if (first >= 0) this.past.splice(0, Math.min(first + 1, this.past.length - 1));
    this.changed([0, 0, 0, 0]);
  }

  undo() { this.step(this.past, this.future, 'before'); }
  redo() { this.step(this.future, this.past, 'after'); }
  step(from, to, which) {
    this.drop();
    const edit = from.pop();
    if (!edit) return;
    to.push(edit);
    this.put(edit.part, edit[which]);
  }
}

/**
 * The rectangle around two.
 * @param {number[]} one
 * @param {number[]} other
 */
function around([x, y, width, height], [left, top, wide, high]) {
  const fromX = Math.min(x, left), fromY = Math.min(y, top);
  return [fromX, fromY, Math.max(x + width, left + wide) - fromX, Math.max(y + height, top + high) - fromY];
}

// --- the dialog -----------------------------------------------------------------------------------------------------

const TOOLS = [['brush', 'Brush', 'b'], ['erase', 'Erase', 'e'], ['object', 'Object', 'o']];
const MODEL = 'facebook/sam2.1-hiera-tiny', FOUND = [0, 190, 255];
const LEAST_BOX = 6; // pixels of the window that a box is wide

/** The dialog for one image. found: what the server says about it. */
class Dialog {
  /** @type {any} */ digest; /** @type {any} */ numFormer; /** @type {any} */ size; /** @type {any} */ shade;
  /** @type {any} */ context; /** @type {any} */ offer; /** @type {any} */ painting; /** @type {any} */ tools;
  /** @type {any} */ sizes; /** @type {any} */ sized; /** @type {any} */ shading; /** @type {any} */ undoes;
  /** @type {any} */ redoes; /** @type {any} */ formers; /** @type {any} */ removes; /** @type {any} */ saves;
  /** @type {any} */ zoomed; /** @type {any} */ cursor; /** @type {any} */ state; /** @type {any} */ message;
  /** @type {any} */ stage; /** @type {any} */ view; /** @type {any} */ name; /** @type {any} */ model;
  /** @type {any} */ takes; /** @type {any} */ objects; /** @type {any} */ box; /** @type {any} */ opener;
  /** @type {any} */ watch; /** @type {any} */ zoom; /** @type {any} */ dirty; /** @type {any} */ frame;
  /** @type {any} */ later; /** @type {any} */ offered; /** @type {any} */ isLooking; /** @type {any} */ isSaving;
  /** @type {any} */ tool; /** @type {any} */ spot; /** @type {any} */ found; /** @type {any} */ pointers;
  /** @type {any} */ stroke; /** @type {any} */ mark; /** @type {any} */ isHeld; /** @type {any} */ points;
  /** @type {any} */ asked; /** @type {any} */ area; /** @type {any} */ offeredImage; /** @type {any} */ image;
  /** @type {any} */ isDone; /** @type {any} */ brought;

  constructor(image, name, found, levels) {
    Object.assign(this, { image, name, found, tool: 'brush', zoom: 1, pointers: new Map(), spot: null, isSaving: false,
      points: [], area: null, offered: null, asked: 0 });
    this.digest = found.digest;
    this.numFormer = found.num_former;
    this.size = Math.max(4, Math.round(Math.max(found.width, found.height) / 16));
    this.shade = canvas(found.width, found.height);
    this.context = this.shade.getContext('2d');
    this.offer = Object.assign(canvas(found.width, found.height), { className: 'offer' });
    this.painting = new Painting(found.width, found.height, levels, part => this.draw(part));
    const kept = unsaved.get(image);
    this.build();
    if (kept) {
      this.digest = kept.digest;
      this.painting.apply((_, at) => kept.levels[at]);
      this.tell('Your unsaved painting is here again.');
    }
    this.draw(this.painting.whole);
  }

  get isChanged() { return this.painting.past.length > 0; }

  build() {
    const { found } = this, button = (name, key, action) =>
      h('button.btn.s', { type: 'button', title: key ? `Key ${key}` : null, onclick: action }, name);
    const range = (name, value, low, high, change) =>
      h('input', { type: 'range', 'aria-label': name, min: low, max: high, value,
        oninput: event => change(Number(event.target.value)) });
    this.tools = h('span.seg', { role: 'group', 'aria-label': 'Tool' },
      TOOLS.map(([tool, word, key]) =>
        h('button', { type: 'button', data: { tool }, title: `Key ${key}`, onclick: () => this.choose(tool) }, word)));
    this.sizes = range('Brush size', 0, 0, 100, share => this.resize(MOST_SIZE ** (share / 100)));
    this.sized = h('span.sized');
    this.shading = range('Shade', 55, 0, 100, share => { this.shade.style.opacity = String(share / 100); });
    this.shade.style.opacity = '0.55';
    this.undoes = button('Undo', 'Ctrl Z', () => this.painting.undo());
    this.redoes = button('Redo', 'Ctrl Y', () => this.painting.redo());
    this.formers = button('Former mask', '', () => this.bring());
    this.removes = button('Remove mask', '', () => this.remove());
    this.saves = h('button.btn.main', { type: 'button', title: 'Key Ctrl S', onclick: () => this.save() }, 'Save');
    this.zoomed = h('button.btn.s', { type: 'button', title: 'Whole image, key 0', onclick: () => this.zoomTo(1) });
    this.cursor = h('div.cursor', { hidden: true });
    this.state = h('span', { role: 'status' });
    this.message = h('div', { 'aria-live': 'polite' });
    this.stage = h('div.stage', {}, h('img', { src: found.image, alt: '', draggable: false }), this.shade, this.offer,
      this.cursor);
    this.view = h('div.view',
      { tabIndex: 0, role: 'application',
        'aria-label':
          `Mask of ${this.name}. Arrow keys move the brush, Enter paints, Shift with an arrow key paints a line.` },
          this.stage);
    this.model =
      h('input', { type: 'text', 'aria-label': 'Model', value: studio.kept('mask-model') || MODEL, spellcheck: false,
        onchange: () => studio.kept('mask-model', this.model.value) });
    this.takes = [button('Add', 'Enter', () => this.take(true)), button('Take away', 'Delete', () => this.take(false)),
      button('Drop', 'Backspace', () => this.drop())];
    this.objects = h('div.row', { hidden: true },
      h('label', { title: 'A folder of transformers with a SAM 2 model, or a hub id that was downloaded' }, 'Model',
        this.model), this.takes,
      h('span.dim', {},
        'Click the object, or draw a box around it; right-click or Alt-click what does not belong to it.'));
    this.listen();
    this.box = h('dialog.dialog.mask#mask',
      { 'aria-label': `Mask of ${this.name}`, onclose: () => this.closed(), oncancel: event => {
        event.preventDefault();
        this.close();
      }, onkeydown: event => this.key(event) },
      h('div.row', {}, h('h2', {}, `Mask of ${this.name}`), h('span.dim', {}, found.size.join(' × ')), h('span.grow'),
        h('button.btn', { type: 'button', onclick: () => this.close() }, 'Close'), this.saves),
      h('div.row', {}, this.tools, h('label', { title: 'Keys [ and ]' }, 'Size', this.sizes, this.sized),
        h('label', {}, 'Shade', this.shading),
        button('Invert', 'i', () => this.painting.apply(level => 255 - level)),
        button('Fill', 'f', () => this.painting.apply(() => 255)),
        button('Clear', 'x', () => this.painting.apply(() => 0)),
        this.undoes, this.redoes, h('span.grow'), button('−', '-', () => this.zoomBy(1 / ZOOM)), this.zoomed,
        button('+', '+', () => this.zoomBy(ZOOM))),
      this.objects, this.message, this.view,
      h('div.row.foot', {}, this.state, h('span.grow'), this.formers, this.removes));
    for (const one of this.box.querySelectorAll('.row .btn.s'))
      if (['−', '+'].includes(one.textContent)) one.setAttribute('aria-label',
        one.textContent === '+' ? 'Zoom in' : 'Zoom out');
  }

  open() {
    this.opener = studio.focused();
    current = this;
    document.body.append(this.box);
    this.box.showModal();
    this.choose('brush');
    this.resize(this.size);
    this.zoomTo(1);
    this.look();
    this.view.focus();
    this.watch = new ResizeObserver(() => this.zoomTo(this.zoom));
    this.watch.observe(this.view);
  }

  tell(text, isBad = false) {
    this.message?.replaceChildren(...(text ? [(isBad ? studio.alert : studio.note)(text)] : []));
  }

  // drawing

  /** A part of the mask has changed: shade it anew with the next frame. */
  draw(part) {
    if (!this.painting) return; // it is being made
    if (part[2]) {
      this.dirty = this.dirty ? around(this.dirty, part) : part;
      this.frame ??= requestAnimationFrame(() => this.drawShade());
    }
    this.enable();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.look(), LEARNED_AFTER_MS);
  }

  /** Shade the part that is not in the loss. */
  drawShade() {
    const { context } = this, [x, y, width, height] = this.dirty;
    this.dirty = this.frame = null;
    context.globalCompositeOperation = 'source-over';
    context.clearRect(x, y, width, height);
    context.fillStyle = SHADE;
    context.fillRect(x, y, width, height);
    context.globalCompositeOperation = 'destination-out';
    context.drawImage(this.painting.now.canvas, x, y, width, height, x, y, width, height);
  }

  /** Say how much is in the loss. */
  look() {
    const { found, painting } = this, levels = painting.levels();
    const share = levels.reduce((sum, level) => sum + level, 0) / levels.length / 255,
      learned = share ? Math.max(1, Math.round(100 * share)) : 0;
    const outside = `the shaded rest with ${found.background} (data.mask_background)`;
    say(this.state, !share && !found.background ? 'Nothing is painted yet: paint the part that is to be in the loss.'
      : `${learned} % is in the loss with weight 1, ${outside}.${found.is_set ? ''
        : ` Save makes ${found.file.replace(/\/[^/]*$/, '')} this run’s mask folder.`}`);
    this.box.dataset.learned = share.toFixed(4);
  }

  /** Let what can be done be clicked. */
  enable() {
    const { found, painting } = this;
    this.undoes.disabled = !painting.past.length;
    this.redoes.disabled = !painting.future.length;
    for (const one of this.takes) one.disabled = !this.offered || this.isLooking;
    this.formers.hidden = !this.numFormer;
    this.removes.hidden = !this.digest;
    this.saves.disabled = this.isSaving || !(this.isChanged || (this.digest && !found.is_set));
    // a button that is disabled loses the focus
    if (this.box.open && !document.querySelector('dialog[open]:not(#mask)')) studio.refocus(this.view);
  }

  choose(tool) {
    this.tool = tool;
    this.objects.hidden = tool !== 'object';
    this.hover();
    for (const one of this.tools.children) one.setAttribute('aria-pressed', String(one.dataset.tool === tool));
  }

  resize(size) {
    this.size = Math.min(MOST_SIZE, Math.max(1, Math.round(size)));
    this.sizes.value = 100 * Math.log(this.size) / Math.log(MOST_SIZE);
    say(this.sized, `${this.size} px`);
    this.hover();
  }

  /** Show the brush where the pointer, or the keyboard's spot, is. */
  hover(at = this.spot) {
    this.spot = at;
    const { width, height } = this.found;
    this.cursor.hidden = !at || this.tool === 'object';
    if (at) Object.assign(this.cursor.style,
      { left: `${100 * at[0] / width}%`, top: `${100 * at[1] / height}%`, width: `${100 * this.size / width}%`,
        height: `${100 * this.size / height}%` });
  }

  // zoom

  zoomTo(zoom, [clientX, clientY] = this.middle()) {
    const { view, stage, found } = this, before = stage.getBoundingClientRect();
    const shareX = (clientX - before.left) / (before.width || 1),
      shareY = (clientY - before.top) / (before.height || 1);
    this.zoom = Math.min(MOST_ZOOM, Math.max(1, zoom));
    const fit = Math.min(view.clientWidth / found.width, view.clientHeight / found.height);
    Object.assign(stage.style,
      { width: `${Math.floor(found.width * fit * this.zoom)}px`,
        height: `${Math.floor(found.height * fit * this.zoom)}px` });
    stage.classList.toggle('pixels', fit * this.zoom > 3);
    const after = stage.getBoundingClientRect();
    view.scrollLeft += after.left + shareX * after.width - clientX;
    view.scrollTop += after.top + shareY * after.height - clientY;
    say(this.zoomed, `${Math.round(100 * this.zoom)} %`);
  }

  zoomBy(factor, at) { this.zoomTo(this.zoom * factor, at); }
  middle() {
    const box = this.view.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  }

  // pointers and keys

  at({ clientX, clientY }) {
    const box = this.shade.getBoundingClientRect();
    return [(clientX - box.left) * this.found.width / box.width, (clientY - box.top) * this.found.height / box.height];
  }

  listen() {
    const { view } = this;
    view.addEventListener('pointerdown', event => this.down(event));
    view.addEventListener('pointermove', event => this.move(event));
    for (const name of ['pointerup', 'pointercancel']) view.addEventListener(name, event => this.up(event));
    view.addEventListener('pointerleave', event => { if (!this.pointers.has(event.pointerId)) this.hover(null); });
    view.addEventListener('contextmenu', event => event.preventDefault());
    view.addEventListener('wheel', event => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY / 400), [event.clientX, event.clientY]);
    }, { passive: false });
  }

  down(event) {
    event.preventDefault();
    this.view.focus({ preventScroll: true });
    this.view.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event);
    // two fingers move and zoom
    if (this.pointers.size > 1) { this.painting.drop(); this.stroke = this.mark = null; return; }
    if (event.button === 1 || this.isHeld) return; // the image is dragged
    if (this.tool === 'object') { this.mark = event; return; }
    this.stroke = { last: this.at(event), isErasing: this.tool === 'erase' || event.button === 2 };
    this.paint(this.stroke.last);
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (event.pointerType !== 'touch') this.hover(this.at(event));
    if (!before) return;
    if (this.stroke) {
      const all = event.getCoalescedEvents?.() ?? [];
      for (const one of all.length ? all : [event]) this.paint(this.at(one));
    } else if (this.mark) this.drawOffer(this.boxTo(event));
    else if (this.pointers.size === 2) this.pinch(event, before);
    else this.pan(before, event);
    this.pointers.set(event.pointerId, event);
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    if (this.stroke) this.painting.end();
    this.stroke = null;
    if (this.mark && event.type === 'pointerup') this.pointed(event);
    this.mark = null;
  }

  // an object that a model finds

  /** The box from where the pointer went down; null while it is too small to be meant. */
  boxTo(event) {
    const from = this.at(this.mark), to = this.at(event),
      isSmall = Math.max(Math.abs(event.clientX - this.mark.clientX),
        Math.abs(event.clientY - this.mark.clientY)) < LEAST_BOX;
    return isSmall ? null : [0, 1].map(side => Math.min(from[side], to[side]))
      .concat([0, 1].map(side => Math.max(from[side], to[side])));
  }

  /** A click was made, or a box was drawn: ask the model. */
  pointed(event) {
    const area = this.boxTo(event);
    if (area) Object.assign(this, { area, points: [] });
    else this.points.push([...this.at(this.mark), this.mark.button !== 2 && !this.mark.altKey]);
    this.look();
    return this.find();
  }

  async find() {
    const number = this.asked += 1, { width, height } = this.found;
    this.isLooking = true; // what is shown is of the click before
    this.drawOffer();
    this.tell('Looking for the object … The first time, the model is read.');
    const answer = await this.ask('mask_find', { model: this.model.value, points: this.points, box: this.area });
    if (number !== this.asked || !this.box.isConnected) return; // another click was made meanwhile
    this.isLooking = false;
    this.enable();
    if (!answer) { this.points.pop(); this.drawOffer(); return; }
    this.tell('');
    this.offered = await levelsOf(answer.mask, width, height);
    this.offeredImage = new ImageData(width, height);
    const { data } = this.offeredImage;
    for (let at = 0; at < this.offered.length; at++) {
      [data[4 * at], data[4 * at + 1], data[4 * at + 2]] = FOUND;
      data[4 * at + 3] = this.offered[at];
    }
    this.drawOffer();
    this.enable();
    this.box.dataset.found = number;
  }

  /** Show what the model proposes, the clicks, and a box. */
  drawOffer(area = this.area) {
    const context = /** @type {CanvasRenderingContext2D} */ (this.offer.getContext('2d'));
    const { width, height } = this.found,
      dot = Math.max(2, Math.max(width, height) / 200);
    context.clearRect(0, 0, width, height);
    if (this.offered) context.putImageData(this.offeredImage, 0, 0);
    Object.assign(context, { lineWidth: dot / 2, strokeStyle: '#fff' });
    if (area) context.strokeRect(area[0], area[1], area[2] - area[0], area[3] - area[1]);
    for (const [x, y, belongs] of this.points) {
      context.beginPath();
      context.arc(x, y, dot, 0, 2 * Math.PI);
      context.fillStyle = belongs ? '#0a0' : '#d00';
      context.fill();
      context.stroke();
    }
  }

  /** Add what the model proposes to the mask, or take it away from it. */
  take(isAdded) {
    const { offered } = this;
    if (!offered || this.isLooking) return;
    this.drop();
    this.painting.apply((level, at) => isAdded ? Math.max(level, offered[at]) : Math.min(level, 255 - offered[at]));
  }

  drop() {
    this.asked += 1;
    Object.assign(this, { offered: null, points: [], area: null, isLooking: false });
    this.tell('');
    this.drawOffer();
    this.enable();
  }

  paint(to) {
    this.painting.line(this.stroke.last, to, this.size, this.stroke.isErasing);
    this.stroke.last = to;
  }

  pan(from, to) {
    this.view.scrollLeft -= to.clientX - from.clientX;
    this.view.scrollTop -= to.clientY - from.clientY;
  }

  pinch(event, before) {
    const other = [...this.pointers.values()].find(one => one.pointerId !== event.pointerId),
      far = one => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
    this.pan({ clientX: before.clientX / 2, clientY: before.clientY / 2 },
      { clientX: event.clientX / 2, clientY: event.clientY / 2 });
    this.zoomBy(far(event) / (far(before) || 1),
      [(event.clientX + other.clientX) / 2, (event.clientY + other.clientY) / 2]);
  }

  key(event) {
    if (event.target.type === 'text' || (event.key === 'Enter' && event.target !== this.view)) return;
    const name = `${event.ctrlKey || event.metaKey ? 'Ctrl ' : ''}${event.key.length === 1 ? event.key.toLowerCase()
      : event.key}`, { painting } = this;
    if (event.key === ' ' && event.target === this.view) {
      event.preventDefault();
      this.isHeld = true;
      addEventListener('keyup', () => { this.isHeld = false; }, { once: true });
      return;
    }
    const act = event.shiftKey && name === 'Ctrl z' ? () => painting.redo() : {
      ...(this.offered ? { Enter: () => this.take(true), Delete: () => this.take(false), Backspace: () => this.drop() }
        : {}),
      b: () => this.choose('brush'), o: () => this.choose('object'), e: () => this.choose('erase'),
      i: () => painting.apply(level => 255 - level), f: () => painting.apply(() => 255),
      x: () => painting.apply(() => 0),
      '[': () => this.resize(Math.min(this.size - 1, this.size / SIZE)),
      ']': () => this.resize(Math.max(this.size + 1, this.size * SIZE)),
      '+': () => this.zoomBy(ZOOM), '=': () => this.zoomBy(ZOOM), '-': () => this.zoomBy(1 / ZOOM),
      0: () => this.zoomTo(1),
      'Ctrl z': () => painting.undo(), 'Ctrl y': () => painting.redo(), 'Ctrl s': () => this.save(),
    }[name] ?? (event.target === this.view ? this.moveKey(event) : undefined);
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** What an arrow key or Enter does to the spot of the keyboard. */
  moveKey(event) {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key],
      { width, height } = this.found;
    if (!by && event.key !== 'Enter') return undefined;
    return () => {
      const from = this.spot ?? [width / 2, height / 2], step = Math.max(1, this.size / 4);
      const to = by ? [Math.min(width, Math.max(0, from[0] + step * by[0])),
        Math.min(height, Math.max(0, from[1] + step * by[1]))] : from;
      this.hover(to);
      if (by && !event.shiftKey) return;
      this.painting.line(from, to, this.size, this.tool === 'erase');
      this.painting.end();
    };
  }

  // the server

  /** Ask the server; undefined where it refused, which is said in the dialog. */
  async ask(name, values) {
    this.isSaving ||= name === 'mask_save';
    this.enable();
    try { return await call(name, { image: this.image, ...values }); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      this.tell(error.message, true);
      return undefined;
    } finally {
      if (name === 'mask_save') this.isSaving = false;
      this.enable();
    }
  }

  async save() {
    if (this.saves.disabled) return;
    this.painting.end();
    const { width, height } = this.found, sent = await encoded(this.painting.levels(), width, height);
    await this.send(sent, 'Mask saved.');
  }

  async remove() {
    if (await studio.ask('Remove this mask?',
      'The whole image is in the loss then. The mask can be brought back here with Former mask.', ['Remove', 'Keep'],
      'stop') !== 0) return;
    await this.send(null, 'Mask removed.');
  }

  async send(sent, done) {
    this.tell('');
    const answer = await this.ask('mask_save', { sent, before: this.digest });
    if (!answer) return;
    if (answer.changed) { this.conflict(answer.changed); return; }
    this.isDone = true;
    unsaved.delete(this.image);
    overlays.delete(this.image);
    studio.toast(done);
    this.box.close();
    await refresh();
  }

  /** Another program has changed the mask since it was loaded. */
  conflict(changed) {
    const mine = () => {
      this.digest = changed.digest;
      this.numFormer = changed.num_former;
      this.tell('Save replaces that mask now; it is kept as a former mask.');
      this.enable();
    };
    const theirs = async () => {
      const levels = await levelsOf(changed.mask, this.found.width, this.found.height);
      mine();
      this.painting.apply((_, at) => levels[at]);
      this.tell('This is the mask of the file. Undo brings back yours.');
    };
    this.message.replaceChildren(
      h('div.notice.warn', { role: 'alert' },
        h('p', {}, changed.digest ? 'Not saved: the mask was changed meanwhile.'
          : 'Not saved: the mask was removed meanwhile.'),
        h('button.btn.s', { type: 'button', onclick: mine }, 'Use mine'), ' ',
        h('button.btn.s', { type: 'button', onclick: theirs }, 'Use the file’s')));
  }

  /** Bring back a former mask, each time an older one. Undo takes it away again. */
  async bring() {
    const number = this.brought ?? 0, answer = await this.ask('mask_former', { number });
    if (!answer) return;
    const levels = await levelsOf(answer.mask, this.found.width, this.found.height);
    this.painting.apply((_, at) => levels[at]);
    this.brought = (number + 1) % this.numFormer;
    this.tell(`Former mask ${number + 1} of ${this.numFormer}, the newest first. It is not saved yet.`);
  }

  async close() {
    this.painting.end();
    if (this.isChanged && await studio.ask('Discard what you painted?', 'The mask is not saved.',
      ['Go on painting', 'Discard']) !== 1) return;
    this.isDone = true;
    unsaved.delete(this.image);
    this.box.close();
  }

  closed() {
    // the browser closed it
    if (!this.isDone && this.isChanged) unsaved.set(this.image,
      { levels: this.painting.levels(), digest: this.digest });
    current = null;
    clearTimeout(this.later);
    this.watch.disconnect();
    this.box.remove();
    studio.refocus(this.opener);
  }
}

async function open(image, name, button) {
  button.disabled = true;
  try {
    const found = await call('mask_load', { image });
    new Dialog(image, name, found, await levelsOf(found.mask, found.width, found.height)).open();
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
  } finally { button.disabled = false; }
}

// --- cards
// ------------------------------------------------------------------------------------------------------------

/** {image: [stamp, address]} of what is drawn over a card. */
const overlays = new Map();
let isShown = studio.kept('masks') === 'on';

async function cover(card) {
  const { image, mask } = card.data, place = card.frame.querySelector('.fr');
  let cover = place?.querySelector('.mk');
  if (!place || !mask || !isShown) { cover?.remove(); return; }
  if (!cover) place.append(cover = h('img.mk', { alt: '' }));
  if (overlays.get(image)?.[0] !== mask) {
    const src = await call('mask_overlay', { image }).catch(error => {
      if (!(error instanceof studio.Refused)) throw error;
      return '';
    });
    overlays.set(image, [mask, src]);
  }
  if (overlays.get(image)[1]) cover.src = overlays.get(image)[1]; else cover.remove();
}

const shown = new Set(); // cards that were drawn

export const mask = {
  /** Give what draws the screen again after a mask was saved. */
  connect(again) { refresh = again; },

  /** The button of a card. */
  button(card) {
    return h('button.mask-open',
      { type: 'button', hidden: true, onclick: event => open(card.data.image, card.data.name, event.currentTarget) },
      'Mask');
  },

  update(card) {
    const { name, mask, shape } = card.data;
    card.mask.hidden = mask === null || !shape;
    card.mask.setAttribute('aria-label', `Mask of ${name}`);
    card.mask.title = 'Paint the loss mask: the part of the image that counts';
    for (const one of shown) if (!one.element.isConnected && one !== card) shown.delete(one);
    shown.add(card);
    cover(card);
  },

  /** What shows and hides the masks of all cards. */
  toggle() {
    const box = h('input#data-masks', { type: 'checkbox', checked: isShown, onchange: () => {
      isShown = box.checked;
      studio.kept('masks', isShown ? 'on' : 'off');
      for (const card of shown) cover(card);
    } });
    return h('label.crop.sm', { title: 'Darken what masks leave out' }, box, 'Masks');
  },
};
