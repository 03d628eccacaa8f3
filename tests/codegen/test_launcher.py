"""What a launch hands to a GPU's driver, as far as that can be followed without one: a stand-in for it listens."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fusec.analysis.machine import chip as machine
from fusec.codegen import target_named
from fusec.codegen.program.fallback import KernelWithFallback, UnfusedKernel
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton import kernel as triton_kernel
from fusec.codegen.triton.jit import define
from fusec.codegen.triton.kernel import TritonKernel
from fusec.codegen.triton.launcher import Launcher
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.signature import options
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.graph import Source
from tests.codegen.test_dynamic_indices import ROWS, kernel_of
from tests.codegen.tile_programs import S, softmax
from tests.codegen.triton_regions import regions_with_products
from tests.contexts import plan_of


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def on_gpu(*shape: int, skipped: int = 0) -> torch.Tensor:
    memory = torch.zeros(skipped + torch.Size(shape).numel())
    return memory[skipped:].view(shape).as_subclass(OnGpu)


class Driver:
    """That of an H100 which is not there; keeps what compiled kernels are launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.dependent: list[bool] = []
        self.compiled: list[tuple[dict[str, str], Any]] = []
        """For each launch the types of its arguments and what was asked of the compiler."""
        self.profiled = 0
        self.stream, self.device = 7, 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, kernel, shared, device: (object(), object(), 0, 0, 1024),
            unload_module=lambda module: None,  # since Triton 3.8
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            for_profilers, arguments = given[6:9], given[9:]
            self.profiled += for_profilers[0] is not None
            addresses = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
            self.launched.append((metadata.hash, *given[:6], *addresses))
            self.dependent.append(metadata.launch_pdl)
            self.compiled.append((dict(source.signature), metadata))

        return launch


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield from standing_in(Driver(), monkeypatch)


def standing_in(stand_in: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """For Triton's driver, as long as any kernel lives that it has loaded: it is asked to unload them."""
    monkeypatch.setattr(type(driver), "active", stand_in)
    gc.freeze()  # what other tests have made is not searched
    yield stand_in
    gc.collect()
    gc.unfreeze()


def refuse_to_compile(heard: Driver, patch: pytest.MonkeyPatch, kernel: TritonKernel) -> None:
    kernel.source = kernel.source.replace("tl.load(", "tl.no_such_function(")


def take_too_much_shared_memory(heard: Driver, patch: pytest.MonkeyPatch, kernel: TritonKernel) -> None:
    patch.setattr(compiler, "max_shared_mem", lambda device: 4)  # which remembers what it was told


def have_too_few_registers(heard: Driver, patch: pytest.MonkeyPatch, kernel: TritonKernel) -> None:
    heard.utils.load_binary = lambda name, code, shared, device: (object(), object(), 0, 0, 32)


def fail_to_load(heard: Driver, patch: pytest.MonkeyPatch, kernel: TritonKernel) -> None:
    def load(*_: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: out of resources")

    heard.utils.load_binary = load


FAULTS = [refuse_to_compile, take_too_much_shared_memory, have_too_few_registers, fail_to_load]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_what_cannot_be_compiled_or_loaded_is_not_launched(
    heard: Driver, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """Also when it is asked for again, which Triton itself answers otherwise."""
    kernel = TritonKernel(replace(softmax(2, 300), sources=(Source("model.py", 12),)))
    fault(heard, monkeypatch, kernel)
    for _ in range(3):
        with pytest.raises(BuildError, match="kernel softmax cannot be launched") as refused:
            kernel([on_gpu(2, 300), on_gpu(2, 300)])
        assert refused.value.where == "model.py:12" and refused.value.why and refused.value.fix
    assert not heard.launched


def test_a_refusal_keeps_no_memory_of_the_caller(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(softmax(2, 300))
    fail_to_load(heard, monkeypatch, kernel)
    x = on_gpu(2, 300)
    with pytest.raises(BuildError):
        kernel([x, on_gpu(2, 300)])
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None


def test_what_cannot_be_loaded_for_some_memory_runs_for_other(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, load = TritonKernel(softmax(2, 300)), heard.utils.load_binary
    kernel([on_gpu(2, 300), on_gpu(2, 300)])
    fail_to_load(heard, monkeypatch, kernel)
    with pytest.raises(BuildError):
        kernel([on_gpu(2, 300, skipped=1), on_gpu(2, 300)])
    heard.utils.load_binary = load
    kernel([on_gpu(2, 300), on_gpu(2, 300)])
    assert len(heard.launched) == 2


def test_no_grid_runs_unless_all_can(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(in_parts())
    monkeypatch.setattr(
        triton_kernel, "buffers_by_name", lambda kernel, *_: {b.name: on_gpu(1, 4096) for b in kernel.buffers}
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    given, load = [on_gpu(1, 256), on_gpu(64, 256), on_gpu(1, 64)], heard.utils.load_binary
    heard.utils.load_binary = lambda name, *rest: fail_to_load_second(name, load, *rest)
    with pytest.raises(BuildError, match="out of resources"):
        kernel(given)
    assert not heard.launched
    heard.utils.load_binary = load
    again = TritonKernel(in_parts())
    again(given)
    assert len(heard.launched) == 2


def fail_to_load_second(name: str, load: Any, *rest: Any) -> Any:
    if "part1" not in name:
        raise RuntimeError("Triton Error [CUDA]: out of resources")
    return load(name, *rest)


def in_parts() -> Kernel:
    """A product whose sum is cut into parts: two grids."""
    (region,) = regions_with_products(F.linear, [torch.randn(1, 256), torch.randn(64, 256)])
    config = replace(configs(plan_of(region), machine("h200"))[0], splits=2)
    return TritonTarget().schedule(plan_of(region), "linear", machine("h200"), config)


class Softmax(UnfusedKernel):
    """The operations of a softmax, counted."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, buffers: Any, symbols: Any = ()) -> None:
        self.runs += 1
        buffers[1].copy_(buffers[0].softmax(-1))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_operations_run_in_the_place_of_what_cannot_be_launched(
    heard: Driver, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    kernel, told, operations = TritonKernel(softmax(2, 300)), list[BuildError](), Softmax()
    fault(heard, monkeypatch, kernel)
    guarded = KernelWithFallback(kernel, operations, told.append)
    x, y = on_gpu(2, 300), on_gpu(2, 300)
    for _ in range(3):
        guarded([x.normal_(), y.zero_()], ())
        assert torch.equal(torch.Tensor(y), torch.Tensor(x).softmax(-1))
    assert operations.runs == 3 and len(told) == 1 and not heard.launched


@pytest.mark.parametrize("good", [0, 1])
def test_a_launch_that_fails_is_no_reason_to_run_anything_again(
    heard: Driver, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """It may have written half of its results."""
    calls, told, operations = list[Any](), list[BuildError](), Softmax()

    def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
        def run(*given: Any) -> None:
            calls.append(given)
            if len(calls) > good:
                raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

        return run

    monkeypatch.setattr(heard, "launcher_cls", launcher_cls)
    guarded = KernelWithFallback(TritonKernel(softmax(2, 300)), operations, told.append)
    for i in range(3):
        with pytest.raises(RuntimeError, match="illegal memory access") if i >= good else nullcontext():
            guarded([on_gpu(2, 300), on_gpu(2, 300)], ())
    assert len(calls) == 3 and not told and not operations.runs


def test_a_launch_hands_over_memory_and_options(heard: Driver) -> None:
    x, y = on_gpu(7, 300), on_gpu(7, 300)
    TritonKernel(softmax(7, 300))([x, y])
    ((_, *grid, _, _, _, first, second, _),) = heard.launched
    ((_, given),) = heard.compiled
    assert grid == [7, 1, 1] and (first, second) == (x.data_ptr(), y.data_ptr())
    assert (given.num_warps, given.enable_fp_fusion) == (2, False)


def test_a_launch_compiles_the_assertions_of_places_and_no_others(heard: Driver) -> None:
    places = TritonKernel(kernel_of(ROWS, "triton"))
    cache, new, at, first = on_gpu(2, 3, 9, 20), on_gpu(2, 4, 3, 20), on_gpu(4), on_gpu()
    places([cache, new, at.to(torch.int64).as_subclass(OnGpu), first.to(torch.int64).as_subclass(OnGpu)])
    TritonKernel(softmax(2, 300))([on_gpu(2, 300), on_gpu(2, 300)])
    (_, asserting), (_, plain) = heard.compiled
    assert asserting.debug and not asserting.sanitize_overflow
    assert not plain.debug


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 3_000_000])
def test_sizes_have_64_bits_whatever_they_are(heard: Driver, rows: int) -> None:
    """By itself Triton takes a number that fits for one of 32 bits, and products of such would wrap around."""
    TritonKernel(softmax(S, 300))([on_gpu(1, 300), on_gpu(1, 300)], [rows])
    ((signature, _),) = heard.compiled
    assert signature["s0"] == "i64" and heard.launched[0][1] == rows


class Both:
    """A launcher beside Triton's own way, which asks everything at each launch."""

    def __init__(self, kernel: Any, heard: Driver) -> None:
        self.options = options(kernel)
        self.function, self.heard = define(kernel, print_kernel(kernel)), heard
        self.direct = Launcher(kernel, self.function, self.options)

    def launch(self, programs: int, buffers: list[torch.Tensor], symbols: list[int]) -> None:
        before = len(self.heard.launched)
        self.direct(buffers, symbols)
        self.function[(programs,)](*buffers, *symbols, **self.options)
        ours, tritons = self.heard.launched[before:]
        assert ours == tritons and ours[1] == programs


@pytest.mark.parametrize("sizes", [(2, 3, 5), (16, 2, 1, 48, 2**31, 2, 1, 16)])
def test_a_launch_is_triton_s_whatever_it_is_of(heard: Driver, sizes: tuple[int, ...]) -> None:
    """Sizes that Triton compiles apart, in any order; each of them twice."""
    both = Both(softmax(S, 300), heard)
    for size in [*sizes, *sizes]:
        both.launch(size, [on_gpu(2, 300), on_gpu(2, 300)], [size])


def test_what_is_not_aligned_is_launched_as_such(heard: Driver) -> None:
    both = Both(softmax(2, 300), heard)
    for x, y in [(0, 0), (1, 0), (0, 1), (4, 8), (3, 2)] * 2:
        both.launch(2, [on_gpu(2, 300, skipped=x), on_gpu(2, 300, skipped=y)], [])
    assert len({given[0] for given in heard.launched}) == 4  # compiled


def test_triton_is_asked_once(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = softmax(2, 300)
    function, asked = define(kernel, print_kernel(kernel)), list[int]()
    run = function.run
    monkeypatch.setattr(function, "run", lambda *args, **options: [asked.append(1), run(*args, **options)][1])
    launcher = Launcher(kernel, function, options(kernel) | {"num_warps": 2})
    for _ in range(3):
        launcher([on_gpu(2, 300), on_gpu(2, 300)], [])
    assert len(asked) == 1 and len(heard.launched) == 3


def test_a_launch_goes_to_the_stream_and_device_of_its_time(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextmanager
    def enter(device: int) -> Iterator[None]:
        entered.append(device)
        before, heard.device = heard.device, device
        yield
        heard.device = before

    monkeypatch.setattr(torch.cuda, "device", enter)
    both = Both(softmax(2, 300), heard)
    for heard.stream in (1, 2, 1):
        both.launch(2, [on_gpu(2, 300), on_gpu(2, 300)], [])
    assert [given[4] for given in heard.launched] == [1, 1, 2, 2, 1, 1] and not entered
    heard.device = 1
    both.direct([on_gpu(2, 300), on_gpu(2, 300)], [])
    assert entered == [0] and heard.device == 1 and len(heard.launched) == 7


def test_profilers_are_told_of_every_launch(heard: Driver) -> None:
    launcher = Both(softmax(2, 300), heard).direct

    def enter(metadata: Any) -> None:
        """Only has to be there."""

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        for _ in range(3):
            launcher([on_gpu(2, 300), on_gpu(2, 300)], [])
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    assert heard.profiled == 3
    launcher([on_gpu(2, 300), on_gpu(2, 300)], [])
    assert heard.profiled == 3 and len(heard.launched) == 4


def test_nothing_is_launched_for_no_rows(heard: Driver) -> None:
    launcher = Both(softmax(S, 300), heard).direct
    launcher([on_gpu(0, 300), on_gpu(0, 300)], [0])
    assert not heard.launched


def test_a_dependent_kernel_waits_before_it_reads_or_writes(heard: Driver) -> None:
    kernel = softmax(2, 300)
    function = define(kernel, print_kernel(kernel, dependent=True))
    compiled = function[(2,)](on_gpu(2, 300), on_gpu(2, 300), launch_pdl=True, **(options(kernel) | {"num_warps": 2}))
    code = compiled.asm["ptx"]
    wait, go = (code.index(f"griddepcontrol.{what};") for what in ("wait", "launch_dependents"))
    assert wait < go < min(code.index("ld.global"), code.index("st.global"))


@pytest.mark.parametrize(
    ("capability", "asked", "dependent"),
    [((9, 0), True, True), ((10, 0), True, True), ((8, 0), True, False), (None, True, False), ((9, 0), False, False)],
)
def test_kernels_are_dependent_where_asked_and_the_gpu_can_do_it(
    heard: Driver, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, asked: bool, dependent: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    (kernel,) = target_named("triton").build([softmax(2, 300)], Config(dependent_launch=asked))
    for _ in range(2):
        kernel([on_gpu(2, 300), on_gpu(2, 300)], [])
    assert heard.dependent == [dependent] * 2 and ("gdc_wait" in kernel.source) == dependent


def test_kernels_are_compiled_ahead_for_aligned_memory(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched is what was compiled then; memory that is not aligned is compiled for at its launch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    compiled: list[str] = []
    warmup = JITFunction.warmup

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        compiled.append(self.__name__)
        return warmup(self, *arguments, **options)

    monkeypatch.setattr(JITFunction, "warmup", counted)
    sizes_known = softmax(2, 300), softmax(3, 300)
    kernels = target_named("triton").build([sizes_known[0], softmax(S, 300), sizes_known[1]], Config())
    assert len(compiled) == 2
    kernels[0]([on_gpu(2, 300), on_gpu(2, 300)], [])
    assert len(compiled) == 2
    kernels[0]([on_gpu(2, 300, skipped=1), on_gpu(2, 300)], [])
    kernels[1]([on_gpu(2, 300), on_gpu(2, 300)], [2])
    assert len(compiled) == 4
    target_named("triton").build([softmax(5, 300)], Config(autotune=True))
    assert len(compiled) == 4


def test_what_fails_ahead_is_told_at_the_launch(heard: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    fail_to_load(heard, monkeypatch, TritonKernel(softmax(2, 300)))
    (kernel,) = target_named("triton").build([softmax(2, 300)], Config())
    with pytest.raises(BuildError, match="out of resources"):
        kernel([on_gpu(2, 300), on_gpu(2, 300)], [])
