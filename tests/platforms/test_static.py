"""One file that needs nothing: built with musl, run where there is nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.platforms import COVERING, compiled, logits_hash, need, run

need(["musl-gcc", "readelf"], "musl-tools binutils")


@pytest.fixture(scope="module")
def program(build_dir: Path) -> Path:
    """headrace-static of a musl build."""
    os.environ["CC"], before = "musl-gcc", os.environ.get("CC")
    try:
        built = compiled(build_dir / "musl", ["-Dstatic_binary=enabled"], "headrace-static")
    finally:
        del os.environ["CC"]
        if before is not None:
            os.environ["CC"] = before
    return built / "headrace-static"


def test_it_has_no_dynamic_dependency(program):
    assert "There is no dynamic section" in run(["readelf", "-d", program])
    assert "INTERP" not in run(["readelf", "-lW", program])


def test_same_logits(program, scored):
    for name, _, _ in COVERING:
        assert logits_hash([program], scored[name].path, scored[name].ids) == scored[name].sha256


def test_it_runs_in_an_empty_root(program, scored, tmp_path):
    """No /lib, no /proc, no /dev: the program, a container and nothing else."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    one = scored["gpt_oss"]
    shutil.copy(program, tmp_path / "headrace")
    shutil.copytree(one.path, tmp_path / "model")
    shutil.copy(one.ids, tmp_path / "ids")
    inside = ["chroot", str(tmp_path), "/headrace"]
    assert logits_hash(inside, "/model", "/ids") == one.sha256
    assert run([*inside, "version"]).startswith("headrace ")
    run([*inside, "verify", "/model"])


def test_it_has_no_network_code(program):
    """musl is small enough that the whole program, libc included, can be held to it."""
    from platforms.test_supply_chain import FORBIDDEN

    # A function of ours that no other file sees may have any name.
    shown = run(["nm", "--extern-only", program])
    names = {line.split()[-1].lstrip("_") for line in shown.splitlines() if line.strip()}
    assert "pthread_create" in names and len(names) > 300 and not names & FORBIDDEN
