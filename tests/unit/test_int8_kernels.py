"""Quantisers and int8 panel products: every ISA equals the NumPy model bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_data as data

SEEDS = st.integers(0, 2**32 - 1)
MODEST = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def tables(lib):
    return data.tables(*lib)


def assert_quantized_equal(got: data.Quantized, want: data.Quantized) -> None:
    assert np.array_equal(got.shift, want.shift)
    assert np.array_equal(got.q, want.q)
    assert np.array_equal(got.scale, want.scale)
    assert np.array_equal(got.sum, want.sum)
    assert np.array_equal(got.offset, want.offset)


@MODEST
@given(seed=SEEDS, k=st.integers(1, 300), n=st.integers(1, 3), flavour=st.sampled_from(data.FLAVOURS))
def test_quantize_follows_the_model(tables, seed, k, n, flavour):
    rng = np.random.default_rng(seed)
    x = data.floats(rng, (n, k), flavour)
    if rng.random() < 0.5:  # blocks of very different size, some of them exactly at a bound
        x *= np.repeat(np.float32(2.0) ** rng.integers(-9, 1, -(-k // 64)), 64)[:k].astype(np.float32)
    want = data.quantize(x)
    for kernels in tables:
        assert_quantized_equal(kernels.quantize(x), want)


@MODEST
@given(seed=SEEDS, k=st.integers(1, 300), flavour=st.sampled_from(data.FLAVOURS))
def test_quantize15_follows_the_model(tables, seed, k, flavour):
    x = data.floats(np.random.default_rng(seed), (2, k), flavour)
    v, scale = data.quantize15(x)
    for kernels in tables:
        hi, lo, got_scale, total = kernels.quantize15(x)
        value = 128 * hi.astype(np.int64) + lo
        assert np.array_equal(value[:, :k], v) and not value[:, k:].any()
        assert lo.min() >= -64 and lo.max() <= 63
        assert np.array_equal(got_scale, scale)
        assert np.array_equal(total, v.sum(axis=1))


def assert_digits_equal(got: data.Quantized22, want: data.Quantized22) -> None:
    for name in ("hi", "mid", "lo", "scale", "offset"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name


@MODEST
@given(seed=SEEDS, k=st.integers(1, 300), flavour=st.sampled_from(data.FLAVOURS))
def test_quantize22_follows_the_model(tables, seed, k, flavour):
    x = data.floats(np.random.default_rng(seed), (2, k), flavour)
    want = data.quantize22(x)
    assert np.abs(want.values).max() <= 2080768
    assert min(want.mid.min(), want.lo.min()) >= -64 and max(want.mid.max(), want.lo.max()) <= 63
    for kernels in tables:
        assert_digits_equal(kernels.quantize22(x), want)


def test_quantize22_at_its_bounds(tables):
    """Every value at the largest, where a group's sum is beyond what float32 counts exactly."""
    x = np.array([[1.0] * 130, [-1.0] * 130, [1.0, -1.0] * 65], np.float32) * np.float32(3e38)
    want = data.quantize22(x)
    assert want.hi[0, :130].tolist() == [127] * 130 and not want.lo.any()
    for kernels in tables:
        assert_digits_equal(kernels.quantize22(x), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 70])
def test_a_token_that_is_not_finite_gets_a_nan_scale(tables, bad, at):
    x = np.ones((1, 71), np.float32)
    x[0, at] = bad
    for kernels in tables:
        out = kernels.quantize(x)
        assert np.isnan(out.scale[0]) and not out.q.any() and out.sum[0] == 0
        assert not out.offset.any()
        hi, lo, scale, total = kernels.quantize15(x)
        fine = kernels.quantize22(x)
        assert np.isnan(fine.scale[0]) and not fine.values.any() and not fine.offset.any()
        assert np.isnan(scale[0]) and not hi.any() and not lo.any() and total[0] == 0


@pytest.mark.parametrize("largest", [2.0**-101, 2.0**-100, 3.4e38])
def test_quantize_at_the_ends_of_the_range(tables, largest):
    x = np.linspace(-largest, largest, 130).astype(np.float32)[None, :]
    want = data.quantize(x)
    assert (want.scale[0] == 0) == (largest < 2.0**-100)
    for kernels in tables:
        assert_quantized_equal(kernels.quantize(x), want)


def random_product(rng, rows: int, k: int, n: int, extreme: bool):
    """w [rows, k] (with the -128 that only damaged records hold), row scales, activations of n tokens."""
    blocks = -(-k // 64)
    if extreme:
        w = rng.choice([-128, 127], (rows, k)) * np.ones((rows, k), np.int64)
        q = rng.choice([-127, 127], (n, blocks * 64)).astype(np.int8)
        shift = np.full((n, blocks), 7, np.uint8)
    else:
        w = rng.integers(-128, 128, (rows, k))
        q = rng.integers(-127, 128, (n, blocks * 64)).astype(np.int8)
        low = rng.integers(0, 8)
        shift = rng.integers(low, 8, (n, blocks)).astype(np.uint8)
    q[:, k:] = 0
    scale = rng.random(n).astype(np.float32)
    row_scale = np.zeros(-(-rows // 64) * 64, np.float32)
    row_scale[:rows] = rng.random(rows)
    return w, row_scale, data.Quantized(q, shift, scale, data.shifted_sum(q, shift))


@MODEST
@given(seed=SEEDS, rows=st.integers(1, 200), k=st.integers(1, 700), n=st.integers(1, 9),
       extreme=st.booleans(), indexed=st.booleans())
def test_int8_panels(tables, seed, rows, k, n, extreme, indexed):
    rng = np.random.default_rng(seed)
    w, row_scale, x = random_product(rng, rows, k, n, extreme)
    want = data.int8_product(w, row_scale[:rows], x)
    index = rng.integers(0, n, rng.integers(1, 12)).astype(np.uint32) if indexed else None
    if indexed:
        want = want[index]
    panels = data.pack_panels(w)
    p0 = int(rng.integers(0, len(panels)))
    p1 = int(rng.integers(p0, len(panels) + 1))
    for kernels in tables:
        y = kernels.int8_panels(panels, row_scale, rows, x, index, ldy=rows + 5)
        assert data.same_bits(np.ascontiguousarray(y[:, :rows]), want), kernels.isa
        assert np.all(y[:, rows:] == -1)
        part = kernels.int8_panels(panels, row_scale, rows, x, index, p0, p1)
        inside = slice(64 * p0, min(64 * p1, rows))
        assert data.same_bits(np.ascontiguousarray(part[:, inside]),
                              np.ascontiguousarray(want[:, inside])), kernels.isa
        assert np.all(np.delete(part, np.arange(64 * p0, min(64 * p1, rows)), axis=1) == -1)


def same_sign_product(blocks: int, shifts: list[int], n: int = 1):
    """Largest possible sums: w = 127, q = 127 (q = -127 for odd tokens)."""
    w = np.full((64, 64 * blocks), 127, np.int64)
    w[1::2] = -127
    q = np.full((n, 64 * blocks), 127, np.int8)
    q[1::2] = -127
    shift = np.tile(np.array(shifts, np.uint8), (n, 1))
    x = data.Quantized(q, shift, np.ones(n, np.float32), data.shifted_sum(q, shift))
    return w, np.ones(64, np.float32), x


@pytest.mark.parametrize("shifts", [
    [7] * 8 + [0] * 12,           # 1036: the most that needs no flush
    [7] * 8 + [0] * 13,           # 1037: flushes
    [7] * 129,
    [3] * 1036,                   # the common factor 2^3 is taken off
    [3] * 1037,
    [0] + [7] * 16,
    [7] * 17 + [0],               # every flush but the last is full
], ids=["bound", "bound+1", "sevens", "threes", "threes+1", "late", "full"])
def test_worst_case_sums_never_overflow(tables, shifts):
    for n in (1, 2, 3, 4, 5):
        w, row_scale, x = same_sign_product(len(shifts), shifts, n)
        want = data.int8_product(w, row_scale, x)
        for kernels in tables:
            assert data.same_bits(kernels.int8_panels(data.pack_panels(w), row_scale, 64, x), want)


def test_tokens_with_different_bounds_share_a_call(tables):
    rng = np.random.default_rng(5)
    w, row_scale, x = random_product(rng, 130, 1500, 70, extreme=True)
    x.shift[::3] = rng.integers(0, 2, x.shift[::3].shape)
    x.sum = data.shifted_sum(x.q, x.shift)
    want = data.int8_product(w, row_scale[:130], x)
    for kernels in tables:
        assert data.same_bits(kernels.int8_panels(data.pack_panels(w), row_scale, 130, x), want)


@MODEST
@given(seed=SEEDS, rows=st.integers(1, 150), k=st.integers(1, 500), n=st.integers(1, 6),
       indexed=st.booleans())
def test_int8_panels15(tables, seed, rows, k, n, indexed):
    rng = np.random.default_rng(seed)
    w = rng.integers(-127, 128, (rows, k))
    row_scale = np.zeros(-(-rows // 64) * 64, np.float32)
    row_scale[:rows] = rng.random(rows)
    x = data.floats(rng, (n, k), "normal")
    v, scale = data.quantize15(x)
    want = data.int8_product15(w, row_scale[:rows], v, scale)
    index = rng.integers(0, n, 7).astype(np.uint32) if indexed else None
    if indexed:
        want = want[index]
    panels = data.pack_panels(w)
    for kernels in tables:
        y = kernels.int8_panels15(panels, row_scale, rows, kernels.quantize15(x), index, rows + 3)
        assert data.same_bits(np.ascontiguousarray(y[:, :rows]), want), kernels.isa
        assert np.all(y[:, rows:] == -1)


def test_int8_panels15_beyond_one_lane(tables):
    """66,368 inputs of the largest value: an int32 lane overflows without a flush."""
    k = 64 * 1037
    w = np.full((64, k), 127, np.int64)
    x = np.ones((1, k), np.float32)
    v, scale = data.quantize15(x)
    want = data.int8_product15(w, np.ones(64, np.float32), v, scale)
    for kernels in tables:
        got = kernels.int8_panels15(data.pack_panels(w), np.ones(64, np.float32), 64,
                                    kernels.quantize15(x))
        assert data.same_bits(got, want)
