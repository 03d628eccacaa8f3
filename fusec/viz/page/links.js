// Links between lines of the model, nodes of the graph, and lines of kernels; and what is selected.

let chosenLine = ""; // "file:line" of the model
let linkedGroups = new Set();

const within = state => function inner(k) { return [k, ...(state.bodies[k] || []).flatMap(inner)]; };
const keysOf = state => state.order.filter(isThere).flatMap(within(state));
const regions = perState(state => new Map(Object.entries(state.bodies).flatMap(([region, keys]) => keys.map(k => [k, Number(region)]))));
const lineId = ([, file, line]) => `${file}:${line}`;
// For each line of the model its nodes, the innermost alone.
const nodesOfLines = perState(state => {
  const found = new Map();
  for (const key of state.order.flatMap(within(state))) {
    if (state.bodies[key]) continue;
    for (const id of new Set(records[state.nodes[key][0]].sources.map(lineId))) {
      if (!found.has(id)) found.set(id, []);
      found.get(id).push(key);
    }
  }
  return found;
});
const linesOf = key => new Set(record(key).sources.map(lineId));

const rowOf = r => r.kernel === undefined ? undefined : page.reports[r.report]?.kernels[r.kernel];
// The kernel that runs a node, and the region that it is made from.
function kernelOf(key) {
  for (let k = key; k !== undefined; k = regions().get(k)) {
    const row = rowOf(record(k));
    if (row) return { row, region: k };
  }
  return null;
}
// The node or the input that each line of a kernel belongs to, as operands have it: [key or name, index].
function originsOf({ row, region }) {
  if (!row.known.includes(region)) return [];
  const body = shown().bodies[region] || [], operands = operandsOf(region);
  return row.lines.map(n => n === null ? null : n >= 0 ? [body[n], 0] : operands[-1 - n]);
}

function link(keys) {
  const { up } = parents();
  linked = new Set(keys); linkedGroups = new Set();
  for (const key of keys) {
    for (let region = regions().get(key); region !== undefined; region = regions().get(region)) linked.add(region);
    for (let id = up[`k${key}`]; id; id = up[id]) linkedGroups.add(id);
  }
}
const isLinked = box => linked.size > 0 && (box.k !== undefined ? linked.has(box.k) : box.g !== undefined && !open.has(box.g) && linkedGroups.has(box.g));

function select(box, keepLinks = false) {
  selected = box;
  if (!keepLinks) { link([]); chosenLine = ""; }
  details(); follow(); draw(); remember();
  if (box) say(spoken(box));
}
function spoken(box) {
  if (box.k === undefined) return box.g ? `${shown().groups[box.g].kind} ${box.l}, ${box.s}, ${open.has(box.g) ? "open" : "closed"}` : `${box.t === "i" ? "input" : "output"} ${box.l}`;
  const r = record(box.k), kernel = kernelOf(box.k);
  return [r.label, r.category, r.types.join(", "), kernel && `kernel ${kernel.row.name}`, marks.get(box.k)].filter(Boolean).join(", ");
}
function goTo(key, keepLinks = false) {
  if (!has(key)) {
    const i = states.findLastIndex(s => s.nodes[key] !== undefined);
    if (i < 0) return;
    before = false; step(i);
  }
  reveal(`k${key}`);
  const p = find(q => q.box.k === key);
  if (p) { select(p.box, keepLinks); show(p); return; }
  const box = parents().boxes[`k${key}`] || { t: "n", k: key, l: record(key).label }; // a constant has no box
  select(box, keepLinks);
}
function goToGroup(id) {
  const box = parents().boxes[id];
  if (!box) return false;
  reveal(id); open.add(id); measured.clear();
  const p = find(q => q.box.g === id && q.box.k === undefined);
  if (p) { select(p.box); show(p); }
  return true;
}
// Show all nodes of a line of the model, and the line in the kernel on show, or in the first that has one.
function chooseLine(id) {
  const nodes = (nodesOfLines().get(id) || []).filter(isThere);
  chosenLine = id; link(nodes);
  const inside = selected && selected.k !== undefined && has(selected.k) && linked.has(selected.k);
  if (nodes.length && !inside) goTo(nodes.find(k => kernelOf(k)) ?? nodes[0], true);
  else { details(); follow(); draw(); }
  if (!nodes.length) { selected = null; details(); draw(); }
  say(`${id}: ${plural(nodes.length, "node")}`); remember();
}
// What became of a selected node in another state, or where it came from.
function heirs(key, from, to) {
  if (states[to].nodes[key] !== undefined) return [key];
  let keys = [key];
  for (let i = from; i !== to; i += Math.sign(to - from)) {
    const next = states[to > from ? i + 1 : i - 1], became = states[to > from ? i + 1 : i].became || {};
    keys = keys.flatMap(k => next.nodes[k] !== undefined ? [k] : to > from ? became[k] || [] : Object.keys(became).filter(old => became[old].includes(k)).map(Number));
  }
  return [...new Set(keys)];
}
