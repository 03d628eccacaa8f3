"""Autotuning: timing the candidates of a kernel, the vendor's library among them."""
