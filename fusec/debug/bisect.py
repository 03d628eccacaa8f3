"""Find the applications of rewrites that make a model wrong, by bisection over application numbers.

Where none of them is the cause, or grouping is, the code of the target is looked at, and what torch hands over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.config import MODES, Config
from fusec.debug.capture import CaptureOptions
from fusec.debug.captured import Captured, captured
from fusec.debug.own_nan import own_nan
from fusec.debug.trial import MOST, Trial
from fusec.debug.wrong_code import WrongCode, wrong_code
from fusec.ir.graph import Graph
from fusec.remarks import Remark
from fusec.reproducers import keep_graph

NONE = "!0.."
"""Selects no application."""
GENERATION = ("cuda_graphs", "autotune", "dependent_launch", "freeze", "small_m", "machine", "disable")
"""Options under which other code is made of the same graph."""
THREADS = "threads"
"""Named as an option where a program is right with one thread."""
_RIGHT_CODE = WrongCode()


@dataclass(frozen=True)
class Finding:
    """The result of the search in one graph of a model."""

    graph: str
    applications: int
    """Number of applications."""
    wrong: str = ""
    """The difference of its program from eager; empty where it is right."""
    culprits: tuple[Remark, ...] = ()
    """The fewest applications without which it is right, or the first ones if it is not right without them."""
    fix: tuple[tuple[str, Any], ...] = ()
    """Options with which it is right; empty where none were found."""
    code: WrongCode = _RIGHT_CODE
    """The target and kernels that are wrong, where the graph after all passes is right."""
    option: str = ""
    """An option that is set, and without which it is right; no application is searched for then."""
    eager: str = ""
    """The distance of eager itself from float64, where it is right and yet differs; NaN that both have."""
    stage: str = ""
    """The part of torch or fusec that captures the graphs, if these differ from eager before any pass."""
    check: str = ""
    """The call of torch that shows it without fusec, or shows that torch is right."""
    reduce: str = ""
    """The command that reduces the graph, on random inputs; "" where it is right."""
    undone: tuple[str, ...] = ()
    """Parts of the compile that raised, and were left out."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels without which its program is right."""
        return self.code.kernels

    def __str__(self) -> str:
        if not self.wrong:
            right = f"{self.graph}: right, with {self.applications} applications of rewrites and passes"
            notes = [f"not fusec: {self.eager}"] * bool(self.eager) + [f"failed: {text}" for text in self.undone]
            return "\n  ".join([right, *notes])
        code = f"\n  code:  {self.code}" if self.code.target else ""
        end = f"check: {self.check}" if self.stage else f"fix:   {self._fix()}"
        return f"{self.graph}: {self.wrong}\n  cause: {self._cause()}{code}\n  {end}"

    def _cause(self) -> str:
        if self.stage:
            return f"{self.stage}: the captured graph differs from eager before any pass"
        if self.option:
            return f"option {self.option}"
        if self.culprits:
            return "\n         ".join(map(str, self.culprits))
        if self.fix:
            return "not found among the applications"
        return "no rewrite and no generated kernel, it is wrong without any"

    def _fix(self) -> str:
        if self.option.startswith(THREADS):
            return "torch.set_num_threads(1), or OMP_NUM_THREADS=1 in the environment"
        if self.fix:
            return f"options={dict(self.fix)}"
        return "none was found" + (": it is wrong without these, too" if self.culprits else "")


def bisect(
    model: Callable[..., Any],
    *inputs: Any,
    dynamic: bool = False,
    train: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **keywords: Any,
) -> list[Finding]:
    """Compare every graph of a model with eager, and search for the application that makes it wrong.

    A program is right where its results and updated inputs are no farther from float64 than the
    numeric rule allows, on the inputs that the model passes to the graph.

    Args:
        model: a module or function of tensors; it is called once on ``inputs`` and ``keywords``.
        inputs: sample inputs.
        dynamic: make sizes symbols.
        train: compare backward graphs too.
        options: those of ``torch.compile(..., backend="fusec")``; ``apply`` is set by the search itself.
        progress: called with a message for each trial.
        keywords: further sample inputs, by name.

    Raises:
        NothingCaptured: where the model leaves no graph.
        OptionError: for an unknown option.
    """
    config = replace(Config.from_options(None, options), apply="")
    found = captured(model, inputs, keywords, CaptureOptions(dynamic, train), config)
    searched = [_search(Trial(graph, arguments, config, progress)) for graph, arguments in found.calls]
    return ([_of_capture(found)] if found.difference else []) + searched


def bisect_graph(
    graph: Graph,
    arguments: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Finding:
    """Compare the program of a captured graph with eager on these arguments, and search as ``bisect`` does."""
    return _search(Trial(graph, arguments, replace(Config.from_options(None, options), apply=""), progress))


def _of_capture(found: Captured) -> Finding:
    """Return the finding of graphs that are wrong before any pass."""
    return Finding("captured graph", 0, found.difference, stage=found.stage, check=found.check)


def _search(trial: Trial) -> Finding:
    wrong, remarks = trial.wrong()
    name = trial.graph.name
    undone = tuple(str(remark) for remark in remarks if remark.kind == "failure")
    finding = Finding(name, len(_made(remarks)), wrong, eager=trial.as_eager, undone=undone)
    if not wrong:
        nan = own_nan(trial.graph, trial.arguments, trial.eager)
        return replace(finding, eager="; ".join(filter(None, (trial.as_eager, nan))))
    finding = replace(finding, reduce=keep_graph(str(trial.graph), name, trial.config, f"wrong: {wrong}"))
    if fix := _undone_option(trial):
        option = f"{fix[0]}={getattr(trial.config, fix[0])}"
        return replace(finding, option=option, fix=(fix,), code=wrong_code(trial))
    culprits: list[int] = []
    known: dict[int, Remark] = {}
    while wrong and len(culprits) < MOST:
        number = _first_wrong(trial, sorted(_made(remarks)) or _numbers(trial, culprits), culprits)
        if number is None:
            break
        culprits.append(number)
        known[number] = trial.numbered[number]
        trial.numbered = {}  # without it, later ones may have other numbers
        wrong, remarks = trial.wrong(apply=_without(culprits))
    if not culprits:
        rewritten = bool(wrong) and not trial.wrong(apply=NONE)[0]
        return _blamed(trial, replace(finding, fix=_applying(trial, NONE) if rewritten else ()))
    if not wrong:
        culprits = _fewest(trial, culprits)
    found = tuple(known[number] for number in sorted(culprits))
    return _blamed(trial, replace(finding, culprits=found, fix=_fix(trial, found, not wrong)))


def _undone_option(trial: Trial) -> tuple[str, Any] | None:
    """Return an option, with its default, without which a graph is right; None where there is none."""
    settings, numbered, right = _settings(trial.config), dict(trial.numbered), False
    names = list(settings)
    while names and not (right and len(names) == 1):
        half = names[: max(1, len(names) // 2)]
        right = not trial.wrong(**{key: value for name in half for key, value in settings[name].items()})[0]
        names = half if right else names[len(half) :]
    trial.numbered = numbered  # those of other options may differ
    return (names[0], settings[names[0]][names[0]]) if names else None


def _blamed(trial: Trial, finding: Finding) -> Finding:
    """Add the target and kernels at fault; where they are right with one thread, that is the cause."""
    import torch

    finding, count = replace(finding, code=wrong_code(trial)), torch.get_num_threads()
    if not finding.code.target or count == 1:
        return finding
    torch.set_num_threads(1)
    try:
        right = not trial.wrong()[0]
    finally:
        torch.set_num_threads(count)
    return replace(finding, option=f"{THREADS}={count}", culprits=(), fix=((THREADS, 1),)) if right else finding


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return the options that change code generation and are set, each with the values that undo it."""
    usual, found = Config(), dict[str, dict[str, Any]]()
    if config.mode != usual.mode:
        found["mode"] = {"mode": usual.mode, **dict.fromkeys(MODES[config.mode], False)}
    for name in GENERATION:
        if getattr(config, name) != getattr(usual, name):
            found[name] = {**found.get("mode", {}), name: getattr(usual, name)}
    return found


def _made(remarks: Sequence[Remark]) -> list[int]:
    return [r.application for r in remarks if r.kind == "passed" and r.application is not None]


def _numbers(trial: Trial, excluded: Sequence[int]) -> range:
    """Return numbers among which is the first wrong one, where a compile raises and leaves no remarks.

    The compile with a part of the numbers tells whether there are more: those not selected are in its remarks.
    """
    count = 1
    while not trial.wrong(apply=_up_to(count - 1, excluded))[0] and count <= max(trial.numbered, default=-1):
        count *= 2
    return range(count)


def _up_to(number: int, excluded: Sequence[int]) -> str:
    """Return the selector of the applications up to a number, but some."""
    return ",".join(filter(None, (f"0..{number}", _without(excluded))))


def _without(numbers: Sequence[int]) -> str:
    """Return the selector of all applications but some."""
    return ",".join(f"!{number}" for number in numbers)


def _first_wrong(trial: Trial, numbers: Sequence[int], excluded: Sequence[int]) -> int | None:
    """Return the number up to which, without those excluded, a graph is wrong; None where none is found.

    Numbers are those of a compile without those excluded, in which the graph is wrong.
    """
    numbers = [number for number in numbers if number not in excluded]
    right, bad = -1, len(numbers) - 1  # right with the numbers up to the first, wrong up to the second
    while bad - right > 1:
        middle = (right + bad) // 2
        if trial.wrong(apply=_up_to(numbers[middle], excluded))[0]:
            bad = middle
        else:
            right = middle
    if bad < 0 or (bad == 0 and not excluded and trial.wrong(apply=NONE)[0]):
        return None
    return numbers[bad] if numbers[bad] in trial.numbered else None


def _fewest(trial: Trial, culprits: list[int]) -> list[int]:
    """Leave out those without which the graph is wrong only because of others that were found after them."""
    for number in culprits[:-1]:
        rest = [other for other in culprits if other != number]
        if not trial.wrong(apply=_without(rest))[0]:
            culprits = rest
    return culprits


def _fix(trial: Trial, culprits: Sequence[Remark], right: bool) -> tuple[tuple[str, str], ...]:
    """Return options with which a graph is right: of several applications, the names of their rewrites are disabled."""
    if len(culprits) > 1:
        names = sorted({remark.subject for remark in culprits})
        disable = ",".join(filter(None, [trial.config.disable, *names]))
        if not trial.wrong(disable=disable)[0]:
            return (("disable", disable),)
    numbers = [remark.application for remark in culprits if remark.application is not None]
    return _applying(trial, _without(numbers)) if right else ()


def _applying(trial: Trial, selector: str) -> tuple[tuple[str, str], ...]:
    """Return the options that make some applications, which are numbered without what the trial disables."""
    given = trial.config.disable
    return (*([("disable", given)] if given else []), ("apply", selector))
