"""Analyses of a graph: uses, outlines of groups, bytes, operations and predicted times."""
