"""What a launch hands to a GPU's driver, as far as that can be followed without one: a stand-in for it listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fusec.codegen import target_named
from fusec.codegen.triton.launch import TritonKernel, define
from fusec.codegen.triton.launcher import Launcher
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import options
from fusec.config import Config
from tests.codegen.tile_programs import S, softmax


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
def heard(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(type(driver), "active", stand_in)
    return stand_in


def test_a_launch_hands_over_memory_and_options(heard: Driver) -> None:
    x, y = on_gpu(7, 300), on_gpu(7, 300)
    TritonKernel(softmax(7, 300))([x, y])
    ((_, *grid, _, _, _, first, second, _),) = heard.launched
    ((_, given),) = heard.compiled
    assert grid == [7, 1, 1] and (first, second) == (x.data_ptr(), y.data_ptr())
    assert (given.num_warps, given.enable_fp_fusion) == (2, False)


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
