"""What a compile did: kernels, coverage, what fell back, what nearly matched; data, which others show."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fusec.analysis.machine import Machine, assumed_cpu
from fusec.config import Config
from fusec.debug.roofline import Roofline, Rooflines, Totals, mean, totals
from fusec.debug.subject import Step, Subject, is_compiled, is_vendor, kind_of, sources_of, subject_of
from fusec.ir.graph import Graph, Node
from fusec.ir.ops import Trait
from fusec.ir.types import ASSUMED_SIZE, estimate
from fusec.remarks import Remark

if TYPE_CHECKING:
    from fusec.debug.site_status import SiteStatus

KINDS = ("generated", "vendor", "opaque")
_NOTHING = Roofline(0.0, 0.0, "launch", 0.0, 0.0)


@dataclass
class KernelRow:
    """Equal launches: one generated kernel, one shape of a vendor's product, or one kind of ATen call."""

    name: str
    kind: str
    """``generated``, ``vendor`` (a library's matrix product or convolution) or ``opaque`` (a call into ATen)."""
    launches: int
    bytes_each: int
    flops_each: int
    fusions: tuple[str, ...] = ()
    """Declared fusions inside."""
    sources: tuple[str, ...] = ()
    source: str = ""
    """Text of the kernel."""
    formula: str = ""
    roofline: Roofline = _NOTHING
    """One launch against the limits of the machine."""
    nodes: list[Node] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes moved by all launches."""
        return self.bytes_each * self.launches

    @property
    def flops(self) -> int:
        """Arithmetic of all launches."""
        return self.flops_each * self.launches

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        fields = {k: v for k, v in self.__dict__.items() if k != "nodes"}
        more = {"fusions": list(self.fusions), "bytes": self.bytes, "flops": self.flops}
        return {**fields, **more, "roofline": self.roofline.to_json()}


@dataclass
class Fallback:
    """An operation that fusec leaves to ATen."""

    name: str
    count: int
    bytes: int
    flops: int
    reason: str
    sources: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {k: v for k, v in self.__dict__.items() if k != "nodes"}


@dataclass
class Explanation:
    """What became of a model."""

    title: str
    subjects: list[Subject]
    kernels: list[KernelRow]
    """Those that move most first."""
    fallbacks: list[Fallback]
    regions: dict[str, int]
    """Declared fusions by name, with the number of their places."""
    near_misses: list[Remark]
    remarks: list[Remark]
    imported_nodes: int
    final_nodes: int
    seconds: float
    """Spent in passes."""
    assumed: dict[str, int]
    """Sizes taken for symbols."""
    copies: int = 0
    """Copies made where layouts do not fit."""
    sites: "list[SiteStatus]" = field(default_factory=list)
    """Places where a fusion could be expected, and what became of them; none where no module was given."""
    machine: Machine = field(default_factory=assumed_cpu)
    """What predicted times are those of."""

    @property
    def totals(self) -> Totals:
        """Predicted and measured times of all launches."""
        return totals([(k.roofline, k.launches) for k in self.kernels], self.subjects)

    def launches(self, kind: str) -> int:
        """Number of launches of a kind."""
        return sum(k.launches for k in self.kernels if k.kind == kind)

    @property
    def coverage(self) -> dict[str, dict[str, float]]:
        """Shares of bytes and of FLOPs, three ways."""
        out = {}
        for name in ("bytes", "flops"):
            sums = {kind: sum(getattr(k, name) for k in self.kernels if k.kind == kind) for kind in KINDS}
            total = sum(sums.values())
            out[name] = {kind: value / total if total else 0.0 for kind, value in sums.items()}
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            "graphs": len(self.subjects),
            "nodes": {"imported": self.imported_nodes, "final": self.final_nodes},
            "regions": self.regions,
            "launches": {kind: self.launches(kind) for kind in KINDS},
            "coverage": self.coverage,
            "kernels": [k.to_json() for k in self.kernels],
            "fallbacks": [f.to_json() for f in self.fallbacks],
            "near_misses": [r.to_json() for r in self.near_misses],
            "remarks": [r.to_json() for r in self.remarks],
            "copies": self.copies,
            "sites": [site.to_json() for site in self.sites],
            "pass_seconds": self.seconds,
            "sizes": self.assumed,
            "machine": self.machine.to_json(),
            "totals": self.totals.to_json(),
        }

    def __rich__(self) -> Any:
        from fusec.debug.tables import explanation_view

        return explanation_view(self)

    def __str__(self) -> str:
        from fusec.debug.tables import as_text

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
    """Compile a model on sample inputs and say what became of it; takes a compile or a graph as well.

    Args:
        model: a module or function of tensors, which is called once; a graph, or what ``fusec.opt`` gives.
        inputs: sample inputs.
        title: what to call it; by default the name of its class.
        dynamic: whether sizes become symbols.
        train: whether the backward graph is wanted too.
        time: whether the compiled programs are run for about a second each, and every step timed.
        options: those of ``torch.compile(..., backend="fusec")``.
        keywords: further sample inputs, by name.
    """
    if isinstance(model, Explanation):
        return model
    if isinstance(model, (Graph, Subject)) or is_compiled(model):
        return explain_subjects([subject_of(model, title)])
    from fusec.debug.capture import compile_model

    title = title or getattr(model, "__name__", type(model).__name__)
    config = Config.from_options(None, options)
    found = compile_model(model, inputs, keywords, config=config, dynamic=dynamic, train=train, title=title, time=time)
    return explain_subjects(found, title, model)


def explain_subjects(subjects: Sequence[Subject], title: str = "", model: Any = None) -> Explanation:
    """Put the parts of one model together; with its module, its sites are looked up too."""
    from fusec.debug.site_status import site_statuses

    remarks = [r for s in subjects for r in s.remarks]
    sizes = {name: s.sizes.get(name, ASSUMED_SIZE) for s in subjects for name in _symbols(s.final)}
    rows = _rows(subjects, sizes)
    return Explanation(
        title or (subjects[0].title if subjects else "nothing was compiled"),
        list(subjects),
        sorted(rows, key=lambda r: (-r.bytes, r.name)),
        _fallbacks(subjects, sizes, remarks),
        dict(Counter(name for s in subjects for name in recognised(s)).most_common()),
        _gathered([r for r in remarks if r.kind == "missed"]),
        remarks,
        sum(len(s.imported or s.final) for s in subjects),
        sum(len(s.final) for s in subjects),
        sum(record.seconds for s in subjects for record in s.records),
        sizes,
        sum(s.copies for s in subjects),
        site_statuses(model, subjects) if hasattr(model, "named_modules") else [],
        subjects[0].machine if subjects else assumed_cpu(),
    )


def recognised(subject: Subject) -> list[str]:
    """Names of the declared fusions that were found, each as often as it was.

    Grouping opens their regions, so they are counted in the last graph that has them; where the compile kept no
    graphs, every application counts, also one that a larger fusion has taken in.
    """
    from fusec.ir.parser import parse_graph
    from fusec.rewriting.fusion import FUSIONS

    found = declared(subject.final)
    for record in reversed([] if found else subject.records):
        if 'kind="declared"' in record.before:
            return declared(parse_graph(record.before))
    applied = [r.subject for r in subject.remarks if r.kind == "passed" and r.application is not None]
    return found or [name for name in applied if name in FUSIONS]


def _gathered(remarks: Iterable[Remark]) -> list[Remark]:
    """Equal remarks about different places as one, most frequent first."""
    equal: defaultdict[tuple[str, ...], list[Remark]] = defaultdict(list)
    for r in remarks:
        equal[r.pass_name, r.message, r.reason].append(r)
    out = []
    for same in sorted(equal.values(), key=len, reverse=True):
        places = tuple(dict.fromkeys(place for r in same for place in r.sources))
        figures = {**same[0].figures, "count": len(same)}
        out.append(replace(same[0], sources=places, figures=figures, application=None))
    return out


def declared(graph: Graph) -> list[str]:
    """Names of the declared fusions in a graph; what a declared fusion holds inside does not count again."""
    found: list[str] = []
    for node in graph.nodes:
        if node.has(Trait.REGION):
            mine = node.attributes.get("kind") == "declared"
            found += [str(node.attributes.get("fusion", ""))] if mine else declared(node.body)
    return found


def node_name(node: Node) -> str:
    """What a row for a node is called."""
    if node.has(Trait.OPAQUE):
        return str(node.attributes.get("target", node.op.name))
    if is_vendor(node):
        word = (
            f"matmul {node.attributes['spec']}"
            if node.has(Trait.CONTRACTION)
            else node.attributes.get("label", node.op.name)
        )
        return f"{word}  {' × '.join(str(v.type) for v in node.operands[:2])}"
    return str(node.attributes.get("label") or node.attributes.get("fusion") or node.op.name)


def _rows(subjects: Sequence[Subject], sizes: dict[str, int]) -> list[KernelRow]:
    from fusec.analysis.memory import flops, moved_bytes

    rows: dict[tuple[Any, ...], KernelRow] = {}
    launches: defaultdict[tuple[Any, ...], list[Roofline]] = defaultdict(list)
    for subject in subjects:
        rooflines = Rooflines(subject, sizes)
        for node in subject.final.nodes:
            kind = kind_of(node, subject)
            if not kind:
                continue
            step = subject.steps.get(node, Step())
            name, moved, work = step.name or node_name(node), moved_bytes(node), flops(node)
            key = (kind, name, step.source, str(moved), str(work))
            if key not in rows:
                inside = tuple(node.attributes.get("fusions", ()))
                each = (estimate(moved, sizes), estimate(work, sizes))
                rows[key] = KernelRow(name, kind, 0, *each, inside, source=step.source, formula=step.formula)
            row = rows[key]
            row.launches += 1
            row.nodes.append(node)
            row.sources = tuple(dict.fromkeys((*row.sources, *_places(node))))[:8]
            launches[key].append(rooflines.of(node))
    for key, row in rows.items():
        row.roofline = mean(launches[key])
    return list(rows.values())


def _fallbacks(subjects: Sequence[Subject], sizes: dict[str, int], remarks: Iterable[Remark]) -> list[Fallback]:
    from fusec.analysis.memory import flops, moved_bytes

    reasons = {r.subject: r.reason or r.message for r in remarks if r.kind in ("failure", "missed", "analysis")}
    found: defaultdict[str, list[Node]] = defaultdict(list)
    for subject in subjects:
        for node in subject.final.nodes:
            if kind_of(node, subject) == "opaque":
                step = subject.steps.get(node)
                found[step.name if step else node_name(node)].append(node)
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


def usual_reason(node: Node) -> str:
    """Why a node is left to ATen, where nothing was said about it."""
    from fusec.analysis.memory import is_attention, is_lookup

    if node.has(Trait.ORDERED):
        return "it keeps its place: random numbers, a collective, or an effect"
    if is_attention(node):
        return "attention is one call of ATen for now"
    if is_lookup(node):
        return "a lookup: where it reads is known only at run time"
    if node.has(Trait.OPAQUE):
        return "fusec does not know this operation"
    if node.has(Trait.WRITE):
        return "an update in place, made by ATen"
    return "it is in no kernel" if not node.has(Trait.REGION) else "its kernel could not be made"


def _places(node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(str, sources_of(node)))))


def _symbols(graph: Graph) -> list[str]:
    return graph.symbols()
