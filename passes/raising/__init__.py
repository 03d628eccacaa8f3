"""Raises primitives to norms, activations, softmax and rotary embeddings, however a model spells them."""

from fusec.passes.raising import activations, norms, rotary, softmax

FAMILIES = (activations, norms, softmax, rotary)
"""In the order in which they are looked for."""
