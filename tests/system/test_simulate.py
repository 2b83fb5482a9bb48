"""headrace-simulate: what it predicts is what the engine does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from case_helpers import slow_drive
from containers import make_container
from headrace_tools.simulate import cli
from headrace_tools.simulate.trace import read_trace

ROOT = Path(__file__).resolve().parents[2]
PROMPT, DECODED = 32, 160


@pytest.fixture(scope="module")
def trace(headrace_bin, model_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    subprocess.run([str(headrace_bin), "trace", str(model_dir), "-f", str(ROOT / "models" / "val.txt"),
                    "--tokens", str(PROMPT + DECODED), "--read-ahead", "4", "-o", str(path)], check=True, capture_output=True,
                   timeout=900)
    return path


@pytest.fixture(scope="module")
def ids(headrace, model_dir) -> list[int]:
    text = (ROOT / "models" / "val.txt").read_text()[:4000]
    with headrace.Model(model_dir, ram="64MiB") as model:
        return model.tokenize(text, special=True)[: PROMPT + DECODED]


def decode(headrace, model_dir, ids: list[int], **settings) -> tuple[int, object, object]:
    """The engine on the prompt and behind it: the cache's slots, its statistics before and after decoding."""
    with headrace.Model(model_dir, ctx=512, chunk=16, threads=2, **settings) as model:
        slots = model.plan().cache_slots
        model.logits(ids[:PROMPT])
        before = model.stats
        for token in ids[PROMPT:]:
            model.logits([token], keep=True)
        after = model.stats
        return slots, before, after


@pytest.mark.parametrize("ram, policy", [
    ("11MiB", "auto"), ("12MiB", "auto"), ("13MiB", "auto"), ("16MiB", "auto"), ("20MiB", "auto"),
    ("13MiB", "lru"), ("13MiB", "lfu")])
def test_engine_and_simulator_agree(headrace, model_dir, trace, ids, ram: str, policy: str) -> None:
    recorded = read_trace(trace)
    slots, before, after = decode(headrace, model_dir, ids, ram=ram, cache_policy=policy)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    found = headrace.simulate(recorded.routes, slots, experts=recorded.experts, policy=policy,
                              prefill=PROMPT, chunk=16, warm_up=PROMPT)
    assert found.hits + found.misses == hits + misses == DECODED * recorded.working_set
    assert found.hit_rate == pytest.approx(hits / (hits + misses), abs=0.015)


@pytest.mark.parametrize("ram, width", [("11MiB", 1), ("12MiB", 2), ("12MiB", 4)])
def test_what_is_read_ahead_agrees(headrace, model_dir, trace, ids, ram: str, width: int) -> None:
    recorded = read_trace(trace)
    slots, before, after = decode(headrace, model_dir, ids, ram=ram, read_ahead=width)
    found = headrace.simulate(recorded.routes, slots, experts=recorded.experts, prefill=PROMPT, chunk=16,
                              warm_up=PROMPT, guesses=recorded.guesses, read_ahead=width)
    points = 0.015 * DECODED * recorded.working_set

    def did(name: str) -> int:
        return getattr(after, name) - getattr(before, name)

    assert found.hits == pytest.approx(did("hits"), abs=points)
    assert 0 < found.ahead_issued == pytest.approx(did("read_ahead_issued"), abs=points)
    assert 0 < found.ahead_used == pytest.approx(did("read_ahead_used"), abs=points)
    # What the drive had not begun the engine took back; the simulator reads it all.
    vain = did("read_ahead_wasted") + did("read_ahead_cancelled")
    assert 0 < found.ahead_wasted == pytest.approx(vain, abs=points)


@pytest.mark.plain_build
@pytest.mark.parametrize("width", [0, 4])
def test_speed_on_a_slow_drive(headrace, headrace_bin, build_dir, model_dir, trace, ids, tmp_path,
                               width: int) -> None:
    """A drive of 12 MB/s that reads one record after the other, in a time that other programs do not
    change: 25 % around what the engine does."""
    rate, prompt, decoded = 12e6, 8, 12
    (tmp_path / "ids").write_text(" ".join(map(str, ids)))
    done = subprocess.run(
        [str(headrace_bin), "bench", str(model_dir), "--ram", "12MiB", "--threads", "2", "--ctx",
         "512", "--chunk", "16", "--ids", str(tmp_path / "ids"), "--prefill", str(prompt), "--decode",
         str(decoded), "--repeats", "1", "--cold", "--read-ahead", str(width or "off"), "--json"],
        env=slow_drive(build_dir, rate), check=True, capture_output=True, timeout=900)
    decode = json.loads(done.stdout)["decode"]
    arithmetic = (decode["seconds_compute"] + decode["seconds_other"]) / decoded
    recorded = read_trace(trace)
    plan = headrace.plan(model_dir, ram="12MiB", ctx=512, chunk=16, threads=2, read_ahead=width or "off")
    layers, n = recorded.routes.shape[1], prompt + decoded
    found = headrace.simulate(
        recorded.routes[:n], plan.cache_slots, experts=recorded.experts, prefill=prompt, chunk=16,
        warm_up=prompt, guesses=recorded.guesses[:n], read_ahead=width,
        pace=headrace.Pace(read=plan.record_bytes / rate, layer=arithmetic / layers, in_flight=2))
    assert found.alone == decoded
    assert decode["tokens_per_second"] == pytest.approx(found.alone / found.seconds, rel=0.25)


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
    plan = headrace.plan(model_dir)  # its floor has the threads of this machine
    rams = [str(plan.floor + records * plan.record_bytes) for records in (20, 300)]
    code, out, _ = simulate(capsys, trace, "--model", model_dir, "--ram", ",".join(rams), "--policy",
                            "auto", "--seconds", "0.1", "--json")
    small, large = json.loads(out)["rows"]
    assert code == 0 and [small["ram"], large["ram"]] == rams
    assert small["slots"] == headrace.plan(model_dir, ram=rams[0]).cache_slots
    assert 0 < small["tokens_per_second"] < large["tokens_per_second"]


def test_read_ahead(headrace, capsys, trace, model_dir) -> None:
    args = (trace, "--read-ahead", "0,1,4,8", "--policy", "auto,belady")
    code, out, _ = simulate(capsys, *args, "--cache", "1", "--bandwidth", "1GB", "--compute", "5",
                            "--json")
    none, one, four, eight, belady = json.loads(out)["rows"]
    assert code == 0 and belady["read_ahead"] is None
    assert eight | {"read_ahead": 4} == four, "a token uses no more"
    assert none["ahead_issued"] == 0 == none["wasted_bytes_per_token"]
    assert none["misses"] == one["misses"] == four["misses"]
    assert none["misses_left_per_token"] > one["misses_left_per_token"] > four["misses_left_per_token"]
    assert 0 <= none["hidden"] < one["hidden"] < four["hidden"] < 1
    assert none["tokens_per_second"] < one["tokens_per_second"] < four["tokens_per_second"] < 200
    for row in (none, one, four):
        reads = row["misses"] + row["ahead_wasted"]
        assert row["bytes_per_token"] == pytest.approx(53248 * reads / row["tokens"])
        assert row["ahead_issued"] == sum(row[f"ahead_{k}"] for k in ("used", "wasted", "cancelled"))
    # A drive that is the limit has no time for what is in vain.
    _, out, _ = simulate(capsys, *args, "--cache", "1", "--bandwidth", "60MB", "--compute", "5", "--json")
    slow = json.loads(out)["rows"]
    assert slow[2]["limit"] == "disk" and slow[2]["tokens_per_second"] < slow[1]["tokens_per_second"]
    plan = headrace.plan(model_dir, read_ahead=8)
    ram = str(plan.floor + 8 * plan.record_bytes)
    code, out, _ = simulate(capsys, *args, "--ram", ram, "--model", model_dir, "--seconds", "0.1")
    rows = [line.split() for line in out.splitlines()[2:6]]
    assert code == 0 and "misses left" in out and [row[8] for row in rows] == ["0", "1", "4", "8"]
    slots = [headrace.plan(model_dir, ram=ram, read_ahead=w or "off").cache_slots for w in (0, 1, 4, 8)]
    assert [int(row[3]) for row in rows] == slots and slots[0] > slots[1] > slots[2]
    assert simulate(capsys, trace, "--read-ahead", "3", "--json", "--cache", "1")[0] == 0


def test_a_trace_without_guesses_cannot_be_read_ahead(capsys, trace, tmp_path) -> None:
    old = [json.loads(line) for line in trace.read_text().splitlines()]
    for one in old:
        one.pop("ahead", None)
    old[0]["headrace"].pop("format")
    (tmp_path / "old").write_text("".join(f"{json.dumps(one)}\n" for one in old))
    assert simulate(capsys, tmp_path / "old", "--cache", "1")[0] == 0
    assert simulate(capsys, tmp_path / "old", "--cache", "1", "--read-ahead", "0")[0] == 0
    code, _, err = simulate(capsys, tmp_path / "old", "--read-ahead", "2")
    assert code == 3 and "headrace trace --read-ahead 2" in err


@pytest.mark.parametrize("args, code, text", [
    (["--read-ahead", "65"], 2, "ranks of a token"), (["--read-ahead", "x"], 2, "ranks of a token"),
    (["--ram", "1GiB"], 2, "--model"), (["--cache", "x"], 2, "working sets"),
    (["--policy", "fifo"], 2, "choose from"), (["--bandwidth", "fast"], 2, "bytes a second"),
    (["--warm-up", "1"], 2, "share"), (["--record-bytes", "-5"], 2, "number of bytes")])
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


def test_models_that_cannot_be_meant(headrace, capsys, tmp_path, trace, model_dir) -> None:
    code, out, err = simulate(capsys, trace, "--model", model_dir, "--ram", "64MiB,1MiB")
    assert code == 4 and out == "" and f"--ram 1MiB: below the floor of {model_dir}" in err
    make_container(tmp_path / "other", layers=3, experts=8, top_k=3, tokenizer=None)
    code, out, err = simulate(capsys, trace, "--model", tmp_path / "other", "--cache", "1")
    assert code == 3 and out == "" and "8 layers with 4 of 32 experts, the model 3 with 3 of 8" in err
    # Of a trace that says nothing about its experts only ids count, not the power of two above them.
    make_container(tmp_path / "six", layers=2, experts=6, top_k=2, tokenizer=None)
    (tmp_path / "bare").write_text('{"layers": [[5, 0], [1, 2]]}\n' * 8)
    assert simulate(capsys, tmp_path / "bare", "--model", tmp_path / "six", "--cache", "1")[0] == 0
    (tmp_path / "bare").write_text('{"layers": [[6, 0], [1, 2]]}\n' * 8)
    assert simulate(capsys, tmp_path / "bare", "--model", tmp_path / "six", "--cache", "1")[0] == 3
