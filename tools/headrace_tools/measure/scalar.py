"""The baseline that a codec of three bits has to beat: eight levels, one scale for each row.

Not a codec of the engine. A measurement gives the weights that it leaves to the converter, which
stores them as int8: the levels are then integers, as those of the vector codecs are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..convert import codebooks
from ..convert.preflight import Bank, Preflight
from ..convert.quantise import decode_bf16, encode_bf16

LEVELS = 8
_ROUNDS = 100
_REFITS = 3


def _normalised(weights: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(rows of root mean square 1, their scales [n, 1]); a row of zeros has the scale 1."""
    wide = weights.astype(np.float64)
    scale = np.sqrt((wide * wide).mean(axis=1, keepdims=True))
    scale[scale == 0] = 1
    return wide / scale, scale


def fit(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Lloyd's and Max's levels for the rows of `samples`, each scaled to a root mean square of 1.

    float64 [8], ascending. Starts from equally likely cells.
    """
    x = np.sort(_normalised(samples)[0].ravel())
    sums = np.concatenate([[0.0], np.cumsum(x)])
    levels = np.array([part.mean() for part in np.array_split(x, LEVELS)])
    for _ in range(_ROUNDS):
        edges = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        first, last = np.concatenate([[0], edges]), np.concatenate([edges, [x.size]])
        count = last - first
        means = (sums[last] - sums[first]) / np.maximum(count, 1)
        levels = np.sort(np.where(count > 0, means, levels))
    return levels


def quantise(weights: NDArray[np.float32], levels: NDArray[np.float64]) -> NDArray[np.float32]:
    """What is left of float32 [rows, cols]: a level for each weight times a bfloat16 for each row.

    Scales begin as root mean squares and are refitted by least squares, as an encoder would.
    """
    x, scale = _normalised(weights)
    middles, gain = (levels[1:] + levels[:-1]) / 2, np.ones((len(x), 1))
    for _ in range(_REFITS):
        chosen = levels[np.searchsorted(middles, x / gain)]
        square = (chosen * chosen).sum(axis=1, keepdims=True)
        mixed = (x * chosen).sum(axis=1, keepdims=True)
        gain = np.where((square > 0) & (mixed > 0), mixed / np.where(square > 0, square, 1), gain)
    stored = decode_bf16(encode_bf16((gain * scale).astype(np.float32)))
    return (levels[np.searchsorted(middles, x / gain)] * stored).astype(np.float32)


def stand_in(pre: Preflight) -> Preflight:
    """`pre` with every expert matrix quantised before it is encoded; the levels of a layer's gate,
    up and down are fitted to the sample that codebooks are fitted to."""
    known: dict[tuple[int, int], NDArray[np.float64]] = {}

    def rewrite(bank: Bank, kind: int, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        return quantise(weights, known[bank.spec.layer, kind])

    for bank in pre.banks:
        for kind in range(len(codebooks.KINDS)):
            known[bank.spec.layer, kind] = fit(codebooks.sample(pre.checkpoint, bank.spec, kind))
    return replace(pre, rewrite=rewrite)
