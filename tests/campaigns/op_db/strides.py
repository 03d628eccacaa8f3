"""Which strides do torch's fake functions predict wrongly, over PyTorch's operator database and layouts of operands?

``python -m tests.campaigns.op_db.strides``; each ATen operation that an operator calls is compared, its real strides on
the CPU with the predicted ones as fusec corrects them, or with ``--uncorrected`` as they are. Operators run in
processes of their own, since one that crashes must not take the others along.
"""

import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fusec.frontend.predictions import corrected_predictions
from tests.campaigns.op_db.cases import DTYPES, Operator, operators

SECONDS = 60
"""Time for the samples of one operator in one dtype."""


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Yield a tensor of the same shape in several layouts, in the same order for each rank."""
    yield x
    if x.layout is not torch.strided or x.ndim < 2 or x.numel() < 2:
        return
    backwards = list(range(x.ndim))[::-1]
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.mT.contiguous().mT
    yield x.permute(backwards).contiguous().permute(backwards)
    yield torch.stack([x, x], -1)[..., 0]
    yield x[..., :1].expand_as(x)
    if x.ndim in (4, 5):
        yield x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


class Comparison(TorchDispatchMode):
    """Runs each operation, and compares its strides with the predicted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        """By operation, its first difference."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and its fake function if it makes new tensors."""
        kwargs = kwargs or {}
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            return func(*args, **kwargs)
        mode = FakeTensorMode()
        real = func(*args, **kwargs)
        try:
            fakes, named = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            with mode:
                predicted = func(*fakes, **named)
        except Exception:  # what depends on data has no prediction
            return real
        for x, fake in zip(tree_leaves(real), tree_leaves(predicted), strict=True):
            if isinstance(x, Tensor) and _differ(x, fake):
                inputs = [(*y.shape, y.stride()) for y in tree_leaves((args, kwargs)) if _strided(y)]
                self.found.setdefault(str(func), f"{x.stride()}, predicted {fake.stride()}, of {inputs}")
        return real


def _strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _differ(real: Tensor, fake: Tensor) -> bool:
    if not _strided(real) or real.shape != fake.shape or real.numel() < 2:
        return False
    return any(n > 1 and a != b for n, a, b in zip(real.shape, real.stride(), fake.stride(), strict=True))


def compare(operator: Operator, dtype: str, count: int) -> dict[str, str]:
    """Compare an operator's samples, each tensor in one layout and in turn the first beside others as they are."""
    comparison = Comparison()
    for sample in operator.samples(dtype, "plain", count):
        tensors = [x for x in tree_leaves(sample) if _strided(x)]
        for i in range(max((len(list(layouts(x))) for x in tensors), default=0)):
            for alike in (False, True):
                x, args, kwargs = _in_layout(sample, i, alike)
                with contextlib.suppress(Exception), torch.no_grad(), comparison:  # eager may refuse the layout
                    operator.call("plain")(x, *args, **kwargs)
    return comparison.found


def _in_layout(sample: Any, i: int, alike: bool) -> Any:
    def moved(x: Tensor) -> Tensor:
        forms = list(layouts(x))
        return forms[i] if i < len(forms) else x

    x, *others = sample
    return (tree_map_only(Tensor, moved, x), *(tree_map_only(Tensor, moved, others) if alike else others))


def _in_a_process(operator: Operator, dtype: str, count: int) -> int:
    """Print what differs; the exit status is 1 where something does."""
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        found = compare(operator, dtype, count)
        for name, difference in found.items():
            print(f"{name} in {operator.name}, {dtype}: {difference}", flush=True)
        os._exit(bool(found))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        print(f"{operator.name}, {dtype}: ended by signal {-status}", flush=True)
    return int(status > 0)


def main(words: list[str] | None = None) -> int:
    """Run; the exit status is 1 where strides differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators, with commas")
    parser.add_argument("--dtypes", default="float32,int64,bfloat16,bool", help="with commas")
    parser.add_argument("--samples", type=int, default=12, help="of each operator")
    parser.add_argument("--uncorrected", action="store_true", help="what torch itself predicts")
    options = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = operators(options.only.split(",") if options.only else ())
    cases = [(o, d) for d in options.dtypes.split(",") for o in chosen if d in DTYPES and o.supports(d)]
    with contextlib.nullcontext() if options.uncorrected else corrected_predictions():
        return int(any([_in_a_process(operator, dtype, options.samples) for operator, dtype in cases]))


if __name__ == "__main__":
    sys.exit(main())
