"""From a region to a kernel: which loops there are, what each computes, and where values live."""

import sympy

from fusec.analysis.indexing import Nest, locate, made, placing
from fusec.analysis.kinds import FEW_ROWS, FEW_ROWS_OF_GPU, HALVES, MULTIPLIED, Limits, Shape, classify
from fusec.analysis.machine import Machine, chip
from fusec.codegen.choice import Choice
from fusec.codegen.kernel import MAX_CHECKS, Kernel
from fusec.codegen.schedule.attention import schedule_attention
from fusec.codegen.schedule.choosing import default_choice, other_choices
from fusec.codegen.schedule.contraction import schedule_contraction
from fusec.codegen.schedule.emitter import Emitter, region_symbols
from fusec.codegen.schedule.rows import Tiling, schedule_rows
from fusec.codegen.schedule.split_rows import schedule_split_rows
from fusec.codegen.schedule.tiled_attention import schedule_tiled_attention
from fusec.codegen.schedule.tiled_contraction import schedule_tiled_contraction
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node
from fusec.ir.printer import print_graph
from fusec.ir.types import Size, estimate, product

_ANY = 1 << 16
_MULTIPLIED = 16
"""Multiply-adds that take as long as one element that is read, about."""


def schedule_region(
    region: Node,
    name: str,
    lanes: int,
    whole_row: bool,
    bf16_products: bool = False,
    cores: int = 1,
    machine: Machine | None = None,
    choice: Choice | None = None,
) -> Kernel:
    """The kernel of a region node.

    Args:
        region: a node whose body holds primitive operations only.
        name: what the kernel is called.
        lanes: elements of a tile.
        whole_row: whether a tile may hold a whole row, and scratch memory is unavailable (Triton).
        bf16_products: whether the machine multiplies bfloat16 directly.
        cores: of the machine.
        machine: the GPU, where tiles hold whole rows.
        choice: what the schedule leaves free there; by default what suits that GPU.

    Raises:
        ScheduleError: where no schedule covers the region.
    """
    body = region.body
    nest = locate(body)
    shape = _classified(nest, whole_row)
    if whole_row:
        choice = choice or default_choice(nest, shape, _gpu(machine), lanes)
        if choice.descriptors and not _gpu(machine).has_descriptors:
            raise ScheduleError(
                f"blocks by tensor descriptors on {_gpu(machine).name}", why="it has none",
                fix="a choice without, as all are that choices() gives for it",
            )  # fmt: skip
        lanes = choice.columns
    else:
        choice = Choice()
    numbers = {node: i for i, node in enumerate(placing(body), 1)}
    if len(numbers) > MAX_CHECKS:
        raise ScheduleError("a kernel with too many places that are found at run time")
    emitter, tiling = Emitter(body, (), numbers, whole_row), Tiling(lanes, whole_row, bf16_products, cores)
    if shape.attention is not None and whole_row:
        statements = schedule_tiled_attention(emitter, nest, shape.attention, choice)
    elif shape.attention is not None:
        statements = schedule_attention(emitter, nest, shape.attention, tiling)
    elif shape.kind == "contraction" and whole_row:
        statements = schedule_tiled_contraction(emitter, nest, shape, choice)
    elif choice.splits > 1:
        statements = schedule_split_rows(emitter, nest, shape, choice)
    else:
        schedule = schedule_contraction if shape.kind == "contraction" else schedule_rows
        statements = schedule(emitter, nest, shape, tiling)
    if whole_row and any(b.role == "scratch" for b in emitter.scratch):
        raise ScheduleError("the kernel needs scratch memory")
    statements = (*emitter.checks(nest.places()), *statements)
    symbols = region_symbols(region)
    outputs = [b for b in emitter.outputs if b.role == "output"]
    return Kernel(
        name=name,
        kind=shape.kind,
        buffers=(*emitter.inputs(statements), *outputs, *emitter.scratch),
        symbols=symbols,
        body=statements,
        work=_work(body, nest, shape),
        formula=print_graph(body, sources=False),
        sources=region.sources,
        choice=choice,
    )


def _work(body: Graph, nest: Nest, shape: Shape) -> Size:
    """The largest of what is read, made and multiplied: of sizes that only a call knows, and of those known before."""
    if shape.attention is not None:
        return product(tuple(a.size for a in shape.attention.loops))
    elsewhere = {o.destination for o in nest.outputs} | {i.value for i in nest.walk() if i.kind == "lookup"}
    read = [v for v in body.inputs if v not in elsewhere]
    numels = [product(v.shape) for v in (*read, *map(made, body.outputs))]
    for contraction in shape.contractions:
        numels.append(product(tuple(a.size for a in (*contraction.axes, *contraction.bound))) // _MULTIPLIED)
    known = max((n for n in numels if isinstance(n, int)), default=0)
    symbolic = [n for n in numels if not isinstance(n, int)]
    return sympy.Max(known, max(symbolic, key=estimate), evaluate=False) if symbolic else known


def choices(region: Node, machine: Machine, lanes: int) -> tuple[Choice, ...]:
    """What ``schedule_region`` may be told for a GPU: its default, then few others that may be quicker.

    Raises:
        ScheduleError: where no schedule covers the region.
    """
    nest = locate(region.body)
    shape = _classified(nest, True)
    default = default_choice(nest, shape, _gpu(machine), lanes)
    return (default, *other_choices(nest, shape, _gpu(machine), default))


def _gpu(machine: Machine | None) -> Machine:
    """A GPU: the usual one in the place of none, or of a CPU."""
    return machine if machine is not None and machine.code else chip("")


def _classified(nest: Nest, whole_row: bool) -> Shape:
    """Grouping has chosen already: whatever has a schedule is scheduled."""
    few, many = (FEW_ROWS_OF_GPU, MULTIPLIED | HALVES) if whole_row else (FEW_ROWS, MULTIPLIED)
    return classify(nest, Limits(_ANY, many, in_order=not whole_row, any_layout=whole_row, few=few))
