"""macOS on arm64: compiled and linked from one cross file. Nothing here can run the result."""

from __future__ import annotations

import importlib.util
import re
import struct
from pathlib import Path

import pytest

from support.build import ROOT
from support.platforms import compiled

if importlib.util.find_spec("ziglang") is None:
    pytest.skip("the macOS build was not compiled: its headers and linker come with zig "
                "(pip install ziglang, 100 MB)", allow_module_level=True)  # fmt: skip

CROSS = ROOT / "cross" / "macos-aarch64.ini"
LC_LOAD_DYLIB = 0xC


@pytest.fixture(scope="module")
def built(build_dir: Path) -> Path:
    return compiled(build_dir / "macos", ["--cross-file", str(CROSS)],
                    "headrace:executable", "headrace:shared_library")


def libraries(path: Path) -> list[str]:
    """The libraries that a Mach-O file loads; fails when it is not one for arm64."""
    data = path.read_bytes()
    magic, cpu, _, _, commands = struct.unpack_from("<5I", data)
    assert magic == 0xFEEDFACF and cpu == 0x0100000C, "a 64-bit Mach-O file for arm64"
    found, at = [], 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command == LC_LOAD_DYLIB:
            start = at + struct.unpack_from("<I", data, at + 8)[0]
            found.append(data[start : at + size].split(b"\0")[0].decode())
        at += size
    return found


@pytest.mark.parametrize("name", ["headrace", "libheadrace.0.dylib"])
def test_it_links_against_the_system_alone(name, built):
    assert libraries(built / name) == ["/usr/lib/libSystem.B.dylib"]


def test_what_only_this_system_has_is_used(built):
    """Its own ways past the cache, its memory statistics, its CPU features; no Linux path."""
    data = (built / "headrace").read_bytes()
    names = set(re.findall(rb"\x00_([a-z_0-9]+)(?=\x00)", data))
    assert {b"fcntl", b"pread", b"host_statistics64", b"sysctlbyname"} <= names
    assert b"neon-dotprod" in data
