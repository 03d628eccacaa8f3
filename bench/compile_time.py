"""How long does compiling take, cold and with what an earlier process built, and how does it grow with depth?

``python -m bench.compile_time``

Every figure is taken in a fresh process: cold with empty caches, and then, at the least depth, warm with those that the
cold one left. Python keeps its bytecode, as it does by default. "Own" is the time from AOTAutograd's hand-over of the
ATen graph to the callable; the rest of the first call is Dynamo and AOTAutograd, which all backends pay.
"""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.devices import Gpu, Toy
from bench.families import FAMILIES, Sizes
from bench.harness import print_promises, progress, report
from bench.machine import wait_until_idle
from bench.peers import peer
from bench.record import write_result

MARK = "compile-time "
"""Begins the line by which a measured process answers."""
COLD, WARM = "cold", "warm"
OWN, WHOLE = 1 / 4, 1 / 2
"""Cold, at most this share of the other backend's own time, and of its first call from end to end."""
WARM_SECONDS = 1.0
"""Own time with the caches of an earlier process, at most."""
GROWTH = {2: 1.2, 4: 1.5}
"""By how many times as many layers there are: own time over that of the least depth, at most."""


def main(words: list[str] | None = None) -> int:
    """Measure each backend at each depth; status 1 when fusec breaks its promises."""
    options = _parser().parse_args(words)
    if options.one:
        found = first_call(options.one, options.depths, options.hidden, options.seed, options.device)
        print(MARK + json.dumps(found))
        return 0
    console, backends = report(options.width), options.backends.split(",")
    depths = [int(word) for word in options.depths.split(",")]
    rows = []
    with progress() as bar:
        task = bar.add_task("compile", total=len(backends) * len(depths) * options.repeats)
        for _ in range(options.repeats):  # interleaved, as in the harness
            for layers in depths:
                for backend in backends:
                    bar.update(task, description=f"{backend}, {layers} layers")
                    with tempfile.TemporaryDirectory() as folder:
                        for caches in (COLD, WARM) if layers == depths[0] else (COLD,):
                            wait_until_idle(options.allow_busy)
                            before = _files(folder)
                            row = in_fresh_process(backend, layers, folder, options.hidden, options.seed)
                            rows.append(row | {"caches": caches, "files": _files(folder) - before})
                    bar.advance(task)
    best = {(b, d, c): _best(rows, b, d, c) for b, d, c in {(r["backend"], r["layers"], r["caches"]) for r in rows}}
    console.print(_table(best, depths, backends))
    promises = _promises(best, depths, backends)
    print_promises(console, promises)
    content = {"hidden": options.hidden, "runs": rows, "promises": promises}
    console.print(f"written to {write_result('compile_time', options.seed, content, options.json)}", style="dim")
    return int(not all(promises.values()))


def first_call(name: str, layers: str, hidden: int, seed: int, device: str = "cpu") -> dict[str, Any]:
    """Compile one model in this process; seconds from end to end and of the backend alone.

    On a GPU, where kernels may be compiled at their first launch, "ready" counts: until the first call has ended.
    """
    sizes = Sizes(hidden, int(layers), heads=max(2, hidden // 64))
    model = FAMILIES["llama"].build(sizes, seed=seed)
    inputs = {k: v.to(device) for k, v in FAMILIES["llama"].sample(1, 16, "none", seed).items()}
    model = model.to(device, torch.bfloat16) if device == "cuda" else model
    wait = (Gpu() if device == "cuda" else Toy()).wait
    with torch.no_grad():
        model(**inputs)
        wait()
        with own_seconds() as spans:
            run, start = peer(name, model), time.perf_counter()
            run(**inputs)
            wait()
            end = time.perf_counter()
        run(**inputs)
        wait()
    return {
        "backend": name,
        "layers": int(layers),
        "seconds": end - start,
        "own": sum(after - before for before, after in spans),
        "ready": end - min((before for before, _ in spans), default=end),
        "graphs": len(spans),
        "call": time.perf_counter() - end,
    }


@contextlib.contextmanager
def own_seconds() -> Iterator[list[tuple[float, float]]]:
    """When what AOTAutograd hands graphs to, whichever backend that is, begins and ends.

    Every module that holds ``aot_module_simplified`` gets one that puts a clock around the compilers it is given.
    """
    importlib.import_module("torch._dynamo.backends.common")  # where Inductor's reference is
    aot_autograd: Any = importlib.import_module("torch._functorch.aot_autograd")
    with contextlib.suppress(ImportError):
        importlib.import_module("fusec.dynamo")
    original = aot_autograd.aot_module_simplified
    spans: list[tuple[float, float]] = []

    def timed(compiler: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if compiler is None:
            return None

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return compiler(*args, **kwargs)
            finally:
                spans.append((start, time.perf_counter()))

        return run

    def replacement(*args: Any, **kwargs: Any) -> Any:
        names = ("fw_compiler", "bw_compiler", "inference_compiler")
        args = (*args[:2], *(timed(argument) for argument in args[2:3]), *args[3:])
        return original(*args, **{name: timed(v) if name in names else v for name, v in kwargs.items()})

    holders = [m for m in list(sys.modules.values()) if vars(m).get("aot_module_simplified") is original]
    for module in holders:
        module.aot_module_simplified = replacement  # type: ignore[attr-defined]
    try:
        yield spans
    finally:
        for module in holders:
            module.aot_module_simplified = original  # type: ignore[attr-defined]


def _files(folder: str) -> int:
    return sum(path.is_file() for path in Path(folder).rglob("*"))


def in_fresh_process(
    backend: str, layers: int, folder: str, hidden: int, seed: int, device: str = "cpu", seconds: float | None = None
) -> dict[str, Any]:
    """What ``first_call`` finds with the caches in a folder.

    Raises:
        RuntimeError: where the process gives no answer.
        subprocess.TimeoutExpired: where it takes longer than ``seconds``.
    """
    command = [sys.executable, "-m", "bench.compile_time", "--one", backend, "--depths", str(layers)]
    command += ["--hidden", str(hidden), "--seed", str(seed), "--device", device]
    caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEC_CACHE_DIR"), folder)
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | caches
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=seconds)
    answer = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if answer is None:
        raise RuntimeError(f"{backend} did not compile {layers} layers\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(answer.removeprefix(MARK))
    return result


def _best(rows: list[dict[str, Any]], backend: str, layers: int, caches: str) -> dict[str, Any]:
    same = [r for r in rows if (r["backend"], r["layers"], r["caches"]) == (backend, layers, caches)]
    return min(same, key=lambda r: float(r["own"]))


Best = dict[tuple[str, int, str], dict[str, Any]]
"""The best run by backend, depth and state of the caches."""


def _table(best: Best, depths: list[int], backends: list[str]) -> Table:
    shown = Table(title="Compiling Llama: own seconds (first call, end to end)")
    shown.add_column("layers", justify="right")
    shown.add_column("caches")
    for backend in backends:
        shown.add_column(backend, justify="right")
    for layers in depths:
        for caches in (COLD, WARM):
            found = [best[backend, layers, caches] for backend in backends if (backend, layers, caches) in best]
            if found:
                shown.add_row(str(layers), caches, *(f"{row['own']:.2f} ({row['seconds']:.2f})" for row in found))
    return shown


def _promises(best: Best, depths: list[int], backends: list[str]) -> dict[str, bool]:
    """What is promised of the first backend against the second, of warm caches, and of depth."""
    ours, shallow = backends[0], depths[0]
    cold, warm = (best[ours, shallow, caches] for caches in (COLD, WARM))
    promises = {}
    if len(backends) > 1:
        theirs = best[backends[1], shallow, COLD]
        promises[f"{shallow} layers, own: at most {OWN} of {backends[1]}'s"] = cold["own"] <= theirs["own"] * OWN
        promises[f"{shallow} layers, end to end: at most {WHOLE}"] = cold["seconds"] <= theirs["seconds"] * WHOLE
    promises[f"{shallow} layers, own, warm: at most {WARM_SECONDS} s"] = warm["own"] <= WARM_SECONDS
    for deep in depths[1:]:
        most = GROWTH.get(deep // shallow)
        if most is not None:
            grown = best[ours, deep, COLD]["own"] / cold["own"]
            promises[f"{deep} layers, own: at most {most} times that of {shallow}"] = grown <= most
    return promises


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compile_time", description=__doc__)
    add = parser.add_argument
    add("--backends", default="fusec,inductor", metavar="A,B", help="the first one is held against the second")
    add("--depths", default="12,24,48", metavar="A,B", help="the least first")
    add("--hidden", type=int, default=1024)
    add("--repeats", type=int, default=5, help="of which the best counts")
    add("--seed", type=int, default=0)
    add("--one", default="", help=argparse.SUPPRESS)
    add("--device", default="cpu", help=argparse.SUPPRESS)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/compile_time.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
