"""The gradients of one step against the numeric rule, over several draws of the rounding errors.

A gradient's error is often a few roundings far upstream, carried to all its elements. Eager's error is one draw of
that, fusec's another, and now and then two such draws are more than a factor of 2 apart, either way round. It shows
most where the true gradient vanishes: a key's bias moves all scores of a query alike, which softmax does not see, so
that its computed gradient is what rounding leaves of large terms that cancel.

A wider bound would hide errors. Instead the rule is held as it stands over several draws together (bench.numerics),
over more of them than outputs need: such a bias has about one draw for each head and run, whatever its length. Held
against itself, eager's largest error of 8 runs of RoBERTa was up to 2.06 times that of 8 others.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bench.families import Family, Inputs
from bench.numerics import DRAWS, Float64, cast_inputs, cast_parameters, in_float64, move_weights
from bench.peers import Backend, Runner, compiled_with
from fusec.reference.contract import Comparison, compare_outputs
from tests.campaigns.routing import Routed, scores_and_choices

RUNS = 4 * DRAWS
"""Runs that are held to the rule together."""
Gradients = dict[str, Tensor]
"""By parameter; and the loss."""


def compare_gradients(
    family: Family, backend: Backend, dtype: torch.dtype, seed: int = 0, draws: int = RUNS, dynamic: bool | None = None
) -> dict[str, Comparison]:
    """Judge the loss and the gradient of every parameter."""
    torch._dynamo.reset()  # past so many compiles of the same code it would run eager
    model = cast_parameters(family.build(seed=seed).train(), dtype)
    model = Routed(model) if family.routed else model
    compiled = compiled_with(model, backend, dynamic)
    runs = []
    for draw in range(draws):
        if draw:
            move_weights(model, seed + draw)
        runs.append(_run(family, model, compiled, cast_inputs(batch(family, seed), dtype)))
    one_sided = {name for expected, found, _ in runs for name in expected.keys() ^ found.keys()}
    comparisons = {name: Comparison((), "has a gradient on one side only") for name in sorted(one_sided)}
    for name in runs[0][0].keys() - one_sided:
        expected, found, reference = (torch.stack([side[name] for side in sides]) for sides in zip(*runs, strict=True))
        comparisons[name] = compare_outputs(expected, found, reference, dtype)
    return comparisons


def batch(family: Family, seed: int) -> Inputs:
    """What a step is taken on."""
    return family.sample(4, 16, "right", seed)


def loss_of(runner: Runner, inputs: dict[str, Any]) -> Tensor:
    """In float32 or better: of the next token, padding left out; without logits, the distance to random targets."""
    outputs = runner(**inputs)
    if not hasattr(outputs, "logits") and not isinstance(outputs, tuple):
        return torch.stack([_distance(t) for t in outputs.to_tuple()]).sum()
    logits = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    labels = inputs.get("decoder_input_ids")
    if labels is None:
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _run(family: Family, model: nn.Module, compiled: Runner, inputs: dict[str, Any]) -> tuple[Gradients, ...]:
    """The gradients of eager, of the compiled model and of float64."""
    exact = in_float64(model)
    exact_inputs: dict[str, Any] = cast_inputs(inputs, torch.float64)
    if family.routed:  # all get the choices of one; that they are right is for tests.campaigns.models to say
        with torch.no_grad(), Float64():
            forced = {"forced": scores_and_choices(exact(**exact_inputs))[1]}
        inputs, exact_inputs = inputs | forced, exact_inputs | forced
    expected, found = _gradients(model, model, inputs), _gradients(compiled, model, inputs)
    with Float64():
        return expected, found, _gradients(exact, exact, exact_inputs)


def _gradients(runner: Runner, model: nn.Module, inputs: dict[str, Any]) -> Gradients:
    model.zero_grad(set_to_none=True)
    loss = loss_of(runner, inputs)
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _distance(output: Tensor) -> Tensor:
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(output.ndim))
    return (output.float() - target).square().mean()
