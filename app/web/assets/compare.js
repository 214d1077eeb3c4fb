// The screen Comparison: runs next to each other.
// @ts-check
import * as studio from './core.js';
import { h } from './core.js';
import { chart as newChart } from './charts.js';
import { lightbox } from './lightbox.js';
import { MOST_COMPARED } from './runs-state.js';

let page, chart, known = '', names = '', hasFailed = false;

function buildComparison(section) {
  page = section;
  const copied = event => studio.act(event.target, page.querySelector('#compare-message'), async () => {
    if (!await studio.copy(location.href))
      return 'The browser lets no page copy here: copy the address from its address bar.';
    studio.toast('The address is copied.');
    return '';
  });
  section.append(
    h('div.head', {}, h('h1', {}, 'Comparison'), h('span.dim#compare-count'), h('span.grow'),
      h('button.btn#compare-link', { type: 'button', onclick: copied }, 'Copy link'),
      h('a.btn', { href: studio.link('runs') }, 'Back to Runs')),
    h('div#compare-message'), h('div#compare-problems'),
    h('div.two', {}, h('div', {}, h('div.card#compare-loss'), h('div.card#compare-results')),
      h('div.card#compare-settings')), h('div.card#compare-samples'));
}

/** A name of the address, which is encoded once more where it has a comma or the like. */
function plain(name) {
  try { return decodeURIComponent(name); } catch { return name; }
}

async function showComparison([, list = '']) {
  if (list !== names) [names, known] = [list, ''];
  let found;
  try {
    found = await studio.call('compare_show', { runs: list.split(',').filter(Boolean).map(plain), known });
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    if (error.lost) return;
    hasFailed = true;
    page.querySelector('#compare-message').replaceChildren(studio.alert(error.message));
    return;
  }
  if (list !== names) return;
  if (hasFailed) page.querySelector('#compare-message').replaceChildren();
  hasFailed = false;
  if (found.key !== known) drawComparison(found);
}

function drawComparison(found) {
  known = found.key;
  const part = name => page.querySelector(`#compare-${name}`), { runs } = found, isEnough = runs.length > 1;
  studio.say(page.querySelector('h1'), isEnough ? `Comparison of ${runs.length} runs` : 'Comparison');
  studio.say(part('count'),
    isEnough ? (found.settings.length
      ? `${studio.counted(found.settings.length, 'setting')} ${found.settings.length === 1 ? 'differs' : 'differ'}`
      : 'equal settings') : '');
  studio.fill(part('problems'), [found.problems, isEnough], () => [...found.problems.map(studio.alert),
    isEnough ? null : h('div.card.empty', {}, h('h2', {}, 'Choose at least two runs'),
      h('p', {}, `Mark 2 to ${MOST_COMPARED} runs in the table and press Compare.`),
      h('a.btn.main', { href: studio.link('runs') }, 'Choose runs'))]);
  for (const name of ['results', 'loss', 'settings', 'samples']) part(name).hidden = !isEnough;
  if (!isEnough) return;
  drawLoss(part('loss'), found.chart);
  studio.fill(part('results'), runs, () => results(runs));
  studio.fill(part('settings'), [found.settings, runs.map(run => run.label)], () => settings(runs, found.settings));
  studio.fill(part('samples'), [found.samples, runs], () => samples(runs, found.samples));
}

/** Draw the smoothed losses. `content` is JSON as app/web/charts.py makes it. */
function drawLoss(container, content) {
  chart ??= newChart(container, { title: 'Loss, smoothed', ylabel: 'loss' });
  chart.set(content);
}

function table(title, runs, rows) {
  const head = runs.map(run =>
    h('th', { scope: 'col' }, h('a', { href: studio.link('runs', run.name), title: run.name }, run.label)));
  return [h('div.ttl', {}, h('h2', {}, title)), h('div.scroll', { tabIndex: 0, role: 'region', 'aria-label': title },
    h('table.wide', {}, h('thead', {}, h('tr', {}, h('td'), head)), h('tbody', {}, rows)))];
}

function results(runs) {
  const bests = runs.map(run => run.best?.[0] ?? Infinity),
    lowest = new Set(bests).size > 1 ? Math.min(...bests) : null;
  const best = (run, index) =>
    (run.best ? [h('b', {}, studio.short(run.best[0])),
      bests[index] === lowest ? [' ', h('span.tag.ok', {}, 'lowest')] : null,
      h('small', {}, `step ${studio.count(run.best[1])}`)] : '–');
  const rows = /** @type {[string, (run: any, index: number) => any][]} */ (
    [['Best validation loss', best], ['Loss, smoothed', run => (run.loss === null ? '–' : studio.short(run.loss))],
      ['State',
        run => `${run.state}, ${run.step === run.num_steps ? studio.counted(run.step, 'step')
          : `${studio.count(run.step)} of ${run.num_steps ? `${studio.count(run.num_steps)} steps` : run.length}`}`],
      ['Duration', run => (run.duration_s ? studio.duration(run.duration_s) : '–')],
      ['Speed', run => (run.speed === null ? '–' : `${studio.short(run.speed)} ${run.unit} a second`)],
      ['Peak memory of a rank', run => (run.peak ? studio.gib(run.peak) : '–')]]);
  return table('Results', runs,
    rows.map(([label, value]) =>
      h('tr', {}, h('th', { scope: 'row' }, label), runs.map((run, index) => h('td', {}, value(run, index))))));
}

function settings(runs, list) {
  return table('What differs', runs, list.length ? list.map(setting => h('tr', { data: { field: setting.field } },
    h('th', { scope: 'row' }, setting.label, h('span.key', {}, setting.field)),
    setting.values.map(value => h('td', {}, h('div.value', {}, value)))))
    : h('tr', {}, h('td.dim', { colSpan: runs.length + 1 }, 'All settings are equal.')));
}

function samples(runs, rows) {
  const title = h('div.ttl', {}, h('h2', {}, 'Samples of the same prompt'),
    h('span.dim', {}, 'the last of each run; [trigger] stands for each run’s own word'));
  if (!rows.length) return [title,
    h('p.dim', {},
      'These runs have no prompt in common. Give them equal prompts under Sampling to compare their samples.')];
  return [title, h('div.scroll', { tabIndex: 0, role: 'region', 'aria-label': 'Samples' }, h('table.pairs', {},
    h('thead', {}, h('tr', {}, h('td'), runs.map(run => h('th', { scope: 'col' }, run.label)))),
    h('tbody', {},
      rows.map(row => h('tr', {}, h('th', { scope: 'row' }, row.prompt),
        row.cells.map((cell, index) => h('td', {}, sample(cell, runs[index], pairOf(row.cells, runs)))))))))];
}

function sample(cell, run, pair) {
  if (!cell) return h('span.missing', {}, 'no sample');
  const caption = [h('small', {}, `step ${studio.count(cell.step)}`), studio.references(cell.references)];
  if (cell.text !== undefined)
    return [h('pre.written', { tabIndex: 0, 'aria-label': `Sample of ${run.label}` }, cell.text), caption];
  if (cell.problem) return [h('span.missing', { title: cell.problem }, 'file is missing'), caption];
  return [h('button.zoom',
    { type: 'button', title: 'Full size',
      onclick: () => lightbox(pair, pair.findIndex(item => item.src === cell.full)) },
    h('img.image', { src: cell.small, alt: `${cell.prompt}, ${run.label}`, loading: 'lazy' })), caption];
}

/** What the lightbox shows of one prompt: the samples of all runs. */
const pairOf = (cells, runs) =>
  cells.map((cell, index) => cell && cell.full
    && { title: runs[index].label, text: `${cell.prompt} · step ${studio.count(cell.step)}`, src: cell.full })
  .filter(Boolean);

studio.screens.compare = { title: 'Comparison', build: buildComparison, show: showComparison, tick: showComparison };
