"""Random weights as they lie in a container, faster than a disk takes them.

A few panels of 64 rows are drawn and encoded for every width; matrices are put together from them
in random order. Statistics, layouts and arithmetic are those of encoded normal weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..convert import four_bit
from ..convert.families import TensorSpec
from ..convert.library import quantizer
from ..convert.quantise import PANEL, RVQ_BITS, encode_block, matrix_bytes, round_up

PANELS = 16
"""Different panels of a matrix pool, at most."""
BLOCK = 64
"""Columns of a block that panels of a mosaic are put together from."""
_WEIGHTS = 4 << 20
"""Encoded of each pool and mosaic, unless that were too few rows or variants."""


class Books:
    """Codebooks of normal weights, one set a codec: rows are scaled before they are looked up."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sets: dict[str, np.ndarray] = {}

    def of(self, codec: str) -> np.ndarray:
        """The set of `codec`, uint8."""
        if codec not in self._sets:
            rng = np.random.default_rng([self._seed, 0x626F6F6B])
            sample = rng.standard_normal((512, 1024), np.float32)
            self._sets[codec] = quantizer(codec, "greedy").fit(sample)
        return self._sets[codec]


class MatrixPool:
    """Encoded random matrices with `cols` columns whose weights have standard deviation `std`."""

    def __init__(
        self, codec: str, cols: int, std: float, rng: np.random.Generator, books: Books
    ) -> None:
        self.codec, self.cols, self.std = codec, cols, np.float32(std)
        self._books = books
        self._panels = max(4, min(PANELS, _WEIGHTS // (PANEL * cols)))
        self._whole = self._encoded(self._panels * PANEL, rng)

    def _encoded(self, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(head, body) uint8 [panels, bytes] of `rows` fresh rows, the last panel maybe short.

        A blob is all heads, then all bodies: the scales before the panels (int8, rvq); a codec
        without scales in front has heads of no bytes.
        """
        panels = round_up(rows, PANEL) // PANEL
        values = rng.standard_normal((rows, self.cols), np.float32) * self.std
        nbytes = matrix_bytes(self.codec, rows, self.cols)
        blob = np.zeros(nbytes, np.uint8)
        if self.codec in RVQ_BITS:
            encoder = quantizer(self.codec, "greedy")
            blob = encoder.encode(values, self._books.of(self.codec))
        else:
            for offset, data in encode_block(self.codec, values, 0, rows):
                blob[offset : offset + data.size] = data
        scale = {"int8": 4}.get(self.codec, 2 if self.codec in RVQ_BITS else 0)
        head = blob[: panels * PANEL * scale].reshape(panels, -1)
        if self.codec in ("bf16", "f32"):
            width = nbytes // rows
            body = np.zeros((panels, PANEL * width), np.uint8)
            body.reshape(-1)[: blob.size] = blob
            return head, body
        return head, blob[head.size :].reshape(panels, -1)

    def matrix(self, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """A fresh matrix of `rows` rows: what lies one behind the other, most of it the pool's own memory."""
        full, rest = divmod(rows, PANEL)
        chosen = rng.integers(0, self._panels, full)
        heads, bodies = self._whole
        tail = self._encoded(rest, rng) if rest else None
        size = matrix_bytes(self.codec, rows, self.cols)
        pieces = [heads[chosen].reshape(-1)]
        if tail is not None:
            pieces.append(tail[0].reshape(-1))
        pieces.extend(bodies[number] for number in chosen)
        if tail is not None:
            pieces.append(tail[1][0][: size - sum(piece.size for piece in pieces)])
        return pieces


class Mosaic:
    """A panel of encoded rows in several variants. Each panel of a matrix takes every block of columns
    from one of them, so that hardly two rows are the same and nearly nothing has to be encoded.

    values: float32 [rows of a panel, variants, columns].
    """

    def __init__(self, codec: str, values: np.ndarray) -> None:
        self.rows, self.variants, self.cols = values.shape
        self.blocks = round_up(self.cols, BLOCK) // BLOCK
        wide = np.zeros((self.rows, self.variants, self.blocks * BLOCK), np.float32)
        wide[..., : self.cols] = values
        wide = wide.reshape(self.rows, -1)
        blob = np.zeros(matrix_bytes(codec, self.rows, wide.shape[1]), np.uint8)
        for offset, data in encode_block(codec, wide, 0, self.rows):
            blob[offset : offset + data.size] = data
        tiles = self.variants * self.blocks
        self.scales = blob[: PANEL * 4 if codec == "int8" else 0]
        """What lies in front of all panels."""
        self._lines = 1
        if codec in four_bit.TABLES:
            split = wide.shape[1] // four_bit.GROUP * PANEL * four_bit.scale_bytes(codec)
            self._sections = [blob[:split].reshape(tiles, -1), blob[split:].reshape(tiles, -1)]
        elif codec == "int8":
            self._sections = [blob[self.scales.size :].reshape(tiles, -1)]
        else:
            self._lines = self.rows
            self._sections = [blob.reshape(self.rows * tiles, -1)]
        self._width = self.cols * blob.size // wide.size if self._lines > 1 else 0

    def panels(self, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """What lies one behind the other, uint8; each valid until the next is asked for."""
        lines = np.arange(self._lines)[:, None] * (self.variants * self.blocks)
        made = [
            np.empty((self._lines, self.blocks, section.shape[1]), np.uint8)
            for section in self._sections
        ]
        for chosen in rng.integers(0, self.variants, (count, self.blocks)):
            tiles = lines + (chosen * self.blocks + np.arange(self.blocks))
            for section, out in zip(self._sections, made, strict=True):
                np.take(section, tiles, axis=0, out=out, mode="clip")  # "raise" would gather elsewhere first
                yield out.reshape(self._lines, -1)[:, : self._width or None]


def variants_of(cols: int) -> int:
    """Of a mosaic with so many columns."""
    return max(16, min(256, _WEIGHTS // (PANEL * cols)))


def copy_pieces(pieces: list[np.ndarray], out: np.ndarray) -> None:
    """Into `out`, uint8 that is at least as long."""
    at = 0
    for piece in pieces:
        out[at : at + piece.size] = piece
        at += piece.size


_OUTPUTS = (
    "attn.o", "mla.o", "delta.out", "shared.down", "ffn.down", "moe.latent_up",
)  # fmt: skip
"""Matrices whose result is added to the residual stream."""


OUTPUT = 0.5
"""What a part adds to the residual stream, beside the embedding's 1 (root mean squares)."""


def expert_gain(part: Mapping[str, object]) -> float:
    """Deviation of down times the root of its columns, so that the experts' sum is like OUTPUT.

    Products of silu(g) and u of unit normal g, u have a root mean square of about 0.6. The root of
    the summed squares of mixing weights is about 0.46 for a softmax; a sigmoid router's weights are
    nearly equal, and their sum is the scaling, or that times top_k.
    """
    gain = OUTPUT / 0.6
    if part["router"] != "sigmoid":
        return gain
    top_k, scaling = float(part["top_k"]), float(part["scaling"])  # type: ignore[arg-type]
    total = scaling if part["renormalize"] else scaling * top_k
    return gain * 0.46 * np.sqrt(top_k) / total


def deviation(name: str, cols: int) -> float:
    """Standard deviation of a trunk matrix: its product with inputs of mean square 1 has about 1."""
    gain = OUTPUT if name.endswith(_OUTPUTS) else 1.0
    if name == "head":
        gain = 2.0  # logits of standard deviation 2
    return gain / np.sqrt(cols)


def small_tensor(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """A vector, or a matrix that no codec is asked for; float32 [rows or 1, cols], f64 constants."""
    name, shape = spec.name.rsplit(".", 1)[-1], (max(1, spec.rows), spec.cols)
    if spec.kind == "f64":
        return np.array([spec.constant], np.float64)
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name == "a_log":
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if name == "dt_bias":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)  # softplus gives the step
    if name == "conv":
        return rng.uniform(-0.5, 0.5, shape).astype(np.float32)
    if spec.rows:
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(spec.cols))
    return np.zeros(shape, np.float32)  # biases, sinks, residual mixes
