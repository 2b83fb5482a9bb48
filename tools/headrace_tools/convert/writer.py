"""Turns a preflighted checkpoint into a container, expert by expert, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .. import __version__
from ..crc32c import crc32c
from . import codebooks, paths, requantised
from .errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_USAGE, ConvertError
from .families import Piece, TensorSpec
from .four_bit import panel_bytes
from .library import quantizer
from .native import native_codec, pack_codes, scale_name, stored_codes
from .options import differing
from .output import OutputDirectory, PartialFile
from .preflight import BLOCK_BYTES, TRUNK_CHUNK, Bank, Preflight, TrunkTensor, free_bytes
from .quantise import CODEC_NUMBERS, PANEL, RVQ_BITS, bf16_overflows, encode_block, round_up
from .row_table import RowTable, write_row_table
from .row_table import read_numbers as read_hash_numbers
from .rows import piece_rows, read_numbers, read_rows
from .safetensors_source import Checkpoint, NonFinite, blocks, clear_nonfinite

CONVERTER = f"headrace-convert {__version__}"
MAX_MANIFEST = 16 << 20

Progress = Callable[[int], None]
"""Called with the number of output bytes just finished."""


def _row_step(cols: int) -> int:
    return max(PANEL, BLOCK_BYTES // (4 * cols) // PANEL * PANEL)


class _Faults:
    """Weights that are no numbers, by tensor; a file that has some is not published."""

    def __init__(self, allow: bool) -> None:
        self.allow = allow
        self.found: list[str] = []

    def add(self, what: str, bad: NonFinite) -> None:
        if bad:
            self.found.append(f"{what}: {bad.text()}")

    def settle(self, record: dict[str, object]) -> None:
        if self.found and not self.allow:
            raise ConvertError(
                "\n  ".join(
                    [
                        "weights that are not finite (--allow-nonfinite stores them as 0):",
                        *self.found,
                    ]
                ),
                EXIT_BAD_INPUT,
                tuple(self.found),
            )
        if self.found:
            record["nonfinite"] = self.found


def _vector(pre: Preflight, spec: TensorSpec, bad: NonFinite) -> np.ndarray:
    """A vector, float32 [1, cols], with its factor; numbers beyond its end must be zero."""
    values = read_numbers(pre.checkpoint, spec.pieces, bad)
    if spec.times:
        values = values * read_numbers(pre.checkpoint, spec.times, bad)
        clear_nonfinite(values, bad)
    if spec.zeros and read_numbers(pre.checkpoint, spec.zeros, bad).any():
        raise ConvertError(
            f"tensor {spec.zeros[0].source!r} {list(spec.zeros[0].shape)}: {spec.cols} numbers are "
            "used, and the rest is not all zero: this converter does not know what it does",
            EXIT_BAD_INPUT,
        )
    return values.reshape(1, spec.cols)


def _tensor_blocks(
    pre: Preflight, spec: TensorSpec, bad: NonFinite
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(matrix, first row, values) of a canonical tensor, in blocks of rows."""
    rows = max(1, spec.rows)
    if spec.kind == "f64":
        yield 0, 0, np.array([spec.constant], dtype=np.float64)
        return
    if not spec.rows and not spec.same_as:
        values = _vector(pre, spec, bad)
        yield 0, 0, values + np.float32(1) if spec.transform == "add_one" else values
        return
    for matrix in range(spec.matrices):
        if spec.transform == "transpose":
            first = matrix * spec.cols
            yield matrix, 0, read_rows(pre.checkpoint, spec.pieces, first, spec.cols, bad).T
            continue
        for first, count in blocks(rows, _row_step(spec.cols)):
            start = matrix * rows + first
            values = read_rows(pre.checkpoint, spec.pieces, start, count, bad)
            if spec.same_as and not np.array_equal(
                values, read_rows(pre.checkpoint, spec.same_as, start, count, NonFinite())
            ):
                raise ConvertError(
                    f"config.json ties {spec.pieces[0].source!r} and {spec.same_as[0].source!r}, "
                    "but the checkpoint holds different values for them"
                )
            if spec.transform == "add_one":
                values += np.float32(1)
            yield matrix, first, values


def _write_tensor(file: PartialFile, pre: Preflight, tensor: TrunkTensor, faults: _Faults) -> None:
    spec, bad = tensor.spec, NonFinite()
    rows = max(1, spec.rows)
    stride = tensor.nbytes // spec.matrices
    for matrix, first, values in _tensor_blocks(pre, spec, bad):
        _refuse_overflow(tensor.codec, values, bad)
        for offset, data in encode_block(tensor.codec, values, first, rows):
            file.write_at(tensor.offset + matrix * stride + offset, data)
    sources = " + ".join(sorted({piece.source for piece in spec.pieces + spec.times}))
    faults.add(f"{spec.name} (from {sources})", bad)


def _refuse_overflow(codec: str, values: np.ndarray, bad: NonFinite) -> None:
    """Counts float32 weights beyond the range of bf16 as Inf and clears them."""
    if codec == "bf16" and (over := bf16_overflows(values)):
        bad.inf += over
        values[np.abs(values) >= 3.38e38] = 0


def _write_trunk(file: PartialFile, pre: Preflight, progress: Progress) -> None:
    faults = _Faults(pre.options.allow_nonfinite)
    os.ftruncate(file.fd, pre.trunk_bytes)
    for tensor in pre.trunk:
        _write_tensor(file, pre, tensor, faults)
        progress(tensor.nbytes)
    faults.settle(file.record)
    seal_trunk(file)


def seal_trunk(file: PartialFile) -> None:
    """Reads the finished trunk.bin for its digest and the checksums of its chunks."""
    digest = hashlib.sha256()
    checksums: list[int] = []
    for chunk in file.chunks(TRUNK_CHUNK):
        digest.update(chunk)
        checksums.append(crc32c(chunk))
    file.sha256 = digest.hexdigest()
    file.record["crc32c"] = checksums


def _encoded(
    pre: Preflight, bank: Bank, expert: int, kind: int, piece: Piece, first: int, count: int,
    bad: NonFinite, moments: np.ndarray | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of an expert's matrix -> (offset in the blob, bytes): a 4-bit source's own numbers
    when the bank's codec holds them."""
    if native_codec(pre.checkpoint, piece) == bank.codec:
        what = f"layer {bank.spec.layer} expert {expert} ({scale_name(piece)})"
        rows = piece_rows(pre.checkpoint, piece, first, count, stored_codes)
        at = first // PANEL * panel_bytes(bank.codec, piece.cols)
        yield at, pack_codes(bank.codec, rows, piece.cols, what, first)
        return
    values = read_rows(pre.checkpoint, (piece,), first, count, bad)
    _refuse_overflow(bank.codec, values, bad)
    if pre.rewrite is not None:
        values = pre.rewrite(bank, kind, values)
    threads = max(1, (os.cpu_count() or 1) // pre.workers())
    if bank.codec in RVQ_BITS:
        encoder = quantizer(bank.codec, pre.options.effort, threads)
        book = pre.books[bank.spec.layer][kind]
        yield from codebooks.encode_rows(
            encoder, book, values, first, piece.total_rows, moments
        )
        return
    yield from encode_block(bank.codec, values, first, piece.total_rows, threads)


def record_header(bank: Bank, expert: int) -> bytes:
    """The 64 bytes in front of an expert, with a checksum of 0."""
    spec = bank.spec
    return struct.pack(
        "<4sHHIIIIQQQQII",
        b"HREX",
        1,
        CODEC_NUMBERS[bank.codec],
        spec.layer,
        expert,
        spec.hidden,
        spec.inner,
        bank.record_bytes,
        *bank.parts,
        bank.bias,
        0,
    )


_Encoded = tuple[np.ndarray, int, list[tuple[str, NonFinite]]]


def encode_record(pre: Preflight, bank: Bank, expert: int) -> _Encoded:
    """One expert -> (record uint8 [record_bytes], its CRC32C, what is not finite)."""
    spec = bank.spec
    record = np.zeros(bank.record_bytes, dtype=np.uint8)
    header = record_header(bank, expert)
    record[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    found = []
    inputs: tuple[np.ndarray | None, ...] = (None, None)
    if pre.feedback is not None and bank.codec in RVQ_BITS:
        inputs = pre.feedback(pre, bank, expert)
    for kind, (base, piece) in enumerate(zip(bank.parts, spec.parts(expert), strict=True)):
        bad = NonFinite()
        for first, count in blocks(piece.total_rows, _row_step(piece.cols)):
            for offset, data in _encoded(
                pre, bank, expert, kind, piece, first, count, bad, inputs[kind // 2]
            ):
                record[base + offset : base + offset + data.size] = data
        if bad:
            found.append((f"layer {spec.layer} expert {expert} ({piece.source})", bad))
    if spec.biases is not None:
        at = bank.bias
        for piece in spec.biases(expert):
            bad = NonFinite()
            values = read_numbers(pre.checkpoint, (piece,), bad).astype("<f4").view(np.uint8)
            record[at : at + values.size] = values
            at = round_up(at + values.size, 64)
            if bad:
                found.append((f"layer {spec.layer} expert {expert} ({piece.source})", bad))
    crc = crc32c(record)
    record[60:64] = np.frombuffer(struct.pack("<I", crc), dtype=np.uint8)
    return record, crc, found


def _write_rows(file: PartialFile, pre: Preflight, table: RowTable, progress: Progress) -> None:
    faults, bad = _Faults(pre.options.allow_nonfinite), NonFinite()

    def rows(first: int, count: int) -> np.ndarray:
        values = read_rows(pre.checkpoint, table.spec.pieces, first, count, bad)
        _refuse_overflow(table.codec, values, bad)
        return values

    write_row_table(file, table, rows, progress)
    faults.add("n-gram rows", bad)
    faults.settle(file.record)


def _write_bank(
    file: PartialFile, pre: Preflight, bank: Bank, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    faults = _Faults(pre.options.allow_nonfinite)
    digest = hashlib.sha256()
    checksums: list[int] = []
    cost: requantised.Sums = []

    def encode(expert: int) -> tuple[_Encoded, requantised.Sums]:
        made = encode_record(pre, bank, expert)
        measured = requantised.is_measured(bank, expert)
        return made, requantised.measure(pre, bank, expert, made[0]) if measured else []

    pending: deque[Future[tuple[_Encoded, requantised.Sums]]] = deque()
    submitted = 0
    try:
        while len(checksums) < bank.spec.experts:
            while submitted < bank.spec.experts and len(pending) < pre.workers():
                pending.append(pool.submit(encode, submitted))
                submitted += 1
            (record, crc, found), more = pending.popleft().result()
            cost = requantised.add(cost, more) if more else cost
            digest.update(record)
            file.write(record)
            checksums.append(crc)
            for what, bad in found:
                faults.add(what, bad)
            progress(bank.record_bytes)
    finally:
        for future in pending:
            future.cancel()
    faults.settle(file.record)
    if cost:
        file.record[requantised.KEY] = cost
    file.sha256 = digest.hexdigest()
    file.record["crc32c"] = checksums


# -- manifest --------------------------------------------------------------------------------


def _real(value: float) -> float | str:
    """A JSON number when 15 digits hold it, else a hexadecimal float."""
    digits = repr(value).split("e")[0].replace(".", "").replace("-", "").strip("0")
    return value if len(digits) <= 15 else value.hex()


def _reals(value: object) -> object:
    if isinstance(value, float):
        return _real(value)
    if isinstance(value, dict):
        return {key: _reals(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_reals(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value


def provenance(
    pre: Preflight, hashes: dict[str, str], nonfinite: list[str], converter: str = CONVERTER
) -> dict[str, object]:
    shards = []
    for shard in pre.checkpoint.shards:
        entry = {"name": shard.name, "bytes": shard.nbytes, "header_sha256": shard.header_sha256}
        if shard.name in hashes:
            entry["sha256"] = hashes[shard.name]
        shards.append(entry)
    notes = pre.notes + [f"stored as 0: {text}" for text in nonfinite]
    options = pre.options.as_dict()
    allocation = {"allocation": options.pop("allocation")} if "allocation" in options else {}
    return {
        **allocation,
        "source": pre.name,
        "family": pre.plan.family,
        "shards": shards,
        "converter": converter,
        "options": options,
        "skipped": pre.skipped,
        "notes": notes,
    }


def _ngram(pre: Preflight) -> dict[str, object]:
    """The model's `ngram` object, completed by its codec and the numbers in the checkpoint."""
    described = pre.plan.model.get("ngram")
    if pre.ngram is None or not isinstance(described, dict):
        return {}
    numbers = read_hash_numbers(pre.checkpoint, pre.ngram.spec)
    sites = [{**site, **more} for site, more in zip(described["sites"], numbers, strict=True)]
    return {"ngram": {**described, "sites": sites, "codec": pre.ngram.codec}}


def _codebooks(pre: Preflight, done: dict[str, dict[str, object]]) -> dict[str, object]:
    size = codebooks.file_bytes(bank.codec for bank in pre.banks)
    if not size:
        return {}
    (crc,) = done[codebooks.FILE]["crc32c"]  # type: ignore[misc]
    return {"codebooks": {"file": codebooks.FILE, "bytes": size, "crc32c": crc}}


def build_manifest(
    pre: Preflight, done: dict[str, dict[str, object]], hashes: dict[str, str],
    converter: str = CONVERTER,
) -> bytes:
    """manifest.json from the plan and the journal's records."""
    nonfinite = [text for name in sorted(done) for text in done[name].get("nonfinite", [])]  # type: ignore[attr-defined]
    tokenizer = None
    if pre.tokenizer is not None:
        tokenizer = {"file": "tokenizer.bin", "bytes": len(pre.tokenizer)}
    manifest = {
        "format": "headrace-container",
        "version": 1,
        "model": {"name": pre.name, **pre.plan.model, **_ngram(pre)},
        "trunk": {
            "file": "trunk.bin",
            "bytes": pre.trunk_bytes,
            "chunk": TRUNK_CHUNK,
            "crc32c": done["trunk.bin"]["crc32c"],
            "tensors": [
                {
                    "name": t.spec.name,
                    "codec": t.codec,
                    "shape": t.spec.shape,
                    "offset": t.offset,
                    "bytes": t.nbytes,
                }
                for t in pre.trunk
            ],
        },
        "experts": [
            {
                "layer": b.spec.layer,
                "file": b.file,
                "codec": b.codec,
                "experts": b.spec.experts,
                "hidden": b.spec.hidden,
                "inner": b.spec.inner,
                "record_bytes": b.record_bytes,
                "crc32c": done[b.file]["crc32c"],
                **({"bias": True} if b.bias else {}),
                **({"activations": b.activations} if b.activations != 8 else {}),
            }
            for b in pre.banks
        ],
        **_codebooks(pre, done),
        "tokenizer": tokenizer,
        "stop_ids": pre.stop_ids,
        "parameters": pre.parameters,
        "provenance": {
            **provenance(pre, hashes, nonfinite, converter),
            **requantised.summary(pre, done),
        },
    }
    data = (
        json.dumps(_reals(manifest), sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"
    )
    if len(data) > MAX_MANIFEST:
        raise ConvertError(
            f"manifest.json would have {len(data)} bytes, at most {MAX_MANIFEST} are allowed"
        )
    return data


def manifest_to_be(pre: Preflight, hash_source: bool = False) -> bytes:
    """manifest.json as the conversion would write it, with the longest checksums in place of real
    ones; with `hash_source` as long as --hash-source makes it."""
    most = 2**32 - 1
    chunks = {"trunk.bin": -(-pre.trunk_bytes // TRUNK_CHUNK), codebooks.FILE: 1}
    chunks |= {bank.file: bank.spec.experts for bank in pre.banks}
    done: dict[str, dict[str, object]] = {
        name: {"crc32c": [most] * chunks.get(name, 0), requantised.KEY: requantised.WIDEST}
        for name in pre.files()
    }
    hashes = {shard.name: "f" * 64 for shard in pre.checkpoint.shards} if hash_source else {}
    return build_manifest(pre, done, hashes)


def container_bytes(pre: Preflight, hash_source: bool = True) -> int:
    """The most bytes that the finished container can have, manifest and digests included."""
    files = pre.files()
    manifest = manifest_to_be(pre, hash_source)
    lines = sum(64 + 2 + len(name) + 1 for name in [*files, "manifest.json"])
    return sum(files.values()) + len(manifest) + lines


# -- the conversion --------------------------------------------------------------------------


def already_converted(pre: Preflight, target: Path) -> bool:
    """True when `target` is the finished container of this source and these options."""
    path = target / "manifest.json"
    if (
        not paths.is_file(path)
        or paths.exists(target / "conversion.log")
        or not paths.is_file(target / "manifest.sha256")
    ):
        return False
    try:
        old = json.loads(paths.read_bytes(path))["provenance"]
        options, shards = old["options"], old["shards"]
        if "allocation" in old:
            options = {**options, "allocation": old["allocation"]}
        headers = [(s["name"], s["bytes"], s["header_sha256"]) for s in shards]
    except (ValueError, KeyError, TypeError):
        return False
    differences = differing(options, pre.options.as_dict())
    if headers != [(s.name, s.nbytes, s.header_sha256) for s in pre.checkpoint.shards]:
        differences.append("the source is another checkpoint")
    if old.get("converter") != CONVERTER:
        differences.append(f"it was made by {old.get('converter')}")
    if differences:
        raise ConvertError(
            f"{target}: already holds a container, and {'; '.join(differences)}; give a new "
            "directory, or --overwrite to replace it",
            EXIT_USAGE,
        )
    return True


def check_files(target: Path) -> None:
    """Compares every file with manifest.sha256. Raises ConvertError (I/O) on a difference."""
    for line in paths.read_bytes(target / "manifest.sha256").decode().splitlines():
        expected, name = line.split("  ", 1)
        if paths.sha256(target / name) != expected:
            raise ConvertError(
                f"{target / name}: reads back differently than it was written", EXIT_IO
            )


def convert(
    pre: Preflight,
    target: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda count: None,
    hash_source: bool = False,
    verify: Callable[[Path], None] | None = None,
    started: Progress = lambda count: None,
    file_done: Callable[[str], None] = lambda name: None,
    checking: Callable[[], None] = lambda: None,
) -> bool:
    """Writes the container. Returns True when an earlier attempt was continued.

    `verify` checks the finished directory (the engine); without it the digests are
    compared here. `started` is called with the bytes that an earlier attempt left,
    `checking` when everything is written. Raises ConvertError; what is finished by then
    is kept for a resume.
    """
    header = {"converter": CONVERTER, "options": pre.options.as_dict(), "source": pre.identity}
    _ngram(pre)  # numbers that cannot be are refused before anything is written
    with OutputDirectory(target, header, pre.output_bytes()) as out:  # type: ignore[arg-type]
        out.start(overwrite)
        files = pre.files()
        todo = (
            sum(size for name, size in files.items() if name not in out.done)
            + pre.manifest_estimate()
        )
        if (free := free_bytes(target)) < todo:
            raise ConvertError(
                f"{target}: not enough disk space: {todo} bytes are needed, {free} are free; free "
                "some space and run the same command again",
                EXIT_IO,
            )
        started(sum(files[name] for name in out.done if name in files))

        def run(name: str, fill: Callable[[PartialFile], None]) -> None:
            if name not in out.done:
                out.write_file(name, files[name], fill)
                file_done(name)

        if pre.tokenizer is not None:
            data = pre.tokenizer

            def fill_tokenizer(file: PartialFile) -> None:
                file.write(data)
                progress(len(data))

            run("tokenizer.bin", fill_tokenizer)
        run("trunk.bin", lambda file: _write_trunk(file, pre, progress))
        if codebooks.FILE in files:
            def fill_books(file: PartialFile) -> None:
                codebooks.write(file, pre.checkpoint, pre.bank_codecs(), pre.options.effort)
                progress(files[codebooks.FILE])

            run(codebooks.FILE, fill_books)
            pre.books = codebooks.read(paths.read_bytes(target / codebooks.FILE), pre.bank_codecs())
        with ThreadPoolExecutor(max_workers=pre.workers()) as pool:
            for bank in pre.banks:
                run(bank.file, lambda file, bank=bank: _write_bank(file, pre, bank, pool, progress))
        if (table := pre.ngram) is not None:
            run(table.file, lambda file: _write_rows(file, pre, table, progress))
        hashes = (
            {s.name: pre.checkpoint.file_sha256(s.name) for s in pre.checkpoint.shards}
            if hash_source
            else {}
        )
        done = {name: out.done[name] for name in files}
        out.finish(build_manifest(pre, done, hashes))
        checking()
        if verify is None:
            check_files(target)
        out.remove_log()
        if verify is not None:
            try:
                verify(target)
            except BaseException:
                (target / "manifest.sha256").unlink()
                raise
        return out.resumed
