"""What is nearly a fusion has one near miss, which names the fusion, the deviation and the line of the model."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.debug.capture import capture
from fusec.passes import default_pipeline
from fusec.remarks import Remark
from tests.contexts import context_of

ROWS = ((2, 16, 256),)


def misses(model: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Remark]:
    """The remarks on what was missed in the model's graph; nothing is built."""
    torch._dynamo.reset()
    found: list[Remark] = []
    for graph in capture(model, *map(torch.randn, shapes)):
        context = context_of()
        default_pipeline(context.config).run(graph, context)
        found += context.remarks.of("missed")
    return found


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


DEVIATIONS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str, str, str]] = [
    (rms_of_another_size, ROWS, "rms_norm", "expected cols (256), found 255", "/ 255"),
    (rms_of_a_scaled_row, ROWS, "rms_norm", "both uses to read the same tensor", "1.5 * x"),
    (swiglu_with_its_gate, ROWS * 2, "swiglu", "silu read only inside", "F.silu"),
]
"""Models, shapes of their inputs, the fusion that is named, part of the reason, and part of the line at fault."""


@pytest.mark.parametrize(
    ("model", "shapes", "fusion", "reason", "line"), DEVIATIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_deviation_is_named(
    model: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], fusion: str, reason: str, line: str
) -> None:
    (miss,) = misses(model, *shapes)
    assert miss.message == f"{fusion} nearly matched" and reason in miss.reason
    lines, first = inspect.getsourcelines(model)
    at = first + next(i for i, text in enumerate(lines) if line in text)
    assert any(source.endswith(f"test_near_misses.py:{at}") for source in miss.sources), miss.sources
