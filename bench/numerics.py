"""The float64 truth that eager and compiled outputs are held against, and models in the dtype asked for.

One run is one draw of rounding errors on either side, and where there are few numbers the largest of one draw is now
and then more than twice that of another, whoever drew it. So the weights move to neighbouring numbers again and again:
each time the problem is as hard as before, every rounding is drawn anew, and eager, fusec and float64 get the same
weights. The rule is held as it stands, over all these runs together: what is worse is so on the whole, and luck evens
out.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
USUAL = ("float32", "bfloat16")
"""Those that are asked for unless others are."""
DRAWS = 8
"""Runs that are held to the rule together."""


class Float64(TorchDispatchMode):
    """Float32 islands of a model (norms, rotary angles, softmax) in float64 as well, so that the reference is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


def reference_outputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """What the model computes in float64, with the same (already rounded) weights and inputs."""
    doubled = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, dict(inputs))
    with torch.no_grad(), Float64(), default_type(torch.float64):
        return tensors_of(in_float64(model)(**doubled))


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Have torch make floating-point tensors of this type meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(model: nn.Module) -> nn.Module:
    """A copy of the model, with its (already rounded) weights in float64."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if hasattr(module, "config"):
            # The grouped product of torch takes no float64.
            module.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return exact


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a model's output, in order."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model as transformers loads it in a dtype: parameters are rounded, of the buffers those that follow them.

    Rotary frequencies stay float32, and so does what a class keeps so; tables of positions and biases do not.
    """
    if dtype == torch.float32:
        return model
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind: Any = type(model)
    config = copy.deepcopy(model.config)
    loaded: nn.Module = kind.from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=dtype)
    return loaded.train(model.training)


def cast_inputs(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the inputs that are real numbers."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}


@torch.no_grad()
def move_weights(model: nn.Module, seed: int) -> None:
    """Every weight becomes the next number up or down, by chance."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=draw) < 0.5
        parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)))
