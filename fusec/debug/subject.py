"""The subject of all tools, a compile or a bare graph, in one form; only this file reads the fields of a compile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusec.analysis.machine import Machine, assumed_cpu
from fusec.analysis.memory import is_attention, is_lookup
from fusec.analysis.sites import Site
from fusec.debug.kernel_lines import Lines, kernel_lines
from fusec.debug.node_errors import NodeError
from fusec.debug.timing import Timing
from fusec.ir.graph import Graph, Node, Source
from fusec.ir.ops import Trait
from fusec.pipeline import PassRecord
from fusec.remarks import LAUNCH, Remark


@dataclass
class Step:
    """A kernel region and its kernel."""

    name: str = ""
    source: str = ""
    """Text of the kernel, C++ or Triton."""
    generated: bool = True
    """False where the region runs through ATen."""
    formula: str = ""
    lines: Lines = ()
    """The operation that each line of the text belongs to; empty where that is not known."""


@dataclass
class Subject:
    """One graph and its history."""

    title: str
    final: Graph
    imported: Graph | None = None
    records: Sequence[PassRecord] = ()
    remarks: Sequence[Remark] = ()
    steps: dict[Node, Step] = field(default_factory=dict)
    """By region; a region that is missing has no kernel yet."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Values of the size symbols when it was compiled, where known."""
    copies: int = 0
    """Copies that the program makes where layouts differ."""
    machine: Machine = field(default_factory=assumed_cpu)
    """The machine that times are predicted for."""
    once: frozenset[Node] = frozenset()
    """Nodes that run once, as their results are kept."""
    timing: Timing | None = None
    """Measured times of its program, if any."""
    tried: dict[str, bool] = field(default_factory=dict)
    """The edits that were tried, by the remark that suggests them, and whether the model fuses with them."""
    sites: tuple[Site, ...] = ()
    """The sites of its model, where the compile has noted them."""
    errors: Mapping[Node, NodeError] = field(default_factory=dict)
    """Errors of its nodes against float64, under ``verify``."""

    def timed(self, timing: Timing | None) -> None:
        """Set the measured times, and the sizes that they were measured with."""
        self.timing = timing
        self.sizes |= timing.sizes if timing else {}

    def note_errors(self, find: Callable[[], Mapping[Node, NodeError]]) -> None:
        """Set the errors of its nodes; where they cannot be found, a remark says why."""
        try:
            self.errors = find()
        except Exception as reason:
            why = f"{type(reason).__name__}: {reason}"
            failed = Remark("analysis", "verify", "errors against float64 could not be recorded", reason=why)
            self.remarks = (*self.remarks, failed)

    def name_of(self, node: Node) -> str:
        """Return the name of a node of the final graph in tables: that of its kernel, if it has one."""
        step = self.steps.get(node)
        return step.name if step and step.name else node_name(node)

    @property
    def is_grouped(self) -> bool:
        """True where its nodes are grouped into kernels."""
        return bool(self.steps) or any(n.attributes.get("kind") in ("kernel", "vendor") for n in self.final.nodes)


def subject_of(compiled: Any, title: str = "") -> Subject:
    """Return the subject of a compile or a graph; a subject is returned unchanged."""
    if isinstance(compiled, Subject):
        return compiled
    if isinstance(compiled, Graph):
        return Subject(title or compiled.name, compiled)
    steps = getattr(compiled.program, "steps", ())
    return Subject(
        title or compiled.graph.name,
        compiled.graph,
        compiled.imported,
        tuple(compiled.records),
        tuple(compiled.remarks),
        _kernel_steps(compiled),
        copies=sum(step.kind == "copy" for step in steps),
        machine=getattr(compiled, "machine", None) or assumed_cpu(),
        once=folded.nodes if (folded := getattr(compiled.program, "folded", None)) else frozenset(),
        sites=tuple(getattr(compiled, "sites", ())),
    )


def is_compiled(value: Any) -> bool:
    """Return whether a value is a compile."""
    return hasattr(value, "program") and hasattr(value, "records")


def _kernel_steps(compiled: Any) -> dict[Node, Step]:
    """The step of the program that each region became."""
    program = compiled.program
    failed = {r.subject for r in compiled.remarks if r.kind == "failure" and r.pass_name == LAUNCH}
    found: dict[Node, Step] = {}
    for step in getattr(program, "steps", ()):
        if step.kind in ("kernel", "interpreted"):
            kernel = program.kernels.get(step.name) if step.kind == "kernel" else None
            text, formula = program.texts.get(step.name, ""), getattr(kernel, "formula", "")
            found[step.node] = Step(step.name, text, kernel is not None and step.name not in failed, formula)
    origins = {name: getattr(kernel, "origins", {}) for name, kernel in getattr(program, "kernels", {}).items()}
    return with_lines(found, origins)


def with_lines(steps: dict[Node, Step], origins: Mapping[str, Mapping[str, int]]) -> dict[Node, Step]:
    """Set the origins of the lines of each kernel; ``origins`` as for ``kernel_lines``."""
    names, texts = ({node: s.name for node, s in steps.items()}, {s.name: s.source for s in steps.values()})
    for node, lines in kernel_lines(names, texts, origins).items():
        steps[node].lines = lines
    return steps


def is_vendor(node: Node) -> bool:
    """Return whether a library's matmul or convolution does the work."""
    return node.has(Trait.CONTRACTION | Trait.CONVOLUTION) or (
        node.has(Trait.REGION) and node.attributes.get("kind") == "vendor"
    )


def sources_of(node: Node) -> tuple[Source, ...]:
    """Return the source locations of a node; of a region those of its body; none of a constant, as in text.

    All layers may share a constant.
    """
    if node.is_op("constant"):
        return ()
    if not node.has(Trait.REGION):
        return node.sources
    inner = (s for n in node.body.nodes if not n.has(Trait.SOURCE) for s in sources_of(n))
    return tuple(dict.fromkeys(inner)) or node.sources


def kind_of(node: Node, subject: Subject) -> str:
    """Return who runs a node of the final graph: ``generated``, ``vendor``, ``opaque``; ``""`` where nothing runs."""
    if node in subject.once:
        return ""
    if is_vendor(node):
        return "vendor"
    if node.has(Trait.REGION):
        step = subject.steps.get(node, Step())
        return "generated" if step.generated else "opaque"
    if node.is_op("constant", "size") or node.is_alias:
        return ""
    return "opaque"


def node_name(node: Node) -> str:
    """Return the name of a node in tables."""
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


def usual_reason(node: Node) -> str:
    """Return why a node is left to ATen, where no remark says so."""
    if node.has(Trait.ORDERED):
        return "its order is fixed: random numbers, a collective, or an effect"
    if is_attention(node):
        return "attention is one call of ATen for now"
    if is_lookup(node):
        return "a lookup: its index is known only at run time"
    if node.has(Trait.OPAQUE):
        return "fusec does not model this operation"
    if node.has(Trait.WRITE):
        return "an update in place by ATen"
    return "it is in no kernel" if not node.has(Trait.REGION) else "its kernel could not be built"
