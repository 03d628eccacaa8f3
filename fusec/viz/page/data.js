"use strict";
// Every text from the graph reaches the page through textContent or the canvas, never as HTML.

const $ = id => document.getElementById(id);
const wish = new URLSearchParams(location.hash.slice(1));
let everything, page, states = [], records = [], graphNumber = 0;
let at = 0, before = false, plain = true; // the state on show: before or after its pass, with or without marks
let stepped = null; // {state, step} while the applications of the pass are on show, one by one

async function unpack(text) {
  const binary = atob(text.trim()), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
// The first paint needs the last state alone; the others, and the applications of passes, come after it.
let isWhole = false, whole;
const parts = () => (parts.all ||= $("parts").textContent.trim().split(" "));
async function loadRest() {
  for (let i = 0; i < states.length - 1; i += 1) Object.assign(states[i], await unpack(parts()[page.first_part + i]));
  isWhole = true;
  document.body.dataset.whole = "true";
  if (selected) details();
}
async function load() {
  everything = await unpack($("data").textContent);
  graphNumber = Math.max(0, Math.min(everything.graphs.length - 1, Number(wish.get("graph") || 0)));
  page = everything.graphs[graphNumber];
  ({ states, records } = page);
  for (const r of records) r.sources = r.sources.map(i => page.sources[i]);
  at = Math.max(0, states.length - 1);
}

const shown = () => stepped ? stepped.state : states[before && at > 0 ? at - 1 : at];
const record = key => records[shown().nodes[key][0]];
const has = key => shown().nodes[key] !== undefined && isThere(Number(key));
const report = () => states.length && page.reports[Math.min(shown().report ?? 0, page.reports.length - 1)] || null;
const finalState = () => states.findLastIndex(s => s.order.some(k => records[s.nodes[k][0]].kernel !== undefined));

function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.flat().filter(c => c !== null && c !== undefined && c !== ""));
  return node;
}
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : word.endsWith("ch") ? "es" : "s"}`;
function amount(n, unit) {
  if (typeof n !== "number") return n === undefined || n === null ? "" : `${n} ${unit}`;
  const steps = ["", "k", "M", "G", "T"];
  let i = 0;
  while (n >= 1000 && i < 4) { n /= 1000; i += 1; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)} ${steps[i]}${unit}`;
}
const duration = us => us < 1000 ? `${Number(us.toPrecision(3))} µs` : `${Number((us / 1000).toPrecision(3))} ms`;
// Times of Triton's interpreter are not those of the machine.
const isMeasured = r => r.measured_us !== null && !report().interpreted;
const timeOf = r => isMeasured(r) ? r.measured_us : r.predicted_us;
const brief = name => name.replace(/^aten\.|\.default$/g, "");
const sourceText = ([module, file, line]) => [module, file && `${file}:${line}`].filter(Boolean).join(", ");

// A value that is computed once for each state.
function perState(compute) {
  const known = new Map();
  return () => {
    const state = shown();
    if (!known.has(state)) known.set(state, compute(state));
    return known.get(state);
  };
}

// The address of the page names what is on show, so that a link leads back to it.
function remember() {
  const now = { graph: graphNumber || "", application: stepped && stepped.step ? passAt().numbers[stepped.step - 1] : "", state: at === states.length - 1 ? "" : at, side: plain ? "" : before ? "before" : "after",
    node: selected && selected.k !== undefined ? selected.k : "", line: chosenLine, tab: openTab === "Kernels" ? "" : openTab, filter: filterText,
    colour: heat === "kind" ? "" : heat, theme: wish.get("theme") ? document.documentElement.dataset.theme : "" };
  const text = new URLSearchParams(Object.entries(now).filter(([, v]) => v !== "" && v !== null && v !== undefined)).toString();
  if (location.hash.slice(1) !== text) history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}
function say(text) { $("said").textContent = text; }
