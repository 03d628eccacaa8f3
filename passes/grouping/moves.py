"""Where a value is computed once kernels are known: in another one of them, where less crosses memory then."""

from collections.abc import Sequence

from fusec.analysis.units import Units
from fusec.ir.graph import Node
from fusec.ir.ops import Trait
from fusec.passes.grouping.candidates import Candidates


def repeat_moves(units: Units, candidates: Candidates) -> int:
    """Let each kernel look up or put together for itself what only kernels read; how many values that were."""
    uses = units.uses
    awaited = {n for before in uses.effects.values() for n in before}
    done = 0
    for unit in units.distinct():
        readers = [units.of.get(r) for n in unit for r in uses.readers(n) if r not in unit]
        others = list({id(other): other for other in readers if other is not None}.values())
        moves = all(n.has(Trait.VIEW | Trait.LOOKUP) or n.is_op("cast") for n in unit)
        if not moves or None in readers or not others or not unit.isdisjoint(awaited | uses.returned):
            continue
        apart = [candidates.estimate(part) for part in (unit, *others)]
        uses.pass_through(*unit)
        if not candidates.is_better([candidates.estimate(other) for other in others], apart):
            uses.stop_at(*unit)
            continue
        for node in unit:
            del units.of[node]
        done += 1
    return done


def shift(nodes: Sequence[Node], units: Units, candidates: Candidates) -> int:
    """Compute in the one kernel that reads it what another has computed on the way, where less is moved then."""
    uses, done = units.uses, 0
    for node in (n for n in reversed(nodes) if n.has(Trait.POINTWISE) and n in units.of):
        readers = [units.of.get(r) for r in uses.readers(node)]
        first, second = units.of[node], next(iter(readers), None)
        if second is None or any(other is not second for other in readers) or node in uses.returned:
            continue
        if first is second or len(first) == 1 or units.closes_cycle({node}, second):
            continue
        moved = first - {node}, second | {node}
        if candidates.is_better(
            [candidates.estimate(part) for part in moved], map(candidates.estimate, (first, second))
        ):
            for part in moved:
                units.put(part)
            done += 1
    return done
