"""Random inputs for the kernels, and NumPy models of the integer products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

FLAVOURS = ("normal", "zeros", "subnormal", "huge", "mixed", "signed_zero")
SMALLEST_TOKEN = np.float32(2.0**-100)


def floats(rng: np.random.Generator, shape: int | tuple[int, ...], flavour: str) -> F32:
    """float32 values of `shape`; `flavour` is one of FLAVOURS. No NaN, no infinity."""
    x = rng.standard_normal(shape)
    if flavour == "zeros":
        x *= 0
    elif flavour == "subnormal":
        x *= 1e-40
    elif flavour == "huge":
        x *= 1e30
    elif flavour == "mixed":
        x *= 10.0 ** rng.integers(-30, 30, np.shape(x))
    elif flavour == "signed_zero":
        x = np.where(rng.random(np.shape(x)) < 0.5, -0.0, np.where(x > 1, x, 0.0))
    return x.astype(np.float32)


def same_bits(a: F32, b: F32) -> bool:
    """True when every element has the same bits; any NaN equals any NaN."""
    equal = a.view(np.uint32) == b.view(np.uint32)
    return bool(np.all(equal | (np.isnan(a) & np.isnan(b))))


def pack_panels(w: I64) -> NDArray[np.uint8]:
    """w [rows, cols] in [-127, 127] -> panel bytes [rows/64][cols/4][64][4], padded with w = 0."""
    rows, cols = w.shape
    padded = np.full((-(-rows // 64) * 64, -(-cols // 64) * 64), 128, np.uint8)
    padded[:rows, :cols] = w + 128
    r, c = padded.shape
    return np.ascontiguousarray(padded.reshape(r // 64, 64, c // 4, 4).transpose(0, 2, 1, 3))


@dataclass
class Quantized:
    """Activations of n tokens: q [n, k_pad] int8, shift [n, k_pad/64], scale [n], sum [n], and
    offset [n, k_pad/32] int32, which follows from q unless it is given."""

    q: NDArray[np.int8]
    shift: NDArray[np.uint8]
    scale: F32
    sum: I64
    offset: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if self.offset is None:
            self.offset = group_offsets(self.q)


def group_offsets(q: NDArray[np.integer]) -> NDArray[np.int32]:
    """-32 * the sum of every 32 inputs, modulo 2^32."""
    sums = q.reshape(len(q), -1, 32).astype(np.int64).sum(axis=2)
    return np.ascontiguousarray((-32 * sums).astype(np.uint64).astype(np.uint32)).view(np.int32)


def shifted_sum(q: NDArray[np.int8], shift: NDArray[np.uint8]) -> I64:
    """sum_b 2^shift[b] * sum(q of block b), per token."""
    blocks = q.reshape(len(q), -1, 64).astype(np.int64).sum(axis=2)
    return (blocks << shift.astype(np.int64)).sum(axis=1)


def quantize(x: F32) -> Quantized:
    """Model of the activation quantiser for x [n, k]: formats/codecs.md and kernels.h."""
    n, k = x.shape
    k_pad = -(-k // 64) * 64
    q = np.zeros((n, k_pad), np.int8)
    shift = np.zeros((n, k_pad // 64), np.uint8)
    scale = np.zeros(n, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        for t in range(n):
            largest = np.abs(x[t]).max(initial=np.float32(0))
            if largest < SMALLEST_TOKEN:
                continue
            scale[t] = np.float32(largest / np.float32(127)) * np.float32(2.0**-7)
            for b in range(k_pad // 64):
                block = x[t, 64 * b : 64 * b + 64]
                peak = np.abs(block).max(initial=np.float32(0))
                s = next(s for s in range(8) if peak * np.float32(2.0 ** (7 - s)) <= largest)
                unit = np.float32(127) / largest * np.float32(2.0 ** (7 - s))
                q[t, 64 * b : 64 * b + len(block)] = np.clip(np.rint(block * unit), -127, 127)
                shift[t, b] = s
    return Quantized(q, shift, scale, shifted_sum(q, shift))


def quantize15(x: F32) -> tuple[I64, F32]:
    """Model of the 15-bit quantiser for x [n, k]: v [n, k] and scale [n]."""
    v = np.zeros(x.shape, np.int64)
    scale = np.zeros(len(x), np.float32)
    for t, row in enumerate(x):
        largest = np.abs(row).max(initial=np.float32(0))
        if largest < SMALLEST_TOKEN:
            continue
        v[t] = np.rint(row * (np.float32(16256) / largest)).astype(np.int64)
        scale[t] = largest / np.float32(16256)
    return v, scale


@dataclass
class Quantized22:
    """22-bit activations of n tokens: digits hi, mid, lo [n, k_pad] int8, scale [n], offset
    [n, k_pad/32] int32."""

    hi: NDArray[np.int8]
    mid: NDArray[np.int8]
    lo: NDArray[np.int8]
    scale: F32
    offset: NDArray[np.int32]

    @property
    def values(self) -> I64:
        """v [n, k_pad]"""
        hi, mid, lo = (a.astype(np.int64) for a in (self.hi, self.mid, self.lo))
        return (hi << 14) + (mid << 7) + lo


def from_values22(v: I64, scale: F32) -> Quantized22:
    """v [n, k_pad], |v| <= 127 * 2^14 -> its digits."""
    lo = ((v + 64) & 127) - 64
    rest = (v - lo) >> 7
    mid = ((rest + 64) & 127) - 64
    hi = (rest - mid) >> 7
    digits = (np.ascontiguousarray(a.astype(np.int8)) for a in (hi, mid, lo))
    return Quantized22(*digits, scale, group_offsets(v))


def quantize22(x: F32) -> Quantized22:
    """Model of the 22-bit quantiser for x [n, k]."""
    v = np.zeros((len(x), -(-x.shape[1] // 64) * 64), np.int64)
    scale = np.zeros(len(x), np.float32)
    for t, row in enumerate(x):
        largest = np.abs(row).max(initial=np.float32(0))
        if largest < SMALLEST_TOKEN:
            continue
        v[t, : len(row)] = np.rint(row * (np.float32(2080768) / largest)).astype(np.int64)
        scale[t] = largest / np.float32(2080768)
    return from_values22(np.clip(v, -2080768, 2080768), scale)


def int8_product(w: I64, row_scale: F32, x: Quantized) -> F32:
    """y [n, rows] of exact integers, rounded once, times row scale, times token scale."""
    rows, k = w.shape
    padded = np.zeros((rows, x.q.shape[1]), np.int64)
    padded[:, :k] = w
    weighted = x.q.astype(np.int64) << np.repeat(x.shift.astype(np.int64), 64, axis=1)
    exact = weighted @ padded.T
    with np.errstate(over="ignore", under="ignore"):
        return exact.astype(np.float32) * row_scale[None, :] * x.scale[:, None]


def int8_product15(w: I64, row_scale: F32, v: I64, scale: F32) -> F32:
    """y [n, rows] for 15-bit activations v [n, k]."""
    with np.errstate(over="ignore", under="ignore"):
        return (v @ w.T).astype(np.float32) * row_scale[None, :] * scale[:, None]


class Kernels:
    """Calls of one table with NumPy arrays. Arrays must be C-contiguous."""

    def __init__(self, ffi, table) -> None:
        self.ffi, self.table = ffi, table
        self.isa: str = ffi.string(table.isa).decode()

    def pointer(self, array: NDArray | None, ctype: str = "float *"):
        if array is None:
            return self.ffi.NULL
        assert array.flags.c_contiguous
        return self.ffi.cast(ctype, array.ctypes.data)

    def _indices(self, index: NDArray[np.uint32] | None):
        return self.pointer(index, "uint32_t *")

    def elementwise(self, name: str, *arrays: F32) -> F32:
        """y = name(arrays...) for exp, sigmoid, softplus, silu, silu_mul."""
        y = np.full(arrays[0].shape, 7, np.float32)
        getattr(self.table, name)(self.pointer(y), *map(self.pointer, arrays), y.size)
        return y

    def batch(self, x: Quantized, k: int):
        """A struct qbatch over the arrays of `x`, which must outlive it."""
        return self.ffi.new("struct qbatch *", {
            "q": self.pointer(x.q, "int8_t *"), "shift": self.pointer(x.shift, "uint8_t *"),
            "scale": self.pointer(x.scale), "sum": self.pointer(x.sum, "int64_t *"),
            "offset": self.pointer(x.offset, "int32_t *"), "k": k, "k_pad": x.q.shape[1]})

    def quantize(self, x: F32) -> Quantized:
        n, k = x.shape
        k_pad = -(-k // 64) * 64
        out = Quantized(np.full((n, k_pad), 99, np.int8), np.full((n, k_pad // 64), 99, np.uint8),
                        np.full(n, 99, np.float32), np.full(n, 99, np.int64),
                        np.full((n, k_pad // 32), 99, np.int32))
        batch = self.batch(out, k)
        for t in range(n):
            self.table.quantize(self.pointer(x[t]), batch, t)
        return out

    def quantize15(self, x: F32) -> tuple[NDArray[np.int8], NDArray[np.int8], F32, I64]:
        """hi, lo [n, k_pad], scale [n], sum [n]"""
        n, k = x.shape
        k_pad = -(-k // 64) * 64
        hi, lo = np.full((2, n, k_pad), 99, np.int8)
        scale, total = np.full(n, 99, np.float32), np.full(n, 99, np.int64)
        batch = self._batch15(hi, lo, scale, total, k)
        for t in range(n):
            self.table.quantize15(self.pointer(x[t]), batch, t)
        return hi, lo, scale, total

    def _batch15(self, hi, lo, scale, total, k):
        return self.ffi.new("struct qbatch15 *", {
            "hi": self.pointer(hi, "int8_t *"), "lo": self.pointer(lo, "int8_t *"),
            "scale": self.pointer(scale), "sum": self.pointer(total, "int64_t *"),
            "k": k, "k_pad": hi.shape[1]})

    def batch22(self, x: Quantized22, k: int):
        """A struct qbatch22 over the arrays of `x`, which must outlive it."""
        return self.ffi.new("struct qbatch22 *", {
            "hi": self.pointer(x.hi, "int8_t *"), "mid": self.pointer(x.mid, "int8_t *"),
            "lo": self.pointer(x.lo, "int8_t *"), "scale": self.pointer(x.scale),
            "offset": self.pointer(x.offset, "int32_t *"), "k": k, "k_pad": x.hi.shape[1]})

    def quantize22(self, x: F32) -> Quantized22:
        n, k = x.shape
        k_pad = -(-k // 64) * 64
        digits = (np.full((n, k_pad), 99, np.int8) for _ in range(3))
        out = Quantized22(*digits, np.full(n, 99, np.float32), np.full((n, k_pad // 32), 99, np.int32))
        batch = self.batch22(out, k)
        for t in range(n):
            self.table.quantize22(self.pointer(x[t]), batch, t)
        return out

    def int8_panels(self, panels, row_scale, rows, x: Quantized, index=None, p0=0, p1=None,
                    ldy=None) -> F32:
        """y [n, ldy]; elements that the kernel does not write stay -1."""
        n = len(x.q) if index is None else len(index)
        y = np.full((n, ldy or rows), -1, np.float32)
        self.table.int8_panels(
            self.pointer(panels, "uint8_t *"), self.pointer(row_scale), rows, p0,
            len(panels) if p1 is None else p1, self.batch(x, x.q.shape[1]),
            self._indices(index), n, self.pointer(y), y.shape[1])
        return y

    def int8_panels15(self, panels, row_scale, rows, quantized, index=None, ldy=None) -> F32:
        hi, lo, scale, total = quantized
        n = len(hi) if index is None else len(index)
        y = np.full((n, ldy or rows), -1, np.float32)
        self.table.int8_panels15(
            self.pointer(panels, "uint8_t *"), self.pointer(row_scale), rows, 0, len(panels),
            self._batch15(hi, lo, scale, total, hi.shape[1]), self._indices(index), n,
            self.pointer(y), y.shape[1])
        return y

    def rows(self, w: NDArray, x: F32, index=None, r0=0, r1=None, ldy=None) -> F32:
        """f32_rows or bf16_rows by the type of w [rows, k]; x [m, ldx]."""
        rows, k = w.shape
        name, ctype = ("f32_rows", "float *") if w.dtype == np.float32 else (
            "bf16_rows", "uint16_t *")
        n = len(x) if index is None else len(index)
        y = np.full((n, ldy or rows), -1, np.float32)
        getattr(self.table, name)(
            self.pointer(w, ctype), k, r0, rows if r1 is None else r1, self.pointer(x), x.shape[1],
            self._indices(index), n, self.pointer(y), y.shape[1])
        return y


def tables(ffi, c) -> list[Kernels]:
    """Every table that can run here, the reference last."""
    names, found = c.kernels_available(), []
    while names[len(found)] != ffi.NULL:
        found.append(Kernels(ffi, c.kernels_find(names[len(found)])))
    assert found and found[-1].isa == "reference"
    return found
