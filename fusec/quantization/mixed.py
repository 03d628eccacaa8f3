"""Mixed precision: the layers whose rounding changes a model's result most have eight bits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from fusec.errors import OptionError
from fusec.quantization.formats import Format, format_named
from fusec.quantization.linear import QuantizedLinear

Layers = Mapping[str, nn.Module]
"""Layers of a model by name."""


def replace_layers(model: nn.Module, layers: Layers) -> None:
    """Replace layers of a model, in place."""
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def mixed_layers(
    model: nn.Module,
    made: Mapping[str, QuantizedLinear],
    rounded: Callable[[str, Format], QuantizedLinear],
    cosines: Callable[[], Tensor],
    least: float,
    shown: Callable[[list[str]], Iterable[str]],
) -> dict[str, QuantizedLinear]:
    """Return layers of which as few as possible have eight bits instead of four, while a cosine is kept.

    Layers are ordered by how far the mean cosine falls if they alone are quantized, for each byte that is saved; how
    many of them have eight bits is then found by bisection. The order is a simple form of the sensitivity analysis of
    Dong et al., "HAWQ" (2019).

    Args:
        model: the model, which is unchanged afterwards.
        made: layers with their weights quantized.
        rounded: returns a layer, by its name, in a format.
        cosines: returns the cosines between rows of the model's result and of what it was.
        least: the cosine that all of them have to reach.
        shown: iterates over names with a progress bar.

    Raises:
        OptionError: if they do not reach it with eight bits in all layers.
    """
    finer = {name: rounded(name, _finer(layer)) for name, layer in made.items() if layer.format.bits < 8}

    def cosines_with(layers: Layers) -> Tensor:
        with _replaced(model, layers):
            return cosines()

    losses = {name: 1 - float(cosines_with({name: made[name]}).mean()) for name in shown([*finer])}
    order = sorted(finer, key=lambda name: losses[name] / max(finer[name].nbytes - made[name].nbytes, 1), reverse=True)

    def mixed(count: int) -> dict[str, QuantizedLinear]:
        return {**made, **{name: finer[name] for name in order[:count]}}

    if cosines_with(mixed(0)).min() >= least:
        return mixed(0)
    few, enough = 0, len(order)
    if not (found := float(cosines_with(mixed(enough)).min())) >= least:  # nor is NaN, of infinite results
        fix = "leave some layers as they are, layers={pattern: None}, or ask for less"
        raise OptionError(f"the least cosine is {found:.5f} with eight bits", why=f"{least} is asked for", fix=fix)
    while enough - few > 1:
        count = (few + enough) // 2
        few, enough = (few, count) if cosines_with(mixed(count)).min() >= least else (count, enough)
    return mixed(enough)


def _finer(layer: QuantizedLinear) -> Format:
    """Return the format of eight bits for a layer that has four."""
    if layer.format.activations:
        return format_named("w8a8")
    return format_named("int8" if layer.in_features % 128 == 0 else "int8-row")


@contextmanager
def _replaced(model: nn.Module, layers: Layers) -> Iterator[None]:
    """Replace layers of a model for a while."""
    before = {name: model.get_submodule(name) for name in layers}
    replace_layers(model, layers)
    try:
        yield
    finally:
        replace_layers(model, before)
