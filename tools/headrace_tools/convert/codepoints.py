"""Sets of Unicode code points as sorted, disjoint half-open ranges (start, stop)."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 0x110000
CodeSet = tuple[tuple[int, int], ...]

EMPTY: CodeSet = ()
ALL: CodeSet = ((0, LIMIT),)


def make(ranges: Iterable[tuple[int, int]]) -> CodeSet:
    """Sorts and joins arbitrary ranges."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)


def single(code: int) -> CodeSet:
    return ((code, code + 1),)


def union(*sets: CodeSet) -> CodeSet:
    return make(r for s in sets for r in s)


def complement(codes: CodeSet) -> CodeSet:
    out = []
    at = 0
    for start, stop in codes:
        if at < start:
            out.append((at, start))
        at = stop
    if at < LIMIT:
        out.append((at, LIMIT))
    return tuple(out)


def intersection(a: CodeSet, b: CodeSet) -> CodeSet:
    return complement(union(complement(a), complement(b)))


def contains(codes: CodeSet, code: int) -> bool:
    return any(start <= code < stop for start, stop in codes)


def partition(sets: list[CodeSet]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Splits the code space into classes that no set of `sets` tells apart.

    Returns (runs, members): runs are (length, class) from U+0000 on; members[i] are the
    classes that make up sets[i]. Class 0 holds U+0000.
    """
    edges: dict[int, list[int]] = {0: []}
    for index, codes in enumerate(sets):
        for start, stop in codes:
            edges.setdefault(start, []).append(index)
            edges.setdefault(stop, []).append(index)
    edges.pop(LIMIT, None)
    points = sorted(edges)
    inside = 0
    classes: dict[int, int] = {}
    runs: list[tuple[int, int]] = []
    for at, after in zip(points, points[1:] + [LIMIT]):
        for index in edges[at]:
            inside ^= 1 << index
        number = classes.setdefault(inside, len(classes))
        runs.append((after - at, number))
    members = [[c for mask, c in classes.items() if mask >> i & 1] for i in range(len(sets))]
    return runs, members
