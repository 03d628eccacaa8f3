"""Explanations: kernels, coverage, fallbacks and near misses of a compile, as data that prints as tables."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusec.analysis.machine import assumed_cpu
from fusec.analysis.memory import flops, moved_bytes
from fusec.codegen.program.kernels import EDITED
from fusec.config import Config
from fusec.debug.explanation import Explanation, Fallback, KernelRow
from fusec.debug.near_misses import near_misses
from fusec.debug.roofline import Roofline, Rooflines, mean
from fusec.debug.site_status import site_statuses
from fusec.debug.subject import (
    Step,
    Subject,
    is_compiled,
    kind_of,
    sources_of,
    subject_of,
    usual_reason,
)  # fmt: skip
from fusec.debug.traffic import intermediate_bytes, traffic
from fusec.ir.graph import Graph, Node
from fusec.ir.types import ASSUMED_SIZE, estimate
from fusec.pipeline import declared_in
from fusec.remarks import Remark


class RichExplanation(Explanation):
    """An explanation that prints as tables, on a terminal by way of rich."""

    def __rich__(self) -> Any:
        from fusec.debug.tables import explanation_view

        return explanation_view(self)

    def __str__(self) -> str:
        from fusec.debug.text import as_text

        return as_text(self)


def explain(
    model: Any,
    *inputs: Any,
    title: str = "",
    dynamic: bool = False,
    train: bool = False,
    time: bool = False,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Explanation:
    """Compile a model on sample inputs and explain the result; accepts a compile or a graph as well.

    Args:
        model: a module or function of tensors, which is called once; a graph, or the result of ``fusec.opt``.
        inputs: sample inputs.
        title: display name; by default the name of its class.
        dynamic: make sizes symbols.
        train: explain the backward graph too.
        time: run the compiled programs for about a second each, and time every step.
        options: those of ``torch.compile(..., backend="fusec")``.
        keywords: further sample inputs, by name.
    """
    if isinstance(model, Explanation):
        return model
    if isinstance(model, (Graph, Subject)) or is_compiled(model):
        return explain_subjects([subject_of(model, title)])
    from fusec.debug.capture import CaptureOptions, compile_model

    title = title or getattr(model, "__name__", type(model).__name__)
    config = Config.from_options(None, options)
    found = compile_model(model, inputs, keywords, CaptureOptions(dynamic, train, time), config=config, title=title)
    return explain_subjects(found, title, model)


def explain_subjects(subjects: Sequence[Subject], title: str = "", model: Any = None) -> Explanation:
    """Combine the graphs of one model into an explanation; with its module, its sites are classified too."""
    remarks = [r for s in subjects for r in s.remarks]
    sizes = {name: s.sizes.get(name, ASSUMED_SIZE) for s in subjects for name in s.final.symbols()}
    rows = _rows(subjects, sizes)
    return RichExplanation(
        title or (subjects[0].title if subjects else "nothing was compiled"),
        list(subjects),
        sorted(rows, key=lambda r: (-r.bytes, r.name)),
        _fallbacks(subjects, sizes, remarks),
        dict(Counter(name for s in subjects for name in recognised(s)).most_common()),
        _gathered(r for s in subjects for r in near_misses(s)),
        remarks,
        sum(len(s.imported or s.final) for s in subjects),
        sum(len(s.final) for s in subjects),
        sum(record.seconds for s in subjects for record in s.records),
        sizes,
        sum(s.copies for s in subjects),
        site_statuses(model, subjects),
        traffic(subjects, sizes),
        subjects[0].machine if subjects else assumed_cpu(),
    )


def recognised(subject: Subject) -> list[str]:
    """Return the names of the declared fusions that were matched, one for each match.

    Grouping opens their regions, so they are counted in the last graph that has them; where the compile recorded no
    graphs, every application counts, also one absorbed by a larger fusion.
    """
    from fusec.passes import FUSIONS

    found = declared_in(subject.final) or next((list(r.declared) for r in reversed(subject.records) if r.declared), [])
    applied = [r.subject for r in subject.remarks if r.kind == "passed" and r.application is not None]
    return found or [name for name in applied if name in FUSIONS]


def _gathered(remarks: Iterable[Remark]) -> list[Remark]:
    """Merge remarks that differ in source location only, those that lose most bytes first, then by number."""
    equal: defaultdict[tuple[str, ...], list[Remark]] = defaultdict(list)
    for r in remarks:
        equal[r.pass_name, r.message, r.reason, str(r.figures.get("kernel", ""))].append(r)
    out = []
    for same in sorted(equal.values(), key=len, reverse=True):
        places = tuple(dict.fromkeys(place for r in same for place in r.sources))
        lost = sum(int(r.figures.get("bytes_lost", 0)) for r in same)
        figures = {**same[0].figures, "count": len(same), **({"bytes_lost": lost} if lost else {})}
        out.append(replace(same[0], sources=places, figures=figures, application=None))
    return sorted(out, key=lambda r: (-int(r.figures.get("bytes_lost", 0)), "kernel" in r.figures))


def _rows(subjects: Sequence[Subject], sizes: dict[str, int]) -> list[KernelRow]:
    rows: dict[tuple[Any, ...], KernelRow] = {}
    launches: defaultdict[tuple[Any, ...], list[Roofline]] = defaultdict(list)
    for subject in subjects:
        rooflines = Rooflines(subject, sizes)
        edited = {r.subject: r.reason for r in subject.remarks if r.pass_name == EDITED}
        between = intermediate_bytes(subject, sizes)
        for node in subject.final.nodes:
            kind = kind_of(node, subject)
            if not kind:
                continue
            step = subject.steps.get(node, Step())
            name, moved, work = subject.name_of(node), moved_bytes(node), flops(node)
            key = (kind, name, step.source, str(moved), str(work))
            if key not in rows:
                inside = tuple(node.attributes.get("fusions", ()))
                each = (estimate(moved, sizes), estimate(work, sizes))
                rows[key] = KernelRow(name, kind, 0, *each, inside, source=step.source, formula=step.formula)
                rows[key].edited = edited.get(name, "")
            row = rows[key]
            row.launches += 1
            if node in subject.errors:
                row.error = max(row.error or 0.0, subject.errors[node].compiled)
            row.intermediate_bytes += between.get(node, 0)
            row.nodes.append(node)
            row.sources = tuple(dict.fromkeys((*row.sources, *_places(node))))[:8]
            launches[key].append(rooflines.of(node))
    for key, row in rows.items():
        row.roofline = mean(launches[key])
    return list(rows.values())


def _fallbacks(subjects: Sequence[Subject], sizes: dict[str, int], remarks: Iterable[Remark]) -> list[Fallback]:
    reasons = {r.subject: r.reason or r.message for r in remarks if r.kind in ("failure", "missed", "analysis")}
    found: defaultdict[str, list[Node]] = defaultdict(list)
    for subject in subjects:
        for node in subject.final.nodes:
            if kind_of(node, subject) == "opaque":
                found[subject.name_of(node)].append(node)
    out = [
        Fallback(
            name,
            len(nodes),
            sum(estimate(moved_bytes(n), sizes) for n in nodes),
            sum(estimate(flops(n), sizes) for n in nodes),
            reasons.get(name, "") or usual_reason(nodes[0]),
            tuple(dict.fromkeys(p for n in nodes for p in _places(n)))[:8],
            nodes,
        )
        for name, nodes in found.items()
    ]
    return sorted(out, key=lambda f: (-f.bytes, f.name))


def _places(node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(str, sources_of(node)))))
