// The card Method of New run, and all other settings, with a search.
// @ts-check
import * as studio from './core.js';
import { h, fill, say } from './core.js';
import { edited } from './form-draft.js';
import { paint, row } from './form-inputs.js';
import { current, $, field, inputs } from './form-state.js';

const MOST_MISSING = 3;

export function drawMethods() {
  const now = current.state.rows['adapter.type'];
  if (!now) return;
  const known = studio.facts.form.methods;
  fill($('methods'), [now.choices, now.value],
    () => known.filter(([kind]) => now.choices.includes(kind)).map(([kind, name, line]) =>
      h(kind === now.value ? 'label.meth.on' : 'label.meth', {},
        h('input', { type: 'radio', name: 'method', value: kind, checked: kind === now.value,
          onchange: () => edited('adapter.type', kind, 0) }),
          h('span', {}, h('b', {}, name), h('span.sm', {}, line)))));
  say($('method-error'), now.error || '');
  const rank = Number(current.state.rows['adapter.rank']?.value) || 0, slider = $('rank-slider');
  if (rank && studio.focused() !== slider) { slider.value = Math.log2(rank); paint(slider); }
}

// --- more ---------------------------------------------------------------------------------------------------------

export function groups() {
  const names = Object.keys(studio.facts.form.fields).filter(name => !field(name).is_front);
  return Object.entries(studio.facts.form.groups)
    .map(([group, hint]) => h('details.grp', { id: `group-${group.toLowerCase()}`, data: { group } },
      h('summary', {}, h('span', {}, group), h('span.dim.sm', {}, hint), h('span.grow'),
        h('span.tag.acc.num-changed', { hidden: true }),
        h('span.reddot', { hidden: true, role: 'img', 'aria-label': 'holds an error' })),
      h('div.g2', {}, names.filter(name => field(name).group === group).map(name => row(name)))));
}

export function drawGroups() {
  let total = 0, changedCount = 0;
  for (const group of current.root.querySelectorAll('details.grp')) {
    const names = [...group.querySelectorAll('.field')].map(element => element.dataset.field);
    const changed = names.filter(name => current.state.rows[name]?.changed).length,
      wrong = names.some(name => current.state.rows[name]?.error);
    total += names.length; changedCount += changed;
    const tag = group.querySelector('.num-changed');
    tag.hidden = !changed; say(tag, `${changed} changed`);
    group.querySelector('.reddot').hidden = !wrong;
  }
  say($('more-note'), `${total} settings, ${changedCount ? `${changedCount} changed` : 'all as in the preset'}`);
  filterGroups();
}

export function filterGroups() {
  const words = $('search').value.toLowerCase().split(/[\s-]+/).filter(Boolean),
    matches = name => words.every(word => isIn(word, searched(name)));
  for (const group of current.root.querySelectorAll('details.grp')) {
    let found = 0;
    for (const element of group.querySelectorAll('.field')) {
      const isFound = matches(element.dataset.field);
      element.classList.toggle('filtered', !isFound);
      if (isFound && !element.hidden) found++;
    }
    group.hidden = words.length > 0 && !found;
    if (words.length && found && !group.dataset.searched) {
      group.dataset.searched = group.open ? 'open' : 'closed';
      group.open = true;
    }
    if (!words.length && group.dataset.searched) {
      group.open = group.dataset.searched === 'open';
      delete group.dataset.searched;
    }
  }
  const above = words.length
    ? Object.keys(studio.facts.form.fields)
    .filter(name => field(name).is_front && !inputs[name]?.element.hidden && matches(name)) : [];
  fill($('found-above'), [above],
    () => above.length ? ['On the cards above: ', ...above.flatMap((name, at) => [at ? ', ' : '', linkTo(name)]), '.']
      : []);
  const isMeant = key => words.length > 0 && words.every(word => isIn(word, key.toLowerCase()));
  const missing = Object.entries(studio.facts.form.missing_words)
    .flatMap(([why, keys]) => keys.split(' ').filter(isMeant).map(key => [key, why])).slice(0, MOST_MISSING);
  say($('no-match'), missing.length ? `No setting: ${missing.map(([key, why]) => `${key}: ${why}`).join('. ')}.`
    : 'No setting has these words.');
  $('no-match').hidden = !words.length || above.length > 0
    || [...current.root.querySelectorAll('details.grp')].some(group => !group.hidden);
}

/** What a field is found by: its words here and in other programs, with and without hyphens. */
function searched(name) {
  const facts = field(name), text = `${facts.label} ${name} ${facts.help} ${facts.group} ${facts.words}`.toLowerCase();
  return `${text} ${text.replaceAll('-', '')}`;
}

const isIn = (word, text) => text.includes(word)
  || (word.length > 3 && word.endsWith('s') && text.includes(word.slice(0, -1)));

/** A field's name that leads to its input. */
export const linkTo = (name, text = field(name).label) => h('a', { href: '#', title: name, onclick: event => {
  event.preventDefault();
  goTo(name);
} }, text);

/** Open the group of a field and go to its input. */
function goTo(name) {
  const shown = name === 'adapter.type'
    ? { element: $('methods'), input: $('methods').querySelector('input:checked, input') } : inputs[name];
  if (!shown) return;
  if (shown.element.classList.contains('filtered')) { $('search').value = ''; filterGroups(); }
  const group = shown.element.closest('details');
  if (group) { group.hidden = false; group.open = true; }
  shown.element.scrollIntoView({ block: 'center' });
  (shown.input || shown.element).focus({ preventScroll: true });
}
