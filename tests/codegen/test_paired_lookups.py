"""Weights of four bits that are looked up in tables of pairs of bfloat16, by instructions or as emulated."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusec
from fusec.codegen import target_named
from fusec.codegen.cpp.schedules import computed
from fusec.codegen.tile.kernel import ComputedDot, TableLookup, walk
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.reference.contract import Comparison, compare_outputs
from tests.codegen.instructions import emulate_pairs

DEPTH, COLUMNS = 320, 37
pytestmark = pytest.mark.skipif(target_named("cpp").lanes != 16, reason="pairs fill registers of 16 lanes")


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_pairs(monkeypatch)


def layer(format: str, rows: int, dtype: torch.dtype) -> tuple[bool, Comparison]:
    """Compile a quantized layer; return whether it looks pairs up, and its comparison with eager."""
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(DEPTH, COLUMNS, bias=False).to(dtype))
    fusec.quantize(model, format, progress=False)
    inputs = torch.randn(rows, DEPTH).to(dtype), *model.buffers()
    names = [name for name, _ in model.named_buffers()]

    def function(x: Tensor, *parts: Tensor) -> Tensor:
        called = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,))
        assert isinstance(called, Tensor)
        return called

    found = compile_graph(trace(function, inputs, symbolic=False), replace(Config(), strict=True))
    (kernel,) = found.program.kernels.values()
    (dot,) = (s for s in walk(kernel.body) if isinstance(s, ComputedDot))
    reference = F.linear(inputs[0].double(), model[0].dequantized(torch.float64))
    return dot.paired, compare_outputs([function(*inputs)], found.program(list(inputs)), [reference], dtype)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("format", ["int4-g64", "nf4", "int4-g320"])
def test_codes_in_whole_tiles(format: str, rows: int) -> None:
    paired, comparison = layer(format, rows, torch.bfloat16)
    assert paired
    assert comparison.passed, comparison


@pytest.mark.parametrize(("format", "dtype"), [("int4-g32", torch.bfloat16), ("int4-g64", torch.float32)], ids=str)
def test_others_are_looked_up_as_floats(format: str, dtype: torch.dtype) -> None:
    """Groups of half a tile, and weights that bfloat16 would round."""
    paired, comparison = layer(format, 1, dtype)
    assert not paired
    assert comparison.passed, comparison


def test_exchanged_halves_of_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = computed._look_up

    def exchanged(*arguments: object, **options: object) -> str:
        name = look_up(*arguments, **options)  # type: ignore[arg-type]
        emitter = arguments[0]
        found = emitter.inner[-1]  # type: ignore[attr-defined]
        assert isinstance(found, TableLookup)
        assert found.shift is not None
        emitter.inner[-1] = replace(found, shift=4 - found.shift)  # type: ignore[attr-defined]
        return name

    monkeypatch.setattr(computed, "_look_up", exchanged)
    paired, comparison = layer("int4-g64", 1, torch.bfloat16)
    assert paired
    assert not comparison.passed
