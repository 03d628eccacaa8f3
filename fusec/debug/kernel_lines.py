"""The operation of the final graph that each line of a kernel belongs to."""

from collections.abc import Mapping, Sequence
from typing import Any

from fusec.codegen.tile.origins import line_origins
from fusec.ir.graph import Node
from fusec.ir.ops import Trait
from fusec.ir.structure import structure

Lines = Sequence[int | None]
"""For each line the number of a node of the region's body, or -1 - i for its input i; None where it has neither."""


def kernel_lines(
    names: Mapping[Node, str], texts: Mapping[str, str], origins: Mapping[str, Mapping[str, int]]
) -> dict[Node, Lines]:
    """Return the origins of the lines of each region's kernel.

    A kernel is made for the first region that it runs. Regions of another structure may share its text; which of their
    operations a line belongs to is then not known, and they are left out.

    Args:
        names: the kernel of each region, in the order of the graph.
        texts: of the kernels.
        origins: of the names in each kernel, as ``Kernel.origins``.
    """
    made: dict[str, tuple[Any, Lines]] = {}
    found: dict[Node, Lines] = {}
    for region, name in names.items():
        if name not in origins or not region.has(Trait.REGION):  # an operation in no kernel may have the name of one
            continue
        key = structure(region.body)
        if name not in made:
            made[name] = key, line_origins(texts.get(name, ""), origins[name])
        if made[name][0] == key:
            found[region] = made[name][1]
    return found
