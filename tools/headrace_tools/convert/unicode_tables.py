"""Unicode properties and normalisation tables, from the data committed in unicode_data.py."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from . import codepoints, unicode_data
from .codepoints import LIMIT, CodeSet

BLOCK = 256  # code points in a block of a two-stage table

# Quick check: a code point without the flag never changes under NFC and begins a new segment.
UNSTABLE = 1


@lru_cache(maxsize=None)
def _categories() -> dict[str, CodeSet]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    at = 0
    for word in unicode_data.CATEGORIES.split():
        name, length = word[:2], int(word[2:], 16)
        ranges.setdefault(name, []).append((at, at + length))
        at += length
    if at != LIMIT:
        raise ValueError("unicode_data.CATEGORIES does not cover the code space")
    return {name: tuple(found) for name, found in ranges.items()}


def _ranges(text: str) -> CodeSet:
    pairs = (word.split("+") for word in text.split())
    return codepoints.make((int(a, 16), int(a, 16) + int(n, 16)) for a, n in pairs)


@lru_cache(maxsize=None)
def property_set(name: str) -> CodeSet | None:
    """The code points of \\p{name}: a general category, its group, or Han; None if unknown."""
    groups = _categories()
    if name in groups:
        return groups[name]
    if name in ("L", "M", "N", "P", "S", "Z", "C"):
        return codepoints.union(*(codes for key, codes in groups.items() if key[0] == name))
    if name == "Han":
        return _ranges(unicode_data.HAN)
    return None


@lru_cache(maxsize=None)
def white_space() -> CodeSet:
    return _ranges(unicode_data.WHITE_SPACE)


@lru_cache(maxsize=None)
def numeric() -> CodeSet:
    """What the pre-tokenizer Digits takes for a digit."""
    return _ranges(unicode_data.NUMERIC)


@lru_cache(maxsize=None)
def punctuation() -> CodeSet:
    """What the pre-tokenizer Punctuation takes for punctuation."""
    return _ranges(unicode_data.PUNCTUATION)


def category(code: int) -> str:
    """General category of one code point."""
    return next(n for n, codes in _categories().items() if codepoints.contains(codes, code))


class TwoStage(NamedTuple):
    """index: u16 for each block of 256 code points; blocks: the distinct blocks' values."""

    index: bytes
    blocks: bytes


def two_stage(runs: Iterable[tuple[int, int]], width: str) -> TwoStage:
    """(length, value) runs from U+0000 -> table; width is "B" or "H"."""
    values: list[int] = []
    for length, value in runs:
        values += [value] * length
    if len(values) != LIMIT:
        raise ValueError("a table must cover the code space")
    known: dict[bytes, int] = {}
    index = []
    for start in range(0, LIMIT, BLOCK):
        block = struct.pack(f"<{BLOCK}{width}", *values[start : start + BLOCK])
        index.append(known.setdefault(block, len(known)))
    return TwoStage(struct.pack(f"<{len(index)}H", *index), b"".join(known))


@lru_cache(maxsize=None)
def decompositions() -> dict[int, tuple[int, ...]]:
    """Full canonical decompositions; Hangul syllables, which go by a formula, are left out."""
    out = {}
    for word in unicode_data.DECOMPOSITIONS.split():
        code, parts = word.split("=")
        out[int(code, 16)] = tuple(int(part, 16) for part in parts.split(","))
    return out


@lru_cache(maxsize=None)
def compositions() -> dict[tuple[int, int], int]:
    """(first, second) -> primary composite, Hangul left out."""
    excluded = _ranges(unicode_data.EXCLUDED)
    full = {
        parts: code
        for code, parts in decompositions().items()
        if not codepoints.contains(excluded, code)
    }
    out = {}
    for parts, code in full.items():
        head = parts[0] if len(parts) == 2 else full[parts[:-1]]
        out[head, parts[-1]] = code
    return out


class Normalisation(NamedTuple):
    """The sections of tokenizer.bin that NFC needs (formats/tokenizer.md)."""

    index: bytes
    blocks: bytes
    records: bytes
    parts: bytes
    pairs: bytes


def combining_classes() -> dict[int, int]:
    """Canonical combining classes that are not 0."""
    out = {}
    for word in unicode_data.COMBINING.split():
        value, run = word.split(":")
        for start, stop in _ranges(run):
            out.update(dict.fromkeys(range(start, stop), int(value, 16)))
    return out


def unstable() -> set[int]:
    """Code points whose NFC_Quick_Check is not Yes."""
    found = {second for _, second in compositions()}
    found.update(range(0x1161, 0x1176), range(0x11A8, 0x11C3))
    for start, stop in _ranges(unicode_data.EXCLUDED):
        found.update(range(start, stop))
    return found


def normalisation() -> Normalisation:
    """Builds the NFC tables."""
    classes, moving, full = combining_classes(), unstable(), decompositions()
    parts: list[int] = []
    records = [struct.pack("<BBBBI", 0, 0, 0, 0, 0)]
    known: dict[bytes, int] = {records[0]: 0}
    runs: list[tuple[int, int]] = []
    at = 0
    for code in sorted(set(classes) | moving | set(full)):
        flags = UNSTABLE if code in moving else 0
        pieces = full.get(code, ())
        offset = len(parts) if pieces else 0
        parts += pieces
        record = struct.pack("<BBBBI", classes.get(code, 0), flags, len(pieces), 0, offset)
        if record not in known:
            known[record] = len(records)
            records.append(record)
        runs += [(code - at, 0), (1, known[record])]
        at = code + 1
    runs.append((LIMIT - at, 0))
    table = two_stage(runs, "H")
    pairs = b"".join(
        struct.pack("<III", a, b, c) for (a, b), c in sorted(compositions().items())
    )
    return Normalisation(
        table.index, table.blocks, b"".join(records), struct.pack(f"<{len(parts)}I", *parts), pairs
    )


def is_nfc_inert(text: str) -> bool:
    """True when no code point of `text` can change or combine under NFC."""
    classes, moving = combining_classes(), unstable()
    return not any(ord(c) in classes or ord(c) in moving for c in text)
