"""4-bit sources whose nibbles and scales go into the container as they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from . import four_bit
from .decoders import Int4Packed, Mxfp4Blocks, Mxfp4Packed, ceil_div
from .errors import EXIT_BAD_INPUT, ConvertError
from .families import Piece
from .safetensors_source import Checkpoint

GROUP = four_bit.GROUP


def scale_name(piece: Piece) -> str:
    """The tensor with the scales of a 4-bit piece."""
    if isinstance(piece.coding, Mxfp4Blocks):
        return piece.source.removesuffix("_blocks") + "_scales"
    return piece.source.removesuffix("_packed") + "_scale"


def native_codec(checkpoint: Checkpoint, piece: Piece) -> str | None:
    """The codec that holds the piece without a change; None when there is none."""
    if isinstance(piece.coding, (Mxfp4Packed, Mxfp4Blocks)):
        return "mxfp4"
    if isinstance(piece.coding, Int4Packed) and piece.coding.group % GROUP == 0:
        scale = checkpoint.tensors.get(scale_name(piece))
        return "int4" if scale is not None and scale.dtype == "BF16" else None
    return None


def native_codec_of_all(checkpoint: Checkpoint, pieces: Iterable[Piece]) -> str | None:
    """The one codec that holds all pieces without a change."""
    found = {native_codec(checkpoint, piece) for piece in pieces}
    return found.pop() if len(found) == 1 else None


def _bytes(checkpoint: Checkpoint, name: str, first: int, count: int, width: int) -> np.ndarray:
    stored = checkpoint.read_stored(checkpoint.tensors[name], first * width, count * width)
    return np.ascontiguousarray(stored).view(np.uint8).reshape(count, -1)


def stored_codes(checkpoint: Checkpoint, piece: Piece, first: int, count: int) -> np.ndarray:
    """Consecutive rows of the source, uint8 [count, C + C / 32 * scale bytes], C = padded cols:
    the nibbles, one a byte, then the scales."""
    coding, cols = piece.coding, piece.cols
    codec = native_codec(checkpoint, piece)
    assert codec is not None and coding is not None
    wide, groups = (cols + 63) // 64 * 64, ceil_div(cols, GROUP)
    out = np.zeros((count, wide + wide // GROUP * four_bit.scale_bytes(codec)), np.uint8)
    if codec == "mxfp4":
        blocks = isinstance(coding, Mxfp4Blocks)
        width = groups * GROUP // 2 if blocks else ceil_div(cols, 2)
        packed = _bytes(checkpoint, piece.source, first, count, width)
        out[:, wide : wide + groups] = _bytes(checkpoint, scale_name(piece), first, count, groups)
    else:
        if first == 0:  # checks the stated shape
            coding.rows(checkpoint, piece.source, piece.shape, 0, 1)
        packed = _bytes(checkpoint, piece.source, first, count, ceil_div(cols, 8))
        per_row = ceil_div(cols, coding.group)
        scales = _bytes(checkpoint, scale_name(piece), first, count, per_row).view("<u2")
        repeated = np.repeat(scales, coding.group // GROUP, axis=1)[:, :groups]
        out[:, wide : wide + 2 * groups] = np.ascontiguousarray(repeated).view(np.uint8)
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(count, -1)[:, :cols]
    out[:, :cols] = nibbles
    out[:, cols:wide] = four_bit.ZERO[codec]
    return out


def pack_codes(codec: str, rows: np.ndarray, cols: int, what: str, first_row: int) -> np.ndarray:
    """Rows of stored_codes -> the bytes of their panels. `what` and `first_row` name them.

    Raises ConvertError for scales that the codec cannot hold.
    """
    wide = (cols + 63) // 64 * 64
    codes, scales = rows[:, :wide], np.ascontiguousarray(rows[:, wide:])
    if codec == "int4":
        bits = scales.view("<u2")
        _refuse((bits & 0x7F80) == 0x7F80, what, first_row, "a scale is not finite")
        return four_bit.pack(codec, codes, bits)
    groups = ceil_div(cols, GROUP)
    _refuse(scales[:, :groups] == 255, what, first_row,
            "a scale byte is 255, which is not a number")
    return four_bit.pack(codec, codes, four_bit.settle_exponents(codes, scales))


def _refuse(bad: np.ndarray, what: str, first_row: int, why: str) -> None:
    """bad: bool [rows, groups]"""
    if count := int(bad.sum()):
        row = first_row + int(np.flatnonzero(bad.any(axis=1))[0])
        more = f"; {count} such scales in these {len(bad)} rows" if count > 1 else ""
        raise ConvertError(f"{what}, row {row}: {why}{more}", EXIT_BAD_INPUT)
