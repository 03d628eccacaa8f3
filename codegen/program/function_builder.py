"""Builds the source of a program's function: its lines, variables with their layouts, constants and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.errors import FusecError
from fusec.frontend.torch_internals import empty_on_cpu
from fusec.ir.graph import Graph, Node, Source, Value, storage
from fusec.ir.types import ScalarType, Size, TensorType, contiguous_strides, same_size
from fusec.loops.strides import dense
from fusec.reference.dtypes import torch_dtype
from fusec.reference.layout import copied, with_strides
from fusec.reference.sizes import unknown_symbol

StepKind = Literal["kernel", "vendor", "opaque", "copy", "write", "interpreted"]


@dataclass(frozen=True)
class Step:
    """One operation of a program."""

    kind: StepKind
    """``kernel`` is a generated kernel, ``vendor`` a vendor call, ``interpreted`` a region without a kernel."""
    name: str
    sources: tuple[Source, ...] = ()
    node: Node | None = None
    """The node of the graph that it is part of; None for copies of outputs."""
    line: int = 0
    """The number of lines of the function before its own."""


class FunctionBuilder:
    """The lines of a Python function without control flow, and the objects that it refers to."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self.node: Node | None = None
        """The node that is being lowered."""
        self.names: dict[Value, str] = {}
        self.layouts: dict[Value, tuple[Size, ...] | None] = {}
        """The strides of each value; None where they are known only at run time."""
        self.roots: dict[Value, Value] = {}
        """For each value that aliases another one, the value that owns the storage."""
        self.written = {storage(v) for n in graph.nodes for v in n.written}
        self.constants: dict[str, Any] = {
            "empty": empty_on_cpu, "empty_on": torch.empty_strided, "with_strides": with_strides, "copied": copied,
            "same_storage": same_storage,
        }  # fmt: skip
        self.symbols: set[str] = set()
        self._by_identity: dict[int, str] = {}
        self._count = 0
        self._temporaries: list[str] = []

    # ------------------------------------------------------------------ text

    def line(self, text: str) -> None:
        """Append one line of the function."""
        self.lines.append(text)

    def step(self, kind: StepKind, name: str, sources: tuple[Source, ...] = ()) -> None:
        """Begin a step, which consists of the lines that follow."""
        self.steps.append(Step(kind, name, sources, self.node, len(self.lines)))

    def constant(self, value: Any, hint: str) -> str:
        """Bind an object, and return its name in the function."""
        if id(value) not in self._by_identity:
            name = f"{hint}_{len(self._by_identity)}"
            self._by_identity[id(value)] = name
            self.constants[name] = value
        return self._by_identity[id(value)]

    def fresh(self) -> str:
        """Return a new temporary variable, one that holds no value of the graph."""
        self._count += 1
        self._temporaries.append(f"w_{self._count}")
        return self._temporaries[-1]

    def take_temporaries(self) -> list[str]:
        """Return the temporary variables since the last call, which the caller frees."""
        taken, self._temporaries = self._temporaries, []
        return taken

    def device(self, name: str) -> str:
        """Return the name of the constant that holds a device."""
        known = f"device_{''.join(c if c.isalnum() else '_' for c in name)}"
        self.constants[known] = torch.device(name)
        return known

    def define(self, value: Value, layout: tuple[Size, ...] | None, root: Value | None = None) -> str:
        """Return a new variable for a value, which the next line computes."""
        name = f"t_{len(self.names)}"
        self.names[value] = name
        self.layouts[value] = layout
        if root is not None:
            self.roots[value] = self.root(root)
        return name

    def alias(self, value: Value, other: Value) -> None:
        """Append a line that makes a value the same tensor as another."""
        name = self.define(value, self.layouts[other], other)
        self.line(f"{name} = {self.names[other]}")

    def root(self, value: Value) -> Value:
        """Return the value that owns the storage of this one."""
        return self.roots.get(value, value)

    def bind_symbols(self, value: Value) -> None:
        """Append lines that read the size symbols that occur first in the shape of a value."""
        if isinstance(value.type, ScalarType):
            self._bind(value.type.expr, self.names[value])
        elif isinstance(value.type, TensorType):
            for d, n in enumerate(value.type.shape):
                self._bind(n, f"{self.names[value]}.shape[{d}]")

    def bind_shapes(self, values: Sequence[Value]) -> None:
        """Append lines that read the size symbols that occur in the shapes of several values."""
        before = -1
        while len(self.symbols) > before:  # a product may be of symbols that come later
            before = len(self.symbols)
            for value in values:
                self.bind_symbols(value)

    def bind_strides(self, value: Value) -> None:
        """Append lines that read the size symbols that occur only in the strides of a value."""
        if isinstance(value.type, TensorType):
            for d, n in enumerate(value.type.strides):
                self._bind(n, f"{self.names[value]}.stride({d})")

    def _bind(self, size: Size | None, text: str) -> None:
        if (unknown := unknown_symbol(size, self.symbols)) is None:
            return
        symbol, slope, rest = unknown
        self.symbols.add(str(symbol))
        found = text if rest == 0 else f"({text} - ({PYTHON.print(rest)}))"
        self.line(f"{symbol} = {found}" if slope == 1 else f"{symbol} = {found} // ({PYTHON.print(slope)})")

    # ------------------------------------------------------------------ tensors

    def layout(self, value: Value) -> tuple[Size, ...]:
        """Return the strides of a value; if they are known only at run time, append a line that ensures its type's."""
        known = self.layouts[value]
        if known is not None:
            return known
        type = value.tensor
        name = self.names[value]
        if type.rank:
            strides = sizes_text(type.strides)
            # A tensor that is written to must remain in the storage that the caller passed.
            function = "same_storage" if self.root(value) in self.written else "with_strides"
            differs = f"{name}.stride() != {strides}"
            if same_layout(type.shape, type.strides, contiguous_strides(type.shape)):
                differs = f"not {name}.is_contiguous() and {differs}"  # faster to check, and nearly always sufficient
            self.line(f"if {differs}: {name} = {function}({name}, {strides})")
        self.layouts[value] = type.strides
        return type.strides

    def has_strides(self, value: Value, strides: tuple[Size, ...]) -> bool:
        """Return whether a value has these strides, or can be given them by rebinding its variable."""
        known = self.layouts[value]
        if known is None and self.root(value) in self.written and strides:
            return False
        return same_layout(value.tensor.shape, value.tensor.strides if known is None else known, strides)

    def tensor(self, value: Value, strides: tuple[Size, ...]) -> str:
        """Return a variable that holds a value with these strides: its own, or that of a copy."""
        if self.has_strides(value, strides):
            self.layout(value)
            return self.names[value]
        if self.layouts[value] is None and self.root(value) in self.written:
            # A rebound variable would no longer refer to the storage that is written to.
            name = self.fresh()
            self.line(f"{name} = with_strides({self.names[value]}, {sizes_text(strides)})")
            return name
        self.layout(value)
        name = self.fresh()
        self.step("copy", "layout")
        self.line(f"{name} = copied({self.names[value]}, {sizes_text(strides)})")
        return name

    def allocate(self, type: TensorType) -> tuple[str, tuple[Size, ...]]:
        """Return an expression that allocates a tensor of a type, and its strides."""
        strides = dense(type).strides
        sizes, dtype = f"{sizes_text(type.shape)}, {sizes_text(strides)}", torch_dtype(type.dtype)
        if type.device == "cpu":
            return f"empty({sizes}, {self.constant(dtype, 'dtype')})", strides
        options = f"dtype={self.constant(dtype, 'dtype')}, device={self.device(type.device)}"
        return f"empty_on({sizes}, {options})", strides


def same_layout(shape: Sequence[Size], a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Return whether two tuples of strides are equal, ignoring dims of length 1."""
    return all(n == 1 or same_size(x, y) for n, x, y in zip(shape, a, b, strict=True))


def same_storage(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a view of a tensor with these strides.

    Raises:
        FusecError: if that takes a copy, since writes to the copy would be lost.
    """
    view = with_strides(tensor, strides)
    if view.data_ptr() != tensor.data_ptr():
        raise FusecError(
            f"a tensor that is written to has strides {tensor.stride()}", why=f"the program was compiled for {strides}"
        )
    return view
