"""What the README shows, runs."""

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(heading: str) -> str:
    """The first Python block under a heading."""
    found = re.search(rf"^#+ {heading}$.*?^```python\n(.*?)^```$", README, re.M | re.S)
    assert found, f"no Python under {heading!r}"
    return found[1]


@pytest.mark.slow
def test_the_quickstart_gives_what_eager_gives() -> None:
    import torch

    from fusec.dynamo import backend

    torch._dynamo.reset()
    if "fusec" not in torch._dynamo.list_backends():  # not installed, so torch does not know the entry point
        torch._dynamo.register_backend(backend, name="fusec")
    names: dict[str, Any] = {}
    exec(block("Quickstart"), names)
    tokens = torch.arange(1000, 1012)[None]
    with torch.no_grad():
        expected, found = (names[which](tokens).last_hidden_state for which in ("model", "compiled"))
    torch.testing.assert_close(found, expected)


def test_the_tools_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("Debugging in three commands"), names)
    assert [record.name for record in names["raised"].records] == ["canonicalize", "raise"]
    assert names["explanation"].launches("generated") and (tmp_path / "report.html").stat().st_size


def test_a_fusion_of_ones_own_is_declared() -> None:
    from fusec.rewriting.fusion import FUSIONS, Fusion

    names: dict[str, Any] = {}
    try:
        exec(compile(block("A fusion of your own"), "user_file.py", "exec"), names)
        assert isinstance(names["scaled_tanh_gate"], Fusion)
    finally:
        FUSIONS.pop("scaled_tanh_gate", None)
