"""Explanations of what the compiler did: reports, differences between graphs."""
