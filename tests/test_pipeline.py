"""Pipelines: their text form, their record, numbered applications, and passes that fail."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fusec import passes
from fusec.config import Config
from fusec.errors import OptionError
from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType, contiguous_strides
from fusec.pipeline import Context, Pipeline
from fusec.selector import Selector
from tests.contexts import context_of


def small_graph() -> Graph:
    graph = Graph()
    x = graph.add_input(TensorType(F32, (4, 8), contiguous_strides((4, 8))), "x")
    half = graph.add_node("div", [x, graph.constant(2.0, F32)]).result
    graph.set_outputs([graph.add_node("exp", [half]).result])
    return graph


@dataclass(frozen=True)
class Breaks:
    """Changes the graph, then raises."""

    name: ClassVar[str] = "breaks"

    def apply(self, graph: Graph, context: Context) -> None:
        graph.set_outputs([graph.inputs[0]])
        graph.erase_dead()
        raise RuntimeError("a bug")


@dataclass(frozen=True)
class Doubles:
    """Doubles the output, as one numbered application or beside one that does nothing; or swaps what it adds."""

    name: ClassVar[str] = "doubles"
    numbered: bool = False
    right: bool = False

    def apply(self, graph: Graph, context: Context) -> None:
        (output,) = graph.outputs
        if self.numbered:
            context.application("nothing")
            context.verified += context.verifies
        other = graph.constant(1.0 if self.right else 2.0, F32)
        graph.set_outputs([graph.add_node("mul", [output, other]).result])


def test_a_pass_that_numbers_nothing_is_one_application() -> None:
    graph, context = small_graph(), Context()
    Pipeline((Doubles(),)).run(graph, context)
    assert context.records[0].changed and context.records[0].applications == 1 and context.records[0].verified == 0
    assert [(r.subject, r.application) for r in context.remarks.of("passed")] == [("doubles", 0)]
    graph, context = small_graph(), Context(Config(apply="!0"))
    before = str(graph)
    Pipeline((Doubles(),)).run(graph, context)
    assert str(graph) == before and not context.records[0].changed and not context.remarks.of("passed")
    assert [r.application for r in context.remarks.of("missed")] == [0]


@pytest.mark.parametrize("numbered", [False, True])
def test_a_pass_is_verified_as_a_whole(numbered: bool) -> None:
    graph, context = small_graph(), Context(Config(verify=True))
    Pipeline((Doubles(numbered, right=True), Doubles(numbered))).run(graph, context)
    right, wrong = context.records
    assert right.changed and not wrong.changed
    assert right.applications == right.verified == wrong.applications == wrong.verified == 1
    (remark,) = context.remarks.of("failure")
    assert "changes the result" in remark.message and remark.application == (None if numbered else 1)
    assert [n.op.name for n in graph.nodes].count("mul") == 1


def test_what_cannot_be_run_is_said_and_kept() -> None:
    graph = Graph()
    huge = (1 << 15, 1 << 15)
    x = graph.add_input(TensorType(F32, huge, contiguous_strides(huge)), "x")
    graph.set_outputs([graph.add_node("slice", [x], {"dim": -2, "start": 0, "stop": huge[0], "step": 2}).result])
    context = Context(Config(verify=True))
    Pipeline((Doubles(),)).run(graph, context)
    assert context.records[0].changed and context.records[0].verified == 0
    assert ["could not be verified" in r.message for r in context.remarks.of("analysis")] == [True]


def test_the_text_form_reads_back() -> None:
    text = "canonicalize,raise{only=rms_norm+silu},fuse"
    pipeline = Pipeline.parse(text, passes.known_passes())
    assert str(pipeline) == text
    assert str(Pipeline.parse(str(pipeline), passes.known_passes())) == text


@pytest.mark.parametrize("text", ["canonicalise", "raise{sole=x}", "raise{", "canonicalize raise"])
def test_a_wrong_text_form_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        Pipeline.parse(text, passes.known_passes())


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", [0, 1, 5, 9]),
        ("0..4", [0, 1]),
        ("!1", [0, 5, 9]),
        ("0..,!5", [0, 1, 9]),
        ("1,9", [1, 9]),
        ("0..9,!1..5", [0, 9]),
    ],
)
def test_selectors(text: str, allowed: list[int]) -> None:
    selector = Selector.parse(text)
    assert [n for n in (0, 1, 5, 9) if selector.allows(n)] == allowed


def test_a_wrong_selector_is_refused() -> None:
    with pytest.raises(OptionError, match="selects no"):
        Config(apply="1-4")


@pytest.mark.parametrize("name", ["canonicalize", "group", "silu", "times-one", "attention"])
def test_what_may_be_left_out_is_known(name: str) -> None:
    passes.known_passes(Config(disable=name))
    with pytest.raises(OptionError, match=f"did you mean.*{name}"):
        passes.known_passes(Config(disable=f"group,{name[:-1]}"))


def test_what_alone_is_looked_for_is_known() -> None:
    with pytest.raises(OptionError, match=r"did you mean.*rms_norm"):
        Pipeline.parse("raise{only=rms_nrm}", passes.known_passes())


def test_a_pass_that_raises_is_undone_and_reported() -> None:
    graph, context = small_graph(), Context()
    before = str(graph)
    Pipeline((Breaks(),)).run(graph, context)
    assert str(graph) == before
    assert [r.subject for r in context.remarks.of("failure")] == ["breaks"]
    assert not context.records[0].changed
    with pytest.raises(RuntimeError):
        Pipeline((Breaks(),)).run(small_graph(), Context(Config(strict=True)))


def test_the_record_has_both_sides() -> None:
    graph, context = small_graph(), Context(Config(record=True))
    Pipeline.parse("canonicalize,canonicalize", passes.known_passes()).run(graph, context)
    first, second = context.records
    assert first.changed
    assert "div" in first.before
    assert "div" not in first.after
    assert first.applications == 1
    assert not second.changed
    assert second.before == first.after


def test_a_disabled_pass_does_not_run() -> None:
    context = Context(Config(disable="canonicalize"))
    Pipeline.parse("canonicalize", passes.known_passes()).run(small_graph(), context)
    assert context.records == []


def test_a_disabled_fusion_is_left_out() -> None:
    config = Config(disable="silu,group")
    graph = Graph()
    x = graph.add_input(TensorType(F32, (4, 8), contiguous_strides((4, 8))), "x")
    gate = graph.add_node("sigmoid", [x]).result
    graph.set_outputs([graph.add_node("mul", [x, gate]).result])
    for chosen, regions in ((Config(disable="group"), 1), (config, 0)):
        changed, context = graph.copy(), context_of(config=chosen)
        passes.default_pipeline(chosen).run(changed, context)
        assert sum(n.is_op("region") for n in changed.nodes) == regions
