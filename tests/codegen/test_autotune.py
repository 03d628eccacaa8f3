"""Choosing by timing, with a clock that the tests hold: what is quickest and right wins, is recorded and read back."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import chip
from fusec.cache import Cache
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.autotune import trials
from fusec.codegen.triton.autotune import tuner as tuning
from fusec.codegen.triton.autotune.trials import copied, rotating
from fusec.codegen.triton.autotune.tuner import TunedKernel, Tuner
from fusec.codegen.triton.autotune.vendor_candidate import VendorCandidate
from fusec.codegen.triton.kernel import TritonKernel
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.signature import num_warps
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.errors import BuildError
from fusec.frontend import trace
from fusec.ir.graph import Node
from fusec.pipeline import Context
from fusec.remarks import Remarks
from tests.codegen.test_vendor_candidate import context
from tests.codegen.triton_regions import regions_of
from tests.contexts import plan_of

H200 = chip("h200")
SHAPES = ((1, 70), (50, 70), (50,))


def layer(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, bias))


def inputs(shapes: Any = SHAPES) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


def region_of(shapes: Any = SHAPES) -> Node:
    (region,) = regions_of(layer, inputs(shapes))
    return region


class Clock:
    """Seconds that pass only where a kernel says so."""

    def __init__(self) -> None:
        self.now, self.timed, self.is_running = 0.0, 0, False

    def timer(self) -> Any:
        def timed(run: Any) -> float:
            self.timed += 1
            begun, self.is_running = self.now, True
            try:
                run()
            finally:
                self.is_running = False
            return self.now - begun

        return timed


class Bench:
    """Kernels of which each config takes as long, and goes as wrong, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.clock, self.remarks, self.folder = Clock(), Remarks(), folder
        self.seconds: dict[KernelConfig | None, float] = {}
        self.wrong: set[KernelConfig] = set()
        self.crashing: set[KernelConfig] = set()
        self.refused: set[KernelConfig] = set()
        self.too_large: set[KernelConfig] = set()
        self.ran: list[KernelConfig | None] = []
        self.timed: list[TritonKernel] = []
        bench = self

        class Simulated(TritonKernel):
            def __init__(self, kernel: Any, dependent: bool = False) -> None:
                if kernel.config in bench.refused:
                    raise BuildError("refused")
                super().__init__(kernel, dependent)

            def __call__(self, buffers: Any, symbols: Any = ()) -> None:
                if self.kernel.config in bench.too_large:
                    raise BuildError("out of shared memory")
                if self.kernel.config in bench.crashing:
                    raise RuntimeError("out of shared memory")
                if not (bench.clock.is_running and self in bench.timed):  # what is timed again takes as long as is said
                    super().__call__(buffers, symbols)
                bench.timed += [self] if bench.clock.is_running else []
                bench.ran.append(self.kernel.config)
                bench.clock.now += bench.seconds.get(self.kernel.config, 1.0)
                if self.kernel.config in bench.wrong:
                    buffers[-1].mul_(1.01)

        class Library(VendorCandidate):
            def __call__(self, buffers: Any, symbols: Any = ()) -> None:
                super().__call__(buffers, symbols)
                bench.ran.append(None)
                bench.clock.now += bench.seconds.get(None, 1.0)

        monkeypatch.setattr(tuning, "TritonKernel", Simulated)
        self.kernel, self.library = Simulated, Library

    def tuner(self, **changes: Any) -> Tuner:
        library = partial(self.library, target=TritonTarget(), context=context())
        tuner = Tuner("a GPU", H200, Cache(self.folder), self.remarks, self.clock.timer, library)
        return replace(tuner, **changes)

    def select_kernel(self, region: Node, **changes: Any) -> Any:
        kernel = TritonTarget().schedule(plan_of(region), "layer", H200)
        return self.tuner(**changes).select_kernel(region, kernel, self.kernel(kernel))

    def runs(self, region: Node, given: list[Tensor] | None = None, **changes: Any) -> KernelConfig | None:
        """Run a region as tuned, hold the result against eager, and say as what it ran in the end."""
        given = given or inputs()
        out = torch.full((*given[0].shape[:-1], given[1].shape[0]), torch.nan)
        _, launchable = self.select_kernel(region, **changes)
        launchable([*given, out], ())
        torch.testing.assert_close(out, layer(*given))
        return self.ran[-1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


DEFAULT, *OTHERS = configs(plan_of(region_of()), H200)


def test_the_quickest_wins(bench: Bench) -> None:
    bench.seconds = {OTHERS[2]: 0.5, OTHERS[1]: 0.7}
    assert bench.runs(region_of()) == OTHERS[2]
    (remark,) = bench.remarks.of("analysis")
    assert str(OTHERS[2]) in remark.message and remark.figures[str(OTHERS[1])] == 0.7e6
    assert not bench.remarks.of("failure")


def test_the_default_wins_where_nothing_is_quicker(bench: Bench) -> None:
    assert bench.runs(region_of()) == DEFAULT


def test_the_library_may_win(bench: Bench) -> None:
    bench.seconds = {None: 0.1}
    assert bench.runs(region_of()) is None
    assert bench.runs(region_of()) is None and bench.clock.timed == len(bench.remarks[0].figures) * 7


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_of(function: Any, given: list[Tensor]) -> Node:
    (region,) = regions_of(function, given)
    return region


def test_the_library_s_attention_may_win(bench: Bench) -> None:
    """It is one call, chosen once, and recorded."""
    torch.manual_seed(0)
    given = [torch.randn(1, 1, 5, 8) for _ in range(3)]
    region = attention_of(causal, given)
    bench.seconds = {None: 0.1}
    for recorded in (False, True):
        _, launchable = bench.select_kernel(region)
        assert isinstance(launchable, TunedKernel) != recorded
        out = torch.full((1, 1, 5, 8), torch.nan)
        launchable([*given, out], ())
        torch.testing.assert_close(out, causal(*given))
        assert bench.ran[-1] is None
    assert not bench.remarks.of("failure", "missed")


def test_the_library_s_attention_is_not_tried_where_a_mask_is_data(bench: Bench) -> None:
    """What it gives for a row that sees nothing depends on the kernel that it takes."""
    given = [*(torch.randn(1, 1, 5, 8) for _ in range(3)), torch.randn(5, 5)]
    bench.seconds = {None: 0.1}
    region = attention_of(masked, given)
    operands = {v.name: x for v, x in zip(trace(masked, given, symbolic=False).inputs, given, strict=True)}
    _, launchable = bench.select_kernel(region)
    out = torch.full((1, 1, 5, 8), torch.nan)
    launchable([*(operands[v.name] for v in region.body.inputs), out], ())
    torch.testing.assert_close(out, masked(*given))
    assert bench.ran and None not in bench.ran
    (remark,) = bench.remarks.of("missed")
    assert "no candidate" in remark.message and "inputs" in remark.reason


def test_candidates_differ_in_what_a_compiler_sees(bench: Bench) -> None:
    """As many warps as a compiler would take by itself are no other candidate."""
    region = region_of(((1, 300), (50, 300), (50,)))
    kernel = TritonTarget().schedule(plan_of(region), "layer", H200)
    warps = [config.warps for config, _ in bench.tuner().candidates(region, kernel).values() if config is not None]
    assert num_warps(kernel) == 8 in {config.warps for config in configs(plan_of(region), H200)}
    assert 4 in warps and 8 not in warps


def test_the_library_serves_a_region_of_another_shape(bench: Bench) -> None:
    """Regions with and without a dim of length 1 have one kernel."""
    bench.seconds = {None: 0.1}
    _, launchable = bench.select_kernel(region_of())
    x, w, bias = inputs()
    for given in (x, x[0]):
        out = torch.full((*given.shape[:-1], 50), torch.nan)
        launchable([given, w, bias, out], ())
        torch.testing.assert_close(out, layer(given, w, bias))
    assert bench.ran[-1] is None


FAULTS = {"wrong": "results are wrong", "crashing": "shared memory", "too_large": "shared memory", "refused": "refused"}
"""And what is told of each."""


@pytest.mark.parametrize(
    ("fault", "faulty"), [*((fault, OTHERS[0]) for fault in FAULTS), *((f, DEFAULT) for f in FAULTS if f != "refused")]
)
def test_what_is_not_right_never_wins(bench: Bench, fault: str, faulty: KernelConfig) -> None:
    """The default neither; one that is refused is never there to be select_kernel."""
    bench.seconds = {faulty: 0.1, OTHERS[1]: 0.5}
    getattr(bench, fault).add(faulty)
    assert bench.runs(region_of()) == OTHERS[1]
    (remark,) = bench.remarks.of("failure")
    assert str(faulty) in remark.message and FAULTS[fault] in remark.reason
    assert str(faulty) not in bench.remarks.of("analysis")[0].figures


class OnGpu(Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.mark.parametrize("fault", ["too_large", "wrong"])
def test_where_no_choice_is_right_that_is_told(bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls it falls back then, and no config is recorded."""
    region = next(r for r in regions_of(lambda x: x.softmax(-1), [torch.randn(6, 40)]))
    getattr(bench, fault).update(configs(plan_of(region), H200))
    _, launchable = bench.select_kernel(region)
    ran = []
    for capturing in (False, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda recorded=capturing: recorded)
        with pytest.raises(BuildError, match=FAULTS[fault]):
            launchable([torch.randn(6, 40).as_subclass(OnGpu), torch.empty(6, 40)], ())
        ran.append(len(bench.ran))
    assert len(set(ran)) == 1  # nothing is tried twice, and what is wrong is not recorded in a CUDA graph
    assert not bench.clock.timed and not list(bench.folder.glob("*.config"))


def test_a_median_counts(bench: Bench) -> None:
    """One measurement that something else disturbs decides nothing."""
    bench.seconds = {OTHERS[0]: 0.5}
    disturbed = bench.clock.timer()

    def timer() -> Any:
        def timed(run: Any) -> float:
            seconds = disturbed(run)
            return seconds + (100.0 if bench.ran[-1] == OTHERS[0] and bench.ran.count(OTHERS[0]) == 2 else 0.0)

        return timed

    assert bench.runs(region_of(), timer=timer) == OTHERS[0]


def test_what_was_chosen_is_read_back(bench: Bench) -> None:
    bench.seconds = {OTHERS[2]: 0.5}
    bench.runs(region_of())
    timed = bench.clock.timed
    kernel, launchable = bench.select_kernel(region_of())
    assert kernel.config == OTHERS[2] and not isinstance(launchable, TunedKernel)
    assert bench.runs(region_of()) == OTHERS[2]
    assert bench.clock.timed == timed > 0
    (record,) = bench.folder.glob("*.config")
    assert record.name.endswith(".config") and b"seconds" in record.read_bytes()


@pytest.mark.parametrize(
    "changes", [{"device": "another GPU"}, {"versions": ("2.99",)}, {"shapes": ((1, 72), (50, 72), (50,))}], ids=str
)
def test_another_chip_version_or_size_is_timed_anew(bench: Bench, changes: dict[str, Any]) -> None:
    bench.seconds = {OTHERS[2]: 0.5}
    bench.runs(region_of())
    shapes = changes.pop("shapes", SHAPES)
    assert isinstance(bench.select_kernel(region_of(shapes), **changes)[1], TunedKernel)
    assert not isinstance(bench.select_kernel(region_of())[1], TunedKernel)


def test_a_record_that_is_no_choice_is_left_alone(bench: Bench) -> None:
    tuner, kernel = bench.tuner(), TritonTarget().schedule(plan_of(region_of()), "layer", H200)
    for content in (b"{}", b"no json", json.dumps({"chosen": {"color": 3}}).encode()):
        tuner.cache.publish(tuner.key(kernel), ".config", content)
        assert isinstance(bench.select_kernel(region_of())[1], TunedKernel)
    assert len(bench.remarks.of("failure")) == 3


def test_code_that_nobody_knows_and_a_full_disk_leave_no_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fusec.provenance.own_code", str)
        assert bench.runs(region_of()) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "publish", full)
        assert bench.runs(region_of()) is not None
    assert not list(bench.folder.glob("*.config"))
    assert "for later processes: no space" in caplog.text


def test_equal_kernels_are_timed_once(bench: Bench) -> None:
    """Also where both were built before either ran."""
    first, second = (bench.select_kernel(region_of())[1] for _ in range(2))
    for launchable in (first, first, second):
        launchable([*inputs(), torch.empty(1, 50)], ())
    assert len(bench.remarks.of("analysis")) == 1


def test_unknown_sizes_are_not_timed(bench: Bench) -> None:
    (region,) = [n for n in _symbolic() if n.is_op("region")]
    kernel = TritonTarget().schedule(plan_of(region), "k", H200)
    built = bench.kernel(kernel)
    assert bench.tuner().select_kernel(region, kernel, built) == (kernel, built)
    assert "dynamic sizes" in bench.remarks.of("missed")[0].reason


def _symbolic() -> Any:
    from tests.codegen.triton_regions import kernel_regions

    return kernel_regions(trace(lambda x: x.softmax(-1), [torch.randn(6, 40)], symbolic=True))


def test_what_a_kernel_is_given_is_left_as_it_is(bench: Bench) -> None:
    def count(counter: Tensor, x: Tensor) -> Tensor:
        counter.add_(2)
        return x * counter

    from fusec.debug.capture import capture
    from tests.codegen.triton_regions import kernel_regions

    (graph,) = capture(count, torch.arange(40.0), torch.ones(40))
    regions = [r for r in kernel_regions(graph) if any(n.is_op("write") for n in r.body)]
    kernel = TritonTarget().schedule(plan_of(regions[0]), "count", H200)
    _, launchable = bench.tuner().select_kernel(regions[0], kernel, bench.kernel(kernel))
    assert isinstance(launchable, TunedKernel)
    given = [torch.arange(40.0) if b.role == "update" else torch.ones(40) for b in kernel.buffers]
    launchable(given, ())
    (updated,) = [x for x, b in zip(given, kernel.buffers, strict=True) if b.role == "update"]
    assert torch.equal(updated, torch.arange(40.0) + 2) and bench.remarks.of("analysis")


def test_a_number_is_the_same_for_every_run_that_is_timed(bench: Bench) -> None:
    """It may be a place: counted on by run after run it would lie beyond what it counts."""

    def count(place: Tensor, x: Tensor) -> Tensor:
        y = x * place
        place.add_(1)
        return y

    from fusec.debug.capture import capture
    from tests.codegen.triton_regions import kernel_regions

    (graph,) = capture(count, torch.tensor(3.0), torch.ones(1))
    (region,) = [r for r in kernel_regions(graph) if any(n.is_op("write") for n in r.body)]
    kernel = TritonTarget().schedule(plan_of(region), "count", H200)
    at = next(i for i, b in enumerate(kernel.buffers) if b.role == "update")
    seen: list[float] = []

    class Watched(TritonKernel):
        def __call__(self, buffers: Any, symbols: Any = ()) -> None:
            seen.append(float(buffers[at]))
            super().__call__(buffers, symbols)

    given = [torch.tensor(3.0) if b.role == "update" else torch.ones(1) for b in kernel.buffers]
    bench.tuner().select_kernel(region, kernel, Watched(kernel))[1](given, ())
    assert len(seen) > 2 and set(seen) == {3.0}
    assert given[at] == 4


def test_without_memory_for_copies_the_default_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(tuning, "rotating", none)
    assert bench.runs(region_of()) == DEFAULT
    assert "not enough memory" in bench.remarks.of("missed")[0].reason


def test_copies_rotate_and_lie_as_the_originals() -> None:
    kernel = TritonTarget().schedule(plan_of(region_of()), "layer", H200)
    given = [torch.randn(1, 70), torch.randn(70, 50).t(), torch.randn(1).expand(50), torch.empty(1, 50)]
    copies = copied(kernel, given)
    assert [c.stride() for c in copies] == [g.stride() for g in given]
    assert all(torch.equal(c, g) for c, g in zip(copies[:3], given[:3], strict=True)) and copies[3].isnan().all()
    assert len({id(c) for c in copies}.union(map(id, given))) == 8
    small = replace(H200, cache_bytes=20_000)
    assert len(rotating(kernel, given, small)) == 1 + -(-2 * 20_000 // (4 * (70 + 3500 + 1 + 50)))
    assert len(rotating(kernel, given, H200)) == trials._MOST_COPIES


def test_a_compile_chooses_under_autotune_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_current_device(cls: type[Tuner], context: Context, *_: Any) -> Tuner:
        assert [step.name for step in context.vendor.passes] == ["group", "bias"]
        return bench.tuner(remarks=context.remarks)

    monkeypatch.setattr(Tuner, "of_current_device", classmethod(of_current_device))
    for mode, expected in (("default", 0), ("max-autotune", 1), ("max-autotune", 0)):
        config = Config(mode=mode, target="triton", machine="h200", strict=True)
        compiled = compile_graph(trace(layer, inputs(), symbolic=False), config)
        for _ in range(2):
            (out,) = compiled.program(inputs())
            torch.testing.assert_close(out, layer(*inputs()))
        assert len([r for r in compiled.remarks if r.pass_name == "autotune"]) == expected
