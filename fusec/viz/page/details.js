// The panel on the right: one node or module, its kernel, and where it comes from.

function nameOf([ref, index]) {
  if (typeof ref === "string") return (shown().inputs[ref] || [ref])[0];
  return record(ref).label + (record(ref).types.length > 1 ? ` · ${index}` : "");
}
const typeOf = ([ref, index]) => typeof ref === "string" ? (shown().inputs[ref] || ["", ""])[1] : record(ref).types[index];
function nodeLink(key, text = record(key).label) {
  return el("button", { className: "link", textContent: text, onclick: () => goTo(key) });
}
function endRow(name, ref) {
  const jump = typeof ref[0] === "number" && has(ref[0]) && record(ref[0]).op !== "constant";
  return el("tr", {}, el("td", { textContent: name }), el("td", {}, jump ? nodeLink(ref[0], nameOf(ref)) : el("span", { textContent: nameOf(ref) }), el("div", { className: "note", textContent: typeOf(ref) })));
}
function byLine(sources) {
  const lines = new Map();
  for (const [module, file, line, op, text] of sources) {
    const id = `${module}|${file}|${line}|${text}`;
    if (!lines.has(id)) lines.set(id, [module, file, line, [], text]);
    if (op) lines.get(id)[3].push(brief(op));
  }
  return [...lines.values()].map(([module, file, line, ops, text]) => [module, file, line, [...new Set(ops)].join(", "), text]);
}
function sourceBlock(source) {
  const [module, file, line, op, text] = source;
  const place = file ? el("button", { className: "link", textContent: `${file}:${line}`, onclick: () => { tab("Model"); chooseLine(`${file}:${line}`); } }) : "";
  return el("div", { className: "origin" }, text ? el("code", { textContent: text }) : "", el("span", { textContent: module ? `${module}   ` : "" }), place, el("span", { textContent: op ? `   ${op}` : "" }));
}
function remarkBlock(r) {
  return el("div", { className: "remark" }, el("span", { className: `tag ${r.kind}`, textContent: r.kind }), ` ${r.application === null || r.application === undefined ? "" : `#${r.application} `}${r.message}`,
    r.reason ? el("span", { className: "note", textContent: r.reason }) : "", editOf(r) ? el("span", { className: "note edit", textContent: editOf(r) }) : "",
    el("span", { className: "note", textContent: [r.pass_name, ...(r.sources || []).slice(0, 2)].filter(Boolean).join(" · ") }));
}
function roofline(row) { // one launch against the limits of the machine
  const r = row.roofline, { machine, interpreted } = report();
  if (!r || !r.predicted_us) return "";
  const time = r.measured_us === null ? "" : interpreted ? `${duration(r.measured_us)} in Triton's interpreter, on the CPU, which says nothing about a GPU; ` : `measured ${duration(r.measured_us)} (${Number(r.gb_s.toPrecision(3))} GB/s, ${Number(r.gflop_s.toPrecision(3))} GFLOP/s), `;
  const share = machine.source === "assumed" || interpreted ? ", for" : `; ${(100 * r.share).toFixed(0)} % of the limit of`; // of a guess there is no share
  return `${time}predicted ${duration(r.predicted_us)}, bound by ${r.bound}${share} ${machine.name} (${machine.source})`;
}

const SVG = $("blank").namespaceURI;
function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}
const tick = p => p < -2 || p > 3 ? `1e${p}` : String(10 ** p);
function rooflinePlot(row) { // FLOP per byte against FLOP per second, both axes logarithmic
  const m = report().machine, r = row.roofline;
  const peak = Math.max(...Object.values(m.peaks), 0), memory = m.read_gb_s;
  if (!peak || !memory || !r || !row.bytes_each || !row.flops_each) return "";
  const us = timeOf(r), intensity = row.flops_each / row.bytes_each, rate = row.flops_each / us / 1e3;
  const [left, right] = [Math.min(-2, Math.floor(Math.log10(intensity))), Math.max(3, Math.ceil(Math.log10(intensity)))];
  const [low, high] = [Math.floor(Math.log10(Math.min(rate, memory * 10 ** left))), Math.ceil(Math.log10(peak)) + 0.1];
  const x = v => 34 + 336 * (Math.log10(v) - left) / (right - left), y = v => 118 - 106 * (Math.log10(v) - low) / (high - low);
  const ridge = peak / memory, plot = svg("svg", { viewBox: "0 0 380 146", class: "roofline", role: "img", "aria-label": `${Number(intensity.toPrecision(3))} FLOP per byte, ${Number(rate.toPrecision(3))} GFLOP/s` });
  for (let p = left; p <= right; p += 1) plot.append(svg("line", { x1: x(10 ** p), x2: x(10 ** p), y1: 12, y2: 118, class: "grid" }), svg("text", { x: x(10 ** p), y: 131, "text-anchor": p === right ? "end" : "middle" }, tick(p)));
  for (let p = Math.ceil(low); p <= high; p += Math.ceil((high - low) / 9)) plot.append(svg("line", { x1: 34, x2: 370, y1: y(10 ** p), y2: y(10 ** p), class: "grid" }), svg("text", { x: 30, y: y(10 ** p) + 4, "text-anchor": "end" }, tick(p)));
  plot.append(svg("polyline", { points: `${x(10 ** left)},${y(memory * 10 ** left)} ${x(Math.min(10 ** right, Math.max(10 ** left, ridge)))},${y(Math.min(peak, memory * 10 ** right))} ${x(10 ** right)},${y(Math.min(peak, memory * 10 ** right))}`, class: "roof" }),
    svg("circle", { cx: x(intensity), cy: y(rate), r: 5, class: isMeasured(r) ? "point" : "point predicted" }),
    svg("text", { x: 202, y: 144, "text-anchor": "middle" }, `FLOP per byte · GFLOP/s · ${isMeasured(r) ? "measured" : "predicted"}`));
  return plot;
}

function details() {
  const panel = $("right"), box = selected, add = (...parts) => panel.append(...parts.flat().filter(p => p !== "" && p !== null));
  const wasHidden = panel.hidden;
  panel.hidden = !box;
  document.body.classList.toggle("selected", !panel.hidden);
  if (panel.hidden !== wasHidden) resize();
  if (panel.hidden) return;
  panel.replaceChildren(el("button", { className: "close", textContent: "×", title: "Close (Esc)", ariaLabel: "Close", onclick: () => { select(null); canvas.focus(); } }));
  panel.scrollTop = 0;
  if (box.k === undefined) { (box.g ? moduleDetails : endDetails)(box, add); return; }
  if (!has(box.k)) { add(el("p", { className: "note", textContent: "This node is not in the graph at this pass." })); return; }
  nodeDetails(box.k, add);
}
function endDetails(box, add) {
  add(el("span", { className: "tag", textContent: box.t === "i" ? "input" : "output" }), el("h2", { textContent: box.l }), el("p", { className: "note", textContent: typeOf(box.v) }));
  if (typeof box.v[0] === "number") add(el("button", { className: "link", textContent: "go to the node that computes it", onclick: () => goTo(box.v[0]) }));
}
function moduleDetails(box, add) {
  const group = shown().groups[box.g], rows = new Map();
  (function inside(id) {
    for (const b of shown().groups[id].boxes) {
      if (b.k !== undefined) { const kernel = kernelOf(b.k); if (kernel) rows.set(kernel.row, [...(rows.get(kernel.row) || []), b.k]); }
      else if (b.g) inside(b.g);
    }
  })(box.g);
  add(el("span", { className: "tag", textContent: group.kind }), el("h2", { textContent: group.name }), el("p", { className: "note", textContent: box.s }),
    el("button", { className: "link", textContent: open.has(box.g) ? "close" : "open", onclick: () => { toggle(box); details(); } }));
  if (!rows.size) return;
  const all = [...rows].sort(([a, x], [b, y]) => b.bytes_each * y.length - a.bytes_each * x.length);
  add(el("h3", { textContent: "Kernels inside" }), el("table", {}, all.map(([row, keys]) => el("tr", {}, el("td", {}, nodeLink(keys[0], brief(row.name))), el("td", { textContent: [keys.length > 1 ? `×${keys.length}` : "", amount(row.bytes_each * keys.length, "B"), duration(timeOf(row.roofline) * keys.length)].filter(Boolean).join(" · ") })))));
}
function nodeDetails(key, add) {
  const r = record(key), operands = operandsOf(key), kernel = kernelOf(key), whole = kernel && kernel.region === key;
  add(el("span", { className: `tag ${r.category}`, textContent: r.category }), " ", marks.has(key) ? el("span", { className: `tag ${marks.get(key)}`, textContent: marks.get(key) }) : "",
    el("h2", { textContent: r.label }), el("div", { className: "note", textContent: r.op === "region" ? "" : page.meanings[r.op] }));
  if (kernel) {
    const { row, region } = kernel;
    add(el("p", {}, whole ? el("b", { textContent: row.name }) : el("span", {}, "in kernel ", nodeLink(region, row.name)), el("span", { className: "note", textContent: `   ${[row.launches > 1 ? `one of ${row.launches} launches` : "", amount(row.bytes_each, "B"), amount(row.flops_each, "FLOP")].filter(Boolean).join(" · ")}` })),
      row.edited ? el("p", { className: "note", textContent: `built from the edited source ${row.edited}` }) : "", el("p", { className: "note", textContent: roofline(row) }));
  }
  if (r.error) add(el("p", { className: "note", textContent: `error against float64 ${r.error.compiled.toExponential(1)} of the largest element; ${r.error.eager.toExponential(1)} in eager` }));
  if (r.reason) add(el("p", { className: "note", textContent: r.reason }));
  if (kernel && kernel.row.source) add(el("h3", {}, kernel.row.source.includes("@triton") ? "Kernel · Triton" : "Kernel · C++", el("button", { className: "copy", textContent: "copy", onclick: () => navigator.clipboard && navigator.clipboard.writeText(kernel.row.source) })), kernelLines(kernel));
  if (whole) add(rooflinePlot(kernel.row));
  add(el("h3", { textContent: "Values" }), el("table", {}, r.types.map((t, i) => el("tr", {}, el("td", { textContent: r.types.length > 1 ? `result ${i}` : "result" }), el("td", { textContent: t }))), operands.map((o, i) => endRow(`operand ${i}`, o))));
  const attributes = Object.entries(r.attributes);
  if (attributes.length) add(el("h3", { textContent: "Attributes" }), el("table", {}, attributes.map(([k, v]) => el("tr", {}, el("td", { textContent: k }), el("td", { textContent: v })))));
  if (r.sources.length) add(el("h3", { textContent: `From the model (${r.sources.length})` }), byLine(r.sources).slice(0, 40).map(sourceBlock));
  const came = isWhole && at > 0 && !before && !stepped ? heirs(key, at, at - 1).filter(k => k !== key) : [], became = stepped || !isWhole ? [] : (before ? states[at] : states[at + 1] || {}).became?.[key] || [];
  if (came.length) add(el("h3", { textContent: "Came from" }), el("p", { className: "note", textContent: came.slice(0, 8).map(k => records[states[at - 1].nodes[k][0]].label).join(", ") }));
  if (became.length) add(el("h3", { textContent: "Becomes" }), el("p", { className: "note", textContent: became.map(k => records[(before ? states[at] : states[at + 1]).nodes[k][0]].label).join(", ") }));
  const lines = new Set(r.sources.map(sourceText)), said = report() ? report().remarks.filter(x => (x.sources || []).some(s => lines.has(s))) : [];
  if (said.length) add(el("h3", { textContent: `Remarks (${said.length})` }), said.slice(0, 60).map(remarkBlock));
  if (whole && kernel.row.formula) add(el("h3", { textContent: "Formula" }), el("pre", { textContent: kernel.row.formula, tabIndex: 0 }));
}
function kernelLines(kernel) {
  const origins = originsOf(kernel), wanted = ref => ref && typeof ref[0] === "number" && (linked.has(ref[0]) || (selected && selected.k === ref[0]));
  const rows = kernel.row.source.split("\n").map((text, i) => ({ gutter: i + 1, text, on: Boolean(wanted(origins[i])), links: Boolean(origins[i]), title: origins[i] ? nameOf(origins[i]) : "" }));
  const lines = new Lines("Kernel source", rows, i => origins[i] && typeof origins[i][0] === "number" && goTo(origins[i][0]), kernel.row.source.includes("@triton") ? "python" : "cpp");
  lines.element.id = "kernel";
  const own = selected ? origins.findIndex(origin => origin && origin[0] === selected.k) : -1;
  return lines.shownAt(own < 0 ? rows.findIndex(r => r.on) : own);
}
