"""Rewriting of graphs: declared fusions and rewrites, their patterns, the matcher, and the drivers that apply them."""
