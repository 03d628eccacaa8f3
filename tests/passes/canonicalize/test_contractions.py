"""Products of matrices have one form: however they are spelled, and however their operands are turned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusec.frontend import trace
from fusec.passes.canonicalize import normalize
from fusec.passes.canonicalize.contractions import canonical_spec
from fusec.reference.interpreter import evaluate
from tests.passes.canonicalize.rule_cases import row


def test_labels() -> None:
    assert canonical_spec("mk,nk->mn") == "az,bz->ab"
    assert canonical_spec("bhqd,bhkd->bhqk") == "abcz,abdz->abcd"
    assert canonical_spec("xyk,zyk->xz") == "azy,bzy->ab"


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


def test_operands_that_were_flattened_in_different_dims_stay_flat() -> None:
    graph = row(
        "%a: f32[6, 6, 4] = reshape(%x) {shape=(6, 6, 4)}\n%b: f32[6, 6, 4] = reshape(%y) {shape=(6, 6, 4)}\n"
        '%r: f32[6, 6] = contraction(%a, %b) {spec="abz,abz->ab"}\nreturn %r',
        "%x: f32[2, 3, 6, 4], %y: f32[6, 2, 3, 4]",
    )
    before = str(graph)
    normalize(graph)
    assert str(graph) == before


def test_rows_in_more_dims_than_there_are_labels_stay_flat() -> None:
    dims = ", ".join(25 * ["2"])
    graph = row(
        f"%a: f32[{2**25}, 4] = reshape(%x) {{shape=({2**25}, 4)}}\n"
        f'%r: f32[{2**25}, 5] = contraction(%a, %w) {{spec="az,bz->ab"}}\nreturn %r',
        f"%x: f32[{dims}, 4], %w: f32[5, 4]",
    )
    before = str(graph)
    normalize(graph)
    assert str(graph) == before


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


@pytest.mark.parametrize("dims", [(1, 0, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1)], ids=str)
def test_a_batch_of_products_stays_outermost(dims: tuple[int, ...]) -> None:
    """A call computes matrices one after another: rows and columns change places in them, a batch is moved later."""
    x, w = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    graph = trace(lambda x, w: torch.bmm(x, w).permute(dims).sin(), [x, w], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["contraction", *(["permute"] if dims[0] else []), "sin"]
    torch.testing.assert_close(evaluate(graph, [x, w])[0], torch.bmm(x, w).permute(dims).sin())


def test_a_product_of_two_vectors_is_a_sum_of_products() -> None:
    x, y = torch.randn(8), torch.randn(8)
    graph = trace(torch.dot, [x, y], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == ["mul", "sum", "reshape"]
    torch.testing.assert_close(evaluate(graph, [x, y])[0], torch.dot(x, y))


def test_a_product_of_one_row_and_one_column_is_a_sum_of_products() -> None:
    x, y = torch.randn(1, 8), torch.randn(1, 8)
    graph = trace(torch.nn.functional.linear, [x, y], symbolic=False)
    normalize(graph)
    assert "contraction" not in [n.op.name for n in graph.nodes]
    torch.testing.assert_close(evaluate(graph, [x, y])[0], x @ y.T)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (5, 1, 8), (1, 5, 8), (2, 3, 1, 8)], ids=str)
@pytest.mark.parametrize(
    "turned", [lambda x, w: (w @ x.mT).mT, lambda x, w: torch.einsum("oi,...i->...o", w, x), torch.nn.functional.linear]
)
def test_one_row_is_a_row(shape: tuple[int, ...], turned: Callable[..., Any]) -> None:
    """As of a last token: a transposition of one row moves nothing, and so is not there to tell rows from columns."""
    x, w = torch.randn(shape), torch.randn(5, 8)
    graph = trace(lambda x, w: turned(x.sin(), w).exp(), [x, w], symbolic=False)
    normalize(graph)
    (product,) = [n for n in graph.nodes if n.is_op("contraction")]
    rows, column = "abc"[: x.ndim - 1], "abcd"[x.ndim - 1]
    assert product.attributes["spec"] == f"{rows}z,{column}z->{rows}{column}"
    assert product.operands[1] is graph.inputs[1] and product.result.shape[-1] == 5
    assert torch.allclose(evaluate(graph, [x, w])[0], torch.nn.functional.linear(x.sin(), w).exp())


@pytest.mark.parametrize("computed", [("sin",), ("sin", "cos"), ()], ids=str)
def test_one_column_is_a_column(computed: tuple[str, ...]) -> None:
    """As of a weight with one row, also where that is computed, or where nothing is."""

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w = x.sin() if "sin" in computed else x, w.cos() if "cos" in computed else w
        return torch.nn.functional.linear(x, w)

    graph = trace(product, [torch.randn(6, 8), torch.randn(1, 8)], symbolic=False)
    normalize(graph)
    assert [n.op.name for n in graph.nodes] == [*computed, "contraction"] and graph.outputs[0].shape == (6, 1)


def test_a_broadcast_operand_keeps_a_dim_that_is_summed() -> None:
    """Without it the other operand is summed by itself, which overflows here."""
    graph = row(
        """%wide: f32[3, 4] @(1, 0) = expand(%x) {shape=(3, 4)}
        %r: f32[3, 5] = contraction(%wide, %y) {spec="ab,cb->ac"}
        return %r""",
        "%x: f32[3, 1], %y: f32[5, 4]",
    )
    normalize(graph)
    (found,) = evaluate(graph, [torch.full((3, 1), 0.25), torch.full((5, 4), 2e38)])
    assert found.isfinite().all()


def test_a_sum_of_nothing_is_not_a_product_with_0() -> None:
    graph = row("""%wide: f32[0, 3, 4] @(0, 4, 1) = expand(%x) {shape=(0, 3, 4)}
      %e: f32[0, 3, 4] = exp(%wide)
      %r: f32[3, 4] = contraction(%e, %e) {spec="abc,abc->bc"}
      return %r""")
    normalize(graph)
    assert torch.equal(evaluate(graph, [torch.full((3, 4), 1e30)])[0], torch.zeros(3, 4))
