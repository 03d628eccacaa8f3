"""Kernels against the limits of the machine: predicted and measured times, as data, as tables, on the command line."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusec.analysis.machine import ASSUMED, CHIPS, Machine, assumed_cpu
from fusec.cli import app
from fusec.codegen import target_named
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.debug import measurement
from fusec.debug.explain import explain
from fusec.debug.tables import roofline_view, share_bar
from fusec.debug.text import as_text, duration
from fusec.debug.timing import sample_inputs, time_program
from fusec.ir.graph import Graph, Value
from fusec.ir.printer import print_graph
from fusec.ir.types import F32, I64, TensorType, contiguous_strides, symbol
from tests.machines import profile
from tests.tools.command_line import CliRunner
from tests.tools.sample import HIDDEN, ROWS, compiled, decoder

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
inputs = torch.randn(40, 64)
"""


def tensor(graph: Graph, *shape: int) -> Value:
    return graph.add_input(TensorType(F32, shape, contiguous_strides(shape)))


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_row_is_one_launch_against_the_machine() -> None:
    found = explain(compiled(2))
    row = next(k for k in found.kernels if k.name == "rms_norm")
    machine, roof = assumed_cpu(), row.roofline
    assert found.machine == machine and roof.measured_us is None
    assert roof.bytes == (2 * ROWS + 1) * HIDDEN * 4 == row.bytes_each
    # 16 rows of 64 lie in the cache, as does the weight, and all that the decoder is given.
    assert roof.limit_us == pytest.approx(roof.bytes / machine.cache_gb_s / 1e3)
    assert roof.predicted_us == pytest.approx(roof.limit_us + machine.launch_us) and roof.bound == "launch"
    assert roof.share == pytest.approx(roof.limit_us / roof.predicted_us)
    assert roof.gb_s == pytest.approx(roof.bytes / roof.predicted_us / 1e3)


def test_weights_that_do_not_fit_the_cache_come_from_memory() -> None:
    sample = compiled(1)
    little = replace(assumed_cpu(), cache_bytes=64 * HIDDEN * 4)
    sample.machine = little
    row = next(k for k in explain(sample).kernels if k.kind == "vendor" and k.launches == 4)
    weight, rows = HIDDEN * HIDDEN * 4, 2 * ROWS * HIDDEN * 4
    expected = max(weight / little.read_gb_s + rows / little.cache_gb_s, row.flops_each / little.peaks["matrix f32"])
    assert row.roofline.limit_us == pytest.approx(expected / 1e3)


def test_totals_are_the_sums_over_launches() -> None:
    found = explain(compiled(2))
    assert found.totals.predicted_us == pytest.approx(sum(k.roofline.predicted_us * k.launches for k in found.kernels))
    assert found.totals.measured_us is None and sum(found.totals.bound.values()) == pytest.approx(1)
    data = json.loads(json.dumps(found.to_json()))
    assert data["machine"]["source"] == "assumed" and data["kernels"][0]["roofline"]["intensity"] >= 0


def test_steps_are_timed_by_node() -> None:
    graph = Graph("steps")
    x, weight = tensor(graph, 40, 64), tensor(graph, 64, 64)
    product = graph.add_node("contraction", (graph.add_node("exp", (x,)).result, weight), {"spec": "az,bz->ab"})
    graph.set_outputs([graph.add_node("tanh", (product.result,)).result])
    made = compile_graph(graph, profile())
    calls: list[int] = []
    probed = made.program.probed(calls.append)
    inputs = [torch.randn(40, 64), torch.randn(64, 64)]
    (plain,), (watched,) = made.program(list(inputs)), probed(list(inputs))
    assert torch.equal(plain, watched)
    assert [s.kind for s in made.program.steps] == ["kernel", "vendor", "kernel"] and calls == [0, 1, 2, 3]
    timing = time_program(made.program, made.graph, inputs, seconds=0.0)
    assert list(timing.seconds) == [n for n in made.graph.nodes if n.is_op("region", "contraction")]
    assert all(s > 0 for s in timing.seconds.values()) and timing.calls >= 5
    assert 0 < timing.probe < timing.total and timing.rest >= 0


def test_inputs_that_are_written_to_stay_as_they_are() -> None:
    graph = Graph("cache")
    cache, new, row = tensor(graph, 8, 4), tensor(graph, 1, 4), graph.add_input(TensorType(I64, (1,), (1,)))
    doubled = graph.add_node("add", (new, new)).result
    written = graph.add_node("write", (cache, doubled, row), {"dim": -2}).result
    graph.set_outputs([graph.add_node("exp", (written,)).result])
    made = compile_graph(graph)
    assert made.graph.written_inputs == [0]
    inputs = [torch.zeros(8, 4), torch.ones(1, 4), torch.tensor([3])]
    time_program(made.program, made.graph, inputs, seconds=0.0)
    assert not inputs[0].any()


def test_random_inputs_of_a_graph_have_its_types() -> None:
    graph = Graph()
    n = symbol("n")
    graph.add_input(TensorType(F32, (n, 4), (1, n)))
    graph.add_input(TensorType(I64, (n,), (1,)))
    x, places = sample_inputs(graph, {"n": 6})
    assert x.shape == (6, 4) and x.stride() == (1, 6) and x.dtype == torch.float32 and places.dtype == torch.int64


def test_a_cache_that_is_timed_is_not_filled_beyond_its_end() -> None:
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(3, 64))
            self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows.index_copy_(0, self.position, x)
            self.position.add_(1)
            return self.rows.sum(0)

    found = explain(Cache(), torch.randn(1, 64), time=True)
    assert found.totals.measured_us


def test_a_timed_model_has_measured_times_beside_the_predicted() -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    found = explain(model, torch.randn(40, 64), time=True, dynamic=True)
    assert all(k.roofline.measured_us for k in found.kernels)
    totals = found.totals
    assert totals.measured_us is not None and totals.unprobed_us and totals.probe_us
    assert totals.measured_us >= sum(k.roofline.us * k.launches for k in found.kernels) * 0.999
    assert 40 in found.assumed.values()  # the size that it ran with, not one that stands for any
    text = as_text(roofline_view(found))
    for word in ("measured", "GB/s", "Together: predicted", "without probes"):
        assert word in text
    known = replace(found, machine=replace(found.machine, source="measured"))
    for view, shown in ((found, found.machine.source != ASSUMED), (known, True)):
        assert ("of the limit" in as_text(roofline_view(view))) == shown  # of a machine that nobody measured


def test_it_is_told_from_which_size_on_arithmetic_decides(tmp_path: Path) -> None:
    """For n rows a dense layer moves 4·(4096² + 2·4096·n) bytes and carries out 2·4096²·n operations."""
    script = tmp_path / "layer.py"
    script.write_text("import torch\nmodel = torch.nn.Linear(4096, 4096)\ninputs = [torch.randn(40, 4096)]\n")
    asked = ("explain", str(script), "--dynamic", "--machine", "a100")
    (layer,) = json.loads(run(*asked, "--json"))["kernels"]
    ((name, turn),) = layer["roofline"]["turns"].items()
    assert turn == pytest.approx((4 / 2039) / (2 / 156_000 - 8 / (4096 * 2039)), rel=0.01)
    assert f"compute from {name} = {math.ceil(turn)}" in " ".join(run(*asked, "--roofline").split())
    static = json.loads(run("explain", str(script), "--json"))["kernels"]
    assert all(not kernel["roofline"]["turns"] for kernel in static)


def test_the_command_shows_and_times(tmp_path: Path) -> None:
    script = tmp_path / "mlp.py"
    script.write_text(SCRIPT)
    text = run("explain", str(script), "--roofline")
    assert "predicted" in text and "measured" not in text.replace("fusec machine measure", "") and "bound by" in text
    data = json.loads(run("explain", str(script), "--time", "--json"))
    assert data["totals"]["measured_us"] > 0 and all(k["roofline"]["measured_us"] > 0 for k in data["kernels"])
    h100 = json.loads(run("explain", str(script), "--machine", "h100", "--json"))
    assert h100["machine"]["name"] == CHIPS["h100"].name
    assert {k["roofline"]["bound"] for k in h100["kernels"]} == {"launch"}


def test_a_graph_is_timed_on_random_inputs(tmp_path: Path) -> None:
    path = tmp_path / "decoder.fir"
    path.write_text(print_graph(decoder(1)))
    data = json.loads(run("explain", str(path), "--time", "--json"))
    assert data["totals"]["measured_us"] > 0
    path.write_text(print_graph(decoder(1, fused=True)))
    assert "predicted" in run("explain", str(path), "--roofline")
    assert CliRunner().invoke(app, ["explain", str(path), "--time"]).exit_code == 2


def test_a_machine_is_measured_stored_shown_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    whole = measurement.measure_machine
    monkeypatch.setattr(measurement, "measure_machine", lambda **words: whole(1, 32, 0.001, **words))
    measured = Machine.from_json(json.loads(run("machine", "measure", "--json")))
    assert measured.source == "measured" and {"matrix bf16", "vector f32"} <= measured.peaks.keys()
    assert Machine.from_json(json.loads(run("machine", "show", "--json"))) == measured
    assert "compute-bound from" in run("machine", "show")
    assert target_named("cpp").machine(Config.from_environment()) == measured
    run("cache", "clear", "--yes")  # takes kernels, which are built again; nobody measures again unasked
    assert json.loads(run("machine", "show", "--json"))["source"] == "measured"
    run("machine", "forget")
    assert json.loads(run("machine", "show", "--json"))["source"] == "assumed"


def test_bars_and_durations() -> None:
    assert [share_bar(s).plain for s in (0.0, 0.5, 1.3)] == ["─" * 10 + " 0 %", "━━━━━───── 50 %", "━" * 10 + " 130 %"]
    assert [duration(us) for us in (0.5, 12.34, 4560, 2e6)] == ["0.5 µs", "12.3 µs", "4.56 ms", "2 s"]
