"""4-bit blobs: layout, rows, encoders and what they keep of Gaussian weights."""

from __future__ import annotations

import numpy as np
import pytest
from headrace_tools.convert import quantise
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_data as data
from support import nibble_data as nibbles
from support.codec_data import aligned_copy, decode, encode, matrix_bytes

CODECS = sorted(nibbles.TABLES)
SEEDS = st.integers(0, 2**32 - 1)
SHAPES = {"rows": st.integers(1, 150), "cols": st.integers(1, 150)}


def blob_of(lib, codec: str, w: np.ndarray) -> nibbles.Blob:
    return nibbles.unpack(codec, *w.shape, aligned_copy(encode(lib, codec, w)))


@given(**SHAPES)
def test_bytes(lib, rows, cols):
    r, c = nibbles.padded(rows), nibbles.padded(cols)
    assert matrix_bytes(lib, "int4", rows, cols) == r * c // 2 + r * c // 16
    assert matrix_bytes(lib, "nl4", rows, cols) == r * c // 2 + r * c // 16
    assert matrix_bytes(lib, "mxfp4", rows, cols) == r * c // 2 + r * c // 32


@pytest.mark.parametrize("codec,rows,cols,fits", [
    ("mxfp4", 1, 2**20, True), ("mxfp4", 1, 2**20 + 1, False), ("mxfp4", 2**31, 2**20, True),
    ("int4", 2**31, 2**31, True), ("nl4", 2**31 + 1, 64, False), ("nl4", 0, 64, False),
])
def test_bytes_at_the_limits(lib, codec, rows, cols, fits):
    assert (matrix_bytes(lib, codec, rows, cols) is not None) == fits


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, codec=st.sampled_from(CODECS), **SHAPES)
def test_rows_follow_the_layout(lib, seed, codec, rows, cols):
    rng = np.random.default_rng(seed)
    r, c = nibbles.padded(rows), nibbles.padded(cols)
    codes = rng.integers(0, 16, (r, c)).astype(np.uint8)
    if codec == "mxfp4":
        scales = rng.integers(100, 120, (r, c // 32)).astype(np.uint8)
    else:
        bits = rng.standard_normal((r, c // 32)).astype(np.float32).view(np.uint32)
        scales = (bits >> 16).astype(np.uint16)
    blob = nibbles.Blob(codec, rows, cols, codes, scales)
    raw = aligned_copy(blob.pack().reshape(-1))
    again = nibbles.unpack(codec, rows, cols, raw)
    assert np.array_equal(again.codes, codes) and np.array_equal(again.scales, scales)
    assert np.array_equal(decode(lib, codec, raw, rows, cols), blob.weights())


def test_mxfp4_exponents_of_every_size(lib):
    scales = np.resize(np.arange(256, dtype=np.uint8), (256, 2))
    codes = np.resize(np.arange(16, dtype=np.uint8), (256, 64))
    blob = nibbles.Blob("mxfp4", 256, 64, codes, scales)
    got = decode(lib, "mxfp4", aligned_copy(blob.pack().reshape(-1)), 256, 64)
    bad = np.repeat(scales == 255, 32, axis=1)
    with np.errstate(over="ignore"):
        want = blob.weights()
    assert np.isnan(got[bad]).all() and np.array_equal(got[~bad], want[~bad])


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, codec=st.sampled_from(CODECS), flavour=st.sampled_from(data.FLAVOURS), **SHAPES)
def test_encoders(lib, seed, codec, flavour, rows, cols):
    """Padding is zero, scales are valid, and no weight is further away than its group allows."""
    w = data.floats(np.random.default_rng(seed), (rows, cols), flavour)
    blob = blob_of(lib, codec, w)
    zero = {"mxfp4": 0, "int4": 8, "nl4": 7}[codec]
    assert np.all(blob.codes[rows:] == zero) and np.all(blob.codes[:, cols:] == zero)
    if codec == "mxfp4":
        spread = blob.scales.max(axis=1).astype(int) - blob.scales.min(axis=1)
        assert blob.scales.max() < 255 and spread.max() <= 25 and not blob.scales[rows:].any()
    else:
        assert np.isfinite(nibbles.bf16_values(blob.scales)).all() and not blob.scales[rows:].any()
    wide = np.zeros(blob.codes.shape)
    wide[:rows, :cols] = w
    groups = np.abs(wide.reshape(len(wide), -1, 32))
    got = np.zeros(blob.codes.shape)
    got[:rows, :cols] = blob.weights()
    miss = np.abs(got - wide).reshape(groups.shape)
    floor = np.abs(w).max(axis=1, initial=0) * 2.0**-23 if codec == "mxfp4" else np.zeros(rows)
    limit = np.maximum(groups.max(axis=2) * 0.26, 2.0**-126)
    limit[:rows] = np.maximum(limit[:rows], floor[:, None])
    assert np.all(miss <= limit[:, :, None])


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, codec=st.sampled_from(CODECS), flavour=st.sampled_from(data.FLAVOURS), **SHAPES)
def test_the_converter_writes_the_same_format(lib, seed, codec, flavour, rows, cols):
    """The same bytes as the engine in any blocks of panels, which it decodes as the engine does."""
    w = data.floats(np.random.default_rng(seed), (rows, cols), flavour)
    size = matrix_bytes(lib, codec, rows, cols)
    assert quantise.matrix_bytes(codec, rows, cols) == size
    made = np.zeros(size, np.uint8)
    for first in range(0, rows, 64):
        for at, part in quantise.encode_block(codec, w[first : first + 64], first, rows):
            made[at : at + part.size] = part
    assert np.array_equal(made, encode(lib, codec, w))
    assert np.array_equal(quantise.decode(codec, made, rows, cols),
                          decode(lib, codec, aligned_copy(made), rows, cols))


@pytest.mark.parametrize("codec", CODECS)
def test_threads_change_no_byte(codec):
    w = np.random.default_rng(6).standard_normal((300, 200)).astype(np.float32)
    made = [next(quantise.encode_block(codec, w, 0, 300, threads))[1] for threads in (1, 2, 5)]
    assert np.array_equal(made[0], made[1]) and np.array_equal(made[0], made[2])


@pytest.mark.parametrize("codec,least", [("mxfp4", 18.7), ("int4", 21.7), ("nl4", 22.55)])
def test_signal_to_noise_of_gaussian_weights(lib, codec, least):
    w = np.random.default_rng(1).standard_normal((256, 1024)).astype(np.float32)
    got = decode(lib, codec, aligned_copy(encode(lib, codec, w)), *w.shape)
    noise = 10 * np.log10((w.astype(float) ** 2).sum() / ((w.astype(float) - got) ** 2).sum())
    assert least <= noise < least + 0.6


def test_mxfp4_keeps_what_it_can_represent(lib):
    """Values of E2M1 with a scale for each group come back, zero groups cost no spread."""
    rng = np.random.default_rng(2)
    values = nibbles.MXFP4[rng.integers(0, 16, (64, 256))].astype(np.float32) / 2
    values[:, ::32] = 6
    w = values * np.repeat(np.float32(2.0) ** rng.integers(-20, 5, (64, 8)), 32, axis=1).astype(np.float32)
    w[:, 32:64] = 0
    w[9] = 0
    blob = blob_of(lib, "mxfp4", w)
    assert np.array_equal(blob.weights(), w)
    assert np.array_equal(blob.scales[:, 1], blob.scales.min(axis=1)) and not blob.scales[9].any()


def test_mxfp4_raises_exponents_that_lie_too_far_below(lib):
    w = np.ones((1, 96), np.float32)
    w[0, 32:64] = 1e-12
    w[0, 64:] = 2.0**-24
    blob = blob_of(lib, "mxfp4", w)
    assert blob.scales[0, :3].tolist() == [125, 101, 101]
    assert np.array_equal(blob.weights()[0, [0, 32, 64]], np.float32([1, 0, 2.0**-24]))


@pytest.mark.parametrize("codec", ["int4", "nl4"])
def test_uniform_groups_keep_their_codes(lib, codec):
    """Weights that lie on the grid of a bfloat16 scale are found again without error."""
    rng = np.random.default_rng(3)
    table = nibbles.TABLES[codec].astype(np.float32)
    values = table[rng.integers(0, 16, (64, 128))]
    values[:, ::32] = table[0]
    values[:, 1::32] = table[15]
    w = values * np.repeat(np.float32(2.0) ** rng.integers(-9, 9, (64, 4)), 32, axis=1).astype(np.float32)
    assert np.array_equal(blob_of(lib, codec, w).weights(), w)
