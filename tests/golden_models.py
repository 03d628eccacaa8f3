"""The graphs of transformers' models after all passes, for the tests that look at what is left of them."""

from typing import Any
from unittest import mock

import torch
from transformers import masking_utils

from bench.families import FAMILIES, Sizes
from bench.numerics import cast_inputs, cast_parameters
from fusec.analysis.machine import Machine
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.ir.graph import Graph
from fusec.passes import default_pipeline
from tests.contexts import context_of


def optimized(
    family: str,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    hidden: int = 64,
    machine: Machine | None = None,
    **more: Any,
) -> list[Graph]:
    """The graphs of a model of two layers at inference, which takes ``more`` besides its inputs; nothing is built.

    Dynamo of torch 2.11 holds ``torch.compiler.is_exporting()`` for true wherever it compiles. Transformers then
    builds masks that it otherwise leaves out, so it is told here; older ones do not ask.
    """
    model = cast_parameters(FAMILIES[family].build(Sizes(hidden=hidden)), dtype)
    inputs = cast_inputs(FAMILIES[family].sample(batch, length, "none"), dtype)
    torch._dynamo.reset()  # or a second shape of a family would be captured with symbols
    with mock.patch.object(masking_utils, "is_torchdynamo_exporting", _false, create=True):
        graphs = capture(model, **inputs, **more)
    for graph in graphs:
        config = Config()
        default_pipeline(config).run(graph, context_of(config=config, machine=machine))
    return graphs


def _false() -> bool:
    return False
