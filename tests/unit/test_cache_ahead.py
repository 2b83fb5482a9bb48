"""Records read before anybody asks: never in the way, counted apart."""

from __future__ import annotations

import errno
import threading

import pytest

from containers import make_container
from store_tools import LFU, Cache, Container, StoreError, plain_read, reads
from support.processes import until

LAYERS, EXPERTS = 3, 16


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("ahead") / "c"
    made = make_container(path, layers=LAYERS, experts=EXPERTS, hidden=32, inner=16, codec="bf16")
    return {**made, "files": [(path / f"experts-{i:04d}.bin").read_bytes() for i in range(LAYERS)]}


@pytest.fixture(scope="module")
def container(lib, made):
    with Container(lib, made["path"]) as c:
        yield c


def settle(cache: Cache) -> dict[str, int]:
    """Statistics once no read ahead is open."""
    def ended() -> bool:
        s = cache.stats()
        return s["ahead_issued"] == s["reads"] - (s["misses"] - s["ahead_used"]) + s["ahead_cancelled"]

    until(ended)
    return cache.stats()


def check(made, leases) -> None:
    size = made["record_bytes"]
    for x in leases:
        assert x.data == made["files"][x.bank][x.expert * size :][:size]


@pytest.mark.parametrize("slots", [0, 2, 20])
def test_what_was_guessed_right_is_there(container, made, slots) -> None:
    with Cache(container, slots, transient=4, ahead=6) as cache:
        assert cache.budget.used == cache.cost()
        cache.begin(0, [1, 2])
        cache.read_ahead(1, [3, 4, 5])
        while (lease := cache.next()) is not None:
            cache.release(lease)
        before = settle(cache)
        assert before["reads"] == 5 and before["ahead_issued"] == 3
        check(made, cache.run(1, [3, 4, 9]))
        s = cache.stats()
        assert s["ahead_used"] == 2 and s["ahead_wasted"] == 1 and s["ahead_cancelled"] == 0
        assert s["reads"] == 6 and s["misses"] == 5 and s["hits"] == 0
        assert s["ahead_bytes"] == 3 * made["record_bytes"]
        # what was used has a place like any other now
        check(made, cache.run(1, [3, 4]))
        assert cache.stats()["hits"] == (0 if slots == 0 else 2)
        assert cache.stats()["leases"] == 0 and cache.stats()["used"] <= slots


def test_a_guess_takes_no_place_in_the_cache(container) -> None:
    with Cache(container, 4, transient=4, ahead=8) as cache:
        cache.run(0, [0, 1, 2, 3])
        for bank in (1, 2, 1, 2):
            cache.read_ahead(bank, list(range(8)))
            settle(cache)
            cache.run(bank, [])
        s = cache.stats()
        assert s["evictions"] == 0 and s["used"] == 4 and s["ahead_wasted"] == 32
        cache.run(0, [0, 1, 2, 3])
        assert cache.stats()["hits"] == 4


def test_own_buffers_are_the_limit(container) -> None:
    with Cache(container, 30, lanes=2, transient=1, ahead=3) as cache:
        cache.read_ahead(1, list(range(10)), lane=0)
        assert cache.stats()["ahead_issued"] == 3
        cache.read_ahead(1, list(range(10)), lane=1)
        assert cache.stats()["ahead_issued"] == 6
        settle(cache)
        cache.read_ahead(2, [0], lane=0)
        assert cache.stats()["ahead_issued"] == 6, "its buffers hold what nobody asked for yet"
        cache.run(1, [0, 1, 2], lane=1)
        assert cache.stats()["ahead_used"] == 3, "whoever asks first gets it"
        cache.read_ahead(2, [0], lane=0)
        assert cache.stats()["ahead_issued"] == 7
    with Cache(container, 30, transient=1) as cache:
        cache.read_ahead(1, [0])
        assert cache.stats()["ahead_issued"] == 0


class Gate:
    """Reads wait until it is opened; the order in which they began is kept."""

    def __init__(self, fail: int = 0) -> None:
        self.open, self.order, self.fail = threading.Event(), [], fail

    def __call__(self, fd: int, buffer, offset: int) -> int:
        self.order.append(offset)
        assert self.open.wait(600)
        return -self.fail if self.fail else plain_read(fd, buffer, offset)


def test_waiting_reads_go_first_and_wrong_ones_are_cancelled(lib, container, made) -> None:
    size, gate = made["record_bytes"], Gate()
    with Cache(container, 16, transient=2, ahead=4, io_threads=1, direct=False) as cache:
        with reads(lib, gate):
            cache.read_ahead(1, [8, 9, 10, 11])
            until(lambda: gate.order)
            cache.begin(1, [2, 9])
            s = cache.stats()
            assert s["ahead_cancelled"] == 2, "10 and 11 had not begun and were not asked for"
            gate.open.set()
            got = []
            while (lease := cache.next()) is not None:
                got.append(lease)
                cache.release(lease)
        check(made, got)
        assert [x.expert for x in got] == [2, 9]
        assert gate.order == [8 * size, 2 * size, 9 * size]
        s = settle(cache)
        assert s["ahead_used"] == 1 and s["ahead_wasted"] == 1, "8 was being read and not wanted"
        assert s["ahead_issued"] == 4 and s["leases"] == 0


def test_a_read_in_flight_is_joined(lib, container, made) -> None:
    gate = Gate()
    with Cache(container, 16, transient=2, ahead=4, io_threads=2, direct=False) as cache:
        with reads(lib, gate):
            cache.read_ahead(2, [5])
            until(lambda: gate.order)
            cache.begin(2, [5])
            assert cache.next(block=False) is None
            gate.open.set()
            lease = cache.next()
        check(made, [lease])
        cache.release(lease)
        assert len(gate.order) == 1 and cache.stats()["ahead_used"] == 1


def test_a_failed_guess_is_silent(lib, container, made) -> None:
    gate = Gate(errno.ENODEV)
    gate.open.set()
    with Cache(container, 16, transient=2, ahead=4, io_threads=1, direct=False) as cache:
        with reads(lib, gate):
            cache.read_ahead(1, [5, 6])
            until(lambda: cache.stats()["ahead_wasted"] == 2)
        check(made, cache.run(1, [5, 6]))
        s = cache.stats()
        assert s["ahead_wasted"] == 2 and s["ahead_used"] == 0 and s["reads"] == 2
        # but one that somebody waits for is an error like any other
        gate = Gate(errno.ENODEV)
        with reads(lib, gate):
            cache.read_ahead(2, [7])
            until(lambda: gate.order)
            cache.begin(2, [7])
            gate.open.set()
            with pytest.raises(StoreError):
                cache.next()
            cache.abort()
        assert cache.stats()["leases"] == 0
        check(made, cache.run(2, [7]))


def test_the_cache_may_shrink_under_guesses(container, made) -> None:
    with Cache(container, 20, transient=4, ahead=6, policy=LFU) as cache:
        for turn in range(30):
            bank = turn % LAYERS
            cache.begin(bank, [turn % EXPERTS, (turn + 3) % EXPERTS])
            cache.read_ahead((bank + 1) % LAYERS, [(turn + i) % EXPERTS for i in range(1, 7)])
            cache.resize((0, 20, 1, 7)[turn % 4])
            got = []
            while (lease := cache.next()) is not None:
                got.append(lease)
                cache.release(lease)
            check(made, got)
        s = settle(cache)
        closed = 20 - s["slots"]
        assert cache.budget.used == cache.cost() - closed * made["record_bytes"]
        assert s["ahead_used"] > 0 and s["leases"] == 0 and s["used"] <= s["slots"]
