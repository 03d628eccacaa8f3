"use strict";
// Every text from the graph reaches the page through textContent or the canvas, never as HTML.
const everything = JSON.parse(document.getElementById("data").textContent);
const wish = new URLSearchParams(location.hash.slice(1));
const graphNumber = Math.max(0, Math.min(everything.graphs.length - 1, Number(wish.get("graph") || 0)));
const page = everything.graphs[graphNumber];
const { states, records, report } = page;
const $ = id => document.getElementById(id);
const canvas = $("canvas"), pen = canvas.getContext("2d");
const PAD = 16, HEAD = 26, GAP = 26;
const view = { x: 0, y: 0, scale: 1, width: 0, height: 0 };
let at = Math.max(0, states.length - 1), before = false, plain = true, selected = null, hovered = null, colours = {};
const open = new Set();

function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.flat().filter(c => c !== null && c !== undefined && c !== ""));
  return node;
}
const shown = () => states[before && at > 0 ? at - 1 : at];
const record = key => records[shown().nodes[key][0]];
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
function amount(n, unit) {
  if (typeof n !== "number") return n === undefined || n === null ? "" : `${n} ${unit}`;
  const steps = ["", "k", "M", "G", "T"];
  let i = 0;
  while (n >= 1000 && i < 4) { n /= 1000; i += 1; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)} ${steps[i]}${unit}`;
}

// ---- Geometry: the layout comes from Python with all groups closed; rows make room for those that are open.

let measured = new Map();
function measure(id) {
  if (measured.has(id)) return measured.get(id);
  const group = shown().groups[id], count = group.row.length;
  const w = [], h = [], grown = [];
  for (let i = 0; i < count; i++) {
    const box = group.boxes[i];
    if (!box) { w.push(10); h.push(0); grown.push(0); continue; }
    let bw = box.w, bh = box.h;
    if (box.g && open.has(box.g)) {
      const inner = measure(box.g);
      bw = Math.max(box.w, inner.w + 2 * PAD); bh = inner.h + HEAD + 2 * PAD;
    }
    w.push(bw); h.push(bh); grown.push(bw - box.w);
  }
  const rows = group.heights.map(() => []);
  group.row.forEach((row, i) => rows[row].push(i));
  const x = new Array(count), y = new Array(count), tops = [];
  let top = 0, left = 0, right = 0;
  rows.forEach((row, r) => {
    row.sort((a, b) => group.x[a] - group.x[b]);
    const total = row.reduce((sum, i) => sum + grown[i], 0);
    let passed = 0;
    for (const i of row) {
      x[i] = group.x[i] + passed / 2 - (total - passed - grown[i]) / 2;
      passed += grown[i];
      left = Math.min(left, x[i] - w[i] / 2); right = Math.max(right, x[i] + w[i] / 2);
    }
    const height = row.reduce((most, i) => Math.max(most, h[i]), group.heights[r]);
    for (const i of row) y[i] = top + (height - h[i]) / 2;
    tops.push([top, height]);
    top += height + GAP;
  });
  for (let i = 0; i < count; i++) x[i] -= left;
  const result = { group, x, y, tops, boxW: w, boxH: h, w: right - left, h: Math.max(0, top - GAP) };
  measured.set(id, result);
  return result;
}
function places(visit) {
  // Every box on the page, outer before inner, with its absolute position.
  (function walk(id, ox, oy, depth) {
    const m = measure(id);
    m.group.boxes.forEach((box, i) => {
      const p = { box, i, m, x: ox + m.x[i] - m.boxW[i] / 2, y: oy + m.y[i], w: m.boxW[i], h: m.boxH[i], depth };
      if (visit(p) === false) return;
      if (box.g && open.has(box.g)) walk(box.g, p.x + (p.w - measure(box.g).w) / 2, p.y + HEAD + PAD, depth + 1);
    });
  })(shown().root, 0, 0, 0);
}
const same = (a, b) => a && b && a.t === b.t && (a.k !== undefined ? a.k === b.k : a.g === b.g && String(a.v) === String(b.v));
function find(wanted) {
  let found = null;
  places(p => { if (!found && wanted(p)) found = p; return !found; });
  return found;
}
function parents() {
  const up = {};
  for (const [id, group] of Object.entries(shown().groups))
    for (const box of group.boxes) {
      if (box.g) up[box.g] = id;
      if (box.k !== undefined) up[`k${box.k}`] = id;
    }
  return up;
}
function reveal(key) {
  const up = parents();
  for (let id = up[`k${key}`]; id && id !== shown().root; id = up[id]) open.add(id);
  measured.clear();
}

// ---- Changes: which nodes the pass at hand added, removed or rewired, counted up the groups.

let marks = new Map(), counts = new Map();
function mark() {
  marks = new Map(); counts = new Map();
  const state = states[at];
  if (plain) return;
  if (before) for (const k of state.removed || []) marks.set(k, "removed");
  else {
    for (const k of state.added || []) marks.set(k, "added");
    for (const k of state.rewired || []) marks.set(k, "rewired");
  }
  const up = parents();
  for (const [key, kind] of marks)
    for (let id = up[`k${key}`]; id; id = up[id]) {
      const c = counts.get(id) || { added: 0, removed: 0, rewired: 0 };
      c[kind] += 1; counts.set(id, c);
    }
}

// ---- Drawing

function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["bg", "panel", "ink", "dim", "faint", "line", "accent", "edge", "group", "group2", "group-line", "added", "removed",
    "rewired", "select", "hover", "c-kernel", "c-declared", "c-contraction", "c-reduction", "c-pointwise", "c-view", "c-opaque", "c-write", "c-source", "ui", "mono"];
  colours = Object.fromEntries(names.map(n => [n, style.getPropertyValue(`--${n}`).trim()]));
}
function rounded(x, y, w, h, r) { pen.beginPath(); pen.roundRect(x, y, w, h, r); }
const fitted = new Map();
function fit(text, width, font) {
  const id = `${font}|${width | 0}|${text}`;
  if (!fitted.has(id)) {
    pen.font = font;
    let out = text;
    while (out.length > 1 && pen.measureText(out === text ? out : `${out}…`).width > width) out = out.slice(0, -1);
    fitted.set(id, out === text ? text : `${out}…`);
  }
  return fitted.get(id);
}
function write(text, x, y, width, font, colour, align = "left") {
  pen.fillStyle = colour; pen.textAlign = align;
  const out = fit(text, width, font);
  pen.font = font;
  pen.fillText(out, x, y);
}
let queued = false;
function draw() {
  if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; paint(); }); }
}
function paint() {
  const ratio = devicePixelRatio || 1, { width, height } = view;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colours.bg; pen.fillRect(0, 0, width, height);
  if (!states.length) return;
  pen.setTransform(ratio * view.scale, 0, 0, ratio * view.scale, ratio * view.x, ratio * view.y);
  const seen = { left: -view.x / view.scale, top: -view.y / view.scale, right: (width - view.x) / view.scale, bottom: (height - view.y) / view.scale };
  pen.textBaseline = "middle";
  paintGroup(shown().root, 0, 0, seen, 0);
}
function paintGroup(id, ox, oy, seen, depth) {
  const m = measure(id), focus = selected || hovered;
  const chosen = m.group.boxes.findIndex(box => same(box, focus)), over = m.group.boxes.findIndex(box => same(box, hovered));
  const bright = [];
  for (const edge of m.group.edges) {
    if (edge[0] === chosen || edge[2] === chosen || edge[0] === over || edge[2] === over) bright.push(edge);
    else if (!edge[3]) paintEdge(m, ox, oy, edge, seen, false);
  }
  for (const edge of bright) paintEdge(m, ox, oy, edge, seen, true);
  m.group.boxes.forEach((box, i) => {
    const x = ox + m.x[i] - m.boxW[i] / 2, y = oy + m.y[i], w = m.boxW[i], h = m.boxH[i];
    if (x > seen.right || y > seen.bottom || x + w < seen.left || y + h < seen.top) return;
    if (box.g && open.has(box.g)) {
      paintFrame(box, x, y, w, h, depth);
      paintGroup(box.g, x + (w - measure(box.g).w) / 2, y + HEAD + PAD, seen, depth + 1);
    } else paintBox(box, x, y, w, h);
  });
}
function paintEdge(m, ox, oy, [a, bends, b, far], seen, bright) {
  const [x0, y0, x1, y1] = [ox + m.x[a], oy + m.y[a] + m.boxH[a], ox + m.x[b], oy + m.y[b]];
  if (!far && (Math.max(y0, y1) < seen.top || Math.min(y0, y1) > seen.bottom)) return;
  pen.strokeStyle = bright ? colours.select : colours.edge;
  pen.lineWidth = bright ? 2 : 1.25;
  pen.setLineDash(far ? [5, 4] : []);
  pen.beginPath(); pen.moveTo(x0, y0);
  let x = x0, y = y0;
  const bendTo = (tx, ty) => {
    if (Math.abs(tx - x) < 0.5) pen.lineTo(tx, ty); else { const my = (y + ty) / 2; pen.bezierCurveTo(x, my, tx, my, tx, ty); }
    x = tx; y = ty;
  };
  if (far && y1 < y0) {
    const side = Math.max(x0, x1) + 90;
    pen.bezierCurveTo(side, y0 + 30, side, y1 - 30, x1, y1);
  } else {
    for (const bend of bends) {
      const [top, height] = m.tops[m.group.row[bend]], bx = ox + m.x[bend];
      bendTo(bx, oy + top - 2); bendTo(bx, oy + top + height + 2);
    }
    bendTo(x1, y1 - 4);
  }
  pen.stroke(); pen.setLineDash([]);
  if (view.scale > 0.3) {
    pen.fillStyle = pen.strokeStyle;
    pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x1 - 3.6, y1 - 6.5); pen.lineTo(x1 + 3.6, y1 - 6.5); pen.fill();
  }
}
const tone = box => box.k !== undefined ? colours[`c-${record(box.k).category}`] : colours["group-line"];
function outline(box, x, y, w, h, r) {
  const change = box.k !== undefined ? marks.get(box.k) : null;
  if (change) {
    pen.strokeStyle = colours[change]; pen.lineWidth = 2.4; pen.setLineDash(change === "rewired" ? [6, 3] : []);
    rounded(x - 1.5, y - 1.5, w + 3, h + 3, r + 1.5); pen.stroke(); pen.setLineDash([]);
    pen.globalAlpha = 0.13; pen.fillStyle = colours[change]; pen.fill(); pen.globalAlpha = 1;
  }
  if (same(box, selected) || same(box, hovered)) {
    pen.strokeStyle = colours.select; pen.lineWidth = same(box, selected) ? 2.4 : 1.4;
    rounded(x - 1.5, y - 1.5, w + 3, h + 3, r + 1.5); pen.stroke();
  }
}
function badge(box, right, y) {
  const c = box.g && counts.get(box.g);
  if (!c || view.scale < 0.25) return;
  let x = right - 8;
  for (const [kind, sign] of [["rewired", "~"], ["removed", "−"], ["added", "+"]]) {
    if (!c[kind]) continue;
    const text = sign + c[kind];
    pen.font = `600 10.5px ${colours.ui}`;
    const w = pen.measureText(text).width;
    write(text, x - w, y, 60, `600 10.5px ${colours.ui}`, colours[kind]);
    x -= w + 7;
  }
}
function chevron(x, y, down) {
  pen.strokeStyle = colours.dim; pen.lineWidth = 1.7; pen.beginPath();
  if (down) { pen.moveTo(x - 4, y - 2); pen.lineTo(x, y + 2.5); pen.lineTo(x + 4, y - 2); } else { pen.moveTo(x - 2, y - 4); pen.lineTo(x + 2.5, y); pen.lineTo(x - 2, y + 4); }
  pen.stroke();
}
function paintFrame(box, x, y, w, h, depth) {
  const region = box.k !== undefined;
  rounded(x, y, w, h, 10);
  pen.fillStyle = depth % 2 ? colours.group2 : colours.group; pen.fill();
  if (region) { pen.globalAlpha = 0.07; pen.fillStyle = tone(box); pen.fill(); pen.globalAlpha = 1; }
  pen.strokeStyle = tone(box); pen.lineWidth = region ? 1.8 : 1.2; pen.stroke();
  outline(box, x, y, w, h, 10);
  if (view.scale < 0.16) return;
  chevron(x + 14, y + 14, true);
  write(box.l, x + 26, y + 14.5, w - (counts.has(box.g) ? 84 : 40), `600 12.5px ${region ? colours.mono : colours.ui}`, region ? tone(box) : colours.ink);
  badge(box, x + w, y + 14);
}
function paintBox(box, x, y, w, h) {
  if (box.t === "i" || box.t === "o") {
    rounded(x, y, w, h, h / 2); pen.fillStyle = colours.hover; pen.fill();
    pen.strokeStyle = colours["group-line"]; pen.lineWidth = 1; pen.stroke();
    outline(box, x, y, w, h, h / 2);
    if (view.scale > 0.3) write(box.l, x + w / 2, y + h / 2 + 0.5, w - 10, `11px ${colours.ui}`, colours.dim, "center");
    return;
  }
  const colour = tone(box), plain = box.k === undefined;
  rounded(x, y, w, h, 7); pen.fillStyle = colours.panel; pen.fill();
  if (plain) { // a closed module: a second sheet behind it
    pen.strokeStyle = colours["group-line"]; pen.lineWidth = 1.2;
    rounded(x + 3, y + 3, w, h, 7); pen.stroke(); rounded(x, y, w, h, 7); pen.fill();
  }
  pen.strokeStyle = plain ? colours["group-line"] : colour; pen.lineWidth = 1.2; pen.stroke();
  if (!plain) {
    pen.save(); rounded(x, y, w, h, 7); pen.clip(); pen.fillStyle = colour; pen.fillRect(x, y, 5, h);
    if (box.g) { pen.globalAlpha = 0.1; pen.fillRect(x, y, w, h); }
    pen.restore();
  }
  outline(box, x, y, w, h, 7);
  if (view.scale < 0.22) return;
  const indent = box.g ? 25 : 13;
  if (box.g) chevron(x + (plain ? 13 : 15), y + h / 2, false);
  const two = box.s && view.scale > 0.42, y1 = two ? y + h / 2 - 7.5 : y + h / 2;
  write(box.l, x + indent, y1, w - indent - 8, `600 12px ${plain ? colours.ui : colours.mono}`, colours.ink);
  if (two) write(box.s, x + indent, y + h / 2 + 8.5, w - indent - 8, `10.5px ${plain ? colours.ui : colours.mono}`, colours.dim);
  badge(box, x + w, plain ? y + h / 2 + 8.5 : y1);
}

// ---- Camera

function resize() {
  const box = $("stage").getBoundingClientRect(), ratio = devicePixelRatio || 1;
  view.width = box.width; view.height = box.height;
  canvas.width = Math.round(box.width * ratio); canvas.height = Math.round(box.height * ratio);
  draw();
}
function frame(x, y, w, h, most = 1) {
  const scale = Math.min(most, (view.width - 80) / Math.max(w, 1), (view.height - 130) / Math.max(h, 1));
  view.scale = Math.max(0.05, scale);
  view.x = view.width / 2 - (x + w / 2) * view.scale;
  view.y = Math.max(60, (view.height - h * view.scale) / 2) - y * view.scale;
  draw();
}
function frameAll() {
  if (!states.length) return;
  const m = measure(shown().root);
  frame(0, 0, m.w, m.h);
  if (view.scale < 0.45) { // too tall to read: start at the top at a legible size
    view.scale = Math.min(0.9, Math.max(view.scale, Math.min(0.75, (view.width - 80) / m.w)));
    view.x = (view.width - m.w * view.scale) / 2; view.y = 64;
  }
  draw();
}
function centre(p, scale = Math.max(view.scale, 0.8)) {
  view.scale = scale;
  view.x = view.width / 2 - (p.x + p.w / 2) * scale;
  view.y = Math.min(view.height * 0.4, view.height / 2) - (p.y + Math.min(p.h, 120) / 2) * scale;
  draw();
}
function keeping(box, change) {
  // Run a change of the layout while the box stays where it is on the screen.
  const was = box && find(p => same(p.box, box));
  change();
  measured.clear();
  const now = was && find(p => same(p.box, box));
  if (now) { view.x += (was.x - now.x + (was.w - now.w) / 2) * view.scale; view.y += (was.y - now.y) * view.scale; }
  draw();
}
function toggle(box) { keeping(box, () => open.has(box.g) ? open.delete(box.g) : open.add(box.g)); }
function zoom(factor, x = view.width / 2, y = view.height / 2) {
  const scale = Math.min(3, Math.max(0.04, view.scale * factor)), ratio = scale / view.scale;
  view.x = x - (x - view.x) * ratio; view.y = y - (y - view.y) * ratio; view.scale = scale;
  draw();
}

// ---- Pointer

function under(event) {
  const box = canvas.getBoundingClientRect();
  const x = (event.clientX - box.left - view.x) / view.scale, y = (event.clientY - box.top - view.y) / view.scale;
  let hit = null;
  places(p => {
    const inside = x >= p.x && x <= p.x + p.w && y >= p.y && y <= p.y + p.h;
    if (inside) hit = { ...p, px: x, py: y };
    return inside;
  });
  if (hit && hit.box.g && open.has(hit.box.g) && hit.py > hit.y + HEAD) return null;
  return hit;
}
let drag = null;
canvas.addEventListener("pointerdown", e => { drag = { x: e.clientX, y: e.clientY, vx: view.x, vy: view.y, moved: false }; canvas.setPointerCapture(e.pointerId); });
canvas.addEventListener("pointermove", e => {
  if (drag) {
    const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
    if (drag.moved || Math.hypot(dx, dy) > 4) { drag.moved = true; canvas.classList.add("drag"); view.x = drag.vx + dx; view.y = drag.vy + dy; draw(); }
    return;
  }
  const hit = under(e);
  canvas.classList.toggle("over", Boolean(hit));
  if (!same(hit && hit.box, hovered)) { hovered = hit && hit.box; draw(); }
});
canvas.addEventListener("pointerup", e => {
  const click = drag && !drag.moved;
  drag = null; canvas.classList.remove("drag");
  if (!click) return;
  const hit = under(e);
  if (!hit) return select(null);
  const box = hit.box, arrow = box.g && hit.px < hit.x + 25;
  if (box.g && (box.k === undefined || arrow || open.has(box.g))) { if (box.k !== undefined && !arrow) select(box); toggle(box); } else select(box);
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("dblclick", e => { const hit = under(e); if (hit && hit.box.g && hit.box.k !== undefined) toggle(hit.box); });
canvas.addEventListener("wheel", e => {
  e.preventDefault();
  const box = canvas.getBoundingClientRect();
  if (e.shiftKey) { view.x -= e.deltaY; draw(); } else zoom(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0014)), e.clientX - box.left, e.clientY - box.top);
}, { passive: false });

// ---- Panels

function select(box) {
  selected = box;
  details();
  for (const row of document.querySelectorAll("#list .row")) row.classList.toggle("on", Boolean(box) && row.dataset.key === String(box.k));
  draw();
}
function goTo(key) {
  if (shown().nodes[key] === undefined) {
    const i = states.findLastIndex(s => s.nodes[key] !== undefined);
    if (i < 0) return;
    step(i);
  }
  reveal(key);
  const p = find(q => q.box.k === key);
  if (p) { select(p.box); centre(p); }
}
function nameOf([ref, index]) {
  if (typeof ref === "string") return (shown().inputs[ref] || [ref])[0];
  return record(ref).label + (record(ref).types.length > 1 ? ` · ${index}` : "");
}
function typeOf([ref, index]) { return typeof ref === "string" ? (shown().inputs[ref] || ["", ""])[1] : record(ref).types[index]; }
function endRow(name, ref) {
  const jump = typeof ref[0] === "number" && shown().nodes[ref[0]] !== undefined && record(ref[0]).op !== "constant";
  const text = jump ? el("button", { className: "link", textContent: nameOf(ref), onclick: () => goTo(ref[0]) }) : el("span", { textContent: nameOf(ref) });
  return el("tr", {}, el("td", { textContent: name }), el("td", {}, text, el("div", { className: "note", textContent: typeOf(ref) })));
}
const sourceText = ([module, file, line]) => [module, file && `${file}:${line}`].filter(Boolean).join(", ");
function byLine(sources) {
  const lines = new Map();
  for (const [module, file, line, op, text] of sources) {
    const id = `${module}|${file}|${line}|${text}`;
    if (!lines.has(id)) lines.set(id, [module, file, line, [], text]);
    if (op) lines.get(id)[3].push(brief(op));
  }
  return [...lines.values()].map(([module, file, line, ops, text]) => [module, file, line, ops.join(", "), text]);
}
function sourceBlock(source) {
  const [module, file, line, op, text] = source;
  return el("div", { className: "source" }, text ? el("code", { textContent: text }) : "", el("span", { textContent: [module, file && `${file}:${line}`, op].filter(Boolean).join("   ") }));
}
function remarkBlock(r) {
  return el("div", { className: "remark" }, el("span", { className: `tag ${r.kind}`, textContent: r.kind }), ` ${r.application === null || r.application === undefined ? "" : `#${r.application} `}${r.message}`,
    r.reason ? el("span", { className: "note", textContent: r.reason }) : "", r.suggestion ? el("span", { className: "note", textContent: `→ ${r.suggestion}` }) : "",
    el("span", { className: "note", textContent: [r.pass_name, ...(r.sources || []).slice(0, 2)].filter(Boolean).join(" · ") }));
}
const WORDS = /(\/\/[^\n]*|#[^\n]*|\/\*[\s\S]*?\*\/|"""[\s\S]*?""")|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\b(auto|bool|break|class|const|constexpr|continue|def|double|else|extern|float|for|from|if|import|in|inline|int|int64_t|int32_t|long|not|or|and|return|size_t|static|struct|template|typename|using|void|while|tl|triton|None|True|False)\b|\b(\d[\w.]*)/g;
function code(text) {
  const pre = el("pre");
  let last = 0;
  for (const found of text.matchAll(WORDS)) {
    pre.append(text.slice(last, found.index), el("span", { className: found[1] ? "c" : found[2] ? "s" : found[3] ? "k" : "d", textContent: found[0] }));
    last = found.index + found[0].length;
  }
  pre.append(text.slice(last));
  return pre;
}
function details() {
  const panel = $("right"), box = selected, add = (...parts) => panel.append(...parts.flat().filter(p => p !== ""));
  const wasHidden = panel.hidden;
  panel.hidden = !box || box.k === undefined && !box.v;
  if (panel.hidden !== wasHidden) resize();
  if (panel.hidden) return;
  panel.replaceChildren(el("button", { className: "close", textContent: "×", title: "Close (Esc)", onclick: () => select(null) }));
  panel.scrollTop = 0;
  if (box.k === undefined) {
    add(el("span", { className: "tag", textContent: box.t === "i" ? "input" : "output" }), el("h2", { textContent: box.l }), el("p", { className: "note", textContent: typeOf(box.v) }));
    if (typeof box.v[0] === "number") add(el("button", { className: "link", textContent: "go to what computes it", onclick: () => goTo(box.v[0]) }));
    return;
  }
  if (shown().nodes[box.k] === undefined) { add(el("p", { className: "note", textContent: "This node is not in the graph at this pass." })); return; }
  const r = record(box.k), operands = shown().nodes[box.k][1];
  add(el("span", { className: `tag ${r.category}`, textContent: r.category }), " ", marks.has(box.k) ? el("span", { className: "tag", textContent: marks.get(box.k) }) : "",
    el("h2", { textContent: r.label }), el("div", { className: "note", textContent: r.op === "region" ? "" : r.meaning }));
  const kernel = r.kernel !== undefined && report ? report.kernels[r.kernel] : null;
  if (kernel) add(el("p", {}, el("b", { textContent: kernel.name }), el("span", { className: "note", textContent: `   ${[kernel.launches > 1 ? `one of ${kernel.launches} launches` : "", amount(kernel.bytes_each, "B"), amount(kernel.flops_each, "FLOP")].filter(Boolean).join(" · ")}` })),
    el("p", { className: "note", textContent: roofline(kernel) }));
  if (r.reason) add(el("p", { className: "note", textContent: r.reason }));
  add(el("h3", { textContent: "Values" }), el("table", {}, r.types.map((t, i) => el("tr", {}, el("td", { textContent: r.types.length > 1 ? `result ${i}` : "result" }), el("td", { textContent: t }))), operands.map((o, i) => endRow(`operand ${i}`, o))));
  const attributes = Object.entries(r.attributes);
  if (attributes.length) add(el("h3", { textContent: "Attributes" }), el("table", {}, attributes.map(([k, v]) => el("tr", {}, el("td", { textContent: k }), el("td", { textContent: v })))));
  if (r.sources.length) add(el("h3", { textContent: `From the model (${r.sources.length})` }), byLine(r.sources).slice(0, 40).map(sourceBlock));
  const places_ = new Set(r.sources.map(sourceText));
  const said = report ? report.remarks.filter(x => (x.sources || []).some(s => places_.has(s))) : [];
  if (said.length) add(el("h3", { textContent: `Remarks (${said.length})` }), said.slice(0, 60).map(remarkBlock));
  if (kernel && kernel.formula) add(el("h3", { textContent: "What it computes" }), code(kernel.formula));
  if (kernel && kernel.source) {
    add(el("h3", {}, "Kernel source", el("button", { className: "copy", textContent: "copy", onclick: () => navigator.clipboard && navigator.clipboard.writeText(kernel.source) })), code(kernel.source));
  }
}
const duration = us => us < 1000 ? `${Number(us.toPrecision(3))} µs` : `${Number((us / 1000).toPrecision(3))} ms`;
function roofline(kernel) { // one launch against the limits of the machine
  const r = kernel.roofline;
  if (!r) return "";
  const measured = r.measured_us === null ? "" : `measured ${duration(r.measured_us)} (${Number(r.gb_s.toPrecision(3))} GB/s, ${Number(r.gflop_s.toPrecision(3))} GFLOP/s), `;
  return `${measured}predicted ${duration(r.predicted_us)}, bound by ${r.bound}; ${(100 * r.share).toFixed(0)} % of the limit of ${report.machine.name} (${report.machine.source})`;
}
const brief = name => name.replace(/^aten\.|\.default$/g, "");
const lists = {
  Kernels() {
    const most = Math.max(1, ...report.kernels.map(k => k.bytes || 0));
    return report.kernels.map(k => row(k.kind, k.launches > 1 ? `${brief(k.name)}  ×${k.launches}` : brief(k.name), amount(k.bytes, "B"),
      [k.kind === "generated" && k.fusions.length ? k.fusions.join(", ") : k.kind, amount(k.flops, "FLOP"), k.roofline ? `${duration(k.roofline.measured_us ?? k.roofline.predicted_us)}${k.launches > 1 ? " each" : ""}, ${k.roofline.bound}` : ""].filter(Boolean).join(" · "), (k.bytes || 0) / most, k.nodes[0], k.nodes));
  },
  Fallbacks() {
    return report.fallbacks.map(f => row("opaque", f.count > 1 ? `${brief(f.name)}  ×${f.count}` : brief(f.name), amount(f.bytes, "B"), [f.reason, ...f.sources.slice(0, 1)].filter(Boolean).join(" · "), null, f.nodes[0], f.nodes));
  },
  Misses() { return report.near_misses.map(remarkRow); },
  Remarks() { return [...report.remarks].sort((a, b) => (b.kind === "failure") - (a.kind === "failure")).map(remarkRow); },
};
function remarkRow(r) {
  const out = row("", r.message, r.figures && r.figures.count > 1 ? `×${r.figures.count}` : "", [r.reason, r.sources[0]].filter(Boolean).join(" · "), null, null, null);
  out.firstChild.prepend(el("span", { className: `tag ${r.kind}`, textContent: r.kind }), " ");
  out.onclick = () => { const key = bySource(r.sources); if (key !== null) goTo(key); };
  return out;
}
function bySource(sources) {
  const wanted = new Set(sources);
  for (const [key, [number]] of Object.entries(shown().nodes)) if (records[number].sources.some(s => wanted.has(sourceText(s)))) return Number(key);
  return null;
}
function row(kind, what, much, less, share, key, keys) {
  let turn = 0;
  const out = el("button", { className: `row ${kind}` }, el("span", { className: "what", textContent: what }), el("span", { className: "much", textContent: much }), less ? el("span", { className: "less", textContent: less }) : "");
  if (share !== null) { const fill = el("i"); fill.style.width = `${Math.max(0.5, share * 100)}%`; out.append(el("span", { className: "share" }, fill)); }
  if (key !== null && key !== undefined) { out.dataset.key = key; out.onclick = () => { if (at !== states.length - 1 || before) { before = false; step(states.length - 1); } goTo(keys[turn++ % keys.length]); }; }
  return out;
}
function tab(name) {
  for (const b of $("tabs").children) b.setAttribute("aria-selected", String(b.dataset.name === name));
  const all = lists[name](), most = 400;
  $("list").replaceChildren(...(all.length ? all.slice(0, most) : [el("div", { className: "empty", textContent: { Kernels: "No kernels: this graph has not been grouped yet.", Fallbacks: "Nothing falls back.", Misses: "No near misses.", Remarks: "No remarks." }[name] })]));
  if (all.length > most) $("list").append(el("div", { className: "empty", textContent: `… and ${all.length - most} more` }));
}
function header() {
  $("name").textContent = everything.title; $("name").title = everything.title;
  if (everything.graphs.length > 1) { // each graph is a page of its own: what is open in one means nothing in another
    const choice = el("select", { title: "Graphs of this model", ariaLabel: "Graph", onchange: () => { location.hash = `graph=${choice.value}`; location.reload(); } },
      everything.graphs.map((g, i) => el("option", { value: i, selected: i === graphNumber, textContent: `${g.name} ${i + 1} of ${everything.graphs.length}, ${plural(Object.keys(g.states[0].nodes).length, "node")}` })));
    $("name").after(choice);
  }
  if (!report) { $("left").remove(); document.querySelector("main").style.gridTemplateColumns = "minmax(0, 1fr) auto"; return; }
  for (const [value, name] of report.headline) $("figures").append(el("div", { className: "figure" }, el("b", { textContent: typeof value === "number" ? value.toLocaleString("en") : value }), el("span", { textContent: name })));
  for (const [name, shares] of Object.entries(report.coverage)) {
    const bar = el("div", { className: "bar", title: Object.entries(shares).map(([k, v]) => `${k} ${(100 * v).toFixed(1)} %`).join(", ") });
    for (const [kind, share] of Object.entries(shares)) if (share > 0) {
      const part = el("i", { className: kind, textContent: share > 0.22 ? `${kind} ${(100 * share).toFixed(share > 0.995 ? 0 : 1)} %` : share > 0.08 ? `${(100 * share).toFixed(1)} %` : "" });
      part.style.width = `${share * 100}%`; bar.append(part);
    }
    $("coverage").append(el("label", { textContent: name }), bar);
  }
  const sizes = { Kernels: report.kernels.length, Fallbacks: report.fallbacks.length, Misses: report.near_misses.length, Remarks: report.remarks.length };
  for (const name of Object.keys(lists)) {
    const b = el("button", { textContent: name, onclick: () => tab(name) }, el("em", { textContent: sizes[name] }));
    b.dataset.name = name; b.setAttribute("role", "tab"); $("tabs").append(b);
  }
  tab("Kernels");
}
function timeline() {
  const bar = el("div", { id: "passes", role: "group", ariaLabel: "Passes" });
  for (const p of page.passes) {
    const delta = p.state === null ? [el("span", { textContent: "no change" })] : ["added", "removed", "rewired"].flatMap((kind, i) => {
      const n = (states[p.state][kind] || []).length;
      return n && p.state > 0 ? [el("span", { className: ["plus", "minus", "tilde"][i], textContent: `${"+−~"[i]}${n} ` })] : [];
    });
    if (p.state === 0) delta.push(plural(Object.keys(states[0].nodes).length, "node"));
    const b = el("button", { className: p.state === null ? "pass idle" : "pass", title: [p.name, p.seconds === null ? "" : `${(1000 * p.seconds).toFixed(1)} ms`, p.applications ? plural(p.applications, "application") : ""].filter(Boolean).join(" · ") },
      el("b", { textContent: p.name.length > 26 ? `${p.name.slice(0, 25)}…` : p.name }), el("small", {}, delta, p.seconds ? ` ${p.seconds >= 1 ? `${p.seconds.toFixed(1)} s` : `${Math.max(1, Math.round(1000 * p.seconds))} ms`}` : ""));
    if (p.state === null) b.disabled = true; else { b.dataset.state = p.state; b.onclick = () => { plain = false; step(p.state); }; }
    bar.append(b);
  }
  const flip = el("div", { className: "switch", id: "flip" }, el("button", { textContent: "before", title: "Before the pass, what it removes in red", onclick: () => side(true) }),
    el("button", { textContent: "after", title: "After the pass, what it adds in green", onclick: () => side(false) }), el("button", { textContent: "plain", title: "After the pass, nothing marked (p)", onclick: () => side(false, true) }));
  $("bottom").replaceChildren(bar, flip, el("span", { className: "note" }, el("kbd", { textContent: "j" }), " ", el("kbd", { textContent: "k" }), " passes"));
  if (states.length < 2) $("bottom").hidden = true;
}
function step(i) {
  i = Math.max(0, Math.min(states.length - 1, i));
  keeping(selected, () => { at = i; if (at === 0) before = false; measured.clear(); mark(); });
  refresh();
}
function side(isBefore, isPlain = false) { keeping(selected, () => { before = isBefore && at > 0; plain = isPlain; measured.clear(); mark(); }); refresh(); }
function walk(by) { if (plain && !before) plain = false; step(at + by); }
function refresh() {
  if (!states.length) return;
  let reached = false;
  for (const b of document.querySelectorAll(".pass")) {
    const s = b.dataset.state === undefined ? -1 : Number(b.dataset.state);
    b.classList.toggle("done", !reached); b.classList.toggle("at", s === at); b.classList.toggle("bare", s === at);
    reached ||= s === at;
    if (s === at) b.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const flip = $("flip");
  if (flip) { [before, !before && !plain, plain].forEach((on, i) => flip.children[i].classList.toggle("on", on)); flip.style.visibility = at > 0 ? "" : "hidden"; }
  details(); draw();
}
function legend() {
  for (const [name, colour] of [["kernel", "c-kernel"], ["fusion", "c-declared"], ["contraction", "c-contraction"], ["reduction", "c-reduction"], ["pointwise", "c-pointwise"], ["view", "c-view"], ["opaque", "c-opaque"], ["write", "c-write"]]) {
    const item = el("span", { textContent: name }); item.style.setProperty("--swatch", `var(--${colour})`); $("legend").append(item);
  }
  if (states.length > 1) for (const name of ["added", "removed", "rewired"]) {
    const item = el("span", { className: "outline", textContent: name }); item.style.setProperty("--swatch", `var(--${name})`); $("legend").append(item);
  }
  for (const [text, title, act] of [["−", "Zoom out", () => zoom(0.8)], ["+", "Zoom in", () => zoom(1.25)], ["fit", "Whole graph (f)", frameAll], ["open", "Open all modules (e)", openAll], ["close", "Close all (c)", closeAll]]) $("tools").append(el("button", { textContent: text, title, onclick: act }));
}
function openAll() {
  keeping(selected, () => { for (const [id, group] of Object.entries(shown().groups)) if (group.kind === "module") open.add(id); });
  frameAll();
}
function closeAll() { open.clear(); measured.clear(); frameAll(); }

// ---- Search

let hits = [], hit = -1;
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  hits = []; hit = -1;
  if (words.length) for (const [key, [number]] of Object.entries(shown().nodes)) {
    const r = records[number];
    if (r.op === "constant") continue;
    if (!r.haystack) r.haystack = [r.label, r.op, r.category, ...r.types, ...Object.values(r.attributes), ...r.sources.flat()].join(" ").toLowerCase();
    if (words.every(w => r.haystack.includes(w))) hits.push(Number(key));
  }
  const named = key => words.every(w => record(key).label.toLowerCase().includes(w)) ? 0 : 1;
  hits.sort((a, b) => named(a) - named(b) || a - b);
  $("hits").replaceChildren(...hits.slice(0, 60).map(key => {
    const r = record(key);
    return el("button", { className: "row", onclick: () => goTo(key) }, el("span", { className: "what", textContent: r.label }), el("span", { className: "much", textContent: r.op }), r.sources[0] ? el("span", { className: "less", textContent: sourceText(r.sources[0]) }) : "");
  }));
  if (words.length && !hits.length) $("hits").append(el("div", { className: "empty", textContent: "Nothing found." }));
}
$("query").addEventListener("input", e => search(e.target.value));
$("query").addEventListener("keydown", e => {
  if (e.key === "Enter" && hits.length) { hit = (hit + (e.shiftKey ? hits.length - 1 : 1)) % hits.length; goTo(hits[hit]); }
  if (e.key === "Escape") { e.target.value = ""; search(""); e.target.blur(); }
  e.stopPropagation();
});
document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const act = { j: () => walk(1), k: () => walk(-1), b: () => side(!before), p: () => side(false, !plain), f: frameAll, e: openAll, c: closeAll, t: theme, "/": () => $("query").focus(), Escape: () => select(null), "+": () => zoom(1.25), "-": () => zoom(0.8) }[e.key];
  if (act) { e.preventDefault(); act(); }
});
function theme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  palette(); draw();
}
$("theme").onclick = theme;

// ---- Start

document.documentElement.dataset.theme = wish.get("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
palette(); header(); timeline(); legend(); resize();
if (wish.has("state")) at = Math.max(0, Math.min(states.length - 1, Number(wish.get("state"))));
if (wish.has("before") || wish.has("after")) { plain = false; before = wish.has("before") && at > 0; }
if (states.length) {
  mark();
  const root = shown().groups[shown().root];
  const modules = root.boxes.filter(b => b.t === "g");
  if (modules.length === 1) open.add(modules[0].g); // a model in one wrapper: look inside
  if (wish.get("open") === "all") for (const [id, g] of Object.entries(shown().groups)) if (g.kind === "module") open.add(id);
  frameAll(); refresh();
  if (wish.has("node")) goTo(Number(wish.get("node")));
  if (wish.get("open") === "node" && selected && selected.g) toggle(selected);
}
addEventListener("resize", resize);
