"""What must hold for every declared fusion, derived from their declarations."""

from fusec import passes
from fusec.testing import KERNEL_CHECKS, PATTERN_CHECKS, derived_tests

test_patterns = derived_tests(*passes.RAISED, *passes.FUSED, checks=PATTERN_CHECKS)
test_kernels = derived_tests(*passes.RAISED, *passes.FUSED, checks=KERNEL_CHECKS)
