"""The intermediate representation: types, operations, graphs, and their text."""
