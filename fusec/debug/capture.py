"""Capture a model with sample inputs as graphs or compiles, through torch.compile itself, as a user would."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from fusec.config import Config
from fusec.debug.subject import Subject, subject_of
from fusec.debug.timing import Stopwatch
from fusec.errors import FusecError
from fusec.ir.graph import Graph
from fusec.remarks import Remark


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture and compile."""

    dynamic: bool = False
    """Sizes become symbols."""
    train: bool = False
    """The backward graph is captured too."""
    time: bool = False
    """Each program runs on its inputs for about a second, and its steps are timed."""


class NothingCaptured(FusecError):
    """A model that produced no graph."""


def capture(
    model: Callable[..., Any], *inputs: Any, dynamic: bool = False, train: bool = False, **keywords: Any
) -> list[Graph]:
    """The graphs of a model as imported, with no pass run on them: one where nothing breaks, two in training.

    Args:
        model: a module or function of tensors; it is called once on ``inputs`` and ``keywords``.
        inputs: sample inputs.
        dynamic: make sizes symbols.
        train: capture the backward graph too.
        keywords: further sample inputs, by name.

    Raises:
        NothingCaptured: where no graph was produced.
    """
    return [graph for graph, _ in captured_calls(model, inputs, keywords, dynamic=dynamic, train=train)]


def captured_calls(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    dynamic: bool = False,
    train: bool = False,
) -> list[tuple[Graph, list[Any]]]:
    """Return the same graphs, each with the arguments it was called with.

    Raises:
        NothingCaptured: where no graph was produced.
    """
    return captured_run(model, inputs, keywords, CaptureOptions(dynamic, train))[0]


def captured_run(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    options: CaptureOptions,
    mutate: bool = False,
    config: Config | None = None,
) -> tuple[list[tuple[Graph, list[Any]]], Any]:
    """Return these graphs and arguments, and the results of the call, in which the interpreter runs the graphs.

    Args:
        model: as for ``capture``, as are ``inputs`` and ``keywords``.
        inputs: sample inputs.
        keywords: further ones.
        options: of the capture.
        mutate: whether the graphs update their inputs, as in a call of the model.
        config: the user's options, some of which the import reads; by default those of the environment.

    Raises:
        NothingCaptured: where no graph was produced.
    """
    from fusec.dynamo import backend_with, fallbacks, interpreted
    from fusec.reference.contract import copy_arguments
    from fusec.reference.interpreter import evaluate

    found: list[tuple[Graph, list[Any]]] = []

    def kept(graph: Graph, config: Config) -> Any:
        first, changes = list[Any](), mutate and bool(graph.written_inputs)
        found.append((graph.copy(), first))

        def program(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()
            first[:] = first or (copy_arguments(given) if changes else given)
            return interpreted(graph)(given) if mutate else evaluate(graph, given)

        return SimpleNamespace(program=program)

    with _kept_log():
        failed = len(fallbacks())
        results = run_compiled(model, backend_with(kept, config), inputs, keywords, options)
        return _checked(found, fallbacks()[failed:]), results


def compile_model(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    options: CaptureOptions = CaptureOptions(),
    *,
    config: Config | None = None,
    title: str = "",
    keep: bool = False,
) -> list[Subject]:
    """Return the compiles of one call of the model, with the graph before and after every pass.

    Graphs that could not be compiled at all are remarks of the last one. With ``keep``, those that were compiled before
    are read from the cache, and run by the interpreter.

    Raises:
        NothingCaptured: where no graph was produced.
    """
    from fusec.debug.kept import compile_kept
    from fusec.dynamo import backend_for, compiled_graphs, fallbacks

    config = replace(config or Config.from_environment(), record=True)
    watch, watched = Stopwatch(), options.time or config.verify
    chosen = backend_for(config, watch.compile if watched else compile_kept if keep else None)
    count, failed = len(compiled_graphs()), len(fallbacks())
    run_compiled(model, chosen, inputs, keywords or {}, options)
    reasons = fallbacks()[failed:]
    found = [_titled(c, title) for c in _checked(compiled_graphs()[count:], reasons)]
    what = "a whole graph runs through ATen"
    failures = [Remark("failure", "compile", what, reason=reason) for reason in reasons]
    found[-1].remarks = (*found[-1].remarks, *failures)
    for subject in found if watched else ():
        if options.time:
            subject.timed(watch.timing(subject.final))
        if config.verify:
            subject.note_errors(partial(watch.errors, subject.final, config))
    return found


def _titled(compiled: Any, title: str) -> Subject:
    kept = getattr(compiled, "subject", None)
    return replace(kept, title=title or kept.title) if kept else subject_of(compiled, title)


def run_compiled(
    model: Callable[..., Any],
    backend: Callable[..., Any] | str,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    options: CaptureOptions,
) -> Any:
    """Call a model, compiled by a backend, once; return its results, in training with the gradients."""
    import torch

    compiled = torch.compile(model, backend=backend, dynamic=options.dynamic or None)
    # The user's own compiles of this model are preserved, and do not count towards torch's limit.
    with torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6):
        return call_model(model, inputs, keywords, options.train, compiled)


def call_model(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    train: bool,
    run: Callable[..., Any] | None = None,
) -> Any:
    """Call a model, or its compiled form ``run``, once as a capture does; return its results.

    In training they are a pair with the gradients of parameters and inputs.
    """
    import torch

    switched = isinstance(model, torch.nn.Module) and model.training != train
    with _mode(model, train) if switched else nullcontext(), nullcontext() if train else torch.no_grad():
        out = (model if run is None else run)(*inputs, **keywords)
        loss = sum(x.float().square().mean() for x in _floats(out)) if train else None
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            leaves = list(_leaves(loss))
            # unlike backward() it leaves every .grad as it is
            found = dict(zip(map(id, leaves), torch.autograd.grad(loss, leaves), strict=True))
            return out, [found.get(id(x)) for x in _arguments(model, inputs, keywords)]
        return out


def _arguments(model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Return parameters and inputs, in one order for a model and its copies."""
    import torch
    from torch.utils._pytree import tree_leaves

    own = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return [*own, *tree_leaves((list(inputs), dict(keywords)))]


def _leaves(loss: Any) -> Iterator[Any]:
    """The tensors that a gradient arrives at."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        step = pending.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        pending += [before for before, _ in step.next_functions]
        if hasattr(step, "variable"):
            yield step.variable


@contextmanager
def _mode(model: Any, train: bool) -> Iterator[None]:
    """Set training or evaluation mode within this context; restore it module by module."""
    was = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, training in was.items():
            module.training = training


@contextmanager
def _kept_log() -> Iterator[None]:
    """Restore the records of compiled graphs and fallbacks: a capture is no compile."""
    from fusec import dynamo

    compiled, fallen = list(dynamo._compiled), list(dynamo._fallbacks)
    try:
        yield
    finally:
        dynamo._compiled[:], dynamo._fallbacks[:] = compiled, fallen


def _floats(out: Any) -> Iterator[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(dict(out) if isinstance(out, Mapping) else out):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            yield leaf


def _checked(found: list[Any], reasons: Sequence[str]) -> list[Any]:
    if not found and reasons:
        fix = "options={'strict': True} raises the error itself"
        raise NothingCaptured("no graph of the model could be compiled", why="; ".join(reasons[:3]), fix=fix)
    if not found:
        raise NothingCaptured("the model produced no graph", why="it computes nothing on tensors")
    return found
