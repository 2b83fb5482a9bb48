"""Synthetic containers for tests, written from formats/container.md and formats/codecs.md alone.

Nothing here uses the engine: the checksum, the codecs and the layouts are a second implementation
that the C code is compared with. Source of every rule: formats/.
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable

import numpy as np

ALIGN = 4096
CHUNK = 1 << 20
HEADER = struct.Struct("<4sHHIIIIQQQQII")  # the 64-byte record header
CODEC_NUMBER = {"f32": 1, "f64": 2, "bf16": 3, "int8": 4}


# ---- CRC32C ------------------------------------------------------------------


def _table() -> np.ndarray:
    """The 256 remainders of the reflected Castagnoli polynomial, uint32 [256]."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table.astype(np.uint32)


_CRC = _table()


@lru_cache(maxsize=8)
def _shift(n: int) -> list[list[int]]:
    """Tables [4][256] that move a CRC register over n zero bytes."""
    basis = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(n):
        basis = _CRC[basis & 0xFF] ^ (basis >> 8)
    tables = []
    for byte in range(4):
        row = [0] * 256
        for value in range(1, 256):
            low = value & -value
            row[value] = row[value ^ low] ^ int(basis[8 * byte + low.bit_length() - 1])
        tables.append(row)
    return tables


def crc32c(data: bytes) -> int:
    """CRC32C of data; crc32c(b"123456789") == 0xE3069283.

    Equal stretches are summed side by side in numpy and joined by the zero-byte operator.
    """
    width = 64 if len(data) < 65536 else 1024
    lanes = len(data) // width
    crc = 0xFFFFFFFF
    if lanes:
        block = np.frombuffer(data, np.uint8, lanes * width).reshape(lanes, width)
        state = np.zeros(lanes, np.uint32)
        for column in np.ascontiguousarray(block.T):
            state = _CRC[(state ^ column) & 0xFF] ^ (state >> 8)
        t0, t1, t2, t3 = _shift(width)
        for part in state.tolist():
            crc = t0[crc & 255] ^ t1[crc >> 8 & 255] ^ t2[crc >> 16 & 255] ^ t3[crc >> 24] ^ part
    for byte in data[lanes * width :]:
        crc = int(_CRC[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


# ---- codecs --------------------------------------------------------------------


def round_up(n: int, unit: int) -> int:
    """The next multiple of unit at or above n."""
    return (n + unit - 1) // unit * unit


def encode(codec: str, w: np.ndarray) -> bytes:
    """The blob of a float32 matrix [rows, cols]. Raises KeyError for an unknown codec."""
    w = np.ascontiguousarray(w, np.float32)
    if codec == "f32":
        return w.tobytes()
    if codec == "f64":
        return w.astype(np.float64).tobytes()
    if codec == "bf16":
        bits = w.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    if codec != "int8":
        raise KeyError(codec)
    rows, cols = w.shape
    padded_rows, padded_cols = round_up(rows, 64), round_up(cols, 64)
    scale = np.max(np.abs(w), axis=1) / np.float32(127)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale).astype(np.float32)
    safe = np.where(scale == 0, np.float32(1), scale)[:, None]
    q = np.where(scale[:, None] == 0, np.float32(0), np.rint(w / safe))
    stored = np.full((padded_rows, padded_cols), 128, np.uint8)
    stored[:rows, :cols] = (np.clip(q, -127, 127) + 128).astype(np.uint8)
    panels = stored.reshape(padded_rows // 64, 64, padded_cols // 4, 4).transpose(0, 2, 1, 3)
    scales = np.zeros(padded_rows, np.float32)
    scales[:rows] = scale
    return scales.tobytes() + np.ascontiguousarray(panels).tobytes()


def record(codec: str, layer: int, expert: int, gate: np.ndarray, up: np.ndarray, down: np.ndarray,
           biases: tuple[np.ndarray, ...] = ()) -> bytes:
    """One expert's record: gate and up [inner, hidden], down [hidden, inner], all float32.

    biases: of gate [inner], up [inner] and down [hidden], or none.
    """
    inner, hidden = gate.shape
    return record_of_blobs(CODEC_NUMBER[codec], layer, expert, hidden, inner,
                           [encode(codec, matrix) for matrix in (gate, up, down)], biases)


def record_of_blobs(codec: int, layer: int, expert: int, hidden: int, inner: int,
                    blobs: list[bytes], biases: tuple[np.ndarray, ...] = ()) -> bytes:
    """A record from the blobs of gate, up and down; `codec` is the number of their codec."""
    offsets, parts, at = [], [], 64
    for blob in blobs:
        offsets.append(at)
        parts.append(blob + bytes(round_up(len(blob), 64) - len(blob)))
        at += len(parts[-1])
    bias_at = at if biases else 0
    for bias in biases:
        blob = np.ascontiguousarray(bias, "<f4").tobytes()
        parts.append(blob + bytes(round_up(len(blob), 64) - len(blob)))
        at += len(parts[-1])
    total = round_up(at, ALIGN)
    body = b"".join(parts) + bytes(total - at)
    fields = (b"HREX", 1, codec, layer, expert, hidden, inner, total, *offsets, bias_at)
    checksum = crc32c(HEADER.pack(*fields, 0) + body)
    return HEADER.pack(*fields, checksum) + body


# ---- files ---------------------------------------------------------------------


def write_digests(path: Path) -> None:
    """Writes manifest.sha256 over everything else that lies in the directory `path`."""
    names = sorted(f.name for f in path.iterdir() if f.is_file() and f.name != "manifest.sha256")
    lines = (f"{hashlib.sha256((path / n).read_bytes()).hexdigest()}  {n}\n" for n in names)
    (path / "manifest.sha256").write_text("".join(lines))


def write_manifest(path: Path, manifest: Any) -> None:
    """Writes manifest.json as the converter does, and manifest.sha256 to match."""
    text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    (path / "manifest.json").write_text(text, encoding="utf-8")
    write_digests(path)


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Applies `change` to the manifest of `path` (in place, or returns a new value)."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    result = change(manifest)
    write_manifest(path, manifest if result is None else result)


def write_trunk(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Writes trunk.bin from name -> (codec, float array [n] or [rows, cols]).

    Returns the manifest's "trunk" object.
    """
    index, blob = [], bytearray()
    for name, (codec, array) in tensors.items():
        data = encode(codec, array.reshape(1, -1) if array.ndim == 1 else array) \
            if codec != "f64" else np.ascontiguousarray(array, np.float64).tobytes()
        index.append({"name": name, "codec": codec, "shape": list(array.shape),
                      "offset": len(blob), "bytes": len(data)})
        blob += data + bytes(round_up(len(data), ALIGN) - len(data))
    (path / "trunk.bin").write_bytes(blob)
    sums = [crc32c(bytes(blob[i : i + CHUNK])) for i in range(0, len(blob), CHUNK)]
    return {"file": "trunk.bin", "bytes": len(blob), "chunk": CHUNK, "crc32c": sums,
            "tensors": index}


def _parts(layers: int, experts: int, hidden: int, inner: int, top_k: int, vocab: int,
           dense: set[int]) -> dict[str, Any]:
    """A "model" object: plain attention without positions' tricks, softmax experts."""
    attention = {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary_dim": 4,
                 "rope": "rope.0", "qk_norm": False, "output_gate": False}
    moe = {"kind": "moe", "experts": experts, "top_k": top_k, "inner": inner, "router": "softmax",
           "renormalize": True, "scaling": 1, "activation": "silu_glu", "shared_inner": 0,
           "shared_gate": False}
    plain = {"kind": "dense", "inner": inner, "activation": "silu_glu"}
    ffns = ([moe] if len(dense) < layers else []) + ([plain] if dense else [])
    return {"name": "synthetic", "vocab_size": vocab, "hidden_size": hidden, "max_position": 512,
            "norm_eps": "0x1.0c6f7a0b5ed8dp-20", "residual": {"kind": "plain"}, "head": "head",
            "mixers": [attention], "ffns": ffns,
            "layers": [{"mixer": 0, "ffn": ffns.index(plain if i in dense else moe)}
                       for i in range(layers)]}


def _trunk_tensors(rng: np.random.Generator, codec: str, layers: int, experts: int, hidden: int,
                   inner: int, vocab: int, dense: set[int]) -> dict[str, tuple[str, np.ndarray]]:
    """Every tensor that _parts asks for, small random values; norms are near 1."""

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    out = {"embed": (codec, matrix(vocab, hidden)), "head": (codec, matrix(vocab, hidden)),
           "final_norm": ("f32", norm()),
           "rope.0": ("f64", 10000.0 ** (-np.arange(2, dtype=np.float64) / 2))}
    for i in range(layers):
        p = f"layers.{i}."
        out[p + "mixer_norm"] = ("f32", norm())
        out[p + "ffn_norm"] = ("f32", norm())
        for name, rows, cols in (("q", 16, hidden), ("k", 8, hidden), ("v", 8, hidden),
                                 ("o", hidden, 16)):
            out[p + "attn." + name] = (codec, matrix(rows, cols))
        if i in dense:
            for name, rows, cols in (("gate", inner, hidden), ("up", inner, hidden),
                                     ("down", hidden, inner)):
                out[p + "ffn." + name] = (codec, matrix(rows, cols))
        else:
            out[p + "moe.router"] = ("f32", matrix(experts, hidden))
    return out


def make_container(directory: str | Path, layers: int = 2, experts: int = 8, hidden: int = 64,
                   inner: int = 32, codec: str = "int8", seed: int = 0, *, top_k: int = 2,
                   vocab: int = 96, trunk_codec: str = "f32", dense: tuple[int, ...] = (),
                   tokenizer: bytes | None = b"synthetic tokenizer\n",
                   stop_ids: tuple[int, ...] = (1,), biased: bool = False) -> dict[str, Any]:
    """Writes a whole container and returns what is in it.

    directory is created. Layers listed in `dense` have a dense ffn and no bank; with `biased` the
    experts have biases. The result has path, manifest, banks (layers that have a bank, ascending), record_bytes, tensors (name ->
    float array) and weights ((layer, expert) -> gate, up, down as float32, before encoding).
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = _trunk_tensors(rng, trunk_codec, layers, experts, hidden, inner, vocab, set(dense))
    trunk = write_trunk(path, tensors)
    banks, weights = [], {}
    for layer in (i for i in range(layers) if i not in dense):
        records = []
        for expert in range(experts):
            gate, up = rng.standard_normal((2, inner, hidden), np.float32) / np.float32(hidden**0.5)
            down = rng.standard_normal((hidden, inner), np.float32) / np.float32(inner**0.5)
            weights[layer, expert] = gate, up, down
            biases = tuple(rng.standard_normal(n, np.float32) for n in (inner, inner, hidden)
                           if biased)
            records.append(record(codec, layer, expert, gate, up, down, biases))
        name = f"experts-{layer:04d}.bin"
        (path / name).write_bytes(b"".join(records))
        banks.append({"layer": layer, "file": name, "codec": codec, "experts": experts,
                      "hidden": hidden, "inner": inner, "record_bytes": len(records[0]),
                      "crc32c": [HEADER.unpack(r[:64])[-1] for r in records]}
                     | ({"bias": True} if biased else {}))
    if tokenizer is not None:
        (path / "tokenizer.bin").write_bytes(tokenizer)
    count = sum(int(np.prod(t["shape"])) for t in trunk["tensors"] if t["codec"] != "f64")
    one = 3 * hidden * inner + (2 * inner + hidden) * biased
    count += sum(b["experts"] * one for b in banks)
    manifest = {
        "format": "headrace-container", "version": 1,
        "model": _parts(layers, experts, hidden, inner, top_k, vocab, set(dense)),
        "trunk": trunk, "experts": banks, "parameters": count, "stop_ids": list(stop_ids),
        "tokenizer": None if tokenizer is None else {"file": "tokenizer.bin",
                                                     "bytes": len(tokenizer)},
        "provenance": {"source": "synthetic", "converter": "tests/containers.py", "seed": seed},
    }
    for ffn in manifest["model"]["ffns"]:
        if biased and ffn["kind"] == "moe":
            ffn["expert_bias"] = True
    write_manifest(path, manifest)
    return {"path": str(path), "manifest": manifest, "banks": [b["layer"] for b in banks],
            "record_bytes": banks[0]["record_bytes"] if banks else 0,
            "tensors": {n: a for n, (_, a) in tensors.items()}, "weights": weights}
