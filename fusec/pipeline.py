"""Pipelines of passes: their text form, how they run, their records, and the numbering of applications."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from fusec.analysis.machine import Machine, assumed_cpu
from fusec.config import Config
from fusec.errors import OptionError, suggestion
from fusec.history import History, Recorder
from fusec.ir.graph import Graph, Node, Source
from fusec.ir.ops import Trait
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.refusal import Refusal
from fusec.remarks import Remarks
from fusec.rewriting.match import MatchFailure, word
from fusec.selector import Selector


class Pass(Protocol):
    """A transformation of a graph: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """The name in the text form of a pipeline."""

    def apply(self, graph: Graph, context: "Context") -> None:
        """Change the graph in place."""


@dataclass(frozen=True)
class PassRecord:
    """The outcome of one pass over one graph."""

    name: str
    """The text form of the pass, options included."""
    seconds: float
    """Duration in the process that ran the pass; a cached outcome keeps it."""
    changed: bool
    before: str
    """The graph as text; empty unless ``config.record``."""
    after: str
    applications: int
    """Number of applications that it made."""
    verified: int = 0
    """Number of these whose sides were compared."""
    declared: tuple[str, ...] = ()
    """The declared fusions in the graph before it, by name."""
    graph: Graph | None = field(default=None, compare=False, repr=False)
    """The graph afterwards, where it changed and ``config.record`` is set; None for a record that was read as text."""
    history: Callable[[], History] | None = field(default=None, compare=False, repr=False)
    """Returns the graph after each of several applications, where that was recorded."""


@dataclass
class Context:
    """State that the passes of one compile share."""

    config: Config = field(default_factory=Config)
    remarks: Remarks = field(default_factory=Remarks)
    records: list[PassRecord] = field(default_factory=list)
    next_number: int = 0
    """The number of the next application."""
    verified: int = 0
    """Number of applications whose sides were compared, under ``verify``."""
    pass_name: str = ""
    """The pass that is running."""
    recorder: Recorder | None = None
    """Records the history of the pass that is running, under ``config.record`` and ``config.history``."""
    failures: dict[Node, MatchFailure] = field(default_factory=dict)
    """For each anchor node, the failed match that came furthest."""
    machine: Machine = field(default_factory=assumed_cpu)
    """The machine whose times are predicted."""
    limits: Limits = field(default_factory=Limits)
    """The kernels that the target has schedules for; by default no matmul."""
    unschedulable: Callable[[Plan], Refusal | None] = lambda plan: None
    """Returns why the target has no schedule for a planned kernel."""
    vendor: "Pipeline" = field(default_factory=lambda: Pipeline(()))
    """Groups the rest of a kernel whose matmuls become vendor calls, as a candidate of the tuner; without passes the
    rest runs operation by operation."""

    def __post_init__(self) -> None:
        self._selector = Selector.parse(self.config.apply)
        self._disabled = self.config.disabled

    def enabled(self, name: str) -> bool:
        """Return whether a pass, fusion or rewrite is not disabled by name."""
        return name not in self._disabled

    @property
    def verifies(self) -> bool:
        """True if both sides of every application are compared."""
        return self.config.verify

    def disable(self, name: str, reason: str = "") -> None:
        """Disable a rewrite that raised, for the rest of this compile."""
        self._disabled |= {name}
        self.remarks.add("failure", self.pass_name, f"{name} raised and is disabled", subject=name, reason=reason)

    def application(
        self, name: str, sources: Iterable[Source] = (), message: str = "", **figures: float | int | str
    ) -> bool:
        """Number an application of ``name``, leave its remark, and return whether to make it."""
        number = self.next_number
        self.next_number += 1
        reason = "" if self._selector.allows(number) else "not selected by option 'apply'"
        reason = reason if self.enabled(name) else "disabled by option 'disable'"
        self.remarks.add(
            "missed" if reason else "passed", self.pass_name, message or name, subject=name, reason=reason,
            sources=tuple(map(str, sources)), application=number, figures={} if reason else figures,
        )  # fmt: skip
        if self.recorder and not reason:
            self.recorder.application(number)
        return not reason

    def near_miss(self, failure: MatchFailure) -> None:
        """Record a failed match, if it came furthest of those with its anchor."""
        least = 3 if failure.clause == "operation" else 2  # a product with a sigmoid is many things besides
        if failure.anchor is None or failure.depth < least or 2 * failure.depth < failure.size:
            return
        known = self.failures.get(failure.anchor)
        if known is None or known.depth * failure.size < failure.depth * known.size:
            self.failures[failure.anchor] = failure

    def report_near_misses(self, graph: Graph, aligned: Iterable[MatchFailure] = ()) -> None:
        """Leave a ``missed`` remark for each recorded match whose anchor is still in the graph.

        Args:
            graph: after the last match.
            aligned: patterns aligned with what is left; one is reported where no match came as far.
        """
        remaining = {node: failure for node, failure in self.failures.items() if node in graph}
        for failure in aligned:
            if failure.anchor is not None:
                known = remaining.get(failure.anchor)
                remaining[failure.anchor] = failure if known is None else _clearer(known, failure)
        for failure in remaining.values():
            self.remarks.add(
                "missed", self.pass_name, f"{failure.fusion} nearly matched", subject=failure.fusion,
                reason=str(failure), suggestion=failure.edit, sources=tuple(map(str, failure.sources)),
                figures={
                    "depth": failure.depth, "size": failure.size, "node": word(failure.node) if failure.node else "",
                    "clause": failure.clause, "expected": failure.expected, "found": failure.found,
                    "text": failure.sources[0].text if failure.sources else "",
                    "around": "; ".join(failure.places),
                    **({"tried": failure.tried} if failure.tried else {}),
                },
            )  # fmt: skip
        self.failures.clear()

    def agrees(self, name: str, before: Graph, after: Graph, exact: bool = True) -> bool:
        """Return whether the sides of an application are equivalent; leave a failure remark where they are not."""
        equivalent = self._compare(name, before, after, exact, self.next_number - 1)
        self.verified += equivalent is not None
        return equivalent is not False

    def keeps_meaning(self, name: str, before: Graph, after: Graph) -> bool:
        """Return whether a whole pass keeps the meaning of a graph; leave a failure remark where it does not."""
        return self._compare(f"pass {name}", before, after, False, None) is not False

    def _compare(self, name: str, before: Graph, after: Graph, exact: bool, number: int | None) -> bool | None:
        """Return whether two graphs are equivalent; None, with a remark, where that could not be decided."""
        from fusec.verify.rewrites import check_rewrite

        try:
            result = check_rewrite(before, after, exact=exact)
            passed, reason = None if result.undecided else result.passed, result.message
        except Exception as problem:  # the check itself failed
            passed, reason = None, str(problem)
        if passed is None:
            self.remarks.add("analysis", self.pass_name, f"{name} could not be verified", subject=name, reason=reason)
        elif not passed:
            message = f"{name} changes the result"
            self.remarks.add("failure", self.pass_name, message, subject=name, reason=reason, application=number)
        return passed


def _clearer(failure: MatchFailure, aligned: MatchFailure) -> MatchFailure:
    """Return a failed match, or an alignment of the same anchor if that says more."""
    vague = failure.clause in ("operation", "operand")
    if vague or aligned.depth * failure.size > failure.depth * aligned.size:
        return aligned
    same = (failure.fusion, failure.clause) == (aligned.fusion, aligned.clause)
    return replace(failure, outcome=aligned.outcome) if same else failure


@dataclass(frozen=True)
class Pipeline:
    """A sequence of passes."""

    passes: tuple[Pass, ...]

    def run(self, graph: Graph, context: Context) -> None:
        """Run every enabled pass on the graph; one that raises is undone, with a failure remark.

        Raises:
            Exception: what a pass raised, under ``strict``.
        """
        text = str(graph) if context.config.record else ""
        for step in self.passes:
            if context.enabled(step.name):
                text = _run_pass(step, graph, context, text)

    def __str__(self) -> str:
        return ",".join(map(describe, self.passes))

    @classmethod
    def parse(cls, text: str, known: Mapping[str, Callable[..., Pass]]) -> "Pipeline":
        """Parse a text form such as ``canonicalize,raise{only=rms_norm},group``; ``known`` has the constructors.

        Raises:
            OptionError: for an unknown pass or option.
        """
        passes = []
        for name, options in _split(text):
            if name not in known:
                raise OptionError(f"unknown pass {name!r}", fix=suggestion(name, known))
            made = known[name]()
            try:
                passes.append(known[name](**{k: _value(made, k, v) for k, v in options.items()}))
            except (TypeError, ValueError) as reason:
                raise OptionError(f"pass {name!r} does not take {options}", why=str(reason)) from reason
        return cls(tuple(passes))


def describe(step: Pass) -> str:
    """Return the text form of a pass: its name, and the options that differ from their defaults."""
    parts = []
    for f in _options(step):
        value = getattr(step, f.name)
        if value != f.default:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"{f.name}={text}")
    return step.name + ("{" + " ".join(parts) + "}" if parts else "")


def _options(step: Pass) -> list[Any]:
    return [f for f in fields(step) if f.init and f.metadata.get("option", True)]  # type: ignore[arg-type]


def _value(step: Pass, name: str, text: str) -> Any:
    for f in _options(step):
        if f.name == name:
            wanted = type(f.default)
            return text.lower() in ("true", "1", "yes") if wanted is bool else wanted(text)
    options = [f.name for f in _options(step)]
    raise OptionError(f"pass {step.name!r} has no option {name!r}", fix=suggestion(name, options))


def _split(text: str) -> list[tuple[str, dict[str, str]]]:
    found = []
    rest = text.strip()
    while rest:
        step = re.match(r"\s*([\w-]+)\s*(?:\{([^}]*)\})?\s*(?:,|$)", rest)
        if step is None:
            raise OptionError(f"{rest!r} is not a pipeline", fix="write it like 'canonicalize,raise{only=rms_norm}'")
        options = {}
        for part in (step.group(2) or "").split():
            key, _, value = part.partition("=")
            options[key] = value or "true"
        found.append((step.group(1), options))
        rest = rest[step.end() :]
    return found


def _run_pass(step: Pass, graph: Graph, context: Context, before: str) -> str:
    """Run a pass on a graph with a text, if that is recorded; return its text afterwards."""
    from fusec.ir.verifier import verify_graph

    saved, shape, first, verified = graph.copy(), _structure(graph), context.next_number, context.verified
    context.pass_name, remarks = step.name, len(context.remarks)
    context.recorder = Recorder(graph) if context.config.record and context.config.history else None
    start = time.perf_counter()
    try:
        step.apply(graph, context)
        verify_graph(graph)
        if _structure(graph) != shape and not _is_kept(step, saved, graph, context, first):
            shape = _undo(graph, saved, context, remarks)
    except Exception as reason:
        if context.config.strict:
            raise
        shape = _undo(graph, saved, context, remarks)
        text = f"{type(reason).__name__}: {reason}"
        context.remarks.add("failure", step.name, f"pass {describe(step)} was undone", subject=step.name, reason=text)
    seconds = time.perf_counter() - start
    changed, declared = _structure(graph) != shape, tuple(declared_in(saved))
    made, compared = context.next_number - first, context.verified - verified
    record = PassRecord(describe(step), seconds, changed, before, before, made, compared, declared)
    context.records.append(_recorded(record, graph, context.recorder) if context.config.record else record)
    return context.records[-1].after


def _recorded(record: PassRecord, graph: Graph, recorder: Recorder | None) -> PassRecord:
    """Add to a record the graph after its pass, and with a recorder after each application."""
    if recorder is not None:
        recorder.stop()
    if not record.changed:
        return record
    found = recorder.history() if recorder is not None and record.applications > 1 else None
    return replace(record, after=str(graph), graph=graph.copy(), history=(lambda: found) if found else None)


def declared_in(graph: Graph) -> list[str]:
    """Return the names of the declared fusions in a graph; fusions nested in a declared one do not count."""
    found: list[str] = []
    for node in graph.nodes:
        if node.has(Trait.REGION):
            mine = node.attributes.get("kind") == "declared"
            found += [str(node.attributes.get("fusion", ""))] if mine else declared_in(node.body)
    return found


def _is_kept(step: Pass, before: Graph, after: Graph, context: Context, first: int) -> bool:
    """Return whether a change is selected and verified; a pass without numbered applications is one as a whole."""
    name = describe(step)
    if context.next_number == first:
        if not context.application(step.name, message=f"{name} as a whole"):
            return False
        return not context.verifies or context.agrees(step.name, before, after)
    return not context.verifies or context.keeps_meaning(name, before, after)


def _undo(graph: Graph, saved: Graph, context: Context, remarks: int) -> tuple[object, ...]:
    """Restore the graph, and remove ``passed`` remarks from number ``remarks`` on; return the graph's structure."""
    graph.become(saved)
    context.remarks[remarks:] = [remark for remark in context.remarks[remarks:] if remark.kind != "passed"]
    return _structure(graph)


def _structure(graph: Graph) -> tuple[object, ...]:
    """Return the nodes and outputs; held as objects, so that new nodes cannot have the ids of erased ones."""
    return (tuple((n, n.operands) for n in graph.nodes), tuple(graph.outputs))
