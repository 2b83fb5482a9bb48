"""Experts read before they are known, through the public interfaces."""

from __future__ import annotations

import json
import subprocess

import pytest

PROMPT = "The captain stood upon the deck and looked at the sea"


def test_counters_add_up_and_the_text_is_the_same(headrace, model_dir) -> None:
    plan = headrace.plan(model_dir, ctx=256, chunk=16)
    ram = plan.floor + plan.total_experts * plan.record_bytes // 4
    made = {}
    for ahead in ("off", 1, 3, 64):
        with headrace.Model(model_dir, ctx=256, chunk=16, ram=ram, read_ahead=ahead) as model:
            g = model.generate(PROMPT, max_tokens=40, ignore_stop_ids=True)
            made[ahead] = g.ids
            s = model.stats
            assert s.memory_peak <= ram and s.leases == 0
            ended = s.read_ahead_used + s.read_ahead_wasted + s.read_ahead_cancelled
            if ahead == "off":
                assert s.read_ahead_issued == 0 and s.reads == s.misses
                continue
            assert 0 < s.read_ahead_used <= s.read_ahead_issued
            # the last layers' guesses of the last token may be open
            assert 0 <= s.read_ahead_issued - ended <= 2 * min(ahead, model.info.top_k)
            assert s.read_ahead_bytes <= s.bytes_read
            assert s.reads - s.misses <= s.read_ahead_wasted + 2 * min(ahead, model.info.top_k)
    assert len(set(map(tuple, made.values()))) == 1


def test_prefill_guesses_nothing(headrace, model_dir) -> None:
    with headrace.Model(model_dir, ctx=256, read_ahead=4) as model:
        ids = model.tokenize(PROMPT * 4)
        model.logits(ids)
        assert model.stats.read_ahead_issued == 0


def test_by_itself_a_small_model_guesses_nothing(headrace, model_dir) -> None:
    plan = headrace.plan(model_dir, ctx=256)
    assert plan.floor == headrace.plan(model_dir, ctx=256, read_ahead="off").floor
    assert plan.floor < headrace.plan(model_dir, ctx=256, read_ahead=4).floor
    with headrace.Model(model_dir, ctx=256, ram=plan.floor + (2 << 20)) as model:
        model.generate(PROMPT, max_tokens=8)
        assert model.stats.read_ahead_issued == 0


def test_with_everything_cached_nothing_is_guessed(headrace, model_dir) -> None:
    with headrace.Model(model_dir, ctx=256, read_ahead=4) as model:
        model.generate(PROMPT, max_tokens=8)
        assert model.stats.cache_slots == model.plan().total_experts
        assert model.stats.read_ahead_issued == 0


@pytest.mark.parametrize("value", ["", "-1", "65", "on", "1.5"])
def test_the_option_is_checked(headrace_bin, model_dir, value) -> None:
    done = subprocess.run([headrace_bin, "plan", model_dir, "--read-ahead", value],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "--read-ahead" in done.stderr


def test_the_command_takes_it(headrace, headrace_bin, model_dir) -> None:
    plan = headrace.plan(model_dir, ctx=128, chunk=8, read_ahead=4)
    command = [str(headrace_bin), "run", str(model_dir), "-p", PROMPT, "-n", "20", "--ctx", "128",
               "--chunk", "8", "--json", "--ram", str(plan.floor)]
    outputs = []
    for value in ("off", "4"):
        done = subprocess.run([*command, "--read-ahead", value], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0]["ids"] == outputs[1]["ids"]
    assert outputs[0]["stats"]["read_ahead_issued"] == 0 < outputs[1]["stats"]["read_ahead_issued"]
    with pytest.raises(headrace.UsageError):
        headrace.Model(model_dir, read_ahead=65)
