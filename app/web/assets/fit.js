// The button that finds the fastest settings that fit the GPUs, on the screen New run, and what it found.
// @ts-check
import * as studio from './core.js';
import { h, fill, say } from './core.js';

const ASK_AGAIN_MS = 300;

/**
 * Make the button with its results. `form` has what they need of the screen: `settled`, `change`, `take` and
 * `linkTo` are
 * its functions, `target` and `preset` return what is chosen and `value` what the row of a field shows.
 * Returns the element, and `draw`, which takes what the server offers.
 */
export function fitter(form) {
  let offer = /** @type {any} */ (null), found = /** @type {any} */ (null), allow = [], numAsked = 0,
    taken = /** @type {any} */ (null), isChanging = false;
  const button = h('button.btn.s#fit-search',
    { type: 'button', 'aria-describedby': 'fit-why', onclick: () => search([]) });
  const why = h('p.sm.dim#fit-why'), said = h('div#fit-said', { role: 'status' }), box = h('div#fit-found');
  const element = h('div#fit', { hidden: true }, button, why, said, box);
  const complain = text => { said.replaceChildren(...(text ? [studio.alert(text)] : [])); };

  /**
   * Ask until the search is over. What was found for another form is not shown: `is_changed` says that there is one.
   */
  async function search(allowed) {
    const number = ++numAsked, hadFocus = box.contains(studio.focused());
    [found, allow] = [null, allowed];
    said.replaceChildren(h('p.sm.dim', {}, 'Searching …'));
    try {
      await form.settled();
      let answer = await studio.call('new_fit', { allow, target: form.target() });
      while (answer.is_running && number === numAsked) {
        await new Promise(resolve => setTimeout(resolve, ASK_AGAIN_MS));
        answer = await studio.call('new_fit', { allow, key: answer.made_for, target: form.target() });
      }
      if (number !== numAsked) return;
      found = answer;
      complain('');
      draw(offer);
      if (hadFocus) studio.refocus(box.querySelector('input:checked, button'), button);
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      if (number === numAsked) complain(error.message);
    }
  }

  function close() {
    numAsked++;
    found = null;
    complain('');
    draw(offer);
    studio.refocus(button);
  }

  /** Change the form, once at a time: the second click of a double click does nothing. */
  async function change(name, values) {
    if (isChanging) return null;
    isChanging = true;
    try {
      return await form.change(name, values, complain);
    } finally {
      isChanging = false;
    }
  }

  async function take(number) {
    const answer = await change('new_take', { key: found.made_for, number, allow });
    if (!answer) return;
    close();
    form.take(answer);
    const { undo } = answer,
      notice = h('div.notice.ok', {},
        h('p', {}, `${studio.counted(Object.keys(undo.taken).length, 'setting')} changed. `,
          h('button.btn.s', { type: 'button', onclick: () => takeBack(undo) }, 'Undo')));
    said.replaceChildren(notice);
    taken = { ...undo, notice };
    studio.refocus(button);
  }

  async function takeBack(undo) {
    const answer = await change('new_undo', undo);
    if (!answer) return;
    form.take(answer);
    if (answer.left.length) said.replaceChildren(
      h('p.sm.dim', {},
        `Not undone, as ${answer.left.length > 1 ? 'they were' : 'it was'} changed after: ${answer.left.join(', ')}.`));
    studio.refocus(button);
  }

  /** Whether the form has anything left of what was taken. */
  const isThere = ({ preset, taken }) => preset === form.preset()
    && Object.entries(taken).some(([name, value]) => form.value(name) === value);

  /** Show the button as the server offers it, and what was found as long as it is about this form. */
  function draw(now) {
    offer = now;
    if (taken && !isThere(taken)) {
      taken.notice.remove();
      taken = null;
    }
    element.hidden = !offer;
    if (!offer) { found = null; return; }
    say(button, offer.words);
    button.disabled = Boolean(offer.why_not);
    say(why, offer.why_not);
    why.hidden = !offer.why_not;
    const isOld = found !== null && (found.is_changed || found.made_for !== offer.key);
    fill(box, [found, isOld],
      () => found === null ? [] : isOld ? outdated() : found.proposals.length ? proposals() : nothing());
  }

  const ending = () => h('div.chips', {}, h('button.btn.s#fit-close', { type: 'button', onclick: close }, 'Close'));

  const outdated = () => [h('p.notice.warn', {}, 'The form or the GPUs were changed after this search.'),
    h('div.chips', {}, h('button.btn.s',
      { type: 'button', disabled: Boolean(offer.why_not), onclick: () => search(allow) }, 'Search again'),
      h('button.btn.s#fit-close', { type: 'button', onclick: close }, 'Close'))];

  const nothing = () => [
    h('p.notice.warn', {}, found.needed.length
      ? `Nothing fits ${found.gpus} with the same result. With ${found.needed.map(
        ([label, value]) => `${label} ${value}`).join(' and ')} it would fit.`
      : `Nothing that is searched fits ${found.gpus}: take more GPUs, larger ones, or a smaller model.`),
    found.allow.length ? h('button.btn.s#fit-allow',
      { type: 'button', onclick: () => search([...new Set([...allow, ...found.allow])]) }, 'Allow it and search again')
      : null,
    ...remarks(), ending()];

  const proposals = () => [
    h('p.sm.dim', {},
      `The fastest settings for ${found.gpus}, by their plans; ${studio.counted(found.samples,
        'sample')} per step as before.`),
    h('ol.proposals', {}, found.proposals.map(card)), h('p.sm.dim', {}, found.reason), ...remarks(), mayChange(),
    ending()];

  const remarks = () => found.notes.map(text => h('p.sm.dim', {}, `Note: ${text}.`));

  /** Check boxes for what changes the result; a new search follows. */
  const mayChange = () => h('fieldset.sm', {}, h('legend', {}, 'Allow as well, though it changes the result'),
    h('div.chips', {}, found.may.map(([name, words]) =>
      h('label', {}, h('input', { type: 'checkbox', value: name, checked: allow.includes(name), onchange: event =>
        search(event.target.checked ? [...allow, name] : allow.filter(other => other !== name)) }), words))));

  function card(one, number) {
    const seconds = `${studio.short(Number(one.seconds.toPrecision(3)))} s per step`,
      what = found.trains_on === 'text' ? 'texts' : 'images';
    return h('li.proposal', {},
      h('p', {}, h('b', {}, seconds), h('span.dim', {}, ` · ${Number(one.per_second.toPrecision(3))} ${what}/s`)),
      h('div.mem', { 'aria-hidden': 'true' },
        h('i', { style: { width: `${100 * one.need / one.limit}%`, background: 'var(--acc)' } })),
      h('p.sm.dim', {}, `${studio.gib(one.need)} of ${studio.gib(one.limit)}`,
        one.whole ? ` · ${studio.duration(one.whole)} for ${studio.counted(found.steps, 'step')}` : '',
        one.host
          ? [` · ${studio.gib(one.host)}${found.host ? ` of ${studio.gib(found.host)}` : ''} of host memory for `,
            studio.term('offloaded blocks')] : ''),
      one.changes.length
        ? h('ul.diff', {},
          one.changes.map(change =>
            h('li', {}, form.linkTo(change.field, change.label), `: ${change.old} → ${change.new}`)))
        : h('p.sm', {}, 'As the form is now.'),
      one.changes.length ? h('button.btn.s',
        { type: 'button', 'aria-label': `Take this: ${seconds}`, onclick: () => take(number) }, 'Take this') : null);
  }

  return { element, draw };
}
