"""The labels of boxes: short enough for a picture, in the terms of the model."""

from typing import Any

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import TensorType

LONGEST = 40
_PRODUCT = Trait.CONTRACTION | Trait.CONVOLUTION


def label(node: Node) -> str:
    """Return a short label of a node: ``mul 0.125``, ``cast bf16``, ``scaled_dot_product_attention``."""
    a = node.attributes
    if node.has(Trait.REGION):
        return shorten(str(a.get("label") or a.get("fusion") or "region"))
    if node.has(Trait.OPAQUE):
        return shorten(short_target(str(a.get("target", node.op.name))))
    return shorten(f"{node.op.name} {_detail(node)}".rstrip())


def _detail(node: Node) -> str:
    a = node.attributes
    if node.has(Trait.REDUCTION):
        return "dim " + " ".join(map(str, a["dims"]))
    if node.is_op("slice"):
        return f"{a['start']}:{a['stop']}" + ("" if a.get("step", 1) == 1 else f":{a['step']}")
    if node.is_op("window"):
        return f"of {a['size']} every {a['step']}"
    if node.is_op("concat"):
        return f"dim {a['dim']}"
    if node.is_op("permute"):
        return " ".join(map(str, a["dims"]))
    shown = {"cast": "dtype", "contraction": "spec", "size": "expr", "constant": "value"}.get(node.op.name)
    return str(a[shown]) if shown else inline_constants(node)


def short_target(target: str) -> str:
    """``aten.embedding.default`` → ``embedding``."""
    name = target.removeprefix("torch.ops.")
    parts = name.split(".")
    return parts[1] if len(parts) >= 2 and parts[0] in ("aten", "prims", "prim") else name.removesuffix(".default")


def inline_constants(node: Node) -> str:
    """The constant operands of a pointwise node."""
    numbers = [v.producer.attributes["value"] for v in node.operands if is_number(v) and v.producer]
    return " ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers)


def is_number(value: Value) -> bool:
    """Return whether a value is a constant or a size, which the page writes into its reader instead of drawing it."""
    return value.producer is not None and value.producer.is_op("constant", "size")


def type_text(value: Value) -> str:
    """The type, without strides and device."""
    ty = value.type
    return f"{ty.dtype}[{', '.join(map(str, ty.shape))}]" if isinstance(ty, TensorType) else str(ty)


def value_name(value: Value) -> str:
    """Return a label for an end of an edge: its own name, its module's if it is the main result, or its operation's."""
    node = value.producer
    if value.name or node is None:
        # The end of a parameter's name distinguishes it from its neighbours.
        name = value.name or f"input {value.index}"
        return name if len(name) <= 24 else "…" + name[-23:]
    module = node.sources[0].module.rpartition(".")[2] if node.sources else ""
    if module and not module.isdigit() and node.has(_PRODUCT | Trait.OPAQUE):
        return shorten(module, 24)
    return shorten(label(node), 24)


def category(node: Node) -> str:
    """The class of colours."""
    if node.has(Trait.REGION):
        return {"kernel": "kernel", "vendor": "contraction"}.get(str(node.attributes.get("kind")), "declared")
    for trait, name in (
        (Trait.OPAQUE, "opaque"), (Trait.WRITE, "write"), (_PRODUCT, "contraction"),
        (Trait.REDUCTION, "reduction"), (Trait.SOURCE, "source"), (Trait.VIEW | Trait.LOOKUP, "view"),
    ):  # fmt: skip
        if node.has(trait):
            return name
    return "write" if node.is_op("full") else "pointwise"


def attribute_text(value: Any) -> str:
    """Return one attribute, on one line."""
    if isinstance(value, Graph):
        return f"graph of {len(value)} nodes"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(attribute_text, value)) + ")"
    return str(value)


def shorten(text: str, longest: int = LONGEST) -> str:
    """At most ``longest`` characters, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
