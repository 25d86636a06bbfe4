// The sections about time, traffic and learning; then the page, verdict first.
'use strict';

// Time ----------------------------------------------------------------------------------------------------------------

function gantt() {
  const rows = D.spans.rows, shownRanks = D.drawn.slice(0, 8), lanes = [];
  for (const r of shownRanks) for (let s = 0; s < D.streams.length; ++s)
    if (rows.some(p => p[0] === r && p[1] === s)) lanes.push([r, s]);
  if (!lanes.length) return null;
  const lane = 15, gap = 8, laneY = [];
  let y = 8;
  lanes.forEach(([r], i) => { if (i && lanes[i - 1][0] !== r) y += gap; laneY.push(y); y += lane; });
  const height = y + 26, canvas = el('canvas', {style: 'width:100%;display:block'}), number = new Map(lanes.map((l, i) => [l + '', i]));
  const cells = rows.filter(p => number.has([p[0], p[1]] + '')).map(p => [number.get([p[0], p[1]] + ''), p]);
  let selecting = null, W = 1160;  // as wide as it is shown
  const x = t => left + (t - view.lo) / (view.hi - view.lo) * (W - left - right);
  const draw = () => {
    const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue('--ink'), soft = style.getPropertyValue('--soft');
    const dpr = Math.max(1, devicePixelRatio || 1);
    W = canvas.clientWidth || W;
    canvas.width = W * dpr; canvas.height = height * dpr; canvas.style.height = height + 'px';
    const c = canvas.getContext('2d');
    c.setTransform(dpr, 0, 0, dpr, 0, 0);
    c.font = '11.5px system-ui, sans-serif'; c.textBaseline = 'middle';
    lanes.forEach(([r, s], i) => {
      c.fillStyle = style.getPropertyValue('--band').trim(); c.fillRect(x(view.lo), laneY[i] + 1, x(view.hi) - x(view.lo), lane - 2);
      if (!i || lanes[i - 1][0] !== r) { c.fillStyle = ink; c.textAlign = 'left'; c.fillText(D.folded ? fitText(who(r).replace(/^ranks? /, ''), left - 12 - c.measureText(D.streams[s].name).width) : 'rank ' + r, 0, laneY[i] + lane / 2); }
      c.fillStyle = soft; c.textAlign = 'right'; c.fillText(D.streams[s].name, left - 8, laneY[i] + lane / 2);
    });
    for (const [i, p] of cells) {
      if (p[7] < view.lo || p[6] > view.hi) continue;
      const a = Math.max(x(p[6]), x(view.lo)), b = Math.min(x(p[7]), x(view.hi));
      c.fillStyle = D.streams[p[1]].colour; c.fillRect(a, laneY[i] + 1.5, Math.max(0.6, b - a - (b - a > 3 ? 0.5 : 0)), lane - 3);
      if (p[9]) { c.fillStyle = ink; c.fillRect(a, laneY[i] - 0.5, Math.max(1, b - a), 2.5); }
      const label = fitText(D.spans.names[p[5]], b - a);
      if (label) { c.fillStyle = '#fff'; c.textAlign = 'left'; c.fillText(label, a + 3, laneY[i] + lane / 2 + 0.5); }
    }
    c.fillStyle = soft; c.textAlign = 'center';
    for (const [t, label] of axisSeconds(view.lo, view.hi, W - left)) c.fillText(label, x(t), height - 10);
    if (selecting) { c.fillStyle = style.getPropertyValue('--select').trim(); c.fillRect(x(selecting[0]), 0, x(selecting[1]) - x(selecting[0]), y); }
  };
  const place = e => { const box = canvas.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
  const time = e => view.lo + Math.min(1, Math.max(0, (place(e)[0] - x(view.lo)) / (x(view.hi) - x(view.lo)))) * (view.hi - view.lo);
  canvas.addEventListener('mousemove', e => {
    const [, py] = place(e), t = time(e), slack = (view.hi - view.lo) / W;
    const i = laneY.findIndex(top => py >= top && py < top + lane);
    const hit = cells.find(([l, p]) => l === i && p[6] - slack <= t && t <= p[7] + slack);
    if (!hit) return hideTip();
    const p = hit[1], s = p[7] - p[6];
    showTip(e, [D.spans.names[p[5]], `${D.spans.kinds[p[2]]} on ${D.streams[p[1]].name}, ${who(p[0])}, ${D.phases[p[3]]}, step ${p[4]}${p[9] ? ', on the critical path' : ''}`,
      seconds(s) + (p[8] ? `, ${bytes(p[8])}` + (s > 0 ? `, ${(p[8] / s / 1e9).toPrecision(3)} GB/s` : '') : '')].join('\n'));
  });
  canvas.addEventListener('mouseleave', hideTip);
  view.attach(canvas, time, (a, b) => { selecting = a === null ? null : [a, b]; draw(); });
  addEventListener('resize', draw);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  requestAnimationFrame(() => view.onchange(draw));
  const busy = lanes.map(([r, s], i) => [r, D.streams[s].name, cells.filter(c => c[0] === i)]).map(([r, s, mine]) => {
    const total = mine.reduce((a, [, p]) => a + p[7] - p[6], 0);
    return [r, s, count(mine.length), seconds(total), percent(total / end)];
  });
  const kept = D.spans.rows.length < D.spans.of ? ` ${count(D.spans.rows.length)} of ${count(D.spans.of)} operations, up to step ${D.spans.last_step}.` : '';
  const few = shownRanks.length < D.num_ranks ? ` Ranks ${runs(shownRanks)} of ${D.num_ranks}.` : '';
  return section('Who does what, when', `Operations by rank and stream; same window of time as above.${kept}${few}${S.source === 'simulated' ? ' What follows one another in a call is one; where a stay has no room for more, so is a run of a block, or all further ones.' : ''}`, el('figure', {}, canvas),
    legend([...D.streams.filter((s, i) => lanes.some(l => l[1] === i)).map(s => [s.name, s.colour]), ...(D.critical ? [[`on the critical path of step ${D.critical.step} (line on top)`, 'var(--ink)']] : [])]),
    withTable('busy time of each stream', [['rank'], ['stream', 1], ['operations'], ['busy'], ['of the time shown']], busy));
}

/// By phase: its longest chain of ops, and what it took beyond that.
function critical() {
  const C = D.critical;
  if (!C) return null;
  const list = C.phases.filter(p => p.elapsed_s > 0), total = list.reduce((a, p) => a + p.elapsed_s, 0);
  const bars = w => {
    const row = 24, label = labelRoom(list.map(p => p.phase), w), hi = Math.max(...list.map(p => Math.max(p.elapsed_s, p.busy_s)));
    const x = t => label + t / hi * (w - label - 70), g = [];
    list.forEach((p, i) => g.push(text(label - 8, i * row + 16, fitText(p.phase, label), {class: 'ink', 'text-anchor': 'end'}),
      el('rect', {x: label, y: i * row + 4, width: Math.max(0.5, x(p.busy_s) - label), height: row - 8, rx: 2, fill: '#0072B2', ...hover(`${p.phase}: ${seconds(p.busy_s)} on the path`)}),
      el('rect', {x: x(p.busy_s), y: i * row + 4, width: Math.max(0, x(p.busy_s + p.waiting_s) - x(p.busy_s)), height: row - 8, rx: 2, fill: '#999999', ...hover(`${p.phase}: ${seconds(p.waiting_s)} waiting`)}),
      text(x(p.busy_s + p.waiting_s) + 6, i * row + 16, seconds(p.elapsed_s))));
    return svg(w, list.length * row + 2, ...g);
  };
  const idle = C.waits.map(o => [o.name, o.phase, count(o.times), seconds(o.idle_s), percent(o.idle_s / total)]);
  return section('Critical path', `Step ${C.step} takes ${seconds(total)}: ${seconds(C.busy_s)} (${percent(C.busy_s / total)}) in the longest chain of operations that had to follow each other` + (C.waits.length ? `, ${seconds(total - C.busy_s)} in between, where it waits for what is no operation that it depends on` + (S.source === 'measured' ? ': a core, a host, a thread that wakes.' : '.') : ', and nothing in between.'),
    el('div', {class: 'beside', style: '--columns: minmax(0,4fr) minmax(0,6fr)'}, el('figure', {}, chart(bars), legend([['on the path', '#0072B2'], ['waiting', '#999999']])),
      table([['operations on the path', 1], ['kind', 1], ['times'], ['own time'], ['of the path']], C.ops.map(o => [o.name, o.kind, count(o.times), seconds(o.own_s), percent(o.own_s / C.busy_s)]))),
    idle.length ? withTable('what the path waits before', [['next on the path', 1], ['phase', 1], ['times'], ['idle before'], ['of the step']], idle) : null,
    withTable('the path by phase', [['phase', 1], ['elapsed'], ['on the path'], ['waiting'], ['waiting share']],
      list.map(p => [p.phase, seconds(p.elapsed_s), seconds(p.busy_s), seconds(p.waiting_s), percent(p.waiting_s / p.elapsed_s)])));
}

const inIteration = new Set(D.phases.filter((_, i) => D.when[i] === 'iteration'));
/// Each phase of an iteration: what a rank spends in it, mean over ranks and all steps; it starts where the one before
/// ends, as it does on every rank.
function meanPhases(summary) {
  let start = 0;
  return summary.phase_totals.filter(p => inIteration.has(p.name)).map(p => {
    const mean = p.seconds / p.times, phase = {...p, n: p.times, start, seconds: mean};
    start += mean * p.times / summary.steps;
    return phase;
  });
}
function waterfall() {
  const phases = meanPhases(S), before = D.predicted ? new Map(meanPhases(D.predicted).map(p => [p.name, p])) : new Map();
  if (!phases.length) return null;
  const hi = Math.max(...phases.map(p => p.start + p.seconds), ...[...before.values()].map(p => p.start + p.seconds));
  const total = phases.reduce((a, p) => a + p.seconds, 0), waits = phases.some(p => p.waiting !== null);
  const bars = w => {
    const row = 24, label = labelRoom(phases.map(p => p.name), w), x = t => label + t / hi * (w - label - 76), g = [];
    phases.forEach((p, i) => {
      const y = i * row, b = before.get(p.name);
      g.push(text(label - 8, y + 16, fitText(p.name, label), {class: 'ink', 'text-anchor': 'end'}));
      g.push(el('rect', {x: x(p.start), y: y + 4, width: Math.max(1, x(p.seconds) - label), height: row - 8, rx: 2, fill: '#0072B2',
        ...hover(`${p.name}: ${seconds(p.seconds)}, ${percent(p.seconds / total)}`)}));
      if (b) g.push(el('rect', {x: x(b.start), y: y + 4, width: Math.max(1, x(b.seconds) - label), height: row - 8, rx: 2, fill: 'none', stroke: '#E69F00', 'stroke-width': 2}));
      const ends = Math.max(x(p.start + p.seconds), b ? x(b.start + b.seconds) : 0);
      g.push(text(ends + 6, y + 16, seconds(p.seconds)));
    });
    for (const [t, name] of axisSeconds(0, hi, w - label)) g.unshift(el('line', {class: 'grid', x1: x(t), x2: x(t), y1: 0, y2: phases.length * row}),
      text(x(t), phases.length * row + 14, name, {'text-anchor': 'middle'}));
    return svg(w, phases.length * row + 20, ...g);
  };
  return section('One iteration, phase by phase', `What a rank spends in it, from entering to leaving, waiting included: mean over ranks${S.steps > 1 ? ` and all ${count(S.steps)} steps` : ''}.`,
    el('figure', {}, chart(bars)),
    D.predicted ? legend([[S.source, '#0072B2'], [D.predicted.source + ' (outline)', '#E69F00']]) : null,
    withTable('phases', [['phase', 1], ['times'], ['starts at'], ['takes'], ['share'], ...(waits ? [['waiting']] : []), ['shortest'], ['median'], ['95 %'], ['longest'], ['in step']],
      phases.map(p => [p.name, count(p.n), seconds(p.start), seconds(p.seconds), percent(p.seconds / total), ...(waits ? [p.waiting === null ? '–' : seconds(p.waiting)] : []), seconds(p.shortest), seconds(p.p50), seconds(p.p95), seconds(p.longest), p.longest_step])));
}

/// Bars of how many responses have which length, with the quantiles marked.
function lengthsChart() {
  const L = D.lengths, range = i => L.width === 1 ? `${i}` : `${i * L.width}–${(i + 1) * L.width - 1}`;
  const bars = w => {
    const h = 190, l = 48, b = h - 34, up = 18, n = L.counts.length, hi = Math.max(...L.counts);
    const bar = (w - l - 10) / n, x = tokens => l + tokens / L.width * bar, y = c => b - c / hi * (b - up), g = [];
    for (const v of ticks(0, hi, 4)) g.push(el('line', {class: 'grid', x1: l, x2: w - 10, y1: y(v), y2: y(v)}), text(l - 6, y(v) + 4, count(v), {'text-anchor': 'end'}));
    L.counts.forEach((c, i) => { if (c) g.push(el('rect', {x: l + i * bar + 0.5, y: y(c), width: Math.max(1, bar - 1), height: b - y(c), rx: 1.5, fill: '#0072B2', ...hover(`${range(i)} tokens: ${count(c)} responses (${percent(c / L.samples)})`)})); });
    for (const v of ticks(0, L.max, Math.min(8, (w - l) / 50)).filter(v => Number.isInteger(v))) g.push(text(x(v) + bar / 2, b + 15, count(v), {'text-anchor': 'middle'}));
    g.push(text((l + w) / 2, h - 2, 'tokens of the response', {'text-anchor': 'middle'}));
    const named = tokens => L.quantiles.filter(o => o[1] === tokens).map(o => `p${100 * o[0]}`).join(', ');
    L.quantiles.forEach(([q, tokens], i) => g.push(el('line', {x1: x(tokens) + bar / 2, x2: x(tokens) + bar / 2, y1: up - 4, y2: b, stroke: '#D55E00', 'stroke-width': 1.5, 'stroke-dasharray': '4 3'}),
      L.quantiles.findIndex(other => other[1] === tokens) === i ? text(Math.min(x(tokens) + bar / 2, w - widthOf(named(tokens)) / 2), up - 8, named(tokens), {class: 'ink', 'text-anchor': 'middle'}) : null));
    return svg(w, h, ...g.filter(n => n));
  };
  return [el('figure', {}, chart(bars), el('figcaption', {}, `${count(L.samples)} responses of all iterations: mean ${number(L.mean)}, longest ${count(L.max)} tokens; dashed: quantiles.`)),
    withTable('responses by length', [['tokens'], ['responses'], ['share'], ['as long or longer']],
      L.counts.map((c, i) => [range(i), count(c), percent(c / L.samples), percent(L.counts.slice(i).reduce((a, v) => a + v, 0) / L.samples)]).filter(r => r[1] !== '0'))];
}
function rollout() {
  if (!D.rollout.length) return null;
  const list = D.rollout.slice(0, 32), hi = Math.max(...list.map(r => r.busy_s + r.idle_s), 1e-12);
  const names = list.map(r => `engine ${r.engine} (rank${r.ranks.length > 1 ? 's' : ''} ${runs(r.ranks)})`);
  const bars = w => {
    const row = 24, label = labelRoom(names, w), x = t => label + t / hi * (w - label - 88), g = [];
    list.forEach((r, i) => g.push(text(label - 8, i * row + 16, fitText(names[i], label), {class: 'ink', 'text-anchor': 'end', ...hover(names[i])}),
      el('rect', {x: label, y: i * row + 4, width: x(r.busy_s) - label, height: row - 8, rx: 2, fill: colourOf.kv_cache, ...hover(`engine ${r.engine} generates for ${seconds(r.busy_s)}`)}),
      el('rect', {x: x(r.busy_s), y: i * row + 4, width: Math.max(0, x(r.busy_s + r.idle_s) - x(r.busy_s)), height: row - 8, rx: 2, fill: colourOf.overhead, ...hover(`engine ${r.engine} waits for ${seconds(r.idle_s)}`)}),
      text(x(r.busy_s + r.idle_s) + 6, i * row + 16, seconds(r.idle_s) + ' idle')));
    return svg(w, list.length * row + 2, ...g);
  };
  const idle = D.rollout.reduce((a, r) => a + r.idle_s * r.ranks.length, 0), all = D.rollout.reduce((a, r) => a + (r.busy_s + r.idle_s) * r.ranks.length, 0);
  const lengths = wholeMetrics.filter(m => 'response_length/mean' in m);
  return section('Rollout: lengths and the idle tail', `${percent(all ? idle / all : 0)} of the ranks' rollout time is waiting for the last engine.`,
    ...(D.lengths ? lengthsChart() : []),
    el('figure', {style: 'padding-top:14px'}, chart(bars), el('figcaption', {}, `How long each engine generates, and then waits for the last one; mean over its ranks and ${thinned ? `the ${count(K.steps)} steps with rows` : 'the steps'}${list.length < D.rollout.length ? `, the first ${list.length} engines` : ''}.`)),
    legend([['generating', colourOf.kv_cache], ['waiting for the last engine', colourOf.overhead]]),
    withTable('rollout by engine, mean over steps', [['engine'], ['ranks', 1], ['generating'], ['waiting'], ['idle share'], ['longest wait of a step']],
      D.rollout.map(r => [r.engine, runs(r.ranks), seconds(r.busy_s), seconds(r.idle_s), percent(r.idle_s / (r.busy_s + r.idle_s || 1)), seconds(r.longest_idle_s)])),
    lengths.length ? withTable('response lengths', [['step'], ['prompt mean'], ['response mean'], ['response max']],
      lengths.map(m => [m.step, number(m['prompt_length/mean'] ?? null), number(m['response_length/mean']), number(m['response_length/max'] ?? null)])) : null);
}

// Traffic -------------------------------------------------------------------------------------------------------------

function traffic() {
  if (!S.traffic_totals.length) return null;
  const n = Math.min(D.matrix.length, 64), hi = Math.max(1, ...D.matrix.flat()), o = 46, widest = o + n * Math.min(44, 420 / n);
  const matrix = w => {
    const cell = (Math.min(w, widest) - o) / n, g = [];
    for (let r = 0; r < n; ++r) {
      if (n <= 16 || r % 8 === 0) g.push(text(o - 6, o + r * cell + cell / 2 + 4, r, {'text-anchor': 'end'}), text(o + r * cell + cell / 2, o - 6, r, {'text-anchor': 'middle'}));
      for (let c = 0; c < n; ++c) {
        const b = D.matrix[r][c], strong = b / hi;
        g.push(el('rect', {x: o + c * cell, y: o + r * cell, width: cell - 1.5, height: cell - 1.5, rx: 2, fill: b ? colourOf.communication : 'var(--band)', 'fill-opacity': b ? 0.15 + 0.85 * strong : 1,
          ...hover(`rank ${r} to rank ${c}: ${bytes(b)}`)}));
        if (b && cell >= 40) g.push(text(o + c * cell + cell / 2, o + r * cell + cell / 2 + 4, bytes(b, 0), {class: strong > 0.7 ? 'on' : 'ink', 'text-anchor': 'middle', style: 'font-size:9.5px'}));
      }
    }
    g.push(text(o, 14, 'to rank →'), text(0, o + 4, '↓ from', {}));
    return svg(w, o + n * cell, ...g);
  };
  const rows = S.traffic_totals.map(t => [t.phase, t.group, t.op, runs(t.ranks), count(t.calls_per_rank), bytes(t.payload_bytes_per_rank), bytes(t.padding_bytes_per_rank), bytes(t.wire_bytes_per_rank)]);
  const columns = [['phase', 1], ['group', 1], ['op', 1], ['ranks', 1], ['calls'], ['payload'], ['padding'], ['wire']];
  return section('Traffic', 'Per rank, all steps together. Payload is the whole tensor (what one rank sends for all-to-all and point to point); wire is what a rank sends.',
    el('div', {class: 'beside', style: '--columns: minmax(0,1fr) minmax(220px,340px)'}, table(columns, rows),
      el('figure', {}, chart(matrix), el('figcaption', {}, `Wire bytes from rank to rank${D.matrix.length < D.num_ranks ? `, the first ${D.matrix.length} ranks` : ''}; rings send to the next rank of the group, all others evenly.`))),
    withTable('rank by rank', [['from'], ['to'], ['bytes']], D.matrix.flatMap((line, r) => line.map((b, c) => [r, c, b]).filter(e => e[2] > 0)).slice(0, 512).map(([r, c, b]) => [r, c, bytes(b)])));
}

/// Links of the cluster, those alike as one row, busiest first.
function links() {
  if (!S.links.length) return null;
  const most = 24, list = S.links.slice(0, most), title = l => l.name + (l.links > 1 ? `, ${count(l.links - 1)} alike` : ''), names = list.map(title);
  const bars = w => {
    const narrow = w < 560, row = narrow ? 36 : 22, off = narrow ? 14 : 0, label = narrow ? 0 : labelRoom(names, w), x = u => label + u * (w - label - 86), g = [];
    for (const u of narrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) g.push(el('line', {class: 'grid', x1: x(u), x2: x(u), y1: 0, y2: list.length * row}), text(x(u), list.length * row + 14, percent(u).replace('.0', ''), {'text-anchor': u || !narrow ? 'middle' : 'start'}));
    list.forEach((l, i) => {
      const y = i * row + off, about = hover(`${l.name}${l.links > 1 ? ` and ${count(l.links - 1)} alike` : ''}\n${bytes(l.bytes)} of ${(l.capacity_bytes_per_second / 1e9).toPrecision(3)} GB/s\nbusy for ${seconds(l.busy_seconds)}, at most ${percent(l.peak_utilisation)} full, ${percent(l.mean_utilisation)} on average`);
      g.push(text(narrow ? 0 : label - 8, narrow ? y : y + 15, narrow ? names[i] : fitText(names[i], label), {class: 'ink', 'text-anchor': narrow ? 'start' : 'end', ...about}),
        el('rect', {x: label, y: y + 5, width: Math.max(0.5, x(l.peak_utilisation) - label), height: row - 10, rx: 2, fill: colourOf.communication, 'fill-opacity': 0.25, ...about}),
        el('rect', {x: label, y: y + 5, width: Math.max(0.5, x(l.mean_utilisation) - label), height: row - 10, rx: 2, fill: colourOf.communication, ...about}),
        text(w, y + 15, bytes(l.bytes, 1), {'text-anchor': 'end'}));
    });
    return svg(w, list.length * row + 20, ...g);
  };
  return section('Traffic by link', 'What the cluster\'s links carried, one way each, busiest first; links that carried the same are one. Full: of their capacity, mean over the iterations; pale: the most at any time.',
    el('figure', {}, chart(bars)),
    withTable('links', [['link', 1], ['alike'], ['capacity'], ['bytes'], ['busy'], ['at most'], ['mean']],
      S.links.map(l => [l.name, count(l.links), (l.capacity_bytes_per_second / 1e9).toPrecision(3) + ' GB/s', bytes(l.bytes), seconds(l.busy_seconds), percent(l.peak_utilisation), percent(l.mean_utilisation)])));
}

// Learning, prediction, provenance ------------------------------------------------------------------------------------

function lineChart(name, points, w) {
  const h = 132, l = 52, b = h - 22, lo = Math.min(...points.map(p => p[1])), hi = Math.max(...points.map(p => p[1]));
  const pad = (hi - lo || Math.abs(hi) || 1) * 0.08, y0 = lo - pad, y1 = hi + pad, s0 = points[0][0], s1 = points[points.length - 1][0];
  const x = s => l + (s - s0) / (s1 - s0 || 1) * (w - l - 10), y = v => b - (v - y0) / (y1 - y0) * (b - 26), g = [text(0, 13, name, {class: 'ink'})];
  for (const v of ticks(y0, y1, 3)) g.push(el('line', {class: 'grid', x1: l, x2: w - 10, y1: y(v), y2: y(v)}), text(l - 6, y(v) + 4, number(Number(v.toPrecision(6))), {'text-anchor': 'end'}));
  for (const s of [...new Set(ticks(s0, s1, 4).map(Math.round))].filter(s => s >= s0 && s <= s1)) g.push(text(x(s), h - 6, s, {'text-anchor': 'middle'}));
  g.push(el('path', {d: points.map((p, i) => `${i ? 'L' : 'M'}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(''), fill: 'none', stroke: /reward/.test(name) ? '#009E73' : '#0072B2', 'stroke-width': 2}));
  const last = points[points.length - 1];
  g.push(el('circle', {cx: x(last[0]), cy: y(last[1]), r: 3, fill: 'var(--ink)', ...hover(`step ${last[0]}: ${number(last[1])}`)}));
  return svg(w, h, ...g);
}
function learning() {
  if (!S.metrics.length) return null;
  const names = metricNames.filter(k => k !== 'step')
    .sort((a, b) => /reward/.test(b) - /reward/.test(a) || /loss/.test(b) - /loss/.test(a) || a.localeCompare(b));
  const charts = S.metrics.length < 2 ? [] : names.map(k => [k, S.metrics.filter(m => typeof m[k] === 'number').map(m => [m.step, m[k]])])
    .filter(c => c[1].length > 1).slice(0, 12).map(c => chart(w => lineChart(...c, w)));
  const shown = thinned ? ` Of ${count(S.steps)} steps the curves show ${count(S.metrics.length)}: one in ${K.every}, and between them each figure's lowest and highest value, so that no spike is lost; metrics.jsonl has them all.` : '';
  const columns = [['step'], ...names.map(k => [k])], rows = wholeMetrics.map(m => [m.step, ...names.map(k => k in m ? number(m[k]) : '')]);
  if (!charts.length) return section('Figures of the driver', `Of ${S.steps === 1 ? 'the one step' : 'each step'}.`, table([['figure', 1], ...wholeMetrics.map(m => ['step ' + m.step])], names.map(k => [k, ...wholeMetrics.map(m => k in m ? number(m[k]) : '')])));
  return section('Learning', `The driver's figures, step by step.${shown}`,
    el('div', {style: 'display:grid;grid-template-columns:repeat(auto-fill,minmax(min(310px,100%),1fr));gap:14px 22px'}, ...charts),
    withTable('metrics', columns, rows));
}

/// Relative errors as bars to both sides of zero.
function errorBars(errors, c) {
  const hi = Math.max(0.05, ...errors.map(e => Math.abs(e[1])));
  const bars = w => {
    const row = 27.5, label = labelRoom(errors.map(e => e[0]), w, 0.36), middle = (w + label) / 2;
    const x = e => middle + e / hi * ((w - label) / 2 - 62), g = [el('line', {class: 'axis', x1: middle, x2: middle, y1: 0, y2: errors.length * row})];
    errors.forEach(([phase, e], i) => g.push(text(label - 8, i * row + 18, fitText(phase, label), {class: 'ink', 'text-anchor': 'end'}),
      el('rect', {x: Math.min(middle, x(e)), y: i * row + 7, width: Math.abs(x(e) - middle), height: row - 14, rx: 2, fill: e < 0 ? '#0072B2' : '#E69F00'}),
      text(x(e) + (e < 0 ? -6 : 6), i * row + 18, percent(e, true), {'text-anchor': e < 0 ? 'end' : 'start'})));
    return svg(w, errors.length * row + 4, ...g);
  };
  return el('figure', {style: 'padding-top:34px'}, chart(bars), legend([[`${c.a} is shorter`, '#0072B2'], [`${c.a} is longer`, '#E69F00']]));
}
function predicted() {
  const c = D.comparison;
  if (!c) return null;
  const order = c.totals.map(t => t.phase), sums = Object.fromEntries(c.totals.map(t => [t.phase, {a: t.a_seconds, b: t.b_seconds, n: t.times}]));
  const verdictLine = c.equal
    ? el('p', {}, el('span', {class: 'equal'}, 'Bytes and calls are equal: '), `all ${count(c.numbers_compared)} numbers of memory (every rank, category and phase) and traffic (every rank, group, operation and phase${thinned ? ', over all steps and in each step with rows' : ''}) are the same in both.`)
    : el('p', {}, el('span', {class: 'differs'}, `${count(c.differences.length)} of ${count(c.numbers_compared)} numbers differ.`));
  const e = c.time_error;
  return section(`Predicted over measured`, `${c.a} beside ${c.b}. Bytes are held to equality; times (what a rank spends in a phase, mean over ranks) are shown with their error.`, verdictLine,
    c.equal ? null : table([['rank'], ['step'], ['phase', 1], ['what', 1], [c.a], [c.b]], c.differences.slice(0, 100).map(d => [d.rank, d.step ?? 'all', d.phase ?? 'all', d.what, count(d.a), count(d.b)])),
    el('p', {}, `Error of phase times: mean ${percent(e.mean)} (weighted by time), max ${percent(e.max)} (phases over 1 %), total ${percent(e.total, true)}.`),
    el('div', {class: 'columns'},
      table([['phase', 1], ['times'], [c.a], [c.b], ['error']], order.map(p => { const s = sums[p]; return [p, count(s.n), seconds(s.a / s.n), seconds(s.b / s.n), s.b > 0 ? percent((s.a - s.b) / s.b, true) : '–']; })),
      errorBars(order.filter(p => sums[p].b > 0).map(p => [p, (sums[p].a - sums[p].b) / sums[p].b]), c)));
}

/// What was sampled: the best and the worst of the first and of the last step that has samples.
function samples() {
  if (!D.samples.length) return null;
  const tokens = list => list.length ? list.join(' ') : '–';
  const cut = (s, what) => s[what + '_tokens'] > s.tokens[what].length ? ` … (${count(s[what + '_tokens'])} tokens)` : '';
  const show = (s, what) => [el('code', {class: 'sample'}, (s.text ? s.text[what] : tokens(s.tokens[what])) + cut(s, what)), s.text ? el('span', {class: 'ids'}, tokens(s.tokens[what])) : ''];
  const mean = list => list && list.length ? number(list.reduce((a, v) => a + v, 0) / list.length) : '–';
  const has = (f) => D.samples.some(f), logps = (s, who) => mean(s.logprobs && s.logprobs[who]);
  const columns = [['step'], ['sample'], ['prompt', 1], ['response', 1]], cells = [s => s.step, s => s.sample, s => el('div', {}, ...show(s, 'prompt')), s => el('div', {}, ...show(s, 'response'))];
  const column = (title, wanted, cell) => { if (has(wanted)) { columns.push([title]); cells.push(cell); } };
  column('reward', s => 'reward' in s, s => number(s.reward));
  column('advantage', s => 'advantage' in s, s => number(s.advantage));
  column('log-prob, rollout', s => s.logprobs && s.logprobs.rollout, s => logps(s, 'rollout'));
  column('log-prob, training', s => s.logprobs && s.logprobs.training, s => logps(s, 'training'));
  return section('Samples', `${has(s => 'reward' in s) ? 'The best and the worst reward' : 'Samples'} of the first and the last step that has any in samples.jsonl, which holds more of them. Log-probs are means per token of the response; training's where the writing rank computed them.`,
    table(columns, D.samples.map(s => cells.map(c => c(s)))));
}

function provenance() {
  return section('Provenance', 'What this report was made from.',
    table([['', 1], ['', 1]], D.provenance.map(([k, v]) => [k, k === 'plan hash' ? el('code', {}, v) : v])));
}

const pair = (a, b) => a && b ? el('div', {class: 'columns'}, a, b) : a || b;
for (const part of [
  el('header', {}, el('h1', {}, S.scenario), el('span', {class: 'sub'}, `hotbunk ${S.source}, ${count(S.steps)} step${S.steps === 1 ? '' : 's'}, plan `, el('code', {}, S.plan_hash.slice(0, 12)), thinned ? ` · rows of ${count(K.steps)} of them` : '')),
  verdict(), tiles(), S.metrics.length > 1 ? learning() : null, turns(), memory(), gantt(), critical(), pair(waterfall(), rollout()), predicted(), pair(peak(), composition()), syncPeak(), traffic(), links(), S.metrics.length > 1 ? null : learning(), samples(), provenance(),
]) if (part) main.append(part);
// First in sight: the step whose critical path is drawn, else step 1.
const pathVisits = D.critical && D.critical.step <= D.spans.last_step ? D.visits.filter(v => v[1] === D.critical.step) : [];
const shown = pathVisits.length ? pathVisits : firstStep;
if (shown.length) view.set(Math.min(...shown.map(v => v[3])), Math.max(...shown.map(v => v[4])));
view.set(view.lo, view.hi);
// On paper nothing opens and nothing scrolls: small tables are printed, as they were they are again afterwards.
const closed = [];
addEventListener('beforeprint', () => {
  for (const d of document.querySelectorAll('details:not([open])')) if (d.querySelectorAll('tr').length <= 40) { d.open = true; closed.push(d); }
});
addEventListener('afterprint', () => { for (const d of closed.splice(0)) d.open = false; });
