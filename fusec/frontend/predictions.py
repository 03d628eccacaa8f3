"""Strides that torch's fake functions predict wrongly, and views that depend on them."""

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fusec.errors import ImportFailure
from fusec.frontend.sources import source_of

_BY_STRIDES = frozenset(("aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter", "aten.as_strided_"))
_UNPREDICTED = frozenset(
    f"aten.{name}"
    for name in (
        "copysign", "div.Tensor_mode", "div.Scalar_mode", "floor_divide", "xlogy", "roll", "index", "index_fill",
        "index_put", "binary_cross_entropy", "log_sigmoid_forward", "reflection_pad1d", "reflection_pad2d",
        "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "native_batch_norm",
        "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update", "max_unpool2d",
        "max_unpool3d",
    )
)  # fmt: skip
"""Operations whose results may lie elsewise in eager where operands are not contiguous.

Most were found by comparing predicted and real strides over a part of PyTorch's operator database; their relatives are
taken to be like them.
"""


def check_views_by_strides(graph: Graph) -> None:
    """See that strides are known wherever a view is made by strides.

    Raises:
        ImportFailure: where it is of what eager may lay out otherwise: it would see other elements.
    """
    for node in graph.nodes:
        if _name(node) in _BY_STRIDES:
            for other in _ancestors(node):
                unpredicted = _name(other) in _UNPREDICTED or str(other.target) in _UNPREDICTED
                if unpredicted and not all(map(_is_contiguous, other.all_input_nodes)):
                    raise ImportFailure(
                        f"a view by strides of what {_name(other)} gives",
                        why="torch predicts other strides for it than eager gives",
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
