"""Graphs of failed compiles as files, for ``fusec reduce``; of many, the last ones are kept."""

import hashlib
import logging
import re
import shlex
from pathlib import Path

from fusec.config import Config
from fusec.ownership import make_private

logger = logging.getLogger(__name__)
FOLDER, MOST = "reproducers", 20
"""The folder in the cache directory, and the most files in it."""


def keep_graph(text: str, name: str, config: Config, failure: str, strict: bool = False) -> str:
    """Write the text of a graph, and return the command that reduces it; "" where it cannot be written.

    Args:
        text: the graph.
        name: of the graph.
        config: the options of the compile, which the command repeats.
        failure: what went wrong, for a comment in the file.
        strict: it fails only where nothing may fall back to ATen.
    """
    folder = config.cache_path() / FOLDER
    stem = re.sub(r"[^A-Za-z0-9_]", "_", name)[:40]
    path = folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.fir"
    command = reduce_command(path, config, strict)
    try:
        make_private(folder)
        path.write_text(f"# {failure.partition(chr(10))[0]}\n# {command}\n{text}", encoding="utf-8")
        for old in sorted(folder.glob("*.fir"), key=lambda file: file.stat().st_mtime_ns)[:-MOST]:
            old.unlink(missing_ok=True)
    except OSError as reason:
        logger.warning("cannot keep a graph that fails: %s", reason)
        return ""
    return command


def reduce_command(path: Path, config: Config, strict: bool = False) -> str:
    """Return the command that reduces a graph file under the options and declarations of its compile."""
    from fusec.rewriting.declaring import declaring_file

    options = {"--target": config.target, "--disable": config.disable, "--declare": declaring_file()}
    words = [word for name, value in options.items() if value for word in (name, value)]
    return shlex.join(["fusec", "reduce", str(path), *(["--strict"] if strict else []), *words])
