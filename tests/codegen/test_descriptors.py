"""Products whose blocks come by tensor descriptors: right at every edge, wherever memory lies, and on which chips."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from fusec.analysis.machine import CHIPS, chip
from fusec.cache import Cache
from fusec.codegen.program.fallback import UnfusedKernel
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.arguments import fits
from fusec.codegen.triton.autotune.tuner import Tuner
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.kernel import TritonKernel
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.signature import descriptors, options
from fusec.config import Config
from fusec.errors import ScheduleError
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from fusec.ir.types import BF16, TensorType, symbol
from fusec.remarks import Remarks
from tests.codegen.test_launcher import Driver, OnGpu, standing_in
from tests.codegen.test_triton_many_rows import LARGE, from_heads, gated, rotated
from tests.codegen.triton_regions import kernel_regions, regions_around_products, regions_with_products
from tests.contexts import plan_of

H100 = chip("h100")
SMALL = KernelConfig(16, 32, 16, stages=3, descriptors=True)
BY_CHIP = {machine.code: machine for machine in CHIPS.values()}


def own_residual(x: Tensor, w: Tensor) -> Tensor:
    """What is multiplied is added too, element by element."""
    return F.gelu(F.linear(x, w)) + x


def of_a_part(x: Tensor, w: Tensor) -> Tensor:
    """Of a weight that begins in the middle of each row of another."""
    return torch.relu(F.linear(x, w[3:, 8:48]))


Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], set[str]]
CASES: dict[str, Case] = {
    "ragged": (F.linear, ((20, 24), (40, 24)), {"in0", "in1"}),
    "full": (F.linear, ((32, 32), (64, 32)), {"in0", "in1"}),
    "more than a group": (F.linear, ((140, 24), (8, 24)), {"in0", "in1"}),
    "two products": (gated, ((20, 24), (40, 24), (40, 24)), {"in0", "in1", "in2"}),
    "rows by column": (lambda x, w: torch.relu(x.t() @ w), ((24, 20), (24, 40)), {"in0", "in1"}),
    "its own residual": (own_residual, ((20, 40), (40, 40)), {"in0", "in1"}),
    "a part of a matrix": (of_a_part, ((20, 40), (43, 56)), {"in0", "in1"}),
    "rows in two dims": (lambda x, w, r: F.linear(x, w) * r, ((3, 9, 24), (40, 24), (3, 9, 40)), {"in0", "in1"}),
    "rows that lie apart": (lambda x, w: F.linear(x.transpose(0, 1)[::2], w) + 1, ((3, 20, 24), (40, 24)), {"in1"}),
    "rows that lie turned": (lambda x, w: F.linear(x.transpose(0, 1), w) + 1, ((8, 4, 24), (40, 24)), {"in1"}),
    "halves of heads": (rotated, ((2, 9, 24), (64, 24), (9, 32), (9, 32)), {"in0", "in1"}),
    "a sum over heads": (from_heads, ((1, 2, 20, 32), (40, 64), (1, 20, 40)), {"in0", "in1"}),
    "rows that are not aligned": (F.linear, ((20, 37), (24, 37)), set()),
}


def region_of(function: Callable[..., Any], shapes: Any, dtype: torch.dtype = torch.bfloat16) -> Node:
    (region,) = regions_with_products(function, [torch.empty(s, dtype=dtype, device="meta") for s in shapes])
    return region


def kernel_of(region: Node, config: KernelConfig = SMALL) -> Kernel:
    return TritonTarget().schedule(plan_of(region), "kernel", H100, config)


def named(kernel: Kernel) -> set[str]:
    return {d.buffer for d in descriptors(kernel)}


HALVES = [("ragged", torch.float16), ("two products", torch.bfloat16), ("a part of a matrix", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), *HALVES])
def test_every_edge(name: str, dtype: torch.dtype) -> None:
    """In the interpreter; what may not come by descriptor comes by address, in the same kernel."""
    torch.manual_seed(0)
    function, shapes, expected = CASES[name]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    (region,) = regions_with_products(function, inputs)
    outcome = check_region(region, chips=(), inputs=inputs, config=SMALL, machine=H100)
    assert outcome.ok and named(outcome.kernel) == expected, outcome


def test_blocks_wider_than_a_head() -> None:
    """Have all of several heads: of the last ones of five there are not enough."""
    inputs = [torch.randn(shape) for shape in ((1, 20, 24), (5 * 32, 24), (20, 32), (20, 32))]
    (region,) = regions_with_products(rotated, inputs)
    outcome = check_region(region, chips=(), inputs=inputs, config=replace(SMALL, columns=64), machine=H100)
    assert outcome.ok and {(2, 16, 16)} == {d.block for d in descriptors(outcome.kernel) if d.buffer == "in1"}, outcome


def test_parts_of_a_sum() -> None:
    """Whose blocks end where the next part begins, the last one where the sum does."""
    inputs = [torch.randn(shape) for shape in ((20, 104), (24, 104))]
    (region,) = regions_with_products(F.linear, inputs)
    outcome = check_region(region, chips=(), inputs=inputs, config=replace(SMALL, splits=3), machine=H100)
    assert outcome.ok and named(outcome.kernel) == {"in0", "in1"}, outcome


def test_a_norm_before_leaves_the_weights() -> None:
    inputs = [torch.randn(shape) for shape in ((20, 24), (24,), (40, 24), (32, 24))]
    graph = trace(
        lambda x, s, w, v: (F.linear(n := F.rms_norm(x, (24,), s), w), F.linear(n, v)), inputs, symbolic=False
    )
    (region,) = kernel_regions(graph, Config(small_m=32))
    outcome = check_region(region, chips=(), inputs=inputs, config=SMALL, machine=H100)
    assert outcome.ok and named(outcome.kernel) == {"in2", "in3"}, outcome


def test_infinities_and_nan_reach_what_they_reach() -> None:
    """Lanes beyond the end are 0 on either side: what they meet there is stored nowhere."""
    x, w = torch.randn(20, 24), torch.randn(40, 24)
    x[0, 3], x[1, 23], x[19, 0] = torch.inf, torch.nan, torch.inf
    w[7, 23], w[39, 5] = -torch.inf, torch.nan
    (region,) = regions_with_products(F.linear, (x, w))
    outcome = check_region(region, chips=(), inputs=[x, w], config=SMALL, machine=H100)
    assert outcome.ok and named(outcome.kernel) == {"in0", "in1"}, outcome


def unknown_rows() -> Node:
    graph, (batch, length) = Graph(), (symbol("b"), symbol("n"))
    x = graph.add_input(TensorType(BF16, (batch, length, 24), (length * 24, 24, 1)))
    weight = graph.add_input(TensorType(BF16, (48, 24), (24, 1)))
    product = graph.add_node("contraction", (x, weight), {"spec": "abz,cz->abc"}).result
    graph.set_outputs([graph.add_node("sigmoid", (product,)).result])
    (region,) = regions_around_products(graph)
    return region


def test_the_number_of_rows_may_be_unknown() -> None:
    """Each batch has blocks of its own: of three dims, of which a block has one batch."""
    region = unknown_rows()
    for shape in ((2, 5), (1, 140)):
        inputs = [torch.randn(size).to(torch.bfloat16) for size in ((*shape, 24), (48, 24))]
        outcome = check_region(region, chips=(), inputs=inputs, config=SMALL, machine=H100)
        assert outcome.ok and [d.block for d in descriptors(outcome.kernel)] == [(1, 16, 16), (32, 16)], outcome
    assert compile_for(kernel_of(region, KernelConfig(64, 64, 32, stages=3, descriptors=True)), "sm_90").block_copies


def test_places_have_32_bits() -> None:
    """Of rows that are more than these count blocks come by address: known ones when scheduled, others at a launch."""
    many = region_of(lambda x, w: torch.relu(x @ w), ((2**31, 8), (8, 64)))
    assert named(kernel_of(many)) == {"in1"}
    fit = fits(kernel_of(unknown_rows()))
    memory = [torch.zeros(64) for _ in range(3)]
    assert fit(memory, (4, 2**31 - 1)) and not fit(memory, (4, 2**31)) and not fit(memory, (2**31, 4))


@pytest.mark.parametrize(
    ("function", "shapes", "config", "expected"),
    [
        (F.linear, ((40, 64), (600, 64)), SMALL, {"in0", "in1"}),
        (F.linear, ((40, 64), (600, 64)), replace(SMALL, descriptors=False), set()),
        (
            F.linear,
            ((40, 64), (600, 64)),
            KernelConfig(16, 512, 16, descriptors=True),
            {"in0"},
        ),  # blocks of 512 columns
        (F.linear, ((40, 20), (24, 20)), SMALL, set()),  # 40 bytes from row to row
        (lambda x, w: torch.relu(F.linear(x, w[:, 4:44])), ((40, 40), (24, 56)), SMALL, {"in0"}),  # 8 bytes ahead
        (from_heads, ((1, 2, 20, 24), (40, 48), (1, 20, 40)), SMALL, {"in1"}),  # blocks of 16 across heads of 24
        (from_heads, ((1, 2, 20, 8), (40, 16), (1, 20, 40)), SMALL, {"in1"}),  # heads apart in a block of the sum
    ],
)
def test_what_may_come_so(function: Callable[..., Any], shapes: Any, config: KernelConfig, expected: set[str]) -> None:
    assert named(kernel_of(region_of(function, shapes), config)) == expected


def test_chips_without_them_are_not_offered_any_and_refuse_them() -> None:
    region, exact = region_of(*LARGE["plain"][0]), region_of(*LARGE["plain"][0], torch.float32)
    for code, machine in BY_CHIP.items():
        offered = [config for config in configs(plan_of(region), machine) if config.descriptors]
        assert bool(offered) == (code in ("sm_90", "sm_100")), code
        assert not configs(plan_of(region), machine)[0].descriptors
        assert not any(config.descriptors for config in configs(plan_of(exact), machine))
        if not offered:
            with pytest.raises(ScheduleError, match=machine.name):
                TritonTarget().schedule(plan_of(region), "kernel", machine, SMALL)


@pytest.mark.parametrize(
    ("name", "code", "unit"),
    [("gated", "sm_90", "wgmma"), ("by input", "sm_90", "wgmma"), ("rotary", "sm_100", "tcgen05")],
)
def test_blocks_go_from_memory_to_the_matrix_unit(name: str, code: str, unit: str) -> None:
    """All that is copied ahead is copied by the block, and nothing spills."""
    (function, shapes), dtype = LARGE[name]
    region, machine = region_of(function, shapes, dtype), BY_CHIP[code]
    config = next(config for config in configs(plan_of(region), machine) if config.descriptors)
    kernel = TritonTarget().schedule(plan_of(region), "kernel", machine, config)
    assert " stages, descriptors\n" in print_kernel(kernel)
    report = compile_for(kernel, code)
    assert report.ok and all(unit in instruction for instruction in report.matrix_instructions), report
    assert report.block_copies == report.asynchronous_copies > 2, report


def test_they_are_candidates_and_what_was_chosen_is_read_back(tmp_path: Path) -> None:
    region = region_of(F.linear, ((40, 64), (72, 64)))
    nothing: Any = SimpleNamespace
    tuner = Tuner("a GPU", chip("h200"), Cache(tmp_path), Remarks(), nothing, UnfusedKernel)
    kernel = TritonTarget().schedule(plan_of(region), "k", chip("h200"))
    found = [config for config, _ in tuner.candidates(region, kernel).values() if config and config.descriptors]
    assert found and found[0] == replace(kernel.config, descriptors=True)
    tuner.cache.publish(tuner.key(kernel), ".config", json.dumps({"chosen": asdict(found[0])}).encode())
    chosen, built = tuner.select_kernel(region, kernel, TritonKernel(kernel))
    assert chosen.config == found[0] and "in0_desc.load(" in built.source


def on_gpu(*shape: int, skipped: int = 0) -> Tensor:
    memory = torch.zeros(skipped + torch.Size(shape).numel(), dtype=torch.bfloat16)
    return memory[skipped:].view(shape).as_subclass(OnGpu)


class Told(Driver):
    """A stand-in for the driver that is also asked for descriptors, as Triton asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.utils.fill_tma_descriptor_tiled = self.utils.fill_tma_descriptor = lambda *told: told  # since 3.7; before
        self.described: list[list[Any]] = []
        """For each launch: address, block, shape and strides of every descriptor."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            found = [x for x in given if isinstance(x, TensorDescriptor)]
            told = [_told(x, m)[0] for x, m in zip(found, metadata.tensordesc_meta, strict=True)]
            self.described.append([(address, *rest[3:6]) for address, *rest in told])
            self.launched.append(given)

        return launch


def _told(found: TensorDescriptor, meta: Any) -> Any:
    """As Triton tells a launch of one; since 3.8 it is asked with one argument more, which it does not look at."""
    unseen = [None] * (len(signature(nvidia.make_tensordesc_arg).parameters) - 2)
    return nvidia.make_tensordesc_arg(found, meta, *unseen)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    yield from standing_in(Told(), monkeypatch)


def test_a_launch_tells_of_memory_where_it_lies_then(told: Told) -> None:
    """The first through Triton, the others straight; and of what begins within a buffer."""
    kernel = TritonKernel(kernel_of(region_of(of_a_part, ((20, 40), (43, 56)))))
    kept = []
    for _ in range(3):
        x, w, out = on_gpu(20, 40), on_gpu(43, 56), on_gpu(20, 40)
        kept.append((x, w, out))  # or the next ones would lie there again
        kernel([x, w, out])
        left = (x.data_ptr(), [16, 16], [20, 40], [40, 1])
        assert told.described[-1] == [left, (w.data_ptr() + 2 * (3 * 56 + 8), [32, 16], [40, 40], [56, 1])]
    assert len(told.described) == 3


def test_memory_that_is_not_aligned_is_loaded_by_address(told: Told) -> None:
    """Before a launch it is asked where memory lies; bases of views need not be multiples of 16 bytes."""
    kernel, lasting = TritonKernel(kernel_of(region_of(F.linear, ((40, 40), (24, 40))))), on_gpu(40, 24)
    for x, w, expected in ((0, 0, 2), (2, 0, 0), (8, 16, 2), (0, 4, 0), (0, 0, 2)):
        kernel.prepare([on_gpu(40, 40, skipped=x), on_gpu(24, 40, skipped=w), lasting])
        kernel([on_gpu(40, 40, skipped=x), on_gpu(24, 40, skipped=w), lasting])
        assert len(told.described[-1]) == expected


@pytest.mark.parametrize("skipped", [0, 1, 4])
def test_it_is_right_wherever_memory_lies(skipped: int) -> None:
    inputs = [torch.randn(skipped + n)[skipped:] for n in (20 * 24, 40 * 24)]
    x, w = inputs[0].view(20, 24), inputs[1].view(40, 24)
    out = torch.full((20, 40), torch.nan)
    TritonKernel(kernel_of(region_of(F.linear, ((20, 24), (40, 24)), torch.float32)))([x, w, out])
    torch.testing.assert_close(out, F.linear(x, w))


def test_a_program_that_loads_by_descriptors_has_four_warps() -> None:
    region = region_of(F.linear, ((40, 64), (72, 64)))
    assert [options(kernel_of(region, replace(SMALL, descriptors=d)))["num_warps"] for d in (False, True)] == [2, 4]
