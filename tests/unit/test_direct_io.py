"""engine/store/direct_io.c: honest mode, and every way in which a read can go wrong."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from containers import make_container
from store_tools import (ALWAYS, FORMAT, IO, LRU, Cache, Container, StoreError, can_be_direct, check,
                         plain_read, reads)

BLOCK = 4096


class File:
    """A struct direct_file over one file, with an aligned buffer to read into."""

    def __init__(self, lib, path: Path, direct: bool) -> None:
        self.ffi, self.C = lib
        self.f = self.ffi.new("struct direct_file *")
        self.err = self.ffi.new("hr_error *")
        self.retries = self.ffi.new("uint64_t *")
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            check(self.ffi, self.C.direct_file_open(directory, path.name.encode(), direct, self.f,
                                                    self.err), self.err)
        finally:
            os.close(directory)

    def read(self, offset: int, n: int) -> bytes:
        size = max(n, 65536)
        buffer = self.C.mem_alloc(self.ffi.NULL, size)
        try:
            check(self.ffi, self.C.direct_read(self.f, offset, buffer, n, self.retries, self.err),
                  self.err)
            return bytes(self.ffi.buffer(buffer, n))
        finally:
            self.C.mem_free(self.ffi.NULL, buffer, size)

    def close(self) -> None:
        self.C.direct_file_close(self.f)


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, bytes]:
    content = random.Random(1).randbytes(16 * BLOCK)
    path = tmp_path / "experts-0000.bin"
    path.write_bytes(content)
    return path, content


@pytest.mark.parametrize("direct", [False, True])
def test_reads_what_is_there(lib, data, direct: bool) -> None:
    path, content = data
    f = File(lib, path, direct)
    assert f.f.bytes == len(content)
    assert f.f.direct == (direct and can_be_direct(path.parent))
    for offset, n in ((0, 1), (1, 3), (5, 5), (15, 1), (0, 16)):
        assert f.read(offset * BLOCK, n * BLOCK) == content[offset * BLOCK :][: n * BLOCK]
    assert f.retries[0] == 0
    f.close()


def test_a_memory_file_system_is_called_buffered(lib) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no writable tmpfs at /dev/shm")
    directory = shm / f"headrace-test-{os.getpid()}"
    try:
        made = make_container(directory, layers=2, experts=3)
        with Container(lib, directory) as c, Cache(c, 2) as cache:
            assert cache.mode() == "buffered"
            for lease in cache.run(1, [0, 1, 2]):
                size = made["record_bytes"]
                want = (directory / "experts-0001.bin").read_bytes()
                assert lease.data == want[lease.expert * size :][:size]
    finally:
        for f in directory.iterdir():
            f.unlink()
        directory.rmdir()


@pytest.mark.parametrize(("hidden", "inner", "blocks"), [(32, 28, 3), (32, 48, 5)])
def test_records_of_odd_numbers_of_blocks_stay_direct(lib, tmp_path, hidden, inner, blocks) -> None:
    if not can_be_direct(tmp_path):
        pytest.skip("this file system has no direct reads")
    made = make_container(tmp_path / "c", layers=1, experts=4, hidden=hidden, inner=inner,
                          codec="f32")
    assert made["record_bytes"] == blocks * BLOCK
    with Container(lib, tmp_path / "c") as c, Cache(c, 4) as cache:
        assert cache.mode() == "direct"
        assert len(cache.run(0, [3, 1, 2, 0])) == 4


def test_direct_refused_by_the_first_transfer(lib, data) -> None:
    """A file system that opens with O_DIRECT and fails the read is used buffered."""
    path, content = data
    with reads(lib, lambda fd, buffer, offset: -errno.EINVAL):
        f = File(lib, path, True)
    assert not f.f.direct
    assert f.read(BLOCK, 2 * BLOCK) == content[BLOCK : 3 * BLOCK]
    f.close()


def test_direct_can_be_declined(lib, tmp_path) -> None:
    make_container(tmp_path / "c", layers=1, experts=2)
    with Container(lib, tmp_path / "c") as c, Cache(c, 1, direct=False) as cache:
        assert cache.mode() == "buffered"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("most", [4096, 5000, 8191, 12288])
def test_short_reads_are_continued_aligned(lib, data, direct: bool, most: int) -> None:
    path, content = data
    f = File(lib, path, direct)
    offsets = []

    def short(fd: int, buffer, offset: int) -> int:
        offsets.append(offset)
        return min(plain_read(fd, buffer, offset), most)

    with reads(lib, short):
        assert f.read(2 * BLOCK, 9 * BLOCK) == content[2 * BLOCK : 11 * BLOCK]
    assert f.retries[0] > 0
    if f.f.direct:
        assert all(o % BLOCK == 0 for o in offsets)
    f.close()


@pytest.mark.parametrize("direct", [False, True])
def test_eintr_storm(lib, data, direct: bool) -> None:
    path, content = data
    f = File(lib, path, direct)
    calls = iter(range(10**6))

    def interrupted(fd: int, buffer, offset: int) -> int:
        if next(calls) % 50:
            return -errno.EINTR
        return min(plain_read(fd, buffer, offset), 2 * BLOCK)

    with reads(lib, interrupted):
        assert f.read(0, 8 * BLOCK) == content[: 8 * BLOCK]
    assert f.retries[0] >= 3 * 49
    f.close()


@pytest.mark.parametrize("times", [1, 2])
def test_eio_that_passes(lib, data, times: int) -> None:
    path, content = data
    f = File(lib, path, False)
    left = [times]

    def failing(fd: int, buffer, offset: int) -> int:
        if left[0]:
            left[0] -= 1
            return -errno.EIO
        return plain_read(fd, buffer, offset)

    with reads(lib, failing):
        assert f.read(BLOCK, BLOCK) == content[BLOCK : 2 * BLOCK]
    assert f.retries[0] == times
    f.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV, errno.ENXIO])
def test_lasting_errors_name_file_offset_and_reason(lib, data, code: int) -> None:
    path, content = data
    f = File(lib, path, False)
    calls = []

    def failing(fd: int, buffer, offset: int) -> int:
        calls.append(offset)
        return -code

    with reads(lib, failing), pytest.raises(StoreError) as caught:
        f.read(3 * BLOCK, BLOCK)
    assert caught.value.code == IO
    assert os.strerror(code) in caught.value.detail
    assert "experts-0000.bin" in caught.value.detail and str(3 * BLOCK) in caught.value.detail
    assert len(calls) == (3 if code == errno.EIO else 1)
    assert f.read(0, BLOCK) == content[:BLOCK], "usable again once the drive is back"
    f.close()


@pytest.mark.parametrize("direct", [False, True])
def test_nothing_read_inside_the_file(lib, data, direct: bool) -> None:
    path, content = data
    f = File(lib, path, direct)
    once = [0]

    def zero_once(fd: int, buffer, offset: int) -> int:
        once[0] += 1
        return 0 if once[0] == 1 else plain_read(fd, buffer, offset)

    with reads(lib, zero_once):
        assert f.read(0, BLOCK) == content[:BLOCK]
    with reads(lib, lambda fd, buffer, offset: 0), pytest.raises(StoreError) as caught:
        f.read(BLOCK, BLOCK)
    assert caught.value.code == IO and "returns nothing" in caught.value.detail
    f.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4096, 4097, 6 * 4096 + 17])
def test_a_file_that_was_cut(lib, data, direct: bool, length: int) -> None:
    path, _ = data
    f = File(lib, path, direct)
    os.truncate(path, length)
    with pytest.raises(StoreError) as caught:
        f.read(4 * BLOCK, 4 * BLOCK)
    assert caught.value.code == FORMAT
    assert "experts-0000.bin" in caught.value.detail and str(length) in caught.value.detail
    f.close()


def test_a_hook_that_returns_too_much_is_not_believed(lib, data) -> None:
    path, _ = data
    f = File(lib, path, False)
    with reads(lib, lambda fd, buffer, offset: len(buffer) + 1), pytest.raises(StoreError) as e:
        f.read(0, BLOCK)
    assert e.value.code == IO
    f.close()


def test_the_cache_survives_a_bad_drive(lib, tmp_path) -> None:
    """Every kind of hiccup while records stream: contents stay right, retries are counted."""
    made = make_container(tmp_path / "c", layers=2, experts=6)
    size, rng = made["record_bytes"], random.Random(3)

    def flaky(fd: int, buffer, offset: int) -> int:
        dice = rng.random()
        if dice < 0.3:
            return -errno.EINTR
        if dice < 0.5:
            return min(plain_read(fd, buffer, offset), rng.randrange(4096, len(buffer) + 4096))
        return plain_read(fd, buffer, offset)

    files = [(tmp_path / "c" / f"experts-{i:04d}.bin").read_bytes() for i in range(2)]
    with Container(lib, tmp_path / "c") as c, Cache(c, 3, policy=LRU, verify=ALWAYS) as cache:
        with reads(lib, flaky):
            for _ in range(10):
                for bank in range(2):
                    for lease in cache.run(bank, rng.sample(range(6), 4)):
                        assert lease.data == files[bank][lease.expert * size :][:size]
        s = cache.stats()
        assert s["retries"] > 0 and s["leases"] == 0
        assert s["bytes_read"] == s["reads"] * size and s["verified"] == s["reads"]
