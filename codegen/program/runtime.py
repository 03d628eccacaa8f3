"""What programs call when they run, beside kernels and ATen; memory that they lend each other."""

from collections.abc import Sequence
from typing import Any

import torch

from fusec.ir.graph import Graph, is_written, storage
from fusec.reference.interpreter import evaluate

LARGEST_SPARE = 16 << 20
"""Bytes of a block that is worth keeping: what needs more computes for so long that new pages do not count."""
MOST_SPARE = 4
"""Blocks that are kept."""
_spare: list[torch.Tensor] = []


def borrow(nbytes: int) -> torch.Tensor:
    """A block of at least so many bytes: the one that was given back last, or a new one.

    A new one has new pages, each of which has the system stop the program when it is first touched.
    """
    try:
        block = _spare.pop()  # one step to other threads
    except IndexError:
        return torch.empty(nbytes, dtype=torch.uint8)
    return block if block.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)


def give_back(block: torch.Tensor) -> None:
    """Keep a borrowed block for the next who needs one."""
    if len(_spare) < MOST_SPARE and block.numel() <= LARGEST_SPARE:
        _spare.append(block)


def raise_out_of_range(fault: int, places: Sequence[tuple[int, int, str, type[Exception]]]) -> None:
    """Raise what eager raises for a place that does not exist.

    Args:
        fault: what the kernel gave: the number of a check and the place.
        places: dim, its length, the source line and the error, for each check.
    """
    place, number = divmod(fault, 256)
    dim, length, source, error = places[number - 1]
    at = f" ({source})" if source else ""
    raise error(f"index {place} is out of bounds for dimension {dim} with size {length}{at}")


def interpret(body: Graph, operands: list[Any], symbols: dict[str, int]) -> list[Any]:
    """Run a graph operation by operation; writes change the operands' storage once all is computed."""
    results = evaluate(body, operands, symbols)
    # A cast that changes nothing gives its operand back; the caller relies on memory of its own.
    taken = {x.untyped_storage().data_ptr() for x in operands if isinstance(x, torch.Tensor)}
    fresh = (not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() not in taken for x in results)
    results = [x if own else x.clone() for x, own in zip(results, fresh, strict=True)]
    for i, value in enumerate(body.outputs):
        if is_written(value):
            results[i] = operands[body.inputs.index(storage(value))].copy_(results[i])
    return results
