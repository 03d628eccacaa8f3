"""Conversion of a model's linear layers to quantized weights, in place, with a report of size and accuracy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusec.errors import OptionError
from fusec.quantization.experts import quantize_stack, stacked_weights
from fusec.quantization.formats import Format, format_named
from fusec.quantization.layers import linear_layers, other_weights, shared_weights
from fusec.quantization.linear import QuantizedLinear
from fusec.quantization.mixed import mixed_layers, replace_layers
from fusec.quantization.report import QuantizationReport, QuantizedLayer
from fusec.quantization.rounding import round_for_inputs, round_to_nearest

Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
Sample: TypeAlias = Inputs | list[Any]
"""Inputs of a model, or a list of several."""


def quantize(
    model: nn.Module,
    format: str = "int8",
    *,
    layers: Mapping[str, str | None] | None = None,
    sample: Sample | None = None,
    min_cosine: float | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Replace the linear layers of a model by ones with quantized weights, in place.

    Those are ``nn.Linear`` and the ``Conv1D`` of ``transformers``. The stacked weights of its experts are stored as
    codes and scales too, rounded to nearest, as ``torch.nn.utils.parametrize`` does it. Other modules with weights of
    two or more dims, such as convolutions and embeddings, stay as they are, and the report names them.

    The new layers are plain PyTorch: they run in eager, keep gradients of their inputs, and their codes and scales are
    in the ``state_dict``. A model that is built and quantized the same way loads it.

    Args:
        model: the model; a linear layer itself has no parent to be replaced in, and stays.
        format: ``int8`` (groups of 128 columns), ``int4`` (groups of 64, with zero points), ``nf4`` (groups of 64), or
            one with other groups: ``int8-row`` (one for each row), ``int4-g32``; ``fp8`` (float8 E4M3, a scale for each
            row); or ``w8a8`` and ``w4a8``, which are ``int8-row`` and ``int4`` with inputs that are quantized to int8
            as well, row by row.
        layers: formats of layers by patterns of their names, as ``{"*.down_proj": "int8", "lm_head": None}``; the first
            matching pattern wins, and None leaves a layer as it is.
        sample: inputs of the model, a tuple or a dict of keywords, or a list of several; without padding, which would
            count as text. Weights are then rounded so that the results of their layers on it change least, and the
            report compares layers and model with what they were.
        min_cosine: the least cosine between a row of the model's first result on ``sample`` and before: layers of four
            bits get eight, those that change results most first, until it is kept. Every second input of a list is held
            out for that, and the others decide the rounding.
        progress: show a bar on a terminal.

    Returns:
        The report.

    Raises:
        OptionError: for an unknown format, a pattern that fits no linear layer, or a cosine that eight bits do not keep
            or that there is no sample for; the model is unchanged.
    """
    linears, stacks = linear_layers(model), stacked_weights(model)
    chosen, skipped = _choose(model, {**linears, **stacks}, format_named(format), layers or {})
    formats = {name: chosen.pop(name) for name in stacks if name in chosen}
    inputs = sample if isinstance(sample, list) else [] if sample is None else [sample]
    held_out: list[Inputs] = []
    if min_cosine is not None:
        _check_comparable(inputs, formats)
        inputs, held_out = inputs[::2], inputs[1::2] or inputs
    squares, before = _observe(model, chosen, inputs)

    def rounded(name: str, format: Format) -> QuantizedLinear:
        weight, observed = linears[name].weight.detach(), squares.get(name)
        parts = round_to_nearest(weight, format) if observed is None else round_for_inputs(weight, format, observed)
        return QuantizedLinear(linears[name], format, parts)

    made: dict[str, QuantizedLinear] = {}
    for name in _shown([*chosen], progress):
        try:
            made[name] = rounded(name, chosen[name])
        except OptionError as error:
            skipped[name] = error.reason
    if min_cosine is not None:
        dense = _run(model, held_out)
        made = mixed_layers(
            model, made, rounded, lambda: torch.cat(_all_cosines(dense, _run(model, held_out))), min_cosine,
            lambda names: _shown(names, progress),
        )  # fmt: skip
        inputs, before = [*inputs, *held_out], [*before, *dense]
    cosines = _cosines(model, made, inputs)
    replace_layers(model, made)
    rows = [_row(name, linears[name], layer, cosines.get(name)) for name, layer in made.items()]
    for name in _shown([*formats], progress):
        try:
            nbytes, lost = quantize_stack(model, name, formats[name])
        except OptionError as problem:
            skipped[name] = problem.reason
            continue
        rows.append(QuantizedLayer(name, formats[name].name, nbytes, stacks[name].nbytes, lost, None))
    after = _run(model, inputs)
    least = min((float(found.min()) for found in _all_cosines(before, after)), default=None)
    return QuantizationReport(tuple(rows), tuple(skipped.items()), least, _losses(before, after))


def _check_comparable(inputs: list[Inputs], stacks: Mapping[str, Format]) -> None:
    """Raise OptionError where no least cosine can be kept."""
    if not inputs:
        raise OptionError("min_cosine without a sample", why="results on it are compared", fix="pass sample=[…]")
    if stacks:
        why = "only linear layers get more bits"
        fix = "layers={" + ", ".join(f"{name!r}: None" for name in [*stacks][:2]) + "}"
        raise OptionError("min_cosine of a model with stacked experts", why=why, fix=fix)


def _choose(
    model: nn.Module,
    layers: Mapping[str, nn.Linear | nn.Parameter],
    usual: Format,
    given: Mapping[str, str | None],
) -> tuple[dict[str, Format], dict[str, str]]:
    """Return the format of each layer or stacked weight, and for the others why they have none."""
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise OptionError(f"no linear layer fits {pattern!r}", fix=f"there are {', '.join([*layers][:6])}, …")
    formats = {pattern: name and format_named(name) for pattern, name in given.items()}
    shared = shared_weights(model)
    chosen: dict[str, Format] = {}
    skipped: dict[str, str] = {}
    for name, layer in layers.items():
        weight = layer if isinstance(layer, nn.Parameter) else model.get_submodule(name).weight
        patterns = [p for p in given if fnmatchcase(name, p)]
        found = formats[patterns[0]] if patterns else usual
        if not found:
            skipped[name] = f"left out by {patterns[0]!r}"
        elif id(weight) in shared:
            skipped[name] = f"shares its weight with {shared[id(weight)]}"
        else:
            chosen[name] = found
    return chosen, skipped | dict(other_weights(model, layers))


def _shown(names: list[str], shown: bool) -> Iterator[str]:
    from rich.progress import track

    yield from track(names, "Quantizing", transient=True, disable=not shown)


def _observe(model: nn.Module, names: Iterable[str], sample: list[Inputs]) -> tuple[dict[str, Tensor], list[Any]]:
    """Run a model on a sample; return Σ xᵀ·x of the inputs of these layers, and the model's results."""
    squares: dict[str, Tensor] = {}

    def add(name: str, x: Tensor, output: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        squares[name] = squares.get(name, 0) + rows.T @ rows

    with _watching(model, names, add):
        return squares, _run(model, sample)


def _cosines(model: nn.Module, made: Mapping[str, QuantizedLinear], sample: list[Inputs]) -> dict[str, float]:
    """Return the least cosine between rows of the results of each layer on a sample, dense and quantized."""
    cosines: dict[str, float] = {}

    def compare(name: str, x: Tensor, output: Tensor) -> None:
        cosines[name] = min(cosines.get(name, 1.0), float(_row_cosines(output, made[name](x)).min()))

    with _watching(model, made, compare):
        _run(model, sample)
    return cosines


@contextmanager
def _watching(model: nn.Module, names: Iterable[str], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call a function with the name, the input and the output of each of these layers when it runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: see(name, inputs[0].detach(), output.detach())

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(model.get_submodule(name).register_forward_hook(hook(name)).remove)
        yield


def _run(model: nn.Module, sample: list[Inputs]) -> list[Any]:
    """Return the results of a model on each of the inputs of a sample."""
    with torch.no_grad():
        return [model(**inputs) if isinstance(inputs, Mapping) else model(*inputs) for inputs in sample]


def _row(name: str, linear: nn.Linear, layer: QuantizedLinear, cosine: float | None) -> QuantizedLayer:
    weight = linear.weight.detach().float()
    error = float((layer.dequantized(torch.float32) - weight).norm() / weight.norm().clamp(min=1e-30))
    return QuantizedLayer(name, layer.format.name, layer.nbytes, linear.weight.nbytes, error, cosine)


def _row_cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine between each row of two tensors; 1 where they are equal, as rows of zeros are."""
    a, b = (x.double().reshape(-1, x.shape[-1]) for x in (a, b))
    return torch.where((a == b).all(-1), 1.0, torch.cosine_similarity(a, b, dim=-1))


def _all_cosines(before: list[Any], after: list[Any]) -> list[Tensor]:
    """Return the cosines between rows of a model's first results, before and after."""
    return [_row_cosines(_first(b), _first(a)) for b, a in zip(before, after, strict=True)]


def _first(output: Any) -> Tensor:
    """Return the first floating-point tensor of a result that has rows."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return next(t for t in tensors if t.is_floating_point() and t.ndim)


def _losses(before: list[Any], after: list[Any]) -> tuple[float, float] | None:
    """Return the mean of the losses that a model returns, before and after; None where it returns none."""
    losses = [[float(out.loss) for out in some if getattr(out, "loss", None) is not None] for some in (before, after)]
    return (fmean(losses[0]), fmean(losses[1])) if all(losses) else None
