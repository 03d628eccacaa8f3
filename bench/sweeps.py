"""Has the time per token a cliff against context, batch or layers?

``python -m bench.sweeps``

A Llama gives one more token for each row, beside a static cache that just holds it. Each axis starts where all others
do; at each of its points all candidates run in one interleaved run. The *trend* of a candidate at a point is what a
step takes by its neighbours alone: between two, a straight line of logarithms; at an end, no longer for less work, and
in proportion for more. A *cliff* is a point at which

- the best peer is faster than we are, beyond the noise;
- our step takes longer than by our trend, so that the trend is less by more than a third and the noise; or
- the best peer's time over ours is less than at a neighbour by more than a third and the noise of both. Where the peers
  became slower at that neighbour, and slower than by their own trend, the trend counts: that step is theirs.

``--again`` says all this of a file of results, and measures nothing.
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import FLOOR, OURS, Measurement, console, measure, print_promises, report
from bench.machine import wait_until_idle
from bench.numerics import DTYPES
from bench.pictures import Curve, Panel, draw_panels, say_drawn
from bench.record import RESULTS, rewrite_result, write_result
from bench.workloads import HIDDEN, calls, decode

PEERS = ("eager", "inductor")
AXES = {
    "context": (256, 512, 1024, 2048, 4096),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "layers": (6, 12, 24, 48),
}  # fmt: skip
"""Tokens that the cache holds, rows, and layers; the first of each is what it is on the other axes."""
ROOM = 16
"""Tokens for which a cache has room beyond those it holds."""
DROP = 1 / 3
"""By this share may a ratio be less than at a neighbour, and a trend than what is measured."""


@dataclass(frozen=True)
class Point:
    """What was measured at one place of an axis."""

    at: int
    ms: dict[str, float]
    """Milliseconds per token, by candidate."""
    ratio: float
    """The best peer's time over ours; above 1 we are ahead."""
    noise: float

    @property
    def behind(self) -> bool:
        """Whether a peer is faster beyond the noise."""
        return self.ratio < 1 - self.noise


Axes = dict[str, dict[str, list[Point]]]
"""The points of each axis, by element type."""


def main(words: list[str] | None = None) -> int:
    """Measure every point of every axis; status 1 where one has a cliff."""
    options = _parser().parse_args(words)
    shown = report(options.width)
    if options.again:
        return _again(Path(options.json or RESULTS / "sweeps.json"), shown)
    warnings.filterwarnings("ignore")
    axes = {axis: [int(word) for word in getattr(options, axis).split(",")] for axis in AXES}
    base = {axis: places[0] for axis, places in axes.items()}
    found: Axes = {}
    measurements: dict[str, Measurement] = {}
    vocabulary = 0
    for dtype in options.dtypes.split(","):
        found[dtype] = {axis: [] for axis in axes}
        for axis, places in axes.items():
            for place in places:
                sizes = base | {axis: place}
                title = ", ".join([dtype, *(f"{name} {size}" for name, size in sizes.items())])
                if title not in measurements:
                    measurements[title], vocabulary = _measure(title, dtype, sizes, options)
                found[dtype][axis].append(_point(place, sizes["batch"], measurements[title]))
    content = {
        "hidden": options.hidden, "vocabulary": vocabulary, "base": base, "room": ROOM, "drop": DROP,
        "axes": {dtype: {axis: [asdict(p) for p in ps] for axis, ps in one.items()} for dtype, one in found.items()},
        "promises": _judged(found, shown),
        "measurements": {title: m.to_json() for title, m in measurements.items()},
        "busy": any(m.disturbed for m in measurements.values()),
    }  # fmt: skip
    file = write_result("sweeps", options.seed, content, options.json)
    console.print(f"written to {file}", style="dim")
    for dtype, one in found.items():
        say_drawn(_draw(file.with_name(f"{file.stem}_{dtype}.svg"), dtype, one, content))
    return int(not all(content["promises"].values()))


def _again(file: Path, shown: Console) -> int:
    """Judge what a file of results holds."""
    axes = json.loads(file.read_text())["axes"]
    found = {dtype: {axis: [Point(**p) for p in ps] for axis, ps in one.items()} for dtype, one in axes.items()}
    promises = _judged(found, shown)
    rewrite_result(file, drop=DROP, promises=promises)
    return int(not all(promises.values()))


def _judged(found: Axes, shown: Console) -> dict[str, bool]:
    """Show what was found, and say which axes have no cliff."""
    promises: dict[str, bool] = {}
    for dtype, axes in found.items():
        shown.print(_table(dtype, axes))
        for axis, points in axes.items():
            here = cliffs(points, axis == "batch")
            promises[f"{dtype}, {axis} {points[0].at} to {points[-1].at}: no cliff"] = not here
            for point, reason in here.items():
                shown.print(f"[red]cliff[/] at {axis} {point}, {dtype}: {reason}", highlight=False)
    print_promises(shown, promises)
    return promises


def cliffs(points: Sequence[Point], shared: bool = False) -> dict[int, str]:
    """Where they are, and why.

    Args:
        points: of one axis, in order.
        shared: whether as many rows share a step as the place says, so that times per token are parts of it.
    """
    places = [point.at for point in points]
    ours, peers = ([best * (p.at if shared else 1) for best, p in zip(bests, points, strict=True)]
                   for bests in zip(*(_bests(point) for point in points), strict=True))  # fmt: skip
    our_trend, their_trend = trend(places, ours), trend(places, peers)
    found: dict[int, str] = {}
    for number, point in enumerate(points):
        beside = [other for other in (number - 1, number + 1) if 0 <= other < len(points)]
        noise = point.noise + max((points[other].noise for other in beside), default=0.0)
        if point.behind:
            found[point.at] = f"a peer takes {point.ratio:.2f} of our time"
        if our_trend[number] < ours[number] * (1 - DROP - noise):
            by = our_trend[number] / ours[number]
            found.setdefault(point.at, f"by the points beside it, our step should take {by:.2f} of its time")
        for other in beside:
            ratio = points[other].ratio
            if other > 0 and peers[other] > peers[other - 1]:
                ratio *= min(1.0, their_trend[other] / peers[other])
            if point.ratio < ratio * (1 - DROP - point.noise - points[other].noise):
                reason = f"the ratio is {point.ratio:.2f}, and {ratio:.2f} at {points[other].at}"
                found.setdefault(point.at, reason)
    return found


def trend(places: Sequence[int], steps: Sequence[float]) -> list[float]:
    """What a step takes at each place by those beside it alone."""
    if len(places) == 1:
        return list(steps)
    between = []
    for number in range(1, len(places) - 1):
        before, here, after = (math.log(place) for place in places[number - 1 : number + 2])
        share = (here - before) / (after - before)
        between.append(steps[number - 1] ** (1 - share) * steps[number + 1] ** share)
    return [steps[1], *between, steps[-2] * places[-1] / places[-2]]


def _bests(point: Point) -> tuple[float, float]:
    """Milliseconds per token of ours, and of the best peer."""
    return point.ms[OURS], min(ms for name, ms in point.ms.items() if name != OURS)


def _measure(title: str, dtype: str, sizes: dict[str, int], options: argparse.Namespace) -> tuple[Measurement, int]:
    """Every candidate at these sizes, held against ours; and how many tokens the model knows."""
    wait_until_idle(options.allow_busy)
    console.print(title, style="dim", highlight=False)
    context = sizes["context"]
    prepared = decode(
        DTYPES[dtype], options.seed, sizes["batch"], options.hidden, sizes["layers"], context, context + ROOM
    )
    candidates, failed = calls(prepared, OURS, options.peers.split(","))
    if failed:
        raise SystemExit("\n".join(f"{title}, {name} did not run: {reason}" for name, reason in failed.items()))
    return measure(candidates, options.rounds, baseline=OURS), prepared.model.config.vocab_size


def _point(place: int, batch: int, measurement: Measurement) -> Point:
    times = {row.name: row.milliseconds / batch for row in measurement.rows}
    ratio = min(row.ratio for row in measurement.rows if row.name not in (OURS, FLOOR))
    return Point(place, {name: ms for name, ms in times.items() if name != FLOOR}, ratio, measurement.noise)


def _table(dtype: str, axes: dict[str, list[Point]]) -> Table:
    names = list(dict.fromkeys(name for points in axes.values() for point in points for name in point.ms))
    shown = Table(title=f"Milliseconds per token, {dtype}")
    for column in ("axis", "at", *names, "best peer over ours", "noise"):
        shown.add_column(column, justify="left" if column == "axis" else "right")
    for axis, points in axes.items():
        for point in points:
            times = [f"{point.ms[name]:.3f}" for name in names]
            shown.add_row(axis, str(point.at), *times, f"{point.ratio:.2f}", f"{point.noise:.1%}")
        shown.add_section()
    return shown


def _draw(file: Path, dtype: str, axes: dict[str, list[Point]], content: dict[str, Any]) -> Path | None:
    base = content["base"]
    panels = []
    for axis, points in axes.items():
        rest = ", ".join(f"{name} {size}" for name, size in base.items() if name != axis)
        at, names = [point.at for point in points], list(points[0].ms)
        times = [Curve(name, at, [point.ms[name] for point in points]) for name in names]
        spread = [point.ratio * point.noise for point in points]
        panels.append(Panel(f"{axis} ({rest})", times, Curve("", at, [p.ratio for p in points], spread)))
    title = f"One more token of a Llama, hidden {content['hidden']}, {dtype}"
    return draw_panels(file, title, "milliseconds per token", panels)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sweeps", description=__doc__)
    add = parser.add_argument
    for axis, places in AXES.items():
        add(f"--{axis}", default=",".join(map(str, places)), metavar="A,B", help="the first is that of other axes")
    add("--hidden", type=int, default=HIDDEN)
    add("--dtypes", default="float32", metavar="A,B")
    add("--peers", default=",".join(PEERS), metavar="A,B")
    add("--rounds", type=int, default=15)
    add("--seed", type=int, default=0)
    add("--again", action="store_true", help="judge what the file of --json holds, and measure nothing")
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/sweeps.json; pictures lie beside it")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
