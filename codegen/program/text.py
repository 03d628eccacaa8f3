"""The text of a program while it is written: variables, the layouts of what they hold, constants, steps."""

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

StepKind = Literal["kernel", "vendor", "opaque", "copy", "write", "interpreted"]


@dataclass(frozen=True)
class Step:
    """One thing that a program does."""

    kind: StepKind
    """``kernel`` is generated, ``vendor`` a library's matrix product, ``interpreted`` a region without a kernel."""
    name: str
    sources: tuple[Source, ...] = ()
    node: Node | None = None
    """What of the graph it belongs to; None for the copies of outputs."""
    line: int = 0
    """Lines of the function ahead of those that do it."""


class ProgramText:
    """Lines of one straight Python function, with all it refers to."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self.node: Node | None = None
        """The node that is being written."""
        self.names: dict[Value, str] = {}
        self.layouts: dict[Value, tuple[Size, ...] | None] = {}
        """Strides that a value is known to have; None where only the running program can tell."""
        self.roots: dict[Value, Value] = {}
        """For a value that shares another one's storage, whose storage it is."""
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
        """Note what the lines that follow do."""
        self.steps.append(Step(kind, name, sources, self.node, len(self.lines)))

    def constant(self, thing: Any, hint: str) -> str:
        """The name under which the function sees an object."""
        if id(thing) not in self._by_identity:
            name = f"{hint}_{len(self._by_identity)}"
            self._by_identity[id(thing)] = name
            self.constants[name] = thing
        return self._by_identity[id(thing)]

    def fresh(self) -> str:
        """A new variable for something that is no value of the graph."""
        self._count += 1
        self._temporaries.append(f"w_{self._count}")
        return self._temporaries[-1]

    def take_temporaries(self) -> list[str]:
        """The variables of the lines so far that are no values, to be freed."""
        taken, self._temporaries = self._temporaries, []
        return taken

    def device(self, name: str) -> str:
        """The constant that holds a device."""
        known = f"device_{''.join(c if c.isalnum() else '_' for c in name)}"
        self.constants[known] = torch.device(name)
        return known

    def define(self, value: Value, layout: tuple[Size, ...] | None, root: Value | None = None) -> str:
        """The variable of a value that the next line computes."""
        name = f"t_{len(self.names)}"
        self.names[value] = name
        self.layouts[value] = layout
        if root is not None:
            self.roots[value] = self.root(root)
        return name

    def alias(self, value: Value, other: Value) -> None:
        """Let a value be the very tensor that another is."""
        name = self.define(value, self.layouts[other], other)
        self.line(f"{name} = {self.names[other]}")

    def root(self, value: Value) -> Value:
        """The value whose storage this one uses."""
        return self.roots.get(value, value)

    def bind_symbols(self, value: Value) -> None:
        """Read the size symbols that a value's type mentions for the first time."""
        if isinstance(value.type, ScalarType):
            self._bind(value.type.expr, self.names[value])
        elif isinstance(value.type, TensorType):
            for d, n in enumerate(value.type.shape):
                self._bind(n, f"{self.names[value]}.shape[{d}]")

    def bind_strides(self, value: Value) -> None:
        """Read the symbols that only a value's strides mention."""
        if isinstance(value.type, TensorType):
            for d, n in enumerate(value.type.strides):
                self._bind(n, f"{self.names[value]}.stride({d})")

    def _bind(self, size: Size | None, text: str) -> None:
        if size is None or isinstance(size, int) or not size.free_symbols:
            return
        unknown = [s for s in size.free_symbols if str(s) not in self.symbols]
        if len(unknown) != 1:
            return
        (symbol,) = unknown
        slope = size.coeff(symbol, 1)
        rest = (size - slope * symbol).expand()
        if slope != 0 and symbol not in rest.free_symbols and symbol not in slope.free_symbols:
            self.symbols.add(str(symbol))
            found = text if rest == 0 else f"({text} - ({PYTHON.print(rest)}))"
            self.line(f"{symbol} = {found}" if slope == 1 else f"{symbol} = {found} // ({PYTHON.print(slope)})")

    # ------------------------------------------------------------------ tensors

    def layout(self, value: Value) -> tuple[Size, ...]:
        """The strides of a value; where they are not certain, they are made those of its type."""
        known = self.layouts[value]
        if known is not None:
            return known
        type = value.tensor
        name = self.names[value]
        if type.rank:
            strides = sizes_text(type.strides)
            # What is written to must stay the storage that the caller passed.
            function = "same_storage" if self.root(value) in self.written else "with_strides"
            differs = f"{name}.stride() != {strides}"
            if same_layout(type.shape, type.strides, contiguous_strides(type.shape)):
                differs = f"not {name}.is_contiguous() and {differs}"  # the quicker question, and nearly always enough
            self.line(f"if {differs}: {name} = {function}({name}, {strides})")
        self.layouts[value] = type.strides
        return type.strides

    def lies(self, value: Value, strides: tuple[Size, ...]) -> bool:
        """Whether a value has these strides, or is given them where only its variable knows of it."""
        known = self.layouts[value]
        if known is None and self.root(value) in self.written and strides:
            return False
        return same_layout(value.tensor.shape, value.tensor.strides if known is None else known, strides)

    def tensor(self, value: Value, strides: tuple[Size, ...]) -> str:
        """A variable that holds the value with these strides: its own, or that of a copy."""
        if self.lies(value, strides):
            self.layout(value)
            return self.names[value]
        if self.layouts[value] is None and self.root(value) in self.written:
            # A rebound variable would no longer be the storage that is written to.
            name = self.fresh()
            self.line(f"{name} = with_strides({self.names[value]}, {sizes_text(strides)})")
            return name
        self.layout(value)
        name = self.fresh()
        self.step("copy", "layout")
        self.line(f"{name} = copied({self.names[value]}, {sizes_text(strides)})")
        return name

    def allocate(self, type: TensorType) -> tuple[str, tuple[Size, ...]]:
        """An expression for new memory of a type, and the strides it has."""
        strides = dense(type).strides
        sizes, dtype = f"{sizes_text(type.shape)}, {sizes_text(strides)}", torch_dtype(type.dtype)
        if type.device == "cpu":
            return f"empty({sizes}, {self.constant(dtype, 'dtype')})", strides
        options = f"dtype={self.constant(dtype, 'dtype')}, device={self.device(type.device)}"
        return f"empty_on({sizes}, {options})", strides


def same_layout(shape: Sequence[Size], a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two stride tuples address a tensor of this shape alike; those of length-1 dims do not count."""
    return all(n == 1 or same_size(x, y) for n, x, y in zip(shape, a, b, strict=True))


def same_storage(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, where that is a view.

    Raises:
        FusecError: where it would be a copy, which a write would miss.
    """
    view = with_strides(tensor, strides)
    if view.data_ptr() != tensor.data_ptr():
        raise FusecError(
            f"a tensor that is written to has strides {tensor.stride()}", why=f"the program was compiled for {strides}"
        )
    return view
