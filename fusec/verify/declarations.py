"""Derived checks of a declared fusion: its spellings agree, and its pattern is found wherever it should be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

import torch

from fusec.frontend import trace
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import BF16, DTYPES, F16, F32, F64, DType, TensorType
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from fusec.rewriting.application import sorted_nodes
from fusec.rewriting.driver import cut
from fusec.rewriting.fusion import Clause, Dims, Fusion, Parameter
from fusec.rewriting.match import Match
from fusec.rewriting.pattern import choices
from fusec.verify.rewrites import check_rewrite

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Draw:
    """The distribution that the arguments of a declaration are drawn from."""

    dtype: DType = F32
    sizes: tuple[int, ...] = (5, 7, 11, 13)
    """Sizes of the named dims, in order of appearance."""
    numbers: tuple[float, ...] = ()
    """Values of the scalar parameters, in order; empty for random ones."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """By the name of a dim or a parameter, before all others; None for an operand that is absent."""


_SIZES = ((5, 7, 11, 13), (8, 16, 32, 64), (13, 11, 7, 5), (64, 32, 16, 8), (16, 16, 16, 16), (1, 1, 1, 1),
          (128, 256, 512, 1024), (1024, 512, 256, 128), (2048, 2048, 2048, 2048))  # fmt: skip
_NUMBERS = ((), (1.5, 2.5, 3.5, 4.5), (4.5, 3.5, 2.5, 1.5), (-1.5, -2.5, -3.5, -4.5), (1e-6, 1e-5, 1e-4, 1e-3),
            (300.0, 500.0, 700.0, 900.0), (1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0), (0.0, 0.0, 0.0, 0.0))  # fmt: skip


def draws(dtypes: Sequence[DType] = (F32,)) -> Iterator[Draw]:
    """Yield draws to find one that a clause accepts or refuses, those with fewest differences from the usual first."""
    everything = list(product(dtypes, _SIZES, _NUMBERS))
    usual = everything[0]
    everything.sort(key=lambda drawn: sum(a != b for a, b in zip(drawn, usual, strict=True)))
    yield from (Draw(*drawn) for drawn in everything)


def refused(clause: Clause, declared: Fusion[Any, Any], dtypes: Sequence[DType]) -> Iterator[Draw]:
    """Yield the draws that only this clause refuses: those its author declares, or else those found by search."""
    others = [c for c in declared.clauses if c is not clause]
    given = {k: v for k, v in clause.refuses.items() if k != "dtype"}
    tried = draws([DTYPES[clause.refuses["dtype"]]] if "dtype" in clause.refuses else dtypes)
    for draw in (replace(d, given=given) for d in tried):
        if not holds(clause, declared, draw) and all(holds(c, declared, draw) for c in others):
            yield draw


def accepted(declared: Fusion[Any, Any], dtype: DType = F32) -> Draw | None:
    """Return the first draw that satisfies every clause; None where there is none."""
    return next((d for d in draws((dtype,)) if all(holds(c, declared, d) for c in declared.clauses)), None)


def holds(clause: Clause, declared: Fusion[Any, Any], draw: Draw) -> bool:
    """Return whether a clause holds for the arguments of a draw."""
    seen = {}
    for p, argument in zip(declared.parameters, sample_arguments(declared.parameters, draw=draw), strict=True):
        if isinstance(argument, torch.Tensor):
            dtype = DTYPES[p.dims.dtype] if p.dims is not None and p.dims.dtype else draw.dtype
            argument = TensorType(dtype, tuple(argument.shape), argument.stride())
        seen[p.name] = argument
    return bool(clause.predicate(**{name: seen[name] for name in clause.parameters}))


def sample_arguments(
    parameters: Sequence[Parameter],
    dtype: DType = F32,
    present: Sequence[str] | None = None,
    seed: int = 0,
    batch: tuple[int, ...] = (2, 3),
    draw: Draw | None = None,
) -> list[Any]:
    """Return random arguments of small, distinct sizes for a declaration; None for operands that are not present."""
    draw = draw or Draw(dtype)
    first = next((p.dims.variadic for p in parameters if p.dims and p.dims.variadic), "")
    sampler = _Sampler(draw, batch, first, seed)
    arguments: list[Any] = []
    for p in parameters:
        if p.dims is None:
            usual = sampler.number()
            arguments.append(draw.given.get(p.name, usual))
        else:
            there = (present is None or p.name in present) and draw.given.get(p.name, True) is not None
            arguments.append(sampler.tensor(p.dims) if there else None)
    return arguments


class _Sampler:
    """Draws the arguments of one call; named dims keep their size from one argument to the next."""

    def __init__(self, draw: Draw, batch: tuple[int, ...], first: str, seed: int) -> None:
        self.draw, self.batch, self.first = draw, batch, first
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes: dict[str, int] = {}
        self.numbers = iter(draw.numbers)

    def size(self, word: str) -> int:
        """Return the size of a dim that is a name, a number or a multiple."""
        factor, _, name = word.rpartition("*")
        if name.isdigit():
            return int(name)
        usual = self.draw.sizes[len(self.sizes) % len(self.draw.sizes)]
        return int(factor or 1) * self.sizes.setdefault(name, self.draw.given.get(name, usual))

    def tensor(self, dims: Dims) -> torch.Tensor:
        """Draw a tensor; the starred dims of the first parameter that has any are ``batch``, others 1."""
        lead = self.batch if dims.variadic == self.first else (1,) * len(self.batch)
        shape = (*(lead if dims.variadic else ()), *map(self.size, dims.fixed))
        x = torch.randn(shape, generator=self.generator)
        if dims.dtype == "bool":
            return x > 0
        return x.to(torch_dtype(DTYPES[dims.dtype] if dims.dtype else self.draw.dtype))

    def number(self) -> float:
        """Draw a scalar, exact in every float type, so that it does not matter where a spelling rounds it."""
        return next(self.numbers, (32 + int(torch.randint(64, (), generator=self.generator))) / 256)


_MOST_TRACED = 1024
_traced: dict[tuple[Any, ...], Graph] = {}


def traced(function: Callable[..., Any], arguments: Sequence[Any], around: Wrap | None = None) -> Graph:
    """Return the graph of a declaration's function, in a wrapper if any, traced once for arguments of equal types."""
    types = ((a.dtype, a.shape, a.stride()) if isinstance(a, torch.Tensor) else (type(a), repr(a)) for a in arguments)
    key = (function, around, *types)
    if key not in _traced:
        if len(_traced) == _MOST_TRACED:
            _traced.clear()
        _traced[key] = trace(around(function) if around else function, arguments, symbolic=False)
    return _traced[key].copy()


def spellings_that_differ(declared: Fusion[Any, Any], draw: Draw, tolerance: float = 1e-5) -> list[str]:
    """The spellings whose results are not those of the declaration, and where.

    They run on random arguments, which shows differences in rounding; and their graphs are checked as a rewrite
    is, in float64 and on special values.
    """
    wrong = []
    for present in choices(declared.parameters):
        arguments = sample_arguments(declared.parameters, present=present, draw=draw)
        wanted = _as_list(declared.function(*arguments))
        graph = traced(declared.function, arguments)
        for name, function in declared.spellings.items():
            found = _as_list(function(*arguments))
            why = _difference(wanted, found, tolerance)
            if not why and function is not declared.function:
                result = check_rewrite(graph, traced(function, arguments), exact=False)
                why = "" if result else result.message
            wrong += [f"{name}({', '.join(present)}): {why}"] if why else []
    return wrong


def _difference(wanted: list[torch.Tensor], found: list[torch.Tensor], tolerance: float) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} results, not {len(wanted)}"
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {i} is {b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
        if not torch.allclose(b.double(), a.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"result {i} is off by {float((a.double() - b.double()).abs().nan_to_num().max()):.3g}"
    return ""


def contradiction(declared: Fusion[Any, Any], match: Match) -> str:
    """Return how a match differs from its declaration on the same operands; empty where it does not.

    Both are checked as a rewrite is (a constant may be cut to some digits), and run in f32, which
    shows differences in rounding.
    """
    bound: list[Any] = [match.tensor(p.name) if p.dims else match.scalars.get(p.name) for p in declared.parameters]
    if any(p.dims is None and not isinstance(b, int | float) for p, b in zip(declared.parameters, bound, strict=True)):
        return ""  # a number that the graph computes
    operands = list(dict.fromkeys(b for b in bound if isinstance(b, Value)))
    given = {v: torch.randn([int(n) for n in v.shape]).to(torch_dtype(v.dtype)) for v in operands}
    said = traced(declared.function, [given[b] if isinstance(b, Value) else b for b in bound])
    found, wanted = cut(operands, sorted_nodes(match), match.outputs), Graph(declared.name)
    inputs = {v: wanted.add_input(v.type) for v in operands}
    to = dict(zip(said.inputs, (inputs[b] for b in bound if isinstance(b, Value)), strict=True))
    wanted.splice(said.nodes, to)
    wanted.set_outputs([to[v] for v in said.outputs])
    result = check_rewrite(wanted, found, exact=False)
    if not result:
        return result.message
    if any(v.dtype.is_float and v.dtype != F32 for v in operands):
        return ""
    arguments = list(given.values())
    return _difference(evaluate(wanted, arguments), evaluate(found, arguments), 1e-4)


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


_WIDER = {BF16: F32, F16: F32, F32: F64}


def wrap_in_views(graph: Graph) -> None:
    """Pass every tensor input through views and casts that cancel."""
    for value in graph.inputs:
        if not isinstance(value.type, TensorType) or not value.users:
            continue
        readers = list(value.users)
        there = value
        if value.dtype in _WIDER:
            there = graph.add_node("cast", [there], {"dtype": _WIDER[value.dtype]}).result
            there = graph.add_node("cast", [there], {"dtype": value.dtype}).result
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
        and not n.is_alias
    ]  # fmt: skip


def _as_list(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]
