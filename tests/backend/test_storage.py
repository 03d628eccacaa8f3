"""What a compiled call does to storage: changes in place, views, copies, caches and weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusec import dynamo
from fusec.ir.verifier import verify_graph
from tests.backend.agreement import Block, check, same


def test_inputs_are_changed_in_place(backend: Any) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        y[0] = 7
        return x * 2

    check(backend, step, torch.randn(3, 4), torch.randn(3, 4))


def test_a_view_of_an_input_is_changed(backend: Any) -> None:
    def step(x: Tensor) -> Tensor:
        x.t()[1].mul_(3)
        return x + 1

    check(backend, step, torch.randn(3, 4))


def cleared_and_written(x: Tensor, rows: Tensor, value: Tensor) -> Tensor:
    x.zero_()
    x.index_copy_(0, rows, value)
    return x + 1


def filled_and_written(x: Tensor, rows: Tensor, value: Tensor) -> Tensor:
    x.fill_(3.0)
    doubled = x * 2
    x[rows] = value
    return doubled


def copied_to_another(x: Tensor, rows: Tensor, value: Tensor, other: Tensor) -> Tensor:
    x.index_copy_(0, rows, value)
    other.copy_(x)
    return x * 2


def cleared_and_copied(x: Tensor, rows: Tensor, value: Tensor, other: Tensor) -> None:
    other.copy_(torch.zeros_like(x).index_copy(0, rows, value))


@pytest.mark.parametrize("step", [cleared_and_written, filled_and_written, copied_to_another, cleared_and_copied])
def test_rows_that_are_written_reach_every_input_that_takes_them(backend: Any, step: Any) -> None:
    inputs = [torch.randn(3, 4), torch.tensor([2]), torch.randn(1, 4), torch.randn(3, 4)]
    check(backend, step, *inputs[: step.__code__.co_argcount])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x, "row": lambda x: x[1], "part": lambda x: x[:, ::2], "transposed": lambda x: x.t(),
    "flat": lambda x: x.flatten(), "diagonal": lambda x: x.diagonal(), "windows": lambda x: x.unfold(1, 2, 1),
    "repeated": lambda x: x.expand(2, 3, 4), "integers": lambda x: x.view(torch.int32),
}  # fmt: skip
EQUALS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 1, lambda x: x - 0, lambda x: x // 1 if x.dtype == torch.int32 else x / 1, lambda x: x.neg().neg(),
    lambda x: x.clone(), lambda x: x.contiguous(), lambda x: torch.maximum(x, x), lambda x: torch.cat([x]),
    lambda x: x.to(x.dtype), lambda x: x.double().to(x.dtype), lambda x: torch.roll(x, 0, 0),
    lambda x: x.repeat(1, 1, 1), lambda x: x[None].sum(0, dtype=x.dtype), lambda x: (x * 1)[:1],
    lambda x: x.flip(0).flip(0), lambda x: x,
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_what_equals_a_changed_input_shares_its_storage_where_eager_does(backend: Any, view: str) -> None:
    def step(x: Tensor, rows: Tensor, value: Tensor) -> list[Tensor]:
        x.index_copy_(0, rows, value)
        return [equal(VIEWS[view](x)) for equal in EQUALS]

    check(backend, step, torch.randn(3, 4), torch.tensor([2]), torch.randn(1, 4))


def test_a_part_of_what_equals_a_changed_input_has_storage_of_its_own(backend: Any) -> None:
    def step(x: Tensor, rows: Tensor, value: Tensor) -> Tensor:
        x.index_copy_(0, rows, value)
        return (x * 1)[:, ::2]

    check(backend, step, torch.randn(3, 4), torch.tensor([2]), torch.randn(1, 4))


@pytest.mark.parametrize("view", VIEWS)
def test_what_equals_an_input_is_what_it_was_before_a_change(backend: Any, view: str) -> None:
    def step(x: Tensor, rows: Tensor, value: Tensor) -> list[Tensor]:
        equals = [equal(VIEWS[view](x)) for equal in EQUALS[:-1]]
        x.index_copy_(0, rows, value)
        return equals

    check(backend, step, torch.randn(3, 4), torch.tensor([2]), torch.randn(1, 4))


def test_the_old_value_survives_a_change(backend: Any) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        old = x.clone()
        x.mul_(2)
        return old, x + old

    check(backend, step, torch.randn(3, 4))


def heads_repeated(x: Tensor) -> Tensor:
    return x[:, None].expand(2, 2, 6, 8).reshape(4, 6, 8)


def replaced(x: Tensor) -> tuple[Tensor, ...]:
    x.copy_(x * 3)
    return heads_repeated(x).sort(1)[0], heads_repeated(x), x.transpose(1, 2).reshape(2, 48)


def tripled(x: Tensor) -> Tensor:
    x.copy_(x * 3)
    return heads_repeated(x).sort(1)[0]


def replaced_by_another_order(x: Tensor) -> Tensor:
    x.copy_(x.sort(1)[0])
    return heads_repeated(x).sort(1)[0]


def replaced_in_part(x: Tensor) -> Tensor:
    x[:, 1].copy_(x[:, 0].exp())
    return heads_repeated(x).cumsum(1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "step", [replaced, tripled, replaced_by_another_order, replaced_in_part], ids=lambda f: f.__name__
)
def test_what_is_made_of_a_changed_input_lies_elsewhere(backend: Any, step: Any, dynamic: bool) -> None:
    """Repeated or turned it has other elements, or more of them, than the input has place for."""
    around = torch.zeros(1000)
    x = around[400:496].view(2, 6, 8).normal_()
    mine, before = x.clone(), around.clone()
    wanted = step(mine)
    with torch.no_grad():
        found = torch.compile(step, backend=backend, dynamic=dynamic)(x)
    torch.testing.assert_close((found, x), (wanted, mine))
    same((around[:400], around[496:]), (before[:400], before[496:]))


def test_a_copy_does_not_share_storage(backend: Any) -> None:
    compiled = torch.compile(lambda x: (x.clone(), x.contiguous().clone(), x * 1.0), backend=backend)
    x = torch.randn(3, 4)
    with torch.no_grad():
        outputs = compiled(x)
    pointers = {t.untyped_storage().data_ptr() for t in (x, *outputs)}
    assert len(pointers) == 4


def test_a_view_shares_storage(backend: Any) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        turned, part, itself = torch.compile(lambda x: (x.t(), x[1:, 2], x), backend=backend)(x)
    assert itself is x
    x.fill_(5)
    assert bool((turned == 5).all()) and bool((part == 5).all())


def test_outputs_that_are_views_of_each_other_stay_so(backend: Any) -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        z = x * 2
        return y[1:], y, y.t(), z[:2], z[1:]

    x = torch.randn(3, 4)
    with torch.no_grad():
        eager = step(x)
        compiled = torch.compile(step, backend=backend)(x)
    for outputs in (eager, compiled):
        outputs[1].add_(10)
        outputs[3].fill_(7)
    same(list(compiled), list(eager))


def views_of_one(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y.view(2, 3), y[:], y, y.view(-1).view(2, 3), y.detach()


def one_view_twice(x: Tensor) -> tuple[Tensor, ...]:
    y = (x * 2).t()
    return y, y, y.t()


def whole_views_alone(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    return y.view(2, 3), y.t().t()


def an_input(x: Tensor) -> tuple[Tensor, ...]:
    return x, x[:], x, x.view(2, 3), x.t().t()


def a_changed_input(x: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2)
    return x.view(2, 3), x, x * 2


@pytest.mark.parametrize("function", [views_of_one, one_view_twice, whole_views_alone, an_input, a_changed_input])
def test_outputs_are_one_object_exactly_where_the_graph_returns_one(backend: Any, function: Any) -> None:
    """A caller may resize one in place (``hidden.unsqueeze_(0)``), and the others stay as they are."""
    objects = {}
    for name in ("aot_eager", "ours"):
        torch._dynamo.reset()
        x = torch.randn(2, 3)
        with torch.no_grad():
            outputs = torch.compile(function, backend=backend if name == "ours" else name)(x)
        known = [*outputs, x]
        objects[name] = [next(i for i, other in enumerate(known) if other is y) for y in known]
        assert len({y.untyped_storage()._cdata for y in outputs[:2]}) == 1
    assert objects["ours"] == objects["aot_eager"]


def test_two_outputs_of_equal_value_are_apart(backend: Any) -> None:
    with torch.no_grad():
        a, b = torch.compile(lambda x: (x + 1, x + 1), backend=backend)(torch.zeros(4))
    a.fill_(9)
    assert bool((b == 1).all())


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 2, 16, 4))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.rows.index_copy_(2, position, x)
        position.add_(1)
        return (self.rows * 2).sum(2)


def test_a_cache_is_written_in_place(backend: Any) -> None:
    dynamo.reset()
    plain, cached = Cache(), Cache()
    compiled, storage = torch.compile(cached, backend=backend), cached.rows.data_ptr()
    positions = torch.tensor([3]), torch.tensor([3])
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 2, 1, 4)
            torch.testing.assert_close(compiled(x, positions[0]), plain(x, positions[1]))
            same((cached.rows, positions[0]), (plain.rows, positions[1]))
    assert cached.rows.data_ptr() == storage
    graph = dynamo.compiled_graphs()[0].graph
    writes = [n for r in graph.nodes for n in (r.body if r.is_op("region") else [r]) if n.is_op("write")]
    assert sorted(len(n.operands) for n in writes) == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_caches_that_a_graph_makes_are_filled_once_and_written_in_place(backend: Any, dtype: torch.dtype) -> None:
    dynamo.reset()

    def start(x: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        keys, values = (torch.zeros(1, 2, 16, 4, dtype=x.dtype) for _ in range(2))
        at = torch.arange(3) + first
        keys.index_copy_(2, at, x.exp())
        values[:, :, at] = x
        empty = torch.ones(1, 2, 16, 4, dtype=x.dtype)
        return keys, values, empty.index_copy(2, at, x), empty, (keys[:, :, :8] * values[:, :, :8]).sum(2)

    for first in (0, 5):
        check(backend, start, torch.randn(1, 2, 3, 4).to(dtype), torch.tensor(first))
    for made in dynamo.compiled_graphs():
        nodes = [n for r in made.graph.nodes for n in (r.body if r.is_op("region") else [r])]
        assert [n.op.name for n in nodes if n.is_op("full", "write")].count("full") == 3
        assert not [n for n in nodes if n.is_op("opaque")]
    found = torch.compile(start, backend=backend)(torch.randn(1, 2, 3, 4).to(dtype), torch.tensor(5))
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)


@pytest.mark.parametrize("value", ["rows", "a row", "a number"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_assigned_are_written_in_place(backend: Any, value: str, dtype: torch.dtype) -> None:
    """Places may count from the end."""
    dynamo.reset()

    def assign(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
        x = x.exp()
        cache[:, :, at] = {"rows": x, "a row": x[:, :1, :1], "a number": x[0, 0, 0, 0]}[value]
        return cache.sum(2)

    for at in ([3, 0], [-1, 5], [-16, 2]):
        x = torch.randn(2, 3, 2, 4).to(dtype)
        check(backend, assign, torch.randn(2, 3, 16, 4).to(dtype), x, torch.tensor(at))
    nodes = [n for c in dynamo.compiled_graphs() for r in c.graph.nodes for n in (r.body if r.is_op("region") else [r])]
    assert [len(n.operands) for n in nodes if n.is_op("write")] == [3]
    for wrong in (16, -17):
        with pytest.raises(IndexError), torch.no_grad():
            torch.compile(assign, backend=backend)(torch.randn(2, 3, 16, 4).to(dtype), x, torch.tensor([0, wrong]))


def test_what_is_assigned_by_other_means_is_eager_s(backend: Any) -> None:
    def by_mask(cache: Tensor, x: Tensor, seen: Tensor) -> None:
        cache[seen] = x[0]

    def by_places_of_two_dims(cache: Tensor, x: Tensor, at: Tensor) -> None:
        cache[at, at] = x[:, 0]

    def by_many(cache: Tensor, x: Tensor, at: Tensor) -> None:
        cache[at[:, None].expand(2, 3)] = x[:, None]

    def added(cache: Tensor, x: Tensor, at: Tensor) -> None:
        cache.index_put_((at,), x, accumulate=True)

    cache, x = torch.randn(5, 4), torch.randn(2, 4)
    for change in (by_places_of_two_dims, added):
        check(backend, change, cache.clone(), x, torch.tensor([3, 3] if change is added else [3, 1]))
    check(backend, by_mask, cache.clone(), x, torch.tensor([True, False, True, True, False]))
    check(backend, by_many, cache.clone(), x[:, :1].expand(2, 4).contiguous(), torch.tensor([1, 1]) - 2)


def test_a_place_outside_of_a_cache_or_table_raises(backend: Any) -> None:
    def step(rows: Tensor, x: Tensor, position: Tensor) -> Tensor:
        rows.index_copy_(0, position, x.exp())
        return rows.sum()

    def rows(table: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, table).exp()

    for function in (step, rows):
        compiled = torch.compile(function, backend=backend)
        for place in (2, 8, -1):
            table = torch.randn(8, 4)
            kept, index = table.clone(), torch.tensor([0, place])
            arguments = (table, torch.randn(2, 4), index) if function is step else (table, index)
            with torch.no_grad():
                if place == 2:
                    compiled(*arguments)
                    continue
                with pytest.raises(IndexError):
                    compiled(*arguments)
            if getattr(backend, "__name__", "") != "eager":
                assert torch.equal(table[1:], kept[1:])


def test_a_slice_of_a_cache_is_written_in_place(backend: Any) -> None:
    dynamo.reset()

    def update(rows: Tensor, x: Tensor, start: int) -> Tensor:
        rows[:, start : start + x.shape[1]] = x
        return rows.sum(1)

    found, expected = torch.zeros(2, 16, 4), torch.zeros(2, 16, 4)
    compiled = torch.compile(update, backend=backend)
    with torch.no_grad():
        for start in (0, 3, 5):
            x = torch.randn(2, 2, 4)
            torch.testing.assert_close(compiled(found, x, start), update(expected, x, start))
            torch.testing.assert_close(found, expected)
    writes = [n for c in dynamo.compiled_graphs() for n in c.graph.nodes if n.is_op("write")]
    assert {len(n.operands) for n in writes} == {3}


def test_rows_of_an_input_that_go_elsewhere_in_it(backend: Any) -> None:
    """ATen refuses to copy rows from the memory that it copies to."""

    def step(x: Tensor, y: Tensor) -> None:
        y[1:] += x[:-1]
        y.view(-1)[3:9] *= 2
        x[1:] = x[:-1].clone()
        x[2:5] = x.clone()[1:4]

    check(backend, step, torch.randn(8, 16), torch.randn(8, 16))


def test_rows_that_are_added_are_written_once(backend: Any) -> None:
    """Functionalization puts the sum in its place, takes it from there and puts it back."""
    dynamo.reset()

    def step(x: Tensor, y: Tensor) -> Tensor:
        y[1:] += x[:-1]
        return x + 1

    check(backend, step, torch.randn(8, 16), torch.randn(8, 16))
    nodes = [n for c in dynamo.compiled_graphs() for r in c.graph.nodes for n in (r.body if r.is_op("region") else [r])]
    assert len([n for n in nodes if n.is_op("write")]) == 1


@pytest.mark.parametrize("accumulate", [True, False])
def test_rows_are_written_to_a_new_value_of_an_input(backend: Any, accumulate: bool) -> None:
    def step(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
        x.index_put_((at,), y[:2], accumulate=accumulate)
        x[1:] = y[1:]
        return x + 1

    check(backend, step, torch.randn(8, 16), torch.randn(8, 16), torch.tensor([3, 1]))
    for compiled in dynamo.compiled_graphs():
        verify_graph(getattr(compiled, "imported", compiled.graph))


def test_the_old_value_of_a_cache_may_be_read(backend: Any) -> None:
    def update(rows: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        old, total = rows.clone(), rows.sum()
        rows.index_copy_(0, index, x)
        return old * 2, total, rows.mean(), rows.t(), old

    check(backend, update, torch.randn(8, 4), torch.randn(2, 4), torch.tensor([1, 5]))


def test_inputs_that_share_storage(backend: Any) -> None:
    def shift(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.mul_(2), b + 1

    found, expected = torch.arange(10.0), torch.arange(10.0)
    with torch.no_grad():
        same(torch.compile(shift, backend=backend)(found[:6], found[4:])[1], shift(expected[:6], expected[4:])[1])
    assert torch.equal(found, expected)


def test_generation_with_a_static_cache(backend: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=61, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(1, 60, (2, 5))
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    kwargs = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(tokens, **kwargs)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    assert torch.equal(model.generate(tokens, **kwargs), expected)
    assert len(dynamo.compiled_graphs()) == 2


def test_weights_may_change(backend: Any) -> None:
    model = Block()
    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 8)
    with torch.no_grad():
        compiled(x)
        model.up.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        model.up.weight.data = torch.randn(24, 8)
        torch.testing.assert_close(compiled(x), model(x))
        model.load_state_dict(Block().state_dict())
        torch.testing.assert_close(compiled(x), model(x))
        model.down.weight = nn.Parameter(torch.randn(8, 24))
        torch.testing.assert_close(compiled(x), model(x))


def test_a_weight_may_be_given_other_strides_whether_or_not_dynamo_looks(backend: Any) -> None:
    model = nn.Linear(6, 6)
    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 6)
    with torch.no_grad():
        compiled(x)
        for unguarded in (True, False):
            model.weight.data = model.weight.data.t()  # the same storage, the same size
            torch.compiler.set_stance("default", skip_guard_eval_unsafe=unguarded)
            try:
                torch.testing.assert_close(compiled(x), model(x))
            finally:
                torch.compiler.set_stance("default")
