"""The floor of the engine: errors, memory budgets, checksums, CPU, threads."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sanitizers import sanitized

MIB = 1 << 20


# ---- errors ----------------------------------------------------------------


def detail(ffi, err) -> str:
    return ffi.string(err.detail).decode("utf-8")


def test_status_names(lib) -> None:
    ffi, C = lib
    names = [ffi.string(C.hr_status_name(code)).decode() for code in range(-1, 10)]
    assert names == ["unknown", "ok", "usage", "format", "memory", "io", "context", "cancelled",
                     "numeric", "unsupported", "unknown"]


def test_fail_formats_and_returns_the_code(lib) -> None:
    ffi, C = lib
    err = ffi.new("hr_error *")
    assert C.fail(ffi.NULL, C.HR_ERR_IO, b"x") == C.HR_ERR_IO
    assert C.fail(err, C.HR_ERR_IO, b"%s: offset %d", ffi.new("char[]", b"trunk.bin"),
                  ffi.cast("int", 4096)) == C.HR_ERR_IO
    assert (err.code, detail(ffi, err)) == (C.HR_ERR_IO, "trunk.bin: offset 4096")
    assert C.fail_prefix(err, C.HR_ERR_FORMAT, b"layer %d", ffi.cast("int", 3)) == C.HR_ERR_IO
    assert detail(ffi, err) == "layer 3: trunk.bin: offset 4096"
    empty = ffi.new("hr_error *")
    assert C.fail_prefix(empty, C.HR_ERR_FORMAT, b"here") == C.HR_ERR_FORMAT
    assert detail(ffi, empty) == "here"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=1400).filter(lambda b: 0 not in b), st.binary(max_size=600))
def test_detail_is_one_line_of_utf8(lib, text: bytes, prefix: bytes) -> None:
    ffi, C = lib
    err = ffi.new("hr_error *")
    C.fail(err, C.HR_ERR_FORMAT, b"%s", ffi.new("char[]", text))
    C.fail_prefix(err, C.HR_ERR_FORMAT, b"%s", ffi.new("char[]", prefix))
    assert detail(ffi, err).isprintable() or not any(ord(c) < 0x20 for c in detail(ffi, err))


@pytest.mark.parametrize("pad", range(1012, 1024))
def test_detail_is_not_cut_within_a_character(lib, pad: int) -> None:
    ffi, C = lib
    err = ffi.new("hr_error *")
    text = "a" * pad + "\N{GRINNING FACE}" * 3
    C.fail(err, C.HR_ERR_FORMAT, b"%s", ffi.new("char[]", text.encode()))
    got = detail(ffi, err)
    assert text.startswith(got) and len(got.encode()) > 1015


@settings(max_examples=500, deadline=None)
@given(st.binary(min_size=1, max_size=6))
def test_utf8_sequence(lib, text: bytes) -> None:
    ffi, C = lib
    length = C.utf8_sequence(text, len(text))
    wanted = 0
    for n in range(1, min(4, len(text)) + 1):
        try:
            if len(text[:n].decode()) == 1:
                wanted = n
                break
        except UnicodeDecodeError:
            pass
    assert length == wanted


# ---- memory budgets --------------------------------------------------------


def test_blocks_are_zero_aligned_and_charged(lib) -> None:
    ffi, C = lib
    budget = ffi.new("struct mem_budget *")
    C.mem_budget_init(budget, 0)
    for size in (0, 1, 63, 64, 65, 4096, 65535, 65536, 65537, 3 * MIB + 1):
        blocks = [C.mem_alloc(budget, size) for _ in range(3)]
        for block in blocks:
            assert int(ffi.cast("uintptr_t", block)) % (4096 if size >= 65536 else 64) == 0
            assert not any(ffi.buffer(block, size)[:])
            ffi.memmove(block, b"\xff" * size, size)
        assert budget.used == 3 * C.mem_cost(size) >= 3 * size
        for block in blocks:
            C.mem_free(budget, block, size)
        assert budget.used == 0
    assert budget.peak == 3 * C.mem_cost(3 * MIB + 1)
    C.mem_free(budget, ffi.NULL, 5)
    assert budget.used == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked for on Linux")
def test_large_blocks_begin_with_a_huge_page(lib) -> None:
    if sanitized():
        pytest.skip("every block comes from the sanitizer")
    ffi, C = lib
    size = 8 * MIB + 5000
    for _ in range(8):  # the system alone would hit the boundary by chance
        block = C.mem_alloc(ffi.NULL, size)
        assert int(ffi.cast("uintptr_t", block)) % (2 * MIB) == 0
        ffi.memmove(ffi.cast("char *", block) + size - 1, b"x", 1)
        kept = C.mem_alloc(ffi.NULL, 65536)  # moves where the system puts the next
        C.mem_free(ffi.NULL, block, size)
        C.mem_free(ffi.NULL, kept, 65536)


def test_budget_refuses_exactly_at_the_limit(lib) -> None:
    ffi, C = lib
    budget = ffi.new("struct mem_budget *")
    cost = C.mem_cost(1000)
    C.mem_budget_init(budget, 2 * cost)
    first, second = C.mem_alloc(budget, 1000), C.mem_alloc(budget, 1000)
    assert first and second and C.mem_alloc(budget, 1) == ffi.NULL
    assert budget.used == budget.peak == 2 * cost
    C.mem_free(budget, first, 1000)
    third = C.mem_alloc(budget, 1000)
    assert third
    C.mem_free(budget, second, 1000)
    C.mem_free(budget, third, 1000)
    assert budget.used == 0


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**64 - 4096])
def test_absurd_sizes_are_refused(lib, size: int) -> None:
    ffi, C = lib
    budget = ffi.new("struct mem_budget *")
    C.mem_budget_init(budget, 0)
    assert C.mem_alloc(budget, size) == ffi.NULL and budget.used == 0
    assert C.mem_cost(size) == 2**64 - 1


def test_budget_holds_under_threads(lib) -> None:
    ffi, C = lib
    budget = ffi.new("struct mem_budget *")
    limit = 40 * C.mem_cost(30000)
    C.mem_budget_init(budget, limit)
    seen: list[int] = []
    refused = [0]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple] = []
        for _ in range(1500):
            if held and rng.random() < 0.45:
                C.mem_free(budget, *held.pop(rng.randrange(len(held))))
            else:
                size = rng.choice([0, 1, 100, 5000, 70000, 200000])
                block = C.mem_alloc(budget, size)
                if block == ffi.NULL:
                    refused[0] += 1
                else:
                    held.append((block, size))
            seen.append(budget.used)
        for item in held:
            C.mem_free(budget, *item)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert budget.used == 0 and refused[0] > 0
    assert max(seen) <= budget.peak <= limit


def test_large_blocks_go_back_to_the_system(lib) -> None:
    ffi, C = lib
    if C.memory_rss() == 0 or sanitized():
        pytest.skip("the resident size is not known or not the program's own")
    size = 96 * MIB
    before = C.memory_rss()
    block = C.mem_alloc(ffi.NULL, size)
    ffi.memmove(block, bytearray(b"\1") * size, size)
    during = C.memory_rss()
    C.mem_free(ffi.NULL, block, size)
    assert during - before > 0.9 * size
    assert C.memory_rss() - before < 0.3 * size


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_checked_sizes(lib, a: int, b: int) -> None:
    ffi, C = lib
    out = ffi.new("size_t *")
    assert C.size_mul(a, b, out) == (a * b < 2**64)
    assert a * b >= 2**64 or out[0] == a * b
    assert C.size_add(a, b, out) == (a + b < 2**64)
    assert a + b >= 2**64 or out[0] == a + b
    assert C.round_up(a >> 2, 64) == (a // 4 + 63) // 64 * 64


# ---- checksums -------------------------------------------------------------


@pytest.mark.parametrize(("data", "value"), [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
])
def test_crc32c_known_answers(lib, data: bytes, value: int) -> None:
    _, C = lib
    assert C.crc32c(0, data, len(data)) == C.crc32c_table(0, data, len(data)) == value


def test_crc32c_instruction_equals_table(lib) -> None:
    ffi, C = lib
    rng = random.Random(1)
    data = ffi.from_buffer(rng.randbytes(60000))
    # Around the lengths where the three chains begin.
    lengths = [0, 1, 7, 8, 9, 767, 768, 769, 776, 1536, 12287, 12288, 12289, 12288 + 769, 24576, 40000]
    for n in lengths + [rng.randrange(50000) for _ in range(100)]:
        at, start = rng.randrange(64), rng.randrange(2**32)
        assert C.crc32c(start, data + at, n) == C.crc32c_table(start, data + at, n)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_crc32c_continues(lib, data: bytes, cut: int) -> None:
    _, C = lib
    head, tail = data[:cut], data[cut:]
    assert C.crc32c(C.crc32c(0, head, len(head)), tail, len(tail)) == C.crc32c(0, data, len(data))


def sha256(lib, chunks: list[bytes]) -> str:
    ffi, C = lib
    state, digest, text = ffi.new("hr_sha256 *"), ffi.new("uint8_t[32]"), ffi.new("char[65]")
    C.hr_sha256_init(state)
    for chunk in chunks:
        C.hr_sha256_update(state, chunk, len(chunk))
    C.hr_sha256_final(state, digest)
    C.sha256_hex(digest, text)
    return ffi.string(text).decode()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 700), st.integers(0, 2**32), st.lists(st.integers(0, 200), max_size=12))
def test_sha256_in_any_chunks(lib, size: int, seed: int, steps: list[int]) -> None:
    data = random.Random(seed).randbytes(size)
    chunks, at = [], 0
    for step in steps:
        chunks.append(data[at:at + step])
        at += step
    chunks.append(data[at:])
    assert sha256(lib, chunks) == hashlib.sha256(data).hexdigest()


def test_sha256_of_every_length_around_a_block(lib) -> None:
    for size in range(200):
        data = bytes(i * 7 & 255 for i in range(size))
        assert sha256(lib, [data]) == hashlib.sha256(data).hexdigest()


def test_sha256_instruction_equals_portable(lib) -> None:
    ffi, C = lib
    data = random.Random(2).randbytes(64 * 300)
    state = ffi.new("hr_sha256 *")
    C.hr_sha256_init(state)
    portable = ffi.new("uint32_t[8]", list(state.state))
    C.hr_sha256_update(state, data, len(data))
    C.sha256_compress_portable(portable, data, 300)
    assert list(portable) == list(state.state)


# ---- CPU -------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_features_are_those_the_kernel_lists(lib) -> None:
    _, C = lib
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(x.split()) for x in lines if x.startswith(("flags", "Features"))), set())
    f = C.cpu_features()
    if platform.machine() == "x86_64":
        assert f.sse42 == ("sse4_2" in flags)
        assert f.avx2 == ({"avx2", "fma", "f16c"} <= flags)
        assert f.avx512 == ({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
                             "avx512vbmi", "avx2", "fma", "f16c"} <= flags)
        assert f.sha == ({"sha_ni", "ssse3", "sse4_2"} <= flags)
        assert not (f.neon or f.dotprod or f.arm_crc32)
    elif platform.machine() == "aarch64":
        assert (f.neon, f.dotprod, f.arm_crc32, f.sha) == (
            "asimd" in flags, "asimddp" in flags, "crc32" in flags, "sha2" in flags)


def test_physical_cores(lib) -> None:
    _, C = lib
    assert 1 <= C.cpu_physical_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_physical_cores_honour_affinity(lib) -> None:
    _, C = lib
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        assert C.cpu_physical_cores() == 1
    finally:
        os.sched_setaffinity(0, cpus)


def flush_mode() -> int:
    """A mode word in which tiny numbers are taken as zero."""
    return 0x1F80 | 0x8040 if platform.machine() in ("x86_64", "AMD64") else 1 << 24


def test_float_mode_enter_and_leave(lib) -> None:
    _, C = lib
    tiny, products = [5e-324], []
    outside = C.float_mode_enter()
    try:
        C.float_mode_leave(flush_mode())
        products.append(tiny[0] * 1.0)
        saved = C.float_mode_enter()
        products.append(tiny[0] * 1.0)
        C.float_mode_leave(saved)
        products.append(tiny[0] * 1.0)
    finally:
        C.float_mode_leave(outside)
    products.append(tiny[0] * 1.0)
    # Compared out here: while tiny numbers count as zero they also compare so.
    assert products == [0.0, 5e-324, 0.0, 5e-324]


# ---- threads ---------------------------------------------------------------


def new_pool(lib, threads: int, budget=None):
    ffi, C = lib
    out, err = ffi.new("struct pool **"), ffi.new("hr_error *")
    status = C.pool_create(threads, budget or ffi.NULL, out, err)
    assert status == C.HR_OK, detail(ffi, err)
    return out[0]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_task_runs_once_under_concurrent_callers(lib, threads: int) -> None:
    ffi, C = lib
    pool = new_pool(lib, threads)
    assert C.pool_threads(pool) == threads
    faults: list[str] = []

    def call(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            tasks = rng.choice([0, 1, 2, 3, 8, 50])
            runs = [0] * tasks
            workers = set()

            @ffi.callback("void(void *, uint32_t, uint32_t)")
            def task(_ctx, index: int, worker: int) -> None:
                if index == tasks - 1:
                    time.sleep(0.001)  # others find nothing left and must wait
                runs[index] += 1
                workers.add(worker)

            C.pool_run(pool, tasks, task, ffi.NULL)
            if runs != [1] * tasks or not workers <= set(range(threads)):
                faults.append(f"{tasks} tasks: {runs}, workers {workers}")
            if tasks == 1 and workers != {0}:
                faults.append("a single task left its caller")

    callers = [threading.Thread(target=call, args=(s,)) for s in range(3)]
    for c in callers:
        c.start()
    for c in callers:
        c.join(600)
    alive = any(c.is_alive() for c in callers)
    assert not alive and not faults
    C.pool_free(pool)


def test_workers_take_part_and_run_in_the_engines_float_mode(lib) -> None:
    ffi, C = lib
    outside = C.float_mode_enter()
    try:
        C.float_mode_leave(flush_mode())  # what a new thread would inherit
        pool = new_pool(lib, 3)
    finally:
        C.float_mode_leave(outside)
    products: dict[int, float] = {}
    meet = threading.Barrier(3)
    tiny = [5e-324]

    @ffi.callback("void(void *, uint32_t, uint32_t)")
    def task(_ctx, _index: int, worker: int) -> None:
        meet.wait(600)  # three tasks at once: each has a worker of its own
        products[worker] = tiny[0] * 1.0

    C.pool_run(pool, 3, task, ffi.NULL)
    C.pool_free(pool)
    assert products == {0: 5e-324, 1: 5e-324, 2: 5e-324}


def test_pool_costs_what_it_says(lib) -> None:
    ffi, C = lib
    budget = ffi.new("struct mem_budget *")
    for threads in (1, 2, 5):
        C.mem_budget_init(budget, C.pool_cost(threads))
        pool = new_pool(lib, threads, budget)
        assert budget.used == C.pool_cost(threads)
        C.pool_free(pool)
        assert budget.used == 0
        C.mem_budget_init(budget, C.pool_cost(threads) - 1)
        out, err = ffi.new("struct pool **"), ffi.new("hr_error *")
        assert C.pool_create(threads, budget, out, err) == C.HR_ERR_MEMORY
        assert "ram" in detail(ffi, err) and out[0] == ffi.NULL and budget.used == 0


@pytest.mark.parametrize("threads", [0, 1025, 2**32 - 1])
def test_pool_refuses_absurd_thread_counts(lib, threads: int) -> None:
    ffi, C = lib
    out, err = ffi.new("struct pool **"), ffi.new("hr_error *")
    assert C.pool_create(threads, ffi.NULL, out, err) == C.HR_ERR_USAGE
    assert "must be 1..1024" in detail(ffi, err)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(0, 50), max_size=200), size=st.integers(1, 3))
def test_sort_in_place_is_sorting(lib, values: list[int], size: int) -> None:
    """Elements of several words: the first is compared, the others must travel with it."""
    ffi, C = lib
    rows = [[v, *range(i, i + size - 1)] for i, v in enumerate(values)]
    data = ffi.new("int32_t[]", [x for row in rows for x in row] or [0])

    @ffi.callback("int(const void *, const void *)")
    def compare(a, b):
        return ffi.cast("int32_t *", a)[0] - ffi.cast("int32_t *", b)[0]

    C.sort_in_place(data, len(rows), 4 * size, compare)
    flat = list(data)[: len(rows) * size]
    got = [flat[i : i + size] for i in range(0, len(flat), size)]
    assert sorted(got) == sorted(rows)
    assert [row[0] for row in got] == sorted(values)


def test_clock_goes_forward(lib) -> None:
    _, C = lib
    times = [C.clock_seconds() for _ in range(100)]
    assert times == sorted(times) and times[0] > 0
