"""The sentence embeddings of ``embed.py`` with quantized weights: size, accuracy on sentences not seen, and speed.

Run as ``make quantized``. A quarter of the sentences decides how weights are rounded, the others are compared. With
``min_cosine`` half of that quarter is held out to choose the layers that need eight bits.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable

import embed  # type: ignore[import-not-found]
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fusec

FORMATS = (("int8", None, 0.999), ("int4-g64", None, 0.9), ("int4-g64", 0.995, 0.98))
"""Format, cosine that is asked for, and the least one that is expected between embeddings of other sentences."""
ROUNDS = 5

Inputs = tuple[Tensor, Tensor]
console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> int:
    """Quantize, compile, compare and time; 1 where an embedding is farther off than it should be."""
    tokenizer, model = embed.load()
    texts = embed.SENTENCES.read_text(encoding="utf-8").splitlines()
    inputs = [_inputs(tokenizer.encode(text).ids) for text in texts if text]
    sample, held_out = inputs[::4], [x for i, x in enumerate(inputs) if i % 4]
    table = Table(title=f"{len(held_out)} sentences, one at a time, {torch.get_num_threads()} threads")
    for heading in ("weights", "MiB", "least cosine", "mean cosine", "compiled / its eager", "eager dense / compiled"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    with torch.no_grad():
        dense = torch.cat([model(*x) for x in held_out])
        failed = False
        for name, asked, least in FORMATS:
            quantized = copy.deepcopy(model)
            report = fusec.quantize(quantized, name, sample=sample, min_cosine=asked)
            if asked is not None:
                count = sum(layer.format == name for layer in report.layers)
                name = f"{name} in {count} of {len(report.layers)} layers, int8 in others"
            compiled = torch.compile(quantized, backend="fusec", dynamic=True)
            found = torch.cat([compiled(*x) for x in held_out])
            own = torch.cat([quantized(*x) for x in held_out])
            same = torch.cosine_similarity(found, own).min().item()
            cosines = torch.cosine_similarity(found, dense)
            failed |= bool(cosines.min() < least) or same < embed.PARITY
            speed = _speed(model, compiled, held_out[:20])
            row = (f"{cosines.min():.5f}", f"{cosines.mean():.5f}", f"cosine {same:.6f}", f"{speed:.2f}")
            table.add_row(name, f"{report.dense_nbytes / 2**20:.1f} → {report.nbytes / 2**20:.1f}", *row)
            console.print(report.summary())
    console.print(table)
    return int(failed)


def _inputs(tokens: list[int]) -> Inputs:
    return torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.long)


def _speed(eager: Callable[..., Tensor], compiled: Callable[..., Tensor], inputs: list[Inputs]) -> float:
    """Return the median, over interleaved rounds, of eager's time over that of the compiled model."""

    def seconds(encode: Callable[..., Tensor]) -> float:
        start = time.perf_counter()
        for x in inputs:
            encode(*x)
        return time.perf_counter() - start

    return statistics.median(seconds(eager) / seconds(compiled) for _ in range(ROUNDS))


if __name__ == "__main__":
    sys.exit(main())
