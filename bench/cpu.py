"""Is fusec ahead of every peer on this processor, and how near does it come to what the machine can do?

``python -m bench.cpu``

All candidates of a workload run in one interleaved run. *Default* holds fusec as it is against eager and Inductor as it
is; *frozen* holds it against all peers, those included that take weights for constants.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib.util import find_spec

import torch
from rich.table import Table

from bench.harness import BASELINE, Measurement, console, measure, report
from bench.machine import wait_until_idle
from bench.peers import peer
from bench.record import write_result
from bench.workloads import WORKLOADS, Prepared, Workload
from fusec.analysis.machine import Machine
from fusec.debug.measurement import measure_machine

OURS = "fusec"
DEFAULT = (BASELINE, "inductor")
"""The peers of *default*."""
PEERS = (*DEFAULT, "inductor frozen", *(["openvino"] if find_spec("openvino") else []))
READ_MB = 512
"""What is read to measure memory: more than any cache holds."""


@dataclass(frozen=True)
class Verdict:
    """How we stand on one workload."""

    title: str
    default: float
    """Time of the best peer of *default* over ours; above 1 we are ahead."""
    frozen: float
    """The same over all peers."""
    least: tuple[float, float]
    """What both have to be."""
    noise: float
    gb_s: float
    """Bytes of weights over time, of ours."""
    gflop_s: float
    """Operations of the products with weights over time."""
    bandwidth: float
    """``gb_s`` over the machine's."""
    utilization: float
    """``gflop_s`` over the machine's."""
    tokens_s: float
    failed: dict[str, str]
    """Peers that do not run it, and why."""

    @property
    def ahead(self) -> bool:
        """Whether no peer is faster beyond the noise."""
        return self.frozen >= 1 - self.noise

    @property
    def holds(self) -> bool:
        """Whether both are at least what they have to be."""
        return self.default >= self.least[0] and self.frozen >= self.least[1]


def main(words: list[str] | None = None) -> int:
    """Measure every workload; status 1 where a promise is broken."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore")
    wait_until_idle(options.allow_busy)
    machine = measure_machine(megabytes=READ_MB)
    measurements, verdicts = dict[str, Measurement](), list[Verdict]()
    for workload in (w for w in WORKLOADS if any(fnmatch(w.title, f"*{one}*") for one in options.workloads.split(","))):
        wait_until_idle(options.allow_busy)
        console.print(workload.title, style="dim", highlight=False)
        prepared = workload.prepare(workload.dtype, options.seed)
        measurement, failed = _measure(prepared, options.peers.split(","), options.rounds)
        measurements[workload.title] = measurement
        verdicts.append(verdict(workload, prepared, measurement, machine, failed))
    report(options.width).print(_table(verdicts, measurements))
    content = {
        "machine": machine.to_json(),
        "workloads": {v.title: asdict(v) | {"ahead": v.ahead, "holds": v.holds} for v in verdicts},
        "measurements": {title: m.to_json() for title, m in measurements.items()},
        "busy": any(m.disturbed for m in measurements.values()),
    }
    console.print(f"written to {write_result('cpu', options.seed, content, options.json)}", style="dim")
    return int(not all(v.holds and v.ahead for v in verdicts))


def verdict(
    workload: Workload, prepared: Prepared, measurement: Measurement, machine: Machine, failed: dict[str, str]
) -> Verdict:
    """How we stand, from the times."""
    ours, dtype = measurement.row(OURS), {"float32": "f32", "bfloat16": "bf16"}[str(workload.dtype)[6:]]
    peers = {row.name: row.ratio for row in measurement.rows if row.name in PEERS}
    seconds = ours.milliseconds / 1e3
    gb_s, gflop_s = prepared.weight_bytes / seconds / 1e9, prepared.flops / seconds / 1e9
    return Verdict(
        workload.title,
        default=min((ratio for name, ratio in peers.items() if name in DEFAULT), default=1.0),
        frozen=min(peers.values(), default=1.0),
        least=workload.least,
        noise=measurement.noise,
        gb_s=gb_s,
        gflop_s=gflop_s,
        bandwidth=gb_s / machine.read_gb_s,
        utilization=gflop_s * 1e9 / machine.peak("matrix", dtype),
        tokens_s=prepared.rows / seconds,
        failed=failed,
    )


def _measure(prepared: Prepared, peers: list[str], rounds: int) -> tuple[Measurement, dict[str, str]]:
    """Every candidate that runs the workload at all, held against ours."""
    torch._dynamo.reset()
    candidates: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name in (OURS, *peers):
        console.print(f"  compile {name}", style="dim", highlight=False)
        try:
            with torch.no_grad():
                call = prepared.call(peer(name, prepared.model, prepared.dynamic))
                call()
        except Exception as problem:
            if name == OURS:
                raise
            failed[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            continue
        candidates[name] = call
    return measure(candidates, rounds, baseline=OURS), failed


def _table(verdicts: list[Verdict], measurements: dict[str, Measurement]) -> Table:
    names = list(dict.fromkeys(row.name for m in measurements.values() for row in m.rows if row.name in PEERS))
    shown = Table(title="Times of the peers over ours, above 1 we are ahead")
    shown.add_column("workload")
    for column in ("ours", *names, "default (at least)", "frozen (at least)", "GB/s", "GFLOP/s", "tokens/s", "noise"):
        shown.add_column(column, justify="right")
    for v in verdicts:
        measurement = measurements[v.title]
        ratios = {row.name: f"{row.ratio:.2f}" for row in measurement.rows}
        marks = [
            f"[{'green' if have >= least else 'red'}]{have:.2f}[/] ({least:.2f})"
            for have, least in zip((v.default, v.frozen), v.least, strict=True)
        ]
        shown.add_row(
            v.title, f"{measurement.row(OURS).milliseconds:.2f} ms", *(ratios.get(name, "-") for name in names), *marks,
            f"{v.gb_s:.0f} ({v.bandwidth:.0%})", f"{v.gflop_s:.0f} ({v.utilization:.0%})", f"{v.tokens_s:,.0f}",
            f"{measurement.noise:.1%}{' busy!' if measurement.disturbed else ''}",
        )  # fmt: skip
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    add = parser.add_argument
    add("--workloads", default="*", metavar="A,B", help="parts of names, with wildcards, as in the table")
    add("--peers", default=",".join(PEERS), metavar="A,B")
    add("--rounds", type=int, default=15)
    add("--seed", type=int, default=0)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/cpu.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
