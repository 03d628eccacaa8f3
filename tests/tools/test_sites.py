"""Sites are found from modules, and each is fused or has a reason that a reader can act on."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusec.analysis.sites import sites_of
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.debug.explain import explain, explain_subjects
from fusec.debug.site_status import SiteStatus, site_statuses
from fusec.debug.subject import Subject
from fusec.debug.tables import explanation_view, site_view
from fusec.debug.text import as_text
from fusec.models import gpt2, llama, t5
from fusec.models.inputs import sample_tokens
from fusec.passes import default_pipeline
from fusec.rewriting.match import OTHER, SAME
from tests.contexts import context_of


def subjects(model: nn.Module, *inputs: Tensor) -> list[Subject]:
    """The model's graphs after all passes; nothing is built."""
    torch._dynamo.reset()
    found = []
    for graph in capture(model.eval(), *inputs):
        context, imported = context_of(config=Config(record=True)), graph.copy()
        default_pipeline(context.config).run(graph, context)
        found.append(Subject("model", graph, imported, remarks=context.remarks))
    return found


def judged(model: nn.Module, *inputs: Tensor) -> list[SiteStatus]:
    return site_statuses(model, subjects(model, *inputs))


TOKENS = sample_tokens(32, 2, 20)
EXPECTED: dict[str, tuple[Any, tuple[Tensor, ...], dict[str, int]]] = {
    "llama": (
        lambda: llama.Llama(llama.PRESETS["tiny"]),
        (TOKENS,),
        {
            "norm": 5, "attention": 2, "softmax": 2, "rotary embedding": 2, "QKV projection": 2,
            "output and residual": 4, "MLP": 2, "embedding": 1, "head": 1,
        },
    ),
    "gpt2": (
        lambda: gpt2.GPT2(gpt2.PRESETS["tiny"]),
        (TOKENS,),
        {
            "norm": 5, "attention": 2, "softmax": 2, "QKV projection": 2, "output and residual": 4, "MLP": 2,
            "embedding": 2,
        },
    ),
    "t5": (
        lambda: t5.T5(t5.PRESETS["tiny"]),
        (TOKENS, TOKENS[:, :7]),
        {
            "norm": 12, "attention": 6, "softmax": 6, "QKV projection": 6, "output and residual": 10, "MLP": 4,
            "embedding": 3,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_every_site_is_found_and_fused(name: str) -> None:
    make, inputs, expected = EXPECTED[name]
    found = judged(make(), *inputs)
    assert Counter(v.site.kind for v in found) == expected
    missed = [(v.site.kind, v.site.module, v.reason) for v in found if not v.fused and v.site.kind != "embedding"]
    assert not missed
    assert not [(v.site.kind, v.site.module) for v in found if v.recognised is False]


class MedianNorm(nn.Module):
    """Rows over the root of their median square: no norm that fusec knows, and no median either."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The row over its root median square."""
        square = x.pow(2).median(-1, keepdim=True).values
        return x * torch.rsqrt(square + 1e-6) * self.weight


class Planted(nn.Module):
    """One layer whose norm cannot be fused, and one whose norm can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.good = MedianNorm(16), nn.Sequential(nn.Linear(16, 16)), nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        """Both norms and a product."""
        return self.good(x + self.mlp(self.norm(x)))


def test_a_planted_miss_says_what_is_to_change() -> None:
    model, x = Planted(), torch.randn(40, 16)
    found = {v.site.module: v for v in judged(model, x) if v.site.kind == "norm"}
    assert found["good"].fused and not found["good"].reason
    missed = found["norm"]
    assert not missed.fused and missed.node == "aten.median.dim"
    assert (missed.clause, missed.expected, missed.found) == ("operation", "div", "aten.median.dim")
    line = MedianNorm.forward.__code__.co_firstlineno + 2
    assert missed.place.endswith(f"test_sites.py:{line}") and "median" in missed.text
    assert missed.edit == "none known: no spelling of rms_norm is like it"
    assert missed.attempt.startswith("rms_norm") and missed.bytes_lost >= 40 * 16 * 4


class RMSNorm(nn.Module):
    """Rows over their root mean square, with eps outside of the root."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm by hand."""
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


def test_a_kernel_without_a_name_is_fused_but_not_recognised() -> None:
    model = nn.Sequential(RMSNorm(), nn.RMSNorm(16))
    found = {v.site.module: v for v in judged(model, torch.randn(40, 16))}
    assert found["0"].fused and found["1"].fused
    assert (found["0"].recognised, found["1"].recognised) == (False, True)
    assert not found["0"].reason and found["0"].attempt.startswith("rms_norm")
    assert found["0"].tried.startswith("move `add` with eps inside `sqrt` at test_sites.py:")
    assert found["0"].tried.endswith(OTHER) and not found["0"].edit


def sites_shown(model: nn.Module, *inputs: Tensor) -> str:
    return as_text(site_view(explain_subjects(subjects(model, *inputs), "shown", model)), 200)


class RootNorm(nn.Module):
    """The root of a model is a site too, whose module path is empty."""

    def __init__(self, eps_inside: bool) -> None:
        super().__init__()
        self.eps_inside = eps_inside

    def forward(self, x: Tensor) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / ((mean + 1e-6).sqrt() if self.eps_inside else mean.sqrt() + 1e-6)


RootNorm.__name__ = "RMSNorm"


@pytest.mark.parametrize("eps_inside", [True, False])
def test_a_norm_that_is_the_whole_model(eps_inside: bool) -> None:
    (status,) = judged(RootNorm(eps_inside), torch.randn(2, 4, 64))
    assert status.fused and status.recognised is eps_inside
    assert eps_inside or "move `add` with eps inside `sqrt`" in status.tried


class ReturnsWeights(nn.Module):
    """Attention that returns its probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


ReturnsWeights.__name__ = "Attention"


def test_an_attention_that_is_the_whole_model_has_the_edit_of_its_remark() -> None:
    (status,) = [s for s in judged(ReturnsWeights(), torch.randn(2, 6, 32)) if s.site.kind == "attention"]
    assert not status.fused and status.edit == "return only the result of the second matmul" and status.tried == SAME


class WritesSoftmaxOut(ReturnsWeights):
    """One whose softmax is not shifted by its maximum."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        powers = torch.exp(q @ k.transpose(-1, -2) * 0.25)
        return self.o((powers / powers.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


WritesSoftmaxOut.__name__ = "Attention"


def test_attention_without_a_known_softmax_has_the_attempt_of_its_softmax() -> None:
    (status,) = [s for s in judged(WritesSoftmaxOut(), torch.randn(2, 6, 32)) if s.site.kind == "attention"]
    assert not status.fused and status.clause == "operation" and status.attempt == "softmax, 3 of 5 operations"
    assert status.tried.startswith("compute it as softmax does") and "on large inputs" in status.tried


class ReturnsMore(ReturnsWeights):
    """One that returns its scores, too, and in another form the entropy of its probabilities."""

    def __init__(self, entropy: bool) -> None:
        super().__init__()
        self.entropy = entropy

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * 0.25
        weights = torch.softmax(scores, -1)
        more = (weights * weights.log()).sum(-1) if self.entropy else scores
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights, more


ReturnsMore.__name__ = "Attention"


@pytest.mark.parametrize("entropy", [False, True])
def test_an_edit_is_proposed_only_if_it_suffices(entropy: bool) -> None:
    (status,) = [s for s in judged(ReturnsMore(entropy), torch.randn(2, 6, 32)) if s.site.kind == "attention"]
    assert not status.fused
    assert status.edit.startswith("none " if entropy else "return only") and status.tried == ("" if entropy else SAME)


def test_a_site_without_a_name_is_listed() -> None:
    text = sites_shown(nn.Sequential(RMSNorm(), nn.RMSNorm(16)), torch.randn(40, 16))
    assert "Not recognised" in text and "move `add` with eps inside `sqrt`" in text
    assert "Every site is fused" not in text


def test_every_site_is_fused_where_each_is_recognised() -> None:
    text = sites_shown(nn.Sequential(nn.RMSNorm(16)), torch.randn(40, 16))
    assert "Every site is fused" in text and "Not recognised" not in text


class Plain(nn.Module):
    """A norm that no module is named for."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm by hand."""
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


def test_a_model_without_sites_is_told_where_sites_come_from() -> None:
    text = sites_shown(Plain(), torch.randn(40, 16))
    assert "No sites" in text and "modules" in text and "lists 1 near miss." in text
    assert "Every site is fused" not in text


def test_sites_come_from_modules_alone() -> None:
    assert [(s.kind, s.module) for s in sites_of(Planted())] == [("norm", "norm"), ("norm", "good")]


class Relative(nn.Module):
    """Attention whose scores are a sum: of queries and keys, and of queries and relative positions."""

    def __init__(self, gives_weights: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        self.positions = nn.Parameter(torch.randn(2, 9, 16))
        self.gives_weights = gives_weights

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The new rows, and the weights where they are wanted."""
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, 2, 16).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        places = (torch.arange(length)[:, None] - torch.arange(length)).clamp(-4, 4) + 4
        beside = (q @ self.positions.mT).gather(-1, places.expand(batch, 2, length, length))
        weights = (q @ k.mT / 4 + beside).softmax(-1)
        rows = self.o_proj((weights @ v).transpose(1, 2).reshape(x.shape))
        return (rows, weights) if self.gives_weights else (rows,)


@pytest.mark.parametrize("gives_weights", [False, True])
def test_scores_may_be_a_sum_of_products_where_one_is_with_the_softmax(gives_weights: bool) -> None:
    found = {v.site.kind: v for v in judged(Relative(gives_weights), torch.randn(3, 20, 32))}
    attention = found["attention"]
    assert attention.fused is not gives_weights
    assert found["QKV projection"].fused


class Turned(nn.Module):
    """Attention with queries and keys rotated by angles that it is told the places of."""

    def __init__(self, angles: Tensor) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("angles", angles)
        self.rotary_dim = 16

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """The new rows."""
        q, k, v = (p(x).view(*x.shape[:2], 2, 16).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        sin, cos = self.get_buffer("angles")[places][:, None].repeat_interleave(2, -1).chunk(2, -1)
        q, k = (y * cos + torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2) * sin for y in (q, k))
        rows = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(rows.transpose(1, 2).reshape(x.shape))


class TurnedTwice(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Turned(torch.randn(50, 16)) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """The new rows."""
        return self.second(self.first(x, places), places)


def test_rows_of_angles_are_looked_up_by_what_rotates() -> None:
    found = judged(TurnedTwice(), torch.randn(3, 20, 32), torch.arange(20)[None].expand(3, -1).contiguous())
    turned = [v for v in found if v.site.kind == "rotary embedding"]
    assert len(turned) == 2 and all(v.fused for v in turned), [v.reason for v in turned]


def test_views_show_sites() -> None:
    model = Planted()
    explanation = explain_subjects(subjects(model, torch.randn(40, 16)), "planted", model)
    text = as_text(site_view(explanation), 200)
    for word in ("norm", "1/2", "median", "test_sites.py"):
        assert word in text
    (data,) = [site for site in explanation.to_json()["sites"] if not site["fused"]]
    assert data["module"] == "norm" and data["edit"] and data["reason"]


class NormA(nn.Module):
    """A norm whose class name does not end in Norm."""

    def forward(self, x: Tensor) -> Tensor:
        """L2 normalization."""
        return x / x.norm(dim=-1, keepdim=True)


class NormBlock(nn.Module):
    """No norm, but a module with one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = NormA(), nn.Linear(16, 16)


class Normal(nn.Module):
    """No norm at all."""


def test_norms_by_class_name() -> None:
    model = nn.ModuleDict({"a": NormA(), "block": NormBlock(), "no": Normal(), "rms": nn.RMSNorm(4)})
    assert [s.module for s in sites_of(model) if s.kind == "norm"] == ["a", "block.norm", "rms"]


class Words(nn.Module):
    """A model with a vocabulary of 32, and linears by these names with so many columns."""

    def __init__(self, **linears: int) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        for name, columns in linears.items():
            setattr(self, name, nn.Linear(16, columns))


@pytest.mark.parametrize(
    ("linears", "heads"),
    [
        ({"up": 32, "down": 16}, []), ({"proj": 16, "out": 32}, ["out"]), ({"out": 32, "proj": 8}, []),
        ({"lm_head": 8, "pool": 16}, ["lm_head"]), ({"lm_head": 32}, ["lm_head"]), ({"classifier": 3}, ["classifier"]),
        ({"overhead": 3}, []),
    ],
)  # fmt: skip
def test_heads_are_named_so_or_make_a_vocabulary(linears: dict[str, int], heads: list[str]) -> None:
    found = [s.parts for s in sites_of(Words(**linears)) if s.kind == "head"]
    assert found == ([tuple(heads)] if heads else [])


def test_rows_of_grouping_have_a_table_of_their_own() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        near = h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)
        return near / near.sum(0) + x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)

    explanation = explain(model, torch.randn(64, 64), torch.randn(64, 64))
    text = as_text(explanation_view(explanation))
    near, _, apart = text.partition("Kept apart")
    rows = [line.split()[0] for line in near.partition("Near misses")[2].splitlines() if " nearly matched" in line]
    assert rows and set(rows) == {"fuse"} and "group " in apart and "nearly matched" not in apart
