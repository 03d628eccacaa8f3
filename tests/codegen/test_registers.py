"""Sums of products stay in registers: where they lie in memory a product is a third slower, and nothing else tells."""

import re
import subprocess
from pathlib import Path

import pytest

from fusec.codegen.cpp import compiler as cpp_compiler

HEADERS = Path(cpp_compiler.__file__).parent
AVX = {"AVX-512": ("cooperlake", 16), "AVX2": ("haswell", 8)}
MACHINES = pytest.mark.parametrize(("machine", "lanes"), AVX.values(), ids=AVX)


@MACHINES
@pytest.mark.parametrize(
    ("left", "right"), [("float", "float"), ("bf16", "bf16"), ("float", "bf16"), ("float", "f16"), ("int8_t",) * 2]
)
def test_of_few_rows(left: str, right: str, machine: str, lanes: int) -> None:
    calls = [f"dot_along_k<{rows}, {lanes}>(out, 64, x, 512, w, 512, 64, 512)" for rows in (1, 2, 3, 4, 7, 8)]
    if left != "int8_t":
        calls += [f"dot_along_n<{rows}, {lanes}, false>(out, 64, x, 512, 1, w, 64, 64, 512)" for rows in (1, 3, 8)]
    head = f"({'int32_t' if left == 'int8_t' else 'float'}* out, const {left}* x, const {right}* w)"
    loops = products(
        "\n".join(f'extern "C" EXPORT void entry{i}{head} {{ {c}; }}' for i, c in enumerate(calls)), machine
    )
    assert len(loops) >= (4 if left == "int8_t" else len(calls))  # tiles of 1 to 4 rows
    assert spilled(loops, r"[(]%r[sb]p[,)]") == []


@MACHINES
@pytest.mark.parametrize(("left", "right"), [("float", "float"), ("bf16", "bf16"), ("float", "int8_t")])
def test_of_rows_that_are_listed(left: str, right: str, machine: str, lanes: int) -> None:
    rows = "listed(w, 512, list)"
    calls = [f"dot_along_k<{n}, {lanes}>(out, 64, x, 512, {rows}, 64, 512)" for n in (1, 2, 4)]
    calls += [f"dot_along_n<{n}, {lanes}, false>(out, 64, x, 512, 1, {rows}, 64, 512)" for n in (1, 2, 4)]
    head = f"(float* out, const {left}* x, const {right}* w, const int64_t* list)"
    loops = products(
        "\n".join(f'extern "C" EXPORT void entry{i}{head} {{ {c}; }}' for i, c in enumerate(calls)), machine
    )
    assert len(loops) >= len(calls)
    assert spilled(loops, r"\bv.*[(]%r[sb]p[,)]") == [], "places may lie in memory, sums may not"


@pytest.mark.parametrize(
    ("machine", "lanes", "left", "right"),
    [
        *((*machine, "float", right) for machine in AVX.values() for right in ("float", "bf16")),
        *((*machine, "bf16", "bf16") for machine in AVX.values()),
        (*AVX["AVX-512"], "word", "word"),
        (*AVX["AVX-512"], "Quad<int8_t>", "Quad<int8_t>"),
    ],
)
def test_of_panels(left: str, right: str, machine: str, lanes: int) -> None:
    sums = "int32_t" if "int8_t" in left else "float"
    loops = products(f"template struct fusec::RowTiles<{lanes}, {sums}, {left}, {right}>;", machine)
    assert len(loops) == {16: 24, 8: 7}[lanes]  # ends are not masked in a loop of AVX2
    assert spilled(loops, r"[xyz]mm.*[(]%r[sb]p[,)]|[(]%r[sb]p[,)].*[xyz]mm") == []  # where a matrix lies may


@MACHINES
@pytest.mark.parametrize("codes", ["int8_t", "uint8_t"])
@pytest.mark.parametrize("code", ["x", "x & {}(15)", "shift_right(x, {}(4))", "x - {}(8)"])
def test_unpacked_bytes(code: str, codes: str, machine: str, lanes: int) -> None:
    """GCC takes apart what is half a register, or goes by way of memory: seven times as long for a whole matmul."""
    body = f"store(out + k, cast<float>({code.format(f'Vec<{codes}, {lanes}>')}), All{{}});"
    loop = f"for (int64_t k = 0; k < 4096; k += {lanes})"
    loop += f" {{ const auto x = load<{lanes}>(codes + k, All{{}}); {body} }}"
    head = f'extern "C" EXPORT void entry(float* out, const {codes}* codes)'
    text = assembly(f"{head} {{ {loop} }}", machine)
    assert any(re.search("vcvtdq2ps", line) for line in text)
    assert spilled([text], r"vpextr|vpinsr|[xy]mm.*[(]%r[sb]p[,)]|[(]%r[sb]p[,)].*[xyz]mm") == []


def spilled(loops: list[list[str]], to: str) -> list[str]:
    return [line for loop in loops for line in loop if re.search(to, line)]


def assembly(text: str, machine: str) -> list[str]:
    compiler = cpp_compiler.find_compiler()
    if "#define __x86_64__ 1" not in compiler.identity or "__clang__" in compiler.identity:
        pytest.skip("reads what GCC writes for x86")
    flags = [f"-march={machine}", *cpp_compiler.FLAGS, f"-I{HEADERS}"]
    command = [*compiler.command, *flags, "-x", "c++", "-S", "-", "-o", "-"]
    text = f'#include "dot.h"\nusing namespace fusec;\n{text}\n'
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def products(text: str, machine: str) -> list[list[str]]:
    """The loops that multiply and add in more than two registers, and have no loop inside that does."""
    lines = assembly(text, machine)
    labels, found = dict[str, int](), list[tuple[int, int]]()
    for i, line in enumerate(lines):
        if label := re.match(r"([.]L\d+):", line):
            labels[label[1]] = i
        elif (jump := re.match(r"\s+j\w+\s+([.]L\d+)$", line)) and jump[1] in labels:
            start = labels[jump[1]] + 1
            inner = any(start <= first and last <= i for first, last in found)
            ends = any(re.search("vpinsr|vinsertps|vmaskmov|vpmaskmov", each) for each in lines[start:i])
            products = sum(bool(re.search("vfmadd|vdpbf16ps|vpdpbusd|vpmaddwd", each)) for each in lines[start:i])
            if not inner and not ends and products > 2:
                found.append((start, i))
    return [lines[first:last] for first, last in found]
