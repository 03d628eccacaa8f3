"""A rewrite that is false, for the tools to find; and a browser."""

import shutil
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from fusec.rewriting.fusion import Dims
from fusec.rewriting.rule import REWRITES, rewrite

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, by playwright; a test is skipped where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
