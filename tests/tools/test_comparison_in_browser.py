"""Two versions of a model or of its report, compared in Chromium.

Needs playwright and a Chromium; see CONTRIBUTING.md.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusec.debug.compare import report_of
from fusec.debug.explain import explain
from fusec.viz.html import render, render_comparison, render_reports
from tests.tools.browser import Opened
from tests.tools.sample import compiled


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_comparisons(browser: Any, tmp_path: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    old, new = (explain(compiled(layers)) for layers in (1, 2))
    pages = {"graphs": render_comparison(old, new), "reports": render_reports(report_of(old), report_of(new))}
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        page = Opened(browser, tmp_path / f"{name}.html", f"theme={theme}")
        found = axe.Axe().run(page.page).response["violations"]
        assert not [(f["id"], n["html"][:120]) for f in found for n in f["nodes"][:2]], name
        page.close()


def test_two_versions_are_compared(browser: Any, tmp_path: Path) -> None:
    def version(norm: bool) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.RMSNorm(16) if norm else nn.Identity(), nn.Linear(16, 16)) for _ in range(2)]
        return nn.Sequential(*layers).eval()

    with torch.no_grad():
        before, after = (explain(version(norm), torch.randn(4, 16), title=str(norm)) for norm in (True, False))
    (tmp_path / "page.html").write_text(render_comparison(before, after), encoding="utf-8")
    page = Opened(browser, tmp_path / "page.html")
    assert page("openTab") == "Changes"
    changes = page("[...document.querySelectorAll('#list .row')].map(r => r.textContent)")
    assert any(re.match(r"norm .*− lost", text) for text in changes)
    kinds = "[...new Set(marks.values())].sort().join(' ')"
    both = page("[at, keysOf(shown()).length]")
    assert "added" in page(kinds) and "removed" in page(kinds)
    page.page.click("#list .row:has-text('− rms_norm')")  # a kernel of the earlier version, with its source
    assert page("marks.get(selected.k)") == "removed" and "rms_norm" in str(page.page.text_content("#kernel"))
    key = page("selected.k")
    page.page.click(".pass >> nth=0")
    assert (
        page("[report().title, selected.k]") == ["True", key]
        and "removed" in page(kinds)
        and "added" not in page(kinds)
    )
    page.press("j")
    assert page("report().title") == "False" and "removed" not in page(kinds)
    page.press("j")
    assert page("[at, keysOf(shown()).length]") == both
    page.close()


def test_graphs_that_differ_where_no_figure_does_are_not_called_the_same(browser: Any, tmp_path: Path) -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + 1) * 2

    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + 3) * 2

    for name, function in {"same": one, "other": other}.items():
        old, new = (explain(version, torch.randn(4, 16)) for version in (one, function))
        (tmp_path / f"{name}.html").write_text(render_comparison(old, new), encoding="utf-8")
        page = Opened(browser, tmp_path / f"{name}.html")
        said = str(page.page.text_content("#list"))
        assert said.startswith("No site, kernel or figure differs") and ("of the graph" in said) is (name == "other")
        page.close()


def test_totals_are_shown_on_a_phone(browser: Any, tmp_path: Path) -> None:
    old, new = (explain(compiled(layers), title=str(layers)) for layers in (1, 2))
    for name, text in {"one": render(old), "both": render_comparison(old, new)}.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        page = Opened(browser, tmp_path / f"{name}.html", "", 390)
        seen = page("[...$('figures').children].every(figure => figure.getBoundingClientRect().right <= 390)")
        assert page.page.is_visible("#figures") and seen and page("document.documentElement.scrollWidth") <= 390
        assert page("$('canvas').getBoundingClientRect().height") > 300
        page.close()


def test_two_reports_are_compared_as_a_table(browser: Any, tmp_path: Path) -> None:
    old, new = (report_of(explain(compiled(layers))) for layers in (1, 2))
    (tmp_path / "page.html").write_text(render_reports(old, new), encoding="utf-8")
    for width in (390, 1280):
        page = Opened(browser, tmp_path / "page.html", "", width)
        assert not page.page.is_visible("#stage") and page.page.is_visible("#list .row >> nth=0")
        assert page.page.is_visible("#figures") and "3 → 6" in str(page.page.text_content("#figures"))
        assert page("document.documentElement.scrollWidth") <= width
    assert any(text.startswith("~ rms_norm") for text in page.page.locator("#list .row").all_text_contents())
    page.press("j", "b", ".", "f", "e", "g", "1")
    page.page.fill("#filter", "swiglu")
    assert page("[...document.querySelectorAll('#list .row')].length") == 1
    page.close()
