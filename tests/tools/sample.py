"""A small decoder, before and after fusing, made by hand: what the tools are tried on."""

import base64
import gzip
import json
import re
from types import SimpleNamespace
from typing import Any

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.types import F32, I64, TensorType, contiguous_strides
from fusec.pipeline import PassRecord
from fusec.remarks import Remark, Remarks

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
ROWS, HIDDEN = 16, 64


def tensor(*shape: int) -> TensorType:
    return TensorType(F32, shape, contiguous_strides(shape))


def source(module: str, line: int, op: str = "", text: str = "") -> tuple[Source, ...]:
    return (Source("modeling_small.py", line, module, op, text),)


def rms_norm(graph: Graph, x: Value, weight: Value, module: str) -> Value:
    """The norm in primitives."""
    at = source(
        module, 12, "aten.rms_norm.default", "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight"
    )
    square = graph.add_node("mul", (x, x), sources=at).result
    total = graph.add_node("sum", (square,), {"dims": (-1,)}, sources=at).result
    mean = graph.add_node("div", (total, graph.constant(float(HIDDEN), F32)), sources=at).result
    shifted = graph.add_node("add", (mean, graph.constant(1e-6, F32)), sources=at).result
    scale = graph.add_node("rsqrt", (shifted,), sources=at).result
    normal = graph.add_node("mul", (x, scale), sources=at).result
    return graph.add_node("mul", (normal, weight), sources=at).result


def region(graph: Graph, operands: list[Value], build: Any, module: str, **attributes: Any) -> Node:
    """A region around what ``build`` makes."""
    body = Graph("body")
    inputs = [body.add_input(v.type, v.name) for v in operands]
    results = build(body, *inputs)
    body.set_outputs(results)
    at = tuple(dict.fromkeys(s for n in body.nodes for s in n.sources)) or source(module, 1)
    return graph.add_node("region", operands, {**attributes, "body": body}, types=[r.type for r in results], sources=at)


def linear(graph: Graph, x: Value, weight: Value, module: str) -> Value:
    at = source(module, 30, "aten.linear.default", f"{module.rsplit('.', 1)[-1]} = self.proj(x)")
    return graph.add_node("contraction", (x, weight), {"spec": "az,bz->ab"}, sources=at).result


def decoder(layers: int = 2, fused: bool = False) -> Graph:
    """Embedding, then layers of norm, attention and SwiGLU on a residual stream."""
    g = Graph("decoder")
    tokens = g.add_input(TensorType(I64, (ROWS,), (1,)), "input_ids")
    table = g.add_input(tensor(100, HIDDEN), "embed_tokens_weight")
    call = {"target": "aten.embedding.default", "args": (("%", 0), ("%", 1)), "kwargs": ()}
    at = source("model.embed_tokens", 8, "aten.embedding.default", "hidden_states = self.embed_tokens(input_ids)")
    x = g.add_node("opaque", (table, tokens), call, types=[tensor(ROWS, HIDDEN)], sources=at).result
    x.name = "hidden_states"
    for i in range(layers):
        x = _layer(g, x, f"model.layers.{i}", fused)
    g.set_outputs([x])
    return g


def _weight(g: Graph, name: str, *shape: int) -> Value:
    return g.add_input(tensor(*shape), name.replace(".", "_"))


def _norm(g: Graph, x: Value, weight: Value, module: str, fused: bool) -> Value:
    if not fused:
        return rms_norm(g, x, weight, module)

    def inner(body: Graph, a: Value, w: Value) -> list[Value]:
        return [rms_norm(body, a, w, module)]

    return region(g, [x, weight], inner, module, kind="kernel", label="rms_norm", fusions=("rms_norm",)).result


def _layer(g: Graph, x: Value, path: str, fused: bool) -> Value:
    h = _norm(g, x, _weight(g, f"{path}.input_layernorm.weight", HIDDEN), f"{path}.input_layernorm", fused)
    q, k, v = (
        linear(g, h, _weight(g, f"{path}.{n}.weight", HIDDEN, HIDDEN), f"{path}.self_attn.{n}")
        for n in ("q_proj", "k_proj", "v_proj")
    )
    call = {"target": "aten.scaled_dot_product_attention.default", "args": (("%", 0), ("%", 1), ("%", 2)), "kwargs": ()}
    at = source(
        f"{path}.self_attn",
        40,
        "aten.scaled_dot_product_attention.default",
        "attn = F.scaled_dot_product_attention(q, k, v)",
    )
    a = g.add_node("opaque", (q, k, v), call, types=[tensor(ROWS, HIDDEN)], sources=at).result
    o = linear(g, a, _weight(g, f"{path}.o_proj.weight", HIDDEN, HIDDEN), f"{path}.self_attn.o_proj")
    x = g.add_node(
        "add", (x, o), sources=source(path, 50, "aten.add.Tensor", "hidden_states = residual + hidden_states")
    ).result
    m = _norm(g, x, _weight(g, f"{path}.post_norm.weight", HIDDEN), f"{path}.post_attention_layernorm", fused)
    gate = linear(g, m, _weight(g, f"{path}.gate.weight", 4 * HIDDEN, HIDDEN), f"{path}.mlp.gate_proj")
    up = linear(g, m, _weight(g, f"{path}.up.weight", 4 * HIDDEN, HIDDEN), f"{path}.mlp.up_proj")

    def swiglu(body: Graph, a: Value, b: Value) -> list[Value]:
        at = source(f"{path}.mlp", 60, "aten.silu.default", "F.silu(self.gate_proj(x)) * self.up_proj(x)")
        sigmoid = body.add_node("sigmoid", (a,), sources=at).result
        gated = body.add_node("mul", (a, sigmoid), sources=at).result
        return [body.add_node("mul", (gated, b), sources=at).result]

    if fused:
        act = region(g, [gate, up], swiglu, f"{path}.mlp", kind="kernel", label="swiglu").result
    else:
        (act,) = swiglu(g, gate, up)
    down = linear(g, act, _weight(g, f"{path}.down.weight", HIDDEN, 4 * HIDDEN), f"{path}.mlp.down_proj")
    return g.add_node(
        "add", (x, down), sources=source(path, 55, "aten.add.Tensor", "hidden_states = residual + self.mlp(h)")
    ).result


def compiled(layers: int = 2) -> Any:
    """What a compile of the decoder offers to the tools."""
    before, after = decoder(layers), decoder(layers, fused=True)
    records = [
        PassRecord("canonicalize", 0.004, False, str(before), str(before), 0),
        PassRecord("group", 0.012, True, str(before), str(after), 3 * layers),
    ]
    remarks = Remarks()
    for number, node in enumerate(n for n in after.nodes if n.attributes.get("label") == "rms_norm"):
        places = tuple(map(str, node.sources))
        remarks.append(Remark("passed", "raise", "rms_norm found", "rms_norm", application=number, sources=places))
    remarks.append(
        Remark(
            "missed",
            "raise",
            "rope nearly matched",
            "rope",
            "sin has 2 users, 1 is expected",
            "name the second use",
            ("model.layers.0.self_attn, modeling_small.py:40",),
        )
    )
    text = "// rms_norm\nvoid rms_norm(const float* x, float* y) {\n  y[0] = x[0] * 2.0f;\n}\n"
    steps, kernels, texts = [], {}, {}
    for node in after.nodes:
        if node.is_op("region"):
            name = node.attributes["label"]
            steps.append(SimpleNamespace(kind="kernel", name=name, node=node))
            kernels[name], texts[name] = SimpleNamespace(formula="", name=name), text
        elif node.is_op("add"):
            steps.append(SimpleNamespace(kind="interpreted", name="add", node=node))
    program = SimpleNamespace(steps=tuple(steps), kernels=kernels, texts=texts)
    return SimpleNamespace(graph=after, imported=before, records=records, remarks=remarks, program=program)


def unpacked(page: str) -> dict[str, Any]:
    """The data of a page."""
    (found,), parts = packed(page, "data"), packed(page, "parts")
    for graph in found["graphs"]:
        states = len(graph["states"])
        graph["states"][: states - 1] = parts[graph["first_part"] : graph["first_part"] + states - 1]
    return found


def packed(page: str, name: str) -> list[dict[str, Any]]:
    """The compressed data of an element of a page."""
    found = re.search(rf'<script type="application/octet-stream" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in found.group(1).split()]
