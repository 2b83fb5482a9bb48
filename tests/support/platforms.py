"""Builds for other machines, and the small containers whose logits every machine must agree on."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.build import ROOT, meson

TOKENS = 45

# Together: every mixer, residual, router, activation and codec. (checkpoint, experts, trunk)
COVERING = [
    ("qwen3_5_moe_eps", "rvq3", "nl4"),  # delta rule, gated attention, shared expert
    ("qwen4_exp", "rvq3x256", "int8"),  # block-sparse attention, hyper residual, n-gram rows
    ("kimi_k3_eps", "rvq2", "int8"),  # delta rule by channel, attention residual, latent experts
    ("kimi_linear_eps", "bf16", "bf16"),  # delta rule by channel, latent attention without rotation
    ("deepseek_v3_eps", "nl4", "int8"),  # latent attention, sigmoid router with groups
    ("deepseek_v2", "int4", "int8"),  # latent attention, softmax router with groups
    ("gpt_oss", "auto", "bf16"),  # sinks, windows, biases, clamped activation; mxfp4 as it came
    ("mixtral", "mxfp4", "f32"),  # plain attention; mxfp4 made here
    ("qwen3_moe_yarn", "f32", "f32"),  # stretched rotation
    ("olmoe", "int8", "int8"),  # normalised queries and keys
]


def need(commands: Iterable[str], packages: str) -> None:
    """Skips the test, naming what is missing and how to get it (Debian's package names)."""
    missing = [c for c in commands if shutil.which(c) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (Debian, Ubuntu: apt-get install {packages})",
                    allow_module_level=True)


def compiled(directory: Path, setup: Sequence[str], *targets: str) -> Path:
    """The build directory, configured with `setup` when new, with `targets` (default: all) built."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".platform-build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "build.ninja").exists():
            meson("setup", str(directory), str(ROOT), *setup)
        meson("compile", "-C", str(directory), *targets)
    return directory


def run(command: Sequence[str | Path], **kwargs) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=900,
                          **kwargs)
    shown = " ".join(map(str, command))
    assert done.returncode == 0, f"{shown}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Scored:
    """A container, ids to evaluate, and the SHA-256 of the logits on this machine."""

    path: Path
    ids: Path
    sha256: str


def write_ids(container: Path, out: Path) -> Path:
    """TOKENS pseudo-random ids of the container's vocabulary, as text."""
    vocab = json.loads((container / "manifest.json").read_text())["model"]["vocab_size"]
    chosen = random.Random(7)
    out.write_text(" ".join(str(chosen.randrange(vocab)) for _ in range(TOKENS)))
    return out


def logits_hash(program: Sequence[str | Path], container: Path | str, ids: Path | str,
                *options: str) -> str:
    """SHA-256 of the logits that `program` (a command that runs headrace) computes."""
    out = run([*program, "score", container, "-f", ids, "--ids", "--hash", "--window",
               str(TOKENS - 1), "--ctx", "64", "--threads", "2", "--ram", "64MiB", *options])
    found = re.search(r"logits sha256\s+([0-9a-f]{64})", out)
    assert found, out
    return found[1]


def emulator_works(command: Sequence[str]) -> bool:
    """Whether a command can be started here at all."""
    try:
        return subprocess.run(command, capture_output=True, timeout=300,
                              env={**os.environ, "LC_ALL": "C"}).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
