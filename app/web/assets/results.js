// What is done with a run's result: a drawing with it, an upload to the hub. Each is a dialog.
// @ts-check
import * as studio from './core.js';
import { h, call, fill } from './core.js';

const AGAIN_MS = 1000;

/** A dialog with a title, its parts and a Close button. It removes itself when it is closed. */
function dialog(id, title, ...parts) {
  const element = h(`dialog.dialog.roomy#${id}`, { 'aria-label': title, onclose: () => element.remove() },
    h('h2', {}, title), ...parts);
  document.body.append(element);
  element.showModal();
  return element;
}

const closeButton = () =>
  h('button.btn', { type: 'button', onclick: event => event.target.closest('dialog').close() }, 'Close');

/** Ask again every second while a dialog is open, until the answer says that nothing runs. */
async function follow(element, question, show) {
  while (element.isConnected) {
    let answer = /** @type {any} */ (null);
    try { answer = await question(); } catch (error) {
      if (!(error instanceof studio.Refused) || !error.lost) throw error; // the page's server may come back
    }
    if (!element.isConnected) return;
    if (answer) show(answer);
    if (answer && !(answer.state || answer).is_running) return;
    await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
  }
}

/** Run an action of a dialog and show what was refused at a place in it. Buttons that are given wait meanwhile. */
async function tried(place, action, ...buttons) {
  place.replaceChildren();
  for (const button of buttons) button.disabled = true;
  try { await action(); } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    place.replaceChildren(studio.alert(error.message));
  } finally {
    for (const button of buttons) button.disabled = false;
    studio.refocus(...buttons);
  }
}

/** Follow what runs after an attempt to start it, also where that is another window's; a refusal is shown meanwhile. */
async function after(refused, place, watch) {
  if (refused && !(refused instanceof studio.Refused)) throw refused;
  if (refused) place.replaceChildren(studio.alert(refused.message));
  await watch();
}

/** What a process does, with a button that ends it. */
const running = (sentence, run, kind) =>
  h('div.notice.running', {}, h('p.grow', {}, sentence),
    h(`button.btn.s#stop-${kind}`, { type: 'button', onclick: async event => {
      event.target.disabled = true;
      await call('result_stop', { run, kind }).catch(error => {
        if (!(error instanceof studio.Refused)) throw error;
        studio.toast(error.message, true);
      });
    } }, 'Stop'));

function drawing(found) {
  const side = (name, title) =>
    h('figure', {}, found.kind === 'text' || found.texts[name]
      ? h('pre.code.written', { tabIndex: 0 }, found.texts[name])
      : found.images[name] ? h('img.image', { src: found.images[name], alt: `${title}: ${found.prompt}` })
      : h('div.missing', {}, 'missing'), h('figcaption.sm', {}, title));
  return h('li', {}, h('p', {}, h('b', {}, found.prompt),
    h('span.dim.sm', {}, ` seed ${found.seed}, ${studio.duration(found.seconds)}, ${studio.when(found.time)}`)),
    h('div.pair', {}, side('base', 'without'), side('trained', 'with')));
}

/** The number that was typed; null for none. */
function whole(text, refusal) {
  if (!text.trim()) return null;
  if (!/^\d{1,15}$/.test(text.trim())) throw new studio.Refused(refusal);
  return Number(text);
}

/** Width and height that were typed, as in "64 x 96"; null for none. */
function sides(text) {
  if (!text.trim()) return null;
  const found = /^(\d{1,6})\s*[x×*, ]\s*(\d{1,6})$/i.exec(text.trim());
  if (!found)
    throw new studio.Refused(
      'Size: write width x height in pixels, as 512 x 768, or leave it empty for that of the samples.');
  return [Number(found[1]), Number(found[2])];
}

export async function draw(run, isText) {
  const prompt = h('textarea#draw-prompt', { rows: 2 }),
    seed = h('input#draw-seed', { type: 'text', inputMode: 'numeric' }), size = h('input#draw-size', { type: 'text' });
  const about = h('p.sm', {},
    `${isText ? 'A text that continues the prompt, from the same seed'
      : 'From the same noise'}, with and without what was trained. It takes a free GPU, or a while on the CPU.`);
  const sizeField = h('div', {}, h('label.sm', { htmlFor: 'draw-size' }, 'Size'), size);
  const place = h('div'), state = h('div#draw-state', { role: 'status' }), list = h('ul.drawings#drawings');
  const show = found => {
    fill(state, found.state,
      () => found.state.is_running
        ? running(`${isText ? 'Writing' : 'Generating'} twice, with and without. The model is loaded first.`, run,
          'drawing')
      : found.state.failed ? studio.alert(found.state.text) : found.state.is_stopped ? studio.note(found.state.text)
      : []);
    fill(list, found.drawings.map(one => one.time), () => found.drawings.map(drawing));
  };
  const watch = () => follow(element, () => call('result_drawings', { run }), show);
  const button = h('button.btn.main#draw', { type: 'submit' }, isText ? 'Write' : 'Draw');
  const draw = () => tried(place, async () => {
    const values = { prompt: prompt.value,
      seed: whole(seed.value, 'Seed: write a whole number, or leave it empty for that of the samples.'),
      size: sides(size.value) };
    const refused = await call('result_draw', { run, ...values }).then(() => null, error => error);
    await after(refused, place, watch);
  }, button);
  const form = h('form', { onsubmit: event => {
    event.preventDefault();
    if (!button.disabled) draw();
  } }, h('label.sm', { htmlFor: 'draw-prompt' }, 'Prompt'), prompt,
    h('div.fields', {}, h('div', {}, h('label.sm', { htmlFor: 'draw-seed' }, 'Seed'), seed), sizeField), place, state,
    h('div.row-end', {}, closeButton(), button));
  const element = dialog('draw-dialog', isText ? 'Write with it' : 'Draw with it', about, form, list);
  await tried(place, async () => {
    const found = await call('result_drawings', { run });
    if (!prompt.value) prompt.value = found.prompts[0] || '';
    seed.placeholder = String(found.seed);
    sizeField.hidden = found.is_text;
    if (found.size) size.placeholder = found.size.join(' x ');
    show(found);
    if (found.state.is_running) await watch();
  }, button);
}

export async function upload(run) {
  const repo = h('input#upload-repo',
    { type: 'text', placeholder: 'your-name/model-name', spellcheck: false, autocomplete: 'off' });
  const isPrivate = h('input#upload-private', { type: 'checkbox', checked: true }),
    overwrites = h('input#upload-overwrites', { type: 'checkbox' });
  const place = h('div'), question = h('div#upload-question'), state = h('div#upload-state', { role: 'status' });
  const values = () =>
    ({ run, repo: repo.value.trim(), is_private: isPrivate.checked, overwrites: overwrites.checked });
  let shown = /** @type {any} */ (null); // what the question is about
  const forget = () => { shown = null; agree.hidden = true; question.replaceChildren(); };
  const show = found => fill(state, found,
    () => found.is_running ? running('Uploading.', run, 'upload') : !found.text ? [] : found.failed
      ? studio.alert(found.text)
    : found.is_stopped
    ? studio.note(`${found.text} The repository may have been made; it has either all files or none.`)
      : h('p.notice.ok', {}, 'Uploaded: ',
        h('a', { href: found.text, target: '_blank', rel: 'noopener noreferrer' }, found.text)));
  const watch = () => follow(element, () => call('result_upload_state', { run }), show);
  const look = h('button.btn#upload-look', { type: 'submit' }, 'Show what is uploaded');
  const agree = h('button.btn.main#upload-agree',
    { type: 'button', hidden: true, onclick: () => tried(place, async () => {
      const agreed = shown;
      forget();
      fill(state, null, () => []);
      const refused = await call('result_start_upload', agreed).then(() => null, error => error);
      await after(refused, place, watch);
    }, look) }, 'Upload this');
  const ask = () => tried(place, async () => {
    forget();
    const asked = values(), found = await call('result_upload_question', asked);
    if (JSON.stringify(asked) !== JSON.stringify(values())) return; // was changed meanwhile
    question.replaceChildren(h('pre.code', { tabIndex: 0 }, found.text),
      h('details', {}, h('summary', {}, 'Model card'), h('pre.code', { tabIndex: 0 }, found.card)));
    shown = asked;
    agree.hidden = false;
  }, look);
  for (const input of [repo, isPrivate, overwrites]) input.addEventListener('input', forget);
  const form = h('form', { onsubmit: event => {
    event.preventDefault();
    if (!look.disabled) ask();
  } }, h('label.sm', { htmlFor: 'upload-repo' }, 'Repository'), repo,
    h('label.check-line', {}, isPrivate, ' private: only you see it'),
    h('label.check-line', {}, overwrites, ' replace files of an existing repository'),
    question, place, state, h('div.row-end', {}, closeButton(), look, agree));
  const element = dialog('upload-dialog', 'Upload to the Hugging Face hub',
    h('p.sm', {}, 'The exported files, a model card and the newest samples. Log in first: ',
      h('code', {}, 'hf auth login'), ' in a terminal, with a token that may write.'), form);
  await tried(place, async () => {
    const found = await call('result_upload_state', { run });
    show(found);
    if (found.is_running) await tried(place, watch, look);
  }); // without `look`: Enter may be pressed at once
}
