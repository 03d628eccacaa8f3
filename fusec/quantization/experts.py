"""Stacks of matrices, as mixtures of experts keep them: stored as codes and scales, unpacked where they are read."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusec.errors import OptionError
from fusec.quantization.formats import Format, Parts
from fusec.quantization.rounding import round_to_nearest


class Unpacked(nn.Module):
    """The parametrization of a weight that is computed from codes and scales."""

    def __init__(self, format: Format, parts: Parts) -> None:
        super().__init__()
        self.format, self.names, self._parts = format, tuple(parts), parts

    def forward(self, *parts: Tensor) -> Tensor:
        """Return the weight, in the dtype of its scales."""
        named = dict(zip(self.names, parts, strict=True))
        return self.format.unpack(named, named["scale"].dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the parts that are stored in the place of the weight."""
        return tuple(self._parts.values())


def stacked_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the [matrices, rows, columns] weights of experts by name.

    They are those of modules that ``transformers`` marks as experts whose matrices multiply rows as ``nn.Linear`` does.
    """
    return dict(_stacks(model))


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        if getattr(module, "is_transposed", None) is False:
            for own, parameter in module.named_parameters(name, recurse=False):
                if parameter.ndim == 3 and parameter.is_floating_point():
                    yield own, parameter


def quantize_stack(model: nn.Module, name: str, format: Format) -> tuple[int, float]:
    """Replace a stack by codes and scales, in place; return their bytes, and the relative error of the weight.

    Raises:
        OptionError: as ``Format.groups``, or if the format quantizes inputs, which experts do not let see.
    """
    if format.activations:
        raise OptionError(f"the inputs of experts have no format {format.name}", fix="choose a format of weights alone")
    owner, _, attribute = name.rpartition(".")
    module, weight = model.get_submodule(owner), model.get_parameter(name)
    dense, stack = weight.detach(), weight.shape[:-1]
    flat = round_to_nearest(dense.reshape(-1, dense.shape[-1]), format)
    parts = {key: part.reshape(*stack, -1) if part.ndim == 2 else part for key, part in flat.items()}
    weight.requires_grad_(False)
    parametrize.register_parametrization(module, attribute, Unpacked(format, parts), unsafe=True)
    error = (getattr(module, attribute).float() - dense.float()).norm() / dense.float().norm().clamp(min=1e-30)
    return sum(part.nbytes for part in parts.values()), float(error)
