// Uploads on the screen Data: images and captions are sent in chunks, go on after a lost connection and a reload, and
// what
// was refused is named. Also deleted images, which can be restored.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, counted } from './core.js';

const AT_ONCE = 3, TRIED_AGAIN_MS = 1500, LONGEST_PAUSE_MS = 5000, UNDO_SHOWN_MS = 12000, MOST_LISTED = 500,
  DRAWN_EVERY_MS = 100;
// what tells files of one name, size and time apart: up to a megabyte of each
const NAMES_AT_ONCE = 2000, SAMPLES = 16, SAMPLE = 65536;
const SYSTEM_FILES = /^(\..*|thumbs\.db|desktop\.ini)$/i;
const NEW = 'new:'; // before the path of a folder that a new one is made in
/** @type {HTMLElement} */
let root;
let hooks = /** @type {any} */ (null), state = /** @type {any} */ (null), batch = /** @type {any} */ (null),
  isRunning = false, asked = 0, drawn = 0, focusOn = /** @type {any} */ (null);
const waiting = [], results = [];
/**
 * The element of an id.
 * @param {string} id
 * @returns {any}
 */
const $ = id => root.querySelector(`#${id}`);

// --- what the browser remembers of an upload that a reload interrupted ---------------------------------------------

function left() {
  try { return JSON.parse(studio.kept('upload') || 'null'); } catch { return null; }
}
const remember = () => studio.kept('upload',
  batch ? JSON.stringify({ folder: batch.folder, total: batch.items.length, done: batch.items.filter(isOver).length })
    : '');

// --- choosing files -----------------------------------------------------------------------------------------------

const isOver = item => ['added', 'there', 'refused'].includes(item.state);
const parts = name => {
  const at = name.lastIndexOf('.');
  return at > 0 ? [name.slice(0, at), name.slice(at).toLowerCase()] : [name, ''];
};

function itemOf(file, path) {
  const name = file.name.normalize(), [stem, suffix] = parts(name),
    above = path.slice(0, path.length - file.name.length);
  const phase = name.toLowerCase() === 'metadata.jsonl' ? 2 : suffix === '.txt' ? 1 : 0;
  return { file, path, phase, stem: (above + stem).toLowerCase(), exact: above + stem, above, given: name,
    size: file.size, state: 'waiting', sent: 0, name: '', why: '' };
}

/** All files of what was dropped, also those in folders. The entries must be read at once: later the drop is empty. */
async function dropped(transfer) {
  const entries = [...transfer.items].filter(item => item.kind === 'file')
    .map(item => item.webkitGetAsEntry?.() || item.getAsFile());
  const files = [], closed = [];
  const read = async entry => {
    try { await readOne(entry); } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      closed.push(entry.fullPath.replace(/^\//, ''));
    }
  };
  const readOne = async entry => {
    if (entry instanceof File) files.push([entry, entry.name]);
    else if (entry?.isFile) files.push(
      [await new Promise((good, bad) => entry.file(good, bad)), entry.fullPath.replace(/^\//, '')]);
    else if (entry?.isDirectory && !SYSTEM_FILES.test(entry.name)) {
      const reader = entry.createReader();
      for (;;) { // a browser gives a hundred at a time
        const some = await new Promise((good, bad) => reader.readEntries(good, bad));
        if (!some.length) break;
        for (const inner of some) await read(inner);
      }
    }
  };
  for (const entry of entries) await read(entry);
  return { files, closed };
}

/** Send files, after those that are being sent. */
async function add(files) {
  const items = files.filter(([file]) => !SYSTEM_FILES.test(file.name)).map(([file, path]) => itemOf(file, path));
  if (!items.length) { if (files.length) studio.toast('There are no images in it.', true); return; }
  const folder = await destination();
  if (!folder) return;
  waiting.push({ folder, items, isPaused: false, isCancelled: false, trouble: '', abort: new AbortController(),
    bytes: items.reduce((sum, item) => sum + item.size, 0) });
  if (!isRunning) run(); else drawSoon();
}

/** The folder that the files go to; a new one is made, and becomes that of the form. */
async function destination() {
  if (!state) await look();
  const place = $('upload-to').value;
  if (!place.startsWith(NEW)) return state?.folder;
  try {
    const made = await call('upload_make', { above: place.slice(NEW.length), name: $('upload-name').value });
    await look();
    $('upload-to').value = '';
    drawPlace();
    if (made.left.labels.length) sayLeft(made.left);
    return made.folder;
  } catch (error) {
    refused(error);
    $('upload-name').focus();
    return null;
  }
}

/** Say that what belonged to the images of the former folder is no longer in the form. */
function sayLeft({ labels, edits }) {
  const undo = async () => { await call('new_edit', { edits }); return 'It is in the form again.'; };
  fill($('upload-behind'), [labels, edits],
    () =>
      [h('p.notice', { role: 'status' },
        `Left behind, as it belongs to the images of the former folder: ${labels.join(', ')}. `,
        h('button.btn.s', { type: 'button',
          onclick: event => studio.act(event.currentTarget, $('upload-behind'), undo) }, 'Undo'))]);
}

function refused(error) {
  if (!(error instanceof studio.Refused)) throw error;
  $('upload-message').replaceChildren(studio.alert(error.message));
}

// --- sending ------------------------------------------------------------------------------------------------------

/** Send what waits, one selection after the other. */
async function run() {
  isRunning = true;
  try {
    while ((batch = waiting.shift())) {
      const now = batch;
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
      batch = null;
      conclude(now);
      await hooks.refresh();
    }
  } finally {
    isRunning = false; // a fault of the script must not keep the next selection from being sent
    batch = null;
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
  results.push(...items.filter(item => item.state === 'refused' || item.note || item.mask));
  remember();
  draw(sentence);
  if (studio.shown !== 'data') studio.toast(`Upload: ${sentence}`);
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
  Object.assign(item, { state: placed.is_new || wasSent ? 'added' : 'there', name: placed.name, sent: file.size });
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

async function cancel() {
  if (!batch) return;
  const now = batch, begun = now.items.filter(item => item.state === 'sending' && item.id).map(item => item.id);
  now.isCancelled = true;
  waiting.length = 0;
  now.abort.abort();
  for (const id of begun) {
    // removed after a week else
    try { await call('upload_cancel', { id }); } catch (error) { if (!(error instanceof studio.Refused)) throw error; }
  }
}

addEventListener('beforeunload', event => { if (batch) event.preventDefault(); });

// --- what is shown of it ------------------------------------------------------------------------------------------

/** Show the progress a few times a second: a selection may have ten thousand files. */
function drawSoon() {
  drawn ||= setTimeout(() => { drawn = 0; if (batch) { remember(); draw(); } }, DRAWN_EVERY_MS);
}

function draw(sentence = '') {
  const items = batch?.items || [], over = items.filter(isOver).length, isBusy = !!batch;
  $('upload-going').hidden = !isBusy;
  if (batch) {
    const sent = items.reduce((sum, item) => sum + (isOver(item) ? item.size : item.sent), 0),
      current = items.filter(item => item.state === 'sending').at(0);
    const share = batch.bytes ? Math.min(1, sent / batch.bytes) : 1;
    $('upload-bar').style.setProperty('--share', `${100 * share}%`);
    $('upload-bar').setAttribute('aria-valuenow', Math.round(100 * share));
    say($('upload-count'), `${studio.count(over)} of ${counted(items.length, 'file')}`);
    say($('upload-size'),
      `${studio.size(sent)} of ${studio.size(batch.bytes)}${waiting.length
        ? `, ${counted(waiting.length, 'selection')} after it` : ''}`);
    say($('upload-current'), batch.isPaused ? 'Paused.' : batch.trouble || current?.path || '');
    say($('upload-pause'), batch.isPaused ? 'Resume' : 'Pause');
    const tenths = Math.floor(10 * share);
    // not every chunk is read aloud
    if (batch.tenths !== tenths || batch.spoken !== batch.trouble) say($('upload-spoken'),
      batch.trouble || `${over} of ${items.length} files are sent.`);
    Object.assign(batch, { tenths, spoken: batch.trouble });
  } else if (sentence) say($('upload-spoken'), sentence);
  if (sentence) say($('upload-done'), sentence);
  if (isBusy) say($('upload-done'), '');
  drawLeft();
  drawResults();
}

function drawLeft() {
  const found = batch ? null : left();
  fill($('upload-left'), found, () => !found ? [] : h('div.notice.warn', { role: 'status' },
    h('p', {},
      `${studio.count(found.done)} of ${counted(found.total, 'file')} are there, in ${found.folder}. Choose the same ` +
      'files again to go on; those that are there are not sent again.'),
    h('button.btn.s', { type: 'button', onclick: () => {
      studio.kept('upload', '');
      drawLeft();
      studio.refocus($('upload-files'));
    } }, 'Dismiss')));
}

function drawResults() {
  const bad = results.filter(item => item.state === 'refused'), renamed = results.filter(item => item.note),
    masked = results.filter(item => item.mask);
  const part = (items, title, text) => items.length
    ? [h('b', {}, title), h('ul', {}, items.slice(0, MOST_LISTED).map(item => h('li', {}, text(item))),
      more(items.length))] : null;
  fill($('upload-results'), [bad.length, renamed.length, masked.length],
    () => !results.length ? [] : h('div.notice', { role: 'group', 'aria-label': 'Notes on the upload' },
      part(bad, `${counted(bad.length, 'file was', 'files were')} not taken`,
        item => [h('b', {}, item.path), ': ', without(item)]),
      part(renamed, `${counted(renamed.length, 'file has', 'files have')} another name`,
        item => [h('b', {}, item.path), ' ', item.note]),
      part(masked,
        `${counted(masked.length, 'image has',
          'images have')} a mask already, perhaps that of an earlier image: look at it with Mask on the card`,
          item => [h('b', {}, item.name), ': ', item.mask]),
      h('button.btn.s', { type: 'button', onclick: () => {
        results.length = 0;
        drawResults();
        studio.refocus($('upload-files'));
      } }, 'Dismiss')));
}

const more = number => (number > MOST_LISTED ? h('li', {}, `and ${studio.count(number - MOST_LISTED)} more`) : null);

/** A refusal without the file's name, which stands before it. */
const without = ({ path, why }) => {
  const name = `${path.split('/').at(-1).normalize()}: `;
  return why.startsWith(name) ? why.slice(name.length) : why;
};

function drawPlace() {
  const usable = state && !state.closed && !state.problem,
    options = [...(usable ? [['', state.folder]] : []),
      ...(state?.roots || []).map(place => [NEW + place, `A new folder in ${place}`])];
  const chosen = $('upload-to').value;
  if (fill($('upload-to'), options, () => options.map(([value, text]) => h('option', { value }, text)))) {
    $('upload-to').value = options.some(([value]) => value === chosen) ? chosen : options[0]?.[0] ?? '';
  }
  $('upload-new').hidden = !$('upload-to').value.startsWith(NEW);
}

function drawState() {
  const why = state.closed || (state.problem && !state.roots.length ? state.problem : '');
  $('upload-open').hidden = !!why;
  fill($('upload-why'), [why, state.problem],
    () => why ? h('p.notice', {}, why) : state.problem && state.folder ? h('p.dim.sm', {}, state.problem) : []);
  drawPlace();
  drawDeleted();
  draw();
}

/** Ask for where files go and for what was deleted. */
async function look() {
  const number = asked += 1;
  let found;
  try { found = await call('upload_state'); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (!error.lost) refused(error);
    return;
  }
  if (number !== asked) return;
  state = found;
  drawState();
}

// --- deleted images -----------------------------------------------------------------------------------------------

async function remove(card) {
  const { image } = card.data, next = card.element.nextElementSibling || card.element.previousElementSibling;
  await hooks.settle();
  let deletion;
  try { deletion = await call('upload_delete', { key: hooks.key(), images: [image] }); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
    return;
  }
  hooks.forget(image);
  undoToast(deletion);
  focusOn = next?.dataset.image || '';
  await Promise.all([hooks.refresh(), look()]);
}

/** Once the cards are there again, which may be some answers later, the keyboard goes on with the next one. */
function focusNext() {
  if (focusOn === null) return;
  studio.refocus([...document.querySelectorAll('#page-data .pc')].find(
    card => card.dataset.image === focusOn)?.querySelector('.del'), $('upload-files'));
  focusOn = null;
}

function undoToast(deletion) {
  const toast = h('div.toast', { role: 'status' }, `${deletion.images[0]} is deleted. `,
    h('button.btn.s', { type: 'button', onclick: () => {
      toast.remove();
      restore(deletion);
    } }, 'Undo'));
  document.querySelector('#toasts').append(toast);
  setTimeout(() => toast.remove(), UNDO_SHOWN_MS);
}

async function restore({ folder, name }) {
  try {
    studio.toast(`${counted(await call('upload_restore', { key: hooks.key(), folder, name }), 'file')} restored.`);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
  }
  await Promise.all([hooks.refresh(), look()]);
  studio.refocus($('trash').querySelector('summary'), $('upload-files'));
}

async function empty() {
  const number = state.deleted.reduce((sum, deletion) => sum + deletion.num_images, 0);
  const answer = await studio.ask('Empty the trash?',
    `${counted(number, 'deleted image')} and their captions are removed from the disk for good.`,
    ['Remove for good', 'Keep them'], 'stop');
  if (answer !== 0) return;
  try { await call('upload_empty', { key: hooks.key() }); } catch (error) { refused(error); }
  await look();
  studio.refocus($('upload-files'));
}

function drawDeleted() {
  const number = state.deleted.reduce((sum, deletion) => sum + deletion.num_images, 0);
  $('trash').hidden = !state.deleted.length;
  fill($('trash'), state.deleted, () => [h('summary', {}, `Deleted images (${studio.count(number)})`),
    h('ul', {}, state.deleted.map(deletion => {
      const more = deletion.num_images - deletion.images.length,
        names = `${deletion.images.join(', ')}${more > 0 ? ` and ${studio.count(more)} more` : ''}`;
      return h('li', {}, h('span', {}, names, ' ', h('span.dim', {}, studio.when(deletion.at))),
        h('button.btn.s', { type: 'button', 'aria-label': `Restore ${names}`, onclick: () => restore(deletion) },
          'Restore'));
    })),
    h('button.btn.s.stop', { type: 'button', onclick: empty }, 'Empty the trash …')]);
}

// --- the card -----------------------------------------------------------------------------------------------------

const picker = (id, more, takesPaths) =>
  h(`input#${id}`, { type: 'file', multiple: true, hidden: true, ...more, onchange: event => {
    const files = [...event.target.files].map(file => [file, (takesPaths && file.webkitRelativePath) || file.name]);
    event.target.value = ''; // so that the same files can be chosen again
    add(files);
  } });

function card() {
  const files = picker('upload-input', { accept: studio.facts.upload.accept, 'aria-label': 'Images and captions' },
    false), folder = picker('upload-input-folder', { webkitdirectory: true, 'aria-label': 'Folder' }, true);
  const bar = h('div.bar#upload-bar',
    { role: 'progressbar', 'aria-label': 'Upload', 'aria-valuemin': 0, 'aria-valuemax': 100 }, h('i'));
  return root = h('section.card#card-upload', { 'aria-labelledby': 'h-upload' },
    h('div.ttl', {}, h('h2#h-upload', {}, 'Add images'), h('span.dim#upload-done')),
    h('div#upload-why'),
    h('div#upload-open', {},
      h('div.drop#upload-drop', {}, files, folder,
        h('p', {}, 'Drop images, their captions (.txt) or a folder here, or'),
        h('button.btn#upload-files', { type: 'button', onclick: () => files.click() }, 'Choose files'),
        h('button.btn#upload-folder', { type: 'button', onclick: () => folder.click() }, 'Choose a folder')),
    h('div.to', {}, h('label', { htmlFor: 'upload-to' }, 'Into'), h('select#upload-to', { onchange: drawPlace }),
      h('label#upload-new', { hidden: true }, 'called ',
        h('input#upload-name', { type: 'text', value: 'images', maxLength: 120 })))),
    h('div#upload-going', { hidden: true, role: 'group', 'aria-label': 'Upload' }, bar,
      h('div.line', {}, h('b#upload-count'), h('span.dim#upload-size'), h('span.grow'),
        h('span.both', {}, h('button.btn.s#upload-pause', { type: 'button', onclick: () => {
          batch.isPaused = !batch.isPaused;
          draw();
        } }, 'Pause'), h('button.btn.s#upload-cancel', { type: 'button', onclick: cancel }, 'Cancel'))),
    h('p.dim.sm#upload-current')),
    h('p.sr#upload-spoken', { 'aria-live': 'polite' }), h('div#upload-message'), h('div#upload-behind'),
    h('div#upload-left'), h('div#upload-results'), h('details#trash', { hidden: true }));
}

/** Take what is dropped anywhere on the screen. */
function listen(section) {
  const holdsFiles = event => [...(event.dataTransfer?.types || [])].includes('Files');
  const over = is => $('upload-drop').classList.toggle('over', is);
  section.addEventListener('dragover', event => { if (holdsFiles(event)) { event.preventDefault(); over(true); } });
  section.addEventListener('dragleave', event => { if (!section.contains(event.relatedTarget)) over(false); });
  section.addEventListener('drop', async event => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    over(false);
    if (root.hidden || $('upload-open').hidden) return;
    const { files, closed } = await dropped(event.dataTransfer);
    await add(files);
    if (closed.length) $('upload-message')
      .append(
        studio.alert(`${closed.slice(0, MOST_LISTED).join(', ')} cannot be read; choose ${closed.length > 1 ? 'them'
          : 'it'} again`));
  });
}

export const upload = {
  /** Make the card. given: {settle, refresh, forget, key} of the screen Data, whose element is `section`. */
  build(section, given) { hooks = given; listen(section); return card(); },
  /** A button that deletes the image of a card of the screen. */
  deleteButton: card => h('button.del', { type: 'button', title: 'Delete', onclick: () => remove(card) }, '✕'),
  look,
  drawn: focusNext,
  /** The screen shows this answer: text takes no images, and another folder has other deleted ones. */
  shown(data) { root.hidden = data.is_text; if (state && state.key !== data.key) look(); },
};
