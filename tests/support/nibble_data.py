"""NumPy models of the 4-bit codecs: tables, blobs, products (formats/codecs.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from support.kernel_data import Kernels, Quantized, Quantized22

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
INT4 = np.arange(-8, 8, dtype=np.int8)
NL4 = np.array([-30, -22, -17, -13, -9, -6, -3, 0, 2, 5, 8, 11, 15, 19, 24, 30], np.int8)
TABLES = {"mxfp4": MXFP4, "int4": INT4, "nl4": NL4}
GROUP = 32


def padded(n: int) -> int:
    return -(-n // 64) * 64


@dataclass
class Blob:
    """codes [R, C] of padded sizes, and their scales [R, C / 32]: bfloat16 bits, or exponents."""

    codec: str
    rows: int
    cols: int
    codes: U8
    scales: NDArray[np.uint16] | U8

    @property
    def table(self) -> NDArray[np.int8]:
        return TABLES[self.codec]

    def pack(self) -> U8:
        """The bytes [panels, bytes of a panel]."""
        panels, groups = len(self.codes) // 64, self.codes.shape[1] // GROUP
        scales = self.scales.reshape(panels, 64, groups).transpose(0, 2, 1)
        scales = np.ascontiguousarray(scales).view(np.uint8).reshape(panels, -1)
        # [panel, row, group, half, step, input of 4] -> [panel, group, step, row, input]
        split = self.codes.reshape(panels, 64, groups, 2, 4, 4).transpose(0, 2, 4, 1, 5, 3)
        nibbles = (split[..., 0] | split[..., 1] << 4).reshape(panels, -1)
        return np.ascontiguousarray(np.concatenate([scales, nibbles], axis=1))

    def weights(self) -> F32:
        """float32 [rows, cols]"""
        wide = self.table[self.codes].astype(np.float32)
        if self.codec == "mxfp4":
            exponent = np.repeat(self.scales.astype(np.int32), GROUP, axis=1) - 128
            out = np.ldexp(wide, exponent).astype(np.float32)
        else:
            out = wide * np.repeat(bf16_values(self.scales), GROUP, axis=1)
        return np.ascontiguousarray(out[: self.rows, : self.cols])


def unpack(codec: str, rows: int, cols: int, blob: U8) -> Blob:
    """The inverse of pack, by loops over the rules of the format."""
    r, c = padded(rows), padded(cols)
    size, dtype = (1, np.uint8) if codec == "mxfp4" else (2, np.uint16)
    codes, scales = np.zeros((r, c), np.uint8), np.zeros((r, c // GROUP), dtype)
    panels = blob.reshape(r // 64, -1)
    for row in range(r):
        panel, lane = panels[row // 64], row % 64
        head = c // GROUP * 64 * size
        scales[row] = panel[:head].view(dtype).reshape(-1, 64)[:, lane]
        for col in range(c):
            k = col % GROUP
            byte = panel[head + col // GROUP * 1024 + k % 16 // 4 * 256 + lane * 4 + k % 4]
            codes[row, col] = byte >> 4 if k >= 16 else byte & 15
    return Blob(codec, rows, cols, codes, scales)


def bf16_values(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c rounded once, for products that are exact in float64 (to odd, then to float32)."""
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    toward_zero = (error > 0) != (total > 0)
    bits = np.where(inexact, np.where(toward_zero, bits - 1, bits + 1), bits)
    return bits.view(np.float64).astype(np.float32)


def group_sums(blob: Blob, x: Quantized) -> NDArray[np.int64]:
    """Exact [n, rows, groups], without the shifts."""
    w = blob.table[blob.codes[: blob.rows]].astype(np.int64).reshape(blob.rows, -1, GROUP)
    return np.einsum("rgk,ngk->nrg", w, x.q.astype(np.int64).reshape(len(x.q), -1, GROUP))


def product(blob: Blob, x: Quantized) -> F32:
    """y [n, rows]"""
    sums = group_sums(blob, x)
    shift = np.repeat(x.shift.astype(np.int64), 2, axis=1)[:, None, :]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if blob.codec != "mxfp4":
            scales = bf16_values(blob.scales[: blob.rows])
            total = np.zeros(sums.shape[:2], np.float32)
            shifted = (sums << shift).astype(np.float32)
            for g in range(sums.shape[2]):
                total = fma(shifted[:, :, g], np.broadcast_to(scales[:, g], total.shape), total)
            return total * x.scale[:, None]
        e = blob.scales[: blob.rows].astype(np.int64)
        top = e.max(axis=1)
        base = np.maximum(e.min(axis=1), top - 25)
        delta = e - base[:, None]
        exact = np.where(delta < 0, 0, sums << (shift + np.maximum(delta, 0))).sum(axis=2)
        power = np.where(top < 255, np.ldexp(np.float32(1), base - 128), np.float32(np.nan))
        return exact.astype(np.float32) * power.astype(np.float32) * x.scale[:, None]


def fine_spread(groups: int) -> int:
    """How far below the row's largest exponent a group still counts, with 22-bit activations."""
    return min(25, 33 - (groups - 1).bit_length())


def fine_product(blob: Blob, x: Quantized22) -> F32:
    """y [n, rows] of mxfp4 with 22-bit activations. Exact sums of any size are Python integers."""
    w = blob.table[blob.codes[: blob.rows]].astype(np.int64).reshape(blob.rows, -1, GROUP)
    sums = np.einsum("rgk,ngk->nrg", w, x.values.reshape(len(x.hi), -1, GROUP))
    e = blob.scales[: blob.rows].astype(np.int64)
    top = e.max(axis=1)
    base = np.maximum(e.min(axis=1), top - fine_spread(e.shape[1]))
    delta = e - base[:, None]
    total = np.where(delta < 0, 0, sums << np.maximum(delta, 0)).sum(axis=2)
    power = np.where(top < 255, np.ldexp(np.float32(1), base - 128), np.float32(np.nan))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return total.astype(np.float32) * power.astype(np.float32) * x.scale[:, None]


def run(kernels: Kernels, blob: Blob, x: Quantized | Quantized22, index=None, p0=0, p1=None,
        ldy=None) -> F32:
    """y [n, ldy] of the codec's kernel; elements that it does not write stay -1."""
    panels = blob.pack()
    n = len(x.scale) if index is None else len(index)
    y = np.full((n, ldy or blob.rows), -1, np.float32)
    if isinstance(x, Quantized22):
        call, batch = kernels.table.mxfp4_panels22, kernels.batch22(x, x.hi.shape[1])
    else:
        call = kernels.table.mxfp4_panels if blob.codec == "mxfp4" else kernels.table.nibble_panels
        batch = kernels.batch(x, x.q.shape[1])
    call(kernels.pointer(panels, "uint8_t *"), kernels.pointer(blob.table, "int8_t *"), blob.rows,
         p0, len(panels) if p1 is None else p1, batch,
         kernels.pointer(index, "uint32_t *"), n, kernels.pointer(y), y.shape[1])
    return y
