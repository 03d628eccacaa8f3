"""A kernel that cannot be built when it is first launched: its operations run instead, which is said once."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec import dynamo
from fusec.codegen.program import recordings
from fusec.codegen.triton import kernel as triton_kernel
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.debug.explain import explain
from fusec.errors import BuildError
from fusec.frontend import trace
from tests.backend.tape import record_on_cpu


class Refused:
    """What a kernel becomes at its first launch."""

    def __init__(self, kernel: Any, edited: str = "") -> None:
        raise BuildError(f"kernel {kernel.name} cannot be launched", why="out of resources", fix="ask for less")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "InterpretedKernel", Refused)


def normed(x: Tensor) -> Tensor:
    return x.softmax(-1) * 2


def compiled(function: Any, *inputs: Tensor, symbolic: bool = False, **options: Any) -> Compiled:
    return compile_graph(trace(function, inputs, symbolic=symbolic), Config(target="triton", **options))


@torch.no_grad()
def test_it_is_said_once_where_and_why(refused: None, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    fast = torch.compile(normed, backend=dynamo.backend, dynamic=False, options={"target": "triton"})
    with caplog.at_level(logging.WARNING, "fusec"):
        for _ in range(3):
            x = torch.randn(3, 40)
            torch.testing.assert_close(fast(x), normed(x))
    (remark,) = dynamo.compiled_graphs()[0].remarks.of("failure")
    assert remark.pass_name == "launch" and "runs through ATen" in remark.message
    assert "out of resources" in remark.reason and remark.suggestion == "ask for less"
    assert "test_fallbacks.py" in remark.sources[0]
    assert len(caplog.records) == 1


def test_explain_counts_it(refused: None) -> None:
    result = compiled(normed, torch.randn(3, 40))
    assert not explain(result).fallbacks  # nobody knows yet
    result.program([torch.randn(3, 40)])
    (found,) = explain(result).fallbacks
    assert found.count == 1 and "out of resources" in found.reason


def test_strict_raises(refused: None) -> None:
    result = compiled(normed, torch.randn(3, 40), strict=True)
    for _ in range(2):
        with pytest.raises(BuildError, match="out of resources"):
            result.program([torch.randn(3, 40)])


def test_sizes_that_change(refused: None) -> None:
    def centered(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)).reshape(-1)

    result = compiled(centered, torch.randn(3, 40), symbolic=True)
    for shape in ((3, 40), (2, 7), (5, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(result.program([x])[0], centered(x))
    assert result.remarks.of("failure")


@torch.no_grad()
def test_what_is_written_in_place_is_written_once(refused: None) -> None:
    torch._dynamo.reset()

    def step(count: Tensor, x: Tensor) -> Tensor:
        count.add_(2)
        return x * count

    fast = torch.compile(step, backend=dynamo.backend, options={"target": "triton"})
    count, x = torch.ones(40), torch.randn(40)
    for i in range(3):
        torch.testing.assert_close(fast(count, x), x * (3 + 2 * i))
        assert torch.equal(count, torch.full((40,), 3.0 + 2 * i))
    assert any(r.pass_name == "launch" for c in dynamo.compiled_graphs() for r in c.remarks)


@torch.no_grad()
def test_a_recording_holds_the_operations(refused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    recorder = record_on_cpu(monkeypatch, "triton")
    fast = torch.compile(normed, backend=dynamo.backend, dynamic=False, options={"cuda_graphs": True})
    for _ in range(5):
        x = torch.randn(3, 40)
        torch.testing.assert_close(fast(x), normed(x))
    assert recorder.replays == 3 and not recorder.tapes[0].launches and recorder.tapes[0].steps
    (result,) = dynamo.compiled_graphs()
    assert [r.kind for r in result.remarks if r.pass_name in ("launch", recordings.PASS_NAME)] == [
        "failure",
        "analysis",
    ]
