"""What the tests of docs/cases.md share: the commands as a user runs them, limits, other users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from support.sanitizers import sanitized

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
CONVERT = """
import resource, sys
import headrace, numpy
library, space = sys.argv.pop(1), int(sys.argv.pop(1))
headrace.use_library(library)
from headrace_tools.convert.cli import main
if space:
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
sys.exit(main())
"""
LIMITED = """
import os, resource, sys
for name, value in zip(sys.argv[1].split(","), sys.argv[2].split(",")):
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
os.execv(sys.argv[3], sys.argv[3:])
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(ROOT / "python")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1"}  # each would take its part of a limited address space


def run(command: list[object], **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(c) for c in command], capture_output=True,
                          **{"timeout": 900, **options})  # type: ignore[call-overload]


def limited(command: list[object], **limits: int) -> subprocess.CompletedProcess[bytes]:
    """Runs a command below limits such as RLIMIT_AS=2**31."""
    if sanitized():
        limits.pop("RLIMIT_AS", None)
    numbers = ",".join(str(v) for v in limits.values())
    return run([sys.executable, "-S", "-c", LIMITED, ",".join(limits), numbers, *command])


def convert(library: Path, *argv: object, space: int = 0) -> subprocess.CompletedProcess[bytes]:
    """headrace-convert in a process of its own, within `space` bytes of addresses (0: no limit)."""
    space = 0 if sanitized() else space
    return run([sys.executable, "-c", CONVERT, library, space, *argv], env=environment())


def slow_drive(build_dir: Path, rate: float) -> dict[str, str]:
    """Environment of a program whose drive gives `rate` bytes a second, in a time of its own."""
    shim = build_dir / "tests" / "faults" / "libslow_time.so"
    if not shim.exists():
        pytest.skip("this build has no shim for system calls")
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not say how long a thread has run")
    return {**os.environ, "LD_PRELOAD": str(shim), "THROTTLE": str(rate)}


def as_nobody(work: Callable[[], object]) -> str:
    """Runs `work` in a forked child that is not root; returns "" or what went wrong.

    Root ignores permissions: a test of them that runs as root cannot fail. Skips loudly where no
    other user can be taken.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        message = ""
        try:
            os.close(read)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
        except PermissionError as error:
            message = f"PermissionError: {error}"
        except BaseException as error:  # noqa: BLE001: it is told to the parent
            message = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, message.encode()[:60000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(pid, 0)
    return message


def open_to_all(path: Path) -> None:
    """Lets other users reach `path`; skips where a parent forbids it for good."""
    for parent in (path, *path.parents):
        try:
            mode = parent.stat().st_mode
            if not mode & 0o001:
                parent.chmod(mode | 0o055)
        except PermissionError:
            pytest.skip(f"{parent} is closed to other users")


def listing(path: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns)
                  for p in path.rglob("*"))
