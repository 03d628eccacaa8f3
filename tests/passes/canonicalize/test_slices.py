"""Slices and concatenations: what is cut and put together again has one form, in its order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusec.frontend import trace
from fusec.ir.parser import parse_graph
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import normalize
from fusec.reference.interpreter import evaluate
from fusec.verify.rewrites import check_rewrite
from tests.passes.canonicalize.rule_cases import row


def test_a_slice_of_the_dim_that_was_summed_stays_outside() -> None:
    graph = row("%s: f32[3, 1] = sum(%x) {dims=(-1,)}\n"
                "%a: f32[3, 0] = slice(%s) {dim=-1, start=0, stop=0, step=1}\n"
                "%r: f32[3, 0] = exp(%a)\nreturn %r")  # fmt: skip
    normalize(graph)
    verify_graph(graph)
    assert [n.op.name for n in graph.nodes] == ["sum", "slice", "exp"]


@pytest.mark.parametrize(("steps", "part"), [(3, slice(0, 0)), (2, slice(1, 1)), (3, slice(1, 2)), (2, slice(0, 2, 2))])
def test_a_slice_of_every_other_element_stays_within_its_dim(steps: int, part: slice) -> None:
    x = torch.randn(2, 4)
    graph = trace(lambda x: x[:, ::steps][:, part], [x], symbolic=False)
    normalize(graph)
    verify_graph(graph)
    assert len(graph.nodes) <= 1 and torch.equal(evaluate(graph, [x])[0], x[:, ::steps][:, part])


def test_a_slice_of_every_other_element_that_may_be_empty_stays_apart() -> None:
    graph = parse_graph("""graph g(%n: int(s0), %x: f32[2, 8]) {
      %a: f32[2, 4] = slice(%x) {dim=-1, start=0, stop=8, step=2}
      %r: f32[2, s0 - 1] = slice(%a) {dim=-1, start=0, stop=s0 - 1, step=1}
      return %r
    }""")
    normalize(graph)
    x = torch.randn(2, 8)
    assert [evaluate(graph, [n, x])[0].shape[1] for n in (1, 4)] == [0, 3]


def test_a_slice_goes_through_any_number_of_layers() -> None:
    """Each adds to what it reads, so that several slices of one value are all that is read of it."""

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x + torch.sin(x)
        return x[:, -1:]

    graph = trace(layers, [torch.randn(2, 5, 3)], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["slice", *8 * ["sin", "add"]]


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
