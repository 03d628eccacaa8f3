"""The cost model: bytes, operations by unit, and the time that a machine needs for them."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import sympy

from fusec.analysis.machine import Machine
from fusec.analysis.memory import body_ends, ends, flops, moved_bytes, touched_bytes
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.structure import structure
from fusec.ir.types import DType, Size, TensorType, accumulation, estimate, product, simplify
from fusec.loops.indexing import IndexedExpr, lower_to_loops
from fusec.loops.recomputation import evaluations

Unit: TypeAlias = tuple[str, str]
"""``vector`` or ``matrix``, and the name of the dtype."""
Seconds: TypeAlias = float | sympy.Expr


@dataclass(frozen=True)
class Cost:
    """Bytes, operations and launches, as expressions over symbolic sizes."""

    bytes: Size = 0
    """Bytes read and written, cached ones included."""
    work: Mapping[Unit, Size] = field(default_factory=dict, hash=False)
    """Operations by unit; recomputation counts each time."""
    cached: Size = 0
    """The part of ``bytes`` that hits the last-level cache."""
    launches: int = 1

    def __add__(self, other: "Cost") -> "Cost":
        work = {unit: self.work.get(unit, 0) + other.work.get(unit, 0) for unit in {**self.work, **other.work}}
        return Cost(self.bytes + other.bytes, work, self.cached + other.cached, self.launches + other.launches)

    @property
    def flops(self) -> Size:
        """The operations of all units."""
        return simplify(sum(self.work.values(), start=0))

    def at(self, symbols: Mapping[str, int] | None = None) -> "Cost":
        """Return the cost in numbers, with an assumed value for each size that is not in ``symbols``."""
        work = {unit: estimate(n, symbols) for unit, n in self.work.items()}
        return Cost(estimate(self.bytes, symbols), work, estimate(self.cached, symbols), self.launches)

    def transfer(self, machine: Machine) -> Seconds:
        """Return the seconds that moving the bytes takes."""
        from_memory = (self.bytes - self.cached) / machine.bandwidth(cached=False)
        return from_memory + self.cached / machine.bandwidth(cached=True)

    def arithmetic(self, machine: Machine) -> Seconds:
        """Return the seconds that the operations take, one unit after another."""
        return sum((n / machine.peak(*unit) for unit, n in self.work.items()), start=0.0)

    def limit(self, machine: Machine) -> Seconds:
        """Return the least seconds: the longer of transfer and arithmetic, which overlap."""
        sides = self.transfer(machine), self.arithmetic(machine)
        return sympy.Max(*sides) if any(isinstance(side, sympy.Expr) for side in sides) else max(*sides)

    def time(self, machine: Machine) -> Seconds:
        """Return the predicted seconds, launches included."""
        return self.limit(machine) + self.launches * machine.launch_us * 1e-6

    def bound(self, machine: Machine) -> str:
        """Return the largest part of the time of a cost in numbers: ``memory``, ``compute`` or ``launch``."""
        sides = {
            "launch": self.launches * machine.launch_us * 1e-6,
            "memory": self.transfer(machine),
            "compute": self.arithmetic(machine),
        }
        return max(sides, key=lambda side: float(sides[side]))


def node_cost(node: Node, cached: Callable[[Value], bool] = lambda value: False) -> Cost:
    """Return the cost of a node as a launch of its own; sources and aliasing views launch nothing.

    Args:
        node: a region counts as one kernel without recomputation.
        cached: returns whether a value is in the last-level cache.
    """
    moved = moved_bytes(node)
    if node.has(Trait.SOURCE) or node.is_alias:
        return Cost(launches=0)
    at = ends(node) if node.has(Trait.REGION) else dict.fromkeys((*node.operands, *node.results))
    near = simplify(sum((touched_bytes(v) for v in at if cached(v)), 0))
    both = isinstance(near, int) and isinstance(moved, int)
    return Cost(moved, _work(node), min(near, moved) if both else sympy.Min(near, moved))


def kernel_cost(body: Graph, counts: Mapping[IndexedExpr, float], machine: Machine) -> Cost:
    """Estimate the cost of a kernel with this body in numbers, recomputation included.

    Args:
        body: of the region.
        counts: how often each expression of its loop nest is evaluated.
        machine: values that its last-level cache holds count as cached.
    """
    sizes = [estimate(touched_bytes(v)) for v in body_ends(body)]
    return Cost(sum(sizes), work_of(counts), sum(size for size in sizes if machine.holds(size)))


def region_cost(
    region: Node,
    symbols: Mapping[str, int],
    cached: Callable[[Value], bool],
    known: dict[Hashable, dict[Unit, Size] | None],
) -> Cost:
    """Return the cost of a node in numbers; of a kernel, with the recomputation of its loop nest.

    Args:
        region: a kernel, or any other node.
        symbols: known sizes.
        cached: returns whether a value is in the last-level cache.
        known: the work of kernels by structure, which is added to it.
    """
    cost = node_cost(region, cached).at(symbols)
    if not region.has(Trait.REGION):
        return cost
    if (key := structure(region.body)) not in known:
        known[key] = _nest_work(region.body, symbols)
    work = known[key]
    return cost if work is None else replace(cost, work=work)


def _nest_work(body: Graph, symbols: Mapping[str, int]) -> dict[Unit, Size] | None:
    """Return the operations of a kernel's loop nest; None where it is interpreted, so that nothing is recomputed."""
    try:
        return work_of(evaluations(lower_to_loops(body), symbols), symbols)
    except ScheduleError:
        return None


def work_of(counts: Mapping[IndexedExpr, float], symbols: Mapping[str, int] | None = None) -> dict[Unit, Size]:
    """Return operations by unit, given the number of evaluations of each expression."""
    work: dict[Unit, Size] = {}
    for item, count in counts.items():
        unit = unit_of(item.node)
        work[unit] = work.get(unit, 0) + round(count * operations(item, symbols))
    return work


def operations(item: IndexedExpr, symbols: Mapping[str, int] | None = None) -> int:
    """Estimate the operations of one evaluation."""
    bound = product(tuple(axis.size for axis in item.bound))
    segments = len(item.pairs) if item.kind == "contraction" else 1
    return estimate(bound, symbols) * segments * item.node.op.cost


def compute_bound_from(cost: Cost, machine: Machine, size: sympy.Symbol) -> float | None:
    """Return the value of a size from which arithmetic takes longer than memory; None where it never does."""
    free = sympy.Dummy(positive=True)  # the solution need not be an integer
    sides = cost.arithmetic(machine), cost.transfer(machine)
    found = sympy.solve(sympy.sympify(sides[0] - sides[1]).subs(size, free), free)
    return min(map(float, found), default=None)


def unit_of(node: Node) -> Unit:
    """Return the unit that executes a node's operations."""
    if node.has(Trait.CONTRACTION | Trait.CONVOLUTION):
        return "matrix", node.operands[0].dtype.name
    return "vector", accumulation(node.result.dtype).name


def _work(node: Node) -> dict[Unit, Size]:
    """Return a node's operations by unit, without recomputation."""
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
