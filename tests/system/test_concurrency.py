"""Sessions side by side, cancelled at random, two processes on one container, a container replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from containers import make_container

PROMPT = "The captain stood upon the deck and looked at the sea, and"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model"
    make_container(path, layers=3, experts=8, hidden=64, inner=32, codec="int8", tokenizer=None)
    return path


def test_a_thousand_cancels_beside_other_sessions(build_dir, small, tmp_path):
    """No lease, no descriptor, no byte left; every other generation has the bits it has alone."""
    program = build_dir / "tests" / "unit" / "tsan_sessions"
    done = subprocess.run([str(program), str(small), str(tmp_path), "1000"], capture_output=True,
                          text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(word) for word in done.stdout.replace(",", "").split() if word.isdigit()]
    assert counts[0] >= 1000 and counts[1] >= 300 and counts[2] == 0, done.stdout


@pytest.mark.parametrize("fixture", ["qwen4_exp", "deepseek_v3"])
def test_other_parts_beside_each_other(build_dir, fixture_models, tmp_path, fixture):
    """Row tables and latent attention: sessions share nothing but the model."""
    program = build_dir / "tests" / "unit" / "tsan_sessions"
    done = subprocess.run([str(program), str(fixture_models(fixture)), str(tmp_path), "40", "7"],
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def command(headrace_bin: Path, model: Path) -> list[str]:
    return [str(headrace_bin), "run", str(model), "-p", PROMPT, "--json", "--ram", "12MiB", "--ctx",
            "256", "--max-tokens", "40", "--threads", "2"]


@pytest.mark.plain_build  # in a few megabytes, which a checker adds to
def test_two_processes_on_one_container(headrace_bin, model_dir):
    """Three at once, one of them killed: the other two say what one says alone."""
    alone = subprocess.run(command(headrace_bin, model_dir), capture_output=True, text=True, check=True)
    want = json.loads(alone.stdout)["ids"]
    before = {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in model_dir.iterdir()}
    running = [subprocess.Popen(command(headrace_bin, model_dir), stdout=subprocess.PIPE, text=True)
               for _ in range(3)]
    time.sleep(0.05)
    running[0].send_signal(signal.SIGKILL)
    for process in running[1:]:
        out, _ = process.communicate(timeout=900)
        assert process.returncode == 0 and json.loads(out)["ids"] == want
    assert running[0].wait() in (0, -signal.SIGKILL)
    running[0].stdout.close()
    assert {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in model_dir.iterdir()} == before


def test_a_container_replaced_under_an_open_model(headrace, small, tmp_path):
    """Renamed over, as a converter does: the open model keeps the files it opened."""
    path, ids = tmp_path / "model", [3, 7, 11, 5, 2, 9]
    shutil.copytree(small, path)
    ram = headrace.plan(path, ctx=64).floor + (1 << 16)
    with headrace.Model(path, ctx=64, ram=ram) as model:
        want = model.logits(ids).tobytes()
        other = tmp_path / "other"
        make_container(other, layers=3, experts=8, hidden=64, inner=32, codec="int8", tokenizer=None,
                       seed=99)
        for file in sorted(other.iterdir()):
            os.replace(file, path / file.name)
        assert model.logits(ids).tobytes() == want
    with headrace.Model(path, ctx=64, ram=ram) as model:
        assert model.logits(ids).tobytes() != want
