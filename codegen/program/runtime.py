"""Functions that programs call at run time, beside kernels and ATen; a pool of memory blocks."""

from collections.abc import Sequence
from typing import Any

import torch

from fusec.ir.graph import Graph, is_written, storage
from fusec.reference.interpreter import evaluate

MAX_POOLED_BYTES = 16 << 20
"""Bytes of one block: kernels that need more run for so long that page faults do not matter."""
MAX_POOLED_BLOCKS = 4
_pool: list[torch.Tensor] = []


def acquire_block(nbytes: int) -> torch.Tensor:
    """Return a block of at least so many bytes: the one that was released last if it is large enough, else a new one.

    Reuse avoids the page faults of a new one.
    """
    try:
        block = _pool.pop()  # atomic
    except IndexError:
        return torch.empty(nbytes, dtype=torch.uint8)
    return block if block.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)


def release_block(block: torch.Tensor) -> None:
    """Return a block to the pool."""
    if len(_pool) < MAX_POOLED_BLOCKS and block.numel() <= MAX_POOLED_BYTES:
        _pool.append(block)


def raise_out_of_range(fault: int, checks: Sequence[tuple[int, int, str, type[Exception]]]) -> None:
    """Raise the error of eager for an index that is out of bounds.

    Args:
        fault: as the launch returned it: ``256 · index + number of the check``.
        checks: the dim, its length, the source location and the type of the error, for each check.
    """
    index, number = divmod(fault, 256)
    dim, length, source, error = checks[number - 1]
    at = f" ({source})" if source else ""
    raise error(f"index {index} is out of bounds for dimension {dim} with size {length}{at}")


def interpret(body: Graph, operands: list[Any], symbols: dict[str, int]) -> list[Any]:
    """Run a graph one operation at a time; writes to operands take effect once all results are computed."""
    results = evaluate(body, operands, symbols)
    # A cast to the same dtype returns its operand, but the caller needs results that do not alias operands.
    taken = {x.untyped_storage().data_ptr() for x in operands if isinstance(x, torch.Tensor)}
    fresh = (not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() not in taken for x in results)
    results = [x if own else x.clone() for x, own in zip(results, fresh, strict=True)]
    for i, value in enumerate(body.outputs):
        if is_written(value):
            results[i] = operands[body.inputs.index(storage(value))].copy_(results[i])
    return results
