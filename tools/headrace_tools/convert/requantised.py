"""What it costs to quantise a 4-bit source once more, measured on the records as they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import codebooks
from .library import quantizer
from .quantise import RVQ_BITS, decode, matrix_bytes
from .rows import read_rows
from .safetensors_source import NonFinite

if TYPE_CHECKING:
    from .preflight import Bank, Preflight

KEY = "requantised"
"""Of a bank's record in the journal, and of the manifest's provenance."""
EXPERTS = 8
"""Measured in every layer, evenly spaced."""
WIDEST = [[1.0, 1e12]] * 3
"""Sums that take the most room in a manifest."""

Sums = list[list[float]]
"""Squares of the source's weights and of the errors, of gate, up and down."""


def is_measured(bank: Bank, expert: int) -> bool:
    """Whether this expert of a bank stands for the others."""
    count = bank.spec.experts
    return bank.native is not None and (
        count <= EXPERTS or expert * EXPERTS // count != (expert - 1) * EXPERTS // count
    )


def decoded(pre: Preflight, bank: Bank, record: np.ndarray) -> list[np.ndarray]:
    """gate, up and down as a record holds them, float32."""
    inner, hidden = bank.spec.inner, bank.spec.hidden
    books = pre.books.get(bank.spec.layer)
    out = []
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    for kind, (start, shape) in enumerate(zip(bank.parts, shapes, strict=True)):
        blob = record[start : start + matrix_bytes(bank.codec, *shape)]
        if bank.codec in RVQ_BITS:
            assert books is not None
            out.append(quantizer(bank.codec).decode(blob, *shape, books[kind]))
        else:
            out.append(decode(bank.codec, blob, *shape))
    return out


def measure(pre: Preflight, bank: Bank, expert: int, record: np.ndarray) -> Sums:
    """How far a record is from the source's own values."""
    out = []
    for piece, got in zip(bank.spec.parts(expert), decoded(pre, bank, record), strict=True):
        exact = read_rows(pre.checkpoint, (piece,), 0, piece.total_rows, NonFinite())
        error = (got - exact).astype(np.float64)
        wide = exact.astype(np.float64)
        out.append([float((wide * wide).sum()), float((error * error).sum())])
    return out


def add(total: Sums, more: Sums) -> Sums:
    """The sums of both; `total` may be empty."""
    if not total:
        return more
    return [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(total, more, strict=True)]


def _decibels(signal: float, noise: float) -> float | None:
    """None: nothing was lost, or there was nothing."""
    return round(10 * math.log10(signal / noise), 2) if signal > 0 and noise > 0 else None


def summary(pre: Preflight, done: dict[str, dict[str, object]]) -> dict[str, object]:
    """{KEY: what the manifest says}; empty when no bank was quantised once more."""
    banks = [bank for bank in pre.banks if bank.native is not None]
    if not banks:
        return {}
    sums: Sums = []
    for bank in banks:
        sums = add(sums, done[bank.file].get(KEY, [[0.0, 0.0]] * 3))  # type: ignore[arg-type]
    kinds = dict(zip(codebooks.KINDS, sums, strict=True))
    kinds["all"] = [sum(column) for column in zip(*sums, strict=True)]
    return {
        KEY: {
            "source": sorted({str(bank.native) for bank in banks}),
            "codecs": sorted({bank.codec for bank in banks}),
            "layers": len(banks),
            "experts_measured": min(EXPERTS, min(bank.spec.experts for bank in banks)),
            "bytes": sum(bank.nbytes for bank in banks),
            "native_bytes": sum(bank.native_bytes for bank in banks),
            "snr_db": {name: _decibels(*both) for name, both in kinds.items()},
        }
    }


def of_container(path: Path) -> dict[str, object] | None:
    """What a finished container's manifest says; None when nothing was quantised once more."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    return manifest["provenance"].get(KEY)


def lines(found: dict[str, object]) -> list[str]:
    """The same for people."""
    size, native = int(found["bytes"]), int(found["native_bytes"])  # type: ignore[call-overload]
    decibels: dict[str, float | None] = found["snr_db"]  # type: ignore[assignment]
    whole = decibels["all"]
    change = f"{abs(native - size):,} bytes {'less' if size < native else 'more'}"
    if whole is None:
        return [f"quantised once more without an error, in {change}"]
    share = 10 ** (-whole / 20)
    each = ", ".join(f"{kind} {decibels[kind]} dB" for kind in codebooks.KINDS)
    return [
        f"quantised once more: experts that are {', '.join(found['source'])} in the source are "  # type: ignore[arg-type]
        f"{', '.join(found['codecs'])} here, {change} ({size:,} instead of {native:,})",  # type: ignore[arg-type]
        f"what it costs: weights differ from the source's own values by {share:.1%} of their size "
        f"({whole} dB; {each}), measured on {found['experts_measured']} experts of each of "
        f"{found['layers']} layers; headrace-kld shows what that does to predictions",
    ]
