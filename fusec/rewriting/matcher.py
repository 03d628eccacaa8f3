"""The matcher: a rooted search with backtracking over commuted operands, which reports the best failed attempt."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size, TensorType, same_size, simplify
from fusec.rewriting.match import SAME_TENSOR, Match, MatchFailure, Number, Pattern, described, same_number, shown, word

_FEW = 3
"""Fewer operations alone do not suggest a pattern."""


@dataclass
class Matcher:
    """One pattern, tried on the nodes of one graph."""

    pattern: Pattern
    graph: Graph
    outputs: set[Value]
    """The outputs of the graph."""
    values: dict[Value, Value] = field(default_factory=dict)
    nodes: dict[Node, Node] = field(default_factory=dict)
    taken: dict[Node, Node] = field(default_factory=dict)
    scalars: dict[str, "Number | Value"] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, Size] = field(default_factory=dict)
    leading: dict[str, tuple[Size, ...]] = field(default_factory=dict)
    deferred: list[tuple[sympy.Expr, "Size | Number", Node]] = field(default_factory=list)
    """Sizes to compare once all symbols are bound."""

    def match(self, root: Value) -> Match | MatchFailure:
        """Match with the pattern's root at ``root``."""
        for state in (self.values, self.nodes, self.taken, self.scalars, self.sizes, self.leading, self.deferred):
            state.clear()
        assert root.producer is not None
        self.start, pattern = root.producer, self.pattern
        self.best = MatchFailure(pattern.name, pattern.spelling, -1, pattern.size, self.start, None, None, "", "", "")
        if self.solve(((self.pattern.root, root), None)):
            return Match(self.pattern, dict(self.nodes), dict(self.values), dict(self.scalars), dict(self.sizes))
        sources = (self.best.node or self.start).sources or self.start.sources
        return replace(self.best, sources=sources, pattern_place=pattern.place)

    def fail(self, node: Node | None, clause: str, expected: object, found: object, change: str = "") -> bool:
        """Record the attempt if it is the best so far, and return False.

        The best has most operations of those that reached the anchor, if any did.
        """
        depth = sum(1 for n in self.nodes if not n.has(Trait.SOURCE))
        anchor = self.nodes.get(self.pattern.anchor) if self.pattern.anchor else None
        if (anchor is not None, depth) > (self.best.anchor is not None, self.best.depth):
            self.best = replace(
                self.best, depth=depth, anchor=anchor, node=node, clause=clause, expected=str(expected),
                found=_text(found), change=change,
            )  # fmt: skip
        return False

    # Each step below binds, continues with the remaining goals, and undoes its bindings if they fail.

    def solve(self, goals: Any) -> bool:
        """Return whether all goals, a linked list of (pattern value, value), can be met."""
        if goals is None:
            return self.finish()
        (pattern, value), rest = goals
        bound = self.values.get(pattern)
        if bound is not None:
            if bound is value:
                return self.solve(rest)
            if len(self.nodes) < _FEW and not (_is_computed_from(bound, value) or _is_computed_from(value, bound)):
                return False  # a gate with another tensor is no attempt at the pattern
            return self.fail(value.producer, "operand", SAME_TENSOR, (bound, value))
        if pattern in self.pattern.tensors:
            return self.bind(pattern, value, rest)
        assert pattern.producer is not None
        if pattern.producer.is_op("constant", "size"):
            return self.match_number(pattern, value, rest)
        if value.producer is None:
            return self.fail(None, "operation", word(pattern.producer), value)
        return self.match_node(pattern, value, rest)

    def bind(self, pattern: Value, value: Value, rest: Any) -> bool:
        """Bind a parameter to a value."""
        if not isinstance(value.type, TensorType) or value.type.dtype != pattern.dtype:
            return self.fail(value.producer, "type", pattern.type, value.type)
        sizes, leading, due = dict(self.sizes), dict(self.leading), len(self.deferred)
        if not self.fit_shape(pattern, value):
            name = self.pattern.tensors[pattern]
            self.fail(value.producer, "shape", f"{name}: {pattern.type}", value.type)
        else:
            self.values[pattern] = value
            if self.solve(rest):
                return True
            del self.values[pattern]
        self.sizes, self.leading = sizes, leading
        del self.deferred[due:]
        return False

    def fit_shape(self, pattern: Value, value: Value) -> bool:
        """Return whether the shape of a value fits that of a parameter; binds size symbols."""
        wanted, shape = pattern.shape, value.shape
        name, count = self.pattern.leading.get(pattern, ("", 0))
        if name and self.pattern.any_rank:
            fixed = len(wanted) - count
            if len(shape) < fixed:
                return False
            cut = len(shape) - fixed
            if name in self.pattern_names() and not self.same_leading(name, shape[:cut]):
                return False
            wanted, shape = wanted[count:], shape[cut:]
        if len(wanted) != len(shape):
            return False
        node = value.producer or self.start
        assert node is not None
        return all(self.unify(a, b, node) for a, b in zip(wanted, shape, strict=True))

    def pattern_names(self) -> set[str]:
        """The starred dims that must agree: those of the first parameter that has any."""
        first = next(iter(self.pattern.leading.values()), ("", 0))[0]
        return {first}

    def same_leading(self, name: str, shape: tuple[Size, ...]) -> bool:
        """Return whether starred dims are equal to those bound before."""
        bound = self.leading.setdefault(name, shape)
        return len(bound) == len(shape) and all(map(same_size, bound, shape))

    def unify(self, pattern: Size, size: "Size | Number", node: Node) -> bool:
        """Return whether a size of the pattern can equal this one; binds a symbol, defers an expression."""
        if isinstance(pattern, int):
            return bool(pattern == size)
        if pattern.is_Symbol:
            bound = self.sizes.get(pattern)
            if bound is None:
                self.sizes[pattern] = size
                return True
            return same_size(bound, size)
        self.deferred.append((pattern, size, node))
        return True

    def match_number(self, pattern: Value, value: Value, rest: Any) -> bool:
        """A constant or a size of the pattern."""
        producer = pattern.producer
        assert producer is not None
        if producer.is_op("size"):
            return self.match_size(producer, value, rest)
        number = producer.attributes["value"]
        name = self.pattern.scalars.get(abs(number)) if isinstance(number, float) else None
        node = value.producer
        constant = node is not None and node.is_op("constant")
        if not constant and (name is None or not isinstance(value.type, TensorType) or value.shape != ()):
            return self.fail(node, "operation", f"the number {name or number}", value)
        found: Number | Value = node.attributes["value"] if constant and node else value
        if name is None:
            if not same_number(number, found, pattern.dtype):  # type: ignore[arg-type]
                return self.fail(node, "constant", number, found)
            return self.with_number(producer, node, pattern, value, rest)
        return self.with_scalar(name, number < 0, found, (producer, node, pattern, value, rest))

    def with_scalar(self, name: str, negative: bool, found: "Number | Value", then: Any) -> bool:
        """Bind a scalar parameter, then go on."""
        producer, node, pattern, value, rest = then
        if negative and isinstance(found, Value):
            return self.fail(node, "operation", f"the number -{name}", found)
        number = -found if negative and not isinstance(found, Value) else found
        bound = self.scalars.get(name)
        if bound is not None:
            if bound is not number and bound != number:
                return self.fail(node, "constant", f"{name}={bound}", number)
            return self.with_number(producer, node, pattern, value, rest)
        self.scalars[name] = number
        if self.with_number(producer, node, pattern, value, rest):
            return True
        del self.scalars[name]
        return False

    def with_number(self, producer: Node, node: Node | None, pattern: Value, value: Value, rest: Any) -> bool:
        """Bind a constant of the pattern, then continue."""
        self.values[pattern] = value
        if node is not None and node.has(Trait.SOURCE):
            self.nodes[producer] = node
        if self.solve(rest):
            return True
        del self.values[pattern]
        self.nodes.pop(producer, None)
        return False

    def match_size(self, producer: Node, value: Value, rest: Any) -> bool:
        """A size of the pattern, as a size or as the number it has here."""
        node = value.producer
        if node is None or not node.is_op("constant", "size"):
            return self.fail(node, "operation", f"the size {producer.attributes['expr']}", value)
        found = node.attributes["value"] if node.is_op("constant") else node.attributes["expr"]
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        sizes, due, expr = dict(self.sizes), len(self.deferred), producer.attributes["expr"]
        if not self.unify(expr, found, node):
            self.fail(node, "constant", f"{expr} ({sizes[expr]})" if expr in sizes else expr, found)
        elif self.with_number(producer, node, producer.result, value, rest):
            return True
        self.sizes = sizes
        del self.deferred[due:]
        return False

    def match_node(self, pattern: Value, value: Value, rest: Any) -> bool:
        """An operation of the pattern, in any order its operands may have."""
        wanted, node = pattern.producer, value.producer
        assert wanted is not None and node is not None
        if wanted.op is not node.op:
            return self.fail(node, "operation", word(wanted), node)
        same_count = len(wanted.operands) == len(node.operands) or wanted.is_op("region")
        if node in self.taken or not same_count:
            return self.fail(node, "operation", f"{len(wanted.operands)} operands", f"{len(node.operands)}")
        sizes, scalars, due = dict(self.sizes), dict(self.scalars), len(self.deferred)
        results = self.fit_attributes(wanted, node)
        if results is not None and results.get(pattern) is value:
            self.nodes[wanted], self.taken[node] = node, wanted
            for p, v in results.items():
                self.values[p] = v
            for operands in _orders(wanted, node):
                goals = rest
                for goal in reversed(list(zip(wanted.operands, operands, strict=True))):
                    goals = (goal, goals)
                if self.solve(goals):
                    return True
            for p in results:
                del self.values[p]
            del self.nodes[wanted], self.taken[node]
        self.sizes, self.scalars = sizes, scalars
        del self.deferred[due:]
        return False

    def fit_attributes(self, wanted: Node, node: Node) -> dict[Value, Value] | None:
        """Return which results correspond, where the attributes fit; otherwise record a failure and return None."""
        if wanted.is_op("region"):
            return self.fit_region(wanted, node)
        for key, value in wanted.attributes.items():
            found = node.attributes.get(key)
            if not self.fit_attribute(value, found, node):
                self.fail(node, "dim" if key in ("dim", "dims") else "attribute", f"{key}={value}", found)
                return None
        return dict(zip(wanted.results, node.results, strict=True))

    def fit_attribute(self, wanted: Any, found: Any, node: Node) -> bool:
        """Return whether an attribute fits; its sizes are unified."""
        if isinstance(wanted, tuple):
            same = isinstance(found, tuple) and len(wanted) == len(found)
            return same and all(self.fit_attribute(a, b, node) for a, b in zip(wanted, found, strict=True))
        if isinstance(wanted, sympy.Expr):
            return isinstance(found, int | sympy.Expr) and self.unify(wanted, found, node)
        return bool(wanted == found)

    def fit_region(self, wanted: Node, node: Node) -> dict[Value, Value] | None:
        """A declared region fits one of the same fusion with the same parameters."""
        a, b = wanted.attributes, node.attributes
        for key in ("fusion", "kind"):
            if a.get(key) != b.get(key):
                self.fail(node, "operation" if key == "fusion" else "attribute", a.get(key), b.get(key))
                return None
        if "parameters" not in a:
            return None
        known = dict(b["scalars"]) | dict(zip(b["parameters"], node.operands, strict=True))
        if set(known) != {*a["parameters"], *dict(a["scalars"])}:
            self.fail(node, "attribute", f"parameters {a['parameters']}", b["parameters"])
            return None
        for name, number in a["scalars"]:
            scalar, found = self.pattern.scalars.get(abs(number)), known[name]
            bound = self.scalars.setdefault(scalar, found) if scalar else number
            if bound is not found and (isinstance(found, Value) or bound != found):
                self.fail(node, "constant", f"{name}={bound}", found)
                return None
        position = {at: value for at, value in zip(b["returns"], node.results, strict=True)}
        if any(at not in position for at in a["returns"]):
            self.fail(node, "operation", f"results {a['returns']}", b["returns"])
            return None
        return {value: position[at] for at, value in zip(a["returns"], wanted.results, strict=True)}

    def finish(self) -> bool:
        """Check what is decidable only at the end: other outputs, sizes, users, convexity, clauses."""
        missing = next((v for v in self.pattern.graph.outputs if v not in self.values), None)
        if missing is not None:
            return any(self.solve(((missing, v), None)) for v in self.candidates(missing))
        return self.sizes_agree() and self.users_agree() and self.is_convex() and self.clauses_hold()

    def candidates(self, pattern: Value) -> Iterator[Value]:
        """Yield values that an additional output may match: those computed from what is bound."""
        assert pattern.producer is not None
        path, seen = [pattern.producer], {pattern.producer}
        while path:
            node = path.pop(0)
            for operand in node.operands:
                at = self.values.get(operand)
                if at is not None and operand.producer is None:
                    yield from _reached(at, node, pattern)
                    return
                if operand.producer is not None and operand.producer not in seen:
                    seen.add(operand.producer)
                    path.append(operand.producer)

    def sizes_agree(self) -> bool:
        """Return whether the deferred sizes agree with the bound symbols."""
        for expr, size, node in self.deferred:
            if not expr.free_symbols <= self.sizes.keys():
                return self.fail(node, "attribute", f"size {expr}", size)
            value = simplify(sympy.sympify(expr).subs(self.sizes))
            if value != size and not same_size(value, size):
                return self.fail(node, "attribute", f"size {expr} = {value}", size)
        return True

    def users_agree(self) -> bool:
        """Return whether no intermediate is read outside, and no parameter is computed inside."""
        leaving = {self.values[v] for v in self.pattern.graph.outputs}
        for value in (self.values[v] for v in self.pattern.tensors if v in self.values):
            if value.producer in self.taken and not self.may_repeat(value.producer):
                return self.fail(value.producer, "users", "operands from outside", "one computed inside")
        for node in self.taken:
            if self.may_repeat(node):
                continue
            for result in node.results:
                if result in leaving:
                    continue
                other = next((u for u in result.users if u not in self.taken), None)
                if other is not None or result in self.outputs:
                    where = f"it also read by {described(other)}" if other else "it also returned"
                    name = word(node)
                    return self.fail(node, "users", f"{name} read only inside", where)
        return True

    def may_repeat(self, node: Node) -> bool:
        """Return whether a node is cheap enough to be computed outside as well: a view, a cast or a constant."""
        return node.has(Trait.SOURCE) or node.is_op("cast") or node.is_alias

    def is_convex(self) -> bool:
        """Return whether the match is convex: no path leaves it and comes back."""
        outputs = [self.values[v] for v in self.pattern.graph.outputs]
        leaving = {v.producer for v in outputs if v.producer and any(u not in self.taken for u in v.users)}
        return len(outputs) == 1 or all(map(self.has_no_path_back, leaving))

    def has_no_path_back(self, exit_node: Node) -> bool:
        """Return whether no operand of the match is computed from one of its nodes."""
        # Nodes above that node do not depend on it; usually those are all that the match reads, so no search is needed.
        above, stack = {exit_node}, [exit_node]
        while stack:
            producers = {v.producer for v in stack.pop().operands if v.producer} - above
            above |= producers
            stack += producers & self.taken.keys()
        seen = self.taken.keys() | above
        stack = [v.producer for node in self.taken for v in node.operands if v.producer and v.producer not in seen]
        while stack:
            node = stack.pop()
            if any(v.producer is exit_node for v in node.operands):
                return self.fail(node, "convex", "no path out and back in", f"{word(node)} on such a path")
            producers = {v.producer for v in node.operands if v.producer} - above
            above |= producers
            stack += producers
        return True

    def clauses_hold(self) -> bool:
        """Return whether the declared clauses hold."""
        for clause in self.pattern.clauses:
            arguments = {name: self.argument(name) for name in clause.parameters}
            if not clause.predicate(**arguments):
                shown = ", ".join(f"{k}: {v}" for k, v in arguments.items())
                return self.fail(self.start, clause.name, clause.why or clause.name.replace("_", " "), shown)
        return True

    def argument(self, name: str) -> Any:
        """Return the argument of a clause: the type of a tensor, the number of a scalar, None where absent."""
        for pattern, known in self.pattern.tensors.items():
            if known == name:
                return self.values[pattern].type if pattern in self.values else None
        found = self.scalars.get(name)
        return found.type if isinstance(found, Value) else found


def _orders(wanted: Node, node: Node) -> Iterator[tuple[Value, ...]]:
    if wanted.is_op("region"):
        known = dict(zip(node.attributes["parameters"], node.operands, strict=True))
        yield tuple(known[name] for name in wanted.attributes["parameters"])
        return
    yield node.operands
    if wanted.has(Trait.COMMUTATIVE) and node.operands[0] is not node.operands[1]:
        yield node.operands[::-1]


def _reached(start: Value, node: Node, pattern: Value) -> Iterator[Value]:
    """Yield results of the root's operation within 8 users of a value."""
    frontier, seen = [start], {start}
    wanted = pattern.producer
    assert wanted is not None
    for _ in range(8):
        following = [r for v in frontier for u in v.users for r in u.results if r not in seen]
        seen.update(following)
        yield from (r for r in following if r.producer is not None and r.producer.op is wanted.op)
        frontier = following


def _is_computed_from(value: Value, other: Value, depth: int = 4) -> bool:
    """Return whether a value is computed from another one by a few pointwise operations."""
    node = value.producer
    if value is other or node is None or not node.has(Trait.POINTWISE) or depth == 0:
        return value is other
    return any(_is_computed_from(operand, other, depth - 1) for operand in node.operands)


def _text(found: object) -> str:
    """Return what was found as text; only of the best attempt, as most fail."""
    if isinstance(found, tuple) and found and all(isinstance(v, Value) for v in found):
        return " and ".join(map(shown, found))
    if isinstance(found, Value):
        return shown(found)
    return word(found) if isinstance(found, Node) else str(found)
