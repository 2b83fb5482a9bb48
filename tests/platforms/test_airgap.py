"""docs/airgap.md, followed line by line where there is no network."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from support.build import ROOT, tool_environment
from support.platforms import need

GUIDE = ROOT / "docs" / "airgap.md"
ISOLATE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def blocks(kind: str) -> list[str]:
    """The commands of the guide's blocks of one kind, in order."""
    text = GUIDE.read_text(encoding="utf-8")
    found = [body for name, body in re.findall(r"^```sh ?(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
             if name == kind]
    assert found, f"the guide has no block of kind {kind!r}"
    return found


def follow(commands: str, place: Path, isolate: list[str]) -> str:
    """Runs the commands in a shell that stops at the first failure; standard output."""
    done = subprocess.run([*isolate, "bash", "-c", "set -eu\n" + commands], cwd=place,
                          env=tool_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def isolate() -> list[str]:
    """The command that runs another where there is no network; nothing, loudly, where it may not."""
    probe = subprocess.run([*ISOLATE, "cat", "/proc/net/dev"], capture_output=True, text=True)
    if probe.returncode != 0:
        warnings.warn("this system permits no namespace without a network: the guide is followed with "
                      f"one ({probe.stderr.strip()})", stacklevel=1)
        return []
    interfaces = [line.split(":")[0].strip() for line in probe.stdout.splitlines()[2:]]
    assert interfaces == ["lo"], "no interface but the loopback, which is down"
    return ISOLATE


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, isolate) -> Path:
    """What a person takes along, and the guide's first step on it: built, in another directory."""
    need(["unshare", "ssh-keygen", "sha256sum", "nm"], "util-linux openssh-client coreutils binutils")
    place = tmp_path_factory.mktemp("air gap") / "a long way" / "down"
    for name in ("engine", "include", "examples", "tools", "python", "models/tiny-qwen3.5-moe"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("meson.build", "meson.options", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    follow(blocks("")[0], place, isolate)
    return place


def test_the_namespace_has_no_network(isolate):
    """The proof of the tests below: a connection cannot even be tried."""
    if not isolate:
        pytest.skip("this system permits no namespace without a network")
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    done = subprocess.run([*ISOLATE, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "unreachable" in done.stderr


def test_reproducible_build(checkout, build_dir):
    """The same compiler and options in another directory, of another depth, give the same bytes."""
    options = {o["name"]: o["value"] for o in json.loads(subprocess.run(
        [sys.executable, "-m", "mesonbuild.mesonmain", "introspect", str(build_dir), "--buildoptions"],
        capture_output=True, text=True, check=True).stdout)}
    if options["buildtype"] != "release" or options["b_sanitize"] not in ("none", [], ""):
        pytest.skip("compares release builds; this is a build for tests")
    for name in ("headrace", "libheadrace.so.0.1.0", "headrace.cdx.json"):
        one, two = ((d / name).read_bytes() for d in (build_dir, checkout / "build-airgap"))
        assert hashlib.sha256(one).hexdigest() == hashlib.sha256(two).hexdigest(), name
        assert os.fsencode(str(ROOT)) not in one and b"a long way" not in two


def test_the_guide(checkout, isolate):
    shown = follow("".join(blocks("")[1:]), checkout, isolate)
    assert 'Good "headrace-container" signature for models@example' in shown
    assert "trunk.bin: OK" in shown and "manifest.json: OK" in shown
    sizes = {p.name for p in (checkout / "stick").iterdir()}
    assert sizes == {"headrace", "headrace.cdx.json", "model"}


@pytest.mark.slow
def test_converting_there(checkout, isolate):
    """The wheels are the one thing that is fetched; they are used without a network."""
    fetch = blocks("network")[0].replace("pip download", "pip download --retries 0 --timeout 10 --quiet")
    try:
        follow(fetch, checkout, [])
    except (AssertionError, subprocess.TimeoutExpired):
        pytest.skip("no package registry within reach: step 1 and converting there were not followed")
    follow(blocks("wheels")[0], checkout, isolate)
