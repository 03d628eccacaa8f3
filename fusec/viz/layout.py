"""Layered layout of one group of boxes: ranks by longest path, one ordering sweep, rows placed by least squares.

There is no crossing minimisation: near-linear time and a picture that is stable between passes matter more
than the last crossing. Everything depends only on the boxes, the edges and the order they are given in.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

COLUMN_GAP = 18.0
LANE = 10.0
"""Width of a bend: the room that an edge keeps free in a row that it passes."""
LONGEST_LANE = 24
"""An edge over more rows than this is not routed; the page shows it when one of its ends is selected."""
LANE_WEIGHT = 0.005
"""Weight of a bend's position, against a box's 1: bends make way for boxes."""


@dataclass(frozen=True)
class Edge:
    """A route between two boxes, by index, through the bends of the rows in between."""

    start: int
    bends: tuple[int, ...]
    """Indices of slots; they follow those of the boxes."""
    stop: int
    far: bool = False
    """True where it is too long, or runs upwards, and was not routed."""


@dataclass(frozen=True)
class Slot:
    """The position of a box or a bend."""

    row: int
    x: float
    """Centre."""
    width: float


@dataclass(frozen=True)
class Layout:
    """Slots of the boxes first, in the order of the arguments, then those of the bends."""

    slots: tuple[Slot, ...]
    edges: tuple[Edge, ...]
    heights: tuple[float, ...]
    """The height of each row."""
    width: float


def lay_out(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Place boxes of these sizes so that every edge runs down, but for those that close a cycle."""
    ranks = rank(len(sizes), edges)
    routes, bend_rows = _route(ranks, edges)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for box, row in enumerate(ranks + bend_rows):
        rows[row].append(box)
    above = _neighbours_above(routes, len(sizes))
    widths = [w for w, _ in sizes] + [LANE] * len(bend_rows)
    centres = _place(rows, above, widths, len(sizes))
    left = min((x - w / 2 for x, w in zip(centres, widths, strict=True)), default=0.0)
    slots = tuple(
        Slot(row, round(x - left, 1), w) for row, x, w in zip(ranks + bend_rows, centres, widths, strict=True)
    )
    heights = tuple(max((sizes[b][1] for b in row if b < len(sizes)), default=0.0) for row in rows)
    width = max((s.x + s.width / 2 for s in slots), default=0.0)
    return Layout(slots, tuple(routes), heights, width)


def rank(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The row of each box: one more than the lowest row it depends on; a cycle is cut where its earliest box is."""
    below: defaultdict[int, list[int]] = defaultdict(list)
    waiting = [0] * count
    for start, stop in dict.fromkeys(edges):
        if start != stop:
            below[start].append(stop)
            waiting[stop] += 1
    ready = [b for b in range(count) if waiting[b] == 0]
    ranks, done, cut = [0] * count, [False] * count, 0
    placed = 0
    while placed < count:
        if not ready:
            while done[cut]:
                cut += 1
            ready = [cut]
        box = heapq.heappop(ready)
        done[box] = True
        placed += 1
        for stop in below[box]:
            if not done[stop]:
                ranks[stop] = max(ranks[stop], ranks[box] + 1)
                waiting[stop] -= 1
                if waiting[stop] == 0:
                    heapq.heappush(ready, stop)
    return _lower_sources(ranks, below, edges)


def _lower_sources(ranks: list[int], below: defaultdict[int, list[int]], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Move each box without dependencies right above its first reader: a weight next to its matmul."""
    fed = {stop for start, stop in edges if start != stop}
    for box in range(len(ranks)):
        if box not in fed and below[box]:
            ranks[box] = max(ranks[box], min(ranks[stop] for stop in below[box]) - 1)
    return ranks


def _route(ranks: list[int], edges: Sequence[tuple[int, int]]) -> tuple[list[Edge], list[int]]:
    """Edges with their bends, and the rows of the bends; the edges out of one box share them."""
    routes: list[Edge] = []
    rows: list[int] = []
    lanes: dict[tuple[int, int], int] = {}
    for start, stop in dict.fromkeys(edges):
        if start == stop:
            continue
        span = ranks[stop] - ranks[start]
        if not 0 < span <= LONGEST_LANE:
            routes.append(Edge(start, (), stop, far=True))
            continue
        bends = []
        for row in range(ranks[start] + 1, ranks[stop]):
            if (start, row) not in lanes:
                lanes[start, row] = len(ranks) + len(rows)
                rows.append(row)
            bends.append(lanes[start, row])
        routes.append(Edge(start, tuple(bends), stop))
    return routes, rows


def _neighbours_above(routes: list[Edge], boxes: int) -> defaultdict[int, dict[int, float]]:
    """Return for each box and bend the slots above that attract it, with weights."""
    above: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for edge in routes:
        if not edge.far:
            path = (edge.start, *edge.bends, edge.stop)
            for upper, lower in pairwise(path):
                above[lower][upper] = 1.0 if upper < boxes or lower >= boxes else LANE_WEIGHT
    return above


def _place(
    rows: list[list[int]], above: defaultdict[int, dict[int, float]], widths: list[float], boxes: int
) -> list[float]:
    """Return the centres of all slots, row by row: each is attracted by the slots above it that it depends on."""
    centres = [0.0] * len(widths)
    for row in rows:
        wish: dict[int, float] = {}
        for slot in row:
            pull = above[slot]
            total = sum(pull.values())
            wish[slot] = sum(centres[u] * w for u, w in pull.items()) / total if total else 0.0
        # Bends go to the right of a box at the same position, so that a chain of boxes stays straight.
        row.sort(key=lambda slot: (round(wish[slot], 3), slot >= boxes, slot))
        weights = [1.0 if slot < boxes else LANE_WEIGHT for slot in row]
        for slot, x in zip(row, _spread([wish[s] for s in row], [widths[s] for s in row], weights), strict=True):
            centres[slot] = x
    return centres


def _spread(wishes: list[float], widths: list[float], weights: list[float]) -> list[float]:
    """Return the positions closest to the wished ones, in weighted squares, that keep the order and do not overlap.

    Isotonic regression: with the room taken by those to the left subtracted, positions must not decrease.
    """
    offsets, offset = [], 0.0
    for i, width in enumerate(widths):
        offset += (widths[i - 1] + width) / 2 + COLUMN_GAP if i else 0.0
        offsets.append(offset)
    blocks: list[tuple[float, float, int]] = []
    for wish, offset, weight in zip(wishes, offsets, weights, strict=True):
        mean, total, length = wish - offset, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, mass, count = blocks.pop()
            mean, total, length = (mean * total + other * mass) / (total + mass), total + mass, length + count
        blocks.append((mean, total, length))
    starts = [mean for mean, _, length in blocks for _ in range(length)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]
