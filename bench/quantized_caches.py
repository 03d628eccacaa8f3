"""How fast is attention over quantized keys and values, against bfloat16, when a token is decoded?

``python -m bench.quantized_caches``

One query for each head, and enough layers that keys and values come from memory rather than from a cache of the CPU.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from bench.harness import measure, report
from bench.machine import wait_until_idle
from bench.peers import backend_named, compiled_with
from bench.pictures import Line, draw_ratios, say_drawn
from bench.record import write_result
from fusec.quantization.formats import Format, Parts, format_named

DENSE = "bfloat16"
FORMATS = ("int8-row", "int8-g32", "int4-g32", "int4-row")
HEADS = {"16 heads on 16": (16, 16), "32 heads on 8": (32, 8)}
WIDTH = 64
CACHES_MB = 400
"""Dense keys and values of all layers together."""


def main(words: list[str] | None = None) -> int:
    """Measure every number of heads in every format."""
    parser = argparse.ArgumentParser(prog="bench.quantized_caches", description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--megabytes", type=int, default=CACHES_MB)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="by default bench/results/quantized_caches.json")
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--width", type=int)
    options = parser.parse_args(words)
    found: dict[str, Any] = {}
    for title, heads in HEADS.items():
        calls, stored = _candidates(*heads, options)
        wait_until_idle(options.allow_busy)
        measurement = measure(calls, options.rounds, baseline=DENSE)
        rows = [measurement.row(name) for name in calls]
        found[title] = {
            "rows": [{"name": r.name, "ms": r.milliseconds, "ratio": r.ratio, "bytes": stored[r.name]} for r in rows],
            "noise": measurement.noise, "busy": measurement.disturbed,
        }  # fmt: skip
    report(options.width).print(_table(found))
    file = write_result("quantized_caches", options.seed, {"tokens": options.tokens, "heads": found}, options.json)
    lines = [
        Line(f"{title}, {row['name']}", {"time": row["ratio"]}, {"time": 1.0})
        for title, content in found.items() for row in content["rows"]
    ]  # fmt: skip
    say_drawn(draw_ratios(file.with_suffix(".svg"), "Time over that of bfloat16; below 1 is faster", lines))
    return 0


def _candidates(queries: int, keys: int, options: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], Any]:
    """Return a call over all layers for each format, and the bytes of a layer's keys and values as stored."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (2, 1, keys, options.tokens, WIDTH)
    layers = max(1, (options.megabytes << 20) // (4 * keys * options.tokens * WIDTH))
    query = torch.randn(1, queries, 1, WIDTH, generator=generator).bfloat16()
    caches = [torch.randn(shape, generator=generator).bfloat16() for _ in range(layers)]
    calls: dict[str, Callable[[], object]] = {}
    stored: dict[str, int] = {}
    for name in (DENSE, *options.formats.split(",")):
        format = None if name == DENSE else format_named(name)
        inputs = [[_stored(x, format) for x in cache] for cache in caches]
        run = compiled_with(partial(_attention, format), backend_named("fusec"), dynamic=False)
        calls[name] = partial(_all_layers, run, query, inputs)
        stored[name] = sum(part.nbytes for parts in inputs[0] for part in parts.values())
    return calls, stored


def _stored(x: Tensor, format: Format | None) -> Parts:
    if format is None:
        return {"dense": x}
    groups = x.unflatten(-1, (format.groups(WIDTH), -1))
    scales = format.cover(groups)
    return format.pack(format.encode(groups, scales).flatten(-2), scales)


def _attention(format: Format | None, query: Tensor, keys: Parts, values: Parts) -> Tensor:
    key, value = (x["dense"] if format is None else format.unpack(x, query.dtype) for x in (keys, values))
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def _all_layers(run: Callable[..., Tensor], query: Tensor, caches: list[list[Parts]]) -> Tensor:
    found = query
    for keys, values in caches:
        found = run(query, keys, values)
    return found


def _table(found: dict[str, Any]) -> Table:
    table = Table("heads", "keys and values", "ms", "over bfloat16", "MB of a layer", "noise")
    for title, content in found.items():
        for row in content["rows"]:
            table.add_row(title, row["name"], f"{row['ms']:.3g}", f"{row['ratio']:.2f}", f"{row['bytes'] / 1e6:.2f}",
                          f"{content['noise']:.1%}")  # fmt: skip
    return table


if __name__ == "__main__":
    raise SystemExit(main())
