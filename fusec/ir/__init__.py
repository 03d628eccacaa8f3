"""The intermediate representation: types, operations, graphs, and their text."""

from fusec.ir import printer  # noqa: F401  it gives every graph its text
