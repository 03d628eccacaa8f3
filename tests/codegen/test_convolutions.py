"""Convolutions in every form and layout: one call of the vendor's, with its bias, between kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec import dynamo
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.reference.contract import compare_outputs
from tests.backend.agreement import same
from tests.combinations import rotating

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]

PLAIN: dict[str, Case] = {
    "no bias": (F.conv1d, ((2, 6, 31), (8, 6, 3))),
    "strides and padding": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), ((2, 6, 31), (8, 6, 3), (8,))),
    "a long window in groups": (lambda x, w, b: F.conv1d(x, w, b, padding=8, groups=2), ((1, 8, 40), (8, 4, 16), (8,))),
    "dilation": (lambda x, w, b: F.conv1d(x, w, b, dilation=3, padding=2), ((2, 6, 31), (8, 6, 3), (8,))),
    "padded to the same": (lambda x, w, b: F.conv1d(x, w, b, padding="same"), ((2, 6, 31), (8, 6, 5), (8,))),
    "padded not at all": (lambda x, w, b: F.conv1d(x, w, b, padding="valid"), ((2, 6, 31), (8, 6, 5), (8,))),
    "without a batch": (lambda x, w, b: F.conv1d(x, w, b, padding=1), ((6, 31), (8, 6, 3), (8,))),
    "a window for each channel": (
        lambda x, w, b: F.conv2d(x, w, b, padding=3, groups=6), ((2, 6, 13, 11), (6, 1, 7, 7), (6,))
    ),
    "several of each channel": (lambda x, w: F.conv2d(x, w, stride=2, groups=6), ((2, 6, 13, 11), (12, 1, 3, 3))),
    "windows that are no squares": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        ((2, 6, 13, 11), (8, 6, 3, 2), (8,)),
    ),
    "in space": (lambda x, w, b: F.conv3d(x, w, b, padding=1), ((1, 3, 5, 6, 7), (4, 3, 3, 2, 3), (4,))),
}  # fmt: skip


def sample(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.randn(shape) / max(1, torch.Size(shape[1:]).numel()) ** 0.5 for shape in shapes]


def run(function: Callable[..., Any], inputs: list[Tensor], symbolic: bool = False) -> list[str]:
    """Compile, compare with eager in values and strides, and tell what it runs as."""
    compiled = compile_graph(trace(function, inputs, symbolic=symbolic), Config(strict=not symbolic))
    expected, reference = (function(*given) for given in (inputs, [x.double() for x in inputs]))
    found = compiled.program(list(inputs))
    comparison = compare_outputs([expected], found, [reference])
    assert comparison.passed, comparison
    assert found[0].stride() == expected.stride()
    return [step.kind for step in compiled.program.steps]


@pytest.mark.parametrize(
    ("name", "dtype"), rotating(list(PLAIN), (torch.float32, torch.bfloat16, torch.float16)), ids=str
)
def test_one_call_with_its_bias(name: str, dtype: torch.dtype) -> None:
    case = PLAIN[name]
    function, shapes = case
    assert run(function, [x.to(dtype) for x in sample(shapes)]) == ["vendor"]


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_sizes_may_be_symbols(case: Case) -> None:
    function, shapes = case
    assert run(function, sample(shapes), symbolic=True).count("opaque") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_of_one_is_a_product_without_copies(dtype: torch.dtype) -> None:
    image, line, weight = (torch.randn(shape).to(dtype) for shape in ((2, 6, 13, 11), (3, 6, 40), (8, 6)))
    assert run(lambda x, w: F.conv2d(x, w[..., None, None]), [image, weight]) == ["vendor"]
    channels_last = image.to(memory_format=torch.channels_last)
    assert run(lambda x, w: F.conv2d(x, w[..., None, None]), [channels_last, weight]) in (["vendor"], ["kernel"])
    assert run(lambda x, w: F.conv1d(x, w[..., None]), [line, weight]) == ["vendor"]
    assert run(lambda x, w: w @ x, [line, weight]) == ["vendor"]


@pytest.mark.filterwarnings("ignore:.*zero-padded copy")  # torch says so of eager, once in a process
def test_padding_on_one_side_is_put_on_before() -> None:
    inputs = sample(((2, 6, 31), (8, 6, 4), (8,)))
    assert run(lambda x, w, b: F.conv1d(x, w, b, padding="same"), inputs) == ["kernel", "vendor"]


@pytest.mark.parametrize(
    ("last", "dtype"), rotating(("image", "weight", "both"), (torch.float32, torch.bfloat16)), ids=str
)
def test_channels_may_lie_last(last: str, dtype: torch.dtype) -> None:
    x, w, b = (t.to(dtype) for t in sample(((2, 6, 13, 11), (8, 3, 3, 3), (8,))))
    x = x if last == "weight" else x.to(memory_format=torch.channels_last)
    w = w if last == "image" else w.to(memory_format=torch.channels_last)
    assert run(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), [x, w, b]) == ["vendor"]
    steps = run(lambda x, w, b: torch.tanh(F.conv2d(torch.tanh(x), w, b, padding=1, groups=2)), [x, w, b])
    assert steps == ["kernel", "vendor", "kernel"]


def test_operands_may_lie_in_any_order() -> None:
    for function, shapes in PLAIN.values():
        turned = [x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2] for x in sample(shapes)]
        run(function, turned)


def test_neighbours_are_fused_among_themselves() -> None:
    def encode(x: Tensor, v: Tensor, a: Tensor, w: Tensor, b: Tensor, p: Tensor) -> Tensor:
        h = F.gelu(F.conv1d(x, v, a, padding=1))
        return F.layer_norm(F.gelu(F.conv1d(h, w, b, stride=2, padding=1)).transpose(1, 2) + p, (12,))

    shapes = ((2, 6, 32), (12, 6, 3), (12,), (12, 12, 3), (12,), (16, 12))
    assert run(encode, sample(shapes)) == ["vendor", "kernel", "vendor", "kernel"]


def test_what_spreads_its_input_stays_a_call() -> None:
    inputs = sample(((2, 6, 9), (6, 8, 3), (8,)))
    assert run(lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), inputs) == ["opaque"]


class Encoder(nn.Module):
    """As wav2vec 2 hears speech: windows without padding, a norm over channels, positions by a window in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 12, 10, stride=5), nn.LayerNorm(12)
        self.second, self.third = nn.Conv1d(12, 12, 3, stride=2), nn.Conv1d(12, 12, 2, stride=2, bias=False)
        self.position = nn.utils.parametrizations.weight_norm(nn.Conv1d(12, 12, 8, padding=4, groups=3), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.first(x[:, None]).transpose(1, 2))).transpose(1, 2)
        h = F.gelu(self.third(F.gelu(self.second(h))))
        return (h + F.gelu(self.position(h)[..., :-1])).transpose(1, 2)


def test_a_model_with_lengths_that_change() -> None:
    dynamo.reset()
    model = Encoder()
    compiled = torch.compile(model, backend="fusec", dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 400), (3, 523), (2, 97)):
            x = torch.randn(batch, length)
            same(compiled(x), model(x))
    (found,) = dynamo.compiled_graphs()
    kinds = [step.kind for step in found.program.steps]
    assert kinds.count("vendor") == 4 and "opaque" not in kinds and "interpreted" not in kinds


def test_gradients() -> None:
    model, x = Encoder(), torch.randn(2, 200, requires_grad=True)
    results = []
    for run in (model, torch.compile(model, backend="fusec")):
        run(x).square().mean().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0])


def test_a_group_norm_and_an_activation_are_one_kernel() -> None:
    function = lambda x, v, w, b: F.gelu(F.group_norm(F.conv1d(x, v, stride=5), 12, w, b))  # noqa: E731
    assert run(function, sample(((2, 1, 400), (12, 1, 10), (12,), (12,)))) == ["vendor", "kernel"]


class Inverted(nn.Module):
    """A block of EfficientNet: wide in between, a window for each channel, gates from the mean of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(8, 32, 1, bias=False), nn.Conv2d(32, 8, 1, bias=False)
        self.each = nn.Conv2d(32, 32, 5, padding=2, groups=32, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (32, 32, 8))
        self.squeeze, self.spread = nn.Conv2d(32, 4, 1), nn.Conv2d(4, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.norms
        h = F.silu(second(self.each(F.silu(first(self.up(x))))))
        gates = torch.sigmoid(self.spread(F.silu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        return x + last(self.down(h * gates))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_block_of_convolutions_leaves_nothing_to_aten(layout: torch.memory_format) -> None:
    dynamo.reset()
    model, x = Inverted().eval().to(memory_format=layout), torch.randn(2, 8, 12, 12).to(memory_format=layout)
    with torch.no_grad():
        same(torch.compile(model, backend="fusec")(x), model(x))
    (found,) = dynamo.compiled_graphs()
    assert {step.kind for step in found.program.steps} == {"vendor", "kernel"}
    assert sum(step.name == "convolution" for step in found.program.steps) == 1
