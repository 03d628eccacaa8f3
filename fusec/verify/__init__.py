"""Nothing is trusted: the executable meaning of graphs, and the oracles that judge rewrites and compiled models."""
