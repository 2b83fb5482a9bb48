"""CRC32C (Castagnoli): the library's where it is installed, else in numpy, which takes 20 times as long.

The checksum is linear over GF(2): a buffer is cut into lanes that are reduced
side by side by table look-ups, eight bytes a step, and the lanes are then
joined pairwise with operators "append n zero bytes".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_POLY = 0x82F63B78
_LANE = 128
_PIECE = 1 << 21


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLY), table >> 1)
    return table


_BYTE = _byte_table()


def _zero_byte(value: np.ndarray) -> np.ndarray:
    return (value >> 8) ^ _BYTE[value & 0xFF]


@lru_cache(maxsize=1)
def _word_tables() -> list[np.ndarray]:
    """tables[k][w]: the 16-bit word w followed by 2k zero bytes."""
    tables = [_zero_byte(_zero_byte(np.arange(65536, dtype=np.uint32)))]
    for _ in range(3):
        tables.append(_zero_byte(_zero_byte(tables[-1])))
    return tables


def _apply(operator: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Applies a linear operator given as 4 tables of 256 entries."""
    out = operator[0][values & 0xFF]
    for byte in range(1, 4):
        out ^= operator[byte][(values >> (8 * byte)) & 0xFF]
    return out


@lru_cache(maxsize=64)
def _zeros_operator(log2_bytes: int) -> np.ndarray:
    """[4, 256] tables of "append 2**log2_bytes zero bytes"."""
    index = np.arange(256, dtype=np.uint32)
    values = np.stack([index << np.uint32(8 * byte) for byte in range(4)])
    if log2_bytes == 0:
        return _zero_byte(values)
    half = _zeros_operator(log2_bytes - 1)
    return _apply(half, _apply(half, values))


@lru_cache(maxsize=64)
def _zeros_table(count: int) -> list[list[int]]:
    """[4][256] of "append `count` zero bytes"."""
    index = np.arange(256, dtype=np.uint32)
    values = np.stack([index << np.uint32(8 * byte) for byte in range(4)])
    power = 0
    while count:
        if count & 1:
            values = _apply(_zeros_operator(power), values)
        count >>= 1
        power += 1
    return values.tolist()


def _append_zeros(crc: int, count: int) -> int:
    a, b, c, d = _zeros_table(count)
    return a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]


def _reduce(words: np.ndarray) -> np.ndarray:
    """Little-endian 16-bit words [4n, lanes] -> the lanes' linear checksums, uint32 [lanes]."""
    tables = _word_tables()
    tail = tables[1].take(words[2::4], mode="clip")
    tail ^= tables[0].take(words[3::4], mode="clip")
    crc = np.zeros(words.shape[1], dtype=np.uint32)
    for step in range(words.shape[0] // 4):
        low = words[4 * step] ^ crc.astype(np.uint16)
        high = words[4 * step + 1] ^ (crc >> 16).astype(np.uint16)
        crc = tables[3].take(low, mode="clip")
        crc ^= tables[2].take(high, mode="clip")
        crc ^= tail[step]
    return crc


def crc32c_rows(data: np.ndarray) -> np.ndarray:
    """CRC32C of every row of uint8 [rows, n], as uint32 [rows]."""
    rows, n = data.shape
    padded = np.zeros((rows, (n + 7) // 8 * 8), dtype=np.uint8)
    padded[:, padded.shape[1] - n :] = data  # zeros in front do not change a linear checksum
    words = np.ascontiguousarray(padded.view("<u2").T)
    return _reduce(words) ^ np.uint32(_append_zeros(0xFFFFFFFF, n) ^ 0xFFFFFFFF)


def _linear(data: np.ndarray) -> int:
    """The checksum of `data` (uint8 [n], n > 0) with start value and final mask 0."""
    lanes = 1
    while lanes * _LANE < data.size:
        lanes *= 2
    if lanes * _LANE != data.size:  # zeros in front do not change a linear checksum
        padded = np.zeros(lanes * _LANE, dtype=np.uint8)
        padded[padded.size - data.size :] = data
        data = padded
    crc = _reduce(np.ascontiguousarray(data.view("<u2").reshape(lanes, _LANE // 2).T))
    power = _LANE.bit_length() - 1
    while crc.size > 1:
        crc = _apply(_zeros_operator(power), crc[0::2]) ^ crc[1::2]
        power += 1
    return int(crc[0])


def crc32c_join(first: int, second: int, count: int) -> int:
    """CRC32C of two buffers one behind the other, from theirs; the second has `count` bytes."""
    return _append_zeros(first, count) ^ second


@lru_cache(maxsize=1)
def _library() -> Callable[[int, int, int], int] | None:
    """hr_crc32c(crc, address, bytes), or None."""
    try:
        from headrace import _abi

        return _abi.library().hr_crc32c
    except (ImportError, AttributeError):
        return None


def crc32c(data: bytes | bytearray | memoryview | np.ndarray, crc: int = 0) -> int:
    """CRC32C of `data`; `crc` is the checksum of what came before it (0 at the start)."""
    view = (
        data.reshape(-1).view(np.uint8)
        if isinstance(data, np.ndarray)
        else np.frombuffer(data, np.uint8)
    )
    if (function := _library()) is not None and view.flags.c_contiguous:
        return function(crc, ctypes.c_void_p(view.ctypes.data), view.size)
    return crc32c_numpy(view, crc)


def crc32c_numpy(view: np.ndarray, crc: int = 0) -> int:
    """The same for uint8 [n], without the library."""
    state = crc ^ 0xFFFFFFFF
    for start in range(0, view.size, _PIECE):
        piece = view[start : start + _PIECE]
        state = _append_zeros(state, piece.size) ^ _linear(piece)
    return state ^ 0xFFFFFFFF
