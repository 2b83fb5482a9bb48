"""Writes a synthetic container: trunk, codebooks, expert banks, manifest, token sequence."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from .. import __version__
from ..convert import codebooks
from ..convert.errors import EXIT_IO, ConvertError
from ..convert.output import OutputDirectory, PartialFile
from ..convert.preflight import (
    TRUNK_CHUNK, Bank, Preflight, TrunkTensor, free_bytes, part_of,
)  # fmt: skip
from ..convert.quantise import CODEC_NUMBERS, PANEL, RVQ_BITS, encode_block
from ..convert.writer import build_manifest, record_header
from ..crc32c import crc32c, crc32c_join
from .direct import Follower, HashedWriter, page_aligned, write_pieces
from .routing import OWN, TopicEmbedding, own_share, router, topic_chain
from .weights import Books, MatrixPool, copy_pieces, deviation, expert_gain, small_tensor

TOKENS = "tokens.txt"
HEADER = 64
"""Bytes in front of an expert."""
SYNTH = f"headrace-synth {__version__}"
_BODY_BYTES = 256 << 20
"""Of the different expert records that banks are put together from."""
_EMBED_BYTES = 512 << 10
"""Of a block of the embedding as float32: what a core's cache holds."""

Progress = Callable[[int], None]
Parts = Iterator[tuple[int, list[np.ndarray]]]
"""Of a tensor: (offset in it, what lies there one behind the other)."""


def _drop_cached(fd: int) -> None:
    """Writes back and leaves the page cache to others."""
    os.fdatasync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Synthesis:
    """Weights of one container. The same seed, layout and library make the same bytes."""

    def __init__(self, pre: Preflight, seed: int) -> None:
        self.pre, self.seed = pre, seed
        model = pre.plan.model
        self.embed_scale = float(model.get("embed_scale", 1.0))  # type: ignore[arg-type]
        routed = [part for part in model["ffns"] if part["kind"] == "moe"]  # type: ignore[attr-defined]
        self.own = min((own_share(p["experts"], p["top_k"]) for p in routed), default=OWN)
        self.books = Books(seed)
        self._pools: dict[tuple[str, int, float], MatrixPool] = {}
        self._records: dict[tuple[str, int, int, int, float], tuple[np.ndarray, list[int]]] = {}

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def pool(self, codec: str, cols: int, std: float) -> MatrixPool:
        key = codec, cols, std
        if key not in self._pools:
            rng = self._rng(1, len(self._pools))
            self._pools[key] = MatrixPool(codec, cols, std, rng, self.books)
        return self._pools[key]

    # -- trunk -------------------------------------------------------------------------------

    def _embedding(self, tensor: TrunkTensor) -> Iterator[Callable[[], Parts]]:
        """What makes a block of rows each, in any order and on any thread."""
        rows, cols = tensor.spec.rows, tensor.spec.cols
        table = TopicEmbedding(cols, self.own, self._rng(2))
        scale = np.float32(self.embed_scale)
        step = max(1, _EMBED_BYTES // (4 * cols * PANEL)) * PANEL

        def block(first: int) -> Parts:
            values = table.rows(first, min(step, rows - first))
            values /= scale
            for offset, data in encode_block(tensor.codec, values, first, rows, threads=1):
                yield offset, [data]

        return (lambda first=first: block(first) for first in range(0, rows, step))  # type: ignore[misc]

    def _parts(self, number: int, tensor: TrunkTensor) -> Parts:
        spec, rows = tensor.spec, max(1, tensor.spec.rows)
        if spec.kind == "matrix" and not spec.name.endswith("moe.router"):
            pool = self.pool(tensor.codec, spec.cols, deviation(spec.name, spec.cols))
            stride = tensor.nbytes // spec.matrices
            for matrix in range(spec.matrices):
                yield matrix * stride, pool.matrix(rows)
            return
        if spec.name.endswith("moe.router"):
            values = router(rows, spec.cols, self._rng(3, number))
        else:
            values = small_tensor(spec, self._rng(4, number))
        for offset, data in encode_block(tensor.codec, values, 0, values.shape[0]):
            yield offset, [data]

    def write_trunk(self, file: PartialFile, progress: Progress) -> None:
        """Tensors in the order in which they lie, so that what is done is read for its checksums
        meanwhile."""
        os.ftruncate(file.fd, self.pre.trunk_bytes)
        follower = Follower(file.fd, TRUNK_CHUNK)

        def write(tensor: TrunkTensor, parts: Parts) -> None:
            for offset, pieces in parts:
                write_pieces(file.fd, pieces, tensor.offset + offset)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            try:
                for number, tensor in enumerate(self.pre.trunk):
                    follower.advance(tensor.offset)
                    if tensor.spec.name == "embed":
                        blocks = self._embedding(tensor)
                        list(threads.map(lambda make: write(tensor, make()), blocks))  # noqa: B023
                    else:
                        write(tensor, self._parts(number, tensor))
                    progress(tensor.nbytes)
                follower.finish(self.pre.trunk_bytes)
            finally:
                follower.close()
        file.sha256 = follower.digest.hexdigest()
        file.record["crc32c"] = follower.checksums
        _drop_cached(file.fd)

    # -- experts -----------------------------------------------------------------------------

    def write_books(self, file: PartialFile) -> None:
        sets = [
            self.books.of(bank.codec)
            for bank in self.pre.banks if bank.codec in RVQ_BITS
            for _ in codebooks.KINDS
        ]  # fmt: skip
        data = np.concatenate(sets)
        file.write(data)
        file.record["crc32c"] = [crc32c(data)]

    def records(self, bank: Bank) -> tuple[np.ndarray, list[int]]:
        """(the different records there are, uint8 [count, record_bytes], checksums of all but their headers)."""
        hidden, inner = bank.spec.hidden, bank.spec.inner
        gain = expert_gain(part_of(self.pre, bank.spec.layer))
        key = bank.codec, hidden, inner, bank.bias, gain
        if key not in self._records:
            count = max(4, min(64, bank.spec.experts, _BODY_BYTES // bank.record_bytes))
            wide = self.pool(bank.codec, hidden, 1 / np.sqrt(hidden))
            narrow = self.pool(bank.codec, inner, gain / np.sqrt(inner))
            made = page_aligned(count, bank.record_bytes)
            gate, up, down = bank.parts
            for record in made:
                for at, pool, rows in ((gate, wide, inner), (up, wide, inner), (down, narrow, hidden)):
                    copy_pieces(pool.matrix(rows), record[at:])
            self._records[key] = made, [crc32c(record[HEADER:]) for record in made]
        return self._records[key]

    def write_bank(self, file: PartialFile, bank: Bank, progress: Progress) -> None:
        records, sums = self.records(bank)
        rng = self._rng(5, bank.spec.layer)
        count = len(sums)
        order = np.concatenate(
            [rng.permutation(count) for _ in range(-(-bank.spec.experts // count))]
        ).tolist()
        checksums: list[int] = []
        with HashedWriter(file.fd) as out:
            for expert in range(bank.spec.experts):
                chosen = order[expert]
                record = records[chosen]
                header = record_header(bank, expert)
                crc = crc32c_join(crc32c(header), sums[chosen], record.size - HEADER)
                out.wait_for(chosen)
                record[: HEADER - 4] = np.frombuffer(header, np.uint8, HEADER - 4)
                record[HEADER - 4 : HEADER] = np.frombuffer(struct.pack("<I", crc), np.uint8)
                out.put(chosen, record)
                checksums.append(crc)
                progress(bank.record_bytes)
        file.sha256 = out.digest.hexdigest()
        file.record["crc32c"] = checksums
        if not out.direct:
            _drop_cached(file.fd)


def synthesise(
    pre: Preflight,
    target: Path,
    seed: int = 0,
    tokens: int = 4096,
    overwrite: bool = False,
    progress: Progress = lambda count: None,
) -> None:
    """Writes the container and `tokens` ids of a topic chain as tokens.txt.

    Raises ConvertError: the directory holds something else, or the disk is too small.
    """
    header: dict[str, dict[str, object]] = {
        "converter": SYNTH,  # type: ignore[dict-item]
        "options": pre.options.as_dict(),
        "source": {"name": pre.name, "seed": seed},
    }
    pre.notes.append(f"weights are pseudo-random, seed {seed}: for measuring speed")
    made = Synthesis(pre, seed)
    with OutputDirectory(target, header, pre.output_bytes()) as out:
        out.start(overwrite)
        files = pre.files()
        todo = sum(size for name, size in files.items() if name not in out.done)
        if (free := free_bytes(target)) < todo:
            raise ConvertError(
                f"{target}: not enough disk space: {todo} bytes are needed, {free} are free", EXIT_IO
            )
        progress(sum(files[name] for name in out.done))

        def run(name: str, fill: Callable[[PartialFile], None]) -> None:
            if name not in out.done:
                out.write_file(name, files[name], fill)

        run("trunk.bin", lambda file: made.write_trunk(file, progress))
        if codebooks.FILE in files:
            run(codebooks.FILE, made.write_books)
        for bank in pre.banks:
            run(bank.file, lambda file, bank=bank: made.write_bank(file, bank, progress))
        out.finish(build_manifest(pre, {name: out.done[name] for name in files}, {}, SYNTH))
        ids = islice(topic_chain(pre.plan.vocab_size, seed), tokens)
        (target / TOKENS).write_text("".join(f"{one}\n" for one in ids))
        out.remove_log()
