"""Kernel configurations: chosen from a chip's profile, or by autotuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """Block sizes of a region on a GPU, and how a block is run."""

    rows: int = 0
    """Rows of a block of a GEMM; queries of a block of attention."""
    columns: int = 0
    """Columns of a block, over all its products; elements of a block of any other kernel."""
    depth: int = 0
    """Elements of a block along the summed axes; keys of a block of attention."""
    splits: int = 1
    """Parts that a sum is split into, each with programs of its own."""
    warps: int = 0
    """Warps of a program; 0 to choose by its largest tile."""
    stages: int = 0
    """Blocks along the summed axes in flight or in use at once; 0 for Triton's default."""
    registers: int = 0
    """Limit per thread; 0 to leave it to the assembler, which may spill for the sake of occupancy."""
    descriptors: bool = False
    """Load blocks of products by tensor descriptor where their layout allows it."""
    transposed: bool = False
    """Pass a block of the weight to the matrix unit as its first operand, and the rows as its second, which may be
    narrower."""

    def __str__(self) -> str:
        parts = self.splits if self.splits > 1 else 0
        numbers = (self.rows, self.columns, self.depth, parts, self.warps, self.stages, self.registers)
        names = ("rows", "columns", "deep", "parts", "warps", "stages", "registers")
        said = [f"{n} {name}" for n, name in zip(numbers, names, strict=True) if n]
        return ", ".join([*said, *(name for name in ("descriptors", "transposed") if getattr(self, name))])
