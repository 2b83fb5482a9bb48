"""Cases of docs/cases.md about calls: clients that go away, callbacks, sessions on one model."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import scripted_model
from scripted_model import successors
from support.build import ROOT, shared_library


@pytest.fixture(scope="module")
def loop(tmp_path_factory) -> Path:
    """A model that says "ab" for ever."""
    return scripted_model.make(tmp_path_factory.mktemp("loop") / "m", successors(b"ab", b"ba"))


# ---- clients that go away ----


def test_b47_cancelled_work_is_not_counted_and_its_place_is_free(lib, model_dir):
    """Cancel in prefill and in decode from another thread: soon over, not counted, the slot reusable."""
    ffi, c = lib
    err, params = ffi.new("hr_error *"), ffi.new("hr_model_params *")
    c.hr_model_params_init(params)
    params.ctx, params.threads, params.chunk, params.max_sessions = 1024, 1, 64, 1
    out, made = ffi.new("hr_model **"), ffi.new("hr_session **")
    assert c.hr_model_open(os.fsencode(model_dir), params, out, err) == 0
    stats = ffi.new("hr_stats *", {"size": ffi.sizeof("hr_stats")})
    steps = []  # layers of the prompt, or tokens, those before and after the cancel

    def step(session) -> None:
        steps.append(1)
        if len(steps) == 10:  # layers of the second chunk, tokens
            other = threading.Thread(target=c.hr_cancel, args=(session,))
            other.start()
            other.join()

    @ffi.callback("hr_moe_fn")
    def on_layer(session, *_):
        step(session)

    @ffi.callback("hr_token_fn")
    def on_token(session, _token):
        step(session)
        return 0

    try:
        for _ in range(3):  # each time the only session there can be
            assert c.hr_session_create(out[0], made, err) == 0
            session = made[0]
            assert c.hr_session_create(out[0], made, err) == 3
            c.hr_session_reset(session)
            assert c.hr_get_stats(out[0], stats, err) == 0
            before = stats.tokens_prefilled
            steps.clear()
            assert c.hr_session_tap(session, on_layer, session, err) == 0
            assert c.hr_eval(session, [5] * 1000, 1000, 0, ffi.NULL, err) == 6
            assert c.hr_session_tap(session, ffi.NULL, ffi.NULL, err) == 0
            assert 10 <= len(steps) <= 11, "the layer that was begun and no other"
            assert c.hr_get_stats(out[0], stats, err) == 0
            assert stats.leases == 0 and stats.tokens_prefilled == before

            c.hr_session_reset(session)
            steps.clear()
            settings = ffi.new("hr_generate_params *")
            c.hr_generate_params_init(settings)
            settings.max_tokens, settings.ignore_stop_ids = 1000, 1
            result = ffi.new("hr_generation *", {"size": ffi.sizeof("hr_generation")})
            assert c.hr_generate(session, [5, 6], 2, settings, on_token, session, result, err) == 0
            assert result.finish == 3 and 10 <= result.tokens <= len(steps) <= 11
            assert c.hr_get_stats(out[0], stats, err) == 0
            assert stats.leases == 0
            c.hr_session_free(session)
    finally:
        c.hr_model_close(out[0])


# ---- callbacks ----


@pytest.mark.parametrize("ending", ["pass", "raise ValueError('from the callback')", "raise KeyboardInterrupt"])
def test_b48_the_last_reference_goes_during_a_generation(build_dir, loop, ending):
    """Nothing but the running call holds the model: it lives until the call is over, then it is freed."""
    script = f"""
import gc, sys, threading
sys.path[:0] = [{str(ROOT / 'python')!r}]
import headrace
headrace.use_library({str(shared_library(build_dir, 'headrace'))!r})
def on_token(token):
    gc.collect()
    if token.index == 3:
        {ending}
try:
    made = headrace.Model({str(loop)!r}, ctx=64).generate("a", max_tokens=6, on_token=on_token)
    print(made.text)
except BaseException as error:
    print(type(error).__name__)
gc.collect()
print(threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    said = {"pass": "bababa", "raise K": "KeyboardInterrupt", "raise V": "ValueError"}
    want = next(text for start, text in said.items() if ending.startswith(start))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split()[0] == want, done.stderr


def test_b48_a_callback_is_kept_alive(headrace, loop):
    """Nobody else refers to the function that is called."""
    seen = []
    with headrace.Model(loop, ctx=64) as model:
        stream = model.stream("a", max_tokens=4)
        gc.collect()
        assert "".join(t.text for t in stream) == "baba"
        model.generate("a", max_tokens=4, on_token=lambda t, kept=bytearray(1 << 20): (gc.collect(), seen.append(t.text))[0] is not False)
    assert "".join(seen) == "baba"


# ---- several at once ----


def test_b51_a_session_beside_a_busy_one_changes_nothing(lib, model_dir):
    """A second timeline with the same beginning, made and evaluated within the callbacks of the
    first: neither changes the other's bits."""
    ffi, c = lib
    err, params = ffi.new("hr_error *"), ffi.new("hr_model_params *")
    c.hr_model_params_init(params)
    params.ctx, params.threads, params.max_sessions = 128, 1, 2
    out, made = ffi.new("hr_model **"), ffi.new("hr_session **")
    assert c.hr_model_open(os.fsencode(model_dir), params, out, err) == 0
    settings = ffi.new("hr_generate_params *")
    c.hr_generate_params_init(settings)
    settings.max_tokens, settings.temperature, settings.seed, settings.ignore_stop_ids = 12, 0.8, 5, 1
    prompt = [7, 11, 3, 99, 250]

    def session():
        assert c.hr_session_create(out[0], made, err) == 0
        return made[0]

    def generate(one, also=lambda: None) -> list[int]:
        ids: list[int] = []

        @ffi.callback("int32_t(void *, const hr_token *)")
        def on_token(_user, token):
            ids.append(token.id)
            also()
            return 0

        assert c.hr_generate(one, prompt, len(prompt), settings, on_token, ffi.NULL, ffi.NULL, err) == 0
        return ids

    try:
        first = session()
        want = generate(first)
        c.hr_session_reset(first)
        second = session()
        steps = []

        def also() -> None:
            ids = [*prompt, *range(20, 30)]
            assert c.hr_eval(second, ids[len(steps) : len(steps) + 1], 1, 0, ffi.NULL, err) == 0
            steps.append(1)

        assert generate(first, also) == want
        c.hr_session_reset(second)
        assert generate(second) == want
        c.hr_session_free(first)
        c.hr_session_free(second)
    finally:
        c.hr_model_close(out[0])
