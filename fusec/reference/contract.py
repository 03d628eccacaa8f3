"""The numeric rule of a compiled model, and copies of arguments to compare two calls with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_FEW_ELEMENTS = 1000
_FEW_ROUNDINGS = 16


@dataclass(frozen=True)
class OutputComparison:
    """One output against the numeric rule."""

    index: int
    passed: bool
    max_ratio: float
    """Share of the allowed largest error that was used; above 1 is a failure. 0 for exact outputs that are exact."""
    rms_ratio: float
    """The same for the root mean square error."""
    message: str = ""

    @property
    def ratio(self) -> float:
        """The worse of the two."""
        return max(self.max_ratio, self.rms_ratio)


@dataclass(frozen=True)
class Comparison:
    """All outputs against the numeric rule."""

    outputs: tuple[OutputComparison, ...]
    message: str = ""
    """Set where the outputs could not be compared one by one."""

    @property
    def passed(self) -> bool:
        """True where every output obeys the numeric rule."""
        return not self.message and all(o.passed for o in self.outputs)

    @property
    def ratio(self) -> float:
        """The largest share of its bound that an output uses."""
        return max((o.ratio for o in self.outputs), default=0.0)

    def __str__(self) -> str:
        wrong = [f"output {o.index}: {o.message}" for o in self.outputs if not o.passed]
        return self.message or "; ".join(wrong) or f"passes, {self.ratio:.2f} of the bound"


def compare_outputs(eager: Any, compiled: Any, reference64: Any, dtype: torch.dtype | None = None) -> Comparison:
    """Compare compiled outputs by their and eager's distance from the float64 reference.

    The rule, with R the reference, E eager, F compiled and u the unit roundoff of ``dtype`` (by default of each
    output): ``max|F-R| <= 2·max|E-R| + 2u·max|R|`` and ``rms(F-R) <= 2·rms(E-R) + 2u·rms(R)``, with 3 instead
    of the first 2 of the latter under 1,000 elements. Integers, booleans, NaN positions and infinities are exact.

    Args:
        eager: outputs of the model as eager computes them, in any nesting.
        compiled: outputs of the compiled model.
        reference64: outputs of the model in float64 on the same, already rounded inputs and weights.
        dtype: the dtype that the model computes in.
    """
    e, f, r = (_leaves(x) for x in (eager, compiled, reference64))
    if not len(e) == len(f) == len(r):
        return Comparison((), f"eager has {len(e)} outputs, compiled {len(f)}, the reference {len(r)}")
    return Comparison(tuple(_compare(i, *row, dtype) for i, row in enumerate(zip(e, f, r, strict=True))))


def as_far_as_eager(eager: Any, compiled: Any, reference64: Any) -> str:
    """Return how far both are from float64 where the compiled outputs visibly differ from eager and are no farther.

    It is empty where they hardly differ, or one is farther than eager: in more elements that have to be exact (NaN,
    infinities, integers), or, in the others, than the numeric rule allows. Arguments are as for ``compare_outputs``.
    """
    said = []
    for i, (e, f, r) in enumerate(zip(*map(_leaves, (eager, compiled, reference64)), strict=True)):
        if not isinstance(e, Tensor) or not isinstance(f, Tensor) or (f.shape, f.dtype) != (e.shape, e.dtype):
            if e is not f and e != f:
                return ""
            continue
        if _hardly_differ(e, f):
            continue
        usual, found = _distance(e, r), _distance(f, r)
        kept = e.isfinite() & f.isfinite() & r.isfinite()
        e64, f64, r64 = (x[kept].to(torch.float64) for x in (e, f, r))
        ruled = not e.is_floating_point() or _by_rule(i, e64, f64, r64, unit_roundoff(e.dtype)).passed
        if found[0] > usual[0] or not ruled:
            return ""
        said.append(f"output {i}: eager is off by {_said(*usual)}, fusec by {_said(*found)}")
    return "; ".join(said)


def _hardly_differ(e: Tensor, f: Tensor) -> bool:
    """Return whether two outputs differ by a few roundings at most."""
    if not e.is_floating_point():
        return torch.equal(e, f)
    e, f, u = e.to(torch.float64), f.to(torch.float64), unit_roundoff(e.dtype)
    return torch.allclose(f, e, rtol=0.0, atol=_FEW_ROUNDINGS * u * _largest(e[e.isfinite()]), equal_nan=True)


def _distance(x: Tensor, reference: Tensor) -> tuple[int, float]:
    """Return the number of elements that differ where they have to be exact, and the largest error of the others."""
    if not x.is_floating_point():
        return int((x != reference).sum()), 0.0
    x, reference = x.to(torch.float64), reference.to(torch.float64)
    finite = x.isfinite() & reference.isfinite()
    other = ~finite & (x != reference) & ~(x.isnan() & reference.isnan())
    return int(other.sum()), _largest((x - reference)[finite])


def _said(elements: int, error: float) -> str:
    return " and ".join(([f"{elements} elements"] if elements else []) + ([f"{error:.2g}"] if error else [])) or "0"


def _largest(x: Tensor) -> float:
    return _max(x) if x.numel() else 0.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance between 1 and the next number."""
    return float(torch.finfo(dtype).eps) / 2


def _leaves(outputs: Any) -> list[Any]:
    """Tensors and numbers, without gradients; complex numbers as pairs."""
    tensors = [x.detach() if isinstance(x, Tensor) else x for x in pytree.tree_leaves(outputs) if x is not None]
    return [torch.view_as_real(x.resolve_conj()) if isinstance(x, Tensor) and x.is_complex() else x for x in tensors]


def _compare(index: int, eager: Any, compiled: Any, reference: Any, dtype: torch.dtype | None) -> OutputComparison:
    def refuse(message: str) -> OutputComparison:
        return OutputComparison(index, False, math.inf, math.inf, message)

    exact = OutputComparison(index, True, 0.0, 0.0)
    if not isinstance(eager, Tensor):
        return exact if eager == compiled else refuse(f"{compiled}, not {eager}")
    if not isinstance(compiled, Tensor) or compiled.shape != eager.shape or compiled.dtype != eager.dtype:
        return refuse(f"{_describe(compiled)}, not {_describe(eager)}")
    if not eager.is_floating_point():
        wrong = int((eager != compiled).sum())
        return refuse(f"{wrong} of {eager.numel()} elements differ, exactness is due") if wrong else exact
    e, f, r = (x.to(torch.float64) for x in (eager, compiled, reference))
    if not torch.equal(e.isnan(), f.isnan()):
        return refuse(f"NaN in {int(f.isnan().sum())} elements, not {int(e.isnan().sum())}, or in others")
    special = ~e.isfinite() | ~f.isfinite()
    if not bool(((e == f) | e.isnan() | ~special).all()):
        return refuse("infinities differ")
    kept = ~special & r.isfinite()
    return _by_rule(index, e[kept], f[kept], r[kept], unit_roundoff(dtype or eager.dtype))


def _by_rule(index: int, e: Tensor, f: Tensor, r: Tensor, u: float) -> OutputComparison:
    if not e.numel():
        return OutputComparison(index, True, 0.0, 0.0)
    slack = 3 if e.numel() < _FEW_ELEMENTS else 2
    max_ratio = _ratio(_max(f - r), 2 * _max(e - r) + 2 * u * _max(r))
    rms_ratio = _ratio(_rms(f - r), slack * _rms(e - r) + 2 * u * _rms(r))
    passed = max_ratio <= 1 and rms_ratio <= 1
    message = (
        "" if passed else f"error is {max_ratio:.2f} of the largest and {rms_ratio:.2f} of the mean that is allowed"
    )
    return OutputComparison(index, passed, max_ratio, rms_ratio, message)


def _ratio(error: float, bound: float) -> float:
    return 0.0 if error == 0 else math.inf if bound == 0 else error / bound


def _max(x: Tensor) -> float:
    return float(x.abs().max())


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _describe(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def copy_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Copies of all tensors, each with its strides; tensors that share storage still do."""
    storages: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        whole = storages.get(_storage(x))
        if whole is None:
            flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
            whole = storages[_storage(x)] = flat.clone()
        fresh = whole.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        return fresh.detach().requires_grad_(x.requires_grad)

    return list(pytree.tree_map(copy, list(arguments)))


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
