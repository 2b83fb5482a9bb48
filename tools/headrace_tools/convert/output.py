"""The output directory: whole files only, a journal, resume after a kill.

Every file is written as NAME.partial, synchronised, renamed, and only then entered in
conversion.log. While that log exists no reader opens the directory; its removal is the
last step of a conversion.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np

from .errors import EXIT_IO, EXIT_USAGE, ConvertError
from .options import differing

LOG = "conversion.log"
_OURS = re.compile(r"(trunk|tokenizer|ngram|codebooks|experts-\d{4,})\.bin|manifest\.(json|sha256)|conversion\.log")
_VERSION = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


class PartialFile:
    """A file being written. `record` goes into the journal beside size and sha256."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.record: dict[str, object] = {}
        self.sha256 = ""

    def write(self, data: bytes | np.ndarray) -> None:
        _write_all(self.fd, memoryview(data).cast("B"))

    def write_at(self, offset: int, data: np.ndarray) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(self.fd, view, offset)
            offset += done
            view = view[done:]

    def chunks(self, size: int) -> Iterator[bytes]:
        """What was written, from the start, in pieces of `size` bytes."""
        offset = 0
        while True:
            data = b""
            while len(data) < size:
                part = os.pread(self.fd, size - len(data), offset + len(data))
                if not part:
                    break
                data += part
            if not data:
                return
            yield data
            offset += len(data)


class OutputDirectory:
    """Use as a context manager; `header` (options and source) is what a resume must repeat."""

    def __init__(self, path: Path, header: dict[str, dict[str, object]], needed: int) -> None:
        self.path = path
        self.header = {"kind": "start", "version": _VERSION, **header}
        self.needed = needed
        self.done: dict[str, dict[str, object]] = {}
        self._journal = Lock()
        self.resumed = False
        self._lock = -1

    # -- opening -----------------------------------------------------------------------------

    def __enter__(self) -> OutputDirectory:
        with self._io("creating", self.path):
            os.makedirs(self.path, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConvertError(
                    f"{self.path}: another conversion is writing here", EXIT_USAGE
                ) from None
            raise ConvertError(
                f"{self.path}: cannot be locked: {error.strerror}", EXIT_IO
            ) from None
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            os.close(self._lock)
        except OSError:
            pass  # nothing was written through it, and what went wrong before must be told

    def start(self, overwrite: bool) -> None:
        """Takes up an unfinished conversion, or begins one in an empty directory.

        Raises ConvertError (usage) when the directory holds something else and
        `overwrite` is not given.
        """
        names = sorted(os.listdir(self.path))
        if overwrite and (LOG in names or "manifest.json" in names or not names):
            self._begin()
            self._clear(names)
            return
        log = self._read_log() if LOG in names else None
        if log is not None:
            self._check_header(log[0])
            for record in log[1:]:
                self._take(record)
            self.resumed = bool(self.done)
            self._rewrite_log([log[0], *self.done.values()])
            keep = set(self.done) | {LOG}
            self._clear([name for name in names if name not in keep])
            return
        strangers = [name for name in names if name not in (LOG, LOG + ".partial")]
        if strangers:
            raise ConvertError(
                f"{self.path}: is not empty ({strangers[0]}); give a new directory, or --overwrite "
                "to replace a container",
                EXIT_USAGE,
            )
        self._begin()

    def _begin(self) -> None:
        self._rewrite_log([self.header])

    def _clear(self, names: list[str]) -> None:
        """Removes files that a conversion may have left; the manifest's digest goes first."""
        with self._io("removing from", self.path):
            for name in sorted(names, key=lambda n: (n != "manifest.sha256", n)):
                if name != LOG and _OURS.fullmatch(name.removesuffix(".partial")):
                    os.unlink(self.path / name)
            _sync_directory(self.path)

    def _read_log(self) -> list[dict[str, object]] | None:
        """Whole lines of the journal; None when not even the first was finished."""
        with self._io("reading", self.path / LOG):
            raw = (self.path / LOG).read_bytes()
        lines: list[dict[str, object]] = []
        for line in raw.split(b"\n")[:-1]:
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not isinstance(value, dict):
                break
            lines.append(value)
        if lines and lines[0].get("kind") == "start":
            return lines
        if raw.count(b"\n"):
            raise ConvertError(
                f"{self.path / LOG}: is damaged; give --overwrite to start again", EXIT_USAGE
            )
        return None

    def _check_header(self, old: dict[str, object]) -> None:
        if old == self.header:
            return
        reasons: list[str] = []
        if old.get("version") != _VERSION or old.get("converter") != self.header.get("converter"):
            reasons.append("it was begun by another version of headrace-convert")
        options = old.get("options")
        reasons += differing(options if isinstance(options, dict) else {}, self.header["options"])  # type: ignore[arg-type]
        if old.get("source") != self.header["source"]:
            reasons.append(
                "the source changed: " + _first_difference(old.get("source"), self.header["source"])
            )
        raise ConvertError(
            f"{self.path}: holds an unfinished conversion that cannot be continued: "
            f"{'; '.join(reasons) or 'its journal differs'}. Repeat the old options, or give "
            "--overwrite to start again",
            EXIT_USAGE,
        )

    def _take(self, record: dict[str, object]) -> None:
        """Believes a journal line when the file it names has that size."""
        name = record.get("name")
        if record.get("kind") != "file" or not isinstance(name, str) or not _OURS.fullmatch(name):
            return
        if not isinstance(record.get("sha256"), str) or (
            name not in ("tokenizer.bin", "ngram.bin") and not isinstance(record.get("crc32c"), list)
        ):
            return
        path = self.path / name
        try:
            status = os.lstat(path)
        except OSError:
            return
        if stat.S_ISREG(status.st_mode) and status.st_size == record.get("bytes"):
            self.done[name] = record

    # -- writing -----------------------------------------------------------------------------

    def _rewrite_log(self, lines: list[dict[str, object]]) -> None:
        partial = self.path / (LOG + ".partial")
        with self._io("writing", self.path / LOG, partial):
            data = b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)
            self._write_synced(partial, data)
            os.replace(partial, self.path / LOG)
            _sync_directory(self.path)

    @staticmethod
    def _write_synced(path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(fd, memoryview(data))
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_file(self, name: str, nbytes: int, fill: Callable[[PartialFile], None]) -> None:
        """Lets `fill` write NAME.partial, then publishes it and enters it in the journal. Several threads
        may write a file each.

        On any error, also an interrupt, the partial file is removed.
        """
        path, partial = self.path / name, self.path / (name + ".partial")
        with self._io("writing", path, partial):
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                file = PartialFile(fd)
                fill(file)
                if os.fstat(fd).st_size != nbytes:
                    raise ConvertError(
                        f"{partial}: has {os.fstat(fd).st_size} bytes, {nbytes} were planned",
                        EXIT_IO,
                    )
                if not file.sha256:
                    digest = hashlib.sha256()
                    for chunk in file.chunks(1 << 20):
                        digest.update(chunk)
                    file.sha256 = digest.hexdigest()
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(partial, path)
            _sync_directory(self.path)
        record = {
            "kind": "file",
            "name": name,
            "bytes": nbytes,
            "sha256": file.sha256,
            **file.record,
        }
        with self._journal, self._io("writing", self.path / LOG):
            log = os.open(self.path / LOG, os.O_WRONLY | os.O_APPEND)
            try:
                _write_all(log, memoryview(json.dumps(record, sort_keys=True).encode() + b"\n"))
                os.fsync(log)
            finally:
                os.close(log)
        self.done[name] = record

    def finish(self, manifest: bytes) -> None:
        """Writes manifest.json and manifest.sha256, checks every file, removes the journal."""
        digests = {name: str(record["sha256"]) for name, record in self.done.items()}
        digests["manifest.json"] = hashlib.sha256(manifest).hexdigest()
        lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
        for name, data in (("manifest.json", manifest), ("manifest.sha256", lines.encode())):
            path, partial = self.path / name, self.path / (name + ".partial")
            with self._io("writing", path, partial):
                self._write_synced(partial, data)
                os.replace(partial, path)
                _sync_directory(self.path)

    def remove_log(self) -> None:
        with self._io("removing", self.path / LOG):
            os.unlink(self.path / LOG)
            _sync_directory(self.path)

    @contextmanager
    def _io(self, verb: str, path: Path, partial: Path | None = None) -> Iterator[None]:
        """Turns OSError into ConvertError and removes `partial` on any exception."""
        try:
            yield
        except BaseException as error:
            if partial is not None:
                try:
                    os.unlink(partial)
                except OSError:
                    pass
            if isinstance(error, OSError):
                raise self._io_error(verb, path, error) from error
            raise

    def _io_error(self, verb: str, path: Path, error: OSError) -> ConvertError:
        if error.errno in _FULL:
            written = sum(int(r["bytes"]) for r in list(self.done.values()))  # type: ignore[call-overload]
            missing = self.needed - written
            try:
                free = f"{shutil.disk_usage(self.path).free} bytes are free"
            except OSError:
                free = "the free space is unknown"
            return ConvertError(
                f"{path}: disk full ({error.strerror}): the container needs {self.needed} bytes, "
                f"{written} of them are written, {missing} are missing, {free}; free some "
                "space and run the same command again to continue",
                EXIT_IO,
            )
        return ConvertError(f"{path}: {verb} failed: {error.strerror or error}", EXIT_IO)


def _first_difference(old: object, new: object) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return "other files"
    before = {s.get("name"): s for s in old.get("shards", []) if isinstance(s, dict)}
    after = {s["name"]: s for s in new["shards"]}
    for name in sorted(set(before) | set(after), key=str):
        if before.get(name) != after.get(name):
            return f"{name} is another file than before"
    files = old.get("files", {})
    for name in sorted(set(files) | set(new["files"])):
        if files.get(name) != new["files"].get(name):
            return f"{name} is another file than before"
    return "other files"
