"""What the command line does, from Python: capture, opt, explain and view of one model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusec
from fusec import dynamo
from fusec.debug.capture import NothingCaptured
from fusec.errors import OptionError, VerificationError
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.pipeline import Context


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    h = x + residual
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def inputs() -> list[Tensor]:
    return [torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)]


def test_a_captured_graph_is_optimized_explained_and_shown(tmp_path: Path) -> None:
    (graph,) = fusec.capture(norm, *inputs())
    text = str(graph)
    assert str(parse_graph(text)) == text
    found = fusec.opt(graph, "canonicalize,raise,fuse", verify_each=True)
    assert str(graph) == text  # the passes ran on a copy
    assert [record.name for record in found.records] == ["canonicalize", "raise", "fuse"]
    assert found.records[0].before == text and found.records[-1].after == str(found.final)
    assert fusec.explain(found).regions == {"add_rms_norm": 1}
    page = tmp_path / "norm.html"
    assert page.write_text("") == 0 and fusec.view(found, path=page) == page.read_text(encoding="utf-8")


def test_inputs_are_called_what_they_are_in_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])
            self.register_buffer("scale", torch.ones(4))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers[0](tokens) * self.scale

    expected = {"layers_0_weight", "layers_0_bias", "scale", "tokens"}
    (graph,) = fusec.capture(Scaled(), torch.randn(2, 4))
    assert {value.name for value in graph.inputs} == expected
    forward, _ = fusec.capture(Scaled(), torch.randn(2, 4), train=True)
    assert {value.name for value in forward.inputs} == expected


def test_symbols_and_options_from_python() -> None:
    (graph,) = fusec.capture(norm, *inputs(), dynamic=True)
    assert graph.symbols()
    explanation = fusec.explain(norm, *inputs(), dynamic=True, options={"disable": "add_rms_norm"})
    assert explanation.assumed and explanation.regions == {"rms_norm": 1}
    assert not fusec.opt(graph, options={"apply": "!0.."}).records[0].changed


def test_training_has_two_graphs() -> None:
    layer = nn.Linear(8, 8)
    assert len(fusec.capture(layer, torch.randn(2, 8), train=True)) == 2
    assert len(fusec.explain(layer, torch.randn(2, 8), train=True).subjects) == 2


def test_wrong_names_of_passes_are_errors() -> None:
    (graph,) = fusec.capture(norm, *inputs())
    with pytest.raises(OptionError, match="did you mean canonicalize"):
        fusec.opt(graph, "canonicalise")


def test_a_pass_that_changes_the_meaning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.passes.canonicalize import Canonicalize

    def double(self: Canonicalize, graph: Graph, context: Context) -> None:
        (output,) = graph.outputs
        graph.set_outputs([graph.add_node("add", (output, output)).result], graph.output_types)

    (graph,) = fusec.capture(norm, *inputs())
    monkeypatch.setattr(Canonicalize, "apply", double)
    assert fusec.opt(graph, "canonicalize").records[0].changed
    with pytest.raises(VerificationError, match="canonicalize changes the result"):
        fusec.opt(graph, "canonicalize", verify_each=True)


def test_what_is_known_and_left_to_aten_says_why() -> None:
    explanation = fusec.explain(lambda x: x.max(-1), torch.randn(4, 8))
    (fallback,) = explanation.fallbacks
    assert fallback.name == "aten.max.dim" and "positions" in fallback.reason
    (remark,) = [r for r in explanation.remarks if r.pass_name == "import"]
    assert remark.sources and "test_python.py" in remark.sources[0]


def test_gradients_stay_as_they_were() -> None:
    """Those of a module, of its inputs, and of what a function has at hand."""
    layer, x, scale = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * scale

    scaled(x).sum().backward()
    tensors = [*layer.parameters(), x, scale]
    before = [(t.grad, t.grad.clone()) for t in tensors if t.grad is not None]
    for model in (layer, scaled):
        assert len(fusec.capture(model, x, train=True)) == 2
    assert len(before) == len(tensors)
    assert all(t.grad is was and torch.equal(was, copy) for t, (was, copy) in zip(tensors, before, strict=True))


def test_a_capture_is_no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.dynamo.import_for_call", lambda *_: 1 / 0)
    compiled, fallen = dynamo.compiled_graphs(), dynamo.fallbacks()
    with pytest.raises(NothingCaptured, match="division"):
        fusec.capture(lambda x: x + 1, torch.randn(3))
    assert (dynamo.compiled_graphs(), dynamo.fallbacks()) == (compiled, fallen)
