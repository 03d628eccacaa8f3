"""What the finite field knows, and what it says it does not."""

import pytest
import torch

from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.verify import modular
from fusec.verify.field import Unknown, draw, evaluate_field, lift, same_elements
from fusec.verify.modular import BASES, PRIMES


def _formula(text: str) -> Graph:
    """A graph of one output from lines like ``%a = exp(%x)`` over x, y: f32[3, 4]."""
    lines = [line.strip().replace(" =", ": f32[3, 4] =", 1) for line in text.split(";")]
    body = "\n".join(lines)
    last = lines[-1].split(":")[0]
    return parse_graph(f"graph g(%x: f32[3, 4], %y: f32[3, 4]) {{\n{body}\nreturn {last} }}")


def _agree(left: str, right: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    inputs = [draw((3, 4), generator), draw((3, 4), generator)]
    (a,), (b,) = (evaluate_field(_formula(side), inputs, {}) for side in (left, right))  # type: ignore[misc]
    return bool(same_elements(a, b).all())


def test_the_tower_of_primes() -> None:
    for p, q, base in zip(PRIMES, PRIMES[1:], BASES, strict=False):
        assert (q - 1) % p == 0 and p % 8 == q % 8 == 7
        assert pow(base, p, q) == 1 and base != 1
        assert pow(3, q - 1, q) == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("%a = add(%x, %y); %b = mul(%a, %a)",
         "%a = mul(%x, %x); %b = mul(%x, %y); %c = mul(%b, 2); %d = mul(%y, %y); %e = add(%a, %c); %f = add(%e, %d)"),
        ("%a = add(%x, %y); %b = exp(%a)", "%a = exp(%x); %b = exp(%y); %c = mul(%a, %b)"),
        ("%a = exp(%x); %b = exp(%a)", "%a = exp(%x); %b = sub(%a, %y); %c = exp(%b); %d = exp(%y); %e = mul(%c, %d)"),
        ("%a = sigmoid(%x)", "%a = exp(%x); %b = add(%a, 1); %c = div(%a, %b)"),
        ("%a = tanh(%x)", "%a = mul(%x, 2); %b = sigmoid(%a); %c = mul(%b, 2); %d = sub(%c, 1)"),
        ("%a = rsqrt(%x)", "%a = sqrt(%x); %b = div(1, %a)"),
        ("%a = rsqrt(%x)", "%a = pow(%x, -0.5)"),
        ("%a = mul(%x, %y); %b = sqrt(%a)", "%a = sqrt(%x); %b = sqrt(%y); %c = mul(%a, %b)"),
        ("%a = mul(%x, %x); %b = sqrt(%a)", "%a = abs(%x)"),
        ("%a = sign(%x); %b = mul(%a, %x)", "%a = abs(%x)"),
        ("%a = pow(%x, 3)", "%a = mul(%x, %x); %b = mul(%a, %x)"),
        ("%a = neg(%x); %b = erf(%a)", "%a = erf(%x); %b = neg(%a)"),
        ("%a = neg(%x); %b = cos(%a)", "%a = cos(%x)"),
        ("%a = exp2(%x)", "%a = mul(%x, 0.6931471805599453); %b = exp(%a)"),
        ("%a = log2(%x)", "%a = log(%x); %b = mul(%a, 1.4426950408889634)"),
        ("%a = log1p(%x)", "%a = add(%x, 1); %b = log(%a)"),
        ("%a = expm1(%x)", "%a = exp(%x); %b = sub(%a, 1)"),
        ("%a = mul(%x, 0.1); %b = mul(%a, 10)", "%a = add(%x, 0)"),
        ("%a = mul(%x, 0.7071067811865476)", "%a = mul(%x, 0.5); %b = mul(%a, 1.4142135623730951)"),
        ("%a = maximum(%x, %y); %b = minimum(%x, %y); %c = add(%a, %b)", "%a = add(%y, %x)"),
        ("%a = div(%x, %y)", "%a = reciprocal(%y); %b = mul(%a, %x)"),
        ("%a = floor(%x)", "%a = add(%x, 0); %b = floor(%a)"),
    ],
)  # fmt: skip
def test_equal_formulas_agree(left: str, right: str) -> None:
    assert _agree(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("%a = sub(%x, %y)", "%a = sub(%y, %x)"),
        ("%a = add(%x, 1e-06)", "%a = add(%x, 1e-05)"),
        ("%a = add(%x, 1e-12)", "%a = add(%x, 2e-12)"),
        ("%a = exp(%x)", "%a = exp2(%x)"),
        ("%a = sigmoid(%x)", "%a = tanh(%x)"),
        ("%a = erf(%x)", "%a = sin(%x)"),
        ("%a = rsqrt(%x)", "%a = sqrt(%x)"),
        ("%a = floor(%x)", "%a = ceil(%x)"),
        ("%a = atan2(%x, %y)", "%a = atan2(%y, %x)"),
        ("%a = sqrt(%x); %b = sqrt(%a)", "%a = sqrt(%x)"),
    ],
)
def test_different_formulas_do_not(left: str, right: str) -> None:
    assert not _agree(left, right)


def test_reductions_contraction_and_views() -> None:
    left = parse_graph("""graph g(%x: f32[3, 4], %y: f32[5, 4]) {
      %m: f32[3, 1] = max(%x) {dims=(-1,)}
      %d: f32[3, 4] = sub(%x, %m)
      %e: f32[3, 4] = exp(%d)
      %s: f32[3, 1] = sum(%e) {dims=(-1,)}
      %p: f32[3, 4] = div(%e, %s)
      %c: f32[3, 5] = contraction(%p, %y) {spec="az,bz->ab"}
      %t: f32[5, 3] @(1, 5) = permute(%c) {dims=(1, 0)}
      %q: f32[1, 1] = prod(%t) {dims=(-2, -1)}
      return %t, %q }""")
    right = parse_graph("""graph g(%x: f32[3, 4], %y: f32[5, 4]) {
      %e: f32[3, 4] = exp(%x)
      %s: f32[3, 1] = sum(%e) {dims=(-1,)}
      %c: f32[5, 3] = contraction(%y, %e) {spec="az,bz->ab"}
      %r: f32[1, 3] = reshape(%s) {shape=(1, 3)}
      %t: f32[5, 3] = div(%c, %r)
      %a: f32[5, 1] = prod(%t) {dims=(-1,)}
      %q: f32[1, 1] = prod(%a) {dims=(-2,)}
      return %t, %q }""")
    generator = torch.Generator().manual_seed(0)
    inputs = [draw((3, 4), generator), draw((5, 4), generator)]
    for a, b in zip(evaluate_field(left, inputs, {}), evaluate_field(right, inputs, {}), strict=True):  # type: ignore[arg-type]
        assert bool(same_elements(a, b).all())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("%a: f32[4] = add(%x, -inf)", "the number -inf"),
        ('%a: f32[4] = opaque(%x) {target="aten.gelu.default", args=($0,)}', "aten.gelu.default"),
        ("%b: i64[4] = cast(%x) {dtype=i64} %a: f32[4] = cast(%b) {dtype=f32}", "a cast to i64"),
        ("%b: f32[4] = exp(%x) %c: f32[4] = exp(%b) %d: f32[4] = exp(%c) %a: f32[4] = exp(%d)", "exponential"),
    ],
)
def test_it_says_what_it_does_not_know(line: str, reason: str) -> None:
    graph = parse_graph(f"graph g(%x: f32[4]) {{\n{line}\nreturn %a }}")
    found = evaluate_field(graph, [draw((4,), torch.Generator().manual_seed(0))], {})
    assert isinstance(found, Unknown) and reason in found.reason


def test_integers_stay_ordinary() -> None:
    graph = parse_graph("""graph g(%x: f32[s0], %n: i64[s0]) {
      %i: i64[s0] = iota() {size=s0, dtype=i64}
      %m: bool[s0] = lt(%i, %n)
      %f: f32[s0] = cast(%i) {dtype=f32}
      %w: f32[s0] = where(%m, %x, %f)
      return %m, %w }""")
    x = draw((4,), torch.Generator().manual_seed(0))
    mask, chosen = evaluate_field(graph, [x, torch.tensor([1, 1, 9, 0])], {"s0": 4})  # type: ignore[misc]
    assert mask.tolist() == [True, False, True, False]
    assert chosen.top.tolist() == [x.top[0], 1, x.top[2], 3]


def test_contraction_does_not_overflow() -> None:
    p = PRIMES[-1]
    a, b = torch.full((1, 5000), p - 1), torch.full((5000, 1), p - 2)
    assert modular.bilinear(torch.matmul, a, b, p).item() == 5000 * (p - 1) * (p - 2) % p
    assert lift(0.1).map(lambda x, q: x * 10 % q).top.item() == 1


def test_a_convolution_of_tiles_is_a_contraction() -> None:
    sides = (
        """graph g(%x: f32[2, 3, 8], %w: f32[5, 3, 4]) {
          %a: f32[2, 5, 2] = convolution(%x, %w) {stride=(4,), padding=(0,), dilation=(1,), groups=1} return %a }""",
        """graph g(%x: f32[2, 3, 8], %w: f32[5, 3, 4]) {
          %t: f32[2, 3, 2, 4] = reshape(%x) {shape=(2, 3, 2, 4)}
          %a: f32[2, 5, 2] = contraction(%t, %w) {spec="azcy,bzy->abc"} return %a }""",
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [draw((2, 3, 8), generator), draw((5, 3, 4), generator)]
    (a,), (b,) = (evaluate_field(parse_graph(side), inputs, {}) for side in sides)  # type: ignore[misc]
    assert same_elements(a, b).all()


@pytest.mark.parametrize("combine", ["add", "mul", "maximum"])
def test_elements_that_are_scattered_are_sums(combine: str) -> None:
    graph = parse_graph(f"""graph g(%x: f32[4], %new: f32[3], %at: i64[3]) {{
      %a: f32[4] = scatter(%x, %new, %at) {{dim=-1, combine="{combine}"}} return %a }}""")
    generator = torch.Generator().manual_seed(0)
    x, new, at = draw((4,), generator), draw((3,), generator), torch.tensor([1, 1, 2])
    found = evaluate_field(graph, [x, new, at], {})
    if combine != "add":
        assert isinstance(found, Unknown)
        return
    rows = torch.stack([x.top, torch.tensor([0, new.top[0] + new.top[1], new.top[2], 0])])
    assert found[0].top.tolist() == (rows.sum(0) % PRIMES[-1]).tolist()  # type: ignore[index]
