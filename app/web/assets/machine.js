// The screen Machine: GPUs with their load, and checks of packages, disk, limits and ports.
'use strict';
{
  const { h, fill, say, call } = studio;
  const WORDS = { ok: ['ok', 'ok'], warn: ['warn', 'remark'], fail: ['bad', 'error'] };
  let root = null, isLooking = false;
  const $ = id => root.querySelector(`#${id}`);

  /** A bar with its share in words behind it; a share below 0 is not known. */
  function meter(name, share, text) {
    return h('div.meter', {}, h('span.dim', {}, name), h('span.bar', { role: 'meter', 'aria-label': name, 'aria-valuenow': Math.round(share), 'aria-valuemin': 0, 'aria-valuemax': 100 },
      h('i', { style: { width: `${Math.max(0, Math.min(100, share))}%` } })), h('span', {}, text));
  }

  function gpu(one) {
    return h('section.card', { 'aria-label': `GPU ${one.index}` }, h('div.ttl', {}, h('h2', {}, `GPU ${one.index}`), h('span.dim', {}, one.name)),
      meter('Memory', 100 * one.memory_used / one.memory, `${(one.memory_used / 1024).toFixed(1)} of ${(one.memory / 1024).toFixed(1)} GiB`),
      one.busy >= 0 ? meter('Load', one.busy, `${one.busy} %`) : null, one.celsius >= 0 ? meter('Temperature', one.celsius, `${one.celsius} °C`) : null);
  }

  async function look() {
    if (isLooking) return;
    isLooking = true;
    $('check-again').disabled = true;
    try {
      const found = await call('machine_checks'), rank = { fail: 0, warn: 1, ok: 2 };
      const isBad = found.checks.some(check => check.verdict === 'fail');
      $('headline').className = `notice ${isBad ? 'bad' : 'ok'}`;
      say($('headline'), found.headline);
      fill($('checks'), found.checks, () => [...found.checks].sort((one, other) => rank[one.verdict] - rank[other.verdict]).map(check => {
        const [mood, word] = WORDS[check.verdict];
        return h('tr', {}, h('th', { scope: 'row' }, check.what), h('td', {}, h(`span.tag.${mood}`, {}, word)), h('td', {}, check.fact, check.remedy && check.verdict !== 'ok' ? h('p.remedy', {}, check.remedy) : null));
      }));
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      $('headline').className = 'notice bad';
      say($('headline'), error.message);
    } finally {
      isLooking = false;
      $('check-again').disabled = false;
    }
  }

  async function drawGpus() {
    const found = await call('machine_gpus');
    fill($('machine-gpus'), found, () => found.map(gpu));
  }

  studio.screens.machine = {
    title: 'Machine',
    build(section) {
      root = section;
      root.append(h('div.head', {}, h('h1', {}, 'Machine'), h('span.grow'), h('button.btn#check-again', { type: 'button', onclick: look }, 'Check again')),
        h('p.notice#headline', { role: 'status' }, 'Looking at this machine …'), h('div#machine-gpus'),
        h('section.card', { 'aria-label': 'Checks' }, h('div.scroll', {}, h('table.wide', {}, h('thead', {}, h('tr', {}, ['Check', 'Result', 'Found'].map(head => h('th', { scope: 'col' }, head)))), h('tbody#checks')))));
    },
    async show() {
      look();
      await this.tick();
    },
    async tick() { try { await drawGpus(); } catch (error) { if (!(error instanceof studio.Refused)) throw error; } },
  };
}
