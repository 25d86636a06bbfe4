// What `plan` says, as a page: the verdict, layouts, seconds against bytes, memory by moment, seconds, what if.
'use strict';
const D = JSON.parse(document.getElementById('data').textContent);
const E = D.explanation, C = D.search, main = document.getElementById('report');
const hues = ['#0072B2', '#E69F00', '#009E73', '#CC79A7', '#D55E00', '#56B4E9', '#F0E442', '#999999'];
const own = C && C.best.find(r => r.own);
document.body.append(tip);
main.replaceChildren();

/// Named amounts in one order, the same hue for the same name; the smallest beyond eight together.
function shades(parts) {
  const sums = new Map();
  for (const [name, amount] of parts) sums.set(name, (sums.get(name) || 0) + amount);
  const names = [...sums].sort((a, b) => b[1] - a[1]).filter(s => s[1] > 0).map(s => s[0]);
  const few = names.length > hues.length ? [...names.slice(0, hues.length - 1), 'other'] : names;
  return {names: few, hue: name => hues[Math.max(0, few.indexOf(few.includes(name) ? name : 'other'))]};
}

/// Bars of parts side by side. bars: [label, [[name, amount, why]…]]; limit: a line at that amount, with its name.
function stacked(bars, shade, unit, axis, limit) {
  const total = parts => parts.reduce((sum, p) => sum + p[1], 0);
  const hi = Math.max(...bars.map(b => total(b[1])), limit ? limit[0] : 0, 1e-12) * 1.02;
  return chart(w => {
    const row = 26, label = labelRoom(bars.map(b => b[0]), w), x = v => label + v / hi * (w - label - 84), g = [];
    for (const [v, name] of axis(hi, w - label)) g.push(el('line', {class: 'grid', x1: x(v), x2: x(v), y1: 0, y2: bars.length * row}), text(x(v), bars.length * row + 14, name, {'text-anchor': 'middle'}));
    bars.forEach(([name, parts], i) => {
      let at = 0;
      g.push(text(label - 8, i * row + 17, fitText(name, label), {class: 'ink', 'text-anchor': 'end', ...hover(name)}));
      for (const [part, amount, why] of parts) {
        if (amount > 0) g.push(el('rect', {x: x(at), y: i * row + 4, width: Math.max(0.5, x(at + amount) - x(at)), height: row - 8, fill: shade.hue(part),
          ...hover(`${name}: ${part} ${unit(amount)} (${percent(amount / total(parts))})${why ? '\n' + why : ''}`)}));
        at += Math.max(0, amount);
      }
      g.push(text(x(at) + 6, i * row + 17, unit(total(parts)), {class: 'over'}));
    });
    if (limit) g.push(el('line', {x1: x(limit[0]), x2: x(limit[0]), y1: -4, y2: bars.length * row, stroke: 'var(--bad)', 'stroke-width': 1.5, 'stroke-dasharray': '5 3', ...hover(`${limit[1]}: ${unit(limit[0])}`)}));
    return svg(w, bars.length * row + 20, ...g);
  });
}
const flagsOf = row => row.flags.length ? el('code', {class: 'flags'}, row.flags.map(f => '--set ' + (/[ \[\]{}]/.test(f) ? `'${f}'` : f)).join(' ')) : 'as it is';

function verdict() {
  const words = {fits: 'Fits', tight: 'Tight', no: 'Does not fit'}, fits = D.verdict !== 'no', need = E.mapped_bytes || E.peak_bytes;
  const why = E.priced ? `${bytes(need)} ${E.mapped_bytes ? 'mapped ' : ''}of ${bytes(E.capacity_bytes)} on the fullest rank, ${bytes(Math.abs(E.capacity_bytes - need))} ${E.capacity_bytes >= need ? 'to spare' : 'too much'}`
    + (E.host_capacity_bytes ? `; host ${bytes(E.host_bytes)} of ${bytes(E.host_capacity_bytes)}` : '') + '.' : `${E.why_not.message}: ${E.why_not.notes.join('; ')}.`;
  return el('section', {class: 'verdict' + (fits ? '' : ' no')}, el('span', {class: 'word'}, words[D.verdict]), el('div', {},
    el('p', {}, el('b', {}, why)), el('p', {class: 'sub'}, E.layout),
    E.priced && E.remedy ? el('p', {}, E.remedy) : null,
    ...D.why_not_lowered.map(w => el('p', {class: 'sub'}, `Priced, not lowered to a plan: ${w}.`)),
    ...(E.priced ? E.notes : []).map(n => el('p', {class: 'sub'}, n + '.')),
    ...D.findings.map(f => el('p', {class: 'sub'}, `${f.code} ${f.level}: ${f.what}${f.help ? '; ' + f.help : ''}.`))));
}
function tiles() {
  const best = C && C.best.find(r => r.fits), tile = (value, name) => el('div', {class: 'tile'}, el('b', {}, value), el('span', {}, name));
  if (!E.priced) return null;
  return el('div', {class: 'tiles'}, tile(seconds(E.iteration_seconds), `an iteration, ${D.seconds_error}`),
    own ? tile(count(Math.round(own.tokens_per_second_per_gpu)), 'tokens per second and GPU') : null,
    own ? tile(number(own.gpu_hours_per_million_samples), 'GPU-hours per million samples') : null,
    best && own && best !== own && own.fits ? tile(percent(best.iteration_seconds / own.iteration_seconds - 1, true), 'an iteration in the best layout that was found') : null);
}
const phasesOf = row => Object.entries(row.phases).filter(p => p[1] > 0);
function ranking() {
  if (!C || !C.best.length) return C && C.reason ? section('Layouts', C.reason) : null;
  let rank = 0;
  const names = C.best.map(r => (rank += r.fits ? 1 : 0, r.own ? 'yours' : `${rank}`)), shade = shades(C.best.flatMap(phasesOf));
  const columns = [['', 1], ['iteration'], ['tokens/s/GPU'], ['fullest'], ['at', 1], ['verdict', 1], ['layout', 1], ['flags', 1]];
  const row = (name, r) => [name, seconds(r.iteration_seconds), count(Math.round(r.tokens_per_second_per_gpu)), bytes(r.peak_bytes), r.fullest, r.verdict, el('span', {class: 'wide'}, r.layout), flagsOf(r)];
  return section(C.lowered ? 'Best layouts that execute' : 'Best layouts', `By ${C.objective}: ${count(C.priced)} of ${count(C.points)} combinations priced${C.complete ? ', the others are provably no better' : `, the best is within ${percent(C.gap)}`}; ${count(C.feasible)} fit in ${bytes(C.limit_bytes)}.`
      + (C.cuts.length ? ` Training cut by: ${C.cuts.join(', ')}.` : ''),
    el('figure', {}, stacked(C.best.map((r, i) => [names[i], phasesOf(r)]), shade, seconds, (hi, w) => axisSeconds(0, hi, w))), legend(shade.names.map(n => [n, shade.hue(n)])),
    table(columns, [...C.best.map((r, i) => row(names[i], r)), ...C.infeasible.map(r => [`${bytes(r.bytes_over)} too much`, ...row('', r).slice(1)]),
      ...C.beyond.map(r => ['only priced', ...row('', r).slice(1)])]));
}

/// Seconds against the fullest moment: what is not beaten in both, the scenario's own and what nearly fits.
function front() {
  if (!C || C.pareto.length < 2) return null;
  const all = [...C.pareto.map(r => [r, hues[0], 'not beaten']), ...C.infeasible.map(r => [r, hues[4], 'does not fit']), ...(own ? [[own, hues[1], 'yours']] : [])];
  const lo = Math.min(...all.map(a => a[0].iteration_seconds)), hi = Math.max(...all.map(a => a[0].iteration_seconds)), top = 1.05 * Math.max(C.limit_bytes, ...all.map(a => a[0].peak_bytes));
  const picture = chart(w => {
    const h = 300, l = 66, b = h - 40, pad = (hi - lo || hi) * 0.05, x = s => l + (s - lo + pad) / (hi - lo + 2 * pad) * (w - l - 16), y = v => b - v / top * (b - 10), g = [];
    for (const [v, name] of axisBytes(top)) g.push(el('line', {class: 'grid', x1: l, x2: w - 16, y1: y(v), y2: y(v)}), text(l - 8, y(v) + 4, name, {'text-anchor': 'end'}));
    for (const [s, name] of axisSeconds(lo - pad, hi + pad, w - l)) g.push(text(x(s), b + 16, name, {'text-anchor': 'middle'}));
    g.push(el('line', {x1: l, x2: w - 16, y1: y(C.limit_bytes), y2: y(C.limit_bytes), stroke: 'var(--bad)', 'stroke-width': 1.5, 'stroke-dasharray': '5 3'}), text(w - 16, y(C.limit_bytes) - 6, 'what fits', {'text-anchor': 'end', class: 'over'}));
    for (const [r, hue, what] of all) g.push(el('circle', {cx: x(r.iteration_seconds), cy: y(r.peak_bytes), r: 5, fill: hue, 'fill-opacity': 0.85, ...hover(`${seconds(r.iteration_seconds)}, ${bytes(r.peak_bytes)} at ${r.fullest} (${what})\n${r.layout}`)}));
    g.push(text((l + w) / 2, h - 4, 'seconds of an iteration', {'text-anchor': 'middle'}));
    return svg(w, h, ...g);
  });
  return section('Seconds against memory', 'Layouts that no other beats in both: iteration and fullest moment of a rank.', el('figure', {}, picture),
    legend([['not beaten', hues[0]], ['yours', hues[1]], ['would be better, does not fit', hues[4]]]),
    withTable('layouts that are not beaten', [['iteration'], ['fullest'], ['at', 1], ['layout', 1]], C.pareto.map(r => [seconds(r.iteration_seconds), bytes(r.peak_bytes), r.fullest, el('span', {class: 'wide'}, r.layout)])));
}

const partsOf = node => node.children && node.children.length ? node.children.map(c => [c.name, c.bytes ?? c.seconds, c.why]) : [['all of it', node.bytes ?? node.seconds, node.why]];
/// A tree as rows: name, amount, why; deeper ones moved in.
function rowsOf(node, unit, depth = 0) {
  return [[el('span', {style: `padding-left:${14 * depth}px`}, node.name), unit(node.bytes ?? node.seconds), el('span', {class: 'wide'}, node.why || '')], ...(node.children || []).flatMap(c => rowsOf(c, unit, depth + 1))];
}
function moments() {
  if (!E.priced || !E.memory.children) return null;
  const list = E.memory.children, shade = shades(list.flatMap(partsOf));
  return section('Memory by moment', `Of the fullest rank; the dashed line is its ${bytes(E.capacity_bytes)}.` + (E.mapped_bytes ? ` Its plan maps ${bytes(E.mapped_bytes)}, which is what has to fit.` : ''),
    el('figure', {}, stacked(list.map(m => [m.name, partsOf(m)]), shade, bytes, axisBytes, E.capacity_bytes > 0 ? [E.capacity_bytes, 'capacity'] : null)),
    legend(shade.names.map(n => [n, shade.hue(n)])),
    withTable('what each moment holds', [['', 1], ['bytes'], ['why', 1]], list.flatMap(m => rowsOf(m, bytes))));
}
function time() {
  if (!E.priced || !E.time.children) return null;
  const list = E.time.children, shade = shades(list.flatMap(partsOf));
  return section('Where the seconds go', `${seconds(E.iteration_seconds)} an iteration, ${D.seconds_error}.`,
    el('figure', {}, stacked(list.map(p => [p.name, partsOf(p)]), shade, seconds, (hi, w) => axisSeconds(0, hi, w))), legend(shade.names.map(n => [n, shade.hue(n)])),
    withTable('seconds by phase and term', [['', 1], ['seconds'], ['', 1]], list.flatMap(p => rowsOf(p, seconds))));
}
function sensitivity() {
  const list = (D.sensitivity || []).filter(s => Math.max(Math.abs(s.minus), Math.abs(s.plus)) > 1e-4).slice(0, 14);
  if (!list.length) return null;
  const hi = Math.max(...list.flatMap(s => [Math.abs(s.minus), Math.abs(s.plus)])), change = c => percent(c, true).replace('.0', '');
  const picture = chart(w => {
    const row = 24, label = labelRoom(list.map(s => s.number), w, 0.45), middle = (w + label) / 2, x = v => middle + v / hi * ((w - label) / 2 - 56), g = [el('line', {class: 'axis', x1: middle, x2: middle, y1: 0, y2: list.length * row})];
    list.forEach((s, i) => {
      g.push(text(label - 8, i * row + 16, fitText(s.number, label, true), {class: 'ink', 'text-anchor': 'end', ...hover(s.number)}));
      for (const [v, by, hue, fits] of [[s.minus, s.minus_change, hues[0], s.minus_fits], [s.plus, s.plus_change, hues[1], s.plus_fits]])
        g.push(el('rect', {x: Math.min(middle, x(v)), y: i * row + (hue === hues[0] ? 4 : row / 2), width: Math.abs(x(v) - middle), height: row / 2 - 4, fill: hue, ...hover(`${s.number} ${change(by)}: ${percent(v, true)} seconds${fits ? '' : ', and does not fit'}`)}));
    });
    return svg(w, list.length * row + 4, ...g);
  });
  return section('What if a number is off', 'Seconds of an iteration when one number of the hardware or the workload changes by a tenth, all else as it is.', el('figure', {}, picture), legend([['less', hues[0]], ['more', hues[1]]]),
    withTable('all numbers', [['number', 1], ['changed by'], ['seconds'], ['changed by'], ['seconds']], (D.sensitivity || []).map(s => [s.number, change(s.minus_change), percent(s.minus, true) + (s.minus_fits ? '' : ', too large'), change(s.plus_change), percent(s.plus, true) + (s.plus_fits ? '' : ', too large')])));
}
function levers() {
  if (!E.priced || !E.levers.length) return null;
  const signed = (v, unit) => (v > 0 ? '+' : v < 0 ? '−' : '') + unit(Math.abs(v));
  return section('Levers', 'What one change buys, the best time first.', table([['change', 1], ['seconds'], ['bytes'], ['fits', 1], ['flags', 1]],
    E.levers.map(l => [l.change, signed(l.seconds, seconds), signed(l.bytes, bytes), l.fits ? 'yes' : 'no', flagsOf(l)])));
}
function provenance() {
  return section('Stands on', '', table([['', 1], ['', 1]], [['hardware', E.hardware], ['framework profile', E.framework], ...D.provenance].map(([k, v]) => [k, el('span', {class: 'wide'}, v)])));
}

for (const part of [el('header', {}, el('h1', {}, D.scenario), el('span', {class: 'sub'}, `hotbunk plan, ${count(D.ranks)} ranks`)),
  verdict(), tiles(), ranking(), front(), moments(), time(), sensitivity(), levers(), provenance()]) if (part) main.append(part);
