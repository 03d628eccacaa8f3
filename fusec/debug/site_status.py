"""The status of each site of a model: fused, or the best attempt, its obstacle, and the edit that would help."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.analysis.memory import is_attention, moved_bytes, touched_bytes
from fusec.analysis.sites import RULE_OF, Site, sites_of
from fusec.debug.operations import Operation, operations_of
from fusec.debug.returns import with_tried_edit
from fusec.debug.subject import Subject, usual_reason
from fusec.ir.graph import Node, Source
from fusec.ir.ops import Trait
from fusec.ir.types import estimate
from fusec.remarks import Remark
from fusec.rewriting.match import word

_AFTER_PRODUCT = 4
"""Most operations between a matmul and the residual stream: a bias, a scale, a cast."""

GENERAL = "a general kernel: no declared fusion is like it"
_UNSUPPORTED = "none in the model: fusec lacks support for it"


@dataclass(frozen=True)
class SiteStatus:
    """One site and its status."""

    site: Site
    fused: bool
    kernels: tuple[str, ...] = ()
    """The kernels, matmuls and ATen calls that run its operations."""
    meanings: tuple[str, ...] = ()
    """Declared fusions that were matched there."""
    node: str = ""
    """The operation at fault."""
    clause: str = ""
    """The violated clause: ``operation``, ``kernel``, or the clause of the pattern that nearly matched."""
    expected: str = ""
    found: str = ""
    place: str = ""
    """Module, file and line of the operation at fault."""
    text: str = ""
    """The text of that line."""
    edit: str = ""
    """The change of the model that would let it fuse, and keeps what it computes."""
    tried: str = ""
    """The outcome of trying a change; with the change, where that is not the edit."""
    attempt: str = ""
    """The nearest pattern, and how far it matched."""
    bytes_lost: int = 0
    """Traffic that a fused site would not have."""
    recognised: bool | None = None
    """True where a declared fusion of its kind was matched; None for a kind that has no name."""

    @property
    def reason(self) -> str:
        """The reason for which it is not fused, in one line; "" where it is."""
        return "" if self.fused else f"{self.node}: {self.clause}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        """Return the status and its site as JSON data."""
        fields = {name: value for name, value in vars(self).items() if name != "site"}
        return {**vars(self.site), **fields, "reason": self.reason}


def site_statuses(model: Any, subjects: Sequence[Subject]) -> list[SiteStatus]:
    """Return the status of the sites of a ``torch.nn.Module``; those that no graph runs are left out.

    Without one they are those that the compiles have noted.
    """
    found: dict[Site, SiteStatus] = {}
    noted = dict.fromkeys(site for subject in subjects for site in subject.sites)
    sites = list(sites_of(model) if hasattr(model, "named_modules") else noted)
    for subject in subjects:
        classifier = _Classifier(subject)
        for site in sites:
            status = classifier.status(site)
            if status is not None and (site not in found or found[site].fused):
                found[site] = status
    return [found[site] for site in sites if site in found]


class _Classifier:
    """One graph."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.by_module: defaultdict[str, list[Operation]] = defaultdict(list)
        self.at_home: defaultdict[Node, set[Operation]] = defaultdict(set)
        for operation in operations_of(subject):
            if not operation.node.is_op("cast"):
                self.at_home[operation.home].add(operation)
            for module in dict.fromkeys(operation.modules):
                self.by_module[module].append(operation)

    def status(self, site: Site) -> SiteStatus | None:
        """Return the status of a site; None where it does not run."""
        work = {o: None for o in self.work_of(site) if not o.node.is_op("cast")}
        if not work:
            return None
        homes = dict.fromkeys(o.home for o in work)
        kernels = tuple(dict.fromkeys(map(self.subject.name_of, homes)))
        meanings = tuple(dict.fromkeys(m for h in homes for m in h.attributes.get("fusions", ())))
        fused = SiteStatus(site, True, kernels, meanings, recognised=self.is_recognised(site, meanings))
        fault = self.fault(site, work)
        if fault is not None:
            return self.missed(fused, *fault)
        nearest = self.nearest(site) if fused.recognised is False else None
        return fused if nearest is None else _as_attempted(fused, nearest)

    def is_recognised(self, site: Site, meanings: tuple[str, ...]) -> bool | None:
        """Return whether a declared fusion of its kind was matched at a site; None where the kind has no name."""
        named = RULE_OF[site.kind].fusions
        if not named:
            return None
        matched = (
            r for r in self.subject.remarks
            if r.kind == "passed" and r.application is not None and re.search(named, r.subject)
        )  # fmt: skip
        places = {place.partition(", ")[0] for r in matched for place in r.sources}
        return any(_within(place, site) for place in places) or (site.kind == "softmax" and "attention" in meanings)

    # The operations of a site.

    def work_of(self, site: Site) -> dict[Operation, None]:
        """The operations that a fusion at the site would hold."""
        if site.kind in ("attention", "softmax", "rotary embedding"):
            return self.inside_attention(site)
        found = dict.fromkeys(o for part in site.parts or (site.module,) for o in self.under(part))
        if site.kind == "MLP":
            if not site.parts:  # an activation that is a function is computed by the module itself
                found = dict.fromkeys(self.by_module[site.module])
            gates = [r for o in found for r in o.readers if r.node.is_op("mul") and len(r.reads) > 1]
            found |= dict.fromkeys(gates)
        if site.kind == "output and residual":
            found |= dict.fromkeys(_to_the_residual(list(found)))
        return found

    def under(self, path: str) -> Iterable[Operation]:
        """Yield the operations of a module and its submodules."""
        for module, operations in self.by_module.items():
            if not path or module == path or module.startswith(f"{path}."):
                yield from operations

    def inside_attention(self, site: Site) -> dict[Operation, None]:
        """The part of an attention module that a kind of site is about, without its projections."""
        projected = {o for part in site.parts for o in self.under(part)}
        own = dict.fromkeys(o for o in self.under(site.module) if o not in projected)
        products = [o for o in own if o.node.has(Trait.CONTRACTION) or is_attention(o.node)]
        after, before = _reach(products, own, "readers"), _reach(products, own, "reads")
        if site.kind == "attention":
            outside = self.added_products(products, own)
            return {o: None for o in own if o not in outside and (o in products or (o in after and o in before))}
        if site.kind == "softmax":
            powers = [o for o in own if o.node.is_op("exp") and o in after and o in before]
            around = [x for o in powers for x in (o, *o.reads, *o.readers) if x in own]
            return dict.fromkeys(around or [o for o in products if is_attention(o.node)])
        # Operations that other modules share, such as angles, belong to no single layer's rotation.
        shared = {o for o in own if any(not _reaches(module, site.module) for module in o.modules)}
        return {o: None for o in own if o in before and not (o in after or o in products or o in shared)}

    def added_products(self, products: list[Operation], own: dict[Operation, None]) -> set[Operation]:
        """Products that are only added to scores, as those of relative positions, where one is with the softmax."""
        powers = {o for o in own if o.node.is_op("exp")}
        scores = [o for o in products if not powers.isdisjoint(_reach([o], own, "readers"))]
        homes = {o.home for o in powers}
        return {o for o in scores if o.home not in homes} if any(o.home in homes for o in scores) else set()

    # Fused or not.

    def fault(self, site: Site, work: dict[Operation, None]) -> tuple[Operation, str, str, int] | None:
        """Return the operation at fault, the violated clause, the finding, and bytes lost; None where it is fused."""
        for operation in work:
            if operation.kind == "opaque":
                return operation, "operation", f"a call of {word(operation.node)}", self.bytes_of(work, "opaque")
        if site.kind in ("QKV projection", "output and residual", "head"):
            for operation in work:
                alone = self.at_home[operation.home] == {operation}
                if alone and operation.kind == "generated" and any(o.kind == "vendor" for o in operation.reads):
                    return operation, "kernel", "a kernel that does nothing else", self.bytes_of(work, "split")
            return None
        for operation in work if site.kind != "patches" else ():
            for read in operation.reads:
                if read in work and read.home is not operation.home:
                    there, here = map(self.subject.name_of, (read.home, operation.home))
                    found = f"{word(read.node)} in {there}, this in {here}"
                    return operation, "kernel", found, self.bytes_of(work, "split")
        return None

    def bytes_of(self, work: dict[Operation, None], what: str) -> int:
        """Return the traffic between the operations of a site, or in and out of its ATen calls, in bytes."""
        if what == "opaque":
            homes = dict.fromkeys(o.home for o in work if o.kind == "opaque")
            return sum(estimate(moved_bytes(home), self.subject.sizes) for home in homes)
        crossing = {v: None for o in work for r, v in o.reads.items() if r in work and r.home is not o.home}
        return sum(2 * estimate(touched_bytes(value), self.subject.sizes) for value in crossing)

    # Why not.

    def missed(self, fused: SiteStatus, at: Operation, clause: str, found: str, lost: int) -> SiteStatus:
        """The status on a site that is not fused."""
        place = next((s for s in at.node.sources if _within(s.module, fused.site)), Source())
        expected = RULE_OF[fused.site.kind].expected
        status = replace(
            fused, fused=False, node=word(at.node), clause=clause, expected=expected, found=found,
            place=str(place), text=place.text, bytes_lost=lost,
        )  # fmt: skip
        remark = self.remark_on(at, fused.site)
        if remark is not None:
            status = replace(status, found=f"{found}, since {remark.reason}", edit=_edit(remark), tried=_tried(remark))
        elif at.kind == "opaque":
            status = replace(status, found=f"{found}: {usual_reason(at.node)}")
        # Attention whose softmax is not recognised has no remark of its own.
        nearest = self.nearest(fused.site, "softmax" if fused.site.kind == "attention" and remark is None else "")
        if nearest is not None:
            status = _as_attempted(status, nearest)
        unknown = f"none known: no spelling of {nearest.subject} is like it" if nearest else _UNSUPPORTED
        return status if status.edit else replace(status, edit=unknown)

    def remark_on(self, at: Operation, site: Site) -> Remark | None:
        """Return the remark about the operation at fault, or about the attention of the site, if there is one."""
        places = {str(s) for s in at.node.sources}
        names = {at.node.op.name, str(at.node.attributes.get("target", ""))}
        reasons = [r for r in self.subject.remarks if r.kind != "passed" and r.reason]
        about = [r for r in reasons if places & {*r.sources}]
        exact = [r for r in about if r.subject in names and "clause" not in r.figures]
        attention = [r for r in reasons if r.subject == site.kind == "attention"]
        inside = [r for r in attention if any(_within(place.partition(", ")[0], site) for place in r.sources)]
        found = next(iter([*exact, *inside, *(r for r in about if r.subject == "attention")]), None)
        return found and with_tried_edit(self.subject, found)

    def nearest(self, site: Site, kind: str = "") -> Remark | None:
        """Return the remark of the pattern, of one for sites of a kind, that matched furthest within a site."""
        named = RULE_OF[kind or site.kind].fusions
        about = [
            r for r in self.subject.remarks
            if named and r.kind == "missed" and "clause" in r.figures and re.search(named, r.subject)
            and any(_within(place.partition(", ")[0], site) for place in r.sources)
        ]  # fmt: skip
        return max(about, key=lambda r: float(r.figures["depth"]) / float(r.figures["size"]), default=None)


def _edit(remark: Remark) -> str:
    """Return the edit that a remark suggests, if it was tried."""
    return remark.suggestion if "tried" in remark.figures else ""


def _tried(remark: Remark) -> str:
    return str(remark.figures.get("tried", ""))


def _as_attempted(status: SiteStatus, remark: Remark) -> SiteStatus:
    """Return a status whose fault is the clause that kept a pattern from matching."""
    said = {name: str(remark.figures[name]) for name in ("node", "clause", "expected", "found", "text")}
    attempt = f"{remark.subject}, {remark.figures['depth']} of {remark.figures['size']} operations"
    said |= {"place": remark.sources[0], "edit": _edit(remark), "tried": _tried(remark), "attempt": attempt}
    return replace(status, **said)  # type: ignore[arg-type]


def _reaches(module: str, other: str) -> bool:
    """Return whether one of two modules contains the other."""
    return any(not b or a == b or a.startswith(f"{b}.") for a, b in ((module, other), (other, module)))


def _within(module: str, site: Site) -> bool:
    return any(not part or module == part or module.startswith(f"{part}.") for part in (site.module, *site.parts))


def _reach(start: list[Operation], within: dict[Operation, None], along: str) -> set[Operation]:
    """Return what is reachable from some operations, which are included only where another reaches them."""
    found: set[Operation] = set()
    stack = [o for s in start for o in getattr(s, along)]
    while stack:
        operation = stack.pop()
        if operation in within and operation not in found:
            found.add(operation)
            stack += getattr(operation, along)
    return found


def _to_the_residual(work: list[Operation]) -> list[Operation]:
    """Return the operations after a matmul up to its residual addition; empty where there is none."""
    found: list[Operation] = []
    at = next((o for o in reversed(work) if any(r not in work for r in o.readers)), None)
    for _ in range(_AFTER_PRODUCT if at is not None else 0):
        following = [r for r in at.readers if r.node.has(Trait.POINTWISE)]  # type: ignore[union-attr]
        sums = [r for r in following if r.node.is_op("add") and len(r.node.operands[1].shape) > 1]
        if sums or not following:
            return found + sums[:1]
        at = following[0]
        found.append(at)
    return []
