// Geometry: the layout comes from Python with all groups closed; rows make room for those that are open.

const PAD = 16, HEAD = 26, GAP = 26;
const open = new Set();
let measured = new Map();

function measure(id) {
  if (measured.has(id)) return measured.get(id);
  const group = shown().groups[id], count = group.row.length;
  const w = [], h = [], grown = [];
  for (let i = 0; i < count; i++) {
    const box = group.boxes[i];
    if (!box) { w.push(10); h.push(0); grown.push(0); continue; }
    if (box.t === "i" || box.t === "o") box.border = id; // a value may be at the borders of several groups
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
      if (!present(box)) return;
      const p = { box, i, m, id, ox, oy, x: ox + m.x[i] - m.boxW[i] / 2, y: oy + m.y[i], w: m.boxW[i], h: m.boxH[i], depth };
      if (visit(p) === false) return;
      if (box.g && open.has(box.g)) walk(box.g, p.x + (p.w - measure(box.g).w) / 2, p.y + HEAD + PAD, depth + 1);
    });
  })(shown().root, 0, 0, 0);
}
const same = (a, b) => Boolean(a && b) && a.t === b.t && (a.k !== undefined ? a.k === b.k : a.g === b.g && a.border === b.border && String(a.v) === String(b.v));
function find(wanted) {
  let found = null;
  places(p => { if (!found && wanted(p)) found = p; return !found; });
  return found;
}
// For each group and node the group around it, and for each group its box.
const parents = perState(state => {
  const up = {}, boxes = {};
  for (const [id, group] of Object.entries(state.groups))
    for (const box of group.boxes) {
      if (box.g) { up[box.g] = id; boxes[box.g] = box; }
      if (box.k !== undefined) { up[`k${box.k}`] = id; boxes[`k${box.k}`] = box; }
    }
  return { up, boxes };
});
function reveal(name) {
  const { up } = parents();
  for (let id = up[name]; id && id !== shown().root; id = up[id]) open.add(id);
  measured.clear();
}

// Changes: which nodes the pass at hand added, removed or rewired, counted up the groups.

let marks = new Map(), counts = new Map();
function mark() {
  marks = new Map(); counts = new Map();
  if (stepped) markStep();
  const state = page.comparison ? states.at(-1) : states[at]; // what differs between two versions is marked in each
  if (plain && !page.comparison || stepped) return countMarks();
  if (page.comparison) for (const kind of ["removed", "added", "rewired"]) { for (const k of state[kind]) if (has(k)) marks.set(k, kind); }
  else if (before) for (const k of state.removed) marks.set(k, "removed");
  else {
    for (const k of state.added) marks.set(k, "added");
    for (const k of state.rewired || []) marks.set(k, "rewired");
  }
  countMarks();
}
function countMarks() {
  const { up } = parents();
  for (const [key, kind] of marks)
    for (let id = up[`k${key}`]; id; id = up[id]) {
      const c = counts.get(id) || { added: 0, removed: 0, rewired: 0 };
      c[kind] += 1; counts.set(id, c);
    }
}

// Heat: an amount of each node, and of each group the sum of those inside; of errors the largest.

let heat = "kind";
const AMOUNTS = {
  bytes: row => row.bytes_each,
  "predicted time": row => row.roofline.predicted_us,
  "measured time": row => row.roofline.measured_us || 0,
  "error against float64": (row, node) => node.error ? node.error.compiled : 0,
};
const SUM = (a, b) => a + b;
const heats = Object.fromEntries(Object.entries(AMOUNTS).map(([name, of]) => [name, perState(state => {
  const values = {}, join = name === "error against float64" ? Math.max : SUM;
  let least = Infinity;
  (function total(id) {
    return values[id] = state.groups[id].boxes.reduce((sum, box) => {
      if (box.k === undefined) return join(sum, box.g ? total(box.g) : 0);
      const node = records[state.nodes[box.k][0]], kernel = rowOf(node), own = kernel ? Number(of(kernel, node)) || 0 : 0;
      values[`k${box.k}`] = own; least = Math.min(least, own || least);
      return join(sum, own);
    }, 0);
  })(state.root);
  return { values, least, most: values[state.root] };
})]));
const heatText = value => heat === "bytes" ? amount(value, "B") : heat.startsWith("error") ? value.toExponential(1) : duration(value);
// One scale for nodes and modules, logarithmic as a model is hundreds of kernels.
function warmth(value) {
  const { least, most } = heats[heat]();
  return most > least ? Math.log(value / least) / Math.log(most / least) : 1;
}
