"""Hoisting of index checks: of kernels that check the same dynamic index the first one does so for all of them.

The layers of a model look up rows by one page table, each in its own part of a pool, and the parts have other lengths.
What takes time is to find the least and the greatest index, which is done once; both are compared with each length.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fusec.codegen.tile.kernel import MAX_CHECKS, Check, Kernel, Loop, Statement, When, walk
from fusec.ir.graph import Node
from fusec.loops.indexing import dynamically_indexed

Statements = tuple[Statement, ...]


@dataclass(frozen=True)
class Checked:
    """A kernel, and the lookups and writes whose indices it checks: check ``i`` is that of number ``i - 1``."""

    kernel: Kernel
    lookups: tuple[Node, ...]


def unhoisted(scheduled: Mapping[Node, Kernel]) -> dict[Node, Checked]:
    """Return kernels that check each its own indices."""
    return {node: Checked(kernel, tuple(dynamically_indexed(node.body))) for node, kernel in scheduled.items()}


def hoist_checks(scheduled: Mapping[Node, Kernel]) -> dict[Node, Checked]:
    """Return the kernels with each check in the first of those that check the same elements of the same values.

    A kernel whose check fails ends the program, so that later ones are launched only where all checks have passed. An
    index that only a later kernel does not allow is reported earlier than it would be, and nothing is stored meanwhile.

    Args:
        scheduled: the kernels in the order of their launches.
    """
    found, first, without = unhoisted(scheduled), dict[tuple[Any, ...], Node](), dict[int, Kernel]()
    for node, kernel in scheduled.items():
        if not kernel.checks:
            continue
        checks, rest = kernel.body[: kernel.checks], kernel.body[kernel.checks :]
        loaded = {name for statement in walk(checks) for name in statement.loads}
        operands = zip(kernel.buffers, node.operands, strict=False)
        read = ((buffer.name, value) for buffer, value in operands if buffer.name in loaded)
        earlier = first.setdefault((_unchecked(checks), *read), node)
        if earlier is not node and (joined := _joined(found[earlier], checks, found[node].lookups)) is not None:
            found[earlier] = joined
            found[node] = Checked(without.setdefault(id(kernel), replace(kernel, body=rest, checks=None)), ())
    return found


def _joined(earlier: Checked, checks: Statements, lookups: tuple[Node, ...]) -> Checked | None:
    """Return a kernel with the checks of a later one; None where it lacks their sizes, or there are too many."""
    kernel, added = earlier.kernel, [s for s in walk(checks) if isinstance(s, Check)]
    sizes = {str(n) for check in added if not isinstance(check.length, int) for n in check.length.free_symbols}
    if not sizes <= set(kernel.symbols) or len(earlier.lookups) + len(lookups) > MAX_CHECKS:
        return None
    ahead = kernel.body[: kernel.checks]
    joined = _with_checks(ahead, checks, len(earlier.lookups))
    if joined == ahead:
        return earlier
    body = (*joined, *kernel.body[len(ahead) :])
    return Checked(replace(kernel, body=body, checks=len(joined)), (*earlier.lookups, *lookups))


def _unchecked(statements: Iterable[Statement]) -> Statements:
    """Return statements without the checks among them."""
    return tuple(
        replace(s, body=_unchecked(s.body)) if isinstance(s, Loop | When) else s
        for s in statements
        if not isinstance(s, Check)
    )


def _with_checks(statements: Statements, others: Statements, first: int) -> Statements:
    """Return statements with the checks of others, which are the same but for checks, numbered from ``first`` on."""
    made = [s for s in statements if isinstance(s, Check)]
    known = {(check.value, check.length) for check in made}
    new = [s for s in others if isinstance(s, Check) and (s.value, s.length) not in known]
    pairs = zip(*([s for s in body if not isinstance(s, Check)] for body in (statements, others)), strict=True)
    joined = (
        replace(a, body=_with_checks(a.body, cast(Loop | When, b).body, first)) if isinstance(a, Loop | When) else a
        for a, b in pairs
    )
    return (*joined, *made, *(replace(check, number=first + check.number) for check in new))
