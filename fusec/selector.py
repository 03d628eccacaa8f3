"""Numbers of applications as a text: to try which of them breaks or slows a model."""

import re
from dataclasses import dataclass

from fusec.errors import OptionError


@dataclass(frozen=True)
class Selector:
    """A set of application numbers: ``0..41,!17`` is 0 to 41 without 17; only exclusions means all others."""

    wanted: tuple[tuple[int, int], ...] = ()
    unwanted: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Selector":
        """Read the text form.

        Raises:
            OptionError: where it is none.
        """
        chosen: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for part in filter(None, (p.strip() for p in text.split(","))):
            found = re.fullmatch(r"(!?)(\d{1,18})(?:\.\.(\d{0,18}))?", part)
            if found is None:
                raise OptionError(f"{part!r} selects no applications", fix="write it like '0..41,!17'")
            no, first, last = found.groups()
            end = int(first) if last is None else (int(last) if last else 2**63)
            chosen[bool(no)].append((int(first), end))
        return cls(tuple(chosen[0]), tuple(chosen[1]))

    def allows(self, number: int) -> bool:
        """Return whether the application of that number is selected."""
        if any(a <= number <= b for a, b in self.unwanted):
            return False
        return not self.wanted or any(a <= number <= b for a, b in self.wanted)

    def require(self, count: int) -> None:
        """Check that the numbers, or the first ones of ranges, are less than the number of applications.

        Raises:
            OptionError: for one that is not.
        """
        for first, _ in (*self.wanted, *self.unwanted):
            if first >= max(count, 1):
                why = f"they are numbered from 0 to {count - 1}" if count else "no rewrite matched"
                raise OptionError(f"there is no application {first}", why=why)
