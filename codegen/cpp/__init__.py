"""C++ for CPUs: OpenMP over a small header of vector primitives."""

from fusec.codegen.cpp.target import CppTarget

__all__ = ["CppTarget"]
