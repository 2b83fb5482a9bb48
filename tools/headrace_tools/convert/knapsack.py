"""The cheapest damage within a budget: one choice for every item."""

from __future__ import annotations

import math

import numpy as np

STATES = 1 << 20
"""Sizes that are told apart. Where there are more, sizes are rounded up, and the budget still holds."""


def choose(sizes: list[list[int]], errors: list[list[float]], budget: int) -> list[int] | None:
    """For every item the index of its choice: least sum of errors with sum of sizes <= budget.

    Equal errors: the smaller sum of sizes, then the lower index in the later item. The result does
    not depend on the machine, and a larger budget never has a larger error. None: nothing fits.
    """
    if not sizes:
        return [] if budget >= 0 else None
    least = [min(row) for row in sizes]
    spare = budget - sum(least)
    if spare < 0:
        return None
    extra = [[size - low for size in row] for row, low in zip(sizes, least, strict=True)]
    unit = math.gcd(*(size for row in extra for size in row)) or 1
    widest = sum(max(row) for row in extra)
    # The unit must not depend on the budget: more budget then always contains the choices of less.
    unit *= max(1, math.ceil(widest / unit / STATES))
    steps = [[-(-size // unit) for size in row] for row in extra]
    top = min(spare, widest + unit * len(sizes)) // unit
    best = np.zeros(top + 1)
    picks: list[np.ndarray] = []
    for row, damage in zip(steps, errors, strict=True):
        after = np.full(top + 1, np.inf)
        pick = np.zeros(top + 1, np.int8)
        for i, (step, error) in enumerate(zip(row, damage, strict=True)):
            if step > top:
                continue
            reached = best[: top + 1 - step] + error
            better = reached < after[step:]
            after[step:][better] = reached[better]
            pick[step:][better] = i
        best = after
        picks.append(pick)
    at = int(np.argmin(best))  # the first of equal ones: the smallest
    out: list[int] = []
    for row, pick in zip(reversed(steps), reversed(picks), strict=True):
        i = int(pick[at])
        out.append(i)
        at -= row[i]
    return out[::-1]
