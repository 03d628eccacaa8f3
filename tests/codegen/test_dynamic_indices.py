"""Kernels that store at places found at run time, or over what they have read: right, in place, never out of range."""

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from fusec.analysis.memory import moved_bytes
from fusec.codegen import target_named
from fusec.codegen.cpp.printer import PARALLEL_WORK
from fusec.codegen.program.program import Program, build_program
from fusec.codegen.program.runtime import raise_out_of_range
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import MAX_CHECKS, Check, ClampIndex, Kernel, Loop, Statement, When, walk
from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.ir.types import DTYPES
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import normalize
from fusec.passes.grouping import Group
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from tests.contexts import context_of, plan_of

both = pytest.mark.parametrize("target", ["cpp", "triton"])
"""Triton's kernels run in its interpreter."""


def grouped(text: str, target: str = "cpp") -> Graph:
    graph = parse_graph(text)
    verify_graph(graph)
    Group().apply(graph, context_of(target))
    return graph


def program(text: str, target: str = "cpp") -> Program:
    if target == "triton":
        pytest.importorskip("triton")
    context = context_of(target, Config(strict=True))
    return build_program(grouped(text, target), target_named(target), context)


def agrees(text: str, *inputs: Tensor, kinds: list[str], target: str = "cpp", **sizes: int) -> Program:
    """Run a graph and its program on copies of the inputs: outputs and inputs end up the same, nothing else moves."""
    made = program(text, target)
    assert [step.kind for step in made.steps] == kinds, made.source
    theirs, ours = ([x.clone() for x in inputs] for _ in range(2))
    expected = evaluate(parse_graph(text), theirs, sizes, mutate=True)
    places = [x.data_ptr() for x in ours]
    found = made(list(ours))
    assert [x.data_ptr() for x in ours] == places
    for a, b in zip([*found, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    return made


ROWS = """graph rows(%cache: f32[2, 3, 9, 20], %new: f32[2, 4, 3, 20], %at: i64[4], %first: i64[]) {
  %y: f32[2, 4, 3, 20] = exp(%new)
  %heads: f32[2, 3, 4, 20] = permute(%y) {dims=(0, 2, 1, 3)}
  %place: i64[4] = add(%at, %first)
  %w: f32[2, 3, 9, 20] = write(%cache, %heads, %place) {dim=-2}
  return %w
}"""
AT = torch.tensor([3, 0, 5, 2])


def raises(target: str, index: int, dim: int, size: int, error: type[Exception] = IndexError) -> Any:
    """What is raised for a place that does not exist; a program on a GPU asserts, and knows neither place nor dim."""
    if target == "triton":
        return pytest.raises(IndexError, match=f"index out of bounds for a dimension of size {size}$")
    return pytest.raises(error, match=f"index {index} is out of bounds for dimension {dim} with size {size}")


@both
def test_rows_go_where_an_index_says(target: str) -> None:
    cache, new = torch.randn(2, 3, 9, 20), torch.randn(2, 4, 3, 20)
    agrees(ROWS, cache, new, AT, torch.tensor(3), kinds=["kernel"], target=target)


@both
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64", "i64"])
def test_elements_go_where_an_index_says(dtype: str, target: str) -> None:
    """Here the lanes run along the places themselves."""
    text = f"""graph elements(%x: {dtype}[40], %new: {dtype}[19], %at: i64[19]) {{
      %y: {dtype}[19] = add(%new, %new)
      %w: {dtype}[40] = write(%x, %y, %at) {{dim=-1}}
      return %w
    }}"""
    made = program(text, target)
    (kernel,) = made.kernels.values()
    theirs = torch_dtype(DTYPES[dtype])
    x, new, at = torch.randn(40).to(theirs), torch.randn(19).to(theirs), torch.randperm(40)[:19]
    expected = x.clone().index_copy_(0, at, new + new)
    made([x, new, at])
    torch.testing.assert_close(x, expected)
    assert unproven_accesses(kernel) == []


@both
def test_lanes_beyond_the_end_have_no_place(target: str) -> None:
    """What is loaded there is 0, of which this makes -1."""
    text = """graph elements(%x: f32[40], %new: f32[19], %at: i64[19]) {
      %y: f32[19] = add(%new, %new)
      %place: i64[19] = sub(%at, 1)
      %w: f32[40] = write(%x, %y, %place) {dim=-1}
      return %w
    }"""
    agrees(text, torch.randn(40), torch.randn(19), 1 + torch.randperm(40)[:19], kinds=["kernel"], target=target)


@both
def test_places_along_a_dim_of_unknown_length(target: str) -> None:
    text = """graph sizes(%cache: f32[s0, 6], %new: f32[s1, 6], %at: i64[s1]) {
      %y: f32[s1, 6] = neg(%new)
      %w: f32[s0, 6] = write(%cache, %y, %at) {dim=-2}
      return %w
    }"""
    sizes = {"s0": 11, "s1": 5}
    at = torch.randperm(11)[:5]
    made = agrees(text, torch.randn(11, 6), torch.randn(5, 6), at, kinds=["kernel"], target=target, **sizes)
    with pytest.raises(IndexError, match="of size s0" if target == "triton" else "11 is .* dimension 0 with size 11"):
        made([torch.randn(11, 6), torch.randn(5, 6), at + 11 - at.max()])


@both
@pytest.mark.parametrize("wrong", [-1, 9, 2**40, -(2**40)])
def test_a_place_out_of_range_raises_and_nothing_is_stored(wrong: int, target: str) -> None:
    """On a GPU nothing there, that is: other programs may have stored."""
    made = program(ROWS, target)
    cache = torch.randn(2, 3, 9, 20)
    before = cache.clone()
    at = AT.clone()
    at[2] = wrong
    with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for dimension 2 with size 9"):
        cache.clone().index_copy_(2, at, torch.randn(2, 3, 4, 20))
    with raises(target, wrong, 2, 9):
        made([cache, torch.randn(2, 4, 3, 20), at, torch.tensor(0)])
    assert torch.equal(cache[:, :, [1, 4, 6, 7, 8]], before[:, :, [1, 4, 6, 7, 8]])
    assert target == "triton" or torch.equal(cache, before)


def test_an_absurd_place_is_told_as_far_as_it_fits() -> None:
    text = ROWS.replace("add(%at, %first)", "sub(%at, %first)")
    with pytest.raises(IndexError, match="index -18014398509481984 is out of bounds"):
        program(text)([torch.randn(2, 3, 9, 20), torch.randn(2, 4, 3, 20), AT, torch.tensor(2**62)])


def test_the_last_check_that_a_kernel_may_have_is_told_apart() -> None:
    places = [(0, length, "", IndexError) for length in range(1, MAX_CHECKS + 1)]
    for wrong in (7, -7):
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for dimension 0 with size {MAX_CHECKS}$"):
            raise_out_of_range(wrong * 256 + MAX_CHECKS, places)


def kernel_of(text: str, target: str = "cpp") -> Kernel:
    (region,) = [n for n in grouped(text, target).nodes if n.is_op("region")]
    return target_named(target).schedule(plan_of(region, target), "kernel")


def test_a_program_asserts_its_places_ahead_of_what_it_stores_there() -> None:
    pytest.importorskip("triton")
    kernel = kernel_of(ROWS, "triton")
    assert unproven_accesses(kernel) == []
    text = target_named("triton").print(kernel)
    assert text.index("tl.device_assert(") < text.index("tl.store(")
    short = tuple(replace(b, numel=b.numel - 1) if b.role == "update" else b for b in kernel.buffers)
    assert unproven_accesses(replace(kernel, buffers=short))
    assert unproven_accesses(replace(kernel, body=without_checks(kernel.body)))


def without_checks(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    inner = (replace(s, body=without_checks(s.body)) if isinstance(s, (Loop, When)) else s for s in body)
    return tuple(s for s in inner if not isinstance(s, Check))


def test_what_is_stored_at_a_place_is_proven_to_stay_inside() -> None:
    kernel = kernel_of(ROWS)
    assert unproven_accesses(kernel) == []
    (place,) = [s for s in walk(kernel.body) if isinstance(s, ClampIndex)]
    assert [s.length for s in walk(kernel.body) if isinstance(s, Check)] == [place.length] == [9]
    short = tuple(replace(b, numel=b.numel - 1) if b.role == "update" else b for b in kernel.buffers)
    assert unproven_accesses(replace(kernel, buffers=short))
    *checks, grid = kernel.body
    assert unproven_accesses(replace(kernel, body=(grid, *checks)))
    text = target_named("cpp").print(kernel)
    assert text.index("return out_of_range(") < text.index("store(")


@both
def test_two_writes_at_the_same_places_are_checked_once(target: str) -> None:
    text = """graph pair(%keys: f32[9, 4], %values: f32[9, 4], %x: f32[2, 4], %at: i64[2]) {
      %y: f32[2, 4] = exp(%x)
      %k: f32[9, 4] = write(%keys, %y, %at) {dim=-2}
      %v: f32[9, 4] = write(%values, %y, %at) {dim=-2}
      return %k, %v
    }"""
    assert len([s for s in walk(kernel_of(text, target).body) if isinstance(s, Check)]) == 1


@both
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_keys_and_values_go_to_their_places_together(dtype: str, target: str) -> None:
    """Though values are only moved; the places are computed in the same kernel."""
    text = f"""graph store(%keys: {dtype}[2, 9, 20], %values: {dtype}[2, 9, 20], %k: {dtype}[4, 40], %v: {dtype}[4, 40],
                       %first: i64[]) {{
      %steps: i64[4] = iota() {{size=4, dtype=i64, device="cpu"}}
      %at: i64[4] = add(%steps, %first)
      %kr: {dtype}[4, 2, 20] = reshape(%k) {{shape=(4, 2, 20)}}
      %kp: {dtype}[2, 4, 20] = permute(%kr) {{dims=(1, 0, 2)}}
      %kn: {dtype}[2, 4, 20] = neg(%kp)
      %vr: {dtype}[4, 2, 20] = reshape(%v) {{shape=(4, 2, 20)}}
      %vp: {dtype}[2, 4, 20] = permute(%vr) {{dims=(1, 0, 2)}}
      %wk: {dtype}[2, 9, 20] = write(%keys, %kn, %at) {{dim=-2}}
      %wv: {dtype}[2, 9, 20] = write(%values, %vp, %at) {{dim=-2}}
      return %wk, %wv
    }}"""
    kind = torch_dtype(DTYPES[dtype])
    inputs = [torch.randn(shape).to(kind) for shape in ((2, 9, 20), (2, 9, 20), (4, 40), (4, 40))]
    agrees(text, *inputs, torch.tensor(5), kinds=["kernel"], target=target)
    with raises(target, 9, 1, 9):
        program(text, target)([*inputs, torch.tensor(6)])


@both
def test_a_product_stores_its_rows_in_a_cache(target: str) -> None:
    text = """graph project(%cache: f32[1, 2, 9, 8], %x: f32[1, 3, 16], %w: f32[16, 16], %at: i64[3]) {
      %p: f32[1, 3, 16] = contraction(%x, %w) {spec="abz,cz->abc"}
      %r: f32[1, 3, 2, 8] = reshape(%p) {shape=(1, 3, 2, 8)}
      %h: f32[1, 2, 3, 8] = permute(%r) {dims=(0, 2, 1, 3)}
      %new: f32[1, 2, 9, 8] = write(%cache, %h, %at) {dim=-2}
      %twice: f32[1, 2, 9, 8] = add(%new, %new)
      return %twice
    }"""
    inputs = torch.randn(1, 2, 9, 8), torch.randn(1, 3, 16), torch.randn(16, 16)
    made = agrees(text, *inputs, torch.tensor([4, 0, 7]), kinds=["kernel", "kernel"], target=target)
    with raises(target, 9, 2, 9):
        made([*inputs, torch.tensor([4, 9, 7])])


@both
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_cache_is_filled_once_and_takes_its_rows_in_place(dtype: str, target: str) -> None:
    if target == "triton":
        pytest.importorskip("triton")
    text = f"""graph start(%x: {dtype}[2, 3, 20], %at: i64[3]) {{
      %y: {dtype}[2, 3, 20] = neg(%x)
      %keys: {dtype}[2, 9, 20] = full() {{value=0.5, shape=(2, 9, 20), dtype={dtype}}}
      %values: {dtype}[2, 9, 20] = full() {{value=0.5, shape=(2, 9, 20), dtype={dtype}}}
      %k: {dtype}[2, 9, 20] = write(%keys, %y, %at) {{dim=-2}}
      %v: {dtype}[2, 9, 20] = write(%values, %x, %at) {{dim=-2}}
      return %k, %v
    }}"""
    graph = parse_graph(text)
    normalize(graph)
    Group().apply(graph, context_of(target))
    made = build_program(graph, target_named(target), context_of(target, Config(strict=True)))
    assert sorted(step.kind for step in made.steps) == ["kernel"] + ["write"] * 2
    whole, rows = (n * DTYPES[dtype].bytes for n in (2 * 9 * 20, 2 * 3 * 20))
    assert sum(moved_bytes(n) for n in graph.nodes) == 2 * whole + 3 * rows + 3 * 8
    x, at = torch.randn(2, 3, 20).to(torch_dtype(DTYPES[dtype])), torch.tensor([4, 0, 7])
    for a, b in zip(made([x, at]), evaluate(parse_graph(text), [x, at], {}), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------ what is read and written


def test_an_input_is_replaced_where_it_was_read() -> None:
    text = """graph step(%mean: f32[70], %x: f32[70], %count: i64[]) {
      %half: f32[70] = mul(%mean, 0.5)
      %next: f32[70] = add(%half, %x)
      %old: f32[70] = sub(%next, %mean)
      %w: f32[70] = write(%mean, %next)
      %new: f32[70] = exp(%w)
      %more: i64[] = add(%count, 1)
      %c: i64[] = write(%count, %more)
      return %old, %new
    }"""
    agrees(text, torch.randn(70), torch.randn(70), torch.tensor(7), kinds=["kernel", "kernel"])


def test_a_number_that_a_kernel_reads_throughout_is_replaced_last() -> None:
    text = """graph count(%count: i64[], %new: f32[40]) {
      %steps: i64[40] = iota() {size=40, dtype=i64, device="cpu"}
      %places: i64[40] = add(%steps, %count)
      %more: i64[] = add(%count, 1)
      %c: i64[] = write(%count, %more)
      return %places
    }"""
    agrees(text, torch.tensor(7), torch.randn(40), kinds=["kernel"])


@pytest.mark.parametrize("cpu", [False, True])
def test_a_row_that_others_read_many_times_over_is_replaced_by_a_kernel_behind_them(cpu: bool) -> None:
    """On a GPU one thread of a program would replace what another one still has to read."""
    text = """graph scale(%x: f32[8], %a: f32[8, 6], %z: f32[8]) {
      %c: f32[8, 1] = reshape(%x) {shape=(8, 1)}
      %s: f32[8, 6] = mul(%a, %c)
      %n: f32[8] = neg(%z)
      %w: f32[8] = write(%x, %n)
      return %s
    }"""
    graph = parse_graph(text)
    Group().apply(graph, context_of("cpp" if cpu else "triton"))
    reader, writer = (n for n in graph.nodes if n.is_op("region"))
    assert not reader.written and [v.name for v in writer.written] == ["x"]
    agrees(text, torch.randn(8), torch.randn(8, 6), torch.randn(8), kinds=["kernel", "kernel"])


def test_a_row_that_every_other_one_reads_is_replaced_last() -> None:
    text = """graph first(%x: f32[4, 5], %z: f32[4, 5], %a: f32[4, 5, 3]) {
      %row: f32[1, 5] = slice(%x) {dim=-2, start=0, stop=1, step=1}
      %b: f32[1, 5, 1] = reshape(%row) {shape=(1, 5, 1)}
      %y: f32[4, 5, 3] = mul(%a, %b)
      %n: f32[4, 5] = neg(%z)
      %w: f32[4, 5] = write(%x, %n)
      return %y
    }"""
    agrees(text, torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 5, 3), kinds=["kernel", "kernel"])


@pytest.mark.parametrize("spelled", [
    "%p: f32[8, 6] = permute(%other) {dims=(1, 0)} %v: f32[8, 6] = add(%x, %p)",
    "%a: f32[4, 6] = slice(%x) {dim=-2, start=0, stop=4, step=1} %b: f32[4, 6] = slice(%x) {dim=-2, start=4, stop=8, "
    "step=1} %n: f32[4, 6] = neg(%b) %v: f32[8, 6] = concat(%n, %a) {dim=-2}",
    "%s: f32[8, 1] = sum(%x) {dims=(-1,)} %v: f32[8, 6] = div(%x, %s)",
    "%s: f32[1, 6] = sum(%x) {dims=(-2,)} %v: f32[8, 6] = div(%x, %s)",
    "%f: f32[6, 8] = reshape(%x) {shape=(6, 8)} %t: f32[8, 6] = permute(%f) {dims=(1, 0)} %v: f32[8, 6] = exp(%t)",
])  # fmt: skip
def test_an_input_that_is_read_elsewhere_too_gets_its_new_value_afterwards(spelled: str) -> None:
    text = f"graph g(%x: f32[8, 6], %other: f32[6, 8]) {{ {spelled} %w: f32[8, 6] = write(%x, %v) return %v }}"
    x, other = torch.randn(8, 6), torch.randn(6, 8)
    expected = [a.clone() for a in (x, other)]
    (value,) = evaluate(parse_graph(text), expected, {}, mutate=True)
    (found,) = program(text)([x, other])
    torch.testing.assert_close(x, expected[0])
    torch.testing.assert_close(found, value)


@pytest.mark.parametrize("size", [8, 40])
def test_an_input_and_its_transpose_become_their_sum(size: int) -> None:
    """Each element is read where another iteration would replace it."""
    x = f"f32[{size}, {size}]"
    text = f"""graph g(%x: {x}) {{
      %t: {x} = permute(%x) {{dims=(1, 0)}}
      %v: {x} = sub(%x, %t)
      %w: {x} = write(%x, %v)
      return %v
    }}"""
    agrees(text, torch.randn(size, size), kinds=["kernel", "write"])


@both
def test_a_kernel_that_reads_the_old_rows_comes_first(target: str) -> None:
    text = """graph old(%cache: f32[9, 4], %x: f32[2, 4], %at: i64[2]) {
      %total: f32[9, 1] = sum(%cache) {dims=(-1,)}
      %y: f32[2, 4] = exp(%x)
      %w: f32[9, 4] = write(%cache, %y, %at) {dim=-2}
      %after: f32[9, 1] = sum(%w) {dims=(-1,)}
      %both: f32[9, 1] = sub(%after, %total)
      return %both
    }"""
    agrees(text, torch.randn(9, 4), torch.randn(2, 4), torch.tensor([4, 1]), kinds=["kernel"] * 3, target=target)


def test_counters_on_a_gpu_are_one_kernel() -> None:
    """Run by Triton's interpreter."""
    pytest.importorskip("triton")
    graph, inputs = parse_graph(counters(3)), [torch.tensor(i) for i in range(3)]
    x = torch.randn(64, 64) / 8
    expected = [*(i + 1 for i in inputs), *evaluate(graph, [*inputs, x], {})]
    Group().apply(graph, context_of("triton", Config(small_m=0)))
    made = build_program(graph, target_named("triton"), context_of("triton", Config(strict=True)))
    assert [step.kind for step in made.steps] == ["vendor"] * 3 + ["kernel"] * 2
    torch.testing.assert_close([*inputs, *made([*inputs, x])], [*expected[:3], expected[3]])


def counters(layers: int) -> str:
    names = [f"%c{i}" for i in range(layers)]
    nodes = "".join(f"%n{i}: i64[] = add({c}, 1) %w{i}: i64[] = write({c}, %n{i}) " for i, c in enumerate(names))
    chain = "".join(
        f"%f{i}: f32[] = cast({c}) {{dtype=f32}} %x{i + 1}: f32[64, 64] = contraction(%x{i}, %x{i}) "
        f'{{spec="ab,bc->ac"}} %x{i + 1}s: f32[64, 64] = add(%x{i + 1}, %f{i}) '
        for i, c in enumerate(names)
    )
    inputs = ", ".join([*(f"{c}: i64[]" for c in names), "%x0: f32[64, 64]"])
    return f"graph counters({inputs}) {{ {chain} {nodes} return %x{layers}s }}"


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("%y: f32[2, 4] = take(%table, %at) {dim=-2} %e: f32[2, 4] = exp(%y) return %e", 2 * 4),
        ("%y: f32[2, 4] = exp(%x) %w: f32[9000, 4] = write(%table, %y, %at) {dim=-2} return %w", 2 * 4),
        ("%y: f32[1, 4] = sum(%table) {dims=(-2,)} return %y", 9000 * 4),
    ],
)
def test_threads_start_for_what_is_read_and_made_and_not_for_a_table(text: str, work: int) -> None:
    assert kernel_of(f"graph g(%table: f32[9000, 4], %x: f32[2, 4], %at: i64[2]) {{ {text} }}").work == work


@pytest.mark.parametrize(("rows", "n", "found"), [("s0", 384, 1), ("s0", 200, 84), (84, 200, 84)])
def test_threads_start_for_a_product_whatever_is_the_most_of_it(rows: object, n: int, found: int) -> None:
    """A weight of known size, and multiply-adds, count beside rows whose number only a call knows."""
    work = kernel_of(
        f"graph g(%x: f32[{rows}, {n}], %w: f32[{n}, {n}]) "
        f'{{ %y: f32[{rows}, {n}] = contraction(%x, %w) {{spec="ak,nk->an"}} return %y }}'
    ).work
    assert sympy.sympify(work).subs({s: found for s in sympy.sympify(work).free_symbols}) >= PARALLEL_WORK


def test_the_counters_of_all_layers_are_one_kernel() -> None:
    inputs = [torch.tensor(i) for i in range(5)]
    made: Any = agrees(counters(5), *inputs, torch.randn(64, 64) / 8, kinds=["kernel"] * 6)
    assert made.kernels.keys() >= {"add_write"}
