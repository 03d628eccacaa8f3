"""Peers that are compared do not share what Dynamo compiles."""

from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from bench.peers import compiled_with

MODELS = 10
"""More than Dynamo keeps of one function."""


@pytest.mark.skipif("isolate_recompiles" not in signature(torch.compile).parameters, reason="before torch 2.13")
def test_every_model_of_a_class_is_compiled_once() -> None:
    compiled: list[int] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    runs = [compiled_with(nn.Linear(4, size), backend, dynamic=False) for size in range(1, MODELS + 1)]
    for _ in range(2):
        assert [run(torch.ones(2, 4)).shape[-1] for run in runs] == [*range(1, MODELS + 1)]
    assert len(compiled) == MODELS
