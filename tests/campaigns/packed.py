"""Are random linear layers with packed weights compiled right, also where all of their sizes are symbols?

``python -m tests.campaigns.packed`` draws layers from number formats, orders of codes in bytes, groups, zero points,
layouts, numbers of rows, dtypes and epilogues. Weights are inputs of the compiled function, so that with dynamic shapes
none of their sizes is known, and each is called with two sizes. Layers are judged as operators are: against float64, in
one graph that nothing falls back from, with kernels proved within their buffers.
"""

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness import progress, report
from fusec import dynamo
from fusec.quantization.formats import NF4
from tests.campaigns.op_db.judge import Subject, Verdict, judge
from tests.campaigns.record import write_result

SIZES = ((40, 3, 8), (72, 5, 6))
"""Columns, groups in a row and rows, for the two calls of a dynamic layer; the rows of others differ."""
_VIEW = "aten.view.dtype"
"""A view of bytes as float8, which computes nothing."""
WORD = tuple(range(0, 32, 4))


def _stacked(*order: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda p: torch.stack([part(p) for part in order], -1).flatten(-2)


def _joined(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda p: torch.cat([p & 15, p >> 4], dim)


UNPACKED: Mapping[str, tuple[torch.dtype, tuple[int, int], Callable[[Tensor], Tensor]]] = {
    "int8": (torch.int8, (1, 1), lambda p: p),
    "uint8": (torch.uint8, (1, 1), lambda p: p),
    "float8": (torch.uint8, (1, 1), lambda p: p.view(torch.float8_e4m3fn)),
    "neighbours": (torch.uint8, (1, 2), _stacked(lambda p: p & 15, lambda p: p >> 4)),
    "neighbours, high first": (torch.uint8, (1, 2), _stacked(lambda p: p >> 4, lambda p: p & 15)),
    "neighbours by arithmetic": (torch.uint8, (1, 2), _stacked(lambda p: p % 16, lambda p: p // 16)),
    "halves of a row": (torch.uint8, (1, 2), _joined(-1)),
    "halves of the rows": (torch.uint8, (2, 1), _joined(0)),
    "two bits": (torch.uint8, (1, 4), lambda p: torch.stack([p >> i & 3 for i in (0, 2, 4, 6)], -1).flatten(-2)),
    "words along the depth": (
        torch.int32, (1, 8), lambda p: (p[..., None] >> torch.tensor(WORD, dtype=torch.int32) & 15).flatten(-2)
    ),
    "words along the columns": (
        torch.int32, (8, 1), lambda p: torch.stack([p >> i & 15 for i in WORD], 1).flatten(0, 1)
    ),
}  # fmt: skip
"""By name: the dtype of the packed weight, codes in an element along columns and depth, and the unpacking."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "part": lambda x: torch.cat((x, x), -2).narrow(-2, 1, x.shape[-2]).copy_(x),
    "apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
}
"""Layouts of an input in memory."""


@dataclass(frozen=True)
class Layer:
    """A random linear layer with a packed weight."""

    codes: str
    """How they are packed; see ``UNPACKED``."""
    codebook: bool
    group: int
    """Codes of a row that share a scale; 0 for all of them."""
    split: str
    """Groups are made by their ``length``, or by the shape of the ``scales``."""
    zero: str
    """``none``, ``constant``, ``integers`` subtracted before codes are floats, or ``floats`` after."""
    transposed: bool
    """Whether the packed weight is stored as [depth, columns]."""
    after: bool
    """Whether scales of rows multiply the product instead of the weight."""
    inputs: str
    """``floats``, or ``codes`` in int8 with a scale for each row."""
    rows: int
    batch: bool
    bias: bool
    epilogue: str
    """``none``, ``gelu``, ``residual`` or ``gate``."""
    dtype: str
    dynamic: bool
    layout: str
    """Of the input: ``contiguous``, a ``part`` of each batch or of all rows, ``apart`` or ``transposed``."""

    def __call__(self, given: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's result [*, columns] on the tensors that ``parts`` makes."""
        x, scale = given["x"], given["scale"]
        dtype = scale.dtype
        weight = self._weight(given, dtype)
        out = F.linear(x.to(dtype), weight, None if self.after or "row_scale" in given else given.get("bias"))
        out = out * given["row_scale"] if "row_scale" in given else out
        out = out * scale[:, 0] if self.after else out
        out = out + given["bias"] if self.bias and (self.after or "row_scale" in given) else out
        if self.epilogue == "gelu":
            return F.gelu(out)
        if self.epilogue == "residual":
            return given["other"] + out
        return F.silu(out) * given["other"] if self.epilogue == "gate" else out

    def _weight(self, given: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = given["packed"], given["scale"]
        codes = UNPACKED[self.codes][2](packed.t() if self.transposed else packed)
        if self.codebook:
            codes = given["codebook"][codes.int()]
        if self.group:
            length = -1 if self.split == "scales" else self.group
            codes = codes.reshape(*scale.shape, length) if length < 0 else codes.unflatten(-1, (-1, length))
            scale = scale[..., None]
        if self.zero == "integers":
            codes = codes.to(torch.int8)
        weight = codes if self.zero == "integers" else codes.to(dtype)
        if "zero" in given:
            weight = weight - (given["zero"][..., None] if self.group else given["zero"])
        weight = weight.to(dtype) - 8 if self.zero == "constant" else weight.to(dtype)
        weight = weight if self.after else weight * scale
        return weight.flatten(-2) if self.group else weight

    def parts(self, columns: int, groups: int, rows: int, draw: torch.Generator) -> dict[str, Tensor]:
        """Return random tensors to call the layer with, for sizes of the weight and a number of rows."""
        dtype, shape = getattr(torch, self.dtype), (columns, groups if self.group else 1)
        depth = groups * (self.group or 32)
        stored, (along_columns, along_depth), _ = UNPACKED[self.codes]
        packed = self._codes(stored, (columns // along_columns, depth // along_depth), draw)
        lead = (4, rows) if self.batch else (rows,)
        result = {"packed": packed.t().contiguous() if self.transposed else packed}
        result["x"] = torch.randn(*lead, depth, generator=draw).to(dtype)
        if self.inputs == "codes":
            result["x"] = torch.randint(-127, 128, (*lead, depth), generator=draw, dtype=torch.int8)
            result["row_scale"] = (torch.rand(*lead, 1, generator=draw) * 0.02).to(dtype)
        result["x"] = LAYOUTS[self.layout](result["x"])
        result["scale"] = (torch.rand(shape, generator=draw) * 0.1 + 0.01).to(dtype)
        if self.zero == "integers":
            result["zero"] = torch.randint(0, 16, shape, generator=draw, dtype=torch.int8)
        if self.zero == "floats":
            result["zero"] = (torch.rand(shape, generator=draw) * 16).to(dtype)
        if self.codebook:
            result["codebook"] = torch.tensor(NF4).to(dtype)
        if self.bias:
            result["bias"] = torch.randn(columns, generator=draw).to(dtype)
        if self.epilogue in ("residual", "gate"):
            result["other"] = torch.randn(*lead, columns, generator=draw).to(dtype)
        return result

    def _codes(self, dtype: torch.dtype, shape: tuple[int, int], draw: torch.Generator) -> Tensor:
        if self.codes == "float8":
            return torch.randn(shape, generator=draw).to(torch.float8_e4m3fn).view(torch.uint8)
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, generator=draw, dtype=dtype)


def drawn(seed: int, count: int) -> Iterator[Layer]:
    """Yield random layers, the same ones for a seed."""
    draw = random.Random(seed)
    for codes in islice(cycle(UNPACKED), count):
        wide = codes in ("int8", "uint8", "float8")
        group = draw.choice((0, 16, 32, 64))
        codebook = not wide and draw.random() < 0.3
        zeros = ("none",) if codebook or codes == "float8" else ("none", "constant", "integers", "floats")
        yield Layer(
            codes,
            codebook,
            group,
            draw.choice(("length", "scales")),
            draw.choice(zeros),
            draw.random() < 0.25,
            not group and draw.random() < 0.3,
            draw.choice(("floats", "floats", "floats", "codes")),
            draw.choice((1, 8, 64)),
            draw.random() < 0.3,
            draw.random() < 0.5,
            draw.choice(("none", "gelu", "residual", "gate")),
            draw.choice(("float32", "bfloat16", "float16")),
            draw.random() < 0.6,
            draw.choice((*LAYOUTS, "contiguous")),
        )


def examine(layer: Layer, seed: int = 0) -> Verdict:
    """Judge a layer, a dynamic one on two sizes of everything but a single row."""
    draw = torch.Generator().manual_seed(seed)
    sizes = SIZES if layer.dynamic else SIZES[:1]
    samples = [layer.parts(columns, groups, layer.rows * rows // 8 or 1, draw) for columns, groups, rows in sizes]

    def each(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda samples, zero: [function(given) for given in samples]

    verdict = judge(Subject(layer, samples, layer.dynamic, around=each))
    graphs = dynamo.compiled_graphs()
    opaque = {step.name for graph in graphs for step in graph.program.steps if step.kind == "opaque"} - {_VIEW}
    return replace(verdict, outcome="opaque", detail=", ".join(opaque)) if opaque and not verdict.detail else verdict


def main(words: Sequence[str] | None = None) -> int:
    """Judge random layers; the exit status is 1 where one is not compiled right."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.packed", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", metavar="FILE", help="by default tests/campaigns/results/packed.json")
    options = parser.parse_args(words)
    torch._dynamo.config.recompile_limit = 64
    outcomes, steps, found = Counter[str](), Counter[str](), list[dict[str, Any]]()
    with progress() as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, layer in bar.track([*enumerate(drawn(options.seed, options.count))], description="packed layers"):
            verdict = examine(layer, index)
            outcomes[verdict.outcome] += 1
            steps += verdict.steps
            if verdict.outcome != "right":
                found.append({"index": index, **asdict(layer), "outcome": verdict.outcome, "detail": verdict.detail})
                bar.console.print(found[-1], soft_wrap=True, highlight=False)
    said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    report().print(f"{options.count} layers, seed {options.seed}: {said}")
    content = {"layers": options.count, "outcomes": dict(outcomes), "steps": dict(steps), "found": found}
    write_result("packed", options.seed, content | {"passed": not found}, options.json)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
