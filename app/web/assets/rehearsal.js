// A rehearsal: its buttons in New run, and on the screen of its run the film, the pictures as they are trained, what it
// cannot show, and what comes next.
// @ts-check
import * as studio from './core.js';
import { h, call, fill } from './core.js';
import { filmed, follow } from './results.js';

const parts = /** @type {Record<string, any>} */ ({});
let shown = '', isFilming = false;

// --- New run --------------------------------------------------------------------------------------------------------

/** A button that starts a rehearsal of the form. `settled` resolves once what was typed has been answered. */
export function rehearseButton(id, kind, settled, complain) {
  const button = h(`button.btn${kind}#${id}`, { type: 'button', onclick: async () => {
    if (button.dataset.busy) return; // not disabled, which would take the focus from it
    button.dataset.busy = 'true';
    try {
      await settled();
      complain('');
      studio.go('runs', await call('rehearsal_begin'));
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      complain(error.message);
    } finally {
      delete button.dataset.busy;
    }
  } }, 'Rehearse');
  return button;
}

/** What a rehearsal is, in a sentence. */
export const rehearsalHelp = () => studio.facts.rehearsal.help;

// --- the screen of its run ------------------------------------------------------------------------------------------

function build() {
  Object.assign(parts, { title: h('span.dim'), problem: h('div'), shows: h('p.sm'), films: h('ul.drawings'),
    now: h('p.notice', { role: 'status', hidden: true }), filmState: h('div', { role: 'status' }),
    grid: h('ul.trained'), gone: h('div'), more: h('p.sm.dim'), cannot: h('ul.cannot') });
  parts.start = h('button.btn.main#rehearsal-start', { type: 'button', onclick: () => studio.act(parts.start,
    parts.problem, async () => studio.go('runs', await call('rehearsal_start', { run: shown }))) },
    'Start the real run');
  parts.change = h('button.btn#rehearsal-change', { type: 'button', onclick: () => studio.act(parts.change,
    parts.problem, change) }, 'Change');
  parts.card = h('section.card#rehearsal', { 'aria-label': 'Rehearsal', hidden: true },
    h('div.ttl', {}, h('h2', {}, 'Rehearsal'), parts.title, h('span.grow'), parts.change, parts.start),
    parts.problem, parts.now, parts.shows, h('h3', {}, 'As they are trained'), parts.gone, parts.grid, parts.more,
    h('div.rehearsed', {}, h('div', {}, h('h3', {}, 'Film'), parts.filmState, parts.films),
      h('div', {}, h('h3', {}, 'What it cannot show'), parts.cannot)));
  return parts.card;
}

/** Show the rehearsal of a run at the top of `home`, and nothing of another run. head: as `run_view` answers it. */
export function draw(run, head, home) {
  if (parts.card) parts.card.hidden = !head.is_rehearsal;
  if (!head.is_rehearsal) { shown = ''; return; }
  if (!parts.card) home.prepend(build());
  parts.card.hidden = false;
  const isEnded = !head.is_running && !head.is_alive, isNew = shown !== run;
  shown = run;
  fill(parts.now, [isEnded, head.state, head.step], () => !isEnded
    ? `It takes about ${studio.facts.rehearsal.seconds} s, and gives way to other work on this machine. It goes on ` +
      'when this page is closed.'
    : head.state === 'finished' ? [] : 'It did not come to its end: what is here shows less.');
  parts.now.hidden = !parts.now.childNodes.length;
  if (isNew) {
    isFilming = false;
    for (const place of [parts.films, parts.filmState, parts.grid, parts.problem, parts.gone, parts.cannot]) {
      place.replaceChildren();
      delete place.dataset.key;
    }
    show(run).catch(tell);
  }
  if (!isEnded) fill(parts.filmState, 'later', () => h('p.sm.dim', {}, 'It is made of the samples, at the end.'));
  else if (!isFilming) {
    isFilming = true;
    film(run).catch(tell);
  }
}

function tell(error) {
  if (!(error instanceof studio.Refused)) throw error;
  parts.problem.replaceChildren(studio.alert(error.message));
}

async function show(run) {
  const found = await call('rehearsal_show', { run });
  if (shown !== run) return;
  studio.say(parts.title, `of ${found.name}, for ${found.model}`);
  studio.say(parts.shows, found.shows);
  parts.cannot.replaceChildren(...found.cannot_show.map(sentence => h('li', {}, sentence)));
  parts.gone.replaceChildren(...(found.problem ? [studio.alert(found.problem)] : []));
  parts.grid.replaceChildren(...found.pictures.map(card));
  const rest = found.num_pictures - found.pictures.length;
  studio.say(parts.more, [rest > 0 ? `And ${studio.counted(rest, 'other')}, which the screen Data shows.` : '',
    found.most ? `Of many pictures, ${found.most} are rehearsed, evenly chosen.` : ''].filter(Boolean).join(' '));
  if (!found.pictures.length) return;
  const drawn = await call('rehearsal_pictures', { run });
  if (shown !== run) return;
  for (const [at, one] of drawn.entries()) {
    const { name } = found.pictures[at];
    parts.grid.children[at].firstChild.replaceChildren(...(one.problem ? [h('div.missing', {}, one.problem)]
      : [h('img.real', { src: one.real, alt: `${name} as the real run trains it` }),
        h('img.own', { src: one.own, alt: `${name} as the demo model saw it` })]));
  }
}

/** A picture's place, its captions as they are trained, and what is trained of it. */
function card(one) {
  const tags = [one.size ? one.size.join(' × ') : 'left out', `${Math.round(100 * one.share)} % of it`,
    one.is_masked ? 'masked' : '', one.is_held_out ? 'held out' : ''];
  return h('li', { data: { name: one.name } }, h('div.both', {}, h('span.skeleton', { 'aria-hidden': 'true' })),
    h('p.key', {}, one.name), one.captions.map(caption => h('p.caption', {}, caption)),
    h('p.tags', {}, tags.filter(Boolean).map(tag => h('span.tag', {}, tag))));
}

/** Show the film; it is made first where there is none of all samples. */
async function film(run) {
  const place = { get isConnected() { return shown === run; } };
  let found = await call('result_show_film', { run });
  if (!found.state.is_running && found.is_old && !found.state.failed) await call('result_make_film', { run });
  await follow(place, async () => {
    found = await call('result_show_film', { run });
    return found;
  }, () => {
    fill(parts.filmState, found.state, () => found.state.is_running ? h('p.sm.dim', {}, 'The film is being made.')
      : found.state.failed ? studio.alert(found.state.text) : []);
    if (!found.state.is_running) fill(parts.films, found, () => found.prompts.map(one => filmed(run, one)));
  });
}

async function change() {
  if (!await call('rehearsal_is_in_form', { run: shown })) await call('new_copy', { run: shown });
  studio.go('new');
}
