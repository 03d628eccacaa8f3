// Search and keyboard.

let hits = [], hit = -1;
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  hits = []; hit = -1;
  if (words.length) for (const key of keysOf(shown())) {
    const r = record(key);
    if (r.op === "constant") continue;
    if (!r.haystack) r.haystack = [r.label, r.op, r.category, ...r.types, ...Object.values(r.attributes), ...r.sources.flat()].join(" ").toLowerCase();
    if (words.every(w => r.haystack.includes(w))) hits.push(key);
  }
  const named = key => words.every(w => record(key).label.toLowerCase().includes(w)) ? 0 : 1;
  hits.sort((a, b) => named(a) - named(b) || a - b);
  $("hits").replaceChildren(...hits.slice(0, 60).map(key => {
    const r = record(key);
    return el("button", { className: "row", onclick: () => goTo(key) }, el("span", { className: "what", textContent: r.label }), el("span", { className: "much", textContent: r.op }), r.sources[0] ? el("span", { className: "less", textContent: sourceText(r.sources[0]) }) : "");
  }));
  if (words.length && !hits.length) $("hits").append(el("div", { className: "empty", textContent: "Nothing found." }));
}

// From the selected box along an edge, or to its neighbour in the row; border boxes lead into the group around.
function neighbour(direction) {
  const p = selected && find(q => same(q.box, selected));
  if (!p) { const first = find(() => true); return first; }
  const { m, i } = p, boxes = m.group.boxes, on = m.group.edges;
  const next = direction === "down" ? on.filter(e => e[0] === i).map(e => e[2]) : direction === "up" ? on.filter(e => e[2] === i).map(e => e[0]) : [];
  if (direction === "left" || direction === "right") {
    const beside = boxes.map((_, j) => j).filter(j => m.group.row[j] === m.group.row[i]).sort((a, b) => m.x[a] - m.x[b]);
    next.push(beside[beside.indexOf(i) + (direction === "right" ? 1 : -1)]);
  }
  const aside = j => Math.abs(m.x[j] - m.x[i]) + (boxes[j].border ? m.w : 0); // a border box last: it leads out of the group
  const target = next.filter(j => boxes[j]).sort((a, b) => aside(a) - aside(b))[0];
  if (target !== undefined) return find(q => q.m === m && q.i === target);
  return direction === "up" || direction === "down" ? find(q => q.box.g === p.id && open.has(p.id)) : null; // out of the group
}
function inside() { // Enter: into an open group, or open a closed one
  if (!selected || !selected.g) { $("kernel")?.focus(); return; }
  if (!open.has(selected.g)) { toggle(selected); say(spoken(selected)); return; }
  const first = find(q => q.id === selected.g && q.box.t !== "i") || find(q => q.id === selected.g);
  if (first) { select(first.box); show(first); }
}
function outside() { // Backspace: the group around
  const p = selected && find(q => same(q.box, selected)), around = p && find(q => q.box.g === p.id);
  if (around) { select(around.box); show(around); }
}
function move(direction) {
  const p = neighbour(direction);
  if (p) { select(p.box); show(p); }
}
const KEYS = [["j  k", "next and previous pass"], [",  .", "single applications of the pass"], ["b  p", "before the pass; nothing marked"], ["/", "search; Enter goes to the next hit"], ["arrows", "along edges and rows of the graph"], ["Enter", "open a module, go in; on a node, to its kernel"],
  ["Backspace", "out to the module around"], ["1 … 9", "lists on the left"], ["g", "back to the graph"], ["f  e  c", "whole graph, open all, close all"], ["+  −", "zoom"], ["t", "light or dark"], ["Esc", "deselect"]];
function help() { const box = $("help"); if (box.open) box.close(); else box.showModal(); }
function listenToKeys() {
  $("help").append(el("h2", { textContent: "Keys" }), el("table", {}, KEYS.map(([k, text]) => el("tr", {}, el("td", {}, el("kbd", { textContent: k })), el("td", { textContent: text })))), el("button", { textContent: "close", onclick: help }));
  $("query").addEventListener("input", e => search(e.target.value));
  $("query").addEventListener("keydown", e => {
    if (e.key === "Enter" && hits.length) { hit = (hit + (e.shiftKey ? hits.length - 1 : 1)) % hits.length; goTo(hits[hit]); }
    if (e.key === "Escape") { e.target.value = ""; search(""); canvas.focus(); }
    e.stopPropagation();
  });
  canvas.addEventListener("keydown", e => {
    const act = { ArrowDown: () => move("down"), ArrowUp: () => move("up"), ArrowLeft: () => move("left"), ArrowRight: () => move("right"), Enter: inside, Backspace: outside }[e.key];
    if (act && !e.ctrlKey && !e.metaKey && !e.altKey) { e.preventDefault(); e.stopPropagation(); act(); }
  });
  document.addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input:not([type=checkbox]), select") || $("help").open) return;
    const act = states.length && { j: () => walk(1), k: () => walk(-1), ",": () => walkApplications(-1), ".": () => walkApplications(1), b: () => side(!before), p: () => side(false, !plain), f: frameAll, e: openAll, c: closeAll, g: () => canvas.focus(),
      "/": () => $("query").focus(), Escape: () => { select(null); canvas.focus(); }, "+": () => zoom(1.25), "-": () => zoom(0.8), "?": help }[e.key] || { t: theme }[e.key];
    const number = /^[1-9]$/.test(e.key) ? $("tabs").children[Number(e.key) - 1] : null;
    if (act) { e.preventDefault(); act(); } else if (number) { number.click(); (document.querySelector("#list .lines, #list [tabindex='0'], #list button") || number).focus(); }
  });
}
