"""The calling convention of an imported graph, which replaces the torch graph it came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import sympy
import torch

from fusec.frontend.sizes import to_size
from fusec.ir.graph import Graph
from fusec.ir.types import ScalarType, Size, TensorType
from fusec.reference.sizes import as_number, unknown_symbol
from fusec.remarks import Remarks


@dataclass(frozen=True)
class View:
    """An output that shares the storage of an input or of another output, by eager's own semantics."""

    of: Literal["input", "output"]
    index: int
    shape: tuple[Size, ...] = ()
    strides: tuple[Size, ...] = ()
    offset: Size = 0
    """Bytes, relative to the base's own offset."""
    dtype: torch.dtype | None = None
    """Its dtype, where it differs from the base's."""
    conjugated: bool = False
    """True for a conjugate view."""
    negated: bool = False
    """True for a negative view."""

    @classmethod
    def between(cls, of: Literal["input", "output"], index: int, owner: torch.Tensor, view: torch.Tensor) -> "View":
        """The view that one fake tensor is of another."""
        shape, strides = tuple(map(to_size, view.shape)), tuple(map(to_size, view.stride()))
        offset = to_size(view.storage_offset()) * view.itemsize - to_size(owner.storage_offset()) * owner.itemsize
        alike = owner.dtype == view.dtype
        conjugated = view.is_conj() != (alike and owner.is_conj())
        negated = view.is_neg() != (alike and owner.is_neg())
        return cls(of, index, shape, strides, offset, None if alike else view.dtype, conjugated, negated)


@dataclass(frozen=True)
class Output:
    """The origin of one output of the torch graph.

    The first of these that is not None: a program output, an input, an earlier output of the torch graph, a view;
    otherwise a number, or None. Views are separate tensors, which a caller may resize or transpose in place.
    """

    index: int | None = None
    input: int | None = None
    repeats: int | None = None
    view: View | None = None
    number: Any = None


@dataclass(frozen=True)
class Binding:
    """The computation of a size symbol: what is read is ``slope * symbol + rest``."""

    symbol: sympy.Symbol
    slope: Size
    rest: Size
    read: Callable[[list[Any]], int]

    def value(self, args: list[Any], sizes: dict[sympy.Symbol, int]) -> int:
        """Return the value of the symbol, given those of others."""
        found = self.read(args)
        if self.slope == 1 and self.rest == 0:
            return found  # perhaps the length of a nested tensor, which knows no arithmetic
        return int((found - _value(self.rest, sizes)) // _value(self.slope, sizes))


@dataclass
class Imported:
    """A graph and all that is needed to call it as the torch graph was called."""

    graph: Graph
    constants: list[torch.Tensor]
    """Tensors that the module holds, passed after the caller's arguments."""
    outputs: tuple[Output, ...]
    remarks: Remarks = field(default_factory=Remarks)
    """Reasons for which operations that fusec models stay ATen calls."""

    def callable(self, program: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """Return a callable that takes and clears a list and returns one, as the torch graph does."""
        constants, outputs = self.constants, self.outputs
        if not constants and all(o.index == i for i, o in enumerate(outputs)):
            return program
        bindings = self.bindings() if any(_sizes(o) for o in outputs) else []
        kept = {o.view.index for o in outputs if o.view is not None and o.view.of == "input"}
        kept.update(o.input for o in outputs if o.input is not None)

        def call(args: list[Any]) -> list[Any]:
            sizes: dict[sympy.Symbol, int] = {}
            for binding in bindings:
                sizes[binding.symbol] = binding.value(args, sizes)
            inputs = {i: args[i] for i in kept}
            given = [*args, *constants]
            args.clear()
            results = program(given)
            found: list[Any] = []
            for o in outputs:
                found.append(found[o.repeats] if o.repeats is not None else _restore(o, results, inputs, sizes))
            return found

        return call

    def bindings(self) -> list[Binding]:
        """Return how each size symbol is read from the arguments, those that it is computed from before it."""
        facts: list[tuple[Size | None, Callable[[list[Any]], int]]] = []
        for i, value in enumerate(self.graph.inputs):
            if isinstance(value.type, ScalarType):
                facts.append((value.type.expr, partial(_read_number, i)))
            if isinstance(value.type, TensorType):
                for d, (n, stride) in enumerate(zip(value.type.shape, value.type.strides, strict=True)):
                    facts.append((n, partial(_read_dim, torch.Tensor.size, i, d)))
                    facts.append((stride, partial(_read_dim, torch.Tensor.stride, i, d)))
        found: dict[str, Binding] = {}
        before = -1
        while len(found) > before:  # a product may be of symbols that come later
            before = len(found)
            for size, read in facts:
                if (unknown := unknown_symbol(size, found)) is not None:
                    found[unknown[0].name] = Binding(*unknown, read)
        return list(found.values())


def _read_number(index: int, args: list[Any]) -> int:
    return as_number(args[index])


def _read_dim(method: Callable[..., int], index: int, dim: int, args: list[Any]) -> int:
    return int(method(args[index], dim))


def _sizes(output: Output) -> bool:
    view = output.view
    sizes = [output.number] if view is None else [*view.shape, *view.strides, view.offset]
    return any(isinstance(n, sympy.Expr) for n in sizes)


def _value(size: Any, sizes: dict[sympy.Symbol, int]) -> Any:
    if not isinstance(size, sympy.Expr):
        return size
    if size in sizes:
        return sizes[size]
    number = size.subs(sizes)
    return int(number) if number.is_integer else float(number)


def _restore(output: Output, results: Sequence[Any], inputs: dict[int, Any], sizes: dict[sympy.Symbol, int]) -> Any:
    if output.index is not None:
        return results[output.index]
    if output.input is not None:
        return inputs[output.input]
    view = output.view
    if view is None:
        return _value(output.number, sizes)
    owner = inputs[view.index] if view.of == "input" else results[view.index]
    shape, strides = ([_value(n, sizes) for n in part] for part in (view.shape, view.strides))
    start = owner.storage_offset() * owner.itemsize + _value(view.offset, sizes)
    if view.dtype is None:
        found = owner.as_strided(shape, strides, start // owner.itemsize)
    else:
        other = torch.empty(0, dtype=view.dtype, device=owner.device)
        found = other.set_(owner.untyped_storage(), start // view.dtype.itemsize, shape, strides)
    found = torch._conj(found) if view.conjugated else found
    return torch._neg_view(found) if view.negated else found
