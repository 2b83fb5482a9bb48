"""Writes what the fuzzers start from: small containers with every kind of part and every codec, and
tokenizers of every style.

python tests/fuzz/bases.py BUILD DIRECTORY

BUILD is a meson build directory with libheadrace (rvq experts are encoded by it). The names are
fixed: an input of a fuzzer chooses by index among them, sorted. What is there already is kept.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tools", "python", "tests"):
    sys.path.insert(0, str(ROOT / folder))

import headrace  # noqa: E402
from headrace_tools.convert.cli import main as convert  # noqa: E402
from headrace_tools.convert.tokenizer import byte_alphabet, compile_tokenizer  # noqa: E402
from support.build import shared_library  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"

#: name -> (fixture, experts, trunk)
CONTAINERS = {
    "attention-bf16": ("glm4_moe_air", "bf16", "bf16"),
    "attention-f32": ("qwen3_moe_yarn", "f32", "f32"),
    "delta-int8": ("qwen3_5_moe_eps", "int8", "int8"),
    "delta-rvq4x64": ("kimi_linear_eps", "rvq3", "int8"),
    "hyper-rvq3x256": ("qwen4_exp", "rvq3x256", "bf16"),
    "mla-int4": ("deepseek_v3_eps", "int4", "nl4"),
    "mla-rvq2x256": ("deepseek_v2_lite", "rvq2", "int8"),
    "residual-nl4": ("kimi_k3_eps", "nl4", "nl4"),
    "sinks-mxfp4": ("gpt_oss", "auto", "nl4"),
}


def containers(target: Path) -> int:
    for name, (fixture, experts, trunk) in CONTAINERS.items():
        path = target / name
        if (path / "manifest.json").exists() and not (path / "conversion.log").exists():
            continue
        code = convert([str(FIXTURES / fixture), str(path), "--experts", experts, "--trunk", trunk,
                        "--no-tokenizer", "--overwrite", "--quiet"])
        if code != 0:
            return code
    return 0


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


def tokenizers(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for number, spec in enumerate((
        small(r"\s+(?!\S)|\s+|[^\s]+", False, False),
        small(r"(?i:'s)|a{2,3}|\p{L}+", True, True),
    )):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "tokenizer.json").write_text(json.dumps(spec))
            (target / f"small{number}").write_bytes(compile_tokenizer(Path(directory), 4096).data)
    with tempfile.TemporaryDirectory() as directory:
        ranks(Path(directory))
        (target / "ranks").write_bytes(compile_tokenizer(Path(directory), 4096).data)
    for folder in sorted((FIXTURES / "tokenizers").iterdir()):
        (target / folder.name).write_bytes(compile_tokenizer(folder, 4096).data)


def main(build: Path, target: Path) -> int:
    headrace.use_library(shared_library(build, "headrace"))
    tokenizers(target / "tokenizers")
    return containers(target / "containers")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
