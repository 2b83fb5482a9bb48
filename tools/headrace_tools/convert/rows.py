"""Canonical rows of a tensor from the pieces of source tensors that it is made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .families import Piece
from .safetensors_source import Checkpoint, NonFinite, clear_nonfinite

_NEAR_ROWS = 64
"""Rows no further apart are read together."""


def _stored_rows(checkpoint: Checkpoint, piece: Piece, first: int, count: int) -> np.ndarray:
    """Consecutive rows of a piece's source, float32 [count, cols]; NaN and Inf stay."""
    if piece.coding is not None:
        return piece.coding.rows(checkpoint, piece.source, piece.shape, first, count)
    entry = checkpoint.tensors[piece.source]
    return checkpoint.read_values(entry, first * piece.cols, count * piece.cols).reshape(
        count, piece.cols
    )


_Reader = Callable[[Checkpoint, Piece, int, int], np.ndarray]


def piece_rows(
    checkpoint: Checkpoint, piece: Piece, first: int, count: int, read: _Reader = _stored_rows
) -> np.ndarray:
    """Rows first..first+count of a piece. Rows that lie close together are read in one go."""
    index = piece.source_rows(first, count)
    out: list[np.ndarray] = []
    far = np.flatnonzero(np.abs(np.diff(index)) > _NEAR_ROWS) + 1
    for part in np.split(index, far):
        low, high = int(part.min()), int(part.max()) + 1
        if high - low > 4 * part.size:  # mostly rows that nobody asked for
            for run in np.split(part, np.flatnonzero(np.diff(part) != 1) + 1):
                out.append(read(checkpoint, piece, int(run[0]), run.size))
            continue
        values = read(checkpoint, piece, low, high - low)
        consecutive = part.size == high - low and (part[:-1] < part[1:]).all()
        out.append(values if consecutive else values[part - low])
    return out[0] if len(out) == 1 else np.concatenate(out)


def read_rows(
    checkpoint: Checkpoint, pieces: tuple[Piece, ...], first: int, count: int, bad: NonFinite
) -> np.ndarray:
    """Canonical rows first..first+count of the concatenated pieces, float32 [count, cols].

    NaN and Inf are counted in `bad` and returned as 0.
    """
    out: list[np.ndarray] = []
    base = 0
    for piece in pieces:
        start, end = max(first, base), min(first + count, base + piece.total_rows)
        if start < end:
            out.append(piece_rows(checkpoint, piece, start - base, end - start))
        base += piece.total_rows
    return clear_nonfinite(out[0] if len(out) == 1 else np.concatenate(out), bad)


def read_numbers(checkpoint: Checkpoint, pieces: tuple[Piece, ...], bad: NonFinite) -> np.ndarray:
    """All numbers of the pieces, one after the other, float32 [total]."""
    parts = [piece_rows(checkpoint, piece, 0, piece.total_rows).reshape(-1) for piece in pieces]
    return clear_nonfinite(np.concatenate(parts), bad)
