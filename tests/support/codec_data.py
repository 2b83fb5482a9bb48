"""Calls of the codecs with NumPy arrays."""

from __future__ import annotations

import numpy as np


def matrix_bytes(lib, codec: str, rows: int, cols: int) -> int | None:
    """Bytes of a blob, None when refused."""
    ffi, c = lib
    out = ffi.new("size_t *")
    ok = c.codec_matrix_bytes(c.codec_from_name(codec.encode()), rows, cols, out)
    return int(out[0]) if ok else None


def encode(lib, codec: str, w: np.ndarray) -> np.ndarray:
    """The blob of w [rows, cols] as bytes, with a guard behind that must survive."""
    ffi, c = lib
    rows, cols = w.shape
    size = matrix_bytes(lib, codec, rows, cols)
    blob = np.full(size + 64, 0xA5, np.uint8)
    c.matrix_encode(c.codec_from_name(codec.encode()), ffi.cast("float *", w.ctypes.data), rows,
                    cols, ffi.cast("void *", blob.ctypes.data))
    assert np.all(blob[size:] == 0xA5)
    return blob[:size]


def decode(lib, codec: str, blob: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """All rows by matrix_row."""
    ffi, c = lib
    matrix = ffi.new("struct matrix *")
    c.matrix_bind(matrix, c.codec_from_name(codec.encode()), rows, cols,
                  ffi.cast("void *", blob.ctypes.data))
    out = np.full((rows, cols + 1), 7, np.float32)
    for r in range(rows):
        c.matrix_row(matrix, r, ffi.cast("float *", out[r].ctypes.data))
    assert np.all(out[:, cols] == 7)
    return np.ascontiguousarray(out[:, :cols])


def aligned_copy(blob: np.ndarray) -> np.ndarray:
    raw = np.zeros(len(blob) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + len(blob)] = blob
    return raw[start : start + len(blob)]


def new_books(ffi):
    """A struct rvq_books at an address that its vectors want; ffi.new would align it to 8 bytes."""
    size = ffi.sizeof("struct rvq_books")
    room = ffi.new("uint8_t[]", size + 63)
    start = -int(ffi.cast("uintptr_t", room)) % 64
    return ffi.gc(ffi.cast("struct rvq_books *", room + start), lambda _, keep=room: None)
