"""What must hold for every declared fusion, derived from the registry."""

from fusec import passes
from fusec.rewriting.fusion import FUSIONS
from fusec.testing import KERNEL_CHECKS, PATTERN_CHECKS, derived_tests

passes.declare_all()
BUILT_IN = [f for f in FUSIONS.values() if f.module.startswith("fusec.")]

test_patterns = derived_tests(*BUILT_IN, checks=PATTERN_CHECKS)
test_kernels = derived_tests(*BUILT_IN, checks=KERNEL_CHECKS)
