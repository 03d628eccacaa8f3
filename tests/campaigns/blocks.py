"""Single layers of the models in plain torch, as functions of their inputs and weights: what spellings are tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusec.models import bert, gpt2, llama, t5
from fusec.models.cache import causal_mask
from fusec.models.inputs import padded_mask
from fusec.models.weights import redraw

HIDDEN = 64


@dataclass(frozen=True)
class Block:
    """One layer."""

    name: str
    module: nn.Module
    call: Callable[..., Any]
    """Takes the module, then the inputs."""
    inputs: tuple[Tensor, ...]

    @property
    def arguments(self) -> list[Tensor]:
        """The inputs, then the weights."""
        return [*self.inputs, *self.module.parameters()]

    def __call__(self, *arguments: Tensor) -> Any:
        """The layer's result, with the weights as arguments."""
        count = len(self.inputs)
        names = [f"module.{name}" for name, _ in self.module.named_parameters()]
        weights = dict(zip(names, arguments[count:], strict=True))
        return torch.func.functional_call(_Called(self.module, self.call), weights, arguments[:count])


class _Called(nn.Module):
    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Any:
        """The call."""
        return self.call(self.module, *inputs)


def llama_layer(batch: int, length: int, dtype: torch.dtype, causal: bool = False) -> Block:
    """RMS norm, rotary embedding, grouped heads, SwiGLU; with padding, or causal alone."""
    config = llama.LlamaConfig(hidden=HIDDEN, intermediate=3 * HIDDEN, heads=4, kv_heads=2, head=16)
    cos, sin = llama.rotary_angles(torch.arange(length)[None], config, dtype)

    def call(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, *padding: Tensor) -> Any:
        slots = torch.arange(length)
        mask = causal_mask(slots, length, padding[0]) if padding else None
        return layer(x, cos, sin, slots, mask, None)

    inputs = (_states(batch, length, dtype), cos, sin)
    padding = () if causal else (padded_mask(batch, length, "right"),)
    return _made("llama-causal" if causal else "llama", llama.Block(config, 0), call, (*inputs, *padding), dtype)


def llama_causal_layer(batch: int, length: int, dtype: torch.dtype) -> Block:
    """The same without padding."""
    return llama_layer(batch, length, dtype, causal=True)


def bert_layer(batch: int, length: int, dtype: torch.dtype) -> Block:
    """Attention with a mask, biases, layer norms after the residuals, gelu."""
    layer = bert.Block(bert.BertConfig(hidden=HIDDEN, intermediate=4 * HIDDEN))

    def call(layer: Any, x: Tensor, mask: Tensor) -> Any:
        return layer(x, mask.bool()[:, None, None])

    return _made("bert", layer, call, (_states(batch, length, dtype), padded_mask(batch, length, "right")), dtype)


def gpt2_layer(batch: int, length: int, dtype: torch.dtype) -> Block:
    """Packed query, key and value, causal attention, gelu by tanh."""
    layer = gpt2.Block(gpt2.GPT2Config(hidden=HIDDEN), 0)

    def call(layer: Any, x: Tensor) -> Any:
        return layer(x, torch.arange(length), None, None)

    return _made("gpt2", layer, call, (_states(batch, length, dtype),), dtype)


def t5_layer(batch: int, length: int, dtype: torch.dtype) -> Block:
    """Attention without scale, with a bias by position and a mask, relu."""
    config = t5.T5Config(hidden=HIDDEN, intermediate=4 * HIDDEN, head=16, layers=1)

    def call(stack: Any, x: Tensor, mask: Tensor) -> Any:
        bias = stack.bias(torch.arange(length), length, mask.bool()[:, None, None])
        return stack.layers[0](x, bias)

    inputs = (_states(batch, length, dtype), padded_mask(batch, length, "right"))
    return _made("t5", t5.Stack(config, decoder=False), call, inputs, dtype, unused="final_layer_norm")


def _states(batch: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def _made(name: str, module: nn.Module, call: Any, inputs: Any, dtype: torch.dtype, unused: str = "") -> Block:
    if unused:
        setattr(module, unused, nn.Identity())
    return Block(name, redraw(module).to(dtype).eval().requires_grad_(False), call, inputs)


BLOCKS = {
    "llama": llama_layer, "llama-causal": llama_causal_layer, "bert": bert_layer, "gpt2": gpt2_layer, "t5": t5_layer,
}  # fmt: skip
