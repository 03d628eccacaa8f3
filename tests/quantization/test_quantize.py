"""Quantization in place: numbers within the format's error, reports, skipped layers, and one kernel for each layer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

import fusec
from fusec.dynamo import backend_for, compiled_graphs
from fusec.errors import OptionError
from fusec.quantization.formats import format_named, quantized_rows
from fusec.quantization.linear import QuantizedLinear
from fusec.quantization.rounding import round_for_inputs, round_to_nearest
from tests.machines import profile

FORMATS = ("int8", "int8-row", "int8-g32", "int4", "int4-g32", "nf4", "fp8")
ERROR = {"int8": 0.01, "int8-row": 0.012, "int8-g32": 0.008, "int4": 0.11, "int4-g32": 0.1, "nf4": 0.11, "fp8": 0.03}
"""Root mean square of the error over that of normal weights."""


class Block(nn.Module):
    """A gated block of a transformer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 128)
        self.norm = nn.RMSNorm(128)
        self.gate, self.up = nn.Linear(128, 256, bias=False), nn.Linear(128, 256)
        self.down, self.head = nn.Linear(256, 128), nn.Linear(128, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        n = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(n)) * self.up(n)))


def block(tied: bool = False) -> Block:
    torch.manual_seed(0)
    return Block(tied).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_error_of_a_format(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, format = torch.randn(48, 256).to(dtype), format_named(name)
    parts = round_to_nearest(weight, format)
    found = format.unpack(parts, torch.float64)
    assert (found - weight.double()).norm() / weight.double().norm() < ERROR[name]
    assert parts["codes"].nbytes * 8 == weight.numel() * format.bits


def test_zeros_and_constant_rows_stay_what_they_are() -> None:
    weight = torch.stack([torch.zeros(64), torch.full((64,), 3.0), torch.full((64,), -0.25)])
    for name in FORMATS:
        if name != "int8":
            format = format_named(name)
            found = format.unpack(round_to_nearest(weight, format), torch.float32)
            torch.testing.assert_close(found, weight, atol=0, rtol=0.01)


def test_a_sample_decides_the_rounding() -> None:
    """Results on inputs that are alike are nearer than if each weight is rounded to the nearest."""
    torch.manual_seed(0)
    weight, format = torch.randn(32, 320), format_named("int4-g32")  # in three blocks of columns
    x = torch.randn(600, 16) @ torch.randn(16, 320) + 0.1 * torch.randn(600, 320)
    parts = round_for_inputs(weight, format, x.T @ x), round_to_nearest(weight, format)
    errors = [(F.linear(x, format.unpack(p, torch.float32)) - F.linear(x, weight)).norm() for p in parts]
    assert errors[0] < 0.3 * errors[1]


def test_the_report() -> None:
    model, tokens = block(), torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        dense = model(tokens)
    report = fusec.quantize(model, "int4", layers={"d*": "int8", "head": None}, sample=(tokens,), progress=False)
    assert {layer.name: layer.format for layer in report.layers} == {"gate": "int4", "up": "int4", "down": "int8"}
    assert report.skipped == (
        ("head", "left out by 'head'"),
        ("embed", "Embedding is not replaced: weight [40, 128]"),
    )
    assert isinstance(model.gate, QuantizedLinear) and type(model.head) is nn.Linear
    assert report.nbytes < 0.2 * report.dense_nbytes
    with torch.no_grad():
        cosine = torch.cosine_similarity(model(tokens), dense, dim=-1).min()
    assert report.cosine == pytest.approx(float(cosine), abs=1e-6) and 0.98 < report.cosine < 1
    assert all(layer.cosine is not None and 0.97 < layer.cosine < 1 for layer in report.layers)
    text = str(report)
    assert "gate" in text and "left out" in text and report.summary() in text


def test_a_cosine_that_is_asked_for() -> None:
    """Layers get eight bits until it is kept on the inputs that are held out, the one that needs them most first."""
    torch.manual_seed(0)
    tokens = [(torch.randint(40, (2, 9)),) for _ in range(12)]
    reports, heads = {}, {}
    for least in (0.0, 0.9995, 0.9999):
        model = block()
        with torch.no_grad():
            model.head.weight *= torch.linspace(1, 40, 40)[:, None]  # rows that matter
        want = [model(*x) for x in tokens[1::2]]
        report = fusec.quantize(model, "int4", sample=tokens, min_cosine=least, progress=False)
        found = [
            F.cosine_similarity(model(*x), y, dim=-1).min().item() for x, y in zip(tokens[1::2], want, strict=True)
        ]
        assert min(found) >= least
        reports[least] = [layer.format for layer in report.layers]
        heads[least] = model.head.format.name
    counts = [formats.count("int8") for formats in reports.values()]
    assert counts[0] == 0 < counts[1] <= counts[2] <= 4 and heads[0.9999] == "int8"
    assert all(set(formats) <= {"int4", "int8"} for formats in reports.values())


def test_layers_that_change_the_result_most_get_eight_bits() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slight, self.strong = nn.Linear(128, 64), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.strong(x) + self.slight(x) / 1000

    torch.manual_seed(0)
    model, sample = Sum().eval(), [(torch.randn(8, 128),) for _ in range(8)]
    fusec.quantize(model, "int4", sample=sample, min_cosine=0.9995, progress=False)
    assert (model.strong.format.name, model.slight.format.name) == ("int8", "int4")


def test_a_cosine_that_cannot_be_kept() -> None:
    """The model is unchanged then."""
    model, sample = block(), [(torch.randint(40, (2, 9)),) for _ in range(4)]
    for words, sampled in (("with eight bits", sample), ("without a sample", None), ("without a sample", [])):
        with pytest.raises(OptionError, match=words):
            fusec.quantize(model, "w4a8", sample=sampled, min_cosine=0.9999999, progress=False)
        assert not any(isinstance(m, QuantizedLinear) for m in model.modules())


def test_rows_of_zeros_are_like_rows_of_zeros() -> None:
    class FirstHidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.arange(x.shape[0]) > 0)[:, None]

    torch.manual_seed(0)
    model = nn.Sequential(FirstHidden(), nn.Linear(64, 64, bias=False)).eval()
    sample = [(torch.randn(3, 64),) for _ in range(4)]
    report = fusec.quantize(model, "int8-row", sample=sample, min_cosine=0.99, progress=False)
    assert report.cosine is not None and report.cosine > 0.99
    assert [layer.cosine > 0.99 for layer in report.layers if layer.cosine is not None] == [True]


def test_results_that_have_no_cosine_keep_none() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.arange(32) == 3, -torch.inf)

    model, sample = nn.Sequential(nn.Linear(64, 32), Masked()).eval(), [(torch.randn(3, 64),) for _ in range(4)]
    with pytest.raises(OptionError, match="nan with eight bits"):
        fusec.quantize(model, "int4", sample=sample, min_cosine=0.9, progress=False)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())


def test_formats_of_eight_bits() -> None:
    """Inputs in int8 stay so; rows that are no whole groups of 128 have one scale each."""
    torch.manual_seed(0)
    sample = [(torch.randn(3, 64),) for _ in range(6)]
    for name, finer in (("nf4", "int8-row"), ("w4a8", "w8a8")):
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64).requires_grad_(False)).eval()
        report = fusec.quantize(model, name, layers={"2": None}, sample=sample, min_cosine=0.999, progress=False)
        assert [layer.format for layer in report.layers] == [finer]


def test_shared_and_odd_layers_are_skipped() -> None:
    model = block(tied=True)
    model.down = nn.Linear(256, 128)
    report = fusec.quantize(model, "int8-g256", progress=False)
    assert dict(report.skipped).keys() == {"gate", "up", "head", "embed"}
    assert "shares its weight with embed" in dict(report.skipped)["head"]
    assert "whole groups of 256" in dict(report.skipped)["gate"]


def test_other_weights_are_named() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked, self.scale = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.ones(1, 8))

    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"conv": nn.Conv1d(3, 8, 5), "experts": Experts(), "mine": Mine(4, 8), "norm": nn.LayerNorm(8)}
    )
    assert dict(fusec.quantize(model, progress=False).skipped) == {
        "conv": "Conv1d is not replaced: weight [8, 3, 5]",
        "experts": "Experts is not replaced: stacked [4, 8, 8]",
        "mine": "Mine is not replaced: weight [8, 4]",
    }
    alone = fusec.quantize(nn.Linear(4, 8), progress=False)
    assert alone.skipped == (("the model itself", "Linear is not replaced: weight [8, 4]"),) and not alone.layers


@pytest.mark.parametrize("name", ["int4-g32", "w8a8"])
def test_a_transposed_weight(name: str) -> None:
    """The Conv1D of transformers is a linear layer whose weight has rows and columns exchanged."""
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(48, 64)
    nn.init.normal_(conv.bias)
    linear, x = nn.Linear(64, 48), torch.randn(5, 64)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.T)
        linear.bias.copy_(conv.bias)
    models = nn.Sequential(conv), nn.Sequential(linear)
    reports = [fusec.quantize(model, name, sample=(x,), progress=False) for model in models]
    assert reports[0].layers == reports[1].layers and not reports[0].skipped
    assert torch.equal(models[0](x), models[1](x))


def test_wrong_arguments() -> None:
    with pytest.raises(OptionError, match="int4"):
        fusec.quantize(block(), "int5")
    with pytest.raises(OptionError, match="q_proj"):
        fusec.quantize(block(), layers={"*.q_proj": "int8"})


def test_a_state_dict_by_safetensors(tmp_path: Path) -> None:
    model, other, tokens = block(), Block().eval(), torch.randint(0, 40, (1, 5))
    for each in (model, other):
        fusec.quantize(each, "nf4", progress=False)
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(model(tokens), other(tokens))


def test_inputs_have_gradients() -> None:
    layer, x = nn.Sequential(nn.Linear(64, 8)), torch.randn(3, 64, requires_grad=True)
    fusec.quantize(layer, "int4", progress=False)
    layer(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert layer[0].bias.grad is not None


@pytest.mark.parametrize("name", ["int4", "w8a8", "fp8"])
def test_a_model_may_ask_for_the_dtype_of_a_weight(name: str) -> None:
    """T5 casts the input of a layer to it."""
    model = nn.Sequential(nn.Linear(64, 8))
    fusec.quantize(model, name, progress=False)
    for dtype in (torch.float32, torch.bfloat16):
        weight = model.to(dtype)[0].weight
        assert (weight.dtype, weight.shape) == (dtype, (8, 64))
        torch.testing.assert_close(weight, model[0].dequantized(dtype))


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (0, 64)], ids=str)
def test_quantized_inputs(shape: tuple[int, ...]) -> None:
    """A row of zeros, one of huge and one of tiny numbers are as exact as others."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(64, 8, bias=False)), torch.randn(shape)
    if len(shape) == 2 and shape[0]:
        x[0], x[1], x[2] = 0, x[1] * 1e30, x[2] * 1e-30
    with torch.no_grad():
        dense = layer(x)
        fusec.quantize(layer, "w8a8", progress=False)
        error = layer(x) - dense
    assert error.shape == (*shape[:-1], 8)
    assert (error.abs() <= 0.02 * x.abs().amax(-1, keepdim=True)).all()


def test_the_codes_of_a_row_reach_127_and_no_further() -> None:
    codes, _ = quantized_rows(torch.randn(50, 64) * torch.logspace(-30, 30, 50)[:, None])
    assert (codes.int().abs().amax(-1) == 127).all()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["int8", "int4-g32", "w8a8", "w4a8"]
    + [pytest.param(n, marks=pytest.mark.thorough) for n in ("int8-row", "nf4", "fp8", "w8a8-g32")],
)
def test_a_quantized_block_has_the_kernels_of_the_dense_one(name: str, dtype: torch.dtype) -> None:
    model, tokens = block().to(dtype), torch.randint(0, 40, (1, 1))
    with torch.no_grad():
        kernels = len(fusec.explain(model, tokens).kernels)
        fusec.quantize(model, name, progress=False)
        torch._dynamo.reset()
        found = torch.compile(model, backend="fusec", options={"strict": True})(tokens)
        assert len(fusec.explain(model, tokens).kernels) == kernels
        torch.testing.assert_close(found, model(tokens), atol=0.03 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)


@pytest.mark.parametrize(
    "name", ["int4-g32", "w4a8", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("int8", "nf4", "fp8", "w8a8"))]
)
def test_a_number_of_rows_that_changes(name: str) -> None:
    """The dense weight is in no kernel's memory."""
    model = block()
    fusec.quantize(model, name, progress=False)
    compiled, before = (
        torch.compile(model, backend=backend_for(profile(f32=100.0, i8=100.0)), dynamic=True),
        len(compiled_graphs()),
    )
    with torch.no_grad():
        for length in (20, 33, 170):
            tokens = torch.randint(0, 40, (2, length))
            torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-5, rtol=1e-4)
    (found,) = compiled_graphs()[before:]
    stored = [v.shape for node in found.graph for v in node.results]
    assert all(any(not isinstance(size, int) for size in shape) for shape in stored), stored
