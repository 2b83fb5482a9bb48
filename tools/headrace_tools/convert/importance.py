"""--importance: what the down matrices of rvq experts are weighed with when they are encoded.

A weight's error costs as much as its input is large. The inputs of down, the expert's activations,
differ much from one another; those of gate and up are normalised, and weighing them gained nothing
(docs/findings.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .calibration import Sample, activate, capture, check_reference, read_text
from .preflight import Bank, Preflight, part_of
from .safetensors_source import NonFinite, blocks
from .rows import read_numbers, read_rows

MAX_ROWS = 256
"""Captured rows that are used for an expert."""
_PRIOR_ROWS = 16
"""What the weights alone let expect counts as much as so many rows."""
_BLOCK_ROWS = 256
_STEPS = 256


class Importance:
    """(`pre`, bank, expert) -> float32 [inner], mean about 1; None when all would weigh nothing.

    The square root of the second moment of every activation, which was better than the moment
    itself: few tokens stand for all. Rounded, so that last digits change nothing.
    """

    def __init__(self, samples: dict[int, Sample]) -> None:
        self.samples = samples

    def __call__(self, pre: Preflight, bank: Bank, expert: int) -> NDArray[np.float32] | None:
        spec, sample = bank.spec, self.samples[bank.spec.layer]
        row, rank = np.nonzero((sample.experts == expert) & (sample.weights != 0))
        count = min(len(row), MAX_ROWS)
        pick = np.arange(count) * len(row) // max(1, count)
        row, rank = row[pick], rank[pick]
        expected, gate, up = _through(pre, bank, expert, sample.inputs[row].astype(np.float64))
        moments = _PRIOR_ROWS * _even(expected)
        if count:
            squares = sample.weights[row, rank].astype(np.float64) ** 2
            active = activate(gate, up, part_of(pre, spec.layer))
            moments += count * _even(squares @ active**2)
        root = _even(np.sqrt(moments))
        if not root.any():
            return None
        fraction, exponent = np.frexp(root)
        return np.ldexp(np.round(fraction * _STEPS) / _STEPS, exponent).astype(np.float32)


def _even(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scaled to mean 1; zeros where that cannot be."""
    mean = values.mean()
    return values / mean if np.isfinite(mean) and mean > 0 else np.zeros_like(values)


def _through(
    pre: Preflight, bank: Bank, expert: int, inputs: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Inputs [n, hidden] -> (what the weights alone let expect [inner], gate and up [n, inner]).

    Expected is the second moment of (g x)(u x) for independent normal x: |g|^2 |u|^2 + 2 (g u)^2.
    """
    spec, bad = bank.spec, NonFinite()
    expected = np.zeros(spec.inner)
    gate, up = np.zeros((2, len(inputs), spec.inner))
    pieces = spec.parts(expert)
    for first, n in blocks(spec.inner, _BLOCK_ROWS):
        g, u = (
            read_rows(pre.checkpoint, (piece,), first, n, bad).astype(np.float64)
            for piece in pieces[:2]
        )
        at = slice(first, first + n)
        gate[:, at], up[:, at] = inputs @ g.T, inputs @ u.T
        inner = np.einsum("ij,ij->i", g, u)
        expected[at] = (g**2).sum(axis=1) * (u**2).sum(axis=1) + 2 * inner**2
    if spec.biases is not None:
        for values, piece in zip((gate, up), spec.biases(expert)[:2], strict=True):
            values += read_numbers(pre.checkpoint, (piece,), bad)
    return expected, gate, up


def request(pre: Preflight, text: Path, reference: Path) -> Preflight:
    """`pre` with the option set to what decides the result. Raises ConvertError."""
    digests = f"{hashlib.sha256(read_text(text)).hexdigest()} {check_reference(reference, pre)}"
    return replace(pre, options=replace(pre.options, importance=digests))


def gather(
    pre: Preflight, text: Path, reference: Path, progress: Callable[[int, int], object]
) -> Preflight:
    """`pre` with what is needed to encode. Raises ConvertError."""
    return replace(pre, importance=Importance(capture(reference, read_text(text), pre, progress)))
