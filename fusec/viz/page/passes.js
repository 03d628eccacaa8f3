// The bar at the bottom: passes, and the states of the graph before and after each; the header and the tools.

function header() {
  $("name").textContent = everything.title; $("name").title = everything.title;
  if (everything.graphs.length > 1) { // each graph is a page of its own: what is open in one means nothing in another
    const choice = el("select", { title: "Graphs of this model", ariaLabel: "Graph", onchange: () => { location.hash = `graph=${choice.value}`; location.reload(); } },
      everything.graphs.map((g, i) => el("option", { value: i, selected: i === graphNumber, textContent: `${g.name} ${i + 1} of ${everything.graphs.length}, ${plural(g.passes.find(p => p.state === 0).nodes, "node")}` })));
    $("name").after(choice);
  }
  if (page.comparison) { totals(); $("coverage").hidden = true; return; }
  const last = page.reports.at(-1);
  if (!last) { $("figures").hidden = $("coverage").hidden = true; return; }
  for (const [value, name] of last.headline) $("figures").append(el("div", { className: "figure" }, el("b", { textContent: typeof value === "number" ? value.toLocaleString("en") : value }), el("span", { textContent: name })));
  for (const [name, shares] of Object.entries(last.coverage)) {
    const text = Object.entries(shares).map(([k, v]) => `${k} ${(100 * v).toFixed(1)} %`).join(", ");
    const bar = el("div", { className: "bar", title: text, role: "img", ariaLabel: `${name}: ${text}` });
    for (const [kind, share] of Object.entries(shares)) if (share > 0) {
      const part = el("i", { className: kind, textContent: share > 0.22 ? `${kind} ${(100 * share).toFixed(share > 0.995 ? 0 : 1)} %` : share > 0.08 ? `${(100 * share).toFixed(1)} %` : "" });
      part.style.width = `${share * 100}%`; bar.append(part);
    }
    $("coverage").append(el("span", { className: "name", textContent: name }), bar);
  }
}
function timeline() {
  const bar = el("div", { id: "passes", role: "group", ariaLabel: "Passes" });
  for (const p of page.passes) {
    const delta = p.state === null ? [el("span", { textContent: "no change" })] : p.delta.flatMap((n, i) => {
      return n && p.state > 0 ? [el("span", { className: ["plus", "minus", "tilde"][i], textContent: `${"+−~"[i]}${n} ` })] : [];
    });
    if (p.state === 0) delta.push(plural(p.nodes, "node"));
    const b = el("button", { className: p.state === null ? "pass idle" : "pass", title: [p.name, p.seconds === null ? "" : `${(1000 * p.seconds).toFixed(1)} ms`, p.applications ? plural(p.applications, "application") : ""].filter(Boolean).join(" · ") },
      el("b", { textContent: p.name.length > 26 ? `${p.name.slice(0, 25)}…` : p.name }), el("small", {}, delta, p.seconds ? ` ${p.seconds >= 1 ? `${p.seconds.toFixed(1)} s` : `${Math.max(1, Math.round(1000 * p.seconds))} ms`}` : ""));
    if (p.state === null) b.disabled = true; else { b.dataset.state = p.state; b.onclick = () => { plain = false; step(p.state); }; }
    bar.append(b);
  }
  const flip = el("div", { className: "switch", id: "flip", role: "group", ariaLabel: "Side of the pass" }, el("button", { textContent: "before", title: "Before the pass, what it removes in red (b)", onclick: () => side(true) }),
    el("button", { textContent: "after", title: "After the pass, what it adds in green", onclick: () => side(false) }), el("button", { textContent: "plain", title: "After the pass, nothing marked (p)", onclick: () => side(false, true) }));
  $("bottom").replaceChildren(bar, el("div", { className: "switch", id: "steps", role: "group", ariaLabel: "Applications" }), flip);
  if (states.length < 2) $("bottom").hidden = true;
}
function moved(change) { // to another state, with what became of the selection there
  if (!isWhole) { whole.then(() => moved(change)); return; }
  const from = before && at > 0 ? at - 1 : at, box = selected, op = box && box.k !== undefined && has(box.k) ? record(box.k).op : "";
  keeping(selected, () => { change(); stepped = null; if (at === 0) before = false; mark(); });
  const to = before && at > 0 ? at - 1 : at;
  link([]); chosenLine = "";
  if (box && box.k !== undefined && !has(box.k)) {
    const found = heirs(box.k, from, to).filter(has), heir = found.find(k => record(k).op === op) ?? found[0];
    if (heir === undefined) select(null); else goTo(heir);
  }
  if (!(openTab in TEXTS)) tab(openTab); else if (openTab === "Outline") tab("Outline");
  refresh();
}
function step(i) { moved(() => { at = Math.max(0, Math.min(states.length - 1, i)); }); }
function side(isBefore, isPlain = false) {
  if (!page.comparison) moved(() => { before = isBefore && at > 0; plain = isPlain; });
}
function walk(by) { if (plain && !before) plain = false; step(at + by); }
function refresh() {
  if (!states.length) return;
  let reached = false;
  for (const b of document.querySelectorAll(".pass")) {
    const s = b.dataset.state === undefined ? -1 : Number(b.dataset.state);
    b.classList.toggle("done", !reached); b.classList.toggle("at", s === at); b.classList.toggle("bare", s === at);
    if (s === at) b.setAttribute("aria-current", "step"); else b.removeAttribute("aria-current");
    reached ||= s === at;
    if (s === at) b.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const flip = $("flip");
  if (flip) { [before, !before && !plain && !stepped, plain].forEach((on, i) => { flip.children[i].classList.toggle("on", on); flip.children[i].setAttribute("aria-pressed", String(on)); }); flip.style.visibility = at > 0 && !page.comparison ? "" : "hidden"; }
  stepper(); legend(); details(); follow(); draw(); remember();
}

function legend() { // of the colours, and of the marks
  const swatch = (text, colour, className = "") => { const item = el("span", { textContent: text, className }); item.style.setProperty("--swatch", colour); $("legend").append(item); };
  $("legend").replaceChildren();
  if (heat !== "kind") {
    const { least, most } = heats[heat]();
    swatch(least < most ? `${heat}: ${heatText(least)}` : heat, "color-mix(in srgb, var(--hot) 8%, var(--panel))"); swatch(heatText(most), "color-mix(in srgb, var(--hot) 80%, var(--panel))");
  } else for (const [name, colour] of [["kernel", "c-kernel"], ["fusion", "c-declared"], ["contraction", "c-contraction"], ["reduction", "c-reduction"], ["pointwise", "c-pointwise"], ["view", "c-view"], ["opaque", "c-opaque"], ["write", "c-write"]]) swatch(name, `var(--${colour})`);
  for (const name of [...(states.length > 1 ? ["added", "removed", "rewired"] : []), "linked"]) swatch(name, `var(--${name})`, "outline");
}
function tools() {
  if (report()) {
    const known = row => [["measured time", row.roofline && isMeasured(row.roofline) ? true : null], ["error against float64", row.error]].filter(([, x]) => x !== null && x !== undefined).map(([name]) => name);
    const choice = el("select", { id: "colour", title: "Colour of the boxes", ariaLabel: "Colour by", onchange: () => { heat = choice.value; legend(); draw(); remember(); } },
      ["kind", "bytes", "predicted time", ...new Set(report().kernels.flatMap(known))].map(name => el("option", { value: name, textContent: `colour: ${name}` })));
    $("tools").append(choice);
  }
  for (const [text, title, act] of [["−", "Zoom out", () => zoom(0.8)], ["+", "Zoom in", () => zoom(1.25)], ["fit", "Whole graph (f)", frameAll], ["open", "Open all modules (e)", openAll], ["close", "Close all (c)", closeAll]]) $("tools").append(el("button", { textContent: text, title, onclick: act }));
}
function theme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  wish.set("theme", root.dataset.theme);
  palette(); draw(); remember();
}
