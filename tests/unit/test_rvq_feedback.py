"""Encoding with feedback: against its definition in NumPy, determinism, what it is worth, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from headrace_tools.measure.weights import normal

from support import kernel_data as data

SHAPES = {"rvq4x64": (4, 64), "rvq3x256": (3, 256), "rvq2x256": (2, 256)}


@pytest.fixture(scope="module")
def quant(headrace):
    from headrace import quant as module

    return module


def correlated(n: int, cols: int, seed: int, near: float = 0.8) -> np.ndarray:
    """Inputs [n, cols] whose neighbours are alike, and whose sizes differ."""
    rng = np.random.default_rng(seed)
    distance = np.abs(np.subtract.outer(np.arange(cols), np.arange(cols)))
    root = np.linalg.cholesky(near**distance)
    size = np.exp(0.5 * np.random.default_rng(5).standard_normal(cols))
    return (rng.standard_normal((n, cols)) @ root.T * size).astype(np.float32)


def second_moments(x: np.ndarray, damping: float) -> np.ndarray:
    h = x.astype(np.float64).T @ x
    return h / np.trace(h) * len(h) + damping * np.eye(len(h))


def upper_factor(h: np.ndarray) -> np.ndarray:
    """A, upper triangular, with A A' = h."""
    return np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]


def unpacked(moments: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, D): what is owed for the error of input i at input k > i's sub-vector, and the metrics."""
    floats, wide = moments.view(np.float32), -(-cols // 8) * 8
    owed, metric, at = np.zeros((wide, wide)), np.zeros((wide, wide)), 0
    for first in range(0, wide, 8):
        owed[:first, first : first + 8] = floats[at : at + 8 * first].reshape(8, first).T
        at += 8 * first
        metric[first : first + 8, first : first + 8] = floats[at : at + 64].reshape(8, 8).T
        at += 64
    assert at == floats.size
    return owed, metric


@pytest.mark.parametrize("cols", [1, 7, 8, 20, 72, 150])
@pytest.mark.parametrize("n", [3, 300])
def test_moments_are_a_factor(quant, cols, n):
    x = correlated(n, cols, 1)
    owed, metric = unpacked(quant.Quantizer().moments(x, 0.2), cols)
    a = ((owed + np.eye(len(owed))) @ metric)[:cols, :cols]
    assert np.allclose(a, np.triu(a))
    assert a @ a.T == pytest.approx(second_moments(x, 0.2), rel=1e-4, abs=1e-4)
    assert not owed[cols:].any() and not owed[:, cols:].any() and not metric[cols:].any()


@pytest.mark.parametrize("x", [np.zeros((0, 40), np.float32), np.zeros((5, 40), np.float32),
                               np.full((2, 40), 1e-30, np.float32), np.full((2, 40), 3e38, np.float32)])
def test_moments_of_next_to_nothing(quant, x):
    owed, metric = unpacked(quant.Quantizer().moments(x, 0.5), 40)
    if x.any():
        assert np.isfinite(owed).all() and np.diag(metric).min() > 0.5
    else:
        assert not owed.any() and np.array_equal(metric, np.eye(40))


def by_definition(books: np.ndarray, codec: str, w: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Weights [rows, cols] chosen one stage after the other (a beam of 1), scales as they begin."""
    stages, entries = SHAPES[codec]
    c = books[64:].view(np.int8).reshape(stages, entries, 8).astype(np.float64)
    unit = float(books[8:12].view(np.float32)[0])
    scale = np.sqrt((w.astype(np.float64) ** 2).mean(axis=1)) / unit
    bits = scale.astype(np.float32).view(np.uint32)
    scale = ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16 << 16).astype(np.uint32).view(np.float32)
    q, error = np.zeros_like(w, np.float64), np.zeros_like(w, np.float64)
    for first in range(0, w.shape[1], 8):
        at = slice(first, first + 8)
        d = a[at, at]
        owed = error[:, :first] @ a[:first, at] @ np.linalg.inv(d)
        left = (w[:, at] + owed) / scale[:, None]
        for s in range(stages):
            distance = (((left[:, None] - c[s]) @ d) ** 2).sum(axis=2)
            chosen = c[s][distance.argmin(axis=1)]
            left = left - chosen
            q[:, at] += chosen
        error[:, at] = w[:, at] - scale[:, None] * q[:, at]
    return q


@pytest.mark.parametrize("codec", sorted(SHAPES))
def test_it_is_what_it_says(quant, codec):
    """Codes as by the definition; then the scale with which the products are nearest."""
    w, x = normal(60, 64, 2), correlated(400, 64, 3)
    quantizer = quant.Quantizer(codec, beam=1)
    books = quantizer.fit(normal(64, 256, 4))
    blob = quantizer.encode_feedback(w, books, quantizer.moments(x, 0.1))
    got = quantizer.decode(blob, 60, 64, books).astype(np.float64)
    a = upper_factor(second_moments(x, 0.1))
    want = by_definition(books, codec, w, a)
    scale = ((w @ a) * (want @ a)).sum(axis=1) / ((want @ a) ** 2).sum(axis=1)
    same = np.abs(got - scale[:, None] * want).max(axis=1) <= np.abs(got).max(axis=1) * 2.0**-8
    assert same.mean() > 0.9  # a near tie decided otherwise changes what follows in its row


@pytest.mark.parametrize("codec", sorted(SHAPES))
def test_products_are_nearer_and_weights_are_not(quant, codec):
    w, x = normal(128, 128, 6), correlated(2000, 128, 7)
    fresh = correlated(2000, 128, 8).astype(np.float64)
    quantizer = quant.Quantizer(codec)
    books = quantizer.fit(normal(128, 256, 8))
    plain = quantizer.encode(w, books)
    fed = quantizer.encode_feedback(w, books, quantizer.moments(x))

    def product_error(blob):
        return float(((fresh @ (w - quantizer.decode(blob, 128, 128, books)).T) ** 2).sum())

    assert product_error(fed) < 0.5 * product_error(plain)
    assert quantizer.sqnr(w, fed, books) < quantizer.sqnr(w, plain, books)


def test_without_moments_it_is_the_plain_encoder(quant):
    w = normal(70, 100, 9)
    quantizer = quant.Quantizer()
    books = quantizer.fit(w)
    plain = quantizer.encode(w, books)
    fed = quantizer.encode_feedback(w, books, quantizer.moments(np.zeros((0, 100), np.float32)))
    scales = 2 * 128
    assert np.array_equal(plain[scales:], fed[scales:])
    apart = plain[:scales].view(np.int16).astype(int) - fed[:scales].view(np.int16)
    assert np.abs(apart).max() <= 1  # the refit sums in another order


@pytest.mark.parametrize("codec", sorted(SHAPES))
def test_the_same_bytes_for_every_thread_count_and_isa(lib, quant, codec):
    w, x = normal(150, 92, 3), correlated(50, 92, 4)
    books = quant.Quantizer(codec, beam=3).fit(w)
    results = set()
    for isa in [kernels.isa for kernels in data.tables(*lib)]:
        for threads in (1, 3):
            quantizer = quant.Quantizer(codec, beam=3, threads=threads, isa=isa)
            moments = quantizer.moments(x, 0.3)
            results.add((moments.tobytes(), quantizer.encode_feedback(w, books, moments).tobytes()))
    assert len(results) == 1


def test_rows_of_zeros_stay(quant):
    w = normal(5, 24, 5)
    w[2] = 0
    quantizer = quant.Quantizer()
    books = quantizer.fit(normal(64, 128, 1))
    blob = quantizer.encode_feedback(w, books, quantizer.moments(correlated(30, 24, 1)))
    back = quantizer.decode(blob, 5, 24, books)
    assert not back[2].any() and np.isfinite(back).all() and back[[0, 1, 3, 4]].any(axis=1).all()


def test_refusals(headrace, quant):
    w, x = normal(8, 64, 14), correlated(20, 64, 1)
    quantizer = quant.Quantizer()
    books, moments = quantizer.fit(w), quantizer.moments(x)
    for damping in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(headrace.UsageError, match="damping"):
            quantizer.moments(x, damping)
    with pytest.raises(headrace.UsageError, match="moments of 64 inputs"):
        quantizer.encode_feedback(w, books, moments[:-4])
    with pytest.raises(headrace.UsageError, match="not encoded with feedback"):
        quant.Quantizer("int8").encode_feedback(w, None, moments)
    with pytest.raises(headrace.UsageError, match="needs codebooks"):
        quantizer.encode_feedback(w, None, moments)
    x[3, 5] = np.nan
    with pytest.raises(headrace.NumericError, match="row 3, column 5"):
        quantizer.moments(x)
