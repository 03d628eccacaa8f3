"""Derived checks of a declared fusion: its spellings agree, and its pattern is found wherever it should be."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import BF16, F32, DType, TensorType
from fusec.rewriting.fusion import Dims, Fusion, Parameter
from fusec.rewriting.pattern import choices

_TORCH = {F32: torch.float32, BF16: torch.bfloat16}


def sample_arguments(
    parameters: Sequence[Parameter],
    dtype: DType = F32,
    present: Sequence[str] | None = None,
    seed: int = 0,
    batch: tuple[int, ...] = (2, 3),
) -> list[Any]:
    """Random arguments of small, distinct sizes for a declaration; None for operands that are not present."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, int] = {}
    first = next((p.dims.variadic for p in parameters if p.dims and p.dims.variadic), "")

    def size(word: str) -> int:
        factor, _, name = word.rpartition("*")
        if name.isdigit():
            return int(name)
        return int(factor or 1) * sizes.setdefault(name, (5, 7, 11, 13)[len(sizes) % 4])

    def tensor(dims: Dims) -> torch.Tensor:
        lead = batch if dims.variadic == first else (1,) * len(batch)
        shape = (*(lead if dims.variadic else ()), *map(size, dims.fixed))
        x = torch.randn(shape, generator=generator)
        if dims.dtype == "bool":
            return x > 0
        return x.to(_TORCH[dtype])

    given: list[Any] = []
    for p in parameters:
        if p.dims is None:
            given.append(0.125 + 0.25 * torch.rand((), generator=generator).item())
        else:
            given.append(tensor(p.dims) if present is None or p.name in present else None)
    return given


def spellings_that_differ(declared: Fusion[Any, Any], dtype: DType = F32, tolerance: float = 1e-5) -> list[str]:
    """The spellings whose results are not those of the declaration, on random arguments."""
    wrong = []
    for present in choices(declared.parameters):
        arguments = sample_arguments(declared.parameters, dtype, present)
        wanted = _as_list(declared.function(*arguments))
        for name, function in declared.spellings.items():
            found = _as_list(function(*arguments))
            close = len(found) == len(wanted) and all(
                a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
                for a, b in zip(found, wanted, strict=True)
            )
            wrong += [] if close else [f"{name}({', '.join(present)})"]
    return wrong


def in_company(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with other operations before and after it, so that its edges are inside a graph."""

    def larger(*given: Any) -> Any:
        changed = [torch.sin(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in given]
        return [torch.cos(r) for r in _as_list(function(*changed))]

    return larger


def commute(graph: Graph) -> None:
    """Swap the operands of every commutative node."""
    for node in graph.nodes:
        if node.has(Trait.COMMUTATIVE):
            graph.replace_operands(node, node.operands[::-1])


def wrap_in_views(graph: Graph) -> None:
    """Give every tensor input a detour over views and casts that change nothing."""
    for value in graph.inputs:
        if not isinstance(value.type, TensorType) or not value.users:
            continue
        readers = list(value.users)
        there = value
        if value.dtype == BF16:
            there = graph.add_node("cast", [there], {"dtype": F32}).result
            there = graph.add_node("cast", [there], {"dtype": BF16}).result
        there = graph.add_node("reshape", [there], {"shape": (1, *value.shape)}).result
        there = graph.add_node("reshape", [there], {"shape": value.shape}).result
        if len(value.shape) > 1:
            swap = (*range(len(value.shape) - 2), len(value.shape) - 1, len(value.shape) - 2)
            there = graph.add_node("permute", [there], {"dims": swap}).result
            there = graph.add_node("permute", [there], {"dims": swap}).result
        for reader in readers:
            graph.replace_operands(reader, [there if v is value else v for v in reader.operands])
    graph.sort()


def regions_named(graph: Graph, name: str) -> list[Node]:
    """The declared regions of a fusion in a graph, those inside other regions included."""
    found: list[Node] = []
    for node in graph.nodes:
        if node.is_op("region"):
            found += [node] if node.attributes.get("fusion") == name else []
            found += regions_named(node.body, name)
    return found


def interior_values(graph: Graph) -> list[Value]:
    """The values inside a pattern that no one else may read: neither outputs, nor as cheap as views and casts."""
    kept = set(graph.outputs)
    return [
        r
        for n in graph.nodes
        for r in n.results
        if r not in kept and not n.has(Trait.SOURCE) and not n.is_op("cast")
        and (not n.has(Trait.VIEW) or n.is_op("concat"))
    ]  # fmt: skip


def _as_list(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]
