"""headrace-simulate: what it predicts is what the engine does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headrace_tools.simulate import cli
from headrace_tools.simulate.trace import read_trace

ROOT = Path(__file__).resolve().parents[2]
PROMPT, DECODED = 32, 160


@pytest.fixture(scope="module")
def trace(headrace_bin, model_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    subprocess.run([str(headrace_bin), "trace", str(model_dir), "-f", str(ROOT / "models" / "val.txt"),
                    "--tokens", str(PROMPT + DECODED), "-o", str(path)], check=True, capture_output=True,
                   timeout=60)
    return path


@pytest.fixture(scope="module")
def ids(headrace, model_dir) -> list[int]:
    text = (ROOT / "models" / "val.txt").read_text()[:4000]
    with headrace.Model(model_dir, ram="64MiB") as model:
        return model.tokenize(text, special=True)[: PROMPT + DECODED]


@pytest.mark.parametrize("ram, policy", [
    ("11MiB", "auto"), ("12MiB", "auto"), ("13MiB", "auto"), ("16MiB", "auto"), ("20MiB", "auto"),
    ("13MiB", "lru"), ("13MiB", "lfu")])
def test_engine_and_simulator_agree(headrace, model_dir, trace, ids, ram: str, policy: str) -> None:
    recorded = read_trace(trace)
    with headrace.Model(model_dir, ram=ram, ctx=512, chunk=16, cache_policy=policy) as model:
        slots = model.plan().cache_slots
        model.logits(ids[:PROMPT])
        before = model.stats
        for token in ids[PROMPT:]:
            model.logits([token], keep=True)
        after = model.stats
    hits, misses = after.hits - before.hits, after.misses - before.misses
    found = headrace.simulate(recorded.routes, slots, experts=recorded.experts, policy=policy,
                              prefill=PROMPT, chunk=16, warm_up=PROMPT)
    assert found.hits + found.misses == hits + misses == DECODED * recorded.working_set
    assert found.hit_rate == pytest.approx(hits / (hits + misses), abs=0.015)


def simulate(capsys, *args: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(a) for a in args])
    except SystemExit as exit:
        code = int(exit.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_table(headrace, capsys, trace) -> None:
    code, out, _ = simulate(capsys, trace, "--cache", "0.5,2,8", "--policy", "auto,lru,belady",
                            "--bandwidth", "1GB")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["auto"] * 3 + ["lru"] * 3 + ["belady"] * 3
    assert [row[2] for row in rows[:3]] == ["16", "64", "256"]
    assert "192 tokens, 8 layers of 32 experts, 4 of a token (32 in all), 144 tokens counted" in out


def test_json(headrace, capsys, trace) -> None:
    code, out, _ = simulate(capsys, trace, "--cache", "1,8", "--json", "--bandwidth", "500MB")
    found = json.loads(out)
    assert code == 0 and found["tokens"] == PROMPT + DECODED
    one, whole = found["rows"][:2]
    assert one["slots"] == 32 and whole["slots"] == 256 == found["layers"] * found["experts"]
    assert one["bytes_per_token"] == pytest.approx(one["misses"] * 53248 / one["tokens"])
    assert one["tokens_per_second"] == pytest.approx(500e6 / one["bytes_per_token"])
    assert one["limit"] == "disk"
    belady = [row for row in found["rows"] if row["policy"] == "belady"]
    assert all(b["hit_rate"] >= row["hit_rate"] for b, row in zip(belady, found["rows"][:2]))


def test_a_model_and_its_memory(headrace, capsys, trace, model_dir) -> None:
    code, out, _ = simulate(capsys, trace, "--model", model_dir, "--ram", "12MiB,64MiB", "--policy",
                            "auto", "--seconds", "0.1", "--json")
    small, large = json.loads(out)["rows"]
    assert code == 0 and (small["ram"], large["ram"]) == ("12MiB", "64MiB")
    assert small["slots"] == headrace.plan(model_dir, ram="12MiB").cache_slots
    assert 0 < small["tokens_per_second"] < large["tokens_per_second"]


@pytest.mark.parametrize("args, code, text", [
    (["--ram", "1GiB"], 2, "--model"), (["--cache", "x"], 2, "working sets"),
    (["--policy", "fifo"], 2, "choose from"), (["--bandwidth", "fast"], 2, "bytes a second"),
    (["--warm-up", "1"], 2, "share")])
def test_usage(headrace, capsys, trace, args: list[str], code: int, text: str) -> None:
    found, out, err = simulate(capsys, trace, *args)
    assert found == code and text in err and out == ""


def test_faults(headrace, capsys, tmp_path, trace) -> None:
    assert simulate(capsys, tmp_path / "absent")[0] == 5
    (tmp_path / "bad").write_text("nothing")
    code, _, err = simulate(capsys, tmp_path / "bad")
    assert code == 3 and "line 1" in err
    code, _, err = simulate(capsys, trace, "--model", tmp_path / "absent")
    assert code == 5 and "absent" in err
