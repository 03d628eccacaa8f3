"""What a schedule leaves free: chosen from a chip's profile, or by timing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """How a region is cut into blocks on a GPU, and how a block is run."""

    rows: int = 0
    """Rows of a block of matrix products; queries of one of attention."""
    columns: int = 0
    """Columns of a block, of all its products together; elements of a block of anything else."""
    depth: int = 0
    """Elements of a block along what is summed; keys of one of attention."""
    splits: int = 1
    """Parts of what is summed, each of which has programs of its own."""
    warps: int = 0
    """Of a program; 0 for as many as its largest tile keeps busy."""
    stages: int = 0
    """Blocks along what is summed that are on their way or in use at once; 0 for as many as Triton takes by itself."""
    registers: int = 0
    """The most that a thread may have; 0 for what the assembler finds best, which keeps some in memory where more
    programs have room then."""
    descriptors: bool = False
    """Whether blocks of products come by tensor descriptors where their memory allows, and not address by address."""
    transposed: bool = False
    """Whether a matrix unit takes a block of the weight as its first operand and the rows as its second, which may be
    narrower."""

    def __str__(self) -> str:
        parts = self.splits if self.splits > 1 else 0
        numbers = (self.rows, self.columns, self.depth, parts, self.warps, self.stages, self.registers)
        names = ("rows", "columns", "deep", "parts", "warps", "stages", "registers")
        said = [f"{n} {name}" for n, name in zip(numbers, names, strict=True) if n]
        return ", ".join([*said, *(name for name in ("descriptors", "transposed") if getattr(self, name))])
