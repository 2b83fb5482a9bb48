"""What routed experts read on a text, and how far coded weights move what they write.

Captured from an existing container of the same checkpoint, in one pass and bounded memory. Errors
are of outputs, not of weights: per expert, every captured input through the source's weights and
through the decoded ones, in float64.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import codebooks, paths
from .errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_MEMORY, EXIT_USAGE, ConvertError
from .library import quantizer
from .preflight import Bank, Preflight
from .requantised import decoded
from .safetensors_source import NonFinite, blocks, require_regular
from .rows import read_numbers, read_rows
from .writer import encode_record

WINDOW = 512
"""Tokens evaluated from one fresh state."""
MAX_TEXT_BYTES = 64 << 20
MAX_TOKENS = 16384
MAX_ROWS = 512
"""Tokens whose inputs are kept in every layer."""
MAX_SAMPLE_BYTES = 2 << 30
EXPERTS = 8
ROWS_PER_EXPERT = 64
_BLOCK_ROWS = 256


@dataclass(frozen=True)
class Sample:
    """Inputs float32 [rows, width], experts int32 and weights float32 [rows, top_k], of a layer."""

    inputs: NDArray[np.float32]
    experts: NDArray[np.int32]
    weights: NDArray[np.float32]


@dataclass
class _Gathered:
    inputs: list[NDArray[np.float32]] = field(default_factory=list)
    experts: list[NDArray[np.int32]] = field(default_factory=list)
    weights: list[NDArray[np.float32]] = field(default_factory=list)
    seen: int = 0


def read_text(path: Path) -> bytes:
    """A calibration text. Raises ConvertError."""
    require_regular(path)
    size = paths.size(path)
    if size > MAX_TEXT_BYTES:
        raise ConvertError(f"{path}: {size} bytes is more than a calibration text may have", EXIT_USAGE)
    return paths.read_bytes(path)


def check_reference(reference: Path, pre: Preflight) -> str:
    """SHA-256 of the reference's manifest; refuses a container of another checkpoint."""
    path = reference / "manifest.json"
    try:
        data = path.read_bytes()
        manifest = json.loads(data)
        shards = [(s["name"], s["header_sha256"]) for s in manifest["provenance"]["shards"]]
        banks = [(b["layer"], b["experts"], b["hidden"], b["inner"]) for b in manifest["experts"]]
        family = manifest["provenance"]["family"]
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None
    except (ValueError, KeyError, TypeError):
        raise ConvertError(f"{path}: is no manifest of headrace-convert", EXIT_BAD_INPUT) from None
    ours = [(b.spec.layer, b.spec.experts, b.spec.hidden, b.spec.inner) for b in pre.banks]
    if (
        shards != [(s.name, s.header_sha256) for s in pre.checkpoint.shards]
        or banks != ours
        or family != pre.plan.family
    ):
        raise ConvertError(
            f"{reference}: is a container of another checkpoint than {pre.source}", EXIT_USAGE
        )
    return hashlib.sha256(data).hexdigest()


def rows_kept(tokens: int, most: int, pre: Preflight) -> int:
    """Of a text of so many tokens, by the memory that their inputs of all layers take."""
    per_row = 4 * max(1, sum(bank.spec.hidden for bank in pre.banks))
    return max(1, min(tokens, most, MAX_SAMPLE_BYTES // per_row))


def capture(
    reference: Path, text: bytes, pre: Preflight, progress: Callable[[int, int], object],
    most: int | None = None,
) -> dict[int, Sample]:
    """MoE layer -> what its routed experts read at `most` (MAX_ROWS) evenly spaced tokens of `text`.

    `progress` is told of tokens done and of all. Raises ConvertError.
    """
    try:
        import headrace

        headrace.version()
    except (ImportError, AttributeError, OSError) as error:
        raise ConvertError(f"a calibration needs the engine: {error}", EXIT_IO) from None
    gathered = {bank.spec.layer: _Gathered() for bank in pre.banks}
    try:
        with headrace.Model(reference, ctx=WINDOW) as model:
            ids = model.tokenize(text, special=True)[:MAX_TOKENS]
            if not ids:
                raise ConvertError("the calibration text has no tokens", EXIT_USAGE)
            rows = rows_kept(len(ids), most or MAX_ROWS, pre)
            kept = np.arange(rows) * len(ids) // rows

            def seen(
                layer: int,
                inputs: NDArray[np.float32],
                experts: NDArray[np.int32],
                weights: NDArray[np.float32],
            ) -> None:
                into = gathered[layer]
                start = into.seen
                into.seen += len(inputs)
                take = kept[np.searchsorted(kept, start) : np.searchsorted(kept, into.seen)] - start
                into.inputs.append(inputs[take])
                into.experts.append(experts[take])
                into.weights.append(weights[take])

            for first, count in blocks(len(ids), WINDOW):
                model.layer_inputs(ids[first : first + count], seen)
                progress(first + count, len(ids))
    except headrace.HeadraceError as error:
        code = EXIT_MEMORY if isinstance(error, headrace.HeadraceMemoryError) else EXIT_IO
        raise ConvertError(f"{reference}: the calibration failed: {error}", code) from error
    return {
        layer: Sample(*(np.concatenate(part) for part in (g.inputs, g.experts, g.weights)))
        for layer, g in gathered.items()
    }


def chosen_experts(sample: Sample, experts: int) -> list[tuple[int, float]]:
    """(expert, share) of at most EXPERTS: equal steps through the experts' squared mixing weights.

    The shares add up to 1, and the mean over the chosen ones stands for the layer.
    """
    used = sample.experts >= 0
    mass = np.bincount(
        sample.experts[used], sample.weights[used].astype(np.float64) ** 2, minlength=experts
    )
    total = mass.sum()
    if not total > 0:
        return []
    if np.count_nonzero(mass) <= EXPERTS:
        return [(int(e), float(mass[e] / total)) for e in np.flatnonzero(mass)]
    edges = np.cumsum(mass)
    steps = (np.arange(EXPERTS) + 0.5) / EXPERTS * edges[-1]
    found, times = np.unique(np.searchsorted(edges, steps), return_counts=True)
    return [(int(e), int(n) / EXPERTS) for e, n in zip(found, times, strict=True)]


def activate(
    gate: NDArray[np.float64], up: NDArray[np.float64], ffn: dict[str, object]
) -> NDArray[np.float64]:
    """The activations of formats/container.md."""
    kind = ffn["activation"]
    real = {k: float(ffn[k]) for k in ("alpha", "limit", "beta", "linear_beta") if k in ffn}  # type: ignore[arg-type]
    if kind == "clamped_glu":
        gate, up = np.minimum(gate, real["limit"]), np.clip(up, -real["limit"], real["limit"])
        return (up + 1) * gate * _sigmoid(real["alpha"] * gate)
    if kind == "situ_glu":
        if (linear := real.get("linear_beta", 0.0)) != 0:
            up = linear * np.tanh(up / linear)
        return real["beta"] * np.tanh(gate / real["beta"]) * _sigmoid(gate) * up
    if kind != "silu_glu":
        raise ConvertError(f"activation {kind!r} cannot be measured", EXIT_USAGE)
    return gate * _sigmoid(gate) * up


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(0.5 * x))


_Rows = Callable[[int, int, int], NDArray[np.float32]]
"""(matrix, first row, count) -> rows of gate, up or down."""


def _product(
    x: NDArray[np.float64], rows: _Rows, matrix: int, count: int, biases: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """x [n, k] through a matrix [count, k], a block of its rows at a time; float64 [n, count]."""
    out = np.empty((len(x), count))
    for first, n in blocks(count, _BLOCK_ROWS):
        out[:, first : first + n] = x @ rows(matrix, first, n).astype(np.float64).T
    return out + biases[matrix] if biases else out


def _output(
    inputs: NDArray[np.float64], rows: _Rows, bank: Bank, biases: list[NDArray[np.float64]],
    ffn: dict[str, object],
) -> NDArray[np.float64]:
    """What one expert writes, float64 [n, hidden]."""
    gate, up = (_product(inputs, rows, matrix, bank.spec.inner, biases) for matrix in (0, 1))
    return _product(activate(gate, up, ffn), rows, 2, bank.spec.hidden, biases)


def _with_books(pre: Preflight, bank: Bank) -> Preflight:
    """`pre` with the codebooks that the bank's codec needs."""
    if not codebooks.file_bytes([bank.codec]):
        return pre
    fitter = quantizer(bank.codec, pre.options.effort)
    books = tuple(
        fitter.fit(codebooks.sample(pre.checkpoint, bank.spec, kind)) for kind in range(len(codebooks.KINDS))
    )
    return replace(pre, books={bank.spec.layer: books})


@dataclass(frozen=True)
class LayerErrors:
    """Mean squares per routed token: of a layer's routed output, and of the error of every bank."""

    output: float
    errors: list[float]


def layer_errors(
    pre: Preflight, banks: list[Bank], sample: Sample, ffn: dict[str, object]
) -> LayerErrors:
    """Errors of the same layer's banks, which differ by their codecs.

    One expert at a time. An expert's outputs count with their squared mixing weights; the errors of
    different experts are taken as independent.
    """
    spec = banks[0].spec
    output, errors = 0.0, [0.0] * len(banks)
    made = [_with_books(pre, bank) for bank in banks]
    used = sample.experts >= 0
    mass = float((sample.weights[used].astype(np.float64) ** 2).sum()) / len(sample.inputs)
    for expert, share in chosen_experts(sample, spec.experts):
        row, rank = np.nonzero((sample.experts == expert) & (sample.weights != 0))
        count = min(len(row), ROWS_PER_EXPERT)
        pick = np.arange(count) * len(row) // count
        row, rank = row[pick], rank[pick]
        inputs = sample.inputs[row].astype(np.float64)
        squares = sample.weights[row, rank].astype(np.float64) ** 2
        factor = share * mass / squares.sum()
        bad = NonFinite()
        pieces = spec.parts(expert)
        biases = [
            read_numbers(pre.checkpoint, (piece,), bad).astype(np.float64)
            for piece in (spec.biases(expert) if spec.biases else ())
        ]

        def source(matrix: int, first: int, count: int) -> NDArray[np.float32]:
            return read_rows(pre.checkpoint, (pieces[matrix],), first, count, bad)

        exact = _output(inputs, source, banks[0], biases, ffn)
        output += factor * float((exact**2).sum(axis=1) @ squares)
        for i, bank in enumerate(banks):
            matrices = decoded(made[i], bank, encode_record(made[i], bank, expert)[0])
            coded = _output(
                inputs, lambda m, first, n, w=matrices: w[m][first : first + n], bank, biases, ffn
            )
            errors[i] += factor * float(((coded - exact) ** 2).sum(axis=1) @ squares)
    return LayerErrors(output, errors)
