"""The best that any cache of whole experts could do, knowing the future."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def next_uses(routes: NDArray[np.int32], experts: int) -> NDArray[np.int64]:
    """For every request [tokens, layers, top_k] the token that asks for the same expert next; the
    number of tokens when none does."""
    tokens, layers, _ = routes.shape
    upcoming = np.full((layers, experts), tokens, np.int64)
    out = np.full(routes.shape, tokens, np.int64)
    rows = np.arange(layers)[:, None]
    for t in range(tokens - 1, -1, -1):
        asked = routes[t]
        out[t] = np.where(asked >= 0, upcoming[rows, np.maximum(asked, 0)], tokens)
        where = np.nonzero(asked >= 0)
        upcoming[where[0], asked[where]] = t
    return out


def belady(routes: NDArray[np.int32], slots: int, experts: int, warm_up: int = 0) -> tuple[int, int]:
    """(hits, misses) after the warm-up when the expert that is needed last leaves, and one that is
    needed later than all of the cached ones is not kept.

    routes: [tokens, layers, top_k], -1 behind a shorter list.
    """
    tokens, layers, _ = routes.shape
    uses = next_uses(routes, experts)
    held: dict[int, int] = {}  # expert of a layer -> when it is needed next
    heap: list[tuple[int, int]] = []  # (-when, which); entries that are no longer true are passed over
    hits = misses = 0
    for t in range(tokens):
        for layer in range(layers):
            for expert, when in zip(routes[t, layer].tolist(), uses[t, layer].tolist()):
                if expert < 0:
                    continue
                which = layer * experts + expert
                # Later layers of the same token come later than this one.
                due = when * layers + layer
                hit = which in held
                if t >= warm_up:
                    hits += hit
                    misses += not hit
                if hit or len(held) < slots:
                    held[which] = due
                    heapq.heappush(heap, (-due, which))
                    continue
                while heap and held.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if heap and -heap[0][0] > due:
                    del held[heapq.heappop(heap)[1]]
                    held[which] = due
                    heapq.heappush(heap, (-due, which))
    return hits, misses
