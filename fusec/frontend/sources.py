"""Source locations of a torch graph's nodes: file, line, module path."""

import inspect
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusec.ir.graph import Source

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n?(?P<text>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)


def source_of(node: Node) -> Source:
    """Return the source location of a node, from the metadata of Dynamo and AOTAutograd."""
    file, line, text = _innermost(node.meta.get("stack_trace") or "")
    return Source(file=file, line=line, module=_module_path(node), op=str(node.target), text=text)


def called_module() -> Any:
    """Return the innermost module that is being called, which Dynamo compiles unless it is a function; or None."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module) and frame.f_code.co_name == "_call_impl":
            return getattr(caller, "_orig_mod", caller)
        frame = frame.f_back
    return None


def input_names(gm: GraphModule) -> list[str]:
    """Return the names of a Dynamo graph's inputs in the model: ``layers_0_mlp_up_weight``, ``input_ids``."""
    return [_input_name(node.name) for node in gm.graph.nodes if node.op == "placeholder"]


def input_weights(gm: GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """Return which inputs of a Dynamo graph are parameters or buffers whose changes torch counts."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return frozenset(
        i
        for i, (node, x) in enumerate(zip(nodes, inputs, strict=False))
        if isinstance(x, torch.Tensor) and not x.is_inference() and _is_of_a_module(node.name, x)
    )


def _is_of_a_module(name: str, x: torch.Tensor) -> bool:
    return isinstance(x, torch.nn.Parameter) or re.search("_(parameters|buffers)_", name) is not None


def _input_name(name: str) -> str:
    """Return ``l_self_modules_layers_modules_0_parameters_weight_`` without Dynamo's access path."""
    if not name.startswith("l_"):
        return name
    plain = re.sub(r"^l_(self_|fn_|kwargs_)?|(?<=_)(modules|parameters|buffers)_|_$", "", name)
    return plain if plain[:1].isalpha() else f"arg_{plain}"


@lru_cache(maxsize=4096)
def _innermost(stack_trace: str) -> tuple[str, int, str]:
    """File, line and text of the innermost frame that is model code (not torch's own)."""
    frames = [m.groupdict() for m in _FRAME.finditer(stack_trace)]
    if not frames:
        return "", 0, ""
    own = [f for f in frames if not f["file"].startswith(_TORCH)]
    frame = (own or frames)[-1]
    return shorten(frame["file"]), int(frame["line"]), frame["text"].strip()


@lru_cache(maxsize=1024)
def shorten(file: str) -> str:
    """A path from its package or project on, so that it reads the same on every machine."""
    for root in ("site-packages/", "dist-packages/"):
        if root in file:
            return file.rpartition(root)[2]
    with suppress(FileNotFoundError):  # the working directory may have been removed
        here = os.getcwd() + os.sep
        if file.startswith(here):
            return file[len(here) :]
    path = Path(file)
    top = path.parent
    while os.path.exists(top / "__init__.py") and top != top.parent:  # False for a name that is too long
        top = top.parent
    return path.relative_to(top).as_posix() if path.is_absolute() else file


def _module_path(node: Node) -> str:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1]
    return readable_path(path[0] if isinstance(path, tuple) else str(path))


@lru_cache(maxsize=4096)
def readable_path(path: str) -> str:
    """``L['self']._modules['layers']._modules['0'].mlp`` as ``layers.0.mlp``."""
    path = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    parts = [p for p in path.split(".") if p and p not in ("_modules", "_orig_mod", "__dict__")]
    return ".".join(parts)
