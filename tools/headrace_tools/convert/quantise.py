"""Encodes and decodes matrices exactly as formats/codecs.md says, block by block of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import four_bit
from .library import quantizer

CODEC_NUMBERS = {"f32": 1, "f64": 2, "bf16": 3, "int8": 4, "mxfp4": 5, "int4": 6, "nl4": 7,
                 "rvq4x64": 8, "rvq3x256": 9, "rvq2x256": 10}
RVQ_BITS = {"rvq4x64": 3, "rvq3x256": 3, "rvq2x256": 2}
"""Bits of codes for a weight."""
FOUR_BIT = frozenset(four_bit.TABLES)
PANEL = 64
"""Rows of a panel; blocks handed to the encoder start at multiples of it."""

_TINY = np.float32(np.finfo(np.float32).tiny)
_BF16_OVERFLOW = np.float32(np.uint32(0x7F7F8000).view(np.float32))
"""The smallest magnitude that rounds to Inf in bf16."""


def round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def matrix_bytes(codec: str, rows: int, cols: int) -> int:
    """Bytes of the blob of a matrix [rows, cols]."""
    if codec == "int8":
        padded = round_up(rows, PANEL)
        return padded * 4 + padded * round_up(cols, PANEL)
    if codec in FOUR_BIT:
        return round_up(rows, PANEL) // PANEL * four_bit.panel_bytes(codec, cols)
    if codec in RVQ_BITS:
        return round_up(rows, PANEL) * (2 + round_up(cols, PANEL) * RVQ_BITS[codec] // 8)
    return rows * cols * {"f32": 4, "f64": 8, "bf16": 2}[codec]


def encode_bf16(weights: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bfloat16 bits, rounded to nearest even. Input must be finite."""
    bits = np.ascontiguousarray(weights, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bits -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_overflows(weights: np.ndarray) -> int:
    """How many finite float32 weights would become Inf in bf16."""
    return int((np.abs(weights) >= _BF16_OVERFLOW).sum())


def encode_int8_panels(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, C] -> (scales float32 [R], panels uint8 [R/64, C'/4, 64, 4]).

    R and C' are n and C rounded up to 64. Input must be finite.
    """
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    rows, cols = weights.shape
    rows_pad, cols_pad = round_up(rows, PANEL), round_up(cols, PANEL)
    scale = np.maximum(weights.max(axis=1), -weights.min(axis=1)) / np.float32(127)
    scale[scale < _TINY] = 0
    divisor = np.where(scale > 0, scale, np.float32(np.inf))
    quotient = weights / divisor[:, None]
    np.rint(quotient, out=quotient)
    np.clip(quotient, -127, 127, out=quotient)
    quotient += np.float32(128)
    scales = np.zeros(rows_pad, dtype=np.float32)
    scales[:rows] = scale
    if (rows, cols) == (rows_pad, cols_pad):
        stored = quotient.astype(np.uint8)
    else:
        stored = np.full((rows_pad, cols_pad), 128, dtype=np.uint8)
        stored[:rows, :cols] = quotient.astype(np.uint8)
    lanes = stored.view(np.uint32).reshape(rows_pad // PANEL, PANEL, cols_pad // 4)
    panels = np.ascontiguousarray(lanes.transpose(0, 2, 1))
    return scales, panels.view(np.uint8).reshape(rows_pad // PANEL, cols_pad // 4, PANEL, 4)


def decode_int8(blob: bytes | np.ndarray, rows: int, cols: int) -> np.ndarray:
    """A whole int8 blob -> float32 [rows, cols], scale * (byte - 128)."""
    data = np.frombuffer(blob, dtype=np.uint8)
    rows_pad, cols_pad = round_up(rows, PANEL), round_up(cols, PANEL)
    scales = data[: rows_pad * 4].view("<f4")
    lanes = data[rows_pad * 4 :].view("<u4").reshape(rows_pad // PANEL, cols_pad // 4, PANEL)
    stored = (
        np.ascontiguousarray(lanes.transpose(0, 2, 1)).view(np.uint8).reshape(rows_pad, cols_pad)
    )
    signed = stored[:rows, :cols].astype(np.float32) - np.float32(128)
    return scales[:rows, None] * signed


def decode(codec: str, blob: bytes | np.ndarray, rows: int, cols: int) -> np.ndarray:
    """A whole blob -> float32 (float64 for f64) [rows, cols]."""
    if codec == "int8":
        return decode_int8(blob, rows, cols)
    data = np.frombuffer(blob, dtype=np.uint8)
    if codec in FOUR_BIT:
        return four_bit.decode(codec, data, rows, cols)
    if codec == "bf16":
        return decode_bf16(data.view("<u2")).reshape(rows, cols)
    return data.view("<f4" if codec == "f32" else "<f8").reshape(rows, cols)


def encode_block(
    codec: str, weights: np.ndarray, first_row: int, rows: int, threads: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows first_row.. of a matrix of `rows` rows -> (offset in the blob, bytes) parts.

    `weights` is float32 [n, cols] (float64 for f64); for int8 and the 4-bit codecs first_row
    is a multiple of 64, and n is too unless the block ends the matrix. `threads` are of the library,
    which encodes the 4-bit codecs; 0: the physical cores.
    """
    cols = weights.shape[1]
    if codec == "int8" or codec in FOUR_BIT:
        if first_row % PANEL or (weights.shape[0] % PANEL and first_row + weights.shape[0] != rows):
            raise ValueError("blocks of panels start and end at panels")
    if codec in FOUR_BIT:
        at = first_row // PANEL * four_bit.panel_bytes(codec, cols)
        yield at, quantizer(codec, threads=threads).encode(weights)
        return
    if codec == "int8":
        scales, panels = encode_int8_panels(weights)
        yield first_row * 4, scales.view(np.uint8)
        yield round_up(rows, PANEL) * 4 + first_row * round_up(cols, PANEL), panels.reshape(-1)
        return
    if codec == "bf16":
        encoded = encode_bf16(weights)
    else:
        encoded = np.ascontiguousarray(weights, dtype="<f4" if codec == "f32" else "<f8")
    raw = encoded.reshape(-1).view(np.uint8)
    yield first_row * cols * (raw.size // max(1, weights.size)), raw
