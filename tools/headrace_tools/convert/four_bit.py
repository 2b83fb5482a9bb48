"""The 4-bit codecs of formats/codecs.md: decoding, and the layout of their panels. The library
encodes (headrace.quant).

Codes are nibbles, uint8 [rows, cols]; scales are [rows, cols / 32]: E8M0 bytes (uint8) of mxfp4,
bfloat16 bits (uint16) of int4 and nl4. Source of mxfp4: the OCP Microscaling specification 1.0.
"""

from __future__ import annotations

import numpy as np

GROUP = 32
PANEL = 64

TABLES = {
    "mxfp4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32),
    "int4": np.arange(-8, 8, dtype=np.float32),
    "nl4": np.array(
        [-30, -22, -17, -13, -9, -6, -3, 0, 2, 5, 8, 11, 15, 19, 24, 30], np.float32
    ),
}
"""The weight of each nibble in units of its scale; of mxfp4, in units of half a scale."""

ZERO = {"mxfp4": 0, "int4": 8, "nl4": 7}
"""The nibble of weight 0."""


def _padded(n: int) -> int:
    return (n + PANEL - 1) // PANEL * PANEL


def scale_bytes(codec: str) -> int:
    """Bytes of one group's scale."""
    return 1 if codec == "mxfp4" else 2


def panel_bytes(codec: str, cols: int) -> int:
    """Bytes of a panel of 64 rows."""
    return _padded(cols) // GROUP * PANEL * (scale_bytes(codec) + GROUP // 2)


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def settle_exponents(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The scales with the groups of zeros at the row's smallest exponent."""
    used = (codes.reshape(len(codes), -1, GROUP) & 7).any(axis=2)
    wide = scales.astype(np.int32)
    low = np.where(used, wide, 256).min(axis=1)
    low = np.where(low == 256, 0, low)
    return np.where(used, wide, low[:, None]).astype(np.uint8)


def pack(codec: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes [n, C], scales [n, C / 32], C a multiple of 64 -> the bytes of their panels, uint8.

    Rows are padded to a multiple of 64.
    """
    rows, cols = codes.shape
    if (padding := _padded(rows) - rows) > 0:
        codes = np.pad(codes, ((0, padding), (0, 0)), constant_values=ZERO[codec])
        scales = np.pad(scales, ((0, padding), (0, 0)))
    panels, groups = len(codes) // PANEL, cols // GROUP
    head = np.ascontiguousarray(scales.reshape(panels, PANEL, groups).transpose(0, 2, 1))
    split = codes.reshape(panels, PANEL, groups, 2, 4, 4).transpose(0, 2, 4, 1, 5, 3)
    nibbles = split[..., 0] | split[..., 1] << 4
    head = head.astype("<u2" if scale_bytes(codec) == 2 else "u1", copy=False)
    parts = (head.view(np.uint8).reshape(panels, -1), nibbles.reshape(panels, -1))
    return np.concatenate(parts, axis=1).reshape(-1)


def unpack(codec: str, blob: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole blob, uint8 -> (codes [rows, C], scales [rows, C / 32])."""
    panels, groups = _padded(rows) // PANEL, _padded(cols) // GROUP
    data = blob.reshape(panels, -1)
    size = groups * PANEL * scale_bytes(codec)
    head = np.ascontiguousarray(data[:, :size]).view("<u2" if scale_bytes(codec) == 2 else "u1")
    scales = head.reshape(panels, groups, PANEL).transpose(0, 2, 1).reshape(-1, groups)[:rows]
    nibbles = data[:, size:].reshape(panels, groups, 4, PANEL, 4)
    both = np.stack([nibbles & 15, nibbles >> 4], axis=-1)  # [panel, group, step, row, 4, half]
    codes = both.transpose(0, 3, 1, 5, 2, 4).reshape(panels * PANEL, groups * GROUP)
    return codes[:rows], scales


def decode(codec: str, blob: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """A whole blob, uint8 -> float32 [rows, cols]."""
    codes, scales = unpack(codec, blob, rows, cols)
    if codec == "mxfp4":
        factor = np.ldexp(np.float32(1), scales.astype(np.int32) - 128).astype(np.float32)
    else:
        factor = _widen(np.ascontiguousarray(scales))
    return (TABLES[codec][codes] * np.repeat(factor, GROUP, axis=1))[:, :cols]
