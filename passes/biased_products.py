"""The bias of a matrix product that the vendor computes: its call adds it, so that no kernel has to."""

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.pipeline import Context


@dataclass(frozen=True)
class BiasedProducts:
    """Make regions of kind ``vendor`` of products and the kernels that only add a bias to them."""

    name: ClassVar[str] = "bias"

    def apply(self, graph: Graph, context: Context) -> None:
        """Take every such pair together."""
        outputs = set(graph.outputs)
        for kernel in graph.nodes:
            product = _product(kernel, outputs)
            if product is not None:
                _join(graph, product, kernel)
                context.remarks.add(
                    "passed", self.name, "linear: product and bias in one call", subject="linear",
                    sources=tuple(map(str, kernel.sources[:8])),
                )  # fmt: skip
        graph.erase_dead()


def _product(kernel: Node, outputs: set[Value]) -> Node | None:
    """The linear layer's product that a kernel adds a bias to, and that nothing else reads."""
    if not kernel.has(Trait.REGION) or kernel.attributes["kind"] != "kernel" or len(kernel.operands) != 2:
        return None
    if [n.op.name for n in kernel.body] != ["add"]:
        return None
    for value, bias in (kernel.operands, kernel.operands[::-1]):
        product = value.producer
        if product is None or not product.has(Trait.CONTRACTION) or len(value.users) != 1 or value in outputs:
            continue
        (left, right), out = split_spec(product.attributes["spec"])
        is_linear = len(right) == 2 and out[-1] in right and out[:-1] == left[:-1] and left[-1] in right
        if is_linear and bias.shape == value.shape[-1:] and bias.producer is None:
            return product
    return None


def _join(graph: Graph, product: Node, kernel: Node) -> None:
    """Let the kernel's region hold the product too, and be the vendor's."""
    inputs = [*product.operands, *(v for v in kernel.operands if v is not product.result)]
    body = Graph()
    to = {v: body.add_input(v.type, v.name) for v in inputs}
    body.splice([product], to)
    inner = dict(zip(kernel.body.inputs, (to[v] for v in kernel.operands), strict=True))
    body.splice(kernel.body.nodes, inner)
    body.set_outputs([inner[v] for v in kernel.body.outputs])
    kernel.attributes = {"kind": "vendor", "label": "linear", "body": body}
    kernel.sources = tuple(dict.fromkeys((*product.sources, *kernel.sources)))
    graph.replace_operands(kernel, inputs)
