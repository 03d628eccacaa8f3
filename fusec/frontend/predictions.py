"""Strides of eager where torch's fake functions predict other ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for, suggest_memory_format
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree as pytree

from fusec.errors import ImportFailure
from fusec.frontend.sources import source_of
from fusec.frontend.torch_internals import predictions_corrected

Layout: TypeAlias = Callable[..., Sequence[Any]]
"""Return the strides of eager from the predicted result and the arguments of the operation."""

_aten = torch.ops.aten
_BY_STRIDES = frozenset(("aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter", "aten.as_strided_"))


def _overloads(names: str) -> Iterator[Any]:
    """Yield the functional overloads of ATen operations by name; a name may select one overload after a dot."""
    for name in names.split():
        packet = getattr(_aten, name.partition(".")[0])
        for overload in packet.overloads():
            found = getattr(packet, overload)
            if not found._schema.is_mutable and name in (packet.__name__, f"{packet.__name__}.{overload}"):
                yield found


def corrected_predictions() -> AbstractContextManager[None]:
    """Correct the strides that fake functions predict to eager's on the CPU within this context."""
    return predictions_corrected(_LAYOUTS, _corrected)


def _corrected(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], predicted: Any) -> Any:
    """Return a prediction, its first tensor with eager's strides.

    Args:
        operation: one of ``_LAYOUTS``.
        args: fake tensors and numbers that it was called with.
        kwargs: the same, by name.
        predicted: the result of its fake function.
    """
    leaves, structure = pytree.tree_flatten(predicted)
    strides = _strides(operation, args, kwargs, leaves[0])
    if strides is None:
        return predicted
    leaves[0] = torch.empty_strided(leaves[0].shape, strides, dtype=leaves[0].dtype, device=leaves[0].device)
    return pytree.tree_unflatten(leaves, structure)


def laid_out(operation: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition of an operation, its first result copied where eager's strides differ."""
    if operation not in _LAYOUTS:
        return decomposition

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten(decomposition(*args, **kwargs))
        first, strides = leaves[0], _strides(operation, args, kwargs, leaves[0])
        if strides is not None and tuple(strides) != first.stride():
            memory = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)
            leaves[0] = _aten.copy.default(memory, first)
        return pytree.tree_unflatten(leaves, structure)

    return call


def _strides(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Tensor) -> Sequence[Any] | None:
    """Return the strides of eager, None where they are unknown: sizes depend on data, or kernels are not the CPU's."""
    if (
        first.ndim < 2
        or first.layout is not torch.strided
        or first.device.type != "cpu"
        or has_free_unbacked_symbols(first)
    ):
        return None
    return _LAYOUTS[operation](first, *args, **kwargs)


def _iterated(out: Tensor, *args: Any, **kwargs: Any) -> Sequence[Any]:
    """Return strides as TensorIterator lays results out: in the order of the broadcast operands' strides."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return compute_elementwise_output_strides(*(x.expand(out.shape) for x in tensors))


def _promoted(out: Tensor, *args: Any, **kwargs: Any) -> Sequence[Any]:
    """Return strides as TensorIterator does for operands cast to one dtype, which have no gaps."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    common = out.dtype if out.is_floating_point() or len(tensors) == 1 else torch.result_type(*tensors)
    return _iterated(out, *(x.to(common) for x in tensors))


def _contiguous(out: Tensor, *args: Any, **kwargs: Any) -> Sequence[Any]:
    return make_contiguous_strides_for(out.shape)


def _cloned(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Sequence[Any]:
    """Return strides as a clone of the first operand, which is then changed in place."""
    return torch.empty_like(x).stride()


def _suggested(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Sequence[Any]:
    """Contiguous or channels last, as the first operand."""
    return torch.empty(out.shape, memory_format=suggest_memory_format(x)).stride()


def _scaled(out: Tensor, x: Tensor, exponent: Tensor) -> Sequence[Any]:
    """Return strides as ATen's composition of ``pow`` and ``mul`` does."""
    return (x * torch.pow(2.0, exponent)).stride()


def _rolled(out: Tensor, x: Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Sequence[Any]:
    """Return strides as ATen's composition of slices and ``cat`` does."""
    if not dims:
        return make_contiguous_strides_for(out.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        start = (x.shape[dim] - shift) % x.shape[dim] if x.numel() else 0
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x.stride()


def _indexed(out: Tensor, x: Tensor, indices: Sequence[Tensor | None]) -> Sequence[Any]:
    """Return strides as TensorIterator does for the operand, with stride 0 in indexed dims, and the indices."""
    indexed = [d < len(indices) and indices[d] is not None for d in range(x.ndim)]
    tensors = torch.broadcast_tensors(*(i for i in indices if i is not None))
    if [key for key, _ in groupby(indexed)].count(True) > 1:  # their dims come first
        x = x.permute(sorted(range(x.ndim), key=lambda d: not indexed[d]))
        indexed.sort(reverse=True)
    before, behind = indexed.index(True), indexed[::-1].index(True)
    kept = x.stride()[:before], x.stride()[x.ndim - behind :]
    source = x.as_strided(out.shape, (*kept[0], *(0 for _ in tensors[0].shape), *kept[1]))
    return _iterated(out, source, *(i.reshape(*i.shape, *(1 for _ in range(behind))) for i in tensors))


_LAYOUTS: dict[Any, Layout] = {
    overload: layout
    for layout, names in (
        (_promoted, "copysign div.Tensor_mode div.Scalar_mode floor_divide heaviside logaddexp logaddexp2 logical_and"
                    " logical_or logical_xor logit_backward special_xlog1py xlogy"),
        (_iterated, "complex native_dropout_backward polar"),
        (_scaled, "ldexp"),
        (_cloned, "binary_cross_entropy index_fill index_put _unsafe_index_put"),
        (_contiguous, "log_sigmoid_forward nll_loss2d_forward pow.Scalar"),
        (_suggested, "reflection_pad3d replication_pad3d native_batch_norm _native_batch_norm_legit max_unpool2d"
                     " max_unpool3d _native_batch_norm_legit_functional _batch_norm_with_update channel_shuffle"
                     " native_channel_shuffle"),
        (_rolled, "roll"),
        (_indexed, "index _unsafe_index"),
    )
    for overload in _overloads(names)
}  # fmt: skip
"""Found by ``tests.campaigns.op_db.strides``, which compares real with predicted strides."""


def check_views_by_strides(graph: Graph) -> None:
    """Check that strides are known wherever a view is made by strides.

    Raises:
        ImportFailure: for a view of a value with other strides in eager: it would select other elements.
    """
    for node in graph.nodes:
        if _name(node) in _BY_STRIDES:
            for other in _ancestors(node):
                unknown = other.target in _LAYOUTS and other.meta["val"].device.type != "cpu"
                if unknown and not all(map(_is_contiguous, other.all_input_nodes)):
                    raise ImportFailure(
                        f"a view by strides of the result of {_name(other)}",
                        why="torch predicts other strides for it than eager's",
                        fix="make it contiguous first, or use a view by shape",
                        where=str(source_of(node)),
                    )


def _name(node: Node) -> str:
    overload = node.target
    return str(overload.overloadpacket) if isinstance(overload, torch._ops.OpOverload) else ""


def _ancestors(node: Node) -> Iterator[Node]:
    seen, stack = {node}, [node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
        yield from new


def _is_contiguous(node: Node) -> bool:
    fake = node.meta.get("val")
    return not isinstance(fake, torch.Tensor) or fake.layout != torch.strided or fake.is_contiguous()
