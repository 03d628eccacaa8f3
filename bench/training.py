"""Is training right: loss, every gradient, and fifty steps?

``python -m bench.training``
"""

import argparse
import copy
import warnings
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor, nn

from bench.families import Family, Inputs, chosen
from bench.harness import progress, report
from bench.models import DTYPES
from bench.numerics import Float64, cast_parameters
from bench.peers import Runner, backend_named, compiled_with
from bench.record import write_result
from fusec.verify.contract import Comparison, compare_outputs

TOLERANCE = 1e-4
"""How far a loss may be from eager's at any step, relative to it."""


@dataclass
class Training:
    """What was found about one model."""

    model: str
    gradients: dict[str, float]
    """Per dtype, the worst error of loss and gradients over its bound."""
    worst_gradient: dict[str, str]
    """Per dtype, whose that is."""
    gradients_passed: bool
    eager_losses: list[float]
    losses: list[float]

    @property
    def drift(self) -> float:
        """Largest relative distance from eager's loss over the steps."""
        return max((abs(f - e) / abs(e) for f, e in zip(self.losses, self.eager_losses, strict=True)), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether gradients and losses are within their bounds."""
        return self.gradients_passed and self.drift <= TOLERANCE


def main(words: list[str] | None = None) -> int:
    """Check every model asked for; status 1 when one fails."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    console, found = report(options.width), []
    with progress() as bar:
        families = chosen(options.models)
        task = bar.add_task("train", total=len(families))
        for family in families:
            bar.update(task, description=family.name)
            found.append(train(family, options.backend, options.dtypes.split(","), options.steps, options.seed))
            bar.advance(task)
    console.print(_table(found))
    content = {"backend": options.backend, "models": [asdict(t) | {"drift": t.drift} for t in found]}
    content["passed"] = all(t.passed for t in found)
    name = "training" if options.backend == "fusec" else f"training-{options.backend}"
    console.print(f"written to {write_result(name, options.seed, content, options.json)}", style="dim", highlight=False)
    return int(not content["passed"])


def train(family: Family, backend: str, dtypes: list[str], steps: int, seed: int) -> Training:
    """Gradients in each dtype, then steps in float32."""
    ratios, places, passed = {}, {}, True
    for dtype in dtypes:
        torch._dynamo.reset()
        place, comparison = _worst_gradient(family, backend, DTYPES[dtype], seed)
        passed &= comparison.passed
        ratios[dtype], places[dtype] = comparison.ratio, f"{place} {comparison.message}".strip()
    torch._dynamo.reset()
    start = family.build(seed=seed).train()
    eager_model, compiled_model = copy.deepcopy(start), start
    runner = compiled_with(compiled_model, backend_named(backend))
    eager_losses = _steps(eager_model, eager_model, family, steps, seed)
    losses = _steps(runner, compiled_model, family, steps, seed)
    return Training(family.name, ratios, places, passed, eager_losses, losses)


def _worst_gradient(family: Family, backend: str, dtype: torch.dtype, seed: int) -> tuple[str, Comparison]:
    model = cast_parameters(family.build(seed=seed).train(), dtype)
    inputs = _batch(family, seed)
    exact = copy.deepcopy(model).double()
    compiled = compiled_with(model, backend_named(backend))
    expected = _loss_and_gradients(model, model, inputs)
    found = _loss_and_gradients(compiled, model, inputs)
    with Float64():
        reference = _loss_and_gradients(exact, exact, inputs)
    if found.keys() != expected.keys():
        missing = ", ".join(sorted(found.keys() ^ expected.keys()))
        return missing, Comparison((), "has a gradient on one side only")
    comparisons = {name: compare_outputs(expected[name], found[name], reference[name], dtype) for name in expected}
    return max(comparisons.items(), key=lambda item: (not item[1].passed, item[1].ratio))


def _loss_and_gradients(runner: Runner, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = _loss(runner, inputs)
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _steps(runner: Runner, model: nn.Module, family: Family, steps: int, seed: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = _loss(runner, _batch(family, seed + step % 4))  # few batches, so that there is something to learn
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _batch(family: Family, seed: int) -> Inputs:
    return family.sample(4, 16, "right", seed)


def _loss(runner: Runner, inputs: Inputs) -> Tensor:
    """Next-token loss in float32 or better, as training scripts take it; padding does not count."""
    logits = runner(**inputs).logits[:, :-1]
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _table(found: list[Training]) -> Table:
    shown = Table(title="Training")
    for column in ("model", "", "gradients (error over its bound)", "worst at", "loss, first to last", "drift"):
        shown.add_column(column)
    for t in found:
        shown.add_row(
            t.model,
            "[green]pass[/]" if t.passed else "[red]FAIL[/]",
            ", ".join(f"{dtype} {ratio:.3f}" for dtype, ratio in t.gradients.items()),
            ", ".join(dict.fromkeys(t.worst_gradient.values())),
            f"{t.losses[0]:.3f} to {t.losses[-1]:.3f}" if t.losses else "-",
            f"{t.drift:.1e}",
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    add = parser.add_argument
    add("--models", default="gpt2,llama", metavar="A,B", help="decoders")
    add("--dtypes", default="float32,bfloat16", metavar="A,B", help="of the gradients; the steps are in float32")
    add("--steps", type=int, default=50)
    add("--backend", default="fusec", help="fusec, interpreter, inductor, aot_eager or eager")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default bench/results/training.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
