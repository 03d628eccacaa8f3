"""The parser of the text form that ``fusec.ir.printer`` prints."""

import difflib
from typing import Any

from fusec.ir.graph import Graph, Source, Value
from fusec.ir.ops import OPS
from fusec.ir.printer import number_context
from fusec.ir.sources import parse_sources, union_of_sources
from fusec.ir.tokens import Token, error_at
from fusec.ir.types import DType, Type
from fusec.ir.value_parser import ValueParser


def parse_graph(text: str) -> Graph:
    """Return the graph that a text describes. Types are taken as written; ``verify_graph`` checks them.

    The grammar; white space separates, ``;`` means "repeated with commas between"::

        graph     = "graph" body
        body      = name "(" value ":" type ; ")" "{" [sources] line… "return" value ["as" type] ; "}"
        line      = [value ":" type ; "="] operation "(" operand ; ")" ["{" name "=" attribute ; "}"] (body | [sources])
        operand   = value | number [":" dtype] ["@" device]
        type      = dtype "[" size ; "]" ["@(" size ; ")"] [device] | ("int"|"float"|"bool") ["(" size ")"]
                  | "other<" string ">"
        attribute = number | string | "true" | "false" | "none" | dtype | type | size | "$" operand number
                  | "(" attribute ; ")" | "[" attribute ; "]"
        sources   = "#" (module "," file ":" line "(" operation ")" string, any of them) repeated with ";" between

    A number without a dtype has that of the last tensor among the operands. ``[…]`` is a list argument
    of an opaque call and ``$0`` its operand 0. A comment on a line of its own is ignored.

    Raises:
        ParseError: with line, column and what was expected.
    """
    parser = _GraphParser(text)
    try:
        return parser.graph()
    except RecursionError as reason:
        raise error_at(text, parser.token.offset, "fewer levels of nesting") from reason


class _GraphParser(ValueParser):
    """One method a rule of the grammar of graphs."""

    def graph(self) -> Graph:
        self.expect("graph")
        graph, _ = self.body()
        self.end()
        return graph

    def body(self) -> tuple[Graph, Token | None]:
        """Parse name, inputs and lines; return the graph and the comment after the opening brace."""
        token = self.token
        named = self.string() if token.kind == "string" else self.take("word", "the name of the graph")
        graph, values = Graph(named), dict[str, Value]()
        self.expect("(")
        for name, frozen, type in self.listed(self.input, ")"):
            self.define(values, name, graph.add_input(type, name.text[1:], frozen))
        self.expect("{")
        comment = self.comment()
        numbers: dict[tuple[Any, ...], Value] = {}
        while not self.accept("return"):
            self.line(graph, values, numbers)
        outputs = self.listed(lambda: self.output(values), "}")
        graph.set_outputs([v for v, _ in outputs], [t for _, t in outputs])
        return graph, comment

    def input(self) -> tuple[Token, bool, Type]:
        return self.new_value(), self.accept("frozen"), self.type()

    def declared(self) -> tuple[Token, Type]:
        return self.new_value(), self.type()

    def new_value(self) -> Token:
        token = self.token
        self.take("value", "a value such as `%x`")
        self.expect(":")
        return token

    def define(self, values: dict[str, Value], name: Token, value: Value) -> None:
        if name.text in values:
            self.fail("a new name", name)
        values[name.text] = value
        value.name = "" if name.text[1:].isdigit() else name.text[1:]

    def output(self, values: dict[str, Value]) -> tuple[Value, Type]:
        value = self.named(values)
        return value, self.type() if self.accept("as") else value.type

    def named(self, values: dict[str, Value]) -> Value:
        token = self.token
        self.take("value", "a value such as `%x`")
        if token.text not in values:
            self.fail("a value that is defined above", token)
        return values[token.text]

    def line(self, graph: Graph, values: dict[str, Value], numbers: dict[tuple[Any, ...], Value]) -> None:
        results: list[tuple[Token, Type]] = []
        if self.token.kind == "value":
            results.append(self.declared())
            while self.accept(","):
                results.append(self.declared())
            self.expect("=")
        op = self.token
        self.take("word", "an operation or `return`")
        if op.text not in OPS:
            near = difflib.get_close_matches(op.text, OPS, n=2)
            self.fail(f"an operation{' (' + ' or '.join(near) + '?)' if near else ''}", op)
        self.expect("(")
        found = self.listed(lambda: self.operand(values), ")")
        attributes = dict(self.listed(self.attribute, "}")) if self.accept("{") else {}
        operands = self.with_numbers(graph, op.text, found, numbers)
        usual: tuple[Source, ...] = ()
        if op.text == "region":
            attributes["body"], comment = self.body()
            usual = union_of_sources(attributes["body"])
        else:
            comment = self.comment()
        sources = parse_sources(comment.text[1:].strip()) if comment else None
        node = graph.add_node(
            op.text, operands, attributes, types=[t for _, t in results], sources=usual if sources is None else sources
        )
        for (name, _), value in zip(results, node.results, strict=True):
            self.define(values, name, value)

    def comment(self) -> Token | None:
        token = self.token
        if token.kind != "comment":
            return None
        self.at += 1
        return token

    def operand(self, values: dict[str, Value]) -> "Value | tuple[Any, DType | None, str | None]":
        """Parse a value, or a number with its optional dtype and device."""
        if self.token.kind == "value":
            return self.named(values)
        token = self.token
        number = self.attribute_value()
        if type(number) not in (int, float, bool):
            self.fail("a value or a number", token)
        dtype = self.dtype() if self.accept(":") else None
        return number, dtype, self.device() if self.accept("@") else None

    def with_numbers(
        self, graph: Graph, op: str, found: list[Any], numbers: dict[tuple[Any, ...], Value]
    ) -> list[Value]:
        """Return the operands as values; equal numbers of a graph become one node."""
        context = number_context(op, (v if isinstance(v, Value) else None for v in found))
        operands: list[Value] = []
        for item in found:
            if isinstance(item, Value):
                operands.append(item)
                continue
            number, dtype, device = item
            dtype = dtype or (context.dtype if context else None)
            if dtype is None:
                self.fail("a dtype after a number without a tensor operand (`1.0:f32`)", self.tokens[self.at - 1])
            device = device or (context.device if context else "cpu")
            key = (type(number), repr(number), dtype, device)
            if key not in numbers:
                numbers[key] = graph.constant(number, dtype, device)
            operands.append(numbers[key])
        return operands
