"""Writes a synthetic container: trunk, codebooks, expert banks, manifest, token sequence."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from .. import __version__
from ..convert import codebooks
from ..convert.errors import EXIT_IO, ConvertError
from ..convert.output import OutputDirectory, PartialFile
from ..convert.preflight import Bank, Preflight, TrunkTensor, free_bytes, part_of
from ..convert.quantise import CODEC_NUMBERS, RVQ_BITS, encode_block
from ..convert.writer import build_manifest, record_header, seal_trunk
from ..crc32c import crc32c, crc32c_join
from .direct import HashedWriter
from .routing import OWN, TopicEmbedding, own_share, router, topic_chain
from .weights import Books, MatrixPool, deviation, expert_gain, small_tensor

TOKENS = "tokens.txt"
SYNTH = f"headrace-synth {__version__}"
_BODY_BYTES = 256 << 20
"""Of the different expert records that banks are put together from."""
_EMBED_ROWS = 2048

Progress = Callable[[int], None]


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
        self._bodies: dict[tuple[str, int, int, int, float], list[tuple[np.ndarray, int]]] = {}

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def pool(self, codec: str, cols: int, std: float) -> MatrixPool:
        key = codec, cols, std
        if key not in self._pools:
            rng = self._rng(1, len(self._pools))
            self._pools[key] = MatrixPool(codec, cols, std, rng, self.books)
        return self._pools[key]

    # -- trunk -------------------------------------------------------------------------------

    def _parts(self, number: int, tensor: TrunkTensor) -> Iterator[tuple[int, np.ndarray]]:
        """(offset in the tensor, bytes)."""
        spec, rows = tensor.spec, max(1, tensor.spec.rows)
        if spec.name == "embed":
            table = TopicEmbedding(spec.cols, self.own, self._rng(2))
            for first in range(0, rows, _EMBED_ROWS):
                values = table.rows(first, min(_EMBED_ROWS, rows - first))
                values /= np.float32(self.embed_scale)
                yield from encode_block(tensor.codec, values, first, rows)
        elif spec.name.endswith("moe.router"):
            values = router(rows, spec.cols, self._rng(3, number))
            yield from encode_block(tensor.codec, values, 0, rows)
        elif spec.kind == "matrix":
            std = deviation(spec.name, spec.cols)
            pool = self.pool(tensor.codec, spec.cols, std)
            stride = tensor.nbytes // spec.matrices
            for matrix in range(spec.matrices):
                yield matrix * stride, pool.blob(rows)
        else:
            values = small_tensor(spec, self._rng(4, number))
            yield from encode_block(tensor.codec, values, 0, values.shape[0])

    def write_trunk(self, file: PartialFile, progress: Progress) -> None:
        os.ftruncate(file.fd, self.pre.trunk_bytes)
        for number, tensor in enumerate(self.pre.trunk):
            for offset, data in self._parts(number, tensor):
                file.write_at(tensor.offset + offset, data)
            progress(tensor.nbytes)
        seal_trunk(file)
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

    def bodies(self, bank: Bank) -> list[tuple[np.ndarray, int]]:
        """(record without its header, checksum of those bytes) of the different experts there are."""
        hidden, inner = bank.spec.hidden, bank.spec.inner
        gain = expert_gain(part_of(self.pre, bank.spec.layer))
        key = bank.codec, hidden, inner, bank.bias, gain
        if key not in self._bodies:
            count = max(4, min(64, bank.spec.experts, _BODY_BYTES // bank.record_bytes))
            wide = self.pool(bank.codec, hidden, 1 / np.sqrt(hidden))
            narrow = self.pool(bank.codec, inner, gain / np.sqrt(inner))
            made = []
            for _ in range(count):
                body = np.zeros(bank.record_bytes - 64, np.uint8)
                gate, up, down = (at - 64 for at in bank.parts)
                for at, pool, rows in ((gate, wide, inner), (up, wide, inner), (down, narrow, hidden)):
                    blob = pool.blob(rows)
                    body[at : at + blob.size] = blob
                made.append((body, crc32c(body)))
            self._bodies[key] = made
        return self._bodies[key]

    def write_bank(self, file: PartialFile, bank: Bank, progress: Progress) -> None:
        bodies = self.bodies(bank)
        rng = self._rng(5, bank.spec.layer)
        order = np.concatenate(
            [rng.permutation(len(bodies)) for _ in range(-(-bank.spec.experts // len(bodies)))]
        )
        checksums: list[int] = []
        with HashedWriter(file.fd, bank.record_bytes) as out:
            for expert in range(bank.spec.experts):
                body, sum_of_body = bodies[order[expert]]
                header = record_header(bank, expert)
                crc = crc32c_join(crc32c(header), sum_of_body, body.size)
                record = out.next()
                record[:60] = np.frombuffer(header, np.uint8, 60)
                record[60:64] = np.frombuffer(struct.pack("<I", crc), np.uint8)
                record[64:] = body
                checksums.append(crc)
                progress(bank.record_bytes)
        file.sha256 = out.digest.hexdigest()
        file.record["crc32c"] = checksums
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
