"""docs/airgap.md, followed line by line where there is no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.build import ROOT, tool_environment
from support.platforms import need

GUIDE = ROOT / "docs" / "airgap.md"
ISOLATE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def blocks(kind: str) -> str:
    """All commands of the guide's blocks of one kind, in order."""
    text = GUIDE.read_text(encoding="utf-8")
    found = [body for name, body in re.findall(r"^```sh ?(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
             if name == kind]
    assert found, f"the guide has no block of kind {kind!r}"
    return "".join(found)


def follow(commands: str, place: Path, isolated: bool) -> str:
    """Runs the commands in a shell that stops at the first failure; standard output."""
    script = "set -eu\n" + commands
    done = subprocess.run([*(ISOLATE if isolated else []), "bash", "-c", script], cwd=place,
                          env=tool_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What a person takes along: the repository's files, nothing built."""
    need(["unshare", "ssh-keygen", "sha256sum", "nm"], "util-linux openssh-client coreutils binutils")
    probe = subprocess.run([*ISOLATE, "cat", "/proc/net/dev"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"this system permits no namespace without a network: {probe.stderr.strip()}")
    interfaces = [line.split(":")[0].strip() for line in probe.stdout.splitlines()[2:]]
    assert interfaces == ["lo"], "no interface but the loopback, which is down"
    place = tmp_path_factory.mktemp("airgap") / "headrace"
    for name in ("engine", "include", "examples", "tools", "python", "models/tiny-qwen3.5-moe"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("meson.build", "meson.options", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    return place


def test_the_namespace_has_no_network(checkout):
    """The proof of the test below: a connection cannot even be tried."""
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    done = subprocess.run([*ISOLATE, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "unreachable" in done.stderr


def test_the_guide(checkout):
    shown = follow(blocks(""), checkout, isolated=True)
    assert 'Good "headrace-container" signature for models@example' in shown
    assert "trunk.bin: OK" in shown and "manifest.json: OK" in shown
    sizes = {p.name for p in (checkout / "stick").iterdir()}
    assert sizes == {"headrace", "headrace.cdx.json", "model"}


@pytest.mark.slow
def test_converting_there(checkout):
    """The wheels are the one thing that is fetched; they are used without a network."""
    fetch = blocks("network").replace("pip download", "pip download --retries 0 --timeout 10 --quiet")
    try:
        follow(fetch, checkout, isolated=False)
    except (AssertionError, subprocess.TimeoutExpired):
        pytest.skip("no package registry within reach: step 1 and converting there were not followed")
    if not (checkout / "stick" / "headrace").exists():
        follow(blocks(""), checkout, isolated=True)
    follow(blocks("wheels"), checkout, isolated=True)
