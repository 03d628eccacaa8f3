"""Dead nodes: a write is dead only where nothing else sees the storage that it changes."""

import pytest

from fusec.ir.parser import parse_graph

STORAGE = """graph g(%x: f32[4], %at: i64[4]) {
  %s: f32[4] = full() {value=0.0, shape=(4,), dtype=f32, device="cpu"}
"""
WRITE = "  %w: f32[4] = write(%s, %x, %at) {dim=-1}\n"


def erased(text: str) -> int:
    return parse_graph(STORAGE + text + "}").erase_dead()


def test_a_write_to_storage_that_nothing_reads_is_dead() -> None:
    assert erased(WRITE + "  %y: f32[4] = exp(%x)\n  return %y\n") == 2


@pytest.mark.parametrize(
    "text",
    [
        WRITE + "  return %w\n",
        WRITE + "  return %s\n",
        "  %old: f32[4] = exp(%s)\n" + WRITE + "  return %old\n",
        "  %v: f32[2, 2] = reshape(%s) {shape=(2, 2)}\n" + WRITE + "  return %v\n",
        WRITE.replace("%s", "%x") + "  return %s\n",
    ],
    ids=["read", "storage returned", "storage read before", "view returned", "an input"],
)
def test_a_write_that_is_seen_stays(text: str) -> None:
    assert erased(text) == 0
