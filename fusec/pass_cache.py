"""Results of passes on disk: later processes load the optimized graph instead of running the passes."""

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
    """The cached result of a pipeline for one graph and configuration.

    Args:
        pipeline: the passes.
        graph: the imported graph; its text, source locations included, is part of the key.
        context: of the compile, in which no pass has run.
    """

    def __init__(self, pipeline: Pipeline, graph: Graph, context: Context) -> None:
        self.context = context
        self.cache: Cache = open_cache(context.config)
        self.key = _key(pipeline, graph, context)

    def load(self, graph: Graph) -> bool:
        """Load the result of an earlier process into the graph and the context.

        Returns:
            Whether there is one: its text must parse to a graph that prints the same.
        """
        content = self.cache.read(self.key, SUFFIX) if self.key else None
        if content is None:
            return False
        try:
            found = json.loads(zlib.decompress(content))
            read = parse_graph(found["graph"])
            remarks = [remark | {"sources": tuple(remark["sources"])} for remark in found["remarks"]]
            records = [PassRecord(**{**record, "declared": tuple(record["declared"])}) for record in found["records"]]
        except Exception as reason:  # whatever is wrong with an entry, the passes can run again
            logger.warning("the cached graph of %s cannot be read, and its passes run again: %s", graph.name, reason)
            return False
        if str(read) != found["graph"]:
            logger.warning("the cached graph of %s parses to another graph, and its passes run again", graph.name)
            return False
        graph.become(read)
        for remark in remarks:
            self.context.remarks.add(**remark)
        self.context.records += records
        self.context.next_number = found["next_number"]
        export(self.cache, self.key, SUFFIX)
        logger.debug("loaded the optimized graph of %s", graph.name)
        return True

    def store(self, graph: Graph) -> None:
        """Store the graph, remarks and records for later processes, unless a pass failed."""
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
        except (TypeError, ValueError) as reason:  # a remark that is not JSON must not fail the compile
            logger.warning("the optimized graph of %s is not cached: %s", graph.name, reason)
            return
        self.cache.offer(self.key, SUFFIX, content, f"the optimized graph of {graph.name}")
        export(self.cache, self.key, SUFFIX)


def _key(pipeline: Pipeline, graph: Graph, context: Context) -> str:
    """Return the key of the cache entry; empty where passes are recorded, or depend on more than fusec's own code."""
    config = context.config
    modules = {d.module for d in FUSIONS.values()} | {d.module for d in REWRITES.values()}
    if config.record or config.verify or not all(m.startswith("fusec.") for m in modules):
        return ""
    choices = repr(replace(config, cache=True, cache_dir="", cache_mb=0))
    machine = json.dumps(context.machine.to_json())
    return key_of_derived("passes", choices, machine, str(pipeline), str(graph))
