"""The model's source around the lines that a graph comes from."""

import linecache
import sys
from collections import defaultdict
from collections.abc import Iterable

from fusec.ir.graph import Source

AROUND = 3
"""Lines shown before and after each line of the graph, where the file can be read."""


def excerpts(sources: Iterable[Source]) -> dict[str, list[tuple[int, str]]]:
    """Return for each file its lines, by number, that have operations, with those around them.

    A source has a short path. The file is that of the module loaded from it; where there is none, as in a graph that
    another process compiled, a line has the text that was recorded and nothing around it.
    """
    texts: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for source in sources:
        if source.file and source.line:
            texts[source.file][source.line] = source.text
    return {file: _lines(_path(file), lines) for file, lines in sorted(texts.items())}


def _path(file: str) -> str:
    """Return the path of the loaded module that a short path belongs to; the short path itself where there is none."""
    paths = (str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values()))
    return next((path for path in paths if path == file or path.endswith(f"/{file}")), file)


def _lines(path: str, recorded: dict[int, str]) -> list[tuple[int, str]]:
    whole = linecache.getlines(path)
    if any(line > len(whole) or whole[line - 1].strip() != text.strip() for line, text in recorded.items()):
        return sorted(recorded.items())  # another version of the file
    near = {n for line in recorded for n in range(line - AROUND, line + AROUND + 1) if 0 < n <= len(whole)}
    return [(n, whole[n - 1].rstrip()) for n in sorted(near)]
