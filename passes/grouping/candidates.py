"""Candidate kernels: groups of nodes, estimated once for all groups of equal structure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from fusec.analysis.devices import devices
from fusec.analysis.gain import Estimate, estimate_kernel, gain, may_lose
from fusec.analysis.machine import Machine
from fusec.analysis.outline import Outline, outline
from fusec.analysis.uses import Uses
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value, is_written, storage
from fusec.ir.structure import abbreviations, spelling
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan, plan_kernel
from fusec.refusal import Refusal


class Candidates:
    """Estimates groups by the bodies of their kernels."""

    def __init__(self, uses: Uses, limits: Limits, machine: Machine, refused: Mapping[Hashable, Refusal]) -> None:
        self.uses, self.limits, self.machine, self.refused = uses, limits, machine, refused
        self.spell = abbreviations()
        self.estimates: dict[tuple[object, ...], Estimate] = {}
        """By structure."""
        self.gains: dict[tuple[object, ...], float] = {}
        """Seconds that kernels save over their operations one by one, by structure."""

    def estimate(self, group: set[Node]) -> Estimate:
        """Return the plan and predicted cost of a group as one kernel."""
        candidate = outline(group, self.uses)
        roots = {storage(v) for n in group for v in n.written}
        if _has_views(candidate, roots):
            return Estimate(Refusal("a kernel reads what it writes, through a view"))
        if len(roots) < sum(len(n.writes) for n in group):
            return Estimate(Refusal("a kernel writes twice to the same memory"))
        found = devices((*candidate.inputs, *candidate.outputs))
        if len(found) > 1:
            return Estimate(Refusal(f"its tensors are on {' and '.join(found)}"))
        key = candidate.structure(self.spell)
        if key not in self.estimates:
            body = candidate.build()
            self.estimates[key] = estimate_kernel(body, self._plan(candidate, body), self.machine)
        return self.estimates[key]

    def _plan(self, candidate: Outline, body: Graph) -> Plan | Refusal:
        refused = self.refused.get(candidate.structure(spelling)) if self.refused else None
        if refused is not None:
            return refused
        try:
            return plan_kernel(body, self.limits)
        except ScheduleError as reason:
            return Refusal.of(reason)

    def refusal(self, group: set[Node]) -> Refusal | None:
        """Return why a group is not legal as one kernel."""
        return self.estimate(group).refusal

    def loss(self, together: Estimate, *parts: set[Node]) -> Refusal | None:
        """Return why one kernel is predicted to be slower than several, if it is."""
        if not may_lose(together, self.machine):
            return None
        separate = [self.estimate(part) for part in parts]
        gained = gain(together, separate, self.machine)
        if gained >= 0:
            return None
        saved = sum(part.cost.bytes for part in separate) - together.cost.bytes
        return Refusal(f"{together.repeated}: {-gained * 1e6:.3g} µs slower in all, for {saved} bytes less")

    def gained(self, members: Iterable[Node], piece: Outline) -> float:
        """Return the predicted seconds that a kernel saves over its operations one by one."""
        key = piece.structure(self.spell)
        if key not in self.gains:
            separate = [self.estimate({node}) for node in members]
            self.gains[key] = gain(self._generated(set(members)), separate, self.machine)
        return self.gains[key]

    def no_gain_over_vendor(self, group: set[Node], matmuls: set[Node]) -> Refusal | None:
        """Return why a kernel is not predicted to be faster than vendor calls and a kernel of the rest."""
        rest = group - matmuls
        if not rest or _is_bias(rest):
            return Refusal("a vendor call computes as much")
        separate = [self.estimate(part) for part in (rest, *({node} for node in matmuls))]
        gained = gain(self._generated(group), separate, self.machine)
        if gained > 0:
            return None
        assumed = (
            "" if _has_static_shapes(group) else f", assuming {self.limits.assumed_share:.0%} of the vendor's speed"
        )
        return Refusal(f"a generated kernel is predicted to be {-gained * 1e6:.3g} µs slower{assumed}")

    def _generated(self, group: set[Node]) -> Estimate:
        """Return an estimate with GEMMs at the assumed share of the vendor's speed, or where tuned at all of it."""
        found, share = self.estimate(group), self.limits.assumed_share
        if not found.is_large_m or share is None or _has_static_shapes(group):
            return found
        work = {kind: n / share if kind[0] == "matrix" else n for kind, n in found.cost.work.items()}
        return replace(found, cost=replace(found.cost, work=work))

    def is_better(self, these: Iterable[Estimate], than: Iterable[Estimate]) -> bool:
        """Return whether kernels are legal, move fewer bytes than others, and are predicted to take no longer."""
        sides = [list(these), list(than)]
        moved = [sum(one.cost.bytes for one in side) for side in sides]
        seconds = [sum(float(one.cost.time(self.machine)) for one in side) for side in sides]
        return not any(one.refusal for one in sides[0]) and bool(moved[0] < moved[1]) and seconds[0] <= seconds[1]


def _has_views(candidate: Outline, roots: set[Value]) -> bool:
    """Return whether inputs share storage that is written, other than the one that is written to: all of it, in order.

    It is an input of the graph, the result of an earlier write, or a reshape of one of these.
    """
    shared = [v for v in candidate.inputs if storage(v) in roots]
    whole = all(v in roots or is_written(v) or (v.producer and v.producer.is_op("reshape")) for v in shared)
    return not whole or len({storage(v) for v in shared}) < len(shared)


def _is_bias(nodes: set[Node]) -> bool:
    """Return whether nodes only add a vector."""
    (node, *others) = nodes
    return not others and node.is_op("add") and any(v.tensor.rank == 1 for v in node.operands)


def _has_static_shapes(nodes: set[Node]) -> bool:
    values = (v for n in nodes for v in (*n.operands, *n.results))
    return all(isinstance(size, int) for v in values for size in v.shape)
