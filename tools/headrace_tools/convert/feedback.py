"""--feedback: rvq experts encoded so that their products are near, on inputs of a calibration text.

Later weights of a row make up for the errors of earlier ones (docs/findings.md has what that is
worth). What that needs of each matrix's inputs is gathered here: of gate and up what the expert's
own tokens brought, of down the activations that they caused, both with some of the layer's other
tokens beside them, because few tokens chose any one expert.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import codebooks
from .calibration import (
    MAX_TOKENS,
    Sample,
    activate,
    capture,
    check_reference,
    read_text,
    rows_kept,
)
from .preflight import Bank, Preflight, part_of
from .rows import read_numbers, read_rows
from .safetensors_source import NonFinite, blocks

OWN_ROWS = 2048
"""Captured tokens of an expert that are used."""
_LAYER_ROWS, _LAYER_WEIGHT = 512, 256
"""Tokens of the whole layer beside them, and how many of the expert's they count as."""
_SHARED_ROWS = 4096
"""Tokens of the layer where the expert has too few of its own for its width."""
_OWN_SHARE = 0.5
"""Of an expert's own tokens to its inputs: below, gate and up take the layer's moments."""
_DAMPING = 0.1
_DOWN_DAMPING = 0.3
_BLOCK_ROWS = 256
_STEPS = 2048

Moments = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Of the inputs of gate and up, and of those of down."""


@dataclass
class _Layer:
    lock: threading.Lock
    moments: NDArray[np.uint8] | None = None


class Feedback:
    """(`pre`, bank, expert) -> the moments with which the expert's matrices are encoded.

    Inputs are rounded to 12 bits, so that last digits of another machine's arithmetic change
    nothing; the library does the rest, with the same bits everywhere.
    """

    def __init__(self, samples: dict[int, Sample]) -> None:
        self.samples = samples
        self._layers = {layer: _Layer(threading.Lock()) for layer in samples}

    def __call__(self, pre: Preflight, bank: Bank, expert: int) -> Moments:
        spec, sample = bank.spec, self.samples[bank.spec.layer]
        row, rank = np.nonzero((sample.experts == expert) & (sample.weights != 0))
        pick = _evenly(len(row), OWN_ROWS)
        row, rank = row[pick], rank[pick]
        weights = sample.weights[row, rank].astype(np.float64)[:, None]
        own = sample.inputs[row].astype(np.float64)
        others = sample.inputs[_evenly(len(sample.inputs), _LAYER_ROWS)].astype(np.float64)
        if len(own) < _OWN_SHARE * spec.hidden:
            outer = self._of_layer(bank)
        else:
            outer = _moments(bank, _stacked(others, own * weights), _DAMPING)
        active = _activations(pre, bank, expert, np.concatenate([others, own]))
        inner = _stacked(active[: len(others)], active[len(others) :] * weights)
        return outer, _moments(bank, inner, _DOWN_DAMPING)

    def _of_layer(self, bank: Bank) -> NDArray[np.uint8]:
        """Gate's and up's of a layer, made when first asked for."""
        layer, sample = self._layers[bank.spec.layer], self.samples[bank.spec.layer]
        with layer.lock:
            if layer.moments is None:
                inputs = sample.inputs[_evenly(len(sample.inputs), _SHARED_ROWS)]
                layer.moments = _moments(bank, _scaled(inputs.astype(np.float64), 1), _DAMPING)
            return layer.moments


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    kept = min(count, most)
    return np.arange(kept) * count // max(1, kept)


def _scaled(rows: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    """Rows with squares that add up to `total`; zeros and what is not finite become no rows."""
    square = float((rows * rows).sum())
    return rows * np.sqrt(total / square) if np.isfinite(square) and square > 0 else rows[:0]


def _stacked(others: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([_scaled(others, _LAYER_WEIGHT), _scaled(own, len(own))])


def _moments(bank: Bank, rows: NDArray[np.float64], least: float) -> NDArray[np.uint8]:
    """The library's moments of the rows; more damping where they are few for their width."""
    fraction, exponent = np.frexp(rows)
    rounded = np.ldexp(np.round(fraction * _STEPS) / _STEPS, exponent).astype(np.float32)
    damping = max(least, 0.5 * rows.shape[1] / max(1, len(rows)))
    return codebooks.quantizer(bank.codec, threads=1).moments(rounded, damping)


def _activations(
    pre: Preflight, bank: Bank, expert: int, inputs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What the expert's down matrix reads when the expert reads `inputs` [n, hidden]; [n, inner]."""
    spec, bad = bank.spec, NonFinite()
    gate, up = np.zeros((2, len(inputs), spec.inner))
    for values, piece in zip((gate, up), spec.parts(expert)[:2], strict=True):
        for first, n in blocks(spec.inner, _BLOCK_ROWS):
            rows = read_rows(pre.checkpoint, (piece,), first, n, bad).astype(np.float64)
            values[:, first : first + n] = inputs @ rows.T
    if spec.biases is not None:
        for values, piece in zip((gate, up), spec.biases(expert)[:2], strict=True):
            values += read_numbers(pre.checkpoint, (piece,), bad)
    return activate(gate, up, part_of(pre, spec.layer))


def request(pre: Preflight, text: Path, reference: Path) -> Preflight:
    """`pre` with the option set to what decides the result. Raises ConvertError."""
    digests = f"{hashlib.sha256(read_text(text)).hexdigest()} {check_reference(reference, pre)}"
    options = replace(pre.options, feedback=digests)
    return replace(pre, options=options, feedback_ram=_memory(pre))


def _memory(pre: Preflight) -> int:
    """Bytes, at most: captured inputs, and for each expert at work its rows and both moments."""
    specs = [bank.spec for bank in pre.banks]
    hidden = max((spec.hidden for spec in specs), default=0)
    inner = max((spec.inner for spec in specs), default=0)
    captured = 4 * rows_kept(MAX_TOKENS, MAX_TOKENS, pre) * sum(spec.hidden for spec in specs)
    rows = 8 * max(OWN_ROWS + _LAYER_ROWS, _SHARED_ROWS) * 4 * max(hidden, inner)
    return captured + pre.workers() * (rows + 6 * (hidden * hidden + inner * inner))


def gather(
    pre: Preflight, text: Path, reference: Path, progress: Callable[[int, int], object]
) -> Preflight:
    """`pre` with what is needed to encode. Raises ConvertError."""
    samples = capture(reference, read_text(text), pre, progress, MAX_TOKENS)
    return replace(pre, feedback=Feedback(samples))
