"""The tokens of the text form, with their positions, for the parser and for syntax highlighting."""

import bisect
import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from fusec.errors import ParseError

T = TypeVar("T")
_SHOWN = 100
"""Characters of a line that an error shows on either side of its place."""
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+)
  | (?P<comment>\#[^\n]*)
  | (?P<value>%[A-Za-z0-9_.]+)
  | (?P<operand>\$\d+)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+)
  | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
  | (?P<sign>\*\*|->|[-+*/()\[\]{}<>,:=@])
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of the text."""

    kind: str
    """``value``, ``operand``, ``string``, ``number``, ``word``, ``sign``, ``comment`` or ``end``."""
    text: str
    offset: int


def tokenize(text: str) -> list[Token]:
    """Return all tokens but white space and comments on lines of their own; the last one is the ``end``.

    Raises:
        ParseError: at a sign that begins no token.
    """
    tokens: list[Token] = []
    position, last_line_end = 0, 0
    for match in _TOKEN.finditer(text):
        kind, found, start = str(match.lastgroup), match[0], match.start()
        if start != position:
            break
        position = start + len(found)
        if kind == "space":
            if "\n" in found:
                last_line_end = len(tokens)
        elif kind != "comment" or last_line_end != len(tokens):
            tokens.append(Token(kind, found, start))
    if position != len(text):
        raise error_at(text, position, f"a value, a number, a word or a sign, not {text[position]!r}")
    tokens.append(Token("end", "the end of the text", len(text)))
    return tokens


def error_at(text: str, offset: int, expected: str) -> ParseError:
    """Return the error that says what was expected at an offset, by line and column."""
    starts = [0, *(m.end() for m in re.finditer("\n", text))]
    line = bisect.bisect_right(starts, offset)
    column = offset - starts[line - 1] + 1
    shown = text[max(starts[line - 1], offset - _SHOWN) : offset + _SHOWN].partition("\n")[0]
    return ParseError(
        f"line {line}, column {column}: expected {expected[:_SHOWN]}",
        where=shown.strip(),
        fix="the grammar is that of fusec.ir.parser.parse_graph; print_graph writes it",
    )


class Cursor:
    """A position in the tokens of a text, and the primitives of a recursive-descent parser."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at = text, tokenize(text), 0

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self.tokens[self.at]

    def fail(self, expected: str, token: Token | None = None) -> NoReturn:
        """Raise the error that says what was expected here, or at another token."""
        token = token or self.token
        raise error_at(self.text, token.offset, f"{expected}, not {token.text[:_SHOWN]}")

    def accept(self, sign: str) -> bool:
        """Step over a sign or word if it comes next."""
        token = self.tokens[self.at]
        found = token.text == sign and token.kind in ("sign", "word")
        self.at += found
        return found

    def expect(self, sign: str) -> None:
        """Step over a sign or word that must come next."""
        if not self.accept(sign):
            self.fail(f"`{sign}`")

    def take(self, kind: str, meaning: str) -> str:
        """Consume a token of some kind and return its text."""
        token = self.token
        if token.kind != kind:
            self.fail(meaning)
        self.at += 1
        return token.text

    def whole(self, token: Token) -> int:
        """Return the number that a token of digits is."""
        try:
            return int(token.text.lstrip("$"))
        except ValueError:
            self.fail("a whole number of fewer digits", token)

    def end(self) -> None:
        """Make sure that nothing follows."""
        if self.token.kind != "end":
            self.fail("the end of the text")

    def listed(self, item: Callable[[], T], close: str) -> list[T]:
        """Parse items separated by commas, up to and including the closing sign; a trailing comma is allowed."""
        items: list[T] = []
        while not self.accept(close):
            items.append(item())
            if not self.accept(","):
                self.expect(close)
                break
        return items
