"""Scatters on targets whose programs go through elements in order: which are short, and have lanes."""

from collections.abc import Iterator, Sequence

from fusec.ir.types import Size, TensorType

MOST_IN_ORDER = 64
"""Elements of a scatter that a program on a GPU takes one after another. Each waits for the memory that the one before
may have changed; an assumption, as none has been timed."""


def scatter_objections(destination: TensorType, dim: int, elements: Size, kept: Sequence[Size]) -> Iterator[str]:
    """Yield why a program does not take the elements of a scatter in order, with lanes along a dim that is kept.

    Args:
        destination: the type of the tensor that is changed.
        dim: along which elements are scattered.
        elements: the number of elements along it.
        kept: the numbers of elements along all dims; that of ``dim`` does not count.
    """
    own = dim % destination.rank
    if not any(s == 1 and n != 1 for d, (s, n) in enumerate(zip(destination.strides, kept, strict=True)) if d != own):
        yield "no dim is contiguous besides the one that is scattered along, in which places may repeat"
    if not isinstance(elements, int):
        yield f"it takes {elements} elements in order, a number not known at compile time"
    elif elements > MOST_IN_ORDER:
        yield f"it takes {elements} elements in order, more than {MOST_IN_ORDER}"
