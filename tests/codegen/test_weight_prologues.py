"""Weights that are computed from packed integers: unpacked in the registers of the product, never in memory."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen import target_named
from fusec.codegen.cpp.schedules import gemm
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import ColumnDot, ComputedDot, walk
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.types import BF16
from fusec.reference.contract import Comparison, compare_outputs
from tests.codegen.instructions import emulate_pairs
from tests.combinations import rotating
from tests.machines import profile
from tests.packed import COLUMNS, DEPTH, FORMS, Packed, int8, per_group, scales


def compiled(form: Packed, rows: int, dtype: torch.dtype) -> tuple[Compiled, Callable[[], Comparison]]:
    """Return a layer with a norm before and a residual after it, compiled, and its comparison with eager."""
    torch.manual_seed(rows)
    x, parts = torch.randn(rows, DEPTH).to(dtype), form.parts()
    residual = torch.randn(rows, COLUMNS).to(dtype)

    def layer(x: Tensor, residual: Tensor, *parts: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (DEPTH,)), form.weight(*parts, x.dtype)) + residual

    found = compile_graph(trace(layer, (x, residual, *parts), symbolic=False), replace(Config(), strict=True))

    def compare() -> Comparison:
        rounded = [p.to(dtype) if p.dtype == torch.float32 else p for p in parts]
        dense = form.weight(*(p.double() if p.dtype == dtype else p for p in rounded), torch.float64)
        reference = F.linear(F.rms_norm(x.double(), (DEPTH,)), dense) + residual.double()
        return compare_outputs([layer(x, residual, *parts)], found.program([x, residual, *parts]), [reference], dtype)

    return found, compare


SETTINGS = [
    (1, torch.bfloat16), (13, torch.float32), (3, torch.float16), (1, torch.float32), (5, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("form", "setting"), rotating(list(FORMS), SETTINGS), ids=str)
def test_a_packed_layer_is_one_kernel(form: str, setting: tuple[int, torch.dtype]) -> None:
    found, compare = compiled(FORMS[form], *setting)
    comparison = compare()
    assert comparison.passed, comparison
    assert [step.kind for step in found.program.steps] == ["kernel"]


@pytest.mark.skipif(target_named("cpp").lanes != 16, reason="pairs fill registers of 16 lanes")
@pytest.mark.parametrize("form", ["int8 per channel", "int4, neighbours in a byte", "int4, halves in a byte"])
def test_pairs_of_bfloat16_as_emulated(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine, though few of them have the instructions."""
    emulate_pairs(monkeypatch)
    found, compare = compiled(FORMS[form], 5, torch.bfloat16)
    (kernel,) = found.program.kernels.values()
    assert any(b.name.startswith("left") and b.dtype == BF16 for b in kernel.buffers)
    assert (comparison := compare()).passed, comparison


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_many_rows_of_a_packed_layer_are_one_kernel(form: Packed) -> None:
    """In float32, on a machine where generated products of many rows are as fast as the library's."""
    many_rows(form, 70, torch.float32, profile(f32=100.0), ["kernel"])


@pytest.mark.parametrize(
    ("form", "dtype"),
    rotating(("int8 per group", "int4, neighbours in a byte", "GGUF Q4_0"), (torch.bfloat16, torch.float16)),
    ids=str,
)
def test_many_rows_of_half_types(form: str, dtype: torch.dtype) -> None:
    many_rows(FORMS[form], 70, dtype, profile(f32=100.0, bf16=100.0, f16=100.0), ["kernel"])


@pytest.mark.parametrize(
    ("form", "rows", "steps"),
    [
        ("int4, halves in a byte", 16, ["kernel"]),
        ("int4, halves in a byte", 17, ["kernel", "vendor", "kernel"]),
        ("int8 per channel", 6, ["kernel", "vendor", "kernel"]),
    ],
)
def test_few_bits_are_unpacked_in_their_matmul_though_the_library_is_faster(
    form: str, rows: int, steps: list[str]
) -> None:
    """Up to 48 rows; a weight of bytes is expanded for the library."""
    many_rows(FORMS[form], rows, torch.bfloat16, profile(f32=100.0, bf16=1.0), steps)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a part of each batch": lambda x: F.pad(x, (0, 0, 1, 2))[:, 1:-2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every other element of a part": lambda x: F.pad(x.repeat_interleave(2, -1), (0, 0, 1, 2))[:, 1:-2, ::2],
    "the same for all rows": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize(
    ("form", "layout"),
    rotating(("int8 per channel", "int4, neighbours in a byte", "int4, halves in a byte", "int8 per group"), LAYOUTS),
)
def test_few_rows_of_each_of_many_batches_in_any_layout(form: str, layout: str) -> None:
    """Their axes are not one axis in memory, so that a block has few rows, whose elements may be apart."""
    torch.manual_seed(0)
    weight, parts = FORMS[form].weight, FORMS[form].parts()
    x = LAYOUTS[layout](torch.randn(2, 9, DEPTH))

    def layer(x: Tensor, *parts: Tensor) -> Tensor:
        return F.linear(x, weight(*parts, x.dtype))

    config = replace(profile(f32=100.0), strict=True)
    found = compile_graph(trace(layer, (x, *parts), symbolic=False), config).program
    assert [step.kind for step in found.steps] == ["kernel"]
    wide = [p.double() if p.dtype == torch.float32 else p for p in (x, *parts)]
    comparison = compare_outputs([layer(x, *parts)], found([x, *parts]), [layer(*wide)])
    assert comparison.passed, comparison


def many_rows(form: Packed, rows: int, dtype: torch.dtype, config: Config, steps: list[str]) -> None:
    """Three times so many rows go through a layer, and a ReLU after it."""
    torch.manual_seed(0)
    parts = tuple(p.to(dtype) if p.dtype == torch.float32 else p for p in form.parts())
    inputs = (torch.randn(3, rows, DEPTH).to(dtype), torch.randn(COLUMNS).to(dtype), *parts)

    def layer(x: Tensor, bias: Tensor, *parts: Tensor) -> Tensor:
        return torch.relu(F.linear(x, form.weight(*parts, x.dtype), bias))

    found = compile_graph(trace(layer, inputs, symbolic=False), config)
    wide = torch.bfloat16, torch.float16, torch.float32
    reference = layer(*(x.double() if x.dtype in wide else x for x in inputs))
    comparison = compare_outputs([layer(*inputs)], found.program(list(inputs)), [reference], dtype)
    assert comparison.passed, comparison
    assert [step.kind for step in found.program.steps] == steps


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_packed_integers_are_all_that_is_read(form: Packed) -> None:
    """The kernel has no memory for the dense weight."""
    found, _ = compiled(form, 1, torch.float32)
    (kernel,) = found.program.kernels.values()
    assert any(isinstance(s, ComputedDot) for s in walk(kernel.body))
    own = sum(int(b.numel) * b.dtype.bytes for b in kernel.buffers if b.role in ("scratch", "shared"))
    assert own < COLUMNS * DEPTH // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "transposed"), [(2, False), (16, False), (33, False), (16, True)])
def test_scales_of_groups_are_computed_in_lanes(groups: int, transposed: bool, dtype: torch.dtype) -> None:
    """Unless they are few, lie apart, or are floats already."""

    def linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        scale, zero = (t.T if transposed else t for t in (scale, zero.to(scale.dtype)))
        return F.linear(x, ((codes.to(scale.dtype) - zero[..., None]) * scale[..., None]).reshape(44, -1))

    def apart(part: Tensor) -> Tensor:
        return part.T.contiguous() if transposed else part

    scale, zero = torch.rand(44, groups).to(dtype), torch.randint(0, 255, (44, groups), dtype=torch.uint8)
    codes = torch.randint(0, 255, (44, groups, 32), dtype=torch.uint8)
    inputs = (torch.randn(2, groups * 32).to(dtype), codes, apart(scale), apart(zero))
    found = compile_graph(trace(linear, inputs, symbolic=False), replace(Config(), strict=True)).program
    (kernel,) = found.kernels.values()
    assert unproven_accesses(kernel) == []
    assert sum(buffer.name.startswith("scales") for buffer in kernel.buffers) == (
        0 if groups == 2 or transposed else 1 if dtype == torch.float32 else 2
    )
    exact = linear(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert compare_outputs([linear(*inputs)], found(list(inputs)), [exact], dtype).passed


def of_bytes(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """Bytes by nibbles: sums of integers."""
    return torch._int_mm(x.to(torch.int8), (q >> 4).to(torch.int8)).to(x.dtype) * s


BY_ROWS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "int8": (lambda x, q, s: x @ (q.to(x.dtype) * s), (200, 90)),
    "int8 in groups": (lambda x, q, s: x @ ((q.reshape(5, 40, 90).to(x.dtype) - 3) * s).reshape(200, 90), (200, 90)),
    "halves of the depth in a byte": (
        lambda x, q, s: x @ (torch.cat([q & 15, q >> 4]).to(x.dtype) * s),
        (100, 90),
    ),
    "blocks of columns": (
        lambda x, q, s: F.linear(x, torch.cat([q & 15, q >> 4], -1).to(x.dtype).transpose(1, 2).flatten(0, 1)) * s,
        (3, 200, 15),
    ),
    "bytes": (of_bytes, (200, 90)),
}


@pytest.mark.parametrize(
    ("name", "rows", "dtype"), rotating(list(BY_ROWS), (1, 13, 3), (torch.float32, torch.bfloat16)), ids=str
)
def test_columns_that_are_contiguous_lie_in_lanes(name: str, rows: int, dtype: torch.dtype) -> None:
    function, shape = BY_ROWS[name]
    torch.manual_seed(rows)
    x = torch.randn(rows, 200).mul(4).round() if name == "bytes" else torch.randn(rows, 200)
    inputs = [x.to(dtype), torch.randint(-128, 128, shape, dtype=torch.int8), scales(90).to(dtype)]
    if name != "bytes" and not name.startswith("int8"):
        inputs[1] = inputs[1].view(torch.uint8)
    found = compile_graph(trace(function, inputs, symbolic=False), replace(Config(), strict=True)).program
    (kernel,) = found.kernels.values()
    assert any(isinstance(s, ColumnDot) for s in walk(kernel.body)) and unproven_accesses(kernel) == []
    exact = function(*(t.double() if t.dtype == dtype else t for t in inputs))
    assert compare_outputs([function(*inputs)], found(inputs), [exact], dtype).passed


@pytest.mark.parametrize("form", ["int4, neighbours in a byte", "int4, halves in a byte", "two bits"])
def test_exchanged_nibbles_are_found(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if the schedule multiplies a part of the weight by the left operand of another."""
    schedule = gemm._Contraction._computed_dot

    def exchanged(*arguments: object) -> ComputedDot:
        dot = schedule(*arguments)  # type: ignore[arg-type]
        return replace(dot, values=(*dot.values[1:], dot.values[0]))

    monkeypatch.setattr(gemm._Contraction, "_computed_dot", exchanged)
    _, compare = compiled(FORMS[form], 2, torch.float32)
    assert not compare().passed


@pytest.mark.parametrize(
    "planted",
    {
        "a zero point is dropped": lambda q, z, s, t: per_group(q, z * 0, s, t),
        "the scale of the next group": lambda q, z, s, t: per_group(q, z, s.roll(1, 1), t),
        "the scale of the next column": lambda q, z, s, t: per_group(q, z, s.roll(1, 0), t),
        "signs are lost": lambda q, z, s, t: per_group(q.abs(), z, s, t),
    }.items(),
    ids=lambda item: item[0],
)
def test_planted_mistakes_are_found(planted: tuple[str, Callable[..., Tensor]]) -> None:
    form = FORMS["int8 per group"]
    torch.manual_seed(0)
    x, parts = torch.randn(2, DEPTH), form.parts()
    right, wrong = (F.linear(x, weight(*parts, torch.float32)) for weight in (form.weight, planted[1]))
    reference = F.linear(x.double(), form.weight(*parts, torch.float64))
    assert compare_outputs([right], [right], [reference]).passed
    assert not compare_outputs([right], [wrong], [reference]).passed


def test_special_values_of_scales() -> None:
    """Lanes beyond the end of a row, where a weight would be 0 · inf, do not count."""
    torch.manual_seed(0)
    q, s = torch.randint(1, 9, (24, 40), dtype=torch.int8), torch.rand(24)
    s[3], s[5] = float("inf"), float("nan")
    x = torch.rand(1, 40) + 0.5

    def layer(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, q.to(x.dtype) * s[:, None])

    found = compile_graph(trace(layer, (x, q, s), symbolic=False), replace(Config(), strict=True))
    (y,) = found.program([x, q, s])
    torch.testing.assert_close(y, layer(x, q, s), equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (5, torch.float16), (40, torch.float32), (40, torch.bfloat16)], ids=str
)
def test_the_packed_matmul_of_torch(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, q, s = torch.randn(rows, 64).to(dtype), int8()[:, :64].contiguous(), scales(COLUMNS).to(dtype)

    def layer(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        return torch.relu(torch.ops.aten._weight_int8pack_mm(x, q, s))

    found = compile_graph(trace(layer, (x, q, s), symbolic=False), profile(f32=100.0))
    reference = torch.relu(x.double() @ (q.double() * s.double()[:, None]).T)
    comparison = compare_outputs([layer(x, q, s)], found.program([x, q, s]), [reference], dtype)
    assert comparison.passed, comparison
    kinds = [step.kind for step in found.program.steps]
    assert kinds == ["kernel"] if rows < 17 or dtype == torch.float32 else kinds == ["kernel", "vendor", "kernel"]


@pytest.mark.parametrize(("rows", "columns", "depth"), [(2, 24, 0), (40, 24, 0), (0, 24, 32), (3, 0, 32)], ids=str)
def test_nothing_to_multiply(rows: int, columns: int, depth: int) -> None:
    """Sums of nothing are 0, and not what memory held; a result without elements needs no kernel of its own."""
    x, q, s = torch.randn(rows, depth), torch.zeros(columns, depth, dtype=torch.int8), torch.rand(columns)

    def layer(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, q.to(x.dtype) * s[:, None])

    found = compile_graph(trace(layer, (x, q, s), symbolic=False), replace(profile(f32=100.0), strict=True))
    for _ in range(3):
        torch.rand(rows, columns).mul_(1e30)  # memory that is freed, and given again
        assert torch.equal(found.program([x, q, s])[0], torch.zeros(rows, columns))


def of_two_scales(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return F.linear(F.linear(x, q.to(x.dtype) * s[:, None]), q.to(x.dtype) * s.square()[:, None])


def twice(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    weight = (q.reshape(64, 4, 16).to(x.dtype) * s[:, None, None]).reshape(64, 64)
    return F.linear(F.silu(F.linear(x, weight)), weight)


@pytest.mark.parametrize("layers", [of_two_scales, twice])
def test_matmuls_that_share_a_packed_weight_each_unpack_it(layers: Callable[..., Tensor]) -> None:
    inputs = (torch.randn(3, 64), torch.randint(-128, 128, (64, 64), dtype=torch.int8), scales(64) * 0.1)
    found = compile_graph(trace(layers, inputs, symbolic=False), replace(Config(), strict=True)).program
    assert len(found.kernels) == 2 and all(
        any(isinstance(s, ComputedDot) for s in walk(kernel.body)) for kernel in found.kernels.values()
    )
    exact = layers(*(t.double() if t.is_floating_point() else t for t in inputs))
    assert compare_outputs([layers(*inputs)], found(list(inputs)), [exact]).passed


@pytest.mark.parametrize(
    ("name", "expanded"),
    rotating(
        ("int4, halves in a byte", "a codebook", "int8 per group"),
        (lambda q: q[:, :1].expand(q.shape), lambda q: q[:1].expand(q.shape)),
    ),
)
def test_packed_integers_without_strides(name: str, expanded: Callable[[Tensor], Tensor]) -> None:
    """One integer along the depth is no index of a table: it is the same in all lanes."""
    q, *rest = FORMS[name].parts()
    inputs = (torch.randn(2, DEPTH), expanded(q), *rest)

    def layer(x: Tensor, *parts: Tensor) -> Tensor:
        return F.linear(x, FORMS[name].weight(*parts, x.dtype))

    found = compile_graph(trace(layer, inputs, symbolic=False), replace(Config(), strict=True))
    exact = layer(*(t.double() if t.is_floating_point() else t for t in inputs))
    assert compare_outputs([layer(*inputs)], found.program(list(inputs)), [exact]).passed


def test_parts_of_different_lengths_are_refused() -> None:
    """A weight in two parts of 16 and 24 columns is dense memory first."""
    q, p = torch.randint(-8, 8, (32, 16), dtype=torch.int8), torch.randint(-8, 8, (32, 24), dtype=torch.int8)
    x = torch.randn(2, 40)

    def layer(x: Tensor, q: Tensor, p: Tensor) -> Tensor:
        return F.linear(x, torch.cat([q, p], 1).to(x.dtype))

    found = compile_graph(trace(layer, (x, q, p), symbolic=False), replace(Config(), strict=True))
    assert len(found.program.steps) == 2
    torch.testing.assert_close(found.program([x, q, p])[0], layer(x, q, p))
