"""What must hold for every declared fusion, derived from their declarations."""

import pytest

from fusec import passes
from fusec.testing import KERNEL_CHECKS, PATTERN_CHECKS, derived_tests

DECLARED = (*passes.RAISED, *passes.FUSED)
VARIANTS = {
    "gelu_tanh", "gelu_quick", "gelu_tanh_scaled", "divided_masked_softmax", "masked_softmax", "chosen_softmax",
    "divided_softmax", "rotary_embedding_halves", "geglu", "geglu_tanh", "packed_swiglu_gate_last", "packed_geglu",
    "packed_geglu_gate_last", "packed_geglu_tanh", "gated_projection_gelu", "linear_gelu", "linear_gelu_tanh",
    "linear_tanh",
}  # fmt: skip
"""Fusions whose kernels have the loops of another one's, with other arithmetic."""

test_patterns = derived_tests(*DECLARED, checks=PATTERN_CHECKS)
test_kernels = derived_tests(*(f for f in DECLARED if f.name not in VARIANTS), checks=KERNEL_CHECKS)
test_kernels_of_variants = pytest.mark.thorough(
    derived_tests(*(f for f in DECLARED if f.name in VARIANTS), checks=KERNEL_CHECKS)
)


def test_variants_are_declared() -> None:
    assert VARIANTS < {f.name for f in DECLARED}
