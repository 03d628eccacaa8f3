"""Traces of fusec's own declarations, which are the same in every process, so that only the first one makes them."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeAlias

from fusec.cache import Cache
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.provenance import key_of_derived
from fusec.rewriting.index import Kind
from fusec.rewriting.pattern import Trace

logger = logging.getLogger(__name__)
_SUFFIX = ".traces"
_Kept: TypeAlias = "tuple[dict[str, str], dict[str, tuple[Kind, ...]]]"


class Traces:
    """A tracer that remembers the graphs of fusec's own functions, as text, by function and types of samples."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.texts: dict[str, str] = {}
        self.kinds: dict[str, tuple[Kind, ...]] = {}
        """The operations of the patterns made from them, by title: kept by ``PatternLibrary``."""

    def __call__(self, function: Callable[..., Any], samples: Sequence[Any]) -> Graph:
        """Return the graph of a function on tensors of these types."""
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
        """Load what earlier processes traced, and on exit store what this one traced for later ones."""
        key = key_of_derived("traces")
        if not key:
            yield
            return
        texts, kinds = _read(cache, key)
        self.texts.update(texts)
        self.kinds.update(kinds)
        yield
        if self.texts.keys() - texts.keys() or self.kinds.keys() - kinds.keys():
            texts, kinds = _read(cache, key)
            content = {"texts": texts | self.texts, "kinds": kinds | self.kinds}
            cache.offer(key, _SUFFIX, json.dumps(content).encode(), "the traces of declarations")


def _is_own(function: Callable[..., Any]) -> bool:
    """Return whether fusec's sources alone decide what a function computes."""
    plain = isinstance(function, FunctionType) and function.__closure__ is None and "<" not in function.__qualname__
    return plain and function.__module__.startswith("fusec.")


def _read(cache: Cache, key: str) -> _Kept:
    content = cache.read(key, _SUFFIX)
    if content is None:
        return {}, {}
    try:
        found = json.loads(content)
        kinds = {title: tuple((op, fusion) for op, fusion in kinds) for title, kinds in found["kinds"].items()}
        return dict(found["texts"]), kinds
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        logger.warning("the traces in the cache cannot be read, and are made again: %s", reason)
        return {}, {}
