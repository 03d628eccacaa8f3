"""Where tensors lie: kernels of a graph run on one kind of device, and each on a single one."""

from collections.abc import Iterable

from fusec.ir.graph import Graph, Value
from fusec.ir.ops import Trait
from fusec.ir.types import TensorType


def kind(device: str) -> str:
    """``cuda`` of ``cuda:0``."""
    return device.partition(":")[0]


def kernel_device(graph: Graph) -> str:
    """The device that a graph's kernels run on: the first GPU, where any of its tensors lies on one.

    A graph may read nothing from there and still make tensors on it.
    """
    values = [*graph.inputs, *(result for node in graph.nodes for result in node.results)]
    found = dict.fromkeys(v.type.device for v in values if isinstance(v.type, TensorType))
    return next((device for device in found if kind(device) == "cuda"), next(iter(found), "cpu"))


def devices(values: Iterable[Value]) -> tuple[str, ...]:
    """The devices of tensors that lie in memory; numbers and ranges a kernel makes for itself."""
    loaded = (v for v in values if v.producer is None or not v.producer.has(Trait.SOURCE))
    return tuple(dict.fromkeys(v.type.device for v in loaded if isinstance(v.type, TensorType)))
