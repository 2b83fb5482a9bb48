"""Experts on several drives, through the public interfaces: the same bits, and who read what."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def text(headrace, model_dir) -> tuple[list[int], bytes]:
    """Token ids and their logits, from the container alone."""
    with headrace.Model(model_dir, ctx=128) as model:
        ids = model.tokenize("The captain stood upon the deck and looked at the sea.")
        assert model.info.drives == 1 and model.drives[0].reads == model.stats.reads
        return ids, model.logits(ids).tobytes()


def banks(folder: Path) -> list[Path]:
    return sorted(folder.glob("experts-*.bin"))


def test_a_mirror_with_damaged_copies(headrace, model_dir, tmp_path, text) -> None:
    ids, expected = text
    for bank in banks(model_dir):
        shutil.copy(bank, tmp_path)
    for bank in banks(tmp_path):
        damaged = bytearray(bank.read_bytes())
        for at in range(1000, len(damaged), 20000):
            damaged[at] ^= 4
        bank.write_bytes(damaged)
    floor = headrace.plan(model_dir, ctx=128, drives=[tmp_path]).floor
    assert floor > headrace.plan(model_dir, ctx=128).floor, "the second drive has threads too"
    with headrace.Model(model_dir, ctx=128, ram=floor, drives=[tmp_path], verify="always") as model:
        for _ in range(3):
            assert model.logits(ids).tobytes() == expected
        own, mirror = model.drives
        stats = model.stats
        assert own.reads + mirror.reads == stats.reads
        assert stats.read_fallbacks == mirror.failures == mirror.reads > 0 == own.failures
        assert stats.memory_peak <= floor
        assert Path(mirror.path) == tmp_path and mirror.banks == len(banks(model_dir))


def test_a_split_container(headrace, headrace_bin, model_dir, tmp_path, text) -> None:
    ids, expected = text
    container, rest = tmp_path / "c", tmp_path / "rest"
    shutil.copytree(model_dir, container)
    rest.mkdir()
    for bank in banks(container)[::2]:
        shutil.move(bank, rest)
    with pytest.raises(headrace.FormatError):
        headrace.Model(container, ctx=128)
    with headrace.Model(container, ctx=128, drives=[rest]) as model:
        assert model.logits(ids).tobytes() == expected
        assert [d.banks for d in model.drives] == [len(banks(container)), len(banks(rest))]
        assert model.plan().cache_slots == model.stats.cache_slots
    done = subprocess.run([headrace_bin, "run", container, "--drive", rest, "-p", "The captain",
                           "-n", "4", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drives = json.loads(done.stdout)["drives"]
    assert [d["banks"] for d in drives] == [len(banks(container)), len(banks(rest))]
    assert all(d["reads"] > 0 for d in drives)
    with pytest.raises(TypeError):
        headrace.Model(container, drives=str(rest))


def test_every_copy_is_verified(headrace, headrace_bin, model_dir, tmp_path) -> None:
    """A split and a mirror: what one drive lacks is no fault, what any copy hurts is, with its place."""
    container, other, mirror = tmp_path / "c", tmp_path / "other", tmp_path / "mirror"
    shutil.copytree(model_dir, container)
    shutil.copytree(model_dir, mirror)
    other.mkdir()
    (mirror / "manifest.json").write_text("not looked at")
    moved = banks(container)[1]
    shutil.move(moved, other)

    def verify(*drives: Path) -> subprocess.CompletedProcess[str]:
        options = [word for drive in drives for word in ("--drive", str(drive))]
        return subprocess.run([headrace_bin, "verify", container, *options], capture_output=True, text=True)

    assert verify().returncode == 3
    assert any(moved.name in fault and "missing" in fault for fault in headrace.verify(container))
    assert verify(other).returncode == 0
    seen = []
    assert headrace.verify(container, lambda done, total: seen.append((done, total)),
                           drives=[other, mirror]) == []
    copies = sum(bank.stat().st_size for bank in banks(mirror))
    assert seen[-1][0] == seen[-1][1] == sum(f.stat().st_size for f in model_dir.iterdir()) + copies

    hurt = mirror / moved.name
    data = bytearray(hurt.read_bytes())
    data[5000] ^= 1
    hurt.write_bytes(data)
    found = verify(other, mirror)
    assert found.returncode == 3
    assert f"{mirror}/{moved.name}: layer 1 expert 0" in found.stdout
    assert f"{mirror}/{moved.name}: its SHA-256" in found.stdout
    assert all(fault.startswith(f"{mirror}/") for fault in headrace.verify(container, drives=[other, mirror]))
    (other / moved.name).unlink()
    hurt.unlink()
    found = verify(other, mirror)
    assert found.returncode == 3 and f"{moved.name}: missing" in found.stdout
    assert verify(tmp_path / "absent").returncode == 5
    found = verify(other)
    assert found.returncode == 3 and f"{other}/experts-*.bin: none lies there" in found.stdout
    assert subprocess.run([headrace_bin, "verify", container, "--drive"], capture_output=True).returncode == 2


@pytest.mark.parametrize("drives", [0, 1, 3])
def test_plans_of_containers_to_be_count_drives(headrace, model_dir, tmp_path, drives) -> None:
    """As of the container itself: buffers, threads, cache."""
    more = [tmp_path / f"d{i}" for i in range(drives)]
    manifest = (model_dir / "manifest.json").read_bytes()
    to_be = headrace.plan_manifest(manifest, ctx=128, ram="64MiB", drives=more)
    for drive in more:
        drive.mkdir()
    there = headrace.plan(model_dir, ctx=128, ram="64MiB", drives=more)
    assert (to_be.io, to_be.cache_slots) == (there.io, there.cache_slots)
    assert abs(to_be.floor - there.floor) < 1 << 16  # the length of the container's path
    if drives:
        assert to_be.io > headrace.plan_manifest(manifest, ctx=128, ram="64MiB").io
    with pytest.raises(headrace.UsageError, match="at most 7"):
        headrace.plan_manifest(manifest, drives=[tmp_path] * 8)
