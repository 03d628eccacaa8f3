"""Rows of packed weights are looked up before they are unpacked: embeddings, tied heads, and experts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.frontend import trace

both = pytest.mark.parametrize("target", ["cpp", "triton"])


def nibbles(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight of codes of four bits, with a scale for each group of eight."""
    unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
    return (unpacked.unflatten(-1, (-1, 8)) * scales[..., None]).flatten(-2)


def embedded(ids: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return F.embedding(ids, nibbles(codes, scales))


def tied(ids: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    weight = nibbles(codes, scales)
    return F.linear(F.embedding(ids, weight), weight)


def experts(ids: Tensor, codes: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    return torch.bmm((codes.float() * scales[..., None])[ids], x[..., None])[..., 0]


def compiled(target: str, function: object, *inputs: Tensor) -> Compiled:
    """Compile a function to kernels alone, and compare it with eager."""
    if target == "triton":
        pytest.importorskip("triton")
    assert callable(function)
    made = compile_graph(trace(function, list(inputs), symbolic=False), Config(strict=True, target=target))
    (found,) = made.program(list(inputs))
    torch.testing.assert_close(found, function(*inputs))
    assert {step.kind for step in made.program.steps} == {"kernel"}, made.program.source
    return made


def largest_intermediate(made: Compiled) -> int:
    """Return the elements of the largest value that one kernel writes for another."""
    nodes = [n for n in made.graph.nodes if n.is_op("region")]
    return max((r.tensor.numel for n in nodes for r in n.results if r not in made.graph.outputs), default=0)


@both
@pytest.mark.parametrize("function", [embedded, tied])
def test_an_embedding_unpacks_the_rows_that_it_reads(function: object, target: str) -> None:
    torch.manual_seed(0)
    ids, codes = torch.randint(90, (2, 3)), torch.randint(256, (90, 16), dtype=torch.uint8)
    made = compiled(target, function, ids, codes, torch.rand(90, 4))
    assert largest_intermediate(made) <= 6 * 32


def four_bit_experts(ids: Tensor, codes: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(nibbles(codes, scales)[ids], x[..., None])[..., 0]


def codebook_experts(ids: Tensor, codes: Tensor, numbers: Tensor, x: Tensor) -> Tensor:
    unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return torch.bmm(numbers[unpacked.int()][ids], x[..., None])[..., 0]


def uneven_experts(ids: Tensor, one: Tensor, other: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(torch.cat([one, other], -1).float()[ids], x[..., None])[..., 0]


@both
@pytest.mark.parametrize("groups", [(1, 2, 3, 4, 10), pytest.param((0, 150, 0, 5, 1), marks=pytest.mark.thorough)])
def test_chosen_matrices_are_unpacked_as_they_are_multiplied(target: str, groups: tuple[int, ...]) -> None:
    """By groups of each number of rows, in no order; sums of these numbers are exact in any order."""
    torch.manual_seed(0)
    rows = sum(groups)
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(groups))[torch.randperm(rows)]
    x = torch.randint(-4, 5, (rows, 32)).float()
    eight, four = torch.randint(-128, 128, (5, 12, 32), dtype=torch.int8), torch.randint(256, (5, 12, 16)).byte()
    for made in (
        compiled(target, experts, ids, eight, 2.0 ** torch.randint(-2, 3, (5, 12)), x),
        compiled(target, four_bit_experts, ids, four, 2.0 ** torch.randint(-2, 3, (5, 12, 4)), x),
        compiled(target, codebook_experts, ids, four, torch.randint(-8, 9, (16,)).float(), x),
    ):
        assert largest_intermediate(made) <= rows * 12
        (region,) = (n for n in made.graph.nodes if n.is_op("region"))
        assert "grouped_linear" in region.attributes["label"]


def optimized(function: Callable[..., Tensor], *inputs: Tensor) -> Compiled:
    made = compile_graph(trace(function, list(inputs), symbolic=False), Config(strict=True, target="cpp"))
    torch.testing.assert_close(made.program(list(inputs))[0], function(*inputs))
    return made


def test_matrices_of_float8_that_many_rows_choose_are_not_copied() -> None:
    """A library's call would look them up; each is unpacked once."""
    ids, x = torch.arange(30) % 5, torch.randint(-4, 5, (30, 32)).float()
    codes = torch.randint(-8, 9, (5, 12, 32)).to(torch.float8_e4m3fn)
    made = optimized(experts, ids, codes, 2.0 ** torch.randint(-2, 3, (5, 12)), x)
    assert "opaque" not in {step.kind for step in made.program.steps}
    assert largest_intermediate(made) == 5 * 12 * 32


def test_matrices_of_parts_with_different_lengths_are_no_sums_of_products() -> None:
    """Each part would be summed in a loop of its own, and the products written."""
    parts = (torch.randint(-8, 9, (5, 12, n)).to(torch.int8) for n in (20, 12))
    made = optimized(uneven_experts, torch.tensor([3, 0, 3]), *parts, torch.randint(-4, 5, (3, 32)).float())
    assert any(node.is_op("contraction") for node in made.graph.nodes)


def test_a_sum_over_joined_halves_is_one_kernel() -> None:
    def total(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (torch.cat([a, b], -1) * x).sum(-1)

    made = compiled("cpp", total, torch.randn(3, 40), torch.randn(3, 40), torch.randn(3, 80))
    assert len([n for n in made.graph.nodes if n.is_op("region")]) == 1


@both
def test_experts_unpack_the_matrices_that_are_chosen(target: str) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (5, 12, 32), dtype=torch.int8)
    ids = torch.tensor([3, 0, 3, 4])
    made = compiled(target, experts, ids, codes, torch.rand(5, 12), torch.randn(4, 32))
    assert largest_intermediate(made) <= 4 * 12


@both
@pytest.mark.parametrize("count", [1, 3])
def test_the_only_matrix_of_a_stack_is_looked_up_and_checked(count: int, target: str) -> None:
    """A stack of one matrix is not one that is broadcast; sums of these numbers are exact in any order."""
    ids, codes = torch.zeros(count, dtype=torch.int64), torch.randint(-128, 128, (1, 12, 32), dtype=torch.int8)
    rest = codes, 2.0 ** torch.randint(-2, 3, (1, 12)), torch.randint(-4, 5, (count, 32)).float()
    made = compiled(target, experts, ids, *rest)
    assert not made.remarks.of("failure")
    with pytest.raises(IndexError):
        made.program([ids + 5, *rest])
