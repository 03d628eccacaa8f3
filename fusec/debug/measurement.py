"""Measuring the machine: the figures of its profile, each the best of repeated runs."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fusec.analysis.machine import MEASURED, Machine, assumed_cpu, cpu_name
from fusec.config import Config
from fusec.ir.graph import Graph, Value
from fusec.ir.ops import OPS
from fusec.ir.types import BF16, F16, F32, I8, I32, DType, TensorType, contiguous_strides

TYPES = (F32, BF16, F16, I8)
"""Dtypes whose matmuls are measured: the library's, and generated ones."""
STEPS = (
    "memory", "cache", *(f"{unit} {element.name}" for unit in ("matrix", "product") for element in TYPES),
    "vector f32", "launch",
)  # fmt: skip
FUNCTIONS = ("exp", "tanh", "sigmoid", "erf", "log", "rsqrt")
"""The vector arithmetic to measure, typical of kernels; multiplications alone are up to twice as fast."""


def measure_machine(
    megabytes: int = 256, size: int = 1024, seconds: float = 0.5, step: Callable[[str], None] = lambda name: None
) -> Machine:
    """Measure this machine with the threads that torch has; about ten times ``seconds``, and five kernels to build.

    Args:
        megabytes: size of the buffer that is read to measure memory; more than any cache holds.
        size: of the matrices.
        seconds: for each figure.
        step: called with the name of each figure before it is measured.
    """
    import torch

    from fusec.reference.dtypes import torch_dtype

    def product(element: DType) -> float:
        a, b = (torch.randn(size, size).to(torch_dtype(element)) for _ in range(2))
        matmul = torch._int_mm if element == I8 else torch.mm
        return 2 * size**3 / _best(lambda: matmul(a, b.t()), seconds) / 1e9

    with torch.no_grad():
        step("memory")
        read = _read_gb_s(megabytes << 20, seconds)
        step("cache")
        cache = last_cache_bytes()
        near = _read_gb_s(cache // 8, seconds) if cache else 0.0
        peaks = {}
        for element in TYPES:
            step(f"matrix {element.name}")
            peaks[f"matrix {element.name}"] = product(element)
        for element in TYPES:
            step(f"product {element.name}")
            peaks[f"product {element.name}"] = _product_gflop_s(element, size, seconds)
        step("vector f32")
        peaks["vector f32"] = _vector_gflop_s(seconds)
        step("launch")
        launch = _launch_us(seconds)
    return Machine(cpu_name(), MEASURED, read, peaks, launch, cache, max(near, read), torch.get_num_threads())


def last_cache_bytes() -> int:
    """Return the size of the last-level cache in bytes; 0 where the system does not report it."""
    levels = {}
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, size = ((cache / name).read_text().strip() for name in ("level", "size"))
            levels[int(level)] = int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
        except (OSError, ValueError):
            continue
    return levels[max(levels)] if levels else 0


def _read_gb_s(size: int, seconds: float) -> float:
    import torch

    data = torch.ones(size // 4)
    return data.nbytes / _best(lambda: torch.dot(data, data), seconds) / 1e9


def _product_gflop_s(dtype: DType, size: int, seconds: float) -> float:
    """Return the speed of a generated matmul of many rows."""
    import torch

    from fusec.reference.dtypes import torch_dtype

    def linear(body: Graph, x: Value) -> Value:
        weight = body.add_input(x.tensor)
        sums = {"dtype": I32} if dtype == I8 else {}
        return body.add_node("contraction", (x, weight), {"spec": "mk,nk->mn", **sums}).result

    x = torch.randn(size, size).to(torch_dtype(dtype))
    return 2 * size**3 / _best(_program(linear, dtype, (size, size), 1, x, x.clone()), seconds) / 1e9


def _vector_gflop_s(seconds: float, elements: int = 1 << 17) -> float:
    """Return the speed of a generated kernel that is almost all arithmetic."""
    import torch

    def functions(body: Graph, x: Value) -> Value:
        total = x
        for i, name in enumerate(FUNCTIONS, start=1):
            scaled = body.add_node("mul", (x, body.constant(0.1 * i, F32))).result
            total = body.add_node("add", (total, body.add_node(name, (scaled,)).result)).result
        return total

    operations = sum(OPS[name].cost + 2 for name in FUNCTIONS) * elements
    return operations / _best(_program(functions, F32, (elements,), 1, torch.ones(elements)), seconds) / 1e9


def _launch_us(seconds: float, many: int = 33) -> float:
    """Return the time in µs that each further trivial kernel adds to a program."""
    import torch

    def little(body: Graph, x: Value) -> Value:
        return body.add_node("neg", (x,)).result

    x = torch.ones(16)
    one, more = (_best(_program(little, F32, (16,), n, x), seconds / 2) for n in (1, many))
    return max((more - one) / (many - 1) * 1e6, 0.01)


def _program(
    build: Callable[[Graph, Value], Value], dtype: DType, shape: tuple[int, ...], kernels: int, *inputs: object
) -> Callable[[], object]:
    """A call of a program of so many equal kernels, one after another; further inputs go to each of them."""
    from fusec.codegen import target_named
    from fusec.codegen.program.program import build_program
    from fusec.compiler import context_for

    type = TensorType(dtype, shape, contiguous_strides(shape))
    graph = Graph("measurement")
    value, *others = (graph.add_input(type) for _ in inputs)
    for _ in range(kernels):
        body = Graph()
        body.set_outputs([build(body, body.add_input(type))])
        attributes = {"kind": "kernel", "label": "measurement", "fusions": (), "body": body}
        value = graph.add_node("region", (value, *others), attributes, types=[body.outputs[0].type]).result
    graph.set_outputs([value])
    target, config = target_named("cpp"), replace(Config.from_environment(), strict=True)
    context, _ = context_for(target, config, assumed_cpu())  # which generates every matmul
    program = build_program(graph, target, context)
    return lambda: program(list(inputs))


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the quickest call."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
