"""Settings that no fixture has, against NumPy models in float64 that the fixtures confirm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from convert_helpers import IDS_ONLY, manifest, run
from oracle.branch_reference import BranchModel
from oracle.plain_reference import PlainModel
from oracle.random_checkpoints import CASES, write_case

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
PLAIN = ("qwen3_moe", "qwen3_moe_yarn", "olmoe", "mixtral", "glm4_moe", "glm4_moe_air")
BRANCHES = ("qwen4_exp", "qwen4_exp_vl")
LENGTHS = (1, 5, 40)


def reference(directory: Path):
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    return (BranchModel if text["model_type"] == "qwen4_exp_text" else PlainModel)(directory)


@pytest.mark.parametrize("name", PLAIN + BRANCHES)
def test_the_references_match_the_fixtures(name):
    model = reference(FIXTURES / name)
    oracle = np.load(FIXTURES / name / "oracle.npz")
    for begin, end in zip(oracle["offsets"][:-1], oracle["offsets"][1:], strict=True):
        trace = model.forward(oracle["input_ids"][begin:end])
        assert np.abs(trace.logits - oracle["logits"][begin:end]).max() < 1e-9
        assert np.array_equal(trace.router_ids, oracle["router_ids"][:, begin:end])
        weights = oracle["router_weights"][:, begin:end]
        assert np.abs(trace.router_weights - weights).max() < 1e-12


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request, tmp_path_factory):
    """(container, reference model, prompts) of a random checkpoint, stored exactly."""
    name = request.param
    base = tmp_path_factory.mktemp(name)
    source = write_case(name, base / "source")
    codec = "bf16" if CASES[name][1] == "BF16" else "f32"
    options = ("--experts", codec, "--trunk", codec)
    assert run(source, base / "model", *options, *IDS_ONLY) == 0
    rng = np.random.default_rng(5)
    vocab = CASES[name][0]["vocab_size"]
    prompts = [rng.integers(0, vocab, n) for n in LENGTHS]
    if CASES[name][0]["model_type"] == "qwen4_exp_text":
        eos = CASES[name][0]["eos_token_id"]
        prompts[2][[3, 11, 12, 39]] = eos if isinstance(eos, int) else eos[0]
    model = reference(source)
    return base / "model", [(p, model.forward(p)) for p in prompts]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_logits_and_routes(case, headrace, chunk):
    path, expected = case
    with headrace.Model(path, chunk=chunk, ctx=64) as model:
        for prompt, trace in expected:
            got = model.logits(prompt)
            assert np.abs(got - trace.logits).max() <= 5e-5 * np.abs(trace.logits).max()
            ids, weights = model.routes(prompt)
            order = np.argsort(ids, axis=-1)
            np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), trace.router_ids)
            np.testing.assert_allclose(
                np.take_along_axis(weights, order, -1), trace.router_weights, atol=1e-4
            )


MARKS = {
    "qwen3_moe_dense_layers": lambda m: [m["ffns"][x["ffn"]]["kind"] for x in m["layers"]]
    == ["dense", "moe", "dense", "dense", "dense"] and m["head"] == "embed" and m["mixers"][0]["bias"],
    "qwen3_moe_yarn_attention_factor": lambda m: m["mixers"][0]["rope_scale"] == 0.75,
    "olmoe_grouped_heads": lambda m: m["mixers"][0]["qk_norm_width"] == "vector",
    "mixtral_window": lambda m: m["mixers"][0]["window"] == 5,
    "granitemoe": lambda m: m["residual"]["multiplier"] == 0.22 and m["embed_scale"] == 11.5,
    "minimax_m2": lambda m: m["mixers"][0]["rotary_dim"] == 6 and m["ffns"][0]["select_bias"],
    "glm4_moe_groups": lambda m: (m["ffns"][1]["groups"], m["ffns"][1]["top_groups"]) == (4, 2)
    and m["ffns"][1]["shared_inner"] == 22,
    "qwen4_exp_two_sites": lambda m: [s["layer"] for s in m["ngram"]["sites"]] == [0, 2],
    "qwen4_exp_long_grams": lambda m: m["ngram"]["order"] == 4 and m["ngram"]["eos"] == 9,
    "qwen4_exp_dense_attention": lambda m: "ngram" not in m and "sparse" not in m["mixers"][0],
    "qwen4_exp_one_tap": lambda m: m["ngram"]["conv_taps"] == 1 and m["ffns"][0]["top_k"] == 1,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_settings_reach_the_manifest(name, tmp_path):
    """Each case is there for something that the fixtures do not use."""
    assert run(write_case(name, tmp_path / "source"), tmp_path / "model", *IDS_ONLY) == 0
    assert MARKS[name](manifest(tmp_path / "model")["model"])


def test_verify_reads_every_row(case, headrace):
    path, _ = case
    assert headrace.verify(path) == []


def test_a_saved_state_continues(case, headrace, tmp_path):
    """What is left after three tokens, saved and loaded, gives the fourth."""
    path, expected = case
    prompt, trace = expected[-1]
    with headrace.Model(path, ctx=64) as model:
        whole = model.generate(prompt, max_tokens=6, ignore_stop_ids=True).ids
        assert whole[0] == trace.logits[-1].argmax()
        model.generate(prompt, max_tokens=3, ignore_stop_ids=True)
        model.save_state(tmp_path / "state")
        model.generate(prompt[:7], max_tokens=1, ignore_stop_ids=True)
        model.load_state(tmp_path / "state")
        rest = model.generate([], max_tokens=3, ignore_stop_ids=True, keep=True)
    assert rest.ids == whole[3:]
