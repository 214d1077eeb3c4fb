// What is done with a run's result: a drawing, a film, a run that goes on from it, an upload. Each is a dialog.
// @ts-check
import * as studio from './core.js';
import { h, call, fill } from './core.js';
import { chooser } from './results-references.js';

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
export async function follow(element, question, show) {
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

/** A drawing: its pictures in one row; where there are several strengths, in a row for each checkpoint. */
function drawing(found) {
  const [base, ...others] = found.pictures, strengths = new Set(others.map(one => one.strength));
  const sources = [...new Set(others.map(one => one.source))], isPair = others.length === 1;
  const rows = strengths.size > 1 && sources.length > 1
    ? sources.map(source => [base, ...others.filter(one => one.source === source)]) : [found.pictures];
  return h('li', {}, h('p', {}, h('b', {}, found.prompt),
    h('span.dim.sm', {}, ` seed ${found.seed}, ${studio.duration(found.seconds)}, ${studio.when(found.time)}`)),
    studio.references(found.references),
    rows.map(row => h('div.pictures', { style: { '--columns': Math.min(row.length, 4) } },
      row.map(one => picture(one, found.prompt, isPair)))));
}

function picture(one, prompt, isPair) {
  const per = one.strength === 1 ? '' : `, ${Math.round(one.strength * 100)} %`;
  const title = !one.strength ? 'without' : isPair && !per ? `with, ${one.source}` : `${one.source}${per}`;
  return h('figure', {}, one.is_text || one.text ? h('pre.code.written', { tabIndex: 0 }, one.text)
    : one.image ? h('img.image', { src: one.image, alt: `${title}: ${prompt}` })
    : h('div.missing', {}, 'missing'), h('figcaption.sm', {}, title));
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

/** The strengths that were typed in per cent, as shares; [1] for none. */
function shares(text) {
  const words = text.replace(/%/g, ' ').split(/[\s,;]+/).filter(Boolean);
  if (words.some(word => !/^\d{1,3}$/.test(word)))
    throw new studio.Refused('Strength: write whole per cents, as 50, 100, 150.');
  return words.length ? [...new Set(words.map(word => Number(word) / 100))].sort((a, b) => a - b) : [1];
}

/** What the checkpoints to draw with are chosen from; `chosen` are marked, else the newest. */
function checkpointBoxes(checkpoints, chosen) {
  return checkpoints.map(one => h('label.check-line', {},
    h('input', { type: 'checkbox', value: one.step,
      checked: chosen.length ? chosen.includes(one.step) : one.is_newest }),
    ` step ${studio.count(one.step)}${one.is_newest ? ', newest' : ''}${one.is_best ? ', best' : ''}`));
}

const progressOf = share =>
  (share === null ? 'The model is loaded first.' : `${Math.floor(share * 100)} % done.`);

/** Draw with checkpoints of a run; `steps` are chosen at first, without any the newest. */
export async function draw(run, isText, steps = []) {
  const prompt = h('textarea#draw-prompt', { rows: isText ? 2 : 3 }),
    seed = h('input#draw-seed', { type: 'text', inputMode: 'numeric' }), size = h('input#draw-size', { type: 'text' }),
    strength = h('input#draw-strength', { type: 'text', placeholder: '100' });
  const about = h('p.sm', {},
    `${isText ? 'A text that continues the prompt, from the same seed'
      : 'From the same noise'}, without and with what was trained. It takes a free GPU, or a while on the CPU.`);
  const sizeField = h('div', {}, h('label.sm', { htmlFor: 'draw-size' }, 'Size'), size);
  const boxes = h('div.boxes'),
    boxesField = h('fieldset#draw-checkpoints', {}, h('legend.sm', {}, 'Checkpoints'), boxes);
  const shown = chooser(run, caption => { prompt.value = caption; });
  const place = h('div'), state = h('div#draw-state', { role: 'status' }), list = h('ul.drawings#drawings');
  const show = found => {
    fill(state, found.state,
      () => found.state.is_running
        ? running(`${isText ? 'Writing' : 'Drawing'}: ${progressOf(found.state.share)}`, run, 'drawing')
      : found.state.failed ? studio.alert(found.state.text) : found.state.is_stopped ? studio.note(found.state.text)
      : []);
    fill(list, found.drawings.map(one => [one.time, one.prompt]), () => found.drawings.map(drawing));
  };
  const watch = () => follow(element, () => call('result_drawings', { run }), show);
  const button = h('button.btn.main#draw', { type: 'submit' }, isText ? 'Write' : 'Draw');
  const draw = () => tried(place, async () => {
    const lines = prompt.value.split('\n').filter(line => line.trim());
    const values = { prompts: isText || !lines.length ? [prompt.value] : lines,
      seed: whole(seed.value, 'Seed: write a whole number, or leave it empty for that of the samples.'),
      size: sides(size.value), strengths: shares(strength.value),
      checkpoints: [...boxes.querySelectorAll('input:checked')].map(box => Number(box.value))
        .sort((a, b) => a - b), ...shown.values() };
    if (boxes.childElementCount && !values.checkpoints.length)
      throw new studio.Refused('Checkpoints: choose at least one.');
    const refused = await call('result_draw', { run, ...values }).then(() => null, error => error);
    await after(refused, place, watch);
  }, button);
  const form = h('form', { onsubmit: event => {
    event.preventDefault();
    if (!button.disabled) draw();
  } }, h('label.sm', { htmlFor: 'draw-prompt' }, isText ? 'Prompt' : 'Prompts, one a line'), prompt, shown.element,
    boxesField,
    h('div.fields', {},
      h('div', {}, h('label.sm', { htmlFor: 'draw-strength' }, 'Strength in %, such as 50, 100, 150'), strength),
      h('div', {}, h('label.sm', { htmlFor: 'draw-seed' }, 'Seed'), seed), sizeField), place, state,
    h('div.row-end', {}, closeButton(), button));
  const element = dialog('draw-dialog', isText ? 'Write with it' : 'Draw with it', about, form, list);
  await tried(place, async () => {
    const [found, checkpoints] = await Promise.all(
      [call('result_drawings', { run }), call('result_checkpoints', { run })]);
    if (!prompt.value) prompt.value = found.prompts[0] || '';
    seed.placeholder = String(found.seed);
    sizeField.hidden = found.is_text;
    boxesField.hidden = checkpoints.length < 2;
    boxes.append(...checkpointBoxes(checkpoints, steps));
    shown.offer(found);
    if (found.size) size.placeholder = found.size.join(' x ');
    show(found);
    if (found.state.is_running) await watch();
  }, button);
}

/** Let a new run go on from the checkpoint of a step. settings: the run's own, {lr, steps}. */
export function branch(run, step, settings) {
  const lr = h('input#branch-lr', { type: 'text', inputMode: 'decimal', value: settings.lr, required: true }),
    steps = h('input#branch-steps', { type: 'number', min: step + 1, step: 1, required: true,
      value: settings.steps > step ? settings.steps : step + (settings.steps || 1) });
  const place = h('div'), button = h('button.btn.main#branch', { type: 'submit' }, 'Continue');
  const go = () => tried(place, async () => {
    const wanted = { lr: lr.value.trim(), steps: Math.round(Number(steps.value)) };
    const made = await call('run_branch', { name: run, step, ...wanted });
    element.close();
    studio.go('runs', made);
  }, button);
  const form = h('form', { onsubmit: event => {
    event.preventDefault();
    if (!button.disabled) go();
  } }, h('div.fields', {}, h('div', {}, h('label.sm', { htmlFor: 'branch-lr' }, 'Learning rate'), lr),
    h('div', {}, h('label.sm', { htmlFor: 'branch-steps' }, 'Train until step'), steps)), place,
    h('div.row-end', {}, closeButton(), button));
  const element = dialog('branch-dialog', `Continue from step ${studio.count(step)}`,
    h('p.sm', {}, 'A new run begins with a copy of this checkpoint, with the charts and samples until then. This run ' +
      'stays as it is. With the same settings it would train the same again.'), form);
}

const FILM_FILES = { loop: 'Loop, WebP', video: 'Video, MP4', sheet: 'Sheet, JPEG' };

/** The film of a prompt: its loop, its sheet and their files. */
export function filmed(run, one) {
  const place = file => ['', 'runs', run, 'film', file.name].map(encodeURIComponent).join('/');
  if (one.problem) return h('li', {}, h('p', {}, h('b', {}, one.prompt)), studio.alert(one.problem));
  return h('li.filmed', {}, h('p', {}, h('b', {}, one.prompt || '(no prompt)'),
    h('span.dim.sm', {}, ` prompt ${one.number}, ${one.num_frames} samples`)),
  h('img.loop', { src: place(one.files.loop), alt: `Film of prompt ${one.number}: ${one.prompt}` }),
  h('img.sheet', { src: one.sheet, alt: `Before, during and after training: ${one.prompt}` }),
  h('p.links', {}, Object.entries(FILM_FILES).filter(([kind]) => one.files[kind]).map(([kind, text]) =>
    h('a.btn.s', { href: place(one.files[kind]), download: '' }, text,
      h('span.dim', {}, ` ${studio.size(one.files[kind].size)}`)))));
}

/** Show the film of a run. It is made first where there is none, or there are samples that are not in it. */
export async function film(run) {
  const place = h('div'), state = h('div#film-state', { role: 'status' }), list = h('ul.drawings#films'),
    folder = h('code');
  const show = found => {
    studio.say(folder, found.folder);
    fill(state, found.state, () => found.state.is_running ? running('Making the film.', run, 'film')
      : found.state.failed ? studio.alert(found.state.text) : found.state.is_stopped ? studio.note(found.state.text)
      : []);
    // While it is made, its files change: they are shown when it is done.
    if (!found.state.is_running) fill(list, found, () => [found.prompts.map(one => filmed(run, one)),
      found.notes.map(note => h('li.sm.dim', {}, note))]);
  };
  const watch = () => follow(element, () => call('result_show_film', { run }), show);
  const make = () => tried(place, async () => {
    const price = Number(studio.kept('price')) || null;
    const refused = await call('result_make_film', { run, price }).then(() => null, error => error);
    await after(refused, place, watch);
  }, button);
  const button = h('button.btn#film-make', { type: 'button', onclick: make }, 'Make it again');
  const element = dialog('film-dialog', 'Film', h('p.sm', {}, 'For each prompt a loop of its samples, all from the ' +
    'same noise, and a sheet of some. The report shows the sheets, and what you publish has both.'), place, state,
    list, h('p.sm.dim', {}, 'In ', folder), h('div.row-end', {}, closeButton(), button));
  await tried(place, async () => {
    const found = await call('result_show_film', { run });
    if (found.state.is_running) { show(found); await watch(); }
    else if (found.is_old) await make();
    else show(found);
  }, button);
}

export async function upload(run) {
  const repo = h('input#upload-repo',
    { type: 'text', placeholder: 'your-name/model-name', spellcheck: false, autocomplete: 'off' });
  const isPrivate = h('input#upload-private', { type: 'checkbox', checked: true }),
    overwrites = h('input#upload-overwrites', { type: 'checkbox' });
  const place = h('div'), question = h('div#upload-question'), hint = h('div'),
    state = h('div#upload-state', { role: 'status' });
  const values = () =>
    ({ run, repo: repo.value.trim(), is_private: isPrivate.checked, overwrites: overwrites.checked });
  let shown = /** @type {any} */ (null); // what the question is about
  const forget = () => { shown = null; agree.hidden = true; question.replaceChildren(); };
  const show = found => fill(state, found,
    () => found.is_running ? running('Publishing.', run, 'upload') : !found.text ? [] : found.failed
      ? studio.alert(found.text)
    : found.is_stopped
    ? studio.note(`${found.text} The repository may have been made; it has either all files or none.`)
      : h('p.notice.ok', {}, 'Published: ',
        h('a', { href: found.text, target: '_blank', rel: 'noopener noreferrer' }, found.text)));
  const watch = () => follow(element, () => call('result_upload_state', { run }), show);
  const look = h('button.btn#upload-look', { type: 'submit' }, 'Show what is published');
  const agree = h('button.btn.main#upload-agree',
    { type: 'button', hidden: true, onclick: () => tried(place, async () => {
      const agreed = shown;
      forget();
      fill(state, null, () => []);
      const refused = await call('result_start_upload', agreed).then(() => null, error => error);
      await after(refused, place, watch);
    }, look) }, 'Publish this');
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
    hint,
    question, place, state, h('div.row-end', {}, closeButton(), look, agree));
  const element = dialog('upload-dialog', 'Publish on the Hugging Face hub',
    h('p.sm', {}, 'The exported files, a model card, the film and the newest samples. Log in first: ',
      h('code', {}, 'hf auth login'), ' in a terminal, with a token that may write. No token, path or picture that ' +
      'you trained on is published.'), form);
  await tried(place, async () => {
    const [found, made] = await Promise.all(
      [call('result_upload_state', { run }), call('result_show_film', { run })]);
    show(found);
    if (made.is_old) hint.append(h('p.notice', {},
      `${made.prompts.length ? 'There are samples that are not in the film' : 'There is no film yet'}. `,
      h('button.btn.s#upload-film', { type: 'button', onclick: () => { forget(); hint.replaceChildren(); film(run); } },
        'Make the film')));
    if (found.is_running) await tried(place, watch, look);
  }); // without `look`: Enter may be pressed at once
}
