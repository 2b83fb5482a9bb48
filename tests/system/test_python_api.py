"""The Python interface on the bundled checkpoint."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

PROMPT = '"My dear Mr. Holmes," said the'
SAMPLED = dict(temperature=0.8, top_k=40, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def model(headrace, model_dir):
    with headrace.Model(model_dir, threads=2, ctx=512) as opened:
        yield opened


# ---- facts -------------------------------------------------------------------------------------


def test_version(headrace):
    assert [int(part) for part in headrace.version().split(".")] == [0, 1, 0]


def test_info(model, headrace):
    info = model.info
    assert (info.vocab_size, info.hidden_size, info.layers, info.moe_layers) == (4096, 128, 8, 8)
    assert (info.experts, info.top_k, info.ctx, info.max_position) == (32, 4, 512, 2048)
    assert info.threads == 2 and info.has_tokenizer
    assert info.isa.split("-")[0] in ("reference", "avx2", "avx512", "neon")
    assert info.trunk_codec == "int8" and info.expert_codec == "int8"
    assert info.io_mode in ("direct", "buffered", "mixed")
    assert len(info.container_sha256) == 64 and int(info.container_sha256, 16) >= 0
    assert all(0 <= i < info.vocab_size for i in info.stop_ids)


def test_default_ctx_is_lowered_to_the_models_limit(headrace, model_dir):
    with headrace.Model(model_dir) as opened:
        assert opened.info.ctx == 2048
    with pytest.raises(headrace.UsageError):
        headrace.Model(model_dir, ctx=2049)


def test_plan(model, headrace, model_dir):
    plan = headrace.plan(model_dir, ctx=512, ram="64MiB")
    assert plan.ram == 64 << 20 and plan.fits and plan.floor <= plan.total <= plan.ram
    assert plan.total == (plan.trunk + plan.state + plan.scratch + plan.io + plan.overhead + plan.cache)
    assert plan.total_experts == 256 and plan.working_set == 32 * plan.record_bytes
    again, other = model.plan(ram="64MiB", threads=0), headrace.plan(model_dir, ctx=512, ram="64MiB")
    for moves in ("available", "recommended"):  # with what else the machine does
        again, other = (dataclasses.replace(p, **{moves: 0}) for p in (again, other))
    assert again == other
    small = headrace.plan(model_dir, ctx=512, ram=plan.floor - 1)
    assert not small.fits and small.floor == headrace.plan(model_dir, ctx=512, ram=1 << 20).floor


def test_stats_count(headrace, model_dir):
    with headrace.Model(model_dir, ctx=512) as opened:
        made = opened.generate(PROMPT, max_tokens=10, ignore_stop_ids=True)
        stats = opened.stats
        assert made.stats.tokens_prefilled == len(opened.tokenize(PROMPT))
        assert made.stats.hits + made.stats.misses > 0 and 0 <= made.stats.hit_rate <= 1
        assert stats.leases == 0 and stats.bytes_read >= made.stats.bytes_read > 0
        assert stats.memory_used <= stats.memory_peak <= stats.memory_limit


@pytest.mark.parametrize("text, value", [
    (4096, 4096), ("4096", 4096), ("1KiB", 1024), ("1.5 MiB", 3 << 19), ("8GiB", 8 << 30), (None, 0),
])
def test_sizes(headrace, text, value):
    from headrace._params import parse_size

    assert parse_size(text) == value


@pytest.mark.parametrize("bad", ["", "8 gallons", "-1", "GiB", -1, "1e9", 2**64])
def test_bad_sizes(headrace, model_dir, bad):
    with pytest.raises(ValueError):
        headrace.plan(model_dir, ram=bad)


# ---- text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", PROMPT, "naïve — žluťoučký kůň 🐎", "x" * 5000, "\0\n\t "])
def test_tokenize_round_trip(model, text):
    ids = model.tokenize(text)
    assert all(isinstance(i, int) for i in ids)
    assert model.detokenize(ids) == text
    assert model.detokenize_bytes(ids) == text.encode()


def test_control_tokens_only_when_asked(model):
    text = "before<|im_end|>after<|endoftext|>"
    assert not {4093, 4094, 4095} & set(model.tokenize(text))
    assert {4093, 4095} <= set(model.tokenize(text, special=True))
    assert model.detokenize(model.tokenize(text)) == text == model.detokenize(model.tokenize(text, special=True))


def test_ill_formed_text(model):
    assert model.detokenize(model.tokenize(b"a\xffb")) == "a\ufffdb"
    model.tokenize("lone \ud800 surrogate")
    # Half of a character is bytes, and as text a replacement character.
    ids = model.tokenize("🐎")
    if len(ids) > 1:
        assert model.detokenize(ids[:1]) == model.detokenize_bytes(ids[:1]).decode(errors="replace")


# ---- logits ------------------------------------------------------------------------------------


def test_logits_shape_and_freshness(model):
    ids = model.tokenize(PROMPT)
    first, second = model.logits(ids), model.logits(np.array(ids))
    assert first.shape == (len(ids), 4096) and first.dtype == np.float32
    assert first.tobytes() == second.tobytes()
    assert model.logits(ids[:3]).tobytes() == first[:3].tobytes()
    assert model.logits([]).shape == (0, 4096)


def test_routes(model):
    ids, weights = model.routes(model.tokenize(PROMPT))
    assert ids.shape == weights.shape == (8, 8, 4)
    assert ids.min() >= 0 and ids.max() < 32
    assert all(len(set(row)) == 4 for row in ids.reshape(-1, 4).tolist())
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("ids, kind", [
    ([4096], ValueError), ([-1], ValueError), ([2**40], ValueError), ("text", TypeError),
    ([1.5], TypeError), ([[1, 2]], TypeError),
])
def test_bad_ids(model, ids, kind):
    with pytest.raises(kind):
        model.logits(ids)
    assert model.logits([1]).shape == (1, 4096)


def test_context_is_refused_before_evaluating(model, headrace):
    before = model.stats.tokens_prefilled
    with pytest.raises(headrace.ContextError) as refused:
        model.generate([1] * 513, max_tokens=1)
    assert "513" in str(refused.value) and "512" in str(refused.value)
    assert isinstance(refused.value, ValueError) and refused.value.code == 5
    with pytest.raises(headrace.ContextError):
        model.logits([1] * 5120)
    assert model.stats.tokens_prefilled == before
    assert model.generate([1] * 511, max_tokens=5, ignore_stop_ids=True).finish_reason == "context"


# ---- generation --------------------------------------------------------------------------------


def test_generate(model):
    made = model.generate(PROMPT, max_tokens=20)
    assert made.finish_reason == "length" and len(made.ids) == 20
    assert made.text == model.detokenize(made.ids) == str(made)
    assert made.ids == model.generate(model.tokenize(PROMPT), max_tokens=20).ids


def test_seed(model):
    one = model.generate(PROMPT, max_tokens=30, **SAMPLED)
    assert one.ids == model.generate(PROMPT, max_tokens=30, **SAMPLED).ids
    assert one.ids != model.generate(PROMPT, max_tokens=30, **(SAMPLED | {"seed": 4})).ids


def test_tokens_of_the_callback(model):
    seen = []
    made = model.generate(PROMPT, max_tokens=25, on_token=seen.append, **SAMPLED)
    real = [t for t in seen if t.id >= 0]
    assert [t.id for t in real] == made.ids
    assert [t.index for t in real] == list(range(len(made.ids)))
    assert "".join(t.text for t in seen) == made.text
    assert b"".join(t.bytes for t in real) == model.detokenize_bytes(made.ids)
    assert all(t.logprob <= 0 for t in real)
    assert [t.stats.tokens_decoded for t in real] == sorted(t.stats.tokens_decoded for t in real)


def test_callback_runs_on_the_calling_thread(model):
    threads = set()
    model.generate(PROMPT, max_tokens=3, on_token=lambda t: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_logprob_is_the_softmax(model):
    seen = []
    made = model.generate(PROMPT, max_tokens=5, on_token=seen.append, ignore_stop_ids=True)
    ids = model.tokenize(PROMPT)
    rows = model.logits([*ids, *made.ids])[len(ids) - 1 : -1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    for row, token in zip(rows, seen):
        assert abs(row[token.id] - token.logprob) < 1e-4


def test_stop_string(model):
    whole = model.generate(PROMPT, max_tokens=40).text
    stop = whole[10:14]
    made = model.generate(PROMPT, max_tokens=40, stop=["never to be seen", stop])
    assert made.finish_reason == "stop" and made.stop_string == stop
    assert made.text == whole[: whole.index(stop)]
    assert model.generate(PROMPT, max_tokens=40, stop=stop).text == made.text


def test_stop_id(model):
    ids = model.generate(PROMPT, max_tokens=10).ids
    made = model.generate(PROMPT, max_tokens=10, stop_ids=[ids[4]])
    assert made.finish_reason == "stop" and made.stop_id == ids[4]
    assert made.ids == ids[: ids.index(ids[4])]


def test_keep_continues(model):
    whole = model.generate(PROMPT, max_tokens=20, ignore_stop_ids=True)
    first = model.generate(PROMPT, max_tokens=8, ignore_stop_ids=True)
    rest = model.generate([], max_tokens=12, keep=True, ignore_stop_ids=True)
    assert first.ids + rest.ids == whole.ids
    assert model.position == len(model.tokenize(PROMPT)) + 19


def test_state_saved_and_loaded(model, headrace, tmp_path):
    whole = model.generate(PROMPT, max_tokens=16, ignore_stop_ids=True)
    model.generate(PROMPT, max_tokens=8, ignore_stop_ids=True)
    file = tmp_path / "state"
    model.save_state(file)
    model.generate("Something else entirely", max_tokens=4)
    model.load_state(file)
    rest = model.generate([], max_tokens=8, keep=True, ignore_stop_ids=True)
    assert rest.ids == whole.ids[8:]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(headrace.HeadraceError):
        model.load_state(file)


@pytest.mark.parametrize("settings", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
    {"min_p": 1.0}, {"repetition_penalty": 0.0}, {"seed": -1}, {"max_tokens": 0}, {"top_k": -1},
    {"stop": ["x"] * 17}, {"stop": [""]}, {"stop": ["a\0b"]}, {"stop_ids": [4096]},
])
def test_bad_settings(model, settings):
    with pytest.raises(ValueError):
        model.generate(PROMPT, **{"max_tokens": 1, **settings})
    with pytest.raises(ValueError):
        list(model.stream(PROMPT, **{"max_tokens": 1, **settings}))
    assert len(model.generate(PROMPT, max_tokens=1).ids) == 1


def test_empty_prompt(model, headrace):
    with pytest.raises(headrace.UsageError):
        model.generate("", max_tokens=1)


# ---- stopping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 7])
def test_callback_returns_false(model, at):
    made = model.generate(PROMPT, max_tokens=20, on_token=lambda t: t.index < at)
    assert made.finish_reason == "cancelled" and len(made.ids) == at + 1
    assert made.ids == model.generate(PROMPT, max_tokens=at + 1).ids


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
@pytest.mark.parametrize("at", [0, 3])
def test_callback_raises(model, kind, at):
    want = model.generate(PROMPT, max_tokens=6).ids

    def on_token(token):
        if token.index == at:
            raise kind("from the callback")

    with pytest.raises(kind, match="from the callback"):
        model.generate(PROMPT, max_tokens=20, on_token=on_token)
    assert model.stats.leases == 0
    assert model.generate(PROMPT, max_tokens=6).ids == want


def test_calls_from_inside_a_callback(model, headrace):
    def on_token(_token):
        assert model.tokenize("allowed")
        assert model.stats.leases >= 0
        model.logits([1])

    with pytest.raises(headrace.UsageError, match="busy"):
        model.generate(PROMPT, max_tokens=3, on_token=on_token)
    assert len(model.generate(PROMPT, max_tokens=3).ids) == 3


def test_close_from_inside_a_callback(headrace, model_dir):
    opened = headrace.Model(model_dir, ctx=128)
    with pytest.raises(headrace.UsageError, match="closed"):
        opened.generate(PROMPT, max_tokens=10, on_token=lambda t: opened.close())
    opened.close()


def test_stream(model):
    want = model.generate(PROMPT, max_tokens=12, **SAMPLED)
    stream = model.stream(PROMPT, max_tokens=12, **SAMPLED)
    tokens = list(stream)
    assert "".join(t.text for t in tokens) == want.text
    assert stream.generation.ids == want.ids and stream.generation.finish_reason == "length"
    assert list(stream) == []


def test_stream_left_early(model):
    want = model.generate(PROMPT, max_tokens=6).ids
    for _ in range(20):
        for token in model.stream(PROMPT, max_tokens=50):
            if token.index == 2:
                break
    with model.stream(PROMPT, max_tokens=50) as stream:
        next(stream)
    with pytest.raises(RuntimeError, match="from the loop"):
        for token in model.stream(PROMPT, max_tokens=50):
            raise RuntimeError("from the loop")
    model.stream(PROMPT)  # never begun
    assert model.stats.leases == 0
    assert model.generate(PROMPT, max_tokens=6).ids == want


def test_open_stream_makes_the_model_busy(model, headrace):
    stream = model.stream(PROMPT, max_tokens=5)
    next(stream)
    with pytest.raises(headrace.UsageError, match="stream"):
        model.generate(PROMPT, max_tokens=1)
    stream.close()
    assert len(model.generate(PROMPT, max_tokens=1).ids) == 1


def test_stream_outlives_close(headrace, model_dir):
    opened = headrace.Model(model_dir, ctx=128)
    stream = opened.stream(PROMPT, max_tokens=50)
    next(stream)
    opened.close()
    with pytest.raises(headrace.UsageError, match="closed"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_threads_take_turns(model):
    want = {seed: model.generate(PROMPT, max_tokens=15, **(SAMPLED | {"seed": seed})).ids
            for seed in range(4)}
    got = {}

    def work(seed):
        got[seed] = model.generate(PROMPT, max_tokens=15, **(SAMPLED | {"seed": seed})).ids

    threads = [threading.Thread(target=work, args=(seed,)) for seed in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


def test_python_runs_while_c_computes(model):
    """The interpreter lock is free: another thread counts on during one evaluation."""
    count, stop = [0], threading.Event()

    def counter():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=counter)
    thread.start()
    try:
        for _ in range(200):  # a busy machine may leave it out now and then
            before = count[0]
            model.logits([5] * 512)
            if count[0] - before >= 3:
                break
        else:
            pytest.fail("nothing else ran")
    finally:
        stop.set()
        thread.join()


# ---- Ctrl-C ------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time
sys.path[:0] = [{python!r}]
import headrace
headrace.use_library({library!r})
model = headrace.Model({path!r}, threads=1, isa="reference", chunk={chunk})
want = model.generate([5, 6, 7], max_tokens=5).ids
sent = []
def send():
    time.sleep({delay})
    sent.append(time.process_time())  # which other programs do not lengthen
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
try:
    {call}
except KeyboardInterrupt:
    print("stopped after", time.process_time() - sent[0])
    assert model.generate([5, 6, 7], max_tokens=5).ids == want
    assert model.stats.leases == 0
else:
    print("ran to its end")
"""


@pytest.mark.plain_build
@pytest.mark.parametrize("call, chunk", [
    ("model.logits([5] * 2000)", 512),
    ("model.logits([5] * 2000)", 1),
    ("model.generate([5] * 2000, max_tokens=1)", 512),
    ("model.generate([5], max_tokens=2000, ignore_stop_ids=True)", 0),
    ("model.generate([5], max_tokens=2000, ignore_stop_ids=True, on_token=lambda t: None)", 0),
    ("for t in model.stream([5], max_tokens=2000, ignore_stop_ids=True): pass", 0),
])
def test_interrupt(headrace, build_dir, model_dir, call, chunk):
    from support.build import ROOT, shared_library

    script = INTERRUPTED.format(python=str(ROOT / "python"), path=str(model_dir), call=call,
                                library=str(shared_library(build_dir, "headrace")), delay=0.15,
                                chunk=chunk)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if "ran to its end" in done.stdout:
        pytest.skip("this machine finished before the interrupt")
    assert float(done.stdout.split()[-1]) < 1.0


def test_interrupt_storm(headrace, build_dir, model_dir):
    """Interrupts at arbitrary moments: none is lost in a callback, none breaks the model."""
    from support.build import ROOT, shared_library

    script = f"""
import os, random, signal, sys, threading, time
sys.path[:0] = [{str(ROOT / 'python')!r}]
import headrace
headrace.use_library({str(shared_library(build_dir, 'headrace'))!r})
model = headrace.Model({str(model_dir)!r}, ctx=256)
want = model.generate([5, 6, 7], max_tokens=5).ids
random.seed(1)
hits = 0
for i in range(60):
    timer = threading.Timer(random.random() * 0.02, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            model.generate([5, 6, 7], max_tokens=3, on_token=(lambda t: None) if i % 2 else None)
    except KeyboardInterrupt:
        hits += 1
assert hits == 60
assert model.generate([5, 6, 7], max_tokens=5).ids == want
assert model.stats.leases == 0
model.close()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), done.stderr


# ---- life and errors ---------------------------------------------------------------------------


def test_close_is_idempotent(headrace, model_dir):
    opened = headrace.Model(model_dir, ctx=64)
    opened.close()
    opened.close()
    assert opened.closed and "closed" in repr(opened)
    for use in (lambda: opened.tokenize("x"), lambda: opened.info, lambda: opened.logits([1]),
                lambda: opened.generate("x"), lambda: opened.stats, lambda: opened.position,
                lambda: opened.__enter__()):
        with pytest.raises(headrace.UsageError, match="closed"):
            use()


def test_dropped_models_are_freed(headrace, model_dir):
    threads = threading.active_count()
    for _ in range(5):
        opened = headrace.Model(model_dir, ctx=64)
        opened.logits([1, 2])
        del opened
    gc.collect()
    deadline = time.monotonic() + 600
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("ending", [
    "", "sys.exit(0)", "stream = model.stream([5], max_tokens=50); next(stream)",
    "threading.Thread(target=lambda: model.generate([5], max_tokens=2000, ignore_stop_ids=True), daemon=True).start(); time.sleep(0.05)",
    "model.self = model",
])
def test_interpreter_exit_with_an_open_model(headrace, build_dir, model_dir, ending):
    from support.build import ROOT, shared_library

    script = f"""
import sys, threading, time
sys.path[:0] = [{str(ROOT / 'python')!r}]
import headrace
headrace.use_library({str(shared_library(build_dir, 'headrace'))!r})
model = headrace.Model({str(model_dir)!r})
model.generate([5], max_tokens=3)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    if "daemon" not in ending:
        assert done.stderr == ""
    assert "Fatal" not in done.stderr and "Segmentation" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_is_refused(headrace, build_dir, model_dir):
    from support.build import ROOT, shared_library

    script = f"""
import os, sys
sys.path[:0] = [{str(ROOT / 'python')!r}]
import headrace
headrace.use_library({str(shared_library(build_dir, 'headrace'))!r})
model = headrace.Model({str(model_dir)!r}, ctx=64)
pid = os.fork()
if pid == 0:
    try:
        model.logits([1])
    except headrace.UsageError as error:
        sys.exit(7 if 'fork' in str(error) else 1)
    sys.exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), model.logits([1]).shape)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True,
                          text=True, timeout=900)
    assert done.stdout == "7 (1, 4096)\n", done.stderr


def test_paths(headrace, model_dir, tmp_path, monkeypatch):
    folder = tmp_path / "mo del" / "モデル" / "ž"
    folder.mkdir(parents=True)
    place = folder / "m"
    shutil.copytree(model_dir, place)
    spellings = [place, str(place), str(place) + "/", str(place).replace("/m", "/./m")]
    monkeypatch.chdir(folder)
    spellings += ["m", "./m", Path("m")]
    monkeypatch.setenv("HOME", str(folder))
    spellings += ["~/m"]
    long = tmp_path / ("l" * 120) / ("o" * 120) / ("n" * 120)
    long.parent.mkdir(parents=True)
    long.symlink_to(place)
    spellings += [long]
    for spelling in spellings:
        with headrace.Model(spelling, ctx=64) as opened:
            assert opened.info.vocab_size == 4096
    with pytest.raises(headrace.HeadraceError, match="no such mödel"):
        headrace.Model("no such mödel")
    with pytest.raises(headrace.UsageError):
        headrace.Model("a\0b")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX permissions")
def test_read_only_container(headrace, model_dir, tmp_path):
    place = tmp_path / "read-only"
    shutil.copytree(model_dir, place)
    listing = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in place.iterdir())
    for file in place.iterdir():
        file.chmod(0o444)
    place.chmod(0o555)
    try:
        with headrace.Model(place, ctx=64) as opened:
            opened.generate(PROMPT, max_tokens=5)
        assert headrace.verify(place) == []
        assert listing == sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in place.iterdir())
    finally:
        place.chmod(0o755)


def test_open_errors(headrace, model_dir, tmp_path):
    with pytest.raises(headrace.HeadraceError):
        headrace.Model(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    manifest = broken / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"hidden_size", b"hidden_sise", 1))
    with pytest.raises(headrace.FormatError) as refused:
        headrace.Model(broken)
    assert "manifest.json" in refused.value.detail and refused.value.code == 2
    with pytest.raises(headrace.UsageError):
        headrace.Model(model_dir, isa="mmx")
    with pytest.raises(headrace.UsageError):
        headrace.Model(model_dir, verify="sometimes")
    with pytest.raises(headrace.UsageError):
        headrace.Model(model_dir, cache_policy="random")
    with pytest.raises(TypeError):
        headrace.Model(model_dir, threads=1.5)
    with pytest.raises(TypeError):
        headrace.Model(model_dir, unknown=1)


def test_verify(headrace, model_dir, tmp_path):
    seen = []
    assert headrace.verify(model_dir, lambda done, total: seen.append((done, total))) == []
    assert seen and seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    experts = broken / "experts-0002.bin"
    data = bytearray(experts.read_bytes())
    data[len(data) // 2] ^= 1
    experts.write_bytes(data)
    faults = headrace.verify(broken)
    assert faults and any("experts-0002.bin" in f for f in faults)
    with pytest.raises(RuntimeError, match="enough"):
        def on_progress(done, total):
            raise RuntimeError("enough")
        headrace.verify(model_dir, on_progress)
    assert isinstance(headrace.verify(model_dir, lambda done, total: False), list)
    with pytest.raises(headrace.HeadraceError):
        headrace.verify(tmp_path / "missing")


def test_damaged_expert_fails_the_token_and_names_it(headrace, model_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    experts = broken / "experts-0003.bin"
    data = bytearray(experts.read_bytes())
    for record in range(32):  # every expert of the layer: whichever is routed to is damaged
        data[record * (len(data) // 32) + 5000] ^= 0x40
    experts.write_bytes(data)
    with headrace.Model(broken, ctx=64) as opened:
        for _ in range(2):
            with pytest.raises(headrace.FormatError, match="experts-0003.bin"):
                opened.logits([1, 2, 3])
        assert opened.stats.leases == 0


def test_errors_can_be_pickled(headrace):
    import pickle

    error = pickle.loads(pickle.dumps(headrace.FormatError("what and where")))
    assert (type(error), error.detail, error.code) == (headrace.FormatError, "what and where", 2)


def test_command_line(headrace, build_dir, model_dir):
    from support.build import ROOT, shared_library

    script = (f"import sys; sys.path[:0] = [{str(ROOT / 'python')!r}]; import headrace; "
              f"headrace.use_library({str(shared_library(build_dir, 'headrace'))!r}); "
              "from headrace.__main__ import main; sys.exit(main(sys.argv[1:]))")
    run = [sys.executable, "-c", script, "run", str(model_dir), "-p", PROMPT, "--max-tokens", "5"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() and "5 tokens" in done.stderr
    missing = subprocess.run([*run[:4], "/nowhere", "-p", "x"], capture_output=True, text=True)
    assert missing.returncode in (3, 5) and "/nowhere" in missing.stderr
    assert json.dumps(missing.stdout) == '""'


def test_layer_inputs_are_those_of_the_routes(model, headrace):
    ids = model.tokenize("The captain stood upon the deck and looked at the sea")
    experts, weights = model.routes(ids)
    seen: dict[int, list] = {}

    def keep(layer, inputs, chosen, mixed):
        assert inputs.shape == (len(chosen), model.info.hidden_size) and np.isfinite(inputs).all()
        seen.setdefault(layer, []).append((inputs, chosen, mixed))

    want = model.logits(ids)
    model.layer_inputs(ids, keep)
    assert sorted(seen) == list(range(model.info.moe_layers))
    for layer, pieces in seen.items():
        assert np.array_equal(np.concatenate([p[1] for p in pieces]), experts[layer])
        assert np.array_equal(np.concatenate([p[2] for p in pieces]), weights[layer])
    assert np.array_equal(model.logits(ids), want)

    def broken(*_):
        raise KeyError("stop here")

    with pytest.raises(KeyError, match="stop here"):
        model.layer_inputs(ids, broken)
    assert np.array_equal(model.logits(ids), want)
