"""Model families: how a checkpoint's config and tensors become a container.

A family is an entry of a module's `FAMILIES`. It turns `config.json` into the
manifest's model description and a table that says from which rows of which source
tensor every canonical tensor comes; it reads no tensor data.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..decoders import FLOATS, Coding, SourceTensor
from ..errors import ConvertError
from ..safetensors_source import TensorEntry

_MODULES = (
    "qwen35", "plain_moe", "gpt_oss", "glm4_moe", "qwen4_exp", "deepseek", "kimi_linear"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a source tensor seen as [product of the rest, cols].

    `groups` runs of `rows` rows, run g starting at first_row + g * stride; with `order`, the rows
    of a run are first_row + g * stride + order[0], + order[1], ... `shape` is the shape of the
    source tensor; cols divides its element count. With `coding`, `source` is the main one of the
    stored tensors, `shape` is the decoded shape and cols its last dimension.
    """

    source: str
    shape: tuple[int, ...]
    cols: int
    first_row: int
    rows: int
    groups: int = 1
    stride: int = 0
    order: tuple[int, ...] = ()
    coding: Coding | None = None

    @property
    def total_rows(self) -> int:
        return self.rows * self.groups

    def sources(self) -> tuple[SourceTensor, ...]:
        """The stored tensors that are read."""
        if self.coding is None:
            return (SourceTensor(self.source, self.shape, FLOATS),)
        return self.coding.sources(self.source, self.shape)

    def source_rows(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: where rows first..first+count of the piece lie in the source."""
        group, within = np.divmod(np.arange(first, first + count), self.rows)
        if self.order:
            within = np.asarray(self.order)[within]
        return self.first_row + group * self.stride + within


def whole(
    source: str, shape: tuple[int, ...], cols: int | None = None, coding: Coding | None = None
) -> tuple[Piece, ...]:
    """A source tensor as it is: [shape[0], rest], or with `cols` columns."""
    elements = 1
    for dim in shape:
        elements *= dim
    if cols is None:
        cols = elements // shape[0] if len(shape) > 1 else elements
    return (Piece(source, shape, cols, 0, elements // cols, coding=coding),)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One resident tensor [rows, cols] (rows 0: a vector [cols]) and where it comes from.

    kind: "matrix" takes the trunk codec; "exact" is bf16 when the source is BF16, else f32;
    "f32" is float32; "f64" holds `constant`. The canonical rows are those of `pieces`, one
    after the other (of a vector: their numbers); transform is "", "add_one" or "transpose".
    `same_as`: a source tensor that must hold the same values. `count`: 0, or a stack of that
    many matrices, whose rows follow one another (each is transposed by itself). `times`: of a
    vector, the factor it is multiplied with, number by number. `zeros`: numbers that must be 0.
    """

    name: str
    rows: int
    cols: int
    kind: str
    pieces: tuple[Piece, ...] = ()
    transform: str = ""
    constant: tuple[float, ...] = ()
    same_as: tuple[Piece, ...] = ()
    count: int = 0
    times: tuple[Piece, ...] = ()
    zeros: tuple[Piece, ...] = ()

    @property
    def shape(self) -> list[int]:
        if self.count:
            return [self.count, self.rows, self.cols]
        return [self.rows, self.cols] if self.rows else [self.cols]

    @property
    def matrices(self) -> int:
        return max(1, self.count)

    @property
    def weights(self) -> int:
        return self.matrices * max(1, self.rows) * self.cols

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        return self.pieces + self.same_as + self.times + self.zeros


@dataclass(frozen=True)
class BankSpec:
    """The routed experts of one layer: expert e -> its gate, up and down pieces.

    fused: all experts lie in the same source tensors. biases: of gate, up and down likewise, one
    number a row; None without.
    """

    layer: int
    experts: int
    hidden: int
    inner: int
    fused: bool
    parts: Callable[[int], tuple[Piece, Piece, Piece]]
    biases: Callable[[int], tuple[Piece, Piece, Piece]] | None = None

    def all_pieces(self, expert: int) -> tuple[Piece, ...]:
        return self.parts(expert) + (self.biases(expert) if self.biases else ())

    @property
    def weights(self) -> int:
        """Numbers of one expert."""
        biases = 2 * self.inner + self.hidden if self.biases else 0
        return 3 * self.hidden * self.inner + biases


@dataclass(frozen=True)
class RowTableSpec:
    """The n-gram rows [rows, dim], which stay on disk, and the int64 tensors of their hash.

    sites: for each layer that adds rows its first row, its number of rows, and the manifest's
    key -> (source tensor, how many).
    """

    rows: int
    dim: int
    pieces: tuple[Piece, ...]
    sites: list[tuple[int, int, dict[str, tuple[str, int]]]]


@dataclass
class ModelPlan:
    """What a family makes of a checkpoint; it can be converted when there are no faults.

    `faults` are the config's own; `tensor_faults` need the tensor names, and mean nothing
    when headers could not be read.
    """

    family: str
    model: dict[str, object] = field(default_factory=dict)
    tensors: list[TensorSpec] = field(default_factory=list)
    banks: list[BankSpec] = field(default_factory=list)
    ngram: RowTableSpec | None = None
    skipped: dict[str, list[str]] = field(default_factory=dict)
    eos: list[object] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    tensor_faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])  # type: ignore[call-overload]


@dataclass(frozen=True)
class Family:
    """`plan(config, tensors)` never raises on bad content: it lists faults."""

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    plan: Callable[[Mapping[str, object], Mapping[str, TensorEntry]], ModelPlan]


def families() -> list[Family]:
    out: list[Family] = []
    for name in _MODULES:
        out += importlib.import_module(f"{__name__}.{name}").FAMILIES
    return out


def detect(config: Mapping[str, object], where: str) -> Family:
    """The family of a config. Raises ConvertError naming what is supported."""
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    for family in families():
        if model_type in family.model_types:
            return family
        if model_type is None and any(name in family.architectures for name in listed):
            return family
    known = ", ".join(sorted(t for family in families() for t in family.model_types))
    raise ConvertError(
        f"{where}: model_type {model_type!r} (architectures {listed!r}) is not a supported "
        f"family; supported are {known}"
    )


class ConfigReader:
    """Typed access to a config object that records faults and which keys were understood."""

    def __init__(self, values: Mapping[str, object], where: str, faults: list[str]) -> None:
        self.values = values
        self.where = where
        self.faults = faults
        self.used: set[str] = set()

    def raw(self, key: str, default: object = None) -> object:
        self.used.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def fault(self, text: str) -> None:
        self.faults.append(f"{self.where}: {text}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; on a fault, `low` (the plan goes on to find more)."""
        value = self.raw(key, default)
        if value is None:
            self.fault(f"{key} is missing")
            return low
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fault(f"{key} is {value!r}, must be an integer from {low} to {high}")
            return low
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number with low < value <= high."""
        value = self.raw(key, default)
        if value is None:
            self.fault(f"{key} is missing")
            return high
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not low < value <= high
        ):
            self.fault(f"{key} is {value!r}, must be a number above {low} and up to {high}")
            return high
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            self.fault(f"{key} is {value!r}, must be true or false")
            return default
        return value

    def only(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """The key must be absent, null or one of `allowed`."""
        value = self.raw(key)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            listed = " or ".join(repr(a) for a in allowed) or "null"
            self.fault(f"{key} is {value!r}, only {listed} is supported: {why}")

    def refuse_unknown(self, harmless: frozenset[str]) -> None:
        """Keys that nobody looked at and that are not null could change the results."""
        for key in sorted(set(self.values) - self.used - harmless):
            if self.values[key] is not None:
                shown = repr(self.values[key])
                self.fault(
                    f"{key} = {shown if len(shown) <= 60 else shown[:57] + '...'} is not known to "
                    "this converter and could change the results"
                )
