"""Interrupted conversions: killed repeatedly, a full disk, other options, other sources.

Every single call is struck in test_convert_injection.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import IDS_ONLY, run, tree
from headrace_tools.convert import cli, output, writer
from tiny_checkpoint import random_weights, text_config, write_checkpoint

CALLS = ("write", "pwrite", "fsync", "replace", "unlink", "ftruncate", "open")


@pytest.fixture(autouse=True)
def without_engine(monkeypatch):
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "m", shards=2)


@pytest.fixture(scope="module")
def clean(source, tmp_path_factory):
    """The tree of an uninterrupted conversion."""
    saved, cli._engine_verify = cli._engine_verify, lambda: None
    try:
        target = tmp_path_factory.mktemp("clean") / "o"
        assert run(source, target, *IDS_ONLY) == 0
    finally:
        cli._engine_verify = saved
    return tree(target)


class Nth:
    """Counts the calls of the os functions a conversion makes; does `act` at the nth."""

    def __init__(self, monkeypatch, nth: int, act, names=CALLS) -> None:
        self.count, self.nth, self.act = 0, nth, act
        for name in names:
            real = getattr(os, name)
            monkeypatch.setattr(os, name, self.wrap(real))

    def wrap(self, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.nth:
                self.act()
            return real(*args, **kwargs)

        return call


def in_child(source: Path, target: Path, nth: int, act) -> int:
    """Converts in a forked child; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            patch = pytest.MonkeyPatch()
            Nth(patch, nth, act)
            code = run(source, target, *IDS_ONLY)
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def looks_whole(path: Path) -> bool:
    return (path / "manifest.sha256").exists() and not (path / "conversion.log").exists()


def test_killed_again_and_again(source, clean, tmp_path):
    target = tmp_path / "o"
    for nth in range(25, 60, 5):
        in_child(source, target, nth, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert run(source, target, *IDS_ONLY) == 0
    assert tree(target) == clean


def stop_midway(source: Path, target: Path) -> None:
    """Leaves an unfinished conversion whose trunk and first bank are done."""
    patch = pytest.MonkeyPatch()

    def interrupt(name: str) -> None:
        if name == "experts-0000.bin":
            raise KeyboardInterrupt

    real = writer.convert
    patch.setattr(cli, "convert", lambda *a, **k: real(*a, **{**k, "file_done": interrupt}))
    try:
        assert run(source, target, *IDS_ONLY) == 130
    finally:
        patch.undo()
    assert (target / "conversion.log").exists() and not (target / "manifest.json").exists()


def test_resume_keeps_what_is_done(source, clean, tmp_path, capsys):
    target = tmp_path / "o"
    stop_midway(source, target)
    done = {name: (target / name).stat().st_ino for name in ("trunk.bin", "experts-0000.bin")}
    capsys.readouterr()
    assert run(source, target, "--json", *IDS_ONLY) == 0
    assert json.loads(capsys.readouterr().out)["resumed"] is True
    assert {name: (target / name).stat().st_ino for name in done} == done
    assert tree(target) == clean


def test_a_file_of_another_size_is_not_trusted(source, clean, tmp_path):
    target = tmp_path / "o"
    stop_midway(source, target)
    os.truncate(target / "trunk.bin", 4096)
    (target / "experts-0000.bin").unlink()
    (target / "experts-0000.bin").symlink_to("trunk.bin")
    (target / "experts-0001.bin").write_bytes(b"not in the journal")
    (target / "experts-0042.bin.partial").write_bytes(b"left over")
    assert run(source, target, *IDS_ONLY) == 0
    assert tree(target) == clean


def test_damage_to_a_finished_file_is_found_at_the_end(source, tmp_path, capsys):
    target = tmp_path / "o"
    stop_midway(source, target)
    with open(target / "experts-0000.bin", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff")
    assert run(source, target, *IDS_ONLY) == 5
    assert "experts-0000.bin: reads back differently" in capsys.readouterr().err
    assert not looks_whole(target)


def test_torn_and_damaged_journals(source, clean, tmp_path, capsys):
    for tail in (b'{"kind": "file", "name": "experts-0001.bin", "by', b"\x00" * 40, b"[1]\n"):
        target = tmp_path / f"o{len(tail)}"
        stop_midway(source, target)
        with open(target / "conversion.log", "ab") as file:
            file.write(tail)
        assert run(source, target, *IDS_ONLY) == 0
        assert tree(target) == clean
    target = tmp_path / "first"
    stop_midway(source, target)
    raw = (target / "conversion.log").read_bytes()
    (target / "conversion.log").write_bytes(b"rubbish\n" + raw)
    assert run(source, target, *IDS_ONLY) == 2
    assert "is damaged" in capsys.readouterr().err
    assert run(source, target, "--overwrite", *IDS_ONLY) == 0
    assert tree(target) == clean


def test_other_options_are_refused(source, clean, tmp_path, capsys):
    """B06: the differing option is named, the files stay as they were."""
    target = tmp_path / "o"
    stop_midway(source, target)
    before = tree(target)
    cases = {
        ("--experts", "bf16"): "--experts was auto, now bf16",
        ("--trunk", "bf16"): "--trunk was int8, now bf16",
        ("--allow-nonfinite",): "--allow-nonfinite was not given, now given",
    }
    for options, words in cases.items():
        capsys.readouterr()
        assert run(source, target, *options, *IDS_ONLY) == 2
        assert words in capsys.readouterr().err
        assert tree(target) == before
    assert run(source, target, *IDS_ONLY) == 0
    assert tree(target) == clean


def test_another_source_is_refused(source, tmp_path, capsys):
    target = tmp_path / "o"
    stop_midway(source, target)
    weights = random_weights(text_config())
    other = write_checkpoint(tmp_path / "other", weights=weights, shards=3)
    assert run(other, target, *IDS_ONLY) == 2
    assert "the source changed" in capsys.readouterr().err
    changed = write_checkpoint(tmp_path / "m", text_config(rms_norm_eps=1e-5), shards=2)
    assert run(changed, target, *IDS_ONLY) == 2
    assert "config.json is another file than before" in capsys.readouterr().err


def test_two_at_a_time_are_refused(source, tmp_path, capsys):
    target = tmp_path / "o"
    header = {"converter": "x", "options": {}, "source": {}}
    with output.OutputDirectory(target, header, 0):
        assert run(source, target, *IDS_ONLY) == 2
    assert "another conversion is writing here" in capsys.readouterr().err


# ---- disk full ----


@pytest.mark.parametrize("code", [errno.EIO, errno.EFBIG, errno.EROFS])
def test_other_write_errors(code, source, clean, tmp_path, capsys):
    target = tmp_path / "o"
    patch = pytest.MonkeyPatch()

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    Nth(patch, 4, fail, ("write",))
    try:
        assert run(source, target, *IDS_ONLY) == 5
    finally:
        patch.undo()
    assert os.strerror(code) in capsys.readouterr().err
    assert not list(target.glob("*.partial"))
    assert run(source, target, *IDS_ONLY) == 0
    assert tree(target) == clean


@pytest.fixture
def small_disk(tmp_path):
    """Callable: options -> a mounted tmpfs; skipped where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_really_full_disk(source, clean, small_disk, monkeypatch, capsys):
    """B08 on an 512 KiB file system: said up front; and when it fills up all the same."""
    disk = small_disk("size=512k")
    target = disk / "o"
    assert run(source, target, *IDS_ONLY) == 5
    message = capsys.readouterr().err
    assert "not enough disk space" in message and "are needed" in message
    monkeypatch.setattr(writer, "free_bytes", lambda path: 1 << 60)
    assert run(source, target, *IDS_ONLY) == 5
    message = capsys.readouterr().err
    assert "disk full" in message and "bytes are free" in message
    assert not list(target.glob("*.partial")) and not looks_whole(target)
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    assert run(source, target, *IDS_ONLY) == 0
    assert tree(target) == clean


def test_read_only_disk(source, small_disk, capsys):
    """B33: a read-only mount, which root cannot write either."""
    disk = small_disk("size=1m,ro")
    assert run(source, disk / "o", *IDS_ONLY) == 5
    message = capsys.readouterr().err
    assert str(disk / "o") in message and os.strerror(errno.EROFS) in message


def test_interrupt_removes_the_partial_file(source, clean, tmp_path, capsys):
    target = tmp_path / "o"
    patch = pytest.MonkeyPatch()

    def interrupt() -> None:
        raise KeyboardInterrupt

    Nth(patch, 8, interrupt, ("write",))
    try:
        assert run(source, target, *IDS_ONLY) == 130
    finally:
        patch.undo()
    assert "again to continue" in capsys.readouterr().err
    assert not list(target.glob("*.partial"))
    assert np.all([name in clean for name in tree(target) if name.endswith(".bin")])
    assert run(source, target, *IDS_ONLY) == 0
    assert tree(target) == clean
