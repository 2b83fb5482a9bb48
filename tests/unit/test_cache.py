"""engine/store/expert_cache.c against small models of what it promises."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from containers import edit_manifest, make_container
from store_tools import (ALWAYS, AUTO, FIRST, FORMAT, IO, LFU, LRU, MEMORY, OFF, USAGE, Cache,
                         Container, StoreError, plain_read, reads)
from support.processes import until

LAYERS, EXPERTS, TOP_K = 4, 24, 4
WORKING_SET = LAYERS * TOP_K


class Store:
    """A container on disk together with the true bytes of every record."""

    def __init__(self, path: Path, **options) -> None:
        self.path = path
        made = make_container(path, hidden=32, inner=16, codec="bf16", **options)
        self.size = made["record_bytes"]
        self.files = [(path / f"experts-{layer:04d}.bin").read_bytes() for layer in made["banks"]]

    def record(self, bank: int, expert: int) -> bytes:
        return self.files[bank][expert * self.size :][: self.size]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(tmp_path_factory.mktemp("cache") / "c", layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def container(lib, store):
    with Container(lib, store.path) as c:
        yield c


class Gate:
    """A read hook that lets nothing through until it is opened."""

    def __init__(self, outcome: int = 0) -> None:
        self.open, self.calls, self.outcome = threading.Event(), 0, outcome

    def __call__(self, fd: int, buffer, offset: int) -> int:
        self.calls += 1
        assert self.open.wait(600)
        return -self.outcome if self.outcome else plain_read(fd, buffer, offset)


@pytest.mark.parametrize("policy", [AUTO, LRU, LFU])
@pytest.mark.parametrize("slots", [0, 1, TOP_K - 1, TOP_K, WORKING_SET - 1,
                                   LAYERS * EXPERTS, 9999])
@pytest.mark.parametrize("shuffle", [0, 77])
def test_every_size_delivers_the_file(container, store, policy, slots, shuffle) -> None:
    rng = random.Random(slots)
    with Cache(container, slots, policy=policy, working_set=WORKING_SET, shuffle=shuffle) as cache:
        asked = 0
        for token in range(12):
            for bank in range(LAYERS):
                # now and then a prefill batch, larger than all buffers together
                wanted = rng.sample(range(EXPERTS), EXPERTS if token == 5 else TOP_K)
                asked += len(wanted)
                leases = cache.run(bank, wanted)
                assert sorted(x.expert for x in leases) == sorted(wanted)
                for x in leases:
                    assert wanted[x.tag] == x.expert and x.bank == bank
                    assert x.data == store.record(bank, x.expert)
                s = cache.stats()
                assert s["leases"] == 0
                assert s["used"] <= s["slots"] == min(slots, LAYERS * EXPERTS)
        assert s["hits"] + s["misses"] == asked
        assert s["misses"] == s["reads"] and s["bytes_read"] == s["reads"] * store.size
        if slots == 0:
            assert s["hits"] == 0 and s["transient_reads"] == s["reads"]
        if slots >= LAYERS * EXPERTS:
            assert s["reads"] <= LAYERS * EXPERTS and s["evictions"] == 0


@pytest.mark.parametrize("slots", [0, 1, 5, 40, 10**6])
@pytest.mark.parametrize(("lanes", "transient", "io_threads"), [(1, 1, 1), (3, 4, 2), (8, 2, 5)])
def test_cost_is_what_is_allocated(container, slots, lanes, transient, io_threads) -> None:
    options = dict(lanes=lanes, transient=transient, io_threads=io_threads)
    with Cache(container, slots, **options) as cache:
        cost = cache.cost()
        assert cache.budget.used == cost
        cache.run(0, list(range(EXPERTS)))
        assert cache.budget.used == cache.budget.peak == cost
    assert cache.budget.used == 0
    with Cache(container, slots, **options, limit=cost) as cache:
        assert cache.budget.peak == cost
    with pytest.raises(StoreError) as caught:
        Cache(container, slots, **options, limit=cost - 1)
    assert caught.value.code == MEMORY


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 6)),
                                   min_size=10, max_size=80))
def test_lru_keeps_the_most_recent(container, slots, requests) -> None:
    recent: OrderedDict[tuple[int, int], None] = OrderedDict()
    with Cache(container, slots, policy=LRU) as cache:
        for n, key in enumerate(requests):
            before = cache.stats()["hits"]
            cache.run(key[0], [key[1]])
            assert (cache.stats()["hits"] > before) == (key in recent), f"request {n}"
            recent[key] = None
            recent.move_to_end(key)
            while len(recent) > slots:
                recent.popitem(last=False)


def test_hits_of_a_batch_are_safe_from_its_misses(container) -> None:
    with Cache(container, 4, policy=LRU) as cache:
        cache.run(0, [6, 7, 8, 9])
        before = cache.stats()
        # 6 is the oldest and the last on disk, but it is in this batch
        cache.run(0, [1, 2, 3, 6])
        assert cache.stats()["hits"] - before["hits"] == 1
        assert cache.stats()["reads"] - before["reads"] == 3


def test_without_slots_a_lane_must_release_first(container, store) -> None:
    with Cache(container, 0, transient=1) as cache:
        cache.begin(2, [5, 1, 9])
        got = []
        lease = cache.next()
        while lease is not None:
            got.append(lease.expert)
            if len(got) < 3:
                assert cache.next(block=False) is None
                with pytest.raises(StoreError) as caught:
                    cache.next(block=True)
                assert caught.value.code == USAGE and "release" in caught.value.detail
            assert lease.data == store.record(2, lease.expert)
            cache.release(lease)
            lease = cache.next()
        assert got == [1, 5, 9], "disk order"
        assert cache.stats()["leases"] == 0


def test_a_lane_advances_while_another_holds_everything(container, store) -> None:
    with Cache(container, 3, lanes=2, transient=1) as cache:
        cache.begin(0, [0, 1, 2, 3], lane=0)
        held = [cache.next(0) for _ in range(4)]
        assert all(held)
        assert [x.expert for x in cache.run(1, [4, 5, 6], lane=1)] == [4, 5, 6]
        # what the other lane holds can be shared, even its transient buffer
        assert {x.expert for x in cache.run(0, [0, 1, 2, 3], lane=1)} == {0, 1, 2, 3}
        assert cache.stats()["reads"] == 7
        for x in held:
            cache.release(x, 0)
        assert cache.stats()["leases"] == 0


def test_a_lane_never_holds_more_than_its_share(container) -> None:
    """Joining another lane's transient buffer counts against one's own."""
    with Cache(container, 0, lanes=2, transient=1) as cache:
        for lane in range(2):
            cache.begin(0, [lane], lane)
        first, second = cache.next(0), cache.next(1)
        cache.begin(0, [1], 0)
        with pytest.raises(StoreError) as caught:
            cache.next(0)
        assert caught.value.code == USAGE
        cache.release(second, 1)
        assert [x.expert for x in cache.run(0, [2], 1)] == [2]
        cache.release(first, 0)
        last = cache.next(0)
        assert last.expert == 1
        cache.release(last, 0)
        assert cache.next(0) is None and cache.stats()["leases"] == 0


@pytest.mark.parametrize("slots", [0, 2])
def test_lanes_share_a_read_in_flight(lib, container, store, slots) -> None:
    gate = Gate()
    with Cache(container, slots, lanes=3, transient=1, direct=False) as cache:
        with reads(lib, gate):
            for lane in range(3):
                cache.begin(1, [7], lane)
                assert cache.next(lane, block=False) is None
            gate.open.set()
            leases = [cache.next(lane) for lane in range(3)]
        assert gate.calls == 1 and cache.stats()["reads"] == 1
        assert all(x.data == store.record(1, 7) for x in leases)
        # a lane that gave its share of the buffer back has its full allowance again
        cache.release(leases[0], 0)
        assert [x.expert for x in cache.run(1, [8], 0)] == [8]
        for lane in (1, 2):
            cache.release(leases[lane], lane)
        assert cache.stats()["leases"] == 0


def test_a_failed_read_reaches_all_and_frees_its_slot(lib, container, store) -> None:
    gate = Gate(errno.ENODEV)
    with Cache(container, 2, lanes=2, transient=1, io_threads=1, direct=False) as cache:
        with reads(lib, gate):
            cache.begin(3, [6], 0)
            cache.begin(3, [6], 1)
            gate.open.set()
            for lane in range(2):
                with pytest.raises(StoreError) as caught:
                    cache.next(lane)
                assert caught.value.code == IO
                assert "experts-0003.bin" in caught.value.detail
                assert str(6 * store.size) in caught.value.detail
                assert os.strerror(errno.ENODEV) in caught.value.detail
                with pytest.raises(StoreError):
                    cache.next(lane)  # until aborted
                cache.abort(lane)
        s = cache.stats()
        assert s["leases"] == 0 and s["used"] == 0 and s["reads"] == 0
        for lane in range(2):
            assert [x.data for x in cache.run(3, [6], lane)] == [store.record(3, 6)]


def test_abort_takes_queued_reads_back(lib, container, store) -> None:
    gate = Gate()
    with Cache(container, 8, lanes=2, transient=1, io_threads=1, direct=False) as cache:
        with reads(lib, gate):
            cache.begin(0, [0, 1, 2, 3, 4, 5], 0)
            cache.begin(0, [5], 1)
            until(lambda: gate.calls)
            done = threading.Thread(target=cache.abort, args=(0,))
            done.start()
            until(lambda: cache.stats()["used"] == 2)  # the one that has begun and the other lane's
            assert done.is_alive(), "waits for the read that has begun"
            gate.open.set()
            done.join(600)
            assert not done.is_alive()
            lease = cache.next(1)
        assert lease.data == store.record(0, 5), "another lane wanted it"
        cache.release(lease, 1)
        s = cache.stats()
        assert gate.calls == 2 and s["leases"] == 0 and s["used"] == 2
        assert {x.expert for x in cache.run(0, [0, 1, 2], 0)} == {0, 1, 2}


def test_abort_leaves_delivered_leases_to_the_caller(container, store) -> None:
    with Cache(container, 4, transient=2) as cache:
        cache.begin(0, list(range(10)))
        held = [cache.next(), cache.next()]
        cache.abort()
        assert cache.stats()["leases"] == 2
        cache.run(1, list(range(EXPERTS)))
        for x in held:
            size = store.size
            assert bytes(cache.ffi.buffer(x.raw.record, size)) == store.record(0, x.expert)
            cache.release(x)
        assert cache.stats()["leases"] == 0


def test_misuse_is_an_error_and_no_hang(container) -> None:
    with Cache(container, 2) as cache:
        for bank, experts in ((LAYERS, [0]), (0, [EXPERTS]), (0, list(range(EXPERTS)) + [0])):
            cache.begin(bank, experts)
            with pytest.raises(StoreError) as caught:
                cache.next()
            assert caught.value.code == USAGE
            cache.abort()
        cache.begin(0, [1, 2])
        cache.begin(1, [3])
        with pytest.raises(StoreError) as caught:
            cache.next()
        assert caught.value.code == USAGE
        cache.abort()
        with pytest.raises(StoreError):
            cache.next(lane=1)
        assert cache.next() is None
        assert cache.stats()["leases"] == 0
        # the same expert twice is odd but harmless
        assert [x.expert for x in cache.run(0, [4, 4])] == [4, 4]
        assert cache.run(0, []) == []
    for bad in (dict(lanes=0), dict(transient=0), dict(io_threads=0)):
        with pytest.raises(StoreError) as caught:
            Cache(container, 2, **bad)
        assert caught.value.code == USAGE


def test_shuffle_changes_the_order_only(lib, container, store) -> None:
    orders = set()
    for seed in (0, 1, 2, 3, 4):
        with Cache(container, 16, shuffle=seed, io_threads=1) as cache:
            cache.run(0, list(range(16)))
            orders.add(tuple(x.expert for x in cache.run(0, list(range(16)))))
    assert len(orders) >= 4 and tuple(range(16)) in orders


@pytest.mark.parametrize("verify", [FIRST, ALWAYS, OFF])
def test_a_flipped_bit(lib, tmp_path, verify) -> None:
    store = Store(tmp_path / "c", layers=1, experts=6)
    bank = tmp_path / "c" / "experts-0000.bin"

    def flip(at: int) -> None:
        data = bytearray(bank.read_bytes())
        data[at] ^= 0x10
        bank.write_bytes(data)

    with Container(lib, tmp_path / "c") as c, Cache(c, 0, verify=verify) as cache:
        cache.run(0, [4])
        flip(4 * store.size + 1000)
        flip(5 * store.size + 1000)
        for expert, seen in ((4, verify == ALWAYS), (5, verify != OFF)):
            if not seen:
                cache.run(0, [expert])
                continue
            with pytest.raises(StoreError) as caught:
                cache.run(0, [expert])
            cache.abort()
            assert caught.value.code == FORMAT
            assert f"layer 0 expert {expert}" in caught.value.detail
            assert str(expert * store.size) in caught.value.detail
        assert cache.stats()["leases"] == 0
        flip(2 * store.size + 12)  # the header's expert number: seen whatever `verify` says
        with pytest.raises(StoreError) as caught:
            cache.run(0, [2])
        assert "expert in the header is 0x12" in caught.value.detail


def test_a_record_of_another_place_or_container(lib, tmp_path) -> None:
    """Whole and valid by their own checksum, but not what the manifest means."""
    store, other = (Store(tmp_path / n, layers=1, experts=4, seed=s)
                    for n, s in (("a", 1), ("b", 2)))
    bank = tmp_path / "a" / "experts-0000.bin"
    bank.write_bytes(store.record(0, 1) + store.record(0, 0) + other.record(0, 2)
                     + store.record(0, 3))
    with Container(lib, tmp_path / "a") as c, Cache(c, 4, verify=OFF) as cache:
        for expert, field in ((0, "expert"), (1, "expert"), (2, "checksum")):
            with pytest.raises(StoreError) as caught:
                cache.run(0, [expert])
            assert caught.value.code == FORMAT and f"{field} in the header" in caught.value.detail
            cache.abort()
        assert len(cache.run(0, [3])) == 1


def test_a_file_cut_while_in_use(lib, tmp_path) -> None:
    store = Store(tmp_path / "c", layers=1, experts=6)
    with Container(lib, tmp_path / "c") as c, Cache(c, 2) as cache:
        os.truncate(tmp_path / "c" / "experts-0000.bin", 4 * store.size + 100)
        with pytest.raises(StoreError) as caught:
            cache.run(0, [1, 4])
        assert caught.value.code == FORMAT
        assert "experts-0000.bin: ends at byte" in caught.value.detail
        cache.abort()
        assert len(cache.run(0, [0, 1, 2, 3])) == 4
        with pytest.raises(StoreError) as caught:
            Cache(c, 2)
        assert caught.value.code == FORMAT and "changed since" in caught.value.detail


def test_a_container_without_experts(lib, tmp_path) -> None:
    make_container(tmp_path / "c", layers=1, dense=(0,))
    with Container(lib, tmp_path / "c") as c, Cache(c, 5) as cache:
        assert cache.stats()["slots"] == 0
        cache.begin(0, [])
        with pytest.raises(StoreError):
            cache.next()


def test_banks_of_different_sizes_share_the_slots(lib, tmp_path) -> None:
    """Slots hold the largest record; smaller ones are read and checked by their own length."""
    small, large = (Store(tmp_path / n, layers=2, experts=4) for n in ("a", "x"))
    big = make_container(tmp_path / "b", layers=2, experts=4, hidden=96, inner=48, codec="f32")
    path = tmp_path / "a"
    (path / "experts-0001.bin").write_bytes((tmp_path / "b" / "experts-0001.bin").read_bytes())
    edit_manifest(path, lambda m: m["experts"].__setitem__(1, big["manifest"]["experts"][1]))
    with Container(lib, path) as c, Cache(c, 3, verify=ALWAYS) as cache:
        assert lib[1].expert_cache_slot_bytes(c.p) == big["record_bytes"] > small.size
        for _ in range(3):
            assert len(cache.run(0, [0, 1, 2, 3])) == len(cache.run(1, [3, 1, 0])) + 1 == 4


@pytest.mark.parametrize("slots", [0, 1, 6, 200])
def test_threads_as_lanes(container, store, slots) -> None:
    """Several lanes at once, each a thread that holds what it gets for a while."""
    lanes, wrong = 4, []
    with Cache(container, slots, lanes=lanes, transient=2, policy=LFU, working_set=WORKING_SET,
               shuffle=5) as cache:

        def work(lane: int) -> None:
            rng = random.Random(lane)
            try:
                for _ in range(25):
                    bank = rng.randrange(LAYERS)
                    cache.begin(bank, rng.sample(range(EXPERTS), rng.randint(1, 10)), lane)
                    if rng.random() < 0.2:
                        cache.abort(lane)
                        continue
                    while (x := cache.next(lane)) is not None:
                        if x.data != store.record(bank, x.expert):
                            wrong.append((lane, bank, x.expert))
                        cache.release(x, lane)
            except Exception as error:  # noqa: BLE001 - reported by the assertion below
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(lanes)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(600)
        assert not any(t.is_alive() for t in threads) and not wrong
        s = cache.stats()
        assert s["leases"] == 0 and s["used"] <= s["slots"]


@pytest.fixture(scope="module")
def machine(container, store):
    """The state machine's class, bound to this module's container."""

    class Machine(RuleBasedStateMachine):
        """Any order of calls by several lanes; leases are kept open at will."""

        lanes, transient = 3, 2

        def __init__(self) -> None:
            super().__init__()
            self.cache: Cache | None = None
            self.held: list[list] = [[] for _ in range(self.lanes)]
            self.todo: list[set[int]] = [set() for _ in range(self.lanes)]
            self.bank = [0] * self.lanes

        @precondition(lambda self: self.cache is None)
        @rule(slots=st.sampled_from([0, 1, TOP_K - 1, TOP_K, 30]),
              policy=st.sampled_from([LRU, LFU]), shuffle=st.integers(0, 3))
        def create(self, slots, policy, shuffle) -> None:
            self.slots = slots
            self.cache = Cache(container, slots, lanes=self.lanes, transient=self.transient,
                               policy=policy, shuffle=shuffle, working_set=WORKING_SET)

        @precondition(lambda self: self.cache is not None)
        @rule(lane=st.integers(0, 2), bank=st.integers(0, LAYERS - 1),
              experts=st.sets(st.integers(0, EXPERTS - 1), max_size=12))
        def begin(self, lane, bank, experts) -> None:
            if self.todo[lane]:
                return
            self.cache.begin(bank, list(experts), lane)
            self.todo[lane], self.bank[lane] = set(experts), bank

        @precondition(lambda self: self.cache is not None)
        @rule(lane=st.integers(0, 2), block=st.booleans())
        def next(self, lane, block) -> None:
            try:
                x = self.cache.next(lane, block)
            except StoreError as error:
                assert error.code == USAGE and block and self.todo[lane]
                own = sum(x.raw.buffer >= self.slots for x in self.held[lane])
                assert own == self.transient, "a free transient buffer was not used"
                return
            if x is None:
                assert not block or not self.todo[lane]
                return
            assert x.bank == self.bank[lane]
            self.todo[lane].remove(x.expert)
            self.held[lane].append(x)

        @precondition(lambda self: self.cache is not None)
        @rule(lane=st.integers(0, 2), pick=st.integers(0, 99))
        def release(self, lane, pick) -> None:
            if self.held[lane]:
                self.cache.release(self.held[lane].pop(pick % len(self.held[lane])), lane)

        @precondition(lambda self: self.cache is not None)
        @rule(lane=st.integers(0, 2))
        def abort(self, lane) -> None:
            self.cache.abort(lane)
            self.todo[lane] = set()

        @precondition(lambda self: self.cache is not None)
        @rule(slots=st.sampled_from([0, 1, TOP_K, 30]))
        def resize(self, slots) -> None:
            self.cache.resize(slots)

        @invariant()
        def promises(self) -> None:
            if self.cache is None:
                return
            s = self.cache.stats()
            assert self.cache.budget.used == self.cache.cost() - (self.slots - s["slots"]) * store.size
            held = sum(len(h) for h in self.held)
            assert s["used"] <= s["slots"]
            assert held <= s["leases"] <= held + sum(len(t) for t in self.todo)
            for lane in self.held:
                for x in lane:
                    now = bytes(self.cache.ffi.buffer(x.raw.record, store.size))
                    assert now == store.record(x.bank, x.expert)

        def teardown(self) -> None:
            if self.cache is None:
                return
            for lane in range(self.lanes):
                self.cache.abort(lane)
                for x in self.held[lane]:
                    self.cache.release(x, lane)
            assert self.cache.stats()["leases"] == 0
            self.cache.close()
            assert self.cache.budget.used == 0

    return Machine


def test_any_order_of_calls(machine) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(
        max_examples=60, stateful_step_count=40, deadline=None,
        suppress_health_check=list(HealthCheck)))
