"""A search for the application of a rewrite that makes a model wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn

import fusec
from fusec.cli import app
from fusec.codegen.cpp import printer
from fusec.config import Config
from fusec.debug import bisect as module
from fusec.pipeline import Context
from fusec.rewriting.fusion import FUSIONS, Dims
from fusec.rewriting.rule import REWRITES, rewrite
from tests.tools.command_line import CliRunner

Rows = Annotated[Tensor, Dims("*batch cols")]


class Layers(nn.Module):
    """Much that is rewritten around the one place that is wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.first(x)).softmax(-1) + x
        x = torch.sin(x) * torch.sin(x)
        return nn.functional.rms_norm(nn.functional.gelu(self.second(x)) + x, (16,))


def test_a_right_model_is_right() -> None:
    (found,) = fusec.bisect(Layers(), torch.randn(4, 16))
    assert not found.wrong and not found.culprits and found.applications > 0
    assert str(found).endswith(f"right, with {found.applications} applications of rewrites and passes")


@pytest.mark.parametrize("options", [{}, {"target": "triton"}], ids=str)
def test_the_application_is_found_and_named(wrong_rewrite: None, options: dict[str, str]) -> None:
    trials: list[str] = []
    (found,) = fusec.bisect(Layers(), torch.randn(4, 16), options=options, progress=trials.append)
    (culprit,) = found.culprits
    assert culprit.subject == "squared_sine" and "test_bisect.py" in culprit.sources[0]
    assert culprit.application in range(1, found.applications)
    assert f"'apply': '!{culprit.application}'" in str(found)
    assert len(trials) <= 2 + math.ceil(math.log2(found.applications))


def test_both_graphs_of_training_are_looked_at(wrong_rewrite: None) -> None:
    forward, backward = fusec.bisect(Layers(), torch.randn(4, 16), train=True)
    assert [culprit.subject for culprit in forward.culprits] == ["squared_sine"]
    assert not backward.wrong


def test_a_rewrite_that_is_wrong_at_two_sites_is_named_and_disabled(wrong_rewrite: None) -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x) * torch.sin(x) + x.softmax(-1), torch.sin(x + 1) * torch.sin(x + 1)

    trials: list[str] = []
    (found,) = fusec.bisect(twice, torch.randn(4, 16), progress=trials.append)
    assert [culprit.subject for culprit in found.culprits] == ["squared_sine", "squared_sine"]
    assert dict(found.fix) == {"disable": "squared_sine"} and "options={'disable': 'squared_sine'}" in str(found)
    assert len(trials) <= 2 * (2 + math.ceil(math.log2(found.applications))) + 2
    torch._dynamo.reset()
    (mended,) = fusec.bisect(twice, torch.randn(4, 16), options=dict(found.fix))
    assert not mended.wrong


def test_the_fix_has_what_is_disabled_already(wrong_rewrite: None) -> None:
    """Applications are numbered without it."""
    (found,) = fusec.bisect(
        lambda x: torch.sin(x) * torch.sin(x) + x.softmax(-1), torch.randn(4, 16), options={"disable": "softmax"}
    )
    (number,) = [culprit.application for culprit in found.culprits]
    assert dict(found.fix) == {"disable": "softmax", "apply": f"!{number}"}


def test_two_rewrites_that_are_wrong(wrong_rewrite: None) -> None:
    @rewrite
    def squared_cosine(x: Rows) -> Tensor:
        """cos²"""
        return torch.cos(x) * torch.cos(x)

    @squared_cosine.to
    def _(x: Rows) -> Tensor:
        return torch.cos(x)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x) * torch.sin(x) + x.softmax(-1), torch.cos(x + 1) * torch.cos(x + 1)

    try:
        (found,) = fusec.bisect(both, torch.randn(4, 16))
    finally:
        REWRITES.pop("squared_cosine")
    assert {culprit.subject for culprit in found.culprits} == {"squared_sine", "squared_cosine"}
    assert dict(found.fix) == {"disable": "squared_cosine,squared_sine"}


@pytest.mark.parametrize("faulty", [0, 3, 5])
def test_an_application_with_which_the_compile_raises(faulty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there are no remarks that would say how many applications there are."""
    application = Context.application

    def broken(self: Context, *args: Any, **figures: Any) -> bool:
        number = self.next_number
        made = application(self, *args, **figures)
        if made and number == faulty:
            raise KeyError("in a rewrite")
        return made

    monkeypatch.setattr(Context, "application", broken)
    monkeypatch.setattr(Context, "disable", lambda self, name, reason="": (_ for _ in ()).throw(KeyError(reason)))
    (found,) = fusec.bisect(Layers(), torch.randn(4, 16), options={"strict": True, "cache": False})
    assert "KeyError" in found.wrong
    assert [culprit.application for culprit in found.culprits] == [faulty]
    assert dict(found.fix) == {"apply": f"!{faulty}"}


def test_of_two_at_fault_together_one_is_named() -> None:
    """The fewest that have to be left out: here the second alone."""
    tried: list[str] = []

    class Pair:
        def wrong(self, apply: str) -> tuple[str, tuple[()]]:
            tried.append(apply)
            return ("" if "!5" in apply else "wrong"), ()

    assert module._fewest(Pair(), [3, 5]) == [5] and tried == ["!5"]  # type: ignore[arg-type]


def test_a_kernel_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    print_kernel = printer.print_kernel
    monkeypatch.setattr("fusec.codegen.cpp.target.print_kernel", lambda k: print_kernel(k).replace("sin(", "cos("))

    def model(x: Tensor) -> Tensor:
        return (torch.sin(x) + x) @ torch.exp(x.softmax(0)).T

    (found,) = fusec.bisect(model, torch.randn(4, 16), options={"cache": False, "small_m": 0})
    assert [culprit.subject for culprit in found.culprits] == ["group"] and dict(found.fix).keys() == {"apply"}
    (name,) = found.kernels
    assert "sin" in name and name in str(found)


def test_what_is_wrong_without_rewrites_and_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = module.Trial.run

    def run(self: Any, function: Any) -> list[Any]:
        found = evaluate(self, function)
        return [found[0] + 1, *found[1:]] if function.__class__.__name__ == "Program" else found

    monkeypatch.setattr(module.Trial, "run", run)
    (found,) = fusec.bisect(lambda x: x.logcumsumexp(0), torch.randn(4, 16))
    assert found.wrong and not found.culprits and "wrong without any" in str(found)


def test_inputs_that_are_written_are_held_against_eager_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    x = torch.randn(4, 16)
    before = x.clone()
    (found,) = fusec.bisect(write, x)
    assert not found.wrong
    run = module.Trial.run
    monkeypatch.setattr(
        module.Trial,
        "run",
        lambda self, f: [*run(self, f)[:-1], before] if f.__class__.__name__ == "Program" else run(self, f),
    )
    (found,) = fusec.bisect(write, before.clone())
    assert found.wrong


def test_the_command(tmp_path: Path, wrong_rewrite: None) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\ndef model(x): return torch.sin(x) * torch.sin(x) + 1\ninputs = [torch.randn(4, 16)]\n"
    )
    result = CliRunner().invoke(app, ["bisect", str(script)])
    assert result.exit_code == 1 and "squared_sine" in result.stdout and "model.py:2" in result.stdout
    (graph,) = json.loads(CliRunner().invoke(app, ["bisect", str(script), "--json"]).stdout)["graphs"]
    assert [culprit["subject"] for culprit in graph["culprits"]] == ["squared_sine"] and graph["fix"]
    REWRITES["squared_sine"].where(lambda x: False)
    assert CliRunner().invoke(app, ["bisect", str(script)]).exit_code == 0
    assert "squared_sine" not in FUSIONS


@pytest.mark.parametrize(
    ("options", "option", "fix"),
    [
        ({"mode": "max-autotune"}, "mode=max-autotune", (("mode", "default"),)),
        ({"small_m": 4, "freeze": True}, "small_m=4", (("small_m", 16),)),
        ({"freeze": True, "dependent_launch": True, "disable": "softmax", "small_m": 4}, "small_m=4",
         (("small_m", 16),)),
        ({"freeze": True}, "", ()),
    ],
)  # fmt: skip
def test_an_option_at_fault_is_named(
    options: dict[str, Any], option: str, fix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile that is wrong where kernels are tuned, or few rows are; the options are bisected."""
    run, runs = module.Trial.wrong, list[Any]()

    def wrong(self: Any, **changes: Any) -> Any:
        config = replace(self.config, **changes)
        runs.append(self)
        said, remarks = run(self, **changes)
        return said or ("planted" if config.autotune or config.small_m == 4 else ""), remarks

    monkeypatch.setattr(module.Trial, "wrong", wrong)
    (found,) = fusec.bisect(torch.sin, torch.randn(4, 16), options={"target": "cpp", **options})
    assert bool(found.wrong) == bool(option) and found.option == option and found.fix == fix
    candidates = module._settings(Config.from_options(None, options))
    assert runs.count(runs[0]) <= 2 + math.ceil(math.log2(len(candidates))), "without those of kernels by themselves"
    assert not option or f"cause: option {option}" in str(found)
