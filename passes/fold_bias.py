"""Folding of a bias into the vendor call of the matmul or convolution that it is added to."""

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.pipeline import Context


@dataclass(frozen=True)
class FoldBiasIntoGemm:
    """Make regions of kind ``vendor`` of matmuls or convolutions and the kernels that only add a bias to them."""

    name: ClassVar[str] = "bias"

    def apply(self, graph: Graph, context: Context) -> None:
        """Fold every such kernel into its vendor call."""
        outputs = set(graph.outputs)
        for kernel in graph.nodes:
            producer = _biased(kernel, outputs)
            if producer is not None:
                label = "convolution" if producer.has(Trait.CONVOLUTION) else "linear"
                _fold(graph, producer, kernel, label)
                context.remarks.add(
                    "passed", self.name, f"{label}: bias folded into the vendor call", subject=label,
                    sources=tuple(map(str, kernel.sources[:8])),
                )  # fmt: skip
        graph.erase_dead()


def _biased(kernel: Node, outputs: set[Value]) -> Node | None:
    """Return the matmul or convolution that a kernel only adds a bias to, if it has no other use."""
    if not kernel.has(Trait.REGION) or kernel.attributes["kind"] != "kernel" or len(kernel.operands) != 2:
        return None
    *views, last = kernel.body.nodes
    if not last.is_op("add") or not all(n.is_op("reshape") for n in views):
        return None
    inside = dict(zip(kernel.body.inputs, kernel.operands, strict=True))
    for inner, term in (last.operands, last.operands[::-1]):
        value = inside.get(inner)
        producer = value.producer if value is not None else None
        if value is None or producer is None or len(value.users) != 1 or value in outputs:
            continue
        (bias,) = (v for v in kernel.operands if v is not value)
        if bias.producer is None and bias.tensor.rank == 1 and _is_bias(producer, term):
            return producer
    return None


def _is_bias(producer: Node, term: Value) -> bool:
    """Return whether a term has one element for each column of a linear layer, or channel of a convolution."""
    shape = producer.results[0].shape
    if producer.has(Trait.CONVOLUTION):
        return term.shape == (shape[1], *(1 for _ in shape[2:]))
    if not producer.has(Trait.CONTRACTION):
        return False
    (left, right), out = split_spec(producer.attributes["spec"])
    is_linear = out[:-1] == left[:-1] and sorted(right) == sorted(left[-1:] + out[-1:])
    return is_linear and len({*left, *out}) == len(left) + 1 and term.shape == shape[-1:]


def _fold(graph: Graph, producer: Node, kernel: Node, label: str) -> None:
    """Move a matmul or convolution into a kernel's region, and make the region a vendor call."""
    inputs = [*producer.operands, *(v for v in kernel.operands if v is not producer.result)]
    body = Graph()
    to = {v: body.add_input(v.type, v.name) for v in inputs}
    body.splice([producer], to)
    inner = dict(zip(kernel.body.inputs, (to[v] for v in kernel.operands), strict=True))
    body.splice(kernel.body.nodes, inner)
    body.set_outputs([inner[v] for v in kernel.body.outputs])
    kernel.attributes = {"kind": "vendor", "label": label, "body": body}
    kernel.sources = tuple(dict.fromkeys((*producer.sources, *kernel.sources)))
    graph.replace_operands(kernel, inputs)
