"""Writes the seed corpora tests/fuzz/corpus/FUZZER/NAME: python tests/fuzz/seeds.py BASES

BASES is what bases.py wrote. Inputs that once were findings lie beside the seeds as finding-*; this
script leaves them alone.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import checkpoint_script as checkpoint  # noqa: E402

STOP = 15  # ends the edits that the container is made consistent with
GENERATE, VERIFY_FILES, ONE_BY_ONE, SHUFFLED = 32, 64, 4, 8  # bits of how a container is used


def write(fuzzer: str, name: str, data: bytes) -> None:
    path = CORPUS / fuzzer / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# ---- manifests: the places of a script are counted as in json_edit.c ----


def preorder(value: object, path: tuple = (), key: object = None) -> list[tuple]:
    """Paths of all values; of a list of checksums only the first."""
    out = [path]
    if isinstance(value, dict):
        for name, below in value.items():
            out += preorder(below, (*path, name), name)
    elif isinstance(value, list):
        for i, below in enumerate(value[:1] if key == "crc32c" else value):
            out += preorder(below, (*path, i))
    return out


class Script:
    """Edits of one manifest."""

    def __init__(self, manifest: dict) -> None:
        self.model = preorder(manifest["model"])
        self.trunk = preorder(manifest["trunk"])
        self.banks = preorder(manifest["experts"])
        self.data = b""

    def edit(self, op: int, path: tuple, *arguments: int) -> Script:
        part, where = {"model": (self.model, 0), "trunk": (self.trunk, 2), "experts": (self.banks, 3)}[path[0]]
        self.data += struct.pack("<BBH", op, where, part.index(path[1:])) + bytes(arguments)
        return self

    def number(self, path: tuple, value: int) -> Script:
        return self.edit(1, path, 4, value)

    def everywhere(self, path: tuple, value: int) -> Script:
        return self.edit(9, path, value)

    def repaired(self) -> bytes:
        return self.data + bytes([STOP])


def manifests(containers: Path) -> None:
    for index, folder in enumerate(sorted(containers.iterdir())):
        manifest = json.loads((folder / "manifest.json").read_text())
        short = folder.name
        model, bank = manifest["model"], manifest["experts"][0]
        mixers = {m["kind"]: i for i, m in enumerate(model["mixers"])}
        moe = next(i for i, f in enumerate(model["ffns"]) if f["kind"] == "moe")

        def seed(name: str, data: bytes, one: int = GENERATE, two: int = ONE_BY_ONE | SHUFFLED | 1) -> None:
            write("manifest", f"{short}-{name}", bytes([index, one, two]) + data)

        def script() -> Script:
            return Script(manifest)

        seed("whole", script().repaired(), GENERATE | VERIFY_FILES)
        seed("width", script().everywhere(("model", "hidden_size"), 33).repaired())
        seed("experts", script().number(("model", "ffns", moe, "experts"), 64)
             .number(("model", "ffns", moe, "top_k"), 7).number(("model", "ffns", moe, "inner"), 1).repaired())
        seed("codec", script().edit(6, ("experts", 0, "codec"), 4 + index % 6, 0).repaired())
        seed("lie", script().number(("experts", 0, "inner"), bank["inner"] + 1 & 255).data)
        if "attention" in mixers:
            at = ("model", "mixers", mixers["attention"])
            seed("heads", script().number((*at, "heads"), 6).number((*at, "kv_heads"), 3)
                 .number((*at, "head_dim"), 10).repaired())
            sparse = model["mixers"][mixers["attention"]].get("sparse")
            if sparse:
                seed("sparse", script().number((*at, "sparse", "budget"), 2)
                     .number((*at, "sparse", "block"), 1).repaired())
        if "mla" in mixers:
            at = ("model", "mixers", mixers["mla"])
            seed("ranks", script().number((*at, "kv_lora_rank"), 5).number((*at, "v_dim"), 3)
                 .number((*at, "nope_dim"), 1).repaired())
        if "delta" in mixers:
            at = ("model", "mixers", mixers["delta"])
            seed("taps", script().number((*at, "conv_taps"), 8).number((*at, "key_dim"), 3)
                 .number((*at, "value_dim"), 17).repaired())
    for name in ("attention-bf16", "residual-nl4", "hyper-rvq3x256"):
        manifest = json.loads((containers / name / "manifest.json").read_text())
        manifest["provenance"] = {}
        write("json", name, json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode())
    write("json", "nested", b'{"format":' + b"[" * 17 + b"]" * 17 + b"}")
    write("json", "strings", json.dumps({"format": "\u0000\ud83d\ude00\\\"", "version": 1e-7}).encode())


# ---- damaged bytes ----


def records(containers: Path) -> None:
    """Edits: what, which, (part of a record), how, offset u24, and what `how` takes."""
    nan, infinite, largest = 2, 0, 5  # of the list of awkward floats
    for index, folder in enumerate(sorted(containers.iterdir())):
        edits = {
            "whole": b"",
            "header": bytes([0, 0, 4, 2, 6, 0, 0, 1]),
            "gate-nan": bytes([0, 1, 0, 4 | 2 << 3, 0, 0, 0, nan]),
            "up-infinite": bytes([0, 2, 1, 4 | 1 << 3, 2, 0, 0, infinite]),
            "down-bytes": bytes([0, 3, 2, 3, 0, 0, 0, 255]),
            "all-largest": bytes([0, 0, 0, 6 | 1 << 3, 0, 0, 0, largest, 3]),
            "zeros": bytes([0, 0, 0, 3, 0, 0, 0, 0]),
            "trunk-scale": bytes([4, 5, 4 | 2 << 3, 0, 0, 0, largest, 4, 9, 4 | 2 << 3, 4, 0, 0, nan]),
        }
        if (folder / "codebooks.bin").exists():
            edits["books"] = bytes([6, 1, 3, 64, 0, 0, 31])
            edits["books-unit"] = bytes([6, 0, 4 | 2 << 3, 8, 0, 0, nan])
        if (folder / "ngram.bin").exists():
            edits["rows"] = bytes([7, 0, 6 | 1 << 3, 0, 0, 0, largest, 1])
            edits["page"] = bytes([7, 1, 2, 0xF4, 0x0F, 0, 1])
        for name, data in edits.items():
            write("records", f"{folder.name}-{name}",
                  bytes([index, GENERATE, ONE_BY_ONE | SHUFFLED | 1]) + data + bytes(8))


def sessions(containers: Path) -> None:
    """Mode, fields, number of edits, fields' values; per edit: piece, how, place, value."""
    for index, folder in enumerate(sorted(containers.iterdir())):
        cases = {
            "whole": bytes([0, 0, 0]),
            "long": bytes([0, 1, 0, 24]),
            "nan": bytes([0, 0, 2, 1, 2 | 2 << 4, 0, 0, 2, 2 | 3 << 4, 0, 0]),
            "no-logits": bytes([0, 4, 0, 0]),
            "pending": bytes([0, 2, 0, 3, 0, 0, 0]),
            "position": bytes([0, 8, 0, 255, 255, 255, 127]),
            "late": bytes([2, 0, 0, 200, 0, 0, 0, 1]),
        }
        for name, data in cases.items():
            write("session", f"{folder.name}-{name}", bytes([index]) + data + bytes(4))
    # Use counts: 128 + bytes added; per change place and value.
    for name, data in {"whole": [128], "lie": [128, 68, 0, 255, 71, 0, 255], "cut": [124, 48, 0, 4],
                       "sum": [128, 64, 0, 9, 68, 0, 1]}.items():
        write("session", f"usage-{name}", bytes([0, 4, *data]))
    write("session", "usage-flip", bytes([0, 6, 128, 70, 0, 1]))
    write("session", "text", bytes([0, 1]) + b"HRSESS01" + bytes(120))


TEXTS = ("", " a  b\r\n'S 12 <s> ab <sx>", "e\u0301\uac00\u11a8 \u1100\u1161 x", "aaaaaaaa  \t\n",
         "internationalization \u4e2d\u6587a 1234567")


def tokenizers(files: Path) -> None:
    """Mode 5: special spellings, edits of a file; per edit: section, how, place, value."""
    edits = (b"", bytes([4, 2 | 32, 3, 0, 0, 1, 0, 0, 0, 4]), bytes([9, 1, 0, 0, 0, 2, 0]), bytes([0, 255, 100]))
    for index, file in enumerate(sorted(files.iterdir())):
        for number, text in enumerate(TEXTS):
            raw = text.encode()
            write("tokenizer", f"{file.name}-{number}",
                  bytes([5, len(raw)]) + raw + bytes([index]) + edits[number % len(edits)] + bytes(1))
    raw = TEXTS[1].encode()
    write("tokenizer", "file", bytes([1, len(raw)]) + raw + (files / "small0").read_bytes())


def checkpoints() -> None:
    """Shard, kind of edit, and what it takes (checkpoint_script.py)."""
    for index, name in enumerate(checkpoint.NAMES):
        write("converter", f"{name}-whole", bytes([index, index % len(checkpoint.OPTIONS)]))
    edits = {
        "value": [0, 0, 0, 30, 0, 0, 0, 12], "delete": [0, 0, 4, 9, 0, 0, 0], "dtype": [0, 2, 0, 3, 0, 0, 0, 3],
        "offsets": [0, 2, 1, 4, 0, 7, 0], "huge": [0, 2, 5, 1, 0, 0, 0, 9, 0], "scalar": [0, 2, 4, 2, 0, 0, 0],
        "config": [0, 4, 0, 0, 9, 0, 0, 0, 22], "config-word": [0, 4, 0, 0, 12, 0, 0, 0, 33],
        "width": [0, 4, 0, 9, 14, 0, 0, 0, 24], "length": [0, 6, 3], "cut": [0, 7, 0, 0, 1], "byte": [0, 8, 40, 0, 0, 255],
        "nan": [0, 9, 0, 1, 0, 31, 0xC0, 0x7F], "twice": [0, 10], "deep": [0, 0, 8, 2, 0, 0, 0, 39],
    }
    for number, (name, data) in enumerate(edits.items()):
        write("converter", name, bytes([number % len(checkpoint.NAMES), number % len(checkpoint.OPTIONS), *data]))


def main(bases: Path) -> None:
    for old in CORPUS.glob("*/*"):
        if not old.name.startswith("finding-"):
            old.unlink()
    manifests(bases / "containers")
    records(bases / "containers")
    sessions(bases / "containers")
    tokenizers(bases / "tokenizers")
    checkpoints()
    files = list(CORPUS.glob("*/*"))
    print(f"{len(files)} files, {sum(f.stat().st_size for f in files)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
