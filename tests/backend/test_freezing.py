"""Constant folding under ``freeze``: results are unchanged, until a weight changes, and freed with the weights."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.families import FAMILIES, Sizes
from fusec import dynamo
from fusec.codegen import target_named
from fusec.codegen.cpp.schedules.gemm import LEAST_PACKED
from fusec.codegen.program.constant_folding import prepack
from fusec.compiler import Compiled
from fusec.config import Config
from fusec.debug.explain import explain
from fusec.ir.types import F32
from tests.machines import profile

BF16_PRODUCTS = target_named("cpp").many_bf16_products
"""Whether this machine multiplies pairs of bfloat16: where it does not, their blocks are widened in each call."""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    assert dynamo.fallbacks() == []
    torch._dynamo.reset()


@pytest.fixture
def plain() -> Config:
    """Options of a machine on which generated products are quick, whichever this one is."""
    return profile(f32=100.0, bf16=100.0)


class Net(nn.Module):
    """Products of many rows, a step that weights alone decide, a view of it, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 112), nn.Linear(112, 48)
        self.scale = nn.Parameter(torch.rand(48, 1))
        self.register_buffer("mask", (torch.rand(48, 48) > 0.3).float())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        masked = (self.up.weight.T[:, :48] * self.scale).softmax(0) * self.mask
        return F.linear(x @ masked.T, self.up.weight)


def frozen(model: Callable[..., Any], config: Config, *, on: bool = True) -> Callable[..., Any]:
    compiled = torch.compile(model, backend=dynamo.backend_for(replace(config, freeze=on)))

    def call(*inputs: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return compiled(*inputs, **keywords)

    return call


def only() -> Compiled:
    (compiled,) = dynamo.compiled_graphs()
    return compiled  # type: ignore[no-any-return]


def figures() -> dict[str, Any]:
    """Of the remark on constant folding."""
    (remark,) = (r for r in only().remarks if r.pass_name == "freeze")
    return remark.figures


def kept() -> list[Tensor]:
    found = only().program.folded.cache._entry
    return [] if found is None else list(found.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_same_bits(dtype: torch.dtype, plain: Config) -> None:
    model, x = Net().to(dtype), torch.randn(40, 48).to(dtype)
    expected = frozen(model, plain, on=False)(x)
    assert kept() == []
    torch._dynamo.reset()
    call = frozen(model, plain)
    for _ in range(2):
        assert torch.equal(call(x), expected)
    blocks = 3 if dtype == torch.float32 or BF16_PRODUCTS else 0  # tied weights once; one is computed first
    assert figures()["prepacked"] == blocks and figures()["steps"] >= 1
    assert figures()["bytes"] == sum(v.nbytes for v in kept()) > 0


def test_numbers_that_only_equal_each_other_are_not_the_same(plain: Config) -> None:
    weight, x = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    class Signs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x * torch.copysign(self.weight, 0.0), x * torch.copysign(self.weight, -0.0)

    model = Signs()
    call = frozen(model, plain)
    for _ in range(2):
        assert all(map(torch.equal, call(x), model(x)))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("bert", torch.float32),
        pytest.param("gemma3", torch.float32, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_models_give_the_same_bits(family: str, dtype: torch.dtype, plain: Config) -> None:
    model = FAMILIES[family].build(Sizes(hidden=64, layers=1)).to(dtype)
    inputs = FAMILIES[family].sample(2, 24, "none")
    expected = frozen(model, plain, on=False)(**inputs)
    torch._dynamo.reset()
    call, tensors = frozen(model, plain), {name: x for name, x in expected.items() if isinstance(x, Tensor)}
    tensors.pop("pooler_output", None)  # few rows, which are summed in another order
    for _ in range(2):
        found = call(**inputs)
        assert tensors and all(torch.equal(found[name], x) for name, x in tensors.items())
    assert (figures()["prepacked"] > 4) == (dtype == torch.float32 or BF16_PRODUCTS)


@pytest.mark.parametrize("rows", [2, 8, 15])
def test_few_rows_agree(rows: int, plain: Config) -> None:
    """They are summed in another order where blocks pay."""
    model, x = Net(), torch.randn(rows, 48)
    torch.testing.assert_close(frozen(model, plain)(x), model(x))
    assert figures()["prepacked"] == (3 if rows >= LEAST_PACKED[target_named("cpp").lanes, F32] else 0)


def test_an_explanation_shows_what_is_frozen(plain: Config) -> None:
    frozen(Net(), plain)(torch.randn(40, 48))
    shown = explain(only())
    assert "3 weights are prepacked" in str(shown)
    once, nodes = only().program.folded.nodes, {node for row in shown.kernels for node in row.nodes}
    assert once and nodes.isdisjoint(once)


def test_a_single_row_reads_weights_as_they_lie(plain: Config) -> None:
    frozen(Net(), plain)(torch.randn(1, 48))
    assert figures()["prepacked"] == 0 and figures()["steps"] > 0


def test_the_number_of_rows_may_be_unknown(plain: Config) -> None:
    model = Net()
    compiled = torch.compile(model, backend=dynamo.backend_for(replace(plain, freeze=True)), dynamic=True)
    with torch.no_grad():
        for rows in (40, 7, 300):
            x = torch.randn(rows, 48)
            torch.testing.assert_close(compiled(x), model(x))
    assert figures()["prepacked"] == 3


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.down.weight.mul_(2)


def by_an_optimizer(model: Net) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def by_a_fused_optimizer(model: Net) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()


def by_a_checkpoint(model: Net) -> None:
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()})


def by_another_tensor(model: Net) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach() * 2)


def by_other_memory(model: Net) -> None:
    model.up.weight.data = model.up.weight.data * 2


def a_buffer(model: Net) -> None:
    model.mask.zero_()


@pytest.mark.parametrize("change", [in_place, by_an_optimizer, by_a_fused_optimizer, by_a_checkpoint,
                                    by_another_tensor, by_other_memory, a_buffer])  # fmt: skip
def test_a_change_is_noticed(change: Callable[[Net], None], plain: Config) -> None:
    model, x = Net(), torch.randn(40, 48)
    call = frozen(model, plain)
    call(x)
    before, made = model(x), kept()
    for _ in range(2):
        change(model)
        torch.testing.assert_close(call(x), model(x), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(x), before, rtol=1e-2)
    same = sum(any(old is new for old in made) for new in kept())
    assert same == {in_place: 2, by_another_tensor: 1, by_other_memory: 1, a_buffer: 2}.get(change, 0)


def test_a_weight_that_is_given_its_old_address_again_is_noticed(plain: Config) -> None:
    """As allocators do, where an adapter is unmerged and another one merged."""
    model, x = Net(), torch.randn(40, 48)
    call, block = frozen(model, plain), bytearray(model.up.weight.nbytes)
    for _ in range(3):
        model.up.weight.data = torch.empty(112, 48)
        block[:] = torch.randn(112, 48).numpy().tobytes()
        model.up.weight.data = torch.frombuffer(block, dtype=torch.float32).view(112, 48)
        torch.testing.assert_close(call(x), model(x), rtol=1e-3, atol=1e-3)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh())


def test_a_weight_transposed_in_place_is_noticed(plain: Config) -> None:
    model, x = Square(), torch.randn(40, 64)
    call = frozen(model, plain)
    call(x)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        model.weight.data = model.weight.data.T
        torch.testing.assert_close(call(x), model(x), rtol=1e-3, atol=1e-3)


def test_tensors_may_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses to swap a tensor that has weak references."""
    model, x = Square(), torch.randn(40, 64)
    compiled = torch.no_grad()(torch.compile(model, backend="fusec", options={"freeze": True}))
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(64, 64)))
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", True)
    model.double()
    torch.testing.assert_close(compiled(x.double()), model(x.double()))


def test_a_change_through_data_goes_unnoticed_as_documented(plain: Config) -> None:
    model, x = Net(), torch.randn(40, 48)
    call = frozen(model, plain)
    before = call(x)
    model.up.weight.data.mul_(2)
    assert torch.equal(call(x), before)
    model.up.weight.requires_grad_(True)
    with torch.no_grad():
        model.up.weight.mul_(1)  # whoever counts the change is heard
    torch.testing.assert_close(call(x), model(x))


def test_threads_may_call_at_once_while_weights_change(plain: Config) -> None:
    model, x = Net(), torch.randn(40, 48)
    call, results = frozen(model, plain), list[Tensor]()
    call(x)
    in_place(model)
    expected, start = model(x), threading.Barrier(8)

    def work() -> None:
        start.wait()
        results.extend(call(x) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        torch.testing.assert_close(result, expected)


def test_nothing_outlives_the_weights(plain: Config) -> None:
    model = Net()
    frozen(model, plain)(torch.randn(40, 48))
    compiled, weight = only(), weakref.ref(model.up.weight)
    values = [weakref.ref(v) for v in kept()]
    assert values
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None and all(v() is None for v in values)
    assert compiled.program.folded.cache._entry is None


def test_folded_values_are_freed_with_the_program(plain: Config) -> None:
    model = Net()
    frozen(model, plain)(torch.randn(40, 48))
    values = [weakref.ref(v) for v in kept()]
    torch._dynamo.reset()
    gc.collect()
    assert values and all(v() is None for v in values)


def test_nothing_is_frozen_in_training(plain: Config) -> None:
    model, x = Net(), torch.randn(40, 48)
    compiled = torch.compile(model, backend=dynamo.backend_for(replace(plain, freeze=True)))
    for _ in range(2):
        compiled(x).sum().backward()
        by_an_optimizer(model)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    for made in dynamo.compiled_graphs():
        (remark,) = (r for r in made.remarks if r.pass_name == "freeze")
        assert remark.message == "nothing is frozen" and "no_grad" in remark.suggestion


def test_weights_without_a_version_counter_are_not_frozen(plain: Config) -> None:
    with torch.inference_mode():
        model, x = Net(), torch.randn(40, 48)
        call = frozen(model, plain)
        call(x)
        model.up.weight.mul_(2)
        torch.testing.assert_close(call(x), model(x))
    assert kept() == []


def test_a_written_buffer_is_not_frozen(plain: Config) -> None:
    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.mask.add_(1)
            return F.linear(x, self.mask.exp()) + self.scale.exp().T

    model, other, x = Counting(), Counting(), torch.randn(40, 48)
    other.load_state_dict(model.state_dict())
    call = frozen(model, plain)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(call(x), other(x))
    assert figures()["prepacked"] == figures()["steps"] == 0


def test_values_that_depend_on_a_written_buffer_are_not_folded(plain: Config) -> None:
    """They would be recomputed at each call."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            share = self.seen.softmax(0) @ self.seen
            self.seen.add_(1)
            return x * share

    module, inputs = Counting(), torch.rand(8, 8)
    call = frozen(module, plain)
    for seen in (1.0, 2.0):
        torch.testing.assert_close(call(inputs), inputs * seen)
    assert not only().program.folded.values


def test_a_folded_output_is_copied_for_the_caller(plain: Config) -> None:
    class Table(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            table = self.scale.exp()
            return x + 1, table, table.T

    model, x = Table(), torch.randn(40, 48)
    call = frozen(model, plain)
    for _ in range(2):
        _, table, turned = call(x)
        torch.testing.assert_close(table, model.scale.exp())
        assert turned.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        table.zero_()


@pytest.mark.parametrize(("shape", "rows"), [((24, 8), 8), ((22, 8), 8), ((5, 4), 8), ((16, 6), 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prepacked_blocks_are_transposed_and_contiguous(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    pair = 4 // weight.element_size()
    blocks = [b.view(len(b), -1, pair).transpose(0, 1).flatten() for b in weight.split(rows)]
    found = prepack(weight, rows)
    assert found.shape == weight.shape and torch.equal(found.flatten(), torch.cat(blocks))


def test_packed_weights_are_not_expanded() -> None:
    """A dense copy would take the memory that they were packed to save."""
    codes, scale = torch.randint(-127, 128, (96, 64), dtype=torch.int8), torch.rand(96, 1)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", codes)
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))

    model, x = Packed(), torch.randn(40, 64, dtype=torch.bfloat16)
    found = frozen(model, profile())(x)  # the library multiplies
    torch.testing.assert_close(found, model(x), atol=0.1, rtol=0.02)
    assert [step.kind for step in only().program.steps] == ["kernel", "vendor"]
    assert figures()["bytes"] == 0
