"""Random valid graphs, for property tests of whatever reads, writes, runs or changes graphs."""

import random

from hypothesis import strategies as st

from fusec.ir.graph import Graph, Source, Value
from fusec.ir.types import BF16, F32, I64, DType, ScalarType, Size, TensorType, contiguous_strides, symbol

_UNARY = ("neg", "abs", "exp", "tanh", "sigmoid", "erf", "floor", "sin", "rsqrt", "isnan")
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "lt", "eq", "pow")
_NUMBERS = (0.0, 1.0, -0.5, 2.0, 1e-6, float("inf"), float("-inf"))
_SOURCES = (
    Source("modeling_llama.py", 271, "layers.0.self_attn.o_proj", "aten.linear.default", "x = self.o_proj(x)  # out"),
    Source("model.py", 3),
    Source(module="layers.1"),
    Source(op="aten.add.Tensor"),
    Source("a b;c.py", 7, 'odd "name"', "op", "two\nlines"),
    Source(text="y = x"),
)


def random_graph(rng: random.Random, size: int = 12, *, symbolic: bool = True, effects: bool = False) -> Graph:
    """A graph of about ``size`` nodes that passes the verifier and that the interpreter can run.

    Args:
        rng: where every choice comes from.
        size: steps; some add no node, some several.
        symbolic: one dimension may be the symbol ``s0``.
        effects: there may be writes and opaque calls.
    """
    return _Maker(rng, symbolic, effects).make(size)


def graphs(size: int = 12, *, symbolic: bool = True, effects: bool = True) -> st.SearchStrategy[Graph]:
    """A strategy of such graphs."""
    return st.builds(
        lambda rng, n: random_graph(rng, n, symbolic=symbolic, effects=effects),
        st.randoms(use_true_random=False),
        st.integers(1, size),
    )


class _Maker:
    def __init__(self, rng: random.Random, symbolic: bool, effects: bool) -> None:
        self.rng, self.symbolic, self.effects = rng, symbolic, effects
        self.graph = Graph(rng.choice(("graph", "main", "odd name")))
        self.written: set[Value] = set()

    def make(self, size: int) -> Graph:
        graph, rng = self.graph, self.rng
        rows: Size = symbol("s0") if self.symbolic and rng.random() < 0.6 else rng.choice((1, 2, 3))
        if not isinstance(rows, int) and rng.random() < 0.5:
            graph.add_input(ScalarType("int", rows), "n")
        for i in range(rng.randint(1, 3)):
            shape = (rows, rng.choice((1, 4, 6)))[: rng.randint(1, 2)] if i else (rows, 6)
            graph.add_input(self.tensor(rng.choice((F32, F32, BF16)), shape), rng.choice(("x", "x", "weight", "")))
        self.values = [v for v in graph.inputs if isinstance(v.type, TensorType)]
        for _ in range(size):
            self.step()
        outputs = [rng.choice(self.values) for _ in range(rng.randint(1, 3))]
        graph.set_outputs([v for v in outputs if v not in self.written] or self.values[-1:])
        return graph

    def tensor(self, dtype: DType, shape: tuple[Size, ...]) -> TensorType:
        strides = contiguous_strides(shape)
        if len(shape) == 2 and self.rng.random() < 0.2:
            strides = (1, shape[0])
        return TensorType(dtype, shape, strides)

    def add(self, op: str, operands: list[Value], **attributes: object) -> None:
        sources = tuple(self.rng.choice(_SOURCES) for _ in range(self.rng.choice((0, 1, 1, 2))))
        node = self.graph.add_node(op, operands, attributes, sources=sources)
        node.result.name = self.rng.choice(("", "", "h", "x", "layer.1_out"))
        self.values.append(node.result)

    def step(self) -> None:
        kinds = [self.unary, self.binary, self.binary, self.number, self.reduce, self.view, self.cast, self.choose]
        kinds += [self.contract, self.concat, self.region, self.position]
        if self.effects:
            kinds += [self.opaque, self.write]
        self.rng.choice(kinds)()

    def pick(self, *, rank: int = 0, floats: bool = True) -> Value | None:
        fitting = [
            v
            for v in self.values
            if v not in self.written and v.tensor.rank >= rank and (v.dtype.is_float or not floats)
        ]
        return self.rng.choice(fitting) if fitting else None

    def unary(self) -> None:
        if x := self.pick():
            self.add(self.rng.choice(_UNARY), [x])

    def binary(self) -> None:
        if not (x := self.pick()):
            return
        fitting = [v for v in self.values if v.tensor.shape == x.shape and v.dtype == x.dtype and v not in self.written]
        self.add(self.rng.choice(_BINARY), [x, self.rng.choice(fitting)])

    def number(self) -> None:
        if not (x := self.pick()):
            return
        number = self.graph.constant(self.rng.choice(_NUMBERS), x.dtype)
        operands = [x, number] if self.rng.random() < 0.8 else [number, number]
        self.add(self.rng.choice(_BINARY), operands)

    def reduce(self) -> None:
        if x := self.pick(rank=1):
            count = self.rng.randint(1, x.tensor.rank)
            self.add(self.rng.choice(("sum", "max", "min", "prod")), [x], dims=tuple(range(-count, 0)))

    def cast(self) -> None:
        if x := self.pick(floats=False):
            self.add("cast", [x], dtype=self.rng.choice((F32, BF16)))

    def choose(self) -> None:
        if not (x := self.pick()):
            return
        condition = self.graph.add_node("lt", [x, self.graph.constant(0.5, x.dtype)]).result
        self.add("where", [condition, x, self.graph.constant(self.rng.choice(_NUMBERS), x.dtype)])

    def view(self) -> None:
        if not (x := self.pick(rank=2)):
            return
        rows, columns, *_ = x.shape
        kind = self.rng.choice(("permute", "flatten", "slice", "unsqueeze", "window", "expand"))
        if kind == "permute":
            self.add("permute", [x], dims=tuple(reversed(range(x.tensor.rank))))
        elif kind == "flatten" and x.tensor.rank == 2:
            self.add("reshape", [x], shape=(rows * columns,))
        elif kind == "slice" and isinstance(x.shape[-1], int) and x.shape[-1] > 1:
            self.add("slice", [x], dim=-1, start=self.rng.randint(0, 1), stop=x.shape[-1], step=self.rng.randint(1, 2))
        elif kind == "window" and isinstance(x.shape[-1], int) and 0 < x.shape[-1] and x.tensor.rank < 4:
            self.add("window", [x], dim=-1, size=self.rng.randint(1, x.shape[-1]), step=self.rng.randint(1, 2))
        elif kind == "unsqueeze" and x.tensor.rank < 4:
            self.add("reshape", [x], shape=(*x.shape, 1))
        elif x.tensor.rank < 4:
            self.add("expand", [x], shape=(2, *x.shape))

    def contract(self) -> None:
        if (x := self.pick(rank=2)) and x.tensor.rank == 2:
            self.add("contraction", [x, x], spec=self.rng.choice(("az,bz->ab", "za,zb->ab", "ab,ab->ab")))

    def concat(self) -> None:
        if x := self.pick(rank=1):
            self.add("concat", [x, x], dim=-self.rng.randint(1, x.tensor.rank))

    def position(self) -> None:
        if (x := self.pick(rank=2)) and x.tensor.rank == 2:
            rows = self.graph.add_node("iota", (), {"size": x.shape[0], "dtype": I64}).result
            count = self.graph.add_node("size", (), {"expr": x.shape[0] * 2 + 1, "dtype": I64}).result
            self.add("lt", [rows, count])

    def region(self) -> None:
        if not (x := self.pick()):
            return
        body = Graph("scaled")
        inner = body.add_input(x.type, "x")
        scaled = body.add_node("mul", [inner, body.constant(0.5, x.dtype)], sources=self.rng.choice(((), _SOURCES[:2])))
        body.set_outputs([scaled.result])
        attributes = {"fusion": "scale", "kind": self.rng.choice(("declared", "kernel")), "body": body}
        sources = self.rng.choice((scaled.sources, (), _SOURCES[1:2]))
        node = self.graph.add_node("region", [x], attributes, types=[scaled.result.type], sources=sources)
        self.values.append(node.result)

    def opaque(self) -> None:
        if not (x := self.pick(rank=1)):
            return
        attributes = {
            "target": "aten.softmax.int",
            "args": (("%", 0), -1),
            "kwargs": (("dtype", ("torch", "float32")),),
            "operand_types": (x.type,),
        }
        result = TensorType(F32, x.shape, contiguous_strides(x.shape))
        self.values.append(self.graph.add_node("opaque", [x], attributes, types=[result]).result)

    def write(self) -> None:
        inputs = [v for v in self.graph.inputs if isinstance(v.type, TensorType) and v not in self.written]
        destination = self.rng.choice(inputs) if inputs else None
        aliases = [v for v in self.values if _root(v) is destination]
        if destination is None or len(inputs) < 2:
            return
        number = self.graph.constant(1.0, destination.dtype)
        value = self.graph.add_node("expand", [number], {"shape": destination.shape}).result
        self.add("write", [destination, value])
        self.written.update(aliases)


def _root(value: Value) -> Value:
    while value.producer is not None and value.producer.is_op(
        "reshape", "permute", "expand", "slice", "window", "write"
    ):
        value = value.producer.operands[0]
    return value
