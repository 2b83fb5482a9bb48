"""Matrix blobs, rows and expert record layouts (formats/codecs.md)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_data as data
from support.codec_data import aligned_copy, decode, encode, matrix_bytes

NAMES = {"f32": 4, "f64": 8, "bf16": 2}
SHAPES = {"rows": st.integers(1, 150), "cols": st.integers(1, 150)}


def test_names_round_trip(lib):
    ffi, c = lib
    for name in ("f32", "f64", "bf16", "int8", "mxfp4", "int4", "nl4", "rvq4x64", "rvq3x256",
                 "rvq2x256"):
        codec = c.codec_from_name(name.encode())
        assert codec != 0 and ffi.string(c.codec_name(codec)) == name.encode()
    for unknown in (b"", b"none", b"int5", b"f32 "):
        assert c.codec_from_name(unknown) == 0


@given(**SHAPES)
def test_matrix_bytes(lib, rows, cols):
    for name, size in NAMES.items():
        assert matrix_bytes(lib, name, rows, cols) == rows * cols * size
    r, k = -(-rows // 64) * 64, -(-cols // 64) * 64
    assert matrix_bytes(lib, "int8", rows, cols) == 4 * r + r * k


@pytest.mark.parametrize("codec,rows,cols,fits", [
    ("f32", 0, 1, False), ("f32", 1, 0, False), ("int8", 0, 0, False),
    ("bf16", 2**31, 1, True), ("bf16", 2**31 + 1, 1, False), ("bf16", 1, 2**31 + 1, False),
    ("int8", 2**31, 2**31, True), ("f32", 2**31, 2**31 - 1, True),
    ("f32", 2**31, 2**31, False), ("f64", 2**31, 2**31, False), ("f64", 2**31, 2**29, True),
    ("f64", 2**31, 2**30, False), ("f32", 2**64 - 1, 2**64 - 1, False), ("none", 1, 1, False),
])
def test_matrix_bytes_at_the_limits(lib, codec, rows, cols, fits):
    # An exact product of 2^64 does not fit; one byte less does.
    product = rows * cols * {"f32": 4, "f64": 8, "bf16": 2, "int8": 1}.get(codec, 0)
    assert (matrix_bytes(lib, codec, rows, cols) is not None) == fits, product


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), flavour=st.sampled_from(data.FLAVOURS), **SHAPES)
def test_int8_encoding(lib, seed, flavour, rows, cols):
    w = data.floats(np.random.default_rng(seed), (rows, cols), flavour)
    blob = aligned_copy(encode(lib, "int8", w))
    rows_pad = -(-rows // 64) * 64
    scales = blob[: 4 * rows_pad].view(np.float32)

    want_scale = np.zeros(rows_pad, np.float32)
    want_scale[:rows] = np.abs(w).max(axis=1) / np.float32(127)
    want_scale[want_scale < np.finfo(np.float32).tiny] = 0
    assert np.array_equal(scales, want_scale)

    safe = np.where(want_scale[:rows, None] > 0, want_scale[:rows, None], np.float32(np.inf))
    q = np.clip(np.rint(w / safe), -127, 127).astype(np.int64)
    assert np.array_equal(blob[4 * rows_pad :], data.pack_panels(q).ravel())
    assert np.array_equal(decode(lib, "int8", blob, rows, cols),
                          want_scale[:rows, None] * q.astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), flavour=st.sampled_from(data.FLAVOURS), **SHAPES)
def test_float_encodings(lib, seed, flavour, rows, cols):
    w = data.floats(np.random.default_rng(seed), (rows, cols), flavour)
    for codec, dtype in (("f32", np.float32), ("f64", np.float64)):
        blob = aligned_copy(encode(lib, codec, w))
        assert np.array_equal(blob.view(dtype).reshape(rows, cols), w)
        assert data.same_bits(decode(lib, codec, blob, rows, cols), w)
    blob = aligned_copy(encode(lib, "bf16", w))
    bits = w.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(blob.view(np.uint16).reshape(rows, cols), rounded)
    assert data.same_bits(decode(lib, "bf16", blob, rows, cols),
                          (rounded.astype(np.uint32) << 16).view(np.float32))


def test_bf16_special_values(lib):
    w = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4028235e38, 1.00390625, 1.01171875]],
                 np.float32)
    w.view(np.uint32)[0, 2] = 0x7F800001  # a NaN whose payload the rounding would drop
    got = decode(lib, "bf16", aligned_copy(encode(lib, "bf16", w)), 1, 8)[0]
    assert np.isnan(got[2])
    want = [np.inf, -np.inf, 0.0, -0.0, np.inf, 1.0, 1.015625]  # ties go to even
    assert data.same_bits(np.delete(got, 2), np.array(want, np.float32))


def layout(lib, codec: str, hidden: int, inner: int, biased: bool = False):
    ffi, c = lib
    out = ffi.new("struct record_layout *")
    ok = c.record_layout(c.codec_from_name(codec.encode()), hidden, inner, biased, out)
    return (out.gate, out.up, out.down, out.bias, out.bytes) if ok else None


@given(hidden=st.integers(1, 5000), inner=st.integers(1, 5000),
       codec=st.sampled_from(["f32", "bf16", "int8", "mxfp4", "int4", "nl4", "rvq4x64"]), biased=st.booleans())
def test_record_layout(lib, hidden, inner, codec, biased):
    gate, up, down, bias, total = layout(lib, codec, hidden, inner, biased)
    wide, narrow = matrix_bytes(lib, codec, inner, hidden), matrix_bytes(lib, codec, hidden, inner)
    assert gate == 64
    assert up % 64 == 0 and 0 <= up - (gate + wide) < 64
    assert down % 64 == 0 and 0 <= down - (up + wide) < 64
    end = down + narrow
    if biased:
        assert bias % 64 == 0 and 0 <= bias - end < 64
        end = bias + 2 * (-(-inner * 4 // 64) * 64) + hidden * 4
    else:
        assert bias == 0
    assert total % 4096 == 0 and 0 <= total - end < 4096 + 64


def test_record_layout_refuses_overflow(lib):
    assert layout(lib, "f32", 0, 4) is None
    assert layout(lib, "f32", 2**31 + 1, 4) is None
    assert layout(lib, "int8", 2**31, 2**31) == (
        64, 64 + (s := 2**62 + 2**33), 64 + 2 * s, 0, 4096 + 3 * s)
    assert layout(lib, "bf16", 2**31, 2**31) is None
