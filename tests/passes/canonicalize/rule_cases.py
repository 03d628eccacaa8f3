"""One case for every rule of canonicalisation, in the order of its files."""

from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph

SORTED = (
    "%where: i64[5, 1] = argsort(%x) {descending=true, count=1}\n%ids: i64[5] = reshape(%where) {shape=(5,)}\n"
    "%at: i64[5] = argsort(%ids) {descending=false, count=5}\n%s: i64[5] = take(%ids, %at) {dim=-1}\n"
)
"""The column of the largest element of each row, sorted."""

CASES: dict[str, tuple[str, str, list[str]]] = {
    # Numbers.
    "constant-folding": ("%x: f32[3, 4]", "%a: f32[] = add(1.5:f32, 2.0:f32)\n%r: f32[3, 4] = mul(%x, %a)", ["mul"]),
    "cast-of-number": (
        "%x: bf16[3, 4]",
        '%c: f32[] = constant() {value=0.125, dtype=f32, device="cpu"}\n'
        "%a: bf16[] = cast(%c) {dtype=bf16}\n%r: bf16[3, 4] = mul(%x, %a)",
        ["mul"],
    ),
    # Casts.
    "neutral-cast": ("%x: f32[3, 4]", "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "cast-through-wider": (
        "%x: bf16[3, 4]",
        "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%b: bf16[3, 4] = cast(%a) {dtype=bf16}\n%r: bf16[3, 4] = exp(%b)",
        ["exp"],
    ),
    "rounded-arithmetic": (
        "%x: bf16[3, 4], %y: bf16[3, 4]",
        "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%b: f32[3, 4] = cast(%y) {dtype=f32}\n%c: f32[3, 4] = mul(%a, %b)\n"
        "%r: bf16[3, 4] = cast(%c) {dtype=bf16}",
        ["mul"],
    ),
    # Arithmetic.
    "constant-right": ("%x: f32[3, 4]", "%r: f32[3, 4] = add(2.0, %x)", ["add"]),
    "times-one": ("%x: f32[3, 4]", "%a: f32[3, 4] = mul(%x, 1.0)\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "plus-zero": ("%x: f32[3, 4]", "%a: f32[3, 4] = sub(%x, 0.0)\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "single-elements": ("%x: f32[3, 1]", "%a: f32[3, 1] = max(%x) {dims=(-1,)}\n%r: f32[3, 1] = exp(%a)", ["exp"]),
    "all-lowest": (
        "%x: f32[3, 4]",
        "%a: bool[3, 4] = eq(%x, -inf)\n%r: bool[3, 1] = min(%a) {dims=(-1,)}",
        ["max", "eq"],
    ),
    "minus-constant": ("%x: f32[3, 4]", "%r: f32[3, 4] = sub(%x, 0.1)", ["add"]),
    "plus-negative": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = neg(%x)\n%b: f32[3, 4] = exp(%x)\n%r: f32[3, 4] = add(%a, %b)",
        ["exp", "sub"],
    ),
    "times-minus-one": ("%x: f32[3, 4]", "%r: f32[3, 4] = mul(%x, -1.0)", ["neg"]),
    "double-negation": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = neg(%x)\n%b: f32[3, 4] = neg(%a)\n%r: f32[3, 4] = exp(%b)",
        ["exp"],
    ),
    "small-power": ("%x: f32[3, 4]", "%r: f32[3, 4] = pow(%x, 3.0)", ["mul", "mul"]),
    "divide-by-power-of-two": ("%x: f32[3, 4]", "%r: f32[3, 4] = div(%x, 8.0)", ["mul"]),
    "one-over": ("%x: f32[3, 4]", "%r: f32[3, 4] = div(1.0, %x)", ["reciprocal"]),
    "reciprocal-root": ("%x: f32[3, 4]", "%a: f32[3, 4] = sqrt(%x)\n%r: f32[3, 4] = reciprocal(%a)", ["rsqrt"]),
    "exponential-of-logarithm": (
        "%x: f32[3, 4]",
        "%m: f32[3, 1] = max(%x) {dims=(-1,)}\n%a: f32[3, 4] = sub(%x, %m)\n%e: f32[3, 4] = exp(%a)\n"
        "%s: f32[3, 1] = sum(%e) {dims=(-1,)}\n%l: f32[3, 1] = log(%s)\n%b: f32[3, 4] = sub(%a, %l)\n"
        "%r: f32[3, 4] = exp(%b)",
        ["max", "sub", "exp", "sum", "div"],
    ),
    "where-of-known-condition": (
        "%x: f32[3, 4], %m: bool[3, 4]",
        "%a: f32[3, 4] = where(%m, %x, %x)\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "where-of-true-and-false": (
        "%m: bool[3, 4]",
        '%t: bool[] = constant() {value=true, dtype=bool, device="cpu"}\n'
        '%f: bool[] = constant() {value=false, dtype=bool, device="cpu"}\n'
        "%a: bool[3, 4] = where(%m, %t, %f)\n%r: bool[3, 4] = not(%a)",
        ["not"],
    ),
    "where-of-negation": (
        "%x: f32[3, 4], %m: bool[3, 4]",
        "%a: bool[3, 4] = not(%m)\n%r: f32[3, 4] = where(%a, %x, 1.0)",
        ["where"],
    ),
    "comparison-of-bools": (
        "%x: f32[3, 4], %m: bool[3, 4]",
        '%f: bool[] = constant() {value=false, dtype=bool, device="cpu"}\n'
        "%a: bool[3, 4] = eq(%m, %f)\n%b: bool[3, 4] = ne(%a, %f)\n%r: f32[3, 4] = where(%b, %x, 1.0)",
        ["where"],
    ),
    "neutral-bool": (
        "%m: bool[3, 4]",
        '%c: bool[] = constant() {value=true, dtype=bool, device="cpu"}\n'
        "%a: bool[3, 4] = and(%m, %c)\n%r: bool[3, 4] = not(%a)",
        ["not"],
    ),
    "decided-comparison": (
        "%m: bool[4], %x: f32[3, 4]",
        '%i: i64[3] = iota() {size=3, dtype=i64, device="cpu"}\n%p: i64[3, 1] = reshape(%i) {shape=(3, 1)}\n'
        "%g: bool[3, 1] = ge(%p, 0)\n%a: bool[3, 4] = and(%g, %m)\n%r: f32[3, 4] = where(%a, %x, 1.0)",
        ["where"],
    ),
    "decided-extreme": (
        "%x: f32[4, 3]",
        '%i: i64[4] = iota() {size=4, dtype=i64, device="cpu"}\n%j: i64[4] = neg(%i)\n'
        "%c: i64[4] = minimum(%j, 0)\n%a: i64[4] = neg(%c)\n%f: f32[4] = cast(%a) {dtype=f32}\n"
        "%b: f32[4, 1] = reshape(%f) {shape=(4, 1)}\n%r: f32[4, 3] = add(%x, %b)",
        ["iota", "cast", "reshape", "add"],
    ),
    # Views.
    "same-shape-view": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = reshape(%x) {shape=(3, 4)}\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "identity-permute": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = permute(%x) {dims=(0, 1)}\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "full-slice": (
        "%x: f32[3, 4]",
        "%a: f32[3, 4] = slice(%x) {dim=-1, start=0, stop=4, step=1}\n%r: f32[3, 4] = exp(%a)",
        ["exp"],
    ),
    "reshape-of-reshape": (
        "%x: f32[3, 4]",
        "%a: f32[12] = reshape(%x) {shape=(12,)}\n%r: f32[2, 6] = reshape(%a) {shape=(2, 6)}",
        ["reshape"],
    ),
    "ones-before-expanding": (
        "%x: f32[3, 1, 4]",
        "%a: f32[3, 1, 4] = exp(%x)\n%b: f32[2, 3, 1, 4] @(0, 4, 4, 1) = expand(%a) {shape=(2, 3, 1, 4)}\n"
        "%r: f32[2, 3, 4] = reshape(%b) {shape=(2, 3, 4)}",
        ["exp", "reshape", "expand"],
    ),
    "permute-of-permute": (
        "%x: f32[3, 4, 5]",
        "%a: f32[5, 3, 4] @(1, 20, 5) = permute(%x) {dims=(2, 0, 1)}\n"
        "%r: f32[4, 5, 3] @(5, 1, 20) = permute(%a) {dims=(2, 0, 1)}",
        ["permute"],
    ),
    "expand-of-expand": (
        "%x: f32[1, 4]",
        "%a: f32[3, 4] @(0, 1) = expand(%x) {shape=(3, 4)}\n%r: f32[2, 3, 4] @(0, 0, 1) = expand(%a) {shape=(2, 3, 4)}",
        ["expand"],
    ),
    "permute-of-ones": ("%x: f32[3, 1, 4]", "%r: f32[1, 3, 4] @(4, 4, 1) = permute(%x) {dims=(1, 0, 2)}", ["reshape"]),
    "permute-before-ones": (
        "%x: f32[3, 4]",
        "%a: f32[3, 1, 4] = reshape(%x) {shape=(3, 1, 4)}\n%r: f32[4, 1, 3] @(1, 4, 4) = permute(%a) {dims=(2, 1, 0)}",
        ["permute", "reshape"],
    ),
    "implicit-broadcast": (
        "%x: f32[3, 4], %y: f32[4]",
        "%a: f32[3, 4] @(0, 1) = expand(%y) {shape=(3, 4)}\n%r: f32[3, 4] = add(%x, %a)",
        ["add"],
    ),
    "compute-before-expanding": (
        "%y: f32[4]",
        "%a: f32[3, 4] @(0, 1) = expand(%y) {shape=(3, 4)}\n%r: f32[3, 4] = exp(%a)",
        ["exp", "expand"],
    ),
    "compute-before-repeating": (
        "%x: f32[3, 4, 1]",
        "%a: f32[3, 4, 2] @(4, 1, 0) = expand(%x) {shape=(3, 4, 2)}\n%b: f32[3, 8] = reshape(%a) {shape=(3, 8)}\n"
        "%c: f32[3, 8] = cos(%b)\n%d: f32[3, 8] = sin(%b)\n%r: f32[3, 8] = mul(%c, %d)",
        ["cos", "expand", "sin", "mul", "reshape"],
    ),
    # Slices.
    "concat-of-all-slices": (
        "%x: f32[3, 2, 4]",
        "%a: f32[3, 1, 4] @(8, 4, 1) = slice(%x) {dim=-2, start=0, stop=1, step=1}\n"
        "%b: f32[3, 1, 4] @(8, 4, 1) = slice(%x) {dim=-2, start=1, stop=2, step=1}\n"
        "%c: f32[3, 4] = reshape(%a) {shape=(3, 4)}\n%d: f32[3, 4] = reshape(%b) {shape=(3, 4)}\n"
        "%e: f32[3, 8] = concat(%c, %d) {dim=-1}\n%r: f32[3, 8] = exp(%e)",
        ["exp", "reshape"],
    ),
    "slice-of-slice": (
        "%x: f32[3, 12]",
        "%a: f32[3, 5] @(12, 2) = slice(%x) {dim=-1, start=1, stop=11, step=2}\n"
        "%r: f32[3, 2] @(12, 4) = slice(%a) {dim=-1, start=1, stop=5, step=2}",
        ["slice"],
    ),
    "slice-of-concat": (
        "%x: f32[3, 4], %y: f32[3, 5]",
        "%a: f32[3, 9] = concat(%x, %y) {dim=-1}\n%r: f32[3, 2] @(9, 1) = slice(%a) {dim=-1, start=5, stop=7, step=1}",
        ["slice"],
    ),
    "slice-across-parts": (
        "%x: f32[3, 4], %y: f32[3, 5]",
        "%a: f32[3, 9] = concat(%x, %y) {dim=-1}\n%r: f32[3, 4] @(9, 1) = slice(%a) {dim=-1, start=2, stop=6, step=1}",
        ["slice", "slice", "concat"],
    ),
    "slice-of-computed": (
        "%x: f32[3, 7, 5], %y: f32[7, 1], %b: f32[5]",
        "%m: f32[3, 7, 1] = sum(%x) {dims=(-1,)}\n%d: f32[3, 7, 5] = sub(%x, %m)\n"
        "%f: f32[3, 7, 5] = mul(%d, %y)\n%a: f32[3, 7, 5] = add(%f, %b)\n"
        "%r: f32[3, 1, 5] @(35, 5, 1) = slice(%a) {dim=-2, start=6, stop=7, step=1}",
        ["slice", "sum", "sub", "slice", "mul", "add"],
    ),
    "slice-of-product": (
        "%x: f32[3, 7, 4], %w: f32[5, 4]",
        '%p: f32[3, 7, 5] = contraction(%x, %w) {spec="abz,cz->abc"}\n'
        "%a: f32[3, 4, 5] @(35, 10, 1) = slice(%p) {dim=-2, start=0, stop=7, step=2}\n%r: f32[3, 4, 5] = exp(%a)",
        ["slice", "contraction", "exp"],
    ),
    "concat-of-one": ("%x: f32[3, 4]", "%a: f32[3, 4] = concat(%x) {dim=-1}\n%r: f32[3, 4] = exp(%a)", ["exp"]),
    "concat-of-equal": (
        "%x: f32[3, 4]",
        "%e: f32[3, 4] = exp(%x)\n%a: f32[3, 12] = concat(%e, %e, %e) {dim=-1}\n%r: f32[3, 12] = exp(%a)",
        ["exp", "exp", "reshape", "expand", "reshape"],
    ),
    "concat-of-concat": (
        "%x: f32[3, 4]",
        "%e: f32[3, 4] = exp(%x)\n%a: f32[3, 8] = concat(%x, %e) {dim=-1}\n%r: f32[3, 12] = concat(%a, %x) {dim=-1}",
        ["exp", "concat"],
    ),
    "concat-of-permuted": (
        "%x: f32[3, 4], %y: f32[3, 5]",
        "%a: f32[4, 3] @(1, 4) = permute(%x) {dims=(1, 0)}\n%b: f32[5, 3] @(1, 5) = permute(%y) {dims=(1, 0)}\n"
        "%r: f32[9, 3] = concat(%a, %b) {dim=-2}",
        ["concat", "permute"],
    ),
    "concat-of-neighbours": (
        "%x: f32[3, 6]",
        "%a: f32[3, 2] @(6, 1) = slice(%x) {dim=-1, start=1, stop=3, step=1}\n"
        "%b: f32[3, 2] @(6, 1) = slice(%x) {dim=-1, start=3, stop=5, step=1}\n%c: f32[3, 4] = concat(%a, %b) {dim=-1}\n"
        "%r: f32[3, 4] = exp(%c)",
        ["slice", "exp"],
    ),
    # Contractions.
    "canonical-labels": (
        "%x: f32[3, 4], %w: f32[5, 4]",
        '%r: f32[3, 5] = contraction(%x, %w) {spec="mk,nk->mn"}',
        ["contraction"],
    ),
    "single-terms": (
        "%x: f32[2, 3, 1], %y: f32[2, 1, 5]",
        '%r: f32[2, 3, 5] = contraction(%x, %y) {spec="abz,azc->abc"}',
        ["mul"],
    ),
    "single-columns": (
        "%x: f32[2, 3, 4], %y: f32[2, 1, 4]",
        '%r: f32[2, 3, 1] = contraction(%x, %y) {spec="abz,acz->abc"}',
        ["mul", "sum"],
    ),
    "looked-up-matrices": (
        "%x: f32[2, 4], %w: f32[3, 4, 5]",
        '%i: i64[2] = iota() {size=2, dtype=i64, device="cpu"}\n%e: f32[2, 4, 5] = take(%w, %i) {dim=-3}\n'
        '%r: f32[2, 5] = contraction(%x, %e) {spec="az,azb->ab"}',
        ["iota", "take", "reshape", "permute", "mul", "sum", "reshape"],
    ),
    "byte-products": (
        "%x: i8[3, 4], %w: u8[5, 4]",
        "%a: f32[3, 4] = cast(%x) {dtype=f32}\n%b: f32[5, 4] = cast(%w) {dtype=f32}\n"
        '%r: f32[3, 5] = contraction(%a, %b) {spec="az,bz->ab"}',
        ["contraction", "cast"],
    ),
    "zero-points": (
        "%x: i8[3, 4], %z: i8[3, 1], %w: u8[5, 4]",
        "%a: i32[3, 4] = cast(%x) {dtype=i32}\n%b: i32[3, 1] = cast(%z) {dtype=i32}\n%c: i32[3, 4] = sub(%a, %b)\n"
        '%d: i32[5, 4] = cast(%w) {dtype=i32}\n%r: i32[3, 5] = contraction(%c, %d) {spec="az,bz->ab"}',
        ["cast", "expand", "contraction", "contraction", "mul", "sub"],
    ),
    "column-sums": (
        "%x: i8[3, 4], %w: i8[5, 4]",
        '%a: i32[3, 5] = contraction(%x, %w) {spec="az,bz->ab", dtype=i32}\n%b: i64[5, 4] = cast(%w) {dtype=i64}\n'
        "%c: i64[5, 1] = sum(%b) {dims=(-1,)}\n%d: i32[5, 1] = cast(%c) {dtype=i32}\n%e: i32[5] = reshape(%d) "
        "{shape=(5,)}\n%r: i32[3, 5] = sub(%a, %e)",
        ["contraction", "expand", "contraction", "reshape", "sub"],
    ),
    "permuted-operand": (
        "%x: f32[3, 4], %w: f32[4, 5]",
        '%a: f32[5, 4] @(1, 5) = permute(%w) {dims=(1, 0)}\n%r: f32[3, 5] = contraction(%x, %a) {spec="az,bz->ab"}',
        ["contraction"],
    ),
    "scaled-operand": (
        "%x: f32[6, 4], %w: f32[4, 5]",
        "%a: f32[4, 6] @(1, 4) = permute(%x) {dims=(1, 0)}\n%b: f32[4, 6] @(1, 4) = mul(%a, 0.25)\n"
        '%r: f32[6, 5] = contraction(%b, %w) {spec="za,zb->ab"}',
        ["mul", "contraction"],
    ),
    "rows-first": (
        "%x: f32[3, 4], %w: f32[5, 4]",
        '%r: f32[3, 5] = contraction(%w, %x) {spec="bz,az->ab"}',
        ["contraction"],
    ),
    "single-row": (
        "%x: f32[1, 4], %w: f32[5, 4]",
        "%e: f32[1, 4] = exp(%x)\n%a: f32[4, 1] = reshape(%e) {shape=(4, 1)}\n"
        '%b: f32[5, 1] = contraction(%w, %a) {spec="az,zb->ab"}\n%r: f32[1, 5] = reshape(%b) {shape=(1, 5)}',
        ["exp", "contraction"],
    ),
    "permuted-result": (
        "%x: f32[2, 3, 4], %w: f32[5, 4]",
        '%a: f32[2, 5, 3] = contraction(%w, %x) {spec="bz,acz->abc"}\n'
        "%r: f32[2, 3, 5] @(15, 1, 3) = permute(%a) {dims=(0, 2, 1)}",
        ["contraction"],
    ),
    "broadcast-operand": (
        "%x: f32[2, 3, 4], %w: f32[4, 5]",
        "%a: f32[2, 4, 5] @(0, 5, 1) = expand(%w) {shape=(2, 4, 5)}\n"
        '%r: f32[2, 3, 5] = contraction(%x, %a) {spec="abz,azc->abc"}',
        ["contraction"],
    ),
    "inserted-ones": (
        "%x: f32[3, 4], %w: f32[4, 5]",
        "%a: f32[1, 3, 4] = reshape(%x) {shape=(1, 3, 4)}\n%b: f32[1, 4, 5] = reshape(%w) {shape=(1, 4, 5)}\n"
        '%c: f32[1, 3, 5] = contraction(%a, %b) {spec="abz,azc->abc"}\n%r: f32[3, 5] = reshape(%c) {shape=(3, 5)}',
        ["contraction"],
    ),
    "flattened-rows": (
        "%x: f32[2, 3, 4], %w: f32[5, 4]",
        '%a: f32[6, 4] = reshape(%x) {shape=(6, 4)}\n%b: f32[6, 5] = contraction(%a, %w) {spec="az,bz->ab"}\n'
        "%r: f32[2, 3, 5] = reshape(%b) {shape=(2, 3, 5)}",
        ["contraction"],
    ),
    "flattened-operands": (
        "%x: f32[2, 3, 4], %w: f32[4]",
        "%a: f32[6, 4] = reshape(%x) {shape=(6, 4)}\n%b: f32[6, 4] = add(%a, %w)\n"
        "%r: f32[2, 3, 4] = reshape(%b) {shape=(2, 3, 4)}",
        ["add"],
    ),
    # Concatenations.
    "softmax-of-parts": (
        "%x: f32[3, 4], %y: f32[3, 1]",
        "%a: f32[3, 5] = concat(%x, %y) {dim=-1}\n%r: f32[3, 1] = max(%a) {dims=(-1,)}",
        ["max", "maximum"],
    ),
    # Sorted rows.
    "groups-of-sorted-rows": (
        "%x: f32[5, 3]",
        f"{SORTED}%f: f32[5] = cast(%s) {{dtype=f32}}\n"
        '%h: f32[3] = opaque(%f) {target="aten.histc.default", args=($0, 3, 0, 2), kwargs=(), '
        "operand_types=(f32[5],)}\n"
        "%d: i64[3] = cast(%h) {dtype=i64}\n%e: i64[3] = cumsum(%d) {dim=-1}\n"
        '%n: i64[5] = iota() {size=5, dtype=i64, device="cpu"}\n%p: i64[5, 1] = reshape(%n) {shape=(5, 1)}\n'
        "%l: bool[5, 3] = le(%e, %p)\n%c: i64[5, 3] = cast(%l) {dtype=i64}\n%t: i64[5, 1] = sum(%c) {dims=(-1,)}\n"
        "%g: f32[5, 1] = cast(%t) {dtype=f32}\n%r: f32[5, 3] = add(%x, %g)",
        ["argsort", "reshape", "argsort", "take", "cast", "reshape", "add"],
    ),
    "counted-rows": (
        "%x: f32[3, 4]",
        '%i: i64[6] = iota() {size=6, dtype=i64, device="cpu"}\n%j: i64[6] = floor_divide(%i, 2)\n'
        "%a: f32[6, 4] = take(%x, %j) {dim=-2}\n%r: f32[6, 4] = exp(%a)",
        ["exp", "reshape", "expand", "reshape"],
    ),
    "restored-order": (
        "%x: f32[5, 3]",
        f"{SORTED}%a: f32[5, 3] = take(%x, %at) {{dim=-2}}\n%b: f32[5, 3] = exp(%a)\n"
        '%z: i64[5] = full() {value=0, shape=(5,), dtype=i64, device="cpu"}\n'
        '%n: i64[5] = iota() {size=5, dtype=i64, device="cpu"}\n%i: i64[5] = write(%z, %n, %at) {dim=-1}\n'
        "%r: f32[5, 3] = take(%b, %i) {dim=-2}",
        ["exp"],
    ),
    # Lookups.
    "grouped-products": (
        "%x: f32[5, 3], %y: f32[5, 4], %w: f32[3, 4, 4]",
        f"{SORTED}%f: f32[5] = cast(%s) {{dtype=f32}}\n"
        '%h: f32[3] = opaque(%f) {target="aten.histc.default", args=($0, 3, 0, 2), kwargs=(), '
        "operand_types=(f32[5],)}\n"
        "%d: i32[3] = cast(%h) {dtype=i32}\n%e: i32[3] = cumsum(%d) {dim=-1}\n"
        '%r: f32[5, 4] = opaque(%y, %w, %e) {target="aten._grouped_mm.default", args=($0, $1, $2), kwargs=(), '
        "operand_types=(f32[5, 4], f32[3, 4, 4], i32[3])}",
        ["argsort", "reshape", "argsort", "take", "take", "reshape", "permute", "mul", "sum", "reshape"],
    ),
    "looked-up-rows": (
        "%x: f32[2, 3], %w: i8[3, 4], %s: f32[3, 1]",
        "%at: i64[2, 1] = argsort(%x) {descending=true, count=1}\n"
        "%f: f32[3, 4] = cast(%w) {dtype=f32}\n%t: f32[3, 4] = mul(%f, %s)\n"
        "%r: f32[2, 1, 4] = take(%t, %at) {dim=-2}",
        ["argsort", "reshape", "take", "cast", "take", "mul", "reshape"],
    ),
    # Scatters.
    "scattered-number": (
        "%x: f32[5, 3]",
        "%at: i64[5, 2] = argsort(%x) {descending=true, count=2}\n"
        '%z: f32[5, 3] = full() {value=0.0, shape=(5, 3), dtype=f32, device="cpu"}\n%w: f32[5, 3] = write(%z, %x)\n'
        "%n: f32[5, 2] = expand(7.0:f32) {shape=(5, 2)}\n%r: f32[5, 3] = scatter(%w, %n, %at) {dim=-1}",
        ["argsort", "iota", "slice", "eq", "slice", "eq", "or", "where"],
    ),
}
"""Inputs, body with the result %r, and the operations that are left."""


def row(body: str, inputs: str = "%x: f32[3, 4]") -> Graph:
    """A graph of these lines, by default about one small matrix."""
    return parse_graph(f"graph g({inputs}) {{\n{body}\n}}\n")


def graph_of(name: str) -> Graph:
    """The case of a rule, before it is applied."""
    inputs, body, _ = CASES[name]
    return row(body + "\nreturn %r", inputs)
