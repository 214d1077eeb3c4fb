// The download of a model, as New run and Data show it.
// @ts-check
import { h } from './core.js';

/** Whether a download is under way. found: its state, as the server answers it; undefined or null for none. */
export const isRunning = found => ['waiting', 'downloading'].includes(found?.state);

/** How much of a model is here, in percent; rounded down, so that 100 means all. */
export const shareOf = found => found?.total_bytes ? Math.floor(100 * found.num_bytes / found.total_bytes) : 0;

/** An empty bar of a kind, such as "div.bar", which `showShare` fills. */
export const progressBar = (kind, name) => h(kind,
  { role: 'progressbar', 'aria-label': `Download of ${name}`, 'aria-valuemin': 0, 'aria-valuemax': 100 }, h('i'));

export function showShare(bar, found) {
  bar.setAttribute('aria-valuenow', String(shareOf(found)));
  bar.firstChild.style.width = `${shareOf(found)}%`;
}
