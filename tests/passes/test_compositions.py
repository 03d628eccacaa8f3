"""Layers of models written in other words: the same meaning, the same kernels, whatever the words."""

from collections.abc import Collection
from copy import deepcopy
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.reference.contract import compare_outputs
from tests.campaigns.blocks import BLOCKS, Block
from tests.campaigns.respelling import Respelled
from tests.campaigns.spellings import DTYPES, SHAPES, Case, Figures, compositions, difference
from tests.campaigns.synonyms import SYNONYMS, with_places

SAMPLE, FEW = 40, 20
"""Compositions, and how many of them are not thorough."""
BLOCK = cache(lambda name, shape, dtype: BLOCKS[name](*shape, dtype))


def arguments(block: Block, dtype: torch.dtype) -> list[torch.Tensor]:
    return [a.to(dtype) if a.is_floating_point() else a for a in block.arguments]


@pytest.mark.parametrize("name", SYNONYMS)
def test_a_synonym_means_the_same(name: str) -> None:
    assert SYNONYMS[name].law
    for seed, one, dtype in product(range(20), BLOCKS, (torch.float64, torch.bfloat16)):
        block = BLOCK(one, (2, 5), torch.float32)
        given, mode = arguments(block, dtype), Respelled(with_places(name), seed, share=1.0)
        with mode:
            found = block(*given)
        plain = block(*given)
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        if dtype == torch.float64:
            assert torch.allclose(found, plain, rtol=1e-9, atol=1e-9), one
        if mode.taken[name]:
            return
    pytest.fail("it applies nowhere")


CASES = [(name, dtype, rows) for rows in SHAPES for dtype in DTYPES for name in BLOCKS]


@pytest.mark.parametrize(
    ("case", "composition"),
    [
        pytest.param(*drawn, marks=() if i < FEW else pytest.mark.thorough)
        for i, drawn in enumerate(zip(cycle(CASES), compositions(SAMPLE, seed=1), strict=False))
    ],
    ids=lambda given: "-".join(given) if isinstance(given[0], str) else str(given[1]),
)
def test_a_composition_takes_the_same_kernels(case: tuple[str, str, str], composition: Any) -> None:
    name, dtype, rows = case
    block = BLOCK(name, SHAPES[rows], DTYPES[dtype])
    plain = _plain(name, dtype, rows)
    wrong = difference(Case(name, block, block.arguments), plain, *composition)
    assert wrong is None, f"{' + '.join(wrong.synonyms)}: {wrong.plain} became {wrong.found}"


@cache
def _plain(name: str, dtype: str, rows: str) -> Figures:
    block = BLOCK(name, SHAPES[rows], DTYPES[dtype])
    return Case(name, block, block.arguments).figures()[0]


def _twice(block: Block) -> Block:
    """Two layers one after the other, which share their mask."""

    def call(layers: Any, x: torch.Tensor, *given: torch.Tensor) -> Any:
        return block.call(layers[1], block.call(layers[0], x, *given), *given)

    return Block("twice", torch.nn.ModuleList([block.module, deepcopy(block.module)]), call, block.inputs)


@pytest.mark.parametrize(
    ("rows", "synonyms"),
    [
        ("few", ["attention-with-bias"]),
        ("few", ["attention-with-scaled-key", "negation-by-comparison"]),
        ("many", ["attention-with-scaled-key", "product-as-quotient"]),
        ("many", ["attention-spelled-out", "softmax-by-logarithm"]),
    ],
    ids=str,
)
def test_layers_that_share_a_mask(rows: str, synonyms: list[str]) -> None:
    block = _twice(BLOCK("bert", SHAPES[rows], torch.float32))
    case = Case("twice", block, block.arguments)
    plain, _ = case.figures()
    found, used = case.figures(synonyms, share=1.0)
    assert set(synonyms) <= set(used) and found == plain


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", "float32"),
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("bert", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_composition_keeps_the_numeric_rule(name: str, dtype: str) -> None:
    block = BLOCK(name, (2, 9), DTYPES[dtype])
    case = Case(name, block, block.arguments)
    names, seed, share = next(drawn for drawn in compositions(100, seed=2) if len(drawn[0]) == len(SYNONYMS))
    graph, mode = case.spelled(names, seed, share)
    assert len(mode.taken) > 10
    with Respelled(names, seed, share):
        eager = block(*block.arguments)
    compiled = compile_graph(graph, Config(target="cpp"))
    found = compiled.program(list(block.arguments))
    reference = block(*arguments(block, torch.float64))
    comparison = compare_outputs([eager], found, [reference], DTYPES[dtype])
    assert comparison.passed, comparison


def test_the_same_seed_gives_the_same_words() -> None:
    block = BLOCK("bert", (1, 12), torch.float32)

    def words(seed: int) -> str:
        def respelled(*given: torch.Tensor) -> Any:
            with Respelled(seed=seed):
                return block(*given)

        return str(trace(respelled, block.arguments, symbolic=False))

    assert words(3) == words(3) != words(4)


def test_a_difference_is_shrunk_to_the_synonyms_that_make_it() -> None:
    class Planted(Case):
        def figures(self, names: Collection[str] = (), seed: int = 0, share: float = 0.5) -> tuple[Figures, list[str]]:
            return Figures((1 + ({"b", "d"} <= set(names)), 0, 0), 8), sorted(names)

    case = Planted("planted", print, ())
    plain, _ = case.figures()
    found = difference(case, plain, ["a", "b", "c", "d", "e"], 0, 1.0)
    assert found is not None and found.synonyms == ["b", "d"]
    assert difference(case, plain, ["a", "b"], 0, 1.0) is None
