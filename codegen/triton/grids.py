"""The grids of a kernel, launched one after the other: each reads the shared memory that earlier ones wrote."""

from dataclasses import replace

from fusec.codegen.tile.kernel import Kernel, Load, Store, walk


def grids(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return a kernel for each grid, in order; most kernels have one."""
    if not any(buffer.role == "shared" for buffer in kernel.buffers):
        return (kernel,)
    return tuple(_single_grid(kernel, number) for number in range(len(kernel.body)))


def _single_grid(kernel: Kernel, number: int) -> Kernel:
    """Return one grid with the buffers that it accesses; the last has the kernel's name, the first its formula."""
    body, name = (kernel.body[number],), f"{kernel.name}_part{number + 1}"
    stored = {s.buffer for s in walk(body) if isinstance(s, Store)}
    accessed = stored | {s.buffer for s in walk(body) if isinstance(s, Load)}
    buffers = tuple(
        replace(b, role="output" if b.name in stored else "input") if b.role == "shared" else b
        for b in kernel.buffers
        if b.name in accessed
    )
    if number == len(kernel.body) - 1:
        name = kernel.name
    grid = replace(kernel, name=name, body=body, buffers=buffers)
    return replace(grid, formula="", sources=()) if number else grid
