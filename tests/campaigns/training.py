"""Is training right: loss and every gradient of one step, and on some models the losses of fifty?

``python -m tests.campaigns.training``
"""

import argparse
import copy
import warnings
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import nn

from bench.families import FAMILIES, Family, chosen
from bench.harness import progress, report
from bench.numerics import DTYPES
from bench.peers import Runner, backend_named, compiled_with
from tests.campaigns.gradients import batch, compare_gradients, loss_of
from tests.campaigns.record import write_result

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
            steps = options.steps if family.name in options.stepped.split(",") else 0
            found.append(train(family, options.backend, options.dtypes.split(","), steps, options.seed))
            bar.advance(task)
    console.print(_table(found))
    content = {"backend": options.backend, "models": [asdict(t) | {"drift": t.drift} for t in found]}
    content["passed"] = all(t.passed for t in found)
    name = "training" if options.backend == "fusec" else f"training-{options.backend}"
    console.print(f"written to {write_result(name, options.seed, content, options.json)}", style="dim", highlight=False)
    return int(not content["passed"])


def train(family: Family, backend: str, dtypes: list[str], steps: int, seed: int) -> Training:
    """Gradients in each dtype, then steps, if any, in float32."""
    ratios, places, passed = {}, {}, True
    for dtype in dtypes:
        comparisons = compare_gradients(family, backend_named(backend), DTYPES[dtype], seed)
        place, comparison = max(comparisons.items(), key=lambda item: (not item[1].passed, item[1].ratio))
        passed &= comparison.passed
        ratios[dtype], places[dtype] = comparison.ratio, f"{place} {comparison.message}".strip()
    if not steps:
        return Training(family.name, ratios, places, passed, [], [])
    torch._dynamo.reset()
    start = family.build(seed=seed).train()
    eager_model, compiled_model = copy.deepcopy(start), start
    runner = compiled_with(compiled_model, backend_named(backend))
    eager_losses = _steps(eager_model, eager_model, family, steps, seed)
    losses = _steps(runner, compiled_model, family, steps, seed)
    return Training(family.name, ratios, places, passed, eager_losses, losses)


def _steps(runner: Runner, model: nn.Module, family: Family, steps: int, seed: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(runner, batch(family, seed + step % 4))  # few batches, so that there is something to learn
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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
            f"{t.drift:.1e}" if t.losses else "-",
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.training", description=__doc__)
    add = parser.add_argument
    add("--models", default="", metavar="A,B", help=f"by default all: {', '.join(FAMILIES)}")
    add("--stepped", default="gpt2,llama", metavar="A,B", help="decoders that also take steps")
    add("--dtypes", default="float32,bfloat16", metavar="A,B", help="of the gradients; the steps are in float32")
    add("--steps", type=int, default=50)
    add("--backend", default="fusec", help="fusec, interpreter, inductor, aot_eager or eager")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/training.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
