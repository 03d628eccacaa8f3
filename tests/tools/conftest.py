"""A rewrite that is false, for the tools to find."""

from collections.abc import Iterator
from typing import Annotated

import pytest
import torch
from torch import Tensor

from fusec.rewriting.fusion import Dims
from fusec.rewriting.rule import REWRITES, rewrite

Rows = Annotated[Tensor, Dims("*batch cols")]


@pytest.fixture
def wrong_rewrite() -> Iterator[None]:
    """sin(x)·sin(x) becomes sin(x) wherever it stands."""

    @rewrite
    def squared_sine(x: Rows) -> Tensor:
        """sin²"""
        return torch.sin(x) * torch.sin(x)

    @squared_sine.to
    def _(x: Rows) -> Tensor:
        return torch.sin(x)

    yield
    REWRITES.pop("squared_sine", None)
