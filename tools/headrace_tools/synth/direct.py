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

_GROUP = 16 << 20
"""Bytes handed to the system at once."""
_GROUPS = 4
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
    """Records one behind the other, past the page cache where that is possible; a context manager.

    Each lies at a page and is a multiple of 4096 bytes long. One thread writes and one hashes, each at its
    own pace: memory that was handed over may change again after `wait_for` its number.
    `digest` is the SHA-256 of what was written, complete once the manager was left. `direct`: the page
    cache has none of it.
    """

    def __init__(self, fd: int) -> None:
        self.digest = hashlib.sha256()
        self._fd, self._offset = fd, 0
        self._next: dict[int, np.ndarray] = {}
        self._bytes = 0
        self._running: deque[tuple[set[int], list[Future[None]]]] = deque()
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

    def wait_for(self, number: int) -> None:
        """Until the memory of that number is not read any more."""
        if number in self._next:
            self._flush()
        while any(number in numbers for numbers, _ in self._running):
            self._settle(len(self._running) - 1)

    def put(self, number: int, record: np.ndarray) -> None:
        """The next record, uint8; `number` names its memory and is not waiting to be written."""
        self._next[number] = record
        self._bytes += record.size
        if self._bytes >= _GROUP:
            self._flush()

    def _settle(self, left: int) -> None:
        """Waits until no more than `left` groups are on their way."""
        while len(self._running) > left:
            for future in self._running.popleft()[1]:
                future.result()

    def _flush(self) -> None:
        """Hands the next records over."""
        if not self._next:
            return
        self._settle(_GROUPS - 1)
        records, offset = list(self._next.values()), self._offset
        work = [
            self._hasher.submit(self._hash, records),
            self._writer.submit(self._write, records, offset),
        ]
        self._running.append((set(self._next), work))
        self._next = {}
        self._offset += self._bytes
        self._bytes = 0

    def _hash(self, records: list[np.ndarray]) -> None:
        for record in records:
            self.digest.update(record)

    def _write(self, records: list[np.ndarray], offset: int) -> None:
        try:
            write_pieces(self._fd, records, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False
            _set_direct(self._fd, False)
            write_pieces(self._fd, records, offset)


class Follower:
    """Reads a file again behind those who write it, for its SHA-256 and the checksums of its chunks."""

    def __init__(self, fd: int, chunk: int) -> None:
        self.digest = hashlib.sha256()
        self.checksums: list[int] = []
        self._fd, self._at = fd, 0
        self._buffer = np.zeros(chunk, np.uint8)
        self._pool = ThreadPoolExecutor(1)
        self._running: list[Future[None]] = []

    def advance(self, end: int) -> None:
        """The bytes below `end` will not change."""
        self._running.append(self._pool.submit(self._read, end, False))

    def finish(self, end: int) -> None:
        """The file ends there: returns when all of it was read."""
        self._running.append(self._pool.submit(self._read, end, True))
        for future in self._running:
            future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read(self, end: int, last: bool) -> None:
        while self._at + self._buffer.size <= end or (last and self._at < end):
            data = self._buffer[: end - self._at]
            done = 0
            while done < data.size:
                part = os.preadv(self._fd, [data[done:]], self._at + done)
                if part == 0:
                    raise OSError(errno.EIO, "the file became shorter while it was written")
                done += part
            self.digest.update(data)
            self.checksums.append(crc32c(data))
            self._at += data.size
