"""Sums of products stay in registers: where they lie in memory a product is a third slower, and nothing else tells."""

import re
import subprocess
from pathlib import Path

import pytest

from fusec.codegen.cpp import compiler as cpp_compiler

HEADERS = Path(cpp_compiler.__file__).parent
FEW = [
    *(f"dot_along_k<{rows}, 16>(out, 64, x, 512, w, 512, 64, 512)" for rows in (1, 2, 3, 4, 7, 8)),
    *(f"dot_along_n<{rows}, 16, false>(out, 64, x, 512, 1, w, 64, 64, 512)" for rows in (1, 3, 8)),
]
MANY = ["dot_many_along_k<16>(out, 64, x, 512, w, 512, rows, 64, 512)"]
MANY_N = ["dot_many_along_n<16, true>(out, 64, x, 512, 1, w, 64, rows, rows, 512)"]


@pytest.mark.parametrize(
    "left, right, calls",
    [
        ("float", "float", FEW + MANY + MANY_N),
        ("bf16", "bf16", FEW + MANY + MANY_N),
        ("float", "bf16", FEW),
        ("float", "f16", FEW),
    ],
    ids=["float", "bfloat16", "float and bfloat16", "float and half"],
)
def test_sums_stay_in_registers(left: str, right: str, calls: list[str]) -> None:
    compiler = cpp_compiler.find_compiler()
    if "#define __AVX512F__ 1" not in compiler.identity or "__clang__" in compiler.identity:
        pytest.skip("reads what GCC writes for AVX-512")
    head = f"(float* out, const {left}* x, const {right}* w, int64_t rows)"
    entries = [f'extern "C" EXPORT void entry{i}{head} {{ {call}; }}' for i, call in enumerate(calls)]
    text = "\n".join(['#include "dot.h"', "using namespace fusec;", *entries, ""])
    command = [*compiler.command, *compiler.flags, f"-I{HEADERS}", "-x", "c++", "-S", "-", "-o", "-"]
    lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    loops = products(lines)
    assert len(loops) >= len(calls)
    assert [line for loop in loops for line in loop if re.search(r"[(]%r[sb]p[,)]", line)] == []


def products(lines: list[str]) -> list[list[str]]:
    """The loops that multiply and add in more than two registers, and have no loop inside that does."""
    labels, found = dict[str, int](), list[tuple[int, int]]()
    for i, line in enumerate(lines):
        if label := re.match(r"([.]L\d+):", line):
            labels[label[1]] = i
        elif (jump := re.match(r"\s+j\w+\s+([.]L\d+)$", line)) and jump[1] in labels:
            start = labels[jump[1]] + 1
            inner = any(start <= first and last <= i for first, last in found)
            if not inner and sum("vfmadd" in each or "vdpbf16ps" in each for each in lines[start:i]) > 2:
                found.append((start, i))
    return [lines[first:last] for first, last in found]
