"""Replacement of groups of nodes by regions of kind ``kernel``."""

from collections.abc import Mapping, Sequence

from fusec.analysis.memory import touched_bytes
from fusec.analysis.outline import outline
from fusec.analysis.partition import Partition
from fusec.ir.graph import Graph, Node
from fusec.ir.ops import Trait
from fusec.ir.types import Size
from fusec.loops.grouped import find_grouped_products
from fusec.loops.plan import Plan
from fusec.passes.grouping.candidates import Candidates
from fusec.pipeline import Context


def make_kernels(
    graph: Graph, partition: Partition, candidates: Candidates, labels: Mapping[Node, str], context: Context
) -> None:
    """Make a region of each group.

    Args:
        graph: is changed in place.
        partition: the groups.
        candidates: predicts what each gains, for the remarks.
        labels: the declared fusions that nodes come from.
        context: takes the remarks.
    """
    uses, made = partition.uses, dict[Node, Node]()
    groups = partition.groups()
    pieces = [outline(group, uses) for group in groups]
    for group, piece in zip(groups, pieces, strict=True):
        members = uses.ordered(group)
        plan = candidates.estimate(group).plan
        if isinstance(plan, Plan) and find_grouped_products(plan.nest, plan.shape):
            labels = {**labels, **{n: "grouped_linear" for n in members if n.is_op("sum")}}
        fusions = tuple(dict.fromkeys(labels[n] for n in members if labels.get(n)))
        body = piece.build()
        region = made[members[0]] = graph.add_node(
            "region", piece.inputs,
            {"kind": "kernel", "label": _label(members, labels), "fusions": fusions, "body": body},
            types=[v.type for v in body.outputs], sources=tuple(dict.fromkeys(s for n in members for s in n.sources)),
        )  # fmt: skip
        if len(members) > 1:
            inside = set(members)
            kept = [n.result for n in members if not uses.escapes(n, inside) and not n.has(Trait.WRITE)]
            saved: Size = sum((2 * touched_bytes(value) for value in kept), start=0)
            _remark(context, region, len(members), saved, candidates.gained(members, piece))
    for piece, region in zip(pieces, made.values(), strict=True):
        for old, new in zip(piece.outputs, region.results, strict=True):
            graph.replace_value(old, new)
    for node in [n for group in groups for n in group if n.has(Trait.WRITE)]:
        graph.erase(node)  # the region writes instead
    before = {node: [made[node], node] for node in made}
    graph.reorder([n for node in uses.position for n in before.get(node, [node]) if n in graph])
    graph.erase_dead()
    graph.sort()


def _label(members: Sequence[Node], labels: Mapping[Node, str]) -> str:
    """Return a readable name: the fusions and matmuls of a region, in order."""
    words = [labels.get(n, "") or ("linear" if n.has(Trait.CONTRACTION) else "") for n in members]
    words = list(dict.fromkeys(filter(None, words)))
    if not words:
        heavy = dict.fromkeys(map(_word, (n for n in members if not n.is_op("cast"))))
        words = list(heavy)[:4] or ["cast"]
    return "_".join(words[:4])


def _word(node: Node) -> str:
    """Return the name of an operation; of a scatter with how it combines elements, such as ``scatter_add``."""
    return "_".join(filter(None, (node.op.name, node.attributes.get("combine", ""))))


def _remark(context: Context, region: Node, operations: int, saved: Size, gained: float) -> None:
    label = region.attributes["label"]
    context.remarks.add(
        "passed", "group", f"{label}: {operations} operations in one kernel", subject=label,
        sources=tuple(map(str, region.sources[:8])),
        figures={"bytes_saved": str(saved), "gain_us": round(gained * 1e6, 3)},
    )  # fmt: skip
