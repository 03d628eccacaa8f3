"""What torch.compile promises must hold for every executor: the interpreter, and the compiler itself."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusec import dynamo
from fusec.errors import OptionError

Compile: Any = Callable[..., Any]


def interpret(graph: Any, config: Any) -> Any:
    return SimpleNamespace(graph=graph, program=dynamo.interpreted(graph))


EXECUTORS = ["interpreter", "compiler"]


@pytest.fixture(params=EXECUTORS)
def backend(request: pytest.FixtureRequest) -> Any:
    torch._dynamo.reset()
    dynamo.reset()
    torch.manual_seed(0)
    yield dynamo.backend if request.param == "compiler" else dynamo.backend_with(interpret)
    assert dynamo.fallbacks() == []
    torch._dynamo.reset()


def check(backend: Any, function: Any, *inputs: Any, grad: bool = False, dynamic: bool | None = None) -> Any:
    """Compiled and eager agree in values, element types, strides, and in what they do to their inputs."""
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        expected, found = function(*copies), compiled(*inputs)
    same(found, expected)
    same(list(inputs), copies)
    return compiled


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.requires_grad == expected.requires_grad
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert found == expected


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_block(backend: Any) -> None:
    check(backend, Block(), torch.randn(2, 5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_contract_holds_in_both_types(backend: Any, dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 3, dtype=dtype), torch.randn(3, 5, dtype=dtype)
    check(backend, lambda x, w: torch.softmax(x @ w, -1).sum(0), x, w)


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


def test_the_old_value_survives_a_change(backend: Any) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        old = x.clone()
        x.mul_(2)
        return old, x + old

    check(backend, step, torch.randn(3, 4))


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


def test_two_outputs_of_equal_value_are_apart(backend: Any) -> None:
    with torch.no_grad():
        a, b = torch.compile(lambda x: (x + 1, x + 1), backend=backend)(torch.zeros(4))
    a.fill_(9)
    assert bool((b == 1).all())


def test_outputs_may_be_numbers_and_none(backend: Any) -> None:
    check(backend, lambda x: (None, x + 1, x.shape[0], 2.5), torch.randn(3, 4))


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:, :1].expand(6, 6), lambda x: x.as_strided((3, 3), (1, 2), 5)],
    ids=["transposed", "sliced", "expanded", "overlapping"],
)
def test_inputs_of_any_layout(backend: Any, layout: Any) -> None:
    x = layout(torch.randn(6, 6))
    compiled = torch.compile(lambda x: (x * 2, x.sum(-1), x.transpose(0, 1) @ x, x.reshape(-1) + 1), backend=backend)
    with torch.no_grad():
        same(compiled(x), (x * 2, x.sum(-1), x.transpose(0, 1) @ x, x.reshape(-1) + 1))


def test_strides_of_outputs(backend: Any) -> None:
    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        turned = x.permute(2, 0, 1)
        return turned + 1, (turned + 1).contiguous(), turned.exp().transpose(0, 1), (x + 1)[:, ::2]

    check(backend, outputs, torch.randn(2, 3, 4))


def test_a_channels_last_input(backend: Any) -> None:
    check(backend, lambda x: torch.relu(x) * 2, torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))


def test_lifted_constants(backend: Any) -> None:
    check(backend, lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(0.1), torch.randn(2, 3))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 4), (4, 1), (1, 1), (0, 0)])
def test_sizes_zero_and_one(backend: Any, shape: tuple[int, int]) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(x, -1), nn.functional.linear(x, w), x.sum(0), nn.functional.layer_norm(x, x.shape[-1:])

    check(backend, f, torch.randn(shape), torch.randn(3, shape[1]))


def test_a_0d_tensor(backend: Any) -> None:
    check(backend, lambda x, y: (x * y, x.sum() + 1, y.exp()), torch.randn(3), torch.tensor(2.0))


def test_special_values(backend: Any) -> None:
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), -float("inf"), 0.0], [-0.0, 1e38, -1e38]])
    check(backend, lambda x: (torch.softmax(x, -1), x.amax(-1), x.clamp(-1, 1), torch.relu(x), x.isnan(), x / x), x)


def test_gradients(backend: Any) -> None:
    model, x = Block(), torch.randn(2, 5, 8, requires_grad=True)
    model(x).square().mean().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    torch.compile(model, backend=backend)(x).square().mean().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found, expected)


def test_gradients_through_attention(backend: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    found = torch.autograd.grad(torch.compile(attend, backend=backend)(*inputs).sum(), inputs)
    torch.testing.assert_close(found, expected)


def test_requires_grad_of_outputs(backend: Any) -> None:
    x = torch.randn(3, requires_grad=True)
    check(backend, lambda x: (x * 2, (x * 2).detach(), x.detach() > 0), x, grad=True)


def test_a_training_loop_follows_eager(backend: Any) -> None:
    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(1)
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = torch.compile(model, backend=backend) if compiled else model
        x, out = torch.randn(4, 8), []
        for _ in range(5):
            loss = (run(x) - x.flip(0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def test_random_numbers_are_eagers(backend: Any) -> None:
    def draw(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + torch.randn(3) + torch.rand_like(x)

    x = torch.randn(3)
    compiled = torch.compile(draw, backend=backend)
    for _ in range(2):
        torch.manual_seed(3)
        expected, state = draw(x), torch.get_rng_state()
        torch.manual_seed(3)
        torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_dropout_in_training(backend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    x = torch.randn(5, 4)
    torch.manual_seed(3)
    model(x).sum().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    torch.manual_seed(3)
    torch.compile(model, backend=backend)(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)


def test_dynamic_shapes_compile_once(backend: Any) -> None:
    dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (4, 16)):
            x = torch.randn(batch, length, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(dynamo.compiled_graphs()) == 1


def test_a_marked_dimension(backend: Any) -> None:
    dynamo.reset()
    compiled = torch.compile(lambda x: x.reshape(-1).softmax(0) * x.shape[0], backend=backend)
    for n in (3, 9):
        x = torch.randn(n, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), x.reshape(-1).softmax(0) * n)
    assert len(dynamo.compiled_graphs()) == 1


def test_sizes_as_numbers(backend: Any) -> None:
    def f(x: Tensor, n: int) -> tuple[Any, ...]:
        return x[:, : n // 2], torch.arange(n) + x.shape[1], x.new_ones(n, 2 * x.shape[0]), n * 3, x * n**0.5

    compiled = torch.compile(f, backend=backend, dynamic=True)
    for n in (4, 6, 7):
        x = torch.randn(n, 2 * n)
        with torch.no_grad():
            same(compiled(x, n), f(x, n))


def test_a_float_argument(backend: Any) -> None:
    compiled = torch.compile(lambda x, s: x * s + s, backend=backend, dynamic=True)
    x = torch.randn(3)
    for s in (0.5, 0.25, 3.0):
        same(compiled(x, s), x * s + s)


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
    writes = [n for n in dynamo.compiled_graphs()[0].graph.nodes if n.is_op("write")]
    assert sorted(len(n.operands) for n in writes) == [2, 3]


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


def test_the_old_value_of_a_cache_may_be_read(backend: Any) -> None:
    def update(rows: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        old, total = rows.clone(), rows.sum()
        rows.index_copy_(0, index, x)
        return old * 2, total, rows.mean(), rows.t(), old

    check(backend, update, torch.randn(8, 4), torch.randn(2, 4), torch.tensor([1, 5]))


def test_running_statistics(backend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        x = torch.randn(5, 4)
        found, expected = compiled(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


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


def test_the_incoming_graph_is_not_changed() -> None:
    seen = []

    def watch(gm: Any, inputs: Any) -> Any:
        before = gm.code
        run = dynamo.backend_with(interpret)(gm, inputs)
        seen.append((before, gm.code))
        return run

    with torch.no_grad():
        torch.compile(Block(), backend=watch)(torch.randn(2, 8))
    assert seen and all(before == after for before, after in seen)


def test_inference_mode_and_autocast(backend: Any) -> None:
    model, x = Block(), torch.randn(2, 8)
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_are_accepted(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=dynamo.backend_with(interpret), mode=mode)
    assert bool((compiled(torch.zeros(3)) == 1).all())


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="this torch has no default backend")
def test_it_may_be_the_default_backend() -> None:
    torch._dynamo.reset()
    torch.compiler.set_default_backend(dynamo.backend_with(interpret))
    try:
        assert bool((torch.compile(lambda x: x + 1)(torch.zeros(3)) == 1).all())
        assert len(dynamo.compiled_graphs()) == 1
    finally:
        torch.compiler.set_default_backend(None)
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "hint"), [({"verifi": True}, "verify"), ({"small_m": "16"}, "int"), ({"target": "cuda"}, "triton")]
)
def test_wrong_options_are_errors(options: dict[str, Any], hint: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=hint) as caught:
        torch.compile(lambda x: x + 1, backend=dynamo.backend_with(interpret), options=options)(torch.zeros(3))
    assert isinstance(caught.value, OptionError) or "OptionError" in str(caught.value)


def test_a_compiler_that_raises_leaves_the_model_running() -> None:
    torch._dynamo.reset()
    dynamo.reset()

    def broken(graph: Any, config: Any) -> Any:
        raise RuntimeError("planted")

    model, x = Block(), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=dynamo.backend_with(broken))(x), model(x))
        torch._dynamo.reset()
        assert dynamo.fallbacks() == []
        strict = torch.compile(model, backend=dynamo.backend_with(broken), options={"strict": True})
        with pytest.raises(Exception, match="planted"):
            strict(x)


def test_a_higher_order_operation_falls_back() -> None:
    torch._dynamo.reset()
    dynamo.reset()

    def choose(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled = torch.compile(choose, backend=dynamo.backend_with(interpret))
    with torch.no_grad():
        for x in (torch.ones(3), -torch.ones(3)):
            torch.testing.assert_close(compiled(x), choose(x))
    assert len(dynamo.fallbacks()) == 1
    dynamo.reset()


def test_a_size_known_only_at_run_time_falls_back() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(lambda x: x[x > 0] * 2, backend=dynamo.backend_with(interpret), fullgraph=True)
        for _ in range(2):
            x = torch.randn(9)
            torch.testing.assert_close(compiled(x), x[x > 0] * 2)
    assert len(dynamo.fallbacks()) == 1
    dynamo.reset()


def test_composite_operations_stay_whole_at_inference() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, config: Any) -> Any:
        graphs.append(graph)
        return interpret(graph, config)

    def attend(q: Tensor, w: Tensor) -> Tensor:
        q = nn.functional.linear(q, w)
        return nn.functional.scaled_dot_product_attention(q, q @ w, q)

    with torch.no_grad():
        torch.compile(attend, backend=dynamo.backend_with(keep))(torch.randn(1, 2, 5, 4), torch.randn(4, 4))
    ops = [n.attributes.get("target", n.op.name) for n in graphs[0].nodes]
    assert ops == ["contraction", "contraction", "aten.scaled_dot_product_attention.default"]
    assert all(n.sources[0].file.endswith("test_backend.py") and n.sources[0].line for n in graphs[0].nodes)
