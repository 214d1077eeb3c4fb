// Uploads on the screen Data: images and captions are sent in chunks, go on after a lost connection and a reload, and
// what
// was refused is named. Also deleted images, which can be restored.
// @ts-check
import * as studio from './core.js';
import { call, h, fill, say, counted } from './core.js';
import { run, cancel } from './upload-sending.js';
import { here, waiting, $, remember, left, results } from './upload-state.js';

const MOST_LISTED = 500, DRAWN_EVERY_MS = 100;
const SYSTEM_FILES = /^(\..*|thumbs\.db|desktop\.ini)$/i;
const NEW = 'new:'; // before the path of a folder that a new one is made in

// --- choosing files -----------------------------------------------------------------------------------------------

export const isOver = item => ['added', 'there', 'refused'].includes(item.state);
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
  const folder = await (here.whereTo ?? destination)(items.length);
  if (!folder) { offerAgain(files, items.length); return; }
  if (!here.isRunning && here.reported !== folder) results.length = 0; // what was said of another folder
  here.reported = folder;
  waiting.push({ folder, items, isPaused: false, isCancelled: false, trouble: '', abort: new AbortController(),
    bytes: items.reduce((sum, item) => sum + item.size, 0) });
  if (!here.isRunning) run(); else drawSoon();
}

/** Keep files whose folder was refused, so that they need not be chosen again. */
function offerAgain(files, number) {
  $('upload-message').append(h('button.btn.s#upload-again', { type: 'button', onclick: () => {
    $('upload-message').replaceChildren();
    add(files);
  } }, `Add the ${counted(number, 'file')}`));
}

/** The folder that the files go to; a new one is made, and becomes that of the form. */
async function destination() {
  if (!here.state) await look();
  const place = $('upload-to').value;
  if (!place.startsWith(NEW)) return here.state?.folder;
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

export function refused(error) {
  if (!(error instanceof studio.Refused)) throw error;
  $('upload-message').replaceChildren(studio.alert(error.message));
}

// --- what is shown of it ------------------------------------------------------------------------------------------

/** Show the progress a few times a second: a selection may have ten thousand files. */
export function drawSoon() {
  here.drawn ||= setTimeout(() => { here.drawn = 0; if (here.batch) { remember(); draw(); } }, DRAWN_EVERY_MS);
}

export function draw(sentence = '') {
  const items = here.batch?.items || [], over = items.filter(isOver).length, isBusy = !!here.batch;
  $('upload-going').hidden = !isBusy;
  if (here.batch) {
    const sent = items.reduce((sum, item) => sum + (isOver(item) ? item.size : item.sent), 0),
      current = items.filter(item => item.state === 'sending').at(0);
    const share = here.batch.bytes ? Math.min(1, sent / here.batch.bytes) : 1;
    $('upload-bar').style.setProperty('--share', `${100 * share}%`);
    $('upload-bar').setAttribute('aria-valuenow', Math.round(100 * share));
    say($('upload-count'), `${studio.count(over)} of ${counted(items.length, 'file')}`);
    say($('upload-size'),
      `${studio.size(sent)} of ${studio.size(here.batch.bytes)}${waiting.length
        ? `, ${counted(waiting.length, 'selection')} after it` : ''}`);
    say($('upload-current'), here.batch.isPaused ? 'Paused.' : here.batch.trouble || current?.path || '');
    say($('upload-pause'), here.batch.isPaused ? 'Resume' : 'Pause');
    const tenths = Math.floor(10 * share);
    // not every chunk is read aloud
    if (here.batch.tenths !== tenths || here.batch.spoken !== here.batch.trouble) say($('upload-spoken'),
      here.batch.trouble || `${over} of ${items.length} files are sent.`);
    Object.assign(here.batch, { tenths, spoken: here.batch.trouble });
  } else if (sentence) say($('upload-spoken'), sentence);
  if (sentence) say($('upload-done'), sentence);
  if (isBusy) say($('upload-done'), '');
  drawLeft();
  drawResults();
}

function drawLeft() {
  const found = here.batch ? null : left();
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
    masked = results.filter(item => item.mask), alone = results.filter(item => item.isAlone);
  const part = (items, title, text) => items.length
    ? [h('b', {}, title), h('ul', {}, items.slice(0, MOST_LISTED).map(item => h('li', {}, text(item))),
      more(items.length))] : null;
  fill($('upload-results'), [bad.length, renamed.length, masked.length, alone.length],
    () => !results.length ? [] : h('div.notice', { role: 'group', 'aria-label': 'Notes on the upload' },
      part(bad, `${counted(bad.length, 'file was', 'files were')} not taken`,
        item => [h('b', {}, item.path), ': ', without(item)]),
      part(renamed, `${counted(renamed.length, 'file has', 'files have')} another name`,
        item => [h('b', {}, item.path), ' ', item.note]),
      part(masked,
        `${counted(masked.length, 'image has',
          'images have')} a mask already, perhaps that of an earlier image: look at it with Mask on the card`,
          item => [h('b', {}, item.name), ': ', item.mask]),
      part(alone, `${counted(alone.length, 'text has', 'texts have')} no image of ${
        alone.length === 1 ? 'its name and is' : 'their names and are'} no caption yet`, item => h('b', {}, item.path)),
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
  const usable = here.state && !here.state.closed && !here.state.problem,
    options = [...(usable ? [['', here.state.folder]] : []),
      ...Object.keys(here.state?.roots || {}).map(place => [NEW + place, `A new folder in ${place}`])];
  const chosen = $('upload-to').value;
  if (fill($('upload-to'), options, () => options.map(([value, text]) => h('option', { value }, text)))) {
    $('upload-to').value = options.some(([value]) => value === chosen) ? chosen : options[0]?.[0] ?? '';
  }
  const place = $('upload-to').value, name = $('upload-name');
  $('upload-new').hidden = !place.startsWith(NEW);
  if (place.startsWith(NEW) && name.value === here.suggested) // nothing was typed
    name.value = here.suggested = here.state.roots[place.slice(NEW.length)];
}

function drawState() {
  const hasPlace = Object.keys(here.state.roots).length > 0;
  const why = here.state.closed || (here.state.problem && !hasPlace ? here.state.problem : '');
  $('upload-open').hidden = !!why;
  fill($('upload-why'), [why, here.state.problem],
    () => why ? h('p.notice', {}, why) : here.state.problem && here.state.folder ? h('p.dim.sm', {}, here.state.problem)
      : []);
  drawPlace();
  drawDeleted();
  draw();
}

/** Ask for where files go and for what was deleted. */
async function look() {
  const number = here.asked += 1;
  let found;
  try { found = await call('upload_state'); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (!error.lost) refused(error);
    return;
  }
  if (number !== here.asked) return;
  here.state = found;
  drawState();
}

// --- deleted images -----------------------------------------------------------------------------------------------

async function remove(card) {
  const { image } = card.data, next = card.element.nextElementSibling || card.element.previousElementSibling;
  await here.hooks.settle();
  let deletion;
  try { deletion = await call('upload_delete', { key: here.hooks.key(), images: [image] }); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
    return;
  }
  here.hooks.forget(image);
  studio.toast(`${deletion.images[0]} is deleted. `, false, () => restore(deletion));
  here.focusOn = next?.dataset.image || '';
  await Promise.all([here.hooks.refresh(), look()]);
}

/** Once the cards are there again, which may be some answers later, the keyboard goes on with the next one. */
function focusNext() {
  if (here.focusOn === null) return;
  studio.refocus([...document.querySelectorAll('#page-data .pc')].find(
    card => card.dataset.image === here.focusOn)?.querySelector('.del'), $('upload-files'));
  here.focusOn = null;
}

async function restore({ folder, name }) {
  try {
    studio.toast(`${counted(await call('upload_restore', { key: here.hooks.key(), folder, name }), 'file')} restored.`);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
  }
  await Promise.all([here.hooks.refresh(), look()]);
  studio.refocus($('trash').querySelector('summary'), $('upload-files'));
}

async function empty() {
  const number = here.state.deleted.reduce((sum, deletion) => sum + deletion.num_images, 0);
  const answer = await studio.ask('Empty the trash?',
    `${counted(number, 'deleted image')} and their captions are removed from the disk for good.`,
    ['Remove for good', 'Keep them'], 'stop');
  if (answer !== 0) return;
  try { await call('upload_empty', { key: here.hooks.key() }); } catch (error) { refused(error); }
  await look();
  studio.refocus($('upload-files'));
}

function drawDeleted() {
  const number = here.state.deleted.reduce((sum, deletion) => sum + deletion.num_images, 0);
  $('trash').hidden = !here.state.deleted.length;
  fill($('trash'), here.state.deleted, () => [h('summary', {}, `Deleted images (${studio.count(number)})`),
    h('ul', {}, here.state.deleted.map(deletion => {
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
  return here.root = h('section.card#card-upload', { 'aria-labelledby': 'h-upload' },
    h('div.ttl', {}, h('h2#h-upload', {}, 'Add images'), h('span.dim#upload-done')),
    h('div#upload-why'),
    h('div#upload-open', {},
      h('div.drop#upload-drop', {}, files, folder,
        h('p', {}, 'Drop images, their captions (.txt) or a folder here, or'),
        h('button.btn#upload-files', { type: 'button', onclick: () => files.click() }, 'Choose files'),
        h('button.btn#upload-folder', { type: 'button', onclick: () => folder.click() }, 'Choose a folder')),
    h('div.to', {}, h('label', { htmlFor: 'upload-to' }, 'Into'), h('select#upload-to', { onchange: drawPlace }),
      h('label#upload-new', { hidden: true }, 'called ',
        h('input#upload-name', { type: 'text', value: here.suggested, maxLength: 120,
          oninput: () => $('upload-message').querySelector('[role=alert]')?.remove() })))), // a refusal of another name
    h('div#upload-going', { hidden: true, role: 'group', 'aria-label': 'Upload' }, bar,
      h('div.line', {}, h('b#upload-count'), h('span.dim#upload-size'), h('span.grow'),
        h('span.both', {}, h('button.btn.s#upload-pause', { type: 'button', onclick: () => {
          here.batch.isPaused = !here.batch.isPaused;
          draw();
        } }, 'Pause'), h('button.btn.s#upload-cancel', { type: 'button', onclick: cancel }, 'Cancel'))),
    h('p.dim.sm#upload-current')),
    h('p.sr#upload-spoken', { 'aria-live': 'polite' }), h('div#upload-message'), h('div#upload-behind'),
    h('div#upload-left'), h('div#upload-results'), h('details#trash', { hidden: true }));
}

const listening = new Set(); // screens on which files can be dropped anywhere

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
    if (here.root.hidden || $('upload-open').hidden) return;
    await addDropped(await dropped(event.dataTransfer));
  });
}

async function addDropped({ files, closed }) {
  await add(files);
  if (closed.length) $('upload-message')
    .append(
      studio.alert(`${closed.slice(0, MOST_LISTED).join(', ')} cannot be read; choose ${closed.length > 1 ? 'them'
        : 'it'} again`));
}

export const upload = {
  /** Take what the screen Data gives: {settle, refresh, forget, key}. */
  connect(given) { here.hooks = given; },
  /**
   * Put the card, of which there is one, into the screen that is shown.
   * @param {HTMLElement} place
   * @param {((number: number) => Promise<string>) | null} whereTo Gives the folder for so many files; null: the card
   *   has a list of folders.
   */
  mount(place, whereTo = null) {
    here.root ??= card();
    here.whereTo = whereTo;
    if (here.root.parentElement === place) return;
    place.append(here.root);
    if (whereTo) here.root.hidden = false; // Data hides it for texts
    const section = place.closest('.page');
    if (!listening.has(section)) listen(section);
    listening.add(section);
  },
  isBusy: () => here.isRunning,
  dropped,
  add: addDropped,
  /** A button that deletes the image of a card of the screen. */
  deleteButton: card => h('button.del', { type: 'button', title: 'Delete', onclick: () => remove(card) }, '✕'),
  look,
  drawn: focusNext,
  /** The screen shows this answer: text takes no images, and another folder has other deleted ones. */
  shown(data) { here.root.hidden = data.is_text; if (here.state && here.state.key !== data.key) look(); },
};
