// Drawing, without a library: elements, number formats, axes, tables, one tooltip.
'use strict';
const SVG = 'http://www.w3.org/2000/svg';

function el(tag, attributes, ...children) {
  const svg = ['svg', 'g', 'rect', 'path', 'line', 'text', 'circle', 'title', 'clipPath', 'defs'].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {}))
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  for (const child of children.flat()) if (child !== null) node.append(child);
  return node;
}

// Numbers as the command line writes them: binary units for memory, decimal for rates.
const units = [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]];
function bytes(b, digits = 2) {
  for (const [unit, size] of units) if (Math.abs(b) >= size) return (b / size).toFixed(digits) + ' ' + unit;
  return Math.round(b) + ' B';
}
function seconds(s) {
  const size = Math.abs(s);
  if (size >= 1 || size === 0) return s.toFixed(2) + ' s';
  if (size >= 1e-3) return (s * 1e3).toFixed(2) + ' ms';
  return (s * 1e6).toFixed(1) + ' µs';
}
const count = n => n.toLocaleString('en-US');
const percent = (x, sign) => (sign && x > 0 ? '+' : '') + (100 * x).toFixed(1) + ' %';
/// "0–3, 6": consecutive numbers joined.
function runs(list) {
  const out = [];
  for (const n of list) {
    const last = out[out.length - 1];
    if (last && n === last[1] + 1) last[1] = n; else out.push([n, n]);
  }
  return out.map(([a, b]) => a === b ? `${a}` : `${a}–${b}`).join(', ');
}
function number(x) {
  if (x === null) return 'nan';
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return x.toExponential(2);
  if (size >= 1e3) return count(Math.round(x));
  return Number.isInteger(x) ? count(x) : x.toPrecision(4).replace(/\.?0+$/, '');
}

/// Round positions between lo and hi, about n of them; steps of 1, 2 or 5 times a power of `base` units.
function ticks(lo, hi, n, unit = 1) {
  const raw = (hi - lo) / n / unit;
  if (!(raw > 0)) return [lo];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * power >= raw) * power * unit;
  const out = [];
  for (let t = Math.ceil(lo / step) * step; t <= hi * (1 + 1e-12); t += step) out.push(t);
  return out;
}
/// The unit a byte axis counts in, so that ticks fall on whole GiB, MiB or KiB.
const byteUnit = hi => (units.find(u => hi >= 2 * u[1]) || ['B', 1])[1];
function axisBytes(hi) {
  const unit = byteUnit(hi);
  const name = (units.find(u => u[1] === unit) || ['B'])[0];
  return ticks(0, hi, 5, unit).map(v => [v, (v / unit).toFixed(v / unit < 10 && v % unit ? 1 : 0) + ' ' + name]);
}
/// As many ticks as `width` pixels have room for.
function axisSeconds(lo, hi, width) {
  const n = Math.max(1, Math.min(8, Math.floor(width / 70)));
  const span = hi - lo;
  const [unit, size] = span >= 2 ? ['s', 1] : span >= 2e-3 ? ['ms', 1e-3] : ['µs', 1e-6];
  const at = ticks(lo, hi, n, size);
  const step = at.length > 1 ? (at[1] - at[0]) / size : 1;
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return at.map(v => [v, (v / size).toFixed(digits) + ' ' + unit]);
}

const tip = el('div', {id: 'tip'});
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? 'block' : 'none';
  const right = event.clientX + tip.offsetWidth + 24 > innerWidth;
  tip.style.left = event.clientX + (right ? -tip.offsetWidth - 14 : 14) + 'px';
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
}
const hideTip = () => { tip.style.display = 'none'; };
/// Attributes that show `text` while the pointer is over an element.
const hover = text => ({onmousemove: e => showTip(e, text), onmouseleave: hideTip});

function dot(colour) { return el('i', {class: 'dot', style: 'background:' + colour}); }

/// Columns: [title, left?]; cells: text, number or node.
function table(columns, rows) {
  const cell = (tag, content, column) => el(tag, {class: column[1] ? 'l' : null}, content);
  return el('div', {class: 'scroll'}, el('table', {},
    el('thead', {}, el('tr', {}, columns.map(c => cell('th', c[0], c)))),
    el('tbody', {}, rows.map(row => el('tr', {}, row.map((content, i) => cell('td', content ?? '', columns[i])))))));
}
function section(title, subtitle, ...children) {
  return el('section', {}, el('h2', {}, title), el('p', {class: 'sub'}, subtitle), ...children);
}
/// Every chart has its table.
function withTable(title, columns, rows) {
  return el('details', {}, el('summary', {}, 'Table: ' + title), table(columns, rows));
}
function legend(entries) {
  return el('div', {class: 'legend'},
    entries.map(([name, colour]) => el('span', {}, el('i', {style: 'background:' + colour}), name)));
}
function svg(width, height, ...children) {
  return el('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img'}, ...children);
}
function text(x, y, content, attributes) { return el('text', {x, y, ...attributes}, content); }
/// A chart drawn for the width that it is shown at, so that its text has one size on every screen; again when that
/// changes. draw(width in pixels) gives its picture, redraw() what else has changed.
function chart(draw) {
  const box = el('div', {});
  let width = 0;
  box.redraw = () => { if (width > 0) box.replaceChildren(draw(width)); };
  new ResizeObserver(() => { if (box.clientWidth && box.clientWidth !== width) { width = box.clientWidth; box.redraw(); } }).observe(box);
  return box;
}
const pen = document.createElement('canvas').getContext('2d');
pen.font = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';  // as svg text in style.css
const widthOf = content => pen.measureText(content).width;
/// Room for these labels at the left of their bars: what the longest needs, at most this share of the width.
function labelRoom(labels, width, share = 0.42) {
  return Math.min(Math.max(...labels.map(widthOf)) + 16, share * width);
}
/// Text that fits `width` pixels at our font size, or nothing; of what is too long the end is left out, or the begin of
/// names that tell most at their end.
function fitText(content, width, keepEnd = false) {
  const room = width - 8;
  if (room < 24) return widthOf(content) <= room ? content : '';
  const cut = n => keepEnd ? '…' + content.slice(content.length - n) : content.slice(0, n) + '…';
  if (widthOf(content) <= room) return content;
  let n = Math.min(content.length - 1, Math.ceil(content.length * room / widthOf(content)) + 2);
  while (n > 0 && widthOf(cut(n)) > room) --n;
  return n >= 3 ? cut(n) : '';
}

/// A window of time that several charts share: drag to zoom in, double click to see everything.
class TimeWindow {
  constructor(lo, hi) { this.all = [lo, hi]; this.lo = lo; this.hi = hi; this.listeners = []; }
  onchange(f) { this.listeners.push(f); f(); }
  set(lo, hi) {
    if (!(hi - lo > 1e-9)) return;
    this.lo = Math.max(lo, this.all[0]); this.hi = Math.min(hi, this.all[1]);
    for (const f of this.listeners) f();
  }
  reset() { this.set(...this.all); }
  /// Makes `node` a place to drag; `toTime` maps a mouse event to seconds, `mark` draws the selection or clears it.
  attach(node, toTime, mark) {
    let from = null;
    node.style.cursor = 'crosshair';
    node.addEventListener('mousedown', e => { from = toTime(e); e.preventDefault(); });
    node.addEventListener('mousemove', e => { if (from !== null) mark(from, toTime(e)); });
    addEventListener('mouseup', e => {
      if (from === null) return;
      const to = toTime(e), start = from;
      from = null;
      mark(null);
      if (Math.abs(to - start) > (this.hi - this.lo) / 200) this.set(Math.min(start, to), Math.max(start, to));
    });
    node.addEventListener('dblclick', () => this.reset());
  }
}
