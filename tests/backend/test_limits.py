"""Where results differ from eager's on purpose: docs/limits.md says so, and these tests pin it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.agreement import check


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_half_values_on_the_way_neither_round_nor_overflow() -> None:
    def function(h: Tensor) -> Tensor:
        return h * h / 256

    h = torch.tensor([300.0, 2.0], dtype=torch.float16)
    assert function(h)[0].isinf()
    assert torch.equal(torch.compile(function, backend="fusec")(h), function(h.float()).half())


def test_zeros_may_have_the_other_sign() -> None:
    zeros, others = torch.tensor([0.0, -0.0]).repeat(32), torch.tensor([-0.0, 0.0]).repeat(32)
    compiled = torch.compile(torch.maximum, backend="fusec")
    assert not torch.equal(torch.maximum(zeros, others).signbit(), compiled(zeros, others).signbit())
    assert torch.equal(torch.maximum(zeros[:2], others[:2]).signbit(), compiled(zeros[:2], others[:2]).signbit())


def test_hidden_keys_are_not_read() -> None:
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, 16)
    v[:, :, 512:] = torch.nan
    mask = (torch.arange(1024) < 512)[None]
    with torch.no_grad():
        assert F.scaled_dot_product_attention(q, k, v, mask).isnan().all()
        found = torch.compile(F.scaled_dot_product_attention, backend="fusec")(q, k, v, mask)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k[:, :, :512], v[:, :, :512]))


def test_the_lowest_number_hides_if_products_are_not_as_large() -> None:
    """A product of 70,000 under a mask of float16 is the largest score in eager."""
    q, k, v = torch.ones(1, 2, 1, 16), torch.zeros(1, 2, 1024, 16), torch.randn(1, 2, 1024, 16)
    mask = torch.zeros(1, 1, 1, 1024).masked_fill(torch.arange(1024) >= 512, torch.finfo(torch.float16).min).half()
    attend = torch.compile(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.float()), backend="fusec")
    for product, same in ((30_000.0, True), (70_000.0, False)):
        k[:, :, 1000] = product / 4
        with torch.no_grad():
            found, eager = attend(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask.float())
        assert torch.allclose(found, eager, atol=1e-5) == same


def test_the_mean_of_an_infinity_is_that_infinity() -> None:
    x = torch.randn(3, 17)
    x[0, 3], x[1, :], x[2, -1] = torch.inf, -torch.inf, torch.inf
    spells = {"var_mean": lambda x: torch.var_mean(x, -1)[1], "native_layer_norm": _layer_norms_mean}
    for name, spell in spells.items():
        found = torch.compile(spell, backend="fusec")(x).flatten()
        assert spell(x)[:2].isnan().all(), name
        assert found.tolist() == x.mean(-1).tolist() == [torch.inf, -torch.inf, torch.inf], name


def _layer_norms_mean(x: Tensor) -> Tensor:
    return torch.native_layer_norm(x, (17,), None, None, 1e-5)[1]


def test_a_norm_whose_variance_overflows_is_0() -> None:
    x = torch.stack([torch.ones(64), torch.linspace(0.5, 1, 64)]) * 1e30
    for norm in (lambda x: F.layer_norm(x, (64,)), lambda x: F.group_norm(x[:, :, None], 2)):
        assert norm(x).isnan().all()
        assert (torch.compile(norm, backend="fusec")(x) == 0).all()


def test_the_first_of_equal_elements_is_selected() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]]).repeat(1, 13)
    values, indices = torch.compile(lambda x: torch.topk(x, 3), backend="fusec")(x)
    assert torch.equal(values, torch.topk(x, 3).values)
    assert indices.tolist() == [[1, 2, 4], [0, 1, 2]]


def test_products_of_parts_of_a_row_may_overflow_on_a_gpu() -> None:
    pytest.importorskip("triton")
    x = torch.full((1, 64), 1e38)
    x[0, 0] = 0.0
    for target in ("cpp", "triton"):
        torch._dynamo.reset()
        found = torch.compile(lambda x: x.cumprod(-1), backend="fusec", options={"target": target})(x)
        assert found[0, :9].eq(0).all() and bool(found.isnan().any()) == (target == "triton")


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_denormal_bfloat16_may_be_zero_in_matmuls(rows: int) -> None:
    x, w = torch.full((rows, 64), 1e-39).bfloat16(), torch.full((64, 64), 1e38).bfloat16()
    assert x[0, 0] > 0
    compiled = torch.compile(lambda x, w: F.relu(F.linear(x, w)), backend="fusec")
    for factor, may_be_zero in ((1.0, True), (1024.0, False)):
        given = (x.float() * factor).bfloat16()
        with torch.no_grad():
            found = compiled(given, w)
        close = torch.isclose(found, (given.double() @ w.double().T).bfloat16())
        assert (close | (found == 0) if may_be_zero else close).all()


def test_uninitialized_memory_is_filled_where_algorithms_are_deterministic(backend: Any, deterministic: None) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.empty(3), torch.empty_like(x), x.new_empty(2, dtype=torch.int64), torch.empty(5) + x[0]

    check(backend, function, torch.ones(4))


def test_freeze_does_not_see_writes_through_data() -> None:
    model, x = nn.Linear(64, 64).eval(), torch.randn(16, 64)  # rows that every processor prepacks for
    compiled = torch.compile(lambda x: model(x), backend="fusec", options={"freeze": True})
    with torch.no_grad():
        before = compiled(x)
        model.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x), before)
        model.weight.data = model.weight.data.clone()
        torch.testing.assert_close(compiled(x), model(x))


def test_an_infinite_scale_may_multiply_a_sum() -> None:
    def linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x.float(), (codes.reshape(8, 2, 32).float() * scale[..., None]).reshape(8, 64))

    x, codes = torch.ones(2, 64, dtype=torch.int8), torch.tensor([-2, 1]).repeat(8, 32).char()
    scale = torch.full((8, 2), torch.inf)
    found = torch.compile(linear, backend="fusec")(x, codes, scale)
    assert linear(x, codes, scale).isnan().all() and found.eq(-torch.inf).all()


@pytest.mark.parametrize("shape", [(1, 4), (0, 4)])
def test_strides_that_address_nothing_are_those_that_torch_predicts(shape: tuple[int, int]) -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 1).t() + 1

    x = torch.randn(shape)
    found, expected = torch.compile(function, backend="fusec")(x), function(x)
    assert torch.equal(found, expected) and found.is_contiguous() == expected.is_contiguous()
    assert expected.stride() == (1, 4) and found.stride() == (1, 1)
