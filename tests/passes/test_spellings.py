"""A fusion is written with one spelling of its parts, and found with every other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.config import Config
from fusec.frontend import trace
from fusec.passes import default_pipeline
from fusec.passes.raising import activations, norms
from fusec.rewriting.fusion import Fusion
from fusec.verify.declarations import regions_named
from tests.contexts import context_of

Part = Callable[..., Tensor]

WHOLES: list[tuple[Fusion[Any, Any], str, Callable[[Part], Callable[..., Any]], list[tuple[int, ...]]]] = [
    (activations.silu, "swiglu", lambda part: lambda x, y: part(x) * y, [(5, 8), (5, 8)]),
    (activations.gelu, "geglu", lambda part: lambda x, y: part(x) * y, [(5, 8), (5, 8)]),
    (activations.gelu, "linear_gelu", lambda part: lambda x, w, b: part(F.linear(x, w, b)), [(5, 8), (6, 8), (6,)]),
    (activations.gelu_tanh, "geglu_tanh", lambda part: lambda x, y: part(x) * y, [(5, 8), (5, 8)]),
    (activations.gelu_tanh, "packed_geglu_tanh", lambda part: lambda x: part(x[:, :4]) * x[:, 4:], [(5, 8)]),
    (activations.gelu_tanh, "linear_gelu_tanh", lambda part: lambda x, w: part(F.linear(x, w)), [(5, 8), (6, 8)]),
    (
        norms.rms_norm,
        "add_rms_norm",
        lambda part: lambda x, y, w: (part(x + y, w, 1e-6), x + y),
        [(5, 8), (5, 8), (8,)],
    ),
    (
        norms.layer_norm,
        "add_layer_norm",
        lambda part: lambda x, y, w, b: (part(x + y, w, b, 1e-6), x + y),
        [(5, 8), (5, 8), (8,), (8,)],
    ),
]
CASES = [
    pytest.param(whole, written(spelled), shapes, id=f"{whole}-{name}")
    for part, whole, written, shapes in WHOLES
    for name, spelled in part.spellings.items()
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("whole", "model", "shapes"), CASES)
def test_every_spelling_of_a_part(whole: str, model: Callable[..., Any], shapes: Any, dtype: torch.dtype) -> None:
    graph = trace(model, [torch.randn(shape, dtype=dtype) for shape in shapes], symbolic=False)
    config = Config(disable="group")
    default_pipeline(config).run(graph, context_of(config=config))
    assert regions_named(graph, whole)
