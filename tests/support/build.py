"""Configures and builds the engine for the tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def tool_environment() -> dict[str, str]:
    """The environment with the running interpreter's own tools (ninja) first on PATH."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    return env


def meson(*args: str) -> None:
    """Runs meson; raises RuntimeError with its whole output when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mesonbuild.mesonmain", *args],
        env=tool_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"meson {' '.join(args)} failed:\n{done.stdout[-20000:]}")


def build(directory: Path, *options: str) -> Path:
    """Builds `directory` (configured first when it is new) with the test library; returns it.

    Several pytest workers may call it at once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".test-build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = ["-Dtests=true", *options]
        if (directory / "build.ninja").exists():
            meson("configure", str(directory), *wanted)
        else:
            meson("setup", str(directory), str(ROOT), *wanted)
        meson("compile", "-C", str(directory))
    return directory


def shared_library(directory: Path, name: str) -> Path:
    """The shared library `name` (without "lib") of a build directory."""
    return directory / f"lib{name}{SHARED_SUFFIX}"
