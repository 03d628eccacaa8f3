"""What a computation costs: bytes, operations by unit, and the time that a machine's limits leave it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import sympy

from fusec.analysis.machine import Machine
from fusec.analysis.memory import body_ends, ends, flops, moved_bytes, touched_bytes
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import DType, Size, TensorType, accumulation, estimate, product, simplify
from fusec.loops.indexing import IndexedExpr, lower_to_loops
from fusec.loops.recomputation import evaluations

Unit: TypeAlias = tuple[str, str]
"""``vector`` or ``matrix``, and the name of the element type."""
Seconds: TypeAlias = float | sympy.Expr


@dataclass(frozen=True)
class Cost:
    """What is moved and computed, as expressions over the sizes."""

    bytes: Size = 0
    """Moved, from wherever."""
    work: Mapping[Unit, Size] = field(default_factory=dict, hash=False)
    """Operations that are carried out, repeated ones each time."""
    cached: Size = 0
    """Those of the bytes that come from the last cache, or stay there."""
    launches: int = 1

    def __add__(self, other: "Cost") -> "Cost":
        work = {unit: self.work.get(unit, 0) + other.work.get(unit, 0) for unit in {**self.work, **other.work}}
        return Cost(self.bytes + other.bytes, work, self.cached + other.cached, self.launches + other.launches)

    @property
    def flops(self) -> Size:
        """All operations."""
        return simplify(sum(self.work.values(), start=0))

    @property
    def intensity(self) -> float | sympy.Expr:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes != 0 else 0.0

    def at(self, symbols: Mapping[str, int] | None = None) -> "Cost":
        """The same in numbers; sizes that are not known count as something middling."""
        work = {unit: estimate(n, symbols) for unit, n in self.work.items()}
        return Cost(estimate(self.bytes, symbols), work, estimate(self.cached, symbols), self.launches)

    def transfer(self, machine: Machine) -> Seconds:
        """How long moving the bytes takes."""
        from_memory = (self.bytes - self.cached) / machine.bandwidth(cached=False)
        return from_memory + self.cached / machine.bandwidth(cached=True)

    def arithmetic(self, machine: Machine) -> Seconds:
        """How long the operations take, one unit after another."""
        return sum((n / machine.peak(*unit) for unit, n in self.work.items()), start=0.0)

    def limit(self, machine: Machine) -> Seconds:
        """The least time: moving and computing overlap, so the longer of the two."""
        sides = self.transfer(machine), self.arithmetic(machine)
        return sympy.Max(*sides) if any(isinstance(side, sympy.Expr) for side in sides) else max(*sides)

    def time(self, machine: Machine) -> Seconds:
        """The predicted time, launches included."""
        return self.limit(machine) + self.launches * machine.launch_us * 1e-6

    def bound(self, machine: Machine) -> str:
        """What most of the time of a cost in numbers goes to: ``memory``, ``compute`` or ``launch``."""
        sides = {
            "launch": self.launches * machine.launch_us * 1e-6,
            "memory": self.transfer(machine),
            "compute": self.arithmetic(machine),
        }
        return max(sides, key=lambda side: float(sides[side]))


def node_cost(node: Node, cached: Callable[[Value], bool] = lambda value: False) -> Cost:
    """What a node costs that runs on its own.

    Args:
        node: of a graph; a region that is one kernel is one launch.
        cached: whether a value that it reads or writes lies in the last cache.
    """
    moved = moved_bytes(node)
    if node.has(Trait.SOURCE) or node.is_alias:
        return Cost(launches=0)
    at = ends(node) if node.has(Trait.REGION) else dict.fromkeys((*node.operands, *node.results))
    near = simplify(sum((touched_bytes(v) for v in at if cached(v)), 0))
    both = isinstance(near, int) and isinstance(moved, int)
    return Cost(moved, _work(node), min(near, moved) if both else sympy.Min(near, moved))


def kernel_cost(body: Graph, counts: Mapping[IndexedExpr, float], machine: Machine) -> Cost:
    """What a kernel with this body costs, about: what its loops repeat counts each time.

    Args:
        body: of the region.
        counts: how often each computation of the located body is carried out.
        machine: whose cache keeps what is small.
    """
    sizes = [estimate(touched_bytes(v)) for v in body_ends(body)]
    return Cost(sum(sizes), work_of(counts), sum(size for size in sizes if machine.holds(size)))


def region_cost(region: Node, symbols: Mapping[str, int], cached: Callable[[Value], bool]) -> Cost:
    """What a node costs in numbers; a kernel as its loops compute it.

    Args:
        region: a kernel, or any other node that runs on its own.
        symbols: the sizes that are known.
        cached: whether a value that it reads or writes lies in the last cache.
    """
    cost = node_cost(region, cached).at(symbols)
    if not region.has(Trait.REGION):
        return cost
    try:
        return replace(cost, work=work_of(evaluations(lower_to_loops(region.body), symbols), symbols))
    except ScheduleError:  # it runs operation by operation
        return cost


def work_of(counts: Mapping[IndexedExpr, float], symbols: Mapping[str, int] | None = None) -> dict[Unit, Size]:
    """Operations by unit of what is computed so often."""
    work: dict[Unit, Size] = {}
    for item, count in counts.items():
        unit = unit_of(item.node)
        work[unit] = work.get(unit, 0) + round(count * operations(item, symbols))
    return work


def operations(item: IndexedExpr, symbols: Mapping[str, int] | None = None) -> int:
    """Operations of one evaluation, about."""
    bound = product(tuple(axis.size for axis in item.bound))
    return estimate(bound, symbols) * item.node.op.cost


def compute_bound_from(cost: Cost, machine: Machine, size: sympy.Symbol) -> float | None:
    """The value of a size from which arithmetic takes longer than memory; None where it never does."""
    free = sympy.Dummy(positive=True)  # between two whole numbers
    sides = cost.arithmetic(machine), cost.transfer(machine)
    found = sympy.solve(sympy.sympify(sides[0] - sides[1]).subs(size, free), free)
    return min(map(float, found), default=None)


def unit_of(node: Node) -> Unit:
    """What carries out a node's operations."""
    if node.has(Trait.CONTRACTION | Trait.CONVOLUTION):
        return "matrix", node.operands[0].dtype.name
    return "vector", accumulation(node.result.dtype).name


def _work(node: Node) -> dict[Unit, Size]:
    """Operations of a node by unit."""
    if node.has(Trait.REGION):
        total: dict[Unit, Size] = {}
        for inner in node.body.nodes:
            for unit, n in _work(inner).items():
                total[unit] = simplify(total.get(unit, 0) + n)
        return total
    count = flops(node)
    if isinstance(count, int) and count == 0:
        return {}
    if node.has(Trait.OPAQUE):
        return {("matrix", _float_operand(node).name): count}
    return {unit_of(node): count}


def _float_operand(node: Node) -> DType:
    types = [v.type for v in node.operands if isinstance(v.type, TensorType) and v.type.dtype.is_float]
    return types[0].dtype
