"""Reads a Hugging Face checkpoint directory: safetensors headers and ranges of tensors.

Headers are untrusted. Every rule that ties a header to its file is checked before
any tensor byte is read, faults are collected so that all of them can be reported
together, and nothing is allocated from an unchecked number.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import paths
from .errors import EXIT_IO, ConvertError, as_fault

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 64 << 20
MAX_RANK = 16
MAX_TENSOR_BYTES = 1 << 62

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
FLOAT_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""What the converter reads, with the numpy type of the stored element."""

STORED_DTYPES = {
    **FLOAT_DTYPES, "F8_E4M3": "u1", "F8_E8M0": "u1", "U8": "u1", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
"""Element types that can be read as they are stored."""

_NUMBERED = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its header declares it. `offset` is absolute in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its size and the SHA-256 of its header (length field included)."""

    name: str
    nbytes: int
    header_sha256: str


@dataclass
class NonFinite:
    """Counts of weights that are no numbers, by kind."""

    nan: int = 0
    inf: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf)

    def text(self) -> str:
        return f"{self.nan} NaN, {self.inf} Inf"


def clear_nonfinite(values: np.ndarray, bad: NonFinite | None) -> np.ndarray:
    """Counts NaN and Inf in `bad` and sets them to 0, in place."""
    if not np.isfinite(values).all():
        nan, inf = np.isnan(values), np.isinf(values)
        if bad is not None:
            bad.nan += int(nan.sum())
            bad.inf += int(inf.sum())
        values[nan | inf] = 0.0
    return values


class _DuplicateKey(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return out


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def parse_json(data: bytes, what: str) -> object:
    """Strict JSON: UTF-8, no duplicate keys, no NaN. Raises ConvertError naming `what`."""
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except _DuplicateKey as error:
        raise ConvertError(f"{what}: the key {str(error)!r} occurs twice") from None
    except RecursionError:
        raise ConvertError(f"{what}: nested too deeply") from None
    except ValueError as error:
        raise ConvertError(f"{what}: not valid JSON ({error})") from None


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON file that holds one object. Raises ConvertError when it is missing or malformed."""
    require_regular(path)
    size = paths.size(path)
    if size > MAX_JSON_BYTES:
        raise ConvertError(f"{path}: {size} bytes is more than a configuration can have")
    value = parse_json(paths.read_bytes(path), str(path))
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: must hold a JSON object")
    return value


def _unfinished_downloads(directory: Path) -> list[Path]:
    """`*.incomplete` files where the hub's client leaves them."""
    places = (directory, directory / "../../blobs", directory / ".cache/huggingface/download")
    return [
        path
        for place in places
        if paths.is_directory(place)
        for path in sorted(place.glob("*.incomplete"))
    ]


def require_regular(path: Path) -> None:
    """Follows links; refuses what is missing, unfinished or no regular file."""
    if paths.is_link(path):
        target = os.readlink(path)
        if target.endswith(".incomplete") or not paths.exists(path):
            raise ConvertError(
                f"{path}: download not finished (the link points to {target!r}, which is "
                f"{'incomplete' if paths.exists(path) else 'missing'}); download the checkpoint again"
            )
    if not paths.exists(path):
        hint = ""
        if unfinished := _unfinished_downloads(path.parent):
            hint = f": download not finished ({unfinished[0].name} is beside it)"
        raise ConvertError(f"{path}: file is missing{hint}")
    if not paths.is_file(path):
        raise ConvertError(f"{path}: is not a regular file")


def _pread(fd: int, count: int, offset: int, path: Path) -> bytes:
    parts: list[bytes] = []
    while count:
        try:
            part = os.pread(fd, min(count, 1 << 30), offset)
        except OSError as error:
            raise ConvertError(f"{path}: reading at {offset}: {error.strerror}", EXIT_IO) from None
        if not part:
            raise ConvertError(f"{path}: ends at {offset}, {count} more bytes are needed", EXIT_IO)
        parts.append(part)
        count -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_entry(
    shard: str, name: str, spec: object, base: int, file_bytes: int
) -> tuple[TensorEntry | None, str | None]:
    """One header entry -> (entry, None) or (None, fault)."""
    where = f"{shard}: tensor {name!r}"
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        return None, f"{where}: needs exactly dtype, shape and data_offsets"
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str):
        return None, f"{where}: dtype is not a string"
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        return None, f"{where}: shape is not a list of at most {MAX_RANK} sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        return None, f"{where}: data_offsets is not a pair of byte counts"
    begin, end = offsets
    if end < begin:
        return None, f"{where}: data_offsets end {end} is before begin {begin}"
    elements = 1
    for dim in shape:
        elements *= dim
    if elements > MAX_TENSOR_BYTES:
        return None, f"{where}: shape {shape} has more elements than 64 bits can count"
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and (elements * bits + 7) // 8 != end - begin:
        return None, (
            f"{where}: {dtype} {shape} takes {(elements * bits + 7) // 8} bytes, "
            f"data_offsets give {end - begin}"
        )
    if base + end > file_bytes:
        present = max(0, min(file_bytes - base, end) - begin)
        return None, (
            f"{where}: needs {end - begin} bytes at offset {base + begin}, {present} are present "
            f"(the file has {file_bytes} bytes, {base + end} are needed): the file is truncated, "
            "download it again"
        )
    return TensorEntry(name, dtype, tuple(shape), shard, base + begin, end - begin), None


def read_header(
    path: Path, shard: str
) -> tuple[Shard | None, list[TensorEntry], list[str], list[str]]:
    """One file's header -> (shard, tensors, faults, notes). Reads no tensor data."""
    faults: list[str] = []
    notes: list[str] = []
    try:
        require_regular(path)
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except ConvertError as error:
        return None, [], [as_fault(error)], notes
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None
    try:
        size = os.fstat(fd).st_size
        if size < 10:
            return None, [], [f"{path}: {size} bytes is too short for a safetensors file"], notes
        prefix = _pread(fd, 8, 0, path)
        length = int.from_bytes(prefix, "little")
        if length < 2 or length > MAX_HEADER_BYTES or length > size - 8:
            return (
                None,
                [],
                [
                    f"{path}: header length {length} is impossible (the file has {size} bytes, "
                    f"a header at most {MAX_HEADER_BYTES})"
                ],
                notes,
            )
        raw = _pread(fd, length, 8, path)
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None
    finally:
        os.close(fd)
    try:
        header = parse_json(raw, f"{path}: header")
    except ConvertError as error:
        return None, [], [str(error)], notes
    if not isinstance(header, dict):
        return None, [], [f"{path}: header is not a JSON object"], notes
    base = 8 + length
    entries: list[TensorEntry] = []
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        entry, fault = _check_entry(str(path), name, spec, base, size)
        if fault is not None:
            faults.append(fault)
        elif entry is not None:
            entries.append(
                TensorEntry(name, entry.dtype, entry.shape, shard, entry.offset, entry.nbytes)
            )
    position, previous = base, ""
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.nbytes == 0:
            continue
        if entry.offset < position:
            faults.append(f"{path}: tensors {previous!r} and {entry.name!r} overlap")
        elif entry.offset > position and not faults:
            notes.append(f"{shard}: {entry.offset - position} unused bytes before {entry.name!r}")
        position, previous = max(position, entry.offset + entry.nbytes), entry.name
    if position < size and not faults:
        notes.append(f"{shard}: {size - position} unused bytes at the end")
    digest = hashlib.sha256(prefix + raw).hexdigest()
    return Shard(shard, size, digest), entries, faults, notes


@dataclass
class Checkpoint:
    """All tensors of a checkpoint directory, by name. `faults` is empty when it is sound."""

    directory: Path
    shards: list[Shard] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads the headers of every shard. Raises ConvertError when there is no checkpoint."""
        if not paths.exists(directory):
            raise ConvertError(f"{directory}: no such directory")
        if not paths.is_directory(directory):
            raise ConvertError(f"{directory}: is not a directory; give the checkpoint's directory")
        self = cls(directory)
        index_path = directory / "model.safetensors.index.json"
        if paths.is_listed(index_path):
            weight_map = self._read_index(index_path)
            names = sorted(set(weight_map.values()))
        else:
            weight_map = None
            names = self._without_index()
        for name in names:
            shard, entries, faults, notes = read_header(directory / name, name)
            self.faults += faults
            self.notes += notes
            if shard is not None:
                self.shards.append(shard)
            for entry in entries:
                other = self.tensors.get(entry.name)
                if other is not None:
                    self.faults.append(
                        f"{directory / name}: tensor {entry.name!r} is also in {other.shard}"
                    )
                    continue
                self.tensors[entry.name] = entry
        if weight_map is not None and not self.faults:
            self._compare(weight_map, index_path)
        return self

    def _read_index(self, path: Path) -> dict[str, str]:
        index = read_json_object(path)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConvertError(f"{path}: has no weight_map")
        for tensor, shard in weight_map.items():
            if (
                not isinstance(shard, str)
                or not shard.endswith(".safetensors")
                or shard != os.path.basename(shard)
                or "\0" in shard
            ):
                raise ConvertError(
                    f"{path}: tensor {tensor!r}: {shard!r} is no safetensors file name"
                )
        listed = set(weight_map.values())
        for other in sorted(self.directory.glob("*.safetensors")):
            if other.name not in listed:
                self.notes.append(f"{other.name}: not in the index, ignored")
        return weight_map

    def _without_index(self) -> list[str]:
        single = self.directory / "model.safetensors"
        names = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if paths.is_listed(single):
            for name in names:
                if name != single.name:
                    self.notes.append(f"{name}: ignored, model.safetensors is the checkpoint")
            return [single.name]
        if any(_NUMBERED.fullmatch(name) for name in names):
            raise ConvertError(
                f"{self.directory}: has shards ({names[0]}) but no model.safetensors.index.json: "
                "download not finished; download the checkpoint again"
            )
        if len(names) == 1:
            return names
        if unfinished := _unfinished_downloads(self.directory):
            raise ConvertError(
                f"{self.directory}: download not finished ({unfinished[0].name}); "
                "download the checkpoint again"
            )
        raise ConvertError(
            f"{self.directory}: no model.safetensors and no model.safetensors.index.json"
        )

    def _compare(self, weight_map: dict[str, str], path: Path) -> None:
        for tensor, shard in sorted(weight_map.items()):
            entry = self.tensors.get(tensor)
            if entry is None:
                self.faults.append(f"{path}: tensor {tensor!r} is not in {shard}")
            elif entry.shard != shard:
                self.faults.append(f"{path}: tensor {tensor!r} is in {entry.shard}, not in {shard}")
        for tensor, entry in sorted(self.tensors.items()):
            if tensor not in weight_map:
                self.faults.append(
                    f"{path}: tensor {tensor!r} of {entry.shard} is not in the index"
                )

    def total_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def read_stored(self, entry: TensorEntry, start: int, count: int) -> np.ndarray:
        """Elements start..start+count as stored [count] (bf16 as uint16, fp8 as bytes).

        Raises ConvertError on an I/O error or an unsupported dtype. Safe from several threads.
        """
        stored = STORED_DTYPES.get(entry.dtype)
        if stored is None:
            raise ConvertError(
                f"{entry.shard}: tensor {entry.name!r}: dtype {entry.dtype} is not supported"
            )
        if start < 0 or count < 0 or start + count > entry.elements:
            raise ValueError("range outside the tensor")
        width = np.dtype(stored).itemsize
        path = self.directory / entry.shard
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None
        try:
            raw = _pread(fd, count * width, entry.offset + start * width, path)
        finally:
            os.close(fd)
        return np.frombuffer(raw, dtype=stored)

    def read_values(self, entry: TensorEntry, start: int, count: int) -> np.ndarray:
        """Elements of a BF16, F16 or F32 tensor as float32 [count], exact; NaN and Inf stay."""
        if entry.dtype not in FLOAT_DTYPES:
            raise ConvertError(
                f"{entry.shard}: tensor {entry.name!r}: dtype {entry.dtype} is not supported"
            )
        values = self.read_stored(entry, start, count)
        if entry.dtype == "BF16":
            wide = values.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32)
        return values.astype(np.float32)

    def read_float32(
        self, entry: TensorEntry, start: int, count: int, bad: NonFinite | None = None
    ) -> np.ndarray:
        """`read_values` with NaN and Inf added to `bad` and returned as 0."""
        return clear_nonfinite(self.read_values(entry, start, count), bad)

    def file_sha256(self, shard: str) -> str:
        """SHA-256 of a whole shard (reads all of it)."""
        return paths.sha256(self.directory / shard)


def blocks(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, count) covering 0..total in steps."""
    for start in range(0, total, step):
        yield start, min(step, total - start)
