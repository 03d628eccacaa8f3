"""Run passes on a graph by themselves, to see the effect of each and verify it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusec.config import Config
from fusec.debug.subject import Subject
from fusec.errors import VerificationError
from fusec.ir.graph import Graph
from fusec.pipeline import PassRecord, Pipeline
from fusec.remarks import Remark
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
    found = Subject(graph.name, work, graph, context.records, context.remarks)
    if verify_each:
        require_agreement(found, verify_passes(found.records), passes, options)
    return found


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


def require_agreement(
    found: Subject, results: "Mapping[int, EquivalenceResult]", passes: str, options: Mapping[str, Any] | None = None
) -> None:
    """Name the first pass that changed the meaning, and the application of a rewrite that is at fault.

    Args:
        found: the result of ``opt`` with these passes and options.
        results: those of ``verify_passes``.
        passes: as for ``opt``.
        options: as for ``opt``.

    Raises:
        VerificationError: where a pass changed the results.
    """
    for i, result in results.items():
        if not result:
            record = found.records[i]
            what = f"pass {record.name} changes the result"
            command = keep_graph(record.before, record.name, Config.from_environment(), what)
            culprit = _at_fault(found, passes, options)
            fixes = [f"--apply '!{culprit.application}' leaves it out"] if culprit else []
            fix = "; ".join(filter(None, [*fixes, command]))
            raise VerificationError(what, where=str(culprit or ""), why=result.message, fix=fix)


def _at_fault(found: Subject, passes: str, options: Mapping[str, Any] | None) -> Remark | None:
    """Return the first application whose two sides differ; None where a pass itself is wrong."""
    if found.imported is None:
        return None
    remarks = opt(found.imported, passes, options={**(options or {}), "verify": True}).remarks
    wrong = {r.application for r in remarks if r.kind == "failure" and r.application is not None}
    return next((r for r in remarks if r.kind == "passed" and r.application in wrong), None)
