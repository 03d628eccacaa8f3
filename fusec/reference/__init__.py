"""The executable meaning of graphs: the interpreter, and what its results are compared by."""
