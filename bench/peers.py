"""The ways to run a model that are compared, each compiled as it is at its best."""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Backend = str | Callable[..., Any]
Runner = Callable[..., Any]
_PARAMETERS = signature(torch.compile).parameters
_ISOLATED: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in _PARAMETERS else {}
"""Compiles of one function are kept together otherwise: a call checks the guards of the others first, and after eight
none is compiled. Versions of torch before 2.13 cannot do this."""


def backend_named(name: str) -> Backend:
    """What ``torch.compile`` takes; fusec's is imported, so that it need not be installed.

    "interpreter" runs fusec's imported graph node by node: it tells the frontend's errors from the compiler's.
    """
    if name == "interpreter":
        return _interpreter()
    if name != "fusec":
        return name
    from fusec.dynamo import backend

    return backend


def _interpreter() -> Backend:
    from fusec.dynamo import backend_with, interpreted

    return backend_with(lambda graph, config: SimpleNamespace(program=interpreted(graph)))


def eager(model: nn.Module, dynamic: bool | None = None) -> Runner:
    """Torch without a compiler."""
    return model


def fusec(model: nn.Module, dynamic: bool | None = None) -> Runner:
    """This compiler."""
    return compiled_with(model, backend_named("fusec"), dynamic)


def fusec_frozen(model: nn.Module, dynamic: bool | None = None) -> Runner:
    """The same with weights laid out for it, and what follows from them alone done once."""
    return compiled_with(model, backend_named("fusec"), dynamic, {"freeze": True})


def inductor(model: nn.Module, dynamic: bool | None = None) -> Runner:
    """Torch's own compiler as most people use it."""
    return compiled_with(model, "inductor", dynamic)


def inductor_frozen(model: nn.Module, dynamic: bool | None = None) -> Runner:
    """Torch's own compiler at its fastest, with the weights as constants.

    As an *option* of ``torch.compile`` freezing has no effect; it must be in force while the first call is traced,
    and under a backend of its own, or the code of an earlier compile of the same model is used again.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def frozen(graph: Any, example_inputs: Any) -> Any:
        return compile_fx(graph, example_inputs)

    compiled = compiled_with(model, frozen, dynamic)
    first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not first:
            return compiled(*args, **kwargs)
        first = False
        with config.patch({"freezing": True, "max_autotune": True, "cpp.enable_concat_linear": True}):
            return compiled(*args, **kwargs)

    return run


def openvino(model: nn.Module, dynamic: bool | None = None) -> Runner:
    """OpenVINO's backend, held to float32 where the model is: by itself it computes in bfloat16 where it can."""
    import openvino.torch  # noqa: F401

    return compiled_with(model, "openvino", dynamic, {"config": {"INFERENCE_PRECISION_HINT": "f32"}})


def compiled_with(
    model: Runner,
    backend: Backend,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Runner:
    """``torch.compile``; "eager" too goes through Dynamo."""
    return torch.compile(model, backend=backend, dynamic=dynamic, options=options, mode=mode, **_ISOLATED)


PEERS: dict[str, Callable[[nn.Module, bool | None], Runner]] = {
    "eager": eager,
    "inductor": inductor,
    "inductor frozen": inductor_frozen,
    "openvino": openvino,
    "fusec": fusec,
    "fusec frozen": fusec_frozen,
}
"""By the name they have in tables; any other name is a backend of ``torch.compile``, with a mode behind it or none."""


def peer(name: str, model: nn.Module, dynamic: bool | None = None) -> Runner:
    """The model run by a peer."""
    if name in PEERS:
        return PEERS[name](model, dynamic)
    backend, _, mode = name.partition(" ")
    return compiled_with(model, backend_named(backend), dynamic, mode=mode or None)
