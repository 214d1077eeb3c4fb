// The screen Queue: runs that wait for their GPUs, and those that the queue has started.
'use strict';
{
  const { h, fill, call, link } = studio;
  const STATES = { finished: 'ok', failed: 'bad', stopped: 'warn', waiting: '' };
  let root = null, state = null;
  const $ = id => root.querySelector(`#${id}`);

  /** Change the queue and show what came of it. */
  async function act(name, values = {}) {
    try {
      state = await call(name, values);
      $('queue-message').replaceChildren();
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      $('queue-message').replaceChildren(studio.alert(error.message));
    }
    draw();
  }

  const gpus = row => row.gpus.length ? row.gpus.join(', ') : state.num_gpus ? 'all' : 'CPU';

  function waitingRow(row, at, all) {
    const move = (sign, by, word, isOff) => h('button.btn.s', { type: 'button', disabled: isOff, 'aria-label': `${row.name}: ${word}`, title: word, onclick: () => act('queue_move', { number: row.number, by }) }, sign);
    return h('tr', { data: { number: row.number } }, h('td', {}, String(at + 1)), h('th', { scope: 'row' }, row.name, row.problem ? h('p.notice.bad', {}, row.problem) : null),
      h('td', {}, row.model), h('td', {}, row.method), h('td', {}, gpus(row)),
      h('td.acts', {}, move('↑', -1, 'earlier', at === 0), move('↓', 1, 'later', at === all.length - 1),
        h('button.btn.s.stop', { type: 'button', 'aria-label': `${row.name}: remove`, onclick: async () => {
          if (await studio.ask('Remove it from the queue?', `${row.name} will not be trained. Its settings are gone from the queue.`, ['Remove', 'Keep'], 'stop') === 0) await act('queue_remove', { number: row.number });
        } }, 'Remove')));
  }

  function takenRow(row) {
    const name = row.run ? h('a', { href: link('runs', row.run) }, row.name) : row.name;
    return h('tr', { data: { number: row.number } }, h('th', { scope: 'row' }, name), h('td', {}, row.model), h('td', {}, row.method), h('td', {}, gpus(row)),
      h('td', {}, row.error ? h('p.notice.bad', {}, row.error) : h(STATES[row.state] ? `span.tag.${STATES[row.state]}` : 'span.tag', {}, row.state)));
  }

  const table = (id, heads, rows) => h('div.scroll', {}, h(`table.wide#${id}`, {}, h('thead', {}, h('tr', {}, heads.map(head => h('th', { scope: 'col' }, head)))), h('tbody', {}, rows)));

  function draw() {
    fill($('queue-problems'), state.problems, () => state.problems.map(studio.alert));
    fill($('queue-settings'), [state.is_paused, state.after_failure], () => [
      h(state.is_paused ? 'span.tag.warn' : 'span.tag.ok', { role: 'status' }, state.is_paused ? 'paused: nothing is started' : 'starts the next run when its GPUs are free'),
      h('label.after', {}, 'After a failure', h('select#after', { onchange: event => act('queue_change', { after_failure: event.target.value }) },
        [['go on', 'start the next run'], ['pause', 'pause the queue']].map(([value, word]) => h('option', { value, selected: value === state.after_failure }, word)))),
      h(state.is_paused ? 'button.btn.main#pause' : 'button.btn#pause', { type: 'button', onclick: () => act('queue_change', { is_paused: !state.is_paused }) }, state.is_paused ? 'Resume the queue' : 'Pause the queue')]);
    fill($('queue-waiting'), [state.waiting, state.num_gpus], () => state.waiting.length
      ? table('waiting', ['', 'Run', 'Model', 'Method', 'GPUs', ''], state.waiting.map(waitingRow))
      : h('div.empty', {}, h('h2', {}, 'Nothing waits'), h('p', {}, 'Fill in New run and press “Add to queue”. Runs start one after the other, as their GPUs become free.'), h('a.btn.main', { href: link('new') }, 'New run')));
    $('queue-taken-card').hidden = !state.taken.length;
    fill($('queue-taken'), [state.taken, state.num_gpus], () => table('taken', ['Run', 'Model', 'Method', 'GPUs', 'State'], state.taken.map(takenRow)));
  }

  studio.screens.queue = {
    title: 'Queue',
    build(section) {
      root = section;
      root.append(h('div.head', {}, h('h1', {}, 'Queue'), h('span.grow'), h('div.settings#queue-settings')), h('div#queue-message'), h('div#queue-problems'),
        h('section.card', { 'aria-label': 'Waiting runs' }, h('div#queue-waiting')),
        h('section.card#queue-taken-card', { hidden: true, 'aria-labelledby': 'h-taken' }, h('div.ttl', {}, h('h2#h-taken', {}, 'Started by the queue')), h('div#queue-taken')));
    },
    async show() { await act('queue_state'); },
    async tick() {
      try { state = await call('queue_state'); } catch (error) { if (error instanceof studio.Refused) return; throw error; }
      draw();
    },
  };
}
