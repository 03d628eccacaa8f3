"""The recorder of patterns records what ``make_fx`` traces, and imports no Dynamo."""

import os
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusec import passes
from fusec.frontend import import_fx, trace
from fusec.frontend.decompositions import KEPT_WHOLE, decompositions
from fusec.frontend.torch_internals import kept_whole
from fusec.ir.types import BF16, F32, DType, TensorType
from fusec.passes.patterns import trace_types
from fusec.rewriting.pattern import choices, spellings
from fusec.rewriting.rule import REWRITES
from fusec.rewriting.sampling import Sizes, sample

Function = Callable[..., Any]
DECLARED = [*passes.RAISED, *passes.FUSED, *REWRITES.values()]
GRAPH = "graph graph(%x: f32[4, 8], %w: f32[8]) {\n  %y: f32[4, 8] = mul(%x, %w)\n  return %y\n}\n"
FUNCTIONS: dict[str, Function] = {
    "parts": lambda x: x.chunk(2, -1)[1] * x.amax(-1, keepdim=True),
    "values and indices": lambda x: x.sort(-1),
    "constant": lambda x: x * torch.tensor(2.5),
    "composite": lambda x: F.linear(F.layer_norm(x, (3,)), x.softmax(-1)),
    "dropped": lambda x: (x.sigmoid(), x.flatten().unflatten(0, x.shape).mT)[1],
}


def as_make_fx(function: Function, tensors: list[torch.Tensor]) -> str:
    with torch.inference_mode(), kept_whole(KEPT_WHOLE):
        return str(import_fx(make_fx(lambda *x: function(*x), decompositions(), "fake")(*tensors)))


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_declarations_are_recorded_as_make_fx_traces_them(dtype: DType, batch: int) -> None:
    types = {F32: torch.float32, BF16: torch.bfloat16}
    for declared in DECLARED:
        for present in choices(declared.parameters):
            given = sample(declared.parameters, dtype, present, Sizes(batch))
            for function in spellings(declared).values():
                samples = [given[name] for name in signature(function).parameters]
                tensors = [torch.empty(s.shape, dtype=types.get(s.dtype, torch.bool), device="meta")  # type: ignore[arg-type]
                           for s in samples if isinstance(s, TensorType)]  # fmt: skip

                def of_tensors(*x: Any, function: Function = function, samples: list[Any] = samples) -> Any:
                    rest = iter(x)
                    return function(*(next(rest) if isinstance(s, TensorType) else s for s in samples))

                assert str(trace_types(function, samples)) == as_make_fx(of_tensors, tensors), declared.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_recorded_as_make_fx_traces_them(name: str) -> None:
    x = torch.empty(5, 3, device="meta")
    assert str(trace(FUNCTIONS[name], [x], symbolic=False)) == as_make_fx(FUNCTIONS[name], [x])


def test_what_changes_its_own_values_is_recorded_without_changes() -> None:
    def changing(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[:, 0].mul_(2)
        return y

    x = torch.empty(5, 3, device="meta")
    assert str(trace(changing, [x], symbolic=False)) == as_make_fx(torch.func.functionalize(changing), [x])


@pytest.mark.parametrize("read", [lambda x: x * x.sum().item(), lambda x: x if x.sum() > 0 else -x, torch.nonzero])
def test_what_depends_on_values_is_refused(read: Function) -> None:
    with pytest.raises(RuntimeError):
        trace(read, [torch.empty(5, 3, device="meta")], symbolic=False)


def test_a_tool_that_reads_a_graph_imports_no_dynamo_and_torch_is_left_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "graph.fir"
    file.write_text(GRAPH)
    code = f"""
import sys
import torch
sys.argv = ["fusec", "explain", {str(file)!r}, "--line"]
from fusec.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
assert "fusec.frontend.recorder" in sys.modules and "torch._dynamo" not in sys.modules
torch.empty(2, device="meta") + 1
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "FUSEC_CACHE_DIR": str(tmp_path)})
    assert not list(tmp_path.glob("*.so")), "nothing was to be built"
