"""The explanation of a compile: counts, coverage, fallbacks, misses; as data, as tables, and of a bare graph."""

import json

import pytest
import torch
from torch import Tensor

from fusec.debug.explain import explain
from fusec.debug.report import activations_generated, left_to_aten, summarize, summary_line
from fusec.debug.text import amount
from fusec.ir.graph import Graph
from tests.tools.sample import HIDDEN, ROWS, compiled, decoder


def test_counts_and_coverage() -> None:
    found = explain(compiled(2), title="small")
    assert (found.launches("generated"), found.launches("vendor"), found.launches("opaque")) == (6, 14, 7)
    for shares in found.coverage.values():
        assert abs(sum(shares.values()) - 1) < 1e-9
    assert found.regions == {"rms_norm": 4}
    rows = {k.name: k for k in found.kernels if k.kind == "generated"}
    assert rows["rms_norm"].launches == 4 and rows["rms_norm"].fusions == ("rms_norm",)
    assert rows["swiglu"].bytes == 2 * rows["swiglu"].bytes_each


def test_fallbacks_say_what_and_why() -> None:
    found = {f.name: f for f in explain(compiled(2)).fallbacks}
    assert found["aten.scaled_dot_product_attention.default"].count == 2
    assert "attention" in found["aten.scaled_dot_product_attention.default"].reason
    assert "lookup" in found["aten.embedding.default"].reason
    assert found["add"].count == 4
    assert all(f.reason for f in found.values())


def test_equal_misses_are_one_row() -> None:
    sample = compiled(1)
    sample.remarks.extend([sample.remarks[-1]] * 3)
    (miss,) = explain(sample).near_misses
    assert miss.figures["count"] == 4 and miss.suggestion


def test_a_miss_names_the_kernel_that_runs_its_operations() -> None:
    def model(x: Tensor) -> Tensor:
        root = torch.sqrt(x.pow(2).mean(-1, keepdim=True))
        return x / (root + 1e-6)

    found = explain(model, torch.randn(4, 256), options={"target": "cpp"})
    (miss,), (kernel,) = found.near_misses, found.kernels
    assert miss.figures["kernel"] == kernel.name
    assert f"runs in kernel {kernel.name} all the same" in " ".join(str(found).split())


def test_a_miss_in_several_kernels_names_none() -> None:
    (miss,) = explain(compiled(1)).near_misses
    assert "kernel" not in miss.figures


def test_data_is_plain() -> None:
    data = json.loads(json.dumps(explain(compiled(1)).to_json()))
    assert data["launches"]["generated"] == 3 and data["kernels"][0]["bytes"] > 0


def test_text_names_what_matters() -> None:
    text = str(explain(compiled(1), title="small"))
    for word in ("small", "rms_norm", "scaled_dot_product_attention", "rope nearly matched", "generated"):
        assert word in text


def test_summary_of_several_graphs() -> None:
    summary = summarize(compiled(1), compiled(1), title="two")
    assert summary["graphs"] == 2 and summary["kernels"]["generated"] == 6
    assert "left to ATen" in summary_line(explain(compiled(1)))


def test_bare_graph() -> None:
    found = explain(decoder(1))
    assert found.launches("generated") == 0 and found.imported_nodes == found.final_nodes


def test_amounts() -> None:
    assert [amount(n, "B") for n in (0, 999, 1500, 2_000_000)] == ["0 B", "999 B", "1.5 kB", "2 MB"]


def test_what_is_left_to_aten() -> None:
    explanation = explain(compiled(2))
    # The sample leaves its additions to ATen: four of them, each reading twice and writing once.
    added = 4 * 3 * ROWS * HIDDEN * 4
    total = sum(row.bytes for row in explanation.kernels)
    assert left_to_aten(explanation)["bytes"] == pytest.approx(added / total)
    generated = sum(row.bytes for row in explanation.kernels if row.kind == "generated") - 4 * HIDDEN * 4  # weights
    assert activations_generated(explanation) == pytest.approx(generated / (generated + added))


def test_nothing_counts_as_fully_covered() -> None:
    explanation = explain(Graph())
    assert left_to_aten(explanation) == {"bytes": 0.0, "flops": 0.0} and activations_generated(explanation) == 1.0
