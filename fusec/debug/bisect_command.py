"""Find the application or option that makes a command fail, such as a program that crashes or is too slow."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fusec.debug.bisect import GENERATION, NONE, THREADS
from fusec.debug.traces import NoTrace, options_in, read_trace
from fusec.errors import FusecError
from fusec.remarks import Remark

GROUPING = "group"
"""The name of the pass that makes kernels."""
_MOST = 1 << 14
"""More applications than any graph has."""
_UNSTEADY = "the command does not fail every time"
Run: TypeAlias = "Callable[[Mapping[str, str], Path], bool]"
"""Runs the command with these variables in the environment, and the folder in ``FUSEC_TRACE``; returns whether it
failed."""


class CommandSucceeds(FusecError):
    """A command that does not fail, or not every time."""


@dataclass(frozen=True)
class CommandFinding:
    """The result of the search."""

    number: int | None
    """Number of the application from which on the command fails; None where it fails without any."""
    applications: tuple[Remark, ...] = ()
    """The applications of that number, one for each graph that has it; then those that are wrong without them."""
    fix: str = ""
    """A selector for ``FUSEC_APPLY`` with which the command succeeds; "" where none was found."""
    disable: str = ""
    """The rewrites and passes for ``FUSEC_DISABLE`` with which, and with ``fix`` where there is one, it succeeds."""
    runs: int = 0
    option: str = ""
    """An option that the program sets, and its value, without which the command succeeds; or the number of threads."""

    def __str__(self) -> str:
        if self.option:
            name = self.option.partition("=")[0]
            fix = "OMP_NUM_THREADS=1" if name == THREADS else f"leave it out, or FUSEC_UNSET={name} in the environment"
            return f"cause: option {self.option}\nfix:   {fix}"
        if self.number is None:
            return "cause: no rewrite and no generated kernel, the command fails without any"
        cause = "\n       ".join(map(str, self.applications)) or f"application {self.number}"
        settings = {"FUSEC_DISABLE": self.disable, "FUSEC_APPLY": self.fix}
        fix = " ".join(f"{name}={value}" for name, value in settings.items() if value)
        return f"cause: {cause}\nfix:   {fix or 'none was found: it fails without these, too'}"


def bisect_command(run: Run, folder: Path, disabled: str = "") -> CommandFinding:
    """Search for the first application number with which a command fails, and for an option that is at fault instead.

    Where it fails without that one too, its rewrite is disabled, and the search goes on for further ones. Options are
    tried where no rewrite is the cause: it fails without any, or because of grouping.

    Args:
        run: runs the command.
        folder: an empty folder for traces.
        disabled: passes, fusions and rewrites that are disabled in all runs.

    Raises:
        CommandSucceeds: where it does not fail, or not every time.
    """
    search = _Search(run, folder, [*filter(None, [disabled])])
    if not search.fails(""):
        raise CommandSucceeds("the command succeeds", why="it exits with 0", fix="let it exit with another code")
    number, is_last = search.first()
    if number < 0:
        option = search.option()
        return CommandFinding(None, runs=search.runs, option=option)
    fix = f"!{number}" if is_last or not search.fails(f"!{number}") else ""
    named = tuple(search.named(number))
    option = search.option() if all(remark.subject == GROUPING for remark in named) else ""
    if fix or option:
        return CommandFinding(number, named, fix, disabled if fix else "", search.runs, option)
    named, disable = search.further(named)
    return CommandFinding(number, named, "", disable, search.runs)


def _up_to(number: int) -> str:
    """Return the selector of the applications up to a number; of none for -1."""
    return f"0..{number}" if number >= 0 else NONE


class _Search:
    def __init__(self, run: Run, folder: Path, disabled: list[str]) -> None:
        self.run, self.folder, self.traces, self.runs, self.disabled = run, folder, dict[str, Path](), 0, disabled

    def first(self) -> tuple[int, bool]:
        """Return the number up to which the command fails, below 0 where it fails without any, and if it is the last.

        It fails with all.
        """
        last = self.last()
        right, wrong = self.bounds(last)
        while wrong - right > 1:
            middle = (right + wrong + 1) // 2
            if self.fails(_up_to(middle)):
                wrong = middle
            else:
                right = middle
        if wrong == last and not self.fails(_up_to(last)):
            raise CommandSucceeds(_UNSTEADY, why="it fails with all applications, and does not with as many")
        return wrong, wrong == last

    def further(self, found: tuple[Remark, ...]) -> tuple[tuple[Remark, ...], str]:
        """Disable the rewrites that were found until the command succeeds; return all, and what to disable for it."""
        named, given = found, len(self.disabled)
        while named:
            names = {remark.subject for remark in named}
            if not names - set(self.disabled):
                break  # the program overrides what is disabled
            self.disabled += sorted(names - set(self.disabled))
            self.traces.clear()
            if not self.fails(""):
                return found, ",".join(self.disabled)
            number, _ = self.first()
            named = tuple(self.named(number)) if number >= 0 else ()
            found += named
        del self.disabled[given:]
        return found, ""

    def fails(self, selector: str) -> bool:
        self.traces[selector] = self.folder / str(self.runs)
        return self.fails_with({"FUSEC_APPLY": selector})

    def fails_with(self, settings: Mapping[str, str]) -> bool:
        self.runs += 1
        if self.disabled:
            settings = {"FUSEC_DISABLE": ",".join(self.disabled), **settings}
        return self.run(settings, self.folder / str(self.runs - 1))

    def option(self) -> str:
        """Return an option with its value, or the number of threads, without which the command succeeds."""
        return next((f"{name}={value}" for name, value, settings in self.set() if not self.fails_with(settings)), "")

    def set(self) -> Iterator[tuple[str, object, Mapping[str, str]]]:
        """Yield the options that the compiles of the first run had, with their values and what undoes each."""
        found = options_in(self.traces[""])
        if found is None:
            return
        for name in ("mode", *GENERATION):
            if name in found:
                yield name, found[name], {"FUSEC_UNSET": name}
        if found[THREADS] != 1:
            yield THREADS, found[THREADS], {"OMP_NUM_THREADS": "1"}

    def last(self) -> int | None:
        """Return the largest number in the first run, -1 for no application; None where its trace does not tell."""
        try:
            trace = read_trace(self.traces[""])
        except NoTrace:
            return None
        numbers = [r.application for subject in trace.subjects for r in subject.remarks if r.application is not None]
        return max(numbers, default=-1) if len(trace.subjects) == len(trace.compiles) else None

    def bounds(self, last: int | None) -> tuple[int, int]:
        """Return numbers up to which the command succeeds and fails; -2 is below all of them."""
        if last is not None:
            return -2, last
        right, wrong = -2, -1
        while not self.fails(_up_to(wrong)):
            right, wrong = wrong, 2 * wrong + 2
            if wrong > _MOST:
                why = "it fails with all applications, and does not with the first ones, however many"
                raise CommandSucceeds(_UNSTEADY, why=why)
        return right, wrong

    def named(self, number: int) -> list[Remark]:
        """Return the applications of a number, one for each graph that has it, from the trace of a run.

        Other runs number them otherwise. Where the compile crashes with it, the run without it names it.
        """
        for selector in (_up_to(number), _up_to(number - 1)):
            try:
                subjects = read_trace(self.traces.get(selector, self.folder / "missing")).subjects
            except NoTrace:
                continue
            if found := [r for subject in subjects for r in subject.remarks if r.application == number]:
                return found
        return []
