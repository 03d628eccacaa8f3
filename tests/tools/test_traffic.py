"""Values that one kernel writes and another reads: their bytes, of kernels and in all, and the reasons."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.debug.explain import explain
from fusec.debug.subject import subject_of
from fusec.debug.traffic import Traffic, traffic
from fusec.ir.parser import parse_graph
from tests.machines import profile
from tests.tools.sample import compiled


def of(text: str) -> Traffic:
    """The traffic of a graph that runs node by node."""
    return traffic([subject_of(parse_graph(f"graph g({text}\n}}\n"))], {})


def values(found: Traffic) -> dict[str, tuple[int, int]]:
    return {value.name: (value.written_bytes, value.read_bytes) for value in found.intermediates}


def test_each_reader_counts() -> None:
    found = of("%x: f32[10]) {\n  %a: f32[10] = exp(%x)\n  %b: f32[10] = neg(%a)\n  %c: f32[10] = tanh(%a)\n"
               "  %y: f32[10] = add(%b, %c)\n  return %y")  # fmt: skip
    assert values(found) == {"a": (40, 80), "b": (40, 40), "c": (40, 40)}
    assert (found.bytes, found.least_bytes, found.ratio) == (280, 80, 3.5)


def test_a_result_that_is_read_again_has_to_be_written_anyway() -> None:
    found = of("%x: f32[10]) {\n  %a: f32[10] = exp(%x)\n  %y: f32[10] = neg(%a)\n  return %a, %y")
    assert values(found) == {"a": (0, 40)} and found.least_bytes == 120


def test_a_view_that_is_a_result_has_its_value_written() -> None:
    found = of("%x: f32[10]) {\n  %a: f32[10] = exp(%x)\n  %v: f32[10, 1] = reshape(%a) {shape=(10, 1)}\n"
               "  %y: f32[10] = neg(%a)\n  return %v, %y")  # fmt: skip
    assert values(found) == {"a": (0, 40)}


def test_views_are_read_as_the_value_and_only_what_they_show() -> None:
    found = of("%x: f32[10]) {\n  %a: f32[10] = exp(%x)\n  %v: f32[3] = slice(%a) {dim=-1, start=0, stop=3, step=1}\n"
               "  %y: f32[3] = neg(%v)\n  return %y")  # fmt: skip
    assert values(found) == {"a": (40, 12)}


def test_a_lookup_reads_what_it_finds() -> None:
    found = of("%t: f32[50, 4], %i: i64[2]) {\n  %a: f32[50, 4] = exp(%t)\n  %y: f32[2, 4] = take(%a, %i) {dim=-2}\n"
               "  return %y")  # fmt: skip
    assert values(found) == {"a": (800, 32)} and found.least_bytes == 800 + 16 + 32
    assert of("%t: f32[50, 4], %i: i64[2]) {\n  %y: f32[2, 4] = take(%t, %i) {dim=-2}\n  return %y").least_bytes == 80


def test_a_cache_that_is_updated_is_an_input() -> None:
    found = of("%cache: f32[8, 4], %new: f32[1, 4], %at: i64[1]) {\n"
               "  %w: f32[8, 4] = write(%cache, %new, %at) {dim=-2}\n  %y: f32[8, 4] = exp(%w)\n"
               "  return %y")  # fmt: skip
    assert not found.intermediates and found.least_bytes == 16 + 8 + 128


def test_kernels_share_the_bytes_of_the_whole() -> None:
    found = explain(compiled(2))
    assert sum(k.intermediate_bytes for k in found.kernels) == found.traffic.bytes > 0
    assert all(0 <= k.intermediate_bytes <= k.bytes for k in found.kernels)


def test_what_no_kernel_repeats_is_none() -> None:
    found = explain(lambda x: F.silu(x) * x, torch.randn(40, 64))
    assert found.traffic.bytes == 0 and found.traffic.least_bytes == 2 * 40 * 64 * 4
    assert "Written and read again" not in str(found)


MODELS: dict[str, tuple[Any, str]] = {
    "fusec does not model this operation": (lambda x, w: torch.logcumsumexp(x.exp(), 0), "exp"),
    "a library's call computes nothing else": (lambda x, w: (x @ w).exp(), "matmul az,zb->ab"),
    "each matmul sums over whole rows of the one before": (lambda x, w: (x[:4] @ w) @ w, "linear"),
    "reductions have different rows: max has 64, max has 64": (
        lambda x, w: torch.softmax(torch.softmax(x, -1) * 2, 0) + w, "softmax",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", MODELS)
def test_the_reason_and_the_line(reason: str) -> None:
    model, writer = MODELS[reason]
    own: dict[str, Any] = {"small_m": 16}
    if writer.startswith("matmul"):  # a machine whose library is faster
        own = {"small_m": 0, "cache_dir": profile(f32=1.0).cache_dir}
    found = explain(model, torch.randn(64, 64), torch.randn(64, 64), options={"target": "cpp", **own})
    reasons = {value.reason: value for value in found.traffic.intermediates}
    assert reason in reasons, reasons
    value = reasons[reason]
    assert value.writer.startswith(writer) and "test_traffic.py" in value.place
    text = " ".join(str(found).split())
    assert "Written and read again" in text and reason in text
    data = json.loads(json.dumps(found.to_json()))["intermediates"]
    assert data["bytes"] == found.traffic.bytes and data["values"][0]["readers"]


def test_symbolic_sizes_are_assumed() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.logcumsumexp(x.exp(), 0)

    found = explain(model, torch.randn(5, 8), dynamic=True)
    (rows, columns) = found.assumed.values()
    assert found.traffic.bytes == 2 * rows * columns * 4
