"""What a compiled call returns: values, element types and strides, for inputs of any kind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusec import dynamo
from fusec.errors import FusecError
from fusec.reference.contract import compare_outputs
from fusec.remarks import Remarks
from tests.backend.agreement import Block, check, interpret, same


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "any", "all", "var", "softmax"])
def test_reductions_of_no_elements(backend: Any, name: str) -> None:
    def reduced(x: Tensor) -> Tensor:
        return getattr(x.sin() > 0 if name in ("any", "all") else x.sin(), name)(-1)

    compiled = torch.compile(reduced, backend=backend)
    for x in (torch.empty(3, 0), torch.empty(5, 0).t().contiguous().t()):
        expected = reduced(x)
        for _ in range(4):
            junk = torch.full(expected.shape, 7.5, dtype=torch.float32)
            del junk  # its memory is likely what the output gets
            torch.testing.assert_close(compiled(x), expected, equal_nan=True)
    assert not [
        remark for found in dynamo.compiled_graphs() for remark in getattr(found, "remarks", Remarks()).of("failure")
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_scalar_beside_sums_of_columns(dynamic: bool) -> None:
    def function(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        c = z.cos()
        return (x - c).sum(-2) * 1.5, c * 2

    x, z = torch.randn(3, 5), torch.randn(())
    torch._dynamo.reset()
    found = torch.compile(function, backend="fusec", dynamic=dynamic, options={"strict": True})(x, z)
    torch.testing.assert_close(found, function(x, z))


def test_a_block(backend: Any) -> None:
    check(backend, Block(), torch.randn(2, 5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_contract_holds_in_both_types(backend: Any, dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 3, dtype=dtype), torch.randn(3, 5, dtype=dtype)
    check(backend, lambda x, w: torch.softmax(x @ w, -1).sum(0), x, w)


def test_outputs_may_be_numbers_and_none(backend: Any) -> None:
    check(backend, lambda x: (None, x + 1, x.shape[0], 2.5), torch.randn(3, 4))


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:, :1].expand(6, 6), lambda x: x.as_strided((3, 3), (1, 2), 5)],
    ids=["transposed", "sliced", "expanded", "overlapping"],
)
def test_inputs_of_any_layout(backend: Any, layout: Any) -> None:
    x = layout(torch.randn(6, 6))
    compiled = torch.compile(lambda x: (x * 2, x.sum(-1), x.transpose(0, 1) @ x, x.reshape(-1) + 1), backend=backend)
    with torch.no_grad():
        same(compiled(x), (x * 2, x.sum(-1), x.transpose(0, 1) @ x, x.reshape(-1) + 1))


def test_the_sign_of_zero_makes_two_kernels(backend: Any) -> None:
    def infinities(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.cumsum(1 / (x.exp() * 0.0), 0), torch.cumsum(1 / (y.exp() * -0.0), 0)

    check(backend, infinities, torch.randn(8, 8), torch.randn(8, 8))


def test_strides_of_outputs(backend: Any) -> None:
    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        turned = x.permute(2, 0, 1)
        return turned + 1, (turned + 1).contiguous(), turned.exp().transpose(0, 1), (x + 1)[:, ::2]

    check(backend, outputs, torch.randn(2, 3, 4))


def test_a_channels_last_input(backend: Any) -> None:
    check(backend, lambda x: torch.relu(x) * 2, torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))


def test_lifted_constants(backend: Any) -> None:
    check(backend, lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(0.1), torch.randn(2, 3))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 4), (4, 1), (1, 1), (0, 0)])
def test_sizes_zero_and_one(backend: Any, shape: tuple[int, int]) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(x, -1), nn.functional.linear(x, w), x.sum(0), nn.functional.layer_norm(x, x.shape[-1:])

    check(backend, f, torch.randn(shape), torch.randn(3, shape[1]))


def test_a_0d_tensor(backend: Any) -> None:
    check(backend, lambda x, y: (x * y, x.sum() + 1, y.exp()), torch.randn(3), torch.tensor(2.0))


def test_special_values(backend: Any) -> None:
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), -float("inf"), 0.0], [-0.0, 1e38, -1e38]])
    check(backend, lambda x: (torch.softmax(x, -1), x.amax(-1), x.clamp(-1, 1), torch.relu(x), x.isnan(), x / x), x)


def test_inference_mode_and_autocast(backend: Any) -> None:
    model, x = Block(), torch.randn(2, 8)
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


def test_composite_operations_stay_whole_at_inference() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, config: Any) -> Any:
        graphs.append(graph)
        return interpret(graph, config)

    def attend(q: Tensor, w: Tensor) -> Tensor:
        q = nn.functional.linear(q, w)
        return nn.functional.scaled_dot_product_attention(q, q @ w, q)

    with torch.no_grad():
        torch.compile(attend, backend=dynamo.backend_with(keep))(torch.randn(1, 2, 5, 4), torch.randn(4, 4))
    ops = [n.attributes.get("target", n.op.name) for n in graphs[0].nodes]
    assert ops == ["contraction", "contraction", "aten.scaled_dot_product_attention.default"]
    assert all(n.sources[0].file.endswith("test_values.py") and n.sources[0].line for n in graphs[0].nodes)


def test_constants_of_unsigned_numbers_wrap(backend: Any) -> None:
    ones = lambda: torch.ones(3, dtype=torch.uint8)  # noqa: E731
    check(
        backend, lambda x: ((ones() - 2).float() + x, (-ones()).float() + x, (ones() * 200 + 100) > 40), torch.randn(3)
    )


@pytest.mark.parametrize("rows", [5, 17, 300])
def test_a_product_with_nothing_to_sum_is_its_bias(rows: int, backend: Any) -> None:
    check(
        backend,
        lambda x, w, b: nn.functional.linear(x, w, b).relu(),
        torch.ones(rows, 0),
        torch.ones(3, 0),
        torch.randn(3),
    )
    check(backend, lambda a, b: torch.einsum("ab,bc->c", a, b).relu(), torch.ones(rows, 0), torch.ones(0, 4))
    for graph in dynamo.compiled_graphs():
        assert not getattr(graph, "remarks", Remarks()).of("failure")


def test_attention_without_keys_gives_zeros(backend: Any) -> None:
    attention = nn.functional.scaled_dot_product_attention
    check(backend, attention, torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8))


def test_an_attention_that_stays_a_call_leaves_the_others_alone(backend: Any) -> None:
    def two(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        attention = nn.functional.scaled_dot_product_attention
        return attention(q, k, k, enable_gqa=True), attention(x, x, x)

    q, k = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8)
    for x in (q, k):
        torch._dynamo.mark_dynamic(x, 1)  # how many of the one stand to one of the other is not known
    check(backend, two, q, k, torch.randn(1, 4, 7, 8))
    for graph in dynamo.compiled_graphs():
        remarks = getattr(graph, "remarks", Remarks())
        assert not remarks.of("failure")
        assert not remarks or any(r.subject == "attention" for r in remarks.of("passed"))


DIVISIONS = {
    "floor": lambda a, b: a // b,
    "truncated": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
}


@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS)
def test_a_division_of_integers_by_zero_raises(divide: Any, backend: Any) -> None:
    a, b = torch.arange(-3, 3), torch.tensor([1, -2, 3, 4, 5, 6])
    compiled = check(backend, lambda a, b: divide(a * 2, b) + 1, a, b)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(a, b * 0)
    check(backend, lambda a: divide(a, 4) + divide(a, len(a)), a, dynamic=True)
    for wrapped in (0, 256):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            torch.compile(lambda a, n=wrapped: divide(a, n), backend=backend)(a.to(torch.uint8))


def test_remainders_and_shifts_of_unsigned_numbers(backend: Any) -> None:
    x, y = torch.tensor([1, 100, 254, 255], dtype=torch.uint8), torch.tensor([7, 8, 9, 255], dtype=torch.uint8)
    check(backend, lambda x: (x % 255, torch.fmod(x, 255), torch.div(x, 255, rounding_mode="trunc"), x // 255), x)
    check(backend, lambda x, y: (x >> 9, x << 9, x >> y, x << y), x, y)


def test_ranges_of_integers_cut_their_numbers_off(backend: Any) -> None:
    def ranges(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.arange(*numbers, dtype=dtype) + x
            for numbers in ((0.5, 5.5, 1.5), (-1.5, 3, 1), (2.7, 9.9, 2.2))
            for dtype in (torch.int64, torch.int32)
        )

    check(backend, ranges, torch.zeros((), dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_scaled_first_does_not_overflow(dtype: torch.dtype, backend: Any) -> None:
    x, large = torch.tensor([8.8643], dtype=dtype), torch.tensor([6.23e37], dtype=dtype)
    check(backend, lambda a, b: torch.addcmul(a, b, a, value=0.5), x, large)


def test_the_sign_of_zero(backend: Any) -> None:
    def infinities(x: Tensor) -> tuple[Tensor, ...]:
        kept = x.tanh(), x.relu(), x.clamp(min=0.0), x.clamp(-1, 0), torch.floor_divide(x, 2.0), x.abs().clamp(min=-0.0)
        return tuple(1 / y for y in kept)

    for dtype in (torch.float32, torch.float64):
        check(backend, infinities, torch.full((40,), -0.0, dtype=dtype))


def test_a_tensor_of_a_half_type_holds_what_that_type_does(backend: Any) -> None:
    check(backend, lambda x: torch.full((3,), 0.1, dtype=torch.bfloat16).float() + x, torch.zeros(3))


INTEGER, HALF, TRUE = torch.ones(3, dtype=torch.int8), torch.ones(3).half(), torch.ones(3, dtype=torch.bool)
REFUSED = {
    "clamp": lambda: INTEGER.clamp(max=300),
    "where": lambda: torch.where(TRUE, INTEGER, 300),
    "masked_fill": lambda: INTEGER.masked_fill(TRUE, 300),
    "full_like": lambda: torch.full_like(INTEGER, 300),
    "a half type": lambda: HALF.masked_fill(TRUE, 1e30),
    "NaN": lambda: INTEGER.masked_fill(TRUE, float("nan")),
    "power": lambda: INTEGER**-1,
    "difference": lambda: HALF - TRUE,
    "product": lambda: torch.ones(3, 3) @ torch.ones(3, 3).double(),
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_what_eager_refuses_is_refused(function: Any, backend: Any) -> None:
    with pytest.raises(RuntimeError):
        function()
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: (function(), x), backend=backend)(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_divisions_of_half_types_by_other_numbers(dtype: torch.dtype, backend: Any) -> None:
    def divisions(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        floors = x // number, x // 0.7, torch.div(x, number, rounding_mode="trunc")
        return *floors, x % 0.7, torch.fmod(x, 0.7), x % number, 7.7 % x

    check(backend, divisions, torch.tensor([100, -7, 3.5, 1000, 12.3] * 4, dtype=dtype), torch.tensor(0.7))


def test_a_call_is_given_memory_as_eager_lays_it_out(backend: Any) -> None:
    def bags(table: Tensor, places: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        each = nn.functional.embedding_bag(places.view(-1, 1), table, mode="mean")
        return each, nn.functional.embedding_bag(places, table, starts, mode="max")

    table, places = torch.arange(10.0).view(5, 2), torch.tensor([[0, 1], [0, 4], [0, 2]])
    given = table, places[:, 1], torch.tensor([[0, 9], [2, 9]])[:, 0]
    torch.testing.assert_close(torch.compile(bags, backend=backend)(*given), bags(*given))


def test_floats_that_no_integer_holds_index_as_in_eager(backend: Any) -> None:
    """Squared they are positive: a conversion that is undefined drops the correction of the remainder."""
    whole = torch.tensor([float("inf"), 1e20, 3.0, float("nan"), -1e20, *range(12)])

    def function(x: Tensor, y: Tensor) -> Tensor:
        v = x + 2 * y
        return y[(v * v).long() % y.shape[0]]

    check(backend, function, torch.randn(33, 17), whole, dynamic=True)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("op", ["max", "min", "amax", "amin", "argmax"])
def test_what_has_no_identity_raises_of_no_elements(backend: Any, op: str, shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"zero-size|xpected reduction dim"):
        torch.compile(lambda x: getattr(x * 2, op)(), backend=backend)(torch.empty(shape))


@pytest.mark.parametrize(("mean", "deviation"), [(1e3, 1), (1e5, 1), (1e8, 1), (0, 1e19), (-3, 1e-30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variances_are_as_exact_as_eagers(backend: Any, mean: float, deviation: float, dtype: torch.dtype) -> None:
    """Eager's are computed in float64: they neither cancel nor overflow."""
    x = (torch.randn(8, 1000) * deviation + mean).to(dtype)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x.var(-1), x.std(0), *torch.var_mean(x, 1, correction=0), x.std())

    found = torch.compile(function, backend=backend)(x)
    exact = [y.double() for y in function(x.double())]
    assert compare_outputs(list(function(x)), list(found), exact, dtype).passed


@pytest.mark.parametrize("count", [170, 2000, 20_000])
@pytest.mark.parametrize("spell", [torch.dot, lambda x, y: nn.functional.linear(x[None], y[None])[0, 0]])
def test_dot_products_are_as_exact_as_eagers(backend: Any, spell: Any, count: int) -> None:
    """Libraries sum a product of one row and one column in a single chain."""
    draws = [(torch.rand(count) + 0.5, torch.rand(count) + 0.5) for _ in range(20)]
    compiled = torch.compile(lambda x, y: spell(x, y) * 0.2, backend=backend)
    exact = torch.stack([torch.dot(x.double(), y.double()) * 0.2 for x, y in draws])
    found = torch.stack([compiled(x, y) for x, y in draws])
    expected = torch.stack([torch.dot(x, y) * 0.2 for x, y in draws])
    assert compare_outputs([expected], [found], [exact], torch.float32).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_statistics_of_a_batch_norm_in_half_types(backend: Any, dtype: torch.dtype) -> None:
    """Its fake function promises float32 for the statistics, and ATen returns them in the type of the input."""
    x, norm, expected = torch.randn(4, 3, 5).to(dtype), nn.BatchNorm1d(3).to(dtype), nn.BatchNorm1d(3).to(dtype)
    same(torch.compile(norm, backend=backend)(x).detach(), expected(x).detach())
    same([norm.running_mean, norm.running_var], [expected.running_mean, expected.running_var])


@torch.library.custom_op("fusec_tests::wider_than_promised", mutates_args=())
def wider_than_promised(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@wider_than_promised.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_fake_function_that_promises_another_shape_is_an_error(backend: Any) -> None:
    with pytest.raises(FusecError, match=r"returned a tensor of shape \(8,\)"):
        torch.compile(lambda x: wider_than_promised(x) * 2, backend=dynamo.backend)(torch.ones(4))
