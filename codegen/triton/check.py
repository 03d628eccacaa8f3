"""A region's Triton kernel held against the meaning of its body, and compiled for chips that need not be here."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusec.analysis.machine import Machine, chip
from fusec.codegen.tile.bounds import Access, size_limits, unproven_accesses
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import storage_numel
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.compile import Report, compile_for
from fusec.codegen.triton.launch import TritonKernel
from fusec.codegen.triton.legality import ANY
from fusec.config import Config
from fusec.ir.graph import Graph, Node
from fusec.ir.ops import split_spec
from fusec.ir.types import TensorType, accumulation, estimate, evaluate_size, evaluate_sizes
from fusec.loops.plan import plan_kernel
from fusec.reference.contract import Comparison, compare_outputs
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from fusec.reference.sizes import bind_symbols

DEFAULT_CHIPS = ("sm_80", "sm_90", "gfx942")
_SIZES = (3, 5, 2, 7, 11, 13)
"""What symbols stand for, in turn: small and distinct, so that a mixed-up size shows."""


@dataclass(frozen=True)
class RegionCheck:
    """The outcome for one region."""

    kernel: Kernel
    comparison: Comparison
    reports: tuple[Report, ...]
    unproven: tuple[Access, ...]

    @property
    def ok(self) -> bool:
        """Whether it is right, within its buffers, and compiles to what each chip should run."""
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
    seed: int = 0,
    inputs: Sequence[Tensor] | None = None,
    config: KernelConfig | None = None,
    machine: Machine | None = None,
) -> RegionCheck:
    """Schedule a region with whole rows, run it, prove its bounds and compile it for chips that need not be there.

    It runs where its tensors lie: on a CPU in Triton's interpreter.

    What is compiled suits each of them, unless a config is given.

    Args:
        region: a node that holds primitives.
        name: what its kernel is called.
        chips: what it is compiled for.
        seed: of the sampled inputs.
        inputs: what the region takes; sampled unless given, though a sample may be nothing that occurs: sums of
            squares below zero have a root that says little about a kernel.
        config: what the schedule leaves free; by default what suits a chip.
        machine: the GPU that what runs has to suit; by default the one that is there, or the usual one.

    Raises:
        ScheduleError: where Triton has no schedule for the region.
        BuildError: where Triton refuses the kernel.
    """
    target = TritonTarget()
    plan = plan_kernel(region.body, ANY)
    kernel = target.schedule(plan, name, machine or target.machine(Config()), config)
    comparison = _compare(kernel, region.body, seed, inputs)
    multiplies, limits = multiplies_matrices(region.body), size_limits(region.body)
    kernels = {code: target.schedule(plan, name, chip(code), config) for code in chips}
    reports = tuple(replace(compile_for(k, code), multiplies_halves=multiplies) for code, k in kernels.items())
    unproven = {str(a): a for k in (kernel, *kernels.values()) for a in unproven_accesses(k, limits)}
    return RegionCheck(kernel, comparison, reports, tuple(unproven.values()))


def multiplies_matrices(body: Graph) -> bool:
    """Whether a body has a product of half types with several rows and columns, which is what matrix units are for."""
    return any(node.is_op("contraction") and _is_of_matrices(node) for node in body.nodes)


def _is_of_matrices(product: Node) -> bool:
    (left, right), result = split_spec(product.attributes["spec"])
    sizes = {
        letter: n
        for term, x in zip((left, right), product.operands, strict=True)
        for letter, n in zip(term, x.shape, strict=True)
    }
    own = [
        math.prod(estimate(sizes[letter]) for letter in kept)
        for kept in (set(left) - set(right), set(right) - set(left), set(left) & set(right) - set(result))
    ]
    halves = all(accumulation(x.tensor.dtype) != x.tensor.dtype for x in product.operands)
    return halves and min(own) > 1


def _compare(kernel: Kernel, body: Graph, seed: int, given: Sequence[Tensor] | None = None) -> Comparison:
    sizes = itertools.cycle(_SIZES)
    symbols = {name: next(sizes) for name in kernel.symbols} if given is None else bind_symbols(body, given)
    generator = torch.Generator().manual_seed(seed)
    if given is None:
        inputs = [_sample(value.tensor, symbols, generator) for value in body.inputs]
    else:
        inputs = [laid_out(x, value.tensor, symbols) for x, value in zip(given, body.inputs, strict=True)]
    reference = evaluate(body, inputs, symbols, dtype=torch.float64)
    eager = evaluate(body, inputs, symbols)
    return compare_outputs(eager, run_kernel(kernel, body, inputs, symbols), reference)


def run_kernel(kernel: Kernel, body: Graph, inputs: Sequence[Tensor], symbols: Mapping[str, int]) -> list[Tensor]:
    """The outputs of a region's kernel; inputs, which have the strides of the body's types, may be written to."""
    written = {v: v.producer.operands[0] for v in body.outputs if v.producer and v.producer.is_op("write")}
    own = {v: _allocate(v.tensor, symbols) for v in body.outputs if v not in written}
    TritonKernel(kernel)([*inputs, *own.values()], [symbols[name] for name in kernel.symbols])
    numbers = dict(zip(body.inputs, inputs, strict=True)) | own
    return [numbers[written.get(v, v)] for v in body.outputs]


def _sample(type: TensorType, symbols: dict[str, int], generator: torch.Generator) -> Tensor:
    """A tensor of a type: normal numbers, small integers, fair booleans."""
    length, dtype = evaluate_size(storage_numel(type), symbols), torch_dtype(type.dtype)
    if dtype.is_floating_point:
        storage = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    else:
        storage = torch.randint(0, 2 if dtype == torch.bool else 6, (length,), generator=generator).to(dtype)
    return storage.to(type.device).as_strided(
        evaluate_sizes(type.shape, symbols), evaluate_sizes(type.strides, symbols)
    )


def laid_out(x: Tensor, type: TensorType, symbols: Mapping[str, int]) -> Tensor:
    """A copy of a tensor with the strides of a type."""
    shape, strides = evaluate_sizes(type.shape, symbols), evaluate_sizes(type.strides, symbols)
    for dim, stride in enumerate(strides):
        x = x.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] else x
    return torch.empty_strided(x.shape, strides, dtype=torch_dtype(type.dtype), device=x.device).copy_(x).expand(shape)


def _allocate(type: TensorType, symbols: Mapping[str, int]) -> Tensor:
    """Memory for an output, filled with what a forgotten store would leave."""
    shape, strides = evaluate_sizes(type.shape, symbols), evaluate_sizes(type.strides, symbols)
    out = torch.empty_strided(shape, strides, dtype=torch_dtype(type.dtype), device=type.device)
    return out.fill_(torch.nan if out.is_floating_point() else 1)
