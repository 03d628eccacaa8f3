"""Generation with a static cache: eager's tokens, compiled once, no cache copied; what is not so is seen."""

import pytest
import sympy
import torch

pytest.importorskip("transformers")

from bench import generate
from bench.families import FAMILIES, Sizes
from bench.generate import FILL, PROMPT_GRAPH, Generated, build, generated, steps_that_move
from fusec.codegen.tile.kernel import Loop, walk
from fusec.dynamo import backend, compiled_graphs
from fusec.ir.parser import parse_graph

SIZES = Sizes(hidden=32, layers=2, heads=2)


@pytest.mark.parametrize(("family", "caches"), [("llama", 4), pytest.param("gemma3", 2, marks=pytest.mark.thorough)])
def test_a_static_cache_gives_the_tokens_of_eager(family: str, caches: int) -> None:
    """Of Gemma3's two layers one has a window, shorter than the prompt."""
    result = generated(FAMILIES[family], 5, backend, sizes=SIZES)
    assert result.same, (result.differs_at, result.margin)
    assert not result.late, result.graphs
    assert not result.copied
    assert result.copies[PROMPT_GRAPH] == [FILL] * caches == [FILL] * result.caches
    program = compiled_graphs()[-1].program
    assert {step.kind for step in program.steps} == {"kernel"}
    assert [step.name for step in program.steps].count("concat_write") == (2 if family == "gemma3" else 0)


def test_a_copy_is_a_copy_in_every_graph() -> None:
    made = Generated("llama", 5, copies={PROMPT_GRAPH: [FILL] * 4, "step 1": []}, caches=4)
    assert not made.copied
    made.copies[PROMPT_GRAPH] += [FILL, "aten.index_copy.default"]
    made.copies["step 1"] = [FILL]
    assert made.copied == ["aten.index_copy.default", FILL, FILL]


@pytest.mark.parametrize("tokens", [pytest.param(4, marks=pytest.mark.thorough), 16])
def test_several_tokens_are_verified_in_one_pass(tokens: int) -> None:
    from transformers import StaticCache

    model, given = build(FAMILIES["llama"], SIZES), FAMILIES["llama"].sample(1, 300 + tokens, "none")["input_ids"]
    torch._dynamo.reset()
    results = []
    for run in (model, torch.compile(model, backend=backend, options={"strict": True})):
        cache = StaticCache(config=model.config, max_cache_len=1024)
        with torch.no_grad():
            model(given[:, :300], past_key_values=cache)
            logits = run(given[:, 300:], past_key_values=cache).logits
        results.append([logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    kernel = compiled_graphs()[-1].program.kernels["attention"]
    (keys,) = (s for s in walk(kernel.body) if isinstance(s, Loop) and s.axis == "key_block")
    assert isinstance(keys.stop, sympy.Min) and keys.stop.free_symbols  # a position that is known at run time


def test_a_wrong_token_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(generate.Compiled):
        def __enter__(self) -> generate.Compiled:
            opened, right = super().__enter__(), self.model.forward

            def wrong(*args: object, **kwargs: object) -> object:
                output = right(*args, **kwargs)
                if len(self.graphs) == 3:
                    output.logits = -output.logits
                return output

            self.model.forward = wrong
            return opened

    monkeypatch.setattr(generate, "Compiled", Wrong)
    result = generated(FAMILIES["gpt2"], 4, "eager", capacity=64, sizes=SIZES)
    assert result.differs_at == 2 and not result.same


def test_a_tie_is_not_the_fault_of_a_kernel() -> None:
    assert Generated("llama", 5, differs_at=3, margin=1e-7).same


TEXT = """graph graph(%cache: f32[1, 2, 64, 16], %new: f32[1, 2, 1, 16], %at: i64[1]) {{
  %written: f32[1, 2, 64, 16] = write(%cache, %new, %at) {{dim=-2}}
  {rest}
  return %out
}}
"""


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ("%out: f32[1, 2, 1, 16] = neg(%new)", []),
        ("%out: f32[1, 2, 64, 16] = neg(%written)", ["neg"]),
        ("%out: f32[1, 2, 65, 16] = concat(%written, %new) {dim=-2}", ["concat"]),
    ],
    ids=["rows", "all", "grown"],
)
def test_only_what_is_moved_as_a_whole_is_counted(rest: str, found: list[str]) -> None:
    assert steps_that_move(parse_graph(TEXT.format(rest=rest)), 1 * 2 * 64 * 16 * 4) == found
