"""Matmuls of libraries with packed weights are unpacked as these libraries pack them."""

import os
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
from torch import Tensor

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.frontend.packed_matmuls import _dequantize_4bit, _dequantize_blockwise, _gemm_4bit, _gemv_4bit
from fusec.quantization.formats import NF4
from fusec.reference.contract import compare_outputs
from tests.combinations import rotating

GROUP = 32


@pytest.mark.parametrize(
    ("shape", "dtype"),
    rotating(((1, 128), (5, 80), (1, 16), (40, 96)), (torch.float32, torch.bfloat16, torch.float16)),
    ids=str,
)
def test_int4_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Whole blocks of columns, and a rest, whose layout differs."""
    rows, columns = shape
    torch.manual_seed(columns)
    codes = torch.randint(0, 16, (columns, 128), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = (torch.rand(128 // GROUP, columns, 2) * 0.1).to(dtype)
    x = torch.randn(rows, 128).to(dtype)

    def matmul(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        return torch.relu(torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales))

    inputs = [x, packed, scales]
    found = compile_graph(trace(matmul, inputs, symbolic=False), Config()).program
    scale, zero = (part.double().t().repeat_interleave(GROUP, 1) for part in scales.unbind(-1))
    exact = torch.relu(x.double() @ ((codes - 8) * scale + zero).t())
    comparison = compare_outputs([matmul(*inputs)], found(inputs), [exact], dtype)
    assert comparison.passed, comparison
    assert "opaque" not in [step.kind for step in found.steps]


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_int4_of_torch_with_other_instructions(capability: str) -> None:
    """Its layout depends on them."""
    script = """
        import torch
        from fusec.frontend.packed_matmuls import _int4pack_mm
        codes = torch.randint(0, 16, (80, 64), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        operands = torch.randn(3, 64), packed, 32, torch.rand(2, 80, 2)
        found = _int4pack_mm(*operands)
        assert found is NotImplemented or torch.allclose(
            found, torch.ops.aten._weight_int4pack_mm_for_cpu(*operands), rtol=1e-3, atol=1e-3
        )
    """
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=True)


def four_bits(rows: int, nested: bool) -> tuple[list[Tensor], Tensor]:
    """Return what bitsandbytes' operation takes, and the weight."""
    torch.manual_seed(rows)
    codes, table = torch.randint(0, 16, (48, 256)), torch.tensor(NF4)
    inputs = [torch.randn(rows, 256), (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).reshape(-1, 1)]
    scales = torch.rand(48 * 256 // GROUP)
    if nested:
        bytes_, values, outer = torch.randint(0, 256, (384,), dtype=torch.uint8), torch.rand(256), torch.rand(2)
        offset = torch.tensor(0.5)
        scales = values[bytes_.int()] * outer.repeat_interleave(256)[:384] + offset
        inputs += [outer, bytes_, values, offset]
    else:
        inputs.append(scales)
    return inputs, (table[codes].reshape(-1, GROUP) * scales[:, None]).reshape(48, 256)


@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_of_bitsandbytes(nested: bool) -> None:
    inputs, weight = four_bits(3, nested)
    dequantize = partial(_dequantize_4bit, {"nf4": torch.tensor(NF4)})
    x, packed, absmax, *more = inputs
    names = ("absmax_8bit", "absmax_code", "absmax_offset")
    found = _gemm_4bit(dequantize, x, packed, (48, 256), absmax, GROUP, "nf4", **dict(zip(names, more, strict=False)))
    torch.testing.assert_close(found, x @ weight.t())


@pytest.mark.parametrize("own", [False, True])
def test_one_token_of_bitsandbytes(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own kernel for the CPU takes weights in another order."""
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *names: own)
    (x, packed, absmax), weight = four_bits(1, False)
    found = _gemv_4bit(x, packed, (48, 256), absmax, torch.tensor(NF4), GROUP)
    if own:
        assert found is NotImplemented
    else:
        torch.testing.assert_close(found, x @ weight.t())


@pytest.mark.parametrize("count", [512, 600, 3])
def test_nested_scales_of_bitsandbytes(count: int) -> None:
    codes, scales, values = torch.randint(0, 256, (count,)), torch.rand(-(-count // 256)), torch.randn(256)
    found = _dequantize_blockwise(codes.to(torch.uint8), scales, values, 256, torch.float32)
    assert torch.equal(found, values[codes] * scales.repeat_interleave(256)[:count])


def test_blocks_that_cross_rows_stay_with_the_library() -> None:
    (_, packed, absmax), _ = four_bits(1, False)
    found = _dequantize_4bit({}, packed, absmax, GROUP, "nf4", (256 * 48 // 80, 80), torch.float32)
    assert found is NotImplemented
