"""The memory probe and CPU quota on /proc and /sys trees laid for them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support import build as building
from support.sanitizers import sanitized

MIB = 1 << 20
NONE = 2**64 - 1

needs_linux = pytest.mark.skipif(platform.system() != "Linux", reason="control groups")


class Tree:
    """A /proc and /sys of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = []
        self.write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n"
                                   "MemAvailable:    8388608 kB\nInactive(file):  524288 kB\n")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if not str(text).endswith("\n") else str(text))

    def mount(self, target: str, kind: str, options: str, source: str = "/") -> None:
        self.mounts.append(f"{len(self.mounts) + 30} 24 0:2{len(self.mounts)} {source} {target} "
                           f"rw,nosuid shared:9 - {kind} {kind} {options}\n")
        head = "22 1 0:20 / / rw - ext4 /dev/vda rw\n23 22 0:21 / /proc rw - proc proc rw\n"
        self.write("proc/self/mountinfo", head + "".join(self.mounts))
        (self.root / target[1:].replace("\\040", " ")).mkdir(parents=True, exist_ok=True)

    def v2(self, path: str, *, max: str | int = "max", high: str | int = "max", current: int = 0,
           inactive: int = 0, mount: str = "sys/fs/cgroup") -> None:
        at = f"{mount}/{path}".rstrip("/")
        self.write(f"{at}/memory.max", max)
        self.write(f"{at}/memory.high", high)
        self.write(f"{at}/memory.current", current)
        self.write(f"{at}/memory.stat", f"anon {current}\nactive_file 7\ninactive_file {inactive}\n")

    def v1(self, path: str, *, limit: int = 0x7FFFFFFFFFFFF000, usage: int = 0, inactive: int = 0,
           hierarchical: int = 0x7FFFFFFFFFFFF000) -> None:
        at = f"sys/fs/cgroup/memory/{path}".rstrip("/")
        self.write(f"{at}/memory.limit_in_bytes", limit)
        self.write(f"{at}/memory.usage_in_bytes", usage)
        self.write(f"{at}/memory.stat", f"inactive_file 3\nhierarchical_memory_limit {hierarchical}\n"
                                        f"total_inactive_file {inactive}\n")


@pytest.fixture()
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def probe(lib, tree: Tree):
    ffi, C = lib
    out = ffi.new("struct memory_probe *")
    C.memory_probe_read(str(tree.root).encode(), out)
    return out


@needs_linux
class TestProbe:
    def test_this_machine(self, lib) -> None:
        ffi, C = lib
        out = ffi.new("struct memory_probe *")
        C.memory_probe_read(b"", out)
        assert 0 < out.available <= out.physical
        assert 0 < out.usable <= out.available
        assert C.memory_default_budget(out) == out.usable - out.usable // 4
        assert 1 * MIB < C.memory_rss() < out.physical

    def test_without_groups(self, lib, tree: Tree) -> None:
        out = probe(lib, tree)
        assert (out.physical, out.available, out.cgroup) == (16 << 30, 8 << 30, NONE)
        assert out.usable == min(out.available, out.rlimit)

    def test_old_kernel_without_available(self, lib, tree: Tree) -> None:
        tree.write("proc/meminfo", "MemTotal: 4194304 kB\nMemFree: 1000 kB\nInactive(file): 24 kB\n")
        assert probe(lib, tree).available == 1024 * 1024

    def test_nothing_readable_is_never_zero(self, lib, tree: Tree) -> None:
        (tree.root / "proc/meminfo").write_text("garbage\n:::\nMemTotal: x\n")
        out = probe(lib, tree)
        assert out.physical > 0 and out.usable > 0

    @pytest.mark.parametrize("leaf", [
        {"max": "max"}, {"max": 4 << 30}, {"max": "max", "high": 3 << 30},
    ])
    def test_v2_limit_above_the_leaf(self, lib, tree: Tree, leaf: dict) -> None:
        tree.write("proc/self/cgroup", "0::/user.slice/app.scope")
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw,nsdelegate")
        tree.v2("user.slice", max=2 << 30, current=700 * MIB, inactive=200 * MIB)
        tree.v2("user.slice/app.scope", current=100 * MIB, **leaf)
        assert probe(lib, tree).cgroup == (2 << 30) - 500 * MIB
        assert probe(lib, tree).usable == (2 << 30) - 500 * MIB

    def test_v2_smallest_room_wins_wherever_it_is(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "0::/a/b/c")
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw")
        tree.v2("a", max=6 << 30, current=(6 << 30) - 300 * MIB)
        tree.v2("a/b", max=1 << 30, high=900 * MIB, current=100 * MIB)
        tree.v2("a/b/c", max=500 * MIB, current=50 * MIB, inactive=10 * MIB)
        assert probe(lib, tree).cgroup == 300 * MIB
        tree.v2("a", max="max")
        assert probe(lib, tree).cgroup == 460 * MIB
        tree.v2("a/b/c", max="max")
        assert probe(lib, tree).cgroup == 800 * MIB
        tree.v2("a/b")
        assert probe(lib, tree).cgroup == NONE

    def test_v2_over_its_limit(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "0::/a")
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw")
        tree.v2("a", high=100 * MIB, current=300 * MIB)
        out = probe(lib, tree)
        assert out.cgroup == 0 and out.usable > 0

    def test_v2_container_does_not_see_its_own_path(self, lib, tree: Tree) -> None:
        # The process is /docker/abc outside, the mount's root is its own group inside.
        tree.v2("", max=5, mount="sys")
        tree.v2("", max=5, mount="sys/fs")
        for path in ("/docker/abc", "/../..", "/", "/../other"):
            tree.write("proc/self/cgroup", f"0::{path}")
            tree.mounts.clear()
            tree.mount("/sys/fs/cgroup", "cgroup2", "rw")
            tree.v2("", max=1 << 30, current=24 * MIB)
            assert probe(lib, tree).cgroup == (1 << 30) - 24 * MIB, path

    def test_v2_mount_of_a_part(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "0::/docker/abc/inner")
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw", source="/docker/abc")
        tree.v2("", max=3 << 30, current=0)
        tree.v2("inner", max=2 << 30, current=MIB)
        tree.v2("docker/abc/inner", max=5, current=0)  # not ours: only looks so
        assert probe(lib, tree).cgroup == (2 << 30) - MIB

    def test_v2_prefers_the_mount_that_shows_the_group(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "0::/a/b")
        tree.mount("/mnt/other", "cgroup2", "rw", source="/somebody")
        tree.mount("/mnt/with\\040space", "cgroup2", "rw", source="/a")
        tree.v2("", max=5 * MIB, mount="mnt/other")
        tree.v2("b", max=77 * MIB, mount="mnt/with space")
        assert probe(lib, tree).cgroup == 77 * MIB

    def test_v1_nested(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/jobs/one\n1:name=systemd:/y")
        tree.mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
        tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
        tree.v1("")
        tree.v1("jobs", limit=2 << 30, usage=1 << 30, inactive=256 * MIB)
        tree.v1("jobs/one", usage=100 * MIB)
        assert probe(lib, tree).cgroup == (2 << 30) - (1 << 30) + 256 * MIB
        tree.v1("jobs/one", limit=600 * MIB, usage=100 * MIB, inactive=40 * MIB)
        assert probe(lib, tree).cgroup == 540 * MIB
        tree.v1("jobs")
        tree.v1("jobs/one")
        assert probe(lib, tree).cgroup == NONE

    def test_v1_container_learns_of_limits_above_its_mount(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "4:memory:/docker/abc")
        tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory", source="/docker/abc")
        tree.v1("", usage=10 * MIB, hierarchical=1 << 30)
        assert probe(lib, tree).cgroup == (1 << 30) - 10 * MIB

    def test_hybrid_takes_both(self, lib, tree: Tree) -> None:
        tree.write("proc/self/cgroup", "4:memory:/m\n0::/u")
        tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
        tree.mount("/sys/fs/cgroup/unified", "cgroup2", "rw")
        tree.v1("m", limit=900 * MIB)
        (tree.root / "sys/fs/cgroup/unified/u").mkdir(parents=True)
        assert probe(lib, tree).cgroup == 900 * MIB

    @pytest.mark.parametrize("text", ["", "garbage", "0:", ":::::", "0::" + "/x" * 5000,
                                      "4:memory", "0::relative"])
    def test_hostile_group_file(self, lib, tree: Tree, text: str) -> None:
        tree.write("proc/self/cgroup", text)
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw")
        tree.mounts.append("9 9\n\n - - -\n1 2 3 4 5 6 7 8 9\n" + "z" * 40000 + "\n")
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw")
        assert probe(lib, tree).usable > 0

    def test_address_space_limit(self, lib, build_dir: Path) -> None:
        if sanitized():
            pytest.skip("the address space is not the program's own")
        script = (
            "import ctypes, resource, sys\n"
            "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))\n"
            "C = ctypes.CDLL(sys.argv[1]); p = (ctypes.c_uint64 * 5)()\n"
            "C.memory_probe_read(b'', p); print(p[3], p[4])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(building.shared_library(build_dir, "headrace_test"))],
            capture_output=True, text=True, check=True)
        room, usable = map(int, done.stdout.split())
        assert 6 << 30 < room < 8 << 30 and usable <= room


@needs_linux
class TestQuota:
    """CPU time limits of control groups, on as many cores as there really are."""

    def cores(self, lib, tree: Tree) -> int:
        _, C = lib
        return C.cpu_physical_cores_under(str(tree.root).encode())

    def real(self) -> int:
        return len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(("leaf", "above", "most"), [
        ("max 100000", "max 100000", 10**6), ("100000 100000", "max 100000", 1),
        ("max 100000", "50000 100000", 1), ("150000 100000", "max 100000", 2),
        ("200000 100000", "400000 200000", 2), ("0 0", "garbage", 10**6),
    ])
    def test_v2(self, lib, tree: Tree, leaf: str, above: str, most: int) -> None:
        tree.write("proc/self/cgroup", "0::/a/b")
        tree.mount("/sys/fs/cgroup", "cgroup2", "rw")
        tree.write("sys/fs/cgroup/a/cpu.max", above)
        tree.write("sys/fs/cgroup/a/b/cpu.max", leaf)
        assert self.cores(lib, tree) == min(most, self.real())

    @pytest.mark.parametrize(("quota", "most"), [(-1, 10**6), (100000, 1), (30000, 1), (200000, 2)])
    def test_v1(self, lib, tree: Tree, quota: int, most: int) -> None:
        tree.write("proc/self/cgroup", "3:cpu,cpuacct:/a")
        tree.mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
        tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", quota)
        tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", 100000)
        assert self.cores(lib, tree) == min(most, self.real())

    def test_siblings_count_once(self, lib, tree: Tree) -> None:
        for cpu in os.sched_getaffinity(0):
            tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-99999")
        assert self.cores(lib, tree) == 1
