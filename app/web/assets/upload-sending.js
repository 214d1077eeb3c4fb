// Sending files in chunks, which goes on after a lost connection and a reload.
// @ts-check
import * as studio from './core.js';
import { call, h, counted } from './core.js';
import { here, waiting, $, left, remember, results } from './upload-state.js';
import { draw, refused, isOver, drawSoon } from './upload.js';

const AT_ONCE = 3, TRIED_AGAIN_MS = 1500, LONGEST_PAUSE_MS = 5000;
// what tells files of one name, size and time apart: up to a megabyte of each
const NAMES_AT_ONCE = 2000, SAMPLES = 16, SAMPLE = 65536;

// --- sending ------------------------------------------------------------------------------------------------------

/** Send what waits, one selection after the other. */
export async function run() {
  here.isRunning = true;
  dispatchEvent(new Event('studio-uploading'));
  try {
    while ((here.batch = waiting.shift())) {
      const now = here.batch;
      now.goesOn = left()?.folder === now.folder;
      $('upload-message').replaceChildren();
      remember();
      draw();
      for (const phase of [0, 1, 2]) { // images first: their captions follow the names that they get
        const items = now.items.filter(item => item.phase === phase);
        await Promise.all(Array.from({ length: AT_ONCE }, async () => {
          while (items.length && !now.isCancelled) await sendOne(now, items.shift());
        }));
      }
      await findMasks(now);
      here.batch = null;
      conclude(now);
      await here.hooks?.refresh();
    }
  } finally {
    here.isRunning = false; // a fault of the script must not keep the next selection from being sent
    here.batch = null;
    dispatchEvent(new Event('studio-uploaded'));
  }
}

/** Find the new images that have a mask already: that of a deleted image stays, and would be trained with unseen. */
async function findMasks(batch) {
  // added before the page was loaded again
  const isNew = item => item.state === 'added' || (batch.goesOn && item.state === 'there');
  const images = batch.items.filter(item => item.phase === 0 && isNew(item));
  const ask = async part => {
    const masks = await call('upload_masked', { folder: batch.folder, names: part.map(item => item.name) });
    for (const item of part) item.mask = masks[item.name];
  };
  try {
    for (let at = 0; at < images.length; at += NAMES_AT_ONCE) {
      const part = images.slice(at, at + NAMES_AT_ONCE);
      if (batch.isCancelled) await ask(part); else await untilAnswered(batch, () => ask(part));
    }
  } catch (error) { refused(error); }
}

/** Say what became of a selection. */
function conclude({ items }) {
  const numOf = kind => items.filter(item => item.state === kind).length,
    numLeft = items.filter(item => !isOver(item)).length;
  const sentence = [`${counted(numOf('added'), 'file')} added`,
    numOf('there') && `${studio.count(numOf('there'))} there already`,
    numOf('refused') && `${studio.count(numOf('refused'))} not taken`,
    numLeft && `${studio.count(numLeft)} not sent`].filter(Boolean).join(', ') + '.';
  const numFolders = new Set(items.map(item => item.above)).size;
  if (numFolders > 1) $('upload-message')
    .append(h('p.notice', { role: 'status' },
      `The files of ${numFolders} folders are in one folder now. Were some of them masks, or images before an ` +
      `edit? Move those into a folder of their own.`));
  results.push(...items.filter(item => item.state === 'refused' || item.note || item.mask
    || item.isAlone));
  remember();
  draw(sentence);
  if (!here.root.getClientRects().length) studio.toast(`Upload: ${sentence}`);
}

/**
 * Do something once more, until the server answers or the selection is cancelled. It waits while the selection is
 * paused.
 */
async function untilAnswered(batch, action) {
  for (let pause = TRIED_AGAIN_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    await gate(batch);
    if (batch.isCancelled) return;
    try {
      await action();
      batch.trouble = '';
      return;
    } catch (error) {
      if (batch.isCancelled || !(error instanceof studio.Refused && error.lost)) throw error;
    }
    batch.trouble = 'The server does not answer. Trying again …';
    drawSoon();
    await new Promise(resolve => setTimeout(resolve, pause));
  }
}

/** Send one file, which goes on where it stopped. */
async function sendOne(batch, item) {
  try {
    await untilAnswered(batch, () => {
      item.state = 'sending';
      drawSoon();
      return send(batch, item);
    });
  } catch (error) {
    if (batch.isCancelled) { item.state = 'waiting'; return; }
    if (!(error instanceof studio.Refused)) throw error;
    Object.assign(item, { state: 'refused', why: error.message });
  }
  if (!isOver(item)) return;
  item.file = null; // what is done needs no memory
  drawSoon();
}

async function send(batch, item) {
  const { file } = item, image = item.phase === 1 ? imageOf(batch, item) : null;
  if (image?.state === 'refused') throw new studio.Refused('not sent, because its image was refused');
  const renamed = item.phase === 2
    && batch.items.find(other => other.phase === 0 && other.name && other.name !== other.given);
  if (renamed)
    throw new studio.Refused(
      `not sent, because ${renamed.path} is called ${renamed.name} now; correct its row and choose this file again`);
  const head = item.phase ? '' : hex(await bytes(file.slice(0, studio.facts.upload.head)));
  item.mark ||= await mark(file);
  const chosen = { folder: batch.folder, name: file.name, size: file.size, path: item.path.slice(-1000),
    image: image?.name || '', head, modified_ms: file.lastModified, mark: item.mark };
  const begun = await call('upload_begin', { file: chosen });
  item.id = begun.id;
  if (!begun.placed) {
    let at = begun.received;
    item.sent = at;
    while (at < file.size) {
      await gate(batch);
      if (batch.isCancelled) return;
      item.sent = at = await sendChunk(batch, item, at);
      drawSoon();
    }
  }
  if (batch.isCancelled) return;
  const wasSent = begun.placed && item.isSent; // only the answer was lost
  item.isSent = true;
  const placed = begun.placed || await call('upload_finish', { file: chosen });
  Object.assign(item, { state: placed.is_new || wasSent ? 'added' : 'there', name: placed.name, sent: file.size,
    isAlone: placed.is_alone });
  if (item.state === 'added' && placed.name !== item.given) item.note = `is called ${placed.name} here`;
}

/**
 * The image that a caption of the same selection belongs to: first that of exactly its name, then one that is not
 * refused.
 */
function imageOf(batch, caption) {
  const rank = item => 2 * Number(item.exact === caption.exact) + Number(item.state !== 'refused');
  return batch.items.filter(item => item.phase === 0 && item.stem === caption.stem)
    .sort((one, other) => rank(other) - rank(one))[0];
}

/** Send one chunk, and return the number of bytes that the server has. */
async function sendChunk(batch, { id, file }, at) {
  const body = await bytes(file.slice(at, at + studio.facts.upload.chunk));
  let answer, found;
  try {
    answer = await fetch(`/uploads/${id}?offset=${at}`, { method: 'PUT', body, signal: batch.abort.signal });
    found = await answer.text();
  } catch { throw new studio.Refused('no answer', true); }
  try { found = JSON.parse(found); } catch { /* a sentence of the guard */ }
  if (Number.isInteger(found.received)) return found.received;
  if ([401, 404, 502, 503, 504].includes(answer.status)) {
    studio.reached(answer.status === 404, answer.status === 401 ? found : '');
    throw new studio.Refused('again', true);
  }
  throw new studio.Refused(found.error
    || (typeof found === 'string' && found.length < 300 ? found : `refused with status ${answer.status}`));
}

async function bytes(blob) {
  try { return await blob.arrayBuffer(); } catch {
    throw new studio.Refused('cannot be read; it was moved, changed or removed: choose it again');
  }
}
/** Adler-32 of samples of a file, the whole of a small one: unpacked archives give all their files one time. */
async function mark(file) {
  const step = Math.max(SAMPLE, Math.ceil(file.size / SAMPLES));
  let low = 1, high = 0;
  for (let at = 0; at < file.size; at += step)
    for (const byte of new Uint8Array(await bytes(file.slice(at, at + SAMPLE)))) {
      low = (low + byte) % 65521;
      high = (high + low) % 65521;
    }
  return (high * 65536 + low).toString(16);
}

const hex = buffer => [...new Uint8Array(buffer)].map(byte => byte.toString(16).padStart(2, '0')).join('');

/** Wait while the upload is paused. */
const gate = batch => /** @type {Promise<void>} */ (new Promise(resolve => {
  const look = () => { if (!batch.isPaused || batch.isCancelled) resolve(); else setTimeout(look, 100); };
  look();
}));

export async function cancel() {
  if (!here.batch) return;
  const now = here.batch, begun = now.items.filter(item => item.state === 'sending' && item.id).map(item => item.id);
  now.isCancelled = true;
  waiting.length = 0;
  now.abort.abort();
  for (const id of begun) {
    // removed after a week else
    try { await call('upload_cancel', { id }); } catch (error) { if (!(error instanceof studio.Refused)) throw error; }
  }
}

addEventListener('beforeunload', event => { if (here.batch) event.preventDefault(); });
