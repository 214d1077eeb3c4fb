// Line charts: `studio.chart(container, {title, ylabel, small})` returns `{set(text)}`, where text is that of `Chart.json`.
// All charts of a screen have one crosshair, one zoom, one smoothing and one x axis: `page` and `settings`.
'use strict';
{
  const { h, svg } = studio;
  const DASHES = [[], [8, 4], [2, 4], [12, 4, 2, 4], [8, 4], [2, 4], [4, 4]];
  const COLORS = 7, LABEL = 11, FAINT = 0.25, NEAR_ZERO = 0.35, LEAST_DRAG = 8, LEAST_MOVE = 0.5, FAR = 1e5, MOST_TICKS = 100;
  const LEAST_SPAN = 1e-8; // of values, relative to them: less is rounding, since they come with 7 digits
  const pages = new WeakMap(), all = new Set(), settings = kept();

  function kept() {
    try { return JSON.parse(studio.kept('charts')) ?? {}; } catch { return {}; } // of another version
  }
  function keep(changes) {
    Object.assign(settings, changes);
    studio.kept('charts', JSON.stringify(settings));
  }

  // As trainer.view.numbers.smoothed: the bias correction of Adam, and the decay raised to the steps of each value.
  function smoothed(values, decay, counts) {
    let mean = 0, weight = 0;
    return values.map((value, at) => {
      if (value !== null) {
        const kept = decay ** (counts ? counts[at] : 1);
        mean = kept * mean + (1 - kept) * value;
        weight = kept * weight + (1 - kept);
      }
      return weight ? mean / weight : null;
    });
  }
  function number(value, digits = 4, unit = '') {
    if (value === null) return '–';
    if (unit === 'seconds') return fixed(value, 3);
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e9)) return trimmed(value.toExponential(digits - 1));
    if (size >= 10 ** digits) return fixed(value, 0);
    return value.toLocaleString('en-US', { maximumSignificantDigits: digits });
  }
  const fixed = (value, decimals) => value.toLocaleString('en-US', { maximumFractionDigits: decimals });
  const trimmed = text => text.replace(/\.?0+e/, 'e').replace('e+', 'e');
  function tickLabel(value, step) {
    if (!value) return '0';
    const size = Math.abs(value);
    if (size < 1e-3) return trimmed(value.toExponential(Math.max(0, digitsOf(step) - digitsOf(size))));
    const decimals = Math.max(0, digitsOf(step));
    return value.toLocaleString('en-US', { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }
  const digitsOf = value => -Math.floor(Math.log10(value) + 1e-9);
  function linearTicks(low, high, most, least = 0) {
    const raw = Math.max((high - low) / most, least), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(found => found >= raw * (1 - 1e-9));
    const found = [], first = Math.ceil(low / step - 1e-9);
    for (let k = 0; k <= MOST_TICKS && (first + k) * step <= high + step * 1e-9; k++) found.push({ at: (first + k) * step, step });
    return found;
  }
  function logTicks(low, high, most) {
    if (high < 3 * low) return linearTicks(low, high, most);
    for (const factors of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const factor of factors) {
          const at = factor * 10 ** power;
          if (at >= low && at <= high) found.push({ at, step: factor % 1 ? 10 ** (power - 1) : 10 ** power });
        }
      if (found.length <= most) return found.length > 1 ? found : linearTicks(low, high, most);
    }
    return linearTicks(low, high, most);
  }

  function firstAt(sorted, x) {  // index of the first that is at least x
    let low = 0, high = sorted.length;
    while (low < high) { const half = (low + high) >> 1; if (sorted[half] < x) low = half + 1; else high = half; }
    return low;
  }
  function indexAt(steps, step) {  // of the last that is not after step; -1 before the first
    const at = firstAt(steps, step);
    return steps[at] === step ? at : at - 1;
  }

  /** The elements of a chart, empty. */
  function skeleton(slider, logBox) {
    const button = (kind, text, properties) => h(`button.btn.s.${kind}`, { type: 'button', ...properties }, text);
    const parts = { canvas: h('canvas', { role: 'img', tabIndex: 0 }), readout: h('ul.readout'), cross: h('i.cross'), chosen: h('i.chosen') };
    const frame = svg('svg', { viewBox: '0 0 12 12', 'aria-hidden': 'true' }, svg('path', { d: 'M1 4V1h3M8 1h3v3M11 8v3H8M4 11H1V8' }));
    const area = h('div.area', {}, parts.canvas, parts.cross, parts.chosen);
    parts.figure = h('figure.chart', {}, h('figcaption', {}, h('h2'), h('b.now'), h('div.tools', {},
      h('label.smoothing', {}, 'Smoothing ', h('span.slider', {}, slider), h('b')), h('label.log', {}, logBox, 'log'),
      h('span.seg.axes', { role: 'group', 'aria-label': 'X axis' }, ['step', 'minutes'].map(axis =>
        h('button', { type: 'button', data: { axis } }, axis === 'step' ? 'step' : 'time'))),
      button('reset', 'Reset', { title: 'Also: double click' }), button('csv', 'CSV', { title: 'Download the data of the chart' }),
      button('png', 'PNG', { title: 'Download as an image' }), button('full', frame, { title: 'Full screen', 'aria-label': 'Full screen' }))),
    parts.readout, area, h('p.sr', { role: 'status' }));
    return parts;
  }

  studio.chart = function (container, { title, ylabel = title.toLowerCase(), small = false }) {
    const slider = h('input', { type: 'range', min: 0, max: 0.99, step: 0.01, 'aria-label': 'Smoothing' });
    const logBox = h('input', { type: 'checkbox' });
    const { figure, canvas, readout, cross, chosen } = skeleton(slider, logBox);
    const find = name => figure.querySelector(name), room = container.closest('.page') || document.body;
    if (!pages.has(room)) pages.set(room, { members: new Set(), at: null, range: null, source: null });
    const page = pages.get(room);
    let chart = null, scale = null, isWaiting = false;
    const means = new Map();
    const everywhere = act => page.members.forEach(act);
    container.append(figure);

    // ---------------------------------------------------------------- what is drawn
    const axisName = () => (chart.hasMinutes ? settings.axis ?? 'step' : 'step');
    const isLog = () => Boolean(settings.log?.[title]);
    const decayOf = line => settings.smoothing ?? line.decay;
    const xs = line => line.grid[axisName()];
    function mean(line) {
      const decay = decayOf(line), known = means.get(line);
      if (known?.decay === decay) return known.values;
      const last = line.values.findLastIndex(value => value !== null);  // a loss that is not a number any more has no mean
      const values = smoothed(line.values, decay, line.counts).map((value, at) => (at > last ? null : value));
      means.set(line, { decay, values });
      return values;
    }
    function paths(line) {  // what a line is drawn as: [kind, values], the faint ones first
      switch (line.look) {
        case 'noisy': return [['raw', line.values], ['smooth', mean(line)]];
        case 'smoothed': return [['smooth', mean(line)]];
        default: return [[line.look, line.values]];
      }
    }
    function inView(line, range) {
      const at = xs(line);
      return [Math.max(0, firstAt(at, range[0]) - 1), Math.min(at.length, firstAt(at, range[1]) + 1)];
    }
    function fullRange() {
      let low = Infinity, high = -Infinity;
      for (const { [axisName()]: at } of chart.grids) { low = Math.min(low, at[0]); high = Math.max(high, at.at(-1)); }
      return [low, high > low ? high : low + 1];
    }
    function xRange() {
      const full = fullRange();
      if (!page.range || page.range.axis !== axisName()) return full;
      const low = Math.max(full[0], page.range.from), high = Math.min(full[1], page.range.to);
      return high > low ? [low, high] : full;
    }
    function yRange(range, log) {
      const seen = [];
      for (const line of chart.lines) {
        const [from, to] = inView(line, range);
        for (const [kind, values] of paths(line)) {
          const few = column => column.slice(from, to).filter(value => value !== null && (!log || value > 0));
          if (kind === 'raw') {  // a few spikes do not flatten the rest
            const [low, high] = [line.low, line.high].map(column => few(column ?? values).sort((a, b) => a - b));
            seen.push(low[low.length * 0.01 | 0], high[Math.min(high.length - 1, high.length * 0.99 | 0)]);
          } else for (const value of few(values)) seen.push(value);
        }
      }
      let low = Infinity, high = -Infinity;
      for (const value of seen) if (value !== undefined) { low = Math.min(low, value); high = Math.max(high, value); }
      if (high < low) return null;
      if (high - low < LEAST_SPAN * Math.abs(high)) low = high;
      if (log) { const margin = Math.max((high / low) ** 0.05, 1.02); return [low / margin, high * margin]; }
      const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
      return [low >= 0 && low < NEAR_ZERO * high ? 0 : low - margin, high + margin];
    }

    // ---------------------------------------------------------------- drawing
    function drawSoon() {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => { isWaiting = false; draw(); });
    }
    function draw() {
      find('.reset').disabled = !page.range;
      if (!chart || !canvas.clientWidth) return;
      canvas.dataset.n = chart.lines.reduce((sum, line) => sum + line.values.filter(value => value !== null).length, 0);
      canvas.dataset.last = chart.lines.length ? fullRange()[1] : '';
      const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
      canvas.width = width * ratio; canvas.height = height * ratio;
      const pen = canvas.getContext('2d'); pen.scale(ratio, ratio);
      const log = isLog(), range = chart.lines.length ? xRange() : null, span = range && yRange(range, log);
      scale = null;
      if (span) {
        layOut(pen, width, height, range, span, log);
        chart.lines.forEach((line, index) => drawLine(pen, line, index));
      }
      showCross();
    }
    function layOut(pen, width, height, range, span, log) {
      const style = getComputedStyle(figure), of = name => style.getPropertyValue(name).trim();
      const isSmall = figure.classList.contains('small') && !document.fullscreenElement;
      const top = 8, bottom = height - (isSmall ? 22 : 40), f = log ? Math.log10 : value => value;
      pen.font = `${LABEL}px ${style.fontFamily}`; pen.textBaseline = 'middle'; pen.lineJoin = 'round';
      const most = Math.max(2, (bottom - top) / (isSmall ? 32 : 40));
      const marks = (log ? logTicks(...span, most * 1.5) : linearTicks(...span, most))
        .map(tick => ({ ...tick, text: tickLabel(tick.at, tick.step) }));
      const left = Math.ceil(Math.max(20, ...marks.map(mark => pen.measureText(mark.text).width)) + (isSmall ? 8 : 26));
      const right = width - 10, low = f(span[0]), high = f(span[1]);
      scale = {
        left, right, top, bottom, range,
        x: x => left + (x - range[0]) / (range[1] - range[0]) * (right - left),
        y: y => bottom - (f(y) - low) / (high - low) * (bottom - top),
        back: pixel => range[0] + (pixel - left) / (right - left) * (range[1] - range[0]),
        color: index => of(`--line-${index % COLORS}`) || '#2c57e0', ink: of('--ink') || '#17181c',
      };
      pen.fillStyle = of('--ink3') || '#62656f'; pen.strokeStyle = of('--line') || '#e3e3e7'; pen.lineWidth = 1;
      pen.textAlign = 'right';
      for (const mark of marks) {
        const y = Math.round(scale.y(mark.at)) + 0.5;
        pen.beginPath(); pen.moveTo(left, y); pen.lineTo(right, y); pen.stroke();
        pen.fillText(mark.text, left - 8, y);
      }
      drawXTicks(pen, width, isSmall);
      if (isSmall) return;
      pen.textAlign = 'center';
      pen.fillText(axisName(), (left + right) / 2, height - 7);
      pen.save(); pen.translate(8, (top + bottom) / 2); pen.rotate(-Math.PI / 2);
      pen.fillText(ylabel, 0, 0);
      pen.restore();
    }
    function drawXTicks(pen, width, isSmall) {
      const wide = scale.right - scale.left, least = axisName() === 'step' ? 1 : 0;
      let free = -Infinity;
      pen.textAlign = 'center';
      for (const { at, step } of linearTicks(...scale.range, Math.max(2, wide / (isSmall ? 70 : 80)), least)) {
        const text = tickLabel(at, step), half = pen.measureText(text).width / 2;
        const x = Math.min(Math.max(scale.x(at), half), width - half);  // a label is never cut by the edge
        if (x - half < free) continue;
        pen.fillText(text, x, scale.bottom + 13);
        free = x + half + 8;
      }
    }
    function drawLine(pen, line, index) {
      const [from, to] = inView(line, scale.range), at = xs(line), color = scale.color(index);
      pen.save();
      pen.beginPath(); pen.rect(scale.left - 4, 0, scale.right - scale.left + 8, scale.bottom + 1); pen.clip();
      for (const [kind, values] of paths(line)) {
        pen.strokeStyle = pen.fillStyle = kind === 'dots' ? scale.ink : color;
        pen.globalAlpha = kind === 'raw' ? FAINT : 1;
        pen.lineWidth = { raw: 1.01, dots: 1.5 }[kind] ?? 2;  // 1 is drawn piece by piece, darker at each bend
        pen.setLineDash(kind === 'raw' || kind === 'dots' ? [] : DASHES[index % COLORS]);
        if (kind === 'raw' && to - from > scale.right - scale.left) drawBand(pen, at, line, from, to);
        else stroke(pen, at, values, from, to, kind === 'raw' && line.low ? line : null);
        if (kind === 'dots') drawDots(pen, at, values, from, to);
      }
      pen.restore();
    }
    function place(value) { const y = scale.y(value); return Number.isFinite(y) ? y : FAR; }  // FAR: of 0 on a log axis
    function stroke(pen, at, values, from, to, spread) {
      let isDown = false, last = -Infinity;
      pen.beginPath();
      for (let i = from; i < to; i++) {
        if (values[i] === null) { isDown = false; continue; }
        const x = scale.x(at[i]), y = place(spread ? spread.low[i] : values[i]);
        if (isDown && x - last < LEAST_MOVE && i < to - 1 && !spread) continue;
        if (isDown) pen.lineTo(x, y); else { pen.moveTo(x, y); pen.lineTo(x + 0.5, y); }
        if (spread) pen.lineTo(x, place(spread.high[i]));
        isDown = true; last = x;
      }
      pen.stroke();
    }
    // More points than pixels: one bar from the lowest to the highest of each column. Lines would cover each other.
    function drawBand(pen, at, line, from, to) {
      const low = line.low ?? line.values, high = line.high ?? line.values, columns = new Map();
      for (let i = from; i < to; i++) {
        if (low[i] === null) continue;
        const x = Math.round(scale.x(at[i])), known = columns.get(x);
        if (!known) columns.set(x, [low[i], high[i]]);
        else { known[0] = Math.min(known[0], low[i]); known[1] = Math.max(known[1], high[i]); }
      }
      for (const [x, [bottom, top]] of columns) {
        const y = place(top);
        pen.fillRect(x, y, 1, Math.max(1, place(bottom) - y));
      }
    }
    function drawDots(pen, at, values, from, to) {
      const radius = to - from > 60 ? 1.5 : 3;
      for (let i = from; i < to; i++) {
        if (values[i] === null) continue;
        pen.beginPath(); pen.arc(scale.x(at[i]), scale.y(values[i]), radius, 0, 7); pen.fill();
      }
    }

    // ---------------------------------------------------------------- crosshair and readout
    // Charts share the step they are at, since minutes and steps of a run go together.
    function moveTo(step, isSpoken = false) {
      page.at = step;
      everywhere(member => member.showCross());
      if (isSpoken) find('.sr').textContent = readout.textContent;
    }
    function longest() { return chart.grids.reduce((best, grid) => (grid.step.length > best.step.length ? grid : best)); }
    function showCross() {
      if (!chart?.lines.length) {
        cross.style.visibility = 'hidden'; find('.now').textContent = ''; readout.replaceChildren();
        return;
      }
      const grid = longest(), isOn = page.at !== null && scale && page.at <= grid.step.at(-1) && page.at >= grid.step[0];
      const at = isOn ? indexAt(grid.step, page.at) : grid.step.length - 1;
      const x = isOn ? scale.x(grid[axisName()][at]) : -1;
      const isSeen = isOn && x >= scale.left - 0.5 && x <= scale.right + 0.5;
      cross.style.visibility = isSeen ? 'visible' : 'hidden';
      if (isSeen) Object.assign(cross.style, { transform: `translateX(${x}px)`, top: `${scale.top}px`,
        height: `${scale.bottom - scale.top}px` });
      read(grid, at);
    }
    function read(grid, at) {
      const isMinutes = axisName() === 'minutes', rows = [];
      const step = number(grid.step[at], 9), where = isMinutes ? `${fixed(grid.minutes[at], 2)} (step ${step})` : step;
      rows.push(item(isMinutes ? 'minute' : 'step', where));
      chart.lines.forEach((line, index) => {
        const own = indexAt(line.grid.step, grid.step[at]), isOther = own >= 0 && line.grid.step[own] !== grid.step[at];
        for (const [kind, values] of paths(line)) {
          const label = kind === 'smooth' && line.look === 'noisy' ? 'smoothed' : line.label;
          const count = kind === 'raw' && line.counts?.[own] > 1 ? `mean of ${line.counts[own]}` : '';
          const note = isOther ? `of ${number(line.grid.step[own], 9)}` : count;
          rows.push(item(label, number(own < 0 ? null : values[own], 4, ylabel), note, index, kind));
        }
      });
      readout.hidden = figure.classList.contains('small') && chart.lines.length < 2 && !document.fullscreenElement;
      readout.replaceChildren(...rows);
      const main = chart.lines[0], shown = paths(main).at(-1)[1], own = indexAt(main.grid.step, grid.step[at]);
      find('.now').textContent = small && own >= 0 ? number(shown[own], 3, ylabel) : '';
    }
    function item(label, value, note = '', index = null, kind = '') {
      const row = document.createElement('li'), strong = document.createElement('b');
      if (index !== null) {
        const mark = document.createElement('i');
        mark.className = kind;
        mark.style.setProperty('--color', kind === 'dots' ? 'var(--ink)' : `var(--line-${index % COLORS})`);
        if (kind !== 'raw' && kind !== 'dots' && DASHES[index % COLORS].length) mark.style.setProperty('--dash', 'dashed');
        row.append(mark);
      }
      strong.textContent = value;
      row.append(`${label} `, strong);
      if (note) { const small = document.createElement('small'); small.textContent = ` ${note}`; row.append(small); }
      return row;
    }

    // ---------------------------------------------------------------- zoom
    function zoom(from, to) {
      page.range = { axis: axisName(), from, to };
      everywhere(member => member.drawSoon());
    }
    function reset() {
      page.range = null;
      everywhere(member => member.drawSoon());
    }
    function zoomBy(factor) {
      if (!scale) return;
      const [low, high] = scale.range, full = fullRange(), grid = longest();
      const middle = page.at === null ? (low + high) / 2 : grid[axisName()][Math.max(0, indexAt(grid.step, page.at))];
      const half = (high - low) * factor / 2;
      if (half * 2 >= full[1] - full[0]) return reset();
      zoom(Math.max(full[0], middle - half), Math.min(full[1], middle + half));
    }
    function stepAt(pixel) {
      const grid = longest(), at = grid[axisName()], x = scale.back(pixel), after = Math.min(firstAt(at, x), at.length - 1);
      return grid.step[after > 0 && x - at[after - 1] < at[after] - x ? after - 1 : after];
    }
    const inside = pixel => Math.min(Math.max(pixel, scale.left), scale.right);
    let from = null;
    canvas.addEventListener('pointerdown', event => {
      if (!scale || event.button) return;
      from = inside(event.offsetX);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', event => {
      if (!scale) return;
      if (from !== null) {
        const to = inside(event.offsetX);
        Object.assign(chosen.style, { visibility: 'visible', top: `${scale.top}px`, height: `${scale.bottom - scale.top}px`,
          transform: `translateX(${Math.min(from, to)}px)`, width: `${Math.abs(from - to)}px` });
      }
      moveTo(stepAt(inside(event.offsetX)));
    });
    function endDrag(event) {
      const began = from;
      from = null; chosen.style.visibility = 'hidden';
      if (began === null || !scale || event.type !== 'pointerup') return;
      const to = inside(event.offsetX);
      if (Math.abs(to - began) >= LEAST_DRAG) zoom(scale.back(Math.min(began, to)), scale.back(Math.max(began, to)));
    }
    canvas.addEventListener('pointerup', endDrag);
    canvas.addEventListener('pointercancel', endDrag);
    canvas.addEventListener('pointerleave', () => { if (from === null) moveTo(null); });
    canvas.addEventListener('dblclick', reset);
    canvas.addEventListener('blur', () => moveTo(null));
    canvas.addEventListener('keydown', event => {
      if (!scale || event.ctrlKey || event.metaKey || event.altKey) return;
      const grid = longest(), last = grid.step.length - 1, now = page.at === null ? last : indexAt(grid.step, page.at);
      const step = event.shiftKey ? 10 : 1;
      const to = { ArrowLeft: now - step, ArrowRight: now + step, Home: 0, End: last }[event.key];
      if (to !== undefined) moveTo(grid.step[Math.min(Math.max(to, 0), last)], true);
      else if (event.key === '+' || event.key === '=') zoomBy(0.5);
      else if (event.key === '-') zoomBy(2);
      else if (event.key === 'Escape' && !document.fullscreenElement) { moveTo(null); reset(); }
      else return;
      event.preventDefault();
    });

    // ---------------------------------------------------------------- tools
    function choose(changes) {
      keep(changes);
      all.forEach(member => member.refresh());
    }
    slider.addEventListener('input', () => choose({ smoothing: Number(slider.value) }));
    slider.addEventListener('dblclick', () => choose({ smoothing: undefined }));  // each run's own again
    logBox.addEventListener('change', () => choose({ log: { ...settings.log, [title]: logBox.checked } }));
    for (const button of figure.querySelectorAll('[data-axis]'))
      button.addEventListener('click', () => choose({ axis: button.dataset.axis }));
    find('.reset').addEventListener('click', reset);
    find('.full').hidden = !document.fullscreenEnabled;
    find('.full').addEventListener('click', () =>
      document.fullscreenElement ? document.exitFullscreen() : figure.requestFullscreen());
    figure.addEventListener('fullscreenchange', () => { size(); drawSoon(); });
    const size = () => figure.classList.toggle('small', small && !document.fullscreenElement);
    const fileName = ending =>
      `${[chart.source, title].filter(Boolean).join(' ').replace(/[^\w.-]+/g, '-').toLowerCase()}.${ending}`;
    function download(blob, ending) {
      const link = document.createElement('a');
      link.href = URL.createObjectURL(blob);
      link.download = fileName(ending);
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    }
    function csv() {
      // A cell that begins like a formula would be one for a spreadsheet.
      const cell = text => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
      const names = chart.lines.flatMap(({ label, low }) =>
        low ? [label, `${label}, lowest`, `${label}, highest`] : [label]);
      const rows = new Map();
      let at = 0;
      for (const line of chart.lines) {
        for (const column of line.low ? [line.values, line.low, line.high] : [line.values]) {
          line.grid.step.forEach((step, index) => {
            if (!rows.has(step)) rows.set(step, [step, line.grid.minutes[index] ?? '']);
            rows.get(step)[2 + at] = column[index] ?? '';
          });
          at += 1;
        }
      }
      const sorted = [...rows.values()].sort((a, b) => a[0] - b[0]);
      const lines = sorted.map(row => Array.from({ length: 2 + at }, (_, index) => row[index] ?? '').join(','));
      return [['step', 'minutes', ...names].map(cell).join(','), ...lines, ''].join('\n');
    }
    find('.csv').addEventListener('click', () => chart && download(new Blob([csv()], { type: 'text/csv' }), 'csv'));
    find('.png').addEventListener('click', () => {
      if (!chart) return;
      const ratio = window.devicePixelRatio || 1, head = 44, style = getComputedStyle(figure);
      const sheet = document.createElement('canvas');
      sheet.width = canvas.width; sheet.height = canvas.height + head * ratio;
      const pen = sheet.getContext('2d');
      pen.fillStyle = style.getPropertyValue('--panel').trim() || '#ffffff'; pen.fillRect(0, 0, sheet.width, sheet.height);
      pen.drawImage(canvas, 0, head * ratio);
      pen.scale(ratio, ratio); pen.fillStyle = scale?.ink ?? '#17181c';
      pen.font = `600 14px ${style.fontFamily}`;
      pen.fillText([title, chart.source].filter(Boolean).join(' · '), 8, 18);
      pen.font = `12px ${style.fontFamily}`;
      let x = 8;
      chart.lines.forEach((line, index) => {
        pen.fillStyle = line.look === 'dots' ? scale?.ink : scale?.color(index);
        pen.fillText(line.label, x, 36); x += pen.measureText(line.label).width + 16;
      });
      sheet.toBlob(blob => download(blob, 'png'));
    });

    // ---------------------------------------------------------------- what comes in
    function set(text) {
      chart = JSON.parse(text);
      means.clear();
      chart.hasMinutes = chart.grids.length > 0 && chart.grids.every(grid => grid.minutes.length);
      for (const line of chart.lines) line.grid = chart.grids[line.grid];
      if (chart.source && page.source !== chart.source) { page.source = chart.source; page.range = page.at = null; }
      find('.sr').textContent = '';
      canvas.setAttribute('aria-label', chart.summary);
      refresh();
    }
    function refresh() {
      if (!chart) return;
      const smooth = chart.lines.filter(line => line.look === 'noisy' || line.look === 'smoothed');
      find('.smoothing').hidden = !smooth.length;
      const decays = new Set(smooth.map(decayOf)), [decay] = decays;
      if (decays.size && document.activeElement !== slider) slider.value = decay;
      slider.style.setProperty('--p', `${slider.value / slider.max * 100}%`);
      find('.smoothing b').textContent = decays.size > 1 ? 'by run' : decay?.toFixed(2) ?? '';
      slider.setAttribute('aria-valuetext', find('.smoothing b').textContent);
      logBox.checked = isLog();
      find('.axes').hidden = !chart.hasMinutes;
      for (const button of figure.querySelectorAll('[data-axis]'))
        button.setAttribute('aria-pressed', button.dataset.axis === axisName());
      drawSoon();
    }
    find('h2').textContent = title;
    size();
    const member = { drawSoon, showCross, refresh };
    page.members.add(member);
    all.add(member);
    new ResizeObserver(drawSoon).observe(canvas);
    return { set };
  };

  addEventListener('studio-theme', () => all.forEach(member => member.drawSoon()));
}
