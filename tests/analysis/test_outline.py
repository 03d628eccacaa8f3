"""Two outlines have the same key exactly where the bodies built of them have the same structure."""

import random
from collections.abc import Hashable, Iterator

import pytest

pytest.importorskip("transformers")

from bench.families import FAMILIES, Sizes
from fusec.analysis.outline import Outline, outline
from fusec.analysis.uses import Uses
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.ir.graph import Graph
from fusec.ir.ops import Trait
from fusec.ir.regions import open_regions
from fusec.ir.structure import abbreviations, structure
from fusec.ir.verifier import verify_graph
from fusec.passes import known_passes
from fusec.pipeline import Pipeline
from tests.contexts import context_of


def candidates(graph: Graph, rng: random.Random) -> Iterator[Outline]:
    """Yield the outlines of each node alone and with up to five of its neighbours."""
    uses = Uses(graph, (n for n in graph if n.has(Trait.VIEW | Trait.SOURCE) and not n.is_op("concat")))
    arithmetic = [n for n in graph if n.has(Trait.POINTWISE | Trait.REDUCTION) and not n.has(Trait.SOURCE)]
    for node in arithmetic:
        group = {node}
        while len(group) < 6:
            yield outline(group, uses)
            near = {n for member in group for n in (*uses.predecessors(member), *uses.readers(member))} - group
            near &= set(arithmetic)
            if not near:
                break
            group.add(rng.choice(uses.ordered(near)))


@pytest.mark.parametrize(
    "family", ["llama", "t5", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt2", "mixtral"))]
)
def test_keys_are_equal_where_bodies_are(family: str) -> None:
    (graph, *_) = capture(FAMILIES[family].build(Sizes(hidden=64, layers=4)), **FAMILIES[family].sample(1, 16, "none"))
    context = context_of(config=Config(strict=True))
    Pipeline.parse("canonicalize,raise,fuse,canonicalize", known_passes()).run(graph, context)
    open_regions(graph)
    graph.erase_dead()
    spell, bodies, keys, count = abbreviations(), dict[Hashable, Hashable](), dict[Hashable, Hashable](), 0
    for piece in candidates(graph, random.Random(0)):
        body = piece.build()
        verify_graph(body)
        key, whole = piece.structure(spell), structure(body)
        assert bodies.setdefault(key, whole) == whole
        assert keys.setdefault(whole, key) == key
        count += 1
    assert 20 < len(bodies) < count / 2
