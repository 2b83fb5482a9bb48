"""Products with 4-bit weights: every ISA equals the NumPy model bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_data as data
from support import nibble_data as nibbles

SEEDS = st.integers(0, 2**32 - 1)
CODECS = st.sampled_from(sorted(nibbles.TABLES))
MODEST = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def tables(lib):
    return data.tables(*lib)


def random_blob(rng: np.random.Generator, codec: str, rows: int, cols: int, wild: bool):
    """Random codes; scales of one size, or `wild` ones (all signs and sizes, wide exponents)."""
    r, c = nibbles.padded(rows), nibbles.padded(cols)
    codes = rng.integers(0, 16, (r, c)).astype(np.uint8)
    shape = (r, c // 32)
    if codec == "mxfp4":
        spread = rng.choice([3, 12, 25, 40, 254]) if wild else rng.integers(0, 6)
        base = rng.integers(0, 255 - spread, (r, 1)) if wild else rng.integers(100, 120, (r, 1))
        scales = (base + rng.integers(0, spread + 1, shape)).astype(np.uint8)
    else:
        values = rng.standard_normal(shape) * (10.0 ** rng.integers(-30, 30, shape) if wild else 0.01)
        scales = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return nibbles.Blob(codec, rows, cols, codes, scales)


def activations(rng: np.random.Generator, n: int, k: int, extreme: bool = False) -> data.Quantized:
    blocks = -(-k // 64)
    if extreme:
        q = rng.choice([-127, 127], (n, blocks * 64)).astype(np.int8)
        shift = np.full((n, blocks), 7, np.uint8)
    else:
        q = rng.integers(-127, 128, (n, blocks * 64)).astype(np.int8)
        shift = rng.integers(0, 8, (n, blocks)).astype(np.uint8)
    q[:, k:] = 0
    return data.Quantized(q, shift, rng.random(n).astype(np.float32), data.shifted_sum(q, shift))


@MODEST
@given(seed=SEEDS, codec=CODECS, rows=st.integers(1, 200), k=st.integers(1, 700),
       n=st.integers(1, 9), wild=st.booleans(), extreme=st.booleans(), indexed=st.booleans())
def test_products(tables, seed, codec, rows, k, n, wild, extreme, indexed):
    rng = np.random.default_rng(seed)
    blob, x = random_blob(rng, codec, rows, k, wild), activations(rng, n, k, extreme)
    want = nibbles.product(blob, x)
    index = rng.integers(0, n, rng.integers(1, 12)).astype(np.uint32) if indexed else None
    if indexed:
        want = np.ascontiguousarray(want[index])
    panels = nibbles.padded(rows) // 64
    p0 = int(rng.integers(0, panels))
    p1 = int(rng.integers(p0, panels + 1))
    inside = slice(64 * p0, min(64 * p1, rows))
    for kernels in tables:
        y = nibbles.run(kernels, blob, x, index, ldy=rows + 5)
        assert data.same_bits(np.ascontiguousarray(y[:, :rows]), want), kernels.isa
        assert np.all(y[:, rows:] == -1)
        part = nibbles.run(kernels, blob, x, index, p0, p1)
        assert data.same_bits(np.ascontiguousarray(part[:, inside]),
                              np.ascontiguousarray(want[:, inside])), kernels.isa
        assert np.all(np.delete(part, np.arange(inside.start, inside.stop), axis=1) == -1)


@pytest.mark.parametrize("codec", sorted(nibbles.TABLES))
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 11, 63, 64, 65, 70, 130])
def test_any_number_of_tokens(tables, codec, n):
    rng = np.random.default_rng(n)
    blob, x = random_blob(rng, codec, 70, 300, False), activations(rng, n, 300)
    want = nibbles.product(blob, x)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def largest_sums(codec: str, groups: int, scales: np.ndarray, n: int = 1):
    """Every product as large as it can be, of one sign in a row (the other in odd tokens)."""
    table = nibbles.TABLES[codec].astype(int)
    codes = np.full((64, groups * 32), table.argmax(), np.uint8)
    codes[1::2] = table.argmin()
    blob = nibbles.Blob(codec, 64, groups * 32, codes, scales)
    q = np.full((n, groups * 32), 127, np.int8)
    q[1::2] = -127
    shift = np.full((n, groups // 2), 7, np.uint8)
    return blob, data.Quantized(q, shift, np.ones(n, np.float32), data.shifted_sum(q, shift))


@pytest.mark.parametrize("spread", [0, 1, 6, 7, 8, 24, 25])
@pytest.mark.parametrize("groups", [2, 8, 44, 346])
def test_mxfp4_sums_never_overflow(tables, spread, groups):
    scales = np.full((64, groups), 100, np.uint8)
    scales[::3] += np.uint8(spread)
    scales[::3, -1] = 100
    for n in (1, 2, 5):
        blob, x = largest_sums("mxfp4", groups, scales, n)
        want = nibbles.product(blob, x)
        for kernels in tables:
            assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def test_mxfp4_longest_row_with_the_widest_spread(tables):
    """2^20 inputs, spread 25: the sum comes to 0.98 * 2^63 and must not wrap."""
    scales = np.full((64, 2**15), 125, np.uint8)
    scales[:, 0] = 100
    blob, x = largest_sums("mxfp4", 2**15, scales)
    exact = (2**15 - 1) * 48768 * 2**32 + 48768 * 2**7
    assert 2**62 < exact < 2**63
    want = np.where(np.arange(64) % 2, -1, 1) * np.float32(exact) * np.float32(2.0**-28)
    for kernels in tables:
        y = nibbles.run(kernels, blob, x)
        assert data.same_bits(y, want.astype(np.float32)[None]), kernels.isa


@pytest.mark.parametrize("codec", ["int4", "nl4"])
def test_group_sums_at_their_bound_are_exact_floats(tables, codec):
    scales = np.full((64, 4), 0x3F80, np.uint16)
    blob, x = largest_sums(codec, 4, scales, 3)
    assert abs(nibbles.group_sums(blob, x)).max() * 128 < 2**24
    want = nibbles.product(blob, x)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def test_mxfp4_groups_too_far_below_count_as_zero(tables):
    rng = np.random.default_rng(8)
    blob, x = random_blob(rng, "mxfp4", 64, 256, False), activations(rng, 5, 256)
    blob.scales[:, :6], blob.scales[:, 6] = 125, 0
    blob.scales[::2, 7], blob.scales[1::2, 7] = 99, 100
    want = nibbles.product(blob, x)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa
    blob.codes[::2, 192:] = 0
    blob.codes[1::2, 192:224] = 0
    blob.scales[:, 6] = 125
    blob.scales[::2, 7] = 125
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def test_a_row_with_a_nan_exponent_is_nan_and_no_other(tables):
    rng = np.random.default_rng(3)
    blob, x = random_blob(rng, "mxfp4", 100, 200, False), activations(rng, 6, 200)
    blob.scales[7] = 60
    blob.scales[7, 2] = 255
    want = nibbles.product(blob, x)
    assert np.isnan(want[:, 7]).all() and np.isfinite(np.delete(want, 7, axis=1)).all()
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def test_exponents_at_the_ends_of_the_range(tables):
    rng = np.random.default_rng(4)
    blob, x = random_blob(rng, "mxfp4", 64, 128, False), activations(rng, 3, 128)
    blob.scales[:] = np.repeat(np.array([0, 1, 2, 3, 253, 254, 127, 20], np.uint8), 8)[:, None]
    x.scale[1] = 2.0**-126
    want = nibbles.product(blob, x)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


@pytest.mark.parametrize("codec", sorted(nibbles.TABLES))
def test_a_token_that_is_not_finite_makes_its_row_nan(tables, codec):
    rng = np.random.default_rng(5)
    blob, x = random_blob(rng, codec, 64, 64, False), activations(rng, 3, 64)
    x.scale[1] = np.nan
    for kernels in tables:
        y = nibbles.run(kernels, blob, x)
        assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("scale,finite", [(0x7F80, False), (0xFFC0, False), (0x7F7F, True)])
def test_a_scale_that_is_not_finite_shows(tables, scale, finite):
    rng = np.random.default_rng(6)
    blob, x = random_blob(rng, "nl4", 64, 128, False), activations(rng, 2, 128)
    x.scale[:] = 1e-6
    blob.scales[9, 1] = scale
    for kernels in tables:
        y = nibbles.run(kernels, blob, x)
        assert np.isfinite(np.delete(y, 9, axis=1)).all()
        if not finite:
            assert not np.isfinite(y[:, 9]).any()
