"""Canonicalisation: each rule keeps the meaning, leaves what would change a bit, and gives one form.

Longer than 500 lines: one case for every rule stands beside the tests that all rules share.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph, base
from fusec.ir.parser import parse_graph
from fusec.ir.types import BF16, BOOL, DTYPES, F16, F32, DType
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import RULES, normalize
from fusec.passes.canonicalize.casts import holds_all
from fusec.passes.canonicalize.contractions import canonical_spec
from fusec.passes.canonicalize.numbers import rounded
from fusec.pipeline import Context
from fusec.rewriting.driver import simplifies, simplify_graph
from fusec.verify.dtypes import torch_dtype
from fusec.verify.interpreter import evaluate
from fusec.verify.rewrites import check_rewrite
from tests.random_graphs import graphs


def row(body: str, inputs: str = "%x: f32[3, 4]") -> Graph:
    return parse_graph(f"graph g({inputs}) {{\n{body}\n}}\n")


CASES: dict[str, tuple[str, str, list[str]]] = {
    "constant-folding": ("%x: f32[3, 4]", "%a: f32[] = add(1.5:f32, 2.0:f32)\n%r: f32[3, 4] = mul(%x, %a)", ["mul"]),
    "cast-of-number": (
        "%x: bf16[3, 4]",
        '%c: f32[] = constant() {value=0.125, dtype=f32, device="cpu"}\n'
        "%a: bf16[] = cast(%c) {dtype=bf16}\n%r: bf16[3, 4] = mul(%x, %a)",
        ["mul"],
    ),
    "neutral-cast": ("%x: f32[3, 4]", "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "cast-through-wider": (
        "%x: bf16[3, 4]",
        "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%b: bf16[3, 4] = cast(%a) {dtype=bf16}\n%r: bf16[3, 4] = exp(%b)",
        ["exp"],
    ),
    "constant-right": ("%x: f32[3, 4]", "%r: f32[3, 4] = add(2.0, %x)", ["add"]),
    "times-one": ("%x: f32[3, 4]", "%a: f32[3, 4] = mul(%x, 1.0)\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "plus-zero": ("%x: f32[3, 4]", "%a: f32[3, 4] = sub(%x, 0.0)\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "minus-constant": ("%x: f32[3, 4]", "%r: f32[3, 4] = sub(%x, 0.1)", ["add"]),
    "plus-negative": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = neg(%x)\n%b: f32[3, 4] = exp(%x)\n%r: f32[3, 4] = add(%a, %b)",
        ["exp", "sub"],
    ),
    "times-minus-one": ("%x: f32[3, 4]", "%r: f32[3, 4] = mul(%x, -1.0)", ["neg"]),
    "double-negation": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = neg(%x)\n%b: f32[3, 4] = neg(%a)\n%r: f32[3, 4] = exp(%b)",
        ["exp"],
    ),
    "small-power": ("%x: f32[3, 4]", "%r: f32[3, 4] = pow(%x, 3.0)", ["mul", "mul"]),
    "divide-by-power-of-two": ("%x: f32[3, 4]", "%r: f32[3, 4] = div(%x, 8.0)", ["mul"]),
    "one-over": ("%x: f32[3, 4]", "%r: f32[3, 4] = div(1.0, %x)", ["reciprocal"]),
    "reciprocal-root": ("%x: f32[3, 4]", "%a: f32[3, 4] = sqrt(%x)\n%r: f32[3, 4] = reciprocal(%a)", ["rsqrt"]),
    "exponential-of-logarithm": (
        "%x: f32[3, 4]",
        "%m: f32[3, 1] = max(%x) {dims=(-1,)}\n%a: f32[3, 4] = sub(%x, %m)\n%e: f32[3, 4] = exp(%a)\n"
        "%s: f32[3, 1] = sum(%e) {dims=(-1,)}\n%l: f32[3, 1] = log(%s)\n%b: f32[3, 4] = sub(%a, %l)\n"
        "%r: f32[3, 4] = exp(%b)",
        ["max", "sub", "exp", "sum", "div"],
    ),
    "settled-choice": (
        "%x: f32[3, 4], %m: bool[3, 4]",
        "%a: f32[3, 4] = where(%m, %x, %x)\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "all-lowest": (
        "%x: f32[3, 4]",
        "%a: bool[3, 4] = eq(%x, -inf)\n%r: bool[3, 1] = min(%a) {dims=(-1,)}",
        ["max", "eq"],
    ),
    "choice-of-truths": (
        "%m: bool[3, 4]",
        '%t: bool[] = constant() {value=true, dtype=bool, device="cpu"}\n'
        '%f: bool[] = constant() {value=false, dtype=bool, device="cpu"}\n'
        "%a: bool[3, 4] = where(%m, %t, %f)\n%r: bool[3, 4] = not(%a)",
        ["not"],
    ),
    "negated-choice": (
        "%x: f32[3, 4], %m: bool[3, 4]",
        "%a: bool[3, 4] = not(%m)\n%r: f32[3, 4] = where(%a, %x, 1.0)",
        ["where"],
    ),
    "compared-truth": (
        "%x: f32[3, 4], %m: bool[3, 4]",
        '%f: bool[] = constant() {value=false, dtype=bool, device="cpu"}\n'
        "%a: bool[3, 4] = eq(%m, %f)\n%b: bool[3, 4] = ne(%a, %f)\n%r: f32[3, 4] = where(%b, %x, 1.0)",
        ["where"],
    ),
    "neutral-truth": (
        "%m: bool[3, 4]",
        '%c: bool[] = constant() {value=true, dtype=bool, device="cpu"}\n'
        "%a: bool[3, 4] = and(%m, %c)\n%r: bool[3, 4] = not(%a)",
        ["not"],
    ),
    "same-shape-view": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = reshape(%x) {shape=(3, 4)}\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "identity-permute": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = permute(%x) {dims=(0, 1)}\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "full-slice": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = slice(%x) {dim=-1, start=0, stop=4, step=1}\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "reshape-of-reshape": (
        "%x: f32[3, 4]",
        "%a: f32[12] = reshape(%x) {shape=(12,)}\n%r: f32[2, 6] = reshape(%a) {shape=(2, 6)}",
        ["reshape"],
    ),
    "permute-of-permute": (
        "%x: f32[3, 4, 5]",
        "%a: f32[5, 3, 4] @(1, 20, 5) = permute(%x) {dims=(2, 0, 1)}\n"
        "%r: f32[4, 5, 3] @(5, 1, 20) = permute(%a) {dims=(2, 0, 1)}",
        ["permute"],
    ),
    "expand-of-expand": (
        "%x: f32[1, 4]",
        "%a: f32[3, 4] @(0, 1) = expand(%x) {shape=(3, 4)}\n%r: f32[2, 3, 4] @(0, 0, 1) = expand(%a) {shape=(2, 3, 4)}",
        ["expand"],
    ),
    "permute-of-ones": ("%x: f32[3, 1, 4]", "%r: f32[1, 3, 4] @(4, 4, 1) = permute(%x) {dims=(1, 0, 2)}", ["reshape"]),
    "permute-before-ones": (
        "%x: f32[3, 4]",
        "%a: f32[3, 1, 4] = reshape(%x) {shape=(3, 1, 4)}\n%r: f32[4, 1, 3] @(1, 4, 4) = permute(%a) {dims=(2, 1, 0)}",
        ["permute", "reshape"],
    ),
    "implicit-broadcast": (
        "%x: f32[3, 4], %y: f32[4]",
        "%a: f32[3, 4] @(0, 1) = expand(%y) {shape=(3, 4)}\n%r: f32[3, 4] = add(%x, %a)",
        ["add"],
    ),
    "compute-before-expanding": (
        "%y: f32[4]",
        "%a: f32[3, 4] @(0, 1) = expand(%y) {shape=(3, 4)}\n%r: f32[3, 4] = exp(%a)",
        ["exp", "expand"],
    ),
    "slice-of-slice": (
        "%x: f32[3, 12]",
        "%a: f32[3, 5] @(12, 2) = slice(%x) {dim=-1, start=1, stop=11, step=2}\n"
        "%r: f32[3, 2] @(12, 4) = slice(%a) {dim=-1, start=1, stop=5, step=2}",
        ["slice"],
    ),
    "slice-of-concat": (
        "%x: f32[3, 4], %y: f32[3, 5]",
        "%a: f32[3, 9] = concat(%x, %y) {dim=-1}\n%r: f32[3, 2] @(9, 1) = slice(%a) {dim=-1, start=5, stop=7, step=1}",
        ["slice"],
    ),
    "slice-across-parts": (
        "%x: f32[3, 4], %y: f32[3, 5]",
        "%a: f32[3, 9] = concat(%x, %y) {dim=-1}\n%r: f32[3, 4] @(9, 1) = slice(%a) {dim=-1, start=2, stop=6, step=1}",
        ["slice", "slice", "concat"],
    ),
    "slice-of-computed": (
        "%x: f32[3, 7, 5], %y: f32[7, 1], %b: f32[5]",
        "%m: f32[3, 7, 1] = sum(%x) {dims=(-1,)}\n%d: f32[3, 7, 5] = sub(%x, %m)\n"
        "%f: f32[3, 7, 5] = mul(%d, %y)\n%a: f32[3, 7, 5] = add(%f, %b)\n"
        "%r: f32[3, 1, 5] @(35, 5, 1) = slice(%a) {dim=-2, start=6, stop=7, step=1}",
        ["slice", "sum", "sub", "slice", "mul", "add"],
    ),
    "slice-of-product": (
        "%x: f32[3, 7, 4], %w: f32[5, 4]",
        '%p: f32[3, 7, 5] = contraction(%x, %w) {spec="abz,cz->abc"}\n'
        "%a: f32[3, 4, 5] @(35, 10, 1) = slice(%p) {dim=-2, start=0, stop=7, step=2}\n%r: f32[3, 4, 5] = exp(%a)",
        ["slice", "contraction", "exp"],
    ),
    "concat-of-one": ("%x: f32[3, 4]", "%a: f32[3, 4] = concat(%x) {dim=-1}\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "concat-of-equal": (
        "%x: f32[3, 1]",
        "%e: f32[3, 1] = exp(%x)\n%a: f32[3, 2] = concat(%e, %e) {dim=-1}\n%r: f32[3, 2] = exp(%a)",
        ["exp", "exp", "expand"],
    ),
    "concat-of-concat": (
        "%x: f32[3, 4]",
        "%e: f32[3, 4] = exp(%x)\n%a: f32[3, 8] = concat(%x, %e) {dim=-1}\n%r: f32[3, 12] = concat(%a, %x) {dim=-1}",
        ["exp", "concat"],
    ),
    "concat-of-permuted": (
        "%x: f32[3, 4], %y: f32[3, 5]",
        "%a: f32[4, 3] @(1, 4) = permute(%x) {dims=(1, 0)}\n%b: f32[5, 3] @(1, 5) = permute(%y) {dims=(1, 0)}\n"
        "%r: f32[9, 3] = concat(%a, %b) {dim=-2}",
        ["concat", "permute"],
    ),
    "concat-of-neighbours": (
        "%x: f32[3, 6]",
        "%a: f32[3, 2] @(6, 1) = slice(%x) {dim=-1, start=1, stop=3, step=1}\n"
        "%b: f32[3, 2] @(6, 1) = slice(%x) {dim=-1, start=3, stop=5, step=1}\n%c: f32[3, 4] = concat(%a, %b) {dim=-1}\n"
        "%r: f32[3, 4] = exp(%c)",
        ["slice", "exp"],
    ),
    "canonical-labels": (
        "%x: f32[3, 4], %w: f32[5, 4]",
        '%r: f32[3, 5] = contraction(%x, %w) {spec="mk,nk->mn"}',
        ["contraction"],
    ),
    "permuted-operand": (
        "%x: f32[3, 4], %w: f32[4, 5]",
        '%a: f32[5, 4] @(1, 5) = permute(%w) {dims=(1, 0)}\n%r: f32[3, 5] = contraction(%x, %a) {spec="az,bz->ab"}',
        ["contraction"],
    ),
    "single-row": (
        "%x: f32[1, 4], %w: f32[5, 4]",
        "%e: f32[1, 4] = exp(%x)\n%a: f32[4, 1] = reshape(%e) {shape=(4, 1)}\n"
        '%b: f32[5, 1] = contraction(%w, %a) {spec="az,zb->ab"}\n%r: f32[1, 5] = reshape(%b) {shape=(1, 5)}',
        ["exp", "contraction"],
    ),
    "inserted-ones": (
        "%x: f32[3, 4], %w: f32[4, 5]",
        "%a: f32[1, 3, 4] = reshape(%x) {shape=(1, 3, 4)}\n%b: f32[1, 4, 5] = reshape(%w) {shape=(1, 4, 5)}\n"
        '%c: f32[1, 3, 5] = contraction(%a, %b) {spec="abz,azc->abc"}\n%r: f32[3, 5] = reshape(%c) {shape=(3, 5)}',
        ["contraction"],
    ),
    "rows-first": (
        "%x: f32[3, 4], %w: f32[5, 4]",
        '%r: f32[3, 5] = contraction(%w, %x) {spec="bz,az->ab"}',
        ["contraction"],
    ),
    "permuted-result": (
        "%x: f32[2, 3, 4], %w: f32[5, 4]",
        '%a: f32[2, 5, 3] = contraction(%w, %x) {spec="bz,acz->abc"}\n'
        "%r: f32[2, 3, 5] @(15, 1, 3) = permute(%a) {dims=(0, 2, 1)}",
        ["contraction"],
    ),
    "broadcast-operand": (
        "%x: f32[2, 3, 4], %w: f32[4, 5]",
        "%a: f32[2, 4, 5] @(0, 5, 1) = expand(%w) {shape=(2, 4, 5)}\n"
        '%r: f32[2, 3, 5] = contraction(%x, %a) {spec="abz,azc->abc"}',
        ["contraction"],
    ),
    "rounded-arithmetic": (
        "%x: bf16[3, 4], %y: bf16[3, 4]",
        "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%b: f32[3, 4] = cast(%y) {dtype=f32}\n%c: f32[3, 4] = mul(%a, %b)\n"
        "%r: bf16[3, 4] = cast(%c) {dtype=bf16}",
        ["mul"],
    ),
    "concat-of-all-slices": (
        "%x: f32[3, 2, 4]",
        "%a: f32[3, 1, 4] @(8, 4, 1) = slice(%x) {dim=-2, start=0, stop=1, step=1}\n"
        "%b: f32[3, 1, 4] @(8, 4, 1) = slice(%x) {dim=-2, start=1, stop=2, step=1}\n"
        "%c: f32[3, 4] = reshape(%a) {shape=(3, 4)}\n%d: f32[3, 4] = reshape(%b) {shape=(3, 4)}\n"
        "%e: f32[3, 8] = concat(%c, %d) {dim=-1}\n%r: f32[3, 8] = exp(%e)",
        ["exp", "reshape"],
    ),
    "single-terms": (
        "%x: f32[2, 3, 1], %y: f32[2, 1, 5]",
        '%r: f32[2, 3, 5] = contraction(%x, %y) {spec="abz,azc->abc"}',
        ["mul"],
    ),
    "single-columns": (
        "%x: f32[2, 3, 4], %y: f32[2, 1, 4]",
        '%r: f32[2, 3, 1] = contraction(%x, %y) {spec="abz,acz->abc"}',
        ["mul", "sum"],
    ),
    "single-elements": ("%x: f32[3, 1]", "%a: f32[3, 1] = max(%x) {dims=(-1,)}\n%r: f32[3, 1] = exp(%a)", ["exp"]),
    "softmax-of-parts": (
        "%x: f32[3, 4], %y: f32[3, 1]",
        "%a: f32[3, 5] = concat(%x, %y) {dim=-1}\n%r: f32[3, 1] = max(%a) {dims=(-1,)}",
        ["max", "maximum"],
    ),
    "flattened-rows": (
        "%x: f32[2, 3, 4], %w: f32[5, 4]",
        '%a: f32[6, 4] = reshape(%x) {shape=(6, 4)}\n%b: f32[6, 5] = contraction(%a, %w) {spec="az,bz->ab"}\n'
        "%r: f32[2, 3, 5] = reshape(%b) {shape=(2, 3, 5)}",
        ["contraction"],
    ),
    "scaled-operand": (
        "%x: f32[6, 4], %w: f32[4, 5]",
        "%a: f32[4, 6] @(1, 4) = permute(%x) {dims=(1, 0)}\n%b: f32[4, 6] @(1, 4) = mul(%a, 0.25)\n"
        '%r: f32[6, 5] = contraction(%b, %w) {spec="za,zb->ab"}',
        ["mul", "contraction"],
    ),
    "ones-before-expanding": (
        "%x: f32[3, 1, 4]",
        "%a: f32[3, 1, 4] = exp(%x)\n%b: f32[2, 3, 1, 4] @(0, 4, 4, 1) = expand(%a) {shape=(2, 3, 1, 4)}\n"
        "%r: f32[2, 3, 4] = reshape(%b) {shape=(2, 3, 4)}",
        ["exp", "reshape", "expand"],
    ),
    "compute-before-repeating": (
        "%x: f32[3, 4, 1]",
        "%a: f32[3, 4, 2] @(4, 1, 0) = expand(%x) {shape=(3, 4, 2)}\n%b: f32[3, 8] = reshape(%a) {shape=(3, 8)}\n"
        "%c: f32[3, 8] = cos(%b)\n%d: f32[3, 8] = sin(%b)\n%r: f32[3, 8] = mul(%c, %d)",
        ["cos", "expand", "sin", "mul", "reshape"],
    ),
    "flattened-operands": (
        "%x: f32[2, 3, 4], %w: f32[4]",
        "%a: f32[6, 4] = reshape(%x) {shape=(6, 4)}\n%b: f32[6, 4] = add(%a, %w)\n"
        "%r: f32[2, 3, 4] = reshape(%b) {shape=(2, 3, 4)}",
        ["add"],
    ),
}


def graph_of(name: str) -> Graph:
    inputs, body, _ = CASES[name]
    return row(body + "\nreturn %r", inputs)


def test_every_rule_has_a_case() -> None:
    assert {r.name for r in RULES} == set(CASES)
    assert all(r.meaning for r in RULES)


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


def _sample(ty: Any) -> torch.Tensor:
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "bool": torch.bool}
    x = torch.randn([int(n) for n in ty.shape], generator=torch.Generator().manual_seed(1)).abs() + 0.5
    return x > 1 if ty.dtype.name == "bool" else x.to(kinds[ty.dtype.name])


LEFT_ALONE = {
    "x + 0 turns -0 into 0": "%r: f32[3, 4] = add(%x, 0.0)",
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
        "%a: f32[3, 8] = concat(%x, %x) {dim=-1}\n%b: f32[3, 4] @(8, 1) = slice(%a) {dim=-1, start=2, stop=6, step=1}\n"
        "%c: f32[3, 8] = exp(%a)\n%r: f32[3, 12] = concat(%b, %c) {dim=-1}"
    ),
    "every other element over parts": (
        "%a: f32[3, 8] = concat(%x, %x) {dim=-1}\n%r: f32[3, 3] @(8, 2) = slice(%a) {dim=-1, start=1, stop=7, step=2}"
    ),
    "a mean stays a division": "%a: f32[3, 1] = sum(%x) {dims=(-1,)}\n%r: f32[3, 1] = div(%a, 4.0)",
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_what_would_change_a_bit_is_left(why: str) -> None:
    graph = row(LEFT_ALONE[why] + "\nreturn %r")
    before = str(graph)
    normalize(graph)
    assert str(graph) == before


def test_a_slice_of_the_dim_that_was_summed_stays_outside() -> None:
    graph = row("%s: f32[3, 1] = sum(%x) {dims=(-1,)}\n"
                "%a: f32[3, 0] = slice(%s) {dim=-1, start=0, stop=0, step=1}\n"
                "%r: f32[3, 0] = exp(%a)\nreturn %r")  # fmt: skip
    normalize(graph)
    verify_graph(graph)
    assert [n.op.name for n in graph.nodes] == ["sum", "slice", "exp"]


@pytest.mark.parametrize(
    ("start", "stop", "found"),
    [
        ("0", "s0 + 1", ["slice", "concat"]),
        ("s0 + 2", "s0 + 7", ["slice", "slice", "concat"]),
        ("2", "s0 + 2", ["concat", "slice"]),
    ],
)
def test_a_slice_over_parts_of_unknown_sizes(start: str, stop: str, found: list[str]) -> None:
    """How much it takes of a part has to be known for every size: a part may be shorter than where it starts."""
    size = {"s0 + 1": "s0 + 1", "s0 + 7": "5", "s0 + 2": "s0"}[stop]
    graph = row(
        "%a: f32[3, s0 + 9] = concat(%x, %y, %z) {dim=-1}\n"
        f"%r: f32[3, {size}] @(s0 + 9, 1) = slice(%a) {{dim=-1, start={start}, stop={stop}, step=1}}\nreturn %r",
        "%x: f32[3, s0], %y: f32[3, 5], %z: f32[3, 4]",
    )
    plain = graph.copy()
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == found
    assert check_rewrite(plain, graph)


def test_operands_that_were_flattened_in_different_dims_stay_flat() -> None:
    graph = row(
        "%a: f32[6, 6, 4] = reshape(%x) {shape=(6, 6, 4)}\n%b: f32[6, 6, 4] = reshape(%y) {shape=(6, 6, 4)}\n"
        '%r: f32[6, 6] = contraction(%a, %b) {spec="abz,abz->ab"}\nreturn %r',
        "%x: f32[2, 3, 6, 4], %y: f32[6, 2, 3, 4]",
    )
    before = str(graph)
    normalize(graph)
    assert str(graph) == before


def test_an_output_is_never_another_name_of_an_input_or_output() -> None:
    graph = row("%a: f32[3, 4] = mul(%x, 1.0)\n%b: f32[3, 4] = exp(%x)\n%c: f32[3, 4] = exp(%x)\nreturn %a, %b, %c")
    normalize(graph)
    assert len(set(graph.outputs)) == 3
    assert graph.inputs[0] not in graph.outputs


@pytest.mark.parametrize("spelled", ["mul(1.0, %x)", "add(-0.0, %x)", "sub(%x, 0.0)", "pow(%x, 1.0)"])
def test_an_output_that_becomes_an_input_in_two_steps_stays_a_copy(spelled: str) -> None:
    graph = row(f"%a: f32[3, 4] = {spelled}\nreturn %a")
    normalize(graph)
    assert base(graph.outputs[0]) not in graph.inputs


def test_storage_that_is_written_to_is_not_shared() -> None:
    graph = row(
        "%a: f32[3, 4] = exp(%x)\n%b: f32[3, 4] = exp(%x)\n%c: f32[3, 4] = tanh(%x)\n"
        "%w: f32[3, 4] = write(%a, %c)\n%v: f32[3, 4] = write(%b, %x)\nreturn %w, %v"
    )
    normalize(graph)
    assert sum(n.is_op("exp") for n in graph.nodes) == 2


@pytest.mark.parametrize(
    "spelled",
    [
        lambda x, w, b: torch.nn.functional.linear(x, w, b),
        lambda x, w, b: torch.addmm(b, x.reshape(-1, 8), w.t()).view(2, 3, 5),
        lambda x, w, b: (x.reshape(6, 8) @ w.transpose(0, 1)).reshape(2, 3, 5) + b,
        lambda x, w, b: torch.matmul(x, w.t()) + b.expand(2, 3, 5),
        lambda x, w, b: b + torch.matmul(x, w.permute(1, 0).contiguous()),
    ],
)
def test_a_linear_layer_has_one_form(spelled: Callable[..., Any]) -> None:
    graph = trace(spelled, [torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["contraction", "add"]
    assert graph.nodes[0].attributes["spec"] == "abz,cz->abc"


def windows(x: torch.Tensor) -> torch.Tensor:
    """Images of 4 × 6 in windows of 2 × 3, one after the other."""
    return x.view(2, 2, 2, 2, 3, 8).transpose(2, 3).reshape(-1, 6, 8)


def test_rows_that_move_lie_as_the_product_reads_them() -> None:
    x, w, b = torch.randn(2, 4, 6, 8), torch.randn(5, 8), torch.randn(5)
    graph = trace(lambda x, w, b: torch.nn.functional.linear(windows(x), w, b), [x, w, b], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["reshape", "permute", "reshape", "contraction", "add"]
    assert graph.nodes[3].attributes["spec"] == "abz,cz->abc"
    together = trace(lambda x, w: x.permute(2, 0, 1, 3).reshape(6, 8, 8) @ w.t(), [x, w], symbolic=False)
    normalize(together)  # dims that lie side by side are merged: nothing moves but labels
    assert [n.op.name for n in together.nodes] == ["contraction", "reshape"]


def test_a_batch_of_heads_is_split_where_both_operands_merge_it() -> None:
    def scores(q: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
        q, k = (x.view(3, 7, 2, 4).transpose(1, 2).reshape(6, 7, 4) for x in (q, k))
        p = p.view(1, 5, 2, 4).transpose(1, 2).repeat(3, 1, 1, 1).reshape(6, 5, 4)
        return torch.bmm(q, k.transpose(-1, -2) / 3), torch.bmm(q, p.transpose(-1, -2))

    q, k, p = torch.randn(3, 7, 8), torch.randn(3, 7, 8), torch.randn(5, 8)
    graph = trace(scores, [q, k, p], symbolic=False)
    normalize(graph)
    specs = [n.attributes["spec"] for n in graph.nodes if n.is_op("contraction")]
    assert sorted(specs) == ["acbz,adbz->abcd", "acbz,bdz->abcd"] and not any(n.is_op("expand") for n in graph.nodes)
    for found, expected in zip(evaluate(graph, [q, k, p]), scores(q, k, p), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (5, 1, 8), (1, 5, 8)], ids=str)
@pytest.mark.parametrize(
    "turned", [lambda x, w: (w @ x.mT).mT, lambda x, w: torch.einsum("oi,...i->...o", w, x), torch.nn.functional.linear]
)
def test_one_row_is_a_row(shape: tuple[int, ...], turned: Callable[..., Any]) -> None:
    """As of a last token: a transposition of one row moves nothing, and so is not there to tell rows from columns."""
    x, w = torch.randn(shape), torch.randn(5, 8)
    graph = trace(lambda x, w: turned(x.sin(), w).exp(), [x, w], symbolic=False)
    normalize(graph)
    (product,) = [n for n in graph.nodes if n.is_op("contraction")]
    assert product.operands[1] is graph.inputs[1] and product.result.shape[-1] == 5
    assert torch.allclose(evaluate(graph, [x, w])[0], torch.nn.functional.linear(x.sin(), w).exp())


def test_one_column_is_a_column() -> None:
    x, w = torch.randn(6, 8), torch.randn(1, 8)
    graph = trace(lambda x, w: torch.nn.functional.linear(x.sin(), w), [x, w], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["sin", "contraction"] and graph.outputs[0].shape == (6, 1)


@given(graphs(effects=False))
def test_a_normal_form_is_its_own(graph: Graph) -> None:
    normalize(graph)
    verify_graph(graph)
    once = str(graph)
    normalize(graph)
    assert str(graph) == once


@given(graphs(effects=False))
def test_a_normal_form_means_the_same(graph: Graph) -> None:
    plain = graph.copy()
    normalize(graph)
    verdict = check_rewrite(plain, graph, exact=False)
    assert verdict, verdict.message


@pytest.mark.parametrize(
    "spelled",
    [
        lambda x: torch.cat(x.unbind(2), -1),
        lambda x: torch.cat([part.mT for part in x.unbind(2)], -2).mT,
        lambda x: torch.stack([x[:, :, i] for i in range(3)], 2).reshape(2, 5, 12),
        lambda x: torch.cat(x.split(1, 2), -1).squeeze(2),
        lambda x: x.transpose(1, 2).transpose(1, 2).flatten(2),
    ],
)
def test_heads_side_by_side_have_one_form(spelled: Callable[..., Any]) -> None:
    x = torch.randn(2, 5, 3, 4)
    graph = trace(lambda x: spelled(x.sin()), [x], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["sin", "reshape"]
    assert torch.equal(evaluate(graph, [x])[0], x.sin().reshape(2, 5, 12))


def test_heads_put_together_in_another_order_stay_in_it() -> None:
    x = torch.randn(2, 5, 3, 4)
    graph = trace(lambda x: torch.cat([part.mT for part in x.sin().unbind(2)], -1), [x], symbolic=False)
    normalize(graph)
    assert torch.equal(evaluate(graph, [x])[0], torch.cat([part.mT for part in x.sin().unbind(2)], -1))
    turned = trace(lambda x: torch.cat(x.sin().unbind(2)[::-1], -1), [x], symbolic=False)
    normalize(turned)
    assert torch.equal(evaluate(turned, [x])[0], torch.cat(x.sin().unbind(2)[::-1], -1))


@pytest.mark.parametrize("alike", [True, False])
def test_two_concatenations_are_taken_apart_only_where_they_are_cut_alike(alike: bool) -> None:
    def largest(s: torch.Tensor, m: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.cat([s, a], -1) + torch.cat([m, b] if alike else [b, m], -1)).amax(-1)

    inputs = [torch.randn(3, n) for n in (4, 4, 1, 1)]
    graph = trace(largest, inputs, symbolic=False)
    normalize(graph)
    assert any(n.is_op("concat") for n in graph.nodes) != alike
    assert torch.equal(evaluate(graph, inputs)[0], largest(*inputs))


def test_labels() -> None:
    assert canonical_spec("mk,nk->mn") == "az,bz->ab"
    assert canonical_spec("bhqd,bhkd->bhqk") == "abcz,abdz->abcd"
    assert canonical_spec("xyk,zyk->xz") == "azy,bzy->ab"


@pytest.mark.parametrize(("dtype", "kind"), [(F32, torch.float32), (BF16, torch.bfloat16), (F16, torch.float16)])
def test_rounding_is_torchs(dtype: Any, kind: torch.dtype) -> None:
    for x in (0.1, 1 / 3, 1e-9, 65519.0, 3.0e38, -2.7182818, 1.00390625, 1.01171875):
        assert rounded(x, dtype) == torch.tensor(x, dtype=torch.float64).to(kind).item()


def numbers(dtype: DType) -> torch.Tensor:
    """All finite numbers of a type of up to 16 bits; of larger ones, those that a narrower type cannot hold too."""
    kind = torch_dtype(dtype)
    if dtype.bytes <= 2 and dtype != BOOL:
        patterns = torch.arange(256 ** min(dtype.bytes, 2), dtype=torch.int32)
        found = patterns.to({1: torch.uint8, 2: torch.uint16}[dtype.bytes]).view(kind)
        return found[found.isfinite()]
    if dtype == BOOL:
        return torch.tensor([False, True])
    if dtype.is_float:
        limits = torch.finfo(kind)
        return torch.tensor([limits.max, limits.min, limits.tiny, limits.eps, 1 + limits.eps, 1 / 3], dtype=kind)
    limits = torch.iinfo(kind)
    return torch.tensor([limits.max, limits.min, -1, 2**24 + 1, limits.max // 2 + 2], dtype=kind)


@pytest.mark.parametrize("narrow", DTYPES.values(), ids=str)
def test_a_wider_type_is_one_that_holds_every_number(narrow: DType) -> None:
    x = numbers(narrow)
    for wide in DTYPES.values():
        there = x.to(torch_dtype(wide))
        kept = torch.equal(there.to(x.dtype), x) and bool((there.double() == x.double()).all())
        assert holds_all(wide, narrow) == kept, f"{narrow} in {wide}"


def test_a_vetoed_application_is_not_made() -> None:
    graph = graph_of("double-negation")
    context = Context(Config(apply="!0"))
    normalize(graph, context)
    assert [n.op.name for n in graph.nodes] == ["neg", "neg", "exp"]
    assert "not selected" in context.remarks[0].reason


def test_a_rule_that_raises_is_left_out() -> None:
    from fusec.rewriting.driver import Simplification

    def broken(graph: Graph, node: Any) -> None:
        raise KeyError("a bug")

    context = Context()
    simplify_graph(graph_of("one-over"), [Simplification("broken", ("div",), broken, True)], context)
    (failure,) = context.remarks.of("failure")
    assert "broken" in failure.message


def test_a_wrong_rule_is_told_with_both_sides_in_order() -> None:
    @simplifies("exp")
    def negated(graph: Graph, node: Any) -> Any:
        return graph.add_node("neg", [node.result]).result if not node.result.users else None

    graph, context = row("%r: f32[3, 4] = exp(%x)\nreturn %r"), Context(Config(verify=True))
    assert not simplify_graph(graph, [negated], context)
    (failure,) = context.remarks.of("failure")
    before, after = map(float, re.findall(r"\): (\S+) and (\S+?)(?:,|$)", failure.reason)[0])
    assert before > 0 > after == -before
