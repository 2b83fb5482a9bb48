"""Questions to the file system whose answer is never a guess.

"Not there" is said only where nothing is there. What pathlib and os.path answer with False as well
(an I/O error, a path that may not be looked at) is raised, so that a failing disk cannot pass for
a checkpoint without the file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from .errors import EXIT_IO, ConvertError


def _mode(path: Path, follow: bool = True) -> int:
    """st_mode, 0 when there is nothing. Raises ConvertError (I/O)."""
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None


def exists(path: Path) -> bool:
    """Whether there is something, links followed."""
    return _mode(path) != 0


def is_listed(path: Path) -> bool:
    """Whether the name is there, be it a link that leads nowhere."""
    return _mode(path, follow=False) != 0


def is_file(path: Path) -> bool:
    return stat.S_ISREG(_mode(path))


def is_directory(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def is_link(path: Path) -> bool:
    return stat.S_ISLNK(_mode(path, follow=False))


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises ConvertError (I/O) with the path, also when reading fails half-way."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None


def size(path: Path) -> int:
    """Bytes of what is there. Raises ConvertError (I/O)."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None


def sha256(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal. Raises ConvertError (I/O)."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}", EXIT_IO) from None
    return digest.hexdigest()
