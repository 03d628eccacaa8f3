"""Devices of tensors and kernels: all kernels of a graph run on one kind of device, each on one device."""

from collections.abc import Iterable

from fusec.ir.graph import Graph, Value
from fusec.ir.ops import Trait
from fusec.ir.types import TensorType


def kind(device: str) -> str:
    """Return the type of a device: ``cuda`` of ``cuda:0``."""
    return device.partition(":")[0]


def kernel_device(graph: Graph) -> str:
    """Return the device of a graph's kernels: the first GPU of any of its tensors, else the first device.

    Results count too: a graph may create tensors on a GPU and read none from it.
    """
    values = [*graph.inputs, *(result for node in graph.nodes for result in node.results)]
    found = dict.fromkeys(v.type.device for v in values if isinstance(v.type, TensorType))
    return next((device for device in found if kind(device) == "cuda"), next(iter(found), "cpu"))


def devices(values: Iterable[Value]) -> tuple[str, ...]:
    """Return the distinct devices of tensors in memory; kernels compute constants and iotas themselves."""
    loaded = (v for v in values if v.producer is None or not v.producer.has(Trait.SOURCE))
    return tuple(dict.fromkeys(v.type.device for v in loaded if isinstance(v.type, TensorType)))
