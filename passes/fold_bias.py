"""The bias of a matrix product or convolution that the vendor computes: its call adds it, so that no kernel has to."""

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.pipeline import Context


@dataclass(frozen=True)
class FoldBiasIntoGemm:
    """Make regions of kind ``vendor`` of products and the kernels that only add a bias to them."""

    name: ClassVar[str] = "bias"

    def apply(self, graph: Graph, context: Context) -> None:
        """Fold every such bias into its matmul."""
        outputs = set(graph.outputs)
        for kernel in graph.nodes:
            product = _product(kernel, outputs)
            if product is not None:
                label = "convolution" if product.has(Trait.CONVOLUTION) else "linear"
                _join(graph, product, kernel, label)
                context.remarks.add(
                    "passed", self.name, f"{label}: product and bias in one call", subject=label,
                    sources=tuple(map(str, kernel.sources[:8])),
                )  # fmt: skip
        graph.erase_dead()


def _product(kernel: Node, outputs: set[Value]) -> Node | None:
    """The linear layer's product or convolution that a kernel adds a bias to, and that nothing else reads."""
    if not kernel.has(Trait.REGION) or kernel.attributes["kind"] != "kernel" or len(kernel.operands) != 2:
        return None
    *views, last = kernel.body.nodes
    if not last.is_op("add") or not all(n.is_op("reshape") for n in views):
        return None
    inside = dict(zip(kernel.body.inputs, kernel.operands, strict=True))
    for inner, term in (last.operands, last.operands[::-1]):
        value = inside.get(inner)
        product = value.producer if value is not None else None
        if value is None or product is None or len(value.users) != 1 or value in outputs:
            continue
        (bias,) = (v for v in kernel.operands if v is not value)
        if bias.producer is None and bias.tensor.rank == 1 and _is_biased(product, term):
            return product
    return None


def _is_biased(product: Node, term: Value) -> bool:
    """Return whether the addend of a matmul is one number for each of its columns, or of its channels."""
    shape = product.results[0].shape
    if product.has(Trait.CONVOLUTION):
        return term.shape == (shape[1], *(1 for _ in shape[2:]))
    if not product.has(Trait.CONTRACTION):
        return False
    (left, right), out = split_spec(product.attributes["spec"])
    is_linear = out[:-1] == left[:-1] and sorted(right) == sorted(left[-1:] + out[-1:])
    return is_linear and len({*left, *out}) == len(left) + 1 and term.shape == shape[-1:]


def _join(graph: Graph, product: Node, kernel: Node, label: str) -> None:
    """Move the matmul into the kernel's region, and make the region the vendor's."""
    inputs = [*product.operands, *(v for v in kernel.operands if v is not product.result)]
    body = Graph()
    to = {v: body.add_input(v.type, v.name) for v in inputs}
    body.splice([product], to)
    inner = dict(zip(kernel.body.inputs, (to[v] for v in kernel.operands), strict=True))
    body.splice(kernel.body.nodes, inner)
    body.set_outputs([inner[v] for v in kernel.body.outputs])
    kernel.attributes = {"kind": "vendor", "label": label, "body": body}
    kernel.sources = tuple(dict.fromkeys((*product.sources, *kernel.sources)))
    graph.replace_operands(kernel, inputs)
