"""The executable semantics of graphs: the interpreter, and the comparison of its results."""
