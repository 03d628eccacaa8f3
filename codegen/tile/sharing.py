"""Kernels that differ only in offsets and lengths, as layers that share one tensor: their code takes these numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy

from fusec.codegen.tile.kernel import Check, ClampIndex, Combine, Kernel, Load, Matrix, Statement, Store
from fusec.ir.types import Size

Numbers = tuple[int, ...]


def share(kernels: Iterable[Kernel]) -> list[tuple[Kernel, Numbers]]:
    """Return for each kernel the one that is built for it, and what a launch passes as its last symbols.

    Kernels with the same code otherwise are built once: offsets in tensors and lengths that are checked become symbols
    where they differ.
    """
    groups: dict[tuple[Any, ...], dict[Numbers, list[int]]] = {}
    kernels = list(kernels)
    for i, kernel in enumerate(kernels):
        numbers: list[int] = []

        def take(number: int, numbers: list[int] = numbers) -> int:
            numbers.append(number)
            return 0

        key = tile_program(replace(kernel, body=_replaced(kernel, take)))
        groups.setdefault(key, {}).setdefault(tuple(numbers), []).append(i)
    shared: dict[int, tuple[Kernel, Numbers]] = {}
    for members in groups.values():
        built, rows = _shared(kernels[next(iter(members.values()))[0]], list(members))
        for row, places in zip(rows, members.values(), strict=True):
            shared |= dict.fromkeys(places, (built, row))
    return [shared[i] for i in range(len(kernels))]


def tile_program(kernel: Kernel) -> tuple[Any, ...]:
    """Return a key that kernels share exactly if they are the same but for their names."""
    return kernel.kind, kernel.buffers, kernel.symbols, kernel.body, kernel.work, kernel.config


def _shared(kernel: Kernel, rows: Sequence[Numbers]) -> tuple[Kernel, list[Numbers]]:
    """Return a kernel whose symbols are the numbers in which the rows differ, and these numbers of each row."""
    if len(rows) == 1:
        return kernel, [()]
    columns = list(zip(*rows, strict=True))
    taken = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))
    names = {column: f"number{i}" for i, column in enumerate(taken)}
    remaining = iter(columns)

    def place(number: int) -> Size:
        column = next(remaining)
        return sympy.Symbol(names[column], integer=True) if column in names else number

    body = _replaced(kernel, place)
    symbols = (*kernel.symbols, *names.values())
    return replace(kernel, symbols=symbols, body=body), list(zip(*taken, strict=True))


def _replaced(kernel: Kernel, number: Callable[[int], Size]) -> tuple[Statement, ...]:
    """Return the body with other offsets in the buffers that a launch takes, and other lengths."""
    taken = {buffer.name for buffer in kernel.buffers if buffer.role in ("input", "output", "update")}

    def visit(thing: Any) -> Any:
        if isinstance(thing, tuple):
            return tuple(map(visit, thing))
        if isinstance(thing, Load | Store | Combine | Matrix):
            if thing.buffer not in taken:
                return thing
            constant, rest = sympy.sympify(thing.offset).as_coeff_Add()
            return replace(thing, offset=rest + number(int(constant))) if constant.is_Integer else thing
        if isinstance(thing, Check | ClampIndex):
            return replace(thing, length=number(thing.length)) if isinstance(thing.length, int) else thing
        if not isinstance(thing, Statement):
            return thing
        parts = {name: getattr(thing, name) for name in (*thing.LOADED, *thing.STORED, *thing.BODY)}
        changed = {name: visit(part) for name, part in parts.items() if not isinstance(part, str)}
        statement: Any = thing
        return replace(statement, **changed) if changed else statement

    return tuple(map(visit, kernel.body))
