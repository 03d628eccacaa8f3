"""Sums of products stay in registers: where they lie in memory a product is a third slower, and nothing else tells."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusec.codegen.cpp import compiler as cpp_compiler

HEADERS = Path(cpp_compiler.__file__).parent


def few(lanes: int) -> list[str]:
    along_k = [f"dot_along_k<{rows}, {lanes}>(out, 64, x, 512, w, 512, 64, 512)" for rows in (1, 2, 3, 4, 7, 8)]
    return along_k + [f"dot_along_n<{rows}, {lanes}, false>(out, 64, x, 512, 1, w, 64, 64, 512)" for rows in (1, 3, 8)]


def many(lanes: int) -> list[str]:
    return [
        f"dot_many_along_k<{lanes}>(out, 64, x, 512, w, 512, rows, 64, 512)",
        f"dot_many_along_n<{lanes}, true>(out, 64, x, 512, 1, w, 64, rows, rows, 512)",
    ]


@pytest.mark.parametrize(("machine", "lanes"), [("cooperlake", 16), ("haswell", 8)], ids=["AVX-512", "AVX2"])
@pytest.mark.parametrize(
    ("left", "right", "calls"),
    [
        ("float", "float", (few, many)),
        ("bf16", "bf16", (few, many)),
        ("float", "bf16", (few,)),
        ("float", "f16", (few,)),
    ],
    ids=["float", "bfloat16", "float and bfloat16", "float and half"],
)
def test_sums_stay_in_registers(
    left: str, right: str, calls: tuple[Callable[[int], list[str]], ...], machine: str, lanes: int
) -> None:
    compiler = cpp_compiler.find_compiler()
    if "#define __x86_64__ 1" not in compiler.identity or "__clang__" in compiler.identity:
        pytest.skip("reads what GCC writes for x86")
    head = f"(float* out, const {left}* x, const {right}* w, int64_t rows)"
    spelled = [call for of in calls for call in of(lanes)]
    entries = [f'extern "C" EXPORT void entry{i}{head} {{ {call}; }}' for i, call in enumerate(spelled)]
    text = "\n".join(['#include "dot.h"', "using namespace fusec;", *entries, ""])
    flags = [f"-march={machine}", *cpp_compiler.FLAGS, f"-I{HEADERS}"]
    command = [*compiler.command, *flags, "-x", "c++", "-S", "-", "-o", "-"]
    lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    loops = products(lines)
    assert len(loops) >= len(spelled)
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
            ends = any(re.search("vpinsr|vinsertps|vmaskmov|vpmaskmov", each) for each in lines[start:i])
            if not inner and not ends and sum("vfmadd" in each or "vdpbf16ps" in each for each in lines[start:i]) > 2:
                found.append((start, i))
    return [lines[first:last] for first, last in found]
