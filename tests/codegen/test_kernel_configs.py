"""What a schedule leaves free: chosen by the chip, the same every time, and handed through to Triton's compiler."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import CHIPS, Machine, chip, known_chip
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.signature import launches, options
from fusec.config import Config
from fusec.ir.graph import Node
from tests.codegen.triton_regions import regions_of, regions_with_products
from tests.contexts import plan_of


def product(rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, depth), (columns, depth))]
    (region,) = regions_with_products(F.linear, inputs)
    return region


def attended(queries: int) -> Node:
    q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="meta") for n in (queries, 128))
    (region,) = regions_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (q, k, k))
    return region


def normed() -> Node:
    x, scale = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 4096), (4096,)))
    (region,) = regions_of(lambda x, scale: F.rms_norm(x, (4096,), scale), (x, scale))
    return region


def expert(ids: Tensor, matrices: Tensor, x: Tensor) -> Tensor:
    gate, up = torch.bmm(matrices[ids], x[..., None])[..., 0].chunk(2, -1)
    return F.silu(gate) * up


def experts(rows: int) -> Node:
    ids = torch.empty(rows, dtype=torch.int64, device="meta")
    shapes = (8, 2048, 1024), (rows, 1024)
    (region,) = regions_of(expert, [ids, *(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)])
    return region


REGIONS = {
    "one row": product(1, 4096, 14336),
    "few rows": product(8, 4096, 4096),
    "many rows": product(4096, 4096, 4096),
    "attention": attended(512),
    "decoding": attended(1),
    "norm": normed(),
    "experts of few rows": experts(8),
    "experts": experts(4096),
}


@pytest.mark.parametrize("name", REGIONS)
def test_the_default_is_the_first_choice_and_the_same_every_time(name: str) -> None:
    for machine in CHIPS.values():
        first, *others = configs(plan_of(REGIONS[name]), machine)
        kernel = TritonTarget().schedule(plan_of(REGIONS[name]), "k", machine)
        assert kernel.config == first == configs(plan_of(REGIONS[name]), machine)[0]
        assert others and first not in others and len({*others}) == len(others) <= 10


@pytest.mark.parametrize("name", REGIONS)
def test_every_choice_is_scheduled_as_it_says(name: str) -> None:
    for config in configs(plan_of(REGIONS[name]), chip("h200")):
        kernel = TritonTarget().schedule(plan_of(REGIONS[name]), "k", chip("h200"), config)
        assert kernel.config == config
        given = options(kernel)
        assert given["num_warps"] == config.warps or not config.warps
        assert given.get("num_stages", 0) == config.stages
        assert given.get("maxnreg", 0) == config.registers


def test_no_register_of_few_rows_is_given_away_for_another_program() -> None:
    """Left alone, the assembler spills one here; AMD's has no such option, and Triton refuses what it does not know."""
    region = product(8, 768, 3072)
    report = compile_for(TritonTarget().schedule(plan_of(region), "k", chip("b200")), "sm_100")
    assert report.ok, report
    assert "maxnreg" not in options(TritonTarget().schedule(plan_of(region), "k", chip("mi300x")))


@pytest.mark.parametrize(
    ("hip", "capability", "code"),
    [(None, (8, 6), "sm_80"), (None, (8, 9), "sm_89"), (None, (9, 0), "sm_90"), (None, (12, 1), "sm_120"),
     (None, (13, 0), "sm_80"), ("6.4", (9, 4), "gfx942")],
)  # fmt: skip
def test_a_gpu_that_nobody_knows_is_like_one_of_its_generation(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, capability: tuple[int, int], code: str
) -> None:
    machine = told(monkeypatch, "one of next year", hip, capability)
    assert (machine.name, machine.code, machine.threads) == ("one of next year", code, 78)
    assert (machine.cache_bytes, machine.shared_bytes) == (24 << 20, 65_536 if hip else 101_376)


@pytest.mark.parametrize(
    ("name", "hip", "known"),
    [("NVIDIA RTX A1000 Laptop GPU", None, ""), ("NVIDIA A100-SXM4-40GB", None, "a100"),
     ("NVIDIA GeForce RTX 4090 D", None, "rtx4090"), ("NVIDIA H100 PCIe", None, "h100"),
     ("AMD Instinct MI300X VF", "6.4", "mi300x"), ("NVIDIA GH200 480GB", None, "")],
)  # fmt: skip
def test_a_gpu_has_the_processors_and_the_memory_that_its_driver_tells(
    monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None, known: str
) -> None:
    machine, like = told(monkeypatch, name, hip, (8, 6)), CHIPS[known or "a100"]
    assert (known_chip(name) is like) == bool(known) and machine.code == like.code
    assert (machine.threads, machine.shared_bytes) == (78, 65_536 if hip else 101_376)
    assert machine.cache_bytes == (like.cache_bytes if hip else 24 << 20)
    assert machine.peak("matrix", "bf16") == pytest.approx(like.peak("matrix", "bf16") * 78 / like.threads)


def told(monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None, capability: tuple[int, int]) -> Machine:
    """The machine that a driver describes."""
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], L2_cache_size=24 << 20, multi_processor_count=78,
        **({} if hip else {"shared_memory_per_block_optin": 101_376}),
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    return TritonTarget().machine(Config())


@pytest.mark.parametrize("code", ["sm_80", "sm_89", "sm_120"])
def test_blocks_fit_the_shared_memory_that_a_chip_has(code: str) -> None:
    small = replace(chip(code), shared_bytes=101_376)
    for name, region in REGIONS.items():
        report = compile_for(TritonTarget().schedule(plan_of(region), "k", small), code)
        assert report.ok and report.shared <= small.shared_bytes, (name, report)


@pytest.mark.parametrize("code", ["sm_80", "sm_89", "sm_120"])
def test_two_programs_for_few_rows_have_room_beside_each_other(code: str) -> None:
    small = replace(chip(code), shared_bytes=101_376)
    report = compile_for(TritonTarget().schedule(plan_of(product(8, 32_000, 4096)), "k", small), code)
    assert report.ok and 2 * report.shared <= small.shared_bytes, report


def test_a_text_names_what_was_chosen() -> None:
    kernel = TritonTarget().schedule(
        plan_of(REGIONS["many rows"]), "k", config=KernelConfig(64, 128, 32, warps=4, stages=2)
    )
    assert "# 64 rows, 128 columns, 32 deep, 4 warps, 2 stages\n" in print_kernel(kernel)


def programs(region: Node, machine: Machine) -> int:
    first, *_ = grids(TritonTarget().schedule(plan_of(region), "k", machine))
    return int(launches(first))


def test_a_larger_chip_gets_more_programs() -> None:
    """Where there are rows and columns enough, every processor has a block."""
    for name in ("one row", "many rows"):
        for machine in CHIPS.values():
            assert programs(REGIONS[name], machine) >= machine.threads
    small = [programs(product(128, 2048, 512), chip(c)) for c in ("a100", "mi300x")]
    assert small[0] < small[1]


def test_a_block_is_as_wide_as_a_chip_has_registers_for() -> None:
    found = {code: configs(plan_of(REGIONS["many rows"]), chip(code))[0] for code in ("sm_80", "sm_90", "sm_100")}
    assert [config.columns for config in found.values()] == [128, 256, 256]
    assert configs(plan_of(product(4096, 4096, 4096, torch.float32)), chip("sm_90"))[0].columns == 64


def test_stages_reach_the_machine_code() -> None:
    """More blocks on their way take more shared memory."""
    shared = []
    for stages in (2, 3, 4):
        config = KernelConfig(64, 64, 32, warps=4, stages=stages)
        kernel = TritonTarget().schedule(plan_of(REGIONS["many rows"]), "k", chip("h100"), config)
        shared.append(compile_for(kernel, "sm_90").shared)
    assert shared[0] < shared[1] < shared[2]


def test_one_row_may_load_ahead_too() -> None:
    """Where there is no matrix unit to do it for, Triton is told."""
    default, *others = configs(plan_of(REGIONS["one row"]), chip("h100"))
    ahead = next(config for config in others if config.stages)
    for config, expected in ((default, False), (ahead, True)):
        kernel = TritonTarget().schedule(plan_of(REGIONS["one row"]), "k", chip("h100"), config)
        report = compile_for(kernel, "sm_90")
        assert report.ok and (report.asynchronous_copies > 0) == expected, report


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_every_choice_is_right(rows: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((rows, 70), (50, 70), (50, 70))]
    (region,) = regions_with_products(gated, inputs)
    for config in configs(plan_of(region), chip("h200")):
        outcome = check_region(region, chips=(), inputs=inputs, config=config)
        assert outcome.ok and outcome.kernel.config == config, outcome


@pytest.mark.parametrize("rows", [3, 70])
def test_every_choice_for_experts_is_right(rows: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randint(4, (rows,)), torch.randn(4, 100, 70), torch.randn(rows, 70)]
    (region,) = regions_of(expert, inputs)
    found = configs(plan_of(region), chip("h200"))
    assert len({(c.rows, c.columns, c.depth) for c in found}) > 3
    for config in found:
        outcome = check_region(region, chips=(), inputs=inputs, config=config)
        assert outcome.ok and outcome.kernel.config == config, outcome
