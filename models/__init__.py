"""Transformer models in plain torch, for demos, tests and benchmarks."""

if __name__ != "fusec.models":
    raise ImportError("import fusec.models; this folder is only its source")
