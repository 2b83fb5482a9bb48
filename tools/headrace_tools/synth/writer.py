"""Writes a synthetic container: trunk, codebooks, expert banks, manifest, token sequence."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Lock, RLock

import numpy as np

from .. import __version__
from ..convert import codebooks
from ..convert.errors import EXIT_IO, ConvertError
from ..convert.output import OutputDirectory, PartialFile
from ..convert.preflight import (
    PAGE, TRUNK_CHUNK, Bank, Preflight, TrunkTensor, free_bytes, part_of,
)  # fmt: skip
from ..convert.quantise import CODEC_NUMBERS, PANEL, RVQ_BITS, encode_block
from ..convert.writer import build_manifest, record_header
from ..crc32c import crc32c, crc32c_join
from .direct import HashedWriter, Stream, page_aligned
from .routing import OWN, own_share, router, topic_chain, topic_rows
from .weights import (
    Books, MatrixPool, Mosaic, copy_pieces, deviation, expert_gain, small_tensor, variants_of,
)  # fmt: skip

TOKENS = "tokens.txt"
HEADER = 64
"""Bytes in front of an expert."""
SYNTH = f"headrace-synth {__version__}"
_BODY_BYTES = 256 << 20
"""Of the different expert records that banks are put together from."""
_FILES = 2
"""Written at once: a thread hashes 2 GB/s, drives take more."""

Progress = Callable[[int], None]
Parts = Iterator[tuple[int, np.ndarray]]
"""Of a tensor: (offset in it, what lies there), ascending."""


def _drop_cached(fd: int) -> None:
    """Writes back and leaves the page cache to others."""
    os.fdatasync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


class Synthesis:
    """Weights of one container. The same seed, layout and library make the same bytes, in whichever order
    and on however many threads the files are written."""

    def __init__(self, pre: Preflight, seed: int) -> None:
        self.pre, self.seed = pre, seed
        model = pre.plan.model
        self.embed_scale = float(model.get("embed_scale", 1.0))  # type: ignore[arg-type]
        routed = [part for part in model["ffns"] if part["kind"] == "moe"]  # type: ignore[attr-defined]
        self.own = min((own_share(p["experts"], p["top_k"]) for p in routed), default=OWN)
        self.books = Books(seed)
        self._lock = RLock()
        self._pools: dict[tuple[str, int, float], MatrixPool] = {}
        self._records: dict[tuple[str, int, int, int, float], tuple[np.ndarray, list[int]]] = {}

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def pool(self, codec: str, cols: int, std: float) -> MatrixPool:
        key = codec, cols, std
        with self._lock:
            if key not in self._pools:
                rng = self._rng(1, CODEC_NUMBERS[codec], cols, _bits(std))
                self._pools[key] = MatrixPool(codec, cols, std, rng, self.books)
            return self._pools[key]

    # -- trunk -------------------------------------------------------------------------------

    def _embedding(self, tensor: TrunkTensor) -> Parts:
        rows, cols = tensor.spec.rows, tensor.spec.cols
        full, rest = divmod(rows, PANEL)
        rng = self._rng(2)
        values = topic_rows(PANEL, variants_of(cols), cols, self.own, rng)
        values /= np.float32(self.embed_scale)
        whole = [(Mosaic(tensor.codec, values), full)] if full else []
        last = [(Mosaic(tensor.codec, values[:rest]), 1)] if rest else []
        at = 0
        for mosaic, panels in whole + last:
            scales = np.tile(mosaic.scales, panels)
            yield at, scales
            at += scales.size
        for mosaic, panels in whole + last:
            for panel in mosaic.panels(panels, rng):
                yield at, panel
                at += panel.size

    def _parts(self, number: int, tensor: TrunkTensor) -> Parts:
        spec, rows = tensor.spec, max(1, tensor.spec.rows)
        rng = self._rng(3, number)
        if spec.name == "embed":
            yield from self._embedding(tensor)
            return
        if spec.kind == "matrix" and not spec.name.endswith("moe.router"):
            pool = self.pool(tensor.codec, spec.cols, deviation(spec.name, spec.cols))
            stride = tensor.nbytes // spec.matrices
            for matrix in range(spec.matrices):
                at = matrix * stride
                for piece in pool.matrix(rows, rng):
                    yield at, piece
                    at += piece.size
            return
        if spec.name.endswith("moe.router"):
            values = router(rows, spec.cols, rng)
        else:
            values = small_tensor(spec, rng)
        yield from encode_block(tensor.codec, values, 0, values.shape[0])

    def write_trunk(self, file: PartialFile, progress: Progress) -> None:
        """Tensors in the order in which they lie."""
        with Stream(file.fd, self.pre.trunk_bytes, TRUNK_CHUNK) as out:
            for number, tensor in enumerate(self.pre.trunk):
                for offset, piece in self._parts(number, tensor):
                    out.skip_to(tensor.offset + offset)
                    out.put(piece)
                progress(tensor.nbytes)
        file.sha256 = out.digest.hexdigest()
        file.record["crc32c"] = out.checksums
        if not out.direct:
            _drop_cached(file.fd)

    # -- experts -----------------------------------------------------------------------------

    def write_books(self, file: PartialFile) -> None:
        with self._lock:
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
        with self._lock:
            if key not in self._records:
                count = max(4, min(64, bank.spec.experts, _BODY_BYTES // bank.record_bytes))
                wide = self.pool(bank.codec, hidden, 1 / np.sqrt(hidden))
                narrow = self.pool(bank.codec, inner, gain / np.sqrt(inner))
                made = page_aligned(count, bank.record_bytes)
                rng = self._rng(4, CODEC_NUMBERS[bank.codec], hidden, inner, bank.bias, _bits(gain))
                gate, up, down = bank.parts
                for record in made:
                    for at, pool, rows in ((gate, wide, inner), (up, wide, inner), (down, narrow, hidden)):
                        copy_pieces(pool.matrix(rows, rng), record[at:])
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
        firsts = page_aligned(bank.spec.experts, PAGE)  # a record's header and what shares its page
        with HashedWriter(file.fd) as out:
            for expert, first in enumerate(firsts):
                record = records[order[expert]]
                header = record_header(bank, expert)
                crc = crc32c_join(crc32c(header), sums[order[expert]], record.size - HEADER)
                first[:] = record[:PAGE]
                first[: HEADER - 4] = np.frombuffer(header, np.uint8, HEADER - 4)
                first[HEADER - 4 : HEADER] = np.frombuffer(struct.pack("<I", crc), np.uint8)
                out.put(first, record[PAGE:])
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

        lock = Lock()

        def counted(count: int) -> None:
            with lock:
                progress(count)

        work: list[tuple[str, Callable[[PartialFile], None]]] = [
            ("trunk.bin", lambda file: made.write_trunk(file, counted)),
            *((bank.file, lambda file, bank=bank: made.write_bank(file, bank, counted))  # type: ignore[misc]
              for bank in pre.banks),
        ]  # fmt: skip
        if codebooks.FILE in files:
            work.insert(0, (codebooks.FILE, made.write_books))
        with ThreadPoolExecutor(min(_FILES, os.cpu_count() or 1)) as threads:
            running = [
                threads.submit(out.write_file, name, files[name], fill)
                for name, fill in work if name not in out.done
            ]  # fmt: skip
            try:
                for file in running:
                    file.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        out.finish(build_manifest(pre, {name: out.done[name] for name in files}, {}, SYNTH))
        ids = islice(topic_chain(pre.plan.vocab_size, seed), tokens)
        (target / TOKENS).write_text("".join(f"{one}\n" for one in ids))
        out.remove_log()
