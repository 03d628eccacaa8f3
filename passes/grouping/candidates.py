"""What groups of nodes would be as kernels, and what they gain: each question is asked once for all equal groups."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from fusec.analysis.devices import devices
from fusec.analysis.gain import Judgement, gain, judge, may_lose
from fusec.analysis.machine import Machine
from fusec.analysis.outline import Outline, outline
from fusec.analysis.uses import Uses
from fusec.ir.graph import Node, storage
from fusec.ir.structure import abbreviations, spelling
from fusec.loops.kinds import Limits

GENERATED = 0.8
"""The share of the library's speed that a generated product of many rows is taken to have on a GPU where it will not be
timed, as its sizes are not known: a guess, since none has been timed there."""


class Candidates:
    """Judges groups by the bodies that they would have."""

    def __init__(self, uses: Uses, limits: Limits, machine: Machine, refused: Mapping[Hashable, str]) -> None:
        self.uses, self.limits, self.machine, self.refused = uses, limits, machine, refused
        self.spell = abbreviations()
        self.judgements: dict[tuple[object, ...], Judgement] = {}
        """By structure."""
        self.gains: dict[tuple[object, ...], float] = {}
        """Seconds that kernels save over their operations one by one, by structure."""

    def judged(self, group: set[Node]) -> Judgement:
        """What a group is as one kernel."""
        candidate = outline(group, self.uses)
        roots = {storage(v) for n in group for v in n.written}
        if roots and any(v not in roots and storage(v) in roots for v in candidate.inputs):
            return Judgement("a kernel reads what it writes: through a view")
        places = devices((*candidate.inputs, *candidate.outputs))
        if len(places) > 1:
            return Judgement(f"its tensors lie on {' and '.join(places)}")
        key = candidate.structure(self.spell)
        if key not in self.judgements:
            refused = self.refused.get(candidate.structure(spelling), "") if self.refused else ""
            self.judgements[key] = judge(candidate.build(), self.limits, self.machine, refused)
        return self.judgements[key]

    def verdict(self, group: set[Node]) -> str:
        """Why a group is no kernel; "" where it is one."""
        return self.judged(group).reason

    def loss(self, together: Judgement, *parts: set[Node]) -> str:
        """Why several kernels are left several though they could be one; "" where that one is quicker."""
        if not may_lose(together, self.machine):
            return ""
        apart = [self.judged(part) for part in parts]
        gained = gain(together, apart, self.machine)
        if gained >= 0:
            return ""
        saved = sum(part.cost.bytes for part in apart) - together.cost.bytes
        return f"{together.repeated}: {-gained * 1e6:.3g} µs more in all, to move {saved} bytes less"

    def gained(self, members: Iterable[Node], piece: Outline) -> float:
        """What a kernel saves over its operations one by one."""
        key = piece.structure(self.spell)
        if key not in self.gains:
            apart = [self.judged({node}) for node in members]
            self.gains[key] = gain(self._generated(set(members)), apart, self.machine)
        return self.gains[key]

    def no_gain_over_library(self, unit: set[Node], products: set[Node]) -> str:
        """Why a kernel saves nothing over products of the library and a kernel of the rest; "" where it does."""
        rest = unit - products
        if not rest or _is_bias(rest):
            return "it would take nothing along that the library's call does not"
        apart = [self.judged(part) for part in (rest, *({node} for node in products))]
        gained = gain(self._generated(unit), apart, self.machine)
        if gained > 0:
            return ""
        share = "" if _is_of_known_sizes(unit) else f" at {GENERATED:.0%} of the library's speed, which is a guess"
        return f"it would take {-gained * 1e6:.3g} µs more{share}"

    def _generated(self, unit: set[Node]) -> Judgement:
        """A kernel with the speed that its products are taken to have: where it is timed, that of the library's."""
        found = self.judged(unit)
        if not (found.many and self.limits.any_layout) or _is_of_known_sizes(unit):
            return found
        work = {kind: n / GENERATED if kind[0] == "matrix" else n for kind, n in found.cost.work.items()}
        return replace(found, cost=replace(found.cost, work=work))

    def is_better(self, found: Iterable[Judgement], than: Iterable[Judgement]) -> bool:
        """Whether these are kernels that move less than others, and take no longer."""
        sides = [list(found), list(than)]
        moved = [sum(one.cost.bytes for one in side) for side in sides]
        seconds = [sum(float(one.cost.time(self.machine)) for one in side) for side in sides]
        return not any(one.reason for one in sides[0]) and bool(moved[0] < moved[1]) and seconds[0] <= seconds[1]


def _is_bias(nodes: set[Node]) -> bool:
    """Whether all that nodes do is to add a vector."""
    (node, *others) = nodes
    return not others and node.is_op("add") and any(v.tensor.rank == 1 for v in node.operands)


def _is_of_known_sizes(nodes: set[Node]) -> bool:
    values = (v for n in nodes for v in (*n.operands, *n.results))
    return all(isinstance(size, int) for v in values for size in v.shape)
