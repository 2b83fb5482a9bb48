"""Compiles the pre_tokenizer of a tokenizer.json to split programs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from . import regex_compile, regex_parse, unicode_tables
from .codepoints import CodeSet
from .errors import ConvertError
from .regex_parse import Chars, Node, RegexError, Repeat

MAX_SPLITS = 8

# The split that ByteLevel itself makes when use_regex is on.
_BYTE_LEVEL_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def refuse(what: str) -> ConvertError:
    return ConvertError(f"tokenizer.json: unsupported {what}")


@lru_cache(maxsize=8)
def compile_pattern(pattern: str) -> regex_compile.Programs:
    """One split by `pattern`; raises RegexError."""
    program = regex_compile.compile_tree(regex_parse.parse(pattern))
    return regex_compile.assemble([(program, False)])


def _split(part: dict[str, Any]) -> tuple[Node, bool]:
    pattern = part.get("pattern")
    behaviour, invert = part.get("behavior"), bool(part.get("invert", False))
    if behaviour == "Isolated":
        drop = False
    elif behaviour == "Removed" and invert:
        drop = True
    else:
        raise refuse(f"pre_tokenizer Split with behavior {behaviour}, invert {invert}")
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return regex_parse.literal(pattern["String"]), drop
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        raise refuse("pre_tokenizer Split without a String or Regex pattern")
    return regex_parse.parse(pattern["Regex"]), drop


def _characters(codes: CodeSet, contiguous: bool) -> Node:
    """Each code point of the set alone, or each run of them."""
    return Repeat(Chars(codes), 1, None) if contiguous else Chars(codes)


def _digits(part: dict[str, Any]) -> Node:
    return _characters(unicode_tables.numeric(), not part.get("individual_digits", False))


def _punctuation(part: dict[str, Any]) -> Node:
    behaviour = part.get("behavior", "Isolated")
    if behaviour not in ("Isolated", "Contiguous"):
        raise refuse(f"pre_tokenizer Punctuation with behavior {behaviour}")
    return _characters(unicode_tables.punctuation(), behaviour == "Contiguous")


def _byte_level(part: dict[str, Any]) -> Node | None:
    if part.get("add_prefix_space", True):
        raise refuse("pre_tokenizer ByteLevel with add_prefix_space")
    return regex_parse.parse(_BYTE_LEVEL_REGEX) if part.get("use_regex", True) else None


def _part(kind: Any, part: dict[str, Any]) -> tuple[Node | None, bool]:
    """(what it cuts out, drop the rest) of one element of a sequence."""
    if kind == "Split":
        return _split(part)
    if kind == "Digits":
        return _digits(part), False
    if kind == "Punctuation":
        return _punctuation(part), False
    if kind == "ByteLevel":
        return _byte_level(part), False
    raise refuse(f"pre_tokenizer {kind}")


def compile_pre_tokenizer(spec: Any) -> regex_compile.Programs:
    """Compiles a sequence that ends in ByteLevel; raises ConvertError for anything else."""
    if not isinstance(spec, dict):
        raise refuse("pre_tokenizer: none given, a ByteLevel is needed")
    parts = spec.get("pretokenizers", []) if spec.get("type") == "Sequence" else [spec]
    programs: list[tuple[regex_compile.Program, bool]] = []
    byte_level = False
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if byte_level:
            raise refuse(f"pre_tokenizer {kind} after ByteLevel")
        try:
            tree, drop = _part(kind, part)
            if tree is not None:
                programs.append((regex_compile.compile_tree(tree), drop))
        except RegexError as error:
            raise refuse(f"construct in the pattern of pre_tokenizer {kind}: {error}") from None
        byte_level = kind == "ByteLevel"
    if not byte_level:
        raise refuse("pre_tokenizer without ByteLevel")
    if len(programs) > MAX_SPLITS:
        raise refuse(f"pre_tokenizer of {len(programs)} splits, at most {MAX_SPLITS}")
    try:
        return regex_compile.assemble(programs)
    except RegexError as error:
        raise refuse(f"pre_tokenizer: {error}") from None
