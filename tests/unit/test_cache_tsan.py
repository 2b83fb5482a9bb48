"""The cache and its reader threads under ThreadSanitizer, on a drive that misbehaves."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from containers import make_container

ROOT = Path(__file__).resolve().parents[2]


def test_no_data_race(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    tsan = ["-fsanitize=thread", "-g", "-O1"]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    works = subprocess.run([*compiler, *tsan, str(probe), "-o", str(tmp_path / "probe")],
                           capture_output=True).returncode == 0
    if not works or subprocess.run([str(tmp_path / "probe")], capture_output=True).returncode:
        pytest.skip("this compiler or system has no ThreadSanitizer")
    engine = ROOT / "engine"
    sources = [p for part in ("base", "quant", "store")
               for p in sorted((engine / part).glob("*.c")) if not p.stem.endswith("_windows")]
    program = tmp_path / "tsan_cache"
    built = subprocess.run(
        [*compiler, "-std=c11", "-D_GNU_SOURCE", *tsan, "-ffp-contract=off",
         f"-I{ROOT / 'include'}", f"-I{engine}", str(ROOT / "tests" / "unit" / "tsan_cache.c"), *map(str, sources),
         "-o", str(program), "-lm", "-lpthread"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    make_container(tmp_path / "c", layers=4, experts=16, hidden=32, inner=48, codec="f32")
    done = subprocess.run([str(program), str(tmp_path / "c"), "60"], capture_output=True, text=True,
                          timeout=900, env={**os.environ, "TSAN_OPTIONS": "exitcode=66"})
    assert done.returncode == 0, done.stdout + done.stderr
