"""Differences between two reports of a model: sites, fusions, launches, coverage and bytes, by meaning, not by text."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusec.debug.explanation import KINDS, Explanation
from fusec.debug.text import duration

Report: TypeAlias = Mapping[str, Any]
"""A result of ``report_of``, or an explanation as JSON data, of which it is a part."""
_WORSE = {"generated": -1, "vendor": 0, "opaque": 1}
"""The sign of a change of coverage that is for the worse."""
COUNTS = {"generated": "kernels", "vendor": "vendor calls", "opaque": "ATen calls"}
"""The names of launches by kind."""


@dataclass(frozen=True)
class Change:
    """One difference."""

    what: str
    """``site``, ``fusion``, ``kernels`` of a fusion, ``launches``, ``coverage``, ``bytes`` or ``time``, in µs."""
    name: str
    """The site or fusion, or the kind of launches or coverage."""
    before: Any
    after: Any
    worse: bool
    """True for less fusion, more launches or bytes, and more work left to ATen."""
    why: str = ""
    """The reason for which a site is not fused any more."""

    def __str__(self) -> str:
        if self.what == "site":
            return f"site {'lost' if self.worse else 'gained'}: {self.name}{f' ({self.why})' if self.why else ''}"
        if self.what == "time":
            return f"{self.name}: {duration(self.before)} → {duration(self.after)}"
        figures = [f"{x:.1%}" if isinstance(x, float) else f"{x:,}" for x in (self.before, self.after)]
        what = self.what if self.what in ("fusion", "kernels", "coverage") else ""
        return f"{what} {self.name}: {' → '.join(figures)}".strip()


@dataclass(frozen=True)
class KernelChange:
    """The launches of one kernel, or kind of call, on both sides."""

    name: str
    kind: str
    launches: tuple[int, int]
    bytes: tuple[int, int]

    @property
    def more(self) -> int:
        """The bytes that are moved more than before."""
        return self.bytes[1] - self.bytes[0]


def report_of(e: Explanation) -> dict[str, Any]:
    """Return what a later compile is compared with, as JSON data: small, and without figures of a machine's speed."""
    data = e.to_json()
    sites = [{key: site[key] for key in ("kind", "module", "fused", "reason")} for site in data["sites"]]
    kernels = [{key: row[key] for key in ("name", "kind", "launches", "bytes")} for row in data["kernels"]]
    kept = {key: data[key] for key in ("title", "regions", "launches", "coverage")}
    return {**kept, "kernels": kernels, "sites": sites}


def changes(before: Report, after: Report, tolerance: float = 0.0) -> list[Change]:
    """Return the differences, first those for the worse, and of each kind sites first.

    Args:
        before: the report that was kept.
        after: that of now.
        tolerance: share by which bytes and coverage may differ without being reported.
    """
    found = [
        *_sites(before, after), *_fusions(before, after), *_whole(before, after), *_launches(before, after),
        *_shares(before, after, tolerance), *_bytes(before, after, tolerance),
    ]  # fmt: skip
    return sorted(found, key=lambda change: not change.worse)


def time_change(before: Explanation, after: Explanation, tolerance: float = 0.0) -> list[Change]:
    """Return the change of the predicted time of all launches, where it is more than this share."""
    was, now = before.totals.predicted_us, after.totals.predicted_us
    if abs(now - was) <= tolerance * was or before.machine != after.machine:
        return []
    return [Change("time", f"predicted time on {after.machine.name}", was, now, now > was)]


def kernel_changes(before: Report, after: Report) -> list[KernelChange]:
    """Return the kernels with other launches or bytes than before, those with the largest change of bytes first."""
    sides = [_kernels(report) for report in (before, after)]
    found = []
    for kind, name in dict.fromkeys((*sides[0], *sides[1])):
        (was, old), (now, new) = (side.get((kind, name), (0, 0)) for side in sides)
        if (was, old) != (now, new):
            found.append(KernelChange(name, kind, (was, now), (old, new)))
    return sorted(found, key=lambda change: (-abs(change.more), change.name))


def _kernels(report: Report) -> dict[tuple[str, str], tuple[int, int]]:
    """Return launches and bytes by kind and name, without the number that distinguishes kernels of one name."""
    found = dict[tuple[str, str], tuple[int, int]]()
    for row in report["kernels"]:
        name = re.sub(r"_\d+$", "", row["name"]) if row["kind"] == "generated" else row["name"]
        launches, moved = found.get((row["kind"], name), (0, 0))
        found[row["kind"], name] = launches + int(row["launches"]), moved + int(row["bytes"])
    return found


def _sites(before: Report, after: Report) -> Iterator[Change]:
    old, new = (
        {(s["kind"], s["module"]): (s["fused"], s["reason"]) for s in report["sites"]} for report in (before, after)
    )
    gone = (False, "it is not in the model any more")
    for key in dict.fromkeys((*old, *new)):
        (was, _), (now, why) = old.get(key, gone), new.get(key, gone)
        if was != now:
            yield Change("site", " ".join(filter(None, key)), was, now, was, why if was else "")


def _fusions(before: Report, after: Report) -> Iterator[Change]:
    """Yield the fusions that are matched more or less often; part of a larger one that is gained is not lost."""
    counts = {
        name: tuple(int(report["regions"].get(name, 0)) for report in (before, after))
        for name in dict.fromkeys((*before["regions"], *after["regions"]))
    }
    gained = Counter({name: now - was for name, (was, now) in counts.items() if now > was})
    for name, (was, now) in counts.items():
        if was != now:
            larger = [other for other in gained if f"_{name}_" in f"_{other}_"]
            inside = 0 < was - now <= sum(gained[other] for other in larger)
            for other in larger if inside else ():
                gained[other] -= min(gained[other], was - now)
            yield Change("fusion", name, was, now, now < was and not inside)


def _whole(before: Report, after: Report) -> Iterator[Change]:
    """Yield the fusions that are matched as often as before, and have fewer or more kernels of their name.

    Those of a softmax that is now inside attention are not lost.
    """
    gained = _launches_of("attention", after) - _launches_of("attention", before)
    for name in dict.fromkeys(("attention", *before["regions"])):
        was, now = _launches_of(name, before), _launches_of(name, after)
        if was != now and before["regions"].get(name) == after["regions"].get(name):
            inside = "softmax" in name and 0 < was - now <= gained
            gained -= (was - now) * inside
            yield Change("kernels", f"of {name}", was, now, now < was and not inside)


def _launches_of(name: str, report: Report) -> int:
    """Return the launches of the kernels of a fusion's name."""
    of_name = re.compile(rf"{re.escape(name)}(_\d+)?")
    return sum(row["launches"] for row in report["kernels"] if of_name.fullmatch(row["name"]))


def _launches(before: Report, after: Report) -> Iterator[Change]:
    for kind in KINDS:
        was, now = (int(report["launches"][kind]) for report in (before, after))
        if was != now:
            yield Change("launches", COUNTS[kind], was, now, now > was)


def _shares(before: Report, after: Report, tolerance: float) -> Iterator[Change]:
    for kind in KINDS:
        was, now = (float(report["coverage"]["bytes"][kind]) for report in (before, after))
        if abs(now - was) > max(tolerance, 5e-4):
            yield Change("coverage", kind, was, now, _WORSE[kind] * (now - was) > 0)


def _bytes(before: Report, after: Report, tolerance: float) -> Iterator[Change]:
    was, now = (sum(int(row["bytes"]) for row in report["kernels"]) for report in (before, after))
    if abs(now - was) > tolerance * was:
        yield Change("bytes", "bytes", was, now, now > was)
