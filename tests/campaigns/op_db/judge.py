"""One function through the backend, held against eager: values, types, strides, aliases, randomness, exceptions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fusec import dynamo
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.reference.contract import Comparison, compare_outputs, copy_arguments
from tests.campaigns.op_db.cases import Arguments, Call, requires_grad, widened
from tests.observations import Observation, TensorFacts, contract_breaches, observe

Function = Callable[..., Any]
LOOSE = 8
"""Times what the numeric rule allows where the reference is no more exact than eager, whose own error is unknown."""
LOOSE_OF_FLOAT64 = 64
"""The same for float64, the most exact reference there is: sums of a hundred terms differ so much by their order."""
DRAWS = 16
"""Runs over which the numeric rule is held together where one run breaks it; see ``bench.numerics``."""
ULPS = 8
"""How far their inputs lie from the first run's: with one ulp, the few elements of a small tensor would hardly vary."""


@dataclass(frozen=True)
class Subject:
    """Calls of an operator as one function, and how it is compiled."""

    function: Function
    samples: Sequence[Any]
    dynamic: bool = False
    gradients: bool = False
    undefined: bool = False
    """What the values are is not defined; everything else is compared."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of the backend."""
    around: Callable[[Function], Function] = lambda function: function
    """What is done with the function, compiled or not."""

    @classmethod
    def of(cls, call: Call, samples: Sequence[Arguments], variant: str, undefined: bool = False) -> "Subject":
        """A variant of a call; see ``cases.VARIANTS``."""
        named = variant == "embedded"

        def function(samples: Sequence[Arguments], zero: Tensor) -> list[Any]:
            more = {"zero": zero} if named else {}
            return [call(x, *args, **kwargs, **more) for x, args, kwargs in samples]

        return cls(function, samples, variant == "dynamic", variant == "gradients", undefined)

    @property
    def arguments(self) -> list[Any]:
        """What the function is called with."""
        return [self.samples, torch.zeros(())]

    def called(self, function: Function) -> Function:
        """The function, or some other that computes the same, with its gradients where these are asked for."""
        return _with_gradients(function) if self.gradients else self.around(function)


@dataclass
class Verdict:
    """What became of a function."""

    outcome: str
    """``right``, ``fallback``, ``refused`` by Dynamo, ``wrong``, ``raised``, or ``torch``: aot_eager differs too, or
    strides are those that torch predicts."""
    detail: str = ""
    steps: Counter[str] = field(default_factory=Counter)
    """What the programs do, by kind of step."""


@dataclass(frozen=True)
class Ran:
    """An observed call, or the exception that it raised."""

    function: Function
    seen: Observation | None
    error: Exception | None = None

    @property
    def refused(self) -> bool:
        """Whether Dynamo finds no whole graph."""
        return isinstance(self.error, torch._dynamo.exc.Unsupported | torch._dynamo.exc.UserError)

    @property
    def failure(self) -> str:
        """The exception in one line."""
        lines = str(self.error).strip().splitlines() if self.error else []
        return f"{type(self.error).__name__}: {''.join(lines[:1])[:200]}" if self.error else "nothing"


def judge(subject: Subject) -> Verdict:
    """Hold the compiled function against eager, and where it differs aot_eager too."""
    eager = run(subject.called(subject.function), subject)
    dynamo.reset()
    compiled = run(_through(dynamo.backend, subject), subject)
    if compiled.refused:
        return Verdict("refused", compiled.failure)
    steps, fallbacks = _steps(), dynamo.fallbacks()
    found = _flaws() + differences(subject, eager, compiled)
    if not found:
        return Verdict("fallback", fallbacks[0][:300], steps) if fallbacks else Verdict("right", "", steps)
    theirs = differences(subject, eager, run(_through("aot_eager", subject), subject))
    if set(map(_kind, found)) <= set(map(_kind, theirs)) or _lies_as_predicted(subject, compiled, found):
        return Verdict("torch", "; ".join(found)[:400], steps)
    return Verdict("raised" if compiled.error and not eager.error else "wrong", "; ".join(found)[:600], steps)


def _lies_as_predicted(subject: Subject, compiled: Ran, found: Sequence[str]) -> bool:
    """Whether strides alone differ, and are those of torch's fake functions, by which memory is laid out."""
    if compiled.seen is None or not all(_kind(difference).endswith(": strides") for difference in found):
        return False
    mode = FakeTensorMode()
    try:
        with mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, subject.arguments)
            predicted = subject.called(subject.function)(*fakes)
    except Exception:  # what depends on data has no prediction
        return False
    strides = [
        [x.stride() for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (predicted, compiled.seen.outputs)
    ]
    return strides[0] == strides[1]


def _kind(difference: str) -> str:
    kind = difference.partition(" (")[0]
    return "raises" if kind.startswith("raises ") else kind  # at a call or, in torch's own backend, as it compiles


def run(function: Function, subject: Subject) -> Ran:
    """Observe a call."""
    try:
        return Ran(function, observe(function, subject.arguments))
    except Exception as error:
        return Ran(function, None, error)


def _through(backend: Any, subject: Subject) -> Function:
    torch._dynamo.reset()
    options = dict(subject.options) if backend is dynamo.backend else {}
    return subject.called(
        torch.compile(
            subject.function, backend=backend, fullgraph=True, dynamic=subject.dynamic, options=options or None
        )
    )


def _with_gradients(function: Function) -> Function:
    def called(samples: Sequence[Arguments], zero: Tensor) -> Any:
        outputs = function(samples, zero)
        inputs = [x for x in tree_leaves(samples) if requires_grad(x)]
        leaves = [x for x in tree_leaves(outputs) if requires_grad(x)]
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in leaves]
        return outputs, torch.autograd.grad(leaves, inputs, weights, allow_unused=True) if leaves else ()

    return called


def _steps() -> Counter[str]:
    return Counter(step.kind for graph in dynamo.compiled_graphs() for step in graph.program.steps)


def _flaws() -> list[str]:
    """What fusec says of itself, or its kernels of themselves, that must not be."""
    graphs = dynamo.compiled_graphs()
    found = [f"a compile fails ({remark})" for graph in graphs for remark in graph.remarks.of("failure")]
    kernels = [k for graph in graphs for k in graph.program.kernels.values() if not k.symbols]
    return found + [f"unproven access ({access})" for kernel in kernels for access in unproven_accesses(kernel)]


def differences(subject: Subject, eager: Ran, compiled: Ran) -> list[str]:
    """Where a compiled call is not what the eager one is; what may differ from run to run stands in parentheses."""
    if eager.seen is None or compiled.seen is None:
        same = eager.error is not None and isinstance(compiled.error, type(eager.error))
        said = f"raises {type(compiled.error).__name__} ({compiled.failure}, not {eager.failure})"
        return [] if same else [said]
    found = [f"{breach.partition(' is ')[0]} ({breach})" for breach in _breaches(eager.seen, compiled.seen)]
    return found or ([] if subject.undefined else _wrong_values(subject, eager, compiled))


def _breaches(eager: Observation, compiled: Observation) -> list[str]:
    eager, compiled = _addressing(eager), _addressing(compiled)
    found = [b for b in contract_breaches(eager, compiled) if not b.endswith("is different after the call")]
    if not found and _partners(eager) != _partners(compiled):
        found.append(f"shared storage of outputs is {_partners(compiled)}, not {_partners(eager)}")
    return found


def _addressing(seen: Observation) -> Observation:
    """Leave out strides that address nothing, of dims of length 1 and of empty tensors, which are a known limit."""

    def stripped(f: TensorFacts) -> TensorFacts:
        empty = 0 in f.shape
        return replace(f, strides=tuple(0 if empty or n == 1 else s for n, s in zip(f.shape, f.strides, strict=True)))

    return replace(seen, facts=[f and stripped(f) for f in seen.facts])


def _partners(seen: Observation) -> list[int | None]:
    """For each output with elements, the first that has the same storage."""
    first: dict[int, int] = {}
    found: list[int | None] = []
    for i, x in enumerate(seen.outputs):
        strided = isinstance(x, Tensor) and x.layout == torch.strided and x.numel() > 0
        found.append(first.setdefault(x.untyped_storage().data_ptr(), i) if strided else None)
    return found


# -- values -----------------------------------------------------------------------------------------------------


def _wrong_values(subject: Subject, eager: Ran, compiled: Ran) -> list[str]:
    return wrong_values(lambda arguments: _values(subject, arguments, eager, compiled), subject.arguments)


Values = list[tuple[Any, Any, Any]]
"""What a call leaves behind: of eager, of what is judged, and in float64 where it can be."""


def wrong_values(call: Callable[[Sequence[Any]], Values], arguments: Sequence[Any]) -> list[str]:
    """The values that break the numeric rule, in one run and in many together."""
    runs = [call(arguments)]
    suspects = [i for i, row in enumerate(runs[0]) if not _compared(row).passed]
    if not suspects:
        return []
    runs += [call(_moved(arguments, seed)) for seed in range(1, DRAWS)]
    found = []
    for i in suspects:
        comparison = _compared([torch.cat([run[i][k].flatten() for run in runs]) for k in range(3)])
        if not comparison.passed:
            found.append(f"value {i} ({comparison})")
    return found


def _compared(row: Sequence[Any]) -> Comparison:
    """Hold values against the numeric rule, or several times that where the reference is no more exact than eager."""
    row = _without_false_nans(*row)
    comparison = compare_outputs([row[0]], [row[1]], [row[2]])
    exact = not isinstance(row[0], Tensor) or row[0].dtype != row[2].dtype or not row[0].is_floating_point()
    loose = LOOSE if exact or row[0].dtype != torch.float64 else LOOSE_OF_FLOAT64
    near = all(max(x.max_ratio, x.rms_ratio) <= loose for x in comparison.outputs)
    return Comparison(()) if near and not exact else comparison


def _without_false_nans(eager: Any, compiled: Any, reference: Any) -> tuple[Any, Any, Any]:
    """Where eager is NaN, and float64 is infinite as what is judged is, eager is wrong: as ``gelu`` of infinity is."""
    if not isinstance(eager, Tensor) or not eager.is_floating_point():
        return eager, compiled, reference
    false = eager.isnan() & reference.isinf() & (compiled == reference.to(compiled.dtype))
    return torch.where(false, compiled, eager), compiled, reference


def _values(subject: Subject, arguments: Sequence[Any], eager: Ran, compiled: Ran) -> Values:
    """Each output, and each input after the call: of eager, of what is compiled, and in float64 where it can be."""
    e, f = (_left(observe(ran.function, arguments)) for ran in (eager, compiled))
    try:
        r = _left(observe(eager.function, widened(list(arguments))))
    except Exception:  # not every operator takes float64
        r = e
    known = len(r) == len(e) and all(map(_alike, r, e))
    return list(zip(e, f, r if known else e, strict=True))


def _left(seen: Observation) -> list[Tensor]:
    return [x.detach().to_dense().resolve_conj() for x in [*seen.outputs, *seen.inputs] if isinstance(x, Tensor)]


def _alike(reference: Tensor, eager: Tensor) -> bool:
    return reference.shape == eager.shape and reference.is_complex() == eager.is_complex()


def _moved(arguments: Sequence[Any], seed: int) -> list[Any]:
    """Arguments of which every part that is not 0 moves by up to ``ULPS`` up or down, by chance.

    Parts are real or imaginary; those of float64 move by ulps of float32.
    """
    copies, draw = copy_arguments(arguments), torch.Generator().manual_seed(seed)
    for x in tree_leaves(copies):
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            own = x.detach()
            for dim in [d for d, stride in enumerate(x.stride()) if stride == 0]:
                own = own.narrow(dim, 0, min(1, x.shape[dim]))
            if own.is_complex():
                own = torch.view_as_real(own.conj() if own.is_conj() else own)
            steps = torch.randint(-ULPS, ULPS + 1, own.shape, generator=draw)
            if own.dtype == torch.float64:  # which is often cast to float32 at once
                own.mul_(1 + steps * torch.finfo(torch.float32).eps)
                continue
            other = own.clone()
            for i in range(ULPS):
                towards = torch.where(steps > 0, torch.inf, -torch.inf).to(own.dtype)
                other = torch.where(steps.abs() > i, torch.nextafter(other, towards), other)
            own.copy_(torch.where(own == 0, own, other))
    return copies
