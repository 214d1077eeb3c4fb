// What the dialog of a mask shows: the image with what is painted over it, and what a model proposes.
// @ts-check
import * as studio from './core.js';
import { say, call } from './core.js';
import { around, levelsOf } from './mask-painting.js';

const MOST_ZOOM = 16, LEARNED_AFTER_MS = 150;
export const ZOOM = 1.25, MOST_SIZE = 800;
const SHADE = 'rgb(214, 26, 84)', FOUND = [0, 190, 255];
const LEAST_BOX = 6; // pixels of the window that a box is wide

/** The image, its shade and the proposals. `Dialog` makes the elements and says what pointer and keys do. */
export class View {
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

  get isChanged() { return this.painting.past.length > 0; }

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
}
