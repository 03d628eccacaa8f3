"""A graph compiler and operator-fusion framework for transformers: ``torch.compile(model, backend="fusec")``.

The public names are loaded when they are first used, so that the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import fusec.provenance  # noqa: F401  it notes when the rest is loaded

if TYPE_CHECKING:
    from fusec.config import Config
    from fusec.continuous_batching import paged_attention
    from fusec.debug.bisect import bisect
    from fusec.debug.capture import capture
    from fusec.debug.expect import expect
    from fusec.debug.explain import explain
    from fusec.debug.optimize import opt
    from fusec.dynamo import backend
    from fusec.quantization.cache import quantized_cache
    from fusec.quantization.quantize import quantize
    from fusec.rewriting.fusion import Dims, fusion
    from fusec.rewriting.rule import rewrite
    from fusec.viz.html import view

__version__ = "0.1.0"
__all__ = [
    "Config", "Dims", "backend", "bisect", "capture", "expect", "explain", "fusion", "opt", "paged_attention",
    "quantize", "quantized_cache", "rewrite", "view",
]  # fmt: skip

_HOMES = {
    "Config": "fusec.config",
    "Dims": "fusec.rewriting.fusion",
    "backend": "fusec.dynamo",
    "bisect": "fusec.debug.bisect",
    "capture": "fusec.debug.capture",
    "expect": "fusec.debug.expect",
    "explain": "fusec.debug.explain",
    "fusion": "fusec.rewriting.fusion",
    "opt": "fusec.debug.optimize",
    "paged_attention": "fusec.continuous_batching",
    "quantize": "fusec.quantization.quantize",
    "quantized_cache": "fusec.quantization.cache",
    "rewrite": "fusec.rewriting.rule",
    "view": "fusec.viz.html",
    "write_report": "fusec.viz.report",
}


def __getattr__(name: str) -> Any:
    """The public name, from where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fusec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
