"""What is nearly a fusion has one near miss, which names the fusion, the deviation and the line of the model."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.config import Config
from fusec.debug.capture import capture
from fusec.passes import declared, default_pipeline
from fusec.remarks import Remark
from fusec.rewriting.match import OTHER, SAME
from fusec.verify import edits
from tests.contexts import context_of

ROWS = ((2, 16, 256),)


def misses(model: Callable[..., Any], *shapes: tuple[int, ...], record: bool = True) -> list[Remark]:
    """The remarks on what was missed in the model's graph; nothing is built."""
    torch._dynamo.reset()
    found: list[Remark] = []
    for graph in capture(model, *map(torch.randn, shapes)):
        context = context_of(config=Config(record=record))
        default_pipeline(context.config).run(graph, context)
        found += context.remarks.of("missed")
    return found


def rms_with_eps_outside(x: Tensor) -> Tensor:
    root = torch.sqrt(x.pow(2).mean(-1, keepdim=True))
    return x / (root + 1e-6)


def rms_with_eps_after_its_inverse(x: Tensor) -> Tensor:
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
    return x * (root + 1e-6)


def rms_of_at_least_eps(x: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean.clamp(min=1e-6))


def rms_without_eps(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def rms_of_a_sum(x: Tensor) -> Tensor:
    square = x.pow(2)
    total = square.sum(-1, keepdim=True)
    return x * torch.rsqrt(total + 1e-6)


def rms_of_twice_the_mean(x: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    twice = 2.0 * mean
    return x * torch.rsqrt(twice + 1e-6)


def layer_norm_over_the_deviation(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = x.std(-1, keepdim=True, unbiased=False)
    return centred / (deviation + 1e-6)


def layer_norm_over_the_unbiased_deviation(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (x.std(-1, keepdim=True) + 1e-6)


def softmax_without_its_maximum(x: Tensor) -> Tensor:
    powers = torch.exp(x)
    return powers / powers.sum(-1, keepdim=True)


def gelu_of_a_square(h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**2)))


def gelu_without_its_half(h: Tensor) -> Tensor:
    bent = torch.erf(h / 2**0.5)
    return h * (1 + bent)


def rms_of_another_size(x: Tensor) -> Tensor:
    square = x.pow(2).sum(-1, keepdim=True)
    mean = square / 255
    return x * torch.rsqrt(mean + 1e-6)


def rms_of_a_scaled_row(x: Tensor) -> Tensor:
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return 1.5 * x * root


def swiglu_with_its_gate(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    opened = F.silu(gate)
    return opened * up, opened


def swiglu_with_its_gate_clamped(gate: Tensor, up: Tensor) -> Tensor:
    opened = gate * torch.sigmoid(gate.clamp(max=7.0))
    return opened * up


def gelu_of_another_constant(h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044 * h**3)))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8).softmax(-1) @ v


def attention_normalized_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT / 8).softmax(-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ v


def attention_with_its_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT / 8).softmax(-1)
    return weights @ v, weights


def attention_with_its_entropy(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT / 8).softmax(-1)
    return weights @ v, (weights * torch.log(weights + 1e-9)).sum(-1)


def attention_of_sigmoids(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.sigmoid(q @ k.mT / 8)
    return weights @ v


def attention_of_computed_keys(x: Tensor) -> Tensor:
    q, k, v = (x * number for number in (1.5, 2.5, 3.5))
    weights = torch.relu(q @ k.mT)
    return weights @ v


def experts(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up) @ down


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8) @ v


def attention_between_layers(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = ((x @ p).view(2, 16, 4, 64).transpose(1, 2) for p in w.unbind())
    rows = attention(q, k, v).transpose(1, 2).reshape(2, 16, 256)
    return rows @ w[0]


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


HEADS = ((2, 4, 16, 64),) * 3
DEVIATIONS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str, str, str]] = [
    (rms_with_eps_outside, ROWS, "rms_norm", "`add` with eps inside `sqrt`, found it outside", "root + 1e-6"),
    (rms_with_eps_after_its_inverse, ROWS, "rms_norm", "inside `rsqrt`, found it outside", "root + 1e-6"),
    (rms_of_at_least_eps, ROWS, "rms_norm", "`add` with eps, found `maximum` with 1e-06, as in `clamp`", ".clamp"),
    (rms_without_eps, ROWS, "rms_norm", "`add` with eps, found none", "rsqrt"),
    (rms_of_a_sum, ROWS, "rms_norm", "`div` with cols, as in `mean`, found none", ".sum"),
    (rms_of_twice_the_mean, ROWS, "rms_norm", "no `mul` with 2, found one", "2.0 * mean"),
    (layer_norm_over_the_deviation, ROWS, "layer_norm", "`add` with eps inside `sqrt`", "deviation + 1e-6"),
    (layer_norm_over_the_unbiased_deviation, ROWS, "layer_norm", "expected 256, found 255", "x.std"),
    (softmax_without_its_maximum, ROWS, "softmax", "`sub` with `max`, found none", "torch.exp"),
    (gelu_of_a_square, ROWS, "gelu_tanh", "expected `mul` with x, found none", "h**2"),
    (gelu_without_its_half, ROWS, "gelu", "`mul` with 0.5, found none", "1 + bent"),
    (rms_of_another_size, ROWS, "rms_norm", "all 6 operations match; constant 255 should be cols (256)", "/ 255"),
    (rms_of_a_scaled_row, ROWS, "rms_norm", "no `mul` with 1.5, found one", "1.5 * x"),
    (swiglu_with_its_gate, ROWS * 2, "swiglu", "silu read only inside", "F.silu"),
    (swiglu_with_its_gate_clamped, ROWS * 2, "silu", "input gate and `clamp` (test_near_misses.py:", ".clamp"),
    (gelu_of_another_constant, ROWS, "gelu_tanh", "all 9 operations match; constant 0.044 should be 0.044715", "0.044"),
    (attention_of_sigmoids, HEADS, "", "`sigmoid` (test_near_misses.py:", "weights @ v"),
    (attention_of_computed_keys, ROWS, "", "between its matmuls, where attention has a softmax", "weights @ v"),
    (attention_normalized_twice, HEADS, "", "divided by their sum again after the softmax", "weights @ v"),
    (attention_with_its_weights, HEADS, "", "`div` (of scaled_softmax, test_near_misses.py:", "weights @ v"),
    (attention_with_its_entropy, HEADS, "", "between its matmuls is also read by `", "weights @ v"),
]
"""Models, shapes of inputs, the fusion that is named (none for an attention), and parts of the reason and line."""


@pytest.mark.parametrize(
    ("model", "shapes", "fusion", "reason", "line"), DEVIATIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_deviation_is_named(
    model: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], fusion: str, reason: str, line: str
) -> None:
    (miss,) = misses(model, *shapes)
    assert miss.message == (f"{fusion} nearly matched" if fusion else "attention takes several kernels")
    assert reason in miss.reason, miss.reason
    lines, first = inspect.getsourcelines(model)
    at = first + next(i for i, text in enumerate(lines) if line in text)
    assert any(source.endswith(f"test_near_misses.py:{at}") for source in miss.sources), miss.sources


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (attention, HEADS),
        (attention_between_layers, (*ROWS, (3, 256, 256))),
        (mlp, (*ROWS, (256, 1024), (1024, 256))),
        (gated_mlp, (*ROWS, (256, 1024), (256, 1024), (1024, 256))),
        (experts, ((4, 16, 64), (4, 64, 128), (4, 128, 64))),
        (products, HEADS),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_no_attention_is_missed(model: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    assert not [miss for miss in misses(model, *shapes) if "attention" in miss.message + miss.reason]


def rms_of_a_square_of_at_least_0(x: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean.relu() + 1e-6)


def softmax_below_its_maximum(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True) - 0.5)
    return powers / powers.sum(-1, keepdim=True)


def rms_in_bfloat16(x: Tensor) -> Tensor:
    low = x.to(torch.bfloat16)
    return x * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_divided_by_a_row(x: Tensor, y: Tensor) -> Tensor:
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (x / y) * root


EDITS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str, str]] = [
    (rms_of_a_scaled_row, ROWS, "move `mul` with 1.5 out of rms_norm", SAME),
    (rms_divided_by_a_row, ROWS * 2, "move `div` with y out of rms_norm", SAME),
    (rms_in_bfloat16, ROWS, "leave out the cast to bf16", SAME),
    (rms_of_a_square_of_at_least_0, ROWS, "compute it as rms_norm does, norms.py:", SAME),
    (softmax_below_its_maximum, ROWS, "compute it as softmax does, softmax.py:", SAME),
    (rms_with_eps_outside, ROWS, "move `add` with eps inside `sqrt`", OTHER),
    (rms_with_eps_after_its_inverse, ROWS, "move `add` with eps inside `rsqrt`", OTHER),
    (rms_of_another_size, ROWS, "write cols (256) instead of 255", OTHER),
    (gelu_of_another_constant, ROWS, "write 0.044715 instead of 0.044", OTHER),
    (softmax_without_its_maximum, ROWS, "compute it as softmax does, softmax.py:", OTHER),
    (layer_norm_over_the_unbiased_deviation, ROWS, "", ""),
    (swiglu_with_its_gate, ROWS * 2, "", ""),
    (rms_of_at_least_eps, ROWS, "", ""),
    (rms_without_eps, ROWS, "", ""),
    (rms_of_a_sum, ROWS, "", ""),
    (rms_of_twice_the_mean, ROWS, "", ""),
    (gelu_of_a_square, ROWS, "", ""),
    (gelu_without_its_half, ROWS, "", ""),
]
"""Models, shapes of inputs, the beginning of the edit, and the outcome of trying it."""


@pytest.mark.parametrize(("model", "shapes", "edit", "outcome"), EDITS, ids=lambda x: getattr(x, "__name__", ""))
def test_an_edit_is_proposed_only_if_it_fuses_and_keeps_the_values(
    model: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], edit: str, outcome: str
) -> None:
    (miss,) = misses(model, *shapes)
    tried = str(miss.figures.get("tried", ""))
    if outcome == SAME:
        assert miss.suggestion.startswith(edit) and " at test_near_misses.py:" in miss.suggestion, miss.suggestion
        assert tried == SAME
    elif outcome == OTHER:
        assert re.match(rf"{re.escape(edit)}(\d+,)? at test_near_misses\.py:", tried) and tried.endswith(OTHER), tried
        assert not miss.suggestion
    else:
        assert not miss.suggestion and not tried, (miss.suggestion, tried)
        assert re.search(r"\(spelling \w+, \w+\.py:\d+\)", miss.reason), miss.reason


def test_a_value_that_an_edit_changes_is_shown_where_ordinary_inputs_do_not_show_it() -> None:
    tried = {model: str(misses(model, *ROWS)[0].figures["tried"]) for model in (softmax_without_its_maximum,
             rms_with_eps_outside)}  # fmt: skip
    assert re.search(r" \(nan becomes \S+ on large inputs\): fuses", tried[softmax_without_its_maximum])
    assert "becomes" not in tried[rms_with_eps_outside]


def test_an_edit_that_would_not_fuse_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "apply_declared", lambda *_: 0)
    (miss,) = misses(rms_of_a_scaled_row, *ROWS)
    assert not miss.suggestion and "tried" not in miss.figures


def test_another_reader_is_named_by_its_line() -> None:
    def model(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        opened = F.silu(gate)
        return opened * up, opened.exp()

    (miss,) = misses(model, *ROWS * 2)
    assert re.search(r"also read by `exp` \(test_near_misses\.py:\d+\)", miss.reason), miss.reason


def test_patterns_are_aligned_only_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "closest", lambda *_: pytest.fail("patterns are aligned in a compile"))
    assert not misses(rms_with_eps_outside, *ROWS, record=False)


GATES = [torch.sigmoid, torch.relu, torch.tanh, lambda gate: torch.sigmoid(gate.exp())]


@pytest.mark.parametrize("gate", GATES, ids=["sigmoid", "relu", "tanh", "sigmoid of exp"])
def test_a_gate_with_another_tensor_is_no_near_miss(gate: Callable[[Tensor], Tensor]) -> None:
    assert not misses(lambda x, up: gate(x) * up, *ROWS * 2)
    assert not misses(lambda x, a, b: gate(x @ a) * (x @ b).exp(), *ROWS, (256, 64), (256, 64))


def test_what_is_no_fusion_is_no_near_miss() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        lengths = x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6
        return torch.logsumexp(x, -1), torch.log_softmax(x, -1), x / lengths, torch.tanh(x) * 30, F.softplus(x)

    assert not [miss for miss in misses(model, *ROWS) if miss.pass_name == "fuse"]


def test_fusions_stand_where_near_misses_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("fusec.passes.declared.closest", raises)
    (graph,) = capture(lambda x: torch.rms_norm(x, (256,)) * torch.exp(x), torch.randn(4, 256))
    context = context_of(config=Config(record=True))
    default_pipeline(context.config).run(graph, context)
    assert "rms_norm" in {r.subject for r in context.remarks.of("passed")}
    assert any("planted" in r.reason for r in context.remarks.of("failure"))
