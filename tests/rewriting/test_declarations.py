"""Declarations: what they accept, what they refuse, and that clauses, rewrites and user fusions take effect."""

from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from fusec import passes
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.errors import DeclarationError
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.ir.types import F32, TensorType
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import normalize
from fusec.passes.patterns import trace_types
from fusec.passes.traces import Traces
from fusec.pipeline import Context
from fusec.rewriting.application import apply_declared
from fusec.rewriting.fusion import FUSIONS, Dims, fusion
from fusec.rewriting.pattern import PatternLibrary
from fusec.rewriting.rule import REWRITES, rewrite
from fusec.verify.declarations import regions_named
from tests.contexts import context_of

Rows = Annotated[Tensor, Dims("*batch cols")]


@pytest.fixture(autouse=True)
def own_registry():  # type: ignore[no-untyped-def]
    fusions, rewrites = dict(FUSIONS), dict(REWRITES)
    yield
    for registry, saved in ((FUSIONS, fusions), (REWRITES, rewrites)):
        registry.clear()  # type: ignore[attr-defined]
        registry.update(saved)  # type: ignore[arg-type]


def normal(function: Any, *samples: Any) -> Graph:
    graph = trace(function, samples, symbolic=False)
    normalize(graph)
    return graph


TRACES = Traces(trace_types)


def library() -> PatternLibrary:
    return PatternLibrary(TRACES, normalize)


def test_a_clause_decides_and_explains() -> None:
    @fusion
    def squared_exponential(x: Rows) -> Tensor:
        """exp(x)²"""
        return torch.exp(x) * torch.exp(x)

    @squared_exponential.where
    def rows_are_short(x: TensorType) -> bool:
        """A row fits one register."""
        return isinstance(x.shape[-1], int) and x.shape[-1] <= 8

    for cols, count in ((8, 1), (9, 0)):
        context = Context()
        graph = normal(squared_exponential.function, torch.randn(3, cols))
        assert apply_declared([squared_exponential], graph, library(), context) == count
        assert bool(context.failures) == (not count)
    (missed,) = context.failures.values()
    assert missed.clause == "rows_are_short"
    assert "fits one register" in missed.expected
    assert "f32[3, 9]" in missed.found


def test_what_nobody_reads_may_be_met() -> None:
    @fusion
    def sine_of_exponential(x: Rows) -> Tensor:
        """sin(exp(x))"""
        return torch.sin(torch.exp(x))

    graph = normal(lambda x: torch.sin(torch.exp(x)) + 1, torch.randn(3, 5))
    graph.set_outputs([graph.inputs[0]])
    apply_declared([sine_of_exponential], graph, library(), Context(Config(verify=True)))
    assert not any(n.is_op("region", "exp", "sin") and not n.result.users for n in graph.nodes)
    graph.erase_dead()
    assert not graph.nodes


def test_a_clause_without_words_is_explained_by_its_name() -> None:
    @fusion
    def twice_exponential(x: Rows) -> Tensor:
        """exp(exp(x))"""
        return torch.exp(torch.exp(x))

    @twice_exponential.where
    def rows_are_short(x: TensorType) -> bool:
        return x.shape[-1] == 8

    context = Context()
    graph = normal(twice_exponential.function, torch.randn(3, 9))
    assert apply_declared([twice_exponential], graph, library(), context) == 0
    assert [missed.expected for missed in context.failures.values()] == ["rows are short"]


@pytest.mark.parametrize("scale", [0.75, torch.tensor(0.75)], ids=["a number", "a tensor"])
def test_a_fusion_within_another_may_take_a_scalar_from_the_graph(scale: Any) -> None:
    @fusion
    def scaled_tanh(x: Rows, scale: float) -> Tensor:
        """tanh(x · scale)"""
        return torch.tanh(x * scale)

    @fusion
    def summed_scaled_tanh(x: Rows, y: Rows, scale: float) -> Tensor:
        """tanh((x + y) · scale)"""
        return scaled_tanh(x + y, scale)

    graph = normal(lambda x, y, scale: torch.tanh((x + y) * scale), torch.randn(3, 5), torch.randn(3, 5), scale)
    assert apply_declared([scaled_tanh, summed_scaled_tanh], graph, library()) == 2
    (region,) = graph.nodes
    assert region.attributes["fusion"] == "summed_scaled_tanh"
    assert len(region.operands) == 2 + isinstance(scale, Tensor)


def test_a_scalar_is_a_variable_and_its_value_is_kept() -> None:
    @fusion
    def shifted_tanh(x: Rows, shift: float) -> Tensor:
        """tanh(x - shift)"""
        return torch.tanh(x - shift)

    graph = normal(lambda x: torch.tanh(x - 0.75), torch.randn(3, 5))
    assert apply_declared([shifted_tanh], graph, library()) == 1
    (region,) = regions_named(graph, "shifted_tanh")
    assert region.attributes["scalars"] == (("shift", 0.75),)


def test_results_that_nobody_reads_are_left_out() -> None:
    @fusion
    def sum_and_sine(x: Rows, y: Rows) -> tuple[Tensor, Tensor]:
        """sin(x + y), and x + y"""
        h = x + y
        return torch.sin(h), h

    for used, returns in ((False, (0,)), (True, (0, 1))):
        graph = normal(
            lambda x, y, used=used: (torch.sin(x + y), x + y) if used else torch.sin(x + y),
            torch.randn(3, 5),
            torch.randn(3, 5),
        )
        assert apply_declared([sum_and_sine], graph, library()) == 1
        assert regions_named(graph, "sum_and_sine")[0].attributes["returns"] == returns


def test_a_user_fusion_builds_on_the_built_in_ones() -> None:
    @fusion
    def squared_norm(x: Rows, weight: Annotated[Tensor, Dims("cols")], eps: float) -> Tensor:
        """The square of an RMS norm."""
        h = FUSIONS["rms_norm"](x, weight, eps)
        return h * h

    def model(x: Tensor, w: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w
        return y * y

    graph = trace(model, [torch.randn(4, 8), torch.randn(8)], symbolic=False)
    context = context_of(config=Config(disable="group"))
    passes.default_pipeline(context.config).run(graph, context)
    (region,) = regions_named(graph, "squared_norm")
    assert regions_named(region.body, "rms_norm")


def test_the_second_kernel_of_a_name_does_not_take_anothers() -> None:
    @fusion
    def gate(x: Rows, y: Rows) -> Tensor:
        """x·tanh(y) + sin(x)"""
        return x * torch.tanh(y) + torch.sin(x)

    @fusion
    def gate_2(x: Rows, y: Rows) -> Tensor:
        """x·cos(y) - eˣ"""
        return x * torch.cos(y) - torch.exp(x)

    def model(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return gate(a, b), gate(c, d), gate_2(c, d)

    inputs = [*torch.randn(2, 4, 32), *torch.randn(2, 8, 33)]
    program = compile_graph(trace(model, inputs, symbolic=False), Config(strict=True)).program
    assert list(program.kernels) == ["gate", "gate_2", "gate_2_2"]
    torch.testing.assert_close(program(list(inputs)), list(model(*inputs)))


def test_a_fusion_may_have_the_name_of_the_function_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    @fusion
    def sin(x: Rows) -> Tensor:
        """sin(x)"""
        return torch.sin(x)

    monkeypatch.setitem(globals(), "sin", sin)
    graph = normal(lambda x: torch.sin(x) * x, torch.randn(3, 5))
    assert apply_declared([sin], graph, library()) == 1


def test_a_fusion_does_not_span_a_write_to_what_it_reads() -> None:
    """It would have to run before the write, for the old value, and behind it, for the new one."""

    @fusion
    def doubled_beside(x: Rows, y: Rows) -> Tensor:
        return (x + x) * torch.sin(y)

    graph = parse_graph("""graph g(%x: f32[3, 5], %y: f32[3, 5]) {
      %a: f32[3, 5] = add(%x, %x)
      %w: f32[3, 5] = write(%x, %y)
      %s: f32[3, 5] = sin(%w)
      %r: f32[3, 5] = mul(%a, %s)
      return %r
    }""")
    assert apply_declared([doubled_beside], graph, library()) == 0
    verify_graph(graph)


def test_an_identity_is_applied_from_left_to_right() -> None:
    @rewrite
    def exponential_of_sum(x: Rows, y: Rows) -> Tensor:
        """eˣ·eʸ = eˣ⁺ʸ"""
        return torch.exp(x) * torch.exp(y)

    @exponential_of_sum.to
    def _(y: Rows, x: Rows) -> Tensor:
        return torch.exp(x + y)

    graph = normal(lambda a, b: torch.exp(a) * torch.exp(b), torch.randn(3, 5), torch.randn(3, 5))
    assert apply_declared([exponential_of_sum], graph, library()) == 1
    assert [n.op.name for n in graph.nodes] == ["add", "exp"]


def test_what_is_declared_later_counts_from_then_on() -> None:
    @rewrite
    def doubled(x: Rows) -> Tensor:
        """x + x = 2·x"""
        return x + x

    @doubled.to
    def _(x: Rows) -> Tensor:
        return x * 2.0

    @fusion
    def doubled_sine(x: Rows) -> Tensor:
        """sin(x) + sin(x)"""
        return torch.sin(x) + torch.sin(x)

    kept = library()

    def operations() -> list[str]:
        graph = normal(doubled_sine.function, torch.randn(3, 5))
        apply_declared([REWRITES["doubled"]], graph, kept)
        return [n.op.name for n in graph.nodes if n.op.name != "constant"]

    assert operations() == ["sin", "mul"] and list(kept.patterns(doubled_sine, F32))
    doubled.where(lambda x: x.shape[-1] == 7)
    assert operations() == ["sin", "add"]
    (within,) = kept.patterns(doubled_sine, F32)
    assert "mul" not in {n.op.name for n in within.graph.nodes}


def test_what_is_declared_wrongly_is_refused() -> None:
    with pytest.raises(DeclarationError, match="no dims"):
        fusion(lambda x: x)

    @fusion
    def twice(x: Rows) -> Tensor:
        """2x"""
        return x + x

    with pytest.raises(DeclarationError, match="unknown"):
        twice.where(lambda weight: True)
    with pytest.raises(DeclarationError, match="takes"):
        twice.spelling(lambda y: y)  # type: ignore[misc]


def test_a_scalar_that_is_lost_is_an_error() -> None:
    @fusion
    def lost(x: Rows, eps: float) -> Tensor:
        """x·eps², computed before it meets x."""
        return torch.exp(x * (eps * eps))

    made = library()
    graph = normal(lambda x: torch.exp(x * 0.25), torch.randn(2, 3))
    assert apply_declared([lost], graph, made) == 0
    assert "does not reach" in made.broken["lost", "reference"]
