// Start.

async function start() {
  document.documentElement.dataset.theme = wish.get("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  palette(); header(); timeline(); tabs(); listen(); listenToKeys();
  $("theme").onclick = theme; $("keys").onclick = help;
  $("menu").onclick = () => document.body.classList.toggle("menu");
  if (wish.has("state")) at = Math.max(0, Math.min(states.length - 1, Number(wish.get("state"))));
  const marked = wish.get("side");
  if (marked && !page.comparison) { plain = false; before = marked === "before" && at > 0; }
  heat = wish.get("colour") in AMOUNTS ? wish.get("colour") : "kind";
  filterText = wish.get("filter") || ""; $("filter").value = filterText;
  const wanted = { tab: wish.get("tab"), line: wish.get("line"), node: wish.get("node") };
  if (!states.length) { document.body.classList.add("alone"); tab("Changes"); document.body.dataset.ready = document.body.dataset.whole = "true"; return; }
  whole = new Promise(done => { requestAnimationFrame(() => setTimeout(() => loadRest().then(done))); });
  if (["state", "side", "application"].some(name => wish.has(name))) await whole;
  legend(); tools(); resize(); new ResizeObserver(resize).observe($("area"));
  if ($("colour")) $("colour").value = heat;
  mark();
  const modules = shown().groups[shown().root].boxes.filter(b => b.t === "g");
  if (modules.length === 1) open.add(modules[0].g); // a model in one wrapper: look inside
  frameTop(); tab(wanted.tab || (page.comparison ? "Changes" : "Kernels")); refresh();
  if (wish.has("application")) await toApplication(Number(wish.get("application")));
  if (wanted.node) goTo(Number(wanted.node));
  if (wanted.line) chooseLine(wanted.line);
  document.body.dataset.ready = "true";
}
load().then(start, error => { document.body.prepend(el("p", { className: "broken", role: "alert", textContent: `This page cannot be shown: ${error.message}. It needs a browser from 2023 or later.` })); throw error; });
