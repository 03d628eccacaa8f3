"""What is called: operators, samples of their arguments, and the ways in which a call is put to the compiler."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int64", "bool", "complex64")}
VARIANTS = {
    "plain": "alone",
    "embedded": "between generated neighbours",
    "strided": "of noncontiguous tensors",
    "dynamic": "with symbolic sizes",
    "inplace": "in place",
    "gradients": "forward and backward",
    "errors": "with arguments that eager refuses",
}
_DIFFERENTIABLE = ("float32", "complex64")

Call = Callable[..., Any]
Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""The input, and the further positional and keyword arguments, of one call."""


def _called(op: Call, *args: Any, **kwargs: Any) -> Any:
    """Call an operator; the database seeds the generator around random ones, by a function that Dynamo refuses."""
    return op(*args, **kwargs)


vars(database)["wrapper_set_seed"] = _called


@dataclass(frozen=True)
class Operator:
    """One entry of the database."""

    info: Any

    @property
    def name(self) -> str:
        """Its name, and that of its variant where it has several entries."""
        return str(self.info.formatted_name)

    def supports(self, dtype: str) -> bool:
        """Whether it takes tensors of a dtype on the CPU."""
        return bool(self.info.supports_dtype(DTYPES[dtype], "cpu"))

    def variants(self, dtype: str) -> Iterator[str]:
        """Those of ``VARIANTS`` that it has in a dtype."""
        for variant in VARIANTS:
            if variant == "inplace" and self.info.inplace_variant is None:
                continue
            if variant == "gradients" and not (self.info.supports_autograd and dtype in _DIFFERENTIABLE):
                continue
            if variant == "errors" and (self.info.error_inputs_func is None or dtype != "float32"):
                continue
            yield variant

    def samples(self, dtype: str, variant: str, count: int) -> list[Arguments]:
        """At most so many, the first, the last and some between, the same in every run."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if variant == "errors":
                return [_arguments(error.sample_input) for error in self.info.error_inputs("cpu")]
            grad = variant == "gradients"
            drawn = list(self.info.sample_inputs("cpu", DTYPES[dtype], requires_grad=grad))
            kept = spread(drawn, 1 if variant == "dynamic" else count)
            samples = [_arguments(x.noncontiguous() if variant == "strided" else x) for x in kept]
        return [sample for sample in samples if not grad or any(map(requires_grad, tree_leaves(sample)))]

    def call(self, variant: str) -> Call:
        """The function that a variant calls."""
        found: Call = self.info.inplace_variant if variant == "inplace" else self.info.op
        if self.name in _PLACES_OF_DIM:
            found = elements_at_positions(found, _PLACES_OF_DIM[self.name])
        return embedded(found) if variant == "embedded" else found


def operators(names: Sequence[str] = ()) -> list[Operator]:
    """All of the database, or those of these names."""
    found = [Operator(info) for info in database.op_db]
    return [operator for operator in found if not names or operator.name in names or operator.info.name in names]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """The first, the last, and others evenly between."""
    if len(items) <= count:
        return list(items)
    return [items[i * (len(items) - 1) // max(count - 1, 1)] for i in range(count)]


_PLACES_OF_DIM = {"sort": 0, "argsort": 0, "topk": 1}
"""Operators that return positions, where the order of equal elements is free, and the place of their dim."""


def elements_at_positions(call: Call, place: int) -> Call:
    """The call with the elements at the positions that it returns in their place."""

    def function(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = call(x, *args, **kwargs)
        if not isinstance(x, Tensor) or x.ndim == 0:
            return found
        *values, positions = found if isinstance(found, tuple) else (found,)
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        return *values, torch.take_along_dim(x, positions, dim)

    return function


def embedded(call: Call) -> Call:
    """The call between neighbours that are generated; the ones before it change no bit of its operands."""

    def function(*args: Any, zero: Tensor, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: _unchanged(x, zero), (args, kwargs))
        return tree_map_only(Tensor, _changed, call(*args, **kwargs))

    return function


def _unchanged(x: Tensor, zero: Tensor) -> Tensor:
    return x ^ zero.to(torch.bool) if x.dtype == torch.bool else x - zero.to(x.dtype)


def _changed(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return ~x
    return x * 1.5 + 1 if x.is_floating_point() or x.is_complex() else x * 3 + 1


def _arguments(sample: Any) -> Arguments:
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def requires_grad(x: Any) -> bool:
    """Whether it is a tensor that gradients are asked for."""
    return isinstance(x, Tensor) and x.requires_grad


def widened(sample: Any) -> Any:
    """Arguments with every float in float64, complex numbers likewise; dtypes among them too."""
    return tree_map(_widened, sample)


_WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


def _widened(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return _WIDE.get(x, x)
    if not isinstance(x, Tensor) or x.dtype not in _WIDE:
        return x
    return x.detach().to(_WIDE[x.dtype]).requires_grad_(x.requires_grad)
