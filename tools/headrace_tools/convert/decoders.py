"""Exact decoding of quantised source tensors to float32, by ranges of rows.

A coding says which stored tensors together hold one logical matrix (or stack of matrices)
[..., rows, cols] and decodes rows of it. Every decoded value is the exact product of the stored
number and its scale, or that product correctly rounded to float32.

Sources of the layouts: the OCP Microscaling specification (MXFP4: E2M1 numbers, one E8M0 scale
for 32), the compressed-tensors format descriptions, the DeepSeek-V3 release notes (FP8 blocks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .errors import EXIT_BAD_INPUT, ConvertError
from .safetensors_source import FLOAT_DTYPES, Checkpoint, TensorEntry

MX_GROUP = 32
"""Numbers that share one scale in the microscaling formats."""

FLOATS = tuple(FLOAT_DTYPES)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A stored tensor that must be there (or may, when optional): shape and allowed dtypes."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Coding(Protocol):
    """How stored tensors become the logical tensor `shape`, named after its main tensor."""

    @property
    def exact_bf16(self) -> bool:
        """Every decoded value is a bf16 number."""

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[SourceTensor, ...]: ...

    def rows(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], first: int, count: int
    ) -> np.ndarray:
        """Rows first..first+count of the tensor seen as [product of the rest, cols], float32.
        NaN and Inf are passed on. Raises ConvertError on an I/O error or an impossible code."""


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, rows, cols) of a stack."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


def e4m3_table() -> np.ndarray:
    """float32 [256]: the value of every FP8 E4M3 (finite variety) byte; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(fraction / 8.0, -6), np.ldexp(1 + fraction / 8.0, exponent - 7)
    )
    magnitude[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3 = e4m3_table()
_E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
_E2M1_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=1)
"""float32 [256, 2]: the two numbers of a byte, low nibble first."""


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 E4M3 `NAME` with one scale for each block of rows x cols in `NAME_scale_inv`.

    Blocks at the right and lower edge are partial. Value = number * scale.
    """

    block_rows: int
    block_cols: int

    @property
    def exact_bf16(self) -> bool:
        return False

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[SourceTensor, ...]:
        _, rows, cols = _sizes(shape)
        blocks = (ceil_div(rows, self.block_rows), ceil_div(cols, self.block_cols))
        return (
            SourceTensor(name, shape, ("F8_E4M3",)),
            SourceTensor(f"{name}_scale_inv", shape[:-2] + blocks, FLOATS),
        )

    def rows(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], first: int, count: int
    ) -> np.ndarray:
        _, rows, cols = _sizes(shape)
        down, across = ceil_div(rows, self.block_rows), ceil_div(cols, self.block_cols)
        stored = checkpoint.read_stored(checkpoint.tensors[name], first * cols, count * cols)
        values = _E4M3[stored].reshape(count, cols)
        index = np.arange(first, first + count)
        block = index // rows * down + index % rows // self.block_rows
        low, high = int(block[0]), int(block[-1]) + 1
        scales = checkpoint.read_values(
            checkpoint.tensors[f"{name}_scale_inv"], low * across, (high - low) * across
        ).reshape(high - low, across)
        wide = np.repeat(scales, self.block_cols, axis=1)[:, :cols]
        with np.errstate(over="ignore", invalid="ignore"):
            values *= wide[block - low]
        return values


def decode_mxfp4(
    packed: np.ndarray, scales: np.ndarray, cols: int, where: str = "MXFP4"
) -> np.ndarray:
    """packed u8 [rows, ceil(cols / 2)], scales u8 [rows, ceil(cols / 32)] -> float32 [rows, cols].

    The low nibble is the even element; a scale byte s stands for 2^(s-127). Exact. Raises
    ConvertError for scale byte 255, which is no number.
    """
    if (scales == 255).any():
        row, group = (int(i[0]) for i in np.nonzero(scales == 255))
        raise ConvertError(
            f"{where}: scale byte 255 (not a number) in row {row}, group {group} of those read",
            EXIT_BAD_INPUT,
        )
    values = _E2M1_PAIRS[packed].reshape(packed.shape[0], -1)[:, :cols]
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127).astype(np.float32)
    with np.errstate(over="ignore"):
        return values * np.repeat(factors, MX_GROUP, axis=1)[:, :cols]


def _byte_rows(
    checkpoint: Checkpoint, name: str, first: int, count: int, width: int
) -> np.ndarray:
    entry = checkpoint.tensors[name]
    return checkpoint.read_stored(entry, first * width, count * width).reshape(count, width)


def _sibling(name: str, suffix: str, other: str) -> str:
    return name.removesuffix(suffix) + other


@dataclass(frozen=True, slots=True)
class Mxfp4Packed:
    """compressed-tensors `mxfp4-pack-quantized`: `X.weight_packed` and `X.weight_scale`."""

    @property
    def exact_bf16(self) -> bool:
        return True

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[SourceTensor, ...]:
        *rest, cols = shape
        scale = _sibling(name, "_packed", "_scale")
        return (
            SourceTensor(name, (*rest, ceil_div(cols, 2)), ("U8",)),
            SourceTensor(scale, (*rest, ceil_div(cols, MX_GROUP)), ("U8", "F8_E8M0")),
        )

    def rows(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], first: int, count: int
    ) -> np.ndarray:
        cols = shape[-1]
        scale = _sibling(name, "_packed", "_scale")
        packed = _byte_rows(checkpoint, name, first, count, ceil_div(cols, 2))
        scales = _byte_rows(checkpoint, scale, first, count, ceil_div(cols, MX_GROUP))
        return decode_mxfp4(packed, scales, cols, f"{scale!r} from row {first}")


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks:
    """MXFP4 as `X_blocks` [..., rows, cols / 32, 16] and `X_scales` [..., rows, cols / 32]."""

    @property
    def exact_bf16(self) -> bool:
        return True

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[SourceTensor, ...]:
        groups = ceil_div(shape[-1], MX_GROUP)
        scales = _sibling(name, "_blocks", "_scales")
        return (
            SourceTensor(name, (*shape[:-1], groups, MX_GROUP // 2), ("U8",)),
            SourceTensor(scales, (*shape[:-1], groups), ("U8", "F8_E8M0")),
        )

    def rows(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], first: int, count: int
    ) -> np.ndarray:
        groups = ceil_div(shape[-1], MX_GROUP)
        scale = _sibling(name, "_blocks", "_scales")
        packed = _byte_rows(checkpoint, name, first, count, groups * MX_GROUP // 2)
        scales = _byte_rows(checkpoint, scale, first, count, groups)
        return decode_mxfp4(packed, scales, shape[-1], f"{scale!r} from row {first}")


def decode_int4(packed: np.ndarray, scales: np.ndarray, cols: int, group: int) -> np.ndarray:
    """packed int32 [rows, ceil(cols / 8)], scales float32 [rows, ceil(cols / group)] -> float32.

    Eight nibbles of a word, lowest first, along the columns; value = (nibble - 8) * scale.
    """
    words = np.ascontiguousarray(packed).view(np.uint32)
    nibbles = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    values = nibbles.reshape(packed.shape[0], -1)[:, :cols].astype(np.float32) - np.float32(8)
    return values * np.repeat(scales, group, axis=1)[:, :cols]


@dataclass(frozen=True, slots=True)
class Int4Packed:
    """compressed-tensors `pack-quantized`, symmetric INT4: `X.weight_packed`, `X.weight_scale`,
    and `X.weight_shape`, which must agree when it is there."""

    group: int

    @property
    def exact_bf16(self) -> bool:
        return False

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[SourceTensor, ...]:
        *rest, cols = shape
        return (
            SourceTensor(name, (*rest, ceil_div(cols, 8)), ("I32",)),
            SourceTensor(
                _sibling(name, "_packed", "_scale"), (*rest, ceil_div(cols, self.group)), FLOATS
            ),
            SourceTensor(_sibling(name, "_packed", "_shape"), (len(shape),), ("I32", "I64"), True),
        )

    def rows(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], first: int, count: int
    ) -> np.ndarray:
        cols = shape[-1]
        stated: TensorEntry | None = checkpoint.tensors.get(_sibling(name, "_packed", "_shape"))
        if stated is not None and first == 0:
            found = tuple(int(n) for n in checkpoint.read_stored(stated, 0, len(shape)))
            if found != shape:
                raise ConvertError(
                    f"{stated.shard}: tensor {stated.name!r} says {list(found)}, config.json asks "
                    f"for {list(shape)}",
                    EXIT_BAD_INPUT,
                )
        packed = _byte_rows(checkpoint, name, first, count, ceil_div(cols, 8))
        groups = ceil_div(cols, self.group)
        scales = checkpoint.read_values(
            checkpoint.tensors[_sibling(name, "_packed", "_scale")], first * groups, count * groups
        )
        return decode_int4(packed, scales.reshape(count, groups), cols, self.group)
