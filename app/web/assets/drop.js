// The screen Drop and name: pictures and a word for them become a run. All that is proposed is a line to be changed.
// @ts-check
import * as studio from './core.js';
import { call, h, fill, counted, link } from './core.js';
import { $, again, current, newId, say } from './drop-state.js';
import { drawLines, lines, settled, takeAll, writer } from './drop-lines.js';
import { upload } from './upload.js';

let makeId = '', isAsking = false, isOwed = false;

// --- pictures and a word ------------------------------------------------------------------------------------------

/** The folder for files that were dropped or chosen: they wait for the word, unless there is a folder. */
function whereTo(number) {
  if (current.folder) return Promise.resolve(current.folder);
  current.numFiles += number;
  const place = current.place ??= new Promise(resolve => { current.found = resolve; });
  drawFirst();
  if (current.isNamed) name(); else $('word').focus();
  return place;
}

/** Make the folder that the word names. The files that wait go into it. */
async function name() {
  const word = $('word').value.trim();
  current.isNamed = Boolean(word);
  if (word && !current.numFiles) {
    say('');
    fill($('first-note'), 'wait', () => 'Now the pictures: drop them here, or choose them above.');
    return;
  }
  makeId ||= newId();
  $('go').disabled = true;
  try {
    const made = await again('drop_make', { id: makeId, word });
    say('');
    current.found?.(made.folder);
    Object.assign(current, { numFiles: 0, found: null, place: null, isNamed: false, writer: null, state: null,
      isArriving: true });
    makeId = '';
    $('word').value = '';
    offerFormer(made.undo);
    studio.go('drop', made.folder);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    makeId = ''; // the next word may be another one
    current.isNamed = false;
    say(error.message);
    $('word').focus();
  } finally {
    $('go').disabled = false;
  }
}

function drawFirst() {
  fill($('first-note'), current.numFiles, () => current.numFiles
    ? `${counted(current.numFiles, 'file')} chosen. One word for what they show, then Go on.`
    : 'A name, a subject or a style. It becomes the trigger word and the name of the run.');
}

/** What New run had before can be brought back. */
function offerFormer(undo) {
  fill($('former'), undo, () => !undo ? [] : h('div.notice', { role: 'status' },
    'New run had other settings, which these take the place of. ',
    h('button.btn.s', { type: 'button', onclick: async event => {
      await studio.act(event.currentTarget, $('said'),
        async () => { await call('new_restore', { ...undo, is_whole: true }); });
      fill($('former'), null, () => []);
      studio.go('new');
    } }, 'Bring them back')));
}

// --- start --------------------------------------------------------------------------------------------------------

async function start() {
  if ($('start').disabled) return;
  const id = current.starting = newId(), { folder } = current;
  $('start').disabled = true;
  try {
    say('');
    await settled();
    follow(await again('drop_start', { id, folder, writer: writer() }));
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    current.starting = '';
    say(error.message);
  }
  await refresh();
}

/** Go to the run that was started here. */
function follow(pending) {
  if (!pending || pending.is_waiting || pending.id !== current.starting) return;
  current.starting = '';
  if (!pending.run) return; // it says why, and Start can be pressed again
  if (studio.shown === 'drop') studio.go('runs', pending.run);
  call('drop_forget', { id: pending.id }).catch(error => { if (!(error instanceof studio.Refused)) throw error; });
}

function drawPending() {
  const { pending } = current.state, waits = !pending ? [] : [
    pending.captioner && `model that writes captions: ${pending.captioner.map(studio.size).join(' of ')}`,
    pending.job && `captions: ${pending.job.answered} of ${pending.job.total}`,
    pending.download && `model: ${pending.download.map(studio.size).join(' of ')}`].filter(Boolean);
  fill($('pending'), [pending, waits], () => !pending ? [] : pending.problem
    ? h('div.notice.bad', { role: 'alert' },
      h('p', {}, h('b', {}, `${pending.name} ${pending.is_uncertain ? 'may have started' : 'was not started'}. `),
        pending.problem),
      h('button.btn.s', { type: 'button', onclick: forget }, 'Dismiss'))
    : pending.run
    ? h('div.notice.ok', { role: 'status' }, h('p', {}, `${pending.name} has started. `,
      h('a', { href: link('runs', pending.run) }, 'Watch it')))
    : h('div.notice', { role: 'status' }, h('p', {}, h('b', {}, `${pending.name} starts by itself`),
      ` when this is done; the page may be closed. ${waits.join(' · ')}`),
      h('button.btn.s#drop-forget', { type: 'button', onclick: forget }, 'Do not start it')));
}

async function forget(event) {
  await studio.act(event.currentTarget, $('said'), async () => {
    await call('drop_forget', { id: current.state.pending.id });
  });
  current.starting = '';
  await refresh();
}

// --- the screen ---------------------------------------------------------------------------------------------------

function draw() {
  const { state } = current, isOwn = !!state?.lines;
  current.root.dataset.step = current.folder ? 'lines' : 'first';
  $('first').hidden = !!current.folder;
  $('card').hidden = $('bar').hidden = !isOwn;
  if (!state) return;
  drawPending();
  fill($('other'), [state.folder, current.folder, state.folder_is_own], () => other(state));
  if (!isOwn) return;
  current.lines = state.lines;
  drawLines();
  if (current.isArriving) studio.refocus($('writer')); // the word's input is hidden now
  current.isArriving = false;
  const { errors, images } = state.lines, wrong = upload.isBusy() ? [] : errors,
    isFull = images.is_complete && images.count > 0;
  fill($('why'), [wrong, isFull, upload.isBusy(), writer()], () => upload.isBusy() ? 'The pictures are on their way.'
    : wrong.length ? h('ul', {}, wrong.map(({ label, text }) => h('li.bad-text', {}, label ? `${label}: ` : '', text)))
    : !isFull ? 'There are no pictures yet.' : writer() ? 'Captions are written first.' : '');
  $('rehearse').disabled = !isFull || upload.isBusy();
  $('start').disabled = !isFull || wrong.length > 0 || upload.isBusy() || !!state.pending?.is_waiting
    || !!current.starting;
}

/** The way to pictures that are in the form and not shown here. */
function other({ folder, folder_is_own: isOwn }) {
  if (folder === current.folder || (!isOwn && !current.folder)) return [];
  if (!isOwn) return h('div.notice', {}, 'These pictures are not in New run any more. ',
    h('a', { href: link('drop') }, 'Drop and name others'));
  const [before, after] = current.folder
    ? ['Another window has named other pictures, which are in New run now: ',
      '. Those of this window stay in their folder.'] : ['In New run are the pictures of ', '.'];
  return h('div.notice', { role: 'status' }, before, h('a', { href: link('drop', folder) }, folder), after);
}

/** Ask for what is proposed, and show it; once more after an answer that is on its way, which is of before. */
export async function refresh() {
  if (isAsking) { isOwed = true; return; }
  isAsking = true;
  try {
    do {
      isOwed = false;
      const { folder } = current, state = await call('drop_state', { folder, known: current.state?.key || '' });
      if (folder !== current.folder) { isOwed = true; continue; }
      if (state) current.state = state;
      follow(current.state.pending);
      draw();
    } while (isOwed);
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (!error.lost) say(error.message);
  } finally {
    isAsking = false;
  }
}

async function loadModels() {
  try { current.models = await call('drop_models'); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
  }
  if (current.state) draw();
}

/** Take files that were dropped on another screen. */
export async function takeDrop(transfer) {
  const found = upload.dropped(transfer); // it is empty once the screen has changed
  const arrived = new Promise(resolve => addEventListener('hashchange', resolve, { once: true })); // after the frame
  studio.go('drop');
  await arrived;
  await upload.add(await found);
}

addEventListener('studio-uploading', () => { if (studio.shown === 'drop') draw(); });
addEventListener('studio-uploaded', async () => {
  if (studio.shown !== 'drop') return;
  await call('new_read_again').catch(error => { if (!(error instanceof studio.Refused)) throw error; });
  await refresh();
});

studio.screens.drop = {
  title: 'Drop and name',
  build(section) {
    current.root = section;
    section.append(
      h('div.head', {}, h('h1', {}, 'Drop and name'), h('span.grow'),
        h('a.btn#drop-new', { href: link('drop') }, 'Other pictures'),
        h('a.btn#drop-all', { href: link('new'), onclick: async event => {
          if (!current.state?.lines) return;
          event.preventDefault();
          try { await takeAll(); } catch (error) {
            if (!(error instanceof studio.Refused)) throw error;
            say(error.message);
            return;
          }
          studio.go('new');
        } }, 'All settings')),
      h('div#drop-pending'), h('div#drop-other'), h('div#drop-former'), h('div#drop-upload'),
      h('form.card#drop-first', { onsubmit: event => { event.preventDefault(); name(); } },
        h('div.ask', {}, h('label', {}, h('span.l', {}, 'One word for what they are'),
          h('input#drop-word', { type: 'text', autocomplete: 'off', spellcheck: false, placeholder: 'milo',
            'aria-describedby': 'drop-first-note', oninput: () => { current.isNamed = false; } })),
        h('button.btn.main#drop-go', { type: 'submit' }, 'Go on')),
        h('p.sm.dim#drop-first-note', { 'aria-live': 'polite' }),
        h('p.sm#drop-demo', {}, 'No pictures at hand? ', h('a', { href: link('new') }, 'Try the quickstart'),
          ', which brings its own and a small model.')),
      h('section.card#drop-card', { 'aria-label': 'Proposals', hidden: true }, lines()),
      h('div#drop-said'),
      h('div.card.go#drop-bar', { hidden: true },
        h('button.btn.main#drop-start', { type: 'button', disabled: true, onclick: start }, 'Start'),
        h('div#drop-why', { role: 'status' })));
    studio.shortcut('Ctrl Enter', 'Start the run', start, 'drop');
    drawFirst();
    loadModels();
  },
  async show([, folder = '']) {
    if (folder !== current.folder) current.state = null;
    current.folder = folder;
    upload.mount($('upload'), whereTo);
    drawFirst();
    draw();
    if (!folder) $('word').focus({ preventScroll: true });
    await Promise.all([refresh(), upload.look()]);
  },
  async tick() { if (!upload.isBusy()) await refresh(); },
};
