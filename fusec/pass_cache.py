"""What the passes made of a graph, kept for later processes: they read the outcome instead of running the passes."""

import json
import logging
import zlib
from dataclasses import asdict, replace

from fusec.artifacts import export
from fusec.cache import Cache, open_cache
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.pipeline import Context, PassRecord, Pipeline
from fusec.provenance import key_of_derived
from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.rule import REWRITES

logger = logging.getLogger(__name__)
SUFFIX = ".passes"


class PassCache:
    """What a pipeline makes of one graph under the choices of one compile.

    Args:
        pipeline: the passes.
        graph: as it comes; its text, places in the model included, is part of the key.
        context: of the compile, in which no pass has run.
    """

    def __init__(self, pipeline: Pipeline, graph: Graph, context: Context) -> None:
        self.context = context
        self.cache: Cache = open_cache(context.config)
        self.key = _key(pipeline, graph, context)

    def load(self, graph: Graph) -> bool:
        """Do to a graph and to the context what the passes of an earlier process did.

        Returns:
            Whether that is known: its text must read as a graph with that very text.
        """
        content = self.cache.read(self.key, SUFFIX) if self.key else None
        if content is None:
            return False
        try:
            found = json.loads(zlib.decompress(content))
            read = parse_graph(found["graph"])
            remarks = [remark | {"sources": tuple(remark["sources"])} for remark in found["remarks"]]
            records = [PassRecord(**record) for record in found["records"]]
        except Exception as reason:  # a graph that text cannot say must not cost later processes more than time
            logger.warning("what the passes made of %s does not read back, and they run again: %s", graph.name, reason)
            return False
        if str(read) != found["graph"]:
            logger.warning("what the passes made of %s reads as another graph, and they run again", graph.name)
            return False
        graph.become(read)
        for remark in remarks:
            self.context.remarks.add(**remark)
        self.context.records += records
        self.context.next_number = found["next_number"]
        export(self.cache, self.key, SUFFIX)
        logger.debug("an earlier process has taken %s through the passes", graph.name)
        return True

    def store(self, graph: Graph) -> None:
        """Let later processes have what the passes have just made, unless one of them failed."""
        context = self.context
        if not self.key or context.remarks.of("failure"):
            return
        found = {
            "graph": str(graph),
            "remarks": [remark.to_json() for remark in context.remarks],
            "records": list(map(asdict, context.records)),
            "next_number": context.next_number,
        }
        try:
            content = zlib.compress(json.dumps(found).encode(), 1)
        except (TypeError, ValueError) as reason:  # nor must what a remark says cost the kernels
            logger.warning("what the passes made of %s is not kept: %s", graph.name, reason)
            return
        self.cache.offer(self.key, SUFFIX, content, f"what the passes made of {graph.name}")
        export(self.cache, self.key, SUFFIX)


def _key(pipeline: Pipeline, graph: Graph, context: Context) -> str:
    """Of the entry in a cache; empty where the passes are to be watched, or consist of more than fusec's own code."""
    config = context.config
    modules = {d.module for d in FUSIONS.values()} | {d.module for d in REWRITES.values()}
    if config.record or config.verify or not all(m.startswith("fusec.") for m in modules):
        return ""
    choices = repr(replace(config, cache=True, cache_dir="", cache_mb=0))
    machine = json.dumps(context.machine.to_json())
    return key_of_derived("passes", choices, machine, str(pipeline), str(graph))
