"""The option ``report``: what a process compiles as one page, or as figures."""

import json
from pathlib import Path

import pytest
import torch

from fusec.debug.compare import changes
from tests.tools.sample import unpacked


def compiled(path: Path, rows: tuple[int, ...] = (2, 3)) -> None:
    torch._dynamo.reset()
    model = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="fusec", options={"report": str(path)})
    with torch.no_grad():
        for n in rows:
            torch.testing.assert_close(model(x := torch.randn(n, 8)), torch.softmax(x * 2, -1))


def test_a_page_has_all_compiles_with_their_kernels_and_guards(tmp_path: Path) -> None:
    compiled(tmp_path / "report.html")
    page = unpacked((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [g["reports"][0]["kernels"][0]["name"] for g in page["graphs"]] == ["scaled_softmax", "scaled_softmax"]
    assert all("scaled_softmax(" in g["reports"][0]["kernels"][0]["source"] for g in page["graphs"])
    (event,) = page["events"]
    assert event["kind"] == "recompile" and "size mismatch at index 0. expected 2, actual 3" in event["text"]


def test_figures_are_a_report_to_compare_with(tmp_path: Path) -> None:
    compiled(tmp_path / "one.json", rows=(2,))
    compiled(tmp_path / "two.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("one", "two"))
    assert "kernels: 1 → 2" in map(str, changes(one, two))


def test_a_report_that_cannot_be_written_does_not_fail_the_compile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(tmp_path / "missing" / "report.html", rows=(2,))
    assert "report.html is not written: FileNotFoundError" in caplog.text
