"""Waiting for what another process does instead of for a while: no machine is too slow for it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Callable

SMALL_PIPE = 4096
"""Bytes: a program that writes more cannot end before somebody reads it."""


def until(condition: Callable[[], object], seconds: float = 600) -> None:
    """Waits for a condition that is bound to come; the limit only ends a hang."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what was waited for never came"
        time.sleep(0.002)


def status(pid: int, name: str) -> str:
    """A field of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split(":", 1)[1].strip()
    return ""


def until_interruptible(pid: int, threads: int = 1, blocked: bool = False) -> None:
    """Until a program handles SIGINT, has so many threads, and `blocked` waits for something."""
    if not Path("/proc/self/status").exists():
        time.sleep(1)
        return
    bit = 1 << (signal.SIGINT - 1)
    until(lambda: int(status(pid, "SigCgt") or "0", 16) & bit)
    until(lambda: len(os.listdir(f"/proc/{pid}/task")) >= threads)
    if blocked:
        until(lambda: status(pid, "State").startswith("S"))


def cost() -> tuple[float, int]:
    """Seconds of processor time and peak bytes of this process: neither depends on what else runs.

    What getrusage calls the peak begins with that of the process that started this one.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if Path("/proc/self/status").exists():
        peak = int(status(os.getpid(), "VmHWM").split()[0]) * 1024
    return used.ru_utime + used.ru_stime, peak


def bound_address_space(more: int) -> tuple[int, int]:
    """Lets this process map so much more than it has; the limits before.

    What it has grows with the processors, of which each gets its part, and with what ran before.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 2 << 30
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, before[1]))
    return before
