"""headrace-convert --budget: sizes, choices, refusals, and the mixed container in the engine."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import manifest, run, tree
from headrace_tools.convert import allocation, calibration, cli, codebooks, feedback, knapsack, writer
from headrace_tools.convert import requantised
from headrace_tools.convert import rows as source_rows
from headrace_tools.convert.options import Options
from headrace_tools.convert.preflight import make_bank, part_of, preflight
from headrace_tools.convert.quantise import decode, matrix_bytes
from headrace_tools.convert.safetensors_source import NonFinite
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
CHECKPOINT = ROOT / "models" / "tiny-qwen3.5-moe"
CODECS = ("bf16", "int8", "mxfp4")


@pytest.fixture(scope="module", autouse=True)
def quick(headrace):
    """The engine under test, and fewer experts measured."""
    saved, calibration.EXPERTS = calibration.EXPERTS, 3
    yield
    calibration.EXPERTS = saved


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_bytes((ROOT / "models" / "val.txt").read_bytes()[:5000])
    return path


@pytest.fixture(scope="module")
def flags(text, model_dir):
    return ["--calibration", text, "--reference", model_dir, "--candidates", ",".join(CODECS),
            "--quiet"]


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


@pytest.fixture(scope="module")
def bounds(text, model_dir):
    """(smallest, largest) budget that makes a difference, from the layouts."""
    pre = preflight(CHECKPOINT, Options("auto"))
    banks = {c: [make_bank(pre, b.spec, c) for b in pre.banks] for c in CODECS}
    spread = sum(b.nbytes for b in banks["bf16"]) - sum(b.nbytes for b in banks["mxfp4"])
    request = allocation.Request(1, text, model_dir, CODECS)
    with pytest.raises(allocation.ConvertError) as refused:
        allocation.allocate(pre, request)
    least = int(str(refused.value).split("container, ")[1].split(" bytes")[0])
    return least, least + spread


@pytest.fixture(scope="module")
def mixed(headrace, flags, bounds, tmp_path_factory):
    """A container at a fifth of the way, and its budget."""
    budget = (4 * bounds[0] + bounds[1]) // 5
    target = tmp_path_factory.mktemp("mixed") / "o"
    assert run(CHECKPOINT, target, "--budget", budget, *flags) == 0
    return target, budget


# ---- the knapsack ------------------------------------------------------------------------------


@st.composite
def problems(draw):
    items = draw(st.integers(1, 5))
    kinds = draw(st.integers(1, 4))
    numbers = st.integers(1, 40)
    sizes = [[draw(numbers) for _ in range(kinds)] for _ in range(items)]
    errors = [[draw(st.integers(0, 9)) / 4 for _ in range(kinds)] for _ in range(items)]
    return sizes, errors, draw(st.integers(0, 40 * items))


def totals(sizes, errors, picks):
    return (sum(e[i] for e, i in zip(errors, picks)), sum(s[i] for s, i in zip(sizes, picks)))


@given(problems(), st.sampled_from([1, 4096]))
@settings(max_examples=200, deadline=None)
def test_choice_is_the_best_of_all(problem, unit):
    sizes, errors, budget = problem
    sizes = [[unit * s for s in row] for row in sizes]
    budget *= unit
    every = itertools.product(*(range(len(row)) for row in sizes))
    fitting = [t for t in (totals(sizes, errors, p) for p in every) if t[1] <= budget]
    picks = knapsack.choose(sizes, errors, budget)
    assert (picks is None) == (not fitting)
    if picks is not None:
        assert totals(sizes, errors, picks) == min(fitting)


@given(problems(), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_rounded_sizes_keep_the_budget_and_its_order(problem, more):
    sizes, errors, budget = problem
    saved, knapsack.STATES = knapsack.STATES, 7
    try:
        small, large = (knapsack.choose(sizes, errors, b) for b in (budget, budget + more))
    finally:
        knapsack.STATES = saved
    assert (small is None) == (sum(map(min, sizes)) > budget)
    if small is not None:
        assert totals(sizes, errors, small)[1] <= budget
        assert totals(sizes, errors, large)[1] <= budget + more
        assert totals(sizes, errors, large)[0] <= totals(sizes, errors, small)[0]


# ---- what is measured --------------------------------------------------------------------------


def activated(gate, up, ffn):
    """formats/container.md, number by number."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    if ffn["activation"] == "silu_glu":
        return gate * sigmoid(gate) * up
    if ffn["activation"] == "clamped_glu":
        gate, up = np.minimum(gate, ffn["limit"]), np.clip(up, -ffn["limit"], ffn["limit"])
        return (up + 1) * gate * sigmoid(ffn["alpha"] * gate)
    beta, linear = ffn["beta"], ffn["linear_beta"]
    return beta * np.tanh(gate / beta) * sigmoid(gate) * (linear * np.tanh(up / linear) if linear else up)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss", "kimi_k3"])
def test_errors_equal_a_direct_computation(name, monkeypatch):
    """All experts taken: the weighted squared error over every route, one by one."""
    from headrace.quant import Quantizer

    monkeypatch.setattr(calibration, "EXPERTS", 1000)
    monkeypatch.setattr(calibration, "_BLOCK_ROWS", 24)
    pre = preflight(FIXTURES / name, Options("auto", tokenizer=False))
    pre.raise_faults()
    spec = pre.banks[-1].spec
    ffn = part_of(pre, spec.layer)
    rng = np.random.default_rng(3)
    rows = 12
    sample = calibration.Sample(
        rng.standard_normal((rows, spec.hidden), np.float32) * 2,
        np.array([rng.permutation(spec.experts)[:2] for _ in range(rows)], np.int32),
        rng.random((rows, 2), np.float32),
    )
    banks = [make_bank(pre, spec, codec) for codec in ("int8", "int4", "rvq2")]
    with_books = calibration._with_books(pre, banks[2])
    books = with_books.books[spec.layer]
    got = calibration.layer_errors(pre, banks, sample, ffn)

    def expert(e, matrices, x):
        bias = [source_rows.read_numbers(pre.checkpoint, (p,), NonFinite()).astype(float)
                for p in spec.biases(e)] if spec.biases else [0, 0, 0]
        gate, up, down = (m.astype(float) for m in matrices)
        return down @ activated(gate @ x + bias[0], up @ x + bias[1], ffn) + bias[2]

    def coded(bank, e, source):
        record = writer.encode_record(with_books, bank, e)[0]
        for kind, (at, m) in enumerate(zip(bank.parts, source)):
            blob = record[at : at + matrix_bytes(bank.codec, *m.shape)]
            if bank.codec == "rvq2x256":
                yield Quantizer(bank.codec).decode(blob, *m.shape, books[kind])
            else:
                yield decode(bank.codec, blob, *m.shape)

    output, errors = 0.0, [0.0, 0.0, 0.0]
    for x, ids, weights in zip(sample.inputs.astype(float), sample.experts, sample.weights):
        for e, w in zip(ids, weights.astype(float)):
            source = [source_rows.read_rows(pre.checkpoint, (p,), 0, p.total_rows, NonFinite())
                      for p in spec.parts(e)]
            exact = expert(e, source, x)
            output += w**2 * (exact @ exact) / rows
            for i, bank in enumerate(banks):
                difference = expert(e, coded(bank, e, source), x) - exact
                errors[i] += w**2 * (difference @ difference) / rows
    assert got.output == pytest.approx(output, rel=1e-9)
    assert got.errors == pytest.approx(errors, rel=1e-6)


def test_sampled_experts_stand_for_the_layer():
    rng = np.random.default_rng(5)
    experts = np.array([rng.permutation(40)[:4] for _ in range(300)], np.int32)
    weights = rng.random((300, 4), np.float32)
    chosen = calibration.chosen_experts(calibration.Sample(np.zeros((300, 1)), experts, weights), 40)
    assert len(chosen) == calibration.EXPERTS and sum(share for _, share in chosen) == 1
    weights[experts == 7] *= 100  # one expert has nearly all
    chosen = calibration.chosen_experts(calibration.Sample(np.zeros((300, 1)), experts, weights), 40)
    assert dict(chosen)[7] == 1


def test_captured_rows_are_the_evenly_spaced_ones(headrace, model_dir, text, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_ROWS", 37)
    pre = preflight(CHECKPOINT, Options("auto"))
    samples = calibration.capture(model_dir, text.read_bytes(), pre, lambda done, total: None)
    whole = {bank.spec.layer: [] for bank in pre.banks}
    with headrace.Model(model_dir, ctx=512, chunk=100, threads=1) as model:
        ids = model.tokenize(text.read_text())
        for first in range(0, len(ids), 512):
            model.layer_inputs(
                ids[first : first + 512], lambda layer, *arrays: whole[layer].append(arrays)
            )
    assert len(ids) > 1024
    at = np.arange(37) * len(ids) // 37
    for layer, parts in whole.items():
        for i, name in enumerate(("inputs", "experts", "weights")):
            expected = np.concatenate([part[i] for part in parts])[at]
            assert np.array_equal(getattr(samples[layer], name), expected)


# ---- containers --------------------------------------------------------------------------------


def predicted(path: Path) -> float:
    found = manifest(path)["provenance"]["allocation"]
    return sum(row["errors"][c] for row, c in zip(found["table"], found["codecs"]))


def test_mixed_container(headrace, mixed, model_dir, model_bf16, text):
    """It holds the budget, and every bank is byte for byte that of a uniform container."""
    target, budget = mixed
    found = manifest(target)
    codecs = [bank["codec"] for bank in found["experts"]]
    assert len(set(codecs)) > 1 and set(codecs) <= set(CODECS)
    assert 0.9 * budget < size(target) <= budget
    uniform = {"int8": tree(model_dir), "bf16": tree(model_bf16)}
    for bank, digest in ((b, tree(target)[b["file"]]) for b in found["experts"]):
        if bank["codec"] in uniform:
            assert digest == uniform[bank["codec"]][bank["file"]]
    assert tree(target)["trunk.bin"] == uniform["int8"]["trunk.bin"]
    stated = found["provenance"]["allocation"]
    assert stated["codecs"] == codecs and stated["budget"] == budget
    assert stated["calibration"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert stated["reference"] == tree(model_dir)["manifest.json"]
    for row in stated["table"]:
        assert row["errors"]["bf16"] == 0 < row["errors"]["int8"] < row["errors"]["mxfp4"]
        assert row["errors"]["mxfp4"] < 0.1 * row["output"]
    assert headrace.verify(target) == []


def test_mixed_container_has_the_same_bits_everywhere(headrace, mixed):
    target, _ = mixed
    digests = set()
    for isa in ("reference", "avx2", "avx512", "neon", "auto"):
        for threads, chunk in ((1, 64), (3, 7)):
            try:
                with headrace.Model(target, ctx=128, isa=isa, threads=threads, chunk=chunk) as m:
                    ids = m.tokenize((ROOT / "models" / "val.txt").read_text()[:300])
                    digests.add(hashlib.sha256(m.logits(ids).tobytes()).hexdigest())
            except (headrace.UsageError, headrace.UnsupportedError):
                assert isa not in ("reference", "auto")
    assert len(digests) == 1


def test_codebooks_are_counted(headrace, text, model_dir, tmp_path, monkeypatch, capsys):
    """With --feedback too, which is part of what a finished container is compared with."""
    monkeypatch.setattr(calibration, "EXPERTS", 1)
    monkeypatch.setattr(codebooks, "_SAMPLES", 1 << 12)
    target = tmp_path / "o"
    flags = ["--calibration", text, "--reference", model_dir, "--quiet", "--candidates",
             "int8,rvq2", "--effort", "greedy", "--budget", 11_000_000]
    assert run(CHECKPOINT, target, "--feedback", *flags) == 0
    codecs = {bank["codec"] for bank in manifest(target)["experts"]}
    assert codecs == {"int8", "rvq2x256"} and size(target) <= 11_000_000
    assert headrace.verify(target) == []
    with headrace.Model(target, ctx=64) as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()
    assert run(CHECKPOINT, target, *flags) == 2
    assert "--feedback was" in capsys.readouterr().err
    monkeypatch.setattr(allocation, "capture", None)
    monkeypatch.setattr(feedback, "capture", None)
    assert run(CHECKPOINT, target, "--feedback", *flags) == 0  # nothing to do, nothing measured


def test_same_bytes_again(mixed, flags, tmp_path, monkeypatch):
    target, budget = mixed
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(CHECKPOINT, tmp_path / "o", "--budget", budget, *flags) == 0
    assert tree(tmp_path / "o") == tree(target)


def test_more_budget_never_predicts_more_error(mixed, flags, bounds, text, model_dir, monkeypatch):
    """From the smallest to more than is useful; the table of the finished container is reused."""
    target, _ = mixed
    monkeypatch.setattr(allocation, "capture", None)
    least, most = bounds
    before, chosen = np.inf, set()
    for budget in [least + (most - least) * i // 7 for i in range(8)] + [most + 10**9]:
        pre = preflight(CHECKPOINT, Options("auto"))
        found = allocation.allocate(
            pre, allocation.Request(budget, text, model_dir, CODECS), target
        ).options.allocation
        error = sum(row["errors"][c] for row, c in zip(found.table, found.codecs))
        assert error <= before
        before = error
        chosen.add(found.codecs)
    assert before == 0 and len(chosen) > 5


def test_smallest_budget(flags, bounds, tmp_path, capsys):
    least, _ = bounds
    assert run(CHECKPOINT, tmp_path / "o", "--budget", least - 1, *flags) == 2
    said = capsys.readouterr().err
    assert f"{least} bytes (mxfp4 experts, int8 trunk)" in said and str(least - 1) in said
    assert not (tmp_path / "o").exists()
    assert run(CHECKPOINT, tmp_path / "o", "--budget", least, *flags) == 0
    assert {bank["codec"] for bank in manifest(tmp_path / "o")["experts"]} == {"mxfp4"}
    assert least - 4000 < size(tmp_path / "o") <= least


def test_plan_shows_the_table(mixed, flags, capsys):
    target, budget = mixed
    assert run(CHECKPOINT, target, "--budget", budget, "--plan", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("budget"))
    rows = [line.split() for line in lines[start + 2 : start + 10]]
    assert [row[0] for row in rows] == [str(i) for i in range(8)]
    assert [row[-1] for row in rows] == [b["codec"] for b in manifest(target)["experts"]]
    assert run(CHECKPOINT, target, "--budget", budget, "--plan", "--json", *flags) == 0
    assert json.loads(capsys.readouterr().out)["options"]["allocation"]["budget"] == budget


def test_resume_measures_nothing_and_refuses_another_budget(
    mixed, flags, text, tmp_path, monkeypatch, capsys
):
    whole, budget = mixed
    target = tmp_path / "o"

    def interrupt(name: str) -> None:
        if name == "experts-0001.bin":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        real = writer.convert
        patch.setattr(cli, "convert", lambda *a, **k: real(*a, **{**k, "file_done": interrupt}))
        assert run(CHECKPOINT, target, "--budget", budget, *flags) == 130
    monkeypatch.setattr(allocation, "capture", None)
    capsys.readouterr()
    assert run(CHECKPOINT, target, "--budget", budget + 1, *flags) == 2
    assert f"--budget was {budget} bytes, now {budget + 1}" in capsys.readouterr().err
    assert run(CHECKPOINT, target, "--quiet") == 2
    assert "--budget was given, now not given" in capsys.readouterr().err
    assert run(CHECKPOINT, target, "--budget", budget, *flags) == 0
    assert tree(target) == tree(whole)
    assert run(CHECKPOINT, target, "--budget", budget, "--json", *flags) == 0
    assert json.loads(capsys.readouterr().out)["already_converted"]
    monkeypatch.undo()
    with open(text, "rb") as file:
        other = tmp_path / "other.txt"
        other.write_bytes(file.read()[:600])
    assert run(CHECKPOINT, target, "--budget", budget, *flags, "--calibration", other) == 2
    assert "--calibration is another text" in capsys.readouterr().err


def test_feedback_makes_products_nearer(text, model_dir, monkeypatch):
    """On what the expert read and on what it read in a text of its own, at the same bytes."""
    monkeypatch.setattr(codebooks, "_SAMPLES", 1 << 12)
    pre = preflight(CHECKPOINT, Options("rvq3", effort="greedy"))
    bank = pre.banks[3]
    pre = calibration._with_books(pre, bank)
    texts = (ROOT / "models" / "val.txt").read_bytes()[5000:60000], text.read_bytes()
    samples, other = (calibration.capture(model_dir, t, pre, lambda done, total: None, 4096) for t in texts)
    fed = replace(pre, feedback=feedback.Feedback(samples))
    expert = int(np.bincount(other[3].experts.ravel()).argmax())
    source = [source_rows.read_rows(pre.checkpoint, (p,), 0, p.total_rows, NonFinite()).astype(float)
              for p in bank.spec.parts(expert)]
    read = other[3].inputs[(other[3].experts == expert).any(axis=1)].astype(float)
    ffn = part_of(pre, 3)
    inputs = [read, read, activated(read @ source[0].T, read @ source[1].T, ffn)]
    matrices = [requantised.decoded(p, bank, writer.encode_record(p, bank, expert)[0]) for p in (pre, fed)]
    for kind, least in enumerate((0.95, 0.95, 0.75)):
        errors = [float(((inputs[kind] @ (m[kind] - source[kind]).T) ** 2).sum()) for m in matrices]
        assert errors[1] < least * errors[0], kind


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss"])
def test_moments_are_those_of_what_experts_read(name, monkeypatch):
    """An expert with few tokens takes gate's and up's from the layer; down's are always its own."""
    monkeypatch.setattr(feedback, "_BLOCK_ROWS", 24)
    pre = preflight(FIXTURES / name, Options("auto", tokenizer=False))
    bank = make_bank(pre, pre.banks[0].spec, "rvq3")
    spec, ffn = bank.spec, part_of(pre, bank.spec.layer)
    rng = np.random.default_rng(4)
    inputs = rng.standard_normal((90, spec.hidden), np.float32) * np.linspace(0.5, 2, spec.hidden, dtype=np.float32)
    experts = np.where(np.arange(90) < 80, 0, 1)[:, None].astype(np.int32)
    weights = rng.random((90, 1), np.float32)
    made = feedback.Feedback({spec.layer: calibration.Sample(inputs, experts, weights)})
    quantizer = codebooks.quantizer(bank.codec)
    bad = NonFinite()

    def wanted(parts: list[tuple[float, np.ndarray]], damping: float) -> np.ndarray:
        rows = np.concatenate([np.sqrt(total / (x**2).sum()) * x for total, x in parts if x.size])
        return quantizer.moments(rows.astype(np.float32), max(damping, 0.5 * rows.shape[1] / len(rows)))

    layer = inputs.astype(float)
    for expert, share in ((0, 80), (1, 10)):
        gate, up = (source_rows.read_rows(pre.checkpoint, (p,), 0, p.total_rows, bad).astype(float)
                    for p in spec.parts(expert)[:2])
        bias = [source_rows.read_numbers(pre.checkpoint, (p,), bad) for p in spec.biases(expert)[:2]] \
            if spec.biases else [0, 0]
        own = experts[:, 0] == expert
        active = activated(layer @ gate.T + bias[0], layer @ up.T + bias[1], ffn)
        outer, inner = made(pre, bank, expert)
        want = [(256, layer), (share, layer[own] * weights[own])] if share == 80 else [(1, layer)]
        assert outer.view(np.float32) == pytest.approx(wanted(want, 0.1).view(np.float32), abs=2e-3)
        assert inner.view(np.float32) == pytest.approx(
            wanted([(256, active), (share, active[own] * weights[own])], 0.3).view(np.float32), abs=2e-3)


@pytest.mark.parametrize(
    "change, said",
    [
        (["--experts", "int8"], "leave --experts out"),
        (["--candidates", "int8,int9"], "'int9' is none of"),
        (["--candidates", "auto"], "'auto' is none of"),
        (["--budget", "12 parsecs"], "is no size"),
        (["--reference", FIXTURES], "manifest.json"),
        (["--calibration", ROOT], "ot a regular file"),
    ],
)
def test_wrong_requests(flags, bounds, tmp_path, capsys, change, said):
    code = run(CHECKPOINT, tmp_path / "o", "--budget", bounds[1], *flags, *change)
    assert code in (2, 3, 5) and said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_companions_belong_together(text, model_dir, tmp_path, capsys):
    assert run(CHECKPOINT, tmp_path / "o", "--budget", "1GiB", "--calibration", text) == 2
    assert "--budget needs --reference" in capsys.readouterr().err
    assert run(CHECKPOINT, tmp_path / "o", "--reference", model_dir) == 2
    assert "--reference means nothing without --budget or --feedback" in capsys.readouterr().err
    assert run(CHECKPOINT, tmp_path / "o", "--feedback", "--calibration", text,
               "--reference", model_dir) == 2
    assert "--feedback is for experts in rvq3" in capsys.readouterr().err


def test_reference_of_another_checkpoint(text, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    assert run(FIXTURES / "qwen3_5_moe", other, "--no-tokenizer", "--quiet") == 0
    assert run(CHECKPOINT, tmp_path / "o", "--budget", "1GiB", "--calibration", text,
               "--reference", other) == 2
    assert "is a container of another checkpoint" in capsys.readouterr().err


@given(st.integers(0, 10**12))
def test_sizes_are_read_exactly(count):
    assert allocation.parse_size(str(count)) == allocation.parse_size(f"{count}B") == count
    assert allocation.parse_size(f"{count}.5 KiB") == count * 1024 + 512
    assert allocation.parse_size("18GiB") == 18 << 30 and allocation.parse_size("1.5gb") == 15 * 10**8
