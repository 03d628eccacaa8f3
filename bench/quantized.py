"""How fast is a Llama with quantized weights, against its own bfloat16 and against the memory that it has to read?

``python -m bench.quantized``

All formats of a workload run in one interleaved run, in bfloat16. Peers are what a user of another library would run,
where it is installed: torchao's int8, int4 (groups of 64) and quantized inputs, and bitsandbytes' NF4, all under
Inductor, and llama.cpp with the same weights in its own types.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import fusec
from bench import llama_cpp
from bench.harness import Measurement, console, measure, report
from bench.machine import wait_until_idle
from bench.peers import peer
from bench.pictures import Line, draw_ratios, say_drawn
from bench.record import write_result
from bench.workloads import VALID, Call, Prepared, decode, described, prefill
from fusec.quantization.linear import QuantizedLinear

DENSE = "bfloat16"
FORMATS = ("int8-row", "int8", "int4", "nf4", "w8a8", "w4a8")
BITSANDBYTES = "bitsandbytes nf4, inductor"
TORCHAO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torchao int8, inductor": ("quantization", "Int8WeightOnlyConfig", {}),
    "torchao w8a8, inductor": ("quantization", "Int8DynamicActivationInt8WeightConfig", {}),
    "torchao int4, inductor": ("prototype.quantization.int4", "PrototypeInt4WeightOnlyConfig", {"group_size": 64}),
    "torchao w4a8, inductor": (
        "prototype.quantization.int4", "Int8DynamicActivationInt4WeightConfig", {"group_size": 64},
    ),
}  # fmt: skip
"""Module, name and arguments of each configuration."""
WORKLOADS: dict[str, Callable[[int], Prepared]] = {
    "decode 1": partial(decode, torch.bfloat16),
    "decode 8": partial(decode, torch.bfloat16, batch=8),
    "prefill 128": partial(prefill, torch.bfloat16, length=128),
    "prefill 512": partial(prefill, torch.bfloat16, length=512),
    "decode 1 of 1.1 billion": partial(decode, torch.bfloat16, hidden=2048, layers=16, mlp=8192),
}
TOKENS = {
    "decode 1": (1, 1, VALID), "decode 8": (8, 1, VALID), "prefill 128": (1, 128, 0), "prefill 512": (1, 512, 0),
    "decode 1 of 1.1 billion": (1, 1, VALID),
}  # fmt: skip
"""Sequences, tokens of each, and tokens in the cache, for llama.cpp."""
READ_MB = 512


@dataclass(frozen=True)
class Candidate:
    """One way to run a workload."""

    call: Call
    weight_bytes: int
    """Bytes of its linear layers' weights as stored."""


def main(words: list[str] | None = None) -> int:
    """Measure every workload in every format."""
    parser = argparse.ArgumentParser(prog="bench.quantized", description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="by default bench/results/quantized.json")
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--width", type=int)
    options = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    found: dict[str, dict[str, Any]] = {}
    for title in options.workloads.split(","):
        candidates, failed = _candidates(WORKLOADS[title], options.formats.split(","), options.seed)
        if llama_cpp.is_installed():
            candidates |= _by_llama_cpp(WORKLOADS[title](options.seed).model, *TOKENS[title], options.seed)
        wait_until_idle(options.allow_busy)
        data = torch.ones((READ_MB << 20) // 4)
        calls = {name: c.call for name, c in candidates.items()} | {"read": lambda data=data: torch.amax(data)}
        found[title] = _rows(candidates, measure(calls, options.rounds, baseline=DENSE)) | {"failed": failed}
    report(options.width).print(_table(found))
    file = write_result("quantized", options.seed, {"workloads": found}, options.json)
    lines = [
        Line(f"{title}, {row['name']}", {"time": row["ratio"]}, {"time": 1.0})
        for title, content in found.items()
        for row in content["rows"]
    ]
    say_drawn(draw_ratios(file.with_suffix(".svg"), "Time over that of bfloat16; below 1 is faster", lines))
    return 0


def _candidates(prepare: Callable[[int], Prepared], formats: list[str], seed: int) -> tuple[dict[str, Candidate], Any]:
    """Return each format that runs, and why the others do not."""
    ways: dict[str, Callable[[nn.Module], int | None]] = {DENSE: lambda model: None}
    ways |= {name: partial(_quantize, format=name) for name in formats}
    if find_spec("torchao") is not None:
        ways |= {name: partial(_quantize_by_torchao, *config) for name, config in TORCHAO.items()}
    if find_spec("bitsandbytes") is not None:
        ways[BITSANDBYTES] = _quantize_by_bitsandbytes
    candidates, failed = dict[str, Candidate](), dict[str, str]()
    for name, quantize in ways.items():
        console.print(f"  compile {name}", style="dim", highlight=False)
        try:
            prepared = prepare(seed)
            stored = quantize(prepared.model)
            with torch.no_grad():
                call = prepared.call(
                    peer("inductor" if name in (*TORCHAO, BITSANDBYTES) else "fusec", prepared.model, False)
                )
                call()
            candidates[name] = Candidate(call, stored or _stored(prepared.model))
        except Exception as problem:
            if name == DENSE:
                raise
            failed[name] = described(problem)
    return candidates, failed


def _by_llama_cpp(model: nn.Module, sequences: int, length: int, valid: int, seed: int) -> dict[str, Candidate]:
    """Return a model as llama.cpp runs it, in each of its types."""
    console.print("  write the model for llama.cpp", style="dim", highlight=False)
    tokens, found = _tokens(model, sequences, length, seed), dict[str, Candidate]()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        llama_cpp.write_model(model, file)
        for name in llama_cpp.FORMATS:
            found[f"llama.cpp {name}"] = Candidate(*llama_cpp.call(llama_cpp.quantized(file, name), tokens, valid))
    return found


def _tokens(model: Any, sequences: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (sequences, length), generator=generator)


def _quantize(model: nn.Module, format: str) -> None:
    fusec.quantize(model, format, progress=False)


def _quantize_by_torchao(module: str, config: str, options: dict[str, Any], model: nn.Module) -> None:
    from torchao.quantization import quantize_

    quantize_(model, getattr(import_module(f"torchao.{module}"), config)(**options))


def _quantize_by_bitsandbytes(model: nn.Module) -> int:
    """Replace the linear layers; return the bytes of their weights."""
    import bitsandbytes as bnb

    stored = 0
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        layer = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, quant_type="nf4"
        )
        options = {"requires_grad": False, "quant_type": "nf4", "compress_statistics": False, "module": layer}
        layer.weight = bnb.nn.Params4bit(linear.weight.data, **options)
        stored += linear.weight.numel() // 2 + linear.weight.numel() // 64 * 4
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.to("cpu").eval())
    return stored


def _stored(model: nn.Module) -> int:
    linears = (m for m in model.modules() if isinstance(m, (nn.Linear, QuantizedLinear)))
    return sum(m.nbytes if isinstance(m, QuantizedLinear) else m.weight.nbytes for m in linears)


def _rows(candidates: dict[str, Candidate], measurement: Measurement) -> dict[str, Any]:
    """Return time, its ratio to that of bfloat16, and the share of the bandwidth at which weights are read."""
    read = (READ_MB << 20) / measurement.row("read").milliseconds
    rows = []
    for name, candidate in candidates.items():
        row = measurement.row(name)
        share = candidate.weight_bytes / row.milliseconds / read
        rows.append({"name": name, "ms": row.milliseconds, "ratio": row.ratio, "bytes": candidate.weight_bytes,
                     "bandwidth": share})  # fmt: skip
    return {"rows": rows, "noise": measurement.noise, "read_gb_s": read / 1e6, "busy": bool(measurement.disturbed)}


def _table(found: dict[str, dict[str, Any]]) -> Table:
    table = Table("workload", "weights", "ms", "over bfloat16", "of the read bandwidth", "noise")
    for title, content in found.items():
        for row in content["rows"]:
            table.add_row(title, row["name"], f"{row['ms']:.3g}", f"{row['ratio']:.2f}", f"{row['bandwidth']:.0%}",
                          f"{content['noise']:.1%}")  # fmt: skip
        for name, why in content["failed"].items():
            table.add_row(title, name, "", why[:60], "", "")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
