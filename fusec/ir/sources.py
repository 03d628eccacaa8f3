"""The text of source locations, printed at the end of a node's line."""

import json
import re
from dataclasses import replace
from functools import lru_cache

from fusec.ir.graph import Graph, Source

_AWKWARD = re.compile(r"[\s,;()\"\[\]#]")
_PLACE = re.compile(r"(?:(?P<module>[^\s,;()\"]+), )?(?P<file>[^\s,;()\"]+):(?P<line>\d+)|(?P<only>[^\s,;()\":]+)")
_OP = re.compile(r" ?\((?P<op>[^\s,;()\"]+)\)")


def union_of_sources(body: Graph) -> tuple[Source, ...]:
    """Return the source locations of all nodes of a body, each once: the default of its region.

    Constants are skipped: they have no line of their own.
    """
    return tuple(dict.fromkeys(s for node in body.nodes if not node.is_op("constant") for s in node.sources))


@lru_cache(maxsize=8192)
def print_source(source: Source) -> str:
    """Return the text of a source location: module, file and line, operation, text; JSON if a part has separators."""
    plain = not any(_AWKWARD.search(part) for part in (source.file, source.module, source.op))
    unplaced = source.line != 0 and not source.file
    if not plain or unplaced or source.line < 0 or source == Source() or source.module == "-" or ":" in source.module:
        return json.dumps([source.module, source.file, source.line, source.op, source.text])
    place = f"{source.file}:{source.line}" if source.file else ""
    parts = [", ".join(filter(None, (source.module, place)))]
    parts += [f"({source.op})"] if source.op else []
    parts += [json.dumps(source.text, ensure_ascii=False)] if source.text else []
    return " ".join(filter(None, parts))


def short_source(source: Source) -> str:
    """Return module, file name and line: ``layers.0.self_attn.o_proj, modeling_llama.py:271``."""
    return str(replace(source, file=source.file.rpartition("/")[2])) or source.op


def parse_sources(text: str) -> tuple[Source, ...] | None:
    """Return the source locations in a comment; None for a comment that lists none."""
    sources: list[Source] = []
    position = 0
    if text == "-":
        return ()
    while position < len(text):
        found = _parse_source(text, position)
        if found is None:
            return None
        source, position = found
        sources.append(source)
        if position < len(text) and not text.startswith("; ", position):
            return None
        position += 2
    return tuple(sources) or None


def _parse_source(text: str, position: int) -> tuple[Source, int] | None:
    if text.startswith("[", position):
        try:
            (module, file, line, op, code), position = json.JSONDecoder().raw_decode(text, position)
        except ValueError:
            return None
        return Source(file, line, module, op, code), position
    module = file = op = code = ""
    line = 0
    start = position
    if place := _PLACE.match(text, position):
        module = place["module"] or place["only"] or ""
        file, line = place["file"] or "", int(place["line"] or 0)
        position = place.end()
    if called := _OP.match(text, position):
        op, position = called["op"], called.end()
    position += position > start and text.startswith(' "', position)
    if text.startswith('"', position):
        try:
            code, position = json.JSONDecoder().raw_decode(text, position)
        except ValueError:
            return None
    return (Source(file, line, module, op, code), position) if position > start else None
