"""Near misses of one graph, each with the kernel that runs its operations if there is one."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusec.debug.operations import Operation, operations_of
from fusec.debug.returns import with_tried_edit
from fusec.debug.subject import Subject
from fusec.remarks import Remark


def near_misses(subject: Subject) -> Iterator[Remark]:
    """Yield the remarks on what was missed; those on patterns name the kernel that fused the operations regardless."""
    remarks = [r for r in subject.remarks if r.kind == "missed"]
    operations = _by_place(subject) if subject.is_grouped and any("around" in r.figures for r in remarks) else {}
    for remark in remarks:
        remark = with_tried_edit(subject, remark)
        kernel = _kernel_of(str(remark.figures.get("around", "")).split("; "), operations, subject)
        yield replace(remark, figures={**remark.figures, "kernel": kernel}) if kernel else remark


def _by_place(subject: Subject) -> Mapping[str, Sequence[Operation]]:
    """Return the operations of each source location."""
    found: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations_of(subject):
        for source in operation.node.sources:
            found[str(source)].append(operation)
    return found


def _kernel_of(places: list[str], operations: Mapping[str, Sequence[Operation]], subject: Subject) -> str:
    """Return the name of the kernel that holds all operations of some source locations; "" where none does."""
    inside = {o for place in places for o in operations.get(place, ())}
    homes = {o.home for o in inside}
    if len(homes) != 1 or len(inside) < 2 or any(o.kind != "generated" for o in inside):
        return ""
    (home,) = homes
    return subject.name_of(home)
