"""`ram` is a ceiling: peaks of resident memory, bytes read compared with the kernel's count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.processes import status

pytestmark = [
    pytest.mark.plain_build,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="samples /proc"),
]

# What a process holds besides the plan, which counts thread stacks: program text, libc
# and the command's buffers.
SLACK = 1 << 20
PROMPTS = [
    '"My dear Mr. Holmes," said the',
    "The captain stood upon the deck and looked at the sea, and",
    "Prince Andrew looked silently at the old general " * 20,
]


def resident(pid: int) -> int:
    """Resident bytes of a process, 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_of(pid: int) -> int:
    """The most resident bytes that a process ever had, 0 when it is gone."""
    try:
        return int(status(pid, "VmHWM").split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def run_watched(command: list[str]) -> tuple[dict, int]:
    """Runs a command that prints JSON; returns it, and its peak as of the last look, 50 times a second.

    One that was over before it was looked at is run again.
    """
    peak = 0
    while peak == 0:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.02)
        out, err = process.communicate()
        assert process.returncode == 0, err.decode()
    return json.loads(out), peak


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory) -> Path:
    """The other bundled checkpoint: latent attention."""
    from conftest import ROOT, convert

    return convert(ROOT / "models" / "tiny-deepseek-v3", tmp_path_factory.mktemp("latent") / "model",
                   "--experts", "int8", "--trunk", "int8")


def levels(headrace, path: Path, **settings: int) -> dict[str, int]:
    plan = headrace.plan(path, ctx=512, **settings)
    whole = plan.total_experts * plan.record_bytes
    return {"floor": plan.floor, "some": plan.floor + 10 * plan.record_bytes,
            "quarter": plan.floor + whole // 4, "all": plan.floor + whole}


@pytest.mark.parametrize("level", ["floor", "some", "quarter", "all"])
@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_resident_memory_stays_within_the_plan(headrace_bin, headrace, model_bf16, level, prompt):
    ram = levels(headrace, model_bf16, threads=2)[level]
    plan = headrace.plan(model_bf16, ctx=512, ram=ram, threads=2)
    assert plan.fits and plan.total <= ram
    result, peak = run_watched([
        str(headrace_bin), "run", str(model_bf16), "-p", PROMPTS[prompt], "--json", "--ram",
        str(ram), "--ctx", "512", "--max-tokens", "100", "--threads", "2"])
    assert peak <= plan.total + SLACK, (
        f"{peak / 2**20:.1f} MiB resident, {plan.total / 2**20:.1f} planned, level {level}")
    stats = result["stats"]
    assert stats["memory_peak"] <= stats["memory_limit"] <= ram


def test_below_the_floor_is_refused_with_the_floor(headrace, model_dir):
    floor = headrace.plan(model_dir, ctx=512).floor
    with headrace.Model(model_dir, ctx=512, ram=floor):
        pass
    with pytest.raises(headrace.HeadraceMemoryError) as refused:
        headrace.Model(model_dir, ctx=512, ram=floor - 1)
    assert str(floor) in refused.value.detail


CHANGING = """
import sys
sys.path[:0] = [{python!r}]
import headrace
headrace.use_library({library!r})
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * 4096
prompts = {prompts!r}
print(resident(), flush=True)
with headrace.Model({path!r}, ram={ram}, ctx=512, threads=2, io_threads=2) as model:
    for i in range(2 * len(prompts)):
        model.generate(prompts[i % len(prompts)], max_tokens=10, temperature=0.8, top_k=40, seed=i)
print(resident(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("level", ["floor", "quarter"])
@pytest.mark.parametrize("model", ["model_bf16", "latent_model"])
def test_changing_prompts_in_one_process(headrace, build_dir, request, model, level):
    """B26: from opening to closing and after it, with prompts that route to different experts."""
    from support.build import ROOT, shared_library

    path = request.getfixturevalue(model)
    ram = levels(headrace, path, threads=2, io_threads=2)[level]
    plan = headrace.plan(path, ctx=512, ram=ram, threads=2, io_threads=2)
    script = CHANGING.format(python=str(ROOT / "python"), path=str(path), ram=ram, prompts=PROMPTS,
                             library=str(shared_library(build_dir, "headrace")))
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    before, after = (int(process.stdout.readline()) for _ in range(2))
    peak = peak_of(process.pid)
    process.communicate("\n")
    assert process.returncode == 0 and peak > before
    # The interpreter's own objects come to what the program is worth in the test above.
    assert peak - before <= plan.total + 2 * SLACK, (
        f"{(peak - before) / 2**20:.1f} MiB more, {plan.total / 2**20:.1f} planned")
    assert after - before <= 2 * SLACK, f"{(after - before) / 2**20:.1f} MiB stay after closing"


READER = """
import sys
import threading
sys.path[:0] = [{python!r}]
import headrace
headrace.use_library({library!r})
def kernel():
    return int(dict(l.split(': ') for l in open('/proc/self/io').read().splitlines())['read_bytes'])
model = headrace.Model({path!r}, ram={ram}, ctx=512)
mode = model.info.io_mode
for _ in range(5):  # what is read besides, such as pages of the program, comes first
    before, counted = kernel(), model.stats.bytes_read
    model.generate({prompt!r}, max_tokens=150)
    print(mode, kernel() - before, model.stats.bytes_read - counted)
"""


def test_bytes_read_are_what_the_kernel_counts(headrace, build_dir, model_bf16):
    """A quarter of the experts fits; every other use is a read from the device."""
    from support.build import ROOT, shared_library

    ram = levels(headrace, model_bf16)["quarter"]
    done = subprocess.run(
        [sys.executable, "-c", READER.format(
            python=str(ROOT / "python"), library=str(shared_library(build_dir, "headrace")),
            path=str(model_bf16), ram=ram, prompt=PROMPTS[1])],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rounds = [line.split() for line in done.stdout.splitlines()]
    mode, kernel, reported = min(rounds, key=lambda r: abs(int(r[1]) - int(r[2])))
    if mode != "direct":
        pytest.skip(f"the file system of {model_bf16} gives {mode} reads, which the kernel does not count")
    if int(kernel) == 0 and int(reported) > 0:
        pytest.skip("the kernel counts no reads of this file system")
    assert int(reported) > 0
    assert abs(int(kernel) - int(reported)) <= 0.01 * int(reported)


def test_a_lowered_budget_gives_memory_back(headrace, model_bf16):
    """The cache shrinks for real, serves what it still can, and grows again."""
    ram = levels(headrace, model_bf16, threads=1)["all"] + (32 << 20)
    with headrace.Model(model_bf16, ctx=512, ram=ram, threads=1, chunk=16) as model:
        ids = model.tokenize(PROMPTS[2])
        expected = model.logits(ids).tobytes()
        full = model.stats
        before = resident(os.getpid())
        least = full.memory_limit - full.cache_bytes
        lowered = model.plan().total - full.cache_bytes * 3 // 4
        model.set_ram(lowered)
        after, now = resident(os.getpid()), model.stats
        freed = full.cache_bytes - now.cache_bytes
        assert freed >= full.cache_bytes * 7 // 10
        assert now.cache_used <= now.cache_slots < full.cache_slots
        assert full.memory_used - now.memory_used == freed
        assert now.memory_limit == lowered >= now.memory_used
        used = full.cache_used * full.cache_bytes // full.cache_slots - now.cache_bytes
        assert before - after >= used * 9 // 10 > 0
        assert model.logits(ids).tobytes() == expected
        assert model.stats.memory_used == now.memory_used

        with pytest.raises(headrace.HeadraceMemoryError) as refused:
            model.set_ram(1 << 20)
        named = [int(word) for word in refused.value.detail.split() if word.isdigit()]
        assert any(n <= least for n in named if n > 1 << 20)
        model.set_ram("1TiB")
        assert model.stats.memory_limit == full.memory_limit
        assert model.stats.cache_slots == full.cache_slots
        assert model.logits(ids).tobytes() == expected
        reads = model.stats.reads
        assert model.logits(ids).tobytes() == expected and model.stats.reads == reads


def test_the_budget_moves_while_a_text_is_generated(headrace, model_bf16):
    sizes = levels(headrace, model_bf16, threads=1)
    with headrace.Model(model_bf16, ctx=512, ram=sizes["all"], threads=1) as model:
        expected = model.generate(PROMPTS[0], max_tokens=120, ignore_stop_ids=True).ids
        steps = iter(range(10**6))

        def move(_token) -> bool:
            model.set_ram(sizes["all"] if next(steps) % 2 else sizes["quarter"] + (1 << 20))
            return True

        done = threading.Event()

        def shake() -> None:
            while not done.wait(0.001):
                move(None)

        shaker = threading.Thread(target=shake)
        shaker.start()
        try:
            made = model.generate(PROMPTS[0], max_tokens=120, ignore_stop_ids=True, on_token=move)
        finally:
            done.set()
            shaker.join()
        assert made.ids == expected
        assert made.stats.reads > 0, "what was given up is read again"
        assert model.stats.leases == 0
