"""Launches on a GPU, as far as they can be followed without one: Triton compiles, a stand-in for its driver listens."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fusec.codegen.triton.launch import TritonKernel
from tests.codegen.tile_programs import S, softmax


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@dataclass
class Launched:
    """What the driver was told."""

    grid: tuple[int, int, int]
    signature: dict[str, str]
    options: Any
    arguments: tuple[Any, ...]


class Listener:
    """Triton's driver of an H100 that is not there."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, kernel, shared, device: (object(), object(), 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What launches a compiled kernel: takes the grid, six things that do not matter here, and the arguments."""

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            self.launched.append(Launched((x, y, z), dict(source.signature), metadata, rest[6:]))

        return launch


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    heard = Listener()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(type(driver), "active", heard)
    return heard


def test_a_launch_hands_over_memory_and_options(listener: Listener) -> None:
    x, y = on_gpu(7, 300), on_gpu(7, 300)
    TritonKernel(softmax(7, 300))([x, y])
    (launched,) = listener.launched
    assert launched.grid == (7, 1, 1)
    assert launched.arguments[0] is x and launched.arguments[1] is y
    assert (launched.options.num_warps, launched.options.enable_fp_fusion) == (2, False)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 3_000_000])
def test_sizes_have_64_bits_whatever_they_are(listener: Listener, rows: int) -> None:
    """By itself Triton takes a number that fits for one of 32 bits, and products of such would wrap around."""
    kernel = softmax(S, 300)
    TritonKernel(kernel)([on_gpu(1, 300), on_gpu(1, 300)], [rows])
    (launched,) = listener.launched
    assert launched.signature["s0"] == "i64" and launched.grid[0] == rows


def test_nothing_is_launched_for_no_rows(listener: Listener) -> None:
    TritonKernel(softmax(S, 300))([on_gpu(0, 300), on_gpu(0, 300)], [0])
    assert not listener.launched
