"""engine/base/machine.c: drives and limits on /proc and /sys trees laid for them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support import build as building

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="/proc and /sys")


class Tree:
    """A /proc and /sys of our own with block devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = []

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, number: str, kind: str, source: str) -> None:
        self.mounts.append(f"{30 + len(self.mounts)} 1 {number} / /mnt rw shared:1 - {kind} {source} rw\n")
        self.write("proc/self/mountinfo", "".join(self.mounts))

    def device(self, where: str, number: str, rotational: int | None = 0, partition: bool = False,
               slaves: tuple[str, ...] = ()) -> None:
        path = self.root / "sys/devices" / where
        path.mkdir(parents=True, exist_ok=True)
        if rotational is not None:
            self.write(f"sys/devices/{where}/queue/rotational", f"{rotational}\n")
        if partition:
            self.write(f"sys/devices/{where}/partition", "1\n")
        (path / "slaves").mkdir(exist_ok=True)
        for slave in slaves:
            (path / "slaves" / Path(slave).name).symlink_to(self.root / "sys/devices" / slave)
        link = self.root / "sys/dev/block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(path, link.parent))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


@pytest.fixture
def drive(lib, tree):
    ffi, C = lib

    def facts(major: int, minor: int) -> dict:
        out = ffi.new("struct drive_facts *")
        C.drive_facts_of(os.fsencode(tree.root), major, minor, out)
        text = {n: ffi.string(getattr(out, n)).decode() for n in ("filesystem", "device")}
        return text | {n: bool(getattr(out, n)) for n in ("rotational", "usb", "network", "memory")}

    return facts


def expected(**values) -> dict:
    none = {"filesystem": "", "device": "", "rotational": False, "usb": False, "network": False,
            "memory": False}
    return none | values


def test_a_partition_belongs_to_its_drive(tree, drive) -> None:
    tree.device("pci0/nvme/nvme0n1", "259:0")
    tree.device("pci0/nvme/nvme0n1/nvme0n1p2", "259:2", None, partition=True)
    tree.mount("259:1", "vfat", "/dev/nvme0n1p1")
    tree.mount("259:2", "ext4", "/dev/nvme0n1p2")
    assert drive(259, 2) == expected(filesystem="ext4", device="nvme0n1")


def test_a_spinning_drive_behind_usb(tree, drive) -> None:
    tree.device("pci0/usb2/2-1/host6/block/sdb", "8:16", 1)
    tree.mount("8:16", "xfs", "/dev/sdb")
    assert drive(8, 16) == expected(filesystem="xfs", device="sdb", rotational=True, usb=True)


def test_what_lies_below_a_volume_counts(tree, drive) -> None:
    tree.device("pci0/ata1/block/sda", "8:0", 1)
    tree.device("pci0/ata1/block/sda/sda1", "8:1", None, partition=True)
    tree.device("virtual/block/dm-0", "253:0", slaves=("pci0/ata1/block/sda/sda1",))
    tree.device("virtual/block/dm-1", "253:1", slaves=("virtual/block/dm-0",))
    tree.mount("253:1", "ext4", "/dev/mapper/data")
    assert drive(253, 1) == expected(filesystem="ext4", device="dm-1", rotational=True)


def test_a_virtual_drive_is_not_believed_to_spin(tree, drive) -> None:
    tree.device("pci0/virtio1/block/vda", "254:0", 1)
    tree.mount("254:0", "ext4", "/dev/vda")
    assert drive(254, 0) == expected(filesystem="ext4", device="vda")


@pytest.mark.parametrize("kind, fact", [("nfs4", "network"), ("virtiofs", "network"),
                                        ("tmpfs", "memory")])
def test_no_drive_of_this_machine(tree, drive, kind: str, fact: str) -> None:
    tree.mount("0:44", kind, "server:/export")
    assert drive(0, 44) == expected(filesystem=kind, **{fact: True})


def test_nothing_is_said(drive) -> None:
    assert drive(8, 0) == expected()


def test_paths_of_this_machine(lib, tmp_path: Path) -> None:
    ffi, C = lib
    out = ffi.new("struct drive_facts *")
    assert C.drive_facts_read(os.fsencode(tmp_path), out)
    listed = (line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").open())
    assert ffi.string(out.filesystem).decode() in {*listed, ""}
    assert not C.drive_facts_read(os.fsencode(tmp_path / "absent"), out)


def test_limits(lib, tree) -> None:
    ffi, C = lib
    out = ffi.new("struct machine_limits *")
    C.machine_limits_read(os.fsencode(tree.root), out)
    assert ffi.string(out.huge_pages) == b"" and out.swap_used == 0
    tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    tree.write("proc/meminfo", "MemTotal: 100 kB\nSwapTotal:       4096 kB\nSwapFree:        1024 kB\n")
    C.machine_limits_read(os.fsencode(tree.root), out)
    assert ffi.string(out.huge_pages) == b"madvise"
    assert out.swap_used == 3072 << 10


def test_locked_memory(build_dir) -> None:
    library = building.shared_library(build_dir, "headrace_test")
    code = ("import ctypes, resource\n"
            "hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]\n"
            "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))\n"
            f"lib = ctypes.CDLL({str(library)!r})\n"
            "out = (ctypes.c_uint64 * 8)()\n"
            "lib.machine_limits_read(b'', out)\n"
            "print(out[0])\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "65536", done.stderr
