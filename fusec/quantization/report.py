"""The result of a quantization: sizes and errors of each layer, as a table."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer that was quantized."""

    name: str
    format: str
    nbytes: int
    """Bytes of the weight's codes and scales."""
    dense_nbytes: int
    """Bytes that the weight had before."""
    weight_error: float
    """Root mean square of the weight's error over that of the weight."""
    cosine: float | None
    """Least cosine between a row of the result on the sample and the dense layer's; None without a sample."""


@dataclass(frozen=True)
class QuantizationReport:
    """Layers quantized and skipped, sizes, and accuracy on a sample; prints as a table."""

    layers: tuple[QuantizedLayer, ...]
    skipped: tuple[tuple[str, str], ...]
    """Linear layers, and other modules with weights of two or more dims, that were left as they are, and why."""
    cosine: float | None = None
    """Least cosine between a row of the model's first result on the sample and before; None without a sample."""
    losses: tuple[float, float] | None = None
    """The loss that the model returns on the sample, before and after; None where it returns none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all quantized weights."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def dense_nbytes(self) -> int:
        """Bytes that they had before."""
        return sum(layer.dense_nbytes for layer in self.layers)

    def summary(self) -> str:
        """Return the totals in a line."""
        parts = [f"{len(self.layers)} layers, {self.dense_nbytes / 2**20:.1f} → {self.nbytes / 2**20:.1f} MiB"]
        parts += [f"{len(self.skipped)} left as they are"] if self.skipped else []
        parts += [f"cosine {self.cosine:.5f}"] if self.cosine is not None else []
        parts += ["loss {:.4f} → {:.4f}".format(*self.losses)] if self.losses is not None else []
        return ", ".join(parts)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=self.summary())
        table.add_column("layer", overflow="fold")
        table.add_column("format")
        for heading in ("KiB", "of before", "weight error", "cosine"):
            table.add_column(heading, justify="right")
        for layer in self.layers:
            share = f"{layer.nbytes / layer.dense_nbytes:.0%}"
            cosine = "" if layer.cosine is None else f"{layer.cosine:.5f}"
            size = f"{layer.nbytes / 1024:,.0f}"
            table.add_row(layer.name, layer.format, size, share, f"{layer.weight_error:.2%}", cosine)
        for name, why in self.skipped:
            table.add_row(name, "–", "", "", "", why, style="dim")
        return table

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), width=120)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]
