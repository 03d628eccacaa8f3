"""Casts that round nothing: values that are bfloat16 numbers already."""

import pytest
import torch
from torch import Tensor

from fusec.codegen.cpp.printer import print_kernel
from fusec.ir.parser import parse_graph
from fusec.loops.casts import is_bfloat16
from tests.codegen.test_dynamic_indices import program

HEAD = "graph g(%x: f32[4], %h: bf16[4], %i: i32[4], %b: bool[4]) {\n"
BITS = "  %m: i32[4] = and(%i, {mask})\n  %v: f32[4] = bitcast(%m) {{dtype=f32}}\n"
WIDE = "  %v: f32[4] = cast(%h) {dtype=f32}\n"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (WIDE, True),
        (BITS.format(mask=0x7FFF0000), True),
        (BITS.format(mask=0x7FFF8000), False),
        ("  %v: f32[4] = bitcast(%i) {dtype=f32}\n", False),
        ("  %v: f32[4] = exp(%x)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = mul(%w, 1024.0)\n", True),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = mul(1.0, %w)\n", True),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = mul(%w, 0.5)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = mul(%w, 3.0)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = mul(%w, inf)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = add(%w, 1024.0)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = where(%b, nan, %w)\n", True),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = where(%b, %x, %w)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[4] = where(%b, 0.1, %w)\n", False),
        (WIDE.replace("%v", "%w") + "  %v: f32[2, 2] = reshape(%w) {shape=(2, 2)}\n", True),
    ],
)
def test_numbers_of_bfloat16_are_known(text: str, known: bool) -> None:
    graph = parse_graph(f"{HEAD}{text}  return %v\n}}")
    assert is_bfloat16(graph.outputs[0]) == known


def test_values_that_are_read_twice_are_looked_at_once() -> None:
    steps = "".join(f"  %v{i + 1}: f32[4] = where(%b, %v{i}, %v{i})\n" for i in range(60))
    graph = parse_graph(f"{HEAD}{WIDE.replace('%v', '%v0')}{steps}  return %v60\n}}")
    assert is_bfloat16(graph.outputs[0])


def test_float8_is_not_rounded_to_bfloat16() -> None:
    """Without an instruction for it, that takes more operations than decoding."""
    text = """graph g(%x: u8[256]) {
  %i: i8[256] = cast(%x) {dtype=i8}
  %w: i32[256] = cast(%i) {dtype=i32}
  %s: i32[256] = shift_left(%w, 20)
  %m: i32[256] = and(%s, -2014314496)
  %f: f32[256] = bitcast(%m) {dtype=f32}
  %p: f32[256] = mul(%f, 1.329227995784916e+36)
  %y: bf16[256] = cast(%p) {dtype=bf16}
  %z: bf16[256] = neg(%y)
  return %z
}"""
    made = program(text)
    (kernel,) = made.kernels.values()
    assert "round_to<bf16>" not in print_kernel(kernel)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers: Tensor = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    numbers = torch.where(numbers.isnan(), numbers.new_tensor(480.0).copysign(codes.view(torch.int8)), numbers)
    torch.testing.assert_close(made([codes])[0], -numbers, rtol=0, atol=0)
