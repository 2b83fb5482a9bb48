"""The rvq encoder: decibels, determinism, importance, refusals; and the Python wrapper."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_tools.measure import scalar, weights
from support import kernel_data as data

CODECS = ("rvq4x64", "rvq3x256", "rvq2x256")


@pytest.fixture(scope="module")
def quant(headrace):
    from headrace import quant as module

    return module


gauss, spread, student = weights.normal, weights.spread, weights.student


def measured(quant, codec: str, effort: str, make=gauss, rows: int = 256) -> float:
    """dB of 65,536 sub-vectors' books on other weights."""
    quantizer = quant.Quantizer(codec, effort=effort)
    books = quantizer.fit(make(rows, 2048, 1))
    w = make(64, 2048, 2)
    return quantizer.sqnr(w, quantizer.encode(w, books), books)


@pytest.mark.parametrize("codec,effort,least", [
    ("rvq4x64", "default", 15.4), ("rvq4x64", "high", 15.6),
    ("rvq3x256", "default", 15.4), ("rvq3x256", "high", 15.6), ("rvq2x256", "default", 10.1),
])
def test_gaussian_weights(quant, codec, effort, least):
    assert measured(quant, codec, effort) >= least


@pytest.mark.parametrize("codec", ["rvq4x64", "rvq3x256"])
def test_heavy_tails_of_rows_and_columns(quant, codec):
    assert measured(quant, codec, "default", spread) >= 15.4


@pytest.mark.parametrize("codec,least", [("rvq4x64", 14.6), ("rvq3x256", 14.9)])
def test_heavy_tails_of_single_weights(quant, codec, least):
    """No scale explains these; a scalar quantiser loses 3.5 dB, vectors 0.9 and 0.6."""
    assert measured(quant, codec, "default", student) >= least


def test_scales_of_rows_are_what_the_set_is_about(quant):
    """One scale for the whole matrix, as a row of all weights has it, costs more than 1 dB."""
    quantizer = quant.Quantizer(effort="greedy")
    sample, w = spread(64, 512, 1), spread(64, 512, 2)

    def db(rows: int) -> float:
        books = quantizer.fit(sample.reshape(rows, -1))
        flat = w.reshape(rows, -1)
        return quantizer.sqnr(flat, quantizer.encode(flat, books), books)

    assert db(64) > db(1) + 1


@pytest.mark.parametrize("make,db", [(gauss, 14.62), (spread, 14.0), (student, 11.2)])
def test_the_scalar_baseline(make, db):
    """Eight levels of Lloyd and Max: 14.62 dB by theory on normal weights. Vectors have to beat it."""
    levels = scalar.fit(make(256, 2048, 1))
    w = make(64, 2048, 2)
    got = scalar.quantise(w, levels)
    assert all(len(np.unique(row)) <= 8 for row in got)
    assert weights.decibels(w, got) == pytest.approx(db, abs=0.15)
    if make is gauss:
        known = np.array([0.2451, 0.7560, 1.3439, 2.1520])
        assert levels == pytest.approx([*-known[::-1], *known], abs=0.02)


def test_the_greedy_baseline_is_what_it_is_said_to_be(quant):
    assert 13.5 < measured(quant, "rvq4x64", "greedy") < 14.0
    assert 14.1 < measured(quant, "rvq3x256", "greedy") < 14.6


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_bytes_for_every_thread_count_and_isa(lib, quant, codec):
    w = gauss(37, 150, 3)  # odd rows, a partial sub-vector
    importance = np.random.default_rng(4).random(150).astype(np.float32)
    results = set()
    for isa in [kernels.isa for kernels in data.tables(*lib)]:
        for threads in (1, 3):
            quantizer = quant.Quantizer(codec, beam=3, threads=threads, isa=isa, seed=7)
            books = quantizer.fit(w)
            results.add((books.tobytes(), quantizer.encode(w, books).tobytes(),
                         quantizer.encode(w, books, importance).tobytes()))
    assert len(results) == 1


def test_a_seed_changes_the_books(quant):
    w = gauss(32, 256, 5)
    assert not np.array_equal(quant.Quantizer(seed=1).fit(w), quant.Quantizer(seed=2).fit(w))


@pytest.mark.parametrize("codec", ["rvq4x64", "rvq3x256"])
def test_importance_lowers_the_weighted_error(quant, codec):
    w = gauss(64, 256, 6)
    importance = np.exp(1.5 * np.random.default_rng(7).standard_normal(256)).astype(np.float32)
    quantizer = quant.Quantizer(codec)
    books = quantizer.fit(gauss(256, 256, 8))
    plain, weighted = quantizer.encode(w, books), quantizer.encode(w, books, importance)
    assert quantizer.error(w, weighted, books, importance)[1] < 0.8 * quantizer.error(
        w, plain, books, importance)[1]
    assert quantizer.error(w, weighted, books)[1] > quantizer.error(w, plain, books)[1]


def test_inputs_without_importance_cost_nothing(quant):
    w = gauss(16, 64, 9)
    w[:, ::2] *= 100
    importance = np.tile(np.array([0, 1], np.float32), 32)
    quantizer = quant.Quantizer()
    books = quantizer.fit(gauss(64, 256, 8))
    blob = quantizer.encode(w, books, importance)
    assert quantizer.error(w, blob, books, importance)[1] > 0
    assert quantizer.sqnr(w, quantizer.encode(w, books, np.zeros(64)), books) < 15  # any answer


@pytest.mark.parametrize("codec", CODECS)
def test_decode_and_error_agree(quant, codec):
    w = spread(70, 100, 10)
    quantizer = quant.Quantizer(codec)
    books = quantizer.fit(w)
    blob = quantizer.encode(w, books)
    back = quantizer.decode(blob, 70, 100, books).astype(np.float64)
    signal, noise = quantizer.error(w, blob, books)
    assert signal == pytest.approx((w.astype(np.float64) ** 2).sum())
    assert noise == pytest.approx(((w - back) ** 2).sum())
    assert quantizer.sqnr(w, blob, books) > 9


def test_scales_are_refitted(quant):
    """A row cannot be improved by another scale: the error is orthogonal to what was decoded."""
    w = gauss(64, 512, 11)
    quantizer = quant.Quantizer()
    books = quantizer.fit(w)
    back = quantizer.decode(quantizer.encode(w, books), 64, 512, books)
    gain = (w * back).sum(axis=1) / (back * back).sum(axis=1)
    assert np.all(np.abs(gain - 1) < 2.0**-8)  # bfloat16


def test_padding_is_zero_and_rows_of_zeros_stay(quant):
    w = gauss(5, 70, 12)
    w[2] = 0
    w[3] *= 1e-42  # a scale that is not normal
    w[4] *= 3e37
    quantizer = quant.Quantizer("rvq3x256")
    books = quantizer.fit(gauss(64, 128, 1))
    blob = quantizer.encode(w, books)
    scales, codes = blob[:128].view(np.uint16), blob[128:]
    assert np.all(scales[5:] == 0) and scales[2] == 0 and scales[3] == 0
    assert 0 < scales[0] and 0 < scales[4] < 0x7F80
    rows = codes.reshape(4, 4, 3, 16, 4)  # 32 columns, 16 rows, plane, row, sub-vector
    assert not rows[:, :, :, 5:].any() and not rows[:, 1:].any()
    assert not rows[3].any() and not rows[2, ..., 1:].any()  # columns 70 to 127
    back = quantizer.decode(blob, 5, 70, books)
    assert not back[2:4].any() and np.isfinite(back).all()
    assert quantizer.sqnr(w[4:], quantizer.encode(w[4:], books), books) > 12


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_counted_and_named(headrace, quant, bad):
    w = gauss(8, 64, 13)
    books = quant.Quantizer().fit(w)
    w[3, 5] = w[7, 63] = bad
    for call in (lambda q: q.fit(w), lambda q: q.encode(w, books)):
        with pytest.raises(headrace.NumericError, match="2 of 512 .* row 3, column 5"):
            call(quant.Quantizer())


def test_refusals(headrace, quant):
    w = gauss(8, 64, 14)
    quantizer = quant.Quantizer()
    books = quantizer.fit(w)
    blob = quantizer.encode(w, books)
    for arguments in ({"codec": "int9"}, {"effort": "most"}, {"beam": 33}, {"isa": "z80"},
                      {"codec": "a name beyond every name"}, {"threads": 5000}):
        with pytest.raises(headrace.UsageError):
            quant.Quantizer(**arguments)
    with pytest.raises(headrace.UsageError, match="needs codebooks"):
        quantizer.encode(w)
    with pytest.raises(headrace.UsageError, match="importance"):
        quantizer.encode(w, books, np.full(64, -1.0))
    with pytest.raises(headrace.UsageError, match="importance"):
        quantizer.encode(w, books, np.ones(63))
    with pytest.raises(headrace.UsageError, match="codebooks"):
        quantizer.encode(w, books[:-1])
    with pytest.raises(headrace.UsageError, match="bytes"):
        quantizer.decode(blob[:-1], 8, 64, books)
    with pytest.raises(headrace.UsageError, match="nothing to fit"):
        quantizer.fit(np.zeros((4, 64), np.float32))
    with pytest.raises(headrace.UsageError, match="no codebooks"):
        quant.Quantizer("int8").fit(w)
    broken = books.copy()
    broken[100] ^= 1
    with pytest.raises(headrace.FormatError, match="CRC32C"):
        quantizer.decode(blob, 8, 64, broken)


@pytest.mark.parametrize("codec,least", [("f32", np.inf), ("bf16", 45), ("int8", 38)])
def test_codecs_without_codebooks(quant, codec, least):
    w = gauss(20, 100, 15)
    quantizer = quant.Quantizer(codec)
    assert quantizer.books_bytes == 0
    assert quantizer.sqnr(w, quantizer.encode(w)) >= least
