"""Which nodes share a kernel: producers and readers are joined greedily, wherever that is one loop nest and saves."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fusec.analysis.devices import devices, kernel_device, kind
from fusec.analysis.outline import outline
from fusec.analysis.units import Units
from fusec.analysis.uses import Uses
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.structure import spelling
from fusec.ir.types import TensorType, contiguous_strides
from fusec.loops.attention import attention_groups, is_layer
from fusec.loops.plan import Plan
from fusec.loops.positions import is_of_positions
from fusec.loops.ranges import loops, ranges
from fusec.loops.strides import dense, view_layout
from fusec.passes.grouping.candidates import Candidates
from fusec.passes.grouping.kernel_regions import make_kernels
from fusec.passes.grouping.moves import repeat_moves, shift
from fusec.pipeline import Context
from fusec.refusal import Refusal

_MAX_NODES = 160
_ARITHMETIC = Trait.POINTWISE | Trait.REDUCTION
_FREE = Trait.VIEW | Trait.SOURCE
TINY = 64
"""Elements up to which what a kernel makes costs nothing but its launch."""


class Grouping:
    """Joins the nodes of one graph."""

    def __init__(
        self,
        graph: Graph,
        context: Context,
        labels: dict[Node, str],
        left: Collection[Node] = (),
        refused: Mapping[Hashable, Refusal] = MappingProxyType({}),
    ) -> None:
        """What there is to join.

        Args:
            graph: whose nodes they are.
            context: takes the remarks.
            labels: the declared fusions that nodes come from.
            left: matmuls that are left to the vendor, whatever kernels may be.
            refused: groups that the target does not schedule, by structure, and why.
        """
        self.graph, self.context, self.labels = graph, context, labels
        self.device = kind(kernel_device(graph))
        self.refusals: dict[tuple[Node, Node], Refusal] = {}
        """Why a producer and its reader stay apart, as found last."""
        self.uses = Uses(graph, (n for n in graph.nodes if self._is_free(n)))
        """A kernel takes index maps, numbers, wider types and numbers for truth values along at no cost."""
        self.candidates = Candidates(self.uses, context.limits, context.machine, refused)
        self.units = Units(self.uses)
        """The groups of the nodes that compute."""
        for node in graph.nodes:
            if node.has(Trait.CONTRACTION):
                self._lay_out(node.operands[0])
        self.products = {n for n in graph.nodes if n.has(Trait.CONTRACTION) and n not in left and self._is_generated(n)}
        self.apart: dict[Node, Refusal] = {}
        """Last products of attentions that stay in several kernels, and why."""

    def join(self) -> None:
        """Join what belongs together."""
        nodes = self.graph.nodes
        for node in nodes:
            self._join_attention(node)
        for node in nodes:
            free = node.has(Trait.POINTWISE) and node in self.uses.free
            if node not in self.units.of and not free and self._computes(node):
                self.units.put({node})
                if node in self.uses.free:
                    self.uses.stop_at(node)
        for node in [n for n, unit in self.units.of.items() if len(unit) == 1]:
            if not node.has(Trait.VIEW) and self.candidates.refusal({node}):
                self._set_views_apart(node)
        # A window that moves does so in its own memory, whatever makes its new rows.
        self._sweep(
            [n for n in nodes if n.has(Trait.WRITE)], lambda first, second: any(n.is_op("concat") for n in first)
        )
        # Rows first: a residual and a norm belong together before a product takes either as its epilogue.
        self._sweep(nodes, lambda first, second: not (first & self.products or second & self.products))
        self._sweep(nodes, lambda first, second: bool(first & self.products))
        self._sweep(nodes, lambda first, second: True)
        self._join_stores()
        if repeat_moves(self.units, self.candidates) + shift(nodes, self.units, self.candidates):
            self._sweep(nodes, lambda first, second: True)
        self._join_tiny()

    def faster_as_vendor_calls(self) -> dict[Node, Refusal]:
        """Return the large-M GEMMs that are predicted to save nothing in their kernels, and why."""
        found: dict[Node, Refusal] = {}
        for unit in self.units.distinct():
            products = {n for n in unit if n.has(Trait.CONTRACTION)}
            if products and self.candidates.estimate(unit).is_large_m:
                refusal = self.candidates.no_gain_over_vendor(unit, products)
                found |= dict.fromkeys(self.uses.ordered(products), refusal) if refusal else {}
        return found

    def unscheduled(self) -> dict[Hashable, Refusal]:
        """Return the groups of several nodes, and products, that the target does not schedule; by structure, why."""
        found: dict[Hashable, Refusal] = {}
        for unit in self.units.distinct():
            if len(unit) > 1 or unit <= self.products:
                plan = self.candidates.estimate(unit).plan
                if isinstance(plan, Plan) and (refusal := self.context.unschedulable(plan)):
                    key = outline(unit, self.uses).structure(spelling)
                    found[key] = replace(refusal, reason=f"its kernel has no schedule: {refusal.reason}")
        return found

    def make(self) -> None:
        """Make kernels of what is joined, and say what stays apart."""
        nodes = self.graph.nodes
        self._explain(nodes)
        for node in [n for n, unit in self.units.of.items() if len(unit) == 1 and n.has(Trait.WRITE)]:
            del self.units.of[node]  # a copy and nothing else is ATen's
        make_kernels(self.graph, self.units, self.candidates, self.labels, self.context)

    # What may be grouped.

    def _is_free(self, node: Node) -> bool:
        if node.is_op("cast"):
            (x,) = node.operands
            wider = x.dtype.is_float and node.result.dtype.is_float and x.dtype.bytes < node.result.dtype.bytes
            return wider and not self._leaves_kernels(node)
        if is_of_positions(node, TINY):
            return not self._leaves_kernels(node)
        if node.is_op("where"):
            return all(map(_is_number, node.operands[1:])) and not self._leaves_kernels(node)
        return node.has(_FREE) and not node.is_op("concat")

    def _leaves_kernels(self, node: Node) -> bool:
        """Whether something that is no arithmetic reads a value, or a view of it."""
        if node.result in self.graph.outputs:
            return True
        return any(
            self._leaves_kernels(user) if user.is_alias
            else not (user.has(_ARITHMETIC) or user.is_op("concat"))
            for user in node.users
        )  # fmt: skip

    def _computes(self, node: Node) -> bool:
        if not {kind(device) for device in devices((*node.operands, *node.results))} <= {self.device}:
            return False
        types = (v.type for v in (*node.operands, *node.results))
        if not all(isinstance(t, TensorType) and t.dtype.kind != "other" for t in types):
            return False
        if node.is_op("concat"):
            return not self.candidates.refusal({node}) or self._set_views_apart(node)
        if node.has(Trait.WRITE):
            return True
        if node.has(Trait.LOOKUP):
            return not self.candidates.refusal({node})
        if node.has(Trait.VIEW):
            return self._reaches_boundary(node) and self._is_copied(node)
        if node.has(Trait.CONTRACTION):
            return node in self.products
        return node.has(_ARITHMETIC) and not node.has(Trait.SOURCE)

    def _lay_out(self, left: Value) -> None:
        """Let what a product reads lie row by row, if a kernel makes it: eager's layout means nothing to us."""
        computed = left.producer is not None and left.producer.has(_ARITHMETIC)
        if computed and left not in self.graph.outputs:
            left.type = replace(left.tensor, strides=contiguous_strides(left.shape))

    def _is_generated(self, node: Node) -> bool:
        (left, right), out = split_spec(node.attributes["spec"])
        is_batch = set(left) & set(right) & set(out)
        plain = not is_batch and node.operands[0].dtype.is_float and node.result.tensor.numel != 0
        return plain and (not self.candidates.refusal({node}) or self._set_views_apart(node))

    def _is_copied(self, view: Node) -> bool:
        """Return whether a kernel makes a view; of a chain without a loop nest, a part is copied, the rest an alias."""
        if not self._needs_copy(view):
            return False
        return not (self.candidates.refusal({view}) and self._set_views_apart(view)) or self._needs_copy(view)

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

    def _set_views_apart(self, node: Node) -> bool:
        """Keep the reshapes that a lone node reads out of its kernel, where without them it has one."""
        read = (v.producer for v in self.uses.taken(node))
        reshapes = [n for n in read if n is not None and n in self.uses.free and n.is_op("reshape")]
        for few in [*([view] for view in reversed(reshapes)), reshapes] if reshapes else ():  # the nearest may do
            self.uses.stop_at(*few)
            copies = [{view} for view in few if self._needs_copy(view)]
            if not self.candidates.refusal({node}) and not any(map(self.candidates.refusal, copies)):
                for copy in copies:
                    self.units.put(copy)
                return True
            self.uses.pass_through(*few)
        return False

    def _reaches_boundary(self, view: Node) -> bool:
        """Whether something that is no kernel reads the view itself."""
        return view in self.uses.returned or any(
            user not in self.uses.free and not self._is_arithmetic(user) for user in view.users
        )

    def _is_arithmetic(self, node: Node) -> bool:
        return node.has(_ARITHMETIC | Trait.LOOKUP) or node.is_op("concat") or node in self.products

    # Joining.

    def _join_attention(self, node: Node) -> None:
        """Both products of an attention and what lies between are one group from the start."""
        refusals: dict[Refusal, None] = {}
        for found in attention_groups(node) if self.candidates.limits.small_m and node.has(Trait.CONTRACTION) else ():
            group = {n for n in found if n not in self.uses.free}
            group |= self._spelled_beside(group)
            refusal = self._no_attention(group, node)
            if refusal is None:
                self.products |= {n for n in group if n.has(Trait.CONTRACTION)}
                self.units.put(group)
                self.labels |= dict.fromkeys(group, "attention")
                return
            refusals[refusal] = None
        if refusals:
            self.apart[node] = Refusal("; or ".join(refusal.reason for refusal in refusals))

    def _no_attention(self, group: set[Node], last: Node) -> Refusal | None:
        """Return why a group from one matmul to the last is not attention in one kernel."""
        if any(self.uses.escapes(n, group) for n in group - {last}):
            return Refusal("something else reads a value between its matmuls")
        if is_layer(group) and any(self.labels.get(n) != "attention" for n in group):
            return Refusal("its keys or values are weights that all rows share")
        refusal = self.candidates.refusal(group)
        views = self._views_into(group) if refusal else []
        if views:
            # A dim that was flattened falls into several loops, unless its view stays outside.
            self.uses.stop_at(*views)
            refusal = self.candidates.refusal(group)
            if refusal:
                self.uses.pass_through(*views)
            else:
                self._let_in(views, group)
        return refusal

    def _let_in(self, views: list[Node], group: set[Node]) -> None:
        """Let those that need not stay outside be free again, the nearest first: they may repeat keys and values."""
        for view in reversed(self.uses.ordered(views)):
            self.uses.pass_through(view)
            if self.candidates.refusal(group):
                self.uses.stop_at(view)

    def _views_into(self, group: set[Node]) -> list[Node]:
        """The reshapes through which a group reads what others compute."""
        read = dict.fromkeys(v.producer for n in group for v in self.uses.taken(n))
        views = [n for n in read if n is not None and n in self.uses.free and n.is_op("reshape")]
        return [n for n in views if group.isdisjoint(self.uses.before(n))]

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
                refusal = self._refusal(producer, first, second)
                if refusal is None:
                    self.units.put(first | second)
                else:
                    self.refusals[producer, node] = refusal

    def _explain(self, nodes: list[Node]) -> None:
        """A remark for every pair and every attention that stays apart."""
        for node, refusal in self.apart.items():
            self.context.remarks.add(
                "missed", "group", "attention stays in several kernels", subject="attention",
                reason=refusal.reason, sources=tuple(map(str, node.sources[:1])),
            )  # fmt: skip
        for node in nodes:
            for producer in self._producers(node):
                first, second = self.units.of[producer], self.units.of[node]
                if first is not second:
                    self.context.remarks.add(
                        "missed", "group", f"{producer.op.name} and {node.op.name} stay in two kernels",
                        subject=node.op.name, reason=self.refusals[producer, node].reason,
                        sources=tuple(map(str, node.sources[:1])),
                    )  # fmt: skip

    def _producers(self, node: Node) -> list[Node]:
        """The computing nodes whose results a computing node reads, through free nodes."""
        if node not in self.units.of:
            return []
        made = dict.fromkeys(v.producer for v in self.uses.taken(node))
        return [n for n in made if n is not None and n in self.units.of]

    def _refusal(self, producer: Node, first: set[Node], second: set[Node]) -> Refusal | None:
        """Return why two groups are not joined."""
        if len(first) + len(second) > _MAX_NODES:
            return Refusal("the kernel would be too large")
        inside = first | second
        shared = any(not inside.issuperset(self.uses.readers(n)) for n in first)
        if shared and not self._same_range(producer, second):
            return Refusal("several kernels read it")
        if self.units.closes_cycle(first, second):
            return Refusal("a kernel between them needs the one and feeds the other")
        together = self.candidates.estimate(inside)
        return together.refusal or self.candidates.loss(together, first, second)

    def _same_range(self, producer: Node, second: set[Node]) -> bool:
        """Whether the other group has loops like those that a value is computed in."""
        seen = [producer.result]
        for value in seen:  # as its readers see it
            seen += [r for user in value.users if user in self.uses.free for r in user.results]
        wanted = [loops(v) for v in seen if v.tensor.numel == producer.result.tensor.numel]
        return any(loops(v) in wanted for n in second for v in ranges(n))

    def _join_stores(self) -> None:
        """What goes to the same places, as keys and values of many rows do, is one kernel, which finds them itself."""
        stored: dict[Value, list[Node]] = {}
        for node in self.uses.ordered(self.units.of):
            if node.has(Trait.WRITE) and "dim" in node.attributes:
                stored.setdefault(node.operands[2], []).append(node)
        for first, *others in stored.values():
            for node in others:
                one, other = self.units.of[first], self.units.of[node]
                if one is not other and not self._stays_apart(one, other):
                    self.units.put(one | other)
            for maker in self._producers(first) if others else ():
                unit = self.units.of[maker]
                if unit is not self.units.of[first] and not self._refusal(maker, unit, self.units.of[first]):
                    self.units.put(unit | self.units.of[first])

    def _stays_apart(self, one: set[Node], other: set[Node]) -> bool:
        """Whether two groups of which neither reads the other are no kernel."""
        both = one | other
        if len(both) > _MAX_NODES or self.units.closes_cycle(one, other) or self.units.closes_cycle(other, one):
            return True
        together = self.candidates.estimate(both)
        return bool(together.refusal or self.candidates.loss(together, one, other))

    def _join_tiny(self) -> None:
        """What no kernel waits for and is so small that only launches count, as all layers' counters, is one kernel."""
        joined: set[Node] = set()
        for unit in self.units.distinct():
            if not all(self._is_tiny(n) and unit.issuperset(self.uses.readers(n)) for n in unit):
                continue
            apart = self.units.closes_cycle(joined, unit) or self.units.closes_cycle(unit, joined) if joined else ""
            if not apart and len(joined) + len(unit) <= _MAX_NODES and not self.candidates.refusal(joined | unit):
                joined |= unit
                self.units.put(joined)

    def _is_tiny(self, node: Node) -> bool:
        plain = node.has(Trait.POINTWISE) or (node.has(Trait.WRITE) and "dim" not in node.attributes)
        sizes = [v.tensor.numel for v in (*node.results, *node.operands)]
        return plain and all(isinstance(n, int) and n <= TINY for n in sizes)


def _is_number(value: Value) -> bool:
    return value.producer is not None and value.producer.is_op("constant")
