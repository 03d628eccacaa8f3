"""Differences between graphs: nothing for equal ones, and what a pass did for others."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fusec.debug.diff import diff_graphs, diff_lines, fingerprint
from fusec.ir.graph import Graph
from tests.tools.sample import decoder, tensor


def chain(ops: list[str]) -> Graph:
    graph = Graph("chain")
    value = graph.add_input(tensor(4), "x")
    for op in ops:
        value = graph.add_node(op, (value,)).result
    graph.set_outputs([value])
    return graph


OPS = st.lists(st.sampled_from(["neg", "exp", "sqrt", "tanh"]), min_size=1, max_size=12)


@given(OPS)
@settings(max_examples=30, deadline=None)
def test_equal_graphs_have_no_difference(ops: list[str]) -> None:
    assert not diff_graphs(chain(ops), chain(ops))
    assert fingerprint(chain(ops)) == fingerprint(chain(ops))


@given(OPS, OPS)
@settings(max_examples=40, deadline=None)
def test_every_node_is_kept_added_or_removed(one: list[str], two: list[str]) -> None:
    before, after = chain(one), chain(two)
    diff = diff_graphs(before, after)
    assert len(diff.pairs) + len(diff.added) == len(after)
    assert len(diff.pairs) + len(diff.removed) == len(before)
    assert all(new.op is old.op for new, old in diff.pairs.items())


def test_insertion_is_one_node() -> None:
    diff = diff_graphs(chain(["neg", "exp", "sqrt"]), chain(["neg", "exp", "tanh", "sqrt"]))
    assert [n.op.name for n in diff.added] == ["tanh"]
    assert not diff.removed and [n.op.name for n in diff.rewired] == ["sqrt"]
    assert diff.summary() == "+1 ~1"


def test_fusing_removes_primitives_and_adds_regions() -> None:
    diff = diff_graphs(decoder(2), decoder(2, fused=True))
    assert {n.op.name for n in diff.added} == {"region"} and len(diff.added) == 6
    assert not any(n.is_op("contraction") for n in diff.removed)


def test_lines_of_a_difference() -> None:
    assert "-a" in list(diff_lines("a\nb", "b\nc")) and "+c" in list(diff_lines("a\nb", "b\nc"))
