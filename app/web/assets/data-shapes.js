// The shapes of the images on the screen Data, those that are held out, and the timesteps of each bucket.
// @ts-check
import * as studio from './core.js';
import { h, fill, say, call, counted } from './core.js';
import { load, enlarge } from './data-captions.js';
import { current, $ } from './data-state.js';

export function drawShapes() {
  fill($('shapes'), current.data.shapes, () => current.data.shapes.map(([width, height, count, cropped]) => {
    const scale = 40 / Math.max(width, height),
      kind = width === height ? 'square' : width > height ? 'landscape' : 'portrait';
    return h('div.sh', {}, h('i', { style: { width: `${width * scale}px`, height: `${height * scale}px` } }),
      h('span', {}, `${studio.count(width)} × ${studio.count(height)}`, h('br'),
        h('span.dim.sm', {}, kind,
          cropped >= 0.005 ? `, ${Math.round(100 * cropped)} % cut off` : ', nothing cut off')),
          h('b', {}, studio.count(count)));
  }));
  say($('trained'), current.data.shapes.length
    ? `${counted(current.data.num_images - current.data.num_held_out,
      'image')} to train on${current.data.num_trained > current.data.num_images - current.data.num_held_out
      ? `, ${studio.count(current.data.num_trained)} with each of their resolutions` : ''}${current.data.num_held_out
      ? `; ${studio.count(current.data.num_held_out)} held out` : ''}.` : 'Shown when images can be read.');
  $('card-held').hidden = !current.data.held_out.length;
  fill($('held'), current.data.held_out, () => current.data.held_out.map(({ image, name }) => {
    const picture = h('img.image', { alt: '', loading: 'lazy' });
    setTimeout(() => load(image, picture));
    return h('button.one', { type: 'button', 'aria-label': `Enlarge ${name}`,
      onclick: () => enlarge(image, current.data.held_out) }, picture, h('span.sm.dim', {}, name));
  }));
  const more = current.data.num_held_out - current.data.held_out.length;
  say($('held-more'), more > 0 ? `and ${studio.count(more)} more` : '');
}

export async function showTimesteps(button) {
  button.disabled = true;
  $('timesteps').replaceChildren(h('p.dim', { role: 'status' }, 'Computing …'));
  try {
    const rows = await call('data_timesteps');
    $('timesteps').replaceChildren(rows.length ? timestepTable(rows) : h('p.dim', {}, 'Text has no timesteps.'));
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    $('timesteps').replaceChildren(studio.alert(error.message));
  } finally {
    button.disabled = false;
    studio.refocus(button);
  }
}

function timestepTable(rows) {
  const histogram = shares => {
    const most = Math.max(...shares),
      mean = shares.reduce((sum, share, at) => sum + (at + 0.5) * share, 0) / shares.length;
    return h('span.histogram', { role: 'img', 'aria-label': `mean ${mean.toFixed(2)}` },
      shares.map(share => h('i', { style: { height: `${100 * share / most}%` } })));
  };
  return h('div.scroll', {},
    h('table.wide', {}, h('thead', {},
      h('tr', {}, ['Bucket', 'Shift', 'Timesteps, image to noise'].map(head => h('th', { scope: 'col' }, head)))),
      h('tbody', {},
        rows.map(row => h('tr', {}, h('th', { scope: 'row' }, `${row.width} × ${row.height}`),
          h('td', {}, row.shift.toFixed(2)), h('td', {}, histogram(row.timesteps)))))));
}
