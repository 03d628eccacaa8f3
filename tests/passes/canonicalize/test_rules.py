"""Each rule of canonicalisation: it applies, keeps the meaning, and leaves what would change a bit."""

import operator
import re
from typing import Any

import pytest
import torch

from fusec.config import Config
from fusec.ir.parser import parse_graph
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import RULES, normalize
from fusec.pipeline import Context
from fusec.reference.interpreter import evaluate
from tests.passes.canonicalize.rule_cases import CASES, graph_of, row


def test_every_rule_has_a_case() -> None:
    assert {r.name for r in RULES} == set(CASES)
    assert all(r.apply.__doc__ for r in RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_applies_and_keeps_the_meaning(name: str) -> None:
    graph, context = graph_of(name), Context(Config(verify=True))
    normalize(graph, context)
    assert name in {r.subject for r in context.remarks.of("passed")}
    assert not context.remarks.of("failure"), [str(r) for r in context.remarks.of("failure")]
    assert [n.op.name for n in graph.nodes if not n.is_op("constant")] == CASES[name][2]


@pytest.mark.parametrize("name", CASES)
def test_the_results_are_bitwise_those_of_before(name: str) -> None:
    graph = graph_of(name)
    rule = next(r for r in RULES if r.name == name)
    inputs = [_sample(v.type) for v in graph.inputs]
    before = evaluate(graph, inputs)
    normalize(graph)
    after = evaluate(graph, inputs)
    for a, b in zip(before, after, strict=True):
        assert torch.allclose(a, b, equal_nan=True) if not rule.exact else torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_sizes_of_one_and_none_keep_the_meaning(name: str) -> None:
    """Each size of a case in turn, wherever the graph stays valid; the rules end, and none raises."""
    inputs, body, _ = CASES[name]
    for size in {*re.findall(r"\b\d+\b", inputs + body)} - {"0", "1"}:
        for other in ("1", "0"):
            texts = [re.sub(rf"(?<![-\w.]){size}\b(?!\.)", other, text) for text in (f"{body}\nreturn %r", inputs)]
            try:
                graph = row(*texts)
                verify_graph(graph)
                samples = [_sample(v.type) for v in graph.inputs]
                before = evaluate(graph, samples)
            except Exception:
                continue  # another number than a size, or one that others depend on
            normalize(graph)
            for a, b in zip(before, evaluate(graph, samples), strict=True):
                assert torch.allclose(a, b, equal_nan=True), (size, other)


def _sample(ty: Any) -> torch.Tensor:
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8, "u8": torch.uint8}
    x = torch.randn([int(n) for n in ty.shape], generator=torch.Generator().manual_seed(1)).abs() + 0.5
    return x > 1 if ty.dtype.name == "bool" else x.to(kinds[ty.dtype.name])


LEFT_ALONE = {
    "x + 0 turns -0 into 0": "%r: f32[3, 4] = add(%x, 0.0)",
    "x - 0 keeps -0": "%r: f32[3, 4] = sub(%x, 0)",
    "f32 to bf16 and back rounds": "%a: bf16[3, 4] = cast(%x) {dtype=bf16}\n%r: f32[3, 4] = cast(%a) {dtype=f32}",
    "x / 3 is not x times a third": "%r: f32[3, 4] = div(%x, 3.0)",
    "the square root of a power is not the same at -inf": "%r: f32[3, 4] = pow(%x, 0.5)",
    "an exponential that may overflow is not divided by its sum": (
        "%a: f32[3, 4] = exp(%x)\n%b: f32[3, 1] = sum(%a) {dims=(-1,)}\n%c: f32[3, 1] = log(%b)\n"
        "%d: f32[3, 4] = sub(%x, %c)\n%r: f32[3, 4] = exp(%d)"
    ),
    "the exponential of a rounded logarithm": (
        "%m: f32[3, 1] = max(%x) {dims=(-1,)}\n%a: f32[3, 4] = sub(%x, %m)\n%b: f32[3, 4] = exp(%a)\n"
        "%c: f32[3, 1] = sum(%b) {dims=(-1,)}\n%d: f32[3, 1] = log(%c)\n%e: f32[3, 4] = sub(%a, %d)\n"
        "%f: bf16[3, 4] = cast(%e) {dtype=bf16}\n%r: bf16[3, 4] = exp(%f)"
    ),
    "the logarithm of a sum over another dim": (
        "%m: f32[3, 1] = max(%x) {dims=(-1,)}\n%a: f32[3, 4] = sub(%x, %m)\n%b: f32[3, 4] = exp(%a)\n"
        "%c: f32[1, 4] = sum(%b) {dims=(-2,)}\n%d: f32[1, 4] = log(%c)\n%e: f32[3, 4] = sub(%a, %d)\n"
        "%r: f32[3, 4] = exp(%e)"
    ),
    "a slice over parts of what is read whole too": (
        "%y: f32[3, 4] = exp(%x)\n%a: f32[3, 8] = concat(%x, %y) {dim=-1}\n"
        "%b: f32[3, 4] @(8, 1) = slice(%a) {dim=-1, start=2, stop=6, step=1}\n"
        "%c: f32[3, 8] = exp(%a)\n%r: f32[3, 12] = concat(%b, %c) {dim=-1}"
    ),
    "every other element over parts": (
        "%y: f32[3, 4] = exp(%x)\n%a: f32[3, 8] = concat(%x, %y) {dim=-1}\n"
        "%r: f32[3, 3] @(8, 2) = slice(%a) {dim=-1, start=1, stop=7, step=2}"
    ),
    "what is repeated for more than arithmetic": (
        "%y: f32[1, 3, 4] = reshape(%x) {shape=(1, 3, 4)}\n%e: f32[2, 3, 4] @(0, 4, 1) = expand(%y) {shape=(2, 3, 4)}\n"
        "%a: f32[6, 4] = reshape(%e) {shape=(6, 4)}\n%b: f32[6, 1] = sum(%a) {dims=(-1,)}\n"
        "%c: f32[6, 4] = sin(%a)\n%r: f32[6, 4] = mul(%c, %b)"
    ),
    "a mean stays a division": "%a: f32[3, 1] = sum(%x) {dims=(-1,)}\n%r: f32[3, 1] = div(%a, 4.0)",
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_what_would_change_a_bit_is_left(why: str) -> None:
    graph = row(LEFT_ALONE[why] + "\nreturn %r")
    before = str(graph)
    normalize(graph)
    assert str(graph) == before


@pytest.mark.parametrize("size", [3, "s0"])
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge"])
@pytest.mark.parametrize("number", range(-2, 6))
def test_places_are_compared_only_where_that_decides_something(op: str, number: int, size: int | str) -> None:
    """A comparison is settled where all places from 0 to the last agree; of an unknown number, where any would."""
    graph = parse_graph(
        f"graph g(%x: f32[{size}]) {{\n"
        f'  %i: i64[{size}] = iota() {{size={size}, dtype=i64, device="cpu"}}\n'
        f"  %c: bool[{size}] = {op}(%i, {number})\n  %r: f32[{size}] = where(%c, %x, 7.0)\n  return %r\n}}"
    )
    compare = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}[op]
    for length in (3,) if size == 3 else (1, 2, 3, 9):
        x = torch.randn(length)
        before = evaluate(graph, [x], {"s0": length})
        normalize(graph)
        assert torch.equal(before[0], evaluate(graph, [x], {"s0": length})[0])
    possible = range(3 if size == 3 else 1000)
    settled = len({compare(place, number) for place in possible}) == 1
    assert settled == (not any(n.is_op(op) for n in graph.nodes))
