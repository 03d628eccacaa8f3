"""Is fusec ahead of every peer on this processor, and how near does it come to what the machine can do?

``python -m bench.cpu``

All candidates of a workload run in one interleaved run. *Default* holds fusec as it is against eager and Inductor as it
is; *frozen* holds it under its option ``freeze`` against all peers, those included that take weights for constants.
Nothing is said of peers that did not run.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.harness import BASELINE, NOT_MEASURED, OURS, Measurement, console, measure, report
from bench.machine import wait_until_idle
from bench.pictures import Line, draw_ratios, say_drawn
from bench.record import write_result
from bench.workloads import WORKLOADS, Prepared, Workload, calls
from fusec.analysis.machine import Machine
from fusec.debug.measurement import measure_machine

OURS_FROZEN = f"{OURS} frozen"
DEFAULT = (BASELINE, "inductor")
"""The peers of *default*."""
FROZEN = ("inductor frozen", *(["openvino"] if find_spec("openvino") else []))
"""Those that take weights for constants."""
PEERS = (*DEFAULT, *FROZEN)
READ_MB = 512
"""What is read to measure memory: more than any cache holds."""
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "read: dot": lambda data: torch.dot(data, data), "read: sum": torch.sum, "read: max": torch.amax,
}  # fmt: skip
"""Ways to read memory, measured among the candidates."""


@dataclass(frozen=True)
class Verdict:
    """How we stand on one workload."""

    title: str
    default: float | None
    """Time of the best peer of *default* over ours; above 1 we are ahead. None where it was not measured."""
    frozen: float | None
    """The same of all peers, over ours under ``freeze``."""
    least: tuple[float, float]
    """What both have to be."""
    noise: float
    gb_s: float
    """Bytes of weights over time, of ours."""
    gflop_s: float
    """Operations of the products with weights over time."""
    machine_gb_s: float
    """Of the quickest way to read memory; in the same rounds where weights lie there, since neighbours slow it."""
    machine_gflop_s: float
    """The better of the library's and our own product of large matrices."""
    tokens_s: float
    first_token_ms: float | None
    """Time to first token: a call's, where it is a prompt's."""
    next_token_ms: float | None
    """Time per token of each row: a call's, where it is a step of decoding."""
    failed: dict[str, str]
    """Peers that do not run it, and why."""

    @property
    def bandwidth(self) -> float:
        """``gb_s`` over the machine's."""
        return self.gb_s / self.machine_gb_s

    @property
    def utilization(self) -> float:
        """``gflop_s`` over the machine's: model FLOP utilization (MFU)."""
        return self.gflop_s / self.machine_gflop_s

    @property
    def ahead(self) -> bool | None:
        """Whether no peer is faster beyond the noise."""
        return _every(None if have is None else have >= 1 - self.noise for have in (self.default, self.frozen))

    @property
    def holds(self) -> bool | None:
        """Whether both are at least what they have to be."""
        pairs = zip((self.default, self.frozen), self.least, strict=True)
        return _every(None if have is None else have >= least for have, least in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        derived = ("bandwidth", "utilization", "ahead", "holds")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def _every(claims: Iterable[bool | None]) -> bool | None:
    """Whether all are true; None where none is false, but one is not known."""
    known = list(claims)
    return False if False in known else None if None in known else True


def main(words: list[str] | None = None) -> int:
    """Measure every workload; status 1 where a promise is seen to be broken."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore")
    wait_until_idle(options.allow_busy)
    machine = measure_machine(megabytes=READ_MB)
    measurements, verdicts, missing = dict[str, Measurement](), list[Verdict](), dict[str, str]()
    for workload in (w for w in WORKLOADS if any(fnmatch(w.title, f"*{one}*") for one in options.workloads.split(","))):
        wait_until_idle(options.allow_busy)
        console.print(workload.title, style="dim", highlight=False)
        try:
            prepared = workload.prepare(workload.dtype, options.seed)
        except ImportError as problem:  # a model that comes in a package
            missing[workload.title] = str(problem)
            continue
        measurement, failed = _measure(prepared, options.peers.split(","), options.rounds, machine.cache_bytes)
        measurements[workload.title] = measurement
        verdicts.append(verdict(workload, prepared, measurement, machine, failed))
    shown = report(options.width)
    shown.print(_table(verdicts, measurements))
    failures = {f"{v.title}, {name}": reason for v in verdicts for name, reason in v.failed.items()}
    for what, reason in (missing | failures).items():
        shown.print(f"{what}: {NOT_MEASURED}: {reason}", style="yellow", markup=False, highlight=False)
    content = {
        "machine": machine.to_json(),
        "workloads": {v.title: v.to_json() for v in verdicts},
        "not measured": missing,
        "measurements": {title: m.to_json() for title, m in measurements.items()},
        "busy": any(m.disturbed for m in measurements.values()),
    }
    file = write_result("cpu", options.seed, content, options.json)
    console.print(f"written to {file}", style="dim")
    draw(file.with_suffix(".svg"), verdicts)
    return int(any(False in (v.holds, v.ahead) for v in verdicts))


def verdict(
    workload: Workload, prepared: Prepared, measurement: Measurement, machine: Machine, failed: dict[str, str]
) -> Verdict:
    """How we stand, from the times."""
    ours, dtype = measurement.row(OURS), {"float32": "f32", "bfloat16": "bf16"}[str(workload.dtype)[6:]]
    ratios = {row.name: row.ratio for row in measurement.rows}
    default, frozen = _best(ratios, failed, DEFAULT), _best(ratios, failed, FROZEN)
    if default is not None and frozen is not None:
        frozen = min(default, frozen) / ratios[OURS_FROZEN]
    seconds = ours.milliseconds / 1e3
    read = [(READ_MB << 20) / row.milliseconds / 1e6 for row in measurement.rows if row.name in READS]
    return Verdict(
        workload.title,
        default=default,
        frozen=None if default is None else frozen,
        least=workload.least,
        noise=measurement.noise,
        gb_s=prepared.weight_bytes / seconds / 1e9,
        gflop_s=prepared.flops / seconds / 1e9,
        machine_gb_s=max(read, default=machine.read_gb_s),
        machine_gflop_s=max(machine.peak("matrix", dtype), machine.peaks.get(f"product {dtype}", 0.0) * 1e9) / 1e9,
        tokens_s=prepared.rows / seconds,
        first_token_ms=ours.milliseconds if prepared.gives == "first token" else None,
        next_token_ms=ours.milliseconds if prepared.gives == "next token" else None,
        failed=failed,
    )


def draw(file: Path, verdicts: list[Verdict]) -> None:
    """The ratios as a picture, with the least that is asked of each."""
    claims = {"best of eager and Inductor": "default", "best of all peers, frozen weights too": "frozen"}
    lines = [
        Line(
            v.title, {name: getattr(v, kind) for name, kind in claims.items()}, dict(zip(claims, v.least, strict=True))
        )
        for v in verdicts
    ]
    say_drawn(draw_ratios(file, "Peers' time over ours; beyond 1 we are ahead", lines))


def _best(ratios: dict[str, float], failed: dict[str, str], peers: Iterable[str]) -> float | None:
    """The least of these peers' ratios; None where one was not asked, or none of them runs the workload."""
    asked = all(name in ratios or name in failed for name in peers)
    return min((ratios[name] for name in peers if name in ratios), default=None) if asked else None


def _measure(prepared: Prepared, peers: list[str], rounds: int, cache_bytes: int) -> tuple[Measurement, dict[str, str]]:
    """Every candidate that runs the workload at all, held against ours, and reading memory where weights lie there."""
    candidates, failed = calls(prepared, OURS, (OURS_FROZEN, *peers))
    if OURS_FROZEN in failed:
        raise RuntimeError(f"{OURS_FROZEN}: {failed[OURS_FROZEN]}")
    data = torch.ones((READ_MB << 20) // 4)
    return measure(
        candidates | {name: partial(read, data) for name, read in READS.items()}, rounds, baseline=OURS
    ), failed


def _table(verdicts: list[Verdict], measurements: dict[str, Measurement]) -> Table:
    known = (OURS_FROZEN, *PEERS)
    names = list(dict.fromkeys(row.name for m in measurements.values() for row in m.rows if row.name in known))
    shown = Table(title="Times of the peers over ours, above 1 we are ahead")
    shown.caption = (
        "frozen: over ours under its option freeze; ours: of a prefill the time to first token, of decoding the time "
        "per token; GB/s: of weights, of what reading memory was measured at; GFLOP/s: of products with weights, of "
        "the machine's (MFU)"
    )
    shown.add_column("workload")
    for column in ("ours", *names, "default (at least)", "frozen (at least)", "GB/s", "GFLOP/s", "tokens/s", "noise"):
        shown.add_column(column, justify="right")
    for v in verdicts:
        measurement = measurements[v.title]
        ratios = {row.name: f"{row.ratio:.2f}" for row in measurement.rows}
        marks = [
            f"{NOT_MEASURED} ({least:.2f})"
            if have is None
            else f"[{'green' if have >= least else 'red'}]{have:.2f}[/] ({least:.2f})"
            for have, least in zip((v.default, v.frozen), v.least, strict=True)
        ]
        shown.add_row(
            v.title, f"{measurement.row(OURS).milliseconds:.2f} ms", *(ratios.get(name, "-") for name in names), *marks,
            f"{v.gb_s:.0f} of {v.machine_gb_s:.0f} ({v.bandwidth:.0%})",
            f"{v.gflop_s:.0f} of {v.machine_gflop_s:.0f} ({v.utilization:.0%})", f"{v.tokens_s:,.0f}",
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
    add("--json", default="", metavar="FILE", help="by default bench/results/cpu.json; a picture lies beside it")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
