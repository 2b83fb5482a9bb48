"""The shim of tests/faults from Python: plans, children that may die, what a process holds open."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from .build import ROOT, SHARED_SUFFIX

KILLED = -signal.SIGKILL


class Shim:
    """The preloaded library in this process; `armed` is a context manager around a plan."""

    def __init__(self) -> None:
        c = ctypes.CDLL(None)
        self._arm = c.fault_arm
        self._arm.argtypes = [ctypes.c_char_p]
        self._seen, self._fired = c.fault_seen, c.fault_fired
        self._seen.restype = self._fired.restype = ctypes.c_uint64

    def arm(self, plan: str) -> None:
        """Starts a plan (tests/faults/plan.h). Raises ValueError when it is not understood."""
        if self._arm(plan.encode()):
            raise ValueError(plan)

    def disarm(self) -> int:
        """Ends the plan; how many calls it struck."""
        fired = int(self._fired())
        self._arm(None)
        return fired


def in_child(work: Callable[[], object]) -> tuple[int, object]:
    """Runs `work` in a forked child: (exit code or minus signal, its JSON value or None)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            data = json.dumps(work()).encode()
            while data:
                data = data[os.write(writer, data) :]
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(pid, 0)[1]
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return code, json.loads(data) if data else None


def descriptors() -> list[str]:
    """What this process has open, sorted."""
    out = []
    for name in os.listdir("/proc/self/fd"):
        try:
            out.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # the listing's own
    return sorted(out)


def preload(build_dir: Path) -> dict[str, str]:
    """Environment of a process that runs with the shim of `build_dir`; {} where there is none."""
    library = build_dir / "tests" / "faults" / f"libfault_files{SHARED_SUFFIX}"
    return {**os.environ, "LD_PRELOAD": str(library)} if library.exists() else {}


def run_driver(build_dir: Path, name: str, *arguments: object) -> Iterator[dict]:
    """Runs tests/faults/NAME.py under the shim: yields the JSON object of each line as it comes.

    Raises AssertionError with what it said when it fails.
    """
    env = preload(build_dir)
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / p) for p in ("tests", "tools", "python"))
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "faults" / f"{name}.py"), *map(str, arguments)],
        env=env, stdout=subprocess.PIPE, stderr=said, text=True,
    ) as process:
        for line in process.stdout:
            yield json.loads(line)
        code = process.wait()
        said.seek(0)
        assert code == 0, said.read()
