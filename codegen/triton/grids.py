"""The grids of a kernel, each of which is a launch of its own: what one stores in shared memory, the next one reads."""

from dataclasses import replace

from fusec.codegen.tile.kernel import Kernel, Load, Store, walk


def grids(kernel: Kernel) -> tuple[Kernel, ...]:
    """A kernel for each grid, in order; most have one."""
    if not any(buffer.role == "shared" for buffer in kernel.buffers):
        return (kernel,)
    return tuple(_alone(kernel, number) for number in range(len(kernel.body)))


def _alone(kernel: Kernel, number: int) -> Kernel:
    """One grid with the memory that it touches; the last one has the kernel's name, the first its formula."""
    body, name = (kernel.body[number],), f"{kernel.name}_part{number + 1}"
    stored = {s.buffer for s in walk(body) if isinstance(s, Store)}
    touched = stored | {s.buffer for s in walk(body) if isinstance(s, Load)}
    buffers = tuple(
        replace(b, role="output" if b.name in stored else "input") if b.role == "shared" else b
        for b in kernel.buffers
        if b.name in touched
    )
    if number == len(kernel.body) - 1:
        name = kernel.name
    alone = replace(kernel, name=name, body=body, buffers=buffers)
    return replace(alone, formula="", sources=()) if number else alone
