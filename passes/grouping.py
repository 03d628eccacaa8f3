"""Grouping: primitives are joined into kernels wherever one loop nest serves both and memory traffic is saved."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from fusec.analysis.attention import attention_nodes
from fusec.analysis.indexing import locate
from fusec.analysis.kinds import classify
from fusec.analysis.memory import touched_bytes
from fusec.analysis.outline import outline
from fusec.analysis.recomputation import recomputation
from fusec.analysis.strides import dense, view_layout
from fusec.analysis.units import Units
from fusec.analysis.uses import Uses
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.regions import open_regions
from fusec.ir.structure import abbreviations
from fusec.ir.types import Size, TensorType
from fusec.pipeline import Context

_MAX_NODES = 160
_ARITHMETIC = Trait.POINTWISE | Trait.REDUCTION
_FREE = Trait.VIEW | Trait.SOURCE


@dataclass(frozen=True)
class Group:
    """Make regions of kind ``kernel``, each one launch; declared regions are opened and leave their names as labels."""

    name: ClassVar[str] = "group"
    small_m: int = 16
    """Largest number of rows of a matrix product that is generated rather than left to the vendor."""

    def apply(self, graph: Graph, context: Context) -> None:
        """Group the whole graph."""
        labels = open_regions(graph)
        graph.erase_dead()
        _Grouping(graph, context, labels, self.small_m).run()


class _Grouping:
    def __init__(self, graph: Graph, context: Context, labels: dict[Node, str], small_m: int) -> None:
        self.graph, self.context, self.labels, self.small_m = graph, context, labels, small_m
        self.spell = abbreviations()
        self.verdicts: dict[tuple[object, ...], str] = {}
        """Why a candidate is no kernel, or "" where it is, by structure."""
        self.refusals: dict[tuple[Node, Node], str] = {}
        """Why a producer and its reader stay apart, as it was found last."""
        self.uses = Uses(graph, (n for n in graph.nodes if n.has(_FREE) and not n.is_op("concat")))
        """A kernel takes index maps and numbers along at no cost."""
        self.units = Units(self.uses)
        """The groups of the nodes that compute."""
        self.small = {n for n in graph.nodes if n.has(Trait.CONTRACTION) and self._is_small(n)}

    def run(self) -> None:
        nodes = self.graph.nodes
        for node in nodes:
            self._join_attention(node)
        for node in nodes:
            if node not in self.units.of and self._computes(node):
                self.units.put({node})
                if node in self.uses.free:
                    self.uses.stop_at(node)
        for node in [n for n, unit in self.units.of.items() if len(unit) == 1]:
            self._set_views_apart(node)
        # Rows first: a residual and a norm belong together before a product takes either as its epilogue.
        self._sweep(nodes, lambda first, second: not (first & self.small or second & self.small))
        self._sweep(nodes, lambda first, second: bool(first & self.small))
        self._sweep(nodes, lambda first, second: True)
        self._explain(nodes)
        self._make_regions()

    # What may be grouped.

    def _computes(self, node: Node) -> bool:
        types = (v.type for v in (*node.operands, *node.results))
        if not all(isinstance(t, TensorType) and t.dtype.kind != "other" for t in types):
            return False
        if node.is_op("concat"):
            return not self._verdict({node})
        if node.has(Trait.VIEW):
            return self._reaches_boundary(node) and self._needs_copy(node)
        if node.has(Trait.CONTRACTION):
            return node in self.small
        return node.has(_ARITHMETIC) and not node.has(Trait.SOURCE)

    def _is_small(self, node: Node) -> bool:
        (left, right), out = split_spec(node.attributes["spec"])
        x = node.operands[0].tensor
        if set(left) & set(right) & set(out) or not x.dtype.is_float:
            return False
        rows = 1
        for label, n in zip(left, x.shape, strict=True):
            if label in out:
                if not isinstance(n, int):
                    return False
                rows *= n
        return 0 < rows <= self.small_m and not self._verdict({node})

    def _needs_copy(self, view: Node) -> bool:
        """Whether a chain of views cannot be an alias of what it views."""
        return self._layout(view.result) is None

    def _layout(self, value: Value) -> TensorType | None:
        node = value.producer
        if node is None or not node.has(Trait.VIEW | Trait.SOURCE) or node.is_op("concat"):
            return value.tensor if node is None or node.has(Trait.OPAQUE) else dense(value.tensor)
        if node.has(Trait.SOURCE) or node in self.units.of:
            return None if node.has(Trait.SOURCE) else dense(value.tensor)
        inner = self._layout(node.operands[0])
        found = view_layout(node, inner) if inner is not None else None
        return None if found is None else TensorType(value.dtype, value.shape, found[0], value.tensor.device)

    def _set_views_apart(self, node: Node) -> None:
        """Keep the reshapes that a lone node reads out of its kernel, where with them it would have none."""
        read = (v.producer for v in self.uses.taken(node))
        reshapes = [n for n in read if n is not None and n in self.uses.free and n.is_op("reshape")]
        if reshapes and not node.has(Trait.VIEW) and self._verdict({node}):
            self.uses.stop_at(*reshapes)

    def _reaches_boundary(self, view: Node) -> bool:
        """Whether something that is no kernel reads the view itself."""
        return view in self.uses.returned or any(
            user not in self.uses.free and not self._is_arithmetic(user) for user in view.users
        )

    def _is_arithmetic(self, node: Node) -> bool:
        return node.has(_ARITHMETIC) or node.is_op("concat") or node in self.small

    # Joining.

    def _join_attention(self, node: Node) -> None:
        """Both products of an attention and what lies between are one group from the start."""
        found = attention_nodes(node) if self.small_m and node.has(Trait.CONTRACTION) else set()
        group = {n for n in found if n not in self.uses.free}
        if not group:
            return
        group |= self._spelled_beside(group)
        if any(not group.issuperset(self.uses.readers(n)) for n in group - {node}):
            reason = "something else reads what lies between its products"
        else:
            reason = self._verdict(group)
        if reason:
            self.context.remarks.add(
                "missed", "group", "attention stays in several kernels", subject="attention", reason=reason,
                sources=tuple(map(str, node.sources[:1])),
            )  # fmt: skip
            return
        self.small |= {n for n in group if n.has(Trait.CONTRACTION)}
        self.units.put(group)
        self.labels |= dict.fromkeys(group, "attention")

    def _spelled_beside(self, group: set[Node]) -> set[Node]:
        """What a spelled-out attention computes beside its scores, as a mask to add, for nobody else."""
        found: set[Node] = set()
        stack = list(group)
        while stack:
            for node in self.uses.before(stack.pop()):
                own = self.labels.get(node) == "attention" and node not in group | found
                if own and (group | found).issuperset(self.uses.readers(node)):
                    found.add(node)
                    stack.append(node)
        return found

    def _sweep(self, nodes: list[Node], wanted: Callable[[set[Node], set[Node]], bool]) -> None:
        """Join every pair of groups that may be, in the order of the graph."""
        for node in nodes:
            for producer in self._producers(node):
                first, second = self.units.of[producer], self.units.of[node]
                if first is second or not wanted(first, second):
                    continue
                reason = self.refusals[producer, node] = self._refusal(producer, first, second)
                if not reason:
                    self.units.put(first | second)

    def _explain(self, nodes: list[Node]) -> None:
        """A remark for every pair that stays apart."""
        for node in nodes:
            for producer in self._producers(node):
                first, second = self.units.of[producer], self.units.of[node]
                if first is not second:
                    self.context.remarks.add(
                        "missed", "group", f"{producer.op.name} and {node.op.name} stay in two kernels",
                        subject=node.op.name, reason=self.refusals[producer, node],
                        sources=tuple(map(str, node.sources[:1])),
                    )  # fmt: skip

    def _producers(self, node: Node) -> list[Node]:
        """The computing nodes whose results a computing node reads, through free nodes."""
        return [n for n in self.uses.before(node) if n in self.units.of] if node in self.units.of else []

    def _refusal(self, producer: Node, first: set[Node], second: set[Node]) -> str:
        """Why two groups are not joined; "" where they are."""
        if len(first) + len(second) > _MAX_NODES:
            return "the kernel would be too large"
        inside = first | second
        shared = any(not inside.issuperset(self.uses.readers(n)) for n in first)
        if shared and not self._same_range(producer, second):
            return "several kernels read it"
        if self.units.closes_circle(first, second):
            return "a kernel between them needs the one and feeds the other"
        return self._verdict(inside)

    def _same_range(self, producer: Node, second: set[Node]) -> bool:
        numel = producer.result.tensor.numel
        return any(n.result.tensor.numel == numel or n.operands[0].tensor.numel == numel for n in second)

    def _verdict(self, group: set[Node]) -> str:
        """Why a group is no kernel; "" where it is one."""
        candidate = outline(group, self.uses)
        key = candidate.structure(self.spell)
        if key not in self.verdicts:
            self.verdicts[key] = self._judge(candidate.build())
        return self.verdicts[key]

    def _judge(self, body: Graph) -> str:
        try:
            nest = locate(body)
            classify(nest, self.small_m)
        except ScheduleError as reason:
            return reason.reason
        return recomputation(nest)

    # Regions.

    def _make_regions(self) -> None:
        graph, made = self.graph, dict[Node, Node]()
        groups = self.units.distinct()
        pieces = [outline(group, self.uses) for group in groups]
        for group, piece in zip(groups, pieces, strict=True):
            members = self.uses.ordered(group)
            body, label, fusions = piece.build(), self._label(members), self._fusions(members)
            made[members[0]] = graph.add_node(
                "region", piece.inputs, {"kind": "kernel", "label": label, "fusions": fusions, "body": body},
                types=[v.type for v in body.outputs],
                sources=tuple(dict.fromkeys(s for n in members for s in n.sources)),
            )  # fmt: skip
            if len(members) > 1:
                self._remark(made[members[0]], members)
        for piece, region in zip(pieces, made.values(), strict=True):
            for old, new in zip(piece.outputs, region.results, strict=True):
                graph.replace_value(old, new)
        before = {node: [made[node], node] for node in made}
        graph.reorder([n for node in self.uses.position for n in before.get(node, [node])])
        graph.erase_dead()
        graph.sort()

    def _fusions(self, members: Iterable[Node]) -> tuple[str, ...]:
        """The declared fusions that it came from."""
        return tuple(dict.fromkeys(self.labels[n] for n in members if self.labels.get(n)))

    def _label(self, members: Iterable[Node]) -> str:
        """A readable name: the fusions and products in it, in order."""
        words = [self.labels.get(n, "") or ("linear" if n.has(Trait.CONTRACTION) else "") for n in members]
        words = list(dict.fromkeys(filter(None, words)))
        if not words:
            heavy = dict.fromkeys(n.op.name for n in members if not n.is_op("cast"))
            words = list(heavy)[:4] or ["cast"]
        return "_".join(words[:4])

    def _remark(self, region: Node, members: list[Node]) -> None:
        inside = set(members)
        kept = [n.result for n in members if not self.uses.escapes(n, inside)]
        saved: Size = sum((2 * touched_bytes(value) for value in kept), start=0)
        label = region.attributes["label"]
        self.context.remarks.add(
            "passed", "group", f"{label}: {len(members)} operations in one kernel", subject=label,
            sources=tuple(map(str, region.sources[:8])), figures={"bytes_saved": str(saved)},
        )  # fmt: skip
