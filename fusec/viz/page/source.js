// Lists of lines: the model, the graph as text, and kernels. Only the lines on show are in the document.

const TOKENS = String.raw`("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(and|auto|bool|break|class|const|constexpr|continue|def|double|else|extern|float|for|from|if|import|in|inline|int|int64_t|int32_t|lambda|long|not|or|return|self|size_t|static|struct|template|tl|triton|typename|using|void|while|None|True|False)\b|(?<![\w%])(\d[\w.]*)`;
const WORDS = { python: new RegExp(`(#.*)|${TOKENS}`, "g"), cpp: new RegExp(`(//.*|#.*)|${TOKENS}`, "g") };
function coloured(text, language) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(WORDS[language])) {
    parts.push(text.slice(last, found.index), el("span", { className: found[1] ? "c" : found[2] ? "s" : found[3] ? "k" : "d", textContent: found[0] }));
    last = found.index + found[0].length;
  }
  return [...parts, text.slice(last)];
}
const MANY = 2000, WIDE = 300; // of more rows than MANY the longest is not looked for
let listsMade = 0;
class Lines {
  static HEIGHT = 18;
  // rows: {gutter, text, on, links, kind, title}; pick(i) is called for a click on a line or Enter.
  constructor(label, rows, pick, language = "python") {
    Object.assign(this, { rows, pick, language, lines: new Map(), active: Math.max(0, rows.findIndex(r => r.on)), id: `lines${listsMade += 1}` });
    this.inner = el("div", { className: "inner" });
    this.inner.style.height = `${rows.length * Lines.HEIGHT}px`;
    this.inner.style.minWidth = `${(rows.length > MANY ? WIDE : Math.min(WIDE, rows.reduce((most, r) => Math.max(most, r.text.length), 0))) * 0.61 + 6}em`;
    this.element = el("div", { className: "lines", tabIndex: 0, role: "listbox", ariaLabel: label }, this.inner);
    this.element.addEventListener("scroll", () => this.paint());
    this.element.addEventListener("keydown", e => this.key(e));
    this.element.addEventListener("click", e => {
      const i = Math.floor((e.clientY - this.inner.getBoundingClientRect().top) / Lines.HEIGHT);
      if (this.rows[i]) { this.active = i; this.pick(i); }
    });
    new ResizeObserver(() => this.paint()).observe(this.element);
  }
  shownAt(i) {
    if (i >= 0) { this.active = i; requestAnimationFrame(() => { this.element.scrollTop = Math.max(0, i * Lines.HEIGHT - this.element.clientHeight / 3); this.paint(); }); }
    return this.element;
  }
  paint() {
    const top = this.element.scrollTop, height = this.element.clientHeight || 400;
    const first = Math.max(0, Math.floor(top / Lines.HEIGHT) - 8), last = Math.min(this.rows.length, Math.ceil((top + height) / Lines.HEIGHT) + 8);
    for (const [i, line] of this.lines) if (i < first || i >= last) { line.remove(); this.lines.delete(i); }
    for (let i = first; i < last; i += 1) {
      if (!this.lines.has(i)) this.lines.set(i, this.inner.appendChild(this.line(i)));
      this.lines.get(i).classList.toggle("active", i === this.active);
    }
    this.element.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
  }
  line(i) {
    const row = this.rows[i], classes = ["line", row.on ? "on" : "", row.links ? "links" : "", row.kind || ""].filter(Boolean).join(" ");
    const line = el("div", { id: `${this.id}-${i}`, role: "option", title: row.title || "", ariaSelected: String(Boolean(row.on)), className: classes },
      el("span", { className: "gutter", textContent: row.gutter ?? "" }), el("code", {}, coloured(row.text, this.language)));
    line.style.top = `${i * Lines.HEIGHT}px`;
    return line;
  }
  key(e) {
    const screen = Math.max(1, Math.floor(this.element.clientHeight / Lines.HEIGHT) - 1);
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: screen, PageUp: -screen, Home: -1e9, End: 1e9 }[e.key];
    if (move !== undefined) {
      this.active = Math.max(0, Math.min(this.rows.length - 1, this.active + move));
      const y = this.active * Lines.HEIGHT, { scrollTop: top, clientHeight: height } = this.element;
      if (y < top) this.element.scrollTop = y; else if (y + Lines.HEIGHT > top + height) this.element.scrollTop = y + Lines.HEIGHT - height;
      this.paint(); say(this.rows[this.active].text);
    } else if (e.key === "Enter" || e.key === " ") this.pick(this.active);
    else return;
    e.preventDefault(); e.stopPropagation();
  }
}

// The model: the files, with the lines of the selected node.
function modelRows() {
  const rows = [], wanted = chosenLine ? new Set([chosenLine]) : selected && selected.k !== undefined && has(selected.k) ? linesOf(selected.k) : new Set(), nodes = nodesOfLines();
  for (const [file, lines] of Object.entries(page.files)) {
    rows.push({ text: `# ${file}`, kind: "file" });
    let last = null;
    for (const [number, text] of lines) {
      if (last !== null && number !== last + 1) rows.push({ text: "⋯", kind: "gap" });
      const id = `${file}:${number}`, here = nodes.get(id);
      rows.push({ gutter: number, text, id, on: wanted.has(id), links: Boolean(here), title: here ? `${plural(here.length, "node")}` : "" });
      last = number;
    }
  }
  return rows;
}
function modelList() {
  const rows = modelRows();
  if (!rows.length) return [el("div", { className: "empty", textContent: "The graph does not say which lines it comes from." })];
  return [new Lines("Model source", rows, i => rows[i].id && chooseLine(rows[i].id)).shownAt(rows.findIndex(r => r.on))];
}

// The graph as text, with the lines that the pass at hand removed and added.
function irText(state, key, indent = "") {
  const operands = operandsOf(key, state), r = records[state.nodes[key][0]];
  const refs = operands.map(([ref, i]) => typeof ref === "string" ? `%${(state.inputs[ref] || [ref])[0]}` : records[state.nodes[ref][0]].op === "constant" ? records[state.nodes[ref][0]].label.replace(/^constant /, "") : `%${ref}${records[state.nodes[ref][0]].types.length > 1 ? `.${i}` : ""}`);
  const attributes = Object.entries(r.attributes).map(([k, v]) => `${k}=${v}`).join(", ");
  return `${indent}%${key}: ${r.types.join(", ")} = ${r.op}(${refs.join(", ")})${attributes ? ` {${attributes}}` : ""}`;
}
let onlyChanges = false;
function irRows() {
  const rows = [], whole = stepped || page.comparison, now = stepped ? stepped.state : states[at], old = at > 0 && !plain && !whole ? states[at - 1] : null;
  const put = (state, key, kind, indent = "") => {
    if (records[state.nodes[key][0]].op === "constant") return;
    const on = selected && selected.k === key || linked.has(key);
    if (!onlyChanges || kind || on) rows.push({ gutter: { added: "+", removed: "−", rewired: "~" }[kind] || "", get text() { return irText(state, key, indent); }, key, kind, on, links: true, get title() { return records[state.nodes[key][0]].sources.map(sourceText)[0] || ""; } });
    for (const inner of state.bodies[key] || []) put(state, inner, kind && onlyChanges ? kind : "", `${indent}    `);
  };
  const added = new Set(old ? now.added : []), rewired = new Set(old ? now.rewired || [] : []), removed = new Set(old ? now.removed : []);
  let i = 0;
  for (const key of now.order) {
    if (old && !added.has(key)) while (i < old.order.length) { // what was removed before this node
      const gone = old.order[i];
      i += 1;
      if (gone === key) break;
      if (removed.has(gone)) put(old, gone, "removed");
    }
    if (isThere(key)) put(now, key, whole ? marks.get(key) || "" : added.has(key) ? "added" : rewired.has(key) ? "rewired" : "");
  }
  if (old) for (; i < old.order.length; i += 1) if (removed.has(old.order[i])) put(old, old.order[i], "removed");
  return rows;
}
function irList() {
  const rows = irRows();
  const choice = el("label", { className: "choice" }, el("input", { type: "checkbox", checked: onlyChanges, onchange: e => { onlyChanges = e.target.checked; if (plain && at > 0 && !stepped) { plain = false; mark(); refresh(); } tab("IR"); } }), stepped ? " only what the application changed" : " only what the pass changed");
  const pick = i => has(rows[i].key) ? goTo(rows[i].key) : (side(!before), has(rows[i].key) && goTo(rows[i].key));
  return [at > 0 ? choice : "", rows.length ? new Lines("Graph as text", rows, pick).shownAt(rows.findIndex(r => r.on)) : el("div", { className: "empty", textContent: "The pass changed nothing." })];
}
