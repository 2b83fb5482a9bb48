"""The rvq codecs: layout, decoding, products of every ISA, codebook sets (formats/codecs.md)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvq_model import SHAPES, pack_codes, pad64
from support import kernel_data as data
from support.codec_data import new_books

SEEDS = st.integers(0, 2**32 - 1)
MODEST = settings(max_examples=30, deadline=None)
CODECS = st.sampled_from(list(SHAPES))


class Case:
    """A random matrix: books, codes, integers w [rows, cols_pad], bfloat16 row scales, the blob."""

    def __init__(self, lib, codec: str, seed: int, rows: int, cols: int, extreme: bool) -> None:
        rng = np.random.default_rng(seed)
        _, stages, entries, limit, _ = SHAPES[codec]
        self.codec, self.rows, self.cols = codec, rows, cols
        if extreme:
            self.books = rng.choice([-limit, limit], (stages, entries, 8)).astype(np.int8)
        else:
            self.books = rng.integers(-limit, limit + 1, (stages, entries, 8)).astype(np.int8)
        rows_pad, cols_pad = pad64(rows), pad64(cols)
        codes = rng.integers(0, entries, (rows_pad, cols_pad // 8, stages)).astype(np.uint8)
        self.codes = pack_codes(codec, codes)
        parts = [self.books[s][codes[..., s]].astype(np.int64) for s in range(stages)]
        self.w = sum(parts).reshape(rows_pad, cols_pad)[:rows]
        scale = rng.random(rows_pad).astype(np.float32)
        self.scale16 = (scale.view(np.uint32) >> 16).astype(np.uint16)
        self.scale = (self.scale16.astype(np.uint32) << 16).view(np.float32)
        self.blob = np.concatenate([self.scale16.view(np.uint8), self.codes])
        ffi, c = lib
        self.c_books = new_books(ffi)
        assert c.rvq_books_set(self.c_books, shape_of(lib, codec),
                               ffi.cast("int8_t *", self.books.ctypes.data))


def shape_of(lib, codec: str):
    return lib[1].rvq_shape_of(SHAPES[codec][0])


@pytest.fixture(scope="module")
def tables(lib):
    return data.tables(*lib)


def product(kernels: data.Kernels, case: Case, x: data.Quantized, index=None, p0=0, p1=None,
            ldy=None) -> np.ndarray:
    """y [n, ldy]; what the kernel does not write stays -1."""
    n = len(x.q) if index is None else len(index)
    y = np.full((n, ldy or case.rows), -1, np.float32)
    kernels.table.rvq_panels(
        case.c_books, kernels.pointer(case.codes, "uint8_t *"),
        kernels.pointer(case.scale16, "uint16_t *"), case.rows, p0,
        pad64(case.rows) // 64 if p1 is None else p1, kernels.batch(x, x.q.shape[1]),
        kernels._indices(index), n, kernels.pointer(y), y.shape[1])
    return y


def activations(rng, cols: int, n: int, extreme: bool) -> data.Quantized:
    blocks = pad64(cols) // 64
    if extreme:
        q = rng.choice([-127, 127], (n, 64 * blocks)).astype(np.int8)
        shift = np.full((n, blocks), 7, np.uint8)
    else:
        q = rng.integers(-127, 128, (n, 64 * blocks)).astype(np.int8)
        shift = rng.integers(rng.integers(0, 8), 8, (n, blocks)).astype(np.uint8)
    q[:, cols:] = 0
    scale = rng.random(n).astype(np.float32)
    return data.Quantized(q, shift, scale, data.shifted_sum(q, shift))


@MODEST
@given(seed=SEEDS, codec=CODECS, rows=st.integers(1, 150), cols=st.integers(1, 300),
       extreme=st.booleans())
def test_rows_follow_the_layout(lib, seed, codec, rows, cols, extreme):
    ffi, c = lib
    case = Case(lib, codec, seed, rows, cols, extreme)
    size = ffi.new("size_t *")
    assert c.codec_matrix_bytes(SHAPES[codec][0], rows, cols, size) and size[0] == len(case.blob)
    assert len(case.blob) == pad64(rows) * (2 + pad64(cols) * SHAPES[codec][4] // 8)
    matrix = ffi.new("struct matrix *")
    c.matrix_bind(matrix, SHAPES[codec][0], rows, cols, ffi.cast("void *", case.blob.ctypes.data))
    matrix.books = case.c_books
    row = np.full(cols + 1, 7, np.float32)
    for r in range(rows):
        c.matrix_row(matrix, r, ffi.cast("float *", row.ctypes.data))
        want = case.scale[r] * case.w[r, :cols].astype(np.float32)
        assert np.array_equal(row[:cols], want) and row[cols] == 7


@MODEST
@given(seed=SEEDS, codec=CODECS, rows=st.integers(1, 200), cols=st.integers(1, 700),
       n=st.integers(1, 11), extreme=st.booleans(), indexed=st.booleans())
def test_products(lib, tables, seed, codec, rows, cols, n, extreme, indexed):
    rng = np.random.default_rng(seed)
    case = Case(lib, codec, seed, rows, cols, extreme)
    x = activations(rng, cols, n, extreme)
    want = data.int8_product(case.w, case.scale[:rows], x)
    index = rng.integers(0, n, rng.integers(1, 12)).astype(np.uint32) if indexed else None
    if indexed:
        want = want[index]
    panels = pad64(rows) // 64
    p0 = int(rng.integers(0, panels))
    p1 = int(rng.integers(p0, panels + 1))
    for kernels in tables:
        y = product(kernels, case, x, index, ldy=rows + 5)
        assert data.same_bits(np.ascontiguousarray(y[:, :rows]), want), kernels.isa
        assert np.all(y[:, rows:] == -1)
        part = product(kernels, case, x, index, p0, p1)
        inside = slice(64 * p0, min(64 * p1, rows))
        assert data.same_bits(np.ascontiguousarray(part[:, inside]),
                              np.ascontiguousarray(want[:, inside])), kernels.isa
        assert np.all(np.delete(part, np.arange(64 * p0, min(64 * p1, rows)), axis=1) == -1)


@pytest.mark.parametrize("codec", SHAPES)
def test_products_are_those_of_int8(lib, tables, codec):
    """Decoded to int8 panels first, the same weights give the same bits."""
    case = Case(lib, codec, 3, 130, 520, False)
    x = activations(np.random.default_rng(4), 520, 70, False)
    panels = data.pack_panels(case.w)
    for kernels in tables:
        assert data.same_bits(product(kernels, case, x),
                              kernels.int8_panels(panels, case.scale, 130, x)), kernels.isa


@pytest.mark.parametrize("shifts", [[7] * 8 + [0] * 12, [7] * 8 + [0] * 13, [7] * 129, [3] * 1037,
                                    [0] + [7] * 16], ids=["bound", "bound+1", "sevens", "threes", "late"])
@pytest.mark.parametrize("codec", SHAPES)
def test_worst_case_sums_never_overflow(lib, tables, codec, shifts):
    """Every weight the largest sum, every activation 127: more than an int32 lane takes."""
    case = Case(lib, codec, 1, 64, 64 * len(shifts), False)
    _, stages, _, limit, _ = SHAPES[codec]
    case.books[:] = limit
    case.w = np.full((64, 64 * len(shifts)), stages * limit, np.int64)
    ffi, c = lib
    assert c.rvq_books_set(case.c_books, shape_of(lib, codec),
                           ffi.cast("int8_t *", case.books.ctypes.data))
    for n in (1, 3, 6):
        q = np.full((n, 64 * len(shifts)), 127, np.int8)
        q[1::2] = -127
        shift = np.tile(np.array(shifts, np.uint8), (n, 1))
        x = data.Quantized(q, shift, np.ones(n, np.float32), data.shifted_sum(q, shift))
        want = data.int8_product(case.w, case.scale[:64], x)
        for kernels in tables:
            assert data.same_bits(product(kernels, case, x), want), kernels.isa


@pytest.mark.parametrize("codec", SHAPES)
def test_entries_are_bounded_so_that_sums_fit(lib, codec):
    ffi, c = lib
    _, stages, entries, limit, _ = SHAPES[codec]
    assert stages * limit <= 127
    books, out = np.zeros((stages, entries, 8), np.int8), new_books(ffi)
    for value, fits in ((limit, True), (-limit, True), (limit + 1, False), (-limit - 1, False)):
        for at in ((0, 0, 0), (stages - 1, entries - 1, 7)):
            books[at] = value
            pointer = ffi.cast("int8_t *", books.ctypes.data)
            assert c.rvq_books_set(out, shape_of(lib, codec), pointer) == fits
            books[at] = 0


def search(kernels: data.Kernels, books: np.ndarray, x: np.ndarray, beam: int, weight=None):
    """codes [n, stages] by the kernel, from float books [stages, entries, 8]."""
    ffi = kernels.ffi
    stages, entries, _ = books.shape
    m = np.ones(8, np.float32) if weight is None else weight
    mix = np.ascontiguousarray((-2 * m * books).transpose(0, 2, 1)).astype(np.float32)
    energy = (m * books.astype(np.float64) ** 2).sum(axis=2).astype(np.float32)
    cross = [2 * (books[t].astype(np.float64) * m) @ books[s].T.astype(np.float64)
             for s in range(1, stages) for t in range(s)]
    cross = np.ascontiguousarray(cross).astype(np.float32)
    codes = np.full((len(x), stages), 255, np.uint8)
    tables = ffi.new("struct rvq_search *", {
        "stages": stages, "entries": entries, "beam": beam, "mix": kernels.pointer(mix),
        "energy": kernels.pointer(energy), "cross": kernels.pointer(cross)})
    kernels.table.rvq_search(tables, kernels.pointer(x), len(x), kernels.pointer(codes, "uint8_t *"))
    return codes


def model_search(books: np.ndarray, x: np.ndarray, beam: int) -> np.ndarray:
    """The beam search in exact arithmetic (integer books and inputs)."""
    stages, entries, _ = books.shape
    found = np.zeros((len(x), stages), np.uint8)
    for i, v in enumerate(x.astype(np.int64)):
        kept = [((v ** 2).sum() * 0, np.zeros(8, np.int64), ())]
        for s in range(stages):
            room = 1 if s == stages - 1 else beam
            sums = np.stack([total + books[s] for _, total, _ in kept])  # [beams, entries, 8]
            key = ((sums ** 2) - 2 * sums * v).sum(axis=2).ravel()
            order = np.argsort(key, kind="stable")[:room]
            kept = [(key[o], sums[o // entries, o % entries], kept[o // entries][2] + (o % entries,))
                    for o in order]
        found[i] = kept[0][2]
    return found


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, codec=CODECS, beam=st.sampled_from([1, 2, 8, 10, 11, 16, 32]), coarse=st.booleans())
def test_search_is_the_beam_search(tables, seed, codec, beam, coarse):
    """Small integers are exact in float32, and full of ties when coarse."""
    rng = np.random.default_rng(seed)
    _, stages, entries, limit, _ = SHAPES[codec]
    most = 1 if coarse else limit
    books = rng.integers(-most, most + 1, (stages, entries, 8)).astype(np.int64)
    x = rng.integers(-2 * most, 2 * most + 1, (6, 8)).astype(np.float32)
    want = model_search(books, x, beam)
    for kernels in tables:
        assert np.array_equal(search(kernels, books, x, beam), want), kernels.isa


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, codec=CODECS, beam=st.integers(1, 32))
def test_search_has_the_same_bits_everywhere(tables, seed, codec, beam):
    rng = np.random.default_rng(seed)
    _, stages, entries, _, _ = SHAPES[codec]
    books = rng.standard_normal((stages, entries, 8)).astype(np.float32)
    x = rng.standard_normal((40, 8)).astype(np.float32) * np.float32(2)
    weight = rng.random(8).astype(np.float32) * (rng.random(8) < 0.8)
    want = search(tables[-1], books, x, beam, weight)
    for kernels in tables[:-1]:
        assert np.array_equal(search(kernels, books, x, beam, weight), want), kernels.isa


def test_search_survives_a_thousand_equal_candidates(tables):
    books = np.zeros((3, 256, 8), np.float32)
    for kernels in tables:
        assert not search(kernels, books, np.ones((3, 8), np.float32), 32).any(), kernels.isa


@pytest.mark.parametrize("codec", SHAPES)
def test_codebook_sets_are_checked(lib, codec):
    ffi, c = lib
    number, stages, entries, limit, _ = SHAPES[codec]
    size = c.codebooks_bytes(number)
    assert size == 64 + stages * entries * 8 and c.codebooks_bytes(4) == 0
    books = np.random.default_rng(1).integers(-limit, limit + 1, (stages, entries, 8)).astype(np.int8)
    good = np.zeros(size, np.uint8)
    c.codebooks_write(number, ffi.cast("int8_t *", books.ctypes.data), 12.5,
                      ffi.cast("void *", good.ctypes.data))

    def read(raw: np.ndarray, repair: bool = False):
        if repair:
            raw[60:64] = 0
            crc = c.crc32c(0, ffi.cast("void *", raw.ctypes.data), size)
            raw[60:64] = np.array([crc], np.uint32).view(np.uint8)
        out, unit, error = new_books(ffi), ffi.new("float *"), ffi.new("hr_error *")
        status = c.codebooks_read(number, ffi.cast("void *", raw.ctypes.data), out, unit, error)
        return status, unit[0], ffi.string(error.detail).decode()

    assert read(good.copy()) == (0, 12.5, "")
    for at in (4, 20, 64, size - 1):
        broken = good.copy()
        broken[at] ^= 1
        assert read(broken)[0] == c.HR_ERR_FORMAT and "CRC32C" in read(broken)[2]
    faults = {"HRCB": (0, 88), "version": (4, 2), "codec number": (6, number + 1),
              "impossible unit": (11, 0xFF), "must be zero": (12, 1), "beyond": (64, 127)}
    for words, (at, value) in faults.items():
        broken = good.copy()
        broken[at] = value
        status, _, detail = read(broken, repair=True)
        assert status == c.HR_ERR_FORMAT and words in detail, (words, detail)
