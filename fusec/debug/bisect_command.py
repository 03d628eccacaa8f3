"""Find the application of a rewrite that makes a command fail, such as a program that crashes or is too slow."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fusec.debug.bisect import NONE
from fusec.debug.traces import NoTrace, read_trace
from fusec.errors import FusecError
from fusec.remarks import Remark

_MOST = 1 << 14
"""More applications than any graph has."""


class CommandSucceeds(FusecError):
    """A command that does not fail, or not every time."""


@dataclass(frozen=True)
class CommandFinding:
    """The result of the search."""

    number: int | None
    """Number of the application from which on the command fails; None where it fails without any."""
    applications: tuple[Remark, ...] = ()
    """The applications of that number, one for each graph that has it."""
    fix: str = ""
    """A selector for ``FUSEC_APPLY`` with which the command succeeds; "" where none was found."""
    runs: int = 0

    def __str__(self) -> str:
        if self.number is None:
            return "cause: no rewrite and no generated kernel, the command fails without any"
        cause = "\n       ".join(map(str, self.applications)) or f"application {self.number}"
        fix = f"FUSEC_APPLY={self.fix}" if self.fix else "none was found: it fails without this one, too"
        return f"cause: {cause}\nfix:   {fix}"


def bisect_command(fails: Callable[[str, Path], bool], folder: Path) -> CommandFinding:
    """Search for the first application number with which a command fails.

    Args:
        fails: runs the command with a selector in ``FUSEC_APPLY`` and a folder in ``FUSEC_TRACE``; returns whether it
            failed.
        folder: an empty folder for traces.

    Raises:
        CommandSucceeds: where it does not fail, or not every time.
    """
    search = _Search(fails, folder)
    if not search.fails(""):
        raise CommandSucceeds("the command succeeds", why="it exits with 0", fix="let it exit with another code")
    if search.fails(NONE):
        return CommandFinding(None, runs=search.runs)
    right, wrong = -1, 1
    while not search.fails(f"0..{wrong - 1}"):
        right, wrong = wrong - 1, 2 * wrong
        if wrong > _MOST:
            why = "it fails with all applications, and does not with the first ones, however many"
            raise CommandSucceeds("the command does not fail every time", why=why)
    wrong -= 1  # right with the numbers up to the first, wrong up to the second
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if search.fails(f"0..{middle}"):
            wrong = middle
        else:
            right = middle
    fix = f"!{wrong}"
    fixed = not search.fails(fix)
    return CommandFinding(wrong, tuple(search.named(wrong)), fix if fixed else "", search.runs)


class _Search:
    def __init__(self, run: Callable[[str, Path], bool], folder: Path) -> None:
        self.run, self.folder, self.traces = run, folder, dict[str, Path]()

    @property
    def runs(self) -> int:
        """Number of runs of the command."""
        return len(self.traces)

    def fails(self, selector: str) -> bool:
        self.traces[selector] = self.folder / str(self.runs)
        return self.run(selector, self.traces[selector])

    def named(self, number: int) -> list[Remark]:
        """Return the applications of a number, one for each graph that has it, from the trace of a run.

        Other runs number them otherwise. Where the compile crashes with it, the run without it names it.
        """
        for selector in (f"0..{number}", f"0..{number - 1}"):
            try:
                subjects = read_trace(self.traces.get(selector, self.folder / "missing")).subjects
            except NoTrace:
                continue
            if found := [r for subject in subjects for r in subject.remarks if r.application == number]:
                return found
        return []
