// What is painted on a mask, with what can be undone, and its PNG.
// @ts-check
import * as studio from './core.js';

const MOST_UNDO = 256 * 2 ** 20; // bytes of levels

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
export async function encoded(levels, width, height) {
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

export const canvas = (width, height) => Object.assign(document.createElement('canvas'), { width, height });

/** The levels of a mask that the server sent; all 0 where there is none. */
export async function levelsOf(src, width, height) {
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
export class Painting {
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
export function around([x, y, width, height], [left, top, wide, high]) {
  const fromX = Math.min(x, left), fromY = Math.min(y, top);
  return [fromX, fromY, Math.max(x + width, left + wide) - fromX, Math.max(y + height, top + high) - fromY];
}
