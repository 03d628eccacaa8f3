"""Values that are written as a whole are read where they were written, unless that would change what is read."""

import pytest

from fusec.ir.forwarding import forward_writes
from fusec.ir.parser import parse_graph
from fusec.ir.verifier import verify_graph

BEFORE = "graph g(%x: f32[8, 4], %y: f32[8, 4]) {{ %v: f32[8, 4] = add(%x, %y) %e: f32[8, 4] = exp(%v) {rest} }}"
WRITE = "%w: f32[8, 4] = write(%x, %v)"


@pytest.mark.parametrize(
    ("rest", "moved"),
    [
        (f"{WRITE} return %e", 1),
        (f"%t: f32[4, 8] = permute(%v) {{dims=(1, 0)}} {WRITE} return %t", 0),
        (f"{WRITE} return %e, %v", 0),
        (f"%o: f32[8, 4] = mul(%e, %x) {WRITE} return %o", 0),
        (f"%t: f32[4, 8] = permute(%x) {{dims=(1, 0)}} %o: f32[4, 8] = exp(%t) {WRITE} return %o, %e", 1),
        (WRITE.replace("%v", "%e") + " return %w", 0),
        ("%w: f32[8, 4] = write(%x, %y) %o: f32[8, 4] = exp(%y) return %o", 0),
        ("%s: f32[4, 4] = slice(%v) {dim=-2, start=0, stop=4, step=1} %z: f32[8, 4] = concat(%s, %s) {dim=-2}"
         "%w: f32[8, 4] = write(%x, %z) return %e", 0),
    ],
    ids=["read", "returned", "a view returned", "the old one read behind", "the old one read before", "one reader",
         "an input", "another"],
)  # fmt: skip
def test_readers_go_where_a_value_is_written(rest: str, moved: int) -> None:
    graph = parse_graph(BEFORE.format(rest=rest))
    assert forward_writes(graph, 1) == moved
    verify_graph(graph)
    (write,) = [n for n in graph.nodes if n.is_op("write")]
    readers = {user.op.name for user in write.operands[1].users}
    assert (readers == {"write"}) == bool(moved or "%w: f32[8, 4] = write(%x, %e)" in rest or "%z" in rest)
    assert not forward_writes(parse_graph(BEFORE.format(rest=rest)), 32)


@pytest.mark.parametrize("later", ["write(%w, %v)", "write(%w, %v, %i) {dim=-2}"])
def test_what_is_written_once_more_is_not_read_where_it_was_written(later: str) -> None:
    graph = parse_graph(f"""graph g(%x: f32[8, 8], %i: i64[8]) {{
      %v: f32[8, 8] = exp(%x)
      %w: f32[8, 8] = write(%x, %v)
      %again: f32[8, 8] = {later}
      return %again
    }}""")
    assert not forward_writes(graph, 1)


def test_a_view_of_what_is_written_once_more_is_not_read_where_it_was_written() -> None:
    graph = parse_graph("""graph g(%x: f32[8, 8]) {
      %v: f32[8, 8] = exp(%x)
      %t: f32[8, 8] @(1, 8) = permute(%v) {dims=(1, 0)}
      %w: f32[8, 8] = write(%x, %v)
      %again: f32[8, 8] = write(%w, %t)
      return %again
    }""")
    assert not forward_writes(graph, 1)


def test_a_destination_of_a_write_stays_where_it_is() -> None:
    graph = parse_graph("""graph g(%x: f32[8, 8], %y: f32[8, 8], %i: i64[8]) {
      %v: f32[8, 8] = write(%x, %y)
      %copy: f32[8, 8] = write(%y, %v)
      %new: f32[8, 8] = exp(%copy)
      %again: f32[8, 8] = write(%v, %new, %i) {dim=-2}
      return %again
    }""")
    assert not forward_writes(graph, 1)
