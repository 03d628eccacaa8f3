"""Findings on fusions at a place of the model, from what a compile has recorded: fused, or the reason why not."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.analysis.sites import RULE_OF
from fusec.config import Config
from fusec.debug.near_misses import near_misses
from fusec.debug.operations import Operation, operations_of
from fusec.debug.reasons import code_of_clause, code_of_text
from fusec.debug.returns import with_tried_edit
from fusec.debug.site_status import GENERAL, SiteStatus, site_statuses
from fusec.debug.subject import Subject, usual_reason
from fusec.errors import FusecError, suggestion
from fusec.ir.graph import Node
from fusec.ir.ops import Trait
from fusec.ir.types import F32
from fusec.remarks import Remark
from fusec.rewriting.match import MatchFailure, word

EVERYTHING, KERNEL = "everything", "kernel"
_ARITHMETIC = Trait.POINTWISE | Trait.REDUCTION


class UnknownPlace(FusecError):
    """A place or fusion that the model does not have."""


@dataclass(frozen=True)
class Finding:
    """One fusion, site or kernel at one place."""

    what: str
    where: str
    """Module, file and line."""
    status: str
    """``fused``; ``unnamed``, in one kernel that is no declared fusion; ``missed``; ``opaque``; ``absent``."""
    kernels: tuple[str, ...] = ()
    """The kernels, matmuls and ATen calls that run its operations."""
    code: str = ""
    """One of ``fusec.debug.reasons.REASONS``."""
    reason: str = ""
    attempt: str = ""
    """The nearest pattern, and how far it matched."""
    text: str = ""
    """The model's line at fault."""
    edit: str = ""
    """A change of the model that lets it fuse, and keeps what the model computes, as trying it has shown."""
    tried: str = ""
    """The outcome of trying a change; with the change, where it is not the edit."""
    bytes_lost: int = 0
    """Traffic that it would not have if it were fused."""
    count: int = 1
    """Equal findings at other places."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON data."""
        return dict(vars(self))


def why(subjects: Sequence[Subject], model: Any, what: str = EVERYTHING, at: str = "") -> list[Finding]:
    """Return findings on a fusion, equal ones merged.

    Args:
        subjects: the compiles of the model.
        model: the module, whose sites are classified too; None for a graph.
        what: a declared fusion (``swiglu``), a kind of site (``norm``, ``attention``), ``kernel``, or ``everything``.
        at: a module (``layers.0.mlp``, ``layers.*``), ``file.py:12``, or a node of the final graph (``%12``); the whole
            model by default.

    Raises:
        UnknownPlace: where nothing is called so, or no operation is there.
    """
    from fusec.passes import FUSIONS

    names = [EVERYTHING, KERNEL, *RULE_OF, *FUSIONS]
    if what not in names:
        raise UnknownPlace(f"no fusion or kind of site is called {what!r}", fix=suggestion(what, names))
    has_modules = hasattr(model, "named_modules") or any(subject.sites for subject in subjects)
    places = [_Place(subject, at, has_modules) for subject in subjects]
    if not any(place.operations for place in places):
        known = {name for subject in subjects for o in operations_of(subject) for name in _names(o)}
        raise UnknownPlace(f"no operation of the model is at {at!r}", fix=suggestion(at, sorted(known)))
    sites = site_statuses(model, subjects)
    found = [finding for place in places for finding in _findings(place, what, sites)]
    if not found and what not in (EVERYTHING, KERNEL):
        found = [absent for place in places for absent in _absent(place, what)]
    return _merged(found) if what == KERNEL else sorted(_merged(found), key=_urgency)


class _Place:
    """The operations and remarks of one graph that belong to a place."""

    def __init__(self, subject: Subject, at: str, has_modules: bool) -> None:
        self.subject, self.at, self.has_modules = subject, at, has_modules
        self.holds = self._test(at)
        self.operations = [
            o for o in operations_of(subject) if any(map(self.holds, map(str, o.node.sources))) or not at
        ]
        self.modules = dict.fromkeys(s.module for o in self.operations for s in o.node.sources if self.holds(str(s)))
        self.homes = defaultdict[str, dict[Node, None]](dict)
        """By source location, the nodes that run its operations."""
        for operation in self.operations:
            for source in operation.node.sources:
                self.homes[str(source)][operation.home] = None
        self.order = {node: i for i, node in enumerate(subject.final.nodes)}

    def _test(self, at: str) -> Callable[[str], bool]:
        """Return the test for the source locations of a place."""
        if at.startswith("%"):
            named = [n for n in self.subject.final.nodes if any(v.name == at[1:] for v in n.results)]
            inside = {str(s) for n in named for s in n.sources}
            return lambda source: source in inside
        if re.search(r":\d+$", at):
            return lambda source: (place := source.rpartition(", ")[2]) == at or place.endswith(f"/{at}")
        return lambda source: (
            not at or any(fnmatch.fnmatchcase(source.partition(", ")[0], pattern) for pattern in (at, f"{at}.*"))
        )

    def remarks(self, remarks: Iterable[Remark]) -> list[Remark]:
        """Return the remarks with a source location here."""
        return [r for r in remarks if not self.at or any(map(self.holds, r.sources))]

    def kernels_at(self, sources: Iterable[str], regions: bool = False) -> tuple[str, ...]:
        """Return the names of what runs the operations of some source locations, or of the regions of these alone."""
        homes = dict.fromkeys(home for source in sources for home in self.homes.get(source, ()))
        chosen = [home for home in homes if regions and home.has(Trait.REGION)] or homes
        ordered = sorted(chosen, key=self.order.__getitem__)
        return tuple(dict.fromkeys(map(self.subject.name_of, ordered)))


def _findings(place: _Place, what: str, sites: Sequence[SiteStatus]) -> Iterator[Finding]:
    if what == KERNEL:
        yield from _kernels(place)
        return
    chosen = [_of_site(s) for s in sites if what in (EVERYTHING, s.site.kind) and _is_at(place, s)]
    yield from chosen
    if what in RULE_OF and chosen:
        return
    misses = [m for m in place.remarks(near_misses(place.subject)) if _is_about(m, what)]
    applied = _applied(place, what)
    yield from (_of_application(place, r) for r in applied)
    yield from () if applied else _grouped(place, what)
    about = [_of_miss(place, m) for m in misses if "clause" in m.figures or m.subject in (what, "attention")]
    yield from about
    if what == EVERYTHING:
        yield from _opaque(place)
        yield from _nameless(place, {name for finding in (*chosen, *about) for name in finding.kernels})


def _is_about(miss: Remark, what: str) -> bool:
    """Return whether a miss is of a fusion, or of a fusion that sites of a kind are expected to be."""
    named = RULE_OF[what].fusions if what in RULE_OF else ""
    return what in (EVERYTHING, miss.subject) or bool(named and re.search(named, miss.subject))


def _is_at(place: _Place, status: SiteStatus) -> bool:
    """Return whether a site is at a place: the module itself, one inside it, or one that a line belongs to."""
    roots = (status.site.module, *status.site.parts)
    if place.at and not re.search(r":\d+$|^%", place.at):
        return any(map(place.holds, roots))
    return not place.at or any(not r or m == r or m.startswith(f"{r}.") for r in roots for m in place.modules)


def _of_site(status: SiteStatus) -> Finding:
    kind, where = status.site.kind, status.place or status.site.module
    said = Finding(
        kind, where, "missed", status.kernels, attempt=status.attempt, text=status.text, edit=status.edit,
        tried=status.tried, bytes_lost=status.bytes_lost,
    )  # fmt: skip
    expected = f"expected {status.expected}, found {status.found}" if status.found else ""
    code = code_of_clause(status.clause) if status.attempt else code_of_text(status.found)
    if status.fused and status.recognised is not False:
        return Finding(kind, where, "fused", status.kernels, reason=", ".join(status.meanings))
    if status.fused:
        return replace(said, status="unnamed", code=code or "operation", reason=expected or GENERAL)
    return replace(said, code=code, reason=f"{status.node}: {expected}")


def _applied(place: _Place, what: str) -> list[Remark]:
    """Return the applications of a declared fusion here, or of all."""
    from fusec.passes import FUSIONS

    passed = (r for r in place.subject.remarks if r.kind == "passed" and r.application is not None)
    return place.remarks(r for r in passed if r.subject in FUSIONS and what in (EVERYTHING, r.subject))


def _of_application(place: _Place, remark: Remark) -> Finding:
    where = next(iter(remark.sources), "")
    return Finding(remark.subject, where, "fused", place.kernels_at(remark.sources, regions=True))


def _grouped(place: _Place, what: str) -> Iterator[Finding]:
    """Yield the kernels here that are a fusion which no declaration names, such as attention that is written out."""
    for home in dict.fromkeys(o.home for o in place.operations):
        if what in home.attributes.get("fusions", ()):
            where = next((str(s) for o in place.operations if o.home is home for s in o.node.sources), "")
            yield Finding(what, where, "fused", (place.subject.name_of(home),))


def _of_miss(place: _Place, remark: Remark) -> Finding:
    figures, where = remark.figures, next(iter(remark.sources), "")
    kernel = str(figures.get("kernel", ""))
    kernels = (kernel,) if kernel else place.kernels_at(remark.sources)
    attempt = f"{figures['depth']} of {figures['size']} operations" if "clause" in figures else ""
    code = code_of_clause(str(figures["clause"])) if "clause" in figures else code_of_text(remark.reason)
    return Finding(
        remark.subject, where, "unnamed" if kernel else "missed", kernels,
        code, remark.reason, attempt,
        str(figures.get("text", "")), remark.suggestion, str(figures.get("tried", "")),
    )  # fmt: skip


def _opaque(place: _Place) -> Iterator[Finding]:
    """Yield the operations here that are left to ATen."""
    reasons = {r.subject: r for r in place.subject.remarks if r.kind != "passed" and (r.reason or r.message)}
    for operation in place.operations:
        if operation.kind == "opaque" and operation.node is operation.home:
            name = place.subject.name_of(operation.node)
            remark = reasons.get(name)
            reason = (remark.reason or remark.message) if remark else usual_reason(operation.node)
            source = next((s for s in operation.node.sources if place.holds(str(s))), None)
            text = source.text if source else ""
            yield Finding(name, str(source or ""), "opaque", (name,), code_of_text(reason), reason, text=text)


def _nameless(place: _Place, said: Collection[str]) -> Iterator[Finding]:
    """Yield the kernels of several operations here that are no declared fusion, and that no finding is about."""
    for home in dict.fromkeys(o.home for o in place.operations if o.kind == "generated"):
        inside = [o for o in place.operations if o.home is home and o.node.has(_ARITHMETIC)]
        name = place.subject.name_of(home)
        if len(inside) > 1 and not home.attributes.get("fusions") and name not in said:
            counts = ", ".join(dict.fromkeys(word(o.node) for o in inside))
            source = next((s for o in inside for s in o.node.sources if place.holds(str(s))), None)
            yield Finding(
                KERNEL, str(source or ""), "unnamed", (name,), "operation", f"{GENERAL} ({counts})",
                text=source.text if source else "",
            )  # fmt: skip


def _kernels(place: _Place) -> Iterator[Finding]:
    """Yield what runs the operations here, then why neighbouring kernels are apart."""
    for home in dict.fromkeys(o.home for o in place.operations):
        inside = [o for o in place.operations if o.home is home]
        name, kind = place.subject.name_of(home), inside[0].kind
        counts = dict.fromkeys(word(o.node) for o in inside)
        where = next((str(s) for o in inside for s in o.node.sources if place.holds(str(s))), "")
        fusions = ", ".join(home.attributes.get("fusions", ()))
        yield Finding(
            name, where, "opaque" if kind == "opaque" else "fused", (kind,), "opaque" if kind == "opaque" else "",
            f"{fusions + ': ' if fusions else ''}{', '.join(counts)}",
        )  # fmt: skip
    for remark in place.remarks(r for r in place.subject.remarks if r.kind in ("missed", "analysis") and r.reason):
        if remark.pass_name == "group":
            remark = with_tried_edit(place.subject, remark)
            where = next(iter(remark.sources), "")
            yield Finding(
                remark.message, where, "missed", code=code_of_text(remark.reason), reason=remark.reason,
                edit=remark.suggestion, tried=str(remark.figures.get("tried", "")),
            )  # fmt: skip


def _absent(place: _Place, what: str) -> Iterator[Finding]:
    """Yield the attempt to match a fusion here that came furthest; without any, the operations that are lacking."""
    from fusec.passes import FUSIONS, pattern_library

    where = place.at or "the model"
    if what not in FUSIONS:
        known = place.has_modules
        reason = "no module here is such a site" if known else "sites are found from modules, and none is known"
        yield Finding(what, where, "absent", code="operation", reason=reason)
        return
    best = _furthest(place, what)
    if best is not None and best.depth * 2 >= best.size:
        attempt, text = f"{best.depth} of {best.size} operations", next((s.text for s in best.sources), "")
        at = next(iter(best.places), where)
        inner = _furthest(place, best.expected) if best.expected in FUSIONS else None
        said = f"{best}; of {best.expected}, {inner}" if inner else str(best)
        yield Finding(
            what, at, "missed", place.kernels_at(best.places), code_of_clause((inner or best).clause), said, attempt,
            text,
        )  # fmt: skip
        return
    have = {o.node.op.name for o in place.operations}
    patterns = pattern_library().patterns(FUSIONS[what], F32)
    needed = ({n.op.name for n in p.computing if n.has(Trait.POINTWISE | Trait.REDUCTION)} - have for p in patterns)
    fewest = min(needed, key=len, default=set())
    lacking = f"it needs {', '.join(sorted(fewest))}, which no operation here computes"
    reason = lacking if fewest else "its operations are here, but not as one of its spellings"
    yield Finding(what, where, "absent", code="operation", reason=reason)


def _furthest(place: _Place, what: str) -> MatchFailure | None:
    """Return the attempt to match a fusion at a place that came furthest; None where nothing matched in part."""
    from fusec.passes import FUSIONS, kept_traces, pattern_library
    from fusec.passes.canonicalize import normalize
    from fusec.rewriting.application import attempts

    graph = (place.subject.imported or place.subject.final).copy()
    normalize(graph)
    with kept_traces(Config.from_environment()):
        found = [a for a in attempts(FUSIONS[what], graph, pattern_library()) if isinstance(a, MatchFailure)]
    here = [f for f in found if f.depth > 0 and (not place.at or any(map(place.holds, f.places)))]
    return max(here, key=lambda f: f.depth / f.size, default=None)


def _names(operation: Operation) -> Iterator[str]:
    for source in operation.node.sources:
        yield source.module
        if source.file:
            yield f"{source.file.rpartition('/')[2]}:{source.line}"


def _merged(found: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ in their place only."""
    equal: dict[Finding, list[Finding]] = {}
    for finding in found:
        equal.setdefault(
            replace(finding, where="", bytes_lost=0, edit=re.sub(r" at \S+$", "", finding.edit)), []
        ).append(finding)
    return [replace(same[0], count=len(same), bytes_lost=sum(v.bytes_lost for v in same)) for same in equal.values()]


def _urgency(finding: Finding) -> tuple[int, int]:
    """Return the key of an order in which those that are not fused are first, by bytes lost."""
    return ("missed", "absent", "opaque", "unnamed", "fused").index(finding.status), -finding.bytes_lost
