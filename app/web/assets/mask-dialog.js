// The dialog in which the mask of one image is painted: its tools, pointer and keys, and what is saved.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { canvas, encoded, levelsOf, Painting } from './mask-painting.js';
import { MOST_SIZE, View, ZOOM } from './mask-view.js';
import { overlays } from './mask.js';

const SIZE = 1.2, MODEL = 'facebook/sam2.1-hiera-tiny';
const TOOLS = [['brush', 'Brush', 'b'], ['erase', 'Erase', 'e'], ['object', 'Object', 'o']];
let current = /** @type {any} */ (null); // the dialog that is open

/** {image: {levels, digest}} of masks that were painted and not saved. */
const unsaved = new Map();
addEventListener('beforeunload', event => { if (unsaved.size || current?.isChanged) event.preventDefault(); });

/** What the screen gives the dialog: how it is drawn again after a mask was saved. */
export const hooks = {
  refresh: () => {},
};

/** The dialog for one image. found: what the server says about it. */
export class Dialog extends View {
  constructor(image, name, found, levels) {
    super();
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

  choose(tool) {
    this.tool = tool;
    this.objects.hidden = tool !== 'object';
    this.hover();
    for (const one of this.tools.children) one.setAttribute('aria-pressed', String(one.dataset.tool === tool));
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

  paint(to) {
    this.painting.line(this.stroke.last, to, this.size, this.stroke.isErasing);
    this.stroke.last = to;
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
    await hooks.refresh();
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
