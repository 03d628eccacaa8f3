"""Samplers of transformers: each of its processors, whole chains, and draws, with eager's tokens for the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.dynamo import compiled_graphs
from tests.combinations import rotating

processors = pytest.importorskip("transformers.generation.logits_process")
VOCABULARY = 900


def scores(rows: int, n: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Tokens so far, and scores of the next."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, n, (rows, 40), generator=generator), 3 * torch.randn(rows, n, generator=generator)


PROCESSORS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: processors.TemperatureLogitsWarper(0.7),
    "top-k": lambda: processors.TopKLogitsWarper(50),
    "top-k, few": lambda: processors.TopKLogitsWarper(3),
    "top-p": lambda: processors.TopPLogitsWarper(0.8),
    "min-p": lambda: processors.MinPLogitsWarper(0.1),
    "typical": lambda: processors.TypicalLogitsWarper(0.9),
    "epsilon": lambda: processors.EpsilonLogitsWarper(1e-3),
    "eta": lambda: processors.EtaLogitsWarper(1e-3),
    "repetition penalty": lambda: processors.RepetitionPenaltyLogitsProcessor(1.2),
    "bad words": lambda: processors.NoBadWordsLogitsProcessor([[5], [7, 9], [1, 2, 3]], eos_token_id=0),
    "suppressed": lambda: processors.SuppressTokensLogitsProcessor([1, 5, 9]),
}


@pytest.mark.parametrize(("name", "rows"), rotating(list(PROCESSORS), (5, 1)))
def test_processors_hide_the_same_tokens(name: str, rows: int) -> None:
    ids, x = scores(rows)
    processor = PROCESSORS[name]()
    expected = processor(ids, x.clone())
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids, x: processor(ids, x), backend="fusec", options={"strict": True})
    found = compiled(ids, x.clone())
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected)
    nodes = compiled_graphs()[-1].graph.nodes
    assert not [n for n in nodes if n.is_op("opaque")]


def chain(ids: Tensor, x: Tensor) -> Tensor:
    for processor in (
        processors.RepetitionPenaltyLogitsProcessor(1.1), processors.TemperatureLogitsWarper(0.7),
        processors.TopKLogitsWarper(50), processors.TopPLogitsWarper(0.9),
    ):  # fmt: skip
        x = processor(ids, x)
    return torch.multinomial(x.softmax(-1), 1)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_chain_draws_eagers_tokens_and_repeats(rows: int) -> None:
    ids, x = scores(rows)
    compiled = torch.compile(chain, backend="fusec", options={"strict": True})
    drawn = []
    for run in (chain, compiled, compiled):
        torch.manual_seed(7)
        drawn.append(torch.cat([run(ids, x) for _ in range(20)]))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])
    assert not torch.equal(compiled(ids, x.flip(-1)), drawn[1][:rows])


def test_the_state_of_the_generator_advances_as_in_eager() -> None:
    p = torch.rand(3, 50)
    compiled = torch.compile(lambda p: torch.multinomial(p, 1), backend="fusec")
    after = []
    for run in (lambda p: torch.multinomial(p, 1), compiled):
        torch.manual_seed(1)
        run(p)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


@pytest.mark.parametrize(
    "wrong", [[0.5, -0.1, 0.6], [0.5, float("nan"), 0.5], [0.5, float("inf"), 0.5], [0.0, 0.0, 0.0]]
)
def test_probabilities_that_are_none_are_refused(wrong: list[float]) -> None:
    p = torch.tensor([[0.2, 0.3, 0.5], wrong])
    for run in (torch.multinomial, torch.compile(lambda p, n: torch.multinomial(p, n), backend="fusec")):
        with pytest.raises(RuntimeError, match="probabilit"):
            run(p, 1)


@pytest.mark.parametrize("samples", [pytest.param(10**6, marks=pytest.mark.thorough), 20_000])
@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "typical"])
def test_draws_have_the_distribution(name: str, samples: int) -> None:
    """A χ² test against the probabilities: the seed is fixed, and the bound is that of one in ten thousand."""
    ids, x = scores(1, 60)
    processor = PROCESSORS[name]()
    p = processor(ids, x.clone()).softmax(-1)[0].double()
    rows = x.expand(samples // 20, -1)

    def draw(ids: Tensor, x: Tensor) -> Tensor:
        return torch.multinomial(processor(ids, x).softmax(-1), 1)

    compiled = torch.compile(draw, backend="fusec")
    torch.manual_seed(3)
    counts = sum(torch.bincount(compiled(ids, rows).flatten(), minlength=60) for _ in range(20))
    assert isinstance(counts, Tensor) and not counts[p == 0].any()
    expected = samples * p
    likely = expected > 5
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    degrees = int(likely.sum()) - 1
    bound = torch.distributions.Chi2(torch.tensor(float(max(degrees, 1)))).sample((200_000,)).quantile(0.9999)
    assert statistic <= float(bound), (statistic, degrees)


def test_a_token_too_many_or_too_few_is_noticed() -> None:
    """The comparison with eager is exact: it tells top-p with one more token."""
    ids, x = scores(1)
    kept = processors.TopPLogitsWarper(0.8)(ids, x)
    order = x.argsort(descending=True)
    last = int((~kept.isinf()).sum())
    more = kept.clone()
    more[0, order[0, last]] = x[0, order[0, last]]
    compiled = torch.compile(lambda x: processors.TopPLogitsWarper(0.8)(ids, x), backend="fusec")(x)
    assert torch.equal(compiled.isinf(), kept.isinf()) and not torch.equal(compiled.isinf(), more.isinf())
