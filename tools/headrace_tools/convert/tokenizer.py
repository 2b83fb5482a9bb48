"""Compiles the tokenizer of a checkpoint to tokenizer.bin (formats/tokenizer.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import paths, tiktoken_ranks, tokenizer_file, unicode_tables
from .errors import ConvertError
from .pre_tokenizer import compile_pre_tokenizer, refuse
from .tokenizer_file import (
    MAX_IDS, NORMALISER_NFC, NORMALISER_NONE, Added, Merges, Model, TokenizerBuild,
)


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain}
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


def _normaliser(spec: Any) -> int:
    if spec is None:
        return NORMALISER_NONE
    kind = spec.get("type") if isinstance(spec, dict) else spec
    if kind == "NFC":
        return NORMALISER_NFC
    if kind == "Sequence":
        found = {_normaliser(part) for part in spec.get("normalizers", [])}
        return max(found, default=NORMALISER_NONE)
    raise refuse(f"normalizer {kind}")


def _check_model(model: Any) -> None:
    """Refuses every option of the BPE model that changes its ids and that the engine does not have."""
    if not isinstance(model, dict):
        raise refuse("model: not an object")
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise refuse(f"model type {model.get('type')}")
    # unk_token and fuse_unk have no effect: every byte has a token of its own.
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise refuse(f"model option {option} = {model[option]!r}")


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


def _added_tokens(spec: dict[str, Any], config: dict[str, Any], vocab: dict[str, int],
                  notes: list[str]) -> list[Added]:
    """The added tokens of both files in ascending id."""
    found: dict[int, Added] = {}
    for entry in spec.get("added_tokens") or []:
        number = entry.get("id") if isinstance(entry, dict) else None
        token = tokenizer_file.added_entry("tokenizer.json", number, entry)
        if token.id in found:
            raise ConvertError(f"tokenizer.json: added token id {token.id} is given twice")
        found[token.id] = token
    for token in tokenizer_file.decoder_entries(config):
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
            found[token.id] = Added(before.id, before.content, True, before.normalized)
    names = {number: token for token, number in vocab.items()}
    tokenizer_file.check_spellings(list(found.values()))
    for token in found.values():
        if vocab.get(token.content, token.id) != token.id or \
                names.get(token.id, token.content) != token.content:
            raise ConvertError(f"added token {token.content!r} ({token.id}) contradicts "
                               "model.vocab")
    return sorted(found.values(), key=lambda token: token.id)


def _merges(model: dict[str, Any], vocab: dict[str, int], plain: set[int],
            control: set[int]) -> Merges:
    """(left id, right id) -> (rank, new id), for the merges that bytes can reach."""
    out: Merges = {}
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


def compile_tokenizer(source_dir: Path, vocab_size: int) -> TokenizerBuild:
    """Compiles the tokenizer of a checkpoint directory.

    A tokenizer.json is taken before a tiktoken.model. vocab_size: rows of the model's embedding;
    every id must be below it. Raises ConvertError naming any construct that the engine would
    not reproduce exactly.
    """
    ranks = source_dir / tiktoken_ranks.FILE
    if paths.is_file(source_dir / "tokenizer.json"):
        build = _compile_json(source_dir, vocab_size)
        if paths.is_file(ranks):
            build.notes.append(f"{ranks.name} is not used: there is a tokenizer.json")
        return build
    if paths.is_file(ranks):
        return tiktoken_ranks.compile_ranks(source_dir, vocab_size)
    others = sorted(path.name for path in source_dir.glob("*.tiktoken"))
    if others or paths.is_file(source_dir / "tokenizer.model"):
        raise ConvertError(f"{(others or ['tokenizer.model'])[0]}: not supported; a tokenizer.json "
                           f"or {ranks.name} is needed")
    raise ConvertError(f"{source_dir}: no tokenizer.json and no {ranks.name}")


def _compile_json(source_dir: Path, vocab_size: int) -> TokenizerBuild:
    spec = tokenizer_file.load_json(source_dir / "tokenizer.json")
    config_path = source_dir / "tokenizer_config.json"
    config = tokenizer_file.load_json(config_path) if paths.is_file(config_path) else {}
    notes: list[str] = []
    if spec.get("truncation") is not None:
        notes.append("the truncation setting of tokenizer.json is not used")
    _note_post_processor(spec.get("post_processor"), notes)

    model = spec.get("model")
    _check_model(model)
    vocab = _vocabulary(model)
    normaliser = _normaliser(spec.get("normalizer"))
    programs = compile_pre_tokenizer(spec.get("pre_tokenizer"))
    added = _added_tokens(spec, config, vocab, notes)
    control = {token.id for token in added if token.special}
    if normaliser == NORMALISER_NFC:
        for token in added:
            if token.normalized and not unicode_tables.is_nfc_inert(token.content):
                raise refuse(f"added token {token.content!r}: normalised and not stable under NFC")

    alphabet = byte_alphabet()
    entries, plain = _entries(vocab, added, alphabet, notes)
    bytes_of = {alphabet[token]: i for token, i in vocab.items() if token in alphabet}
    missing = [b for b in range(256) if bytes_of.get(b) not in plain - control]
    if missing:
        raise refuse(f"vocabulary: it lacks a token for the byte 0x{missing[0]:02X}")
    compiled = Model(
        entries, [bytes_of[b] for b in range(256)], _merges(model, vocab, plain, control),
        sorted(plain - control) if model.get("ignore_merges") else None, added, programs,
        normaliser,
    )
    return tokenizer_file.build(compiled, config, vocab_size, "tokenizer.json", notes)


def _note_post_processor(spec: Any, notes: list[str]) -> None:
    if isinstance(spec, dict) and spec.get("special_tokens"):
        names = ", ".join(sorted(spec["special_tokens"]))
        notes.append(f"the post_processor's tokens ({names}) are not added by the engine")


def _entries(vocab: dict[str, int], added: list[Added], alphabet: dict[str, int],
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
    return entries, plain
