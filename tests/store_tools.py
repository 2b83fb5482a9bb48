"""Python faces of the store's C interfaces (container, expert cache, read hook) for tests."""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

AUTO, LRU, LFU = 0, 1, 2
FIRST, ALWAYS, OFF = 0, 1, 2
OK, USAGE, FORMAT, MEMORY, IO, CANCELLED, UNSUPPORTED = 0, 1, 2, 3, 4, 6, 8


class StoreError(Exception):
    """A call that returned something else than HR_OK."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"[{code}] {detail}")
        self.code, self.detail = code, detail


def check(ffi: Any, code: int, err: Any) -> None:
    """Raises StoreError unless code is HR_OK; err is an hr_error *."""
    if code != OK:
        assert err.code == code, "status and error disagree"
        raise StoreError(code, ffi.string(err.detail).decode("utf-8"))


class Container:
    """An opened container. `budget` limits what it may allocate (0 = no limit)."""

    def __init__(self, lib: tuple[Any, Any], path: str | Path, limit: int = 0,
                 drives: tuple[Path, ...] = ()) -> None:
        self.ffi, self.C = lib
        self.path = Path(path)
        self.budget = self.ffi.new("struct mem_budget *")
        self.C.mem_budget_init(self.budget, limit)
        out, err = self.ffi.new("struct container **"), self.ffi.new("hr_error *")
        self.p = self.ffi.NULL
        names = [self.ffi.new("char[]", os.fsencode(d)) for d in drives]
        check(self.ffi, self.C.container_open_drives(
            os.fsencode(path), self.ffi.new("const char *[]", names), len(names), self.budget, out,
            err), err)
        self.p = out[0]

    def close(self) -> None:
        self.C.container_close(self.p)
        self.p = self.ffi.NULL

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Lease:
    """A delivered record: raw is the struct cache_lease, data a copy of the record."""

    raw: Any
    bank: int
    expert: int
    tag: int
    data: bytes


class Cache:
    """An expert cache over a container; its own budget shows what it allocates."""

    def __init__(self, container: Container, slots: int, *, lanes: int = 1, transient: int = 1,
                 io_threads: int = 2, working_set: int = 1, policy: int = LRU, verify: int = FIRST,
                 direct: bool = True, shuffle: int = 0, limit: int = 0, ahead: int = 0,
                 calibrate: bool = False) -> None:
        self.container, self.ffi, self.C = container, container.ffi, container.C
        self.options = self.ffi.new("struct cache_options *", {
            "slots": slots, "lanes": lanes, "transient": transient, "io_threads": io_threads,
            "working_set": working_set, "policy": policy, "verify": verify, "direct": direct,
            "shuffle_seed": shuffle, "ahead": ahead, "calibrate": calibrate})
        self.budget = self.ffi.new("struct mem_budget *")
        self.C.mem_budget_init(self.budget, limit)
        out, err = self.ffi.new("struct expert_cache **"), self.ffi.new("hr_error *")
        self.p = self.ffi.NULL
        check(self.ffi, self.C.expert_cache_create(container.p, self.options, self.budget, out,
                                                   err), err)
        self.p = out[0]

    def cost(self) -> int:
        """Bytes, as planned."""
        return self.C.expert_cache_cost(self.container.p, self.options)

    def close(self) -> None:
        self.C.expert_cache_free(self.p)
        self.p = self.ffi.NULL

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, bank: int, experts: list[int], lane: int = 0,
              chunk: list[list[int]] | None = None) -> None:
        """chunk: the tokens' choices, which `experts` unites; None: one token wants them all."""
        wanted, uses, kept = self.ffi.new("uint32_t[]", experts), self.ffi.NULL, []
        if chunk is not None:
            users: dict[int, list[int]] = {}
            for token, chosen in enumerate(chunk):
                for expert in chosen:
                    users.setdefault(expert, []).append(token)
            first, tokens = [0], []
            for expert in range(self.container.p.banks[bank].experts):
                tokens += users.get(expert, [])
                first.append(len(tokens))
            kept = [self.ffi.new("uint32_t[]", first), self.ffi.new("uint32_t[]", tokens)]
            uses = self.ffi.new("struct cache_uses *", [len(chunk), *kept])
        self.C.cache_begin(self.p, lane, bank, wanted, len(experts), uses)

    def next(self, lane: int = 0, block: bool = True) -> Lease | None:
        out, got = self.ffi.new("struct cache_lease *"), self.ffi.new("bool *")
        waited, err = self.ffi.new("double *"), self.ffi.new("hr_error *")
        check(self.ffi, self.C.cache_next(self.p, lane, block, out, got, waited, err), err)
        if not got[0]:
            return None
        size = self.container.p.banks[out.bank].record.bytes
        data = bytes(self.ffi.buffer(out.record, size))
        return Lease(out, out.bank, out.expert, out.tag, data)

    def release(self, lease: Lease, lane: int = 0) -> None:
        self.C.cache_release(self.p, lane, lease.raw)

    def abort(self, lane: int = 0) -> None:
        self.C.cache_abort(self.p, lane)

    def resize(self, slots: int, wait: bool = False) -> None:
        self.C.expert_cache_resize(self.p, slots, wait)

    def run(self, bank: int, experts: list[int], lane: int = 0) -> list[Lease]:
        """A whole batch, each record released as soon as it is delivered."""
        self.begin(bank, experts, lane)
        leases = []
        while (lease := self.next(lane)) is not None:
            leases.append(lease)
            self.release(lease, lane)
        return leases

    def stats(self) -> dict[str, int]:
        s = self.ffi.new("struct cache_stats *")
        self.C.expert_cache_stats(self.p, s)
        return {name: int(getattr(s, name)) for name, _ in self.ffi.typeof(s[0]).fields}

    def drive(self, index: int) -> Any:
        """A struct cache_drive_stats."""
        s = self.ffi.new("struct cache_drive_stats *")
        self.C.expert_cache_drive(self.p, index, s)
        return s

    def read_ahead(self, bank: int, experts: list[int], lane: int = 0) -> None:
        self.C.cache_read_ahead(self.p, lane, bank, self.ffi.new("uint32_t[]", experts),
                                len(experts))

    def mode(self) -> str:
        return self.ffi.string(self.C.expert_cache_io_mode(self.p)).decode()


Read = Callable[[int, memoryview, int], int]


def plain_read(fd: int, buffer: memoryview, offset: int) -> int:
    """What pread does, for hooks that only sometimes interfere."""
    return os.preadv(fd, [buffer], offset)


@contextmanager
def _replaced(ffi: Any, replace: Callable[[Any], None], callback: Any) -> Iterator[None]:
    replace(callback)
    try:
        yield
    finally:
        replace(ffi.NULL)


@contextmanager
def reads(lib: tuple[Any, Any], read: Read) -> Iterator[None]:
    """Replaces pread: read(fd, buffer, offset) returns bytes read, or -errno."""
    ffi, C = lib

    def hook(fd: int, buffer: Any, n: int, offset: int) -> int:
        result = read(fd, ffi.buffer(buffer, n), offset)
        if result < 0:
            ffi.errno = -result
            return -1
        return result

    with _replaced(ffi, C.direct_io_set_pread, ffi.callback("int64_t(int, void *, size_t, int64_t)", hook)):
        yield


@contextmanager
def clock(lib: tuple[Any, Any], now: Callable[[], float]) -> Iterator[None]:
    """Replaces the engine's clock: with it, what took how long is up to the test."""
    ffi, C = lib
    with _replaced(ffi, C.clock_set, ffi.callback("double(void)", now)):
        yield


def can_be_direct(directory: Path) -> bool:
    """Whether this file system takes an aligned O_DIRECT read."""
    probe = directory / "probe"
    probe.write_bytes(bytes(2 * 4096))
    try:
        fd = os.open(probe, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [mmap.mmap(-1, 4096)], 4096) == 4096
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        probe.unlink()
