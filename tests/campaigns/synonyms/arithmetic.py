"""Other spellings of arithmetic. Floats may round otherwise; what is finite, infinite or no number stays so."""

from typing import Any

import torch
from torch import Tensor

from tests.campaigns.respelling import operands_of, synonym

HALF = (torch.bfloat16, torch.float16)


def _floats(*values: Any) -> bool:
    """Whether all are tensors of one floating type."""
    return all(isinstance(v, Tensor) and v.is_floating_point() and v.dtype == values[0].dtype for v in values)


@synonym("add")
def commuted_sum(x: Any, y: Any, **options: Any) -> Any:
    """x + y = y + x."""
    return y + x if not options else NotImplemented


@synonym("mul")
def commuted_product(x: Any, y: Any) -> Any:
    """x·y = y·x."""
    return y * x


@synonym("pow")
def power_as_product(x: Any, y: Any) -> Any:
    """x² = x·x, x³ = x·x·x."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or y not in (2, 3):
        return NotImplemented
    return x * x if y == 2 else x * x * x


@synonym("mul")
def product_as_power(x: Any, y: Any) -> Any:
    """x·x = x²."""
    return x.pow(2) if x is y else NotImplemented


@synonym("pow", "square")
def power_as_square(x: Any, y: Any = 2) -> Any:
    """x² by the function of that name, or by its exponent as a float."""
    if y != 2 or not isinstance(x, Tensor):
        return NotImplemented
    return x.square() if isinstance(y, int) else x**2


@synonym("rsqrt")
def inverse_of_root(x: Tensor) -> Tensor:
    """1/√x as a quotient."""
    return 1 / x.sqrt()


@synonym("rsqrt")
def reciprocal_of_root(x: Tensor) -> Tensor:
    """1/√x as a reciprocal."""
    return x.sqrt().reciprocal()


@synonym("rsqrt")
def power_of_minus_half(x: Tensor) -> Tensor:
    """1/√x as a power."""
    return x.pow(-0.5)


@synonym("sqrt")
def power_of_half(x: Tensor) -> Tensor:
    """√x as a power, of what is no -∞."""
    return x.pow(0.5)


@synonym("div")
def quotient_by_reciprocal(x: Any, y: Any, **options: Any) -> Any:
    """x/y = x·(1/y)."""
    return x * y.reciprocal() if _floats(x, y) and not options else NotImplemented


@synonym("div")
def quotient_by_inverse_number(x: Any, y: Any, **options: Any) -> Any:
    """x/n = x·(1/n)."""
    return x * (1 / y) if _floats(x) and isinstance(y, int | float) and not options else NotImplemented


@synonym("mul")
def product_as_quotient(x: Any, y: Any) -> Any:
    """x·n = x/(1/n)."""
    return x / (1 / y) if _floats(x) and isinstance(y, float) and y else NotImplemented


@synonym("neg", "__neg__")
def minus_one_times(x: Tensor) -> Tensor:
    """-x = -1·x."""
    return -1 * x


@synonym("neg", "__neg__")
def over_minus_one(x: Tensor) -> Any:
    """-x = x/(-1)."""
    return x / -1 if x.is_floating_point() else NotImplemented


@synonym("sub")
def difference_as_sum(x: Any, y: Any, **options: Any) -> Any:
    """x - y = x + (-y)."""
    return x + -y if _floats(x) and not options else NotImplemented


@synonym("sub")
def difference_by_alpha(x: Any, y: Any, **options: Any) -> Any:
    """x - y = x + α·y with α = -1."""
    return torch.add(x, y, alpha=-1) if _floats(x, y) and not options else NotImplemented


@synonym("add")
def sum_as_difference(x: Any, y: Any, **options: Any) -> Any:
    """x + y = x - (-y)."""
    return x - -y if _floats(x) and not options else NotImplemented


@synonym("add")
def sum_with_product(x: Any, y: Any, **options: Any) -> Any:
    """a·b + c in one call."""
    factors = operands_of(y, "mul")
    return torch.addcmul(x, *factors) if _floats(x, *factors) and factors and not options else NotImplemented


@synonym("mean")
def mean_as_sum(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """A mean is a sum over a number."""
    if not isinstance(dim, int) or options:
        return NotImplemented
    return x.sum(dim, keepdim=keepdim) / x.shape[dim]


@synonym("mean")
def mean_as_scaled_sum(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """A mean is a sum times a number."""
    if not isinstance(dim, int) or options:
        return NotImplemented
    return x.sum(dim, keepdim=keepdim) * (1 / x.shape[dim])


@synonym("sum")
def sum_squeezed(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """A sum that keeps its dim is one that gets it back."""
    return x.sum(dim).unsqueeze(dim) if isinstance(dim, int) and keepdim and not options else NotImplemented


@synonym("amax")
def largest_with_place(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    """The maximum, out of a pair with its place."""
    return x.max(dim, keepdim=keepdim).values if isinstance(dim, int) else NotImplemented


@synonym("sigmoid")
def logistic_by_exponential(x: Tensor) -> Tensor:
    """σ(x) = 1/(1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


@synonym("masked_fill")
def filled_by_choice(x: Tensor, mask: Tensor, value: Any) -> Any:
    """What a mask fills is chosen by it."""
    return torch.where(mask, value, x)


@synonym("where")
def chosen_by_fill(condition: Tensor, x: Any = None, y: Any = None) -> Any:
    """A choice of a number is a fill, where the shapes are the same."""
    if isinstance(x, Tensor) and isinstance(y, float) and torch.broadcast_shapes(condition.shape, x.shape) == x.shape:
        return x.masked_fill(~condition, y)
    return NotImplemented


@synonym("where")
def choice_of_opposite(condition: Tensor, x: Any = None, y: Any = None) -> Any:
    """c ? x : y = ¬c ? y : x."""
    return NotImplemented if x is None else torch.where(~condition, y, x)


@synonym("__invert__", "logical_not")
def negation_by_comparison(x: Tensor) -> Any:
    """¬x is x = false."""
    return x == False if x.dtype == torch.bool else NotImplemented  # noqa: E712


@synonym("__and__")
def conjunction_by_function(x: Any, y: Any) -> Any:
    """x ∧ y by the function of that name."""
    both = isinstance(y, Tensor) and x.dtype == y.dtype == torch.bool
    return torch.logical_and(x, y) if both else NotImplemented


@synonym("__and__")
def conjunction_by_opposites(x: Any, y: Any) -> Any:
    """x ∧ y = ¬(¬x ∨ ¬y)."""
    both = isinstance(y, Tensor) and x.dtype == y.dtype == torch.bool
    return ~(~x | ~y) if both else NotImplemented


@synonym("le")
def turned_comparison(x: Any, y: Any) -> Any:
    """x ≤ y is y ≥ x."""
    return y >= x if isinstance(y, Tensor) else NotImplemented


@synonym("le")
def opposite_comparison(x: Any, y: Any) -> Any:
    """x ≤ y is ¬(x > y), of integers."""
    return ~(x > y) if isinstance(y, Tensor) and not x.is_floating_point() else NotImplemented


@synonym("bool")
def truth_by_comparison(x: Tensor) -> Tensor:
    """Whether x is not 0."""
    return x != 0


@synonym("relu")
def positive_by_clamp(x: Tensor, inplace: bool = False) -> Any:
    """What is positive of x, by a lower bound."""
    return x.clamp(min=0)


@synonym("relu")
def positive_by_choice(x: Tensor, inplace: bool = False) -> Any:
    """What is positive of x, by a choice that lets NaN pass."""
    return torch.where(x <= 0, 0.0, x)


@synonym("add")
def sum_computed_wide(x: Any, y: Any, **options: Any) -> Any:
    """A sum of half types is computed in float32 and rounded: written out."""
    half = _floats(x, y) and x.dtype in HALF and not options
    return (x.float() + y.float()).to(x.dtype) if half else NotImplemented


@synonym("mul")
def product_computed_wide(x: Any, y: Any) -> Any:
    """A product of half types is computed in float32 and rounded: written out."""
    return (x.float() * y.float()).to(x.dtype) if _floats(x, y) and x.dtype in HALF else NotImplemented
