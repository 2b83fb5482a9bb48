"""ngram.bin: rows of an embedding that stay on disk, in pages that carry their own checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..crc32c import crc32c_rows
from .errors import ConvertError
from .families import RowTableSpec
from .quantise import encode_block
from .safetensors_source import Checkpoint

if TYPE_CHECKING:
    from .output import PartialFile

PAGE = 4096
PAYLOAD = 4084
_NUMBER_AT, _CRC_AT = 4084, 4092
_PAGES = 1024
"""Pages encoded at a time."""


@dataclass(frozen=True)
class RowTable:
    """The file's layout: whole rows from the start of each page, its number, its CRC32C."""

    spec: RowTableSpec
    codec: str
    file: str = "ngram.bin"

    @property
    def row_bytes(self) -> int:
        return self.spec.dim * (2 if self.codec == "bf16" else 4)

    @property
    def per_page(self) -> int:
        return max(1, PAYLOAD // self.row_bytes)

    @property
    def pages(self) -> int:
        return -(-self.spec.rows // self.per_page)

    @property
    def nbytes(self) -> int:
        return self.pages * PAGE


def encode_pages(codec: str, values: np.ndarray, first: int, per_page: int) -> np.ndarray:
    """float32 rows [n, dim] -> pages uint8 [ceil(n / per_page), 4096], numbered from `first`."""
    rows, dim = values.shape
    pages = -(-rows // per_page)
    ((_, data),) = encode_block(codec, values, 0, rows)
    row_bytes = data.size // rows
    out = np.zeros((pages, PAGE), dtype=np.uint8)
    payload = np.zeros((pages * per_page, row_bytes), dtype=np.uint8)
    payload[:rows] = data.reshape(rows, row_bytes)
    out[:, : per_page * row_bytes] = payload.reshape(pages, per_page * row_bytes)
    numbers = np.arange(first, first + pages, dtype="<u8")
    out[:, _NUMBER_AT:_CRC_AT] = numbers.view(np.uint8).reshape(pages, 8)
    crcs = crc32c_rows(out[:, :_CRC_AT]).astype("<u4")
    out[:, _CRC_AT:] = crcs.view(np.uint8).reshape(pages, 4)
    return out


def write_row_table(
    file: PartialFile,
    table: RowTable,
    rows: Callable[[int, int], np.ndarray],
    progress: Callable[[int], None],
) -> None:
    """`rows(first, count)` gives float32 [count, dim]."""
    digest = hashlib.sha256()
    for page in range(0, table.pages, _PAGES):
        start = page * table.per_page
        count = min(_PAGES * table.per_page, table.spec.rows - start)
        data = encode_pages(table.codec, rows(start, count), page, table.per_page)
        digest.update(data)
        file.write(data)
        progress(data.size)
    file.sha256 = digest.hexdigest()


def read_numbers(checkpoint: Checkpoint, spec: RowTableSpec) -> list[dict[str, list[int]]]:
    """Each site's int64 tensors by manifest key, offsets counted from the first row of all.

    Raises ConvertError for impossible ones.
    """
    out: list[dict[str, list[int]]] = []
    for first, rows, names in spec.sites:
        site: dict[str, list[int]] = {}
        for key, (name, count) in names.items():
            entry = checkpoint.tensors[name]
            values = [int(v) for v in checkpoint.read_stored(entry, 0, count)]
            if min(values) < 0:
                raise ConvertError(
                    f"{entry.shard}: tensor {name!r} holds the negative {min(values)}"
                )
            site[key] = values
        for index, (prime, offset) in enumerate(zip(site["primes"], site["offsets"], strict=True)):
            if prime == 0 or offset + prime > rows:
                raise ConvertError(
                    f"tensor {names['offsets'][0]!r}: part {index} of the n-gram table, {prime} "
                    f"rows from {offset}, does not lie in its {rows} rows"
                )
        site["offsets"] = [first + offset for offset in site["offsets"]]
        out.append(site)
    return out
