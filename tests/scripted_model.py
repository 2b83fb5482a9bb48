"""A model that says what a test tells it to: the next token is a function of the last one alone.

Its vocabulary is the 256 bytes and a few added tokens. Attention and experts add exact zeros, the
embedding is a unit vector for each token, and the head picks the successor.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from containers import edit_manifest, make_container, record, write_trunk
from headrace_tools.convert.tokenizer import byte_alphabet, compile_tokenizer

SPECIAL = ("<|end|>", "<|eom|>", "</s>", "<|user|>", "<|assistant|>")
"""Control tokens; their ids are 256, 257, ..."""
ADDED = "<b>"
"""An added token that is no control token, but is found on request only: the last id."""
VOCABULARY = 256 + len(SPECIAL) + 1


def tokenizer_json() -> dict:
    """256 byte tokens and the added ones, no merges."""
    alphabet = {byte: c for c, byte in byte_alphabet().items()}
    added = [{"id": 256 + i, "content": text, "special": True, "normalized": False}
             for i, text in enumerate(SPECIAL)]
    added.append({"id": VOCABULARY - 1, "content": ADDED, "special": False, "normalized": False})
    return {"added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "model": {"type": "BPE", "vocab": {alphabet[b]: b for b in range(256)}, "merges": []}}


def compiled_tokenizer(work: Path) -> bytes:
    work.mkdir(parents=True, exist_ok=True)
    (work / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return compile_tokenizer(work, VOCABULARY).data


def successors(*chains: list[int] | bytes) -> dict[int, int]:
    """last id -> next id of chains; a token with two successors is a mistake."""
    out: dict[int, int] = {}
    for chain in chains:
        for last, following in zip(chain, chain[1:]):
            assert out.setdefault(last, following) == following, f"{last} is followed by two tokens"
    return out


def make(directory: Path, following: dict[int, int], stop_ids: tuple[int, ...] = (),
         max_position: int = 512) -> Path:
    """Writes the container; ids without an entry are followed by themselves."""
    made = make_container(directory, layers=1, experts=2, hidden=VOCABULARY, inner=8, codec="f32",
                          vocab=VOCABULARY, top_k=1, stop_ids=stop_ids,
                          tokenizer=compiled_tokenizer(directory.with_name(directory.name + ".tokenizer")))
    unit = np.eye(VOCABULARY, dtype=np.float32)
    head = np.zeros_like(unit)
    for last in range(VOCABULARY):
        head[following.get(last, last), last] = 1
    tensors = dict(made["tensors"])
    tensors |= {"embed": unit, "head": head, "final_norm": np.ones(VOCABULARY, np.float32),
                "layers.0.attn.o": np.zeros_like(tensors["layers.0.attn.o"])}
    trunk = write_trunk(directory, {name: ("f64" if name.startswith("rope") else "f32", values)
                                    for name, values in tensors.items()})
    gate = np.ones((8, VOCABULARY), np.float32)
    records = [record("f32", 0, e, gate, gate, np.zeros((VOCABULARY, 8), np.float32)) for e in range(2)]
    (directory / "experts-0000.bin").write_bytes(b"".join(records))

    def change(manifest: dict) -> None:
        manifest["trunk"] = trunk
        manifest["experts"][0]["crc32c"] = [int.from_bytes(r[60:64], "little") for r in records]
        manifest["model"]["max_position"] = max_position

    edit_manifest(directory, change)
    return directory
