"""Windows on x86-64: cross-compiled, linked, and run with Wine where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.build import ROOT
from support.platforms import COVERING, compiled, logits_hash, need, run

COMPILER = "x86_64-w64-mingw32-gcc-posix"
need([COMPILER], "gcc-mingw-w64-x86-64-posix")

CROSS = ROOT / "cross" / "windows-x86_64.ini"
# No library of ours or of the compiler, and none with sockets in it (ws2_32, wininet, winhttp).
SYSTEM_LIBRARIES = {"kernel32.dll", "msvcrt.dll", "ntdll.dll", "psapi.dll", "shell32.dll"}


@pytest.fixture(scope="module")
def built(build_dir: Path) -> Path:
    """A build directory with headrace.exe and the library."""
    return compiled(build_dir / "windows", ["--cross-file", str(CROSS), "-Dstatic_binary=disabled"],
                    "headrace:executable", "headrace:shared_library")


@pytest.fixture(scope="module")
def wine(built, tmp_path_factory) -> dict[str, str]:
    """The environment of a Wine with a prefix of its own, started once."""
    if shutil.which("wine") is None:
        pytest.skip("wine not found: compiled and linked, not run (apt-get install wine64 wine)")
    env = {**os.environ, "WINEDEBUG": "-all", "LC_ALL": "C.UTF-8", "DISPLAY": "",
           "WINEPREFIX": str(tmp_path_factory.mktemp("wine")), "WINEDLLOVERRIDES": "mscoree,mshtml="}
    first = subprocess.run(["wine", str(built / "headrace.exe"), "version"], env=env,
                           capture_output=True, text=True, timeout=900)
    if first.returncode != 0:
        pytest.skip(f"this wine runs no program: {first.stderr[-300:]}")
    return env


@pytest.fixture
def program(built, wine, monkeypatch) -> list[str]:
    """The command that runs headrace.exe."""
    for name, value in wine.items():
        monkeypatch.setenv(name, value)
    return ["wine", str(built / "headrace.exe")]


def test_only_libraries_of_windows(built):
    for name in ("headrace.exe", "libheadrace-0.dll"):
        shown = run(["x86_64-w64-mingw32-objdump", "-p", built / name])
        needed = {n.lower() for n in re.findall(r"DLL Name: (\S+)", shown)}
        assert "kernel32.dll" in needed and needed <= SYSTEM_LIBRARIES, needed


def test_the_library_exports_its_interface(built):
    shown = run(["x86_64-w64-mingw32-objdump", "-p", built / "libheadrace-0.dll"])
    exported = set(re.findall(r"^\s*\[\s*\d+\] (?:\+base\[\s*\d+\]\s+\S+ )?(\w+)$", shown, re.MULTILINE))
    header = (ROOT / "include" / "headrace.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^HR_API[^;(]*?\b(hr_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 30 and exported == declared


def test_version_and_info(program, scored):
    assert run([*program, "version"]).startswith("headrace ")
    out = json.loads(run([*program, "info", scored["olmoe"].path, "--json"]))
    assert out["isa"][-1] == "reference" and out["model"]["isa"] == out["isa"][0]
    assert out["model"]["io_mode"] == "direct", "unbuffered reads were proven by one"


@pytest.mark.parametrize("name", [row[0] for row in COVERING])
def test_same_logits(name, program, scored):
    one = scored[name]
    for options in ([], ["--isa", "reference", "--no-direct"]):
        assert logits_hash(program, one.path, one.ids, *options) == one.sha256, options


def test_bytes_of_pipes_and_files(program, headrace_bin, model_dir, tmp_path):
    """No translation of line ends, no end at 0x1A, in prompts and in what is written (case B54)."""
    text = "“The captain”\r\nsaid:\n\x1a still\r here, and the old man was".encode()
    (tmp_path / "prompt").write_bytes(text)
    tail = ["-n", "12", "--ctx", "128", "--temperature", "0.9", "--seed", "3"]

    def output(command: list, prompt: list) -> bytes:
        done = subprocess.run([*map(str, command), "run", str(model_dir), *prompt, *tail], input=text,
                              capture_output=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for prompt in (["-"], ["-f", str(tmp_path / "prompt")]):
        here = output([headrace_bin], prompt)
        assert here and output(program, prompt) == here
    said = ["-p", "Žofie — モデル and the old man was"]
    assert output(program, said) == output([headrace_bin], said)


def test_paths(program, scored, tmp_path, monkeypatch):
    """Blanks, other scripts, more than 260 units, a slash at the end, relative (case B52)."""
    one = scored["gpt_oss"]
    places = [tmp_path / "mo del" / "モデル" / "ž", tmp_path / ("d" * 120) / ("e" * 120) / ("f" * 120)]
    for place in places:
        shutil.copytree(one.path, place)
        for path in (f"{place}", f"{place}/"):
            assert logits_hash(program, path, one.ids) == one.sha256
    monkeypatch.chdir(tmp_path)
    assert logits_hash(program, "mo del/モデル/ž", one.ids) == one.sha256
    missing = subprocess.run([*program, "verify", "mo del/モデル/nicht"], capture_output=True, text=True)
    assert missing.returncode == 5 and "mo del/モデル/nicht" in missing.stderr


def test_verify_and_refusals(program, scored, tmp_path):
    place = Path(shutil.copytree(scored["olmoe"].path, tmp_path / "model"))
    run([*program, "verify", place])
    trunk = bytearray((place / "trunk.bin").read_bytes())
    trunk[100] ^= 1
    (place / "trunk.bin").write_bytes(trunk)
    broken = subprocess.run([*program, "verify", str(place)], capture_output=True, text=True)
    assert broken.returncode == 3 and "trunk.bin" in broken.stderr + broken.stdout
    small = subprocess.run([*program, "plan", str(place), "--ram", "64KiB"], capture_output=True, text=True)
    assert small.returncode == 4


def test_memory_and_cores(program, scored):
    """Without --ram and --threads: what Windows says is free, and its cores."""
    path = scored["olmoe"].path
    assert json.loads(run([*program, "info", path, "--json"]))["model"]["threads"] >= 1
    ram = json.loads(run([*program, "plan", path, "--json"]))["ram"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 << 20 < ram <= total


def test_use_counts_and_lock(program, headrace_bin, model_dir, tmp_path):
    """The same counts as here, replaced by the second run; the trunk is locked where Wine may."""
    tail = ["run", model_dir, "-p", "The captain", "-n", "3", "--ctx", "64", "--usage"]
    for turn in range(2):
        assert run([*program, *tail, tmp_path / "zvyk"]) == run([headrace_bin, *tail, tmp_path / "here"])
        assert (tmp_path / "zvyk").read_bytes() == (tmp_path / "here").read_bytes(), turn
    assert not list(tmp_path.glob("*.partial"))
    for lock in ("auto", "off"):
        info = json.loads(run([*program, "info", model_dir, "--lock", lock, "--json"]))["model"]
        assert info["trunk_locked"] in ((True, False) if lock == "auto" else (False,))


def test_sessions(built, wine, scored, tmp_path, monkeypatch):
    """Saved through a rename that replaces, under a name in another script, and read back."""
    for name, value in wine.items():
        monkeypatch.setenv(name, value)
    compiled(built, [], "headrace:static_library")
    trip = tmp_path / "session_trip.exe"
    subprocess.run([COMPILER, "-static", "-std=gnu11", "-I", ROOT / "include",
                    ROOT / "tests" / "platforms" / "session_trip.c", built / "libheadrace.a",
                    "-o", trip, "-lntdll", "-lpsapi", "-lm", "-pthread"], check=True)
    for name in ("qwen3_5_moe_eps", "kimi_k3_eps"):
        assert run(["wine", trip, scored[name].path, "sitzung.hrs"], cwd=tmp_path).strip() == "same"
        assert not list(tmp_path.glob("*.partial"))
        (tmp_path / "sitzung.hrs").unlink()
