"""MXFP4 weights with 22-bit activations: every ISA equals the NumPy model bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_data as data
from support import nibble_data as nibbles
from unit.test_nibble_kernels import random_blob

SEEDS = st.integers(0, 2**32 - 1)
LARGEST = 127 << 14
MODEST = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def tables(lib):
    return data.tables(*lib)


def activations(rng: np.random.Generator, n: int, k: int, extreme: bool = False):
    shape = (n, -(-k // 64) * 64)
    v = (rng.choice([-LARGEST, LARGEST], shape) if extreme
         else rng.integers(-LARGEST, LARGEST + 1, shape))
    v[:, k:] = 0
    return data.from_values22(v.astype(np.int64), rng.random(n).astype(np.float32))


@MODEST
@given(seed=SEEDS, rows=st.integers(1, 200), k=st.integers(1, 700), n=st.integers(1, 9),
       wild=st.booleans(), extreme=st.booleans(), indexed=st.booleans())
def test_products(tables, seed, rows, k, n, wild, extreme, indexed):
    rng = np.random.default_rng(seed)
    blob, x = random_blob(rng, "mxfp4", rows, k, wild), activations(rng, n, k, extreme)
    want = nibbles.fine_product(blob, x)
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


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 70])
def test_any_number_of_tokens(tables, n):
    rng = np.random.default_rng(n)
    blob, x = random_blob(rng, "mxfp4", 70, 300, False), activations(rng, n, 300)
    want = nibbles.fine_product(blob, x)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def largest_product(groups: int, scales: np.ndarray, n: int = 1):
    """Every product as large as it can be, of one sign in a row (the other in odd tokens)."""
    codes = np.full((64, groups * 32), 7, np.uint8)
    codes[1::2] = 15
    v = np.full((n, groups * 32), LARGEST, np.int64)
    v[1::2] *= -1
    return (nibbles.Blob("mxfp4", 64, groups * 32, codes, scales),
            data.from_values22(v, np.ones(n, np.float32)))


@pytest.mark.parametrize("groups,spread", [(2, 25), (256, 25), (258, 24), (512, 24), (514, 23),
                                           (2**15, 18)])
def test_the_widest_spread_never_overflows(tables, groups, spread):
    """Sums come to 0.75 * 2^63 where the groups are as many as the spread allows."""
    assert nibbles.fine_spread(groups) == spread
    scales = np.full((64, groups), 100 + spread, np.uint8)
    scales[:, 0] = 100
    scales[::4, 0] = 99  # too far below: counts as zero
    blob, x = largest_product(groups, scales)
    exact = (groups - 1) * 32 * 12 * LARGEST * 2**spread + (np.arange(64) % 4 > 0) * 32 * 12 * LARGEST
    assert exact.max() < 2**63
    sign = np.where(np.arange(64) % 2, -1, 1)
    want = (sign * exact).astype(np.float32) * np.float32(2.0**-28)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want[None]), kernels.isa


def test_a_row_with_a_nan_exponent_and_a_token_that_is_not_finite(tables):
    rng = np.random.default_rng(3)
    blob, x = random_blob(rng, "mxfp4", 100, 200, False), activations(rng, 6, 200)
    blob.scales[7, 2] = 255
    x.scale[4] = np.nan
    want = nibbles.fine_product(blob, x)
    assert np.isnan(want[:, 7]).all() and np.isnan(want[4]).all()
    assert np.isfinite(np.delete(np.delete(want, 7, axis=1), 4, axis=0)).all()
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def test_exponents_at_the_ends_of_the_range(tables):
    rng = np.random.default_rng(4)
    blob, x = random_blob(rng, "mxfp4", 64, 128, False), activations(rng, 3, 128)
    blob.scales[:] = np.repeat(np.array([0, 1, 2, 3, 253, 254, 127, 20], np.uint8), 8)[:, None]
    x.scale[1] = 2.0**-126
    want = nibbles.fine_product(blob, x)
    for kernels in tables:
        assert data.same_bits(nibbles.run(kernels, blob, x), want), kernels.isa


def test_the_error_is_that_of_float32(tables):
    """Against float64: 2^-22 of the largest activation, where 8 bits leave 2^-8."""
    rng = np.random.default_rng(9)
    blob = random_blob(rng, "mxfp4", 64, 2048, False)
    x = rng.standard_normal((3, 2048)).astype(np.float32)
    exact = x.astype(np.float64) @ blob.weights().astype(np.float64).T
    for kernels in tables:
        y = nibbles.run(kernels, blob, kernels.quantize22(x))
        assert np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)) < 1e-6
