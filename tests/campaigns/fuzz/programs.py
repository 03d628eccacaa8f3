"""Straight-line programs of torch through the backend, held against eager by the judge of the operator database."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.fuzz.draws import Draws, Program
from tests.campaigns.fuzz.inputs import KINDS, numbers
from tests.campaigns.op_db.judge import Subject, Verdict, judge

_DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")
_FLOATS = ("float32", "float32", "bfloat16", "float64")
_SHAPES = ((3, 4), (4,), (2, 3, 4), (1, 4), (3, 1), (), (0, 4), (17, 33), (4, 4), (1,), (3, 0), (5, 1, 4))
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Given to programs as arguments, which makes them float64 in the reference."""
_LAYOUTS = ("dense", "dense", "dense", "turned", "part", "repeated")

STEPS: tuple[str, ...] = (
    # views
    "{a}.t() if {a}.ndim == 2 else {a}", "{a}.transpose(0, -1) if {a}.ndim else {a}", "{a}[..., 1:]", "{a}[..., ::2]",
    "{a}.unsqueeze(0)", "{a}.reshape(-1)", "{a}.flatten()[{n}:]", "{a}[None].expand(2, *{a}.shape)", "{a}[:1]",
    "{a}.squeeze()", "{a}.view(-1) if {a}.is_contiguous() else {a}", "{a}.split(2, -1)[0]", "{a}.select(0, 0)",
    "{a}.diagonal()", "{a}.unfold(-1, 2, 1)", "{a}.narrow(-1, 0, 1)", "{a}.contiguous()", "{a}.detach()",
    # changes in place
    "{a}.add_({n})", "{a}.mul_({b})", "{a}.zero_()", "{a}.copy_({b})", "{a}.relu_()", "{a}[..., :1].fill_({n})",
    "{a}.index_copy_(0, torch.arange({a}.shape[0]).flip(0), {b}.expand_as({a}).clone())", "{a}.clamp_(-1, 1)",
    "{a}.masked_fill_({a} > 0, {n})", "{a}.t_()", "{a}.sub_({b})", "{a}.neg_()", "{a}.__setitem__(0, {b}[0])",
    # computations
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})", "{a} * {n} + {a}",
    "torch.where({a} > {n}, {a}, {b})",
    "{a}.exp()", "{a}.tanh()", "torch.nn.functional.gelu({a}.to(f32))",
    "{a}.sum(-1, keepdim=True)", "{a}.to(f32).mean(0)", "{a}.amax(-1)", "{a}.softmax(-1)", "{a}.to(f32).var(-1)",
    "{a} @ {b}", "{a} @ {b}.transpose(-1, -2)", "torch.cat([{a}, {b}])", "torch.stack([{a}, {a}])", "{a}.clone()",
    "{a}.to(bf16)", "{a}.to(f32)", "{a}.to(f16).to(f32)", "{a} // {m}", "{a} % {m}",
    "{a} & {b}", "{a} << {m}", "~{a}", "{a} == {b}", "{a}.isnan()",
    "{a}.abs().clamp(max=50).nan_to_num().to(torch.int32)",
    "{a}[torch.arange({a}.shape[0]).flip(0)]", "{a}.index_select(0, torch.zeros(2, dtype=torch.int64))",
    "{a}.cumsum(0)", "{a}.roll(1, 0)", "{a}.sort(-1).values", "torch.zeros_like({a})", "{a}.new_ones(2, 3)",
    "{a}.prod(-1)",
    "torch.nn.functional.layer_norm({a}.to(f32), {a}.shape[-1:])", "{a}.flip(-1)", "{a}.any(-1)", "{a}.tril()",
    "torch.nn.functional.pad({a}, (1, 0))", "{a}.repeat(2, 1)", "{a}.sigmoid() * {a}", "{a}.rsqrt()", "{a}.floor()",
)  # fmt: skip
"""Each may be impossible for what it is given; what eager refuses is left out."""


@dataclass
class Made:
    """A program of torch: what it does, and what it is called with."""

    lines: list[str]
    given: list[Tensor]
    variant: str
    dynamic: bool
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """A function."""
        head = f"def program({', '.join([*(f'v{i}' for i in range(len(self.given))), *_TYPES])}):"
        return "\n    ".join([head, *self.lines])

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        names: dict[str, Any] = {"torch": torch}
        exec(compile(self.text, "<program>", "exec"), names)
        made: Callable[..., Any] = names["program"]
        return made


def made(program: Program) -> Made:
    """The program that some bytes stand for: each step that eager refuses is left out."""
    head, steps = program
    draws = Draws(head)
    variant = draws.choice(("plain", "plain", "dynamic", "gradients", "freeze"))
    generator = torch.Generator().manual_seed(sum(head))
    given = [_input(draws, variant, generator) for _ in range(1 + draws.below(3))]
    if variant == "freeze":
        given = [x.contiguous() for x in given]
    known, lines = [copy.deepcopy(x) for x in given], list[str]()
    for step in steps[:10]:
        if line := _taken(Draws(step), known):
            lines.append(line)
    draws = Draws(head[24:])
    results = [f"v{len(known) - 1}", *(f"v{draws.below(len(known))}" for _ in range(draws.below(3)))]
    return Made([*lines, f"return [{', '.join(results)}]"], given, variant, variant == "dynamic")


def _input(draws: Draws, variant: str, generator: torch.Generator) -> Tensor:
    grad = variant == "gradients"
    shape, dtype = draws.choice(_SHAPES), draws.choice(_FLOATS if grad or variant == "freeze" else _DTYPES)
    kind, layout = draws.choice(KINDS), draws.choice(_LAYOUTS)
    x = numbers(shape, getattr(torch, dtype), kind, generator)
    if layout == "turned":
        x = x.mT.contiguous().mT if x.ndim > 1 else x
    elif layout == "part" and x.ndim:
        x = torch.cat([x, x], -1)[..., : x.shape[-1]]
    elif layout == "repeated" and x.ndim and x.shape[0] and not grad:
        x = x[:1].expand(x.shape)
    return x.requires_grad_(grad)


def _taken(draws: Draws, known: list[Tensor]) -> str:
    """A line that eager runs on what is known by now; "" where it refuses."""
    text = draws.choice(STEPS)
    a, b = (len(known) - 1 - draws.below(len(known)) for _ in range(2))
    values = {"a": f"v{a}", "b": f"v{b}", "n": draws.choice((1, 2, 0, 0.5)), "m": draws.choice((2, 3, 1))}
    line = text.format(**values)
    names = {"torch": torch, **_TYPES, **{f"v{i}": x for i, x in enumerate(known)}}
    trial = copy.deepcopy(known) if not any(x.requires_grad for x in known) else None
    try:
        found = eval(line, names)
    except Exception:
        if trial is not None:
            known[:] = trial
        return ""
    if not isinstance(found, Tensor) or found.numel() > 4000 or found.ndim > 4:
        return ""
    known.append(found)
    return f"v{len(known) - 1} = {line}"


class Frozen(nn.Module):
    """A program of which all inputs but the first are parameters."""

    def __init__(self, function: Callable[..., Any], parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.function, self.first = function, [x.clone() for x in parameters]
        self.weights = nn.ParameterList([nn.Parameter(x.clone(), requires_grad=False) for x in parameters])

    def forward(self, given: Sequence[Any], zero: Tensor) -> Any:
        """The program on its parameters, which it does not change."""
        first, *types = given
        return self.function(first, *(w * 1 for w in self.weights), *types)

    def changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of this module, compiled or not, between which its parameters change in every way."""

        def called(given: Sequence[Any], zero: Tensor) -> list[Any]:
            wide = zero.dtype == torch.float64
            run = copy.deepcopy(self).double() if wide else function
            module = run if isinstance(run, Frozen) else self
            for w, first in zip(module.weights, self.first, strict=True):
                w.data = first.to(w.dtype, copy=True)
            outputs = []
            for change in (lambda: None, module.change_in_place, module.change_data, module.load):
                change()
                outputs.append(copy.deepcopy(run(given, zero)))
            return outputs

        return called

    def change_in_place(self) -> None:
        """As optimizers do."""
        for w in self.weights:
            w.add_(1)

    def change_data(self) -> None:
        """Other memory."""
        for w in self.weights:
            w.data = w.data * 2 + 1

    def load(self) -> None:
        """A checkpoint."""
        self.load_state_dict({name: w * 0.5 for name, w in self.state_dict().items()})


def judge_program(program: Program) -> Verdict:
    """Hold a program against eager; what eager refuses as a whole says nothing."""
    subject = subject_of(made(program))
    try:
        with torch.set_grad_enabled(subject.gradients):
            subject.called(subject.function)(
                *copy.deepcopy(subject.arguments) if not subject.gradients else subject.arguments
            )
    except Exception as reason:
        return Verdict("undefined", f"{type(reason).__name__}: {reason}"[:200])
    with torch.set_grad_enabled(subject.gradients):
        return judge(subject)


def subject_of(program: Made) -> Subject:
    """The program as the judge takes it."""
    call = program.function()
    if program.variant == "freeze" and len(program.given) > 1:
        first, *weights = program.given
        module = Frozen(call, weights)
        return Subject(module, [first, *_TYPES.values()], options={"freeze": True}, around=module.changing)

    def function(given: Sequence[Any], zero: Tensor) -> Any:
        return call(*given)

    return Subject(function, [*program.given, *_TYPES.values()], program.dynamic, program.variant == "gradients")


def python_of(program: Program) -> str:
    """The program in Python, and what it is called with."""
    done = made(program)
    inputs = [f"v{i}: {x.dtype} {tuple(x.shape)} strides {x.stride()} = {x.tolist()}" for i, x in enumerate(done.given)]
    return "\n".join([f"variant {done.variant}", *(line[:300] for line in inputs), done.text])
