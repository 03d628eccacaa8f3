"""The page: template, style, scripts and compressed data in one offline file."""

import base64
import gzip
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fusec.collector import collector_paused
from fusec.debug.compare import COUNTS, Report, changes, kernel_changes
from fusec.debug.explain import explain, explain_subjects
from fusec.debug.explanation import Explanation
from fusec.debug.subject import Subject
from fusec.errors import FusecError
from fusec.history import History
from fusec.ir.graph import Graph, Node, Source
from fusec.ir.ops import Trait
from fusec.viz.model_source import excerpts
from fusec.viz.scene import Facts, Scene

SCRIPTS = (
    "data",
    "geometry",
    "paint",
    "camera",
    "links",
    "details",
    "lists",
    "source",
    "passes",
    "keyboard",
    "compare",
    "applications",
    "start",
)
"""The scripts of the page, in order; they share one scope."""


def view(
    model: Any,
    *inputs: Any,
    path: str | Path | None = None,
    title: str = "",
    before: Explanation | Report | None = None,
    **keywords: Any,
) -> str:
    """Write the page of a model (compiled on sample inputs), of a compile or of a graph; returns its HTML.

    It accepts the arguments of ``fusec.explain``: ``dynamic``, ``train`` and ``options`` among the keywords.

    Args:
        model: the model.
        inputs: sample inputs.
        path: the file to write.
        title: display name.
        before: the explanation of an earlier version, which the page compares the model with, or its report as JSON
            data, from which it has no graph to draw.
        keywords: further arguments of ``fusec.explain``.
    """
    explanation = explain(model, *inputs, title=title, **keywords)
    if isinstance(before, Mapping):
        text = render_reports(before, explanation.to_json())
    else:
        text = render(explanation) if before is None else render_comparison(before, explanation)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


@collector_paused()
def render(explanation: Explanation, events: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page of an explanation, the largest of its graphs first, with the events of a trace."""
    if len(explanation.subjects) == 1:
        return _page(explanation.title, [_history(explanation)], events)
    parts = [explain_subjects([subject], explanation.title) for subject in _by_size(explanation)]
    for part in parts:
        part.sites = explanation.sites
    return _page(explanation.title, [_history(part) for part in parts], events)


@collector_paused()
def render_comparison(before: Explanation, after: Explanation) -> str:
    """Return the page of the differences between two versions of a model: of the largest graph of each."""
    scene, reports, facts = Scene(), list[dict[str, Any]](), list[Facts]()
    parts = [explain_subjects(_by_size(e)[:1], e.title) for e in (before, after)]
    for number, (name, whole, part) in enumerate(zip(("before", "after"), (before, after), parts, strict=True)):
        facts.append(_facts(part, number))
        scene.add_state(name, part.subjects[0].final, facts[-1], report=number)
        reports.append(_report(part, scene) | {"sites": [site.to_json() for site in whole.sites]})
    scene.add_union("both", lambda node: facts[0](node) or facts[1](node), report=1)
    names = (f"before: {before.title}", f"after: {after.title}", "both in one")
    passes = [{"name": name, "state": i, "seconds": None, "applications": 0} for i, name in enumerate(names)]
    files = excerpts(_sources(part.subjects[0].final for part in parts))
    data = {"name": after.subjects[0].final.name, "passes": passes, "reports": reports, "files": files}
    data |= {"comparison": comparison(before.to_json(), after.to_json()), **scene.to_json()}
    return _page(f"{before.title} → {after.title}", [data], ())


def render_reports(before: Report, after: Report) -> str:
    """Return the page of the differences between two reports, which have no graphs."""
    data = {"name": "", "passes": [], "reports": [], "files": {}, "states": [], "records": []}
    titles = f"{before['title']} → {after['title']}"
    return _page(titles, [{**data, "comparison": comparison(before, after)}], ())


def comparison(before: Report, after: Report) -> dict[str, Any]:
    """Return the differences of two reports as the page shows them."""
    sides = (before, after)
    total = {"bytes moved": [sum(int(row["bytes"]) for row in side["kernels"]) for side in sides]}
    total |= {name: [int(side["launches"][kind]) for side in sides] for kind, name in COUNTS.items()}
    total["sites fused"] = [sum(bool(site["fused"]) for site in side["sites"]) for side in sides]
    return {
        "total": total,
        "changes": [{**vars(change), "text": str(change)} for change in changes(before, after)],
        "kernels": [vars(change) for change in kernel_changes(before, after)],
    }


def _by_size(explanation: Explanation) -> list[Subject]:
    return sorted(explanation.subjects, key=lambda s: -len(s.imported or s.final))


def _history(explanation: Explanation) -> dict[str, Any]:
    (subject,) = explanation.subjects
    scene, passes = Scene(), []
    for name, graph, history, about in _states(subject):
        passes.append({"name": name, "state": None, **about})
        if graph is not None:
            known, facts = history() if history else None, _facts(explanation) if graph is subject.final else _no_facts
            scene.add_state(name, graph, facts, known, report=0)
            passes[-1]["state"] = len(scene.states) - 1
            passes[-1] |= {"history": len(scene.histories) - 1, "numbers": known.numbers} if known else {}
    reports = [_report(explanation, scene)] if subject.is_grouped else []
    files = excerpts(_sources([subject.imported or subject.final, subject.final]))
    data = {"passes": passes, "reports": reports, "files": files, "histories": scene.histories}
    return {"name": subject.final.name, **data, **scene.to_json()}


def _no_facts(node: Node) -> dict[str, Any]:
    return {}


def _facts(explanation: Explanation, report: int = 0) -> Facts:
    """Return a function of the data that the final graph's nodes have beside their own: kernel, reason."""
    numbers = {node: i for i, row in enumerate(explanation.kernels) for node in row.nodes}
    reasons = {node: f.reason for f in explanation.fallbacks for node in f.nodes}
    errors = {node: vars(e) for subject in explanation.subjects for node, e in subject.errors.items()}

    def facts(node: Node) -> dict[str, Any]:
        out: dict[str, Any] = {"kernel": numbers[node], "report": report} if node in numbers else {}
        more = (("reason", reasons), ("error", errors))
        return out | {name: known[node] for name, known in more if node in known}

    return facts


def _states(subject: Subject) -> Iterator[tuple[str, Graph | None, Callable[[], History] | None, dict[str, Any]]]:
    """Yield the graph at import and after every pass that changed it, with its history; others have no graph."""
    from fusec.ir.parser import parse_graph

    quiet: dict[str, Any] = {"seconds": None, "applications": 0}
    changing = [r for r in subject.records if r.changed and r.after]
    if subject.imported is not None:
        yield "import", subject.imported, None, quiet
    elif changing:
        yield "import", parse_graph(changing[0].before), None, quiet
    last = changing[-1] if changing else None
    ended = last is not None and last.after == str(subject.final)
    for record in subject.records:
        about = {"seconds": record.seconds, "applications": record.applications}
        shown = record.changed and record.after
        final = ended and record is last
        after = subject.final if final else (record.graph or parse_graph(record.after)) if shown else None
        yield record.name, after, record.history, about
    if not ended:
        name = "final" if subject.records or subject.imported is not None else subject.final.name
        yield name, subject.final, None, quiet


def _sources(graphs: Any) -> Iterator[Source]:
    for graph in graphs:
        for node in graph.nodes:
            yield from node.sources
            if node.has(Trait.REGION):
                yield from _sources([node.body])


def _report(explanation: Explanation, scene: Scene) -> dict[str, Any]:
    data = explanation.to_json()
    (subject,) = explanation.subjects
    shown = [row.nodes for row in explanation.kernels] + [row.nodes for row in explanation.fallbacks]
    for row, nodes in zip([*data["kernels"], *data["fallbacks"]], shown, strict=True):
        row["nodes"] = [scene.key(n) for n in nodes]
    for row, nodes in zip(data["kernels"], shown, strict=False):
        row["lines"] = next((list(subject.steps[n].lines) for n in nodes if n in subject.steps), [])
        row["known"] = [scene.key(n) for n in nodes if n in subject.steps and subject.steps[n].lines]
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


def _page(title: str, graphs: Sequence[dict[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    """Fill the template."""
    parts: list[str] = []
    for graph in graphs:
        _split(graph, parts)
    return Template(_part("page.html")).substitute(
        title=html.escape(f"{title} · fusec"),
        style=_part("page.css"),
        parts=" ".join(parts),
        script="\n".join(_part(f"{name}.js") for name in SCRIPTS),
        data=pack({"title": title, "graphs": list(graphs), "events": list(events)}),
    )


def _split(graph: dict[str, Any], parts: list[str]) -> None:
    """Move to parts what the first paint does not need: states but the last, then histories."""
    states = graph["states"]
    for about in graph["passes"]:
        if about["state"] is not None:
            state = states[about["state"]]
            about["delta"] = [len(state.get(kind, ())) for kind in ("added", "removed", "rewired")]
            about["nodes"] = len(state["order"])
    graph["first_part"] = len(parts)
    parts += map(pack, (*states[:-1], *graph.pop("histories", ())))
    graph["states"] = [{"order": [], "nodes": {}} for _ in states[:-1]] + states[-1:]


def pack(data: Any) -> str:
    """Return data as compressed JSON in base64, which cannot end its script element, whatever strings it contains."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _part(name: str) -> str:
    text = resources.files("fusec.viz").joinpath("page").joinpath(name).read_text(encoding="utf-8")
    if not text:
        raise FusecError(f"part {name} of the page is missing", fix="install fusec again")
    return text
