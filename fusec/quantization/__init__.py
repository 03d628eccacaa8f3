"""Quantization of a model's linear layers, in plain PyTorch: codes of 4 or 8 bits and their scales."""
