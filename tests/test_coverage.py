"""Between the calls of attention a layer is generated kernels only, where it has so few rows that products are too."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

from fusec.analysis.memory import is_attention
from fusec.debug.subject import kind_of, node_name, subject_of
from fusec.ir.graph import Node
from tests.golden_models import optimized


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [pytest.param(64, marks=pytest.mark.thorough), 1024])
@pytest.mark.parametrize("length", [1, pytest.param(8, marks=pytest.mark.thorough), 16])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_only_generated_kernels_between_attentions(family: str, length: int, hidden: int, dtype: torch.dtype) -> None:
    (graph,) = optimized(family, 1, length, dtype, hidden)
    nodes = list(graph)
    calls = [i for i, n in enumerate(nodes) if is_attention(n) or is_kernel_of_attention(n)]
    assert len(calls) == 2  # one for each layer
    kinds = {node: kind_of(node, subject_of(graph)) for node in nodes}
    for first, second in pairwise([*calls, len(nodes)]):
        between = nodes[first + 1 : second]
        assert any(kinds[node] == "generated" for node in between)
        assert not [node_name(node) for node in between if kinds[node] not in ("generated", "")]


def is_kernel_of_attention(node: Node) -> bool:
    """One with a softmax: the mask that all layers share may be a kernel of its own."""
    label = node.attributes.get("label") or ""
    return label.endswith("attention") and any(n.is_op("exp") for n in node.body)
