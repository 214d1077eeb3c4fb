// The card Data of New run: the folder, what it holds, and the dialog that finds one.
// @ts-check
import * as studio from './core.js';
import { say, call, h, fill } from './core.js';
import { edited } from './form-draft.js';
import { withRemedies } from './form-remedies.js';
import { PATH_PAUSE_MS, inputs, current, $ } from './form-state.js';
import { look as looks } from './look.js';

/** Letters of a proposed prompt that are shown. */
const MOST_SHOWN = 60;

let glanceTimer = 0;
/** While a folder is typed, look at that one folder when the typing rests. */
export function glanceSoon(name, input) {
  clearTimeout(glanceTimer);
  glanceTimer = setTimeout(async () => {
    if (current.typingPath !== name) return;
    const found = await call('new_glance', { path: input.value }).catch(() => null), help = inputs[name].help;
    if (!found || current.typingPath !== name || found.path !== undefined) return;
    inputs[name].element.classList.toggle('wrong', Boolean(found.wrong));
    say(help, found.wrong !== undefined ? found.wrong
      : `${found.images} images, ${found.captions} with a caption, ${found.folders} folders in it. Press Enter to ` +
        `read it.`);
  }, PATH_PAUSE_MS);
}

export function drawData() {
  const data = current.state.data, place = $('data-facts');
  say($('data-title'), current.state.is_text ? 'Texts' : 'Pictures');
  fill($('data-tag'), [data, current.state.waiting], () => {
    if (!data) return [];
    const [mood, words] = data.badge;
    return [h(`span.tag.${mood}`, {}, words)];
  });
  fill(place, [data, current.state.errors], () => {
    if (!data || !data.is_complete) return [];
    return [...data.facts.map(([first, rest]) => h('span', {}, h('b', {}, first), h('span.dim', {}, ` ${rest}`))),
      ...data.others.slice(0, 4).map(text => h('p.notice.bad', {}, withRemedies(text))),
      ...data.warnings.slice(0, 4).map(text => h('p.notice.warn', {}, withRemedies(text)))];
  });
  drawProposals();
  fill($('recent'), [current.state.recent],
    () => current.state.recent.map(path =>
      h('button.chip', { type: 'button', title: path, onclick: () => setPath(path) },
        path.split('/').slice(-2).join('/'))));
  drawThumbnails(data);
  looks.hint($('pair-hint'),
    [current.state.rows['data.path']?.value, current.state.rows['data.references']?.value,
      data?.is_complete && data.num_images],
    path => edited('data.references', path, 0));
}

const cut = text => text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}…` : text;

/** Name, trigger word and prompts for own pictures, while those of the preset are in the form. */
function drawProposals() {
  const offered = current.state.proposals;
  $('proposals').hidden = !offered.length;
  fill($('proposals'), [offered], () => offered.length ? [
    h('p', {}, h('b', {}, 'For these pictures'), ' instead of the preset’s words:'),
    h('ul', {}, offered.map(({ label, value }) => h('li', {}, `${label}: `,
      value.split('\n').map((line, at) => [at ? ' · ' : '', h('b', {}, cut(line))])))),
    takeProposals('Take them')] : []);
}

/** A button that puts all that is proposed into the form. */
export const takeProposals = words => h('button.btn.s', { type: 'button', onclick: () => {
  for (const { field, value } of current.state.proposals) edited(field, value, 0);
} }, words);

async function drawThumbnails(data) {
  const key = JSON.stringify([data?.is_complete, data?.num_images, current.state.rows['data.path']?.value,
    current.state.rows['data.folders']?.value, data?.problems]);
  if (current.shownThumbnails === key) return;
  current.shownThumbnails = key;
  const shown = data?.is_complete && data.num_images ? await call('new_thumbnails').catch(() => []) : [];
  if (current.shownThumbnails !== key) return;
  $('thumbs')
    .replaceChildren(...shown.map(
      image => h('img.image', { src: image.src, alt: image.name, title: image.name, loading: 'lazy' })));
}

function setPath(path) {
  inputs['data.path'].input.value = path;
  current.typingPath = '';
  edited('data.path', path, 0);
}

/**
 * Choose a folder by a dialog that shows what is in each. typed: the path that was typed so far; `take` gets the one
 * that is chosen.
 */
export async function browse(typed = inputs['data.path'].input.value, take = setPath) {
  const list = h('ul.folders'), here = h('p.key'), count = h('p.sm'), error = h('div');
  const choose = h('button.btn.main', { type: 'button', onclick: () => {
    take(dialog.dataset.path);
    dialog.close();
  } }, 'Take this folder');
  const dialog = h('dialog.dialog#picker', { 'aria-label': 'Choose a folder', onclose: () => dialog.remove() },
    h('h2', {}, 'Choose a folder'), here, count, error, list,
    h('div.row-end', {}, h('button.btn', { type: 'button', onclick: () => dialog.close() }, 'Cancel'), choose));
  const open = async path => {
    let found;
    try { found = await call('new_browse', { path }); } catch (refused) {
      error.replaceChildren(studio.alert(String(/** @type {any} */ (refused).message)));
      return;
    }
    error.replaceChildren();
    dialog.dataset.path = found.path;
    here.textContent = found.path;
    count.textContent = `${found.num_images} images, ${found.num_captions} with a caption${found.is_cut
      ? ' among the first 5,000 entries' : ''}`;
    const up = found.above
      ? [h('li', {}, h('button.btn.ghost', { type: 'button', onclick: () => open(found.above) }, '↑ ..'))] : [];
    const roots = found.roots.filter(at => at !== found.path)
      .map(at => h('li', {}, h('button.btn.ghost', { type: 'button', onclick: () => open(at) }, at)));
    list.replaceChildren(...up,
      ...found.folders.map(folder =>
        h('li', {}, h('button.btn.ghost', { type: 'button', onclick: () => open(`${found.path}/${folder}`) }, folder))),
      ...(found.above ? [] : roots));
    studio.refocus(list.querySelector('button'), choose); // the one that was pressed is gone
  };
  document.body.append(dialog);
  dialog.showModal();
  await open(typed.startsWith('/') ? typed : '');
  if (!dialog.dataset.path) await open('');
}
