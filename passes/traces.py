"""Traces of fusec's own declarations, which are the same in every process, and so are made by the first one only."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from fusec.cache import Cache
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.provenance import key_of_derived
from fusec.rewriting.pattern import Trace

logger = logging.getLogger(__name__)
_SUFFIX = ".traces"


class Traces:
    """A tracer that remembers the graphs of fusec's own functions, as text, by function and types of samples."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.texts: dict[str, str] = {}

    def __call__(self, function: Callable[..., Any], samples: Sequence[Any]) -> Graph:
        """The graph of a function on tensors of these types."""
        if not _is_own(function):
            return self.trace(function, samples)
        title = f"{function.__module__}.{function.__qualname__}({', '.join(map(str, samples))})"
        if title in self.texts:
            return parse_graph(self.texts[title])
        graph = self.trace(function, samples)
        self.texts[title] = str(graph)
        return graph

    @contextmanager
    def kept(self, cache: Cache) -> Iterator[None]:
        """Within it, what earlier processes traced is known; behind it, what this one did is there for later ones."""
        key = key_of_derived("traces")
        if not key:
            yield
            return
        there = _read(cache, key)
        self.texts = there | self.texts
        yield
        if self.texts.keys() - there.keys():
            texts = _read(cache, key) | self.texts
            cache.offer(key, _SUFFIX, json.dumps(texts).encode(), "the traces of declarations")


def _is_own(function: Callable[..., Any]) -> bool:
    """Whether fusec's sources alone say what a function does."""
    plain = isinstance(function, FunctionType) and function.__closure__ is None and "<" not in function.__qualname__
    return plain and function.__module__.startswith("fusec.")


def _read(cache: Cache, key: str) -> dict[str, str]:
    try:
        found: dict[str, str] = dict(json.loads(cache.read(key, _SUFFIX) or b"{}"))
    except (TypeError, ValueError) as reason:
        logger.warning("the traces of the cache do not read back, and are made anew: %s", reason)
        return {}
    return found
