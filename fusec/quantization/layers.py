"""The linear layers of a model, and the other modules with weights, which are left as they are."""

import sys
from collections.abc import Collection, Iterator

from torch import nn


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside of a model by name, each as an ``nn.Linear`` that shares its parameters.

    These are ``nn.Linear`` itself, since a subclass may be read by others than its ``forward``, and the ``Conv1D`` of
    ``transformers``, in GPT-2 and its like: a linear layer whose weight is stored as [in_features, out_features].
    """
    found = {name: _as_linear(module) for name, module in model.named_modules() if name}
    return {name: linear for name, linear in found.items() if linear is not None}


def other_weights(model: nn.Module, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of other modules that own parameters with two or more dims longer than 1, and what they are.

    Args:
        model: the model.
        known: names of modules and parameters that are not among the others.
    """
    for name, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(name, recurse=False) if n not in known}
        large = {n: p for n, p in own.items() if sum(size > 1 for size in p.shape) > 1}
        if large and name not in known:
            weights = ", ".join(f"{n.rpartition('.')[2]} {[*p.shape]}" for n, p in large.items())
            yield name or "the model itself", f"{type(module).__name__} is not replaced: {weights}"


def shared_weights(model: nn.Module) -> dict[int, str]:
    """Return the parameters that modules share, by identity, each with the name of one owner."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {key: names[0] for key, names in owners.items() if len(names) > 1}


def _as_linear(module: nn.Module) -> nn.Linear | None:
    if type(module) is nn.Linear:
        return module
    # A module of transformers is none unless that is imported.
    if type(module) is not getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None):
        return None
    weight: nn.Parameter = module.get_parameter("weight")
    rows, columns = weight.shape
    linear = nn.Linear(rows, columns, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=False)
    linear.bias = module.get_parameter("bias")
    return linear
