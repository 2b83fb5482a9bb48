"""headrace-plan: forecasts for checkpoints that are not converted yet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import sparse_checkpoint
from headrace_tools.convert.options import Options
from headrace_tools.convert.preflight import preflight
from headrace_tools.plan import candidates as plans
from headrace_tools.plan import cli

CHECKPOINT = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3.5-moe"


def run(capsys, *args: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(a) for a in args])
    except SystemExit as exit:
        code = int(exit.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(scope="module")
def forecast(headrace, tmp_path_factory) -> dict:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = cli.main([str(CHECKPOINT), "--ram", "12MiB", "--threads", "2", "--seconds", "0.2", "--json",
                         "--target", str(tmp_path_factory.mktemp("target"))])
    assert code == 0
    return json.loads(text.getvalue())


def test_choices_and_what_they_cost(forecast) -> None:
    assert [c["experts"] for c in forecast["choices"]] == ["int8", "nl4", "rvq3"]
    assert [c["codec"] for c in forecast["choices"]] == ["int8", "nl4", "rvq4x64"]
    sizes = [c["container_bytes"] for c in forecast["choices"]]
    assert sizes == sorted(sizes, reverse=True)
    for choice in forecast["choices"]:
        found = choice["forecast"]
        assert 0 < found["low"] < found["tokens_per_second"] < found["high"]
        assert found["verdict"] in ("ready", "warn")
    hits = [c["forecast"]["hit_rate"] for c in forecast["choices"]]
    assert hits == sorted(hits), "smaller experts, more of them cached"
    assert any("chat template" in note for note in forecast["notes"])


def test_the_plan_is_that_of_the_container(headrace, forecast, model_dir) -> None:
    there = headrace.plan(model_dir, ram="12MiB", threads=2)
    here = next(c["plan"] for c in forecast["choices"] if c["experts"] == "int8")
    for name in ("trunk", "state", "scratch", "record_bytes", "total_experts", "experts_per_token",
                 "trunk_per_token", "working_set"):
        assert here[name] == getattr(there, name), name
    # The text of the manifest is the only difference: its checksums are the longest.
    assert 0 <= here["floor"] - there.floor < 1 << 20
    assert abs(here["cache_slots"] - there.cache_slots) <= 12


def test_plan_of_the_converter_says_what_running_takes(headrace, capsys, model_dir) -> None:
    from headrace_tools.convert import cli as convert

    assert convert.main([str(CHECKPOINT), "--plan", "--json", "--experts", "int8"]) == 0
    running = json.loads(capsys.readouterr().out)["running"]
    there = headrace.plan(model_dir)
    assert 0 <= running["floor"] - there.floor < 1 << 20
    assert running["bytes_per_token_cold"] == there.experts_per_token
    assert convert.main([str(CHECKPOINT), "--plan"]) == 0
    assert "headrace-plan" in capsys.readouterr().out


def test_for_people(headrace, capsys, tmp_path) -> None:
    code, out, _ = run(capsys, CHECKPOINT, "--experts", "rvq2,int8", "--ram", "64MiB", "--seconds", "0.1",
                       "--target", tmp_path / "new" / "container")
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["rvq2", "int8"]
    assert "--experts rvq2: " in out and "256 of 256 experts cached" in out


def test_headers_alone_suffice(headrace, capsys, tmp_path) -> None:
    source = sparse_checkpoint.write_sparse_checkpoint(tmp_path / "Qwen3.6-35B-A3B")
    code, out, _ = run(capsys, source, "--experts", "nl4", "--no-tokenizer", "--ram", "4GiB", "--json",
                       "--seconds", "0.1")
    found = json.loads(out)["choices"][0]
    assert code == (0 if found["plan"]["available"] >= 4 << 30 else 4)
    assert 18e9 < found["container_bytes"] < 22e9 and 500e6 < found["plan"]["experts_per_token"] < 620e6
    assert found["plan"]["moe_layers"] == 40 and found["plan"]["experts"] == 256
    assert not found["probe"]["cold"], "holes of a file come from no drive"
    assert any("not proven" in text for _, text in found["forecast"]["reasons"])


def test_nothing_fits(headrace, capsys) -> None:
    code, out, _ = run(capsys, CHECKPOINT, "--experts", "int8", "--ram", "2MiB", "--seconds", "0.1")
    assert code == 4 and "--experts int8: no" in out


def test_a_full_drive_is_a_reason(headrace, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "free_bytes", lambda path: 1 << 20)
    code, out, _ = run(capsys, CHECKPOINT, "--experts", "int8", "--ram", "64MiB", "--seconds", "0.1")
    assert code == 4 and "1.00 MiB are free" in out and "--experts int8: no" in out


def test_hits_of_a_trace(headrace, capsys, tmp_path) -> None:
    lines = [{"layers": [[0, 1, 2, 3]] * 8}] * 20
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run(capsys, CHECKPOINT, "--experts", "int8", "--ram", "14MiB", "--threads", "2",
                       "--seconds", "0.1",
                       "--trace", tmp_path / "trace", "--json")
    assert code == 0 and json.loads(out)["choices"][0]["forecast"]["hit_rate"] == 1
    (tmp_path / "trace").write_text('{"layers": [[0, 1]]}')
    code, _, err = run(capsys, CHECKPOINT, "--trace", tmp_path / "trace")
    assert code == 3 and "the model 8 with 4" in err


@pytest.mark.parametrize("args, code, text", [
    (["--experts", "int9"], 2, "choose from"), (["--ram", "much"], 2, "much"),
    (["--ctx", "99999999"], 2, "ctx")])
def test_usage(headrace, capsys, args: list[str], code: int, text: str) -> None:
    found, out, err = run(capsys, CHECKPOINT, *args)
    assert found == code and text in err and out == ""


def test_no_checkpoint(headrace, capsys, tmp_path) -> None:
    code, _, err = run(capsys, tmp_path / "absent")
    assert code in (3, 5) and "absent" in err


def test_where_the_drive_is_measured(tmp_path) -> None:
    pre = preflight(CHECKPOINT, Options())
    assert plans.place_to_probe(pre, CHECKPOINT.parent / "new", 4096) == max(
        CHECKPOINT.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    assert plans.place_to_probe(pre, CHECKPOINT.parent / "new", 1 << 30) == CHECKPOINT.parent
    assert plans.place_to_probe(replace(pre, source=tmp_path), tmp_path / "a" / "b", 4096) == tmp_path
