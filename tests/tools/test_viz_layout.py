"""What the layout of the page must hold, for any graph."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fusec.viz.layout import COLUMN_GAP, Layout, lay_out, rank

SIZES = st.lists(st.tuples(st.floats(10, 300), st.floats(10, 60)), min_size=1, max_size=24)


@st.composite
def acyclic(draw: st.DrawFn) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    sizes = draw(SIZES)
    pairs = list(combinations(range(len(sizes)), 2))
    return sizes, draw(st.lists(st.sampled_from(pairs), max_size=40)) if pairs else []


def overlaps(layout: Layout) -> bool:
    rows: dict[int, list[tuple[float, float]]] = {}
    for slot in layout.slots:
        rows.setdefault(slot.row, []).append((slot.x - slot.width / 2, slot.x + slot.width / 2))
    return any(
        left[1] > right[0] + 0.3
        for row in rows.values()
        for left, right in zip(sorted(row), sorted(row)[1:], strict=False)
    )


@given(acyclic())
@settings(max_examples=60, deadline=None)
def test_edges_run_down_and_boxes_keep_apart(graph: tuple[list[tuple[float, float]], list[tuple[int, int]]]) -> None:
    sizes, edges = graph
    layout = lay_out(sizes, edges)
    assert all(layout.slots[a].row < layout.slots[b].row for a, b in edges)
    assert not overlaps(layout)
    assert all(-0.1 <= s.x - s.width / 2 and s.x + s.width / 2 <= layout.width + 0.1 for s in layout.slots)
    for edge in layout.edges:
        path = (edge.start, *edge.bends, edge.stop)
        rows = [layout.slots[i].row for i in path]
        assert edge.far or rows == list(range(rows[0], rows[-1] + 1))


@given(SIZES, st.data())
@settings(max_examples=40, deadline=None)
def test_cycles_are_cut_and_every_box_is_placed(sizes: list[tuple[float, float]], data: st.DataObject) -> None:
    box = st.integers(0, len(sizes) - 1)
    layout = lay_out(sizes, data.draw(st.lists(st.tuples(box, box), max_size=40)))
    assert len(layout.slots) >= len(sizes)
    assert not overlaps(layout)


@given(acyclic())
@settings(max_examples=30, deadline=None)
def test_layout_is_deterministic_and_ignores_repeated_edges(
    graph: tuple[list[tuple[float, float]], list[tuple[int, int]]],
) -> None:
    sizes, edges = graph
    assert lay_out(sizes, edges) == lay_out(sizes, edges + edges)


def test_chain_is_straight_beside_its_residual() -> None:
    layout = lay_out([(100, 30)] * 5, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)])
    centres = [layout.slots[i].x for i in range(5)]
    assert max(centres) - min(centres) < COLUMN_GAP


def test_adding_a_box_below_moves_nothing_above() -> None:
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    before, after = lay_out([(80, 30)] * 4, edges), lay_out([(80, 30)] * 5, [*edges, (3, 4)])
    assert before.slots[:4] == after.slots[:4]


def test_thousands_of_boxes_rank_in_one_go() -> None:
    edges = [(i, i + 1) for i in range(4999)] + [(i, i + 9) for i in range(0, 4990, 7)]
    assert rank(5000, edges) == list(range(5000))
    assert len(lay_out([(90, 30)] * 5000, edges).slots) > 5000
