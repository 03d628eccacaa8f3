"""Results as pictures: SVG files beside the JSON, the same bytes for the same figures, readable without colours."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import console

OURS = "#0072b2"
OTHERS = ("#d55e00", "#6b6b6b", "#009e73", "#cc79a7")
"""Colours that stay apart for colour-blind eyes (Okabe and Ito's); each candidate has a mark of its own besides."""
MARKS = ("s", "^", "D", "v")
SOFT = "#9a9a9a"
"""Of what is only there to read the rest by."""


@dataclass(frozen=True)
class Curve:
    """One value at each place of an axis."""

    name: str
    at: Sequence[float]
    values: Sequence[float]
    spread: Sequence[float] = ()
    """Half-width of the bar at each value, where it has one."""


@dataclass(frozen=True)
class Panel:
    """An axis with its curves: times above, and beneath them how many times as fast we are."""

    title: str
    times: Sequence[Curve]
    """Ours first."""
    ratio: Curve


@dataclass(frozen=True)
class Line:
    """A line of a chart of ratios."""

    title: str
    values: Mapping[str, float | None]
    """By claim, in an order that is the same for all lines; None where nothing was measured."""
    least: Mapping[str, float] = field(default_factory=dict)
    """What each has to be."""


def draw_panels(file: Path, title: str, times_label: str, panels: Sequence[Panel]) -> Path | None:
    """Times over each axis, both in powers of two, and the ratios beneath; None where matplotlib is missing."""
    pyplot = _pyplot()
    if pyplot is None:
        return None
    figure, axes = pyplot.subplots(
        2, len(panels), figsize=(4.1 * len(panels), 5.4), sharex="col", sharey="row", squeeze=False,
        height_ratios=(3, 2), layout="constrained",
    )  # fmt: skip
    figure.suptitle(title)
    for column, panel in enumerate(panels):
        above, beneath = axes[0][column], axes[1][column]
        for number, curve in enumerate(panel.times):
            colour, mark = (OURS, "o") if not number else (OTHERS[number - 1], MARKS[number - 1])
            above.plot(curve.at, curve.values, color=colour, marker=mark, markersize=4.5, lw=1 if number else 2)
        above.set(xscale="log", yscale="log")
        ratio = panel.ratio
        beneath.axhline(1, color=SOFT, lw=1)
        beneath.errorbar(
            ratio.at, ratio.values, yerr=ratio.spread or None, color=OURS, marker="o", markersize=4.5, lw=2
        )
        for at, value in zip(ratio.at, ratio.values, strict=True):
            beneath.annotate(f"{value:.2f}", (at, value), (0, 7), textcoords="offset points", ha="center", fontsize=8)
        beneath.set(xlabel=panel.title)
        beneath.set_xticks(list(ratio.at), [f"{at:g}" for at in ratio.at])
        beneath.minorticks_off()
    for column, panel in enumerate(panels):  # only now does the axis that all share have its ends
        _name_curves(axes[0][column], panel.times)
    axes[1][0].set_ylim(0, 1.2 * max(value for panel in panels for value in (1, *panel.ratio.values)))
    axes[0][0].set_ylabel(times_label)
    axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[1][0].set_ylabel("times as fast\nas the best other")
    return _write(pyplot, figure, file)


def draw_ratios(file: Path, title: str, lines: Sequence[Line]) -> Path | None:
    """A line for each question with a mark for each claim, and a tick where it has to be at least."""
    pyplot = _pyplot()
    if pyplot is None:
        return None
    claims = list(dict.fromkeys(claim for line in lines for claim in line.values))
    figure, axes = pyplot.subplots(figsize=(8.2, 1.5 + 0.34 * len(lines)), layout="constrained")
    axes.axvline(1, color=SOFT, lw=1)
    for number, claim in enumerate(claims):
        colour, mark = (OURS, "o") if not number else (OTHERS[number - 1], MARKS[number - 1])
        offset = 0.16 * (number - (len(claims) - 1) / 2) * 2
        places = [(line.values.get(claim), row + offset, line.least.get(claim)) for row, line in enumerate(lines)]
        known = [(value, row) for value, row, _ in places if value is not None]
        asked = [(least, row) for value, row, least in places if value is not None and least is not None]
        if known:
            axes.scatter(*zip(*known, strict=True), color=colour, marker=mark, s=34, zorder=3, label=claim)
        if asked:
            axes.scatter(*zip(*asked, strict=True), color=colour, marker="|", s=90, zorder=2)
        for value, row in known:
            axes.annotate(f"{value:.2f}", (value, row), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.scatter([], [], color="black", marker="|", s=90, label="at least asked")
    axes.set_yticks(range(len(lines)), [line.title for line in lines])
    axes.set(xlim=(0, None))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, ncols=len(claims) + 1, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    figure.suptitle(title)
    return _write(pyplot, figure, file)


def say_drawn(picture: Path | None) -> None:
    """Where a picture lies, or why there is none."""
    said = f"drawn in {picture}" if picture else "not drawn: matplotlib is not installed"
    console.print(said, style="dim", highlight=False)


def _name_curves(axes: Any, curves: Sequence[Curve]) -> None:
    """Names behind the last points, moved apart where they would lie on each other; the axis is logarithmic."""
    ends = sorted(range(len(curves)), key=lambda number: curves[number].values[-1])
    low, high = (math.log(bound) for bound in axes.get_ylim())
    apart, below = 0.07 * (high - low), -math.inf
    for number in ends:
        curve = curves[number]
        below = max(math.log(curve.values[-1]), below + apart)
        axes.annotate(
            curve.name, (curve.at[-1], math.exp(below)), (8, 0), textcoords="offset points", va="center", fontsize=9,
            color=OTHERS[number - 1] if number else OURS, annotation_clip=False,
        )  # fmt: skip


def _pyplot() -> Any:
    """matplotlib's, set so that the same data gives the same file; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcdefaults()
    pyplot.rcParams.update(
        {"svg.hashsalt": "fusec", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
         "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}
    )  # fmt: skip
    return pyplot


def _write(pyplot: Any, figure: Any, file: Path) -> Path:
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return file
