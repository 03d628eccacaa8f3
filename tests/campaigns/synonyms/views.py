"""Other spellings of views, of data movement, and of nothing at all."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.campaigns.respelling import synonym


@synonym("transpose")
def transpose_as_permute(x: Tensor, a: int, b: int) -> Tensor:
    """A transposition is a permutation."""
    dims = list(range(x.ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return x.permute(dims)


@synonym("transpose", "swapaxes")
def transpose_as_move(x: Tensor, a: int, b: int) -> Any:
    """Neighbours change places where one moves to the other's."""
    return x.movedim(a, b) if abs(a % x.ndim - b % x.ndim) == 1 else NotImplemented


@synonym("transpose")
def transpose_as_property(x: Tensor, a: int, b: int) -> Any:
    """The last two dims change places in ``mT``."""
    return x.mT if {a % x.ndim, b % x.ndim} == {x.ndim - 2, x.ndim - 1} and x.ndim > 1 else NotImplemented


@synonym("transpose")
def transpose_by_einsum(x: Tensor, a: int, b: int) -> Tensor:
    """A transposition in letters."""
    letters = list("ijklmn"[: x.ndim])
    there = "".join(letters)
    letters[a], letters[b] = letters[b], letters[a]
    return torch.einsum(f"{there}->{''.join(letters)}", x)


@synonym("unflatten")
def unflatten_as_view(x: Tensor, dim: int, sizes: Any) -> Any:
    """A dim split in two is a view."""
    if dim % x.ndim != x.ndim - 1:
        return NotImplemented
    return x.view(*x.shape[:-1], *sizes)


@synonym("unflatten", "view")
def split_by_chunks(x: Tensor, *given: Any) -> Any:
    """Heads are pieces of the last dim, stacked."""
    if len(given) != 2 or given[0] != -1 or not isinstance(given[1], tuple | list) or given[1][0] == -1:
        return NotImplemented
    return torch.stack(x.chunk(given[1][0], -1), -2)


@synonym("view")
def view_as_reshape(x: Tensor, *shape: Any) -> Any:
    """A view is a reshape."""
    return NotImplemented if isinstance(shape[0], torch.dtype) else x.reshape(*shape)


@synonym("flatten")
def flatten_as_reshape(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dims in one are a reshape."""
    a, b = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:a], -1, *x.shape[b + 1 :])


@synonym("flatten")
def flatten_as_view_of_copy(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dims in one are a view of a copy that is contiguous."""
    a, b = start_dim % x.ndim, end_dim % x.ndim
    size = x.shape[a : b + 1].numel()
    return x.contiguous().view(*x.shape[:a], size, *x.shape[b + 1 :])


@synonym("flatten")
def flatten_as_concatenation(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """The heads side by side."""
    a, b = start_dim % x.ndim, end_dim % x.ndim
    return torch.cat(x.unbind(a), -1) if a == x.ndim - 2 and b == x.ndim - 1 else NotImplemented


@synonym("flatten")
def flatten_by_einsum(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Through another order of dims and back."""
    a, b = start_dim % x.ndim, end_dim % x.ndim
    return x.mT.mT.reshape(*x.shape[:a], -1, *x.shape[b + 1 :]) if x.ndim > 1 else NotImplemented


@synonym("unsqueeze")
def unsqueeze_by_index(x: Tensor, dim: int) -> Any:
    """A dim of length 1 by an index."""
    return x[..., None] if dim == -1 else x[(slice(None),) * dim + (None,)] if dim >= 0 else NotImplemented


@synonym("chunk")
def chunk_as_split(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal pieces by their length."""
    return x.split(x.shape[dim] // chunks, dim) if x.shape[dim] % chunks == 0 else NotImplemented


@synonym("chunk", "tensor_split")
def chunk_as_slices(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal pieces one by one, by narrowing."""
    size = x.shape[dim] // chunks
    if x.shape[dim] % chunks:
        return NotImplemented
    return tuple(x.narrow(dim, i * size, size) for i in range(chunks))


@synonym("chunk")
def chunk_as_index(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal pieces of the last dim by indices."""
    size = x.shape[dim] // chunks
    if x.shape[dim] % chunks or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    return tuple(x[..., i * size : (i + 1) * size] for i in range(chunks))


@synonym("chunk")
def chunk_as_rows(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal pieces are rows of the split dim."""
    if x.shape[dim] % chunks or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    return x.unflatten(-1, (chunks, -1)).unbind(-2)


@synonym("chunk")
def chunk_by_select(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal pieces selected out of the split dim."""
    if x.shape[dim] % chunks or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    apart = x.view(*x.shape[:-1], chunks, x.shape[-1] // chunks)
    return tuple(apart.select(-2, i) for i in range(chunks))


@synonym("cat")
def cat_as_stack(tensors: Any, dim: int = 0) -> Any:
    """Equal pieces side by side are a stack, flattened."""
    same = all(t.shape == tensors[0].shape for t in tensors)
    if not same or dim % tensors[0].ndim != tensors[0].ndim - 1:
        return NotImplemented
    return torch.stack(tuple(tensors), -2).flatten(-2)


@synonym("cat")
def cat_in_steps(tensors: Any, dim: int = 0) -> Any:
    """The last piece is put on last."""
    if len(tensors) < 3:
        return NotImplemented
    return torch.cat((torch.cat(tuple(tensors[:-1]), dim), tensors[-1]), dim)


@synonym("cat")
def cat_turned(tensors: Any, dim: int = 0) -> Any:
    """Side by side or one above the other is a matter of order."""
    if dim % tensors[0].ndim != tensors[0].ndim - 1 or tensors[0].ndim < 2:
        return NotImplemented
    return torch.cat([t.mT for t in tensors], -2).mT


@synonym("add", "mul", wraps=True)
def broadcast_by_hand(call: Any, x: Any, y: Any, **options: Any) -> Any:
    """An operand that is broadcast may be expanded first."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.shape == y.shape or options:
        return NotImplemented
    return call(*torch.broadcast_tensors(x, y))


@synonym("repeat_interleave")
def repeated_by_expansion(x: Tensor, repeats: int, dim: int) -> Any:
    """Every row several times is an expansion, flattened."""
    apart = x.unsqueeze(dim + 1)
    shape = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    return apart.expand(shape).reshape(*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])


READERS = ("linear", "matmul", "rms_norm", "layer_norm", "gelu", "silu", "relu", "softmax", "add", "mul", "flatten")
"""Calls whose first argument takes a detour that changes nothing."""


def _detour(way: Any) -> Any:
    def through(call: Any, x: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim < 2:
            return NotImplemented
        return call(way(x), *rest, **options)

    through.__name__, through.__doc__ = way.__name__, way.__doc__
    return synonym(*READERS, wraps=True)(through)


@_detour
def operand_copied(x: Tensor) -> Tensor:
    """A copy has the same elements."""
    return x.clone()


@_detour
def operand_made_contiguous(x: Tensor) -> Tensor:
    """The order in memory is no part of a value."""
    return x.contiguous()


@_detour
def operand_without_dropout(x: Tensor) -> Tensor:
    """Dropout with probability 0, and outside training, keeps everything."""
    return F.dropout(F.dropout(x, 0.0, training=True), 0.1, training=False)


@_detour
def operand_detached(x: Tensor) -> Tensor:
    """At inference there is no gradient to cut."""
    return x.detach()


@_detour
def operand_flattened_and_back(x: Tensor) -> Tensor:
    """All elements in one dim, and in their shape again."""
    return x.reshape(-1).view(x.shape)


@_detour
def operand_transposed_and_back(x: Tensor) -> Tensor:
    """Two transpositions are none."""
    return x.transpose(-1, -2).transpose(-2, -1)


@_detour
def operand_unsqueezed_and_back(x: Tensor) -> Tensor:
    """A dim of length 1 comes and goes."""
    return x.unsqueeze(0).squeeze(0)


@_detour
def operand_sliced_whole(x: Tensor) -> Tensor:
    """A slice of everything."""
    return x[..., 0 : x.shape[-1]]


@_detour
def operand_split_and_joined(x: Tensor) -> Tensor:
    """Pieces side by side are what they were cut from."""
    return torch.cat(x.split([1, x.shape[-1] - 1], -1), -1) if x.shape[-1] > 1 else x.clone()


@_detour
def operand_widened_and_back(x: Tensor) -> Tensor:
    """A wider type holds every number of a narrower one."""
    return x.double().to(x.dtype)


@_detour
def operand_expanded_to_itself(x: Tensor) -> Tensor:
    """An expansion to the shape it has."""
    return x.expand_as(x)


@_detour
def operand_times_one(x: Tensor) -> Tensor:
    """1·x = x."""
    return x * 1.0 if x.is_floating_point() else x.clone()


@_detour
def operand_negated_twice(x: Tensor) -> Tensor:
    """-(-x) = x."""
    return x.neg().neg() if x.is_floating_point() else x.clone()
