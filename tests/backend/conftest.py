"""What torch.compile promises must hold for every executor: the interpreter, and the compiler itself."""

from typing import Any

import pytest
import torch

from fusec import dynamo
from fusec.codegen.tile.bounds import unproven_accesses
from tests.backend.agreement import interpret


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    dynamo.reset()


@pytest.fixture(params=[pytest.param("interpreter", marks=pytest.mark.thorough), "compiler"])
def backend(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    yield dynamo.backend if request.param == "compiler" else dynamo.backend_with(interpret)
    assert dynamo.fallbacks() == []
    programs = [compiled.program for compiled in dynamo.compiled_graphs()]
    kernels = [kernel for program in programs for kernel in getattr(program, "kernels", {}).values()]
    assert [a for kernel in kernels if not kernel.symbols for a in unproven_accesses(kernel)] == []
    torch._dynamo.reset()
