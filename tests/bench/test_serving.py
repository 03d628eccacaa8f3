"""The command that measures parts of a server's step."""

import argparse
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from bench import serving, serving_parts
from bench.harness import OURS
from bench.serving_batches import Batch
from bench.serving_steps import Requests, paged, weights

OPTIONS = argparse.Namespace(seed=0, llama_hidden=64, llama_layers=2, context=40, requests=4)


def test_each_workload_is_measured_against_the_fastest_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_parts, "SPELLINGS", ("grouped_mm",))
    monkeypatch.setattr(serving_parts, "ROWS", (2,))
    monkeypatch.setattr(serving_parts, "BACKENDS", ("aot_eager", OURS))
    monkeypatch.setattr(serving_parts, "VOCABULARY", 1000)
    words = "--workloads experts,samplers --models Mixtral --hidden 32 --rows 2 --dtypes float32 --rounds 1".split()
    serving.main([*words, "--allow-busy", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["workloads"]
    assert [row["kind"] for row in found] == ["decode", "greedy", "sampler"]
    for row in found:
        ratios = {r["name"]: r["ratio"] for r in row["rows"]}
        ours = min(ratio for name, ratio in ratios.items() if name.startswith("fusec"))
        assert row["gain"] == pytest.approx(ratios[row["best"]] / ours)
        assert not row["best"].startswith("fusec")


def test_steps_apart_and_together_are_the_same_work() -> None:
    """Requests whose pages are mixed, some with a single token and one with a prompt."""
    model = paged(torch.float32, OPTIONS)
    requests = Requests(model, [20, 35, 0], 24, seed=0)
    together = requests.step([1, 1, 24])
    alone = requests.step([1, 1, 0])
    alone["input_ids"] = together["input_ids"][:, :2]
    with torch.no_grad():
        want = model(**alone).logits
        torch.testing.assert_close(model(**together).logits[:, :2], want)
        alone["read_index"][0][:20] = alone["read_index"][0][1:21].clone()  # a neighbour's keys
        assert not torch.allclose(model(**alone).logits, want)


def test_what_a_batch_reports() -> None:
    batch = Batch(paged(torch.float32, OPTIONS), OPTIONS)
    tokens = batch()
    figures = batch.figures()
    assert [len(one) for one in tokens] == [40] * 4 and batch() == tokens
    assert batch.tokens == sum(map(len, batch.prompts)) + 4 * 39
    assert 0 < figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p95"] < 1e3 * batch.seconds
    assert figures["new_tokens_s"] == pytest.approx(40 * figures["qps"])


def test_weights_of_a_model() -> None:
    model = paged(torch.float32, OPTIONS)
    embedded = model.get_input_embeddings().weight.numel()
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert weights(model) == sum(p.numel() for p in model.parameters()) - embedded - norms
