// Drawing. Text is at least LEAST pixels high on the screen; where it has no room, it is left out.

const canvas = $("canvas"), pen = canvas.getContext("2d"), LEAST = 11;
const view = { x: 0, y: 0, scale: 1, width: 0, height: 0 };
let selected = null, hovered = null, linked = new Set(), colours = {};

function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["bg", "panel", "ink", "dim", "line", "accent", "edge", "group", "group2", "group-line", "added", "removed", "rewired", "select", "linked",
    "hover", "hot", "c-kernel", "c-declared", "c-contraction", "c-reduction", "c-pointwise", "c-view", "c-opaque", "c-write", "c-source", "ui", "mono"];
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
    if (fitted.size > 20000) fitted.clear();
    fitted.set(id, out === text ? text : out.length > 1 ? `${out}…` : "");
  }
  return fitted.get(id);
}
const legible = size => Math.ceil(Math.max(size, LEAST / view.scale) * 4) / 4;
function write(text, x, y, width, size, style, colour, align = "left") {
  const font = `${style.weight || 400} ${legible(size)}px ${style.family}`, out = fit(text, width, font);
  if (out.length < Math.min(text.length, 3)) return;
  pen.fillStyle = colour; pen.textAlign = align; pen.font = font;
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
  paintMap(seen);
}
function paintGroup(id, ox, oy, seen, depth) {
  const m = measure(id), focus = selected || hovered;
  const chosen = m.group.boxes.findIndex(box => same(box, focus)), over = m.group.boxes.findIndex(box => same(box, hovered));
  const bright = [];
  for (const edge of m.group.edges) {
    if (!isEdge(m.group.boxes[edge[0]], m.group.boxes[edge[2]])) continue;
    if (edge[0] === chosen || edge[2] === chosen || edge[0] === over || edge[2] === over) bright.push(edge);
    else if (!edge[3]) paintEdge(m, ox, oy, edge, seen, false);
  }
  for (const edge of bright) paintEdge(m, ox, oy, edge, seen, true);
  m.group.boxes.forEach((box, i) => {
    if (!present(box)) return;
    const x = ox + m.x[i] - m.boxW[i] / 2, y = oy + m.y[i], w = m.boxW[i], h = m.boxH[i];
    if (x > seen.right || y > seen.bottom || x + w < seen.left || y + h < seen.top) return;
    if (box.g && open.has(box.g)) {
      paintFrame(box, x, y, w, h, depth);
      paintGroup(box.g, x + (w - measure(box.g).w) / 2, y + HEAD + PAD, seen, depth + 1);
    } else paintBox(box, x, y, w, h);
  });
}
const changeOf = box => box && box.k !== undefined ? marks.get(box.k) : undefined;
const changeOfEdge = ({ group }, a, b) => ["removed", "added"].find(kind => changeOf(group.boxes[a]) === kind || changeOf(group.boxes[b]) === kind);
function paintEdge(m, ox, oy, [a, bends, b, far], seen, bright) {
  const [x0, y0, x1, y1] = [ox + m.x[a], oy + m.y[a] + m.boxH[a], ox + m.x[b], oy + m.y[b]];
  if (!far && (Math.max(y0, y1) < seen.top || Math.min(y0, y1) > seen.bottom)) return;
  pen.strokeStyle = bright ? colours.select : colours[changeOfEdge(m, a, b) || "edge"];
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
const amountOf = box => heat === "kind" ? undefined : heats[heat]().values[box.k === undefined ? box.g : `k${box.k}`];
function warm(box, x, y, w, h, r) {
  const value = amountOf(box);
  if (!value) return;
  pen.globalAlpha = 0.08 + 0.72 * warmth(value);
  pen.fillStyle = colours.hot; rounded(x, y, w, h, r); pen.fill(); pen.globalAlpha = 1;
}
function ring(x, y, w, h, r, colour, width) {
  const least = width / Math.min(1, view.scale);
  pen.strokeStyle = colour; pen.lineWidth = least;
  rounded(x - 1.5, y - 1.5, w + 3, h + 3, r + 1.5); pen.stroke();
}
function outline(box, x, y, w, h, r) {
  const change = changeOf(box);
  if (change) {
    pen.setLineDash(change === "rewired" ? [6, 3] : []);
    ring(x, y, w, h, r, colours[change], 2.4); pen.setLineDash([]);
    pen.globalAlpha = 0.13; pen.fillStyle = colours[change]; pen.fill(); pen.globalAlpha = 1;
  }
  if (isLinked(box)) ring(x, y, w, h, r, colours.linked, 2.6);
  if (same(box, selected) || same(box, hovered)) ring(x, y, w, h, r, colours.select, same(box, selected) ? 2.6 : 1.4);
}
function badge(box, right, y) {
  const change = changeOf(box), c = change ? { [change]: "" } : box.g && counts.get(box.g);
  if (!c || view.scale < 0.5) return;
  let x = right - 8;
  for (const [kind, sign] of [["rewired", "~"], ["removed", "−"], ["added", "+"]]) {
    if (!c[kind] && kind !== change) continue;
    const text = sign + c[kind];
    pen.font = `600 ${legible(11)}px ${colours.ui}`;
    const w = pen.measureText(text).width;
    write(text, x - w, y, w + 2, 11, { weight: 600, family: colours.ui }, heat === "kind" && !change ? colours[kind] : colours.ink);
    x -= w + 7;
  }
}
function chevron(x, y, down, colour) {
  pen.strokeStyle = colour; pen.lineWidth = 1.7; pen.beginPath();
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
  if (legible(12.5) > HEAD + PAD) return;
  chevron(x + 14, y + 14, true, colours.dim);
  const size = legible(12.5), value = amountOf(box), room = w - (counts.has(box.g) ? 84 : 40);
  write(box.l + (value ? `   ${heatText(value)}` : ""), x + 26, y + Math.max(14.5, size / 2 + 2), room, 12.5, { weight: 600, family: region ? colours.mono : colours.ui }, colours.ink);
  badge(box, x + w, y + 14);
}
function paintBox(box, x, y, w, h) {
  if (box.t === "i" || box.t === "o") {
    rounded(x, y, w, h, h / 2); pen.fillStyle = colours.hover; pen.fill();
    pen.strokeStyle = colours["group-line"]; pen.lineWidth = 1; pen.stroke();
    outline(box, x, y, w, h, h / 2);
    if (legible(11) <= h - 4) write(box.l, x + w / 2, y + h / 2 + 0.5, w - 10, 11, { family: colours.ui }, colours.dim, "center");
    return;
  }
  const colour = tone(box), module = box.k === undefined;
  rounded(x, y, w, h, 7); pen.fillStyle = colours.panel; pen.fill();
  if (module) { // a closed module: further sheets behind it
    pen.strokeStyle = colours["group-line"]; pen.lineWidth = 1.2;
    for (const d of shown().groups[box.g].kind === "layers" ? [6, 3] : [3]) { rounded(x + d, y + d, w, h, 7); pen.stroke(); }
    rounded(x, y, w, h, 7); pen.fill();
  }
  pen.strokeStyle = module ? colours["group-line"] : colour; pen.lineWidth = 1.2; pen.stroke();
  if (!module) {
    pen.save(); rounded(x, y, w, h, 7); pen.clip(); pen.fillStyle = colour; pen.fillRect(x, y, heat === "kind" && legible(12) > h - 4 ? w : 5, h);
    if (box.g && heat === "kind") { pen.globalAlpha = 0.1; pen.fillRect(x, y, w, h); }
    pen.restore();
  }
  warm(box, x, y, w, h, 7);
  outline(box, x, y, w, h, 7);
  const size = legible(12), small = legible(11);
  if (size > h - 4) return;
  const indent = box.g ? 25 : 13, value = amountOf(box), quiet = value || changeOf(box) ? colours.ink : colours.dim;
  if (box.g) chevron(x + (module ? 13 : 15), y + h / 2, false, quiet);
  const below = heat === "kind" ? box.s : value ? heatText(value) : "";
  const two = below && size + small + 6 <= h, y1 = two ? y + h / 2 - 7.5 : y + h / 2;
  const taken = counts.has(box.g) ? 62 : changeOf(box) ? 14 : 0;
  write(box.l, x + indent, y1, w - indent - 8 - taken, 12, { weight: 600, family: module ? colours.ui : colours.mono }, colours.ink);
  if (two) write(below, x + indent, y + h / 2 + 8.5, w - indent - 8, 11, { family: module ? colours.ui : colours.mono }, quiet);
  badge(box, x + w, y1);
}

// The map: the whole graph in small, with the part on show.

const map = { scale: 1, x: 0, y: 0 };
function paintMap(seen) {
  const small = $("map"), { w, h } = measure(shown().root);
  const whole = seen.left <= 0 && seen.top <= 0 && seen.right >= w && seen.bottom >= h;
  small.hidden = whole;
  if (whole) return;
  const ratio = devicePixelRatio || 1, width = small.clientWidth, height = small.clientHeight, ink = small.getContext("2d");
  small.width = width * ratio; small.height = height * ratio;
  map.scale = Math.min((width - 8) / Math.max(w, 1), (height - 8) / Math.max(h, 1));
  map.x = (width - w * map.scale) / 2; map.y = (height - h * map.scale) / 2;
  ink.setTransform(ratio * map.scale, 0, 0, ratio * map.scale, ratio * map.x, ratio * map.y);
  places(p => {
    if (p.w * map.scale < 1.5 && p.h * map.scale < 1.5) return false;
    const opened = p.box.g && open.has(p.box.g);
    ink.fillStyle = opened ? colours.group2 : tone(p.box);
    ink.fillRect(p.x, p.y, p.w, Math.max(p.h, 1 / map.scale));
    return true;
  });
  ink.strokeStyle = colours.select; ink.lineWidth = 1.5 / map.scale;
  const left = Math.max(seen.left, -4 / map.scale), top = Math.max(seen.top, -4 / map.scale);
  ink.strokeRect(left, top, Math.min(seen.right, w) - left, Math.min(seen.bottom, h) - top);
}
