"""Compiles of tools, kept in the cache: the next tool reads the same graph's compile instead of repeating it."""

import json
import logging
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fusec.cache import open_cache
from fusec.codegen import target_for
from fusec.codegen.cpp import CppTarget
from fusec.codegen.program.edits import digest_of_edits
from fusec.collector import collector_paused
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config, compiler_command
from fusec.debug.subject import Subject, subject_of
from fusec.debug.traces import subject_from
from fusec.ir.graph import Graph
from fusec.provenance import key_of_derived
from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.rule import REWRITES
from fusec.tracing import IMPORTED, recorded

logger = logging.getLogger(__name__)
_SUFFIX = ".compile"


@collector_paused()
def kept_subject(graph: Graph, config: Config, title: str = "") -> Subject:
    """Return the subject of a compile of a graph, from the cache where there is one."""
    kept = _Kept(graph, config)
    return replace(kept.read() or subject_of(kept.compiled()), title=title or graph.name)


def compile_kept(graph: Graph, config: Config) -> Any:
    """Return a compile for the backend; its program is interpreted where kernels are not built.

    One from the cache has a ``subject``, and no kernels either.
    """
    from fusec.dynamo import interpreted

    kept = _Kept(graph, config)
    found = None if config.trace else kept.read()
    if found is None:
        compiled = kept.compiled()
        if isinstance(kept.target, CppTarget):
            compiled.program = replace(compiled.program, run=interpreted(graph))
        return compiled
    remarks = list(found.remarks)  # the frontend adds its own
    return SimpleNamespace(program=interpreted(graph), remarks=remarks, subject=replace(found, remarks=remarks))


class _Kept:
    """The entry of the cache for the compile of one graph."""

    def __init__(self, graph: Graph, config: Config) -> None:
        self.graph, self.config, self.text = graph, config, str(graph)
        self.cache = open_cache(config)
        self.target = target_for(graph, config)
        if isinstance(self.target, CppTarget):
            self.target = CppTarget(builds=False)
        self.key, self.key_with_history = self._key(config), self._key(replace(config, history=True))

    def _key(self, config: Config) -> str:
        """Return the key; "" where the compile depends on more, or may turn out to have failed when it is launched."""
        modules = {d.module for d in FUSIONS.values()} | {d.module for d in REWRITES.values()}
        if self.target.name != "cpp" or not all(module.startswith("fusec.") for module in modules):
            return ""
        choices = repr(replace(config, target="", cache=True, cache_dir="", cache_mb=0, trace="", report=""))
        machine = json.dumps(self.target.machine(config).to_json())
        about = (choices, machine, *compiler_command(), digest_of_edits(config))
        return key_of_derived("compile", *about, self.text)

    def read(self) -> Subject | None:
        """Return what an earlier process compiled, possibly with a history that was not asked for."""
        keys = {self.key: None, self.key_with_history: None} if self.key else ()
        content = next(filter(None, (self.cache.read(key, _SUFFIX) for key in keys)), None)
        if content is None:
            return None
        try:
            about, texts = json.loads(zlib.decompress(content))
            return subject_from(about, {**texts, IMPORTED: self.text})
        except Exception as reason:  # whatever is wrong with an entry, the graph can be compiled again
            logger.warning("the kept compile of %s cannot be read, and is repeated: %s", self.graph.name, reason)
            return None

    def compiled(self) -> Compiled:
        """Compile the graph, and keep that for later processes unless a part of it failed."""
        compiled = compile_graph(self.graph, self.config, self.target)
        if self.key and not compiled.remarks.of("failure"):
            content = json.dumps(recorded(compiled), default=str).encode()
            self.cache.offer(self.key, _SUFFIX, zlib.compress(content, 1), f"the compile of {self.graph.name}")
        return compiled
