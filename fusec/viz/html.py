"""The page: template, style, script and data in one offline file."""

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fusec.debug.explain import explain, explain_subjects
from fusec.debug.explanation import Explanation
from fusec.debug.subject import Subject
from fusec.errors import FusecError
from fusec.ir.graph import Graph, Node
from fusec.viz.scene import Scene


def view(model: Any, *inputs: Any, path: str | Path | None = None, title: str = "", **keywords: Any) -> str:
    """Write the page of a model (compiled on sample inputs), of a compile or of a graph; returns its HTML.

    It accepts the arguments of ``fusec.explain``: ``dynamic``, ``train`` and ``options`` among the keywords.
    """
    text = render(explain(model, *inputs, title=title, **keywords))
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def render(explanation: Explanation) -> str:
    """The page of an explanation, the largest of its graphs first."""
    subjects = sorted(explanation.subjects, key=lambda s: -len(s.imported or s.final))
    if len(subjects) == 1:
        return page_of(explanation.title, [_graph_data(explanation)])
    parts = [explain_subjects([subject], explanation.title) for subject in subjects]
    return page_of(explanation.title, [_graph_data(part) for part in parts])


def _graph_data(explanation: Explanation) -> dict[str, Any]:
    (subject,) = explanation.subjects
    numbers = {node: i for i, row in enumerate(explanation.kernels) for node in row.nodes}
    reasons = {node: f.reason for f in explanation.fallbacks for node in f.nodes}

    def facts(node: Node) -> dict[str, Any]:
        out: dict[str, Any] = {"kernel": numbers[node]} if node in numbers else {}
        return out | ({"reason": reasons[node]} if node in reasons else {})

    scene, passes = Scene(), []
    for name, graph, about in _history(subject):
        state = None
        if graph is not None:
            scene.add_state(name, graph, facts if graph is subject.final else lambda node: {})
            state = len(scene.states) - 1
        passes.append({"name": name, "state": state, **about})
    report = _report(explanation, scene) if subject.is_grouped else None
    return {"name": subject.final.name, "passes": passes, "report": report, **scene.to_json()}


def _history(subject: Subject) -> list[tuple[str, Graph | None, dict[str, Any]]]:
    """The graph at import and after every pass that changed it; passes without effect have no graph."""
    from fusec.ir.parser import parse_graph

    quiet: dict[str, Any] = {"seconds": None, "applications": 0}
    out: list[tuple[str, Graph | None, dict[str, Any]]] = []
    changing = [r for r in subject.records if r.changed and r.after]
    if subject.imported is None and changing:
        out.append(("import", parse_graph(changing[0].before), quiet))
    elif subject.imported is not None:
        out.append(("import", subject.imported, quiet))
    last = changing[-1] if changing else None
    for record in subject.records:
        about = {"seconds": record.seconds, "applications": record.applications}
        graph = None
        if record is last and record.after == str(subject.final):
            graph = subject.final
        elif record.changed and record.after:
            graph = parse_graph(record.after)
        out.append((record.name, graph, about))
    if not any(graph is subject.final for _, graph, _ in out):
        out.append(("final" if out else subject.final.name, subject.final, quiet))
    return out


def _report(explanation: Explanation, scene: Scene) -> dict[str, Any]:
    data = explanation.to_json()
    shown = [row.nodes for row in explanation.kernels] + [row.nodes for row in explanation.fallbacks]
    for row, nodes in zip([*data["kernels"], *data["fallbacks"]], shown, strict=True):
        row["nodes"] = [scene.key(n) for n in nodes]
    launches = data["launches"]
    data["headline"] = [
        (f"{explanation.imported_nodes:,} → {explanation.final_nodes:,}", "nodes"),
        (sum(explanation.regions.values()), "fusions"),
        (launches["generated"], "kernels"),
        (launches["vendor"], "vendor calls"),
        (launches["opaque"], "ATen calls"),
    ]
    data["coverage"] = {"bytes": data["coverage"]["bytes"], "FLOPs": data["coverage"]["flops"]}
    return data


def page_of(title: str, graphs: Sequence[dict[str, Any]]) -> str:
    """Fill the template."""
    part = {name: _part(f"page.{name}") for name in ("html", "css", "js")}
    return Template(part["html"]).substitute(
        title=html.escape(f"{title} · fusec"),
        style=part["css"],
        script=part["js"],
        data=embed({"title": title, "graphs": list(graphs)}),
    )


def embed(data: Any) -> str:
    """Return JSON that cannot end its script element, whatever strings it contains."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _part(name: str) -> str:
    text = resources.files("fusec.viz").joinpath("page").joinpath(name).read_text(encoding="utf-8")
    if not text:
        raise FusecError(f"part {name} of the page is missing", fix="install fusec again")
    return text
