"""Limits that the system sets: control groups, rlimits, budgets down to nothing.

Within every limit a run gives the same tokens, or refuses with a named error: it is never killed and
never ends by a signal.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.plain_build,  # a checker reserves address space and keeps freed memory
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups, /proc"),
]

MIB = 1 << 20
PROMPT = "The captain stood upon the deck and looked at the sea, and"
V1 = Path("/sys/fs/cgroup/memory")


def run(headrace_bin: Path, model: Path, *options: str, before: Callable[[], None] | None = None,
        prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, str(headrace_bin), "run", str(model), "-p", PROMPT, "--json", "--ctx", "256",
         "--max-tokens", "12", "--threads", "2", "--io-threads", "2", *options],
        capture_output=True, text=True, preexec_fn=before, timeout=900)


@pytest.fixture(scope="module")
def tokens(headrace_bin, model_dir) -> list[int]:
    done = run(headrace_bin, model_dir)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["ids"]


def right_or_refused(done: subprocess.CompletedProcess[str], tokens: list[int], codes: tuple[int, ...],
                     where: object) -> bool:
    """True when it ran; fails unless it gave the right tokens or one of the exit codes and a text."""
    if done.returncode == 0:
        assert json.loads(done.stdout)["ids"] == tokens, where
        return True
    assert done.returncode in codes, f"{where}: {done.returncode}: {done.stderr}"
    assert done.stderr.startswith("headrace: ") and len(done.stderr) > 30, f"{where}: {done.stderr}"
    return False


# ---- control groups ---------------------------------------------------------------


@pytest.fixture
def group_v1():
    """Callable: limit of the outer group -> the inner, unlimited one, as real v1 groups."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        outer = V1 / f"headrace-test-{uuid.uuid4().hex[:8]}"
        try:
            outer.mkdir()
            made.append(outer)
            (outer / "memory.use_hierarchy").write_text("1")
            (outer / "memory.limit_in_bytes").write_text(str(limit))
            inner = outer / "inner"
            inner.mkdir()
            made.append(inner)
        except OSError as error:
            pytest.skip(f"no memory group of cgroup v1 can be made here: {error}")
        return inner

    yield make
    for path in reversed(made):
        path.rmdir()


def enter(group: Path) -> Callable[[], None]:
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))


def test_real_v1_limit_above_the_group(headrace_bin, model_dir, tokens, group_v1):
    """B30: the limit of the parent is what the budget comes from, and the kernel never has to kill."""
    limit = 24 * MIB
    inner = group_v1(limit)
    planned = subprocess.run([str(headrace_bin), "plan", str(model_dir), "--ctx", "256", "--threads", "2",
                              "--io-threads", "2", "--json"],
                             capture_output=True, text=True, preexec_fn=enter(inner))
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert 0 < plan["available"] <= limit and plan["ram"] <= limit * 3 // 4
    done = run(headrace_bin, model_dir, before=enter(inner))
    assert right_or_refused(done, tokens, (), "inside the group")
    assert json.loads(done.stdout)["stats"]["memory_limit"] <= limit * 3 // 4
    assert int((inner.parent / "memory.max_usage_in_bytes").read_text()) <= limit
    assert "oom_kill 0" in (inner / "memory.oom_control").read_text()


def test_v1_limits_down_to_too_little(headrace_bin, model_dir, tokens, group_v1):
    """Where not even the floor fits, it is refused; the kernel kills nobody."""
    ran = []
    for limit in (6, 10, 14, 20, 32):
        inner = group_v1(limit * MIB)
        done = run(headrace_bin, model_dir, before=enter(inner))
        ran.append(right_or_refused(done, tokens, (4,), f"{limit} MiB"))
        assert "oom_kill 0" in (inner / "memory.oom_control").read_text()
    assert ran == sorted(ran) and not ran[0] and ran[-1]


@pytest.fixture
def unified(tmp_path):
    """Callable: limit, used -> a prefix that shows the command a v2 hierarchy with them.

    The files are laid over those of /proc and /sys in a mount namespace of the command's own.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("laying a v2 hierarchy over /sys needs root and unshare")

    def prefix(limit: int, used: int) -> tuple[str, ...]:
        top = tmp_path / uuid.uuid4().hex[:8]
        leaf = top / "slice" / "scope"
        leaf.mkdir(parents=True)
        for folder, most in ((top / "slice", limit), (leaf, "max")):
            (folder / "memory.max").write_text(f"{most}\n")
            (folder / "memory.high").write_text("max\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text("anon 0\ninactive_file 0\n")
        (top / "cgroup").write_text("0::/slice/scope\n")
        (top / "mountinfo").write_text(
            f"30 24 0:26 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n")
        script = (f"mount --bind {top}/cgroup /proc/$$/cgroup && "
                  f"mount --bind {top}/mountinfo /proc/$$/mountinfo && exec \"$@\"")
        return ("unshare", "--mount", "sh", "-c", script, "sh")

    if subprocess.run([*prefix(1, 0), "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    return prefix


def test_v2_limit_above_the_group(headrace_bin, model_dir, tokens, unified):
    """B30: "max" at the leaf, a limit above it."""
    done = run(headrace_bin, model_dir, prefix=unified(32 * MIB, 4 * MIB))
    assert right_or_refused(done, tokens, (), "inside the group")
    assert json.loads(done.stdout)["stats"]["memory_limit"] <= 28 * MIB * 3 // 4
    refused = run(headrace_bin, model_dir, prefix=unified(32 * MIB, 31 * MIB))
    assert not right_or_refused(refused, tokens, (4,), "no room left")
    assert "safely available" in refused.stderr


# ---- rlimits --------------------------------------------------------------------------


def limited(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_address_space_down_to_nothing(headrace_bin, model_dir, tokens, kind):
    """The budget follows the limit; below what fits, it is refused."""
    ran = []
    for mib in (4, 8, 12, 16, 24, 40, 80):
        done = run(headrace_bin, model_dir, before=limited(getattr(resource, kind), mib * MIB))
        if done.returncode in (127, -11, 1) and not done.stderr.startswith("headrace: "):
            assert mib <= 4, f"{mib} MiB: {done.returncode} {done.stderr}"  # before main
            continue
        ran.append(right_or_refused(done, tokens, (4,), f"{kind} {mib} MiB"))
    assert ran == sorted(ran) and ran[-1] and not ran[0]


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_address_space_below_the_budget(headrace_bin, model_dir, tokens, kind):
    """A `ram` that the system does not give: refused while opening, at whatever call it is."""
    ran = [right_or_refused(
        run(headrace_bin, model_dir, "--ram", "64MiB", before=limited(getattr(resource, kind), mib * MIB)),
        tokens, (4,), f"{kind} {mib} MiB") for mib in range(8, 72, 5)]
    assert not ran[0]


def test_descriptors_down_to_nothing(headrace_bin, model_dir, tokens):
    ran = []
    for most in range(4, 24):
        done = run(headrace_bin, model_dir, before=limited(resource.RLIMIT_NOFILE, most))
        ran.append(right_or_refused(done, tokens, (5,), f"{most} descriptors"))
        assert ran[-1] or os.strerror(24) in done.stderr, done.stderr
    assert ran == sorted(ran) and ran[-1] and not ran[0]


@pytest.mark.parametrize(("kind", "value"), [("RLIMIT_MEMLOCK", 0), ("RLIMIT_STACK", 256 << 10),
                                             ("RLIMIT_CORE", 0)])
def test_limits_that_change_nothing(headrace_bin, model_dir, tokens, kind, value):
    """B22, B32: the trunk need not be locked; the stack that a call needs is small."""
    done = run(headrace_bin, model_dir, before=limited(getattr(resource, kind), value))
    assert right_or_refused(done, tokens, (), kind)


# ---- budgets ----------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["qwen3_5_moe_eps", "deepseek_v3", "gpt_oss"])
def test_budgets_down_to_nothing(headrace, fixture_models, fixture):
    """B26, B28: every budget gives the same bits or names the floor; the account keeps to it."""
    path, ids = fixture_models(fixture), [3, 1, 4, 1, 5]
    options = {"ctx": 64, "threads": 2, "io_threads": 2, "chunk": 4}
    plan = headrace.plan(path, **options)
    floor, record = plan.floor, plan.record_bytes
    for ram in (1, 4096, 65536, floor // 2, floor - 4096, floor - 1):
        with pytest.raises(headrace.HeadraceMemoryError, match=str(floor)):
            headrace.Model(path, ram=ram, **options)
    seen = set()
    steps = [0, 1, record, 2 * record, 5 * record, plan.total_experts * record * 2]
    for ram in (floor + step for step in steps):
        with headrace.Model(path, ram=ram, **options) as model:
            seen.add(model.logits(ids).tobytes())
            stats = model.stats
            assert stats.memory_peak <= stats.memory_limit == ram and stats.leases == 0
    assert len(seen) == 1
