"""View and data-movement operations of ATen as reshape, permute, expand, slice, window and concat."""

import sys
from dataclasses import replace

import sympy

from fusec.errors import ImportFailure
from fusec.frontend.dtypes import to_type
from fusec.frontend.lowering import Argument, Call, Lowering, lowers
from fusec.frontend.sizes import to_size
from fusec.ir.graph import Node, Value, base
from fusec.ir.types import BOOL, I32, I64, Size, TensorType, product, same_shape, same_size, simplify


@lowers("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_copy.default",
        "aten._reshape_alias.default", "aten.view_copy.default", "aten.squeeze.default", "aten.squeeze.dim",
        "aten.squeeze.dims", "aten.unsqueeze.default", "aten.flatten.using_ints", "aten.unflatten.int",
        "prims.squeeze.default", "prims.collapse_view.default", "prims.split_dim.default")  # fmt: skip
def _reshape(low: Lowering, call: Call) -> Value:
    x: Value = call["self"] if "self" in call.arguments else call["a"]
    return low.reshape(x, call.out.shape)


@lowers("aten.as_strided.default")
def _as_strided(low: Lowering, call: Call) -> Value:
    fake, offset = call.fakes["self"], call["storage_offset"]
    source, given = to_type(fake), TensorType(call.out.dtype, call.out.shape, tuple(map(to_size, call["stride"])))
    if not isinstance(source, TensorType) or not source.is_contiguous or not given.is_contiguous:
        raise ImportFailure("a view by strides", why="it is a slice only where its elements are neighbours, in order")
    first = 0 if offset is None else to_size(offset) - to_size(fake.storage_offset())
    if first == 0 and same_size(source.numel, given.numel):
        return low.reshape(call["self"], call.out.shape)
    inside = all(isinstance(n, int) for n in (first, source.numel, given.numel))
    if not inside or not 0 <= first <= source.numel - given.numel:
        raise ImportFailure("a view by strides", why="it is not known to be within the tensor")
    flat = low.reshape(call["self"], (source.numel,))
    return low.reshape(low.slice(flat, 0, first, given.numel), call.out.shape)


@lowers("aten.permute.default", "prims.transpose.default")
def _permute(low: Lowering, call: Call) -> Value:
    x: Value = call["self"] if "self" in call.arguments else call["a"]
    dims = call["dims"] if "dims" in call.arguments else call["permutation"]
    rank = len(x.shape)
    return _permuted(low, x, tuple(d % rank for d in dims))


@lowers("aten.t.default", "aten.transpose.int")
def _transpose(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    rank = len(x.shape)
    if rank == 0:
        return x
    dims = list(range(rank))
    a, b = call.get("dim0", 0) % rank, call.get("dim1", 1) % rank
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(low, x, tuple(dims))


def _permuted(low: Lowering, x: Value, dims: tuple[int, ...]) -> Value:
    return x if dims == tuple(range(len(dims))) else low.emit("permute", x, dims=dims)


@lowers("aten.expand.default", "aten.expand_as.default", "prims.broadcast_in_dim.default")
def _expand(low: Lowering, call: Call) -> Value:
    if call.target.startswith("prims"):
        x: Value = call["a"]
        shape: list[Size] = [1] * len(call.out.shape)
        for n, d in zip(x.shape, call["broadcast_dimensions"], strict=True):
            shape[d] = n
        return low.expand(low.reshape(x, tuple(shape)), call.out.shape)
    return low.expand(call["self"], call.out.shape)


@lowers("aten.repeat.default")
def _repeat(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    repeats = list(call["repeats"])
    shape = (1,) * (len(repeats) - len(x.shape)) + x.shape
    split: list[Size] = [part for n in shape for part in (1, n)]
    wanted: list[Size] = [part for r, n in zip(repeats, shape, strict=True) for part in (r, n)]
    x = low.reshape(x, tuple(split))
    return low.reshape(low.expand(x, tuple(wanted)), call.out.shape)


@lowers("aten.embedding.default", "aten.index_select.default")
def _take(low: Lowering, call: Call) -> Value:
    of_rows = call.target == "aten.embedding.default"
    table, index = (call["weight"], call["indices"]) if of_rows else (call["self"], call["index"])
    rank = len(table.shape)
    if rank == 0:
        raise ImportFailure("a lookup in a 0-d tensor", why="it has no dim to index")
    index = low.cast(index, I64)
    if not of_rows:
        index = low.reshape(index, (index.tensor.numel,))
    return low.emit("take", table, index, dim=(0 if of_rows else call["dim"] % rank) - rank)


@lowers("aten.gather.default")
def _gather(low: Lowering, call: Call) -> Value:
    table, index = call["self"], low.cast(call["index"], I64)
    if len(table.shape) != len(index.shape) or not table.shape:
        raise ImportFailure("a lookup in or by a 0-d tensor", why="it has no dim to index")
    return low.emit("gather", table, index, dim=call["dim"] % len(table.shape) - len(table.shape))


@lowers("aten.index.Tensor")
def _index(low: Lowering, call: Call) -> Value:
    """Lower indexing: one index tensor is a lookup; several that enumerate a dim each are a view."""
    x, given = call["self"], {d: index for d, index in enumerate(call["indices"]) if index is not None}
    if any(index.dtype not in (I32, I64) for index in given.values()):
        raise ImportFailure("a lookup by a mask", why="the number of elements is known only at run time")
    if len(given) == 1:
        ((dim, index),) = given.items()
        index = counted_from_start(low, low.cast(index, I64), x.shape[dim])
        return low.emit("take", x, index, dim=dim - len(x.shape))
    rank, first, last = max(len(index.shape) for index in given.values()), min(given), max(given)
    along = [_counted(index, x.shape[d], rank) for d, index in given.items()]
    dims = [d for found in along if found for d in found]
    if None in along or dims != sorted(set(dims)) or len(given) != last - first + 1:
        if (joined := joined_rows(low, x, given)) is None:
            raise ImportFailure("a lookup with index tensors in several dims", why="they are known only at run time")
        return low.emit("take", *joined, dim=first - len(joined[0].shape))
    counts = {d: x.shape[dim] for dim, found in zip(given, along, strict=True) for d in found or ()}
    counted = tuple(counts.get(d, 1) for d in range(rank))
    return low.expand(low.reshape(x, (*x.shape[:first], *counted, *x.shape[last + 1 :])), call.out.shape)


def counted_from_start(low: Lowering, index: Value, n: Size) -> Value:
    """Return indices into a dim of length ``n`` with negative ones wrapped."""
    behind = low.pointwise("add", index, n, dtype=I64)
    return low.emit("where", low.pointwise("lt", index, 0, dtype=I64), behind, index)


def joined_rows(low: Lowering, x: Value, given: dict[int, Value]) -> tuple[Value, Value] | None:
    """Return a tensor with several dims as one, and indices into it instead of one index tensor for each.

    The indices have the dims of the index tensors, then those between that have none. An index that is out of range in
    its own dim is so in the result. None where the dims are not one in memory, or others come first.
    """
    dims = range(min(given), max(given) + 1)
    between, strides = [d for d in dims if d not in given], x.tensor.strides
    if any(not same_size(strides[d], strides[d + 1] * x.shape[d + 1]) for d in dims[:-1]) or (between and dims[0]):
        return None
    joined, inside = low.number(0, I64), low.number(True, BOOL)
    for d in dims:
        n = x.shape[d]
        if d in given:
            index = counted_from_start(low, low.cast(given[d], I64), n)
            index = low.reshape(index, (*index.shape, *(1 for _ in between)))
            for op, end in (("ge", 0), ("lt", n)):
                inside = low.emit("and", inside, low.pointwise(op, index, end, dtype=I64))
        else:
            index = low.emit("iota", size=n, dtype=I64, device=low.device)
            index = low.reshape(index, (n, *(1 for other in between if other > d)))
        joined = low.emit("add", low.pointwise("mul", joined, n, dtype=I64), index)
    rows = low.reshape(x, (*x.shape[: dims[0]], product(x.shape[dims[0] : dims[-1] + 1]), *x.shape[dims[-1] + 1 :]))
    rows.type = replace(rows.tensor, strides=(*strides[: dims[0]], *strides[dims[-1] :]))  # written in place, perhaps
    return rows, low.emit("where", inside, joined, low.number(-1, I64))


def _counted(index: Value, n: Size, rank: int) -> tuple[int, ...] | None:
    """Return the dim of several index tensors along which one of them is 0 to ``n``, none where it is only 0.

    None where it does not count.
    """
    along = tuple(d + rank - len(index.shape) for d, m in enumerate(index.shape) if m != 1 and same_size(m, n))
    while (node := index.producer) is not None and (node.is_op("reshape") or _adds_nothing(node)):
        index = node.operands[0]
    counts = node is not None and node.is_op("iota") and same_size(index.tensor.numel, n)
    return along if counts and len(along) == (0 if n == 1 else 1) else None


def _adds_nothing(node: Node) -> bool:
    """Return whether a term is 0, such as the length of an empty cache."""
    other = node.operands[1].producer if node.is_op("add") else None
    return other is not None and other.is_op("constant") and other.attributes["value"] == 0


@lowers("aten.slice.Tensor")
def _slice(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    dim = call["dim"] % len(x.shape)
    length = call.out.shape[dim]
    start = first_index(call["start"], x, dim, call) if call["start"] is not None else 0
    if isinstance(start, int) and isinstance(length, int) and length == 0:
        start = 0
    return low.slice(x, dim, start, length, call["step"])


def first_index(start: Argument, x: Value, dim: int, call: Call | None = None) -> Size:
    """A start index as eager reads it: counted from the end if negative, and clamped to the length."""
    if isinstance(start, Value):
        raise ImportFailure(
            "a slice that starts at a number known only at run time", why="the offset of a view is part of its type"
        )
    n = x.shape[dim]
    if isinstance(start, int):
        start = start + n if start < 0 else start
        if isinstance(start, int):
            start = max(start, 0)
            return min(start, n) if isinstance(n, int) else start
    if start.is_nonnegative or same_size(start, n):
        return start
    if start.is_negative:
        return start + n
    # Eager's own answer can be read from the view that it made.
    if call is not None and not same_size(stride := to_size(call.fakes["self"].stride(dim)), 0):
        offset = to_size(call.fake_results[0].storage_offset()) - to_size(call.fakes["self"].storage_offset())
        found = simplify(sympy.simplify(sympy.sympify(offset) / stride))
        if isinstance(found, int) or found.is_integer:
            return found
    raise ImportFailure(
        f"a slice from {start}, whose sign is unknown", why="a negative start counts from the end",
        fix="torch._check(start >= 0), or dynamic=False",
    )  # fmt: skip


def row_index(index: Argument, x: Value, dim: int, call: Call | None = None) -> Size:
    """Return a wrapped row index; eager raises for an index out of range, so nothing is clamped."""
    if isinstance(index, int):
        return index + x.shape[dim] if index < 0 else index
    return first_index(index, x, dim, call)


@lowers("aten.select.int")
def _select(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    dim = call["dim"] % len(x.shape)
    row = low.slice(x, dim, row_index(call["index"], x, dim, call), 1)
    return low.reshape(row, call.out.shape)


@lowers("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.split.sizes",
        "aten.split_with_sizes_copy.default", "aten.split_copy.Tensor")  # fmt: skip
def _split(low: Lowering, call: Call) -> list[Value | None]:
    x: Value = call["self"]
    dim, start = call["dim"] % len(x.shape), 0
    parts: list[Value | None] = []
    for ty in call.types:
        assert isinstance(ty, TensorType)
        parts.append(low.slice(x, dim, start, ty.shape[dim]))
        start = start + ty.shape[dim]
    return parts


@lowers("aten.unbind.int")
def _unbind(low: Lowering, call: Call) -> list[Value | None]:
    x: Value = call["self"]
    dim = call["dim"] % len(x.shape)
    return [low.reshape(low.slice(x, dim, i, 1), ty.shape) for i, ty in enumerate(call.types)]  # type: ignore[union-attr]


@lowers("aten.cat.default")
def _cat(low: Lowering, call: Call) -> Value:
    # Eager concatenates an empty 1-d tensor with tensors of any rank; it adds no elements.
    parts = [p for p in call["tensors"] if not (p.shape == (0,) and len(call.out.shape) != 1)]
    return _joined(low, [low.cast(p, call.out.dtype) for p in parts], call["dim"])


@lowers("aten.stack.default")
def _stack(low: Lowering, call: Call) -> Value:
    rank = len(call.out.shape)
    dim = call["dim"] % rank
    shape = tuple(1 if d == dim else n for d, n in enumerate(call.out.shape))
    return _joined(low, [low.reshape(low.cast(p, call.out.dtype), shape) for p in call["tensors"]], dim)


def _joined(low: Lowering, parts: list[Value], dim: int) -> Value:
    rank = len(parts[0].shape)
    return parts[0] if len(parts) == 1 else low.emit("concat", *parts, dim=dim % rank - rank)


@lowers("aten.roll.default")
def _roll(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    dims, shifts = call["dims"], call["shifts"]
    flat = not dims
    if flat:
        x, dims = low.reshape(x, (product(x.shape),)), [0]
    for dim, shift in zip(dims, shifts, strict=True):
        n = x.shape[dim]
        if not isinstance(n, int) or not isinstance(shift, int):
            raise ImportFailure(
                "a roll by a symbolic number, or of a symbolic length", why="the position of the cut has to be known"
            )
        if n and shift % n:
            cut = n - shift % n
            x = _joined(low, [low.slice(x, dim, cut, n - cut), low.slice(x, dim, 0, cut)], dim)
    return low.reshape(x, call.out.shape)


@lowers("aten.slice_backward.default", "aten.select_backward.default")
def _slice_backward(low: Lowering, call: Call) -> Value:
    grad, shape = call["grad_output"], call.out.shape
    dim, selects = call["dim"] % len(shape), "select" in call.target
    if selects:
        grad = low.reshape(grad, tuple(1 if d == dim else n for d, n in enumerate(shape)))
    elif call["step"] != 1:
        raise ImportFailure("the gradient of a slice with a step", why="zeros would go between its elements")
    zeros = low.expand(low.number(0, call.out.dtype), shape)
    if same_size(grad.shape[dim], 0):
        return zeros
    if selects:
        start = row_index(call["index"], zeros, dim)
    elif call["end"] == sys.maxsize:
        start = shape[dim] - grad.shape[dim]
    else:
        start = first_index(call["start"], zeros, dim)
    return _with_piece(low, zeros, dim, start, grad)


@lowers("aten.slice_scatter.default")
def _slice_scatter(low: Lowering, call: Call) -> Value:
    x, source = call["self"], low.cast(call["src"], call.out.dtype)
    if call["step"] != 1:
        raise ImportFailure("a slice with a step that is written to", why="it is no piece of a concatenation")
    dim = call["dim"] % len(x.shape)
    if same_size(source.shape[dim], 0):
        return x
    start = first_index(call["start"] or 0, x, dim)
    return source if same_shape(source.shape, x.shape) else _with_piece(low, x, dim, start, source)


@lowers("aten.select_scatter.default")
def _select_scatter(low: Lowering, call: Call) -> Value:
    x = call["self"]
    dim = call["dim"] % len(x.shape)
    row = low.reshape(call["src"], tuple(1 if d == dim else n for d, n in enumerate(x.shape)))
    return _with_piece(low, x, dim, row_index(call["index"], x, dim), row)


def _with_piece(low: Lowering, x: Value, dim: int, start: Size, piece: Value) -> Value:
    """Return a value whose elements from ``start`` on, along ``dim``, are replaced by a piece."""
    n, end = x.shape[dim], start + piece.shape[dim]
    parts = [low.slice(x, dim, 0, start)] if not same_size(start, 0) else []
    parts.append(piece)
    parts += [low.slice(x, dim, end, n - end)] if not same_size(end, n) else []
    return _joined(low, parts, dim)


def replaced_at(low: Lowering, call: Call) -> Value:
    """Lower an update: one value under a mask of leading dims is a ``where``; a row at a known index is a concat."""
    x, given = call["self"], {d: index for d, index in enumerate(call["indices"]) if index is not None}
    if len(given) == 1 and not call["accumulate"]:
        ((dim, index),) = given.items()
        if dim == 0 and index.dtype == BOOL and call["values"].type.numel == 1:
            mask = low.reshape(index, (*index.shape, *(1 for _ in x.shape[len(index.shape) :])))
            return low.emit("where", mask, low.reshape(call["values"], ()), x)
        number = base(index).producer
        if number is not None and number.is_op("constant") and index.dtype in (I32, I64) and index.tensor.numel == 1:
            return _with_row(low, x, dim, number.attributes["value"], call["values"], index.shape)
    raise ImportFailure("an update at indices in a tensor", why="they are known only at run time")


def _with_row(low: Lowering, x: Value, dim: int, at: int, value: Value, among: tuple[Size, ...]) -> Value:
    """Return a value with one row along ``dim`` replaced; the new row has length 1 there."""
    n, before, behind = x.shape[dim], x.shape[:dim], x.shape[dim + 1 :]
    if not isinstance(n, int) or not -n <= at < n:
        raise ImportFailure(f"a row at index {at} of {n}", why="it is not known to be in range")
    at %= n
    row = low.reshape(low.expand(low.cast(value, x.dtype), (*before, *among, *behind)), (*before, 1, *behind))
    return _with_piece(low, x, dim, at, row)


@lowers("aten.unfold.default")
def _unfold(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    if not x.shape:
        return low.reshape(x, call.out.shape)
    dim = call["dimension"] % len(x.shape) - len(x.shape)
    return low.emit("window", x, dim=dim, size=call["size"], step=call["step"])


@lowers("aten.constant_pad_nd.default")
def _pad(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    rank, pads = len(x.shape), call["pad"]
    for i in range(len(pads) // 2):
        dim = rank - 1 - i
        parts: list[Value] = []
        for amount in (pads[2 * i], None, pads[2 * i + 1]):
            if amount is None:
                parts.append(x)
            elif not isinstance(amount, int) or amount < 0:
                raise ImportFailure(f"padding by {amount}", why="only a known number of elements can be added")
            elif amount:
                shape = tuple(amount if d == dim else n for d, n in enumerate(x.shape))
                parts.append(low.expand(low.number(call["value"], x.dtype), shape))
        x = _joined(low, parts, dim)
    return x
