"""Compiles a Hugging Face tokenizer to tokenizer.bin (formats/tokenizer.md)."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..crc32c import crc32c
from . import regex_compile, regex_parse, unicode_tables
from .errors import ConvertError
from .regex_parse import RegexError

MAGIC = b"HRTOKENS"
VERSION = 1
MODEL_BYTE_BPE = 1
IGNORE_MERGES = 1
NORMALISER_NONE, NORMALISER_NFC = 0, 1
CONTROL, ADDED = 1, 2  # vocabulary flags
NOTHING = 0xFFFFFFFF
MAX_IDS = 1 << 24
MAX_SPLITS = 8
MAX_TOKEN_BYTES = 1 << 16

_HEADER = struct.Struct("<8sIIQIIII")
_SECTION = struct.Struct("<IIQQ")

# The split that ByteLevel itself makes when use_regex is on.
_BYTE_LEVEL_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


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
class _Added:
    id: int
    content: str
    special: bool
    normalized: bool


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain}
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


def _refuse(what: str) -> ConvertError:
    return ConvertError(f"tokenizer.json: unsupported {what}")


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConvertError(f"{path.name}: cannot be read: {error}") from None


def _normaliser(spec: Any) -> int:
    if spec is None:
        return NORMALISER_NONE
    kind = spec.get("type") if isinstance(spec, dict) else spec
    if kind == "NFC":
        return NORMALISER_NFC
    if kind == "Sequence":
        found = {_normaliser(part) for part in spec.get("normalizers", [])}
        return max(found, default=NORMALISER_NONE)
    raise _refuse(f"normalizer {kind}")


def _split_tree(spec: dict[str, Any]) -> tuple[regex_parse.Node, bool]:
    """(tree, drop what it does not match) of a Split."""
    pattern = spec.get("pattern")
    behaviour, invert = spec.get("behavior"), bool(spec.get("invert", False))
    if behaviour == "Isolated":
        drop = False
    elif behaviour == "Removed" and invert:
        drop = True
    else:
        raise _refuse(f"pre_tokenizer Split with behavior {behaviour}, invert {invert}")
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return regex_parse.literal(pattern["String"]), drop
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        raise _refuse("pre_tokenizer Split without a String or Regex pattern")
    return regex_parse.parse(pattern["Regex"]), drop


def _pre_tokenizer(spec: Any) -> regex_compile.Programs:
    """Compiles a sequence of Splits that ends in ByteLevel."""
    if not isinstance(spec, dict):
        raise _refuse("pre_tokenizer: none given, a ByteLevel is needed")
    parts = spec.get("pretokenizers", []) if spec.get("type") == "Sequence" else [spec]
    programs: list[tuple[regex_compile.Program, bool]] = []
    byte_level = False
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if byte_level:
            raise _refuse(f"pre_tokenizer {kind} after ByteLevel")
        try:
            if kind == "Split":
                tree, drop = _split_tree(part)
                programs.append((regex_compile.compile_tree(tree), drop))
            elif kind == "ByteLevel":
                if part.get("add_prefix_space", True):
                    raise _refuse("pre_tokenizer ByteLevel with add_prefix_space")
                if part.get("use_regex", True):
                    tree = regex_parse.parse(_BYTE_LEVEL_REGEX)
                    programs.append((regex_compile.compile_tree(tree), False))
                byte_level = True
            else:
                raise _refuse(f"pre_tokenizer {kind}")
        except RegexError as error:
            raise _refuse(f"construct in the pattern of pre_tokenizer {kind}: {error}") from None
    if not byte_level:
        raise _refuse("pre_tokenizer without ByteLevel")
    if len(programs) > MAX_SPLITS:
        raise _refuse(f"pre_tokenizer of {len(programs)} splits, at most {MAX_SPLITS}")
    try:
        return regex_compile.assemble(programs)
    except RegexError as error:
        raise _refuse(f"pre_tokenizer: {error}") from None


def _check_model(model: Any) -> None:
    """Refuses every option of the BPE model that changes its ids and is not implemented."""
    if not isinstance(model, dict):
        raise _refuse("model: not an object")
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise _refuse(f"model type {model.get('type')}")
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                   "byte_fallback"):
        if model.get(option):
            raise _refuse(f"model option {option} = {model[option]!r}")


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab")
    good = isinstance(vocab, dict) and all(
        type(i) is int and 0 <= i < MAX_IDS for i in vocab.values()
    )
    if not good:
        raise ConvertError("tokenizer.json: model.vocab is not a map from tokens to ids")
    if len(set(vocab.values())) != len(vocab):
        raise ConvertError("tokenizer.json: model.vocab gives one id to two tokens")
    return vocab


def _added_entry(where: str, number: Any, entry: Any) -> _Added:
    content = entry.get("content") if isinstance(entry, dict) else None
    if type(number) is not int or not 0 <= number < MAX_IDS or not isinstance(content, str):
        raise ConvertError(f"{where}: an added token without a valid id and content")
    for option in ("single_word", "lstrip", "rstrip"):
        if entry.get(option):
            raise ConvertError(f"{where}: unsupported option {option} of added token {content!r}")
    special = bool(entry.get("special", False))
    return _Added(number, content, special, bool(entry.get("normalized", not special)))


def _added_tokens(spec: dict[str, Any], config: dict[str, Any], vocab: dict[str, int],
                  notes: list[str]) -> list[_Added]:
    """The added tokens of both files in ascending id."""
    found: dict[int, _Added] = {}
    for entry in spec.get("added_tokens") or []:
        number = entry.get("id") if isinstance(entry, dict) else None
        token = _added_entry("tokenizer.json", number, entry)
        if token.id in found:
            raise ConvertError(f"tokenizer.json: added token id {token.id} is given twice")
        found[token.id] = token
    more = config.get("added_tokens_decoder") or {}
    if not isinstance(more, dict):
        raise ConvertError("tokenizer_config.json: added_tokens_decoder is not an object")
    for key, entry in more.items():
        number = int(key) if key.isascii() and key.isdigit() else None
        token = _added_entry("tokenizer_config.json", number, entry)
        before = found.get(token.id)
        if before is None:
            notes.append(f"added token {token.content!r} ({token.id}) is only in "
                         "tokenizer_config.json")
            found[token.id] = token
        elif before.content != token.content:
            raise ConvertError(f"tokenizer_config.json: added token {token.id} is "
                               f"{token.content!r}, in tokenizer.json it is {before.content!r}")
        elif token.special and not before.special:
            notes.append(f"added token {token.content!r} is special by tokenizer_config.json")
            found[token.id] = _Added(before.id, before.content, True, before.normalized)
    names = {number: token for token, number in vocab.items()}
    contents: dict[str, int] = {}
    for token in found.values():
        if not token.content:
            raise ConvertError(f"added token {token.id} has no content")
        if contents.setdefault(token.content, token.id) != token.id:
            raise ConvertError(f"added token {token.content!r} has two ids")
        if vocab.get(token.content, token.id) != token.id or \
                names.get(token.id, token.content) != token.content:
            raise ConvertError(f"added token {token.content!r} ({token.id}) contradicts "
                               "model.vocab")
    return sorted(found.values(), key=lambda token: token.id)


def _merges(model: dict[str, Any], vocab: dict[str, int], plain: set[int],
            control: set[int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(left id, right id) -> (rank, new id), for the merges that bytes can reach."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    if not isinstance(model["merges"], list):
        raise ConvertError("tokenizer.json: model.merges is not a list")
    for rank, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or [type(token) for token in pair] != [str, str]:
            raise ConvertError(f"tokenizer.json: merge {rank} is not a pair of tokens")
        left, right = pair
        for token in (left, right, left + right):
            if token not in vocab:
                raise ConvertError(f"tokenizer.json: merge {rank} needs {token!r}, "
                                   "which model.vocab lacks")
        new = vocab[left + right]
        if vocab[left] not in plain or vocab[right] not in plain:
            continue
        if new in control or new not in plain:
            raise ConvertError(f"tokenizer.json: merge {rank} builds the added token "
                               f"{left + right!r} from plain text")
        out[vocab[left], vocab[right]] = (rank, new)
    return out


def _u32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _matcher(tokens: list[_Added]) -> bytes:
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


def compile_tokenizer(source_dir: Path, vocab_size: int) -> TokenizerBuild:
    """Compiles the tokenizer of a checkpoint directory.

    vocab_size: rows of the model's embedding; every id must be below it. Raises ConvertError
    naming any construct that the engine would not reproduce exactly.
    """
    path = source_dir / "tokenizer.json"
    if not path.is_file():
        if list(source_dir.glob("*.tiktoken")) or (source_dir / "tiktoken.model").is_file():
            raise ConvertError("tiktoken.model: rank files without merges are not supported; "
                               "a tokenizer.json is needed")
        raise ConvertError(f"{source_dir}: no tokenizer.json")
    spec = _load(path)
    config_path = source_dir / "tokenizer_config.json"
    config = _load(config_path) if config_path.is_file() else {}
    if not isinstance(spec, dict) or not isinstance(config, dict):
        raise ConvertError("tokenizer.json and tokenizer_config.json must be objects")
    notes: list[str] = []
    if spec.get("truncation") is not None:
        notes.append("the truncation setting of tokenizer.json is not used")
    _note_post_processor(spec.get("post_processor"), notes)

    model = spec.get("model")
    _check_model(model)
    vocab = _vocabulary(model)
    normaliser = _normaliser(spec.get("normalizer"))
    programs = _pre_tokenizer(spec.get("pre_tokenizer"))
    added = _added_tokens(spec, config, vocab, notes)
    control = {token.id for token in added if token.special}
    if normaliser == NORMALISER_NFC:
        for token in added:
            if token.normalized and not unicode_tables.is_nfc_inert(token.content):
                raise _refuse(f"added token {token.content!r}: normalised and not stable under NFC")

    alphabet = byte_alphabet()
    entries, plain = _entries(vocab, added, alphabet, notes)
    if len(entries) > vocab_size:
        raise ConvertError(f"tokenizer.json: token id {len(entries) - 1} is outside the model's "
                           f"vocabulary of {vocab_size}")
    bytes_of = {alphabet[token]: i for token, i in vocab.items() if token in alphabet}
    missing = [b for b in range(256) if bytes_of.get(b) not in plain - control]
    if missing:
        raise _refuse(f"vocabulary: it lacks a token for the byte 0x{missing[0]:02X}")
    merges = sorted(_merges(model, vocab, plain, control).items())

    flags = IGNORE_MERGES if model.get("ignore_merges") else 0
    whole = sorted(plain - control, key=lambda i: entries[i]) if flags else []
    nfc = [bytes(s) for s in unicode_tables.normalisation()] if normaliser else [b""] * 5
    sections = [
        _u32(_offsets([len(entry) for entry in entries])),
        _flag_bytes(len(entries), added),
        b"".join(entries),
        _u32([bytes_of[b] for b in range(256)]),
        _u32(_merge_index(merges, len(entries))),
        b"".join(struct.pack("<III", right, rank, new) for (_, right), (rank, new) in merges),
        _u32(whole),
        _matcher([token for token in added if not token.normalized]),
        _matcher([token for token in added if token.normalized]),
        programs.splits, programs.nodes, programs.sets, programs.class_index,
        programs.class_blocks, *nfc,
    ]
    contents = {token.content: token.id for token in added}
    return TokenizerBuild(pack(sections, flags, normaliser), notes, contents, sorted(control),
                          _named(config, contents))


def _note_post_processor(spec: Any, notes: list[str]) -> None:
    if isinstance(spec, dict) and spec.get("special_tokens"):
        names = ", ".join(sorted(spec["special_tokens"]))
        notes.append(f"the post_processor's tokens ({names}) are not added by the engine")


def _entries(vocab: dict[str, int], added: list[_Added], alphabet: dict[str, int],
             notes: list[str]) -> tuple[list[bytes], set[int]]:
    """Bytes of each id, and the ids whose spelling is in the byte alphabet."""
    spelled = {token.id for token in added}
    size = max([*vocab.values(), *spelled, -1]) + 1
    entries = [b""] * size
    plain = set()
    foreign = 0
    for token, number in vocab.items():
        if all(c in alphabet for c in token):
            entries[number] = bytes(alphabet[c] for c in token)
            if token:
                plain.add(number)
        else:
            entries[number] = token.encode("utf-8")
            foreign += number not in spelled
    for token in added:
        spelling = token.content.encode("utf-8")
        if spelling != entries[token.id]:
            plain.discard(token.id)
        entries[token.id] = spelling
    if foreign:
        notes.append(f"{foreign} vocabulary entries outside the byte alphabet are kept as text")
    long = [i for i, entry in enumerate(entries) if len(entry) > MAX_TOKEN_BYTES]
    if long:
        raise _refuse(f"vocabulary: token {long[0]} has more than {MAX_TOKEN_BYTES} bytes")
    return entries, plain


def _offsets(lengths: list[int]) -> list[int]:
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def _flag_bytes(size: int, added: list[_Added]) -> bytes:
    flags = bytearray(size)
    for token in added:
        flags[token.id] = ADDED | (CONTROL if token.special else 0)
    return bytes(flags)


def _merge_index(merges: list[tuple[tuple[int, int], tuple[int, int]]], size: int) -> list[int]:
    counts = [0] * size
    for (left, _), _ in merges:
        counts[left] += 1
    return _offsets(counts)


def _named(config: dict[str, Any], contents: dict[str, int]) -> dict[str, int]:
    out = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in contents:
            out[name] = contents[text]
    return out
