// A config of another trainer, chosen or dropped onto New run: what was taken, changed and left out of it.
// @ts-check
import { h } from './core.js';
import { takeDrop } from './drop.js';
import { change, complain, take } from './form-draft.js';
import { showYaml } from './form-yaml.js';
import { current, $ } from './form-state.js';

const CONFIG = /\.(toml|ya?ml|json)$/i, PART = /\.(toml|ya?ml|json|txt)$/i, MOST_BYTES = 4e6;
const TITLES = { taken: 'Taken', changed: 'Changed', 'left out': 'Left out' };

/** The button of the screen's head; what is dropped anywhere on the screen is taken too. */
export function importButton() {
  const input = h('input.sr#import-input', { type: 'file', multiple: true, tabIndex: -1, 'aria-label': 'Config',
    accept: '.toml,.yaml,.yml,.json,.txt', onchange: async () => {
      const files = [...(input.files || [])];
      input.value = '';
      await importAll(files);
    } });
  current.root.addEventListener('dragover', event => {
    if ([...(event.dataTransfer?.types || [])].includes('Files')) event.preventDefault();
  });
  current.root.addEventListener('drop', async event => {
    const files = [...(event.dataTransfer?.files || [])];
    if (event.defaultPrevented || !files.length) return;
    event.preventDefault();
    if (files.some(file => CONFIG.test(file.name)) && files.every(file => PART.test(file.name))) await importAll(files);
    else await takeDrop(event.dataTransfer);
  });
  const title =
    'A config of kohya’s sd-scripts, ai-toolkit, OneTrainer, SimpleTuner or diffusion-pipe, with the files it names';
  return [input, h('button.btn#import', { type: 'button', title, onclick: () => input.click() }, 'Import a config …')];
}

async function importAll(chosen) {
  if (!chosen.length) return;
  if (chosen.reduce((sum, file) => sum + file.size, 0) > MOST_BYTES) {
    complain('These files are larger than any config.');
    return;
  }
  const files = Object.fromEntries(await Promise.all(chosen.map(async file => [file.name, await file.text()])));
  const answer = await change('new_import_config', { files });
  if (!answer) return;
  take(answer);
  showYaml();
  show(answer.imported, answer.undo);
}

function show({ tool, lists }, undo) {
  const close = () => $('imported').replaceChildren();
  const takeBack = async () => {
    const former = await change('new_restore', { ...undo, is_whole: true });
    take(former);
    if (former) close();
  };
  const list = ([name, lines]) => h('details', { open: name !== 'taken', data: { list: name } },
    h('summary', {}, `${TITLES[name]} (${lines.length})`),
    h('ul.sm', {}, lines.map(line => h('li', {}, line.replaceAll(' -> ', ' → ')))));
  $('imported')
    .replaceChildren(h('div.notice', { role: 'status' }, h('p', {}, h('b', {}, `From a config of ${tool}. `),
      'Everything can be changed below. ', h('button.btn.s', { type: 'button', onclick: takeBack }, 'Undo'), ' ',
      h('button.btn.s', { type: 'button', onclick: () => { close(); $('import').focus(); } }, 'Close')),
      Object.entries(lists).filter(([, lines]) => lines.length).map(list)));
  $('imported').scrollIntoView({ block: 'nearest' });
}
