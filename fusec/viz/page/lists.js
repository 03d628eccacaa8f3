// The panel on the left: lists of kernels, misses and remarks, the outline, the model and the graph as text.

let openTab = "Kernels", filterText = "";
const TABS = {
  Kernels: () => report() ? report().kernels.length : null,
  Model: () => Object.keys(page.files).length || null,
  Outline: () => states.length ? "" : null,
  IR: () => states.length ? "" : null,
  Changes: () => page.comparison ? page.comparison.changes.length + page.comparison.kernels.length : null,
  Sites: () => report() && report().sites.length || null,
  Misses: () => report() ? report().near_misses.length : null,
  Remarks: () => report() ? report().remarks.length : null,
  Fallbacks: () => report() ? report().fallbacks.length : null,
  Trace: () => everything.events.length || null,
};
const EMPTY = { Kernels: "No kernels: this graph has not been grouped yet.", Fallbacks: "Nothing falls back.", Misses: "No near misses.", Remarks: "No remarks." };
const lists = {
  Kernels() {
    const most = Math.max(1, ...report().kernels.map(k => k.bytes || 0));
    return report().kernels.map(k => row(k.kind, k.launches > 1 ? `${brief(k.name)}  ×${k.launches}` : brief(k.name), amount(k.bytes, "B"),
      [k.kind === "generated" && k.fusions.length ? k.fusions.join(", ") : k.kind, amount(k.flops, "FLOP"), k.roofline ? `${isMeasured(k.roofline) ? "measured " : ""}${duration(timeOf(k.roofline))}${k.launches > 1 ? " each" : ""}, ${k.roofline.bound}` : ""].filter(Boolean).join(" · "), (k.bytes || 0) / most, k.nodes));
  },
  Fallbacks() {
    return report().fallbacks.map(f => row("opaque", f.count > 1 ? `${brief(f.name)}  ×${f.count}` : brief(f.name), amount(f.bytes, "B"), [f.reason, ...f.sources.slice(0, 1)].filter(Boolean).join(" · "), null, f.nodes));
  },
  Sites() { // equal ones together, those that lose most first
    const equal = new Map();
    for (const s of report().sites) {
      const id = JSON.stringify([s.kind, s.fused, s.reason, s.edit]);
      equal.set(id, [...(equal.get(id) || []), s]);
    }
    const lost = all => all.reduce((sum, s) => sum + (s.bytes_lost || 0), 0);
    return [...equal.values()].sort((a, b) => a[0].fused - b[0].fused || lost(b) - lost(a)).map(all => {
      const [s] = all, out = row(s.fused ? "generated" : "opaque", `${s.kind}${all.length > 1 ? `  ×${all.length}` : ""}`, s.fused ? "fused" : lost(all) ? `${amount(lost(all), "B")} lost` : "missed", s.fused ? s.kernels.join(", ") : [s.reason, s.place].filter(Boolean).join(" · "), null, null);
      if (s.edit) out.append(el("span", { className: "less edit", textContent: `→ ${s.edit}` }));
      let turn = 0;
      out.onclick = () => { const m = all[turn++ % all.length].module; atEnd(); goToGroup(`m${m}`) || chooseModule(m); };
      return out;
    });
  },
  Misses() { return report().near_misses.map(r => remarkRow([r], (r.figures || {}).count || 1)); },
  Remarks() {
    const equal = new Map();
    for (const r of report().remarks) {
      const id = JSON.stringify([r.kind, r.pass_name, r.message, r.reason]);
      equal.set(id, [...(equal.get(id) || []), r]);
    }
    const worst = ["failure", "missed", "passed", "analysis"];
    return [...equal.values()].sort((a, b) => worst.indexOf(a[0].kind) - worst.indexOf(b[0].kind)).map(all => remarkRow(all, all.length));
  },
  Changes: comparisonList,
  Trace() {
    return everything.events.map(e => {
      const out = row(e.kind === "fallback" ? "opaque" : "", e.kind, e.count > 1 ? `×${e.count}` : "", e.text, null, null);
      const [, path, line] = /(\S+):(\d+)\s*$/.exec(e.text) || [], file = Object.keys(page.files).find(f => path === f || path?.endsWith(`/${f}`));
      if (file) out.onclick = () => { tab("Model"); chooseLine(`${file}:${line}`); };
      return out;
    });
  },
};
const editOf = r => r.suggestion ? `→ ${r.suggestion}` : (r.figures || {}).tried ? `tried: ${r.figures.tried}` : "";
function remarkRow(all, count) {
  const [r] = all, sources = all.flatMap(x => x.sources || []);
  const out = row("", `${all.length === 1 && typeof r.application === "number" ? `#${r.application} ` : ""}${r.message}`, [count > 1 ? `×${count}` : "", (r.figures || {}).bytes_lost ? `${amount(r.figures.bytes_lost, "B")} lost` : ""].filter(Boolean).join(" · "), [r.pass_name, r.reason, (r.figures || {}).kernel && `runs in kernel ${r.figures.kernel} all the same`, sources[0]].filter(Boolean).join(" · "), null, null);
  out.firstChild.prepend(el("span", { className: `tag ${r.kind}`, textContent: r.kind }), " ");
  if (editOf(r)) out.append(el("span", { className: "less edit", textContent: editOf(r) }));
  let turn = 0;
  out.onclick = async () => {
    if (r.kind === "passed" && await toApplication(all[turn % all.length].application)) { turn += 1; return; }
    if (!sources.length) return;
    const found = bySource([sources[turn++ % sources.length]]);
    link(found); if (found.length) goTo(found[0], true);
  };
  return out;
}
function bySource(sources) {
  const wanted = new Set(sources);
  return keysOf(shown()).filter(key => !shown().bodies[key] && record(key).sources.some(s => wanted.has(sourceText(s))));
}
function chooseModule(module) { // all nodes of a module that has no group of its own
  const found = keysOf(shown()).filter(key => record(key).sources.some(s => s[0] === module || s[0].startsWith(`${module}.`)));
  link(found); if (found.length) goTo(found[0], true);
}
function atEnd() { if (finalState() >= 0 && (at < finalState() || before)) { before = false; step(finalState()); } }
const breakable = name => name.split(/(?<=[_/]|\.(?=[a-z]))/i).flatMap((part, i) => i ? [el("wbr"), part] : [part]);
function row(kind, what, much, less, share, keys) {
  let turn = 0;
  const out = el("button", { className: `row ${kind}` }, el("span", { className: "what" }, breakable(what)), el("span", { className: "much", textContent: much }), less ? el("span", { className: "less" }, breakable(less)) : "");
  if (share !== null) { const fill = el("i"); fill.style.width = `${Math.max(0.5, share * 100)}%`; out.append(el("span", { className: "share" }, fill)); }
  if (keys && keys.length) {
    out.keys = new Set(keys);
    out.onclick = () => { if (!has(keys[0])) atEnd(); goTo(keys[turn++ % keys.length]); };
  }
  return out;
}

// The outline: modules and nodes as a tree, which a screen reader can walk.
function outlineItems(id, depth) {
  return shown().groups[id].boxes.filter(box => (box.t === "g" || box.t === "n") && present(box)).map(box => {
    const item = el("li", { role: "treeitem", tabIndex: -1, className: "item" });
    item.box = box;
    item.setAttribute("aria-level", depth);
    const label = el("span", { className: "label" }, box.k !== undefined ? el("i", { className: `dot ${record(box.k).category}` }) : "", box.l, el("small", { textContent: box.t === "g" ? box.s : "" }));
    label.style.paddingLeft = `${8 + depth * 12}px`;
    label.onclick = () => { choose(item); if (box.g) unfold(item); };
    item.append(label);
    if (box.g) item.setAttribute("aria-expanded", "false");
    item.setAttribute("aria-selected", "false");
    return item;
  });
}
function unfold(item, to = item.getAttribute("aria-expanded") !== "true") {
  if (!item.box.g) return;
  item.setAttribute("aria-expanded", String(to));
  item.querySelector(":scope > ul")?.remove();
  if (to) item.append(el("ul", { role: "group" }, outlineItems(item.box.g, Number(item.getAttribute("aria-level")) + 1)));
}
function choose(item) {
  for (const other of document.querySelectorAll("#list [role=treeitem]")) { other.tabIndex = -1; other.setAttribute("aria-selected", "false"); }
  item.tabIndex = 0; item.setAttribute("aria-selected", "true"); item.focus();
  reveal(item.box.k !== undefined ? `k${item.box.k}` : item.box.g);
  const p = find(q => same(q.box, item.box));
  select(item.box); if (p) show(p);
}
function outlineList() {
  const items = outlineItems(shown().root, 1), tree = el("ul", { role: "tree", ariaLabel: "Modules and nodes" }, items);
  if (items.length) items[0].tabIndex = 0;
  tree.addEventListener("keydown", e => {
    const all = [...tree.querySelectorAll("[role=treeitem]")], item = e.target.closest("[role=treeitem]"), i = all.indexOf(item);
    const opened = item.getAttribute("aria-expanded") === "true";
    const acts = {
      ArrowDown: () => all[i + 1] && choose(all[i + 1]), ArrowUp: () => all[i - 1] && choose(all[i - 1]), Home: () => choose(all[0]), End: () => choose(all.at(-1)),
      ArrowRight: () => opened ? all[i + 1] && choose(all[i + 1]) : unfold(item, true),
      ArrowLeft: () => opened ? unfold(item, false) : item.parentElement.closest("[role=treeitem]") && choose(item.parentElement.closest("[role=treeitem]")),
      Enter: () => { unfold(item); choose(item); }, " ": () => choose(item),
    };
    if (acts[e.key]) { acts[e.key](); e.preventDefault(); e.stopPropagation(); }
  });
  return [tree];
}

const TEXTS = { Model: modelList, IR: irList, Outline: outlineList };
function tab(name) {
  if (!TABS[name] || TABS[name]() === null) name = Object.keys(TABS).find(t => TABS[t]() !== null);
  openTab = name;
  for (const b of $("tabs").children) { const on = b.dataset.name === name; b.setAttribute("aria-selected", String(on)); b.tabIndex = on ? 0 : -1; }
  $("filter").hidden = name in TEXTS;
  $("list").classList.toggle("whole", name === "Model" || name === "IR");
  $("list").setAttribute("aria-label", name);
  if (name in TEXTS) $("list").replaceChildren(...TEXTS[name]().filter(Boolean));
  else {
    const words = filterText.toLowerCase().split(/\s+/).filter(Boolean), most = 400;
    const all = lists[name]().filter(r => words.every(w => r.textContent.toLowerCase().includes(w)));
    $("list").replaceChildren(...(all.length ? all.slice(0, most) : [el("div", { className: "empty", textContent: words.length ? "Nothing matches." : name === "Changes" ? noChanges() : EMPTY[name] || "" })]));
    if (all.length > most) $("list").append(el("div", { className: "empty", textContent: `… and ${all.length - most} more` }));
  }
  follow(false); remember();
}
function follow(again = true) { // what is selected, in the list that is open
  if (again && (openTab === "Model" || openTab === "IR")) { tab(openTab); return; }
  for (const r of document.querySelectorAll("#list .row")) r.classList.toggle("on", Boolean(selected && r.keys && r.keys.has(selected.k)));
}
function tabs() {
  for (const name of Object.keys(TABS)) {
    const count = TABS[name]();
    if (count === null) continue;
    const b = el("button", { textContent: name, onclick: () => tab(name) }, count === "" ? "" : el("em", { textContent: count }));
    b.dataset.name = name; b.setAttribute("role", "tab"); b.setAttribute("aria-controls", "list"); $("tabs").append(b);
  }
  $("tabs").addEventListener("keydown", e => {
    const all = [...$("tabs").children], i = all.indexOf(document.activeElement), to = { ArrowRight: i + 1, ArrowLeft: i - 1 }[e.key];
    if (to !== undefined) { const b = all[(to + all.length) % all.length]; b.click(); b.focus(); e.preventDefault(); e.stopPropagation(); }
  });
  $("filter").addEventListener("input", e => { filterText = e.target.value; tab(openTab); });
}
