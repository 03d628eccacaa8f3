"""The page: one file, no network, nothing in it that a hostile name could run; the same nodes keep their keys."""

import base64
import gzip
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusec.debug.compare import report_of
from fusec.debug.diff import diff_graphs
from fusec.debug.explain import explain, explain_subjects
from fusec.debug.subject import subject_of
from fusec.ir.graph import Graph, Source, Value
from fusec.ir.parser import parse_graph
from fusec.ir.types import F32
from fusec.viz.descent import descendants
from fusec.viz.html import pack, render_comparison, render_reports, view
from fusec.viz.model_source import excerpts
from fusec.viz.scene import Scene
from fusec.viz.tree import build_tree
from tests.tools.sample import HOSTILE, compiled, decoder, region, source, tensor, unpacked
from tests.tools.test_diff import chain


def data_of(page: str) -> dict[str, Any]:
    data = unpacked(page)
    graph = data["graphs"][0]
    return {"title": data["title"], **graph, "report": graph["reports"][-1] if graph["reports"] else None}


def states_of(*graphs: Graph) -> list[dict[str, Any]]:
    scene = Scene()
    for graph in graphs:
        scene.add_state("state", graph)
    return scene.states


def hostile_graph() -> Graph:
    graph = Graph(HOSTILE)
    x = graph.add_input(tensor(2, 3), HOSTILE)
    at = (Source(HOSTILE, 1, f"layers.0.{HOSTILE}", HOSTILE, HOSTILE),)
    call = {"target": HOSTILE, "args": (("%", 0), HOSTILE), "kwargs": ()}
    y = graph.add_node("opaque", (x,), call, types=[tensor(2, 3)], sources=at).result
    y.name = HOSTILE
    z = graph.add_node("add", (x, y), sources=at).result
    graph.set_outputs([z])
    return graph


def test_hostile_names_are_data_only() -> None:
    page = view(hostile_graph(), title=HOSTILE)
    assert "<img" not in page
    assert page.count("<script") == page.count("</script") == 3
    assert data_of(page)["title"] == HOSTILE
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "document.write" not in page


def test_embedded_text_cannot_end_its_element() -> None:
    text = pack({"a": "</script><!--\u2028&"})
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert json.loads(gzip.decompress(base64.b64decode(text))) == {"a": "</script><!--\u2028&"}


def test_page_needs_no_network() -> None:
    page = view(compiled())
    assert not re.search(r"https?:|//cdn|@import|url\(|fetch\(|XMLHttpRequest|<link|\bsrc=", page)
    assert "default-src 'none'" in page


def test_page_is_written(tmp_path: Path) -> None:
    page = view(compiled(), path=tmp_path / "page.html", title="small")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert "<title>small · fusec</title>" in page


def test_every_reference_of_the_page_resolves() -> None:
    data = data_of(view(compiled(3)))
    for state in data["states"]:
        assert state["root"] in state["groups"]
        for record, operands in state["nodes"].values():
            assert 0 <= record < len(data["records"])
            assert all(str(ref) in state["nodes"] or ref in state["inputs"] for ref, _ in operands)
        for group in state["groups"].values():
            slots = len(group["row"])
            assert all(0 <= end < slots for a, bends, b, _ in group["edges"] for end in (a, *bends, b))
            for box in group["boxes"]:
                assert "g" not in box or box["g"] in state["groups"]
                assert "k" not in box or str(box["k"]) in state["nodes"]
    last = data["states"][-1]
    assert all(str(k) in last["nodes"] for row in data["report"]["kernels"] for k in row["nodes"])
    assert all(str(k) in last["nodes"] for k in last["added"])
    assert all(str(k) in data["states"][-2]["nodes"] for k in last["removed"])


def test_kernel_shows_its_source_and_its_model_lines() -> None:
    data = data_of(view(compiled()))
    row = next(k for k in data["report"]["kernels"] if k["name"] == "rms_norm")
    assert "void rms_norm" in row["source"]
    record = data["records"][data["states"][-1]["nodes"][str(row["nodes"][0])][0]]
    assert data["report"]["kernels"][record["kernel"]]["name"] == "rms_norm"
    assert data["sources"][record["sources"][0]][:3] == ["model.layers.0.input_layernorm", "modeling_small.py", 12]


def test_kernels_and_reasons_are_shown_though_the_last_pass_changed_nothing() -> None:
    data = data_of(view(explain(lambda x: torch.kthvalue(torch.softmax(x, -1), 2).values, torch.randn(4, 8))))
    assert data["passes"][-1]["state"] is None
    records = [data["records"][node[0]] for node in data["states"][-1]["nodes"].values()]
    shown = {data["report"]["kernels"][r["kernel"]]["name"]: r for r in records if "kernel" in r}
    assert shown.keys() == {"softmax", "aten.kthvalue.default"}
    assert shown["aten.kthvalue.default"]["reason"] and "reason" not in shown["softmax"]


def test_nodes_keep_their_keys_and_groups_their_layout_between_equal_states() -> None:
    first, second = states_of(decoder(2), decoder(2))
    assert first["nodes"].keys() == second["nodes"].keys()
    assert first["groups"] == second["groups"]
    assert not second["added"] and not second["removed"] and not second["rewired"]


def test_modules_are_groups_and_lone_nodes_are_not() -> None:
    groups = states_of(decoder(2))[0]["groups"]
    names = {g["name"] for g in groups.values()}
    assert {"layers.0", "layers.1", "self_attn", "mlp"} <= names
    assert "q_proj" not in names and "layers" not in names


def test_runs_of_equal_layers_are_folded() -> None:
    groups = states_of(decoder(5))[0]["groups"]
    folded = [g for g in groups.values() if g["kind"] == "layers"]
    assert [g["name"] for g in folded] == ["layers.0–4"]
    assert [box["l"] for box in folded[0]["boxes"] if box["t"] == "g"] == [f"layers.{i}" for i in range(5)]
    assert not any(g["kind"] == "layers" for g in states_of(decoder(2))[0]["groups"].values())


def test_layers_that_differ_are_not_folded() -> None:
    graph = decoder(5)
    (third, *_) = [n for n in graph.nodes if n.is_op("rsqrt") and "layers.2" in str(n.sources[0])]
    third.sources = (replace(third.sources[0], module="model.layers.2.elsewhere"),)
    names = {g["name"] for g in states_of(graph)[0]["groups"].values() if g["kind"] == "layers"}
    assert "layers.0–4" not in names


def test_a_node_is_in_the_module_of_most_of_its_sources() -> None:
    def home(*modules: str) -> str:
        graph = Graph("g")
        x = graph.add_input(tensor(2, 3), "x")
        sources = tuple(Source("a.py", i, module) for i, module in enumerate(modules))
        other = graph.add_node("exp", (x,), sources=(Source("a.py", 99, "elsewhere.part"),)).result
        node = graph.add_node("exp", (other,), sources=sources)
        graph.add_node("neg", (node.result,), sources=sources)
        graph.set_outputs([graph.nodes[-1].result])
        return build_tree(graph).home[node].path

    assert home("layers.0", "layers.1.norm", "layers.1.norm", "layers.1") == "layers.1"
    assert home("layers.0", "layers.1") == ""
    assert home(*(f"layers.{i}" for i in range(8))) == ""


def test_a_kernel_is_in_its_layer_where_it_computes_what_all_layers_share() -> None:
    graph = Graph("g")
    x = graph.add_input(tensor(2, 3), "x")

    def rotate(body: Graph, angles: Value) -> list[Value]:
        shared = tuple(Source("a.py", i, f"layers.{i}") for i in range(8))
        value = body.add_node("cos", (angles,), sources=shared).result
        for line in range(3):
            value = body.add_node("neg", (value,), sources=source("layers.3", line)).result
        return [value]

    kernel = region(graph, [x], rotate, "layers.3", kind="kernel")
    other = region(graph, [kernel.result], rotate, "layers.3", kind="kernel")
    graph.set_outputs([graph.add_node("neg", (other.result,), sources=source("norm", 1)).result])
    tree = build_tree(graph)
    assert tree.home[kernel] is tree.home[other] and tree.home[kernel].path == "layers.3"


def test_descendants_have_the_operation_of_the_node_that_was_removed() -> None:
    before, after = decoder(2), decoder(2, fused=True)
    diff = diff_graphs(before, after)
    found = descendants(diff.removed, diff.added)
    norms = [n for n in diff.removed if n.is_op("rsqrt")]
    assert norms
    for node in norms:
        assert [heir.op.name for heir in found[node]] == ["rsqrt"] and found[node][0].sources == node.sources


def test_lines_of_the_model_have_those_around_them_where_the_file_is_the_one_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "excerpt_model.py").write_text("".join(f"line{i} = {i}\n" for i in range(1, 21)))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("excerpt_model")
    found = excerpts([Source("excerpt_model.py", 10, text="line10 = 10")])
    assert found == {"excerpt_model.py": [(i, f"line{i} = {i}") for i in range(7, 14)]}
    other = [Source("excerpt_model.py", 10, text="another text"), Source("gone.py", 3, text="x = y")]
    assert excerpts(other) == {"excerpt_model.py": [(10, "another text")], "gone.py": [(3, "x = y")]}


def test_two_versions_are_states_with_their_reports_and_one_of_both() -> None:
    with torch.no_grad():
        before, after = (explain(lambda x, f=f: f(torch.softmax(x, -1)), torch.randn(4, 8), title=title)
                         for title, f in (("one", torch.exp), ("two", lambda y: torch.kthvalue(y, 2)[0])))  # fmt: skip
    data = unpacked(render_comparison(before, after))["graphs"][0]
    old, new, both = data["states"]
    assert [old["report"], new["report"]] == [0, 1] and [r["title"] for r in data["reports"]] == ["one", "two"]
    assert both["nodes"].keys() == old["nodes"].keys() | new["nodes"].keys()
    assert set(map(str, both["removed"])) == old["nodes"].keys() - new["nodes"].keys() - _inner(old)
    for state in (old, both):  # a kernel that only one version has is that of its own report
        for key in both["removed"]:
            record = data["records"][state["nodes"][str(key)][0]]
            assert data["reports"][record["report"]]["kernels"][record["kernel"]]["nodes"] == [key]
    assert "ATen calls: 0 → 1" in [change["text"] for change in data["comparison"]["changes"]]
    assert data["comparison"]["total"]["ATen calls"] == [0, 1]


def _inner(state: dict[str, Any]) -> set[str]:
    return {str(key) for body in state["bodies"].values() for key in body}


def test_what_only_one_version_has_leads_to_the_readers_that_both_have() -> None:
    scene = Scene()
    for ops in (["neg", "exp", "tanh"], ["neg", "tanh"]):
        scene.add_state("state", chain(ops))
    scene.add_union("both")
    state = scene.states[-1]
    group = state["groups"][state["root"]]
    names = [box.get("l") for box in group["boxes"]]
    edges = {(names[a], names[b]) for a, _, b, _ in group["edges"]}
    assert {("neg", "tanh"), ("neg", "exp"), ("exp", "tanh")} <= edges
    assert [scene.records[state["nodes"][k][0]]["op"] for k in state["removed"]] == ["exp"]


def test_a_kernel_that_is_read_back_keeps_the_keys_of_its_body() -> None:
    """Its text has equal constants once, so that it has fewer nodes than a graph that was compiled just now."""

    def doubled(body: Graph, x: Value) -> list[Value]:
        more = body.add_node("mul", (x, body.constant(2.0, F32))).result
        return [body.add_node("exp", (body.add_node("mul", (more, body.constant(2.0, F32))).result,)).result]

    graph = Graph("g")
    kernel = region(graph, [graph.add_input(tensor(4), "x")], doubled, "m", kind="kernel", label="k")
    graph.set_outputs([kernel.result])
    again = parse_graph(str(graph))
    assert len(again.nodes[0].body.nodes) < len(kernel.body.nodes)
    for pair in ((graph, again), (again, graph)):
        scene = Scene()
        for side in pair:
            scene.add_state("state", side)
        ops = [{k: scene.records[n]["op"] for k, (n, _) in state["nodes"].items()} for state in scene.states]
        old, new = ({k: op for k, op in known.items() if op != "constant"} for known in ops)
        assert old == new and list(old.values()) == ["region", "mul", "mul", "exp"]


def test_a_constant_is_at_no_line() -> None:
    """As in a graph that is read back, so that a line of the model and a miss lead to what computes."""
    graph = Graph("g")
    half = graph.constant(0.5, F32)
    assert half.producer is not None
    half.producer.sources = source("m", 3)
    graph.set_outputs([graph.add_node("mul", (graph.add_input(tensor(4), "x"), half), sources=source("m", 3)).result])
    scene = Scene()
    scene.add_state("state", graph)
    assert {r["op"]: len(r["sources"]) for r in scene.records} == {"constant": 0, "mul": 1}


def test_two_reports_are_compared_without_a_graph() -> None:
    old, new = ({**report_of(explain(compiled(layers))), "title": str(layers)} for layers in (1, 2))
    data = unpacked(render_reports(old, new))["graphs"][0]
    assert data["states"] == [] and data["comparison"]["total"]["kernels"] == [3, 6]
    (norm,) = [k for k in data["comparison"]["kernels"] if k["name"] == "rms_norm"]
    assert norm["launches"] == [2, 4] and norm["bytes"][1] == 2 * norm["bytes"][0]
    assert data["comparison"]["kernels"][0]["bytes"][1] - data["comparison"]["kernels"][0]["bytes"][0] == max(
        k["bytes"][1] - k["bytes"][0] for k in data["comparison"]["kernels"]
    )


def test_every_graph_of_a_model_is_on_the_page() -> None:
    page = view(explain_subjects([subject_of(compiled(1)), subject_of(compiled(2))], "two graphs"))
    sizes = [len(g["states"][0]["nodes"]) for g in unpacked(page)["graphs"]]
    assert len(sizes) == 2 and sizes[0] > sizes[1]


def test_graph_that_was_not_compiled_has_a_page_without_a_report() -> None:
    data = data_of(view(decoder(1)))
    assert data["report"] is None and len(data["states"]) == 1


def test_thousands_of_nodes_stay_small() -> None:
    page = view(explain(compiled(60)))
    assert len(data_of(page)["states"][0]["nodes"]) > 1800
    assert len(page) < 3_000_000


def test_misses_that_lose_most_bytes_come_first() -> None:
    def model(*given: torch.Tensor) -> list[torch.Tensor]:
        return [torch.softmax(x, -1).sum(0) for x in given]

    small, large = [torch.randn(8, 8) for _ in range(3)], torch.randn(64, 48)
    data = data_of(view(explain(model, *small, large)))
    lost = [r["figures"]["bytes_lost"] for r in data["report"]["near_misses"]]
    assert lost == sorted(lost, reverse=True) and lost[0] == 2 * 4 * 64 * 48
