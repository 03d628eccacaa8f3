"""Is fusec right on a GPU, and ahead of Inductor there?

``python -m bench.gpu [--only NAME] [--stages kernels,models] [--budget SECONDS]``, on a machine with a GPU. Stages:
*kernels* runs every kernel of the models on random data into memory that is poisoned, *sanitizer* the same of small
models under compute-sanitizer, *launching* asks whether recorded launches replay right and what a launch costs,
*rows* holds operations on rows alone against the numeric rule and then times them, *models* does so with every model,
*compile* times the compile in fresh processes with empty caches. What is found is written after every step, so that
nothing is lost where time runs out, and ``--continue`` goes on from there: runs of the same code on the same chip add
up until nothing is missing.

``--toy`` runs all of it without a GPU, in Triton's interpreter at toy sizes: to see that the command runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench import launching
from bench.compile_time import in_fresh_process
from bench.devices import Budget, Gpu, TooLate, Toy
from bench.gpu_report import PEERS, draw, tables
from bench.gpu_run import BUDGET_S, STAGES, Run
from bench.gpu_workloads import DTYPE, ROWS, Rows, Turn, Workload, ragged, workloads
from bench.harness import BASELINE, OURS, Measurement, console, measure, report
from bench.numerics import Float64, default_type, in_float64
from bench.peers import peer
from bench.regions import graphs_of, other_forms, regions_of
from bench.workloads import described
from fusec.codegen.program.recordings import PASS_NAME as RECORDING
from fusec.codegen.tile.configuration import KernelConfig
from fusec.config import Config
from fusec.ir.graph import Node
from fusec.ir.structure import structure
from fusec.reference.contract import compare_outputs

CHECKED_LAYERS = 2
"""Of every model whose kernels are checked one by one: further layers have the same."""
TRAFFIC = 1 << 30
"""Bytes that an operation on rows moves: many times what a cache holds."""
REPLAYS = 2
"""Calls after the first: those that record launches or replay them are held against the rule too."""
SETS = 3
"""Of its operands, taken in turn."""
SANITIZER = "compute-sanitizer"
SANITIZED_S = 100
"""Seconds that it may take."""
SANITIZED_SHARE = 0.7
"""Of them, in which kernels are begun: starting torch takes long in it, too."""


def main(words: list[str] | None = None) -> int:
    """Check, then measure; status 1 where something of ours is wrong, or behind what it has to be."""
    options = _parser().parse_args(words)
    if unknown := set(options.stages.split(",")) - set(STAGES):
        _parser().error(f"no stage is called {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    warnings.filterwarnings("ignore")
    if not (options.toy or torch.cuda.is_available()):
        raise SystemExit(
            "bench.gpu measures a GPU, and torch finds none\n"
            "  fix:   run it on a machine with one and a CUDA build of torch, or give --toy to see that it runs"
        )
    run = Run(options, Toy() if options.toy else Gpu(), Budget(options.budget))
    if options.goes_on:
        run.goes_on()
    stages = dict(zip(STAGES, (_kernels, _sanitizer, _launching, _rows, _models, _compile), strict=True))
    with run.device.compiling(), torch.no_grad():
        for name, end in run.ends.items():
            run.step(name)
            try:
                with run.budget.part(end):
                    stages[name](run)
            except Exception as problem:  # what the next stages find is not lost for it
                traceback.print_exc()
                run.fails(name, described(problem))
            run.write()
    file, shown = run.write(), report(options.width)
    for one in tables(run.found, run.claims):
        shown.print(one)
    for what in run.failures:
        shown.print(f"[red]FAIL[/] {what}", highlight=False, soft_wrap=True)
    console.print(f"written to {file}", style="dim", highlight=False)
    draw(file.with_suffix(".svg"), run.claims)
    return int(bool(run.failures) or any(claim["holds"] is False for claim in run.claims))


# ---------------------------------------------------------------------- what is right


def _kernels(run: Run) -> None:
    """Every distinct kernel of every model in every mode, held against its body on what it gets in the model.

    Products run a second time with blocks by tensor descriptors, where the device has such.
    """
    rows = run.found.setdefault("kernels", [])
    seen = set[Any]()
    for workload in run.chosen((*workloads(run.small), *ragged(run.small))):
        run.part(
            f"kernels of {workload.title}", STAGES["kernels"].least, partial(_kernels_of, run, workload, seen, rows)
        )


def _kernels_of(run: Run, workload: Workload, seen: set[Any], rows: list[dict[str, Any]]) -> None:
    from fusec.codegen.triton import TritonTarget

    rows[:] = [row for row in rows if row["in"] != workload.title]  # an earlier run left them unfinished
    few = replace(workload, layers=min(workload.layers, CHECKED_LAYERS))
    model = few.build(run.device.device, run.options.seed)
    turn = Turn(few, model, run.options.seed)
    turn.rewind()
    captured = graphs_of(model, turn.inputs)
    for mode in run.modes:
        turn.rewind()  # the capture has moved the places of the caches on
        for graph, arguments in captured:
            for region, inputs in regions_of(graph.copy(), arguments, Config(mode=mode)):
                if (key := structure(region.body)) in seen:
                    continue
                seen.add(key)
                forms = other_forms(region, TritonTarget().machine(Config()))
                for config in (None, *[form for form in forms if form.descriptors][:1]):
                    row = {"in": workload.title, "mode": mode, "config": str(config or "default")}
                    what = f"kernel {region.attributes['label']} of {workload.title}, {mode}, {row['config']}"
                    if run.late(what, 3):
                        continue
                    rows.append(row | _kernel(region, inputs, config))
                    if rows[-1]["problem"]:
                        run.fails(what, rows[-1]["problem"])


def _kernel(region: Node, inputs: list[Any], config: KernelConfig | None) -> dict[str, Any]:
    from fusec.codegen.triton import check

    label = str(region.attributes["label"])
    found = {"kernel": label, "ratio": 0.0, "problem": ""}
    try:
        name = "".join(c if c.isalnum() else "_" for c in label)
        outcome = check.check_region(region, name, chips=(), inputs=inputs, config=config)
        return found | {"ratio": outcome.comparison.ratio, "problem": "" if outcome.ok else str(outcome)}
    except Exception as problem:
        return found | {"problem": described(problem)}


def _sanitizer(run: Run) -> None:
    """The kernels of small models once more, in a process whose every access to memory is looked at."""
    tool = shutil.which(SANITIZER)
    found = run.found.setdefault("sanitizer", {"tool": tool or "not present", "said": ""})
    if tool is None or run.options.toy:
        found["said"] = "not present" if tool is None else "there is no GPU"
    else:
        seconds = min(SANITIZED_S, run.budget.left)
        run.part(SANITIZER, STAGES["sanitizer"].least, lambda: found.update(said=_sanitized(run, tool, seconds)))
    run.step(f"{SANITIZER}: {found['said']}")


def _sanitized(run: Run, tool: str, seconds: float) -> str:
    """What the sanitizer says, if it works here at all: on some machines it may not look at the GPU."""
    end = time.monotonic() + seconds

    def said(*words: str) -> str:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "86", sys.executable, *words]
        # Without torch's cache of memory every tensor has a place of its own; what lies beyond it is nobody's.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        left = end - time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left, check=False)
        return f"status {done.returncode}: {(done.stdout + done.stderr)[-600:]}" if done.returncode else ""

    try:
        if refused := said("-c", "import torch; torch.ones(8, device='cuda').sum().item()"):
            return f"does not work here: {refused}"
        with tempfile.TemporaryDirectory() as folder:
            file, budget = Path(folder) / "kernels.json", f"{SANITIZED_SHARE * (end - time.monotonic()):.0f}"
            options = ["--modes", run.options.modes, "--budget", budget, "--json", str(file)]
            if wrong := said("-m", "bench.gpu", "--small", "--stages", "kernels", *options):
                run.fails(SANITIZER, wrong)
                return wrong
            return f"no error in {len(json.loads(file.read_text())['kernels'])} kernels"
    except subprocess.TimeoutExpired:
        return f"not finished within {seconds:.0f} s"


def _launching(run: Run) -> None:
    """Recorded launches on data that moves, streams, memory; then what a launch costs in each way."""
    if not isinstance(run.device, Toy):  # on a CPU nothing is recorded
        run.part("launching", STAGES["launching"].least, partial(_launches, run))


def _launches(run: Run) -> None:
    found = run.found["launching"] = {"problems": {}}
    for what, problem in launching.problems(run.device.device):
        found["problems"][what] = problem
        if problem:
            run.fails(what, problem)
    found["us"] = launching.costs(run.device.device)


# ---------------------------------------------------------------------- what is measured


def _models(run: Run) -> None:
    """Every model: candidates compiled, held against the rule, then timed side by side."""
    rows = run.found.setdefault("models", {})
    for workload in run.chosen(workloads(run.small, run.options.whole)):
        run.part(workload.title, STAGES["models"].least, partial(_model, run, workload, rows))
        torch._dynamo.reset()


def _model(run: Run, workload: Workload, rows: dict[str, Any]) -> None:
    seed = run.options.seed
    row = rows[workload.title] = {
        "layers": workload.layers, "depth": workload.depth, "batch": workload.batch, "length": workload.length,
        "least": workload.least, "aim": workload.aim, "candidates": {},
    }  # fmt: skip
    model = workload.build(run.device.device, seed)
    prepared = workload.prepare(model, seed)
    exact = in_float64(model)
    with Float64(), default_type(torch.float64):
        reference = Turn(workload, exact, seed).results(exact)
    del exact
    eager = Turn(workload, model, seed)
    expected = eager.results(model)
    candidates: dict[str, Callable[[], object]] = {BASELINE: partial(eager, model)}
    torch._dynamo.reset()
    for name in (*run.ours, *run.peers):
        found: dict[str, Any] = {}
        row["candidates"][name] = found
        if run.late(f"{workload.title}, {name}", 20):
            continue
        run.step(f"  {name}")
        try:
            with run.budget.kept():
                candidates[name] = _checked(run, workload, name, model, expected, reference, found)
        except TooLate:
            run.leaves_out(f"{workload.title}, {name}")
            torch._dynamo.reset()
        except Exception as problem:
            found["problem"] = described(problem)
            if name in run.ours:
                traceback.print_exc()
                run.fails(f"{workload.title}, {name}", found["problem"])
            else:
                run.step(f"  {name} does not run: {found['problem']}")
        run.device.clear()
    del reference, expected
    if run.late(f"times of {workload.title}", 10):
        return
    measurement = measure(candidates, run.options.rounds, 20.0, clock=run.device.clock)
    row |= _figures(prepared, measurement, [name for name in run.ours if row["candidates"][name].get("right")]) | {
        "measurement": measurement.to_json()
    }
    row["peak_bytes"] = run.device.peak_bytes()


def _checked(
    run: Run, workload: Workload, name: str, model: Any, eager: Sequence[Tensor], reference: Sequence[Tensor],
    found: dict[str, Any],
) -> Callable[[], object]:  # fmt: skip
    """A candidate's call, compiled and held against the rule: wrong ones are timed, but win nothing."""
    from fusec import dynamo

    turn, compiled = Turn(workload, model, run.options.seed), peer(name, model)
    known, fallen = len(dynamo.compiled_graphs()), len(dynamo.fallbacks())
    run.device.poison()
    run.device.wait()
    start = time.perf_counter()
    first = turn.results(compiled)
    run.device.wait()
    found["first_call_s"] = time.perf_counter() - start
    *_, last = (turn.results(compiled) for _ in range(REPLAYS))
    comparison = compare_outputs([*eager, *eager], [*first, *last], [*reference, *reference], DTYPE)
    found |= {"ratio": comparison.ratio, "right": comparison.passed}
    if name in run.ours:
        found |= _inside(dynamo.compiled_graphs()[known:])
        if not comparison.passed:
            run.fails(f"{workload.title}, {name}", str(comparison))
        if found["not recorded"] and isinstance(run.device, Gpu):
            run.fails(f"{workload.title}, {name}", f"launches one by one: {'; '.join(found['not recorded'])}")
        if left := dynamo.fallbacks()[fallen:]:
            run.fails(f"{workload.title}, {name}", f"left to ATen: {'; '.join(left)}")
    return partial(turn, compiled)


def _inside(graphs: Sequence[Any]) -> dict[str, Any]:
    """What a call of ours does, by kind of step, what got no kernel or was put aside, and what was not recorded."""
    from fusec.codegen.triton.autotune.tuner import PASS_NAME as TUNING

    steps = [step.kind for graph in graphs for step in graph.program.steps]
    remarks = [remark for graph in graphs for remark in graph.remarks.of("failure", "missed")]
    return {
        "steps": dict(Counter(steps)),
        "no kernel": [f"{r.message}: {r.reason}" for r in remarks if r.kind == "failure" and r.pass_name != TUNING],
        "rejected": [f"{r.message}: {r.reason}" for r in remarks if r.kind == "failure" and r.pass_name == TUNING],
        "not recorded": [f"{r.message}: {r.reason}" for r in remarks if (r.kind, r.pass_name) == ("missed", RECORDING)],
    }


def _figures(prepared: Any, measurement: Measurement, ours: Sequence[str]) -> dict[str, Any]:
    """What the best of ours reaches."""
    mine = [row for row in measurement.rows if row.name in ours]
    if not mine:
        return {}
    best = min(mine, key=lambda row: row.milliseconds)
    seconds = best.milliseconds / 1e3
    return {
        "ours": best.name, "ms": best.milliseconds, "gb_s": prepared.weight_bytes / seconds / 1e9,
        "tflop_s": prepared.flops / seconds / 1e12, "tokens_s": prepared.rows / seconds,
    }  # fmt: skip


def _rows(run: Run) -> None:
    """Operations on rows by themselves, beside a copy that moves as many bytes in the same rounds."""
    found, traffic = run.found.setdefault("rows", {}), 12 << 10 if run.small else TRAFFIC
    for rows in run.chosen(ROWS):
        run.part(f"{rows.title} rows", STAGES["rows"].least, partial(_row_kernel, run, rows, traffic, found))


def _row_kernel(run: Run, rows: Rows, traffic: int, kernels: dict[str, Any]) -> None:
    draw = torch.Generator(run.device.device).manual_seed(run.options.seed)
    columns = 96 if traffic < TRAFFIC else rows.columns
    rows = replace(rows, columns=columns)
    count = traffic // ((rows.operands + 1) * columns * DTYPE.itemsize)
    sets = [rows.inputs(count, run.device.device, draw) for _ in range(SETS)]
    names, function = [OURS, *(name for name in run.peers if " " not in name)], cast(Any, rows.function)
    runners: dict[str, Callable[..., Any]] = {BASELINE: function} | {name: peer(name, function) for name in names}
    found = kernels[rows.title] = {"rows": count, "columns": columns, "least": 0.85, "aim": 0.92}
    for taken in (1, 37, count):
        torch._dynamo.reset()  # each number of rows is compiled as it is
        some = [x[:taken] if x.ndim > 1 else x for x in sets[0]]
        run.device.poison()
        mine = runners[OURS](*some)
        with Float64():
            exact = function(*(x.double() for x in some))
        comparison = compare_outputs([function(*some)], [mine], [exact], DTYPE)
        if not comparison.passed:
            run.fails(f"{rows.title}, {taken} rows", str(comparison))
            return
    del some, mine, exact
    halves = [
        [torch.ones(traffic // 2, dtype=torch.uint8, device=run.device.device) for _ in "ab"] for _ in range(SETS)
    ]
    candidates = {name: _in_turn(runner, sets) for name, runner in runners.items()}
    candidates["copy"] = _in_turn(lambda a, b: b.copy_(a), halves)
    measurement = measure(candidates, run.options.rounds, 5.0, clock=run.device.clock)
    ours, copied = measurement.row(OURS).milliseconds, measurement.row("copy").milliseconds
    found |= {"share": copied / ours, "gb_s": traffic / ours / 1e6, "copy_gb_s": traffic / copied / 1e6}
    found["measurement"] = measurement.to_json()


def _in_turn(function: Callable[..., Any], sets: Sequence[Sequence[Tensor]]) -> Callable[[], object]:
    """A call on the next operands each time, which no cache holds any more."""
    following = cycle(sets)
    return lambda: function(*next(following))


def _compile(run: Run) -> None:
    """A first call in a fresh process with empty caches, Dynamo's part taken off: what the backend alone takes."""
    layers, hidden = (1, 64) if run.small else (12, 1024)
    found = run.found.setdefault("compile", {"layers": layers, "hidden": hidden, "least": 2.0, "aim": 5.0})
    for name in (OURS, *run.peers[:1]):
        run.part(f"compile time of {name}", STAGES["compile"].least, partial(_cold, run, name, found))


def _cold(run: Run, name: str, found: dict[str, Any]) -> None:
    device, seconds = run.device.device.type, min(150, run.budget.left)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found[name] = in_fresh_process(
                name, found["layers"], folder, found["hidden"], run.options.seed, device, seconds
            )
        except subprocess.TimeoutExpired:
            run.leaves_out(f"compile time of {name}")


# ---------------------------------------------------------------------- the rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", metavar="NAME", help="a part of the name of what is checked and measured")
    add("--stages", default=",".join(STAGES), metavar="A,B", help=f"of {', '.join(STAGES)}")
    add(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="what is not begun by then is left out, and said",
    )
    add("--continue", dest="goes_on", action="store_true", help="measure what the file has not yet, of the same code")
    add("--modes", default="default,max-autotune", metavar="A,B", help="of fusec")
    add("--peers", default=",".join(PEERS), metavar="A,B", help="a mode behind a name or none")
    add("--whole", action="store_true", help="all layers of every model; otherwise 8 of 32 stand in for Llama 8B")
    add("--small", action="store_true", help="toy sizes, on the GPU")
    add("--toy", action="store_true", help="toy sizes without a GPU, in Triton's interpreter")
    add("--rounds", type=int, default=15)
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default bench/results/gpu.json; a picture lies beside it")
    add("--width", type=int, default=None, help="of the tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
