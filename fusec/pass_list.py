"""The names of the passes, a description of each, and the order of the default pipeline.

This module imports nothing, since the passes themselves need sympy and torch, which are slow to import.
"""

DESCRIPTIONS = {
    "canonicalize": "Bring a graph to canonical form: algebra, casts, views, contractions, equal and dead code.",
    "raise": "Raise primitives to norms, activations, softmax and rotary embeddings, however a model spells them.",
    "fuse": "Fuse across named operations: residual and norm, gates, projections with their epilogues.",
    "attention": "Make a region `attention` of each call of scaled-dot-product attention that has a schedule.",
    "group": "Make regions of kind `kernel`, each one launch; the names of declared regions become labels.",
    "bias": "Make regions of kind `vendor` of matmuls or convolutions and the kernels that only add a bias to them.",
}
"""A description of each pass, by its name in the text of a pipeline."""

DEFAULT = (
    "canonicalize",  # so that one pattern matches equivalent computations
    "raise",  # norms, softmax, activations and rotary embeddings become regions
    "fuse",  # larger regions: residual and norm, gates, projections
    "attention",  # calls of attention with a generated kernel are decomposed
    "canonicalize",  # merges and removes nodes that have become equal or dead
    "group",  # kernels: groups of nodes with one loop nest, by predicted cost
    "bias",  # vendor calls add a bias that would be the only work of a kernel
)
"""The passes of a compile, in order."""
