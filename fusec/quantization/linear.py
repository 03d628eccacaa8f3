"""A linear layer whose weight is stored as codes and scales."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec.quantization.formats import Format, Parts, quantized_rows


class QuantizedLinear(nn.Module):
    """``x · weightᵀ + bias`` with a weight that is computed from codes; they are buffers, and the bias a parameter.

    Where the format has quantized activations, inputs are rounded to int8 first, and have no gradients.

    Eager dequantizes the whole weight at each call; compiled kernels do it in registers, as they read the codes.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, format: Format, parts: Parts) -> None:
        """Create the quantized replacement of a linear layer.

        Args:
            linear: the layer to replace; its sizes and bias are kept.
            format: the number format.
            parts: the parts of the weight.
        """
        super().__init__()
        self.format = format
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, part in parts.items():
            self.register_buffer(name, part)
        self.bias = linear.bias

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self.buffers())

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, in the dtype of the scales: models such as T5 ask for its dtype or device."""
        return self.dequantized(self.scale.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the [out_features, in_features] weight in a dtype."""
        return self.format.unpack(dict(self.named_buffers()), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return [*, out_features] for x of [*, in_features], in its dtype."""
        if not self.format.activations:
            return F.linear(x, self.dequantized(x.dtype), self.bias)
        codes, scale = quantized_rows(x)
        if self.format.bits == 8 and not self.format.group:
            sums = torch._int_mm(codes.reshape(-1, self.in_features), self.codes.t())
            sums = sums.reshape(*x.shape[:-1], self.out_features) * self.scale.float().reshape(-1)
        else:
            sums = F.linear(codes.to(x.dtype), self.dequantized(x.dtype)).float()
        out = (sums * scale).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """Return sizes and format, for print."""
        return f"{self.in_features}, {self.out_features}, format={self.format.name}"
