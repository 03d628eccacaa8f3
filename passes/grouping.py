"""Grouping: primitives are joined into kernels wherever one loop nest serves both and memory traffic is saved."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fusec.analysis.affine import Axis
from fusec.analysis.attention import attention_nodes
from fusec.analysis.indexing import Located, Nest, below, locate
from fusec.analysis.kinds import classify
from fusec.analysis.memory import touched_bytes
from fusec.analysis.strides import dense, view_layout
from fusec.analysis.uses import base, joining_closes_circle
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.structure import structure
from fusec.ir.types import Size, TensorType, estimate
from fusec.pipeline import Context

# Arithmetic that costs about as much as moving one byte (a core's share of bandwidth against its throughput).
_FLOPS_PER_BYTE = 8
_MAX_NODES = 160
_ARITHMETIC = Trait.POINTWISE | Trait.REDUCTION
_FREE = Trait.VIEW | Trait.SOURCE
# Arithmetic that hides behind the load of its operand, however often it is repeated.
_CHEAP = 2


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


def open_regions(graph: Graph) -> dict[Node, str]:
    """Put the bodies of declared regions in their place; gives the fusion's name for each node that came from one."""
    labels: dict[Node, str] = {}
    order: list[Node] = []
    opened: list[Node] = []
    for node in graph.nodes:
        if not node.has(Trait.REGION):
            order.append(node)
            continue
        flat = node.body.copy()
        inner = open_regions(flat)
        to = dict(zip(flat.inputs, node.operands, strict=True))
        count = len(graph)
        graph.splice(flat, to, node.sources)
        added = graph.newest(len(graph) - count)
        for old, new in zip(flat.nodes, added, strict=True):
            labels[new] = node.attributes["fusion"] or inner.get(old, "")
        for old_result, body_output in zip(node.results, flat.outputs, strict=True):
            graph.replace_value(old_result, to[body_output])
        order += added
        opened.append(node)
    for node in opened:
        graph.erase(node)
    graph.reorder(order)
    return labels


class _Grouping:
    def __init__(self, graph: Graph, context: Context, labels: dict[Node, str], small_m: int) -> None:
        self.graph, self.context, self.labels, self.small_m = graph, context, labels, small_m
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.unit: dict[Node, set[Node]] = {}
        """The group of each node that computes; nodes of one group share the set."""
        self.verdicts: dict[tuple[object, ...], str] = {}
        """Why a candidate is no kernel, or "" where it is, by structure."""
        self.apart: set[Node] = set()
        """Views that no loop index follows, so that they stay outside of kernels."""
        self.refusals: dict[tuple[Node, Node], str] = {}
        """Why a producer and its reader stay apart, as it was found last."""
        self.outputs = set(graph.outputs)
        self._forget()
        self.small = {n for n in graph.nodes if n.has(Trait.CONTRACTION) and self._is_small(n)}

    def run(self) -> None:
        nodes = self.graph.nodes
        for node in nodes:
            self._join_attention(node)
        for node in nodes:
            if node not in self.unit and self._computes(node):
                self.unit[node] = {node}
                if node.has(Trait.VIEW):
                    self._forget()
        for node in [n for n, group in self.unit.items() if len(group) == 1]:
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
            return self._reaches_boundary(node.result) and self._needs_copy(node)
        if node.has(Trait.CONTRACTION):
            return node in self.small
        return node.has(Trait.POINTWISE | Trait.REDUCTION) and not node.has(Trait.SOURCE)

    def _is_small(self, node: Node) -> bool:
        (left, right), out = split_spec(node.attributes["spec"])
        x = node.operands[0].tensor
        if set(left) & set(right) & set(out) or x.device != "cpu" or not x.dtype.is_float:
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
        if node.has(Trait.SOURCE) or node in self.unit:
            return None if node.has(Trait.SOURCE) else dense(value.tensor)
        inner = self._layout(node.operands[0])
        found = view_layout(node, inner) if inner is not None else None
        return None if found is None else TensorType(value.dtype, value.shape, found[0], value.tensor.device)

    def _set_views_apart(self, node: Node) -> None:
        """Keep the reshapes that a lone node reads out of its kernel, where with them it would have none."""
        views = [v.producer for v in node.operands if v.producer is not None and self._is_free(v.producer)]
        reshapes: list[Node] = []
        while views:
            view = views.pop()
            if view.is_op("reshape"):
                reshapes.append(view)
            views += [v.producer for v in view.operands if v.producer is not None and self._is_free(v.producer)]
        if reshapes and not node.has(Trait.VIEW) and self._verdict({node}):
            self.apart.update(reshapes)
            self._forget()

    def _reaches_boundary(self, value: Value) -> bool:
        """Whether something that is no kernel reads the value itself."""
        if value in self.outputs:
            return True
        return any(not self._is_free(u) and not self._is_arithmetic(u) for u in value.users)

    def _forget(self) -> None:
        """Drop what was found out about free nodes, when there are other ones."""
        self.free: dict[Node, bool] = {}
        self.readers: dict[Value, tuple[Node, ...]] = {}
        self.later: dict[Node, tuple[Node, ...]] = {}

    def _is_arithmetic(self, node: Node) -> bool:
        return node.has(_ARITHMETIC) or node.is_op("concat") or node in self.small

    def _is_free(self, node: Node) -> bool:
        """Whether a kernel takes the node along at no cost: an index map, or a number."""
        found = self.free.get(node)
        if found is None:
            bare = node not in self.unit and node not in self.apart and not node.is_op("concat")
            found = self.free[node] = bare and node.has(_FREE)
        return found

    # Joining.

    def _join_attention(self, node: Node) -> None:
        """Both products of an attention and what lies between, as one group from the start."""
        found = attention_nodes(node) if self.small_m and node.has(Trait.CONTRACTION) else set()
        group = {n for n in found if not n.has(Trait.VIEW)}
        if not group:
            return
        added = {n for n in group if n.has(Trait.CONTRACTION)} - self.small
        self.small |= added
        self._forget()
        if any(r not in group for n in group - {node} for v in n.results for r in self._readers(v)):
            reason = "something else reads what lies between its products"
        else:
            reason = self._verdict(group)
        if reason:
            self.small -= added
            self._forget()
            self.context.remarks.add("missed", "group", "attention stays in several kernels", subject="attention",
                                     reason=reason, sources=tuple(map(str, node.sources[:1])))  # fmt: skip
            return
        self.unit |= dict.fromkeys(group, group)
        self.labels |= dict.fromkeys(group, "attention")

    def _sweep(self, nodes: list[Node], wanted: Callable[[set[Node], set[Node]], bool]) -> None:
        """Join every pair of groups that may be, in the order of the graph."""
        for node in nodes:
            for producer in self._producers(node) if node in self.unit else ():
                first, second = self.unit[producer], self.unit[node]
                if first is second or not wanted(first, second):
                    continue
                reason = self.refusals[producer, node] = self._refusal(producer, first, second)
                if not reason:
                    union = first | second
                    for member in union:
                        self.unit[member] = union

    def _explain(self, nodes: list[Node]) -> None:
        """A remark for every pair that stays apart."""
        for node in nodes:
            for producer in self._producers(node) if node in self.unit else ():
                first, second = self.unit[producer], self.unit[node]
                if first is not second:
                    self.context.remarks.add(
                        "missed", "group", f"{producer.op.name} and {node.op.name} stay in two kernels",
                        subject=node.op.name, reason=self.refusals[producer, node],
                        sources=tuple(map(str, node.sources[:1])),
                    )  # fmt: skip

    def _producers(self, node: Node) -> list[Node]:
        """The computing nodes whose results a node reads, through free nodes."""
        found: dict[Node, None] = {}
        stack = list(reversed(node.operands))
        while stack:
            producer = stack.pop().producer
            if producer is None:
                continue
            if producer in self.unit:
                found[producer] = None
            elif self._is_free(producer):
                stack.extend(reversed(producer.operands))
        return list(found)

    def _readers(self, value: Value) -> tuple[Node, ...]:
        """The nodes that read a value, through free nodes."""
        found = self.readers.get(value)
        if found is None:
            found = self.readers[value] = tuple(self._read(value))
        return found

    def _read(self, value: Value) -> Iterator[Node]:
        for user in value.users:
            if self._is_free(user):
                yield from self._readers(user.result)
                if user.result in self.outputs:
                    yield user
            else:
                yield user

    def _after(self, node: Node) -> tuple[Node, ...]:
        """What must come after a node: the readers of its results, and writes to what it or its views read."""
        found = self.later.get(node)
        if found is None:
            found = self.later[node] = tuple(self._follow(node))
        return found

    def _follow(self, node: Node) -> Iterator[Node]:
        for value in node.results:
            yield from self._readers(value)
        for value in node.operands:
            yield from (u for u in base(value).users if u is not node and u.has(Trait.WRITE))

    def _refusal(self, producer: Node, first: set[Node], second: set[Node]) -> str:
        """Why two groups are not joined; "" where they are."""
        if len(first) + len(second) > _MAX_NODES:
            return "the kernel would be too large"
        inside = first | second
        shared = any(r not in inside for n in first for v in n.results for r in self._readers(v))
        if shared and not self._same_range(producer, second):
            return "several kernels read it"
        if joining_closes_circle(first, second, lambda n: self.unit.get(n, (n,)), self._after, self.position):
            return "a kernel between them needs the one and feeds the other"
        return self._verdict(inside)

    def _same_range(self, producer: Node, second: set[Node]) -> bool:
        numel = producer.result.tensor.numel
        return any(n.result.tensor.numel == numel or n.operands[0].tensor.numel == numel for n in second)

    def _verdict(self, nodes: set[Node]) -> str:
        body, _, _ = self._body(nodes)
        key = structure(body)
        found = self.verdicts.get(key)
        if found is None:
            found = self.verdicts[key] = self._judge(body)
        return found

    def _judge(self, body: Graph) -> str:
        try:
            nest = locate(body)
            classify(nest, self.small_m)
        except ScheduleError as reason:
            return str(reason)
        return recomputation(nest)

    # Regions.

    def _body(self, nodes: set[Node]) -> tuple[Graph, list[Value], list[Value]]:
        """The graph of a group, with the values it takes from outside and those it gives."""
        body = Graph()
        to: dict[Value, Value] = {}
        inputs: list[Value] = []

        def take(value: Value) -> Value:
            if value in to:
                return to[value]
            node = value.producer
            if node is None or not (node in nodes or self._is_free(node)):
                inputs.append(value)
                to[value] = body.add_input(value.type, value.name)
                return to[value]
            copy = body.add_node(
                node.op.name, [take(v) for v in node.operands], dict(node.attributes),
                types=[r.type for r in node.results], sources=node.sources,
            )  # fmt: skip
            to[value] = copy.result
            return to[value]

        for node in sorted(nodes, key=self.position.__getitem__):
            take(node.result)
        given = [n.result for n in sorted(nodes, key=self.position.__getitem__) if self._escapes(n.result, nodes)]
        types = [dense(v.tensor) for v in given]
        for value, type in zip(given, types, strict=True):
            to[value].type = type
        body.set_outputs([to[v] for v in given])
        return body, inputs, given

    def _escapes(self, value: Value, nodes: set[Node]) -> bool:
        return value in self.outputs or any(r not in nodes for r in self._readers(value))

    def _make_regions(self) -> None:
        graph = self.graph
        groups = list({id(group): group for group in self.unit.values()}.values())
        made: dict[Node, Node] = {}
        replaced: list[tuple[Value, Value]] = []
        for group in groups:
            members = sorted(group, key=self.position.__getitem__)
            body, inputs, given = self._body(group)
            if not given:
                continue
            sources = tuple(dict.fromkeys(s for n in members for s in n.sources))
            product = self._biased_product(members)
            if product is not None:
                body, inputs = _biased_body(product, members[0])
            label = "linear" if product is not None else self._label(members)
            kind = "vendor" if product is not None else "kernel"
            region = graph.add_node(
                "region", inputs, {"fusion": label, "kind": kind, "label": label, "body": body},
                types=[v.type for v in body.outputs], sources=sources,
            )  # fmt: skip
            made[members[0]] = region
            replaced += zip(given, region.results, strict=True)
            self._remark(region, members, sources)
        for old, new in replaced:
            graph.replace_value(old, new)
        order: list[Node] = []
        for node in (n for n in graph.nodes if n in self.position):
            order += [made[node], node] if node in made else [node]
        graph.reorder(order)
        graph.erase_dead()
        graph.sort()

    def _biased_product(self, members: list[Node]) -> Node | None:
        """The vendor's product that a lone addition of a bias belongs to: one call does both."""
        if len(members) != 1 or not members[0].is_op("add"):
            return None
        for value, other in (members[0].operands, members[0].operands[::-1]):
            node = value.producer
            if node is None or not node.has(Trait.CONTRACTION) or node in self.unit or len(value.users) != 1:
                continue
            (left, right), out = split_spec(node.attributes["spec"])
            is_linear = len(right) == 2 and out[-1] in right and out[:-1] == left[:-1] and left[-1] in right
            is_bias = other.shape == node.result.shape[-1:] and other.producer is None
            if is_linear and is_bias and value not in self.outputs:
                return node
        return None

    def _label(self, members: Iterable[Node]) -> str:
        """A readable name: the fusions and products in it, in order."""
        words = [self.labels.get(n, "") or ("linear" if n.has(Trait.CONTRACTION) else "") for n in members]
        words = list(dict.fromkeys(filter(None, words)))
        if not words:
            heavy = dict.fromkeys(n.op.name for n in members if not n.is_op("cast"))
            words = list(heavy)[:4] or ["cast"]
        return "_".join(words[:4])

    def _remark(self, region: Node, members: list[Node], sources: tuple[Source, ...]) -> None:
        inside = [n.result for n in members]
        saved: Size = 0
        for value in inside:
            if all(r in members for r in self._readers(value)) and value not in self.outputs:
                saved = saved + 2 * touched_bytes(value)
        label = region.attributes["label"]
        self.context.remarks.add(
            "passed",
            "group",
            f"{label}: {len(members)} operations in one kernel",
            subject=label,
            sources=tuple(map(str, sources[:8])),
            figures={"bytes_saved": str(saved)},
        )


def _biased_body(product: Node, addition: Node) -> tuple[Graph, list[Value]]:
    """A product and its bias on their own; the views before them stay outside."""
    body = Graph()
    bias = next(v for v in addition.operands if v is not product.result)
    inputs = [*product.operands, bias]
    x, weight, b = (body.add_input(v.type, v.name) for v in inputs)
    made = body.add_node("contraction", (x, weight), dict(product.attributes), sources=product.sources).result
    order = (made, b) if addition.operands[0] is product.result else (b, made)
    biased = body.add_node("add", order, types=[dense(addition.result.tensor)], sources=addition.sources)
    body.set_outputs([biased.result])
    return body, inputs


def recomputation(nest: Nest) -> str:
    """Why a nest computes some values more often than is worth it; "" where it does not."""
    order = [a for dim in nest.axes for a in dim]
    evaluations: dict[Value, float] = {}
    items: dict[Value, Located] = {}
    prologue = below(i for i in nest.walk() if i.kind == "contraction")
    seen: set[Located] = set()
    for output in nest.outputs:
        own = {axis for part in output.index for axis in part.axes}
        nested = [a for a in order if a in own]
        stack = [output.root]
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            stack.extend(item.operands)
            if item.kind in ("pointwise", "reduction", "contraction"):
                loops = () if item in prologue or item.kind == "contraction" else nested
                evaluations[item.value] = evaluations.get(item.value, 0.0) + _evaluations(item, loops)
                items[item.value] = item
    for value, count in evaluations.items():
        numel = estimate(value.tensor.numel)
        saved = 2 * numel * value.dtype.bytes
        cost = items[value].node.op.cost if items[value].kind == "pointwise" else 64
        if cost > _CHEAP and (count - numel) * cost > _FLOPS_PER_BYTE * saved:
            name = items[value].node.op.name
            return f"{name} would be computed {count / numel:.0f} times over"
    return ""


def _evaluations(item: Located, nested: Sequence[Axis]) -> float:
    """How often a value is computed: once for each step of the loops down to the innermost that it depends on."""
    depends = [i for i, a in enumerate(nested) if a in item.axes]
    loops = {*(nested[: max(depends) + 1] if depends else ()), *item.axes}
    count = 1.0
    for axis in loops:
        count *= estimate(axis.size)
    return count
