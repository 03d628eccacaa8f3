// Single applications of the rewrites of a pass: the graph after each, in one layout of all nodes that the pass ever had,
// so that nothing moves. A node is there from the step that adds it to the one that removes it.

const passAt = () => page.passes.find(p => p.state === at);
const histories = new Map(); // by number: the state, or a promise of it
function historyOf(pass) {
  if (!pass || pass.history === undefined) return null;
  if (!histories.has(pass.history)) histories.set(pass.history, unpack(parts()[page.first_part + states.length - 1 + pass.history]).then(state => { histories.set(pass.history, state); return state; }));
  return histories.get(pass.history);
}
const lifeOf = key => shown().lives[key] || [0, Infinity];
const isThere = key => { if (!stepped) return true; const [born, died] = lifeOf(key); return born <= stepped.step && stepped.step <= died; }; // what this step removes is still drawn
const present = box => !stepped || (box.k !== undefined ? isThere(box.k) : box.v === undefined || typeof box.v[0] !== "number" || isThere(box.v[0]));
function operandsOf(key, state = shown()) {
  if (!stepped || state !== stepped.state) return state.nodes[key][1];
  const when = stepped.step - (lifeOf(key)[1] === stepped.step), past = (state.operands[key] || []).find(([until]) => when < until);
  return past ? past[1] : state.nodes[key][1];
}
const isEdge = (a, b) => present(a) && present(b) && (!stepped || a.k === undefined || b.k === undefined || operandsOf(b.k).some(([ref]) => ref === a.k));
function markStep() {
  for (const [key, [born, died]] of Object.entries(stepped.state.lives)) {
    if (died === stepped.step) marks.set(Number(key), "removed");
    else if (born === stepped.step) marks.set(Number(key), "added");
  }
  for (const [key, past] of Object.entries(stepped.state.operands))
    if (past.some(([until]) => until === stepped.step) && !marks.has(Number(key)) && isThere(Number(key))) marks.set(Number(key), "rewired");
}
const remarkOf = number => page.reports.at(-1)?.remarks.find(r => r.application === number && r.kind === "passed");

async function walkApplications(by) {
  const pass = passAt();
  if (!pass || pass.history === undefined) { say(pass && pass.applications === 1 ? "one application, which before and after show" : "no applications in this pass"); return; }
  const now = stepped ? stepped.step + by : by > 0 ? 1 : pass.numbers.length;
  await toStep(Math.max(0, Math.min(pass.numbers.length, now)));
}
async function toApplication(number) {
  const pass = page.passes.find(p => p.numbers && p.numbers.includes(number));
  if (!pass) return false;
  await whole;
  if (at !== pass.state) step(pass.state);
  await toStep(pass.numbers.indexOf(number) + 1);
  return true;
}
async function toStep(number) { // after so many applications of the pass
  const pass = passAt(), state = await historyOf(pass), box = selected;
  if (passAt() !== pass) return;
  keeping(box, () => { before = plain = false; stepped = { state, step: number }; mark(); });
  if (box && box.k !== undefined && !has(box.k)) selected = null;
  chosenLine = ""; link([]);
  if (openTab === "Outline") tab("Outline");
  const r = number ? remarkOf(pass.numbers[number - 1]) : null;
  const changed = [...marks.keys()].filter(k => marks.get(k) !== "rewired"), added = changed.find(k => marks.get(k) === "added");
  if (changed.length) goTo(added ?? changed[0]);
  refresh();
  say(r ? `#${r.application} ${r.message}, ${number} of ${pass.numbers.length}, at ${r.sources[0] || "no line"}` : `before the first of ${pass.numbers.length} applications`);
}
function stepper() {
  const pass = passAt(), box = $("steps"), many = pass && pass.history !== undefined;
  box.hidden = !many;
  if (!many) return;
  historyOf(pass); // so that it is there for the first step
  const count = pass.numbers.length, r = stepped && stepped.step ? remarkOf(pass.numbers[stepped.step - 1]) : null;
  const text = !stepped ? plural(count, "application") : stepped.step ? `${stepped.step} of ${count}: ${r ? r.message : ""}` : `before ${count}`;
  const button = (label, title, act, off) => el("button", { textContent: label, title, ariaLabel: title, onclick: act, disabled: off });
  box.replaceChildren(button("‹", "The application before (,)", () => walkApplications(-1), Boolean(stepped) && stepped.step === 0),
    el("span", { textContent: text, title: r ? `#${r.application} ${r.message}` : "" }), button("›", "The next application (.)", () => walkApplications(1), Boolean(stepped) && stepped.step === count),
    stepped ? button("×", "The whole pass (p)", () => side(false, true), false) : "");
}
