"""Writes tokenizer.bin (formats/tokenizer.md)."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..crc32c import crc32c
from . import paths, unicode_tables
from .errors import ConvertError
from .regex_compile import Programs

MAGIC = b"HRTOKENS"
VERSION = 1
MODEL_BYTE_BPE = 1
IGNORE_MERGES = 1
NORMALISER_NONE, NORMALISER_NFC = 0, 1
CONTROL, ADDED, ORDINARY = 1, 2, 4  # vocabulary flags
NOTHING = 0xFFFFFFFF
MAX_IDS = 1 << 24
MAX_TOKEN_BYTES = 1 << 16

_HEADER = struct.Struct("<8sIIQIIII")
_SECTION = struct.Struct("<IIQQ")

# (left id, right id) -> (rank, new id)
Merges = dict[tuple[int, int], tuple[int, int]]


@dataclass
class TokenizerBuild:
    """A compiled tokenizer.

    data: the bytes of tokenizer.bin. notes: facts for the conversion log. added: spelling -> id
    of every added token; control: the ids never produced from plain text; named: "eos_token",
    "bos_token", "pad_token" -> id where tokenizer_config.json names one of the added tokens.
    """

    data: bytes
    notes: list[str] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    control: list[int] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Added:
    """An added token: matched by its spelling, after normalisation if `normalized`."""

    id: int
    content: str
    special: bool
    normalized: bool

    @property
    def flags(self) -> int:
        """Blanks that are not special (GPT-NeoX has runs of them) are recognised in any text."""
        if self.special:
            return ADDED | CONTROL
        return ADDED | ORDINARY if self.content.isspace() else ADDED


@dataclass(frozen=True)
class Model:
    """What is to be encoded with.

    entries: bytes of each id, empty for an id without one. byte_ids: the id of each single byte.
    whole: the ids that a piece of their bytes becomes at once; None if there is no such rule.
    """

    entries: list[bytes]
    byte_ids: list[int]
    merges: Merges
    whole: list[int] | None
    added: list[Added]
    programs: Programs
    normaliser: int = NORMALISER_NONE


def load_json(path: Path) -> dict[str, Any]:
    """Reads an object; raises ConvertError."""
    try:
        value = json.loads(paths.read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path.name}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path.name}: not an object")
    return value


def added_entry(where: str, number: Any, entry: Any) -> Added:
    """Checks an element of added_tokens or added_tokens_decoder of the file `where`."""
    content = entry.get("content") if isinstance(entry, dict) else None
    if type(number) is not int or not 0 <= number < MAX_IDS or not isinstance(content, str):
        raise ConvertError(f"{where}: an added token without a valid id and content")
    for option in ("single_word", "lstrip", "rstrip"):
        if entry.get(option):
            raise ConvertError(f"{where}: unsupported option {option} of added token {content!r}")
    special = bool(entry.get("special", False))
    return Added(number, content, special, bool(entry.get("normalized", not special)))


def decoder_entries(config: dict[str, Any]) -> list[Added]:
    """The added_tokens_decoder of tokenizer_config.json in its order."""
    found = config.get("added_tokens_decoder") or {}
    if not isinstance(found, dict):
        raise ConvertError("tokenizer_config.json: added_tokens_decoder is not an object")
    return [
        added_entry("tokenizer_config.json",
                    int(key) if key.isascii() and key.isdigit() else None, entry)
        for key, entry in found.items()
    ]


def check_spellings(added: list[Added]) -> None:
    """Raises ConvertError for an added token without spelling, or two with the same."""
    contents: dict[str, int] = {}
    for token in added:
        if not token.content:
            raise ConvertError(f"added token {token.id} has no content")
        if contents.setdefault(token.content, token.id) != token.id:
            raise ConvertError(f"added token {token.content!r} has two ids")


def _u32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _offsets(lengths: list[int]) -> list[int]:
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def _flag_bytes(size: int, added: list[Added]) -> bytes:
    flags = bytearray(size)
    for token in added:
        flags[token.id] = token.flags
    return bytes(flags)


def _merge_sections(merges: Merges, size: int) -> list[bytes]:
    """The merges in ascending (left, right), and where those of each left id are."""
    counts = [0] * size
    body = bytearray()
    for (left, right), (rank, new) in sorted(merges.items()):
        counts[left] += 1
        body += struct.pack("<III", right, rank, new)
    return [_u32(_offsets(counts)), bytes(body)]


def _matcher(tokens: list[Added]) -> bytes:
    """Added tokens sorted by spelling, each with the longest other one that it begins with."""
    spelled = sorted((token.content.encode("utf-8"), token.id) for token in tokens)
    out: list[int] = []
    open_prefixes: list[int] = []
    for index, (spelling, number) in enumerate(spelled):
        while open_prefixes and not spelling.startswith(spelled[open_prefixes[-1]][0]):
            open_prefixes.pop()
        out += [number, open_prefixes[-1] if open_prefixes else NOTHING]
        open_prefixes.append(index)
    return _u32(out)


def pack(sections: list[bytes], flags: int, normaliser: int) -> bytes:
    """Header, section table and the sections at multiples of 8 bytes, with the checksum."""
    at = _HEADER.size + _SECTION.size * len(sections)
    table, body = b"", []
    for kind, section in enumerate(sections, start=1):
        padding = -at % 8
        body += [bytes(padding), section]
        at += padding
        table += _SECTION.pack(kind, 0, at, len(section))
        at += len(section)

    def header(crc: int) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, crc, at, MODEL_BYTE_BPE, flags, normaliser,
                            len(sections))

    rest = b"".join([table, *body])
    return header(crc32c(header(0) + rest)) + rest


def _named(config: dict[str, Any], contents: dict[str, int]) -> dict[str, int]:
    out = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in contents:
            out[name] = contents[text]
    return out


def build(model: Model, config: dict[str, Any], vocab_size: int, source: str,
          notes: list[str]) -> TokenizerBuild:
    """Packs `model`. config: the tokenizer_config.json; source: the file named in errors.

    Raises ConvertError when an id is not below vocab_size or a token is too long.
    """
    entries = model.entries
    if len(entries) > vocab_size:
        raise ConvertError(f"{source}: token id {len(entries) - 1} is outside the model's "
                           f"vocabulary of {vocab_size}")
    long = next((i for i, entry in enumerate(entries) if len(entry) > MAX_TOKEN_BYTES), None)
    if long is not None:
        raise ConvertError(f"{source}: unsupported vocabulary: token {long} has more than "
                           f"{MAX_TOKEN_BYTES} bytes")
    whole = sorted(model.whole or [], key=lambda i: entries[i])
    nfc = [b""] * 5
    if model.normaliser == NORMALISER_NFC:
        nfc = [bytes(section) for section in unicode_tables.normalisation()]
    programs = model.programs
    sections = [
        _u32(_offsets([len(entry) for entry in entries])),
        _flag_bytes(len(entries), model.added),
        b"".join(entries),
        _u32(model.byte_ids),
        *_merge_sections(model.merges, len(entries)),
        _u32(whole),
        _matcher([token for token in model.added if not token.normalized]),
        _matcher([token for token in model.added if token.normalized]),
        programs.splits, programs.nodes, programs.sets, programs.class_index,
        programs.class_blocks, *nfc,
    ]
    flags = IGNORE_MERGES if model.whole is not None else 0
    contents = {token.content: token.id for token in model.added}
    control = sorted(token.id for token in model.added if token.special)
    return TokenizerBuild(pack(sections, flags, model.normaliser), notes, contents, control,
                          _named(config, contents))
