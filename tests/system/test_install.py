"""What `pip install .` installs is complete: it works away from the checkout, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.build import ROOT, tool_environment

pytestmark = [pytest.mark.slow, pytest.mark.plain_build]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel's content in an empty folder."""
    pytest.importorskip("mesonpy", reason="meson-python builds the wheel")
    base = tmp_path_factory.mktemp("install")
    source = base / "source"
    source.mkdir()
    for name in ("meson.build", "meson.options", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("engine", "include", "examples", "python", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index",
         "--disable-pip-version-check", "--target", str(base / "site"), str(source)],
        env=tool_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    shutil.rmtree(source)
    return base / "site"


def test_every_command_works_away_from_the_checkout(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    env.pop("HEADRACE_BUILD", None)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    scripts = installed / "bin"
    checkpoint = str(ROOT / "models" / "tiny-qwen3.5-moe")
    run(sys.executable, str(scripts / "headrace-convert"), checkpoint, "model")
    assert run(str(scripts / "headrace"), "version") == "headrace 0.1.0\n"
    assert run(str(scripts / "headrace"), "run", "model", "-p", "The captain", "-n", "5")
    run(str(scripts / "headrace"), "verify", "model")
    where = run(sys.executable, "-c", "import headrace; print(headrace.__file__); "
                "print(headrace.Model('model').generate('The captain', max_tokens=5).text)")
    assert str(installed) in where
    assert run(sys.executable, "-m", "headrace", "run", "model", "-p", "The captain",
               "--max-tokens", "5")


def test_the_package_holds_nothing_else(installed):
    top = {p.name for p in installed.iterdir() if not p.name.endswith(".dist-info")}
    assert top == {"bin", "headrace", "headrace_tools"}
    assert not list(installed.rglob("*.c")) and not list(installed.rglob("*.a"))
