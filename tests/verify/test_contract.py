"""The numeric rule and the rest of the contract."""

from typing import Any

import pytest
import torch

from fusec.reference.contract import compare_outputs, copy_arguments
from tests.observations import contract_breaches, observe


def _case(dtype: torch.dtype, shape: tuple[int, ...] = (64, 64)) -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.randn(shape, dtype=torch.float64)
    return reference.to(dtype), reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_eager_gives_passes(dtype: torch.dtype) -> None:
    eager, reference = _case(dtype)
    result = compare_outputs({"a": eager}, {"a": eager.clone()}, {"a": reference})
    assert result.passed and 0 < result.ratio <= 0.5 and "passes" in str(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_beyond_the_bound_fail(dtype: torch.dtype) -> None:
    eager, reference = _case(dtype)
    one_off = eager.clone()
    one_off[3, 3] += 0.1
    result = compare_outputs([eager], [one_off], [reference])
    assert not result.passed and result.outputs[0].max_ratio > 1 and "output 0" in str(result)
    everywhere = (eager.double() * (1 + 20 * torch.finfo(dtype).eps)).to(dtype)
    assert compare_outputs([eager], [everywhere], [reference]).outputs[0].rms_ratio > 1


def test_an_exact_eager_leaves_room_for_one_rounding() -> None:
    reference = torch.full((10,), 1.0, dtype=torch.float64)
    eager = reference.float()
    assert compare_outputs(eager, eager + 2**-23, reference).passed
    assert not compare_outputs(eager, eager + 2**-21, reference).passed


def test_integers_nan_and_infinities_are_exact() -> None:
    whole = torch.arange(4)
    assert compare_outputs(whole, whole.clone(), whole).passed
    assert not compare_outputs(whole, whole + 1, whole).passed
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert compare_outputs(special, special.clone(), special.double()).passed
    for place, other in ((0, 0.0), (1, torch.nan), (1, -torch.inf), (2, 1e38), (3, torch.inf), (3, torch.nan)):
        changed = special.clone()
        changed[place] = other
        assert not compare_outputs(special, changed, special.double()).passed


def test_structure_type_and_scalars() -> None:
    x = torch.ones(3)
    assert "2 outputs" in str(compare_outputs([x, x], [x], [x]))
    assert not compare_outputs(x, x.bfloat16(), x.double()).passed
    assert not compare_outputs(x, torch.ones(4), x.double()).passed
    assert compare_outputs([3, None, x], [3, None, x], [3, None, x.double()]).passed
    assert not compare_outputs([3], [4], [3]).passed
    assert compare_outputs(torch.empty(0), torch.empty(0), torch.empty(0)).passed


def _eager(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    cache[0] = x[0]
    noise = torch.rand(3)
    return {"view": x.t(), "sum": x * 2 + noise.sum() * 0, "cache": cache}


def _no_alias(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    return _eager(x, cache) | {"view": x.t().clone()}


def _dense(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    return _eager(x, cache) | {"view": x.t().contiguous()}


def _no_mutation(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    result = _eager(x, cache.clone())
    return result | {"cache": cache}


def _more_random(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    torch.rand(1)
    return _eager(x, cache)


def _detached(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    result = _eager(x, cache)
    return result | {"sum": result["sum"].detach()}


def _as_tuple(x: torch.Tensor, cache: torch.Tensor) -> Any:
    return tuple(_eager(x, cache).values())


def _wider(x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    result = _eager(x, cache)
    return result | {"sum": result["sum"].double()}


@pytest.mark.parametrize(
    ("compiled", "breach"),
    [
        (_eager, None),
        (_no_alias, "aliases"),
        (_dense, "strides"),
        (_no_mutation, "input 1 is different after the call"),
        (_more_random, "random state"),
        (_detached, "requires_grad"),
        (_as_tuple, "nested"),
        (_wider, "dtype"),
    ],
)
def test_breaches_of_the_contract_are_named(compiled: Any, breach: str | None) -> None:
    arguments = [torch.randn(3, 4, requires_grad=True), torch.zeros(2, 4)]
    found = contract_breaches(observe(_eager, arguments), observe(compiled, arguments))
    assert (found == []) if breach is None else any(breach in line for line in found), found


def test_copies_keep_layout_and_sharing() -> None:
    whole = torch.arange(12.0).view(3, 4)
    arguments = [whole.t(), whole[1:], {"n": 3}, torch.ones(2, requires_grad=True)]
    transposed, tail, other, leaf = copy_arguments(arguments)
    assert transposed.stride() == (1, 4) and other == {"n": 3} and leaf.requires_grad and leaf.is_leaf
    tail.zero_()
    assert transposed[:, 1:].sum() == 0 and whole.sum() == 66
