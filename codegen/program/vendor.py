"""A contraction as one call of the vendor's matrix product, over views where layouts allow it; a convolution as one."""

from copy import copy
from dataclasses import replace

import torch

from fusec.codegen.program.text import ProgramText
from fusec.codegen.tile.sizes import sizes_text
from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import Size, contiguous_strides, product, same_size, simplify


def write_contraction(text: ProgramText, node: Node) -> None:
    """Append the lines that compute a contraction."""
    (a_term, b_term), out_term = split_spec(node.attributes["spec"])
    a, b = node.operands
    batch = [x for x in out_term if x in a_term and x in b_term]
    rows = [x for x in out_term if x in a_term and x not in b_term]
    columns = [x for x in out_term if x in b_term and x not in a_term]
    summed = [x for x in a_term if x in b_term and x not in out_term]
    plain = len(batch) + len(rows) + len(summed) == len(a_term) and len(set(a_term)) == len(a_term)
    plain = plain and len(batch) + len(columns) + len(summed) == len(b_term) and len(set(b_term)) == len(b_term)
    if not plain or not summed or not node.result.dtype.is_float:
        _write_einsum(text, node)
        return
    if _is_linear(node, a_term, b_term, out_term):
        # One call, as eager makes it, without the views that the general form needs.
        text.step("vendor", "linear", node.sources)
        name = text.define(node.result, None)
        function = text.constant(torch.nn.functional.linear, "linear")
        text.line(f"{name} = {function}({text.names[a]}, {text.names[b]})")
        return
    left, right = _Matrix(text, a, a_term), _Matrix(text, b, b_term)
    type = node.result.tensor
    allocation, strides = text.allocate(type)
    if type.numel == 0:
        text.line(f"{text.define(node.result, strides)} = {allocation}")
        return
    repeated = None if batch else _repeated(left, right, out_term, type.shape, strides)
    if repeated is not None:
        # A weight that all of a batch meet, whose rows do not lie in memory as those of one matrix.
        batch, (left, right) = [out_term[0]], repeated
        rows, columns = ([x for x in out_term[1:] if x in m.term] for m in (left, right))
    a_matrix, b_matrix = left.write((batch, rows, summed)), right.write((batch, summed, columns))
    groups = (batch, rows, columns)
    merged = _merge(out_term, type.shape, strides, groups)
    if merged is None:
        # The groups interleave in memory: compute them apart, then leave the permuted view.
        order = "".join(x for group in groups for x in group)
        sizes = dict(zip(out_term, type.shape, strict=True))
        dense = tuple(sizes[x] for x in order)
        of = dict(zip(order, contiguous_strides(dense), strict=True))
        strides = tuple(of[x] for x in out_term)
        allocation, _ = text.allocate(replace(type, strides=strides))
        merged = _merge(out_term, type.shape, strides, groups)
        assert merged is not None
    name = text.define(node.result, strides)
    text.line(f"{name} = {allocation}")
    target = name
    if not _is_whole(merged if batch else merged[1:], type.shape, strides):
        target = text.fresh()
        text.line(f"{target} = {_view(name, merged, batch)}")
    text.step("vendor", "bmm" if batch else "mm", node.sources)
    function = text.constant(torch.bmm if batch else torch.mm, "matmul")
    text.line(f"{function}({a_matrix}, {b_matrix}, out={target})")


def write_convolution(text: ProgramText, node: Node) -> None:
    """Append the call for a convolution."""
    text.step("vendor", "convolution", node.sources)
    _call_convolution(text, node, node, "None")


def _call_convolution(text: ProgramText, node: Node, product: Node, bias: str) -> None:
    x, weight = (text.names[v] for v in node.operands[:2])
    sizes = [sizes_text(product.attributes[key]) for key in ("stride", "padding", "dilation")]
    none = sizes_text((0,) * len(product.attributes["stride"]))
    name = text.define(node.result, None)
    function = text.constant(torch.convolution, "convolution")
    options = f"{', '.join(sizes)}, False, {none}, {product.attributes['groups']}"
    text.line(f"{name} = {function}({x}, {weight}, {bias}, {options})")


def write_biased(text: ProgramText, region: Node) -> None:
    """Append the call for a vendor region: rows times a weight, or a convolution, plus a bias."""
    x, weight, bias = region.operands
    product = next(n for n in region.body if n.has(Trait.CONTRACTION | Trait.CONVOLUTION))
    if product.has(Trait.CONVOLUTION):
        text.step("vendor", "convolution", region.sources)
        _call_convolution(text, region, product, text.names[bias])
        return
    (a_term, b_term), _ = split_spec(product.attributes["spec"])
    transposed = ".t()" if b_term[0] == a_term[-1] else ""
    text.step("vendor", "linear", region.sources)
    name = text.define(region.result, None)
    function = text.constant(torch.nn.functional.linear, "linear")
    text.line(f"{name} = {function}({text.names[x]}, {text.names[weight]}{transposed}, {text.names[bias]})")


def _is_linear(node: Node, a_term: str, b_term: str, out_term: str) -> bool:
    """Whether it is rows times a weight of [columns, summed]."""
    linear = len(b_term) == 2 and len(a_term) > 1 and a_term[-1] == b_term[1] and out_term == a_term[:-1] + b_term[0]
    return linear and node.operands[0].tensor.is_contiguous and node.result.tensor.is_contiguous


def _write_einsum(text: ProgramText, node: Node) -> None:
    function = text.constant(torch.einsum, "einsum")
    a, b = (text.names[v] for v in node.operands)
    text.step("vendor", "einsum", node.sources)
    name = text.define(node.result, None)
    text.line(f"{name} = {function}({node.attributes['spec']!r}, {a}, {b})")


class _Matrix:
    """An operand of a product: a label, a length and a stride for each of its dims."""

    def __init__(self, text: ProgramText, value: Value, term: str) -> None:
        self.text, self.name, self.term = text, text.names[value], term
        self.shape, self.strides = self.given = value.tensor.shape, text.layout(value)

    def repeated(self, label: str, size: Size) -> "_Matrix":
        """The same for every element of a batch."""
        out = copy(self)
        out.term, out.shape, out.strides = label + self.term, (size, *self.shape), (0, *self.strides)
        return out

    def merge(self, *groups: list[str]) -> list[tuple[Size, Size]] | None:
        """Length and stride of each group of labels as one dim, where memory allows that."""
        return _merge(self.term, self.shape, self.strides, groups)

    def write(self, groups: tuple[list[str], ...]) -> str:
        """The operand as a matrix (or a batch of them) whose dims are the groups of labels."""
        merged = self.merge(*groups)
        if merged is None:
            sizes = dict(zip(self.term, self.shape, strict=True))
            dims = tuple(self.term.index(x) for group in groups for x in group)
            shape = tuple(product(tuple(sizes[x] for x in group)) for group in groups)
            shape = shape if groups[0] else shape[1:]
            copied = self.text.fresh()
            self.text.step("copy", "operand of matmul")
            self.text.line(f"{copied} = {self.name}.permute({dims}).reshape({sizes_text(shape)})")
            return copied
        # The stride of a dim of length 1 decides which routine torch takes; with this one it sums in parts, as eager.
        for lone, other in ((-2, -1), (-1, -2)):
            if merged[lone][0] == 1:
                merged[lone] = 1, simplify(merged[other][0] * merged[other][1])
        if (merged if groups[0] else merged[1:]) == list(zip(*self.given, strict=True)):
            return self.name
        return _view(self.name, merged, groups[0])


def _repeated(
    left: _Matrix, right: _Matrix, out: str, shape: tuple[Size, ...], strides: tuple[Size, ...]
) -> tuple[_Matrix, _Matrix] | None:
    """The operands, one of them repeated for each element of the result's first dim; None where that spares no copy.

    They are in the order in which they make the result in place.
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
    spared = left.merge([label], rows, summed), right.merge([label], summed, columns)
    in_place = _merge(out, shape, strides, ([label], rows, columns))
    return None if None in (*spared, in_place) or not rows or not columns else (left, right)


def _is_whole(dims: list[tuple[Size, Size]], shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether the view would address the same elements as the tensor itself."""
    return dims == [(n, 1 if n == 1 else s) for n, s in zip(shape, strides, strict=True)]


def _view(name: str, merged: list[tuple[Size, Size]], batch: list[str]) -> str:
    dims = merged if batch else merged[1:]
    shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    return f"{name}.as_strided({sizes_text(shape)}, {sizes_text(strides)})"


def _merge(
    term: str, shape: tuple[Size, ...], strides: tuple[Size, ...], groups: tuple[list[str], ...]
) -> list[tuple[Size, Size]] | None:
    """Length and stride of each group of labels taken as one dim; None where one does not lie in memory as one."""
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
