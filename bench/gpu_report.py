"""What ``bench.gpu`` found: claims that hold or do not, tables, a picture, and the table of docs/performance.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.gpu_workloads import ROWS, workloads
from bench.harness import FLOOR, NOT_MEASURED
from bench.pictures import Line, draw_ratios, say_drawn

CLAIM = "claims"
INDUCTOR, COPY, COMPILE = "Inductor's best time / ours", "share of a copy's bandwidth", "Inductor's / ours"

PEERS = ("inductor", "inductor max-autotune")
"""All that Inductor's best time is the best of."""

Claim = dict[str, Any]
"""What is asked of one figure: what, unit, least, aim, have (None where it was not measured) and whether it holds."""


def claims(found: Mapping[str, Any], ours: Sequence[str] = ("fusec",)) -> list[Claim]:
    """Everything that is asked, with what was found so far; ``found`` may be empty."""
    models, rows, compiled = (found.get(stage, {}) for stage in ("models", "rows", "compile"))
    asked = [(w.title, INDUCTOR, w.least, w.aim, _best_ratio(models.get(w.title, {}), ours)) for w in workloads()]
    asked += [(f"{r.title} rows", COPY, 0.85, 0.92, rows.get(r.title, {}).get("share")) for r in ROWS]
    asked.append(("compile, cold", COMPILE, 2.0, 5.0, _compile_ratio(compiled)))
    return [
        {"what": what, "unit": unit, "least": least, "aim": aim, "have": have,
         "holds": None if have is None or least is None else have >= least}
        for what, unit, least, aim, have in asked
    ]  # fmt: skip


def _best_ratio(row: Mapping[str, Any], ours: Sequence[str]) -> float | None:
    """The best time of Inductor over the best of ours; None unless each of its modes was timed, or does not run."""
    times = {r["name"]: r["milliseconds"] for r in row.get("measurement", {}).get("rows", ())}
    right = [name for name in ours if row.get("candidates", {}).get(name, {}).get("right")]
    mine = min((times[name] for name in right if name in times), default=None)
    known = all(name in times or row.get("candidates", {}).get(name, {}).get("problem") for name in PEERS)
    theirs = min((times[name] for name in PEERS if name in times), default=None) if known else None
    return None if mine is None or theirs is None else theirs / mine


def _compile_ratio(compiled: Mapping[str, Any]) -> float | None:
    if not {"fusec", "inductor"} <= compiled.keys():
        return None
    return float(compiled["inductor"]["ready"]) / float(compiled["fusec"]["ready"])


def tables(found: Mapping[str, Any], asked: Sequence[Claim]) -> list[Table]:
    """What there is to see in a terminal."""
    shown = [_claims_table(asked)]
    if models := found.get("models"):
        shown.append(_times_table(models))
    if kernels := found.get("kernels"):
        worst = max(row["ratio"] for row in kernels)
        wrong = [row for row in kernels if row["problem"]]
        table = Table(
            title=f"Kernels: {len(kernels) - len(wrong)} of {len(kernels)} right, worst {worst:.2f} of the bound"
        )
        for column in ("kernel", "in", "mode", "problem"):
            table.add_column(column)
        for row in wrong:
            table.add_row(row["kernel"], row["in"], row["mode"], row["problem"])
        shown.append(table)
    return shown


def _claims_table(found: Sequence[Claim]) -> Table:
    table = Table(title="What is asked")
    for column in ("", "what", "at least", "aim", "measured"):
        table.add_column(column)
    for claim in found:
        mark = "" if claim["holds"] is None else "[green]" if claim["holds"] else "[red]"
        table.add_row(claim["what"], claim["unit"], *(_figure(claim, key) for key in ("least", "aim")),
                      f"{mark}{_figure(claim, 'have')}")  # fmt: skip
    return table


def _times_table(models: Mapping[str, Any]) -> Table:
    table = Table(title="Milliseconds of a call")
    names = list(dict.fromkeys(r["name"] for m in models.values() for r in m.get("measurement", {}).get("rows", ())))
    names = [name for name in names if name != FLOOR]
    for column in ("", "layers", *names, "GB/s", "TFLOP/s", "launches", "noise"):
        table.add_column(column)
    for title, model in models.items():
        times = {r["name"]: f"{r['milliseconds']:.3f}" for r in model.get("measurement", {}).get("rows", ())}
        steps: dict[str, int] = next((c["steps"] for c in model["candidates"].values() if "steps" in c), {})
        noise = f"{model['measurement']['noise']:.1%}" if "measurement" in model else ""
        figures = (f"{model[key]:.0f}" if key in model else "" for key in ("gb_s", "tflop_s"))
        table.add_row(title, f"{model['layers']} of {model['depth']}", *(times.get(name, "-") for name in names),
                      *figures, str(sum(steps.values())), noise)  # fmt: skip
    return table


def draw(file: Path, found: Sequence[Claim]) -> None:
    """The measured ratios as a picture, with the least that is asked of each; none where nothing was measured."""
    lines = [
        Line(c["what"], {INDUCTOR: c["have"]}, {INDUCTOR: c["least"]})
        for c in found
        if c["unit"] == INDUCTOR and c["have"] is not None and c["least"] is not None
    ]
    if lines:
        say_drawn(draw_ratios(file, "Inductor's best time over ours; beyond 1 we are ahead", lines))


def page_table(result: Mapping[str, Any] | None) -> str:
    """Return the table of docs/performance.md for a run; without one it says of every figure that none was measured."""
    lines = [f"{_preface(result)}\n", "| workload | what | at least | aim | measured |", "|---|---|---|---|---|"]
    for claim in result[CLAIM] if result else claims({}):
        cells = (_figure(claim, key) for key in ("least", "aim", "have"))
        lines.append(f"| {claim['what']} | {claim['unit']} | {' | '.join(cells)} |")
    if result:
        lines += ["", "![Inductor's best time over ours, with what is asked](../bench/results/gpu.svg)"]
    return "\n".join(lines) + "\n"


def _preface(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "No figure here was measured: no GPU was at hand. `python -m bench.gpu` measures them on one."
    versions = ", ".join(
        f"{name} {result['versions'][name]}" for name in ("torch", "triton") if name in result["versions"]
    )
    depth = "all layers" if result["layers"] == "all" else "8 of 32 layers stand in for the 8B model"
    where = f"{result['chip']}, {result['time'][:10]}, {versions}, CUDA {result['cuda']}"
    return f"{where}; bfloat16, random weights; {depth}. `python -m bench.gpu`."


def _figure(claim: Claim, key: str) -> str:
    value = claim[key]
    if value is None:
        return NOT_MEASURED if key == "have" else "-"
    return f"{value:.0%}" if claim["unit"] == COPY else f"{value:.2f}" if key == "have" else f"{value:g}"
