"""A file written and hashed at the rate of the disk: past the page cache where that is possible."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

_BUFFER = 16 << 20
_DIRECT: int = getattr(os, "O_DIRECT", 0)


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
    """Pieces of equal length, a multiple of 4096, one behind the other; a context manager.

    Two buffers take turns: while one is written and hashed, the next pieces are put together in
    the other. `digest` is the SHA-256 of what was written, complete once the manager was left.
    """

    def __init__(self, fd: int, piece: int) -> None:
        self.digest = hashlib.sha256()
        self._fd, self._piece = fd, piece
        size = max(1, _BUFFER // piece) * piece
        self._buffers = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(2)]
        self._used = 0
        self._running: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(2)
        self._direct = _set_direct(fd, True)

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self._flush()
            self._settle()
        finally:
            self._pool.shutdown()
            _set_direct(self._fd, False)

    def next(self) -> np.ndarray:
        """Where the next piece goes, uint8 [piece]; it holds what an earlier one left."""
        if self._used == self._buffers[0].size:
            self._flush()
        start = self._used
        self._used += self._piece
        return self._buffers[0][start : self._used]

    def _settle(self) -> None:
        running, self._running = self._running, []
        for future in running:
            future.result()

    def _flush(self) -> None:
        """Hands the first buffer over when the second has been dealt with, and swaps them."""
        self._settle()
        view = self._buffers[0][: self._used]
        if view.size:
            self._running = [
                self._pool.submit(self.digest.update, view), self._pool.submit(self._write, view)
            ]  # fmt: skip
        self._buffers.reverse()
        self._used = 0

    def _write(self, data: np.ndarray) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                _set_direct(self._fd, False)
