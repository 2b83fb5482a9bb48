"""Bank files on several drives: mirrors, splits, damaged copies, and who reads what."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from containers import make_container
from store_tools import (ALWAYS, FIRST, FORMAT, IO, USAGE, Cache, Container, StoreError, clock,
                         plain_read, reads)

LAYERS, EXPERTS = 3, 12


@pytest.fixture
def made(tmp_path: Path) -> dict:
    return make_container(tmp_path / "c", layers=LAYERS, experts=EXPERTS, hidden=32, inner=16,
                          codec="bf16")


def copy_banks(source: Path, target: Path, banks: range | list[int]) -> Path:
    target.mkdir(exist_ok=True)
    for bank in banks:
        shutil.copy(source / f"experts-{bank:04d}.bin", target)
    return target


def read_all(cache: Cache, path: Path, size: int) -> None:
    """Every record of every bank, compared with the files of `path`."""
    for bank in range(LAYERS):
        truth = (path / f"experts-{bank:04d}.bin").read_bytes()
        for lease in cache.run(bank, list(range(EXPERTS))):
            assert lease.data == truth[lease.expert * size :][:size]


def slowly(fd: int, buffer: memoryview, offset: int) -> int:
    """A read long enough that the next one finds this drive busy, whatever else the machine does."""
    time.sleep(0.002)
    return plain_read(fd, buffer, offset)


def test_two_copies_share_the_work(lib, tmp_path, made) -> None:
    mirror = copy_banks(tmp_path / "c", tmp_path / "m", range(LAYERS))
    with Container(lib, tmp_path / "c", drives=(mirror,)) as c, \
            Cache(c, 0, transient=4, io_threads=2, direct=False) as cache, reads(lib, slowly):
        assert cache.budget.used == cache.cost()
        for _ in range(4):
            read_all(cache, mirror, made["record_bytes"])
        parts = [cache.drive(i) for i in range(2)]
        assert sum(p.reads for p in parts) == cache.stats()["reads"] == 4 * LAYERS * EXPERTS
        assert all(p.reads > 0 and p.banks == LAYERS and p.seconds > 0 for p in parts)
        assert [Path(lib[0].string(p.path).decode()) for p in parts] == [tmp_path / "c", mirror]
        assert cache.stats()["fallbacks"] == 0


def test_the_faster_drive_reads_more(lib, tmp_path, made) -> None:
    """Work goes by what each drive has to do already and how fast it was lately."""
    mirror = copy_banks(tmp_path / "c", tmp_path / "m", range(LAYERS))
    now, lock, gate = 1.0, threading.Lock(), threading.Event()
    gate.set()

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        nonlocal now
        assert gate.wait(600)
        with lock:  # nothing else takes time
            now += 0.0085 if os.readlink(f"/proc/self/fd/{fd}").startswith(str(mirror)) else 0.001
        return plain_read(fd, buffer, offset)

    with Container(lib, tmp_path / "c", drives=(mirror,)) as c, \
            Cache(c, 0, transient=10, io_threads=1, direct=False) as cache, reads(lib, read), \
            clock(lib, lambda: now):
        for expert in range(EXPERTS):  # one after the other
            cache.run(0, [expert])
        fast, slow = (cache.drive(i).reads for i in range(2))
        assert (fast, slow) == (EXPERTS - 1, 1), "one read says that it is slow"
        gate.clear()
        cache.begin(1, list(range(10)))  # all are given to a drive before the first is read
        gate.set()
        while (lease := cache.next()) is not None:
            cache.release(lease)
        assert cache.drive(0).reads - fast == 9, "8 take less than one of the other, 10 less than two"
        assert cache.drive(1).reads - slow == 1


@pytest.mark.parametrize("verify", [FIRST, ALWAYS])
def test_a_damaged_copy_is_made_good_by_another(lib, tmp_path, made, verify) -> None:
    mirror = copy_banks(tmp_path / "c", tmp_path / "m", range(LAYERS))
    size = made["record_bytes"]
    data = bytearray((mirror / "experts-0001.bin").read_bytes())
    for expert in range(EXPERTS):
        data[expert * size + 700] ^= 1
    (mirror / "experts-0001.bin").write_bytes(data)
    with Container(lib, tmp_path / "c", drives=(mirror,)) as c, \
            Cache(c, 0, transient=4, verify=verify, io_threads=2, direct=False) as cache, \
            reads(lib, slowly):
        for _ in range(3):
            read_all(cache, tmp_path / "c", size)
        s = cache.stats()
        bad = cache.drive(1).failures
        assert s["fallbacks"] == bad > 0 and cache.drive(0).failures == 0
        assert s["reads"] == 3 * LAYERS * EXPERTS + bad
        assert not cache.drive(1).left_out, "the drive works; some of its records are bad"


def test_a_dead_drive_is_left_out(lib, tmp_path, made) -> None:
    mirror = copy_banks(tmp_path / "c", tmp_path / "m", range(LAYERS))
    dead = 0

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        nonlocal dead
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(mirror)):
            return plain_read(fd, buffer, offset)
        dead += 1
        return -errno.ENODEV

    with Container(lib, tmp_path / "c", drives=(mirror,)) as c, \
            Cache(c, 0, transient=4, io_threads=1, direct=False) as cache, reads(lib, read):
        for _ in range(4):
            read_all(cache, tmp_path / "c", made["record_bytes"])
        assert cache.drive(1).left_out and 4 <= dead < 12
        assert cache.stats()["fallbacks"] == dead


def test_what_no_copy_gives_is_an_error(lib, tmp_path, made) -> None:
    mirror = copy_banks(tmp_path / "c", tmp_path / "m", range(LAYERS))
    for folder in (tmp_path / "c", mirror):
        data = bytearray((folder / "experts-0000.bin").read_bytes())
        data[2 * made["record_bytes"] + 700] ^= 1
        (folder / "experts-0000.bin").write_bytes(data)
    with Container(lib, tmp_path / "c", drives=(mirror,)) as c, Cache(c, 4) as cache:
        with pytest.raises(StoreError) as caught:
            cache.run(0, [1, 2])
        assert caught.value.code == FORMAT and "layer 0 expert 2" in caught.value.detail
        cache.abort()
        assert len(cache.run(0, [0, 1, 3])) == 3
        assert cache.stats()["leases"] == 0 and cache.stats()["fallbacks"] == 0


def test_a_split_container(lib, tmp_path, made) -> None:
    """Some banks are here, some there; the container's directory need not have any."""
    whole = shutil.copytree(tmp_path / "c", tmp_path / "whole")
    first = copy_banks(whole, tmp_path / "one", [0])
    second = copy_banks(whole, tmp_path / "two", [1, 2])
    for bank in range(LAYERS):
        (tmp_path / "c" / f"experts-{bank:04d}.bin").unlink()
    with Container(lib, tmp_path / "c", drives=(first, second)) as c, Cache(c, 3) as cache:
        read_all(cache, whole, made["record_bytes"])
        assert [cache.drive(i).banks for i in range(3)] == [0, 1, 2]
        assert lib[0].string(cache.drive(0).mode) == b"absent"
    with pytest.raises(StoreError) as caught:
        Container(lib, tmp_path / "c", drives=(first,))
    assert caught.value.code == FORMAT and "experts-0001.bin" in caught.value.detail


def test_what_is_not_a_copy_is_refused(lib, tmp_path, made) -> None:
    mirror = copy_banks(tmp_path / "c", tmp_path / "m", range(LAYERS))
    with open(mirror / "experts-0002.bin", "ab") as f:
        f.write(bytes(4096))
    with pytest.raises(StoreError) as caught:
        Container(lib, tmp_path / "c", drives=(mirror,))
    assert caught.value.code == FORMAT
    assert str(mirror) in caught.value.detail and "experts-0002.bin" in caught.value.detail
    for drives, code in (((tmp_path / "nowhere",), IO), ((tmp_path,) * 8, USAGE)):
        with pytest.raises(StoreError) as caught:
            Container(lib, tmp_path / "c", drives=drives)
        assert caught.value.code == code
    # of another container: the right length, but not the right records
    other = make_container(tmp_path / "other", layers=LAYERS, experts=EXPERTS, hidden=32, inner=16,
                           codec="bf16", seed=1)
    assert other["record_bytes"] == made["record_bytes"]
    with Container(lib, tmp_path / "c", drives=(tmp_path / "other",)) as c, \
            Cache(c, 0, transient=4, io_threads=2, direct=False) as cache, reads(lib, slowly):
        read_all(cache, tmp_path / "c", made["record_bytes"])
        assert cache.drive(1).reads > 0 and cache.drive(1).failures == cache.drive(1).reads


def test_reads_in_flight_are_measured(lib, tmp_path) -> None:
    """The depth is one that was tried, and no read of the measurement is taken for an expert's."""
    made = make_container(tmp_path / "c", layers=4, experts=48, hidden=128, inner=128, codec="f32")
    with Container(lib, tmp_path / "c") as c, \
            Cache(c, 4, transient=8, io_threads=8, calibrate=True) as cache:
        drive = cache.drive(0)
        if lib[0].string(drive.mode) != b"direct":
            assert drive.depth == 8 and drive.probed == 0
            return
        assert drive.depth in (2, 4, 8) and drive.probed > 0
        s = cache.stats()
        assert s["reads"] == s["bytes_read"] == s["used"] == drive.reads == 0
        assert cache.budget.used == cache.cost()
        assert len(cache.run(0, list(range(48)))) == 48
        assert cache.stats()["bytes_read"] == 48 * made["record_bytes"]
