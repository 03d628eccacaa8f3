"""Strides of views are those of torch's own views; what torch cannot view is copied."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType, contiguous_strides, symbol
from fusec.loops.strides import dense, view_layout

N = symbol("n")


def typed(x: Tensor) -> TensorType:
    return TensorType(F32, tuple(x.shape), x.stride())


def laid_out() -> Iterator[Tensor]:
    """Generate tensors of all layouts: dense, permuted, strided, with overlapping elements."""
    for shape in ((2, 3, 4), (4, 1, 6), (6, 4), (12,), (1, 1), (2, 0, 3)):
        whole = torch.empty(shape)
        for dims in itertools.permutations(range(len(shape))):
            yield whole.permute(dims)
        yield torch.empty(*shape[:-1], shape[-1] + 2)[..., 1:-1]
        yield torch.empty(2 * shape[0], *shape[1:])[::2]
        yield torch.empty(1, *shape[1:]).expand(shape)
        yield torch.empty(*shape[:-1], 1).expand(shape)


def layout(x: Tensor, op: str, **attributes: Any) -> Any:
    graph = Graph()
    return view_layout(graph.add_node(op, [graph.add_input(typed(x))], attributes), typed(x))


def factors(numel: int, most: int = 4) -> Iterator[tuple[int, ...]]:
    if most == 0:
        return
    yield (numel,)
    for n in range(1, numel + 1):
        if numel % n == 0:
            yield from ((n, *rest) for rest in factors(numel // n, most - 1))


@pytest.mark.parametrize("x", list(laid_out()), ids=lambda x: f"{tuple(x.shape)} {x.stride()}")
def test_views_have_the_strides_of_torch(x: Tensor) -> None:
    for dims in itertools.permutations(range(x.ndim)):
        assert layout(x, "permute", dims=dims) == (x.permute(dims).stride(), 0)
    for d in range(-x.ndim, 0):
        for start, step in itertools.product((0, 1), (1, 2)):
            if start < x.shape[d]:
                there = x.narrow(d, start, x.shape[d] - start)
                there = there[(..., slice(None, None, step), *[slice(None)] * (-1 - d))]
                found = layout(x, "slice", dim=d, start=start, stop=x.shape[d], step=step)
                assert found == (there.stride(), there.storage_offset() - x.storage_offset())
    wide = (5, *(3 if n == 1 else n for n in x.shape))
    strides, offset = layout(x, "expand", shape=wide)
    expected = x.expand(wide).stride()
    assert offset == 0 and all(a == b for a, b, n in zip(strides, expected, wide, strict=True) if n > 1)
    assert layout(x, "neg") is None
    for shape in factors(x.numel()) if x.numel() else [(0, 5), (3, 0)]:
        found = layout(x, "reshape", shape=shape)
        try:
            expected = x.view(shape).stride()
        except RuntimeError:
            assert found is None, shape
            continue
        assert found is not None, shape
        assert all(a == b for a, b, n in zip(found[0], expected, shape, strict=True) if n != 1 and x.numel()), shape


@pytest.mark.parametrize("x", [x for x in laid_out() if x.numel()], ids=lambda x: f"{tuple(x.shape)} {x.stride()}")
def test_dense_types_have_no_gaps(x: Tensor) -> None:
    found, kept = dense(typed(x)), torch.empty_like(x).stride()
    permuted = sorted(zip(x.stride(), x.shape, strict=True)) == sorted(zip(kept, x.shape, strict=True))
    wanted = kept if permuted else contiguous_strides(tuple(x.shape))
    assert (found.dtype, found.shape) == (F32, tuple(x.shape))
    assert all(a == b for a, b, n in zip(found.strides, wanted, x.shape, strict=True) if n > 1)


def test_views_of_symbolic_sizes() -> None:
    graph = Graph()
    x = graph.add_input(TensorType(F32, (N, 4, 6), (24, 6, 1)))
    assert view_layout(graph.add_node("reshape", [x], {"shape": (4 * N, 6)}), x.tensor) == ((6, 1), 0)
    assert view_layout(graph.add_node("reshape", [x], {"shape": (N, 2, 12)}), x.tensor) == ((24, 12, 1), 0)
    turned = graph.add_input(TensorType(F32, (4, N, 6), (6, 24, 1)))
    assert view_layout(graph.add_node("reshape", [turned], {"shape": (4 * N, 6)}), turned.tensor) is None
    assert dense(TensorType(F32, (4, N, 6), (6, 24, 1))).strides == (6, 24, 1)
    assert dense(TensorType(F32, (4, N), (2 * N, 2))).strides == (N, 1)


def test_windows_overlap() -> None:
    for x in laid_out():
        for d, n in enumerate(x.shape):
            for size, step in {(min(n, 2), 1), (n, 3), (min(n, 1), 2)}:
                seen = x.unfold(d, size, step)
                assert layout(x, "window", dim=d - x.ndim, size=size, step=step) == (seen.stride(), 0)
