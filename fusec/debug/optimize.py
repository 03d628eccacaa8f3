"""Run passes on a graph by themselves, to see the effect of each and verify it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusec.config import Config
from fusec.debug.subject import Subject
from fusec.errors import VerificationError
from fusec.ir.graph import Graph
from fusec.pipeline import PassRecord, Pipeline
from fusec.reproducers import keep_graph
from fusec.selector import Selector

if TYPE_CHECKING:
    from fusec.verify.rewrites import EquivalenceResult


def opt(
    graph: Graph, passes: str = "default", *, verify_each: bool = False, options: Mapping[str, Any] | None = None
) -> Subject:
    """Run a pipeline on a copy of a graph.

    Args:
        graph: a result of ``fusec.capture``, or parsed from text.
        passes: ``default``, or a text such as ``canonicalize,raise{only=rms_norm}``.
        verify_each: run the graph before and after each pass on sampled inputs.
        options: those of ``torch.compile(..., backend="fusec")``.

    Returns:
        The graph after all passes (``final``), a record of each with its text before and after, and the remarks;
        ``fusec.explain`` and ``fusec.view`` accept it.

    Raises:
        OptionError: for an unknown pass or option, or an application that there is none of.
        VerificationError: where a pass changes the result, under ``verify_each``.
    """
    from fusec.codegen import target_for
    from fusec.compiler import context_for
    from fusec.passes import kept_traces

    config = Config.from_options(None, {"record": True, **(options or {})})
    target = target_for(graph, config)
    work, (context, _) = graph.copy(), context_for(target, config)
    with kept_traces(config):
        choose_passes(passes, config).run(work, context)
    Selector.parse(config.apply).require(context.next_number)
    if verify_each:
        require_agreement(context.records, verify_passes(context.records))
    return Subject(graph.name, work, graph, context.records, context.remarks)


def choose_passes(text: str, config: Config) -> Pipeline:
    """Return the pipeline that a text names; the passes have the options that the configuration sets.

    Raises:
        OptionError: for an unknown pass; close matches are named.
    """
    from fusec.passes import default_pipeline, known_passes

    if text == "default":
        return default_pipeline(config)
    return Pipeline.parse(text, known_passes(config))


def verify_passes(records: Sequence[PassRecord]) -> "dict[int, EquivalenceResult]":
    """Run both sides of every pass that changed the graph; the results by the number of the record."""
    from fusec.ir.parser import parse_graph
    from fusec.verify.rewrites import check_rewrite

    return {
        i: check_rewrite(parse_graph(r.before), parse_graph(r.after), exact=False)
        for i, r in enumerate(records)
        if r.changed
    }


def require_agreement(records: Sequence[PassRecord], results: "Mapping[int, EquivalenceResult]") -> None:
    """Name the first pass that changed the meaning.

    Raises:
        VerificationError: where a pass changed the results.
    """
    for i, result in results.items():
        if not result:
            what = f"pass {records[i].name} changes the result"
            command = keep_graph(records[i].before, records[i].name, Config.from_environment(), what)
            fix = "find the application at fault with --apply and --remarks passed"
            raise VerificationError(what, why=result.message, fix=f"{fix}; {command}" if command else fix)
