"""Fusions across named operations: residual and norm, gates, projections with their epilogues."""

from fusec.passes.fusion import gates, norms, projections

FAMILIES = (norms, gates, projections)
"""In the order in which they are looked for."""
