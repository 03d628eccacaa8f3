// Comparison of two versions: totals in the header, and the lists of sites, kernels and other figures that differ.

const signed = (n, unit) => `${n < 0 ? "−" : "+"}${amount(Math.abs(n), unit)}`;
const grade = more => more > 0 ? "worse" : more < 0 ? "better" : "";
function totals() { // was → now, with the sign of the difference
  for (const [name, [was, now]] of Object.entries(page.comparison.total)) {
    if (!was && !now) continue;
    const unit = name.startsWith("bytes") ? "B" : "", more = now - was, text = n => unit ? amount(n, unit) : n.toLocaleString("en");
    const worse = name.startsWith("sites") ? -more : more;
    $("figures").append(el("div", { className: `figure ${grade(worse)}`, title: `${name}: ${text(was)} before, ${text(now)} after` },
      el("b", {}, more ? `${text(was)} → ${text(now)}` : text(now)), el("span", { textContent: more ? `${name}  ${signed(more, unit)}` : `${name}, as before` })));
  }
}
function comparisonList() {
  const { changes, kernels } = page.comparison, sites = changes.filter(c => c.what === "site"), others = changes.filter(c => c.what !== "site");
  const most = Math.max(1, ...kernels.map(k => Math.abs(k.bytes[1] - k.bytes[0])));
  return [...section("Sites: modules where a fusion is expected", sites.map(siteChange)), ...section("Kernels and calls", kernels.map(k => kernelChange(k, most))),
    ...section("Fusions, launches, coverage, bytes", others.map(c => row(c.worse ? "worse" : "better", c.text, c.worse ? "worse" : "better", c.why, null, null)))];
}
function noChanges() {
  const nodes = (page.passes.at(-1)?.delta || []).reduce((sum, n) => sum + n, 0);
  return `No site, kernel or figure differs${nodes ? `, but ${plural(nodes, "node")} of the graph` : ""}.`;
}
function section(title, rows) { return rows.length ? [el("h2", { className: "heading", textContent: `${title} (${rows.length})` }), ...rows] : []; }
function siteChange(c) {
  const out = row(c.worse ? "worse" : "better", c.name, c.worse ? "− lost" : "+ gained", c.why, null, null), module = c.name.split(" ").slice(1).join(" ");
  if (states.length) out.onclick = () => goToGroup(`m${module}`) || chooseModule(module);
  return out;
}
function kernelChange(k, most) {
  const [was, now] = k.bytes, [launched, launches] = k.launches, more = now - was;
  const sign = !launched ? "+" : !launches ? "−" : "~", keys = page.reports.flatMap(r => r.kernels.filter(x => x.kind === k.kind && (x.kind === "generated" ? x.name.replace(/_\d+$/, "") : x.name) === k.name).flatMap(x => x.nodes));
  const counts = launched === launches ? plural(launches, k.kind === "generated" ? "launch" : "call") : `${launched} → ${launches} ${k.kind === "generated" ? "launches" : "calls"}`;
  return row(grade(more || launches - launched), `${sign} ${brief(k.name)}`, signed(more, "B"), `${counts} · ${amount(was, "B")} → ${amount(now, "B")}${k.kind === "generated" ? "" : ` · ${k.kind}`}`, Math.abs(more) / most, keys);
}
