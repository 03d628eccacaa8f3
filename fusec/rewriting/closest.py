"""The closest pattern of an operation that no pattern matched: both aligned, but for an edit or two.

The matcher starts at a root and stops at the first operation that differs, so it has nothing to say about a pattern
whose last operations differ. Here those that differ are skipped, and so are casts between float types.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeAlias

import sympy

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import TensorType, same_size
from fusec.rewriting.application import Patterns
from fusec.rewriting.index import Index, Kind
from fusec.rewriting.match import MatchFailure, Pattern, same_number, word
from fusec.rewriting.rule import Declaration
from fusec.rewriting.substitution import Substitution

RARE = ("exp", "sqrt", "reciprocal", "sigmoid", "tanh", "rsqrt", "erf")
"""The operations around which patterns are aligned, if one is the anchor of the pattern."""
_ARITHMETIC = Trait.POINTWISE | Trait.REDUCTION
_MOST_STEPS, _STEPS_OF_ALL = 4000, 50_000
"""The most steps of one alignment, and of all alignments of a graph: some tenths of a second."""
_MOST_ROOTS = 12
"""Values, read from an anchor on, that may be the root."""
_LEAST_DEPTH = 3
_ONE, _TWO = (1, 0.5), (2, 0.75)
"""The edits that are allowed, and the share of the pattern that has to fit then."""

Goals: TypeAlias = "tuple[tuple[Value, Value], Goals] | None"


@dataclass(frozen=True)
class Edit:
    """One difference between a pattern and a graph."""

    kind: str
    """``missing`` or ``extra`` in the graph, another ``operation``, or another ``constant``."""
    node: Node | None
    """The node of the graph at fault."""
    wanted: Node | None = None
    """The node of the pattern, unless the one of the graph is extra."""
    path: Value | None = None
    """The operand of an extra node that is aligned instead of it."""
    number: object = None
    """The expected number."""

    def moves(self, other: "Edit") -> bool:
        """Return whether two edits are one operation that is elsewhere."""
        missing, extra = sorted((self, other), key=lambda e: e.kind, reverse=True)
        if (missing.kind, extra.kind) != ("missing", "extra") or missing.wanted is None or extra.node is None:
            return False
        return missing.wanted.op is extra.node.op and _has_number(missing.wanted) == _has_number(extra.node)


@dataclass(frozen=True)
class _State:
    values: dict[Value, Value] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()

    def bound(self, pattern: Value, value: Value) -> "_State":
        return _State({**self.values, pattern: value}, self.edits)

    @property
    def moved(self) -> tuple[Edit, ...]:
        """The two edits that move an operation; empty where none do."""
        return next((pair for pair in combinations(self.edits, 2) if pair[0].moves(pair[1])), ())

    @property
    def cost(self) -> int:
        return len(self.edits) - bool(self.moved)


@dataclass
class _Budget:
    steps: int = _STEPS_OF_ALL


class _Alignment:
    """One pattern, aligned with a graph below a root."""

    def __init__(self, pattern: Pattern, anchor: Node, most: int, budget: _Budget) -> None:
        self.pattern, self.anchor, self.most, self.budget, self.steps = pattern, anchor, most, budget, 0

    def states(self, goals: Goals, state: _State) -> Iterator[_State]:
        """Yield every way to meet all goals, a linked list of (pattern value, value)."""
        self.steps += 1
        self.budget.steps -= 1
        if self.steps > _MOST_STEPS or self.budget.steps < 0:
            return
        if goals is None:
            yield state
            return
        (pattern, value), rest = goals
        pattern, value = _uncast(pattern), _uncast(value)
        yield from self.exact(pattern, value, rest, state)
        for edit, then in self.edits(pattern, value, rest, state):
            edited = _State(state.values, (*state.edits, edit))
            if edited.cost <= self.most:
                yield from self.states(then, edited)

    def exact(self, pattern: Value, value: Value, rest: Goals, state: _State) -> Iterator[_State]:
        """Yield the alignments in which a value fits."""
        bound, wanted, node = state.values.get(pattern), pattern.producer, value.producer
        if wanted is not None and wanted.has(Trait.SOURCE):
            if self.is_number(wanted, node, state):
                yield from self.states(rest, state.bound(pattern, value))
        elif bound is not None:
            if _same(bound, value):
                yield from self.states(rest, state)
        elif wanted is None:
            if _fits(pattern, value, self.pattern):
                yield from self.states(rest, state.bound(pattern, value))
        elif node is not None and wanted.op is node.op and self.is_allowed(wanted, node):
            for goals in _operands(wanted, node, rest):
                yield from self.states(goals, state.bound(pattern, value))

    def is_allowed(self, wanted: Node, node: Node) -> bool:
        """Return whether the anchor is aligned with its node, and attributes without sizes are equal."""
        if (wanted is self.pattern.anchor) != (node is self.anchor) or len(wanted.operands) != len(node.operands):
            return False
        known = [(a, node.attributes.get(k)) for k, a in wanted.attributes.items() if not isinstance(a, sympy.Expr)]
        return wanted.has(_ARITHMETIC) and all(a == b for a, b in known)

    def is_number(self, wanted: Node, node: Node | None, state: _State) -> bool:
        """Return whether a constant or size of the pattern is equal to a node; a scalar parameter is to any."""
        if node is None or not node.is_op("constant", "size"):
            return self.is_scalar(wanted) and node is None
        expected, found = self.number(wanted, state), _constant(node)
        if expected is None or isinstance(expected, sympy.Expr) or isinstance(found, sympy.Expr):
            return expected is None or bool(expected == found)
        return same_number(expected, found, wanted.result.dtype)  # type: ignore[arg-type]

    def is_scalar(self, wanted: Node) -> bool:
        value = wanted.attributes.get("value")
        return isinstance(value, float) and abs(value) in self.pattern.scalars

    def number(self, wanted: Node, state: _State) -> object:
        """Return the number that a constant or size of the pattern has; None where it may have any."""
        if not wanted.is_op("size"):
            return None if self.is_scalar(wanted) else wanted.attributes.get("value")
        expr = wanted.attributes["expr"]
        sizes = [
            (a, b)
            for p, v in state.values.items() if p.producer is None and p.shape and v.shape
            for a, b in zip(p.shape[::-1], v.shape[::-1], strict=False)
        ]  # fmt: skip
        return next((b for a, b in sizes if isinstance(a, sympy.Expr) and same_size(a, expr)), None)

    def edits(self, pattern: Value, value: Value, rest: Goals, state: _State) -> Iterator[tuple[Edit, Goals]]:
        """Yield the edits at a goal, with the goals that remain after each."""
        wanted, node = pattern.producer, value.producer
        if wanted is not None and wanted.has(Trait.SOURCE):
            if node is not None and node.is_op("constant", "size") and not self.is_number(wanted, node, state):
                yield Edit("constant", node, wanted, number=self.number(wanted, state)), rest
            return
        may_differ = (
            wanted is not None and pattern not in state.values
            and wanted.has(Trait.POINTWISE) and wanted is not self.pattern.anchor
        )  # fmt: skip
        if wanted is not None and may_differ and pattern is not _uncast(self.pattern.root):
            for operand in wanted.operands:
                if operand.producer is None or not operand.producer.has(Trait.SOURCE):
                    yield Edit("missing", node, wanted), ((operand, value), rest)
        if node is None or not node.has(Trait.POINTWISE) or node is self.anchor or node.has(Trait.SOURCE):
            return
        for at in dict.fromkeys(node.operands if state.values else ()):
            if isinstance(at.type, TensorType) and at.shape == value.shape:
                yield Edit("extra", node, path=at), ((pattern, at), rest)
        if wanted is not None and may_differ and wanted.op is not node.op:
            if len(wanted.operands) == len(node.operands):
                yield from ((Edit("operation", node, wanted), goals) for goals in _operands(wanted, node, rest))


def closest(graph: Graph, declarations: Iterable[Declaration], library: Patterns) -> Iterator[MatchFailure]:
    """Yield the best alignment of each rare operation of a graph, with those patterns that have such an anchor.

    A graph with very many of them is aligned from its beginning, as far as a budget of steps lasts.
    """
    anchors = [n for n in graph.nodes if n.is_op(*RARE)]
    if not anchors:
        return
    index = _Nearly(graph)
    patterns: dict[str, list[Pattern]] = {}
    for declared in declarations:
        for dtype in index.float_types:
            for pattern in library.patterns(declared, dtype, index):
                if pattern.anchor is not None and pattern.size >= _LEAST_DEPTH:
                    patterns.setdefault(pattern.anchor.op.name, []).append(pattern)
    budget = _Budget()
    for anchor in anchors:
        roots, candidates = _roots(anchor), patterns.get(anchor.op.name, ())
        for most, share in (_ONE, _TWO):
            alignments = [_Alignment(pattern, anchor, most, budget) for pattern in candidates]
            found = [f for a in alignments if (f := _best(a, roots)) and f.fits >= share]
            if budget.steps < 0:
                return
            if found:
                best = max(found, key=lambda f: (not f.state.edits, f.fits, f.depth, -len(f.state.edits)))
                if best.state.edits:
                    yield best.failure(anchor)
                elif (cast := best.cast) is not None:
                    yield best.cast_failure(anchor, cast)
                break


class _Nearly(Index):
    """An index that lets a pattern pass if the graph has its rare operations and all but two of the rest."""

    def holds_all(self, kinds: Iterable[Kind]) -> bool:
        """Return whether the graph has nearly all of these operations."""
        wanted = list(kinds)
        missing = [kind for kind in wanted if not super(_Nearly, self).holds_all((kind,))]
        rare = [kind for kind in wanted if kind[0] in RARE]
        return bool(rare) and len(missing) <= 2 and not set(rare) & set(missing)


@dataclass(frozen=True)
class _Found:
    """The alignment with most operations of a pattern."""

    pattern: Pattern
    root: Value
    state: _State

    @property
    def depth(self) -> int:
        """Number of operations that fit; casts do not count."""
        return sum(1 for p in self.state.values if p.producer and not p.producer.has(Trait.SOURCE))

    @property
    def size(self) -> int:
        """Number of operations of the pattern."""
        return sum(1 for n in self.pattern.computing if not n.is_op("cast"))

    @property
    def fits(self) -> float:
        """The share of operations that fit; 0 where they are too few to name."""
        return self.depth / self.size if self.depth >= _LEAST_DEPTH else 0

    @property
    def cast(self) -> Node | None:
        """The cast to the narrowest float type among the operations that fit, where the pattern has none."""
        pairs = ((p.producer, v.producer) for p, v in self.state.values.items())
        found = [cast for p, v in pairs if p is not None and v is not None and not any(_casts(p)) for cast in _casts(v)]
        return min(found, key=lambda cast: cast.result.dtype.bytes, default=None)

    def cast_failure(self, anchor: Node, cast: Node) -> MatchFailure:
        """Return an alignment in which a cast is all that differs as a failed match."""
        pattern, root, dtype = self.pattern, self.root.producer, cast.result.dtype.name
        assert root is not None
        return MatchFailure(
            pattern.name, pattern.spelling, self.depth, self.size, root, anchor, cast, "type",
            "one float type", f"a cast to {dtype}", cast.sources,
            f"leave out the cast to {dtype}", self.substitution(), pattern_place=pattern.place,
        )  # fmt: skip

    def reader(self, edit: Edit) -> Node | None:
        """Return the node that would read what is missing."""
        users = edit.wanted.users if edit.wanted else ()
        found = (self.state.values.get(r) for user in users for r in user.results)
        return next((value.producer for value in found if value is not None), None)

    def failure(self, anchor: Node) -> MatchFailure:
        """Return the alignment as a failed match."""
        pattern, moved = self.pattern, sorted(self.state.moved, key=lambda e: e.kind, reverse=True)
        edits = [e for e in self.state.edits if e not in moved]
        said = [*([_moved(moved[0], moved[1], pattern)] if moved else ()), *(self.said(e) for e in edits)]
        (clause, expected, found, change), *further = said
        for _, expected_too, found_too, _ in further:
            clause, found, change = "operation", f"{found}, and expected {expected_too}, found {found_too}", ""
        root = self.root.producer
        assert root is not None
        nodes = (n for edit in (*moved[1:], *edits) for n in (edit.node, self.reader(edit)))
        node = next((n for n in nodes if n is not None and n.sources), root)
        return MatchFailure(
            pattern.name, pattern.spelling, self.depth, self.size, root, anchor, node, clause, expected, found,
            node.sources, change, self.substitution(), pattern_place=pattern.place,
        )  # fmt: skip

    def substitution(self) -> Substitution | None:
        """Return how to make the edits in a graph; None where that is not known."""
        values, factors = dict(self.state.values), []
        moved = sorted(self.state.moved, key=lambda e: e.kind, reverse=True)
        if moved and moved[0].wanted and moved[1].node:
            values.update(zip(*(_numbers(edit) for edit in (moved[0].wanted, moved[1].node)), strict=False))
        if all(e.kind == "extra" and e.node and _is_factor(e.node, self.root) for e in self.state.edits):
            factors = [(e.node, e.path) for e in reversed(self.state.edits) if e.node and e.path]
        known = {p: v for p, v in values.items() if p.producer is None or p.producer.has(Trait.SOURCE)}
        found = Substitution(self.pattern, self.root, known, tuple(factors))
        return found if found.is_possible else None

    def said(self, edit: Edit) -> tuple[str, str, str, str]:
        """Return an edit as a clause, what is expected and found, and the change of a number or of an order."""
        pattern = self.pattern
        found = _shown(edit.node, pattern) if edit.node else "a graph input"
        if edit.kind == "constant":
            assert edit.node is not None
            expected, found = _number(edit.number), _number(_constant(edit.node))
            return "constant", expected, found, f"write {expected} instead of {found}"
        if edit.wanted is None:
            is_factor = edit.node is not None and _is_factor(edit.node, self.root)
            return "operation", f"no {found}", "one", f"move {found} out of {pattern.name}" if is_factor else ""
        return "operation", _shown(edit.wanted, pattern), "none" if edit.kind == "missing" else found, ""


def _numbers(node: Node) -> list[Value]:
    """Return the operands of a node that are numbers."""
    return [v for v in node.operands if v.producer is not None and v.producer.has(Trait.SOURCE)]


def _casts(node: Node) -> Iterator[Node]:
    """Yield the casts between float types that an operation reads."""
    for value in node.operands:
        cast = value.producer
        if cast is not None and cast.is_op("cast") and cast.operands[0].dtype.is_float and value.dtype.is_float:
            yield cast


def _best(alignment: _Alignment, roots: list[Value]) -> _Found | None:
    """Return the best alignment of a pattern, below one of these roots; one without edits if there is one."""
    pattern = alignment.pattern
    assert pattern.anchor is not None
    found = [
        _Found(pattern, root, state)
        for root in roots
        for state in alignment.states(((pattern.root, root), None), _State())
        if pattern.anchor.results[0] in state.values
    ]
    return max(found, key=lambda f: (not f.state.edits, f.depth, -len(f.state.edits)), default=None)


def _is_factor(node: Node, root: Value) -> bool:
    """Return whether an operation scales the result of the root, so that it may as well follow it."""
    while node.is_op("mul", "div") and node.result is not root and len(node.users) == 1:
        (user,) = node.users
        if user.is_op("div") and user.operands[1] is node.result:
            return False
        node = user
    return node.is_op("mul", "div") and node.result is root


def _moved(missing: Edit, extra: Edit, pattern: Pattern) -> tuple[str, str, str, str]:
    """Return two edits that move an operation as one; the model may move its eps."""
    assert missing.wanted is not None and extra.node is not None
    what, before = _shown(missing.wanted, pattern), next(iter(missing.wanted.users), None)
    function = before.op.name if before and len(before.operands) == 1 else ""
    read = [_uncast(v).producer for v in extra.node.operands]
    if function and any(n is not None and n.is_op(function) for n in read):
        place, found = f"inside `{function}`", "it outside"
    else:
        after = next(iter(extra.node.users), None)
        place = f"before `{before.op.name}`" if before else "at the end"
        found = f"it before `{word(after)}`" if after else "it at the end"
    return "operation", f"{what} {place}", found, f"move {what} {place}" if _has_scalar(missing.wanted, pattern) else ""


def _shown(node: Node, pattern: Pattern) -> str:
    """Return the operation of a node, a number or another operation that it takes, and what the model calls there."""
    text = f"`{word(node)}`"
    if len(node.operands) == 2:
        operand = max(node.operands, key=lambda v: v.producer is not None and v.producer.has(Trait.SOURCE))
        text += f" with {_operand(node.operands[1] if not _has_number(node) else operand, pattern)}"
    called = next((s.op.split(".")[1] for s in node.sources if s.op.count(".")), "")
    own = pattern.name in called or called.rstrip("_") in (node.op.name, word(node))
    return text if own or not called else f"{text}, as in `{called}`"


def _constant(node: Node) -> Any:
    """Return the number of a constant, or the expression of a size."""
    return node.attributes.get("value", node.attributes.get("expr"))


def _number(number: object) -> str:
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) < 1e9
    return str(int(number)) if is_whole else str(number)  # type: ignore[call-overload]


def _operand(value: Value, pattern: Pattern) -> str:
    node = value.producer
    if node is None:
        return value.name
    if not node.has(Trait.SOURCE):
        return f"`{word(node)}`"
    number = _constant(node)
    return pattern.scalars.get(abs(number), _number(number)) if isinstance(number, float) else str(number)


def _operands(wanted: Node, node: Node, rest: Goals) -> Iterator[Goals]:
    """Yield the goals for the operands of two nodes, in any order they may have."""
    for operands in (node.operands, node.operands[::-1]) if wanted.has(Trait.COMMUTATIVE) else (node.operands,):
        goals = rest
        for goal in reversed(list(zip(wanted.operands, operands, strict=True))):
            goals = (goal, goals)
        yield goals


def _fits(parameter: Value, value: Value, pattern: Pattern) -> bool:
    """Return whether a value has the dtype of a parameter, and a rank that it may have."""
    if not isinstance(value.type, TensorType) or value.dtype != parameter.dtype:
        return False
    name, count = pattern.leading.get(parameter, ("", 0))
    rank = len(parameter.shape) - count
    return len(value.shape) >= rank if name else len(value.shape) == rank


def _uncast(value: Value) -> Value:
    """Return a value without the casts between float types that it is the result of."""
    while value.producer is not None and value.producer.is_op("cast"):
        narrow = value.producer.operands[0]
        if not (narrow.dtype.is_float and value.dtype.is_float):
            break
        value = narrow
    return value


def _same(a: Value, b: Value, depth: int = 6) -> bool:
    """Return whether two values are computed alike, up to casts: the mean by hand and the mean inside a variance."""
    a, b = _uncast(a), _uncast(b)
    if a is b or a.producer is None or b.producer is None or depth == 0:
        return a is b
    one, other = a.producer, b.producer
    if one.op is not other.op or len(one.operands) != len(other.operands) or not one.has(_ARITHMETIC | Trait.SOURCE):
        return False
    alike = all(v == other.attributes.get(k) for k, v in one.attributes.items() if k != "dtype")
    return alike and all(_same(x, y, depth - 1) for x, y in zip(one.operands, other.operands, strict=True))


def _has_number(node: Node) -> bool:
    return bool(_numbers(node))


def _has_scalar(node: Node, pattern: Pattern) -> bool:
    """Return whether an operation takes a scalar parameter, such as eps."""
    numbers = [v.producer.attributes["value"] for v in node.operands if v.producer and v.producer.is_op("constant")]
    return any(isinstance(number, float) and abs(number) in pattern.scalars for number in numbers)


def _roots(anchor: Node) -> list[Value]:
    """Return the values that are computed from an anchor, the nearest first."""
    found: list[Value] = [anchor.results[0]]
    for value in found:  # extended while it is read
        users = [u for u in value.users if u.has(_ARITHMETIC)]
        found += [r for u in users for r in u.results if r not in found]
        if len(found) >= _MOST_ROOTS:
            break
    return found[:_MOST_ROOTS]
