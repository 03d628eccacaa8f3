"""Index arithmetic: what views do to an index."""

import pytest

from fusec.ir.types import Size, symbol
from fusec.loops.affine import Affine, Axis, NotAffine, Unaligned, at_least, divide, reindex

S = symbol("s0")


def value(index: Affine, at: dict[Axis, int], sizes: dict[str, int]) -> int:
    def number(n: Size) -> int:
        return n if isinstance(n, int) else int(n.subs(sizes))

    return number(index.offset) + sum(number(c) * at[a] for a, c in index.terms)


def test_reshape_keeps_the_row_major_position() -> None:
    h, d = Axis(4), Axis(16)
    merged = reindex((Affine.of([(h, 1)]), Affine.of([(d, 1)])), (4, 16), (64,))
    assert [value(merged[0], {h: i, d: j}, {}) for i in range(4) for j in range(16)] == list(range(64))


def test_an_axis_is_split_by_the_factor_of_a_reshape() -> None:
    c = Axis(64)
    with pytest.raises(Unaligned) as cut:
        reindex((Affine.of([(c, 1)]),), (64,), (4, 16))
    assert cut.value.axis is c
    assert cut.value.factor == 16


def test_symbolic_rows_merge_and_split() -> None:
    b, s, d = Axis(S), Axis(8), Axis(64)
    index = tuple(Affine.of([(a, 1)]) for a in (b, s, d))
    rows, columns = reindex(index, (S, 8, 64), (S * 8, 64))
    assert value(rows, {b: 2, s: 3, d: 5}, {"s0": 7}) == 19
    assert value(columns, {b: 2, s: 3, d: 5}, {"s0": 7}) == 5
    with pytest.raises(Unaligned):
        reindex((Affine.of([(Axis(S * 8), 1)]), Affine.of([(d, 1)])), (S * 8, 64), (S, 8, 64))


def test_a_slice_that_crosses_rows_is_not_affine() -> None:
    c = Axis(6)
    with pytest.raises((NotAffine, Unaligned)):
        reindex((Affine.of([(c, 1)], 3),), (12,), (4, 3))


@pytest.mark.parametrize(
    ("a", "b", "certain"), [(3, 2, True), (2, 3, False), (S, 1, True), (S, 2, False), (S * 4 - 1, S + 2, True)]
)
def test_at_least_is_true_only_where_it_is_proven(a: Size, b: Size, certain: bool) -> None:
    assert at_least(a, b) == certain


def test_divide_returns_sizes_only() -> None:
    assert divide(12, 4) == 3
    assert divide(12, 5) is None
    assert divide(S * 64, 64) == S
    assert divide(S, 2) is None


def test_an_index_into_no_elements_keeps_its_axes() -> None:
    rows, columns = Axis(5), Axis(0)
    index = (Affine.of([(rows, 1)], 0), Affine.of([(columns, 1)], 0))
    *_, last = reindex(index, (5, 0), (0,))
    assert {axis for axis, _ in last.terms} == {rows, columns}
