"""The tile program: one language for kernels of every target, and how statements are emitted into it."""
