"""Lookups in tables that are computed, such as packed embeddings, and of a matrix for each row."""

from itertools import islice

from fusec.analysis.memory import touched_bytes
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import I64, estimate, product, same_size
from fusec.passes.canonicalize.rows import RowsOf, computed_from, has_uneven_parts
from fusec.rewriting.driver import simplifies

_MOST_OPERATIONS = 64
"""The most operations that unpack a table."""
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@simplifies("opaque", exact=False, conditional=True)
def grouped_products(graph: Graph, node: Node) -> Value | None:
    """A library's grouped GEMM is one of rows whose matrix is looked up: that of the first group to end behind a row.

    Its result is undefined for rows beyond the last end.
    """
    if node.attributes["target"] not in _GROUPED or len(node.operands) != 3 or node.attributes["kwargs"]:
        return None
    x, matrices, ends = node.operands
    device, rows, count = x.tensor.device, x.shape[0], matrices.shape[0]
    if (x.tensor.rank, matrices.tensor.rank, ends.tensor.rank) != (2, 3, 1) or ends.producer is None:
        return None
    if not isinstance(count, int) or has_uneven_parts(matrices) or not same_size(x.shape[-1], matrices.shape[-2]):
        return None
    numbers = graph.add_node("iota", [], {"size": rows, "dtype": I64, "device": device}).result
    numbers = graph.add_node("reshape", [numbers], {"shape": (rows, 1)}).result
    ended = graph.add_node("le", [graph.add_node("cast", [ends], {"dtype": I64}).result, numbers]).result
    passed = graph.add_node("sum", [graph.add_node("cast", [ended], {"dtype": I64}).result], {"dims": (-1,)}).result
    group = graph.add_node("minimum", [passed, graph.constant(count - 1, I64, device)]).result
    group = graph.add_node("reshape", [group], {"shape": (rows,)}).result
    own = graph.add_node("take", [matrices, group], {"dim": -3}).result
    return graph.add_node("contraction", [x, own], {"spec": "az,azb->ab"}).result


@simplifies("take", conditional=True)
def looked_up_rows(graph: Graph, node: Node) -> Value | None:
    """Rows are looked up in what a packed table is computed from, and only these are computed."""
    (table, indices), dim = node.operands, node.attributes["dim"]
    count, taken = product(indices.shape), list[Value]()
    few = estimate(count) <= estimate(table.shape[dim])
    if not _is_packed(table) or not (few or _is_stack_of_a_grouped_gemm(table, dim)):
        return None  # many would be computed more than once
    flat = indices if indices.tensor.rank == 1 else graph.add_node("reshape", [indices], {"shape": (count,)}).result

    def look_up(value: Value, at: int) -> Value:
        taken.append(value)
        return graph.add_node("take", [value, flat], {"dim": at}).result

    found = RowsOf(graph, count, look_up).of(table, dim)
    if found is None or table in taken:
        return None
    return graph.add_node("reshape", [found], {"shape": node.result.shape}).result


def _is_stack_of_a_grouped_gemm(table: Value, dim: int) -> bool:
    """Return whether a table is a stack of matrices that a grouped GEMM unpacks, each of them once for all its rows."""
    inputs = (v for v in computed_from(table) if v.producer is None)
    loaded = all(v.dtype.kind != "other" for v in inputs)  # float8 is looked up by a library's call, which copies
    return loaded and table.tensor.rank == 3 and dim == -3


def _is_packed(table: Value) -> bool:
    """Return whether a table is computed element by element from inputs of the graph with fewer bytes."""
    found = list(islice(computed_from(table), _MOST_OPERATIONS))
    element = Trait.POINTWISE | Trait.VIEW | Trait.LOOKUP | Trait.SOURCE
    if len(found) == _MOST_OPERATIONS or not all(v.producer is None or v.producer.has(element) for v in found):
        return False
    inputs = [v for v in found if v.producer is None]
    sizes = sum(touched_bytes(v) for v in inputs), touched_bytes(table)
    return bool(inputs) and all(isinstance(n, int) for n in sizes) and sizes[0] < sizes[1]
