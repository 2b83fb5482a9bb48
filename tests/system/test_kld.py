"""headrace-kld and the quality table: figures against an independent computation, limits, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from headrace_tools.convert import options
from headrace_tools.measure import compare as comparing
from headrace_tools.measure import divergence, kld, quality
from support.build import ROOT

VAL = ROOT / "models" / "val.txt"
CHECKPOINT = ROOT / "models" / "tiny-qwen3.5-moe"
MIB = 1 << 20

IN_PROCESS = """
import os, sys
import headrace
headrace.use_library(os.environ["HEADRACE_TEST_LIBRARY"])
from headrace_tools.measure.kld import main
"""


@pytest.fixture
def run(headrace, capsys):
    """Callable: arguments of headrace-kld -> (exit code, standard output, standard error)."""

    def call(*args):
        code = kld.main([str(a) for a in args])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def run_json(run):
    def call(*args):
        code, out, err = run(*args, "--json", "--quiet")
        assert code == 0, err
        assert err == ""
        return json.loads(out)

    return call


@pytest.fixture(scope="module")
def short_text(tmp_path_factory):
    """1,900 bytes around the end of a document: four windows of 128, the last one partial."""
    data = VAL.read_bytes()
    at = data.index(b"<|endoftext|>")
    path = tmp_path_factory.mktemp("kld") / "short.txt"
    path.write_bytes(data[at - 1000 : at + 900])
    return path


def child(*lines):
    """A Python process on the library under test; `lines` follow IN_PROCESS."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), str(ROOT / "python")])
    return subprocess.Popen([sys.executable, "-c", IN_PROCESS + "\n".join(lines)], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ---- figures -----------------------------------------------------------------------------------


def test_identical_containers_differ_by_nothing(run_json, model_dir):
    got = run_json(model_dir, model_dir, "--text", VAL, "--limit", 3, "--window", 100)
    assert got["kl"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert got["nll_difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert got["top1"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert got["ref"] == got["cand"]
    assert (got["predictions"], got["windows"], got["window"]) == (300, 3, 100)


def independent(headrace, paths, text, window):
    """KL, losses and agreement of every position from whole windows of Model.logits; another
    formula than the tool's."""
    parts = []
    with headrace.Model(paths[0], ctx=window) as ref, headrace.Model(paths[1], ctx=window) as cand:
        ids = ref.tokenize(text.read_text(encoding="utf-8"), special=True)
        for at in range(0, len(ids) - 1, window):
            targets = np.array(ids[at + 1 : at + window + 1])
            inputs = ids[at : at + len(targets)]
            a, b = (m.logits(inputs).astype(np.longdouble) for m in (ref, cand))
            p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (a, b))
            p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
            each = np.arange(len(targets))
            parts.append(np.stack([
                (p * np.log(p / q)).sum(1), -np.log(p[each, targets]), -np.log(q[each, targets]),
                (a.argmax(1) == b.argmax(1)).astype(np.longdouble)]))
    return np.array(ids), np.concatenate(parts, axis=1).astype(np.float64)


def test_every_position_equals_an_independent_computation(
        run_json, headrace, model_bf16, model_dir, short_text, tmp_path):
    file = tmp_path / "positions.npz"
    got = run_json(model_bf16, model_dir, "--text", short_text, "--window", 128,
                   "--per-position", file)
    ids, (kl, nll_ref, nll_cand, top1) = independent(
        headrace, (model_bf16, model_dir), short_text, 128)
    n = ids.size - 1
    assert got["predictions"] == n and got["windows"] == 4 and n % 128 not in (0, 64)
    assert got["kl"]["mean"] == pytest.approx(kl.mean(), abs=1e-9)
    assert got["top1"]["mean"] == pytest.approx(top1.mean(), abs=1e-12)
    assert got["ref"]["mean_nll"] == pytest.approx(nll_ref.mean(), abs=1e-9)
    assert got["cand"]["perplexity"] == pytest.approx(np.exp(nll_cand.mean()), rel=1e-9)
    with np.load(file) as rows:
        shapes = {name: (rows[name].dtype.str[1:], rows[name].shape) for name in rows.files}
        assert shapes == {name: (kind, (n,)) for name, kind in [
            ("target", "i4"), ("window", "i4"), ("position", "i4"), ("kl", "f8"),
            ("nll_ref", "f8"), ("nll_cand", "f8"), ("top1", "b1")]}
        assert (rows["target"] == ids[1:]).all()
        assert (rows["window"] * 128 + rows["position"] == np.arange(n)).all()
        assert rows["position"].max() == 127
        for name, want in (("kl", kl), ("nll_ref", nll_ref), ("nll_cand", nll_cand)):
            assert np.abs(rows[name] - want).max() < 1e-9, name
        assert (rows["top1"] == (top1 == 1)).all()
    assert os.listdir(tmp_path) == ["positions.npz"]


def test_int8_is_close_to_bf16(run_json, model_bf16, model_dir):
    got = run_json(model_bf16, model_dir, "--text", VAL, "--limit", 8)
    assert got["predictions"] == 8 * 512
    assert 1e-5 < got["kl"]["mean"] < 0.002
    for figure in ("kl", "top1", "nll_difference"):
        assert got[figure]["low"] < got[figure]["mean"] < got[figure]["high"], figure
    assert got["top1"]["low"] > 0.96
    assert (got["ref"]["expert_codec"], got["cand"]["trunk_codec"]) == ("bf16", "int8")


def test_the_direction_is_from_the_reference(run_json, model_bf16, model_dir, short_text):
    pair = [run_json(a, b, "--text", short_text)["kl"]["mean"]
            for a, b in ((model_bf16, model_dir), (model_dir, model_bf16))]
    assert pair[0] != pair[1] and pair[0] == pytest.approx(pair[1], rel=0.2)


def test_perplexity_is_that_of_headrace_score(run_json, headrace_bin, model_dir, short_text):
    got = run_json(model_dir, model_dir, "--text", short_text, "--window", 96, "--end",
                   "<|endoftext|>")
    done = subprocess.run(
        [headrace_bin, "score", model_dir, "-f", short_text, "--window", "96", "--end",
         "<|endoftext|>", "--json"], capture_output=True, check=True)
    want = json.loads(done.stdout)
    assert got["predictions"] == want["predictions"]
    assert got["ref"]["mean_nll"] == pytest.approx(want["mean_nll"], rel=1e-9)


def test_the_convention_of_the_bundled_checkpoint(headrace, model_dir):
    request = comparing.Request(model_dir, model_dir, text=VAL, end="<|endoftext|>")
    with headrace.Model(model_dir) as model:
        assert comparing.read_ids(request, model).size - 1 == 54133


def test_settings_change_no_figure(run_json, model_bf16, model_dir, short_text):
    common = (model_bf16, model_dir, "--text", short_text, "--window", 128)
    first, second = run_json(*common), run_json(*common, "--ram", "40MiB", "--threads", 1)
    for got in (first, second):
        del got["seconds"]
    assert first == second


def test_logits_in_pieces_are_the_logits_of_the_whole(headrace, model_dir):
    with headrace.Model(model_dir, ctx=300) as model:
        ids = model.tokenize(VAL.read_bytes()[:900])[:150]
        whole = model.logits(ids)
        pieces = [model.logits(ids[a:b], keep=a > 0) for a, b in ((0, 64), (64, 65), (65, 150))]
        assert np.concatenate(pieces).tobytes() == whole.tobytes()
        assert model.position == 150
        assert model.logits(ids[:2]).tobytes() == whole[:2].tobytes()
        model.logits(ids)
        with pytest.raises(headrace.ContextError):
            model.logits([*ids, 1], keep=True)
        assert model.position == 150


# ---- arithmetic --------------------------------------------------------------------------------


def test_rows_of_extreme_logits():
    rng = np.random.default_rng(1)
    ref = rng.normal(size=(70, 9001)).astype(np.float32) * 30
    cand = ref + np.float32(1e-3) * rng.normal(size=ref.shape).astype(np.float32)
    targets = rng.integers(0, 9001, 70).astype(np.int32)
    plain = divergence.compare_rows(ref, cand, targets)
    moved = divergence.compare_rows(ref + np.float32(4096), cand - np.float32(4096), targets)
    assert (plain.kl > -1e-15).all() and plain.kl.max() > 1e-8 and np.isfinite(moved.kl).all()
    assert (moved.nll_ref >= 0).all() and np.allclose(moved.nll_ref, plain.nll_ref, atol=2e-3)
    same = divergence.compare_rows(ref, ref + np.float32(0), targets)
    assert not same.kl.any() and same.top1.all()
    for bad in (np.nan, np.inf, -np.inf):
        broken = cand.copy()
        broken[69, 3] = bad
        for pair in ((ref, broken), (broken, ref), (broken, broken)):
            with pytest.raises(ValueError, match="not finite"):
                divergence.compare_rows(*pair, targets)


def test_interval_of_positions_that_depend_on_each_other():
    """Positions that are equal within a window say no more than one: the interval is that of the
    windows' means, sqrt(window) wider than independent positions would give."""
    rng = np.random.default_rng(2)
    means = rng.normal(5, 1, 400)
    values = np.repeat(means, 50)
    got, other = divergence.estimates([values, 2 * values], 50)
    assert got.mean == pytest.approx(means.mean())
    assert got.high - got.low == pytest.approx(2 * 1.96 * means.std() / 20, rel=0.1)
    assert (other.mean, other.low, other.high) == pytest.approx(
        (2 * got.mean, 2 * got.low, 2 * got.high), rel=1e-12)  # one set of draws for all figures
    assert divergence.estimates([values, 2 * values], 50) == [got, other]
    alone, = divergence.estimates([values], values.size)
    assert alone.mean == pytest.approx(got.mean) and alone.low is None and alone.high is None


def test_a_short_last_window_weighs_what_it_holds():
    values = np.r_[np.zeros(100), np.ones(1)]
    got, = divergence.estimates([values], 100)
    assert got.mean == pytest.approx(1 / 101)
    assert got.low == 0 and got.high == 1


# ---- limits ------------------------------------------------------------------------------------


@pytest.mark.plain_build
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_text(headrace, model_dir):
    """Logits of the longer text would be 2 x 192 MiB, of one of its windows 2 x 32 MiB. 8 MiB more
    than for short windows are allowed, the engines' longer context included. The short text comes
    twice: a second pair of engines finds the heap of the first."""
    short, long = (
        f"assert main([{str(model_dir)!r}] * 2 + ['--text', {str(VAL)!r}, '--window', '{window}', "
        f"'--limit', '{limit}', '--ram', '64MiB', '--threads', '2', '--quiet']) == 0"
        for window, limit in ((64, 80), (2048, 6)))
    peak = "print([l.split()[1] for l in open('/proc/self/status') if l[:6] == 'VmHWM:'][0])"
    process = child(short, short, peak, long, peak)
    out, err = process.communicate()
    assert process.returncode == 0, err
    before, after = (int(line) * 1024 for line in out.splitlines() if line.isdigit())
    assert after - before < 8 * MIB, (before, after)


def test_both_engines_share_the_ceiling(headrace, model_bf16, model_dir):
    def shares_of(ram: int) -> tuple[int, ...]:
        return comparing.ram_shares(comparing.Request(model_bf16, model_dir, text=VAL, ram=ram, threads=2))

    shares = shares_of(48 * MIB)
    floors = [headrace.plan(path, ctx=512, threads=2).floor for path in (model_bf16, model_dir)]
    assert sum(shares) <= 48 * MIB
    assert all(share >= floor for share, floor in zip(shares, floors, strict=True))
    assert list(shares_of(sum(floors))) == floors
    with pytest.raises(comparing.MeasureError) as raised:
        shares_of(sum(floors) - 1)
    assert raised.value.exit_code == 4 and str(sum(floors)) in str(raised.value)


def test_interrupt(headrace, model_bf16, model_dir, tmp_path):
    process = child(f"sys.exit(main([{str(model_bf16)!r}, {str(model_dir)!r}, '--text', {str(VAL)!r}, "
                    f"'--limit', '100', '--per-position', {str(tmp_path / 'p.npz')!r}]))")
    assert "predictions" in process.stderr.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 130, err
    assert out == "" and "Traceback" not in err and "interrupted after" in err
    assert not list(tmp_path.iterdir())


# ---- refusals ----------------------------------------------------------------------------------


def test_other_tokenizers_are_refused(run, model_dir, tmp_path):
    other = shutil.copytree(model_dir, tmp_path / "other")
    data = bytearray((other / "tokenizer.bin").read_bytes())
    data[-1] ^= 1
    (other / "tokenizer.bin").write_bytes(data)
    ids = tmp_path / "ids"
    ids.write_text("1 2 3")
    for source in (("--text", VAL), ("--ids", ids)):
        code, out, err = run(model_dir, other, *source)
        assert code == 3 and out == ""
        assert f"{other}: its tokenizer is not that of {model_dir}" in err


def test_ids_only_containers(run, run_json, fixture_models, model_dir, tmp_path):
    first, ids = fixture_models("qwen3_5_moe"), tmp_path / "ids.txt"
    ids.write_text("3, 1 4\n1 5,9 2 6")
    got = run_json(first, first, "--ids", ids, "--window", 4)
    assert (got["predictions"], got["windows"], got["kl"]["mean"]) == (7, 2, 0)
    code, _, err = run(first, first, "--text", VAL)
    assert code == 2 and "no tokenizer" in err and "--ids" in err
    code, _, err = run(first, first, "--ids", ids, "--end", "x")
    assert code == 2 and "--end" in err
    code, _, err = run(first, model_dir, "--ids", ids)
    assert code == 3 and "vocabulary" in err
    for text, problem in (("1 x 2", "'x'"), ("1", "at least 2"), ("", "at least 2"),
                          ("1 99999", "id 99999 at index 1"), ("1 2147483648", "2147483648"),
                          ("1 -2", "'-2'")):
        ids.write_text(text)
        code, out, err = run(first, first, "--ids", ids, "--quiet")
        assert (code, out) == (3, "") and problem in err, text


@pytest.mark.parametrize("args, code", [
    ((), 2), (("--text", VAL, "--ids", VAL), 2), (("--text", VAL, "--window", "0"), 2),
    (("--text", VAL, "--limit", "x"), 2),
])
def test_usage(model_dir, args, code):
    with pytest.raises(SystemExit) as raised:
        kld.main([str(model_dir), str(model_dir), *map(str, args)])
    assert raised.value.code == code


def test_exit_codes(run, model_dir, tmp_path):
    def code(ref, cand, *args):
        got, out, err = run(ref, cand, *args)
        assert out == "" and err.startswith("headrace-kld: ") and err.count("\n") == 1
        return got

    text = ("--text", VAL)
    assert code(model_dir, tmp_path / "none", *text) == 5
    assert code(model_dir, tmp_path, *text) == 3
    assert code(model_dir, model_dir, "--text", tmp_path / "none") == 5
    assert code(model_dir, model_dir, *text, "--ram", "1MiB") == 4
    assert code(model_dir, model_dir, *text, "--ram", "much") == 2
    assert code(model_dir, model_dir, *text, "--window", 100000) == 2
    assert code(model_dir, model_dir, *text, "--per-position", tmp_path / "no" / "p.npz") == 5
    assert code(model_dir, model_dir, *text, "--per-position", tmp_path) == 5
    (tmp_path / "empty").touch()
    assert code(model_dir, model_dir, "--text", tmp_path / "empty") == 3


def test_an_engine_that_cannot_be_loaded(run, headrace, model_dir, monkeypatch):
    def missing():
        raise ImportError("libheadrace was not found")

    monkeypatch.setattr(headrace, "version", missing)
    code, out, err = run(model_dir, model_dir, "--text", VAL)
    assert (code, out) == (5, "") and "libheadrace was not found" in err


# ---- the table ---------------------------------------------------------------------------------


def test_the_table_offers_what_the_converter_offers():
    offered = quality.choices()
    assert len(set(offered)) == len(offered)
    assert {choice.experts for choice in offered} == (
        set(options.EXPERT_CODECS) - {"auto"} | set(options.RVQ_CODECS))
    assert {choice.trunk for choice in offered} == set(options.TRUNK_CODECS) - {"auto"}
    assert quality.Choice.parse("int8") == quality.Choice("int8", "int8")
    assert quality.Choice.parse("bf16/int8 --hash-source") == quality.Choice(
        "bf16", "int8", ("--hash-source",))
    for bad in ("", "int7", "int8/int7", "/int8"):
        with pytest.raises(ValueError, match="is none of"):
            quality.Choice.parse(bad)
    assert quality.Choice.parse("hybrid --budget 1GB").calibrated
    assert not quality.Choice.parse("scalar3/bf16").calibrated
    for bad in ("hybrid", "int8 --budget 1GB", "scalar3 --hash-source"):
        with pytest.raises(ValueError, match="go together|no further"):
            quality.Choice.parse(bad)


def test_quality_table(headrace, capsys, tmp_path, model_bf16, model_dir, run_json):
    code = quality.main([str(CHECKPOINT), "--codecs", "bf16", "int8", "--windows", "2",
                         "--work", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert not list(tmp_path.iterdir())
    lines = out.splitlines()
    assert lines[0].startswith("1,024 predictions in 2 windows of 512")
    names, _, reference, int8 = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])
    assert len(names) == len(reference) == len(int8) == 9
    want = run_json(model_bf16, model_dir, "--text", VAL, "--limit", 2)
    assert reference[:2] == ["bf16", "bf16"] and reference[4] == "16.00"
    assert reference[5] == f"{want['ref']['perplexity']:.3f}"
    whole = sum(path.stat().st_size for path in model_dir.iterdir())
    size = sum(path.stat().st_size for path in model_dir.glob("experts-*"))
    assert [int8[i] for i in (0, 1, 3, 4)] == ["int8", "int8", f"{size / 1e6:.3f}", "8.25"]
    assert abs(float(int8[2]) - whole / 1e6) < 0.0011  # options in the manifest may differ
    assert int8[5:7] == [f"{want['cand']['perplexity']:.3f}", f"{want['kl']['mean']:.6f}"]
    assert int8[8] == f"{want['top1']['mean'] * 100:.2f} %"


@pytest.mark.parametrize("code", [2, 3, 4, 130])
def test_a_choice_that_cannot_be_converted(headrace, capsys, tmp_path, monkeypatch, code):
    """A codec that is not for this checkpoint is a row without figures; anything else ends it."""
    real = quality.cli.main
    monkeypatch.setattr(quality.cli, "main", lambda argv: code if "f32" in argv else real(argv))
    got = quality.main([str(CHECKPOINT), "--codecs", "f32", "int8", "--windows", "1",
                        "--work", str(tmp_path)])
    out, _ = capsys.readouterr()
    assert got == code and not list(tmp_path.iterdir())
    if code in (2, 3):
        reference, refused, int8 = out.splitlines()[4:]
        assert reference.startswith("| bf16 | bf16 |") and "| 26.214 |" in reference
        assert refused.startswith("| f32 | f32 | not converted |")
        assert int8.startswith("| int8 | int8 |") and "| 13.631 |" in int8
    else:
        assert out == ""
