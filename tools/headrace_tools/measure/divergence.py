"""Divergence of two sets of next-token predictions: the arithmetic, without a model.

All of it is float64. Logarithms are natural: divergences and losses are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Logits turned into float64 at a time, so that memory does not grow with the vocabulary.
_BLOCK = 1 << 19
_RESAMPLES = 4000
_SEED = 20100
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rows:
    """Figures of n positions.

    Attributes:
        kl: KL(reference || candidate), float64 [n].
        nll_ref, nll_cand: -log of the probability of the token that follows, float64 [n].
        top1: bool [n], both think the same token the likeliest (ties: the lowest id).
    """

    kl: NDArray[np.float64]
    nll_ref: NDArray[np.float64]
    nll_cand: NDArray[np.float64]
    top1: NDArray[np.bool_]

    @classmethod
    def empty(cls, n: int) -> Rows:
        return cls(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.bool_))

    def put(self, at: int, part: Rows) -> None:
        """Copies `part` to the positions from `at` on."""
        to = slice(at, at + part.kl.size)
        self.kl[to], self.top1[to] = part.kl, part.top1
        self.nll_ref[to], self.nll_cand[to] = part.nll_ref, part.nll_cand


@dataclass(frozen=True)
class Estimate:
    """A mean over positions and its interval; the bounds are None when there is one window only."""

    mean: float
    low: float | None
    high: float | None


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of the softmax of every row: float64 [n, vocabulary]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def compare_rows(
    ref: NDArray[np.float32], cand: NDArray[np.float32], targets: NDArray[np.int32]
) -> Rows:
    """Figures of the positions whose logits are given.

    Args:
        ref, cand: logits [n, vocabulary].
        targets: ids of the tokens that follow, [n].
    Raises:
        ValueError: shapes differ, or a logit is NaN or infinite.
    """
    n, vocabulary = ref.shape
    if cand.shape != ref.shape or targets.shape != (n,):
        raise ValueError(f"logits {ref.shape} and {cand.shape} for {targets.shape} targets")
    out = Rows.empty(n)
    step = max(1, _BLOCK // vocabulary)
    for at in range(0, n, step):
        rows = slice(at, at + step)
        with np.errstate(invalid="ignore"):  # a logit that is not finite becomes a NaN, found below
            p, q = log_softmax(ref[rows]), log_softmax(cand[rows])
            kl = (np.exp(p) * (p - q)).sum(axis=1)
        if not np.isfinite(kl).all():
            raise ValueError("a logit is not finite")
        each = np.arange(p.shape[0])
        out.put(
            at,
            Rows(
                kl,
                -p[each, targets[rows]],
                -q[each, targets[rows]],
                p.argmax(axis=1) == q.argmax(axis=1),
            ),
        )
    return out


def estimates(values: list[NDArray[np.float64]], window: int) -> list[Estimate]:
    """Means of several figures over the same positions, with 95 % intervals.

    The interval is a block bootstrap's. Positions of one window depend on each other, so whole
    windows are drawn, with replacement, as many as there are; the 2.5 % and 97.5 % quantiles of the
    mean over 4000 such draws are the bounds. The generator has a fixed seed of its own: equal
    figures give equal intervals.

    Args:
        values: figures, each [positions], cut in windows of `window`, the last perhaps shorter.
    """
    positions = values[0].size
    edges = np.arange(0, positions, window)
    sums = np.stack([np.add.reduceat(v, edges) for v in values], axis=1)
    counts = np.diff(np.append(edges, positions))
    means = [math.fsum(sums[:, i]) / positions for i in range(len(values))]
    if edges.size < 2:
        return [Estimate(mean, None, None) for mean in means]
    drawn = _resampled(sums, counts)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return [Estimate(m, float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]


def _resampled(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Means of every draw, [draws, figures], from the sums [windows, figures]."""
    windows = counts.size
    bits = np.random.PCG64(_SEED)  # its raw output is the same in every version of NumPy
    out = np.empty((_RESAMPLES, sums.shape[1]))
    step = max(1, (1 << 18) // windows)
    for at in range(0, _RESAMPLES, step):
        draws = min(step, _RESAMPLES - at)
        raw = bits.random_raw(draws * windows)
        pick = ((raw >> np.uint64(32)) * np.uint64(windows) >> np.uint64(32)).astype(np.intp)
        pick = pick.reshape(draws, windows)
        out[at : at + draws] = sums[pick].sum(axis=1) / counts[pick].sum(axis=1, keepdims=True)
    return out
