"""Packed weights are prefetched so far ahead that memory answers before they are multiplied."""

import re
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import fusec
from fusec.codegen import target_named
from fusec.codegen.cpp.printer import AHEAD_BYTES
from fusec.codegen.tile.kernel import Kernel, Load, Loop, Prefetch, walk
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace

COLUMNS = 256
pytestmark = pytest.mark.usefixtures("nothing_is_built")


def kernel(format: str, depth: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Kernel, str]:
    """Return the kernel of a quantized layer at one row, and its source."""
    model = nn.Sequential(nn.Linear(depth, COLUMNS, bias=False).to(dtype))
    fusec.quantize(model, format, progress=False)
    weights = dict(model.named_buffers())

    def layer(x: Tensor, *parts: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(weights, parts, strict=True)), (x,))

    inputs = [torch.randn(1, depth).to(dtype), *weights.values()]
    program = compile_graph(trace(layer, inputs, symbolic=False), Config()).program
    (found,), (text,) = program.kernels.values(), program.texts.values()
    return found, text


@pytest.mark.parametrize("depth", [256, 1024, 16384])
@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("int4-g64", 4), ("nf4", 4), ("w4a8", 4)])
def test_distance_in_columns(format: str, bits: int, depth: int) -> None:
    _, text = kernel(format, depth)
    options = re.search(r"dot_(computed|grouped)<([^>]*)>", text)
    assert options is not None
    place = 2 if options[1] == "grouped" else 4
    assert int(options[2].split(", ")[place]) == AHEAD_BYTES // (depth * bits // 8)


def test_scales_of_the_next_block() -> None:
    groups = target_named("cpp").lanes
    found, _ = kernel("int4-g64", 64 * groups)
    loops = [s for s in walk(found.body) if isinstance(s, Loop)]
    groups_of = next(s for s in loops if any(isinstance(i, Prefetch) for i in s.body))
    block = next(s for s in loops if groups_of in s.body)
    loads, prefetched = ([s for s in groups_of.body if isinstance(s, kind)] for kind in (Load, Prefetch))
    assert [s.buffer for s in loads] == [s.buffer for s in prefetched]
    ahead = {sympy.expand(p.offset - x.offset) for x, p in zip(loads, prefetched, strict=True)}
    assert ahead == {groups * sympy.expand(block.stop - block.start)}
