"""Writes a seed corpus for fuzz_tokenizer: python tests/fuzz/tokenizer_seeds.py DIRECTORY."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from headrace_tools.convert.tokenizer import byte_alphabet, compile_tokenizer  # noqa: E402

TEXTS = (
    "", " a  b\r\n'S 12 <s> ab <sx>", "e\u0301\uac00\u11a8 \u1100\u1161 x", "\t\t  \n\n",
    "aaaaaaaa", "internationalization \u4e2d\u6587a", "   a    <s>  \n\n",
)


def small(pattern: str, nfc: bool, ignore_merges: bool) -> dict:
    """A tokenizer.json of 256 bytes, a few merges and three added tokens."""
    alphabet = {byte: c for c, byte in byte_alphabet().items()}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for token in ("aa", "ab", "aaaa", alphabet[32] + "a", alphabet[32] * 2):
        vocab[token] = len(vocab)
    space = alphabet[32]
    merges = [["a", "a"], ["a", "b"], ["aa", "aa"], [space, "a"], [space, space]]
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
        "added_tokens": [
            {"id": 300, "content": "<s>", "special": True, "normalized": False},
            {"id": 301, "content": "<sx>", "special": False, "normalized": True},
            {"id": 302, "content": "<s", "special": False, "normalized": False},
            {"id": 303, "content": "   ", "special": False, "normalized": True}],
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges},
    }


def ranks(folder: Path) -> None:
    """A tiktoken.model of the bytes and some strings that merges do or do not reach."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"ab", b"aa", b"aaa", b" a", b"aabaa", b"zzzz", b"\xe4\xb8", b"\xe4\xb8\xad"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    config = {"tokenizer_class": "TikTokenTokenizer",
              "added_tokens_decoder": {"264": {"content": "<s>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    builds = []
    for number, spec in enumerate((
        small(r"\s+(?!\S)|\s+|[^\s]+", False, False),
        small(r"(?i:'s)|a{2,3}|\p{L}+", True, True),
    )):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "tokenizer.json").write_text(json.dumps(spec))
            builds.append((f"small{number}", compile_tokenizer(Path(directory), 4096).data))
    with tempfile.TemporaryDirectory() as directory:
        ranks(Path(directory))
        builds.append(("ranks", compile_tokenizer(Path(directory), 4096).data))
    for folder in sorted((ROOT / "tests" / "fixtures" / "tokenizers").iterdir()):
        builds.append((folder.name, compile_tokenizer(folder, 4096).data))
    for name, data in builds:
        for number, text in enumerate(TEXTS):
            raw = text.encode("utf-8")
            (target / f"{name}-{number}").write_bytes(bytes([1, len(raw)]) + raw + data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
