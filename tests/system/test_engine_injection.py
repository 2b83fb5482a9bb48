"""Every file call and every allocation of the engine fails in turn, until no call is left to strike.

The points and what each checks are in tests/faults/engine_loop.c; calls that allocate nothing in steady.c.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from containers import make_container

pytestmark = pytest.mark.plain_build  # the program replaces what run-time checkers replace

# Name -> the fewest points it must find: a campaign that strikes nothing shows nothing.
MEMORY = {"one allocation fails": 40, "no allocation from then on": 40,
          "plan, verify: one allocation fails": 14, "quantise: one allocation fails": 10}
READS = {"EIO once": 80, "EIO once, reads": 60, "EIO for good": 80, "device gone": 80,
         "short reads": 2, "nothing read, once": 60, "nothing read, ever": 60, "EINTR storm": 9,
         "reads overtake each other": 2, "plan, verify: EIO once": 50,
         "plan, verify: device gone": 50, "plan, verify: short reads": 2}
MIRROR = {"mirror: EIO once": 10, "mirror: gone": 2}
SESSIONS = {"save: EIO once": 10, "save: EIO for good": 10, "save: disk full": 10,
            "save: short writes": 2, "save: EINTR storm": 2, "save: kill": 10,
            "save: torn write, then kill": 5, "save: power cut": 10, "load: EIO once": 15,
            "load: EIO once, reads": 15, "load: EIO for good": 15, "load: short reads": 2,
            "load: nothing read, once": 15, "load: nothing read, ever": 15, "load: EINTR storm": 2}
USAGE = {"usage: EIO once": 12, "usage: EIO for good": 12, "usage: disk full": 8, "usage: short writes": 2,
         "usage: EINTR storm": 2, "usage: kill": 12, "usage: torn write, then kill": 6, "usage: power cut": 12,
         "open with usage: EIO once": 10, "open with usage: EIO for good": 10,
         "open with usage: short reads": 2, "open with usage: nothing read, ever": 10}


@pytest.fixture(scope="module")
def engine_loop(build_dir):
    """Callable: container, campaigns with their fewest points; fails on any problem."""
    program = build_dir / "tests" / "faults" / "engine_loop"
    if not program.exists():
        pytest.skip("no fault shim: not Linux with glibc")
    # Sessions are saved a thousand times: where the directory is in memory, fsync costs nothing.
    shm = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="headrace-", dir=shm if shm.is_dir() else None))

    def run(container: Path, campaigns: dict[str, int]) -> None:
        done = subprocess.run([str(program), str(container), str(work), *campaigns],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results = {r["name"]: r for r in map(json.loads, done.stdout.splitlines())}
        assert set(results) == set(campaigns)
        for name, result in results.items():
            assert result["count"] == 0, f"{container.name}: {name}: {result['problems']}"
            assert result["points"] >= campaigns[name], result

    run.work = work
    yield run
    shutil.rmtree(work)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model"
    make_container(path, layers=2, experts=6, hidden=64, inner=32, codec="int8", tokenizer=None)
    return path


def test_every_allocation(engine_loop, small):
    """HR_ERR_MEMORY with a text, nothing leaked, and the model or the next one works."""
    engine_loop(small, MEMORY)


def test_every_read(engine_loop, small):
    """B20, B24: the right tokens, or an error that names file and cause."""
    engine_loop(small, READS)


def test_every_read_of_a_second_drive(engine_loop, small):
    """Nobody notices that it is gone, for the container has the same records."""
    mirror = engine_loop.work / "mirror"
    mirror.mkdir()
    for bank in small.glob("experts-*.bin"):
        shutil.copy(bank, mirror)
    engine_loop(small, MIRROR)


def test_every_call_of_a_session_file(engine_loop, small):
    """B45: the file is the old state or the new one, and so is the session."""
    engine_loop(small, SESSIONS)


def test_every_call_of_a_usage_file(engine_loop, small):
    """The file holds the old counts or the new ones; a model opens with all of them or says why not."""
    engine_loop(small, USAGE)


@pytest.mark.parametrize("fixture", ["qwen4_exp", "deepseek_v3"])
def test_every_allocation_of_other_parts(engine_loop, fixture_models, fixture):
    """Row tables, sparse selection, latent attention."""
    engine_loop(fixture_models(fixture), {"one allocation fails": 40})


def test_every_allocation_with_a_tokenizer(engine_loop, model_dir):
    engine_loop(model_dir, {"one allocation fails": 40})


def test_slow_drive(engine_loop, tmp_path):
    """B24: with 200 ms for a read, prefill is cancelled within a few of them, not within a layer's
    sixty-four; the reads can be counted meanwhile."""
    make_container(tmp_path / "model", layers=2, experts=64, hidden=64, inner=32, codec="int8",
                   top_k=16, tokenizer=None)
    engine_loop(tmp_path / "model", {"slow drive": 4})


@pytest.mark.parametrize("container", ["model_dir", "qwen4_exp", "deepseek_v3", "qwen3_next"])
def test_nothing_is_allocated_once_a_session_is_there(build_dir, request, fixture_models, tmp_path,
                                                      container):
    """No allocation, mapping or thread on any thread: prefill, decode, sampling, text, routes, cancelling."""
    program = build_dir / "tests" / "faults" / "steady"
    if not program.exists():
        pytest.skip("no fault shim: not Linux with glibc")
    path = request.getfixturevalue(container) if container == "model_dir" else fixture_models(container)
    done = subprocess.run([str(program), str(path), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *settings, exceptions = map(json.loads, done.stdout.splitlines())
    assert len(settings) == 3 and exceptions["name"] == "exceptions"
    for result in (*settings, exceptions):
        assert result["count"] == 0, f"{result['name']}: {result['problems']}"
    assert all(result["points"] > 50 for result in settings), settings
    assert exceptions["faults"] > 20, "the counter sees what is allocated"
