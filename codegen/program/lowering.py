"""Lowering of a grouped graph to the function of a program: launches, calls, copies and frees, node by node."""

from dataclasses import replace

import torch

from fusec.codegen.program.constant_folding import FoldedValues
from fusec.codegen.program.function_builder import FunctionBuilder, same_layout
from fusec.codegen.program.kernels import Launched, kernel_name
from fusec.codegen.program.launch_batch import MAX_LAUNCHES, LaunchBatch
from fusec.codegen.program.opaque_calls import lower_opaque_call
from fusec.codegen.program.runtime import interpret
from fusec.codegen.program.vendor_calls import lower_contraction, lower_convolution, lower_vendor_region
from fusec.codegen.target import BatchLaunchable
from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.ir.graph import Node, Value, storage, updated
from fusec.ir.ops import Trait
from fusec.ir.types import TensorType, same_size
from fusec.loops.strides import view_layout
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import LOOKUPS, argsort, place, reducing, scatter
from fusec.reference.opaque import resolve
from fusec.rewriting.driver import cut


class Lowering:
    """Lowers the nodes of a graph that are not folded, with at most ``max_launches`` in a batch."""

    def __init__(
        self,
        code: FunctionBuilder,
        kernels: dict[Node, Launched],
        folded: FoldedValues,
        max_launches: int = MAX_LAUNCHES,
    ) -> None:
        self.code, self.graph, self.kernels, self.folded = code, code.graph, kernels, folded
        self.nodes = [node for node in self.graph.nodes if node not in folded.nodes]
        self.prepacked: dict[tuple[Value, int], str] = {}
        """Variables of prepacked weights, by value and rows of a block."""
        batched = all(isinstance(launched.launchable, BatchLaunchable) for launched in kernels.values())
        self.batch = LaunchBatch(code, max_launches if batched else 1)
        self.last_use: dict[Value, Node] = {}
        for node in self.nodes:
            self.last_use.update(dict.fromkeys(node.operands, node))
        self.outputs = set(self.graph.outputs)

    def run(self) -> None:
        """Append all lines of the function."""
        self._lower_inputs()
        for node in self.nodes:
            self.code.node = node
            self._lower(node)
            self._free(node)
        self.code.node = None
        self.batch.emit()
        self._lower_outputs()

    def _lower_inputs(self) -> None:
        names = [self.code.define(v, None) for v in self.graph.inputs]
        if names:
            self.code.line(f"{''.join(name + ', ' for name in names)}= args")
        self.code.line("args.clear()")
        changed = {storage(v) for node in self.kernels for v in node.written}
        if counted := [self.code.names[v] for v in self.graph.inputs if v in changed]:
            # Autograd detects by the version counter when a tensor that was saved for backward is modified.
            function = self.code.constant(torch.autograd.graph.increment_version, "increment_version")
            self.code.line(f"{function}([{', '.join(counted)}])")
        self.code.bind_shapes(self.graph.inputs)
        for value in self.graph.inputs:
            self.code.bind_strides(value)
        self._lower_folded_values()
        unused = [v for v in self.graph.inputs if v not in self.last_use and v not in self.outputs]
        if unused:
            self.code.line(f"del {', '.join(self.code.names[v] for v in unused)}")

    def _lower_folded_values(self) -> None:
        """Append the line that takes folded values from the cache."""
        code, names = self.code, list[str]()
        for value, rows in self.folded.values:
            if rows:
                self.prepacked[value, rows] = f"p_{len(self.prepacked)}"
            names.append(self.prepacked[value, rows] if rows else code.define(value, value.tensor.strides))
        if names:
            weights = "".join(f"{code.names[v]}, " for v in self.folded.weights)
            code.line(f"{', '.join(names)}, = {code.constant(self.folded.cache, 'weight_cache')}(({weights}))")

    def _lower(self, node: Node) -> None:
        is_view = node.has(Trait.VIEW) and not node.is_op("concat")
        if node not in self.kernels and not is_view and not _is_independent(node):
            self.batch.emit()
        if node in self.kernels:
            self._launch(node, self.kernels[node])
        elif is_view:
            self._view(node)
        elif node.is_op("contraction"):
            lower_contraction(self.code, node)
        elif node.is_op("convolution"):
            lower_convolution(self.code, node, node)
        elif node.has(Trait.REGION) and node.attributes["kind"] == "vendor":
            lower_vendor_region(self.code, node)
        elif node.has(Trait.OPAQUE):
            lower_opaque_call(self.code, node)
        elif node.has(Trait.SOURCE):
            self._source(node)
        elif node.is_op("full"):
            self._full(node)
        elif node.has(Trait.WRITE):
            self._write(node)
        elif node.has(Trait.LOOKUP):
            self._lookup(node)
        elif node.has(Trait.SCAN | Trait.SORT):
            self._scan_or_sort(node)
        elif node.is_op("concat"):
            self._concat(node)
        else:
            self._interpret(node)

    def _free(self, node: Node) -> None:
        used = dict.fromkeys(v for v in node.operands if self.last_use[v] is node and v not in self.outputs)
        used = {v: None for v in used if v in self.code.names}  # a weight may be read only prepacked
        unread = [r for r in node.results if r not in self.last_use and r not in self.outputs]
        self.batch.free([self.code.names[v] for v in [*used, *unread]] + self.code.take_temporaries())

    def _lower_outputs(self) -> None:
        returned, owned = [], set[Value]()
        for i, (value, type) in enumerate(zip(self.graph.outputs, self.graph.output_types, strict=True)):
            name = self.code.names[value]
            if isinstance(value.type, TensorType) and isinstance(type, TensorType):
                root = self.code.root(value)
                if root in owned or self._outlives_call(root, i):  # eager returns storage of its own
                    self.code.step("copy", "output")
                    name = f"copied({name}, {sizes_text(type.strides)})"
                else:
                    owned.add(root)
                    name = self._with_strides(value, type)
            returned.append(name)
        self.code.line(f"return [{', '.join(returned)}]")

    def _outlives_call(self, root: Value, output: int) -> bool:
        """Return whether the storage of an output is that of an input, a folded value or a constant."""
        if root.producer is None:
            return output not in self.graph.updated_outputs
        return (root, 0) in self.folded.values or (root.producer is not None and root.producer.is_op("constant"))

    def _with_strides(self, value: Value, type: TensorType) -> str:
        """Return an expression for an output with the strides of its type."""
        name, known, strides = self.code.names[value], self.code.layouts[value], sizes_text(type.strides)
        if not type.rank or (known is not None and all(map(same_size, known, type.strides))):
            return name
        if known is not None:
            static = all(isinstance(n, int) for n in (*known, *type.strides))
            copies = static and not same_layout(type.shape, known, type.strides)
            return f"{'copied' if copies else 'with_strides'}({name}, {strides})"
        if value.producer is not None and value.producer.has(Trait.OPAQUE) and value.tensor.strides == type.strides:
            return name  # with the strides that the operation chose, even if its fake function promised others
        return f"{name} if {name}.stride() == {strides} else with_strides({name}, {strides})"

    def _launch(self, node: Node, launched: Launched) -> None:
        code, kernel = self.code, launched.kernel
        operands = zip(node.operands, node.body.inputs, kernel.buffers, strict=False)
        packed = {inner: self.prepacked[value, buffer.packed] for value, inner, buffer in operands if buffer.packed}
        pairs = [pair for pair in zip(node.operands, node.body.inputs, strict=True) if pair[1] not in packed]
        checks = list(map(_check, launched.lookups))
        # A copy of an operand reads what the launches before it write.
        copies = not all(v in node.written or code.has_strides(v, inner.tensor.strides) for v, inner in pairs)
        if copies or not self.batch.has_room(checks):
            self.batch.emit()
        buffers = []
        for value, inner in zip(node.operands, node.body.inputs, strict=True):
            if inner in packed:
                buffers.append(packed[inner])
            elif value in node.written:
                self.batch.materialize(value)
                code.layout(value)  # never a copy: raises at run time if the strides take one
                buffers.append(code.names[value])
            else:
                buffers.append(code.tensor(value, inner.tensor.strides))
        code.step("kernel", kernel.name, node.sources)
        for result, inner in zip(node.results, node.body.outputs, strict=True):
            destination = updated(node, result.index)
            if destination is None:
                buffers.append(self.batch.result(result, inner.tensor))
            else:
                code.alias(result, destination)
        self.batch.add(launched.launchable, buffers, (*kernel.symbols, *map(str, kernel.numbers)), checks)

    def _source(self, node: Node) -> None:
        type, code = node.result.tensor, self.code
        dtype = torch_dtype(type.dtype)
        if node.is_op("constant"):
            number = torch.full((), node.attributes["value"], dtype=dtype, device=type.device)
            name = code.define(node.result, ())
            code.line(f"{name} = {code.constant(number, 'number')}")
            return
        options = f"dtype={code.constant(dtype, 'dtype')}, device={code.device(type.device)}"
        if node.is_op("size"):
            call = f"{code.constant(torch.full, 'full')}((), {PYTHON.print(node.attributes['expr'])}, {options})"
        else:
            call = f"{code.constant(torch.arange, 'arange')}({PYTHON.print(node.attributes['size'])}, {options})"
        code.line(f"{code.define(node.result, type.strides)} = {call}")

    def _full(self, node: Node) -> None:
        code, type = self.code, node.result.tensor
        number = torch.full((), node.attributes["value"], dtype=torch_dtype(type.dtype), device=type.device)
        allocation, strides = code.allocate(type)
        fill = "" if _is_overwritten(node.result) else f".fill_({code.constant(number, 'number')})"
        if fill:
            code.step("write", "full", node.sources)
        code.line(f"{code.define(node.result, strides)} = {allocation}{fill}")

    def _write(self, node: Node) -> None:
        code = self.code
        destination, value, *index = node.operands
        target, new = code.names[destination], code.names[value]
        if storage(value) is storage(destination):  # ATen does not copy to memory that it copies from
            new = f"{new}.clone()"
        code.step("write", "write", node.sources)
        if index:
            dim, rows = node.attributes["dim"], code.names[index[0]]
            if node.is_op("scatter"):
                function = code.constant(scatter, "scatter")
                code.line(f"{function}({target}, {dim}, {rows}, {new}, {reducing(node)!r})")
            else:
                code.line(f"{code.constant(place, 'place')}({target}, {dim}, {rows}, {new})")
        else:
            code.line(f"{target}.copy_({new})")
        code.alias(node.result, destination)

    def _lookup(self, node: Node) -> None:
        code = self.code
        table, index = (code.names[v] for v in node.operands)
        code.step("opaque", node.op.name, node.sources)
        name, function = code.define(node.result, None), code.constant(LOOKUPS[node.op.name], node.op.name)
        code.line(f"{name} = {function}({table}, {node.attributes['dim']}, {index})")

    def _scan_or_sort(self, node: Node) -> None:
        code, how = self.code, node.attributes
        x = code.names[node.operands[0]]
        code.step("opaque", node.op.name, node.sources)
        name = code.define(node.result, None)
        if node.has(Trait.SORT):
            function, count = code.constant(argsort, "argsort"), PYTHON.print(how["count"])
            code.line(f"{name} = {function}({x}, {how['descending']}, {count})")
        else:
            function = code.constant(getattr(torch, node.op.name), node.op.name)
            code.line(f"{name} = {function}({x}, {how['dim']}, dtype={x}.dtype)")

    def _concat(self, node: Node) -> None:
        code = self.code
        code.step("copy", "concat", node.sources)
        name = code.define(node.result, None)
        parts = ", ".join(code.names[v] for v in node.operands)
        code.line(f"{name} = {code.constant(torch.cat, 'cat')}([{parts}], {node.attributes['dim']})")

    def _view(self, node: Node) -> None:
        code, (operand,) = self.code, node.operands
        strides = code.layout(operand)
        type, shape = operand.tensor, node.result.shape
        source = code.names[operand]
        self.batch.materialize(operand)
        if all(same_size(a, b) for a, b in zip(shape, type.shape, strict=False)) and len(shape) == type.rank:
            if node.is_op("reshape", "expand"):
                code.alias(node.result, operand)
                return
        found = view_layout(node, replace(type, strides=strides))
        if found is None:
            self.batch.emit()
            name = code.define(node.result, None)
            code.step("copy", "reshape", node.sources)
            code.line(f"{name} = {source}.reshape({sizes_text(shape)})")
            return
        layout, offset = found
        name = code.define(node.result, layout, operand)
        start = "" if same_size(offset, 0) else f", {source}.storage_offset() + {PYTHON.print(offset)}"
        code.line(f"{name} = {source}.as_strided({sizes_text(shape)}, {sizes_text(layout)}{start})")

    def _interpret(self, node: Node) -> None:
        """Append a call that interprets a region without a kernel, or an operation outside of all regions."""
        code = self.code
        body = node.body if node.has(Trait.REGION) else cut(node.operands, [node], node.results, node.op.name)
        operands = ", ".join(code.names[v] for v in node.operands)
        names = [code.define(r, None, updated(node, r.index)) for r in node.results]
        code.step("interpreted", kernel_name(node) if node.has(Trait.REGION) else node.op.name, node.sources)
        known = ", ".join(f"{s!r}: {s}" for s in sorted(code.symbols))
        function, graph = code.constant(interpret, "interpret"), code.constant(body, "body")
        code.line(f"{''.join(name + ', ' for name in names)}= {function}({graph}, [{operands}], {{{known}}})")


def _is_independent(node: Node) -> bool:
    """Return whether a node can run ahead of the pending launches: it reads no memory, as ``full`` and random draws."""
    if node.has(Trait.OPAQUE):
        tags = getattr(resolve(node.attributes["target"]), "tags", ())
        return not node.operands and torch.Tag.nondeterministic_seeded in tags
    return not node.operands


def _is_overwritten(value: Value) -> bool:
    """Return whether the only user of a value writes all of it before anything reads it."""
    if len(value.users) != 1 or not (user := next(iter(value.users))).has(Trait.REGION):
        return False
    (inner,) = (v for v, operand in zip(user.body.inputs, user.operands, strict=True) if operand is value)
    return len(inner.users) == 1 and all(n.is_op("write") and "dim" not in n.attributes for n in inner.users)


def _check(node: Node) -> str:
    """Return the arguments of the error for an index out of bounds: dim, length, source location and type."""
    dim = node.attributes["dim"] % node.operands[0].tensor.rank
    length = PYTHON.print(node.operands[0].shape[dim])
    error = node.attributes.get("error", "RuntimeError" if node.is_op("gather", "scatter") else "IndexError")
    return f"({dim}, {length}, {str(node.sources[0]) if node.sources else ''!r}, {error})"
