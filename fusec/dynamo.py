"""The torch.compile backend: AOTAutograd hands over ATen graphs, forward and backward, and each is compiled."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import GraphModule

import fusec.artifacts
from fusec.analysis.sites import Site, sites_of
from fusec.collector import collector_paused
from fusec.config import Config
from fusec.errors import FusecError, ImportFailure, OptionError
from fusec.frontend.decompositions import KEPT_WHOLE, decompositions
from fusec.frontend.fx import import_for_call
from fusec.frontend.predictions import corrected_predictions
from fusec.frontend.sources import called_module, input_names, input_weights
from fusec.frontend.torch_internals import (
    boxed,
    compile_through_aot,
    is_dynamos,
    kept_whole,
    min_cut_partition,
    outside_tracing,
    static_inputs,
    unrecordable,
)
from fusec.ir.graph import Graph
from fusec.ir.types import ScalarType
from fusec.reference.interpreter import bind_symbols, evaluate
from fusec.reference.layout import finalize_outputs
from fusec.reference.opaque import forget_registered
from fusec.tracing import start_trace, trace_event, traced

logger = logging.getLogger(__name__)

Boxed: TypeAlias = Callable[[list[Any]], Any]
"""A boxed function, as in AOTAutograd: takes and clears a list of arguments, and returns a list of results."""
CompileGraph: TypeAlias = Callable[[Graph, Config], Any]
"""Returns an object whose ``program`` is Boxed; remarks of the import are added before its ``remarks``, if any."""

start_trace(os.environ.get("FUSEC_TRACE", ""))
_compiled: list[Any] = []
_fallbacks: list[str] = []


def backend(
    gm: GraphModule, example_inputs: list[Any], mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="fusec", mode=…, options=…)``, called for each graph.

    Raises:
        OptionError: for an unknown mode or option, or a value of another type.
    """
    from fusec.compiler import compile_graph

    return _compile(gm, example_inputs, Config.from_options(mode, options), compile_graph)


def backend_with(compile_graph: CompileGraph, config: Config | None = None) -> Callable[..., Any]:
    """The same backend around another compiler of single graphs, for the options of each compile or fixed ones."""

    def custom(
        gm: GraphModule, example_inputs: list[Any], mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        return _compile(gm, example_inputs, config or Config.from_options(mode, options), compile_graph)

    custom.reset = reset  # type: ignore[attr-defined]
    return custom


def backend_for(config: Config, compile_graph: CompileGraph | None = None) -> Callable[..., Any]:
    """Return the backend for a fixed configuration, with fusec's compiler of single graphs or another one."""
    from fusec import compiler

    return backend_with(compile_graph or compiler.compile_graph, config)


def compiled_graphs() -> list[Any]:
    """Return what has been compiled in this process, in order: a ``fusec.compiler.Compiled`` per graph."""
    return list(_compiled)


def fallbacks() -> list[str]:
    """Return the reasons for which whole graphs were left to ATen in this process."""
    return list(_fallbacks)


def reset() -> None:
    """Clear the records of compiled graphs; ``torch._dynamo.reset()`` calls it."""
    _compiled.clear()
    _fallbacks.clear()
    forget_registered()


backend.reset = reset  # type: ignore[attr-defined]


def _compile(gm: GraphModule, inputs: list[Any], config: Config, compile_graph: CompileGraph) -> Callable[..., Any]:
    try:
        return _through_aot(gm, inputs, config, compile_graph)
    except OptionError:
        raise
    except Exception as reason:
        if config.strict or is_dynamos(reason):
            raise
        program: Callable[..., Any] = compile_through_aot(gm, inputs, fw_compiler=_as_it_came)  # may raise the same
        _fall_back(config, reason)
        return program


def _as_it_came(gm: GraphModule, example_inputs: list[Any]) -> Any:
    return boxed(_run_module(gm))


def _through_aot(gm: GraphModule, inputs: list[Any], config: Config, compile_graph: CompileGraph) -> Callable[..., Any]:
    trains, names = _trains(gm, inputs), input_names(gm)
    weights = input_weights(gm, inputs) if config.freeze and not trains else frozenset()
    if config.trace or config.report:
        compile_graph = _noting_sites(compile_graph)

    def compiler(graph_module: GraphModule, example_inputs: list[Any]) -> Any:
        static = None if trains else static_inputs()
        with outside_tracing(), collector_paused():
            return boxed(_compile_aten(graph_module, names, weights, static, config, compile_graph))

    with nullcontext() if trains else kept_whole(KEPT_WHOLE), corrected_predictions():
        program: Callable[..., Any] = compile_through_aot(
            gm,
            inputs,
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=decompositions(),
            partition_fn=min_cut_partition,
            keep_inference_input_mutations=True,
        )
    return program


def _noting_sites(compile_graph: CompileGraph) -> CompileGraph:
    """Return a compiler of single graphs that notes the sites of the model that is called now."""
    sites: tuple[Site, ...] = ()
    try:
        sites = tuple(sites_of(module)) if (module := called_module()) is not None else ()
    except Exception as reason:  # whatever a user's module raises, it is compiled
        logger.warning("the sites of the model are not in the trace: %s: %s", type(reason).__name__, reason)

    def noting(graph: Graph, config: Config) -> Any:
        compiled = compile_graph(graph, config)
        if hasattr(compiled, "records"):
            compiled.sites = sites
        return compiled

    return noting


def _trains(gm: GraphModule, inputs: list[Any]) -> bool:
    """Return whether AOTAutograd may build a backward graph."""
    if not torch.is_grad_enabled():
        return False
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)] + list(gm.parameters())
    return any(x.requires_grad for x in tensors)


def _compile_aten(
    gm: GraphModule,
    names: Sequence[str],
    weights: frozenset[int],
    static: frozenset[int] | None,
    config: Config,
    compile_graph: CompileGraph,
) -> Boxed:
    """Compile one ATen graph into a program; failures are reported, and the model still runs.

    ``static`` are the inputs whose memory is the same in every call, None in training.
    """
    try:
        imported = import_for_call(gm, names, weights)
        with traced(imported.graph, config) as write:
            compiled = compile_graph(imported.graph, config)
            write(compiled)
        getattr(compiled, "remarks", [])[:0] = imported.remarks
        program = imported.callable(_recorded(compiled, gm, static) if config.cuda_graphs else compiled.program)
        program = _for_assumed_calls(program, imported.graph, gm, config)
    except OptionError:
        raise
    except Exception as reason:
        _fall_back(config, reason)
        return _run_module(gm)
    _compiled.append(compiled)
    if config.report and hasattr(compiled, "records"):
        fusec.write_report(config.report, compiled)  # by name: the page is in a layer above this one
    return program


def _for_assumed_calls(program: Boxed, graph: Graph, gm: GraphModule, config: Config) -> Boxed:
    """Return a program for calls that are as the IR assumes; others run through ATen.

    Symbolic numbers are positive. A base is as long as it was when the graph was compiled: AOTAutograd makes one of the
    memory that inputs share, and while it compiles only as far as they reach.
    """
    numbers = [v for v in graph.inputs if isinstance(v.type, ScalarType) and isinstance(v.type.expr, sympy.Symbol)]
    positions, lengths = [v.index for v in numbers], _lengths_of_bases(gm)
    if not positions and not lengths:
        return program
    instead, reported = _run_module(gm), list[str]()

    def run(args: list[Any]) -> list[Any]:
        positive = all(args[i] > 0 for i in positions)
        if positive and all(args[i].shape[0] == length for i, length in lengths.items()):
            return program(args)
        found = "inputs that share a part of longer memory"
        if not positive:
            found = "a number that is not positive: "
            found += ", ".join(f"{v.name}={args[v.index]}" for v in numbers if args[v.index] < 1)
        if config.strict:
            raise ImportFailure(
                f"a graph is called with {found}",
                why="kernels are for positive sizes and one length of memory; ATen runs others unless `strict`",
                fix="compile with dynamic=False, or hand it over as a tensor" if not positive else "pass one tensor",
            )
        if not reported:
            reported.append(found)
            _fallbacks.append(found)
            logger.warning("fusec runs a graph through ATen where it is called with %s", found)
        return instead(args)

    return run


def _lengths_of_bases(gm: GraphModule) -> dict[int, int]:
    """Return the length of each input that may be a base of others: flat, and read through views by strides."""
    nodes = enumerate(gm.graph.find_nodes(op="placeholder"))
    bases = {i: n.meta["val"] for i, n in nodes if any(u.target is torch.ops.aten.as_strided.default for u in n.users)}
    tensors = ((i, v) for i, v in bases.items() if isinstance(v, torch.Tensor) and v.ndim == 1)
    return {i: v.shape[0] for i, v in tensors if isinstance(v.shape[0], int)}


def _recorded(compiled: Any, gm: GraphModule, static: frozenset[int] | None) -> Boxed:
    """A program whose launches are recorded, where that can be and it is one of fusec's own."""
    from fusec.codegen.program.program import Program
    from fusec.codegen.program.recordings import recorded

    program: Boxed = compiled.program
    if not isinstance(program, Program):
        return program
    return recorded(program, compiled.graph, static, compiled.remarks, partial(unrecordable, gm))


def _fall_back(config: Config, reason: Exception) -> None:
    """Record a graph that is left to ATen, with the reason; raise it under ``strict``."""
    if config.strict:
        raise reason
    said = reason.reason if isinstance(reason, FusecError) else reason
    _fallbacks.append(f"{type(reason).__name__}: {said}")
    trace_event(config, "fallback", _fallbacks[-1])
    logger.warning("fusec could not compile a graph, which now runs through ATen: %s", reason)
    logger.debug("the compile failed here", exc_info=reason)


def interpreted(graph: Graph) -> Boxed:
    """Return a program that runs a graph node by node through ATen, with the layouts that the graph declares."""

    def run(args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        symbols = bind_symbols(graph, given)
        return finalize_outputs(graph, evaluate(graph, given, symbols, mutate=True), given, symbols)

    return run


def _run_module(gm: GraphModule) -> Boxed:
    """Run the original graph."""

    def run(args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        return list(gm(*given))

    return run
