"""Every statement declares the roles of its fields, and a printer of some target has a method for it."""

from dataclasses import fields

import pytest

from fusec.codegen.cpp.printer import _Printer as CppPrinter
from fusec.codegen.cpp.statements import Statements as CppStatements
from fusec.codegen.tile.kernel import (
    Accumulation,
    Assign,
    ComputedDot,
    Definition,
    Dot,
    DotTiles,
    Prefetch,
    Sort,
    Statement,
    TableLookup,
)
from fusec.codegen.tile.sort_tile import SortTile
from fusec.codegen.triton.printer import _Printer as TritonPrinter
from fusec.codegen.triton.statements import Statements as TritonStatements

STATEMENTS = [s for kind in (Statement, Definition, Accumulation) for s in kind.__subclasses__()]
STATEMENTS = [s for s in STATEMENTS if s not in (Definition, Accumulation)]
NO_OPERANDS = {"op", "axis", "along", "kind"}
"""Fields of text that name no value and no buffer."""


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: s.__name__)
def test_fields_have_roles(statement: type[Statement]) -> None:
    roles = {name for group in (statement.RESULT, statement.LOADED, statement.STORED) for name in group}
    roles |= {*statement.OPERANDS, *statement.INDICES, *statement.BODY}
    types = {field.name: str(field.type) for field in fields(statement)}  # type: ignore[arg-type]
    assert roles <= types.keys()
    wanted = ("str", "Operand", "sympy", "Matrix", "Statement")
    held = {name for name, type in types.items() if any(word in type for word in wanted)} - NO_OPERANDS
    # Sizes are numbers or expressions of symbols: neither loops nor lengths decide which lane is meant. Steps are
    # offsets along the statement's own loop.
    assert held - {"start", "stop", "step", "steps", "length", "rows", "columns", "depth", "count"} <= roles


def test_printers_have_methods() -> None:
    every = set(STATEMENTS)
    cpp = registered(CppStatements, "straight") | registered(CppPrinter, "_statement")
    triton = registered(TritonStatements, "line") | registered(TritonPrinter, "_statement")
    assert every - cpp == {Assign, DotTiles, SortTile}
    assert every - triton == {Dot, ComputedDot, TableLookup, Sort, Prefetch}


def registered(printer: type, method: str) -> set[type]:
    """Return the classes that a method dispatches on."""
    return set(vars(printer)[method].dispatcher.registry) - {object}
