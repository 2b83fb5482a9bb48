"""The rvq codecs in NumPy, from formats/codecs.md alone: random codebooks and matrices."""

from __future__ import annotations

import struct

import numpy as np

from containers import crc32c, edit_manifest, record_of_blobs, write_digests

#: codec -> (number, stages, entries, limit of an entry, bytes of codes for a sub-vector)
SHAPES = {"rvq4x64": (8, 4, 64, 31, 3), "rvq3x256": (9, 3, 256, 42, 3),
          "rvq2x256": (10, 2, 256, 63, 2)}


def pad64(n: int) -> int:
    return -(-n // 64) * 64


def pack_codes(codec: str, codes: np.ndarray) -> np.ndarray:
    """codes [rows_pad, cols_pad / 8, stages] -> the bytes of the page: [R/64][C/32][4][planes][64]."""
    stages, planes = SHAPES[codec][1], SHAPES[codec][4]
    if stages == 4:
        high = codes[..., 3:4] >> np.array([0, 2, 4], np.uint8) & 3
        codes = codes[..., :3] | high << 6
    rows, subs, _ = codes.shape
    parts = codes.reshape(rows // 64, 4, 16, subs // 4, 4, planes)  # panel, group, row, K/32, i, plane
    return np.ascontiguousarray(parts.transpose(0, 3, 1, 5, 2, 4)).astype(np.uint8).ravel()


def random_books(rng: np.random.Generator, codec: str) -> np.ndarray:
    """int8 [stages, entries, 8]"""
    _, stages, entries, limit, _ = SHAPES[codec]
    return rng.integers(-limit, limit + 1, (stages, entries, 8)).astype(np.int8)


def book_set(codec: str, books: np.ndarray, unit: float = 1.0) -> bytes:
    """A set of codebooks.bin."""
    header = struct.pack("<4sHHf48x", b"HRCB", 1, SHAPES[codec][0], unit)
    return header + struct.pack("<I", crc32c(header + bytes(4) + books.tobytes())) + books.tobytes()


def random_matrix(rng: np.random.Generator, codec: str, books: np.ndarray, rows: int,
                  cols: int) -> tuple[bytes, np.ndarray]:
    """A blob and the float32 weights [rows, cols] that it stands for, of about unit row norm."""
    _, stages, entries, _, _ = SHAPES[codec]
    rows_pad, cols_pad = pad64(rows), pad64(cols)
    codes = rng.integers(0, entries, (rows_pad, cols_pad // 8, stages)).astype(np.uint8)
    parts = [books[s][codes[..., s]].astype(np.int64) for s in range(stages)]
    w = sum(parts).reshape(rows_pad, cols_pad)[:rows, :cols]
    scale = np.zeros(rows_pad, np.float32)
    scale[:rows] = (0.5 + rng.random(rows)) / (w.std() * cols**0.5)
    bits = (scale.view(np.uint32) >> 16).astype(np.uint16)
    scale = (bits.astype(np.uint32) << 16).view(np.float32)
    return (bits.tobytes() + pack_codes(codec, codes).tobytes(),
            scale[:rows, None] * w.astype(np.float32))


def replace_experts(made: dict, codec: str, seed: int = 0) -> dict[tuple[int, int], list[np.ndarray]]:
    """Gives the container that make_container made random rvq experts; returns their weights."""
    from pathlib import Path

    rng = np.random.default_rng(seed)
    path, weights, sets = Path(made["path"]), {}, b""
    manifest = made["manifest"]
    for bank in manifest["experts"]:
        hidden, inner, records = bank["hidden"], bank["inner"], []
        books = [random_books(rng, codec) for _ in range(3)]
        sets += b"".join(book_set(codec, b) for b in books)
        for expert in range(bank["experts"]):
            shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
            made_ones = [random_matrix(rng, codec, b, *s) for b, s in zip(books, shapes)]
            weights[bank["layer"], expert] = [w for _, w in made_ones]
            records.append(record_of_blobs(SHAPES[codec][0], bank["layer"], expert, hidden, inner,
                                           [blob for blob, _ in made_ones]))
        (path / bank["file"]).write_bytes(b"".join(records))
        bank |= {"codec": codec, "record_bytes": len(records[0]),
                 "crc32c": [struct.unpack("<I", r[60:64])[0] for r in records]}
    (path / "codebooks.bin").write_bytes(sets)
    books = {"file": "codebooks.bin", "bytes": len(sets), "crc32c": crc32c(sets)}
    edit_manifest(path, lambda m: m.update(experts=manifest["experts"], codebooks=books))
    write_digests(path)
    return weights
