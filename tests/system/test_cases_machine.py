"""Cases of docs/cases.md about the machine: memory, permissions, system calls."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from case_helpers import as_nobody, limited, listing, open_to_all, run
from containers import edit_manifest, make_container
from convert_helpers import IDS_ONLY
from convert_helpers import run as convert
from headrace_tools.convert import cli
from support.processes import SMALL_PIPE
from support.sanitizers import sanitized
from tiny_checkpoint import write_checkpoint

IDS = ["--ids", "1 2 3 4 5 6 7 8", "-n", "4", "--ctx", "32"]
LAYERS, EXPERTS, TOP_K = 3, 8, 3


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "c"
    make_container(path, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, tokenizer=None)
    return path


@pytest.fixture(scope="module")
def wanted(headrace_bin, container) -> bytes:
    done = run([headrace_bin, "run", container, *IDS])
    assert done.returncode == 0 and done.stdout.strip()
    return done.stdout


# ---- system calls that are refused ----

#: optional for the engine: each may be refused, and the result is the same
OPTIONAL_CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "statx": 332, "fadvise64": 221, "madvise": 28,
                  "mlock": 149, "mlock2": 325, "mbind": 237, "sched_getaffinity": 204, "sysinfo": 99}
DENIED = """
import ctypes, os, struct, sys
# BPF: the number of the call; each that is listed returns errno, the others are allowed.
code, numbers = int(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")]
program = [(0x20, 0, 0, 0)]
for i, n in enumerate(numbers):
    program.append((0x15, len(numbers) - i, 0, n))
program += [(0x06, 0, 0, 0x7fff0000), (0x06, 0, 0, 0x00050000 | code)]
raw = b"".join(struct.pack("<HBBI", *line) for line in program)
buffer = ctypes.create_string_buffer(raw)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
bpf = Program(len(program), ctypes.addressof(buffer))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(bpf), 0, 0):
    sys.exit(77)
os.execv(sys.argv[3], sys.argv[3:])
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not sys.platform.startswith("linux"), reason="numbers of calls")
@pytest.mark.parametrize("code", [1, 38], ids=["EPERM", "ENOSYS"])
def test_b22_refused_system_calls(headrace_bin, container, wanted, code):
    """A sandbox that refuses what is optional: the same tokens, no complaint of a refusal to start."""
    if sanitized():
        pytest.skip("the sanitizer needs these calls itself")
    numbers = ",".join(map(str, OPTIONAL_CALLS.values()))
    done = run([sys.executable, "-S", "-c", DENIED, code, numbers, headrace_bin, "run", container, *IDS])
    if done.returncode == 77:
        pytest.skip("this kernel installs no filter")
    assert done.returncode == 0 and done.stdout == wanted, done.stderr


def locked() -> int:
    """Bytes that this process holds locked."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmLck:\s*(\d+)", status).group(1)) << 10


@pytest.fixture(scope="module")
def trunk_state(headrace, model_dir, tmp_path_factory):
    """Callable: lock, bytes that may be locked -> what a process without privileges finds."""
    place = tmp_path_factory.mktemp("locked")
    path = Path(shutil.copytree(model_dir, place / "model"))
    for file in path.iterdir():
        file.chmod(0o644)
    result = place / "result"
    result.touch()
    result.chmod(0o666)

    def look(lock: str, limit: int) -> dict:
        def work() -> None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            out: dict = {"error": None}
            try:
                with headrace.Model(path, lock=lock, ctx=32, ram="64MiB") as model:
                    out |= {"logits": model.logits([1, 2, 3]).tobytes().hex(), "open": locked(),
                            "told": model.info.trunk_locked}
            except headrace.HeadraceMemoryError as error:
                out["error"] = str(error)
            result.write_text(json.dumps(out | {"closed": locked()}))

        open_to_all(path)  # each time: pytest closes its directory whenever another run begins
        wrong = as_nobody(work)
        if "maximum limit" in wrong:
            pytest.skip("this system lets nobody lock so much")
        assert wrong == ""
        return json.loads(result.read_text())

    return look


needs_status = pytest.mark.skipif(not sys.platform.startswith("linux") or sanitized(), reason="reads VmLck")


@needs_status
def test_b32_locking_refused(trunk_state, model_dir):
    """By itself it goes on in silence with the same logits; asked for, it names limit and remedy."""
    trunk = (model_dir / "trunk.bin").stat().st_size
    off = trunk_state("off", trunk * 2)
    for limit in (0, trunk // 2):
        auto, on = trunk_state("auto", limit), trunk_state("on", limit)
        assert auto == off | {"told": False} and off["open"] == 0
        assert f"{trunk} bytes" in on["error"] and "ulimit -l" in on["error"] and on["closed"] == 0
        assert f"may lock {limit} bytes" in on["error"], on["error"]


@needs_status
@pytest.mark.parametrize("lock", ["auto", "on"])
def test_b32_locked_where_allowed(trunk_state, model_dir, lock):
    """The whole trunk, and nothing else, from opening to closing."""
    trunk = (model_dir / "trunk.bin").stat().st_size
    now = trunk_state(lock, 2 * trunk)
    assert now["error"] is None and now["told"]
    assert trunk <= now["open"] <= trunk + 8192 and now["closed"] == 0
    assert now["logits"] == trunk_state("off", 0)["logits"]


@needs_status
def test_b32_nothing_is_pinned_that_others_need(headrace, tmp_path):
    """A plan beyond what is available, here for sessions that nobody makes: locked only when asked for."""
    make_container(tmp_path / "c", tokenizer=None)
    edit_manifest(tmp_path / "c", lambda m: m["model"].update(max_position=1 << 27))
    told = {}
    for lock, ctx in (("auto", 64), ("on", 64), ("auto", 1 << 27), ("on", 1 << 27)):
        settings = {"ctx": ctx, "max_sessions": 64, "ram": 1 << 55, "chunk": 1}
        plan = headrace.plan(tmp_path / "c", **settings)
        assert (plan.total > plan.available) == (ctx > 64)
        try:
            with headrace.Model(tmp_path / "c", lock=lock, **settings) as model:
                told[lock, ctx] = model.info.trunk_locked
        except headrace.HeadraceMemoryError:
            pytest.skip("this system lets nobody lock anything")
    assert list(told.values()) == [True, True, False, True]


def test_b32_no_warning(headrace_bin, container, wanted):
    done = limited([headrace_bin, "run", container, *IDS], RLIMIT_MEMLOCK=0)
    assert done.returncode == 0 and done.stdout == wanted
    assert b"lock" not in done.stderr and b"warn" not in done.stderr.lower()
    shown = limited([headrace_bin, "info", container, "--lock", "off"], RLIMIT_MEMLOCK=0)
    assert b"not locked in memory" in shown.stdout


# ---- memory ----


@pytest.mark.parametrize("slots", [0, 1, TOP_K - 1, TOP_K, TOP_K * LAYERS - 1, EXPERTS * LAYERS])
def test_b28_cache_below_a_working_set(headrace, container, slots):
    """Every size of the cache gives the same logits and ends; the hit rate is the true one."""
    settings = {"ctx": 32, "threads": 1, "chunk": 4}
    with headrace.Model(container, **settings) as whole:
        want = whole.logits(list(range(1, 20)))
    plan = headrace.plan(container, **settings)
    ram = plan.floor
    while headrace.plan(container, ram=ram, **settings).cache_slots < slots:
        ram += max(512, plan.record_bytes // 8)
    with headrace.Model(container, ram=ram, **settings) as model:
        assert (model.logits(list(range(1, 20))) == want).all()
        for token in range(1, 8):
            model.logits([token], keep=True)
        stats = model.stats
        assert stats.leases == 0 and stats.reads == stats.misses > 0
        assert slots <= stats.cache_slots <= slots + 1, "the smallest ram that gives so many"
        if stats.cache_slots == 0:
            assert slots == 0 and stats.hits == 0
        if slots == EXPERTS * LAYERS:
            assert stats.misses <= slots


def test_b31_killed_is_not_finished(headrace_bin, model_dir):
    """SIGKILL in the middle: the text so far has arrived, the status says killed, nothing says done."""
    process = subprocess.Popen(
        [str(headrace_bin), "run", str(model_dir), "-p", "The captain stood", "-n", "0", "--ctx", "2048",
         "--temp", "1", "--seed", "1", "--threads", "1", "--isa", "reference"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, pipesize=SMALL_PIPE)  # it does not end unless all is read
    text = b""
    while len(text) < 20:
        text += os.read(process.stdout.fileno(), 64)
    process.send_signal(signal.SIGKILL)
    rest, messages = process.communicate(timeout=900)
    assert process.returncode == -signal.SIGKILL
    assert len(text + rest) >= 20 and b"finish" not in messages and b"tokens/s" not in messages


def test_b31_more_than_there_is_is_refused_at_the_start(headrace_bin, container, monkeypatch, tmp_path, capsys):
    """Before anything is read or written: the engine below its floor, the converter below its peak."""
    floor = json.loads(run([headrace_bin, "plan", container, "--json"]).stdout)["floor"]
    done = run([headrace_bin, "run", container, *IDS, "--ram", floor // 2])
    assert done.returncode == 4 and done.stdout == b"" and done.stderr.count(b"\n") == 1
    monkeypatch.setattr(cli, "_memory_available", lambda: 1 << 20)
    assert convert(write_checkpoint(tmp_path / "m"), tmp_path / "o", *IDS_ONLY) == 4
    assert "bytes of memory are needed, 1048576 are available" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


# ---- permissions ----


def test_b33_these_tests_can_fail(tmp_path):
    """Root writes into a read-only directory; the user that the tests below take cannot."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    open_to_all(closed)
    assert as_nobody(lambda: (closed / "x").write_text("x")).startswith("PermissionError")
    assert as_nobody(lambda: os.access(closed, os.R_OK) or os._exit(1)) == ""
    assert as_nobody(lambda: 1 / 0).startswith("ZeroDivisionError")


def test_b33_targets_that_cannot_be_written(tmp_path, monkeypatch):
    """Conversion into a directory of somebody else: the system's reason and the path."""
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)
    source = write_checkpoint(tmp_path / "m")
    assert convert(source, tmp_path / "o", *IDS_ONLY) == 0  # and every module is loaded now
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    open_to_all(closed)
    open_to_all(source)
    for name in source.iterdir():
        name.chmod(0o644)
    messages = tmp_path / "messages"
    messages.touch(mode=0o666)
    messages.chmod(0o666)

    def work() -> None:
        with messages.open("w") as file:
            sys.stderr = file
            assert convert(source, closed / "o", *IDS_ONLY) == 5

    assert as_nobody(work) == ""
    text = messages.read_text()
    assert str(closed / "o") in text and "Permission denied" in text and "Traceback" not in text


def test_b33_files_that_cannot_be_read(headrace_bin, container, tmp_path):
    path = Path(shutil.copytree(container, tmp_path / "c"))
    open_to_all(path)
    (path / "experts-0001.bin").chmod(0o000)

    def work() -> None:
        done = run([headrace_bin, "run", path, *IDS])
        assert done.returncode == 5 and b"experts-0001.bin: Permission denied" in done.stderr, done.stderr

    assert as_nobody(lambda: headrace_bin.stat()) == "", "the build is closed to other users"
    assert as_nobody(work) == ""


def test_b53_read_only_container(headrace_bin, container, wanted, tmp_path):
    """As a user who can only read it: the same tokens, no complaint, and nothing written anywhere."""
    path = Path(shutil.copytree(container, tmp_path / "c"))
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    open_to_all(path)
    before = listing(path)
    environment = {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home), "PATH": os.environ["PATH"]}

    def work() -> None:
        for command in (["run", path, *IDS], ["verify", path], ["plan", path], ["inspect", path]):
            done = run([headrace_bin, *command], cwd=home, env=environment)
            assert done.returncode == 0 and b"ermission" not in done.stderr, done.stderr
            assert command[0] != "run" or done.stdout == wanted

    assert as_nobody(work) == ""
    assert listing(path) == before and listing(home) == []
