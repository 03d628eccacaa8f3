"""Lowering of contractions and convolutions to vendor calls, on views of the operands where their layouts allow it."""

from copy import copy
from dataclasses import replace

import torch

from fusec.codegen.program.function_builder import FunctionBuilder
from fusec.codegen.tile.sizes import sizes_text
from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait, multiplies_bytes, split_spec
from fusec.ir.types import I8, Size, contiguous_strides, product, same_size, simplify


def lower_contraction(code: FunctionBuilder, node: Node) -> None:
    """Append the lines that compute a contraction."""
    (a_term, b_term), out_term = split_spec(node.attributes["spec"])
    if not _is_matmul(node, a_term, b_term, out_term):
        _call_einsum(code, node)
    elif multiplies_bytes(node.attributes):
        _call_matmul(code, node, a_term, b_term, out_term)
    elif _is_linear(node, a_term, b_term, out_term):
        # One call, as in eager, without the views that the general form needs.
        code.step("vendor", "linear", node.sources)
        a, b = (code.names[v] for v in node.operands)
        function = code.constant(torch.nn.functional.linear, "linear")
        code.line(f"{code.define(node.result, None)} = {function}({a}, {b})")
    elif node.result.tensor.numel == 0:
        allocation, strides = code.allocate(node.result.tensor)
        code.line(f"{code.define(node.result, strides)} = {allocation}")
    else:
        _call_matmul(code, node, a_term, b_term, out_term)


def _is_matmul(node: Node, a_term: str, b_term: str, out_term: str) -> bool:
    """Return whether a library has a contraction as a matmul: each label is batch, kept or summed, once.

    Of integers, signed bytes alone, without a batch.
    """
    labels = {*a_term, *b_term}
    shared, summed = {*a_term} & {*b_term}, labels - {*out_term}
    once = len({*a_term}) == len(a_term) and len({*b_term}) == len(b_term)
    of_bytes = shared == summed and all(v.dtype == I8 for v in node.operands)
    return once and bool(summed) and summed <= shared and (node.result.dtype.is_float or of_bytes)


def _call_matmul(code: FunctionBuilder, node: Node, a_term: str, b_term: str, out_term: str) -> None:
    batch = [x for x in out_term if x in a_term and x in b_term]
    summed = [x for x in a_term if x not in out_term]
    left, right = (_Matrix(code, v, term) for v, term in zip(node.operands, (a_term, b_term), strict=True))
    type = node.result.tensor
    strides = code.allocate(type)[1]
    repeated = None if batch else _repeated(left, right, out_term, type.shape, strides)
    if repeated is not None:
        # All of a batch share a weight, but their rows have no common stride.
        batch, (left, right) = [out_term[0]], repeated
    rows, columns = ([x for x in out_term if x in m.term and x not in batch] for m in (left, right))
    a, b = left.lower((batch, rows, summed)), right.lower((batch, summed, columns))
    groups = (batch, rows, columns)
    merged = _merge(out_term, type.shape, strides, groups)
    if merged is None:
        # The groups interleave in memory: compute into a permuted layout.
        order = "".join(x for group in groups for x in group)
        sizes = dict(zip(out_term, type.shape, strict=True))
        of = dict(zip(order, contiguous_strides(tuple(sizes[x] for x in order)), strict=True))
        strides = tuple(of[x] for x in out_term)
        merged = _merge(out_term, type.shape, strides, groups)
        assert merged is not None
    target = name = code.define(node.result, strides)
    code.line(f"{name} = {code.allocate(replace(type, strides=strides))[0]}")
    if not _is_whole(merged if batch else merged[1:], type.shape, strides):
        target = code.fresh()
        code.line(f"{target} = {_view(name, merged, batch)}")
    code.step("vendor", "bmm" if batch else "mm", node.sources)
    function = torch._int_mm if multiplies_bytes(node.attributes) else torch.bmm if batch else torch.mm
    code.line(f"{code.constant(function, 'matmul')}({a}, {b}, out={target})")


def lower_convolution(code: FunctionBuilder, node: Node, product: Node, bias: str = "None") -> None:
    """Append the call of a convolution: of ``product``, which is the node or in its body."""
    code.step("vendor", "convolution", node.sources)
    x, weight = (code.names[v] for v in node.operands[:2])
    sizes = [sizes_text(product.attributes[key]) for key in ("stride", "padding", "dilation")]
    none = sizes_text((0,) * len(product.attributes["stride"]))
    name = code.define(node.result, None)
    function = code.constant(torch.convolution, "convolution")
    options = f"{', '.join(sizes)}, False, {none}, {product.attributes['groups']}"
    code.line(f"{name} = {function}({x}, {weight}, {bias}, {options})")


def lower_vendor_region(code: FunctionBuilder, region: Node) -> None:
    """Append the call of a vendor region: a linear layer or a convolution, with its bias."""
    x, weight, bias = region.operands
    product = next(n for n in region.body if n.has(Trait.CONTRACTION | Trait.CONVOLUTION))
    if product.has(Trait.CONVOLUTION):
        lower_convolution(code, region, product, code.names[bias])
        return
    (a_term, b_term), _ = split_spec(product.attributes["spec"])
    transposed = ".t()" if b_term[0] == a_term[-1] else ""
    code.step("vendor", "linear", region.sources)
    name = code.define(region.result, None)
    function = code.constant(torch.nn.functional.linear, "linear")
    code.line(f"{name} = {function}({code.names[x]}, {code.names[weight]}{transposed}, {code.names[bias]})")


def _is_linear(node: Node, a_term: str, b_term: str, out_term: str) -> bool:
    """Return whether a contraction is ``linear`` with a weight of shape [columns, summed]."""
    linear = len(b_term) == 2 and len(a_term) > 1 and a_term[-1] == b_term[1] and out_term == a_term[:-1] + b_term[0]
    return linear and node.operands[0].tensor.is_contiguous and node.result.tensor.is_contiguous


def _call_einsum(code: FunctionBuilder, node: Node) -> None:
    function = code.constant(torch.einsum, "einsum")
    a, b = (code.names[v] for v in node.operands)
    code.step("vendor", "einsum", node.sources)
    name = code.define(node.result, None)
    if multiplies_bytes(node.attributes):
        a, b = (f"{x}.int()" for x in (a, b))
    code.line(f"{name} = {function}({node.attributes['spec']!r}, {a}, {b})")


class _Matrix:
    """An operand of a matmul: the label, length and stride of each dim."""

    def __init__(self, code: FunctionBuilder, value: Value, term: str) -> None:
        self.code, self.name, self.term = code, code.names[value], term
        self.shape, self.strides = self.given = value.tensor.shape, code.layout(value)

    def repeated(self, label: str, size: Size) -> "_Matrix":
        """Return the operand broadcast along a batch dim."""
        out = copy(self)
        out.term, out.shape, out.strides = label + self.term, (size, *self.shape), (0, *self.strides)
        return out

    def merge(self, *groups: list[str]) -> list[tuple[Size, Size]] | None:
        """Return the length and stride of each group of labels as one dim, or None; see ``_merge``."""
        return _merge(self.term, self.shape, self.strides, groups)

    def lower(self, groups: tuple[list[str], ...]) -> str:
        """Return the operand as a matrix, or a batch of them, whose dims are the groups of labels."""
        merged = self.merge(*groups)
        if merged is None:
            sizes = dict(zip(self.term, self.shape, strict=True))
            dims = tuple(self.term.index(x) for group in groups for x in group)
            shape = tuple(product(tuple(sizes[x] for x in group)) for group in groups)
            shape = shape if groups[0] else shape[1:]
            copied = self.code.fresh()
            self.code.step("copy", "operand of matmul")
            self.code.line(f"{copied} = {self.name}.permute({dims}).reshape({sizes_text(shape)})")
            return copied
        # Torch chooses a routine by the strides of dims of length 1 as well; with these it chooses as in eager.
        for lone, other in ((-2, -1), (-1, -2)):
            if merged[lone][0] == 1:
                merged[lone] = 1, simplify(merged[other][0] * merged[other][1])
        if (merged if groups[0] else merged[1:]) == list(zip(*self.given, strict=True)):
            return self.name
        return _view(self.name, merged, groups[0])


def _repeated(
    left: _Matrix, right: _Matrix, out: str, shape: tuple[Size, ...], strides: tuple[Size, ...]
) -> tuple[_Matrix, _Matrix] | None:
    """Return the operands, one of them broadcast along the first dim of the result; None if that avoids no copy.

    They are in the order in which they compute the result in its own layout.
    """
    label, rest = out[:1], out[1:]
    summed = [x for x in left.term if x in right.term]
    rows, columns = ([x for x in out if x in m.term] for m in (left, right))
    whole = (
        left.merge([], rows, summed),
        right.merge([], summed, columns),
        _merge(out, shape, strides, ([], rows, columns)),
    )
    if None not in whole or not rest:
        return None
    left, right = (m if label in m.term else m.repeated(label, shape[0]) for m in (left, right))
    if rest[-1] in left.term:
        left, right = right, left
    rows, columns = ([x for x in rest if x in m.term] for m in (left, right))
    views = left.merge([label], rows, summed), right.merge([label], summed, columns)
    in_place = _merge(out, shape, strides, ([label], rows, columns))
    return None if None in (*views, in_place) or not rows or not columns else (left, right)


def _is_whole(dims: list[tuple[Size, Size]], shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Return whether a view with these dims is the tensor itself."""
    return dims == [(n, 1 if n == 1 else s) for n, s in zip(shape, strides, strict=True)]


def _view(name: str, merged: list[tuple[Size, Size]], batch: list[str]) -> str:
    dims = merged if batch else merged[1:]
    shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    return f"{name}.as_strided({sizes_text(shape)}, {sizes_text(strides)})"


def _merge(
    term: str, shape: tuple[Size, ...], strides: tuple[Size, ...], groups: tuple[list[str], ...]
) -> list[tuple[Size, Size]] | None:
    """Return the length and stride of each group of labels merged into one dim; None if one has no common stride."""
    sizes = dict(zip(term, zip(shape, strides, strict=True), strict=True))
    out: list[tuple[Size, Size]] = []
    for group in groups:
        length: Size = 1
        stride: Size = 1
        for label in reversed(group):
            n, step = sizes[label]
            if n == 1:
                continue
            if length == 1:
                length, stride = n, step
            elif same_size(step, simplify(stride * length)):
                length = simplify(length * n)
            else:
                return None
        out.append((length, stride))
    return out
