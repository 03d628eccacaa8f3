"""What must hold for every declared fusion, derived from the registry."""

import pytest

from fusec import passes
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.ops import Trait
from fusec.ir.types import BF16, F32, DType
from fusec.pipeline import Context, Pipeline
from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.match import Match
from fusec.rewriting.matcher import Matcher
from fusec.rewriting.pattern import choices
from fusec.rewriting.sampling import Sizes, symbolize
from fusec.verify.declarations import (
    commute,
    in_company,
    interior_values,
    regions_named,
    sample_arguments,
    spellings_that_differ,
    wrap_in_views,
)
from fusec.verify.interpreter import evaluate

passes.declare_all()
BUILT_IN = [name for name, f in FUSIONS.items() if f.module.startswith("fusec.")]
SPELLINGS = [(name, spelling) for name in BUILT_IN for spelling in FUSIONS[name].spellings]


def run(graph: Graph, **options: bool) -> Context:
    context = Context(Config(**options))  # type: ignore[arg-type]
    known = passes.known_passes()
    Pipeline((known["canonicalize"](), known["raise"](), known["fuse"]())).run(graph, context)
    assert not context.remarks.of("failure"), [str(r) for r in context.remarks.of("failure")]
    return context


def larger_graph(
    name: str, spelling: str, dtype: DType, absent: bool = False, batch: tuple[int, int] = (2, 3)
) -> Graph:
    declared = FUSIONS[name]
    present = list(choices(declared.parameters))[-1 if absent else 0]
    arguments = sample_arguments(declared.parameters, dtype, present, batch=batch)
    return trace(in_company(declared.spellings[spelling]), arguments, symbolic=False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_spellings_mean_the_same(name: str) -> None:
    assert spellings_that_differ(FUSIONS[name], F32, 1e-4) == []
    assert spellings_that_differ(FUSIONS[name], BF16, 5e-2) == []


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_every_spelling_is_found(name: str, spelling: str, dtype: DType) -> None:
    for absent in (False, True):
        graph = larger_graph(name, spelling, dtype, absent=absent)
        run(graph)
        assert regions_named(graph, name), str(graph)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", BUILT_IN)
def test_commuted_operands_views_and_casts_do_not_hide_it(name: str, dtype: DType) -> None:
    for disguise in (commute, wrap_in_views):
        graph = larger_graph(name, "reference", dtype)
        disguise(graph)
        run(graph)
        assert regions_named(graph, name), (disguise.__name__, str(graph))


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_is_found_with_symbolic_sizes(name: str) -> None:
    graph = larger_graph(name, "reference", F32, batch=(101, 103))
    sizes = Sizes(2)
    sizes.names = {"batch": 101, "length": 103}
    symbolize(graph, sizes)
    assert graph.symbols() or not any(p.dims and p.dims.variadic for p in FUSIONS[name].parameters)
    run(graph)
    assert regions_named(graph, name), str(graph)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_match_keeps_the_results(name: str) -> None:
    graph = larger_graph(name, "reference", F32)
    arguments = sample_arguments(FUSIONS[name].parameters, F32)
    tensors = [a for a in arguments if not isinstance(a, float)]
    before = evaluate(graph.copy(), tensors)
    run(graph, verify=True)
    for a, b in zip(before, evaluate(graph, tensors), strict=True):
        assert a.allclose(b, rtol=1e-5, atol=1e-6)


def first_pattern(name: str):  # type: ignore[no-untyped-def]
    return next(passes.pattern_library().patterns(FUSIONS[name], F32))


def match(name: str, graph: Graph):  # type: ignore[no-untyped-def]
    pattern = first_pattern(name)
    root = graph.outputs[pattern.graph.outputs.index(pattern.root)]
    return Matcher(pattern, graph, set(graph.outputs)).match(root)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_pattern_matches_itself(name: str) -> None:
    assert isinstance(match(name, first_pattern(name).graph.copy()), Match)


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_is_not_found_where_others_read_an_intermediate(name: str) -> None:
    inner = interior_values(first_pattern(name).graph)
    for i in range(len(inner)):
        graph = first_pattern(name).graph.copy()
        graph.set_outputs([*graph.outputs, interior_values(graph)[i]])
        found = match(name, graph)
        assert not isinstance(found, Match)
        assert found.clause == "users"


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_is_not_found_where_a_constant_differs(name: str) -> None:
    pattern = first_pattern(name)
    for i, node in enumerate(pattern.graph.nodes):
        if not node.is_op("constant") or abs(node.attributes["value"]) in pattern.scalars:
            continue
        graph = pattern.graph.copy()
        graph.nodes[i].attributes["value"] = node.attributes["value"] * 1.5 + 1
        found = match(name, graph)
        assert not isinstance(found, Match)
        assert found.clause == "constant"


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_is_not_found_along_another_axis(name: str) -> None:
    for i, node in enumerate(first_pattern(name).graph.nodes):
        if not node.has(Trait.REDUCTION):
            continue
        graph = first_pattern(name).graph.copy()
        graph.nodes[i].attributes["dims"] = (-2,)
        assert not isinstance(match(name, graph), Match)


def test_every_declaration_can_be_a_pattern() -> None:
    library = passes.pattern_library()
    for name in BUILT_IN:
        for dtype in (F32, BF16):
            assert list(library.patterns(FUSIONS[name], dtype)), name
    assert library.broken == {}
