"""headrace-bench: known ratios are found again, drift is thrown away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headrace_tools.measure import paired

FAKE = """#!/bin/sh
# Prints the figures of MODEL in run N, and counts its runs.
cd {folder} || exit 9
[ "$1" = bench ] || exit 9
case "$*" in *--fail*) echo "headrace: no such model" >&2; exit 3;; *--no-prefill*) kind=.short;; esac
read n < state
echo $((n + 1)) > state
cat "$2.$((n % {runs}))$kind"
"""
SPEEDS = {"slow": 10.0, "fast": 15.0}


@pytest.fixture
def fake(tmp_path):
    """Callable: factors on the speed, run by run -> the program."""

    def make(*noise: float) -> Path:
        noise = noise or (1.0,)
        (tmp_path / "state").write_text("0\n")
        for name, usual in SPEEDS.items():
            for run, factor in enumerate(noise):
                speed = usual * factor
                decode = {"tokens_per_second": speed, "bytes_per_token": 3e6 / speed}
                for kind, prefill in (("", {"tokens_per_second": 4 * speed}), (".short", None)):
                    figures = json.dumps({"decode": decode, "prefill": prefill})
                    (tmp_path / f"{name}.{run}{kind}").write_text(figures)
        program = tmp_path / "fake"
        program.write_text(FAKE.format(folder=tmp_path, runs=len(noise)))
        program.chmod(0o755)
        return program

    return make


def runs(program: Path) -> int:
    return int((program.parent / "state").read_text())


def bench(capsys, *args: object) -> tuple[int, dict]:
    code = paired.main([*map(str, args[:-1]), "--json", "--quiet", *args[-1]])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def test_known_ratio_is_recovered(fake, capsys):
    noise = (1.0, 1.01, 0.99, 1.02, 1.0, 0.98, 1.01)
    program = fake(*noise)
    code, found = bench(capsys, "slow", "fast", "--binary", program, "--brackets", 12, [])
    assert code == 0 and found["accepted"] == 12 and runs(program) == 36
    for metric, ratio in (("decode", 1.5), ("prefill", 1.5), ("bytes", 1 / 1.5)):
        one = found["metrics"][metric]
        low, high = one["interval"]
        assert one["ratio"] == pytest.approx(ratio, rel=0.01)
        assert low <= one["ratio"] <= high and high / low < 1.03
        assert low < ratio * 1.005 and high > ratio * 0.995
    decode = found["metrics"]["decode"]
    assert decode["a"] == pytest.approx(10, rel=0.02) and decode["b"] == pytest.approx(15, rel=0.02)


def test_steady_drift_cancels(fake, capsys):
    """Everything slows down by 1 % from run to run: plain pairs would see a ratio of 0.99."""
    program = fake(*(0.99**i for i in range(15)))
    code, found = bench(capsys, "slow", "slow", "--binary", program, "--brackets", 5, [])
    assert code == 0
    assert found["metrics"]["decode"]["ratio"] == pytest.approx(1, abs=2e-4)


def test_brackets_that_drift_are_discarded_and_repeated(fake, capsys):
    disturbed = (1.0, 0.3, 0.5)  # A, B and the second A of a bracket in which another job ran
    program = fake(1, 1, 1, *disturbed, 1, 1, 1, *disturbed, 1, 1, 1)
    code, found = bench(capsys, "slow", "fast", "--binary", program, "--brackets", 3, [])
    assert code == 0 and (found["accepted"], found["discarded"]) == (3, 2) and runs(program) == 15
    assert found["metrics"]["decode"]["ratio"] == pytest.approx(1.5)
    fates = [bracket["accepted"] for bracket in found["brackets"]]
    assert fates == [True, False, True, False, True]
    assert found["brackets"][1]["drift"] == pytest.approx(0.5 / 0.75)
    (program.parent / "state").write_text("0\n")
    wide = bench(capsys, "slow", "fast", "--binary", program, "--brackets", 2, "--drift", "70%", [])
    assert wide[1]["discarded"] == 0 and wide[1]["metrics"]["decode"]["ratio"] < 1


def test_a_machine_that_never_settles(fake, capsys):
    program = fake(1.0, 1.0, 0.8)
    code, found = bench(capsys, "slow", "fast", "--binary", program, "--brackets", 2, [])
    assert code == paired.EXIT_UNSTEADY and runs(program) == 18
    assert found["accepted"] == 0 and found["metrics"]["decode"]["ratio"] is None


def test_sides_and_common_options(fake, capsys):
    program = fake()
    code, found = bench(capsys, "--a", "slow --ram 4GiB", "--b", "fast --ram '8 GiB'", "--binary-a",
                        program, "--binary-b", program, "--brackets", 1, ["--", "--no-prefill"])
    assert code == 0
    assert found["commands"] == [
        [str(program), "bench", "slow", "--ram", "4GiB", "--no-prefill", "--json"],
        [str(program), "bench", "fast", "--ram", "8 GiB", "--no-prefill", "--json"]]
    assert found["metrics"]["prefill"] == {"a": None, "b": None, "ratio": None, "interval": None}
    assert found["metrics"]["decode"]["interval"] is None  # one bracket tells nothing of chance


def test_failures_are_passed_on(fake, capsys):
    program = str(fake())
    assert paired.main(["slow", "fast", "--binary", program, "--", "--fail"]) == 3
    assert "no such model" in capsys.readouterr().err
    only = ["slow", "fast", "--binary", program, "--metric", "prefill", "--", "--no-prefill"]
    assert paired.main(only) == 2
    assert "prefill was not measured" in capsys.readouterr().err
    for words in ([], ["slow"], ["slow", "fast", "other"], ["slow", "fast", "--drift", "0"],
                  ["slow", "fast", "--binary", "/nowhere/headrace"]):
        with pytest.raises(SystemExit) as stop:
            paired.main([*words, *([] if "--binary" in words else ["--binary", program])])
        assert stop.value.code == 2
        capsys.readouterr()


def test_real_binary(headrace_bin, model_dir, capsys):
    """More work for a token in a chunk of one: prefill is slower than in chunks of 64."""
    both = f"{model_dir} --prefill 64 --decode 4 --repeats 2"
    code, found = bench(capsys, "--a", f"{both} --chunk 1", "--b", both, "--binary", headrace_bin,
                        "--metric", "prefill", "--brackets", 2, "--drift", "100%", [])
    assert code == 0 and found["accepted"] == 2
    assert found["metrics"]["prefill"]["ratio"] > 1.2
    assert found["metrics"]["bytes"]["a"] >= 0
