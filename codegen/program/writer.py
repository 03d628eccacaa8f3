"""The function of a program, written node by node: what is launched, called, copied and freed."""

from dataclasses import replace

import torch

from fusec.codegen.program.calls import write_call
from fusec.codegen.program.freezing import Keeping
from fusec.codegen.program.launch_batches import LONGEST, LaunchBatch
from fusec.codegen.program.launchables import kernel_name
from fusec.codegen.program.runtime import interpret
from fusec.codegen.program.text import ProgramText, same_layout
from fusec.codegen.program.vendor import write_biased, write_contraction, write_convolution
from fusec.codegen.target import DirectLaunchable, Launchable
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.ir.graph import Graph, Node, Value, storage, updated
from fusec.ir.ops import Trait
from fusec.ir.types import Size, TensorType, same_size
from fusec.loops.indexing import dynamically_indexed
from fusec.loops.strides import view_layout
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import LOOKUPS


class ProgramWriter:
    """Writes the function, node by node."""

    def __init__(
        self,
        text: ProgramText,
        kernels: dict[Node, tuple[Kernel, Launchable]],
        keeping: Keeping,
        longest: int = LONGEST,
    ) -> None:
        self.text, self.graph, self.kernels, self.keeping = text, text.graph, kernels, keeping
        self.nodes = [node for node in self.graph.nodes if node not in keeping.once]
        self.packed: dict[tuple[Value, int], str] = {}
        """Variables of values that lie transposed in blocks of so many rows."""
        direct = all(isinstance(launchable, DirectLaunchable) for _, launchable in kernels.values())
        self.batch = LaunchBatch(text, longest if direct else 1)
        self.last_use: dict[Value, Node] = {}
        for node in self.nodes:
            self.last_use.update(dict.fromkeys(node.operands, node))
        self.kept = set(self.graph.outputs)

    def write(self) -> None:
        """Write all of it."""
        self._inputs()
        for node in self.nodes:
            self.text.node = node
            self._node(node)
            self._free(node)
        self.text.node = None
        self.batch.write()
        self._outputs()

    def _inputs(self) -> None:
        names = [self.text.define(v, None) for v in self.graph.inputs]
        if names:
            self.text.line(f"{''.join(name + ', ' for name in names)}= args")
        self.text.line("args.clear()")
        changed = {storage(v) for node in self.kernels for v in node.written}
        if counted := [self.text.names[v] for v in self.graph.inputs if v in changed]:
            # Torch counts changes, so that a tensor saved for a backward pass is not used after one.
            function = self.text.constant(torch.autograd.graph.increment_version, "increment_version")
            self.text.line(f"{function}([{', '.join(counted)}])")
        for value in self.graph.inputs:
            self.text.bind_symbols(value)
        for value in self.graph.inputs:
            self.text.bind_strides(value)
        self._keep()
        unused = [v for v in self.graph.inputs if v not in self.last_use and v not in self.kept]
        if unused:
            self.text.line(f"del {', '.join(self.text.names[v] for v in unused)}")

    def _keep(self) -> None:
        """Take what is kept from call to call."""
        text, names = self.text, list[str]()
        for value, rows in self.keeping.values:
            if rows:
                self.packed[value, rows] = f"p_{len(self.packed)}"
            names.append(self.packed[value, rows] if rows else text.define(value, value.tensor.strides))
        if names:
            weights = "".join(f"{text.names[v]}, " for v in self.keeping.weights)
            text.line(f"{', '.join(names)}, = {text.constant(self.keeping.frozen, 'frozen')}(({weights}))")

    def _node(self, node: Node) -> None:
        is_view = node.has(Trait.VIEW) and not node.is_op("concat")
        if node not in self.kernels and not is_view and not node.has(Trait.SOURCE):
            self.batch.write()
        if node in self.kernels:
            self._launch(node, *self.kernels[node])
        elif is_view:
            self._view(node)
        elif node.is_op("contraction"):
            write_contraction(self.text, node)
        elif node.is_op("convolution"):
            write_convolution(self.text, node)
        elif node.has(Trait.REGION) and node.attributes["kind"] == "vendor":
            write_biased(self.text, node)
        elif node.has(Trait.OPAQUE):
            write_call(self.text, node)
        elif node.has(Trait.SOURCE):
            self._source(node)
        elif node.is_op("full"):
            self._full(node)
        elif node.is_op("write"):
            self._write(node)
        elif node.has(Trait.LOOKUP):
            self._look_up(node)
        elif node.is_op("concat"):
            self._concat(node)
        else:
            self._interpret(node)

    def _free(self, node: Node) -> None:
        used = dict.fromkeys(v for v in node.operands if self.last_use[v] is node and v not in self.kept)
        used = {v: None for v in used if v in self.text.names}  # not what is only there in blocks
        unread = [r for r in node.results if r not in self.last_use and r not in self.kept]
        self.batch.free([self.text.names[v] for v in [*used, *unread]] + self.text.take_temporaries())

    def _outputs(self) -> None:
        names, owned = [], set[Value]()
        inputs = set(self.graph.inputs)
        for i, (value, type) in enumerate(zip(self.graph.outputs, self.graph.output_types, strict=True)):
            name = self.text.names[value]
            if isinstance(value.type, TensorType) and isinstance(type, TensorType):
                root = self.text.root(value)
                known = self.text.layouts[value]
                fits = known is not None and same_layout(type.shape, known, type.strides)
                kept = (root in inputs and i not in self.graph.updated_outputs) or (root, 0) in self.keeping.values
                if root in owned or kept or self._is_constant(root):  # eager gives storage of its own
                    names.append(self._copied(name, type))
                    continue
                owned.add(root)
                if value.type.rank and not (known is not None and all(map(same_size, known, type.strides))):
                    strides = sizes_text(type.strides)
                    if _lies_as_called(value, known, type):
                        pass  # as the operation laid it out, whatever its fake function promised
                    elif known is None:
                        name = f"{name} if {name}.stride() == {strides} else with_strides({name}, {strides})"
                    else:
                        certain = not fits and all(isinstance(n, int) for n in (*known, *type.strides))
                        name = f"{'copied' if certain else 'with_strides'}({name}, {strides})"
            names.append(name)
        self.text.line(f"return [{', '.join(names)}]")

    def _copied(self, name: str, type: TensorType) -> str:
        self.text.step("copy", "output")
        return f"copied({name}, {sizes_text(type.strides)})"

    def _is_constant(self, value: Value) -> bool:
        return value.producer is not None and value.producer.is_op("constant")

    # ------------------------------------------------------------------ one kind of node each

    def _launch(self, node: Node, kernel: Kernel, launchable: Launchable) -> None:
        text = self.text
        lies = zip(node.operands, node.body.inputs, kernel.buffers, strict=False)
        packed = {inner: self.packed[value, buffer.packed] for value, inner, buffer in lies if buffer.packed}
        pairs = [pair for pair in zip(node.operands, node.body.inputs, strict=True) if pair[1] not in packed]
        checks = [_check(place) for place in dynamically_indexed(node.body)]
        # A copy has to see what the launches before it write.
        copies = not all(value in node.written or text.lies(value, inner.tensor.strides) for value, inner in pairs)
        if copies or not self.batch.takes(checks):
            self.batch.write()
        buffers = []
        for value, inner in zip(node.operands, node.body.inputs, strict=True):
            if inner in packed:
                buffers.append(packed[inner])
            elif value in node.written:
                self.batch.materialize(value)
                text.layout(value)  # the storage itself, or an error
                buffers.append(text.names[value])
            else:
                buffers.append(text.tensor(value, inner.tensor.strides))
        text.step("kernel", kernel.name, node.sources)
        for result, inner in zip(node.results, node.body.outputs, strict=True):
            destination = updated(node, result.index)
            if destination is None:
                buffers.append(self.batch.result(result, inner.tensor))
            else:
                text.alias(result, destination)
        self.batch.add(launchable, buffers, kernel.symbols, checks)

    def _source(self, node: Node) -> None:
        type, text = node.result.tensor, self.text
        dtype = torch_dtype(type.dtype)
        if node.is_op("constant"):
            number = torch.full((), node.attributes["value"], dtype=dtype, device=type.device)
            name = text.define(node.result, ())
            text.line(f"{name} = {text.constant(number, 'number')}")
            return
        options = f"dtype={text.constant(dtype, 'dtype')}, device={text.device(type.device)}"
        if node.is_op("size"):
            call = f"{text.constant(torch.full, 'full')}((), {PYTHON.print(node.attributes['expr'])}, {options})"
        else:
            call = f"{text.constant(torch.arange, 'arange')}({PYTHON.print(node.attributes['size'])}, {options})"
        text.line(f"{text.define(node.result, type.strides)} = {call}")

    def _full(self, node: Node) -> None:
        text, type = self.text, node.result.tensor
        number = torch.full((), node.attributes["value"], dtype=torch_dtype(type.dtype), device=type.device)
        text.step("write", "full", node.sources)
        allocation, strides = text.allocate(type)
        text.line(f"{text.define(node.result, strides)} = {allocation}.fill_({text.constant(number, 'number')})")

    def _write(self, node: Node) -> None:
        text = self.text
        destination, value, *index = node.operands
        target, new = text.names[destination], text.names[value]
        text.step("write", "write", node.sources)
        if index:
            dim, rows = node.attributes["dim"], text.names[index[0]]
            text.line(f"{target}.index_copy_({dim}, {rows}, {new})")
        else:
            text.line(f"{target}.copy_({new})")
        text.alias(node.result, destination)

    def _look_up(self, node: Node) -> None:
        text = self.text
        table, index = (text.names[v] for v in node.operands)
        text.step("opaque", node.op.name, node.sources)
        name, function = text.define(node.result, None), text.constant(LOOKUPS[node.op.name], node.op.name)
        text.line(f"{name} = {function}({table}, {node.attributes['dim']}, {index})")

    def _concat(self, node: Node) -> None:
        text = self.text
        text.step("copy", "concat", node.sources)
        name = text.define(node.result, None)
        parts = ", ".join(text.names[v] for v in node.operands)
        text.line(f"{name} = {text.constant(torch.cat, 'cat')}([{parts}], {node.attributes['dim']})")

    def _view(self, node: Node) -> None:
        text, (operand,) = self.text, node.operands
        strides = text.layout(operand)
        type, shape = operand.tensor, node.result.shape
        source = text.names[operand]
        self.batch.materialize(operand)
        if all(same_size(a, b) for a, b in zip(shape, type.shape, strict=False)) and len(shape) == type.rank:
            if node.is_op("reshape", "expand"):
                text.alias(node.result, operand)
                return
        found = view_layout(node, replace(type, strides=strides))
        if found is None:
            self.batch.write()
            name = text.define(node.result, None)
            text.step("copy", "reshape", node.sources)
            text.line(f"{name} = {source}.reshape({sizes_text(shape)})")
            return
        layout, offset = found
        name = text.define(node.result, layout, operand)
        start = "" if same_size(offset, 0) else f", {source}.storage_offset() + {PYTHON.print(offset)}"
        text.line(f"{name} = {source}.as_strided({sizes_text(shape)}, {sizes_text(layout)}{start})")

    def _interpret(self, node: Node) -> None:
        """Run a region (or a primitive that no group took) operation by operation."""
        text = self.text
        body = node.body if node.has(Trait.REGION) else _alone(node)
        operands = ", ".join(text.names[v] for v in node.operands)
        names = [text.define(r, None, updated(node, r.index)) for r in node.results]
        text.step("interpreted", kernel_name(node) if node.has(Trait.REGION) else node.op.name, node.sources)
        known = ", ".join(f"{s!r}: {s}" for s in sorted(text.symbols))
        function, graph = text.constant(interpret, "interpret"), text.constant(body, "body")
        text.line(f"{''.join(name + ', ' for name in names)}= {function}({graph}, [{operands}], {{{known}}})")


def _check(node: Node) -> str:
    """What is to be said where a place does not exist: dim, length, source line, and the error that eager raises."""
    dim = node.attributes["dim"] % node.operands[0].tensor.rank
    length = PYTHON.print(node.operands[0].shape[dim])
    error = "RuntimeError" if node.is_op("gather") else "IndexError"
    return f"({dim}, {length}, {str(node.sources[0]) if node.sources else ''!r}, {error})"


def _alone(node: Node) -> Graph:
    """A graph of this node only."""
    graph = Graph(node.op.name)
    inputs = [graph.add_input(v.type) for v in node.operands]
    copy = graph.add_node(node.op.name, inputs, dict(node.attributes), types=[r.type for r in node.results])
    graph.set_outputs(list(copy.results))
    return graph


def _lies_as_called(value: Value, known: tuple[Size, ...] | None, promised: TensorType) -> bool:
    """Return whether a result of an opaque call is returned itself, and not a copy of it in another layout."""
    called = known is None and value.producer is not None and value.producer.has(Trait.OPAQUE)
    return called and value.tensor.strides == promised.strides
