"""Checks of a region's Triton kernel: results, bounds proofs, and compilation for chips that need not be present."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusec.analysis.machine import Machine, chip
from fusec.codegen.tile.bounds import Access, size_limits, unproven_accesses
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.compile import Report, compile_for
from fusec.codegen.triton.kernel import TritonKernel
from fusec.codegen.triton.legality import ANY
from fusec.config import Config
from fusec.ir.graph import Graph, Node
from fusec.ir.ops import split_spec
from fusec.ir.types import TensorType, accumulation, estimate, evaluate_size, evaluate_sizes, storage_numel
from fusec.loops.plan import plan_kernel
from fusec.reference.contract import Comparison, compare_outputs
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from fusec.reference.layout import copied
from fusec.reference.sizes import bind_symbols

DEFAULT_CHIPS = ("sm_80", "sm_90", "gfx942")
_SIZES = (3, 5, 2, 7, 11, 13)
"""The values of symbols, in turn: small and distinct, so that sizes that are confused give wrong results."""


@dataclass(frozen=True)
class RegionCheck:
    """The outcome for one region."""

    kernel: Kernel
    comparison: Comparison
    reports: tuple[Report, ...]
    unproven: tuple[Access, ...]

    @property
    def ok(self) -> bool:
        """Return whether it is right, stays within its buffers and compiles without problems for each chip."""
        return self.comparison.passed and all(r.ok for r in self.reports) and not self.unproven

    def __str__(self) -> str:
        lines = [f"{self.kernel.name}: {self.comparison}"]
        lines += [f"  does not fit: {r}" for r in self.reports if not r.ok]
        lines += [f"  out of bounds: {a}" for a in self.unproven]
        return "\n".join(lines)


def check_region(
    region: Node,
    name: str = "kernel",
    chips: Sequence[str] = DEFAULT_CHIPS,
    inputs: Sequence[Tensor] | None = None,
    config: KernelConfig | None = None,
    machine: Machine | None = None,
) -> RegionCheck:
    """Schedule a region, run its kernel, prove its bounds and compile it for chips that need not be present.

    The kernel runs on the device of its tensors: on a CPU in Triton's interpreter. For each chip it is scheduled again.

    Args:
        region: a kernel region.
        name: of the kernel.
        chips: to compile for.
        inputs: of the region; sampled by default, though samples may be values that never occur, such as negative sums
            of squares.
        config: of the kernel; by default chosen by heuristics, for each chip.
        machine: the GPU for which the kernel that runs is scheduled; by default the present one, or a usual one.

    Raises:
        ScheduleError: if Triton has no schedule for the region.
        BuildError: if Triton cannot compile the kernel.
    """
    target = TritonTarget()
    plan = plan_kernel(region.body, ANY)
    kernel = target.schedule(plan, name, machine or target.machine(Config()), config)
    comparison = _compare(kernel, region.body, inputs)
    multiplies, limits = multiplies_matrices(region.body), size_limits(region.body)
    kernels = {code: target.schedule(plan, name, chip(code), config) for code in chips}
    reports = tuple(replace(compile_for(k, code), multiplies_halves=multiplies) for code, k in kernels.items())
    unproven = {str(a): a for k in (kernel, *kernels.values()) for a in unproven_accesses(k, limits)}
    return RegionCheck(kernel, comparison, reports, tuple(unproven.values()))


def multiplies_matrices(body: Graph) -> bool:
    """Return whether a body has a matmul of half types with several rows and columns, as matrix units compute."""
    return any(node.is_op("contraction") and _multiplies_matrices(node) for node in body.nodes)


def _multiplies_matrices(product: Node) -> bool:
    (left, right), result = split_spec(product.attributes["spec"])
    sizes = product.label_sizes
    own = [
        math.prod(estimate(sizes[letter]) for letter in kept)
        for kept in (set(left) - set(right), set(right) - set(left), set(left) & set(right) - set(result))
    ]
    halves = all(accumulation(x.tensor.dtype) != x.tensor.dtype for x in product.operands)
    return halves and min(own) > 1


def _compare(kernel: Kernel, body: Graph, given: Sequence[Tensor] | None) -> Comparison:
    sizes = itertools.cycle(_SIZES)
    symbols = {name: next(sizes) for name in kernel.symbols} if given is None else bind_symbols(body, given)
    generator = torch.Generator().manual_seed(0)
    if given is None:
        inputs = [_sample(value.tensor, symbols, generator) for value in body.inputs]
    else:
        inputs = [laid_out(x, value.tensor, symbols) for x, value in zip(given, body.inputs, strict=True)]
    reference = evaluate(body, inputs, symbols, dtype=torch.float64)
    eager = evaluate(body, inputs, symbols)
    return compare_outputs(eager, run_kernel(kernel, body, inputs, symbols), reference)


def run_kernel(kernel: Kernel, body: Graph, inputs: Sequence[Tensor], symbols: Mapping[str, int]) -> list[Tensor]:
    """Run a region's kernel; return its outputs. Inputs have the strides of the body's types, and may be written to."""
    written = {v: v.producer.operands[0] for v in body.outputs if v.producer and v.producer.writes}
    own = {v: _allocate(v.tensor, symbols) for v in body.outputs if v not in written}
    TritonKernel(kernel)([*inputs, *own.values()], [symbols[name] for name in kernel.symbols])
    numbers = dict(zip(body.inputs, inputs, strict=True)) | own
    return [numbers[written.get(v, v)] for v in body.outputs]


def _sample(type: TensorType, symbols: dict[str, int], generator: torch.Generator) -> Tensor:
    """Return a random tensor of a type: normal floats, small integers, or booleans of equal probability."""
    length, dtype = evaluate_size(storage_numel(type), symbols), torch_dtype(type.dtype)
    if dtype.is_floating_point:
        storage = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    else:
        storage = torch.randint(0, 2 if dtype == torch.bool else 6, (length,), generator=generator).to(dtype)
    return storage.to(type.device).as_strided(
        evaluate_sizes(type.shape, symbols), evaluate_sizes(type.strides, symbols)
    )


def laid_out(x: Tensor, type: TensorType, symbols: Mapping[str, int]) -> Tensor:
    """Return a copy of a tensor with the strides of a type."""
    whole = x.to(torch_dtype(type.dtype)).expand(evaluate_sizes(type.shape, symbols))
    return copied(whole, evaluate_sizes(type.strides, symbols))


def _allocate(type: TensorType, symbols: Mapping[str, int]) -> Tensor:
    """Return memory for an output, filled with values that reveal a missing store."""
    shape, strides = evaluate_sizes(type.shape, symbols), evaluate_sizes(type.strides, symbols)
    out = torch.empty_strided(shape, strides, dtype=torch_dtype(type.dtype), device=type.device)
    return out.fill_(torch.nan if out.is_floating_point() else 1)
