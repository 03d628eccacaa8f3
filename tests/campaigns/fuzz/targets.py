"""The ways in which a graph is compiled and run: passes alone, with C++ kernels, and with Triton's interpreted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from fusec.codegen import target_named
from fusec.codegen.program.constant_folding import ConstantFolding
from fusec.codegen.program.kernels import ScheduleCache, build_kernels
from fusec.codegen.program.program import build_program
from fusec.codegen.tile.bounds import size_limits, unproven_accesses
from fusec.codegen.tile.kernel import Kernel
from fusec.compiler import context_for
from fusec.config import Config
from fusec.errors import BuildError, FusecError
from fusec.ir.graph import Graph, Node
from fusec.ir.types import evaluate_sizes
from fusec.passes import default_pipeline
from fusec.pipeline import Context
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import Machine
from fusec.reference.sizes import bind_symbols

Run = Callable[[list[Any]], list[Any]]
"""Gives the outputs for arguments, which it may write to."""


class Unproven(FusecError):
    """A kernel for which it is not proved that it stays within its buffers."""


@dataclass(frozen=True)
class Compiled:
    """A graph that can be run."""

    run: Run
    falls_back: bool = False
    """Whether a region has no schedule and runs through ATen."""


@dataclass(frozen=True)
class Optimized:
    """A graph after all passes."""

    graph: Graph
    context: Context
    schedules: ScheduleCache


def optimized(graph: Graph, target: str) -> Optimized:
    """Run the passes, each of which is verified, and any of which may raise."""
    config = Config(strict=True)
    chosen = target_named(target)
    context, schedules = context_for(chosen, config)
    work = graph.copy()
    default_pipeline(config).run(work, context)
    return Optimized(work, context, schedules)


def interpreter(graph: Graph) -> Compiled:
    """What passes make of a graph, node by node."""
    work = optimized(graph, "cpp").graph
    return Compiled(lambda given: _ExactProducts(bind_symbols(work, given), None, True).evaluate(work, given))


def cpp(graph: Graph) -> Compiled:
    """A program of C++ kernels, all of which must build; its outputs lie as promised, in memory of their own."""
    done = optimized(graph, "cpp")
    done.context.config = replace(done.context.config, strict=False)
    program = build_program(done.graph, target_named("cpp"), done.context, done.schedules)
    for kernel in program.kernels.values():
        _check_bounds(kernel)
    failures = done.context.remarks.of("failure")
    if unbuilt := [remark for remark in failures if "has no kernel" not in remark.message]:
        raise BuildError(unbuilt[0].message, why=unbuilt[0].reason)
    return Compiled(lambda given: _kept_promises(graph, given, program(list(given))), bool(failures))


def build_ahead(graphs: Sequence[Graph]) -> None:
    """Build the C++ kernels of many graphs in one call, so that ``cpp`` finds them."""
    gathering = _Gathering()
    for graph in graphs:
        try:
            done = optimized(graph, "cpp")
            build_kernels(done.graph, gathering, Context(Config()), ConstantFolding.of(done.graph), done.schedules)  # type: ignore[arg-type]
        except Exception:  # which will be found when the graph is judged
            pass
    target_named("cpp").build(gathering.kernels, Config())


class _Gathering:
    """The C++ target, which remembers what it should build."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[BuildError]:
        self.kernels += kernels
        return [BuildError("it will be built") for _ in kernels]


def triton(graph: Graph) -> Compiled:
    """What passes make of a graph, node by node, kernels being run by Triton's interpreter."""
    done = optimized(graph, "triton")
    work, schedules = done.graph, done.schedules
    unscheduled = any(_is_kernel(node) and _kernel(schedules, node) is None for node in work)

    def run(given: list[Any]) -> list[Any]:
        with _functions_of_eager():
            return _TritonMachine(bind_symbols(work, given), schedules).evaluate(work, given)

    return Compiled(run, unscheduled)


@contextmanager
def _functions_of_eager() -> Iterator[None]:
    """Let Triton's interpreter round exponentials and the like once, and give the first of two zeros as a maximum.

    NumPy's functions of float32 are off by up to 3.5 ulps, and its maximum depends on where an element lies.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    unpatched = InterpreterBuilder.binary_op

    def unary_op(self: Any, x: Any, function: Callable[[Any], Any]) -> Any:
        wide = x.data.astype("float64") if x.data.dtype == "float32" else x.data
        return TensorHandle(function(wide).astype(x.data.dtype), x.dtype.scalar)

    def binary_op(self: Any, x: Any, y: Any, function: Callable[[Any, Any], Any]) -> Any:
        if function in (np.maximum, np.minimum):
            return unpatched(self, x, y, lambda a, b: np.where(a == b, a, function(a, b)))
        return unpatched(self, x, y, function)

    with mock.patch.multiple(InterpreterBuilder, unary_op=unary_op, binary_op=binary_op):
        yield


def _kernel(schedules: ScheduleCache, region: Node) -> Kernel | None:
    """Return the kernel of a region; None where it has no schedule."""
    try:
        return schedules.kernel(region)
    except FusecError:
        return None


def _is_kernel(node: Node) -> bool:
    return node.is_op("region") and node.attributes["kind"] == "kernel"


class _ExactProducts(Machine):
    """Rounds matrix products once: how exact those of torch are depends on layouts, which passes may change."""

    def contract(self, node: Node, a: Tensor, b: Tensor) -> Tensor:
        if not a.is_floating_point():
            return super().contract(node, a, b)
        return super().contract(node, a.double(), b.double()).to(torch_dtype(node.result.tensor.dtype))


class _TritonMachine(Machine):
    """The interpreter of the IR, with kernels for its regions."""

    def __init__(self, symbols: Mapping[str, int], schedules: ScheduleCache) -> None:
        super().__init__(symbols, None, True)
        self.schedules = schedules

    def node(self, node: Node, operands: list[Any]) -> list[Any]:
        """A kernel where the node is one and has a schedule."""
        from fusec.codegen.triton.check import run_kernel

        kernel = _kernel(self.schedules, node) if _is_kernel(node) else None
        if kernel is None:
            return super().node(node, operands)
        _check_bounds(kernel, node)
        inputs = [
            _as_typed(x, v.tensor, self.symbols)
            for x, v in zip(self.tensors(node, operands), node.body.inputs, strict=True)
        ]
        found = run_kernel(kernel, node.body, inputs, self.symbols)
        for i in node.writes:
            if inputs[i] is not operands[i]:
                operands[i].copy_(inputs[i])
        return found


def _as_typed(x: Tensor, type: Any, symbols: Mapping[str, int]) -> Tensor:
    """The tensor itself where it has the strides of a type, else a copy that has."""
    strides = evaluate_sizes(type.strides, symbols)
    if _lies_so(x, strides):
        return x
    from fusec.codegen.triton.check import laid_out

    return laid_out(x, type, symbols)


def _check_bounds(kernel: Kernel, region: Node | None = None) -> None:
    if region is None and kernel.symbols:
        return
    if found := unproven_accesses(kernel, *([size_limits(region.body)] if region is not None else [])):
        raise Unproven(f"an access of {kernel.name} may be out of bounds", why=str(found[0]))


def _kept_promises(graph: Graph, given: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """Outputs lie as promised, in memory of their own, but for what is written, which lies where it was written."""
    symbols = bind_symbols(graph, given)
    seen = {x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)}
    for i, (x, type) in enumerate(zip(outputs, graph.output_types, strict=True)):
        strides = evaluate_sizes(type.strides, symbols)  # type: ignore[union-attr]
        if not _lies_so(x, strides):
            raise FusecError(f"output {i} has strides {x.stride()}, not {strides}")
        if x.numel() and i not in graph.updated_outputs and x.untyped_storage().data_ptr() in seen:
            raise FusecError(f"output {i} shares memory")
        seen.add(x.untyped_storage().data_ptr())
    return outputs


def _lies_so(x: Tensor, strides: Sequence[int]) -> bool:
    return all(a == b or n == 1 for a, b, n in zip(x.stride(), strides, x.shape, strict=True)) or not x.numel()


TARGETS: dict[str, Callable[[Graph], Compiled]] = {"interpreter": interpreter, "cpp": cpp, "triton": triton}
