"""Which spellings of a quantized linear layer are compiled to packed kernels, and are their results right?

``python -m tests.campaigns.quantized`` compiles each layer for 1, 8 and 64 rows in float32 and bfloat16, and counts
kernels, calls of ATen, and the bytes of dense weights that are written. Layers of torchao, bitsandbytes and HQQ are
tried where these are installed.
"""

import argparse
import copy
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from rich.table import Table
from torch import nn

from bench.harness import progress, report
from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.ir.graph import Value
from fusec.ir.ops import Trait
from fusec.ir.types import TensorType
from fusec.reference.contract import compare_outputs
from tests.campaigns.packed_layers import Layer, Plain, layers
from tests.campaigns.record import write_result
from tests.packed import DEPTH

ROWS, DTYPES = (1, 8, 64), (torch.float32, torch.bfloat16)


@dataclass
class Found:
    """One layer at one number of rows in one dtype."""

    layer: str
    library: str
    rows: int
    dtype: str
    kernels: int = 0
    calls: int = 0
    """Of the vendor's library and of ATen."""
    dense_bytes: int = 0
    """Of floating-point values of the weight's size that are written."""
    ratio: float = 0.0
    """Error over its bound; above 1 is wrong."""
    problem: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is wrong, or was not compiled."""
        return bool(self.problem)

    @property
    def packed(self) -> bool:
        """Whether the weight stays packed."""
        return not self.dense_bytes and not self.failed


def examine(layer: Layer, rows: int, dtype: torch.dtype, config: Config) -> Found:
    """Compile a layer, run it, and compare it with the float64 product with its dequantized weight."""
    found = Found(layer.name, layer.library, rows, str(dtype).removeprefix("torch."))
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = layer.make(dtype)
            x = torch.randn(rows, DEPTH).to(dtype)
            eager = module(x)
            compiled = torch.compile(module, backend=backend_for(config), dynamic=False)(x)
        except Exception as error:  # whatever a library raises is a finding
            found.problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
            return found
        comparison = compare_outputs([eager], [compiled], [_reference(layer, module, x, eager)], dtype)
        found.ratio = comparison.ratio
        # Of a library's quantized inputs only eager's result is known, from which both may be a few roundings away.
        most = 8 if layer.activations and layer.library else 1
        found.problem = "" if comparison.ratio <= most and not comparison.message else str(comparison)[:200]
    for graph in compiled_graphs():
        steps = [step.kind for step in graph.program.steps]
        found.kernels += steps.count("kernel")
        found.calls += sum(kind not in ("kernel", "copy") for kind in steps)
        computed = [node.results for node in graph.graph.nodes if not node.has(Trait.VIEW)]
        found.dense_bytes += sum(_dense_bytes(results, DEPTH * eager.shape[-1]) for results in computed)
    return found


def _reference(layer: Layer, module: nn.Module, x: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Return the result in float64: of an identity a linear layer gives its weight."""
    if not layer.activations:
        return x.double() @ module(torch.eye(DEPTH, dtype=x.dtype)).double()
    return copy.deepcopy(module).double()(x.double()) if isinstance(module, Plain) else eager.double()


def _dense_bytes(results: Sequence[Value], size: int) -> int:
    types = [r.type for r in results if isinstance(r.type, TensorType)]
    return sum(t.numel * t.dtype.bytes for t in types if t.dtype.is_float and t.numel == size)


def main(argv: list[str] | None = None) -> int:
    """Examine all layers; return 1 if one is wrong or is not compiled."""
    parser = argparse.ArgumentParser(prog="tests.campaigns.quantized", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of layers or libraries")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--target", default="cpp", help="cpp, or triton: in its interpreter where there is no GPU")
    parser.add_argument("--json", default="", help="by default in tests/campaigns/results")
    options = parser.parse_args(argv)
    config = replace(Config.from_environment(), target=options.target)
    chosen = [layer for layer in layers() if options.only in f"{layer.library} {layer.name}"]
    cases = [(layer, int(rows), dtype) for layer in chosen for rows in options.rows.split(",") for dtype in DTYPES]
    found = []
    with progress() as bar:
        for layer, rows, dtype in bar.track(cases, description="quantized layers"):
            found.append(examine(layer, rows, dtype, config))
    console = report()
    console.print(_table(found))
    failed = [f for f in found if f.failed]
    packed = sum(f.packed for f in found)
    console.print(f"{len(found)} cases of {len(chosen)} spellings: {packed} packed, {len(failed)} failed")
    name = "quantized" if options.target == "cpp" else f"quantized_{options.target}"
    write_result(name, 0, {"cases": [asdict(f) for f in found]}, options.json)
    return int(bool(failed))


def _table(found: list[Found]) -> Table:
    """One row per layer; by dtype and rows: kernels, + calls, and D where a dense weight is written."""
    keys = list(dict.fromkeys((f.dtype, f.rows) for f in found))
    table = Table("layer", "library", *(f"{dtype} M={rows}" for dtype, rows in keys), "problem")
    for name in dict.fromkeys((f.layer, f.library) for f in found):
        own = {(f.dtype, f.rows): f for f in found if (f.layer, f.library) == name}
        cells = [
            "failed" if f.failed else f"{f.kernels}{f'+{f.calls}' if f.calls else ''}{' D' if f.dense_bytes else ''}"
            for f in own.values()
        ]
        table.add_row(*name, *cells, next((f.problem for f in own.values() if f.problem), ""))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
