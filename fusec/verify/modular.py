"""Arithmetic modulo a prime below 2³¹ on int64 tensors, so that a product of two residues fits."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

PRIMES = (4197031, 243427799, 486855599, 973711199)
"""Each divides the next one less one, so that exponents modulo one act on powers modulo the next; all are 7 modulo 8,
so that -1 is no square and 2 is one."""
BASES = (142494273, 4, 4)
"""An element of order PRIMES[i] modulo PRIMES[i+1]."""
LEVELS = len(PRIMES)
_SMALL = 15
"""Bits of the lower limb in a sum of products: its products have 46 bits, so 2¹⁷ of them sum up without overflow."""


def power(base: Tensor, exponent: Tensor | int, p: int) -> Tensor:
    """base^exponent by squaring, elementwise; exponents are not negative."""
    if isinstance(exponent, int):
        result = torch.ones_like(base)
        for bit in f"{exponent:b}":
            result = result * result % p
            result = result * base % p if bit == "1" else result
        return result
    base, left = torch.broadcast_tensors(base, exponent)
    result = torch.ones_like(base)
    while bool((left > 0).any()):
        result = torch.where(left % 2 == 1, result * base % p, result)
        base, left = base * base % p, left // 2
    return result


def inverse(x: Tensor, p: int) -> Tensor:
    """Return 1/x by Fermat's little theorem, and 0 for 0."""
    return power(x, p - 2, p)


def sqrt(x: Tensor, p: int) -> Tensor:
    """A multiplicative map whose square is x where x has a square root, and -x otherwise."""
    return power(x, (p + 1) // 4, p)


def sign(x: Tensor, p: int) -> Tensor:
    """The Legendre symbol: 1 for squares, -1 for the others, 0 for 0; multiplicative and odd, as the sign is."""
    return power(x, (p - 1) // 2, p)


def product(x: Tensor, dims: tuple[int, ...], p: int) -> Tensor:
    """Return the product along dims, with keepdim."""
    for d in dims:
        total = torch.ones_like(x.sum(d))
        for i in range(x.shape[d]):
            total = total * x.select(d, i) % p
        x = total.unsqueeze(d)
    return x


def products(x: Tensor, dim: int, p: int) -> Tensor:
    """Return the product of each element and those before it along a dim."""
    parts = list(x.unbind(dim))
    for i in range(1, len(parts)):
        parts[i] = parts[i - 1] * parts[i] % p
    return torch.stack(parts, dim) if parts else x


def bilinear(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, p: int) -> Tensor:
    """Return sums of products of two operands (einsum, convolution), computed in two limbs of the first."""
    high = function(a >> _SMALL, b) % p
    low = function(a & ((1 << _SMALL) - 1), b) % p
    return ((high << _SMALL) + low) % p


def keyed(name: str, p: int, *operands: Tensor) -> Tensor:
    """Return a hash of the operands under a name: equal operands give equal results, and no other algebra holds."""
    mixed = torch.tensor(_key(name))
    for x in operands:
        mixed = _mix(mixed ^ (x * _odd_number(name)))
    return (mixed & 0x7FFFFFFFFFFFFFFF) % p


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 wraps around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _key(name: str) -> int:
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _odd_number(name: str) -> int:
    return _key(f"{name} factor") | 1


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
