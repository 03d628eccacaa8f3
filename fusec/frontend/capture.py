"""Other ways into the importer: a plain function (for patterns), and an exported program."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from fusec.frontend.decompositions import KEPT_WHOLE, decompositions
from fusec.frontend.fx import import_fx
from fusec.frontend.recorder import recorded
from fusec.frontend.targets import is_mutable
from fusec.frontend.torch_internals import kept_whole, outside_tracing
from fusec.ir import types as t
from fusec.ir.graph import Graph


def trace(function: Callable[..., Any], sample_inputs: Sequence[Any], symbolic: bool = True) -> Graph:
    """Return the graph of a plain torch function, as a compile at inference would import it.

    Args:
        function: takes tensors and Python numbers, returns tensors.
        sample_inputs: arguments to trace with; Python numbers among them become constants.
        symbolic: turn sizes other than 0 and 1 into the symbols ``s0``, ``s1``, … in order of appearance
            (sizes that are equal in the samples are one symbol); otherwise all are as in the samples.
    """
    tensors = [a for a in sample_inputs if isinstance(a, torch.Tensor)]

    def of_tensors(*given: torch.Tensor) -> Any:
        rest = iter(given)
        return function(*(next(rest) if isinstance(a, torch.Tensor) else a for a in sample_inputs))

    gm = _traced(of_tensors, tensors, symbolic)
    if any(is_mutable(n) for n in gm.graph.nodes):
        gm = _traced(torch.func.functionalize(of_tensors, remove="mutations"), tensors, symbolic)
    return rename_symbols(import_fx(gm))


def _traced(function: Callable[..., Any], tensors: list[torch.Tensor], symbolic: bool) -> torch.fx.GraphModule:
    if not symbolic and all(x.is_meta for x in tensors):
        return recorded(function, tensors)
    from torch.fx.experimental.proxy_tensor import make_fx  # here, as it imports Dynamo

    mode: Literal["symbolic", "fake"] = "symbolic" if symbolic else "fake"
    with outside_tracing(), torch.inference_mode(), kept_whole(KEPT_WHOLE):
        return make_fx(function, decomposition_table=decompositions(), tracing_mode=mode)(*tensors)


def import_exported(program: Any) -> Graph:
    """Return the graph of a ``torch.export.ExportedProgram``, decomposed as a compile at inference would."""
    with torch.no_grad():
        table = {op: d for op, d in torch.export.default_decompositions().items() if op not in KEPT_WHOLE}
        plain = program.run_decompositions(table | decompositions())
    return import_fx(plain.graph_module)


def rename_symbols(graph: Graph) -> Graph:
    """The same graph with its symbols named ``s0``, ``s1``, … in the order in which its inputs mention them."""
    names: dict[Any, Any] = {}
    for value in graph.inputs:
        if isinstance(value.type, t.TensorType):
            for n in (*value.type.shape, *value.type.strides):
                for s in () if isinstance(n, int) else sorted(n.free_symbols, key=str):
                    names.setdefault(s, t.symbol(f"s{len(names)}"))

    def size(n: Any) -> Any:
        return n if isinstance(n, (int, float)) else t.simplify(n.subs(names, simultaneous=True))

    def renamed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(renamed(v) for v in value)
        if isinstance(value, t.TensorType):
            return t.TensorType(value.dtype, renamed(value.shape), renamed(value.strides), value.device)
        if isinstance(value, t.ScalarType):
            return value if value.expr is None else t.ScalarType(value.kind, size(value.expr))
        return size(value) if hasattr(value, "free_symbols") else value

    for value in [*graph.inputs, *(r for n in graph.nodes for r in n.results)]:
        value.type = renamed(value.type)
    for node in graph.nodes:
        node.attributes = {k: renamed(v) for k, v in node.attributes.items()}
    graph.output_types = [renamed(ty) for ty in graph.output_types]
    return graph
