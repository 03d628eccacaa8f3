"""Splits of loop axes, found while a region is lowered: into an outer and an inner axis, or into segments."""

import re
from dataclasses import dataclass, field

from fusec.ir.types import Size
from fusec.loops.affine import Affine, Axis, Unaligned, divide

_SEGMENT = re.compile(r"@\d+")


@dataclass(frozen=True)
class Segment:
    """One segment of a dim: its index, and the axes of the index, outer first."""

    index: Affine
    axes: tuple[Axis, ...]


@dataclass
class Splits:
    """Splits of axes, by the roles of the axes.

    Role ``d2`` is a dim of the widest output, ``d2/i`` the inner axis of its split, ``d2@32`` its segment from 32 on.
    """

    factors: dict[str, Size] = field(default_factory=dict)
    """The length of the inner axis, by role."""
    segments: dict[str, list[int]] = field(default_factory=dict)
    """The first index of the second segment, by role."""
    roles: dict[Axis, str] = field(default_factory=dict)

    def add(self, split: Unaligned) -> None:
        """Add a split."""
        role = self.roles[split.axis]
        if split.factor is not None:
            self.factors[role] = split.factor
        else:
            assert split.segment is not None
            self.segments[role] = [split.segment]

    def segments_of(self, role: str, size: Size, made: dict[tuple[str, Size], Axis]) -> list[Segment]:
        """Return the segments of a range, each over the axes that it is split into."""
        if role in self.segments:
            assert isinstance(size, int)
            (point,) = self.segments[role]
            low = self.segments_of(f"{role}@0", point, made)
            high = self.segments_of(f"{role}@{point}", size - point, made)
            return low + [Segment(p.index + Affine(offset=point), p.axes) for p in high]
        if role in self.factors:
            inner = self.factors[role]
            outer = divide(size, inner)
            assert outer is not None
            return [
                Segment(high.index.scaled(inner) + low.index, (*high.axes, *low.axes))
                for high in self.segments_of(f"{role}/o", outer, made)
                for low in self.segments_of(f"{role}/i", inner, made)
            ]
        # Segments of one length share an axis, so that their common subexpressions are computed once.
        axis = made.setdefault((_SEGMENT.sub("@", role), size), Axis(size, role[0]))
        self.roles[axis] = role
        return [Segment(Affine.of([(axis, 1)]), (axis,))]
