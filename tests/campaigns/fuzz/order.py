"""Sums and products in another order: whether a graph's results depend on it, and the reference that adds backwards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusec.ir.graph import Graph, Node
from fusec.ir.ops import split_spec
from fusec.ir.types import accumulation
from fusec.reference.contract import copy_arguments
from fusec.reference.interpreter import Machine, bind_symbols


class OrderDependent(Exception):
    """Partial results overflow or underflow in one order of the terms and not in another."""


def run_in_any_order(graph: Graph, given: Sequence[Any]) -> None:
    """Run a graph on copies, as eager does.

    Raises:
        OrderDependent: if a partial sum or product may leave the range of its type.
        RuntimeError, IndexError: what eager raises.
    """
    _Watching(bind_symbols(graph, given), None, mutate=True).evaluate(graph, copy_arguments(given))


def reversed_reference(graph: Graph, given: Sequence[Any]) -> list[Any]:
    """The outputs in float64, terms added from the last to the first: float64 itself has no more exact reference."""
    return _Reversed(bind_symbols(graph, given), torch.float64, mutate=True).evaluate(graph, given)


class _Reversed(Machine):
    def contract(self, node: Node, a: Tensor, b: Tensor) -> Tensor:
        (a_term, b_term), out = split_spec(node.attributes["spec"])
        summed = {x for x in a_term + b_term if x not in out}
        flipped = (x.flip([term.index(label) for label in sorted(summed) if label in term])
                   for x, term in ((a, a_term), (b, b_term)))  # fmt: skip
        return super().contract(node, *flipped)

    def reduce(self, node: Node, x: Tensor) -> Tensor:
        return super().reduce(node, x.flip(node.attributes["dims"]))


class _Watching(Machine):
    def contract(self, node: Node, a: Tensor, b: Tensor) -> Tensor:
        self._sum(node, super().contract(node, _magnitudes(a), _magnitudes(b)))
        return super().contract(node, a, b)

    def convolve(self, node: Node, x: Tensor, weight: Tensor) -> Tensor:
        self._sum(node, super().convolve(node, _magnitudes(x), _magnitudes(weight)))
        return super().convolve(node, x, weight)

    def reduce(self, node: Node, x: Tensor) -> Tensor:
        if node.is_op("sum"):
            self._sum(node, super().reduce(node, _magnitudes(x)))
        elif node.is_op("prod"):
            self._product(node, x)
        return super().reduce(node, x)

    def _limits(self, node: Node) -> torch.finfo | None:
        dtype = self.dtype(accumulation(node.operands[0].tensor.dtype))
        return torch.finfo(dtype) if dtype.is_floating_point else None

    def _sum(self, node: Node, of_magnitudes: Tensor) -> None:
        limits = self._limits(node)
        if limits is not None and not (of_magnitudes <= limits.max).all():
            raise OrderDependent(f"{node.op.name}: a partial sum may overflow")

    def _product(self, node: Node, x: Tensor) -> None:
        limits = self._limits(node)
        if limits is None:
            return
        magnitudes = x.double().abs().nan_to_num(1.0, torch.inf)
        above, below = magnitudes.clamp(min=1.0), magnitudes.clamp(max=1.0)
        for d in node.attributes["dims"]:
            above, below = above.prod(d, keepdim=True), below.prod(d, keepdim=True)
        overflows, underflows = above > limits.max, below < limits.tiny
        if ((overflows & (below < 1)) | (underflows & (above > 1))).any():
            raise OrderDependent("prod: a partial product may leave the range of its type")


def _magnitudes(x: Tensor) -> Tensor:
    """Of the finite numbers, in float64; what is infinite already is so in every order."""
    return x.double().abs().nan_to_num(0.0, 0.0) if x.is_floating_point() else x
