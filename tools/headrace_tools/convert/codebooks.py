"""Residual vector quantisation of experts: codebooks.bin, and matrices encoded with it.

The library does the work (headrace.quant); here is what it is given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..crc32c import crc32c
from .errors import ConvertError
from .families import BankSpec
from .library import quantizer
from .quantise import PANEL, RVQ_BITS, round_up
from .rows import read_rows
from .safetensors_source import Checkpoint, NonFinite

if TYPE_CHECKING:
    from headrace.quant import Quantizer

    from .output import PartialFile

FILE = "codebooks.bin"
KINDS = ("gate", "up", "down")
_SAMPLES = 1 << 16
"""Sub-vectors of 8 weights that the codebooks of a matrix kind are fitted to."""
_BOOK_BYTES = {"rvq4x64": 64 + 4 * 64 * 8, "rvq3x256": 64 + 3 * 256 * 8,
               "rvq2x256": 64 + 2 * 256 * 8}

Books = tuple[np.ndarray, ...]
"""uint8 sets of gate, up and down."""


def file_bytes(codecs: Iterable[str]) -> int:
    """Length of codebooks.bin for banks of these codecs; 0 when none needs it."""
    return sum(len(KINDS) * _BOOK_BYTES.get(codec, 0) for codec in codecs)


def sample(checkpoint: Checkpoint, bank: BankSpec, kind: int) -> np.ndarray:
    """Rows of gate, up or down drawn evenly from all experts of a layer, float32 [n, cols]."""
    pieces = [bank.parts(expert)[kind] for expert in range(bank.experts)]
    rows, cols = pieces[0].total_rows, pieces[0].cols
    needed = min(rows * len(pieces), -(-_SAMPLES * 8 // cols))
    chosen = min(len(pieces), needed)
    count = min(rows, -(-needed // chosen))
    parts = []
    for i in range(chosen):
        expert = i * len(pieces) // chosen
        first = expert * 7919 % (rows - count + 1)  # other rows of every expert
        parts.append(read_rows(checkpoint, (pieces[expert],), first, count, NonFinite()))
    return np.concatenate(parts)


def write(
    file: PartialFile, checkpoint: Checkpoint, banks: Iterable[tuple[BankSpec, str]], effort: str
) -> None:
    """Fits and writes the codebooks of all banks, each with its codec."""
    sets = []
    for bank, codec in banks:
        if codec not in _BOOK_BYTES:
            continue
        fitter = quantizer(codec, effort)
        for kind, name in enumerate(KINDS):
            rows = sample(checkpoint, bank, kind)
            if not rows.any():
                raise ConvertError(
                    f"layer {bank.layer}: the {name} matrices of the experts are zero where "
                    "codebooks are fitted; convert with --experts int8"
                )
            sets.append(fitter.fit(rows))
    data = np.concatenate(sets)
    file.write(data)
    file.sha256 = hashlib.sha256(data).hexdigest()
    file.record["crc32c"] = [crc32c(data)]


def read(data: bytes, banks: Iterable[tuple[BankSpec, str]]) -> dict[int, Books]:
    """Layer -> sets, from the bytes of codebooks.bin."""
    out, at = {}, 0
    raw = np.frombuffer(data, np.uint8)
    for bank, codec in banks:
        size = _BOOK_BYTES.get(codec, 0)
        if size:
            out[bank.layer] = tuple(raw[at + i * size : at + (i + 1) * size] for i in range(3))
            at += 3 * size
    return out


def encode_rows(
    encoder: Quantizer, book: np.ndarray, weights: np.ndarray, first: int, rows: int,
    moments: np.ndarray | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows first.. of a matrix of `rows` rows -> (offset in the blob, bytes); as encode_block."""
    if moments is None:
        blob = encoder.encode(weights, book)
    else:
        blob = encoder.encode_feedback(weights, book, moments)
    scales = 2 * round_up(len(weights), PANEL)
    row_bytes = round_up(weights.shape[1], PANEL) * RVQ_BITS[encoder.codec] // 8
    yield 2 * first, blob[:scales]
    yield 2 * round_up(rows, PANEL) + first * row_bytes, blob[scales:]


def encode_rate(codec: str) -> float:
    """Weights a second of one thread, measured on 128 K weights."""
    weights = np.random.default_rng(0).standard_normal((128, 1024), np.float32)
    encoder = quantizer(codec, "default", 1)
    books = encoder.fit(weights[:16])
    start = time.perf_counter()
    encoder.encode(weights, books)
    return 0.8 * weights.size / max(time.perf_counter() - start, 1e-6)
