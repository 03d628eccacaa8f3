"""Reads types, sizes and attribute values, by recursive descent; no text is ever evaluated."""

import json
from keyword import iskeyword
from typing import Any

from fusec.ir.expressions import FUNCTIONS, combine
from fusec.ir.ops import OPS
from fusec.ir.tokens import Cursor
from fusec.ir.types import (
    DTYPES,
    DType,
    OtherType,
    ScalarType,
    Size,
    TensorType,
    Type,
    contiguous_strides,
    symbol,
)

_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": float("inf"), "nan": float("nan")}
_SCALARS = ("int", "float", "bool")


class ValueParser(Cursor):
    """One method a rule of the grammar of types and attributes."""

    # -- types ---------------------------------------------------------------------------------------------

    def type(self) -> Type:
        """A type."""
        token = self.token
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)].text
        if token.text in _SCALARS and following != "[":
            self.at += 1
            if not self.accept("("):
                return ScalarType(token.text)
            size = self.size()
            self.expect(")")
            return ScalarType(token.text, size)
        if token.text == "other" and following == "<":
            self.at += 2
            name = self.string()
            self.expect(">")
            return OtherType(name)
        dtype = self.dtype()
        self.expect("[")
        return self.tensor(dtype)

    def tensor(self, dtype: DType) -> TensorType:
        """Parse a tensor type after its opening bracket."""
        shape = tuple(self.listed(self.extent, "]"))
        strides = contiguous_strides(shape)
        if self.accept("@"):
            self.expect("(")
            strides = tuple(self.listed(self.extent, ")"))
            if len(strides) != len(shape):
                self.fail(f"{len(shape)} strides", self.tokens[self.at - 1])
        is_device = self.token.kind == "word" and self.token.text not in OPS and self.token.text not in ("as", "return")
        return TensorType(dtype, shape, strides, self.device() if is_device else "cpu")

    def dtype(self) -> DType:
        """Parse a dtype."""
        token = self.token
        name = self.take("word", "a type")
        if self.accept("<"):
            kind = self.take("word", "a kind of dtype")
            self.expect(",")
            size = self.token
            self.take("number", "a number of bytes")
            width = self.whole(size)
            self.expect(">")
            return DType(name, kind, width)
        if name not in DTYPES:
            self.fail(f"a type ({', '.join(DTYPES)})", token)
        return DTYPES[name]

    def device(self) -> str:
        """A device: ``cuda:0``."""
        name = self.take("word", "a device")
        return f"{name}:{self.take('number', 'the number of the device')}" if self.accept(":") else name

    # -- attributes and sizes --------------------------------------------------------------------------------

    def attribute(self) -> tuple[str, Any]:
        """A name and its value."""
        name = self.take("word", "the name of an attribute")
        self.expect("=")
        return name, self.attribute_value()

    def attribute_value(self) -> Any:
        """Any value that an attribute may have."""
        token = self.token
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)].text
        if token.kind == "string":
            return self.string()
        if token.kind == "operand":
            self.at += 1
            return ("%", self.whole(token))
        if self.accept("["):
            return ("list", tuple(self.listed(self.attribute_value, "]")))
        if token.kind == "word" and token.text in _WORDS:
            self.at += 1
            return _WORDS[token.text]
        if token.kind == "word" and (token.text in DTYPES or token.text in (*_SCALARS, "other") or following == "<"):
            return self.type_or_dtype(following)
        start = self.at
        if token.text == "(" and (found := self.tuple()) is not None:
            return found[0]
        self.at = start
        return self.expression()

    def type_or_dtype(self, following: str) -> Any:
        """Parse a dtype, or a type that begins with one."""
        token = self.token
        if token.text in DTYPES and following not in ("[", "<"):
            self.at += 1
            return DTYPES[token.text]
        if token.text in (*_SCALARS, "other"):
            return self.type()
        dtype = self.dtype()
        return self.tensor(dtype) if self.accept("[") else dtype

    def tuple(self) -> "tuple[tuple[Any, ...]] | None":
        """A tuple, boxed; None where the parenthesis turns out to belong to an expression."""
        self.expect("(")
        items: list[Any] = []
        comma = True
        while not self.accept(")"):
            items.append(self.attribute_value())
            comma = self.accept(",")
            if not comma:
                self.expect(")")
                break
        if len(items) == 1 and not comma:
            return None
        return None if self.token.text in ("*", "/", "+", "-", "**") else (tuple(items),)

    def string(self) -> str:
        """A string in quotes."""
        token = self.token
        text = self.take("string", "a string")
        try:
            return str(json.loads(text))
        except ValueError:
            self.fail("a string in JSON form", token)

    def size(self) -> Size:
        """A whole number or an expression."""
        if self.token.kind == "number" and self.tokens[self.at + 1].text in (",", "]", ")"):
            token = self.token
            self.at += 1
            return self.whole(token)
        return self.expression()

    def extent(self) -> Size:
        """Parse a size or stride of a tensor."""
        token = self.token
        found = self.size()
        if isinstance(found, float):
            self.fail("a whole number or an expression", token)
        return found

    def expression(self) -> Any:
        """A sum of products of powers."""
        left = self.product()
        while (sign := self.token.text) in ("+", "-"):
            self.at += 1
            left = self.combined(sign, left, self.product())
        return left

    def product(self) -> Any:
        """A product of powers."""
        left = self.unary()
        while (sign := self.token.text) in ("*", "/"):
            self.at += 1
            left = self.combined(sign, left, self.unary())
        return left

    def unary(self) -> Any:
        """A power, or one negated."""
        if self.accept("-"):
            return -self.unary()
        left = self.atom()
        return self.combined("**", left, self.unary()) if self.accept("**") else left

    def combined(self, sign: str, left: Any, right: Any) -> Any:
        """Two operands under their operator."""
        try:
            return combine(sign, left, right)
        except (TypeError, ValueError, ArithmeticError):
            self.fail("operands that can be combined", self.tokens[self.at - 1])

    def atom(self) -> Any:
        """Parse a number, a symbol, a call or an expression in parentheses."""
        token = self.token
        if token.kind == "number":
            self.at += 1
            return self.whole(token) if token.text.isdigit() else float(token.text)
        if self.accept("("):
            inner = self.expression()
            self.expect(")")
            return inner
        name = self.take("word", "a number, a size symbol or an attribute's value")
        if not self.accept("("):
            if iskeyword(name):
                self.fail("a size symbol that is no keyword of Python", token)
            return _WORDS[name] if name in ("inf", "nan") else symbol(name)
        if name not in FUNCTIONS:
            self.fail(f"a function of sizes ({', '.join(FUNCTIONS)})", token)
        return FUNCTIONS[name](*self.listed(self.expression, ")"))
