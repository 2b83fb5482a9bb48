"""The 4-bit codecs of formats/codecs.md: encoding, decoding, and the layout of their panels.

Codes are nibbles, uint8 [rows, cols]; scales are [rows, cols / 32]: E8M0 bytes (uint8) of mxfp4,
bfloat16 bits (uint16) of int4 and nl4. Source of mxfp4: the OCP Microscaling specification 1.0.
"""

from __future__ import annotations

import numpy as np

GROUP = 32
PANEL = 64
MX_SPREAD = 25
"""How far below the row's largest a scale byte of mxfp4 still counts in products."""

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

_REACHES = (0.84, 0.93, 1.02, 1.11, 1.22)
_FAR = 64
_LIMIT = np.float32(_FAR - 0.75)
_E2M1_MIDDLES = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)


def _padded(n: int) -> int:
    return (n + PANEL - 1) // PANEL * PANEL


def scale_bytes(codec: str) -> int:
    """Bytes of one group's scale."""
    return 1 if codec == "mxfp4" else 2


def panel_bytes(codec: str, cols: int) -> int:
    """Bytes of a panel of 64 rows."""
    return _padded(cols) // GROUP * PANEL * (scale_bytes(codec) + GROUP // 2)


def _nearest_lut(table: np.ndarray) -> np.ndarray:
    """[2 _FAR + 1]: ceil(2 x) + _FAR -> the nearest weight's nibble, ties to the lower."""
    middles = table[:-1] + table[1:]
    return np.searchsorted(middles, np.arange(-_FAR, _FAR + 1), side="left").astype(np.uint8)


_LUTS = {codec: _nearest_lut(TABLES[codec]) for codec in ("int4", "nl4")}


def _bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(codec: str, groups: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, weights in units of the scale) nearest to groups [n, 32]; scale [n] is not 0."""
    twice = groups * (np.float32(2) / scale)[:, None]
    np.clip(twice, -_LIMIT, _LIMIT, out=twice)
    codes = _LUTS[codec][np.ceil(twice, out=twice).astype(np.int16) + _FAR]
    return codes, TABLES[codec][codes]


def fit_groups(codec: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int4, nl4: float32 [rows, multiple of 32] -> (codes, scales) with a small squared error.

    Tries scales that put the largest weight near either end of the table, each refined once by
    least squares. A group whose scale would underflow becomes zero. Input must be finite.
    """
    rows, cols = weights.shape
    groups = weights.reshape(-1, GROUP)
    at = np.abs(groups).argmax(axis=1)
    largest = groups[np.arange(len(groups)), at]
    codes = np.full(groups.shape, ZERO[codec], np.uint8)
    scales = np.zeros(len(groups), np.uint16)
    least = np.full(len(groups), np.inf, np.float32)
    ends = TABLES[codec][[0, 15]]
    norm = np.where(largest == 0, np.float32(1), np.abs(largest))
    unit = groups / norm[:, None]  # keeps every square in range
    with np.errstate(all="ignore"):
        for end in ends:
            for reach in _REACHES:
                first = np.where(largest == 0, np.float32(1), largest / norm) / (end * np.float32(reach))
                _, q = _round(codec, unit, first)
                squares = np.einsum("ij,ij->i", q, q)
                better = np.einsum("ij,ij->i", unit, q) / np.maximum(squares, np.float32(1))
                bits = _bf16(better * norm)
                scale = _widen(bits) / norm
                usable = np.isfinite(scale) & (scale != 0) & np.isfinite(np.float32(2) / scale)
                scale = np.where(usable, scale, np.float32(1))
                tried, q = _round(codec, unit, scale)
                q *= scale[:, None]
                q -= unit
                error = np.einsum("ij,ij->i", q, q)
                take = usable & (error < least) & (largest != 0)
                least[take], scales[take], codes[take] = error[take], bits[take], tried[take]
    return codes.reshape(rows, cols), scales.reshape(rows, cols // GROUP)


def encode_mxfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, multiple of 32] -> (codes, scales) by the specification's rule.

    Exponents are raised to 25 below the row's largest. Input must be finite.
    """
    rows, cols = weights.shape
    groups = weights.reshape(rows, -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    exponent = np.frexp(largest)[1].astype(np.int32) + 124  # floor(log2) - 2 + 127
    exponent = np.where(largest == 0, 0, np.maximum(exponent, 0))
    exponent = np.maximum(exponent, exponent.max(axis=1, keepdims=True) - MX_SPREAD)
    doubled = np.ldexp(np.abs(groups), 128 - exponent[:, :, None])
    codes = np.searchsorted(_E2M1_MIDDLES, doubled, side="left").astype(np.uint8)
    tie = (codes < 7) & (doubled == _E2M1_MIDDLES[np.minimum(codes, 6)]) & (codes % 2 == 1)
    codes += tie  # a tie goes to the even code
    codes |= np.where((groups < 0) & (codes > 0), np.uint8(8), np.uint8(0))
    codes = codes.reshape(rows, cols)
    return codes, settle_exponents(codes, exponent.astype(np.uint8))


def settle_exponents(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The scales with the groups of zeros at the row's smallest exponent."""
    used = (codes.reshape(len(codes), -1, GROUP) & 7).any(axis=2)
    wide = scales.astype(np.int32)
    low = np.where(used, wide, 256).min(axis=1)
    low = np.where(low == 256, 0, low)
    return np.where(used, wide, low[:, None]).astype(np.uint8)


def encode(codec: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, cols] -> (codes, scales), cols padded with zeros to a multiple of 64."""
    rows, cols = weights.shape
    wide = np.zeros((rows, _padded(cols)), np.float32)
    wide[:, :cols] = weights
    return encode_mxfp4(wide) if codec == "mxfp4" else fit_groups(codec, wide)


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
