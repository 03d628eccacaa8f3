"""Ahead-of-time compilation for chips that need not be present, and the resources that the machine code uses."""

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusec.analysis.machine import CHIPS as MACHINES
from fusec.codegen.tile.kernel import DotTiles, Kernel, walk
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.jit import define
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import blocks, descriptors, options, parameters
from fusec.codegen.triton.tiles import spans
from fusec.errors import BuildError
from fusec.ir.types import accumulation

CHIPS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""By name."""

_POINTERS = {
    "f64": "*fp64", "f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "i64": "*i64", "i32": "*i32", "i16": "*i16",
    "i8": "*i8", "u8": "*u8", "bool": "*i1", "float8_e4m3fn": "*fp8e4nv", "float8_e5m2": "*fp8e5",
}  # fmt: skip
_SHARED = {machine.code: machine.shared_bytes for machine in MACHINES.values()}
"""The maximum of shared memory of a program, in bytes."""
_MATRIX = re.compile(r"\b(?:(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma\.)[\w.:]*|v_s?mfma_\w+)")
_COPY = re.compile(r"\bcp\.async\.(?:c[ag]|bulk)\b")
_BLOCK_COPY = "cp.async.bulk.tensor."
_ASSERTION = re.compile(r"\bcall(?:\.uni)?\s+__assertfail\b")
_ALIGNED = [["tt.divisibility", 16]]
"""The alignment of pointers that is assumed: torch aligns allocations to more."""


@dataclass(frozen=True)
class Report:
    """The resources that a kernel uses on a chip."""

    kernel: str
    chip: str
    registers: int
    """Registers of a thread."""
    spills: int
    """Spilled bytes (NVIDIA) or registers (AMD)."""
    shared: int
    """Bytes of shared memory of a program."""
    assembly_bytes: int
    """Length of the PTX or AMDGCN text."""
    matrix_instructions: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Number of instructions for matrix units, by mnemonic."""
    multiplies_halves: bool = False
    """True if the kernel multiplies matrices of half types, for which each of these chips has a unit."""
    asynchronous_copies: int = 0
    """Number of asynchronous copies to shared memory, as in software-pipelined loops (NVIDIA)."""
    block_copies: int = 0
    """Number of those that copy a block through a tensor descriptor."""
    assertions: int = 0
    """Number of traps of index checks."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what is wrong: spills, too much shared memory, or an unused matrix unit."""
        limit, found = _SHARED[self.chip], []
        if self.spills:
            found.append(f"{self.spills} spilled")
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory where a program can have {limit}")
        if self.multiplies_halves and not self.matrix_instructions:
            found.append("a product of matrices without the matrix unit")
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems


def compile_for(kernel: Kernel, chip: str) -> Report:
    """Compile a kernel for one of ``CHIPS``; no GPU is needed.

    Returns:
        For a kernel with several grids the maximum of registers and shared memory, and the sum of the rest.

    Raises:
        BuildError: if Triton cannot compile it.
    """
    text = print_kernel(kernel)
    first, *others = (_compile_grid(grid, text, chip) for grid in grids(kernel))
    return replace(reduce(_combine, others, first), kernel=kernel.name, multiplies_halves=multiplies_halves(kernel))


def _compile_grid(kernel: Kernel, text: str, chip: str) -> Report:
    function = define(kernel, text)
    names = parameters(kernel)
    pointers = {b.name: _POINTERS[b.dtype.name] for b in kernel.buffers}
    blocks_of = (f"tensordesc<{pointers[d.buffer][1:]}{list(d.block)}>" for d in descriptors(kernel))
    types = [*pointers.values(), *blocks_of, *(["i64"] * len(kernel.symbols))]
    constants = {block.name: block.lanes for block in blocks(kernel)}
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): _ALIGNED for i in range(len(kernel.buffers))}
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    try:
        compiled = triton.compile(source, target=CHIPS[chip], options=options(kernel))
    except Exception as reason:
        raise BuildError(f"Triton refuses kernel {kernel.name} for {chip}", why=str(reason)) from reason
    report = _nvidia if CHIPS[chip].backend == "cuda" else _amd
    return report(kernel.name, chip, compiled)


def _combine(one: Report, other: Report) -> Report:
    return replace(
        one,
        registers=max(one.registers, other.registers),
        spills=one.spills + other.spills,
        shared=max(one.shared, other.shared),
        assembly_bytes=one.assembly_bytes + other.assembly_bytes,
        matrix_instructions=dict(Counter(one.matrix_instructions) + Counter(other.matrix_instructions)),
        asynchronous_copies=one.asynchronous_copies + other.asynchronous_copies,
        block_copies=one.block_copies + other.block_copies,
        assertions=one.assertions + other.assertions,
    )


def multiplies_halves(kernel: Kernel) -> bool:
    """Return whether a kernel multiplies matrices of a half type."""
    axes = spans(kernel)
    dots = [s for s in walk(kernel.body) if isinstance(s, DotTiles)]
    return any(accumulation(s.dtype) != s.dtype and len(axes.get(s.acc, ())) == 2 for s in dots)


def _amd(name: str, chip: str, compiled: Any) -> Report:
    text = compiled.asm["amdgcn"]

    def field(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    # Scalar registers spill to lanes of vector registers, not to memory, unless the kernel has scratch memory.
    spills = field("vgpr_spill_count") + (field("sgpr_spill_count") if field("private_segment_fixed_size") else 0)
    matrix = dict(Counter(_MATRIX.findall(text)))
    registers, traps = field("vgpr_count"), text.count("s_trap")
    return Report(name, chip, registers, spills, compiled.metadata.shared, len(text), matrix, assertions=traps)


def _nvidia(name: str, chip: str, compiled: Any) -> Report:
    with TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
        ptx = compiled.asm["ptx"]
        stack = int(found.get("STACK", 0)) + int(found.get("LOCAL", 0))
        spills = _spilled(ptx, Path(folder)) if stack else 0
    matrix = dict(Counter(_MATRIX.findall(ptx)))
    report = Report(name, chip, int(found.get("REG", 0)), spills, compiled.metadata.shared, len(ptx), matrix)
    return replace(
        report,
        asynchronous_copies=len(_COPY.findall(ptx)),
        block_copies=ptx.count(_BLOCK_COPY),
        assertions=len(_ASSERTION.findall(ptx)),
    )


def _spilled(ptx: str, folder: Path) -> int:
    """Return the bytes that the assembler reports as spilled: the stack may also hold tables, as for ``sin``."""
    source, found = folder / "kernel.ptx", re.search(r"^\.target sm_(\d+)(a?)", ptx, re.MULTILINE)
    if not found:
        raise BuildError("PTX without a target", where=str(source))
    source.write_text(ptx)
    from triton.backends.nvidia.compiler import get_ptxas  # the one of its two that Triton used

    flags = ["-v", "--fmad=false", "--regAllocOptLevel=2", f"--gpu-name=sm_{found[1]}{found[2]}"]
    log = _tool(get_ptxas(int(found[1])).path, *flags, str(source), "-o", str(folder / "again.cubin"))
    return sum(map(int, re.findall(r"(\d+) bytes spill", log)))


def _tool(name: str, *arguments: str) -> str:
    """Return the output of a CUDA tool in Triton's wheel, given by name or path."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    try:
        done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as reason:
        raise BuildError(f"{name} failed", where=str(path), why=reason.stderr) from reason
    except (OSError, subprocess.TimeoutExpired) as reason:
        raise BuildError(f"{name} failed", where=str(path), why=str(reason)) from reason
    return done.stdout + done.stderr
