"""Greedy fusion of producers with their readers, wherever the result is one loop nest and saves time."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fusec.analysis.devices import devices, kernel_device, kind
from fusec.analysis.memory import touched_bytes
from fusec.analysis.outline import outline
from fusec.analysis.partition import Partition
from fusec.analysis.uses import Uses
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, multiplies_bytes, split_spec
from fusec.ir.structure import spelling
from fusec.ir.types import TensorType, contiguous_strides, estimate
from fusec.loops.attention import NO_ATTENTION
from fusec.loops.index_masks import is_index_mask
from fusec.loops.plan import Plan
from fusec.loops.ranges import loops, ranges
from fusec.loops.strides import dense, view_layout
from fusec.passes.grouping.attention import AttentionGroups
from fusec.passes.grouping.candidates import Candidates
from fusec.passes.grouping.kernel_regions import make_kernels
from fusec.passes.grouping.sinking import rematerialize, sink
from fusec.pipeline import Context
from fusec.refusal import Refusal

_MAX_NODES = 160
_ARITHMETIC = Trait.POINTWISE | Trait.REDUCTION
_ORDERED = Trait.SCAN | Trait.SORT
_INLINED = Trait.VIEW | Trait.SOURCE
_CYCLE = Refusal("another kernel reads the one and is read by the other")
TINY = 64
"""Elements up to which a kernel costs nothing but its launch."""


class Grouping:
    """Fuses the nodes of one graph into groups."""

    def __init__(
        self,
        graph: Graph,
        context: Context,
        labels: dict[Node, str],
        to_vendor: Collection[Node] = (),
        refused: Mapping[Hashable, Refusal] = MappingProxyType({}),
    ) -> None:
        """Start with every node in a group of its own.

        Args:
            graph: is changed only by ``make``, but for the strides of matmuls' operands.
            context: takes the remarks.
            labels: the declared fusions that nodes come from.
            to_vendor: matmuls that are vendor calls.
            refused: groups that the target does not schedule, by structure, and why.
        """
        self.graph, self.context, self.labels = graph, context, labels
        self.device = kind(kernel_device(graph))
        self.refusals: dict[tuple[Node, Node], Refusal] = {}
        """The reason why a producer and its reader are in two groups, as found last."""
        self.uses = Uses(graph, (n for n in graph.nodes if self._is_inlined(n)))
        """Views, constants, widening casts and masks are recomputed by each kernel that reads them, at no cost."""
        self.candidates = Candidates(self.uses, context.limits, context.machine, refused)
        self.partition = Partition(self.uses)
        for node in graph.nodes:
            if node.has(Trait.CONTRACTION):
                self._make_contiguous(node.operands[0])
        self.to_vendor = to_vendor
        self.matmuls = {
            n for n in graph.nodes if n.has(Trait.CONTRACTION) and n not in to_vendor and self._is_generated(n)
        }
        """Those with a generated kernel."""
        self.attentions = AttentionGroups(self.uses, self.candidates, labels)
        self.fused_attention: set[Node] = set()
        """The nodes of attentions in one kernel."""
        self.unfused_attention: dict[Node, Refusal] = {}
        """Last matmuls of attentions that take several kernels, and why."""

    def fuse(self) -> None:
        """Fuse groups as far as that is legal and predicted to save time."""
        nodes = self.graph.nodes
        for node in nodes:
            self._fuse_attention(node)
            self._fuse_weight(node)
        for node in nodes:
            is_inlined = node.has(Trait.POINTWISE) and node in self.uses.inlined
            if node not in self.partition.group_of and not is_inlined and self._computes(node):
                self.partition.put({node})
                if node in self.uses.inlined:
                    self.uses.materialize(node)
        for node in [n for n, group in self.partition.group_of.items() if len(group) == 1]:
            if not node.has(Trait.VIEW) and self.candidates.refusal({node}):
                self._materialize_views(node)
        # A cache that is shifted is shifted in place: the write joins the concatenation first.
        self._sweep(
            [n for n in nodes if n.has(Trait.WRITE)], lambda first, second: any(n.is_op("concat") for n in first)
        )
        # A matrix times a vector is one computation: apart from their sums, its products would be stored.
        self._sweep(nodes, _sums_products)
        # Reductions first: a residual and a norm are fused before either becomes the epilogue of a matmul.
        self._sweep(nodes, lambda first, second: not (first & self.matmuls or second & self.matmuls))
        self._sweep(nodes, lambda first, second: bool(first & self.matmuls))
        self._sweep(nodes, lambda first, second: True)
        self._fuse_stores()
        if rematerialize(self.partition, self.candidates) + sink(nodes, self.partition, self.candidates):
            self._sweep(nodes, lambda first, second: True)
        self._fuse_tiny()

    def faster_as_vendor_calls(self) -> dict[Node, Refusal]:
        """Return the large-M GEMMs that are predicted to save nothing in their kernels, and why."""
        found: dict[Node, Refusal] = {}
        for group in self.partition.groups():
            matmuls = {n for n in group if n.has(Trait.CONTRACTION)}
            if matmuls and self.candidates.estimate(group).is_large_m:
                refusal = self.candidates.no_gain_over_vendor(group, matmuls)
                found |= dict.fromkeys(self.uses.ordered(matmuls), refusal) if refusal else {}
        return found

    def unscheduled(self) -> dict[Hashable, Refusal]:
        """Return the groups of several nodes, and matmuls, without a schedule on the target: structure and reason."""
        found: dict[Hashable, Refusal] = {}
        for group in self.partition.groups():
            if len(group) > 1 or group <= self.matmuls:
                plan = self.candidates.estimate(group).plan
                if isinstance(plan, Plan) and (refusal := self.context.unschedulable(plan)):
                    key = outline(group, self.uses).structure(spelling)
                    found[key] = replace(refusal, reason=f"its kernel has no schedule: {refusal.reason}")
        return found

    def make(self) -> None:
        """Make a kernel region of each group; leave remarks for what was not fused."""
        nodes = self.graph.nodes
        self._remark_unfused(nodes)
        for node in [n for n, group in self.partition.group_of.items() if len(group) == 1 and n.is_op("write")]:
            del self.partition.group_of[node]  # ATen copies
        make_kernels(self.graph, self.partition, self.candidates, self.labels, self.context)

    # Nodes that may be grouped.

    def _is_inlined(self, node: Node) -> bool:
        if node.is_op("cast"):
            (x,) = node.operands
            wider = x.dtype.is_float and node.result.dtype.is_float and x.dtype.bytes < node.result.dtype.bytes
            return wider and not self._leaves_kernels(node)
        if is_index_mask(node, TINY):
            return not self._leaves_kernels(node)
        if node.is_op("where"):
            return all(map(_is_number, node.operands[1:])) and not self._leaves_kernels(node)
        if node.is_op("reshape") and any(node.result in user.written for user in node.users):
            return False  # a kernel writes to an input of its own: the rows of a pool are a view of it
        return node.has(_INLINED) and not node.is_op("concat")

    def _leaves_kernels(self, node: Node) -> bool:
        """Return whether a result, or a view of it, is an output of the graph or read by other than arithmetic."""
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
        types = (v.type for v in (*(() if node.is_op("bitcast") else node.operands), *node.results))
        if not all(isinstance(t, TensorType) and t.dtype.kind != "other" for t in types):
            return False
        if node.is_op("concat"):
            return not self.candidates.refusal({node}) or self._materialize_views(node)
        if node.has(Trait.WRITE) and not node.is_op("scatter"):
            return True
        if node.has(Trait.LOOKUP | _ORDERED) or node.is_op("scatter"):
            return not self.candidates.refusal({node}) or self._materialize_views(node)
        if node.has(Trait.VIEW):
            return self._reaches_boundary(node) and self._is_copied(node)
        if node.has(Trait.CONTRACTION):
            return node in self.matmuls
        return node.has(_ARITHMETIC) and not node.has(Trait.SOURCE)

    def _make_contiguous(self, left: Value) -> None:
        """Make the left operand of a matmul contiguous, if a kernel computes it, whatever its strides in eager."""
        computed = left.producer is not None and left.producer.has(_ARITHMETIC)
        if computed and left not in self.graph.outputs:
            left.type = replace(left.tensor, strides=contiguous_strides(left.shape))

    def _is_generated(self, node: Node) -> bool:
        return _is_plain(node) and (not self.candidates.refusal({node}) or self._materialize_views(node))

    def _is_copied(self, view: Node) -> bool:
        """Return whether a kernel copies a view; of a chain that is no loop nest, only a part is copied."""
        if not self._needs_copy(view):
            return False
        return not (self.candidates.refusal({view}) and self._materialize_views(view)) or self._needs_copy(view)

    def _needs_copy(self, view: Node) -> bool:
        """Return whether a chain of views has no strides over the memory of its operand."""
        return self._layout(view.result) is None

    def _layout(self, value: Value) -> TensorType | None:
        node = value.producer
        if node is None or not node.has(Trait.VIEW | Trait.SOURCE) or node.is_op("concat"):
            return value.tensor if node is None or node.has(Trait.OPAQUE) else dense(value.tensor)
        if node.has(Trait.SOURCE) or node in self.partition.group_of:
            return None if node.has(Trait.SOURCE) else dense(value.tensor)
        inner = self._layout(node.operands[0])
        found = view_layout(node, inner) if inner is not None else None
        return None if found is None else TensorType(value.dtype, value.shape, found[0], value.tensor.device)

    def _materialize_views(self, node: Node) -> bool:
        """Materialize reshapes that a node reads, where it has a kernel without them; return whether it has."""
        read = (v.producer for v in self.uses.inputs(node))
        reshapes = [n for n in read if n is not None and n in self.uses.inlined and n.is_op("reshape")]
        for few in (
            [*([view] for view in reversed(reshapes)), reshapes] if reshapes else ()
        ):  # the nearest may be enough
            self.uses.materialize(*few)
            copies = [{view} for view in few if self._needs_copy(view)]
            if not self.candidates.refusal({node}) and not any(map(self.candidates.refusal, copies)):
                for copy in copies:
                    self.partition.put(copy)
                return True
            self.uses.inline(*few)
        return False

    def _reaches_boundary(self, view: Node) -> bool:
        """Return whether other than kernels read a view."""
        return view in self.uses.returned or any(
            user not in self.uses.inlined and not self._is_arithmetic(user) for user in view.users
        )

    def _is_arithmetic(self, node: Node) -> bool:
        return node.has(_ARITHMETIC | Trait.LOOKUP | _ORDERED) or node.is_op("concat") or node in self.matmuls

    # Fusion.

    def _fuse_attention(self, node: Node) -> None:
        """Fuse the attention of which ``node`` is the last matmul, if it is one."""
        found = self.attentions.group_ending_at(node)
        if isinstance(found, set) and not self.partition.is_convex(found):
            found = _CYCLE
        if isinstance(found, Refusal):
            self.unfused_attention[node] = found
        elif found is not None:
            self.matmuls |= {n for n in found if n.has(Trait.CONTRACTION)}
            self.partition.put(found)
            self.fused_attention |= found
            self.labels |= dict.fromkeys(found, "attention")

    def _fuse_weight(self, node: Node) -> None:
        """Fuse a matmul with all that computes its weight, where only that is legal, such as one with few bits."""
        if not node.has(Trait.CONTRACTION) or node in self.matmuls or node in self.to_vendor or not _is_plain(node):
            return
        group = {node}
        stack = [node.operands[1].producer]
        while stack:
            n = stack.pop()
            if n is None or not n.has(_ARITHMETIC | _INLINED | Trait.LOOKUP):
                continue
            if n not in self.uses.inlined and group.issuperset(self.uses.readers(n)):
                group.add(n)
            if n in group or n in self.uses.inlined:
                stack += [v.producer for v in n.operands]
        if len(group) == 1 or not all(map(self._computes, group - {node})):
            return
        if self.partition.is_convex(group) and not self.candidates.refusal(group):
            self.matmuls.add(node)
            self.partition.put(group)

    def _sweep(self, nodes: list[Node], wanted: Callable[[set[Node], set[Node]], bool]) -> None:
        """Fuse each producer's group with its reader's, in the order of the graph, where that is wanted and legal."""
        for node in nodes:
            for producer in self._producers(node):
                first, second = self.partition.group_of[producer], self.partition.group_of[node]
                if first is second or not wanted(first, second):
                    continue
                refusal = self._refusal(producer, first, second)
                if refusal is None:
                    self.partition.put(first | second)
                else:
                    self.refusals[producer, node] = refusal

    def _remark_unfused(self, nodes: list[Node]) -> None:
        """Leave a remark for every attention, and every producer and reader, in several kernels or in none."""
        self._remark_unordered(nodes)
        for node, refusal in self.unfused_attention.items():
            self._remark_missed(node, "attention takes several kernels", "attention", refusal)
        for node in nodes:
            for producer in self._producers(node):
                first, second = self.partition.group_of[producer], self.partition.group_of[node]
                if first is second:
                    continue
                refusal = self.refusals[producer, node]
                if not self._is_no_attention(first | second, refusal):
                    message = f"{producer.op.name} and {node.op.name} are in two kernels"
                    self._remark_missed(node, message, node.op.name, refusal, self._between(producer, node))

    def _remark_unordered(self, nodes: list[Node]) -> None:
        """Leave a remark for every scan, sort and scatter in no kernel."""
        for node in nodes:
            is_in_order = node.has(_ORDERED) or node.is_op("scatter")
            if is_in_order and node not in self.partition.group_of and (refusal := self.candidates.refusal({node})):
                self._remark_missed(node, f"{node.op.name} is in no kernel", node.op.name, refusal)

    def _between(self, producer: Node, node: Node) -> int:
        """Return the bytes of what a node reads of another, written and read, for a tool that shows them."""
        if not self.context.config.record:
            return 0
        return 2 * sum(estimate(touched_bytes(v)) for v in self.uses.inputs(node) if v.producer is producer)

    def _is_no_attention(self, group: set[Node], refusal: Refusal) -> bool:
        """Return whether a refusal is about an attention where there is none, or one that is known already."""
        known = self.fused_attention | self.unfused_attention.keys()
        has_softmax = any(n.is_op("exp") for n in group) and any(n.is_op("sum") for n in group)
        return refusal.reason.startswith(NO_ATTENTION) and not (has_softmax and known.isdisjoint(group))

    def _remark_missed(self, node: Node, message: str, subject: str, refusal: Refusal, lost: int = 0) -> None:
        self.context.remarks.add(
            "missed", "group", message, subject=subject, reason=refusal.reason, suggestion=refusal.suggestion,
            sources=tuple(map(str, node.sources[:1])), figures={"bytes_lost": lost} if lost else {},
        )  # fmt: skip

    def _producers(self, node: Node) -> list[Node]:
        """Return the producers of a node's inputs that are in groups."""
        if node not in self.partition.group_of:
            return []
        producers = dict.fromkeys(v.producer for v in self.uses.inputs(node))
        return [n for n in producers if n is not None and n in self.partition.group_of]

    def _refusal(self, producer: Node, first: set[Node], second: set[Node]) -> Refusal | None:
        """Return why a producer's group is not fused with a reader's."""
        if len(first) + len(second) > _MAX_NODES:
            return Refusal(f"the kernel would have more than {_MAX_NODES} operations")
        inside = first | second
        shared = any(not inside.issuperset(self.uses.readers(n)) for n in first)
        if shared and not self._same_range(producer, second) and not self._reads_what_is_reduced(first, second):
            return Refusal("several kernels read its result")
        if self.partition.closes_cycle(first, second):
            return _CYCLE
        together = self.candidates.estimate(inside)
        return together.refusal or self.candidates.loss(together, first, second)

    def _same_range(self, producer: Node, second: set[Node]) -> bool:
        """Return whether a group has a node with the loops of a producer's result, or of a view of it."""
        seen = [producer.result]
        for value in seen:  # extended while it is read
            seen += [r for user in value.users if user in self.uses.inlined for r in user.results]
        wanted = [loops(v) for v in seen if v.tensor.numel == producer.result.tensor.numel]
        return any(loops(v) in wanted for n in second for v in ranges(n))

    def _reads_what_is_reduced(self, first: set[Node], second: set[Node]) -> bool:
        """Return whether a group reads the rows that another reduces, as a quantisation does after their maximum."""
        reduced = [loops(n.operands[0]) for n in first if n.has(Trait.REDUCTION)]
        one, other = ({v for n in group for v in self.uses.inputs(n)} for group in (first, second))
        return any(loops(v) in reduced for v in one & other)

    def _fuse_stores(self) -> None:
        """Fuse stores at the same dynamic rows, such as keys and values into a cache, and the producer of the index."""
        stored: dict[Value, list[Node]] = {}
        for node in self.uses.ordered(self.partition.group_of):
            if node.has(Trait.WRITE) and "dim" in node.attributes:
                stored.setdefault(node.operands[2], []).append(node)
        for first, *others in stored.values():
            latest = first  # of this layer: one that depends on the first is not fused with it
            for node in others:
                for earlier in dict.fromkeys((latest, first)):
                    one, other = self.partition.group_of[earlier], self.partition.group_of[node]
                    if one is not other and self._may_fuse(one, other):
                        self.partition.put(one | other)
                        break
                latest = node
            for producer in self._producers(first) if others else ():
                group, stores = self.partition.group_of[producer], self.partition.group_of[first]
                if group is not stores and not self._refusal(producer, group, stores):
                    self.partition.put(group | stores)

    def _may_fuse(self, one: set[Node], other: set[Node]) -> bool:
        """Return whether two groups, neither of which reads the other, are better as one kernel."""
        both = one | other
        if len(both) > _MAX_NODES or self._close_cycle(one, other):
            return False
        together = self.candidates.estimate(both)
        return not (together.refusal or self.candidates.loss(together, one, other))

    def _close_cycle(self, one: set[Node], other: set[Node]) -> bool:
        return self.partition.closes_cycle(one, other) or self.partition.closes_cycle(other, one)

    def _fuse_tiny(self) -> None:
        """Fuse all groups of tiny results that no kernel reads, such as the counters of all layers."""
        fused: set[Node] = set()
        for group in self.partition.groups():
            if not all(self._is_tiny(n) and group.issuperset(self.uses.readers(n)) for n in group):
                continue
            if len(fused) + len(group) > _MAX_NODES or (fused and self._close_cycle(fused, group)):
                continue
            if not self.candidates.refusal(fused | group):
                fused |= group
                self.partition.put(fused)

    def _is_tiny(self, node: Node) -> bool:
        plain = node.has(Trait.POINTWISE) or (node.has(Trait.WRITE) and "dim" not in node.attributes)
        sizes = [v.tensor.numel for v in (*node.results, *node.operands)]
        return plain and all(isinstance(n, int) and n <= TINY for n in sizes)


def _is_plain(matmul: Node) -> bool:
    """Return whether a matmul has elements and no batch, of a dtype that kernels sum."""
    (left, right), out = split_spec(matmul.attributes["spec"])
    is_batch = set(left) & set(right) & set(out)
    summed = matmul.operands[0].dtype.is_float or multiplies_bytes(matmul.attributes)  # a library sums other integers
    return not is_batch and summed and matmul.result.tensor.numel != 0


def _is_number(value: Value) -> bool:
    return value.producer is not None and value.producer.is_op("constant")


def _sums_products(products: set[Node], sums: set[Node]) -> bool:
    """Return whether some group sums the products of another, one factor of which has fewer elements than these."""
    return any(
        total.is_op("sum") and (product := total.operands[0].producer) in products and product.is_op("mul")
        and any(x.tensor.numel != product.result.tensor.numel for x in product.operands)
        for total in sums
    )  # fmt: skip
