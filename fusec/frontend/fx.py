"""From an ATen graph of torch.fx to the IR."""

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fusec.errors import FusecError, ImportFailure
from fusec.frontend import bits, contractions, convolutions, pointwise, reductions, scatters, sorts, views
from fusec.frontend.caches import CacheWrites
from fusec.frontend.calling import Imported, Output, View
from fusec.frontend.checkpointing import without_states
from fusec.frontend.dtypes import tensor_type, to_dtype, to_type
from fusec.frontend.lengths import finalize_lengths, multiples_as_products
from fusec.frontend.lowering import HANDLERS, Call, Lowering
from fusec.frontend.opaque import Template, attribute, bind
from fusec.frontend.predictions import check_views_by_strides
from fusec.frontend.sizes import Real, finalize_numbers, to_plain, to_size
from fusec.frontend.sources import source_of
from fusec.frontend.targets import (
    CHECKS,
    NUMBERS,
    arguments,
    defines_symbol,
    fake_of,
    fake_of_parts,
    functional,
    is_mutable,
    keeps_its_place,
)
from fusec.frontend.targets import number as number_of
from fusec.frontend.torch_internals import position_of_input, storage_key
from fusec.frontend.versions import SCATTERED
from fusec.ir.graph import Graph, Value, base, storage
from fusec.ir.ops import Trait
from fusec.ir.types import ScalarType, Size, TensorType, Type, same_shape, same_size, simplify
from fusec.loops.strides import dense, memory_layout
from fusec.remarks import Remarks

PASS_NAME = "import"
"""Under which the import leaves its remarks."""
TABLES = (bits, contractions, convolutions, pointwise, reductions, scatters, sorts, views)
"""The modules whose import fills the table of handlers."""


def import_fx(gm: GraphModule) -> Graph:
    """Import an ATen graph into the IR. Tensors that the module holds become inputs after its own.

    Args:
        gm: the graph from AOTAutograd, make_fx or torch.export.

    Raises:
        ImportFailure: where the graph contains other than ATen operations.
    """
    return Importer(gm).run(aliases=False).graph


def import_for_call(gm: GraphModule, names: Sequence[str] = (), weights: Collection[int] = frozenset()) -> Imported:
    """Import an ATen graph into the IR, with all that is needed to call it instead of the module.

    Args:
        gm: the graph from AOTAutograd; it is not changed.
        names: names of the inputs of the Dynamo graph before it.
        weights: which of them are to be frozen.
    """
    gm = without_states(gm)
    check_views_by_strides(gm.graph)
    finalize_lengths(gm.graph)
    finalize_numbers(gm.graph)
    with multiples_as_products(gm.graph):
        return Importer(gm, names=names, weights=weights, tolerant=True).run(aliases=True)


class Importer:
    """One import: walks the torch graph once, in order."""

    def __init__(
        self,
        gm: GraphModule,
        names: Sequence[str] = (),
        weights: Collection[int] = frozenset(),
        tolerant: bool = False,
    ) -> None:
        self.gm, self.tolerant = gm, tolerant
        self.names, self.weights = names, weights
        self.graph = Graph()
        self.low = Lowering(self.graph)
        self.values: dict[Node, Any] = {}
        """The import of each torch node: a Value, a number or size, None, or a list of them."""
        self.constants: list[torch.Tensor] = []
        self.remarks = Remarks()
        """Operations that fusec models but leaves to ATen here."""
        self.placeholders: dict[Node, int] = {}
        self.leaves: list[Node] = []
        self.changed: dict[Value, set[int | None]] = {}
        """Inputs that the graph writes to, with the keys of their storage and of the storage of their new value."""
        self.old: dict[Node, Value] = {}
        """Outputs that hold the old content of a changed input."""
        self.caches = CacheWrites(gm.graph)

    def run(self, aliases: bool) -> Imported:
        """Import; with ``aliases``, the caller makes the outputs that share an input's storage."""
        nodes = list(self.gm.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for node in nodes:
            if node.op == "get_attr":
                self._attribute(node)
        self._note_changes(nodes[-1])
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op in ("call_module", "call_method"):
                raise ImportFailure(f"{node.op} {node.target}", why="only ATen graphs can be imported",
                                    fix="run the module through AOTAutograd, make_fx or torch.export")  # fmt: skip
        outputs = self._outputs(next(n for n in nodes if n.op == "output"), aliases)
        self.graph.erase_dead()
        return Imported(self.graph, self.constants, outputs, self.remarks)

    def _placeholder(self, node: Node) -> None:
        fake = node.meta.get("val")
        self.placeholders[node] = len(self.graph.inputs)
        place = position_of_input(node)
        name = self.names[place] if place is not None and place < len(self.names) else node.name
        value = self.graph.add_input(to_type(fake), name, place in self.weights)
        if isinstance(fake, (bool, int, torch.SymInt)):
            self.values[node] = to_size(fake)
        else:
            given = self._plain(node, value) if isinstance(fake, torch.Tensor) else value
            self.values[node] = None if fake is None else given

    def _plain(self, node: Node, value: Value) -> Value:
        """An input as memory holds it: a copy of one that torch has only marked as negative.

        Raises:
            ImportFailure: where the graph changes such a one.
        """
        if not node.meta["val"].is_neg():
            return value
        if any(is_mutable(user) for user in node.users):
            raise ImportFailure(
                f"the graph changes {value.name}", why="it is a negative view",
                fix="pass torch.resolve_neg(…)",
            )  # fmt: skip
        return self._clone(value)

    def _note_changes(self, output: Node) -> None:
        """Find the inputs that the graph changes: their old content must be read before."""
        self.leaves = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, Node)]
        for node in self.placeholders:
            if any(u.target is torch.ops.aten.copy_.default and u.args[0] is node for u in node.users):
                self.changed[self.values[node]] = {storage_key(node.meta["val"])}

    def _clone(self, value: Value) -> Value:
        attributes = {"target": "aten.clone.default", "args": (("%", 0),), "kwargs": ()}
        types = (value.tensor,)
        return self.graph.add_node(
            "opaque", [value], attributes | {"operand_types": types}, types=types, sources=self.low.sources
        ).result

    def _attribute(self, node: Node) -> None:
        tensor = attribute(self.gm, node)
        if isinstance(tensor, torch.nn.Module):
            return  # bound to the higher-order operation that takes it
        if not isinstance(tensor, torch.Tensor):
            raise ImportFailure(
                f"the graph holds {node.target}, a {type(tensor).__name__}",
                why="only tensors are values of the IR", fix="exclude its caller with torch.compiler.disable",
            )  # fmt: skip
        node.meta.setdefault("val", tensor)
        dtype = to_dtype(tensor.dtype)
        is_number = (tensor.ndim == 0 and dtype.kind != "other") or (tensor.numel() == 1 and dtype.kind == "int")
        if is_number and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            with self.low.at(source_of(node), str(tensor.device)):
                self.values[node] = self.low.expand(self.low.number(tensor.item(), dtype), tuple(tensor.shape))
            return
        self.constants.append(tensor)
        self.values[node] = self.graph.add_input(to_type(tensor), node.name)

    def _call(self, node: Node) -> None:
        fake = node.meta.get("val")
        if node.meta.get("unbacked_bindings"):
            raise ImportFailure(
                f"{node.target} returns a size that is known only at run time", where=str(source_of(node)),
                why="every size has to follow from the sizes of the inputs",
                fix="leave torch._dynamo.config.capture_dynamic_output_shape_ops off: the graph then breaks here",
            )  # fmt: skip
        if node.target is operator.getitem:
            source = self.values[node.args[0]]  # type: ignore[index]
            self.values[node] = source[node.args[1]] if source is not None else None
        elif isinstance(fake, NUMBERS) and not defines_symbol(node):
            self.values[node] = number_of(fake)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self.values[node] = self._lower(node, fake if "val" in node.meta else fake_of_parts(node))
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise ImportFailure(
                f"{node.target} is no ATen operation", where=str(source_of(node)),
                why="fusec can neither decompose nor call it", fix="exclude its caller with torch.compiler.disable",
            )  # fmt: skip
        elif str(node.target).startswith(CHECKS):
            self.values[node] = None
        else:
            self.values[node] = self._lower(node, fake)

    def _lower(self, node: Node, fake: Any) -> Any:
        flat, structure = pytree.tree_flatten(fake)
        types = [to_type(f) for f in flat] if fake is not None else []
        device = next((ty.device for ty in types if isinstance(ty, TensorType)), "cpu")
        source = source_of(node)
        copies_back = node.target is torch.ops.aten.copy_.default and node.args[0] in self.placeholders
        mutable = is_mutable(node) and not copies_back
        if mutable and not self._changes_own_temporary(node):
            raise ImportFailure(
                f"{node.target} changes its operand", where=str(source), why="values of the IR never change",
                fix="make the graph functional, as AOTAutograd or torch.func.functionalize does",
            )  # fmt: skip
        with self.low.at(source, device):
            self.low.fresh.clear()
            written = self._write(node, flat, types)
            results = [written] if written is not None else None
            if results is None:
                results = self._expand(node, flat, types)
            if results is None:
                results = self._opaque(node, types)
            if self.changed and written is None:
                results = [self._apart(v, f) for v, f in zip(results, flat, strict=False)]
            elif written is not None and storage(written) in self.changed:
                self.changed[storage(written)].add(storage_key(fake))
        if mutable:
            self.values |= dict.fromkeys(self._sharing(node), results[0])
        for value in results:
            if isinstance(value, Value) and not value.name:
                value.name = node.name
        return pytree.tree_unflatten(results, structure) if results else None

    def _changes_own_temporary(self, node: Node) -> bool:
        """Return whether an in-place operation changes a value without other readers, so that it may be a new value."""
        operand = node.args[0]
        if not isinstance(operand, Node) or operand.op != "call_function" or functional(node) not in HANDLERS:
            return False
        first, *rest = self._sharing(node)
        return first.op == "call_function" and all(is_mutable(n) for n in rest)

    def _sharing(self, node: Node) -> list[Node]:
        """Return the earlier nodes whose storage an in-place operation changes."""
        key = storage_key(node.args[0].meta.get("val"))  # type: ignore[union-attr]
        return [n for n in self.values if storage_key(n.meta.get("val")) == key]

    def _write(self, node: Node, flat: list[Any], types: list[Type]) -> Value | None:
        """Import an update in place as a write, if the node is one."""
        if node.target is torch.ops.aten.copy_.default and node.args[0] in self.placeholders:
            destination, value = self.values[node.args[0]], self.values[node.args[1]]  # type: ignore[index]
            if isinstance(value, Value) and base(value).producer in self.caches.made and storage(value) is destination:
                return value
            value = self.low.expand(self.low.cast(value, destination.dtype), destination.shape)
            for leaf in self.leaves:
                kept = self.values.get(leaf)
                if isinstance(kept, Value) and leaf not in self.old and base(kept) is destination:
                    self.old[leaf] = self._clone(kept)
            newest = next((n.result for n in reversed(self.caches.made) if storage(n.result) is destination), None)
            newest = destination if newest is None else self._version(newest, destination)
            return self.low.emit("write", newest, value)
        try:
            scattered = self._scatter(node, flat, types) if node in self.caches.folded else None
            written = scattered or self.caches.lower(node, self.low, self.values)
        except ImportFailure as reason:
            self._miss(node, "returns a new value, which is copied", reason)
            return None
        in_place = written is not None and storage(written).producer is None
        return self._version(written, self.values[node.args[0]]) if in_place else written  # type: ignore[arg-type, index]

    def _version(self, value: Value, before: Value) -> Value:
        """Return what an update makes of an input, or of a view of it, in the shape and strides that this has."""
        value = self.low.reshape(value, before.shape)
        value.type = before.type
        return value

    def _scatter(self, node: Node, flat: list[Any], types: list[Type]) -> Value | None:
        """Import a scatter into an input as one that updates it in place; None where it is none."""
        if functional(node) not in scatters.UPDATES:
            return None
        call = self._bind(node, flat, types)
        old = storage(call["self"])
        if old.producer is not None or not scatters.updates_storage(call):
            return None
        with self.low.overwriting(old):
            value = HANDLERS[call.target](self.low, call)
        assert isinstance(value, Value)
        if (made := base(value).producer) is not None:
            self.caches.made[made] = None
        return value

    def _scattered_before(self, node: Node, call: Call) -> Value | None:
        """Return the storage of a scatter's result that only this scatter reads, and may update."""
        first = node.args[0]
        if call.target not in scatters.UPDATES or not isinstance(first, Node) or len(first.users) > 1:
            return None
        if first.target not in SCATTERED or not call.out.is_contiguous or not scatters.updates_storage(call):
            return None
        value: Value = call["self"]
        alone = value.producer is not None and value.producer.is_op("scatter") and storage(value).producer is not None
        return storage(value) if alone else None

    def _expand(self, node: Node, flat: list[Any], types: list[Type]) -> list[Any] | None:
        """Lower the node to primitives; return None where it must stay an opaque call."""
        handler = HANDLERS.get(functional(node))
        if handler is None:
            return None
        call = self._bind(node, flat, types)
        try:
            with self.low.overwriting(self._scattered_before(node, call)):
                results = handler(self.low, call)
            values = results if isinstance(results, list) else [results]
            return [self._promised(v, ty) for v, ty in zip(values, types, strict=True)]
        except Exception as reason:
            if not (self.tolerant or isinstance(reason, FusecError)):
                raise  # a declaration would match nothing, and nobody reads the remark
            self._miss(node, "stays an ATen call", reason)
            return None

    def _miss(self, node: Node, what: str, error: Exception) -> None:
        reason, suggestion = f"{type(error).__name__}: {error}", ""
        if isinstance(error, FusecError):
            reason, suggestion = error.reason, error.fix
        target, sources = str(node.target), tuple(map(str, self.low.sources))
        self.remarks.add(
            "analysis",
            PASS_NAME,
            f"{target} {what}",
            subject=target,
            reason=reason,
            suggestion=suggestion,
            sources=sources,
        )

    def _promised(self, value: Value | None, ty: Type) -> Value | None:
        """Return a result with eager's dtype, shape and strides."""
        if value is None or not isinstance(ty, TensorType):
            return value
        value = self.low.cast(value, ty.dtype)
        if not same_shape(value.shape, ty.shape):
            if len(value.shape) > len(ty.shape) or all(isinstance(n, int) for n in value.shape + ty.shape):
                raise ImportFailure(
                    f"our result is {value.type}, eager's is {ty}", why="no reshape leads from one to the other"
                )
            value = self.low.reshape(value, ty.shape)
        if value in self.low.fresh:
            if value.producer is not None and value.producer.has(Trait.WRITE) and not ty.same_memory(value.tensor):
                raise ImportFailure(f"our result is {value.type}, eager's is {ty}", why="an update keeps its strides")
            # A view of an updated input lies in its memory, where torch predicts that of a new tensor.
            value.type = memory_layout(value) if base(value).producer in self.caches.made else ty
        return value

    def _bind(self, node: Node, flat: list[Any], types: list[Type]) -> Call:
        given = arguments(node)
        used = [True] * len(types)
        if len(types) > 1:
            read = {u.args[1] for u in node.users if u.target is operator.getitem and u.users}
            used = [i in read for i in range(len(types))]
        resolved, fakes = ({name: look(a) for name, a in given.items()} for look in (self._resolve, fake_of))
        return Call(functional(node), resolved, fakes, types, used, flat)

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self._resolve(a) for a in argument]
        return argument

    def _apart(self, value: Any, fake: Any) -> Any:
        """A result that eager has in storage of its own, although here it is an input that changes later."""
        keys = self.changed.get(base(value)) if isinstance(value, Value) else None
        return value if keys is None or storage_key(fake) in keys else self._clone(value)

    def _opaque(self, node: Node, types: list[Type]) -> list[Any]:
        """The node as a call of ATen, or of a function that a higher-order operation is bound to."""
        template, target = Template(), str(node.target)
        given, named = node.args, node.kwargs
        if not isinstance(node.target, torch._ops.OpOverload):
            target, bound = bind(node, self.gm)
            given, named = tuple(bound), {}
        args = tuple(template.freeze(self._argument(a), fake_of(a)) for a in given)
        kwargs = tuple((k, template.freeze(self._argument(a), fake_of(a))) for k, a in named.items())
        attributes: dict[str, Any] = {"target": target, "args": args, "kwargs": kwargs}
        attributes["operand_types"] = tuple(template.operand_types)
        if (viewed := self._viewed(node, template.operands)) is not None:
            attributes["views"] = viewed
        op = "ordered" if keeps_its_place(node) else "opaque"
        made = self.graph.add_node(op, template.operands, attributes, types=types, sources=self.low.sources)
        return [r.type.expr if isinstance(r.type, ScalarType) and r.type.expr is not None else r for r in made.results]

    def _viewed(self, node: Node, operands: list[Value]) -> int | None:
        """The position of the operand whose storage the results of a call have."""
        keys = {key for f in pytree.tree_leaves(node.meta.get("val")) if (key := storage_key(f)) is not None}
        shared = [self.values[n] for n in node.all_input_nodes if storage_key(n.meta.get("val")) in keys]
        return next((operands.index(value) for value in shared if value in operands), None)

    def _argument(self, argument: Any) -> Any:
        """Return an argument of an ATen call, which accepts a 0-d CPU tensor as a number."""
        value = self._resolve(argument)
        if not isinstance(value, Real):
            return value
        with self.low.at(self.low.sources[0], "cpu"):
            return self.low.real(value.expr)

    def _outputs(self, node: Node, aliases: bool) -> tuple[Output, ...]:
        inputs = {storage_key(p.meta.get("val")): p for p in self.placeholders if storage_key(p.meta.get("val"))}
        leaves = pytree.tree_leaves(node.args[0], is_leaf=lambda x: x is None)
        shared = self._shared(leaves, set(inputs)) if aliases else {}
        results: list[tuple[Node, Value]] = []
        slots: list[Output] = []
        first, placed = dict[Node, int](), dict[Node, int]()
        for i, leaf in enumerate(leaves):
            value, fake = (self.values[leaf], leaf.meta.get("val")) if isinstance(leaf, Node) else (leaf, None)
            key = storage_key(fake) if aliases and leaf not in self.old else None
            owner, whole = inputs.get(key), shared.get(key)
            if not isinstance(value, Value):
                slots.append(Output(number=simplify(to_plain(value.expr)) if isinstance(value, Real) else value))
            elif aliases and first.setdefault(leaf, i) != i:
                slots.append(Output(repeats=first[leaf]))
            elif owner is not None:
                slots.append(self._of_input(leaf, owner))
            elif whole is not None:
                if placed.setdefault(whole, len(results)) == len(results):
                    results.append((whole, self.values[whole]))
                view = View.between("output", placed[whole], whole.meta["val"], leaf.meta["val"])
                slots.append(Output(placed[whole]) if leaf is whole else Output(view=view))
            else:
                slots.append(Output(len(results)))
                results.append((leaf, self._own(leaf, value)))
        types = [tensor_type(f, even_empty=True) if isinstance(f := leaf.meta.get("val"), torch.Tensor) else value.type
                 for leaf, value in results]  # fmt: skip
        self.graph.set_outputs([value for _, value in results], types)
        return tuple(slots)

    def _of_input(self, leaf: Node, owner: Node) -> Output:
        """Return an output that is an input, updated in place, or a view of one."""
        given = leaf.args[0] if leaf.target is torch.ops.aten.copy_.default else leaf
        if given in self.placeholders:
            return Output(input=self.placeholders[given])  # type: ignore[index]
        return Output(view=View.between("input", self.placeholders[owner], owner.meta["val"], leaf.meta["val"]))

    def _own(self, leaf: Node, value: Value) -> Value:
        """An output that shares its storage with nothing that the caller has."""
        value, key = self.old.get(leaf, value), storage_key(leaf.meta.get("val"))
        if key not in self.changed.get(storage(value), {key}):
            return self._clone(value)  # a copy of the changed input
        return value

    def _shared(self, leaves: list[Any], inputs: set[int | None]) -> dict[int | None, Node]:
        """Return for each storage that several outputs share the node that fills it, whose views they all are."""
        keys = Counter(storage_key(leaf.meta.get("val")) for leaf in leaves if isinstance(leaf, Node))
        wanted = {key for key, count in keys.items() if key is not None and key not in inputs and count > 1}
        found: dict[int | None, Node] = {}
        for node, value in self.values.items() if wanted else ():
            key = storage_key(node.meta.get("val"))
            if key in wanted and key not in found and isinstance(value, Value) and _fills_storage(node.meta["val"]):
                found[key] = node
        return found


def _fills_storage(fake: torch.Tensor) -> bool:
    """Return whether a tensor covers its storage exactly once, so that tensors sharing it are views of it."""
    ty = to_type(fake)
    if not isinstance(ty, TensorType):
        return False
    reach: Size = 1
    if all(isinstance(n, int) and n > 0 for n in (*ty.shape, *ty.strides)):
        for stride, n in sorted(zip(ty.strides, ty.shape, strict=True)):
            if n != 1 and stride < reach:
                return False
            reach += (n - 1) * stride
    elif dense(ty).strides == ty.strides:
        reach = ty.numel
    else:
        return False
    return same_size(reach * fake.itemsize, to_size(fake.untyped_storage().nbytes()))
