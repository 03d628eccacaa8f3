"""The text of a graph, which ``fusec.ir.parser`` parses back into an equal graph.

``%12: bf16[s0, 4096] = mul(%11, 0.5)   # layers.0.mlp, modeling_llama.py:271 (aten.mul.Tensor) "x = x * 0.5"``
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import sympy
from sympy.printing.str import StrPrinter

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.sources import print_source, short_source, union_of_sources
from fusec.ir.types import DTYPES, DType, OtherType, ScalarType, Size, TensorType, Type, contiguous_strides

_INDENT = "  "
_WIDTH = 100
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_quoted = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder for each string


Sources: TypeAlias = "bool | Literal['short']"
"""Print source locations at the end of lines: in full, which parses back, or short, which is easier to read."""
Naming: TypeAlias = Callable[[Graph], Mapping[Value, str]]
"""Returns a name for each value that is printed."""


def print_graph(graph: Graph, *, sources: Sources = True, names_of: Naming | None = None) -> str:
    """Return the text of a graph; with ``sources`` in full it parses back to an equal graph.

    Args:
        graph: the graph.
        sources: whether lines end with source locations.
        names_of: names the values of the graph and of each body; ``name_values`` by default.
    """
    return f"graph {_print_body(graph, 0, sources, names_of or name_values)}\n"


def print_node(
    node: Node, names: Mapping[Value, str], *, sources: Sources = True, depth: int = 0, names_of: Naming | None = None
) -> str:
    """Return the text of one node (of a region: all its lines); values missing in ``names`` print as ``%?``."""
    pad = _INDENT * depth
    results = ", ".join(f"%{names.get(r, '?')}: {print_type(r.type)}" for r in node.results)
    operands = ", ".join(_operands(node, names))
    attributes = {k: v for k, v in node.attributes.items() if not isinstance(v, Graph)}
    shown = f" {{{', '.join(f'{k}={print_attribute(v)}' for k, v in attributes.items())}}}" if attributes else ""
    line = f"{pad}{results}{' = ' if results else ''}{node.op.name}({operands}){shown}"
    comment = _comment(node, sources) if sources else ""
    body = node.attributes.get("body")
    if isinstance(body, Graph):
        return f"{line} {_print_body(body, depth, sources, names_of or name_values, comment)}"
    return line + comment


def name_values(graph: Graph) -> dict[Value, str]:
    """Return a unique name for every value that is printed: its hint, or a number. Inlined constants have none."""
    names: dict[Value, str] = {}
    taken: set[str] = set()
    outputs = set(graph.outputs)
    unnamed: list[Value] = []
    values = [*graph.inputs, *(r for n in graph.nodes if not is_inline(n, outputs) for r in n.results)]
    for value in values:
        if not _NAME.fullmatch(value.name):
            unnamed.append(value)
            continue
        name, count = value.name, 0
        while name in taken:
            count += 1
            name = f"{value.name}_{count}"
        taken.add(name)
        names[value] = name
    names.update((value, str(i)) for i, value in enumerate(unnamed))
    return names


def is_inline(node: Node, outputs: Iterable[Value] = ()) -> bool:
    """Return whether a node is a constant that is printed inside its readers, not on a line of its own."""
    return (
        node.op.name == "constant"
        and type(node.attributes.get("value")) in (int, float, bool)
        and node.attributes.keys() <= {"value", "dtype", "device"}
        and bool(node.results[0].users)
        and node.results[0] not in outputs
    )


def positions_as_read(graph: Graph) -> dict[Node, int]:
    """Return the position of each node in the graph that the text parses to: equal numbers are one node there."""
    outputs, positions, count = set(graph.outputs), dict[Node, int](), 0
    numbers = dict[tuple[Any, ...], int]()
    for node in graph.nodes:
        if is_inline(node, outputs):
            continue
        for number in (v.producer for v in node.operands):
            if number is not None and number not in positions and is_inline(number, outputs):
                value, dtype = number.attributes["value"], number.attributes["dtype"]
                key = (type(value), repr(value), dtype, number.attributes.get("device", "cpu"))
                positions[number] = numbers.setdefault(key, count)
                count += positions[number] == count
        positions[node], count = count, count + 1
    return positions


@lru_cache(maxsize=8192)
def print_type(type: Type) -> str:
    """Return the text of a type: ``bf16[s0, 64] @(64, 1) cuda:0``; row-major strides and the CPU are left out."""
    if isinstance(type, ScalarType):
        return type.kind if type.expr is None else f"{type.kind}({print_size(type.expr)})"
    if isinstance(type, OtherType):
        return f"other<{json.dumps(type.name)}>"
    layout = "" if type.strides == contiguous_strides(type.shape) else f" @({_sizes(type.strides)})"
    device = "" if type.device == "cpu" else f" {type.device}"
    return f"{print_dtype(type.dtype)}[{_sizes(type.shape)}]{layout}{device}"


def print_dtype(dtype: DType) -> str:
    """Return the name of a dtype; with its kind and width where the IR does not compute on it."""
    return dtype.name if DTYPES.get(dtype.name) == dtype else f"{dtype.name}<{dtype.kind}, {dtype.bytes}>"


def print_size(size: Size) -> str:
    """Return the text of a size."""
    return str(size) if isinstance(size, int) else _print_expression(size)


def print_attribute(value: Any) -> str:
    """Return the text of an attribute's value; ``$0`` means operand 0 in the arguments of an opaque call."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, DType):
        return print_dtype(value)
    if isinstance(value, (TensorType, ScalarType, OtherType)):
        return print_type(value)
    if isinstance(value, tuple):
        return _print_tuple(value)
    if isinstance(value, Graph):
        return f"<graph {value.name}>"
    return _print_expression(value) if isinstance(value, sympy.Basic) else f"<{value!r}>"


def _print_body(graph: Graph, depth: int, sources: Sources, names_of: Naming, comment: str = "") -> str:
    names, outputs = names_of(graph), set(graph.outputs)
    pad = _INDENT * (depth + 1)
    inputs = [f"%{names[v]}: {'frozen ' if v.frozen else ''}{print_type(v.type)}" for v in graph.inputs]
    header = ", ".join(inputs)
    if len(header) > _WIDTH:
        header = f"\n{pad}{_INDENT}" + f",\n{pad}{_INDENT}".join(inputs) + f"\n{pad}"
    name = graph.name if _NAME.fullmatch(graph.name) else json.dumps(graph.name)
    lines = [f"{name}({header}) {{{comment}"]
    lines += [
        print_node(node, names, sources=sources, depth=depth + 1, names_of=names_of)
        for node in graph.nodes
        if not is_inline(node, outputs)
    ]
    lines += [f"{pad}return {', '.join(_returned(graph, names))}".rstrip(), _INDENT * depth + "}"]
    return "\n".join(lines)


def _returned(graph: Graph, names: Mapping[Value, str]) -> list[str]:
    promised = [*graph.output_types, *(v.type for v in graph.outputs[len(graph.output_types) :])]
    return [
        f"%{names.get(value, '?')}" + ("" if type == value.type else f" as {print_type(type)}")
        for value, type in zip(graph.outputs, promised, strict=False)
    ]


def number_context(op: str, operands: Iterable[Value | None]) -> TensorType | None:
    """Return the type of the last tensor among the named operands (not counting the condition of a ``where``).

    A number among them has its dtype and device, unless it is printed with its own.
    """
    named = [None if v is None else v.type for v in operands]
    tensors = [type for type in named[op == "where" :] if isinstance(type, TensorType)]
    return tensors[-1] if tensors else None


def _operands(node: Node, names: Mapping[Value, str]) -> list[str]:
    if all(v in names for v in node.operands):
        return [f"%{names[v]}" for v in node.operands]
    context = number_context(node.op.name, (v if v in names else None for v in node.operands))
    return [f"%{names[v]}" if v in names else _print_constant(v, context) for v in node.operands]


def _print_constant(value: Value, context: TensorType | None) -> str:
    """Return the text of a number, with its dtype and device where they differ from the last named tensor operand's."""
    producer = value.producer
    if producer is None or not is_inline(producer):
        return "%?"
    number, dtype = print_attribute(producer.attributes["value"]), producer.attributes["dtype"]
    device = producer.attributes.get("device", "cpu")
    usual = context.device if context else "cpu"
    place = "" if device == usual else f"@{device}"
    return number if context and dtype == context.dtype and not place else f"{number}:{print_dtype(dtype)}{place}"


def _print_tuple(value: tuple[Any, ...]) -> str:
    if len(value) == 2 and value[0] == "%" and type(value[1]) is int and value[1] >= 0:
        return f"${value[1]}"
    if len(value) == 2 and value[0] == "list" and isinstance(value[1], tuple):
        return f"[{', '.join(map(print_attribute, value[1]))}]"
    return f"({', '.join(map(print_attribute, value))}{',' if len(value) == 1 else ''})"


def _sizes(sizes: tuple[Size, ...]) -> str:
    return ", ".join(map(print_size, sizes))


class _Expressions(StrPrinter):  # type: ignore[misc]
    """Sympy's printer, but with all the digits of a float."""

    def _print_Float(self, expr: sympy.Float) -> str:
        return repr(float(expr))


@lru_cache(maxsize=8192)
def _print_expression(expression: sympy.Basic) -> str:
    return str(_Expressions().doprint(expression))


def _comment(node: Node, sources: Sources) -> str:
    body = node.attributes.get("body")
    usual = union_of_sources(body) if isinstance(body, Graph) else ()
    if node.sources == usual:
        return ""
    if sources == "short":
        return f"   # {'; '.join(dict.fromkeys(map(short_source, node.sources)))}" if node.sources else ""
    return f"   # {'; '.join(map(print_source, node.sources)) or '-'}"


Graph.printer = print_graph
