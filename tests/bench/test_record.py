"""Results as they are written: the same data, a record a line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.record import _finite, _text, write_result

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_text_reads_back(value: Any) -> None:
    assert json.loads(_text(_finite(value))) == _finite(value)


@pytest.mark.parametrize("parts", [["q", "k"], []])
def test_a_record_takes_one_line(tmp_path: Path, parts: list[str]) -> None:
    site = {"kind": "norm", "parts": parts, "fused": True, "lost": 0}
    content = {"rows": [{"model": "llama", "shares": {"flops": 0.5}, "sites": [site, site]}], 3: float("inf")}
    path = write_result("question", 7, content, str(tmp_path / "found.json"))  # type: ignore[arg-type]
    found, lines = json.loads(path.read_text()), path.read_text().splitlines()
    assert found["rows"] == content["rows"] and found["seed"] == 7 and found["3"] == "inf"
    assert [json.loads(line.strip().rstrip(",")) for line in lines if "norm" in line] == [site, site]
