"""The passes of a compile as data: their order, their text form, their record, and the numbers of what they do."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from fusec.analysis.machine import Machine, assumed_cpu
from fusec.config import Config
from fusec.errors import OptionError, suggestion
from fusec.ir.graph import Graph, Node, Source
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.refusal import Refusal
from fusec.remarks import Remarks
from fusec.rewriting.match import MatchFailure, word
from fusec.selector import Selector


class Pass(Protocol):
    """A change of the graph: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What the text form of a pipeline calls it."""

    def apply(self, graph: Graph, context: "Context") -> None:
        """Change the graph in place."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph."""

    name: str
    """Its text form, options included."""
    seconds: float
    """In the process that ran it; an outcome that was kept brings its own along."""
    changed: bool
    before: str
    """The graph as text; empty unless the compile keeps a record."""
    after: str
    applications: int
    """How many rewrites it made."""
    verified: int = 0
    """Of how many both sides were run and compared."""


@dataclass
class Context:
    """What the passes of one compile share."""

    config: Config = field(default_factory=Config)
    remarks: Remarks = field(default_factory=Remarks)
    records: list[PassRecord] = field(default_factory=list)
    next_number: int = 0
    """Number of the next application."""
    verified: int = 0
    """How many applications have been compared, under ``verify``."""
    pass_name: str = ""
    """The pass that is running."""
    failures: dict[Node, MatchFailure] = field(default_factory=dict)
    """For each telling node that a pattern looked at, the attempt that came furthest."""
    machine: Machine = field(default_factory=assumed_cpu)
    """What predicted times are those of."""
    limits: Limits = field(default_factory=Limits)
    """The kernels that the target has schedules for; by default no matmul."""
    unschedulable: Callable[[Plan], Refusal | None] = lambda plan: None
    """Returns why the target has no schedule for a planned kernel."""
    vendor: "Pipeline" = field(default_factory=lambda: Pipeline(()))
    """Groups the rest of a kernel whose matmuls are vendor calls, which is timed as well; without any passes the rest
    runs operation by operation."""

    def __post_init__(self) -> None:
        self._selector = Selector.parse(self.config.apply)
        self._disabled = self.config.disabled

    def allows(self, number: int, name: str) -> bool:
        """Whether application ``number`` of the rewrite ``name`` may be made."""
        return self.enabled(name) and self._selector.allows(number)

    def enabled(self, name: str) -> bool:
        """Whether a pass, fusion or rewrite is not disabled by name."""
        return name not in self._disabled

    @property
    def disabled(self) -> frozenset[str]:
        """Names that the configuration leaves out."""
        return self._disabled

    @property
    def verifies(self) -> bool:
        """Whether both sides of every application are to be compared."""
        return self.config.verify

    def disable(self, name: str, reason: str = "") -> None:
        """Leave a rewrite that failed out for the rest of this compile."""
        self._disabled |= {name}
        self.remarks.add("failure", self.pass_name, f"{name} raised and is left out", subject=name, reason=reason)

    def application(
        self, name: str, sources: Iterable[Source] = (), message: str = "", **figures: float | int | str
    ) -> bool:
        """Take the next number for an application of ``name``, leave its remark, and say whether to make it."""
        number = self.next_number
        self.next_number += 1
        places = tuple(map(str, sources))
        if self.allows(number, name):
            self.remarks.add(
                "passed",
                self.pass_name,
                message or name,
                subject=name,
                sources=places,
                application=number,
                figures=figures,
            )
            return True
        reason = "not selected by option 'apply'" if self.enabled(name) else "left out by option 'disable'"
        self.remarks.add(
            "missed", self.pass_name, message or name, subject=name, reason=reason, sources=places, application=number
        )
        return False

    def near_miss(self, failure: MatchFailure) -> None:
        """Remember an attempt that failed, if it is the best around its most telling node."""
        if failure.anchor is None or failure.depth < 2 or 2 * failure.depth < failure.size:
            return
        known = self.failures.get(failure.anchor)
        if known is None or known.depth * failure.size < failure.depth * known.size:
            self.failures[failure.anchor] = failure

    def report_near_misses(self, graph: Graph, limit: int = 40) -> None:
        """A ``missed`` remark for every best attempt whose telling node no region has taken since."""
        left = [(node, failure) for node, failure in self.failures.items() if node in graph]
        for _, failure in left[:limit]:
            self.remarks.add(
                "missed", self.pass_name, f"{failure.fusion} nearly matched", subject=failure.fusion,
                reason=str(failure), suggestion=failure.edit, sources=tuple(map(str, failure.sources)),
                figures={
                    "depth": failure.depth, "size": failure.size, "node": word(failure.node) if failure.node else "",
                    "clause": failure.clause, "expected": failure.expected, "found": failure.found,
                    "text": failure.sources[0].text if failure.sources else "",
                },
            )  # fmt: skip
        self.failures.clear()

    def agrees(self, name: str, before: Graph, after: Graph, exact: bool = True) -> bool:
        """Under ``verify``: whether the two sides of an application mean the same; a difference is a failure remark."""
        found = self._compared(name, before, after, exact, self.next_number - 1)
        self.verified += found is not None
        return found is not False

    def keeps_meaning(self, name: str, before: Graph, after: Graph) -> bool:
        """Under ``verify``: the same of a whole pass, for what it does beside its applications, or to all of them."""
        return self._compared(f"pass {name}", before, after, False, None) is not False

    def _compared(self, name: str, before: Graph, after: Graph, exact: bool, number: int | None) -> bool | None:
        """Whether two graphs mean the same; None where they could not be run, which is said."""
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


@dataclass(frozen=True)
class Pipeline:
    """Passes in order."""

    passes: tuple[Pass, ...]

    def run(self, graph: Graph, context: Context) -> None:
        """Run every pass on the graph; one that raises is undone, reported and left out.

        Raises:
            Exception: whatever a pass raised, under ``strict``.
        """
        for step in self.passes:
            if context.enabled(step.name):
                _run_pass(step, graph, context)

    def __str__(self) -> str:
        return ",".join(map(describe, self.passes))

    @classmethod
    def parse(cls, text: str, known: Mapping[str, Callable[..., Pass]]) -> "Pipeline":
        """Read ``canonicalize,raise{only=rms_norm},group``; ``known`` makes a pass from its options.

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
    """The text form of a pass: its name, and the options that differ from their defaults."""
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
            raise OptionError(f"{rest!r} is no pipeline", fix="write it like 'canonicalize,raise{only=rms_norm}'")
        options = {}
        for part in (step.group(2) or "").split():
            key, _, value = part.partition("=")
            options[key] = value or "true"
        found.append((step.group(1), options))
        rest = rest[step.end() :]
    return found


def _run_pass(step: Pass, graph: Graph, context: Context) -> None:
    from fusec.ir.verifier import verify_graph

    saved, shape, first, verified = graph.copy(), _structure(graph), context.next_number, context.verified
    before = str(graph) if context.config.record else ""
    context.pass_name, told = step.name, len(context.remarks)
    start = time.perf_counter()
    try:
        step.apply(graph, context)
        verify_graph(graph)
        if _structure(graph) != shape and not _may_stay(step, saved, graph, context, first):
            shape = _undo(graph, saved, context, told)
    except Exception as reason:
        if context.config.strict:
            raise
        shape = _undo(graph, saved, context, told)
        text = f"{type(reason).__name__}: {reason}"
        context.remarks.add("failure", step.name, f"pass {describe(step)} was undone", subject=step.name, reason=text)
    seconds = time.perf_counter() - start
    changed = _structure(graph) != shape
    after = str(graph) if context.config.record and changed else before
    made, compared = context.next_number - first, context.verified - verified
    context.records.append(PassRecord(describe(step), seconds, changed, before, after, made, compared))


def _may_stay(step: Pass, before: Graph, after: Graph, context: Context, first: int) -> bool:
    """Whether a change is selected and right; a pass that numbers nothing it does is one application as a whole."""
    name = describe(step)
    if context.next_number == first:
        if not context.application(step.name, message=f"{name} as a whole"):
            return False
        return not context.verifies or context.agrees(step.name, before, after)
    return not context.verifies or context.keeps_meaning(name, before, after)


def _undo(graph: Graph, saved: Graph, context: Context, told: int) -> tuple[object, ...]:
    """Take back what a pass did, and what it said of it; the structure that is left."""
    graph.become(saved)
    context.remarks[told:] = [remark for remark in context.remarks[told:] if remark.kind != "passed"]
    return _structure(graph)


def _structure(graph: Graph) -> tuple[object, ...]:
    """Nodes and outputs themselves: those that a pass erases must not lend their ids to others."""
    return (tuple((n, n.operands) for n in graph.nodes), tuple(graph.outputs))
