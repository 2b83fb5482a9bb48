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
