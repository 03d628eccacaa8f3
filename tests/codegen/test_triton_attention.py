"""Attention as Triton kernels: every spelling and every edge right in the interpreter, hidden blocks left out."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import Machine
from fusec.analysis.machine import chip as machine
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Assign, Kernel, Loop, walk
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.schedules import heuristics as choosing
from fusec.codegen.triton.signature import num_warps
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Node
from fusec.loops.attention import FEW_QUERIES, Attention
from tests.codegen.test_attention import (
    BOUNDED,
    SPELLINGS,
    by_hand,
    call,
    call_causal,
    call_masked,
    check_masked_rows_infinities_and_nan,
    check_that_lengths_share_a_kernel,
    check_that_nothing_is_seen,
    filled,
    linear_bias,
    one_more,
    only_sinks,
    passes,
    sample,
    sinks_first,
    soft_capped,
    triangle,
    window,
    with_large_sinks,
    with_sinks,
)
from tests.codegen.test_attention_caches import check_that_a_position_ends_the_loop, up_to, window_up_to
from tests.codegen.triton_regions import every_chip, regions_of
from tests.combinations import named, rotating
from tests.contexts import plan_of

Spelling = Callable[..., Tensor]


def region_of(spelling: Spelling, inputs: tuple[Tensor, ...]) -> Node:
    (region,) = regions_of(spelling, inputs)
    return region


def kernel_of(spelling: Spelling, inputs: tuple[Tensor, ...], chip: str = "sm_80") -> Kernel:
    return TritonTarget().schedule(plan_of(region_of(spelling, inputs)), "attention", machine(chip))


def on_triton(spelling: Spelling, inputs: tuple[Tensor, ...]) -> Compiled:
    return compile_graph(trace(spelling, inputs, symbolic=False), Config(target="triton", strict=True))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling(spelling: Spelling) -> None:
    """Many queries in half precision, few in single; both with blocks that are not full."""
    for lengths, dtype in (((70, 40), torch.bfloat16), ((3, 70), torch.float32)):
        outcome = check_region(region_of(spelling, sample(*lengths, dtype)), chips=())
        assert outcome.kernel.kind == "attention"
        assert outcome.ok, outcome


@pytest.mark.parametrize("lengths", [(1, 2), (1, 70), (16, 7), (17, 33), (32, 32)], ids=str)
def test_every_length(lengths: tuple[int, int]) -> None:
    for spelling in (by_hand, call_causal):
        outcome = check_region(region_of(spelling, sample(*lengths)), chips=())
        assert outcome.ok, outcome


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_may_be_larger_than_their_type_holds(dtype: torch.dtype, queries: int) -> None:
    q, k, v, mask = sample(queries, 70, dtype)
    q[:], k[:], k[..., ::2] = 300.0, 300.0, -300.0
    outcome = check_region(region_of(by_hand, (q, k, v, mask)), chips=(), inputs=[q, k, mask, v])
    assert outcome.ok, outcome


@pytest.mark.parametrize(("queries", "width"), [(1, 20), (5, 20), (40, 200)])
def test_heads_that_share_keys_and_odd_widths(queries: int, width: int) -> None:
    """Few queries of all heads that share a key are one tile."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, queries, width), torch.randn(2, 2, 50, width), torch.randn(2, 2, 50, 24)

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, 50, -1) for x in (k, v))
        return torch.softmax(q @ k.transpose(-1, -2) * 0.2, -1) @ v

    region = region_of(shared, (q, k, v))
    outcome = check_region(region, chips=())
    assert outcome.ok, outcome
    assert _programs(outcome.kernel) == (4 if queries * 3 <= 16 else 12 * (2 if width <= 128 else 3))


def _programs(kernel: Kernel) -> int:
    return math.prod(int(loop.stop) for loop in walk(kernel.body) if isinstance(loop, Loop) and loop.kind == "grid")


@pytest.mark.parametrize("spelling", [triangle, only_sinks], ids=lambda f: f.__name__)
def test_lengths_that_change_share_a_kernel(spelling: Spelling) -> None:
    check_that_lengths_share_a_kernel(spelling, ((40, 50), (7, 70), (64, 64)), "triton")


@pytest.mark.parametrize(
    ("spelling", "lengths"),
    rotating((by_hand, call, triangle, with_sinks, one_more), ((40, 40), (5, 100))),
    ids=named,
)
def test_masked_rows_infinities_and_nan(spelling: Spelling, lengths: tuple[int, int]) -> None:
    check_masked_rows_infinities_and_nan(on_triton, spelling, *lengths)


@pytest.mark.parametrize(
    ("spelling", "lengths"), rotating((with_sinks, sinks_first, one_more), ((40, 40), (5, 100))), ids=named
)
def test_sinks_above_and_far_below_all_scores(spelling: Spelling, lengths: tuple[int, int]) -> None:
    inputs = with_large_sinks(*lengths)
    assert passes(spelling, on_triton(spelling, inputs), inputs)


@BOUNDED
def test_blocks_of_keys_that_no_query_sees_are_left_out(spelling: Spelling, start: bool, stop: bool) -> None:
    kernel = kernel_of(spelling, sample(300, 300))
    (loop,) = [s for s in walk(kernel.body) if isinstance(s, Loop) and any(isinstance(t, Assign) for t in s.body)]
    assert bool(sympy.sympify(loop.start).free_symbols) == start
    assert bool(sympy.sympify(loop.stop).free_symbols) == stop


@pytest.mark.parametrize("spelling", [by_hand, filled, call_masked], ids=lambda f: f.__name__)
def test_blocks_that_a_loaded_mask_hides_are_not_read(spelling: Spelling) -> None:
    """As with what lies in a static cache behind the present place; one mask for all queries, or one for each."""
    for each in (False, True):
        q, k, v, mask = sample(3, 100)
        mask = mask if each else mask[:, :, :1].clone()
        mask[..., 70:] = mask[1, ..., 32:64] = -math.inf
        want = spelling(q, k, v, mask)
        k[:, :, 96:] = v[:, :, 96:] = math.nan
        k[1, :, 32:64] = math.nan
        (got,) = on_triton(spelling, (q, k, v, mask)).program([q, k, v, mask])
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


POSITIONS = [
    (1, False, torch.float32),
    (3, True, torch.bfloat16),
    (40, True, torch.float32),
    (40, False, torch.bfloat16),
]


@pytest.mark.parametrize(("setting", "spelling"), rotating(POSITIONS, (up_to, window_up_to)), ids=named)
def test_the_loop_over_keys_ends_at_a_position_that_is_loaded(
    spelling: Spelling, setting: tuple[int, bool, torch.dtype]
) -> None:
    queries, each, dtype = setting
    check_that_a_position_ends_the_loop(spelling, dtype, queries, each, 150, {"target": "triton"}, 32)


@every_chip
@pytest.mark.parametrize("queries", [1, 512])
def test_a_loop_that_ends_at_a_position_compiles(queries: int, chip: str) -> None:
    q, k = torch.empty(1, 2, queries, 64).bfloat16(), torch.empty(1, 2, 512, 64).bfloat16()
    report = compile_for(kernel_of(window_up_to, (q, k, k, torch.arange(queries))), chip)
    assert report.ok, report


@pytest.mark.parametrize("queries", [3, 40])
def test_nothing_is_seen_at_all(queries: int) -> None:
    check_that_nothing_is_seen(on_triton, queries, 70)


def in_parts(region: Node, parts: int, chip: str = "h100") -> KernelConfig:
    (default, *_) = configs(plan_of(region), machine(chip))
    return replace(default, splits=parts)


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, the keys of few queries are dealt out to three programs."""
    default = choosing._attention

    def parted(attention: Attention, machine: Machine) -> KernelConfig:
        return replace(default(attention, machine), splits=3 if attention.rows <= FEW_QUERIES else 1)

    monkeypatch.setattr(choosing, "_attention", parted)


@pytest.mark.parametrize(("spelling", "split"), rotating(SPELLINGS, ((3, 150, 3), (1, 70, 8))), ids=named)
def test_every_spelling_in_parts(spelling: Spelling, split: tuple[int, int, int]) -> None:
    """More blocks than parts, and parts without a key; queries of several heads that share keys among them."""
    queries, keys, parts = split
    region = region_of(spelling, sample(queries, keys))
    outcome = check_region(region, chips=(), config=in_parts(region, parts))
    assert outcome.ok and len(grids(outcome.kernel)) == 2, outcome


@pytest.mark.parametrize("spelling", [by_hand, with_sinks, call_causal], ids=lambda f: f.__name__)
def test_what_many_parts_found_is_brought_together_column_by_column(spelling: Spelling) -> None:
    region = region_of(spelling, sample(8, 130))
    outcome = check_region(region, chips=(), config=in_parts(region, 32))
    _, together = grids(outcome.kernel)
    assert outcome.ok and "column_block" in {loop.axis for loop in walk(together.body) if isinstance(loop, Loop)}


@pytest.mark.usefixtures("three_parts")
@pytest.mark.parametrize("spelling", [by_hand, call, with_sinks, one_more], ids=lambda f: f.__name__)
def test_masked_rows_infinities_and_nan_in_parts(spelling: Spelling) -> None:
    check_masked_rows_infinities_and_nan(on_triton, spelling, 5, 100)
    check_that_nothing_is_seen(on_triton, 3, 70)


@pytest.mark.usefixtures("three_parts")
@pytest.mark.parametrize("spelling", [up_to, window_up_to], ids=lambda f: f.__name__)
def test_what_is_seen_is_dealt_out_where_a_position_says_what(spelling: Spelling) -> None:
    check_that_a_position_ends_the_loop(spelling, torch.float32, 3, False, 150, {"target": "triton"}, 32)


@pytest.mark.usefixtures("three_parts")
def test_lengths_that_change_share_a_kernel_in_parts() -> None:
    check_that_lengths_share_a_kernel(triangle, ((3, 50), (7, 70), (2, 64)), "triton")


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_parts_come_of_heads_too_few_for_a_chip() -> None:
    """As a Llama of 8 billion parameters decodes; each program has to have some keys at once."""

    def parts(batch: int, keys: int) -> int:
        q, k = torch.empty(batch, 32, 1, 128).bfloat16(), torch.empty(batch, 8, keys, 128).bfloat16()
        return kernel_of(grouped, (q, k, k), "h100").config.splits

    assert parts(1, 4096) > parts(8, 4096) > parts(64, 4096) == 1 == parts(1, 128)


@every_chip
@pytest.mark.parametrize(("heads", "shared", "width"), [(8, 1, 128), (8, 4, 128), (4, 2, 256)], ids=str)
def test_parts_compile(heads: int, shared: int, width: int, chip: str) -> None:
    """Compilers load what all parts found at once, as far as they see where it is."""
    q, k = torch.empty(1, heads * shared, 1, width).bfloat16(), torch.empty(1, heads, 4096, width).bfloat16()
    spelling, positions = (grouped, ()) if shared > 1 else (window_up_to, (torch.arange(1),))
    kernel = kernel_of(spelling, (q, k, k, *positions), chip)
    report = compile_for(kernel, chip)
    assert kernel.config.splits > 1 and report.ok, report


def test_a_program_runs_it() -> None:
    inputs = sample(20, 30)
    result = on_triton(by_hand, inputs)
    assert [step.name for step in result.program.steps] == ["attention"]
    assert passes(by_hand, result, inputs)


@every_chip
@pytest.mark.parametrize("spelling", [linear_bias, window, with_sinks], ids=lambda f: f.__name__)
def test_what_is_done_to_scores_compiles(spelling: Spelling, chip: str) -> None:
    """For many queries and for few."""
    for queries in (512, 4):
        q, k = torch.empty(1, 2, queries, 128), torch.empty(1, 2, 512, 128)
        inputs = tuple(x.bfloat16() for x in (q, k, k, torch.empty(1, 1, queries, 512)))
        report = compile_for(kernel_of(spelling, inputs, chip), chip)
        assert report.ok and report.matrix_instructions, report


@every_chip
@pytest.mark.parametrize("width", [128, 256])
def test_large_ones_compile_to_what_a_chip_should_run(width: int, chip: str) -> None:
    """The dearest scores there are, for many queries and for few."""
    for queries in (512, 4):
        q, k = torch.empty(1, 2, queries, width), torch.empty(1, 2, 512, width)
        inputs = tuple(x.bfloat16() for x in (q, k, k, torch.empty(1, 1, queries, 512)))
        report = compile_for(kernel_of(soft_capped, inputs, chip), chip)
        assert report.ok and report.matrix_instructions, report


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_keys_and_values_are_on_their_way_before_they_are_needed(chip: str) -> None:
    """Tiles of both are copied as they lie: what is turned before it is multiplied has to pass through registers."""
    q, k = (torch.empty(1, 2, 512, 128).bfloat16() for _ in range(2))
    kernel = kernel_of(call_causal, (q, k, k, torch.empty(512, 512)), chip)
    assert "tl.trans" not in print_kernel(kernel)
    report = compile_for(kernel, chip)
    tile = 32 * 128 * 2 // 16 // (32 * num_warps(kernel))  # copies of 16 bytes that each thread makes of one tile
    assert report.asynchronous_copies >= 2 * tile * 2, report  # of both, in the loop and ahead of it


@pytest.mark.parametrize(("chip", "width"), [("sm_120", 128), ("sm_89", 512), ("gfx942", 512)])
def test_those_of_float32_fit_into_shared_memory_and_registers(chip: str, width: int) -> None:
    """Wide heads leave no room for blocks of keys that are on their way while one is multiplied."""
    q, k = torch.empty(1, 2, 300, width), torch.empty(1, 2, 300, width)
    report = compile_for(kernel_of(grouped, (q, k, k), chip), chip)
    assert report.ok, report


@pytest.mark.parametrize("queries", [4, 512])
def test_no_candidate_has_blocks_too_small_for_a_matrix_unit(queries: int) -> None:
    q, k = torch.empty(1, 2, queries, 256).bfloat16(), torch.empty(1, 2, 512, 256).bfloat16()
    found = configs(plan_of(region_of(grouped, (q, k, k))), machine("h100"))
    assert len(found) > 3 and all(min(config.rows, config.depth) >= 16 for config in found)
