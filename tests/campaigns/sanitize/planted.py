"""Kernels with a fault each, which the sanitizers must report."""

from collections.abc import Callable

import sympy
import torch

from fusec.codegen.cpp.build import build
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.tile.kernel import Buffer, Compute, Kernel, Load, Loop, Store
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.types import F32, I64
from tests.campaigns.sanitize.guards import guarded

_LENGTH = 100
_I = sympy.Symbol("i", integer=True, nonnegative=True)


def _store() -> None:
    """Store one element behind the output."""
    _run(_converted(store=_I + 1))


def _load() -> None:
    """Load one element behind the input."""
    _run(_converted(load=_I + 1))


def _cast() -> None:
    """Convert a float out of range as C++ does."""
    _run(_converted().replace("cast<int64_t>(", "(int64_t)("))


PLANTED: dict[str, Callable[[], None]] = {"store": _store, "load": _load, "cast": _cast}
REPORTS = {"store": "heap-buffer-overflow", "load": "SEGV", "cast": "outside the range of representable values"}
"""What is reported of each."""


def _converted(load: sympy.Expr = _I, store: sympy.Expr = _I) -> str:
    """Return the text of a kernel that converts floats to integers, one after another."""
    body = (Load("v", "x", load), Compute("r", "cast", ("v",), I64), Store("y", store, "r"))
    buffers = (Buffer("x", F32, _LENGTH, "input"), Buffer("y", I64, _LENGTH, "output"))
    return print_kernel(Kernel("planted", "pointwise", buffers, (), (Loop("i", 0, _LENGTH, 1, "serial", body),)))


def _run(text: str) -> None:
    (kernel,) = build([("planted", text)], Config.from_environment())
    if isinstance(kernel, BuildError):
        raise kernel
    kernel((guarded(torch.full((_LENGTH,), 1e30)), torch.empty(_LENGTH, dtype=torch.int64)), ())
