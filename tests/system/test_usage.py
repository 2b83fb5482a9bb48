"""Usage files through the public interface: hr_model_params.usage, hr_model_save_usage, --usage."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from containers import make_container

IDS = ["--ids", "1 2 3 4 5 6 7 8", "-n", "4", "--ctx", "32"]
PROMPT = list(range(1, 25))


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("usage") / "c"
    make_container(path, layers=3, experts=8, top_k=3, tokenizer=None)
    return path


def tokens(file: Path) -> int:
    """That the first layer has counted."""
    return struct.unpack_from("<I", file.read_bytes(), 64)[0]


def used_most(file: Path, experts: int) -> list[int]:
    """Of the first layer."""
    uses = struct.unpack_from(f"<{experts}I", file.read_bytes(), 68)
    return sorted(range(experts), key=lambda e: -uses[e])


def test_same_bits_and_less_to_read(model_dir, headrace, tmp_path):
    """A small cache that knows what was used before: no bit changes, bytes do."""
    settings = {"ctx": 128, "chunk": 8, "threads": 2, "io_threads": 2, "read_ahead": "off"}
    plan = headrace.plan(model_dir, **settings)
    ram = plan.floor + 60 * plan.record_bytes
    with headrace.Model(model_dir, ram=ram, **settings) as model:
        ids = model.tokenize("It was a fine morning in the spring, when Elizabeth was told that the "
                             "carriage stood before the door, and that her father waited for her.")
        cold = [model.logits(ids[:1]).tobytes()]
        cold += [model.logits([i], keep=True).tobytes() for i in ids[1:]]
        without = model.stats
        model.save_usage(tmp_path / "usage")
        assert model.stats.memory_used == without.memory_used
    with headrace.Model(model_dir, ram=ram, usage=tmp_path / "usage", **settings) as model:
        warm = [model.logits(ids[:1]).tobytes()]
        warm += [model.logits([i], keep=True).tobytes() for i in ids[1:]]
        assert warm == cold and model.stats.misses < without.misses
        assert model.stats.hits + model.stats.misses == without.hits + without.misses


def test_runs_converge(container, headrace, tmp_path):
    """Counts go on from run to run, and what is used most stays the same."""
    file, before = tmp_path / "usage", None
    for turn in range(1, 4):
        with headrace.Model(container, ctx=64, usage=before) as model:
            model.logits(PROMPT)
            model.save_usage(file)
            model.save_usage(file)
        assert tokens(file) == turn * len(PROMPT), "saving twice counts once"
        most = used_most(file, 8) if turn == 1 else most
        assert used_most(file, 8) == most
        before = file


def test_routes_are_what_is_counted(container, headrace, tmp_path):
    """Chunks of any size count the same: one use for each token and expert."""
    images = set()
    for chunk in (1, 5, 64):
        with headrace.Model(container, ctx=64, chunk=chunk, threads=1) as model:
            routes = model.routes(PROMPT)
            model.save_usage(tmp_path / "usage")
        images.add((tmp_path / "usage").read_bytes())
    ids = routes[0] if isinstance(routes, tuple) else routes
    words = struct.unpack_from("<9I", next(iter(images)), 64)
    assert len(images) == 1 and words[0] == len(PROMPT)
    assert list(words[1:]) == [int((ids[0] == e).sum()) for e in range(8)]


def test_refused_before_anything_is_loaded(container, headrace, tmp_path):
    other = tmp_path / "other"
    make_container(other, layers=3, experts=8, top_k=3, seed=9, tokenizer=None)
    with headrace.Model(other, ctx=32) as model:
        model.save_usage(tmp_path / "usage")
        theirs = model.info.container_sha256
    with headrace.Model(container, ctx=32) as model:
        ours = model.info.container_sha256
        with pytest.raises(headrace.HeadraceIOError, match="cannot create"):
            model.save_usage(tmp_path / "no" / "usage")
    with pytest.raises(headrace.FormatError) as caught:
        headrace.Model(container, ctx=32, usage=tmp_path / "usage")
    assert theirs in str(caught.value) and ours in str(caught.value) and theirs != ours
    with pytest.raises(headrace.HeadraceIOError, match="none: cannot open"):
        headrace.Model(container, ctx=32, usage=tmp_path / "none")
    # the trunk is not read first
    broken = Path(shutil.copytree(container, tmp_path / "broken"))
    trunk = bytearray((broken / "trunk.bin").read_bytes())
    trunk[-1] ^= 1
    (broken / "trunk.bin").write_bytes(trunk)
    with pytest.raises(headrace.FormatError, match="another container"):
        headrace.Model(broken, ctx=32, usage=tmp_path / "usage")


def test_writers_of_one_file_take_turns(container, headrace, tmp_path):
    """What another one has begun stays whole, and appears before what waited for it."""
    file, partial = tmp_path / "usage", tmp_path / "usage.partial"
    with headrace.Model(container, ctx=64) as model:
        model.logits(PROMPT)
        saver = threading.Thread(target=model.save_usage, args=(file,))
        with partial.open("wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            other.write(b"theirs" * 1000)
            other.flush()
            saver.start()
            saver.join(0.3)
            assert saver.is_alive() and partial.read_bytes() == b"theirs" * 1000
            partial.rename(file)
        saver.join(600)
    assert tokens(file) == len(PROMPT) and not partial.exists()


def test_what_a_killed_writer_left_is_no_hindrance(container, headrace, tmp_path):
    file, partial = tmp_path / "usage", tmp_path / "usage.partial"
    partial.write_bytes(b"half" * 1000)
    with headrace.Model(container, ctx=64) as model:
        model.logits(PROMPT)
        model.save_usage(file)
        assert not partial.exists()
        partial.mkdir()
        with pytest.raises(headrace.HeadraceIOError, match="usage.partial: cannot create"):
            model.save_usage(file)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(headrace.HeadraceIOError, match="pipe: not a regular file"):
            model.save_usage(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo(), "devices and pipes are not replaced"
    headrace.Model(container, ctx=64, usage=file).close()


# ---- the command ----


def command(*words: object, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stderr
    return done


def test_run_score_and_trace_keep_the_file(headrace_bin, container, tmp_path):
    file = tmp_path / "usage"
    (tmp_path / "ids").write_text(" ".join(map(str, PROMPT)))
    plain = command(headrace_bin, "run", container, *IDS)
    first = command(headrace_bin, "run", container, *IDS, "--usage", file)
    seen = tokens(file)
    assert seen >= 8 + 3
    second = command(headrace_bin, "run", container, *IDS, "--usage", file, "--json")
    assert tokens(file) == 2 * seen and first.stdout == plain.stdout
    assert json.loads(second.stdout)["ids"] == [int(i) for i in plain.stdout.split()]
    command(headrace_bin, "score", container, "-f", tmp_path / "ids", "--ids", "--usage", file)
    assert tokens(file) == 2 * seen + len(PROMPT) - 1
    command(headrace_bin, "trace", container, "--ids", tmp_path / "ids", "--usage", file)
    assert tokens(file) == 2 * seen + 2 * len(PROMPT) - 1
    before = file.read_bytes()
    command(headrace_bin, "bench", container, "--prefill", 4, "--decode", 2, "--repeats", 1, "--usage", file)
    command(headrace_bin, "info", container, "--usage", file)
    assert file.read_bytes() == before, "only read"
    missing = command(headrace_bin, "bench", container, "--usage", tmp_path / "none", code=5)
    assert "none: cannot open" in missing.stderr


def test_what_cannot_be_read_or_written_is_said(headrace_bin, container, tmp_path):
    file = tmp_path / "usage"
    file.write_bytes(b"notes of mine\n")
    done = command(headrace_bin, "run", container, *IDS, "--usage", file, code=3)
    assert f"{file}: not a file of use counts" in done.stderr
    assert file.read_bytes() == b"notes of mine\n" and done.stdout == ""
    plain = command(headrace_bin, "run", container, *IDS)
    done = command(headrace_bin, "run", container, *IDS, "--usage", tmp_path / "no" / "usage", code=5)
    assert done.stdout == plain.stdout, "the text is not lost"
    assert "usage.partial: cannot create" in done.stderr
