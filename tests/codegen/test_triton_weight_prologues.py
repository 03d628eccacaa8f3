"""Packed weights in Triton kernels: unpacked in the blocks of the product, never in memory."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.tile.bounds import unproven_accesses
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.reference.contract import compare_outputs
from tests.packed import COLUMNS, DEPTH, FORMS, Packed

GPU = Config(target="triton", machine="h100", strict=True)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (5, torch.float16), (20, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_packed_layer_is_one_kernel(form: Packed, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    parts = tuple(p.to(dtype) if p.dtype == torch.float32 else p for p in form.parts())
    inputs = torch.randn(rows, DEPTH).to(dtype), torch.randn(rows, COLUMNS).to(dtype), *parts

    def layer(x: Tensor, residual: Tensor, *parts: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (DEPTH,)), form.weight(*parts, x.dtype)) + residual

    found = compile_graph(trace(layer, inputs, symbolic=False), GPU).program
    exact = layer(*(x.double() if x.dtype == dtype else x for x in inputs))
    comparison = compare_outputs([layer(*inputs)], found(list(inputs)), [exact], dtype)
    assert comparison.passed, comparison
    assert [step.kind for step in found.steps] == ["kernel"]
    (kernel,) = found.kernels.values()
    assert unproven_accesses(kernel) == []
