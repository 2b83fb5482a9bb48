"""Compiles a tiktoken rank file to tokenizer.bin.

A rank file lists byte strings and their ranks, which are the ids. Encoding replaces the
neighbouring pair whose joined bytes have the lowest rank, leftmost among equals; a piece that
is itself listed becomes that id at once. Every part of a piece is a listed string at any time, so
this is byte pair encoding with one merge for each way to divide a listed string into two.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from . import paths, tokenizer_file
from .errors import ConvertError
from .pre_tokenizer import compile_pattern
from .tokenizer_file import MAX_IDS, Added, Merges, Model, TokenizerBuild

FILE = "tiktoken.model"
RESERVED = 256  # ids after the ranks

# The rank file has no pattern. These are TikTokenTokenizer.pat_str of the Python file that comes
# with Moonlight, Kimi-K2, Kimi-Linear and Kimi-K3 (tokenization_moonshot.py, tokenization_kimi.py).
_CLASS = "TikTokenTokenizer"
_WORD = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
BRANCHES = (
    r"[\p{Han}]+", _WORD % ("*", "+"), _WORD % ("+", "*"), r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
)
PATTERN = "|".join(BRANCHES)


def read_ranks(path: Path) -> list[bytes]:
    """The byte string of each rank. Raises ConvertError naming the line that is wrong."""
    lines = paths.read_bytes(path).split(b"\n")
    found: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        token, _, rank = line.strip().partition(b" ")
        try:
            spelling = base64.b64decode(token, validate=True)
        except binascii.Error:
            spelling = b""
        if not spelling or not rank.isdigit() or len(rank) > 8 or int(rank) >= MAX_IDS - RESERVED:
            raise ConvertError(f"{path.name}: line {number} is not a base64 string and a rank")
        if int(rank) in found:
            raise ConvertError(f"{path.name}: line {number}: rank {int(rank)} is given twice")
        found[int(rank)] = spelling
    for rank in range(len(found)):
        if rank not in found:
            raise ConvertError(f"{path.name}: rank {rank} is missing")
    return [found[rank] for rank in range(len(found))]


def _merges(ids: dict[bytes, int]) -> Merges:
    lengths = sorted({len(token) for token in ids})
    out: Merges = {}
    for token, rank in ids.items():
        for length in lengths:
            if length >= len(token):
                break
            left = ids.get(token[:length])
            if left is None:
                continue
            right = ids.get(token[length:])
            if right is not None:
                out[left, right] = (rank, rank)
    return out


def _check_pattern(source_dir: Path, config: dict[str, Any]) -> None:
    """Refuses a tokenizer that is not known to split by PATTERN."""
    auto_map = config.get("auto_map")
    mapped = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    names = [config.get("tokenizer_class"), *(mapped if isinstance(mapped, list) else [mapped])]
    if not any(isinstance(name, str) and name.split(".")[-1] == _CLASS for name in names):
        raise ConvertError(
            f"{FILE}: a rank file has no pattern, and that of tokenizer_class "
            f"{config.get('tokenizer_class')!r} (tokenizer_config.json) is not known, only that of "
            f"{_CLASS}"
        )
    if config.get("pat_str", PATTERN) != PATTERN:
        raise ConvertError(f"tokenizer_config.json: unsupported pat_str: not that of {_CLASS}")
    for path in sorted(source_dir.glob("tokenization_*.py")):
        try:
            text = paths.read_bytes(path).decode("utf-8")
        except ValueError as error:
            raise ConvertError(f"{path.name}: cannot be read: {error}") from None
        missing = [branch for branch in BRANCHES if branch not in text]
        if "pat_str" in text and missing:
            raise ConvertError(f"{path.name}: unsupported pat_str: it lacks {missing[0]}")


def _added_tokens(config: dict[str, Any], first: int) -> list[Added]:
    """The reserved ids from `first` on, named by tokenizer_config.json or by their number."""
    found = {
        number: Added(number, f"<|reserved_token_{number}|>", True, False)
        for number in range(first, first + RESERVED)
    }
    for token in tokenizer_file.decoder_entries(config):
        if token.id not in found:
            raise ConvertError(
                f"tokenizer_config.json: added token {token.content!r} has the id {token.id}; "
                f"{FILE} leaves {first} to {first + RESERVED - 1}"
            )
        found[token.id] = Added(token.id, token.content, token.special, False)
    added = [found[number] for number in sorted(found)]
    tokenizer_file.check_spellings(added)
    return added


def compile_ranks(source_dir: Path, vocab_size: int) -> TokenizerBuild:
    """Compiles tiktoken.model and tokenizer_config.json of a checkpoint directory.

    vocab_size: rows of the model's embedding; every id must be below it. Raises ConvertError.
    """
    config_path = source_dir / "tokenizer_config.json"
    if not paths.is_file(config_path):
        raise ConvertError(f"{FILE}: tokenizer_config.json is needed beside it")
    config = tokenizer_file.load_json(config_path)
    _check_pattern(source_dir, config)
    ranks = read_ranks(source_dir / FILE)
    ids = {token: rank for rank, token in enumerate(ranks)}
    if len(ids) != len(ranks):
        twice = next(rank for rank, token in enumerate(ranks) if ids[token] != rank)
        raise ConvertError(f"{FILE}: ranks {twice} and {ids[ranks[twice]]} are the same bytes")
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if missing:
        raise ConvertError(f"{FILE}: it lacks the byte 0x{missing[0]:02X}")
    added = _added_tokens(config, len(ranks))
    notes = [f"{FILE}: {len(ranks)} ranks, split by the pattern of {_CLASS}"]
    model = Model(
        ranks + [token.content.encode("utf-8") for token in added],
        [ids[bytes([byte])] for byte in range(256)], _merges(ids), list(range(len(ranks))),
        added, compile_pattern(PATTERN),
    )
    return tokenizer_file.build(model, config, vocab_size, FILE, notes)
