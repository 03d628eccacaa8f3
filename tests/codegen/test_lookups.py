"""Kernels that load where an index says: embeddings, rows, elements; right, in one kernel, never out of range."""

import pytest
import torch

from fusec.analysis.memory import moved_bytes
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.ir.parser import parse_graph
from fusec.ir.types import DTYPES
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from tests.codegen.test_dynamic_indices import ROWS, agrees, both, grouped, kernel_of, program, raises
from tests.codegen.triton_regions import every_chip
from tests.combinations import rotating

EMBEDDED = """graph embedded(%words: f32[50, 40], %positions: f32[16, 40], %ids: i64[2, 5], %w: f32[40]) {
  %first: f32[5, 40] = slice(%positions) {dim=-2, start=2, stop=7, step=1}
  %at: i64[5] = iota() {size=5, dtype=i64, device="cpu"}
  %next: i64[5] = add(%at, 1)
  %e: f32[2, 5, 40] = take(%words, %ids) {dim=-2}
  %p: f32[5, 40] = take(%positions, %next) {dim=-2}
  %q: f32[2, 5, 40] = add(%e, %p)
  %h: f32[2, 5, 40] = add(%q, %first)
  %s: f32[2, 5, 40] = mul(%h, %h)
  %t: f32[2, 5, 1] = sum(%s) {dims=(-1,)}
  %r: f32[2, 5, 1] = rsqrt(%t)
  %n: f32[2, 5, 40] = mul(%h, %r)
  %y: f32[2, 5, 40] = mul(%n, %w)
  return %y, %h
}"""
IDS = torch.tensor([[3, 49, 0, 7, 7], [1, 2, 3, 4, 5]])


@both
def test_embeddings_and_the_norm_behind_them_are_one_kernel(target: str) -> None:
    inputs = torch.randn(50, 40), torch.randn(16, 40), IDS, torch.randn(40)
    made = agrees(EMBEDDED, *inputs, kinds=["kernel"], target=target)
    (kernel,) = made.kernels.values()
    assert kernel.kind == "row" and unproven_accesses(kernel) == []


@both
def test_rows_that_are_looked_up_are_normed_and_multiplied(target: str) -> None:
    """Several rows are a tile, each of them from a place of its own."""
    text = """graph project(%table: f32[9, 24], %ids: i64[3], %w: f32[40, 24]) {
      %e: f32[3, 24] = take(%table, %ids) {dim=-2}
      %s: f32[3, 24] = mul(%e, %e)
      %t: f32[3, 1] = sum(%s) {dims=(-1,)}
      %r: f32[3, 1] = rsqrt(%t)
      %n: f32[3, 24] = mul(%e, %r)
      %y: f32[3, 40] = contraction(%n, %w) {spec="az,bz->ab"}
      return %y
    }"""
    inputs = torch.randn(9, 24), torch.tensor([8, 0, 3]), torch.randn(40, 24)
    agrees(text, *inputs, kinds=["kernel"], target=target)


@both
def test_places_that_are_dear_to_find_are_checked_before_they_lie_in_scratch(target: str) -> None:
    """As T5's buckets of relative positions, in the kernel of a softmax."""
    text = """graph biased(%x: f32[3, 20], %w: f32[32]) {
      %log: f32[3, 20] = log(%x)
      %many: f32[3, 20] = mul(%log, 8.0)
      %at: i64[3, 20] = cast(%many) {dtype=i64}
      %e: f32[3, 20] = take(%w, %at) {dim=-1}
      %top: f32[3, 1] = max(%e) {dims=(-1,)}
      %d: f32[3, 20] = sub(%e, %top)
      %p: f32[3, 20] = exp(%d)
      %t: f32[3, 1] = sum(%p) {dims=(-1,)}
      %y: f32[3, 20] = div(%p, %t)
      return %y
    }"""
    made = agrees(text, torch.rand(3, 20) * 19 + 1, torch.randn(32), kinds=["kernel"], target=target)
    (kernel,) = made.kernels.values()
    assert unproven_accesses(kernel) == []


ROUNDED = {
    "exp": ("%f: f32[64] = exp(%x)", 5.2257466316223145, 186),
    "sigmoid": ("%s: f32[64] = sigmoid(%x) %f: f32[64] = mul(%s, 64.0)", 1.4, 52),
}
"""Floats that give an index close to the end: rounded the one way they are inside, the other way they are not."""


USES = {
    "read": "%e: f32[64] = take(%t, %at) {dim=-1} return %e",
    "write": "%n: f32[64] = neg(%x) %w: f32[LENGTH] = write(%t, %n, %at) {dim=-1} return %w",
}


@both
@pytest.mark.parametrize(("spelled", "x", "length"), ROUNDED.values(), ids=ROUNDED)
@pytest.mark.parametrize("use", USES)
def test_an_index_of_floats_stays_inside_however_it_is_rounded(
    spelled: str, x: float, length: int, use: str, target: str
) -> None:
    """e^5.2257466 is 185.99998 in the loop that checks, and 186 in the vectors of the loop that loads or stores."""
    body = f"{spelled} %at: i64[64] = cast(%f) {{dtype=i64}} {USES[use]}"
    made = program(f"graph g(%x: f32[64], %t: f32[LENGTH]) {{ {body} }}".replace("LENGTH", str(length)), target)
    (kernel,) = made.kernels.values()
    assert unproven_accesses(kernel) == []
    storage = torch.arange(float(length + 8))
    try:
        (result,) = made([torch.full((64,), x), storage[:length]])
    except IndexError:
        return
    finally:
        assert storage[length:].equal(torch.arange(float(length), length + 8))
    assert result.eq(length - 1).all() or use == "write"


@both
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_a_lookup_out_of_range_raises(wrong: int, target: str) -> None:
    inputs = torch.randn(50, 40), torch.randn(16, 40), IDS.clone(), torch.randn(40)
    inputs[2][1, 3] = wrong
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(inputs[2], inputs[0])
    with raises(target, wrong, 0, 50):
        program(EMBEDDED, target)(list(inputs))


@pytest.mark.parametrize("wrong", [{0: -1}, {0: 50}, {99: -1}, {99: 50}, {40: 2**40, 41: 7}, {5: -(2**40), 99: 60}])
def test_one_of_many_places_out_of_range_raises(wrong: dict[int, int]) -> None:
    """Many are checked together: one place that is wrong is named, if several are."""
    text = """graph taken(%table: f32[50, 7], %ids: i64[100]) {
  %y: f32[100, 7] = take(%table, %ids) {dim=-2}
  %z: f32[100, 7] = exp(%y)
  return %z
}"""
    ids = torch.arange(100) % 50
    agrees(text, torch.randn(50, 7), ids, kinds=["kernel"])
    for at, place in wrong.items():
        ids[at] = place
    out = [place for place in wrong.values() if not 0 <= place < 50]
    with pytest.raises(IndexError, match="|".join(f"index {place} is out of bounds" for place in out)):
        program(text)([torch.randn(50, 7), ids])


def test_no_places_at_all_are_in_range() -> None:
    text = """graph taken(%table: f32[50, 7], %ids: i64[n, 0]) {
  %y: f32[n, 0, 7] = take(%table, %ids) {dim=-2}
  %z: f32[n, 0, 7] = exp(%y)
  return %z
}"""
    (found,) = program(text)([torch.randn(50, 7), torch.zeros(70, 0, dtype=torch.int64)])
    assert found.shape == (70, 0, 7)


def test_no_places_are_in_range_where_their_dim_is_split() -> None:
    """Each place is read at 0, whatever the row, since there is none."""
    text = """graph taken(%table: f32[0, 4], %ids: i64[0]) {
  %e: f32[0, 4] = take(%table, %ids) {dim=-2}
  %v: f32[0, 2, 4] = reshape(%e) {shape=(0, 2, 4)}
  %y: f32[0, 1, 4] = sum(%v) {dims=(-2,)}
  return %y
}"""
    made = program(text)
    (found,) = made([torch.randn(0, 4), torch.zeros(0, dtype=torch.int64)])
    assert found.shape == (0, 1, 4)
    assert not any(map(unproven_accesses, made.kernels.values()))


@pytest.mark.parametrize(("table", "index", "dim", "around"), [
    ((7, 30), (40,), -1, ""),  # lanes along the places
    ((7, 30), (3, 2), -2, ""),
    ((4, 7, 5), (6,), -2, ""),
    ((7, 30), (), -2, ""),
    ((1, 30), (4,), -2, ""),
    ((30, 7), (6, 3), -2, "%t: {dtype}[7, 30] = permute(%table) {{dims=(1, 0)}}"),
    ((9, 30), (6,), -2, "%t: {dtype}[7, 30] = slice(%table) {{dim=-2, start=1, stop=8, step=1}}"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32"])
@both
def test_lookups_along_any_dim_and_through_views(
    table: tuple[int, ...], index: tuple[int, ...], dim: int, around: str, dtype: str, target: str
) -> None:
    seen = (7, 30) if around else table
    result = (*seen[: dim + len(seen)], *index, *seen[dim + len(seen) + 1 :])
    text = f"""graph lookup(%table: {dtype}{list(table)}, %ids: i64{list(index)}) {{
      {around.format(dtype=dtype)}
      %e: {dtype}{list(result)} = take({"%t" if around else "%table"}, %ids) {{dim={dim}}}
      %y: {dtype}{list(result)} = add(%e, %e)
      return %y
    }}"""
    data = (8 * torch.randn(table)).to(torch_dtype(DTYPES[dtype]))
    agrees(text, data, torch.randint(0, seen[dim], index), kinds=["kernel"], target=target)


@pytest.mark.parametrize(("dim", "dtype"), rotating((-1, -2, -3), ("f32", "bf16", "bool")))
@both
def test_each_element_is_looked_up_by_itself(dim: int, dtype: str, target: str) -> None:
    text = f"""graph lookup(%table: {dtype}[3, 9, 20], %at: i64[2, 8, 18]) {{
      %e: {dtype}[2, 8, 18] = gather(%table, %at) {{dim={dim}}}
      %y: f32[2, 8, 18] = cast(%e) {{dtype=f32}}
      return %y
    }}"""
    data, length = (8 * torch.randn(3, 9, 20)).to(torch_dtype(DTYPES[dtype])), (3, 9, 20)[dim]
    made = agrees(text, data, torch.randint(0, length, (2, 8, 18)), kinds=["kernel"], target=target)
    for wrong in (length, -1):
        with raises(target, wrong, dim + 3, length, RuntimeError):
            made([data, torch.full((2, 8, 18), wrong)])


@both
def test_lookups_in_a_table_of_unknown_length(target: str) -> None:
    text = """graph sizes(%table: f32[s0, 6], %ids: i64[s1, s2]) {
      %e: f32[s1, s2, 6] = take(%table, %ids) {dim=-2}
      %y: f32[s1, s2, 6] = exp(%e)
      return %y
    }"""
    sizes = {"s0": 11, "s1": 5, "s2": 3}
    made = agrees(text, torch.randn(11, 6), torch.randint(0, 11, (5, 3)), kinds=["kernel"], target=target, **sizes)
    with pytest.raises(IndexError, match="of size s0" if target == "triton" else "11 is .* dimension 0 with size 11"):
        made([torch.randn(11, 6), torch.full((5, 3), 11)])


@pytest.mark.parametrize("body", [
    "%t: f32[9, 4] = exp(%x) %e: f32[2, 4] = take(%t, %at) {dim=-2} return %e",
    "%e: f32[2, 4] = take(%x, %at) {dim=-2} %n: f32[2, 4] = neg(%e) "
    "%w: f32[9, 4] = write(%x, %n, %at) {dim=-2} return %e",
    "%i: i64[4] = take(%at, %at) {dim=-1} %e: f32[4, 4] = take(%x, %i) {dim=-2} return %e",
    "%s: i64[1] = sum(%at) {dims=(-1,)} %e: f32[1, 4] = take(%x, %s) {dim=-2} return %e",
])  # fmt: skip
@both
def test_a_kernel_looks_up_only_what_lies_there_already(body: str, target: str) -> None:
    """Not in what it computes or writes, and at places that it can tell beforehand."""
    text = f"graph g(%x: f32[9, 4], %at: i64[2]) {{ {body} }}"
    if "take(%at, %at)" in text:
        text = text.replace("i64[4]", "i64[2]").replace("f32[4, 4]", "f32[2, 4]")
    inputs = torch.randn(9, 4), torch.tensor([1, 0])
    expected = [x.clone() for x in inputs]
    (value,) = evaluate(parse_graph(text), expected, {}, mutate=True)
    made = program(text, target)
    assert len(made.steps) == 2
    (found,) = made(list(inputs))
    torch.testing.assert_close(found, value)
    torch.testing.assert_close(inputs[0], expected[0])


def test_only_the_rows_that_are_looked_up_count() -> None:
    (region,) = [n for n in grouped(EMBEDDED).nodes if n.is_op("region")]
    rows, positions = 2 * 5 * 40 * 4, 5 * 40 * 4
    # The positions are read as a slice as well, which counts as the whole table.
    assert moved_bytes(region) == rows + positions + 16 * 40 * 4 + IDS.numel() * 8 + 40 * 4 + 2 * rows
    (region,) = [n for n in grouped(ROWS).nodes if n.is_op("region")]
    assert moved_bytes(region) == 2 * (2 * 3 * 4 * 20 * 4) + 4 * 8 + 8


@every_chip
@pytest.mark.parametrize("text", ["rows", "embedded"])
def test_assertions_compile(text: str, chip: str) -> None:
    from fusec.codegen.triton.compile import compile_for

    report = compile_for(kernel_of({"rows": ROWS, "embedded": EMBEDDED}[text], "triton"), chip)
    assert report.ok, report.problems
    assert report.assertions
