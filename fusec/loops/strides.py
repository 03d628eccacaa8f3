"""Strides of views and of dense tensors."""

from dataclasses import replace

from fusec.ir.graph import Node, Value
from fusec.ir.types import Size, TensorType, contiguous_strides, same_size, simplify
from fusec.loops.affine import at_least, divide


def view_layout(node: Node, type: TensorType) -> tuple[tuple[Size, ...], Size] | None:
    """Return strides and offset (in elements) of a view of a tensor of ``type``; None where the view needs a copy."""
    if node.is_op("permute"):
        return tuple(type.strides[d] for d in node.attributes["dims"]), 0
    if node.is_op("slice"):
        d, start, step = (node.attributes[k] for k in ("dim", "start", "step"))
        strides = list(type.strides)
        strides[d] = simplify(strides[d] * step)
        return tuple(strides), simplify(start * type.strides[d])
    if node.is_op("window"):
        d, step = node.attributes["dim"], node.attributes["step"]
        strides = [*type.strides, type.strides[d]]
        strides[d - 1] = simplify(strides[d - 1] * step)
        return tuple(strides), 0
    if node.is_op("expand"):
        shape = node.attributes["shape"]
        lead = len(shape) - type.rank
        old = zip(type.shape, type.strides, shape[lead:], strict=True)
        return (0,) * lead + tuple(stride if same_size(n, m) else 0 for n, stride, m in old), 0
    if node.is_op("reshape"):
        strides_ = _reshaped(type, node.attributes["shape"])
        return None if strides_ is None else (strides_, 0)
    return None


def memory_layout(value: Value) -> TensorType:
    """Return the type of a value, with strides in the memory of what it is a view of; its own where it is none."""
    node = value.producer
    layout = view_layout(node, memory_layout(node.operands[0])) if node is not None and node.is_alias else None
    return value.tensor if layout is None else replace(value.tensor, strides=layout[0])


def _reshaped(type: TensorType, shape: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """Return the strides of ``shape`` over the same memory, matching contiguous dims from the right; else None."""
    if any(n == 0 for n in type.shape):
        return contiguous_strides(shape)
    runs = _runs(type)
    out: list[Size] = []
    run = runs.pop() if runs else (1, 1)
    length, stride = run
    for n in reversed(shape):
        if n == 1:
            out.append(stride)
            continue
        if length == 1:
            if not runs:
                return None
            length, stride = runs.pop()
        rest = divide(length, n)
        if rest is None:
            return None
        out.append(stride)
        length, stride = rest, simplify(stride * n)
    return tuple(reversed(out)) if length == 1 and not runs else None


def _runs(type: TensorType) -> list[tuple[Size, Size]]:
    """Return length and innermost stride of each maximal group of contiguous dims, outer first."""
    runs: list[tuple[Size, Size]] = []
    for n, stride in zip(reversed(type.shape), reversed(type.strides), strict=True):
        if n == 1:
            continue
        if runs and same_size(stride, simplify(runs[-1][1] * runs[-1][0])):
            runs[-1] = (simplify(runs[-1][0] * n), runs[-1][1])
        else:
            runs.append((n, stride))
    return runs[::-1]


def dense(type: TensorType) -> TensorType:
    """Return the type with dense strides: its own where they only permute dims, else row-major."""
    order = _order(type)
    strides: list[Size] = [1] * type.rank
    step: Size = 1
    for d in reversed(order):
        strides[d] = step
        step = simplify(step * type.shape[d]) if type.shape[d] != 0 else step  # as torch does
    kept = all(same_size(a, b) or n == 1 for a, b, n in zip(strides, type.strides, type.shape, strict=True))
    return TensorType(type.dtype, type.shape, tuple(strides) if kept else contiguous_strides(type.shape), type.device)


def _order(type: TensorType) -> list[int]:
    """Return the dims from the largest stride to the smallest; where that is not proven, in their order."""
    order: list[int] = []
    for d in range(type.rank):
        place = len(order)
        while place and _before(type, d, order[place - 1]):
            place -= 1
        order.insert(place, d)
    return order


def _before(type: TensorType, a: int, b: int) -> bool:
    larger = at_least(type.strides[a], type.strides[b])
    return larger and not same_size(type.strides[a], type.strides[b])
