"""Movement of computations between kernels, once those are known, where that moves fewer bytes."""

from collections.abc import Sequence

from fusec.analysis.outline import outline
from fusec.analysis.partition import Partition
from fusec.analysis.uses import Uses
from fusec.ir.graph import Node
from fusec.ir.ops import Trait
from fusec.passes.grouping.candidates import Candidates


def rematerialize(partition: Partition, candidates: Candidates) -> int:
    """Recompute views, casts, lookups and packed weights in each kernel that reads them; return the kernels saved."""
    uses = partition.uses
    before_writes = {n for nodes in uses.effects.values() for n in nodes}
    done = 0
    for group in partition.groups():
        readers = [partition.group_of.get(r) for n in group for r in uses.readers(n) if r not in group]
        others = list({id(other): other for other in readers if other is not None}.values())
        is_cheap = all(n.has(Trait.VIEW | Trait.LOOKUP) or n.is_op("cast") for n in group)
        if (
            not (is_cheap or _is_packed_weight(group, uses))
            or None in readers
            or not others
            or not group.isdisjoint(before_writes | uses.returned)
        ):
            continue
        separate = [candidates.estimate(part) for part in (group, *others)]
        uses.inline(*group)
        if not candidates.is_better([candidates.estimate(other) for other in others], separate):
            uses.materialize(*group)
            continue
        for node in group:
            del partition.group_of[node]
        done += 1
    return done


def sink(nodes: Sequence[Node], partition: Partition, candidates: Candidates) -> int:
    """Move pointwise nodes into the one kernel that reads their results; return the number of nodes moved."""
    uses, done = partition.uses, 0
    for node in (n for n in reversed(nodes) if n.has(Trait.POINTWISE) and n in partition.group_of):
        readers = [partition.group_of.get(r) for r in uses.readers(node)]
        first, second = partition.group_of[node], next(iter(readers), None)
        if second is None or any(other is not second for other in readers) or node in uses.returned:
            continue
        if first is second or len(first) == 1 or partition.closes_cycle({node}, second):
            continue
        moved = first - {node}, second | {node}
        if candidates.is_better(
            [candidates.estimate(part) for part in moved], map(candidates.estimate, (first, second))
        ):
            for part in moved:
                partition.put(part)
            done += 1
    return done


def _is_packed_weight(group: set[Node], uses: Uses) -> bool:
    """Return whether matmuls and lookups alone read what nodes compute, from fewer bytes than it takes."""
    read = {r for n in group for r in uses.readers(n)} - group
    plain = all(n.has(Trait.POINTWISE | Trait.VIEW | Trait.LOOKUP) for n in group)
    if not plain or not all(n.has(Trait.CONTRACTION | Trait.LOOKUP) for n in read):
        return False
    piece = outline(group, uses)
    packed, dense = (sum(v.tensor.nbytes for v in values) for values in (piece.inputs, piece.outputs))
    return isinstance(dense, int) and isinstance(packed, int) and packed < dense
