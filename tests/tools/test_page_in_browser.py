"""The page in Chromium: what a reader sees, clicks and types. Needs playwright and a Chromium; see CONTRIBUTING.md."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fusec.analysis.machine import CHIPS, MEASURED, Machine, assumed_cpu
from fusec.debug.explain import explain
from fusec.debug.explanation import Explanation
from fusec.debug.timing import Timing
from fusec.viz.html import render, view
from tests.tools.browser import Opened
from tests.tools.sample import compiled
from tests.tools.test_page import hostile_graph


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a decoder of five layers."""
    path = tmp_path_factory.mktemp("page") / "decoder.html"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=5, vocab_size=128)).eval()
    with torch.no_grad():
        view(model, torch.arange(8)[None], path=path, title="decoder")
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    page = Opened(browser, file)
    yield page
    page.close()


def test_equal_layers_are_folded_and_hold_their_kernels(opened: Opened) -> None:
    boxes = opened("shown().groups[shown().root].boxes.map(b => b.l + ' ' + b.s)")
    assert any(re.match(r"layers\.1–4 \d+ nodes in 4 equal layers", box) for box in boxes)
    label = "b => b.k === undefined ? b.l : record(b.k).label"
    assert "add_rms_norm_gated_projection" in opened(f"shown().groups['mmodel.layers.2'].boxes.map({label})")
    inside = opened(f"shown().groups['mmodel.layers.2.self_attn'].boxes.map({label})")
    assert "attention" in inside and "add_rms_norm_linear_rotary_embedding" in inside


def test_model_graph_and_kernel_follow_each_other(opened: Opened) -> None:
    opened("tab('Model'); goTo(keysOf(shown()).find(k => record(k).op === 'rsqrt'))")
    opened.page.click("#list .line.on:has-text('rsqrt')")
    rsqrt = "[...linked].filter(k => record(k).op === 'rsqrt').length"
    assert opened(rsqrt) == 11  # two norms in each of five layers, and the last
    assert opened("[...linked].filter(k => records[shown().nodes[k][0]].kernel !== undefined).length") == 11
    lit = "[...document.querySelectorAll('#kernel .line.on')].map(l => l.textContent)"
    opened.page.wait_for_selector("#kernel .line.on")
    assert any("rsqrt" in text for text in opened(lit))
    # From a line of the kernel to its node and back to the line of the model.
    opened.page.click("#kernel .line.on:has-text('rsqrt')")
    assert opened("record(selected.k).op") == "rsqrt"
    assert "rsqrt" in opened("[...document.querySelectorAll('#list .line.on')].map(l => l.textContent).join()")
    assert opened("nodesOfLines().get([...linesOf(selected.k)][0]).includes(selected.k)")


def test_every_line_of_a_kernel_leads_to_an_operation_of_its_region(opened: Opened) -> None:
    counts = opened("""report().kernels.filter(k => k.kind === 'generated').map(k => {
        const origins = originsOf({ row: k, region: k.nodes[0] }), lines = k.source.trimEnd().split('\\n').length;
        const reached = new Set(origins.filter(o => o && typeof o[0] === 'number').map(o => o[0]));
        const computed = shown().bodies[k.nodes[0]].filter(n => !['source', 'view'].includes(record(n).category));
        return [k.name, origins.length === lines, computed.filter(n => reached.has(n)).length / computed.length];
    })""")
    assert len(counts) >= 5
    for name, whole, share in counts:
        assert whole and share > 0.5, name


def test_a_selection_becomes_its_descendant_in_another_pass(opened: Opened) -> None:
    opened("step(0)")
    key = opened("shown().order.find(k => record(k).op === 'rsqrt')")
    opened(f"goTo({key})")
    for _ in range(opened("states.length") - 1):
        opened.press("j")
    assert opened("record(selected.k).op") == "rsqrt" and opened("kernelOf(selected.k).row.name").startswith("rms_norm")
    for _ in range(opened("states.length") - 1):
        opened.press("k")
    assert opened("selected.k") == key


def test_the_address_restores_what_is_on_show(browser: Any, opened: Opened, file: Path) -> None:
    opened("tab('Remarks'); step(2); side(false)")
    opened("goTo(states[2].added[0])")
    opened.page.fill("#filter", "rms")
    address = opened("location.hash.slice(1)")
    again = Opened(browser, file, address)
    state = "[at, before, plain, selected.k, openTab, filterText]"
    assert again(state) == opened(state) == [2, False, False, opened("states[2].added[0]"), "Remarks", "rms"]
    again.close()


def test_from_the_start_to_a_line_of_a_kernel_and_back_by_keyboard_alone(opened: Opened) -> None:
    opened.press("g", "ArrowDown")
    for _ in range(12):
        if opened("selected && selected.g !== undefined && selected.k === undefined"):
            break
        opened.press("ArrowDown")
    assert opened("selected.l").startswith("layers.0")
    opened.press("Enter", "Enter")
    for _ in range(12):
        if opened("selected.k !== undefined && record(selected.k).kernel !== undefined"):
            break
        opened.press("ArrowDown")
    assert "kernel" in opened.said
    opened("window.region = selected.k")
    opened.press("Escape") if opened("open.has(selected.g)") else None
    assert opened("document.activeElement.id") == "canvas"
    opened.press("Tab")  # on from the graph
    for _ in range(30):
        if opened("document.activeElement.id") == "kernel":
            break
        opened.press("Tab")
    assert opened("document.activeElement.id") == "kernel"
    for _ in range(120):
        opened.press("ArrowDown")
        if "rsqrt(" in opened.said and "//" not in opened.said:
            break
    opened.press("Enter")
    assert opened("record(selected.k).op") == "rsqrt"
    opened.press("g", "Backspace")
    assert opened("selected.k") == opened("window.region")
    opened.press("Backspace")
    assert opened("selected.l").startswith("layers.0")


def test_arrows_lead_down_from_the_inputs_to_the_results(opened: Opened) -> None:
    """Out of a layer too, some of whose values are results."""
    opened.press("g", "ArrowDown", "ArrowDown", "ArrowDown", "Enter", "Enter")
    walked = [opened("selected.l")]
    for _ in range(9):
        opened.press("ArrowDown")
        walked.append(opened("selected.l"))
    inside = ["self_attn", "add_rms_norm_gated_projection", "mlp.down_proj: linear", "linear_6", "layers.0"]
    assert walked == [*inside, "layers.1–4", "norm: add_rms_norm_linear", *["11 results"] * 3]


def test_the_outline_is_a_tree_that_the_keyboard_walks(opened: Opened) -> None:
    opened("tab('Outline'); document.querySelector('#list [role=treeitem]').focus()")
    for _ in range(20):
        opened.press("ArrowDown")
        if opened("document.activeElement.textContent").startswith("layers.0"):
            break
    opened.press("ArrowRight", "ArrowRight")
    assert opened("document.activeElement.getAttribute('aria-level')") == "2"
    assert opened("selected.k") == opened("document.activeElement.box.k")
    opened.press("ArrowLeft", "ArrowLeft")
    assert opened("document.activeElement.getAttribute('aria-expanded')") == "false"


def test_text_on_the_canvas_is_legible_or_left_out(browser: Any, file: Path) -> None:
    page = Opened(browser, file)
    page("""(() => { window.sizes = []; const fill = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            const size = parseFloat(/([\\d.]+)px/.exec(this.font)[1]) * this.getTransform().a / devicePixelRatio;
            window.sizes.push(size); return fill.call(this, text, ...rest); }; openAll(); })()""")
    for scale in (0.02, 0.1, 0.3, 0.5, 0.8, 1.0, 2.0):
        page(f"view.scale = {scale}; paint()")
    sizes = page("window.sizes")
    assert len(sizes) > 100 and min(sizes) >= 10.99
    page.close()


CONTRASTS = """(() => {
    const contrasts = [], fill = CanvasRenderingContext2D.prototype.fillText;
    const light = parts => parts.map(c => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
        const at = this.getTransform().transformPoint({ x, y }), ink = this.fillStyle;
        const under = [...this.getImageData(at.x, at.y, 1, 1).data].slice(0, 3);
        const pair = [light(under), light([1, 3, 5].map(i => parseInt(ink.slice(i, i + 2), 16)))].sort((a, b) => b - a);
        if (at.x >= 0 && at.y >= 0 && at.x < canvas.width && at.y < canvas.height)
            contrasts.push([Math.round(100 * pair[0] / pair[1]) / 100, text, heat]);
        return fill.call(this, text, x, y, ...rest); };
    for (const r of records) if (r.kernel !== undefined) r.error = { compiled: 2 ** r.kernel * 1e-7, eager: 1e-7 };
    for (heat of ["kind", "bytes", "predicted time", "error against float64"]) for (plain of [true, false])
        states.forEach((_, i) => { step(i); closeAll(); paint(); openAll(); paint(); });
    CanvasRenderingContext2D.prototype.fillText = fill;
    return contrasts.sort((a, b) => a[0] - b[0]); })()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_on_the_canvas_has_contrast(browser: Any, file: Path, theme: str) -> None:
    """What axe cannot see: names and amounts on boxes of each kind, change and heat."""
    page = Opened(browser, file, f"theme={theme}")
    found = page(CONTRASTS)
    assert len(found) > 200 and found[0][0] >= 4.5, found[:5]
    page.close()


@pytest.mark.parametrize("width, height", [(1440, 900), (1280, 720), (390, 844)])
def test_nothing_overlaps_and_the_whole_graph_fits(browser: Any, file: Path, width: int, height: int) -> None:
    page = Opened(browser, file, "", width, height)
    page("openAll(); frameAll()")
    rectangles = page("""['canvas', 'tools', 'search', 'legend', 'bottom', 'top'].map(id => {
        const r = $(id).getBoundingClientRect(); return [id, r.left, r.top, r.right, r.bottom]; })""")
    for i, (name, left, top, right, bottom) in enumerate(rectangles):
        assert left >= 0 and right <= width + 1 and bottom <= height + 1, name
        for other, *edges in rectangles[i + 1 :]:
            apart = right <= edges[0] + 1 or edges[2] <= left + 1 or bottom <= edges[1] + 1 or edges[3] <= top + 1
            assert apart, (name, other)
    whole = page("""(() => { const m = measure(shown().root); return [view.x, view.y, view.x + m.w * view.scale,
        view.y + m.h * view.scale, view.width, view.height]; })()""")
    assert min(whole[:2]) >= 0 and whole[2] <= whole[4] and whole[3] <= whole[5]
    assert page("document.documentElement.scrollWidth") <= width
    page.close()


def test_tools_fit_a_phone_whatever_a_page_has_colours_for(browser: Any, file: Path) -> None:
    page = Opened(browser, file, "", 390, 844)
    page("$('colour').append(el('option', { textContent: 'colour: error against float64' }))")
    edges = page("[...$('tools').children].map(tool => tool.getBoundingClientRect().right)")
    assert max(edges) <= 390 and max(edges) <= page("$('tools').getBoundingClientRect().right"), edges
    page.close()


def test_lists_are_a_drawer_on_a_phone(browser: Any, file: Path) -> None:
    page = Opened(browser, file, "", 390, 844)
    assert not page.page.is_visible("#list")
    page.page.click("#menu")
    page.page.wait_for_timeout(300)
    page.page.click("#list .row >> nth=0")
    assert page("record(selected.k).kernel") == 0
    page("toApplication(page.passes.find(p => p.numbers).numbers[0])")
    for name in ("#steps", "#flip", "#passes"):
        box = page.page.locator(name).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844, name
    page.close()


def test_a_wide_graph_begins_at_its_first_box(opened: Opened) -> None:
    """Rows may lead far to one side, so that nothing is below the middle."""
    opened("measure(shown().root).w = 1e5; measure(shown().root).h = 1e5; frameTop()")
    assert 0 < opened("view.x + measure(shown().root).x[0] * view.scale") < opened("view.width")


@pytest.mark.parametrize("factor", [1, 1e-7, 1e7])
def test_the_roofline_is_inside_its_frame(opened: Opened, factor: float) -> None:
    opened(
        f"report().machine.read_gb_s *= {factor}; for (const name in report().machine.peaks)"
        f" report().machine.peaks[name] *= {factor}; goTo(report().kernels[0].nodes[0])"
    )
    texts = opened("""[...document.querySelectorAll('.roofline text')].map(t => {
        const box = t.getBBox(); return [t.textContent, box.x, box.x + box.width]; })""")
    assert len(texts) > 5 and all(left >= 0 and right <= 380 for _, left, right in texts), texts


def explained(machine: Machine) -> Explanation:
    """An explanation of the sample, each kernel measured at a second, beside the limits of a machine."""
    found = explain(compiled())
    found.machine = found.subjects[0].machine = machine
    found.subjects[0].timing = Timing({}, 0.0, 1.0, 0.0, 5, {})
    for row in found.kernels:
        row.roofline = replace(row.roofline, measured_us=1e6)
    return found


def test_the_map_does_not_cover_what_is_selected(browser: Any, file: Path) -> None:
    page = Opened(browser, file, "", 1280, 720)
    for key in page("report().kernels.flatMap(k => k.nodes)"):
        page(f"""(() => {{ goTo({key}); const p = find(q => same(q.box, selected));
            view.x = view.width - 20 - (p.x + p.w) * view.scale; view.y = view.height - 20 - (p.y + p.h) * view.scale;
            show(p); paint(); }})()""")
        right, bottom, *map_at = page("""(() => {
            const { x, y, w, h } = find(p => same(p.box, selected)), at = $('map').getBoundingClientRect();
            const area = canvas.getBoundingClientRect(), [left, top] = [area.x + view.x, area.y + view.y];
            return [left + (x + w) * view.scale, top + (y + h) * view.scale, at.left, at.top]; })()""")
        assert right <= map_at[0] or bottom <= map_at[1], (key, right, bottom, map_at)
    page.close()


@pytest.mark.parametrize(
    ("machine", "wanted", "refused"),
    [
        (CHIPS["a100"], "1000 ms in Triton's interpreter, on the CPU", "% of the limit"),
        (assumed_cpu(), "measured 1000 ms", "% of the limit"),
        (replace(assumed_cpu(), source=MEASURED), "% of the limit of a modest CPU (measured)", "interpreter"),
    ],
    ids=["interpreted", "assumed", "measured"],
)
def test_times_are_compared_with_limits_that_are_known(
    browser: Any, tmp_path: Path, machine: Machine, wanted: str, refused: str
) -> None:
    (tmp_path / "page.html").write_text(render(explained(machine)), encoding="utf-8")
    page = Opened(browser, tmp_path / "page.html")
    page("goTo(report().kernels.find(k => k.kind === 'generated').nodes[0])")
    said, plotted = page.page.inner_text("#right"), page.page.text_content(".roofline") or ""
    assert wanted in said and refused not in said
    interpreted = "interpreter" in wanted
    assert ("predicted" if interpreted else "measured") in plotted.rpartition("GFLOP/s")[2]
    assert ("measured time" in str(page.page.text_content("#colour"))) is not interpreted
    assert ("measured" in str(page.page.text_content("#list"))) is not interpreted
    page.close()


@pytest.mark.parametrize("width, height", [(1440, 900), (390, 844)])
def test_what_is_selected_is_seen_beside_its_details(browser: Any, file: Path, width: int, height: int) -> None:
    """On a phone they cover the lower half of the graph."""
    page = Opened(browser, file, "", width, height)
    for row in (0, 1, 2):
        page(f"goTo(report().kernels[{row}].nodes.at(-1))")
        left, top, right, bottom = page("""(() => {
            const { x, y, w, h } = find(p => same(p.box, selected)), at = canvas.getBoundingClientRect();
            const [left, top] = [at.x + view.x + x * view.scale, at.y + view.y + y * view.scale];
            return [left, top, left + w * view.scale, top + Math.min(h, 40) * view.scale];
        })()""")
        panel = page.page.locator("#right").bounding_box()
        assert left >= 0 and top >= 0 and right <= width
        assert bottom <= panel["y"] or right <= panel["x"], (row, bottom, panel)
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, file: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    page = Opened(browser, file, f"theme={theme}")
    states = [
        "tab('Kernels')", "tab('Model'); goTo(report().kernels[0].nodes[0])", "tab('Outline')", "tab('Sites')",
        "tab('Remarks')", "tab('IR'); step(2); side(false)", "toStep(3)", "tab('Misses'); select(null); help()",
    ]  # fmt: skip
    for state in states:
        page(f"(() => {{ {state} }})()")
        page.page.wait_for_timeout(200)
        found = axe.Axe().run(page.page).response["violations"]
        shown = [(f["id"], n["html"][:120], n["failureSummary"]) for f in found for n in f["nodes"][:2]]
        assert not shown, (state, shown)
    page.close()


def test_single_applications_are_stepped_through(opened: Opened) -> None:
    opened("plain = false; step(page.passes.find(p => p.name === 'raise').state)")
    opened.press(".")
    opened.wait_until("stepped && stepped.step === 1")
    first = opened.said
    assert re.match(r"#\d+ \S+, 1 of \d+, at ", first) and opened("marks.get(selected.k)") == "added"
    opened.press(".")
    opened.wait_until("stepped.step === 2")
    assert ", 2 of " in opened.said and opened("location.hash").count("application=") == 1
    opened.press(",")
    opened.wait_until("stepped.step === 1")
    assert opened.said == first
    opened.press("p")
    assert opened("stepped === null && plain")


def test_steps_lead_from_the_graph_before_a_pass_to_the_one_after_it(opened: Opened) -> None:
    here = "state.order.filter(isThere).filter(k => marks.get(k) !== 'removed')"
    texts = f"(state => {here}.map(k => irText(state, k)).sort())"
    walked = 0
    for name in ("canonicalize", "raise", "fuse", "attention"):
        opened(f"plain = true; step(page.passes.find(p => p.name === '{name}' && p.history !== undefined).state)")
        before, after = opened(f"[states[at - 1], states[at]].map({texts})")
        opened("toStep(0)")
        assert opened(f"{texts}(shown())") == before
        opened("toStep(passAt().numbers.length)")
        assert opened(f"{texts}(shown())") == after != before
        walked += opened("passAt().numbers.length")
    assert walked > 40


def test_a_remark_leads_to_the_graph_after_its_application(browser: Any, opened: Opened, file: Path) -> None:
    opened("tab('Remarks')")
    opened.page.click("#list .row:has-text('add_rms_norm') >> nth=0")
    opened.wait_until("stepped !== null")
    state = "[at, stepped.step, passAt().numbers[stepped.step - 1], selected.k]"
    assert "add_rms_norm" in opened.said and opened("record(selected.k).label") == "add_rms_norm"
    again = Opened(browser, file, opened("location.hash.slice(1)"))
    assert again(state) == opened(state)
    again.close()


def test_the_graph_as_text_shows_what_a_pass_changed(opened: Opened) -> None:
    opened("onlyChanges = true; plain = false; step(2); tab('IR')")
    rows = opened("irRows().map(r => [r.kind, r.text])")
    kinds = [kind for kind, _ in rows]
    assert kinds.count("removed") == opened(
        "states[2].removed.filter(k => records[states[1].nodes[k][0]].op !== 'constant').length"
    )
    assert any(kind == "added" and "region" in text for kind, text in rows)


def test_boxes_are_coloured_by_bytes(opened: Opened) -> None:
    opened.page.select_option("#colour", "bytes")
    total = opened("heats.bytes().values[shown().root]")
    assert total == sum(opened("report().kernels.map(k => k.bytes)"))
    assert "colour=bytes" in opened("location.hash")


def test_the_graph_keeps_its_shape_where_the_legend_takes_other_lines(browser: Any, file: Path) -> None:
    page = Opened(browser, file, "", 390, 844)
    heights = []
    for colour in ("bytes", "kind"):
        page.page.select_option("#colour", colour)
        page.wait_until("canvas.height === Math.round(canvas.getBoundingClientRect().height * devicePixelRatio)")
        heights.append(page("canvas.height"))
    assert heights[0] > heights[1]
    page.close()


def test_more_heat_is_a_warmer_colour_on_nodes_and_modules_alike(opened: Opened) -> None:
    opened.page.select_option("#colour", "predicted time")
    found = opened("""(() => {
        const boxes = Object.values(shown().groups).flatMap(g => g.boxes).filter(box => box && amountOf(box));
        return boxes.map(box => [amountOf(box), warmth(amountOf(box))]).sort((a, b) => a[0] - b[0]); })()""")
    assert len(found) > 20 and [warm for _, warm in found] == sorted(warm for _, warm in found)
    assert found[0][1] == 0 and found[-1][1] < 1  # the model as a whole is at the end of the legend
    assert len({warm for _, warm in found}) == len({amount for amount, _ in found})


def test_hostile_names_are_inert(browser: Any, tmp_path: Path) -> None:
    view(hostile_graph(), path=tmp_path / "page.html", title="<img src=x onerror=alert(1)>")
    page = Opened(browser, tmp_path / "page.html")
    page("for (const name of ['Model', 'Outline', 'IR']) tab(name)")
    page("keysOf(shown()).forEach(k => goTo(k))")
    assert page("document.querySelectorAll('img, body script:not([type]):not(:last-of-type)').length") == 0
    page.close()


def test_events_of_a_trace_are_listed(browser: Any, tmp_path: Path) -> None:
    text = "size mismatch at index 0\n  /a/folder/modeling_small.py:12"  # torch says the whole path
    events = [{"kind": "recompile", "text": text, "count": 2}]
    (tmp_path / "page.html").write_text(render(explain(compiled()), events), encoding="utf-8")
    page = Opened(browser, tmp_path / "page.html", "tab=Trace")
    page.page.click("#list .row")
    assert page("openTab") == "Model" and page("chosenLine") == "modeling_small.py:12" and page("linked.size") > 0
    page.close()


def test_a_miss_has_its_edit_or_the_one_that_was_tried(browser: Any, tmp_path: Path) -> None:
    found = explain(compiled())
    (miss,) = found.near_misses
    tried = replace(miss, suggestion="", figures={"tried": "write 2: changes values", "kernel": "rms_norm"})
    found.near_misses = [miss, tried]
    (tmp_path / "page.html").write_text(render(found), encoding="utf-8")
    page = Opened(browser, tmp_path / "page.html", "tab=Misses")
    first, second = page.page.locator("#list .row").all_text_contents()
    assert f"→ {miss.suggestion}" in first and "tried" not in first
    assert "tried: write 2: changes values" in second and "runs in kernel rms_norm all the same" in second
    page.close()


def test_links_to_other_passes_wait_for_them(browser: Any, file: Path) -> None:
    page = Opened(browser, file, "state=1&side=before")
    assert page("[at, before, shown() === states[0], marks.size > 0]") == [1, True, True, True]
    page.close()


def test_a_step_takes_no_time(opened: Opened) -> None:
    opened("openAll()")
    longest = opened("""Math.max(...Array.from({ length: states.length }, (_, i) => {
        const start = performance.now(); step(i); paint(); return performance.now() - start; }))""")
    assert longest < 1000  # milliseconds; generous, as test machines are shared
