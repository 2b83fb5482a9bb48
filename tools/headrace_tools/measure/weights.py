"""python -m headrace_tools.measure.weights: what codecs leave of weights of a known distribution.

Prints a Markdown table of signal to noise in dB, and of how fast one thread encodes. Codebooks are
fitted to one draw and judged on another.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..convert import quantise
from ..convert.options import RVQ_CODECS
from .kld import guarded, positive
from .scalar import fit, quantise as quantise_scalar

Weights = NDArray[np.float32]

ROW_SPREAD, COLUMN_SPREAD = 0.3, 0.2
"""Standard deviations of the logarithms of a matrix's row and column scales in `spread`."""
_COLUMNS_SEED = 4242


def normal(rows: int, cols: int, seed: int) -> Weights:
    """Independent, N(0, 1)."""
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def spread(rows: int, cols: int, seed: int) -> Weights:
    """Heavy tails as matrices have them: normal weights times log-normal scales of rows and columns.

    Columns have the same scales for every seed, as the inputs of one layer would. The spread of the
    rows is the one with which a single scale for the whole matrix costs 1.4 dB against scales of rows.
    """
    row = np.random.default_rng([seed, 1]).standard_normal((rows, 1))
    column = np.random.default_rng(_COLUMNS_SEED).standard_normal((1, cols))
    scale = np.exp(ROW_SPREAD * row + COLUMN_SPREAD * column)
    return (0.02 * scale * normal(rows, cols, seed)).astype(np.float32)


def student(rows: int, cols: int, seed: int) -> Weights:
    """Independent, Student's t with 4 degrees of freedom: tails that no scale explains."""
    return np.random.default_rng(seed).standard_t(4, (rows, cols)).astype(np.float32)


SETS: dict[str, Callable[[int, int, int], Weights]] = {
    "normal": normal, "spread": spread, "t4": student,
}  # fmt: skip
SCALAR = "scalar3"


@dataclass(frozen=True)
class Row:
    """A codec as the table names it. rate: weights a second of one thread; None: not the library's."""

    name: str
    bits: float
    decibels: dict[str, float]
    rate: float | None


def decibels(exact: Weights, got: Weights) -> float:
    """Signal to noise."""
    wide = exact.astype(np.float64)
    noise = float(((wide - got) ** 2).sum())
    return 10 * math.log10(float((wide * wide).sum()) / noise) if noise > 0 else math.inf


def library(codec: str, effort: str, sample: Weights, weights: Weights) -> tuple[float, float]:
    """(dB, weights a second) of the library's encoder, one thread; codebooks from `sample`."""
    from headrace.quant import Quantizer

    fitter = Quantizer(codec, effort=effort)
    encoder = Quantizer(codec, effort=effort, threads=1)
    books = fitter.fit(sample) if codec in RVQ_CODECS.values() else None
    begun = time.process_time()
    blob = encoder.encode(weights, books)
    seconds = time.process_time() - begun
    return encoder.sqnr(weights, blob, books), weights.size / max(seconds, 1e-9)


def by_converter(codec: str, weights: Weights) -> float:
    """dB of a codec that the converter encodes."""
    size = quantise.matrix_bytes(codec, *weights.shape)
    blob = np.zeros(size, np.uint8)
    for at, part in quantise.encode_block(codec, weights, 0, len(weights)):
        blob[at : at + part.size] = part
    return decibels(weights, quantise.decode(codec, blob, *weights.shape))


def table(rows: int, cols: int, samples: int, seed: int = 1) -> list[Row]:
    """Every codec on every set, matrices [rows, cols], codebooks from `samples` sub-vectors of 8."""
    drawn = {
        name: (make(-(-samples * 8 // cols), cols, seed), make(rows, cols, seed + 1))
        for name, make in SETS.items()
    }
    out = []
    for codec in ("int8", "nl4", "int4", "mxfp4"):
        found = {name: by_converter(codec, w) for name, (_, w) in drawn.items()}
        out.append(Row(codec, _bits(codec, rows, cols), found, None))
    found = {name: decibels(w, quantise_scalar(w, fit(s))) for name, (s, w) in drawn.items()}
    out.append(Row(SCALAR, _bits("rvq4x64", rows, cols), found, None))
    for codec in RVQ_CODECS.values():
        for effort in ("greedy", "default", "high"):
            each = {name: library(codec, effort, s, w) for name, (s, w) in drawn.items()}
            rate = max(rate for _, rate in each.values())
            found = {name: db for name, (db, _) in each.items()}
            out.append(Row(f"{codec}, {effort}", _bits(codec, rows, cols), found, rate))
    return out


def _bits(codec: str, rows: int, cols: int) -> float:
    return 8 * quantise.matrix_bytes(codec, rows, cols) / (rows * cols)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace_tools.measure.weights",
        description="A table of what codecs leave of weights of a known distribution.",
    )
    parser.add_argument("--rows", metavar="N", type=positive, default=512)
    parser.add_argument("--cols", metavar="N", type=positive, default=2048)
    parser.add_argument("--samples", metavar="N", type=positive, default=65536,
                        help="sub-vectors of 8 that codebooks are fitted to")
    parser.add_argument("--seed", metavar="N", type=int, default=1)
    args = parser.parse_args(argv)

    def work() -> int:
        found = table(args.rows, args.cols, args.samples, args.seed)
        print("| codec | bits | " + " | ".join(SETS) + " | Mweights/s |")
        print("| --- | ---: |" + " ---: |" * (len(SETS) + 1))
        for row in found:
            cells = [f"{row.decibels[name]:.2f}" for name in SETS]
            cells.append("" if row.rate is None else f"{row.rate / 1e6:.1f}")
            print(f"| {row.name} | {row.bits:.2f} | " + " | ".join(cells) + " |")
        return 0

    return guarded("weights", work, lambda: "interrupted")


if __name__ == "__main__":
    sys.exit(main())
