"""Codes of the reasons for which something is not fused: a fixed list, for filters and tables."""

import re
from typing import NamedTuple


class Reason(NamedTuple):
    """One code."""

    code: str
    text: str
    """A regular expression for the text of the reason."""
    meaning: str


_CLAUSES = {
    "users": "another-reader", "convex": "cycle", "type": "dtype", "shape": "shape", "constant": "constant",
    "operation": "operation", "operand": "operand", "attribute": "attribute", "dim": "dim",
}  # fmt: skip
"""By the clause of a match that failed."""
REASONS = (
    Reason("operation", "", "an operation of the pattern is missing, or another one is in its place"),
    Reason("operand", "", "an operation reads another value than the pattern's"),
    Reason("attribute", "", "an operation has another attribute than the pattern's"),
    Reason("constant", "", "a constant differs from the pattern's"),
    Reason("dim", r"reduction is not over", "a reduction or concatenation is along another dim"),
    Reason("shape", r"different (shapes|rows)|other (rows|axes)|one loop|broadcast along|sums over several"
           r"|one (column|element)"
           r"|without columns|lacks the summed|too many (rows|loops|segments)|at several indices|differ along"
           r"|batched|left operand|the result is",
           "shapes or loops that one kernel cannot have"),
    Reason("dtype", r"of bytes|different (types|dtypes)|no Triton form",
           "dtypes that a pattern or kernel does not take"),
    Reason("clause", "", "a condition that the fusion declares does not hold"),
    Reason("another-reader", r"also read by|several kernels read|reads? its result",
           "another operation reads a value that would stay inside"),
    Reason("returned", r"also returned|depend on a matmul|output is not computed",
           "a value that would stay inside is a result"),
    Reason("cycle", r"reads the one and is read by the other", "another kernel would be both before and after it"),
    Reason("alias", r"reads what it writes|writes (to a view|twice)|write cannot", "it reads memory that it updates"),
    Reason("layout", r"contiguous|affine|exceeds|one dim in memory|concatenation|split more than"
           r"|start of its dim|part of a dim",
           "memory that a kernel cannot read in vectors or tiles"),
    Reason("size", r"not known|not proven|symbolic", "a size that has to be a number is a symbol"),
    Reason("softmax", r"softmax|keys or values|sinks|dropout|no keys|(first|second) matmul|scale is not"
           r"|has \d+ matmuls", "attention of another form than the schedule's"),
    Reason("vendor", r"vendor", "a library's matmul is at least as fast"),
    Reason("slower", r"slower", "one kernel is predicted to be slower than several"),
    Reason("device", r"tensors are on", "its tensors are on several devices"),
    Reason("too-large", r"more than|too many", "a limit on the size of kernels"),
    Reason("order", r"order is fixed|random", "random numbers, a collective, or another effect keeps its place"),
    Reason("lookup", r"lookup|look-up|dynamic ind|right operand|index is known",
           "an index or a table is computed at run time"),
    Reason("opaque", r"does not model|call of ATen|by ATen|in no kernel|cannot be part|could not be built|a call of"
           r"|no generated scan|is in the kernel|it sorts",
           "an operation that fusec leaves to ATen"),
    Reason("split", r"in (two|several) kernels|does nothing else|, this in ", "its operations run in several kernels"),
    Reason("other", "", "a reason of its own; the text says which"),
)  # fmt: skip
"""In the order in which texts are compared."""


def code_of_clause(clause: str) -> str:
    """Return the code of a clause of a match that failed."""
    return _CLAUSES.get(clause, "clause")


def code_of_text(reason: str) -> str:
    """Return the code of the text of a reason; "" where there is none."""
    found = next((known.code for known in REASONS if known.text and re.search(known.text, reason)), "other")
    return found if reason else ""
