"""Each line of a kernel belongs to an operation of its region, on both targets."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.tile.origins import line_origins
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.debug.kernel_lines import kernel_lines
from fusec.debug.subject import Subject, subject_of
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from tests.tools.sample import tensor


def norm(x: Tensor, weight: Tensor, projection: Tensor) -> Tensor:
    return F.silu(F.linear(F.rms_norm(x, (64,), weight), projection))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


SAMPLES = {
    norm: (torch.randn(4, 64), torch.randn(64), torch.randn(32, 64)),
    attention: tuple(torch.randn(1, 2, 40, 64) for _ in range(3)),
}
COMMENT = ("//", "#")
EXPECTED = [
    (norm, "cpp", r"= rsqrt\(", "rsqrt"),
    (norm, "cpp", r"= sigmoid\(", "sigmoid"),
    (norm, "cpp", r"\bacc\d+ = ", "sum"),
    (norm, "cpp", r"fold_sum\(", "sum"),
    (norm, "cpp", r"^ *dot_\w+<", "contraction"),
    (norm, "cpp", r"store\(out0", "mul"),
    (norm, "cpp", r"store\(left\d", "mul"),
    (norm, "triton", r"= tl\.rsqrt\(", "rsqrt"),
    (norm, "triton", r"= tl\.reduce\(", "sum"),
    (attention, "cpp", r"^ *dot_\w+<", "contraction"),
    (attention, "cpp", r"\* 0\.125f", "mul"),
    (attention, "cpp", r"maximum\(acc", "max"),
    (attention, "cpp", r"\bacc\d+ = acc\d+ \+ ", "sum"),
    (attention, "triton", r"= tl\.dot\(", "contraction"),
    (attention, "triton", r" \* 0\.125", "mul"),
]


def lines_of(function: object, target: str) -> list[tuple[str, str]]:
    """Return the lines of all kernels but comments, each with its operation, "input", or "" where it has neither."""
    graph = trace(function, SAMPLES[function], symbolic=False)
    subject: Subject = subject_of(compile_graph(graph, Config(target=target, strict=True)))
    return [
        (text, name_of(region, origin))
        for region, step in subject.steps.items()
        for text, origin in zip(step.source.splitlines(), step.lines, strict=True)
        if not text.startswith(COMMENT)
    ]


def name_of(region: Node, origin: int | None) -> str:
    return "" if origin is None else region.body.nodes[origin].op.name if origin >= 0 else "input"


@pytest.mark.parametrize(("function", "target", "pattern", "operation"), EXPECTED)
def test_a_line_belongs_to_the_operation_that_it_computes(
    function: object, target: str, pattern: str, operation: str
) -> None:
    found = [name for text, name in lines_of(function, target) if re.search(pattern, text)]
    assert found and set(found) == {operation}


def test_loads_belong_to_inputs() -> None:
    assert {name for text, name in lines_of(norm, "cpp") if re.search(r"= load<\d+>\(in\d", text)} == {"input"}
    assert line_origins("// v1 = rsqrt(v2)\nv1 = 3", {"v1": 5}) == [None, 5]


def test_a_region_of_another_structure_has_no_lines() -> None:
    def region(op: str) -> Node:
        body = Graph("body")
        body.set_outputs([body.add_node(op, (body.add_input(tensor(4), "x"),)).result])
        graph = Graph("g")
        x = graph.add_input(tensor(4), "x")
        return graph.add_node("region", (x,), {"kind": "kernel", "body": body}, types=[tensor(4)])

    first, equal, other = region("exp"), region("exp"), region("neg")
    found = kernel_lines(dict.fromkeys((first, equal, other), "k"), {"k": "v1 = 3"}, {"k": {"v1": 0}})
    assert found == {first: [0], equal: [0]}


def test_equal_layers_share_a_kernel_and_its_lines() -> None:
    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = x + torch.cummax(F.rms_norm(x, (16,), weight), -1).values
        return x

    graph = trace(layers, [torch.randn(4, 16), *(torch.randn(16) for _ in range(4))], symbolic=False)
    steps = list(subject_of(compile_graph(graph, Config(target="cpp"))).steps.values())
    assert len(steps) > len({step.name for step in steps}) and all(step.lines for step in steps)
    assert len({(step.name, tuple(step.lines)) for step in steps}) == len({step.name for step in steps})
