// The report's data, its verdict, and the sections about memory. All numbers come from the JSON beside this script.
'use strict';
const D = JSON.parse(document.getElementById('data').textContent);
const S = D.summary, M = S.memory, main = document.getElementById('report');
const left = 104, right = 14;
const colourOf = Object.fromEntries(D.categories.map(c => [c.name, c.colour]));
const rowOf = new Map(M.by_rank.map(r => [r.rank, r]));
const who = rank => D.who[rank] || 'rank ' + rank;  // ranks that are alike are drawn once
const peakDrawn = D.drawn.includes(M.peak_rank) ? M.peak_rank : D.drawn[D.drawn.length - 1];
const K = S.kept, thinned = K.steps < K.of;  // a long run has rows of some steps, and totals of all
const metricNames = [...new Set(S.metrics.flatMap(m => Object.keys(m)))];
const wholeMetrics = thinned ? S.metrics.filter(m => 2 * Object.keys(m).length > metricNames.length) : S.metrics;
const steps = [...new Set(D.visits.filter(v => D.when[v[2]] === 'iteration').map(v => v[1]))].filter(s => s <= D.recorded.last_step).sort((a, b) => a - b);
const end = Math.max(1e-9, D.recorded.end_s);
const firstStep = D.visits.filter(v => v[1] === 1);
const view = new TimeWindow(0, end);
document.body.append(tip);
main.replaceChildren();

function verdict() {
  const need = M.mapped_peak_bytes + D.overhead_bytes, room = M.capacity_bytes - need;
  const parts = D.at_peak.rows.slice(0, 3).map(r => `${r.name}${r.buffers > 1 ? ` × ${r.buffers}` : ''} (${bytes(r.bytes)})`).join(', ');
  const by = M.by_rank.length ? Object.entries(rowOf.get(M.peak_rank).at_peak).filter(c => c[1] > 0 && c[0] !== 'overhead')
    .sort((a, b) => b[1] - a[1]).slice(0, 3).map(([c, b]) => `${c} ${bytes(b)} (${percent(b / M.peak_bytes)})`).join(', ') : '';
  const word = S.fits ? 'Fits' : 'Does not fit';
  const hostRefuses = !S.fits && room >= 0;
  const how = hostRefuses ? 'the host memory of a rank is too small' : M.capacity_bytes === 0 ? 'no capacity is set'
    : room >= 0 ? `${bytes(room)} to spare (${percent(room / M.capacity_bytes)})` : `${bytes(-room)} too much`;
  return el('section', {class: 'verdict' + (S.fits ? '' : ' no')}, el('span', {class: 'word'}, word), el('div', {},
    el('p', {}, el('b', {}, how + '. '), `The fullest GPU maps ${bytes(need)}` +
      (D.overhead_bytes ? ` with ${bytes(D.overhead_bytes)} overhead` : '') +
      (M.capacity_bytes ? ` of ${bytes(M.capacity_bytes)}.` : '.')),
    el('p', {class: 'sub'}, `Live bytes peak at ${bytes(M.peak_bytes)} on rank ${M.peak_rank} in phase ${M.peak_phase || '(none)'}: ${by}.` +
      (parts ? ` Largest buffers there: ${parts}.` : '')),
    S.priced_blocks.length ? el('p', {class: 'sub'}, `Priced blocks: ${S.priced_blocks.join(', ')}. They take what the closed form says; all else is the plan's.`) : null));
}

function tiles() {
  const c = D.comparison, last = S.metrics[S.metrics.length - 1] || {};
  const reward = Object.keys(last).find(k => /reward/.test(k));
  const tile = (value, label) => el('div', {class: 'tile'}, el('b', {}, value), el('span', {}, label));
  return el('div', {class: 'tiles'},
    tile(seconds(S.iteration_seconds), `per iteration, ${S.source}, mean of ${S.steps}`),
    tile(number(S.tokens_per_second), 'tokens trained per second'),
    S.mfu > 0 ? tile(percent(S.mfu), 'MFU of the train phase') : null,
    tile(count(D.num_ranks), D.folded ? `ranks, ${count(new Set(Object.values(D.who)).size)} of them drawn: others are like these` : 'ranks'),
    reward ? tile(number(last[reward]), `${reward} at step ${last.step}`) : null,
    c ? tile(c.equal ? 'equal' : 'not equal', `bytes and calls, ${c.a} and ${c.b}`) : null,
    c ? tile(percent(c.time_error.mean), 'mean error of predicted times') : null);
}

/// Index of the last point at or before t, or -1.
function pointAt(series, t) {
  let lo = -1, hi = series.t.length;
  while (hi - lo > 1) { const mid = (lo + hi) >> 1; if (series.t[mid] <= t) lo = mid; else hi = mid; }
  return lo;
}
/// One step-shaped band per category, bottom first; overhead lies below all.
function bands(series, x, y, lo, hi, overhead = D.overhead_bytes) {
  const from = Math.max(0, pointAt(series, lo)), points = [];
  for (let i = from; i < series.t.length && series.t[i] <= hi; ++i) points.push(i);
  if (!points.length) return [];
  const base = points.map(() => overhead);
  return D.categories.map((category, c) => {
    let upper = '', lower = '';
    points.forEach((p, k) => {
      const x0 = x(Math.max(lo, series.t[p])).toFixed(1);
      const x1 = x(k + 1 < points.length ? series.t[points[k + 1]] : Math.min(hi, end)).toFixed(1);
      const y0 = y(base[k]).toFixed(1);
      base[k] += series.bytes[p][c];
      const y1 = y(base[k]).toFixed(1);
      upper += `${k ? 'L' : 'M'}${x0},${y1}L${x1},${y1}`;
      lower = `L${x1},${y0}L${x0},${y0}` + lower;
    });
    return el('path', {d: upper + lower + 'Z', fill: category.colour});
  });
}
// A capacity far above all else is a line of text, for which there is room above what is drawn.
const capacityIsFar = M.capacity_bytes >= 1.7 * (M.mapped_peak_bytes + D.overhead_bytes);
const highest = Math.max(M.peak_bytes + D.overhead_bytes, M.mapped_peak_bytes + D.overhead_bytes,
  capacityIsFar ? 0 : M.capacity_bytes, 1);
const top_ = highest * (capacityIsFar ? 1.15 : 1.06);

function memoryChart(rank, W) {
  const H = 330, up = 24, bottom = H - 26, series = D.timeline[rank];
  const x = t => left + (t - view.lo) / (view.hi - view.lo) * (W - left - right);
  const y = b => bottom - b / top_ * (bottom - up);
  const inWindow = D.visits.filter(v => v[0] === rank && v[4] > view.lo && v[3] < view.hi);
  const g = [];
  inWindow.forEach((v, i) => {
    const a = x(Math.max(v[3], view.lo)), b = x(Math.min(v[4], view.hi));
    if (i % 2) g.push(el('rect', {x: a, y: up, width: b - a, height: bottom - up, fill: 'var(--band)'}));
    const label = fitText(D.phases[v[2]], b - a);
    if (label) g.push(text((a + b) / 2, up - 8, label, {'text-anchor': 'middle'}));
  });
  for (const [v, label] of axisBytes(top_)) g.push(
    el('line', {class: 'grid', x1: left, x2: W - right, y1: y(v), y2: y(v)}),
    text(left - 8, y(v) + 4, label, {'text-anchor': 'end'}));
  for (const [t, label] of axisSeconds(view.lo, view.hi, W - left)) g.push(text(x(t), H - 8, label, {'text-anchor': 'middle'}));
  if (D.overhead_bytes) g.push(el('rect', {x: left, width: W - left - right, y: y(D.overhead_bytes), height: bottom - y(D.overhead_bytes), fill: colourOf.overhead}));
  g.push(...bands(series, x, y, view.lo, view.hi));
  const level = (b, label, colour, dash, above = -5) => b && b < top_ ? g.push(
    el('line', {x1: left, x2: W - right, y1: y(b), y2: y(b), stroke: colour, 'stroke-width': 1.5, 'stroke-dasharray': dash}),
    text(W - right - 4, y(b) + above, label, {class: 'ink', 'text-anchor': 'end'})) : 0;
  level(M.capacity_bytes, 'capacity ' + bytes(M.capacity_bytes), 'var(--bad)', null);
  if (M.capacity_bytes >= top_) g.push(text(W - right - 4, up + 13, `↑ capacity ${bytes(M.capacity_bytes)}, above this picture`, {class: 'ink', 'text-anchor': 'end'}));
  const mapped = rowOf.get(rank).mapped_peak_bytes + D.overhead_bytes;
  const close = M.capacity_bytes < top_ && Math.abs(y(mapped) - y(M.capacity_bytes)) < 18;
  level(mapped, 'highest mapped ' + bytes(mapped), 'var(--soft)', '5 4', close ? 13 : -5);
  const cursor = el('line', {y1: up, y2: bottom, stroke: 'var(--ink)', opacity: 0});
  const selection = el('rect', {y: up, height: bottom - up, fill: 'var(--select)', width: 0});
  const surface = el('rect', {x: left, y: up, width: W - left - right, height: bottom - up, fill: 'transparent'});
  const picture = svg(W, H, ...g, cursor, selection, surface);
  const time = e => {
    const box = picture.getBoundingClientRect();
    return view.lo + Math.min(1, Math.max(0, (e.clientX - box.left - left) / (W - left - right))) * (view.hi - view.lo);
  };
  surface.addEventListener('mousemove', e => {
    const t = time(e), p = pointAt(series, t), v = inWindow.find(w => w[3] <= t && t < w[4]);
    cursor.setAttribute('opacity', 0.5); cursor.setAttribute('x1', x(t)); cursor.setAttribute('x2', x(t));
    const now = p < 0 ? [] : D.categories.map((c, i) => [c.name, series.bytes[p][i]]).filter(c => c[1] > 0);
    showTip(e, [`${seconds(t)}${v ? `, ${D.phases[v[2]]}, step ${v[1]}` : ''}`, ...now.reverse().map(([n, b]) => `${n}: ${bytes(b)}`),
      `live: ${bytes(now.reduce((a, c) => a + c[1], 0))}`].join('\n'));
  });
  surface.addEventListener('mouseleave', () => { hideTip(); cursor.setAttribute('opacity', 0); });
  view.attach(surface, time, (a, b) => {
    selection.setAttribute('width', a === null ? 0 : Math.abs(x(b) - x(a)));
    if (a !== null) selection.setAttribute('x', Math.min(x(a), x(b)));
  });
  return picture;
}

/// Host memory of a rank over the same window of time.
function hostChart(rank, W) {
  const H = 150, up = 8, bottom = H - 24, series = D.host_timeline[rank];
  if (!series || !series.t.length) return svg(W, 24, text(left, 16, 'nothing in host memory'));
  const most = Math.max(1, ...series.bytes.map(b => b.reduce((a, n) => a + n, 0))) * 1.08;
  const x = t => left + (t - view.lo) / (view.hi - view.lo) * (W - left - right), y = b => bottom - b / most * (bottom - up), g = [];
  for (const [v, label] of axisBytes(most)) g.push(el('line', {class: 'grid', x1: left, x2: W - right, y1: y(v), y2: y(v)}),
    text(left - 8, y(v) + 4, label, {'text-anchor': 'end'}));
  for (const [t, label] of axisSeconds(view.lo, view.hi, W - left)) g.push(text(x(t), H - 8, label, {'text-anchor': 'middle'}));
  g.push(...bands(series, x, y, view.lo, view.hi, 0));
  return svg(W, H, ...g);
}

function thumbnails(select) {
  const w = 260, h = 74;
  const grid = el('div', {style: 'display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:10px;margin-bottom:12px'});
  const marks = [];
  for (const rank of D.drawn) {
    const series = D.timeline[rank], x = t => t / end * w, y = b => h - b / top_ * h;
    const frame = el('rect', {x: 0.5, y: 0.5, width: w - 1, height: h - 1, rx: 4, fill: 'none', stroke: 'var(--line)'});
    const r = rowOf.get(rank);
    const button = el('div', {style: 'cursor:pointer', onclick: () => { mark(rank); select(rank); }},
      svg(w, h, ...bands(series, x, y, 0, end), M.capacity_bytes && M.capacity_bytes < top_ ?
        el('line', {x1: 0, x2: w, y1: y(M.capacity_bytes), y2: y(M.capacity_bytes), stroke: 'var(--bad)'}) : null, frame),
      el('span', {class: 'note'}, `${who(rank)}: ${bytes(r.peak_bytes)} live, ${bytes(r.mapped_peak_bytes)} mapped`));
    marks.push([rank, frame]);
    grid.append(button);
  }
  const mark = rank => marks.forEach(([r, f]) => { f.setAttribute('stroke', r === rank ? 'var(--accent)' : 'var(--line)'); f.setAttribute('stroke-width', r === rank ? 2 : 1); });
  mark(peakDrawn);
  return grid;
}

function zoomControls() {
  const buttons = [el('span', {}, 'Show'), el('button', {onclick: () => view.reset()}, 'everything')];
  for (const step of steps.filter(s => s > 0).slice(0, 12)) {
    const visits = D.visits.filter(v => v[1] === step);
    buttons.push(el('button', {onclick: () => view.set(Math.min(...visits.map(v => v[3])), Math.max(...visits.map(v => v[4])))}, 'step ' + step));
  }
  return el('div', {class: 'controls'}, ...buttons, el('span', {}, 'or drag over a chart; double click to go back'));
}

function memory() {
  let rank = peakDrawn;
  const picture = chart(width => D.timeline.length ? memoryChart(rank, width) : '');
  const hosts = D.host_timeline.some(s => s && s.t.length) ? chart(width => hostChart(rank, width)) : null;
  view.onchange(picture.redraw);
  if (hosts) view.onchange(hosts.redraw);
  const used = D.categories.filter(c => M.by_rank.some(r => r.category_peaks[c.name] > 0));
  const rows = [];
  for (const r of M.by_rank) for (const [phase, p] of Object.entries(r.phase_peaks))
    rows.push([r.rank, phase, bytes(p.peak_bytes), bytes(p.mapped_peak_bytes), ...used.map(c => p.by_category[c.name] ? bytes(p.by_category[c.name]) : '–')]);
  const host = M.by_rank.filter(r => r.host.peak_bytes > 0).map(r => [r.rank, bytes(r.host.peak_bytes),
    Object.entries(r.host.category_peaks).filter(c => c[1] > 0).map(([c, b]) => `${c} ${bytes(b)}`).join(', ')]);
  return section('Memory over time', 'Live bytes of each GPU by category, as the plan allocates and frees them. Pick a rank.' +
    (S.source === 'measured' ? ' What is measured stands where its stream came to it. Streams overlap, so what is alive together here may differ from the peaks of the table, which are counted in program order.' : '') + (D.drawn.length < D.num_ranks ? ` ${D.drawn.length} of ${count(D.num_ranks)} ranks are drawn${D.folded ? '; the others are like these, or have no room' : '; the table has all'}.` : '') +
    (S.source === 'simulated' ? ' A call, or a run of a block, is drawn at its peak from its beginning on.' : '') +
    (D.recorded.last_step < S.steps ? ` Events were kept for the first ${D.recorded.last_step} of ${S.steps} steps.` : ''),
    zoomControls(), thumbnails(r => { rank = r; picture.redraw(); if (hosts) hosts.redraw(); }), el('figure', {}, picture),
    hosts ? el('figure', {}, hosts, el('figcaption', {}, 'Host memory of the same rank: what sleeps, what is staged.')) : null, legend(used.map(c => [c.name, c.colour])),
    withTable('peak by rank and phase, with its composition', [['rank'], ['phase', 1], ['live'], ['mapped'], ...used.map(c => [c.name])], rows),
    host.length ? withTable('host memory', [['rank'], ['peak'], ['highest by category', 1]], host) : null);
}

/// Tensors as bars, with their table; `of`: rows, others, other_bytes that add up to `total`.
function tensorBars(of, total) {
  const names = of.rows.map(r => r.name + (r.buffers > 1 ? ` × ${count(r.buffers)}` : ''));
  const bars = w => {
    const row = 22, label = labelRoom(names, w, 0.5), hi = Math.max(1, ...of.rows.map(r => r.bytes)), g = [];
    of.rows.forEach((r, i) => {
      const width = Math.max(1, r.bytes / hi * (w - label - 84)), about = hover(`${names[i]}\n${r.category}: ${bytes(r.bytes)}`);
      g.push(text(label - 8, i * row + 15, fitText(names[i], label, true), {class: 'ink', 'text-anchor': 'end', ...about}),
        el('rect', {x: label, y: i * row + 4, width, height: row - 8, rx: 2, fill: colourOf[r.category], ...about}),
        text(label + width + 6, i * row + 15, bytes(r.bytes)));
    });
    return svg(w, of.rows.length * row + 4, ...g);
  };
  const rows = of.rows.map(r => [el('span', {}, dot(colourOf[r.category]), r.name), count(r.buffers), r.process ?? '', r.category, bytes(r.bytes), percent(r.bytes / total)]);
  if (of.others) rows.push([`${count(of.others)} others`, '', '', '', bytes(of.other_bytes), percent(of.other_bytes / total)]);
  rows.push(['all together', '', '', '', bytes(total), percent(1)]);
  return [el('figure', {}, chart(bars)),
    legend(D.categories.filter(c => of.rows.some(r => r.category === c.name)).map(c => [c.name, c.colour])),
    withTable('tensors alive then', [['tensor', 1], ['buffers'], ['process', 1], ['category', 1], ['size'], ['share']], rows)];
}
function peak() {
  if (!D.at_peak.rows.length) return null;
  return section('What makes the peak', `Alive when rank ${M.peak_rank} holds most, in phase ${M.peak_phase || '(none)'}; * stands for a number.`,
    ...tensorBars(D.at_peak, M.peak_bytes));
}
/// The same of the weight update, where two processes meet.
function syncPeak() {
  const P = S.live_at_peak.find(p => p.phase === 'sync');
  if (!P || !P.tensors.length) return null;
  const most = 14, rest = P.tensors.slice(most), sum = (list, key) => list.reduce((a, t) => a + t[key], 0);
  return section('What makes the peak of the weight update', `Alive when rank ${P.rank} holds most in phase sync: ${bytes(P.peak_bytes)}; * stands for a number.` +
    (D.overhead_bytes ? ` Beside them ${bytes(D.overhead_bytes)} of overhead (contexts, communicators) that the plan states and does not allocate.` : ''),
    ...tensorBars({rows: P.tensors.slice(0, most), others: sum(rest, 'buffers'), other_bytes: sum(rest, 'bytes')}, P.peak_bytes));
}

const processColours = {trainer: '#0072B2', engine: '#E69F00', working: '#56B4E9', host: '#999999'};
/// Step by step how trainer and engine take turns on one GPU: what is alive behind each step, and at most meanwhile.
function turns() {
  const T = S.timeline, list = T.steps;
  if (list.every(s => s.action === 'works')) return null;
  const title = s => s.tag === s.phase ? s.phase : `${s.phase}: ${s.tag} ${s.action}`;
  const time = s => s.seconds === null ? '' : seconds(s.seconds);
  const bars = w => {
    const narrow = w < 560, row = narrow ? 46 : 30, names = list.map(title), label = narrow ? 0 : labelRoom(names, w, 0.36), off = narrow ? 16 : 0;
    const hi = Math.max(1, M.capacity_bytes && M.capacity_bytes < 3 * M.peak_bytes ? M.capacity_bytes : 0, ...list.map(s => Math.max(s.device_bytes.peak, s.host_bytes.total)));
    const room = 138, x = b => label + b / hi * (w - label - room), g = [], bottom = list.length * row;
    for (const [v, name] of axisBytes(hi).filter(([v], i, all) => !narrow || i % 2 === 0 || all.length < 4)) g.push(el('line', {class: 'grid', x1: x(v), x2: x(v), y1: 0, y2: bottom}), text(x(v), bottom + 14, name, {'text-anchor': v ? 'middle' : 'start'}));
    if (M.capacity_bytes && M.capacity_bytes <= hi) g.push(el('line', {x1: x(M.capacity_bytes), x2: x(M.capacity_bytes), y1: 0, y2: bottom, stroke: 'var(--bad)', 'stroke-width': 1.5}));
    list.forEach((s, i) => {
      const y = i * row + off, d = s.device_bytes, about = hover([title(s), `${s.process}, ${s.action}${s.seconds === null ? '' : ', ' + seconds(s.seconds)}${s.waiting ? ` (waiting ${seconds(s.waiting)})` : ''}`,
        `device: trainer ${bytes(d.trainer)}, engine ${bytes(d.engine)}, at most ${bytes(d.peak)} meanwhile, ${bytes(d.mapped)} mapped`, `host: trainer ${bytes(s.host_bytes.trainer)}, engine ${bytes(s.host_bytes.engine)}`].join('\n'));
      g.push(text(narrow ? 0 : label - 8, narrow ? y : y + 17, narrow ? names[i] : fitText(names[i], label), {class: narrow ? 'ink over' : 'ink', 'text-anchor': narrow ? 'start' : 'end', ...about}));
      let at = 0;
      g.push(el('rect', {x: x(0), y: y + 4, width: Math.max(0, x(d.peak) - x(0)), height: 13, fill: 'none', stroke: 'var(--soft)', 'stroke-dasharray': '2 2', ...about}));
      for (const who of ['trainer', 'engine', 'working']) {
        if (d[who]) g.push(el('rect', {x: x(at), y: y + 4, width: x(at + d[who]) - x(at), height: 13, fill: processColours[who], ...about}));
        at += d[who];
      }
      if (s.host_bytes.total) g.push(el('rect', {x: x(0), y: y + 19, width: x(s.host_bytes.total) - x(0), height: 5, fill: processColours.host, ...about}));
      g.push(text(w, y + 15, d.total ? bytes(d.total) : 'empty', {class: 'ink', 'text-anchor': 'end'}), text(w - 70, y + 15, time(s), {'text-anchor': 'end'}));
    });
    return svg(w, bottom + 18, ...g);
  };
  const engines = list.some(s => s.device_bytes.engine || s.process === 'engine');
  return section('How trainer and engine take turns', `Rank ${T.rank}, step by step. Full bars: live bytes behind the step, by process; dashed: at most meanwhile; thin: host memory.` +
    (D.overhead_bytes ? ` Overhead (${bytes(D.overhead_bytes)}) comes on top.` : ''),
    el('figure', {}, chart(bars)),
    legend([['trainer', processColours.trainer], ...(engines ? [['engine', processColours.engine]] : []), ...(list.some(s => s.device_bytes.working) ? [['working memory', processColours.working]] : []), ['host memory', processColours.host], ...(M.capacity_bytes ? [['capacity', 'var(--bad)']] : [])]),
    withTable('step by step', [['phase', 1], ['process', 1], ['what', 1], ['does', 1], ['takes'], ['waiting'], ['trainer'], ['engine'], ['device'], ['at most'], ['mapped'], ['host, trainer'], ['host, engine']],
      list.map(s => [s.phase, s.process, s.tag, s.action, time(s), s.waiting === null ? '' : seconds(s.waiting), ...['trainer', 'engine', 'total', 'peak', 'mapped'].map(k => bytes(s.device_bytes[k])), bytes(s.host_bytes.trainer), bytes(s.host_bytes.engine)])));
}

/// Live bytes by category at the peak of each rank, side by side.
function composition() {
  const list = M.by_rank.slice(0, 16), hi = highest;
  const bars = w => {
    const row = 26, label = 60, x = b => label + b / hi * (w - label - 80), g = [];
    list.forEach((r, i) => {
      let at = 0;
      g.push(text(label - 8, i * row + 17, 'rank ' + r.rank, {'text-anchor': 'end'}));
      for (const c of D.categories) {
        const b = r.at_peak[c.name];
        if (b) g.push(el('rect', {x: x(at), y: i * row + 4, width: x(at + b) - x(at), height: row - 8, fill: c.colour, ...hover(`rank ${r.rank}, ${c.name}: ${bytes(b)}`)}));
        at += b;
      }
      g.push(text(x(hi) + 8, i * row + 17, bytes(at)));
    });
    if (M.capacity_bytes && M.capacity_bytes <= hi) g.push(el('line', {x1: x(M.capacity_bytes), x2: x(M.capacity_bytes), y1: 0, y2: list.length * row, stroke: 'var(--bad)', 'stroke-width': 1.5}));
    return svg(w, list.length * row + 4, ...g);
  };
  const used = D.categories.filter(c => M.by_rank.some(r => r.at_peak[c.name] > 0));
  return section('The peak of each rank', 'Composition when the live total is highest, with overhead; the red line is the capacity.',
    el('figure', {}, chart(bars)), legend(used.map(c => [c.name, c.colour])),
    withTable('composition at the peak', [['rank'], ...used.map(c => [c.name])], M.by_rank.map(r => [r.rank, ...used.map(c => r.at_peak[c.name] ? bytes(r.at_peak[c.name]) : '–')])));
}
