"""Strides of outputs and the storage they share, which are those of aot_eager."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from fusec import dynamo
from tests.backend.agreement import check, interpret, sharing


def test_empty_tensors(backend: Any) -> None:
    check(backend, lambda x: x.to(torch.float32), torch.zeros(1, 1, 0, dtype=torch.bfloat16))
    check(backend, lambda x: x.exp(), torch.zeros(7, 0, 3).transpose(0, 2))
    check(backend, lambda x: x.sum(0, keepdim=True) * 2, torch.zeros(7, 0))


def test_strides_of_single_rows(backend: Any) -> None:
    rows = torch.zeros(1, 17, dtype=torch.long)
    check(backend, lambda w: F.embedding(rows, w).movedim(0, -1), torch.randn(1, 17).requires_grad_(), grad=True)


def padded(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.ops.aten.copy(x.new_empty_strided((3, 4), (8, 1)), x)
    return y, y[1:], y.t()


def part_of_padded(x: Tensor) -> tuple[Tensor, ...]:
    y = (F.pad(x, (0, 4)) * 2)[:, :4]
    return y, y[1:], y.t()


@pytest.mark.parametrize("function", [padded, part_of_padded])
def test_outputs_in_one_padded_storage(backend: Any, function: Any) -> None:
    check(backend, function, torch.randn(3, 4))


STEPS = {
    "transpose": lambda x: x.transpose(0, -1),
    "flip": lambda x: x.flip(0),
    "part": lambda x: x[..., : x.shape[-1] // 2 + 1],
    "every second": lambda x: x[::2],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.squeeze(),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "contiguous": lambda x: x.contiguous(),
    "flatten": lambda x: x.reshape(-1),
    "double": lambda x: x * 2,
    "to integers": lambda x: x.to(torch.int32),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "add its transpose": lambda x: x + x.mT if x.ndim > 1 and x.shape[-1] == x.shape[-2] else x + 1,
    "join": lambda x: torch.cat([x, x], -1),
}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(st.sampled_from(sorted(STEPS)), max_size=5),
       st.lists(st.integers(0, 5), min_size=1, max_size=3), st.permutations(range(3)))  # fmt: skip
@settings(deadline=None, max_examples=12)
def test_strides_and_sharing_are_aot_eagers(
    shape: list[int], steps: list[str], kept: list[int], order: list[int]
) -> None:
    """Of some intermediate values, each an output; torch's fake functions guess the strides of dims of length 1."""
    torch._dynamo.reset()
    x = torch.randn(shape).permute([d for d in order if d < len(shape)])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step in steps:
            values.append(STEPS[step](values[-1] if values[-1].ndim else values[-1][None]))
        return tuple(values[i] for i in kept if i < len(values))

    results = []
    with torch.no_grad():
        for backend in ("aot_eager", dynamo.backend_with(interpret), dynamo.backend):
            torch._dynamo.reset()
            outputs = torch.compile(function, backend=backend, dynamic=False)(x)
            results.append(outputs)
            assert sharing([*outputs, x]) == sharing([*results[0], x])
    for outputs in results[1:]:
        assert [significant_strides(x) for x in outputs] == [significant_strides(x) for x in results[0]]
        torch.testing.assert_close(outputs, results[0], equal_nan=True)


def significant_strides(x: Tensor) -> list[int]:
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n != 1]


@pytest.mark.parametrize("then", [lambda y: y.contiguous(), lambda y: y.contiguous() - 0.0], ids=["copy", "computed"])
def test_what_a_call_returns_is_laid_out_anew_where_the_model_says_so(backend: Any, then: Any) -> None:
    check(backend, lambda x: then(torch.special.bessel_j0(x.t())), torch.randn(4, 5))


def test_what_a_call_returns_lies_as_it_came() -> None:
    """The fake function of max_unpool2d promises contiguous memory, and ATen keeps channels last."""
    x = torch.randn(2, 2, 6, 12).to(memory_format=torch.channels_last)
    pooled, index = F.max_pool2d(x, 2, return_indices=True)
    check(dynamo.backend, lambda pooled, index: F.max_unpool2d(pooled, index, 2), pooled, index)


CALLS = {
    "roll": lambda x, y: torch.roll(x, 1, 2),
    "roll twice": lambda x, y: torch.roll(x, (1, 2), (0, 3)),
    "roll flat": lambda x, y: torch.roll(x, 3),
    "floor_divide": lambda x, y: torch.floor_divide(x, y + 1),
    "div floor": lambda x, y: torch.div(x, y + 1, rounding_mode="floor"),
    "div by a number": lambda x, y: torch.div(x, 3, rounding_mode="trunc"),
    "copysign": lambda x, y: torch.copysign(x, y),
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "logaddexp": lambda x, y: torch.logaddexp(x.float(), y.float()),
    "logical_and": lambda x, y: torch.logical_and(x, y),
    "heaviside": lambda x, y: torch.heaviside(x, y),
    "index": lambda x, y: x[:, torch.tensor([[0, 1, 0], [1, 0, 1]]).t()],
    "index apart": lambda x, y: x[torch.tensor([[0, 1], [1, 0], [1, 1]]).t(), :, torch.tensor([0, 3])],
    "index_put": lambda x, y: torch.index_put(x, [torch.tensor([0])], y[0]),
    "index_fill": lambda x, y: torch.index_fill(x, 1, torch.tensor([0]), 1),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), (y.float()).sigmoid(), reduction="none"),
    "logsigmoid": lambda x, y: F.logsigmoid(x.float()),
    "batch_norm": lambda x, y: F.batch_norm(x.float(), None, None, training=True),
    "max_unpool2d": lambda x, y: F.max_unpool2d(*F.max_pool2d(x.float(), 2, return_indices=True), 2),
    "reflection_pad3d": lambda x, y: F.pad(x[None], (1, 1, 1, 1, 1, 1), "reflect"),
    "replication_pad3d": lambda x, y: F.pad(x[None], (1, 1, 1, 1, 1, 1), "replicate"),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "first two dims swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "last two dims swapped": lambda x: x.mT.contiguous().mT,
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "padded": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[..., :1].expand_as(x),
    "broadcast": lambda x: x[:, :1],
}


_FIRST = ("channels last", "reversed", "broadcast")
"""Layouts that are not left to `make verify`."""


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in _FIRST else pytest.mark.thorough) for name in LAYOUTS]
)
def test_strides_are_eagers_where_torch_predicts_others(layout: str, dynamic: bool) -> None:
    """Of results, of what is computed from them, and as ``as_strided`` sees them; for floats and for integers."""
    check_strides(layout, dynamic, ((torch.float32, False), (torch.float32, True), (torch.int64, True)))


def check_strides(layout: str, dynamic: bool, settings: Sequence[tuple[torch.dtype, bool]]) -> None:
    """Whether the second operand is transposed goes with the dtype."""
    for dtype, transposed in settings:
        x, y = (torch.randint(1, 9, (2, 3, 4, 6)).to(dtype) for _ in range(2))
        given = LAYOUTS[layout](x), LAYOUTS["last two dims swapped"](y) if transposed else y
        names = [name for name, call in CALLS.items() if _accepts(call, *given)]

        def function(x: Tensor, y: Tensor, names: list[str] = names) -> list[tuple[Tensor, ...]]:
            return [_looked_at(CALLS[name], x, y) for name in names]

        wanted = function(*given)

        dynamo.reset()
        torch._dynamo.reset()
        found = torch.compile(function, backend=dynamo.backend_with(interpret), dynamic=dynamic)(*given)
        assert dynamo.fallbacks() == []
        for (name, values), ours in zip(zip(names, wanted, strict=True), found, strict=True):
            assert list(map(significant_strides, ours)) == list(map(significant_strides, values)), (name, dtype)
            torch.testing.assert_close(ours, values, equal_nan=True)


def test_they_are_with_dynamic_shapes_too() -> None:
    """As the test above, which tries all layouts and dtypes in `make verify`."""
    check_strides("reversed", True, [(torch.float32, True)])


def _accepts(call: Any, x: Tensor, y: Tensor) -> bool:
    """Return whether eager takes the dtype and the shape."""
    try:
        return call(x, y).numel() >= 6
    except (RuntimeError, IndexError, ValueError):
        return False


def _looked_at(call: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    out = call(x, y)
    twice = out + out
    return out, twice, torch.as_strided(twice, (2, 3), (3, 1)) + 1


@pytest.mark.parametrize("name", ["roll", "index", "floor_divide", "xlogy"])
def test_kernels_write_eagers_strides(name: str) -> None:
    x = torch.randint(1, 9, (2, 3, 4, 6)).float()
    for layout in ("channels last", "broadcast"):
        given = LAYOUTS[layout](x), LAYOUTS["last two dims swapped"](x)
        if _accepts(CALLS[name], *given):
            torch._dynamo.reset()
            wanted = _looked_at(CALLS[name], *given)
            found = torch.compile(lambda x, y: _looked_at(CALLS[name], x, y), backend=dynamo.backend)(*given)
            assert list(map(significant_strides, found)) == list(map(significant_strides, wanted))
            torch.testing.assert_close(found, wanted, equal_nan=True)
    assert dynamo.fallbacks() == []


def test_gradients_have_eagers_strides() -> None:
    """The backward graph is traced with eager's strides too."""
    x = LAYOUTS["channels last"](torch.randn(2, 3, 4, 6)).requires_grad_()
    check(dynamo.backend, lambda x: torch.roll(torch.roll(x, 1, 2) * x.mT.mT.sin(), 1, 3), x, grad=True)
