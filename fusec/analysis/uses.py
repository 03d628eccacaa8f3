"""Who needs a value, and whether joining nodes would close a circle."""

from collections.abc import Callable, Iterable

from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait


def joining_closes_circle(
    first: set[Node],
    second: set[Node],
    unit: Callable[[Node], Iterable[Node]],
    after: Callable[[Node], Iterable[Node]],
    position: dict[Node, int],
) -> bool:
    """Whether a path leads from ``first`` to ``second`` through a node of neither, so that they cannot be one.

    Args:
        first: the nodes of the earlier unit.
        second: the nodes of the later unit.
        unit: all nodes that run together with a node.
        after: the nodes that must come after a node.
        position: where each node stands; a path never goes beyond the last node of ``second``.
    """
    last = max(position[n] for n in second)
    stack = [s for n in first for s in after(n) if s not in first and s not in second]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        members = () if node in seen else tuple(unit(node))
        seen.update(members)
        if all(position[m] > last for m in members):
            continue
        for reader in (s for m in members for s in after(m)):
            if reader in second:
                return True
            if reader not in first and reader not in seen:
                stack.append(reader)
    return False


def base(value: Value) -> Value:
    """The value that a chain of aliasing views looks at."""
    while value.producer is not None and value.producer.has(Trait.VIEW) and not value.producer.is_op("concat"):
        value = value.producer.operands[0]
    return value
