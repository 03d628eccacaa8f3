"""Fusions across operations that have a name: residual and norm, gates, projections with what follows them."""

from fusec.passes.fusion import gates, norms, projections

FAMILIES = (norms, gates, projections)
"""In the order in which they are looked for."""
