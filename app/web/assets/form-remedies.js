// The changes that an error or a warning names, as buttons beside it.
// @ts-check
import { h, link } from './core.js';
import { edited } from './form-draft.js';
import { current } from './form-state.js';

/** What images without captions need, beside the change of the field. */
const WITHOUT_CAPTIONS = [['uncaptioned', 'Write them'], ['caption', 'Caption with a model']];

/** A sentence with the changes that it names, which stand for its words on them. */
export function withRemedies(text) {
  const remedies = current.state.remedies[text] || [];
  if (!remedies.length) return text;
  const buttons = remedies.map(({ field, label, value }) => field !== 'data.missing_caption'
    ? apply(field, value, `${label}: ${value}`)
    : [...WITHOUT_CAPTIONS.map(([place, words]) => h('a.btn.s', { href: link('data', place) }, words)),
      apply(field, value, 'Train without')]);
  return [h('span', { title: text }, text.split('; ')[0]), h('span.remedies', {}, buttons)];
}

const apply = (field, value, words) =>
  h('button.btn.s', { type: 'button', data: { remedy: field }, onclick: () => edited(field, value, 0) }, words);
