"""engine/store/disk_probe.c: every record once, honest about what came from the drive."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from pathlib import Path

import pytest

from containers import make_container
from store_tools import (IO, USAGE, Container, StoreError, can_be_direct, check, clock, plain_read,
                         reads)

RECORD = 64 << 10
RECORDS = 192
ENDLESS = 1e9  # seconds: the records end before the time does, on any machine


class Probe:
    """Runs the probe; what it allocated must be gone afterwards."""

    def __init__(self, lib) -> None:
        self.ffi, self.C = lib
        self.budget = self.ffi.new("struct mem_budget *")
        self.C.mem_budget_init(self.budget, 0)

    def __call__(self, call, *args, seconds: float = 0.3, seed: int = 1, depth_most: int = 0):
        options = self.ffi.new("struct disk_probe_options *",
                               {"seconds": seconds, "seed": seed, "depth_most": depth_most})
        out, err = self.ffi.new("struct disk_probe *"), self.ffi.new("hr_error *")
        try:
            check(self.ffi, call(*args, options, self.budget, out, err), err)
        finally:
            assert self.budget.used == 0
        return out

    def file(self, path: Path, direct: bool = True, **options):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            return self(self.C.disk_probe_file, directory, path.name.encode(), RECORD, direct,
                        **options)
        finally:
            os.close(directory)


@pytest.fixture
def probe(lib) -> Probe:
    return Probe(lib)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    with open(path, "wb") as file:
        file.write(random.Random(1).randbytes(RECORDS * RECORD + 100))
        file.flush()
        os.fsync(file.fileno())
    return path


def accounted() -> bool:
    """Whether this system says what a thread read from devices."""
    return os.path.exists("/proc/thread-self/io")


def test_every_record_at_most_once_and_whole(lib, probe, data) -> None:
    seen: list[tuple[int, int]] = []

    def note(fd: int, buffer: memoryview, offset: int) -> int:
        seen.append((offset, len(buffer)))
        return plain_read(fd, buffer, offset)

    with reads(lib, note):
        found = probe.file(data, seconds=ENDLESS)
    asked = [offset for offset, n in seen if n == RECORD]
    assert len(asked) == len(set(asked)) == sum(found.rate[i].reads for i in range(4))
    assert sorted(asked) == [i * RECORD for i in range(RECORDS)], "with time to spare all of them"
    assert asked != sorted(asked)
    assert found.asked == len(asked) * RECORD
    assert [found.rate[i].depth for i in range(found.rates)] == [1, 2, 4, 8]
    for i in range(found.rates):
        rate = found.rate[i]
        assert 0 < rate.lowest <= rate.bytes_per_second <= rate.highest


def test_another_seed_reads_in_another_order(lib, probe, data) -> None:
    orders = []
    for seed in (1, 1, 2):
        seen: list[int] = []

        def note(fd: int, buffer: memoryview, offset: int) -> int:
            seen.append(offset)
            return plain_read(fd, buffer, offset)

        with reads(lib, note):
            probe.file(data, seconds=ENDLESS, seed=seed, depth_most=1)  # two readers may overtake
        orders.append(seen[1:9])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.skipif(not accounted(), reason="this system keeps no account of device reads")
def test_direct_reads_are_proven_cold(probe, data) -> None:
    if not can_be_direct(data.parent):
        pytest.skip("this file system cannot bypass the page cache")
    data.read_bytes()  # in the page cache, which must not matter
    found = probe.file(data)
    assert found.direct and found.accounted and found.cold
    assert found.physical >= found.asked > 0 and not found.fresh


def test_the_page_cache_is_never_taken_for_the_drive(probe, data) -> None:
    with open(data, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        sum(pages[::4096])  # mapped pages stay whatever the reader advises
        found = probe.file(data, direct=False)
    assert not found.direct and not found.cold
    assert found.physical < found.asked / 2


class Drive:
    """A drive in a time of its own, in which nothing but its reads takes any: a read takes READ seconds.

    Of 15 records the probe reads 1, 2, 4 and 8 at a time; no read of these goes on before all are there.
    """

    READ, RECORDS = 0.004, 15

    def __init__(self, serial: bool) -> None:
        self.serial, self.now, self.begun, self.all_there = serial, 1.0, 0, threading.Condition()

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) == RECORD:  # not what looks whether direct reads work
            with self.all_there:
                self.begun += 1
                together = next(n for n in (1, 3, 7, 15) if n >= self.begun)
                if self.serial or self.begun == together:
                    self.now += self.READ
                self.all_there.notify_all()
                assert self.all_there.wait_for(lambda: self.begun >= together, 600)
        return plain_read(fd, buffer, offset)

    def probed(self, lib, probe, path: Path):
        with open(path, "r+b") as file:
            file.truncate(self.RECORDS * RECORD)
        with reads(lib, self), clock(lib, lambda: self.now):
            found = probe.file(path, seconds=ENDLESS)
        assert [found.rate[i].reads for i in range(4)] == [1, 2, 4, 8]
        return found


def test_latency_is_hidden_by_depth(lib, probe, data) -> None:
    found = Drive(serial=False).probed(lib, probe, data)
    for i in range(4):
        assert found.rate[i].bytes_per_second == pytest.approx(2**i * RECORD / Drive.READ)
        assert found.rate[i].seconds_per_read == pytest.approx(Drive.READ)
    assert found.best == 8


def test_a_drive_that_serves_one_at_a_time_needs_no_depth(lib, probe, data) -> None:
    found = Drive(serial=True).probed(lib, probe, data)
    for i in range(4):
        assert found.rate[i].bytes_per_second == pytest.approx(RECORD / Drive.READ)
    assert found.best == 1
    assert found.rate[3].seconds_per_read > 3 * found.rate[0].seconds_per_read


def test_a_failing_drive_is_an_error(lib, probe, data) -> None:
    with reads(lib, lambda fd, buffer, offset: -errno.EIO), pytest.raises(StoreError) as failure:
        probe.file(data)
    assert failure.value.code == IO and "data.bin" in failure.value.detail


def test_a_file_without_a_whole_record(lib, probe, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(RECORD - 1))
    with pytest.raises(StoreError) as failure:
        probe.file(tmp_path / "data.bin")
    assert failure.value.code == USAGE


def test_banks_of_a_container(lib, probe, tmp_path: Path) -> None:
    model = make_container(tmp_path / "model")
    with Container(lib, model["path"]) as container:
        records = sum(container.p.banks[i].experts for i in range(container.p.bank_count))
        found = probe(lib[1].disk_probe_container, container.p, True)
    assert 0 < sum(found.rate[i].reads for i in range(4)) <= records


def test_scratch_file_leaves_nothing(lib, probe, tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        found = probe(lib[1].disk_probe_scratch, directory, RECORD, True, seconds=0.1)
    finally:
        os.close(directory)
    assert found.fresh and found.asked >= 16 * RECORD / 2
    assert list(tmp_path.iterdir()) == []
    if can_be_direct(tmp_path) and accounted():
        assert found.cold


def test_scratch_file_where_none_can_be(lib, probe) -> None:
    directory = os.open("/proc/self", os.O_RDONLY)
    try:
        with pytest.raises(StoreError) as failure:
            probe(lib[1].disk_probe_scratch, directory, RECORD, True)
    finally:
        os.close(directory)
    assert failure.value.code == IO and "scratch file" in failure.value.detail
