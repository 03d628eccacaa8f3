"""Patterns, matches, and matches that failed."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import sympy

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import Trait
from fusec.ir.types import F64, DType, Size
from fusec.rewriting.fusion import Clause

Number: TypeAlias = "float | int | bool"


@dataclass(eq=False)
class Pattern:
    """A canonical pattern graph and what its parts stand for."""

    name: str
    spelling: str
    graph: Graph
    tensors: dict[Value, str]
    """Graph inputs and the parameters they stand for."""
    leading: dict[Value, tuple[str, int]]
    """For a graph input with a starred dim: its name, and how many dims it stands for here."""
    scalars: dict[float, str]
    """The numbers that stand for scalar parameters."""
    returns: tuple[int, ...]
    """For each graph output, its position in what the declaration returns."""
    any_rank: bool
    """Whether the starred dims may be of any number, as nothing in the pattern depends on it."""
    clauses: Sequence[Clause] = ()

    def __post_init__(self) -> None:
        self.computing = [n for n in self.graph.nodes if not n.has(Trait.SOURCE)]
        self.size = len(self.computing)
        self.root = max(self.graph.outputs, key=lambda v: len(_cone(v)))  # from which most of it can be reached
        self.anchor = max(self.computing, key=_rarity) if self.computing else None

    @cached_property
    def fingerprint(self) -> Any:
        """Equal for patterns that match the same."""
        number: dict[Value, int] = {}
        rows: list[Any] = []
        for value, name in self.tensors.items():
            number[value] = len(number)
            rows.append((name, str(value.type)))

        def visit(value: Value) -> int:
            if value in number:
                return number[value]
            node = value.producer
            assert node is not None
            operands = [visit(v) for v in node.operands]
            if node.has(Trait.COMMUTATIVE):
                operands.sort()
            attributes = tuple((k, str(v)) for k, v in sorted(node.attributes.items()) if k not in ("body", "spelling"))
            rows.append((node.op.name, tuple(operands), attributes))
            for r in node.results:
                number[r] = len(number)
            return number[value]

        roots = tuple(visit(v) for v in self.graph.outputs)
        return (tuple(rows), roots)

    @property
    def is_telling(self) -> bool:
        """Whether it has an operation rare enough for an attempt that failed to be worth a remark."""
        return self.anchor is not None and _rarity(self.anchor) >= _RARE.index("contraction")


_RARE = (
    "cast", "mul", "add", "sub", "reshape", "permute", "expand", "div", "neg", "slice", "where", "contraction", "sum",
    "max", "concat", "exp", "region", "sqrt", "reciprocal", "sigmoid", "tanh", "rsqrt", "erf",
)  # fmt: skip


def _rarity(node: Node) -> int:
    return _RARE.index(node.op.name) if node.op.name in _RARE else len(_RARE)


def _cone(value: Value) -> set[Node]:
    found: set[Node] = set()
    stack = [value.producer]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [v.producer for v in node.operands]
    return found


@dataclass(frozen=True)
class Match:
    """One occurrence of a pattern."""

    pattern: Pattern
    nodes: dict[Node, Node]
    """Pattern nodes and the nodes they stand for."""
    values: dict[Value, Value]
    """Pattern values and the values they stand for."""
    scalars: dict[str, "Number | Value"]
    sizes: dict[sympy.Symbol, Size]

    def tensor(self, name: str) -> Value | None:
        """What a tensor parameter stands for; None where it is absent."""
        return next((self.values[v] for v, n in self.pattern.tensors.items() if n == name and v in self.values), None)

    @property
    def outputs(self) -> list[Value]:
        """What the outputs of the pattern stand for."""
        return [self.values[v] for v in self.pattern.graph.outputs]


_EDITS = {
    "operation": "compute {expected} in the place of {found}",
    "attribute": "write it with {expected}; there is {found}",
    "constant": "write {expected} in the place of {found}",
    "type": "cast to {expected}; there is {found}",
    "shape": "give it the shape of {expected}; there is {found}",
    "users": "keep it to this place ({expected}); it is {found}",
    "convex": "compute what lies between before or after it; there is {found}",
}
"""For each clause of a match, how a model is changed to fulfil it."""


@dataclass(frozen=True)
class MatchFailure:
    """The best attempt of a match that failed."""

    fusion: str
    spelling: str
    depth: int
    """How many nodes fitted."""
    size: int
    """How many the pattern has."""
    root: Node
    anchor: Node | None
    """What stood for the pattern's most telling node, if the attempt came that far."""
    node: Node | None
    """The node at fault."""
    clause: str
    """``operation``, ``attribute``, ``constant``, ``type``, ``shape``, ``users``, ``convex``, or a declared clause."""
    expected: str
    found: str
    sources: tuple[Source, ...] = ()

    @property
    def edit(self) -> str:
        """The change of the model that would let the match go on."""
        place = next((f" at {s.file.rpartition('/')[2]}:{s.line}" for s in self.sources if s.file), "")
        words = _EDITS.get(self.clause, "make it so that {expected}; there is {found}")
        return words.format(expected=self.expected, found=self.found) + place

    def __str__(self) -> str:
        return (
            f"{self.depth} of {self.size} operations fit (spelling {self.spelling}), then {self.clause}: "
            f"expected {self.expected}, found {self.found}"
        )


def word(node: Node) -> str:
    """What a node is called where people read it: its operation, or what it calls."""
    return str(node.attributes.get("target" if node.has(Trait.OPAQUE) else "fusion", node.op.name))


def same_number(a: Number, b: Number, dtype: DType) -> bool:
    """Whether two constants are one in the type that the operation computes in."""
    if a == b or (a != a and b != b):
        return True
    if not dtype.is_float or dtype == F64:
        return False
    try:
        return bool(struct.pack("f", a) == struct.pack("f", b))
    except OverflowError:
        return False
