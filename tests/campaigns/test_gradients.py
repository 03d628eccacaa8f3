"""The check of gradients accepts what is right and finds faults of a backward pass, without the compiler."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

pytest.importorskip("transformers")

from bench.families import FAMILIES
from bench.numerics import move_weights
from fusec.reference.contract import Comparison
from tests.campaigns.faults import SDPA, Fault, Plant, calls, planted
from tests.campaigns.gradients import compare_gradients


def _wrong(comparisons: dict[str, Comparison]) -> list[str]:
    return [name for name, comparison in comparisons.items() if not comparison.passed]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("vit", torch.float32),
        pytest.param("bert", torch.float32, marks=pytest.mark.thorough),
        pytest.param("t5", torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_other_roundings_pass(family: str, dtype: torch.dtype) -> None:
    comparisons = compare_gradients(FAMILIES[family], "aot_eager", dtype, draws=4)
    assert not _wrong(comparisons)
    assert len(comparisons) > 20 and any(c.ratio > 0.4 for c in comparisons.values())


def test_weights_move_by_one_number() -> None:
    model = nn.Linear(64, 64).to(torch.bfloat16)
    before = model.weight.detach().clone()
    move_weights(model, 0)
    distance = (model.weight.detach().view(torch.int16) - before.view(torch.int16)).abs()
    assert bool((distance == 1).all()) and bool((model.weight > before).any() and (model.weight < before).any())


def _query_leaks_into_key(graph: fx.Graph) -> bool:
    """The gradient of a key gets 1 % of the query's."""
    for node in calls(graph, SDPA):
        query, key = node.args[:2]
        with graph.inserting_before(node):
            leaking = graph.call_function(_also_to, (query, key))
        node.args = (leaking, *node.args[1:])
        return True
    return False


def _also_to(query: Tensor, key: Tensor) -> Tensor:
    return query + 0.01 * (key - key.detach())


def _norm_statistics_constant(graph: fx.Graph) -> bool:
    """A layer norm whose mean and deviation get no gradient."""
    for node in calls(graph, F.layer_norm):
        node.target = _norm_of_constants
        return True
    return False


def _norm_of_constants(x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    deviation, mean = torch.var_mean(x.detach(), -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(deviation + eps) * weight + bias


def _norm_scaled(graph: fx.Graph) -> bool:
    """The gradient of a layer norm's scale and offset a tenth too large."""
    for node in calls(graph, F.layer_norm):
        node.target = _norm_with_larger_gradient
        return True
    return False


def _norm_with_larger_gradient(x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    weight, bias = (p + 0.1 * (p - p.detach()) for p in (weight, bias))
    return F.layer_norm(x, shape, weight, bias, eps)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("plant", "parameter"),
    [
        (_query_leaks_into_key, "k_proj.bias"),
        (_norm_statistics_constant, "projection.weight"),
        (_norm_scaled, "layernorm_before.bias"),
    ],
)
def test_faults_of_the_backward_pass_are_found(plant: Plant, parameter: str, dtype: torch.dtype) -> None:
    fault = Fault("planted", "vit", (4, 16, "right"), plant)
    wrong = _wrong(compare_gradients(FAMILIES["vit"], planted(fault, "aot_eager"), dtype, draws=8))
    assert any(name.endswith(parameter) for name in wrong), wrong
