"""Quantisation for converters: matrices to and from the blobs of a container.

    from headrace.quant import Quantizer

    quantizer = Quantizer("rvq4x64", effort="high")
    books = quantizer.fit(sample_rows)          # float32 [rows, cols]
    blob = quantizer.encode(w, books)           # uint8, as formats/codecs.md lays it out
    print(quantizer.sqnr(w, blob, books))       # dB

Everything is computed by the C library; results have the same bits for every thread count and ISA.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _abi
from .errors import UsageError, check

EFFORTS = {"greedy": _abi.HR_EFFORT_GREEDY, "default": _abi.HR_EFFORT_DEFAULT,
           "high": _abi.HR_EFFORT_HIGH}


class Quantizer:
    """One codec with its settings. Holds no state: any thread may use it.

    Arguments:
        codec: a name from formats/codecs.md; the rvq ones need the codebooks that `fit` makes.
        effort: "greedy" (the baseline), "default" or "high"; rvq only.
        beam: candidates kept between stages, at most 32; 0 = by effort.
        threads: 0 = the physical cores available.
        seed: of the first guess of `fit`.
        isa: "auto", or one that `headrace info` names.
    """

    def __init__(self, codec: str = "rvq4x64", *, effort: str = "default", beam: int = 0,
                 threads: int = 0, seed: int = 0, isa: str = "auto") -> None:
        if effort not in EFFORTS:
            raise UsageError(f"effort is {effort!r}, not one of {', '.join(EFFORTS)}",
                             _abi.HR_ERR_USAGE)
        self.codec = codec
        self._params = _abi.hr_quant_params()
        _abi.library().hr_quant_params_init(self._params)
        for field, text in (("codec", codec), ("isa", isa)):
            raw = text.encode()
            if len(raw) > 15:
                raise UsageError(f"there is no {field} {text!r}", _abi.HR_ERR_USAGE)
            setattr(self._params, field, raw)
        self._params.effort, self._params.beam = EFFORTS[effort], beam
        self._params.threads, self._params.seed = threads, seed
        self.blob_bytes(1, 1)  # the settings are checked here, not at the first matrix

    def _call(self, name: str, *arguments: object) -> None:
        error = _abi.hr_error()
        check(getattr(_abi.library(), name)(self._params, *arguments, error), error)

    def _sizes(self, rows: int, cols: int) -> tuple[int, int]:
        blob, books = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("hr_quant_bytes", rows, cols, blob, books)
        return blob.value, books.value

    def blob_bytes(self, rows: int, cols: int) -> int:
        """Bytes of an encoded matrix [rows, cols]."""
        return self._sizes(rows, cols)[0]

    @property
    def books_bytes(self) -> int:
        """Bytes of a set of codebooks; 0 for a codec without."""
        return self._sizes(1, 1)[1]

    def fit(self, samples: ArrayLike) -> NDArray[np.uint8]:
        """Codebooks for matrices like `samples`, float32 [rows, cols]: rows drawn from them.

        65,536 sub-vectors of 8 weights or more are advisable.
        Raises NumericError naming the first weight that is NaN or infinite.
        """
        w = _matrix(samples)
        books = np.zeros(self.books_bytes, np.uint8)
        self._call("hr_quant_fit", _floats(w), *w.shape, books.ctypes.data)
        return books

    def encode(self, weights: ArrayLike, books: NDArray[np.uint8] | None = None,
               importance: ArrayLike | None = None) -> NDArray[np.uint8]:
        """The blob of `weights`, float32 [rows, cols].

        `importance`, [cols], finite and not negative, weighs the squared error of each input.
        Raises NumericError naming the first weight that is NaN or infinite, FormatError when the
        codebooks are damaged or of another codec.
        """
        w = _matrix(weights)
        scale = _importance(importance, w.shape[1])
        blob = np.zeros(self.blob_bytes(*w.shape), np.uint8)
        self._call("hr_quant_encode", self._books(books), _floats(w), *w.shape, _floats(scale),
                   blob.ctypes.data)
        return blob

    def moments(self, inputs: ArrayLike, damping: float = 0.1) -> NDArray[np.uint8]:
        """What `encode_feedback` needs to know of a matrix's inputs.

        Arguments:
            inputs: float32 [n, cols], a row for every input seen, each counting by its own size.
            damping: share of the inputs' mean square that is added to that of each: the less is
                known, the more is wanted. 0.1 where n is many times cols.
        Raises NumericError naming the first number that is NaN or infinite.
        """
        x = _matrix(inputs)
        out = np.zeros(_abi.library().hr_quant_moments_bytes(x.shape[1]), np.uint8)
        self._call("hr_quant_moments", _floats(x), *x.shape, damping, out.ctypes.data)
        return out

    def encode_feedback(self, weights: ArrayLike, books: NDArray[np.uint8],
                        moments: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """As `encode` for rvq codecs, but what is kept small is the error of products with inputs
        like those that `moments` was made of: later weights of a row make up for earlier ones."""
        w = _matrix(weights)
        expected = _abi.library().hr_quant_moments_bytes(w.shape[1])
        if moments.dtype != np.uint8 or not moments.flags.c_contiguous or moments.size != expected:
            raise UsageError(f"the moments of {w.shape[1]} inputs are {expected} contiguous bytes, "
                             f"not {moments.size} of {moments.dtype}", _abi.HR_ERR_USAGE)
        blob = np.zeros(self.blob_bytes(*w.shape), np.uint8)
        self._call("hr_quant_encode_feedback", self._books(books), _floats(w), *w.shape,
                   moments.ctypes.data, blob.ctypes.data)
        return blob

    def decode(self, blob: NDArray[np.uint8], rows: int, cols: int,
               books: NDArray[np.uint8] | None = None) -> NDArray[np.float32]:
        """The weights [rows, cols] that a blob stands for."""
        w = np.zeros((rows, cols), np.float32)
        data = self._blob(blob, rows, cols)
        self._call("hr_quant_decode", self._books(books), data.ctypes.data, rows, cols, _floats(w))
        return w

    def error(self, weights: ArrayLike, blob: NDArray[np.uint8],
              books: NDArray[np.uint8] | None = None,
              importance: ArrayLike | None = None) -> tuple[float, float]:
        """Sums over the matrix of m w^2 and m (w - decoded)^2; m is the importance, or 1."""
        w = _matrix(weights)
        scale = _importance(importance, w.shape[1])
        data = self._blob(blob, *w.shape)
        signal, noise = ctypes.c_double(), ctypes.c_double()
        self._call("hr_quant_error", self._books(books), data.ctypes.data, _floats(w), *w.shape,
                   _floats(scale), signal, noise)
        return signal.value, noise.value

    def sqnr(self, weights: ArrayLike, blob: NDArray[np.uint8],
             books: NDArray[np.uint8] | None = None, importance: ArrayLike | None = None) -> float:
        """Signal to quantisation noise in dB; infinite when nothing is lost."""
        signal, noise = self.error(weights, blob, books, importance)
        return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf

    def _books(self, books: NDArray[np.uint8] | None) -> int | None:
        if books is None:
            return None
        if books.dtype != np.uint8 or not books.flags.c_contiguous or books.size != self.books_bytes:
            raise UsageError(f"the codebooks of {self.codec} are {self.books_bytes} contiguous bytes, "
                             f"not {books.size} of {books.dtype}", _abi.HR_ERR_USAGE)
        return books.ctypes.data

    def _blob(self, blob: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.uint8]:
        expected = self.blob_bytes(rows, cols)
        if blob.dtype != np.uint8 or blob.size != expected:
            raise UsageError(f"a {self.codec} matrix [{rows}, {cols}] has {expected} bytes, "
                             f"not {blob.size} of {blob.dtype}", _abi.HR_ERR_USAGE)
        if blob.flags.c_contiguous and blob.ctypes.data % 8 == 0:
            return blob
        aligned = np.empty(expected, np.uint8)
        aligned[:] = blob
        return aligned


def _matrix(weights: ArrayLike) -> NDArray[np.float32]:
    w = np.ascontiguousarray(weights, dtype=np.float32)
    if w.ndim != 2:
        raise UsageError(f"weights have the shape {w.shape}, not [rows, cols]", _abi.HR_ERR_USAGE)
    return w


def _importance(importance: ArrayLike | None, cols: int) -> NDArray[np.float32] | None:
    if importance is None:
        return None
    m = np.ascontiguousarray(importance, dtype=np.float32)
    if m.shape != (cols,):
        raise UsageError(f"importance has the shape {m.shape}, not [{cols}]", _abi.HR_ERR_USAGE)
    return m


def _floats(array: NDArray[np.float32] | None) -> object:
    return None if array is None else array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
