"""Mixtures of experts under the numeric rule: a router may choose otherwise only on a tie.

A choice is a step: an error within the rule can flip it, and what follows is then another, equally right, result.
So each run reports its routers' scores and choices, and where a choice differs, all are run again with the
reference's choices forced on them. The scores stay under the rule, and a choice must be the one that the run's own
scores imply.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS_OF = {
    "MixtralTopKRouter": lambda router, scores, choice: _normed(scores.float().softmax(-1).gather(1, choice)),
    "DeepseekV3TopkRouter": lambda router, scores, choice: (
        _normed(scores.sigmoid().gather(1, choice)) * router.routed_scaling_factor
    ),
}
"""The weights of chosen experts, per class of router."""


class Routed(nn.Module):
    """A model that also gives, for each router, its scores and its choice; and that takes choices from outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.forced: list[Tensor] | None = None
        self.seen: list[Tensor] = []
        for module in routers_of(model):
            module.register_forward_hook(self._record)

    def _record(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        scores, weights, choice = output
        index = len(self.seen) // 2
        self.seen += [scores, choice]
        if self.forced is None:
            return output
        forced = self.forced[index]
        return scores, WEIGHTS_OF[type(router).__name__](router, scores, forced).to(weights.dtype), forced

    def forward(self, forced: list[Tensor] | None = None, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Logits, then scores and choice of each router."""
        self.seen, self.forced = [], forced
        logits = self.model(**inputs).logits
        seen, self.seen, self.forced = self.seen, [], None
        return (logits, *seen)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers in the order they run."""
    return [m for m in model.modules() if type(m).__name__ in WEIGHTS_OF]


def scores_and_choices(outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those of each router."""
    return list(outputs[1::2]), list(outputs[2::2])


def flips(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """How many tokens got other experts."""
    _, found_choices = scores_and_choices(found)
    _, expected_choices = scores_and_choices(expected)
    return sum(
        int((f.sort(-1)[0] != e.sort(-1)[0]).any(-1).sum())
        for f, e in zip(found_choices, expected_choices, strict=True)
    )


def unfounded_choices(model: nn.Module, outputs: Sequence[Tensor]) -> int:
    """How many choices do not follow from the scores beside them, a rounding of the scores allowed."""
    count = 0
    for router, scores, choice in zip(routers_of(model), *scores_and_choices(outputs), strict=True):
        rounding = 2 * torch.finfo(scores.dtype).eps * scores.abs().amax(-1, keepdim=True)
        favoured = scores + rounding * torch.zeros_like(scores).scatter(1, choice, 1.0)
        implied = [_choose(router, s).sort(-1)[0] == choice.sort(-1)[0] for s in (scores, favoured)]
        count += int((~(implied[0].all(-1) | implied[1].all(-1))).sum())
    return count


@torch.no_grad()
def _choose(router: nn.Module, scores: Tensor) -> Tensor:
    """The router's own rule on given scores: its projection is made the identity."""
    rule: Any = copy.copy(router)
    rule._parameters = {"weight": torch.eye(scores.shape[-1], dtype=scores.dtype)}
    rule._forward_hooks = {}
    rule.hidden_dim = scores.shape[-1]
    choice: Tensor = rule.forward(scores)[2]
    return choice


def _normed(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
