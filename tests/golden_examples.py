"""The small models of the pages in docs/golden, each with what there is to see in its page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Example:
    """One page: a model, its inputs, and what to look at."""

    path: str
    """Of the page, without suffix: ``passes/fuse``, or ``cpp/rows`` for a target and a schedule."""
    shows: str
    """One line, for the index."""
    note: str
    model: Callable[..., Any]
    shapes: Shapes
    """Of the inputs, by parameter."""
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the compile."""
    integers: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of inputs that have others."""

    @property
    def name(self) -> str:
        """Of the pass or schedule."""
        return self.path.rpartition("/")[2]

    @property
    def title(self) -> str:
        """The heading of the page."""
        return {"passes": f"`{self.name}`", "cpp": f"C++: {self.name}", "triton": f"Triton: {self.name}"}[self.folder]

    @property
    def folder(self) -> str:
        """``passes``, or the target."""
        return self.path.partition("/")[0]


# Passes.


def redundant(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total, again = x * 2.0 + y, y + 2.0 * x
    negative = -(total * again)
    positive = -negative * 1.0
    return positive.t().t() @ weight.t()


def norm_and_gate(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = weight * normed.to(x.dtype)
    return y * torch.sigmoid(y)


def layer(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    normed = F.rms_norm(h, weight.shape, weight, 1e-6)
    return F.silu(F.linear(normed, gate)) * F.linear(normed, up), h


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def norm_and_projection(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    normed = F.rms_norm(x, scale.shape, scale, 1e-6)
    return F.silu(F.linear(normed, weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


# Schedules.


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(F.linear(x, weight, bias))


def packed_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).view(len(scale), -1, 64)
    return F.linear(x, ((codes.to(x.dtype) - 8) * scale[..., None]).view(len(scale), -1))


def packed_linear_of_bytes(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return packed_linear(x.to(scale.dtype), packed, scale)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


GATES = {"gate": (64, 4096), "up": (64, 4096)}
FEW = {"x": (4, 1024), "scale": (1024,), "weight": (4096, 1024)}
MANY = {"x": (512, 1024), "weight": (4096, 1024), "bias": (4096,)}
QUERIES = {"q": (1, 4, 256, 64), "k": (1, 4, 256, 64), "v": (1, 4, 256, 64)}
DECODE = {"q": (1, 64, 1, 64), "k": (1, 64, 512, 64), "v": (1, 64, 512, 64)}

EXAMPLES = (
    Example(
        "passes/canonicalize", "equivalent computations in canonical form",
        """
        The sum is computed twice, with commuted operands; one `add` remains. The double negation, the factor 1
        and the pair of transposes are removed. The transpose of the weight moves into the contraction, whose
        spec has `bz` instead of `zb`. The pass runs again after `attention`, to merge and remove nodes that
        have become equal or dead.
        """,
        redundant, {"x": (8, 64), "y": (8, 64), "weight": (32, 64)},
    ),
    Example(
        "passes/raise", "norms, activations and softmax recognized in primitives",
        """
        The operations of the norm become a region `rms_norm`, and `y * torch.sigmoid(y)` a region `silu`. A
        region keeps its operations as its body, which defines its semantics. Its attributes record which
        `spelling` of the declaration matched, and with which `scalars`.
        """,
        norm_and_gate, {"x": (8, 64), "weight": (64,)}, torch.bfloat16,
    ),
    Example(
        "passes/fuse", "fusions across them: a residual and its norm, gates and projections",
        """
        The residual sum and the norm become `add_rms_norm`, which has two results, as the sum is an output as
        well. The activation, the gate and both projections become `gated_projection`. Regions nest: a fusion is
        declared in terms of smaller ones.
        """,
        layer, {"x": (8, 64), "residual": (8, 64), "weight": (64,), "gate": (96, 64), "up": (96, 64)},
    ),
    Example(
        "passes/attention", "a call of scaled-dot-product attention as primitives",
        """
        The call is `opaque` to all other passes. It is decomposed into a region that computes
        softmax(q·kᵀ/√d)·v, with the causal mask as a comparison of two `iota`; a query with no visible key
        yields 0. Attention that a model writes out has the same form in `group`.
        """,
        causal_attention, QUERIES,
    ),
    Example(
        "passes/group", "kernels: groups of nodes with one loop nest",
        """
        Declared regions are inlined, and their names become `fusions`; each region of kind `kernel` is one
        launch. On a CPU where generated matmuls are about as fast as the library's, the activation becomes the
        epilogue of the matmul. On a GPU matmuls of so many rows use the library, unless `autotune` times
        generated ones. With few rows everything is one kernel: [C++](../cpp/small-m-gemm.md),
        [Triton](../triton/small-m-gemm.md).
        """,
        norm_and_projection, FEW | {"x": (40, 1024)},
    ),
    Example(
        "passes/bias", "a bias that a vendor's matmul adds",
        """
        On a GPU the matmul of 40 rows uses the library, and the kernel `add` would only add the bias: both
        become a region of kind `vendor`, which is one call. On a CPU `group` has already fused them into one
        kernel, so nothing changes.
        """,
        linear, {"x": (40, 64), "weight": (32, 64), "bias": (32,)},
    ),
    Example(
        "cpp/pointwise", "lanes along the innermost axis",
        """
        The body is a lambda over a tile of 16 elements (`f32x16`). It is called for full tiles (`All`), and
        once for the remainder (`Part`), with masked loads and stores. `team.share` distributes the rows over
        the threads.
        """,
        swiglu, GATES,
    ),
    Example(
        "cpp/rows", "one loop over the row for each reduction",
        """
        The maximum, the sum and the division are one loop over the row each. The exponentials are stored in
        `row0`, since recomputing them costs more than reading them from the cache. The maximum has four
        accumulators (`acc1_1`, …), to hide latency; `keep` leaves lanes past the end unchanged.
        """,
        softmax, {"x": (128, 1000)},
    ),
    Example(
        "cpp/small-m-gemm", "few rows: norm, matmul and activation in one pass over the weight",
        """
        The kernel is memory-bound, so the weight is read once. Each thread computes all normalized rows into
        its own `left0` (the prologue), then threads take blocks of the weight dynamically (`team.deal`).
        `dot_along_k` multiplies, and the activation (the epilogue) is applied to the block before it is stored.
        """,
        norm_and_projection, FEW,
    ),
    Example(
        "cpp/weight-prologue", "few rows and a weight of four bits, unpacked in registers",
        """
        A byte holds two neighbours of a row of the weight, so the sum has two segments: `left0` holds the even
        and `left1` the odd elements of `x`. `values` computes a register of either segment from one load of
        bytes, and `dot_computed` multiplies; the dense weight is never stored. Scales of 64 elements are loaded
        once for each step of `i0`.
        """,
        packed_linear, {"x": (1, 1024), "packed": (4096, 512), "scale": (4096, 16)}, torch.bfloat16,
        integers={"packed": torch.uint8},
    ),
    Example(
        "cpp/byte-groups", "few rows of int8 and a weight of four bits, summed exactly in each group",
        """
        `values` returns the codes of one group, its scale and its zero point. `dot_grouped` multiplies bytes with
        integer instructions into 32-bit lanes; only the sum of a group becomes a float, times the scale.
        """,
        packed_linear_of_bytes, {"x": (1, 1024), "packed": (4096, 512), "scale": (4096, 16)}, torch.bfloat16,
        integers={"packed": torch.uint8, "x": torch.int8},
    ),
    Example(
        "cpp/large-m-gemm", "many rows, in blocks that stay in the cache",
        """
        The kernel is compute-bound. The loop over `rows` processes as many at a time as fit into the L2 cache
        with their sums, while threads take blocks of the weight dynamically (`team.deal`). `dot_many_along_k`
        is the micro-kernel, in `dot.h`; bias and activation are the epilogue of each block.
        """,
        linear_relu, MANY,
    ),
    Example(
        "cpp/attention", "online softmax, lanes along the queries",
        """
        Keys are processed in blocks (`key_block += 64`), and a block of `scores1` stays in the cache between
        the two matmuls. If a block has a larger score than all before, `factor5` corrects the sums. Lanes run
        along the queries and scores are stored transposed, so there is no reduction across lanes. The loop over
        the keys ends at the last query of the block, since the mask hides all later keys.
        """,
        causal_attention, QUERIES,
    ),
    Example(
        "cpp/decode-attention", "online softmax, lanes along the keys",
        """
        With a single query, lanes run along the keys (`key_block += 256`), and each block's maximum and sum are
        reduced across lanes (`fold_max`, `fold_sum`). The steps are those of [attention](attention.md).
        """,
        attention, DECODE,
    ),
    Example(
        "triton/pointwise", "rows in blocks",
        """
        Each program computes one row, block by block; the row's length is a multiple of `BLOCK`, so nothing is
        masked. `exp` is a device function of the prelude, as `tl.exp` is less accurate.
        """,
        swiglu, GATES,
    ),
    Example(
        "triton/rows", "a row is one block",
        """
        The whole row is one `BLOCK` and stays in registers, so it is loaded once. `mask_i1` excludes lanes past
        the end from the reductions and the store. The region is the same as in [C++](../cpp/rows.md).
        """,
        softmax, {"x": (128, 1000)},
    ),
    Example(
        "triton/split-rows", "few long rows: each row is split over programs",
        """
        Two rows would occupy two multiprocessors. Here each row has `512 parts`, one program each, which store
        partial sums in `parts0_ptr`; a second launch adds these in a fixed order, and divides.
        """,
        mean_square, {"x": (2, 1 << 20)},
    ),
    Example(
        "triton/small-m-gemm", "few rows: norm, matmul and activation in one kernel",
        """
        Each program computes a block of columns (`16 rows, 16 columns, 128 deep`) and normalizes all rows
        itself, as they are in the cache. The four rows are padded to 16, the minimum of a matrix unit
        (`mask_i0`). The activation is applied to the sums in registers, `acc5`.
        """,
        norm_and_projection, FEW, torch.bfloat16,
    ),
    Example(
        "triton/large-m-gemm", "many rows, in tiles",
        """
        A program computes one tile of sums, `128 rows, 64 columns`. `row_block` varies fastest between
        programs, so programs that run at the same time share blocks of the weight in the cache. Such kernels
        are generated only under `autotune`, which times them against the library's matmul.
        """,
        linear_relu, MANY, torch.bfloat16, {"autotune": True},
    ),
    Example(
        "triton/attention", "online softmax on tiles",
        """
        A program has a block of queries and processes the keys block by block (`64 rows, 32 deep`). `acc2` is
        the largest score so far, `acc3` the sum of the exponentials and `acc4` the weighted sum of values;
        `v17` corrects the sums when the largest score increases. The loop ends at the last query of the block,
        since the mask hides all later keys.
        """,
        causal_attention, QUERIES, torch.bfloat16,
    ),
    Example(
        "triton/decode-attention", "online softmax over parts of the keys",
        """
        With a single query, there are too few heads to keep enough keys in flight, so the keys of each head are
        split over programs (`4 parts`). A second launch merges their results in a fixed order, with corrections
        as between blocks. A matrix unit would be mostly idle, so matmuls are sums of elementwise products.
        """,
        attention, DECODE, torch.bfloat16,
    ),
)  # fmt: skip
