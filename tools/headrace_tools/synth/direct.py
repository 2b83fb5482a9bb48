"""Files written and hashed at the rate of the disk, from memory as it lies, without a copy."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..crc32c import crc32c

GROUP = 16 << 20
"""Bytes handed to the system at once."""
GROUPS = 4
"""On their way at once."""
_VECTORS = 512
"""Pieces of memory in one call; systems allow 1024."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def page_aligned(count: int, size: int) -> np.ndarray:
    """Zeros, uint8 [count, size], from the start of a page."""
    return np.frombuffer(mmap.mmap(-1, count * size), np.uint8).reshape(count, size)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of views when `done` bytes of them are written."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def write_pieces(fd: int, pieces: Sequence[np.ndarray], offset: int) -> None:
    """Pieces of contiguous memory, one behind the other."""
    views = [memoryview(piece).cast("B") for piece in pieces if piece.size]
    while views:
        done = os.pwritev(fd, views[:_VECTORS], offset)
        offset += done
        views = _after(views, done)


def _set_direct(fd: int, on: bool) -> bool:
    """False where the file system reads and writes through its cache only."""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return True


class HashedWriter:
    """Memory written one piece behind the other, past the page cache where that is possible; a context manager.

    Pieces start at a page and are multiples of 4096 bytes long. One thread writes and one hashes, each at its
    own pace. `digest` is the SHA-256 of what was written, complete once the manager was left. `direct`: the
    page cache has none of it.
    """

    def __init__(self, fd: int) -> None:
        self.digest = hashlib.sha256()
        self._fd, self._offset = fd, 0
        self._next: list[np.ndarray] = []
        self._bytes = 0
        self._running: deque[list[Future[None]]] = deque()
        self._hasher, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.direct = _set_direct(fd, True)

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self._flush()
            self._settle(0)
        finally:
            self._hasher.shutdown()
            self._writer.shutdown()
            _set_direct(self._fd, False)

    def put(self, *pieces: np.ndarray) -> None:
        """The next ones, uint8. Handed over at once when they reach GROUP bytes; their memory may change
        as soon as GROUPS such calls followed."""
        self._next += pieces
        self._bytes += sum(piece.size for piece in pieces)
        if self._bytes >= GROUP:
            self._flush()

    def _settle(self, left: int) -> None:
        """Waits until no more than `left` groups are on their way."""
        while len(self._running) > left:
            for future in self._running.popleft():
                future.result()

    def _flush(self) -> None:
        """Hands the next pieces over."""
        if not self._next:
            return
        self._settle(GROUPS - 1)
        pieces, offset = self._next, self._offset
        self._running.append([
            self._hasher.submit(self._hash, pieces),
            self._writer.submit(self._write, pieces, offset),
        ])  # fmt: skip
        self._next = []
        self._offset += self._bytes
        self._bytes = 0

    def _hash(self, pieces: list[np.ndarray]) -> None:
        for piece in pieces:
            self.digest.update(piece)

    def _write(self, pieces: list[np.ndarray], offset: int) -> None:
        try:
            write_pieces(self._fd, pieces, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False
            _set_direct(self._fd, False)
            write_pieces(self._fd, pieces, offset)


class Stream:
    """A file of `size` bytes put together from small pieces, in the order in which they lie; zeros between
    them. A context manager.

    `checksums` are the CRC32C of its chunks, whose length divides GROUP; complete like `digest` once the
    manager was left.
    """

    def __init__(self, fd: int, size: int, chunk: int) -> None:
        self.checksums: list[int] = []
        self._out = HashedWriter(fd)
        self._size, self._chunk = size, chunk
        self._buffers = page_aligned(GROUPS + 1, min(GROUP, size))
        self._turn, self._start, self._used = 0, 0, 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self.skip_to(self._size)
                self._hand_over()
        finally:
            self._out.__exit__(kind, *exc)

    @property
    def direct(self) -> bool:
        return self._out.direct

    @property
    def digest(self) -> hashlib._Hash:
        return self._out.digest

    def skip_to(self, offset: int) -> None:
        while (gap := offset - self._start - self._used) > 0:
            self._room(gap)[:] = 0

    def put(self, piece: np.ndarray) -> None:
        """Contiguous memory, copied."""
        data = piece.reshape(-1).view(np.uint8)
        while data.size:
            room = self._room(data.size)
            room[:] = data[: room.size]
            data = data[room.size :]

    def _room(self, most: int) -> np.ndarray:
        """The next bytes to fill, `most` of them or fewer."""
        if self._used == self._buffers.shape[1]:
            self._hand_over()
        first = self._used
        self._used = min(first + most, self._buffers.shape[1])
        return self._buffers[self._turn, first : self._used]

    def _hand_over(self) -> None:
        full = self._buffers[self._turn, : self._used]
        self.checksums += [crc32c(full[at : at + self._chunk]) for at in range(0, full.size, self._chunk)]
        self._out.put(full)
        self._start += self._used
        self._turn, self._used = (self._turn + 1) % (GROUPS + 1), 0
