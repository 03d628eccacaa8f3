"""Patterns, matches, and matches that failed."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import sympy

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import Trait
from fusec.ir.types import F64, DType, Size
from fusec.rewriting.fusion import Clause
from fusec.rewriting.index import Kind, kind_of

Number: TypeAlias = "float | int | bool"


@dataclass(eq=False)
class Pattern:
    """A canonical pattern graph, and what its inputs and constants represent."""

    name: str
    spelling: str
    graph: Graph
    tensors: dict[Value, str]
    """Graph inputs and the parameters they represent."""
    leading: dict[Value, tuple[str, int]]
    """For a graph input with a starred dim: its name, and the number of dims it covers here."""
    scalars: dict[float, str]
    """The constants that represent scalar parameters."""
    returns: tuple[int, ...]
    """For each graph output, its position in the tuple that the declaration returns."""
    any_rank: bool
    """True where the pattern fits any number of starred dims, as nothing in it depends on that."""
    clauses: Sequence[Clause] = ()
    place: str = ""
    """File and line of the spelling."""

    def __post_init__(self) -> None:
        self.computing = [n for n in self.graph.nodes if not n.has(Trait.SOURCE)]
        self.size = len(self.computing)
        self.root = max(self.graph.outputs, key=lambda v: len(cone(v)))  # from which most of it can be reached
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

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The operations that a graph must have for the pattern to match."""
        return tuple(dict.fromkeys(map(kind_of, self.computing)))

    @property
    def is_distinctive(self) -> bool:
        """True where an operation is rare enough for a failed attempt to be worth a remark."""
        return self.anchor is not None and _rarity(self.anchor) >= _RARE.index("contraction")


_RARE = (
    "cast", "mul", "add", "sub", "reshape", "permute", "expand", "div", "neg", "slice", "where", "contraction", "sum",
    "max", "concat", "exp", "region", "sqrt", "reciprocal", "sigmoid", "tanh", "rsqrt", "erf",
)  # fmt: skip


def _rarity(node: Node) -> int:
    return _RARE.index(node.op.name) if node.op.name in _RARE else len(_RARE)


def cone(value: Value) -> set[Node]:
    """Return all nodes that a value depends on."""
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
    """Pattern nodes and the nodes they matched."""
    values: dict[Value, Value]
    """Pattern values and the values they matched."""
    scalars: dict[str, "Number | Value"]
    sizes: dict[sympy.Symbol, Size]

    def tensor(self, name: str) -> Value | None:
        """Return the value bound to a tensor parameter; None where it is absent."""
        return next((self.values[v] for v, n in self.pattern.tensors.items() if n == name and v in self.values), None)

    @property
    def outputs(self) -> list[Value]:
        """The values that match the outputs of the pattern."""
        return [self.values[v] for v in self.pattern.graph.outputs]


SAME_TENSOR = "both uses to read the same tensor"
"""Expected of two operands that a pattern reads from one value."""
_CHANGES = {"dim": "use {expected} instead of {found}", "constant": "write {expected} instead of {found}"}
"""For clauses of a match, the change of a model that fulfils it and keeps its operations."""
SAME, OTHER = "fuses, same values", "fuses, but changes values, so it isn't proposed"
"""The outcomes of an edit that was tried."""


@dataclass(frozen=True)
class MatchFailure:
    """The best attempt of a match that failed."""

    fusion: str
    spelling: str
    depth: int
    """Number of nodes that fitted."""
    size: int
    """Number of nodes of the pattern."""
    root: Node
    anchor: Node | None
    """The node that matched the pattern's anchor, its rarest operation, if the attempt came that far."""
    node: Node | None
    """The node at fault."""
    clause: str
    """``operation``, ``operand``, ``attribute``, ``dim``, ``constant``, ``type``, ``shape``, ``users``, ``convex``, or
    one that is declared."""
    expected: str
    found: str
    sources: tuple[Source, ...] = ()
    change: str = ""
    """The change of the model that would let the match continue, where it does not follow from the clause."""
    substitution: Any = None
    """A ``Substitution``, which makes the change in a graph, if the pattern is aligned as a whole."""
    outcome: str = ""
    """``SAME`` or ``OTHER`` where that was tried and fuses."""
    difference: str = ""
    """For ``OTHER``, a value that it changes, where that takes inputs out of the ordinary."""
    pattern_place: str = ""
    """File and line of the spelling."""

    @property
    def proposal(self) -> str:
        """The change of the model that would let the match continue, and its place; empty where none is known.

        Most operations of a pattern are the result of canonicalization, so no model could be written with them.
        """
        change = self.change or _CHANGES.get(self.clause, "").format(expected=self.expected, found=self.found)
        if not change and (self.outcome == SAME or self.difference):
            change = f"compute it as {self.fusion} does, {self.pattern_place},"
        place = place_of(self.sources)
        return change + (f" at {place}" if place else "") if change else ""

    @property
    def edit(self) -> str:
        """The proposed change, if it was tried: the model fuses with it, and computes the same values."""
        return self.proposal if self.outcome == SAME else ""

    @property
    def tried(self) -> str:
        """The outcome of trying the change; with the change, where that is no edit to make."""
        if self.outcome == OTHER:
            where = f" ({self.difference})" if self.difference else ""
            return f"{self.proposal}{where}: {OTHER}" if self.proposal else ""
        return self.outcome

    @property
    def places(self) -> tuple[str, ...]:
        """Source locations of the root, the anchor and the node at fault."""
        nodes = (n for n in (self.root, self.anchor, self.node) if n is not None)
        return tuple(dict.fromkeys(place for n in nodes for s in n.sources if (place := str(s))))

    def __str__(self) -> str:
        matched = "all" if self.depth == self.size else f"{self.depth} of"
        # Without an edit, the reader compares two lines.
        spelling = f"spelling {self.spelling}" + (f", {self.pattern_place}" if self.pattern_place else "")
        differs = (
            f"constant {self.found} should be {self.expected}"
            if self.clause == "constant"
            else f"expected {self.expected}, found {self.found}"
        )
        return f"{matched} {self.size} operations match{'' if self.proposal else f' ({spelling})'}; {differs}"


def word(node: Node) -> str:
    """Return the display name of a node: its operation, its fusion, or the ATen operation it calls."""
    return str(node.attributes.get("target" if node.has(Trait.OPAQUE) else "fusion", node.op.name))


def place_of(sources: Iterable[Source]) -> str:
    """Return the name of the file and the line of the first source that has them."""
    return next((f"{s.file.rpartition('/')[2]}:{s.line}" for s in sources if s.file), "")


def described(node: Node) -> str:
    """Return what the model calls where a node is computed, with the module and line."""
    called = next((s.op.split(".")[1].strip("_") for s in node.sources if s.op.count(".")), "")
    name = word(node) if node.has(Trait.REGION) or not called else called
    module = next((s.module.rpartition(".")[2] for s in node.sources if s.file), "")
    where = ", ".join(part for part in (module, place_of(node.sources)) if part)
    return f"`{name}`" + (f" ({where})" if where else "")


def shown(value: Value) -> str:
    """Return the description of a value: of its producer, or the name of the graph input."""
    return described(value.producer) if value.producer else f"input {value.name}"


def same_number(a: Number, b: Number, dtype: DType) -> bool:
    """Return whether two constants are equal in the dtype that the operation computes in."""
    if a == b or (a != a and b != b):
        return True
    if not dtype.is_float or dtype == F64:
        return False
    try:
        return bool(struct.pack("f", a) == struct.pack("f", b))
    except OverflowError:
        return False
