"""How much memory does a quantized Llama need beside its packed weights?

``python -m bench.quantized_memory``

Every figure is of a fresh process: how far its resident memory rises from where another model of the kind has been
compiled and freed, which takes the imports, to its peak while the packed model is read from a file, compiled and called
with one token. Eager, which expands each weight that it multiplies, is beside it.
"""

import argparse
import gc
import json
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.table import Table
from torch import nn

import fusec
from bench.harness import BASELINE, OURS, print_promises, progress, report
from bench.memory import MARK, answer_of, at_rest, mib
from bench.peers import peer
from bench.quantized import DENSE
from bench.record import write_result
from bench.workloads import llama

FORMATS = ("int8", "int4", "w8a8", "w4a8")
MOST = 1.15
"""Of our peak over the packed weights, at most."""
CALLS = 3
SMALL = {"hidden": 64, "layers": 1, "mlp": 128}


def main(words: list[str] | None = None) -> int:
    """Measure each format; status 1 where a quantized one takes more than promised."""
    options = _parser().parse_args(words)
    if options.one:
        print(MARK + json.dumps(peak(options.one, Path(options.file), options.name)))
        return 0
    formats = [DENSE, *options.formats.split(",")]
    sizes = {"hidden": options.hidden, "layers": options.layers, "mlp": options.mlp}
    found: dict[str, dict[str, dict[str, float]]] = {}
    with progress() as bar, TemporaryDirectory() as folder:
        task = bar.add_task("measure", total=2 * len(formats))
        for name in formats:
            file = Path(folder) / "model.pt"
            torch.save(_quantized(name, options.seed, **sizes), file)
            gc.collect()
            found[name] = {}
            for candidate in (BASELINE, OURS):
                bar.update(task, description=f"{name}, {candidate}")
                found[name][candidate] = answer_of(
                    "bench.quantized_memory", "--one", name, "--file", str(file), "--name", candidate
                )
                bar.advance(task)
    shown = report(options.width)
    shown.print(_table(found))
    promises = {
        f"{name}: at most {MOST} of its packed size": one[OURS]["ratio"] <= MOST
        for name, one in found.items()
        if name != DENSE
    }
    print_promises(shown, promises)
    content = {"sizes": sizes, "formats": found, "promises": promises}
    path = write_result("quantized_memory", options.seed, content, options.json)
    shown.print(f"written to {path}", style="dim", highlight=False)
    return int(not all(promises.values()))


def peak(format: str, file: Path, name: str) -> dict[str, float]:
    """Return the packed size of a model in a file and how far this process rises for it, in MiB, and their ratio."""
    warnings.filterwarnings("ignore")
    _call(name, _quantized(format, 0, **SMALL))
    torch._dynamo.reset()
    before = at_rest()
    model = torch.load(file, weights_only=False)
    _call(name, model)
    packed = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) / 2**20
    risen = mib("VmHWM") - before
    return {"packed": packed, "peak": risen, "ratio": risen / packed}


def _call(name: str, model: nn.Module) -> None:
    run = peer(name, model)
    with torch.no_grad():
        for _ in range(CALLS):
            run(torch.ones(1, 1, dtype=torch.int64), use_cache=False)


def _quantized(format: str, seed: int, hidden: int, layers: int, mlp: int) -> nn.Module:
    model = llama(torch.bfloat16, seed, hidden, layers, mlp)
    if format != DENSE:
        fusec.quantize(model, format, progress=False)
    return model


def _table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    shown = Table("", "packed MiB", title="Peak memory in MiB (over the packed weights)")
    for name in (BASELINE, OURS):
        shown.add_column(name, justify="right")
    for format, one in found.items():
        peaks = [f"{at['peak']:.0f} ({at['ratio']:.2f})" for at in one.values()]
        shown.add_row(format, f"{one[OURS]['packed']:.0f}", *peaks)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized_memory", description=__doc__)
    add = parser.add_argument
    add("--formats", default=",".join(FORMATS), metavar="A,B", help=f"beside {DENSE}")
    add("--hidden", type=int, default=2048)
    add("--layers", type=int, default=16)
    add("--mlp", type=int, default=8192)
    add("--seed", type=int, default=0)
    for hidden in ("--one", "--file", "--name"):
        add(hidden, default="", help=argparse.SUPPRESS)
    add("--json", default="", metavar="FILE", help="by default bench/results/quantized_memory.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
