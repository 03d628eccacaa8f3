"""The private torch names that fusec uses, in one file; each has a fallback or a test."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

logger = logging.getLogger(__name__)
_EXCLUDED = "__dynamo_disable"
"""The attribute of a function in which torch keeps its form that Dynamo does not trace."""


def _decline(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _unless_differentiated(op: Any) -> Callable[..., Any]:
    """Return an operation's autograd kernel: decomposed where gradients are needed, as the whole operation has none.

    Tensor subclasses also get the decomposition: they need to implement dispatched operations only.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if transformed or differentiated or any(map(is_traceable_wrapper_subclass, tensors)):
            return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return call


@cache
def _is_autograd(key: Any) -> bool:
    """Return whether a dispatch key is one of autograd's; cached, as its name is slow to get."""
    return key.name.startswith("Autograd")


@contextmanager
def kept_whole(ops: tuple[Any, ...]) -> Iterator[bool]:
    """Keep these composite operations whole in traces within this context, where no gradient is computed.

    Yields True where torch supports that; otherwise they are imported decomposed, with equal results.
    """
    try:
        from torch.export.exported_program import _override_composite_implicit_decomp
    except ImportError:
        logger.warning("this torch version cannot keep composite operations whole; they are imported decomposed")
        yield False
        return
    with _override_composite_implicit_decomp(dict.fromkeys(ops, _decline)):
        for op in ops:
            for key in op.py_kernels:
                if _is_autograd(key):
                    op.py_kernels[key] = _unless_differentiated(op)
        yield True


def decomposition_table(ops: list[Any]) -> dict[Any, Any]:
    """Torch's own decompositions of these operations."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(ops))


def compile_through_aot(gm: torch.fx.GraphModule, inputs: list[Any], **compilers: Any) -> Any:
    """Run AOTAutograd on a Dynamo graph."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**compilers)(gm, inputs)


def is_dynamos(error: Exception) -> bool:
    """Return whether Dynamo itself handles an error, to restart its analysis for instance."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Suspend AOTAutograd's tracing within this context: tensors are real, and new traces have their own symbols."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), tracing(None):
        yield


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Let torch's reference functions run without the import of Dynamo within this context.

    They exclude themselves from Dynamo at their first call, which imports it. Where it is imported, nothing changes.
    """
    functions = _excluded() if "torch._dynamo" not in sys.modules else ()
    for function in functions:
        setattr(function, _EXCLUDED, function)
    try:
        yield
    finally:
        for function in functions:
            vars(function).pop(_EXCLUDED, None)  # another thread may have been first


@cache
def _excluded() -> list[FunctionType]:
    """Return the functions inside torch's reference functions that a decorator excludes from Dynamo."""
    decorators = torch._disable_dynamo(_decline).__code__  # type: ignore[attr-defined]
    names = ("torch._refs", "torch._refs.nn.functional")
    pending = [f for name in names for f in vars(import_module(name)).values() if isinstance(f, FunctionType)]
    found: dict[int, FunctionType] = {}
    seen = set[FunctionType]()
    while pending:
        if (function := pending.pop()) in seen:
            continue
        seen.add(function)
        inner = [f for cell in function.__closure__ or () if isinstance(f := cell.cell_contents, FunctionType)]
        found |= {id(f): f for f in inner if function.__code__ is decorators}
        pending += inner
    return list(found.values())


def static_inputs() -> frozenset[int]:
    """Return the inputs of AOTAutograd's current graph whose memory stays the same from call to call.

    Parameters, buffers, and tensors that ``torch._dynamo.mark_static_address`` names, as caches are; none outside of
    a compile.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return frozenset(context.fw_metadata.static_input_indices) if context and context.fw_metadata else frozenset()


def unrecordable(gm: torch.fx.GraphModule) -> str:
    """Return the first operation of a graph that torch excludes from CUDA graphs; empty where there is none."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    found = get_first_incompatible_cudagraph_node(gm)
    return "" if found is None else str(found.target)


def storage_key(value: Any) -> int | None:
    """A number that two fake tensors have in common exactly when they share their storage."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def position_of_input(node: torch.fx.Node) -> int | None:
    """Return the index of the Dynamo graph's input behind a placeholder of AOTAutograd's graph; None if unknown."""
    described: Any = node.meta.get("desc")
    return described.idx if type(described).__name__ == "PlainAOTInput" else None


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _inductors_allocation() -> Any:
    try:
        return getattr(import_module("torch._C._dynamo.guards"), "_empty_strided_cpu", _empty_strided)
    except ImportError:
        return _empty_strided


empty_on_cpu = _inductors_allocation()
"""Allocates a CPU tensor by shape, strides and dtype; Inductor's function has a third of the overhead."""


def boxed(function: Any) -> Any:
    """Mark a function for AOTAutograd as taking its arguments in one list, which it clears."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    """Split a joint graph so that little is saved between forward and backward."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def carried_by_torch(kind: str, restore: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
    """Let ``torch.compiler.save_cache_artifacts()`` save files of a kind; return the function that adds one by name.

    ``restore`` is called for each that ``torch.compiler.load_cache_artifacts()`` brings. Where torch cannot do that,
    nothing is saved.
    """
    try:
        from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
    except ImportError:
        logger.warning("this torch version cannot save artifacts; kernels are built again elsewhere")
        return lambda name, content: None

    class Artifact(CacheArtifact):
        def populate_cache(self) -> None:
            restore(self.key, self.content)

        @staticmethod
        def type() -> str:
            return kind

    CacheArtifactFactory.register(Artifact)
    return partial(CacheArtifactManager.record_artifact, kind)


@contextmanager
def predictions_corrected(operations: Collection[Any], correct: Callable[..., Any]) -> Iterator[None]:
    """Replace the results of fake functions by those of ``correct`` within this context.

    Args:
        operations: the overloads whose fake functions are concerned.
        correct: is called with the overload, its positional and keyword arguments, and the prediction.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatch = FakeTensorMode.dispatch

    def corrected(mode: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        predicted = dispatch(mode, operation, types, args, kwargs or {})
        if predicted is NotImplemented or operation not in operations:
            return predicted
        with mode:
            return correct(operation, args, kwargs or {}, predicted)

    FakeTensorMode.dispatch = corrected  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def listen(heard: Callable[[str, str, str], None]) -> None:
    """Call a function with name, payload and compile of each artifact in torch's structured trace."""
    try:
        from torch._logging._internal import trace_log
    except ImportError:
        logger.warning("this torch version has no structured trace: recompiles and graph breaks are not in the trace")
        return

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            metadata = getattr(record, "metadata", {})
            if isinstance(about := metadata.get("artifact"), dict):
                compile = f"{metadata.get('frame_id', '')}/{metadata.get('frame_compile_id', '')}"
                heard(str(about.get("name", "")), str(getattr(record, "payload", "") or ""), compile)

    trace_log.addHandler(Handler())
    trace_log.setLevel(logging.DEBUG)


def artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (``TORCH_TRACE``), where one is written."""
    try:
        from torch._logging._internal import trace_log, trace_structured_artifact
    except ImportError:
        return
    if trace_log.handlers:
        trace_structured_artifact(name, "string", payload)


def is_profiling() -> bool:
    """Return whether a profiler of torch records events."""
    return torch.autograd.profiler._is_profiler_enabled
