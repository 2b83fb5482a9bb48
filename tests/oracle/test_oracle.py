"""Random checkpoints against the float64 outputs of their reference class (tests/fixtures).

The container holds the weights in bf16, exactly as the checkpoint does, so what differs is
float32 arithmetic: logits within the tolerance each fixture states, greedy ids and routed experts
exactly. Fixtures with MXFP4 experts run a second time with these kept as MXFP4, whose products with
22-bit activations have to meet the same tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NAMES = sorted(p.parent.name for p in FIXTURES.glob("*/oracle.json"))
NATIVE = [name for name in NAMES if "mxfp4" in (FIXTURES / name / "config.json").read_text()]


def test_fixtures_are_there():
    assert len(NAMES) >= 30, f"tests/fixtures holds {NAMES}"
    assert {"gpt_oss", "kimi_k3"} < set(NATIVE)


@pytest.fixture(params=NAMES + [f"{name}-mxfp4" for name in NATIVE])
def oracle(request, fixture_models, headrace):
    name, _, native = request.param.partition("-")
    with np.load(FIXTURES / name / "oracle.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    stated = json.loads((FIXTURES / name / "oracle.json").read_text())
    arrays["tolerance"] = stated["stats"]["suggested_abs_tol_f32"]
    arrays["path"] = fixture_models(name, "auto" if native else "bf16")
    described = json.loads((arrays["path"] / "manifest.json").read_text())
    model = described["model"]
    kinds = {(bank["codec"], bank.get("activations", 8)) for bank in described["experts"]}
    assert (kinds == {("mxfp4", 22)}) == bool(native)
    # A selection bias ranks experts by another number than their weight.
    arrays["biased"] = any(f.get("select_bias") for f in model["ffns"])
    offsets = arrays["offsets"]
    arrays["prompts"] = [arrays["input_ids"][a:b] for a, b in zip(offsets, offsets[1:])]
    return arrays


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_logits(oracle, headrace, chunk):
    with headrace.Model(oracle["path"], chunk=chunk, ctx=128) as model:
        for p, prompt in enumerate(oracle["prompts"]):
            want = oracle["logits"][oracle["offsets"][p] : oracle["offsets"][p + 1]]
            got = model.logits(prompt)
            assert got.shape == want.shape and got.dtype == np.float32
            assert np.abs(got - want).max() <= oracle["tolerance"], f"prompt {p}"


def test_greedy_ids_and_their_logits(oracle, headrace):
    with headrace.Model(oracle["path"], ctx=128) as model:
        for p, prompt in enumerate(oracle["prompts"]):
            want = oracle["gen_ids"][p]
            made = model.generate(prompt, max_tokens=len(want), ignore_stop_ids=True)
            assert made.ids == want.tolist(), f"prompt {p}"
            assert made.finish_reason == "length"
            rows = model.logits([*prompt, *want[:-1]])[len(prompt) - 1 :]
            assert np.abs(rows - oracle["gen_logits"][p]).max() <= oracle["tolerance"]


def test_routed_experts(oracle, headrace):
    with headrace.Model(oracle["path"], ctx=128) as model:
        for p, prompt in enumerate(oracle["prompts"]):
            rows = slice(oracle["offsets"][p], oracle["offsets"][p + 1])
            ids, weights = model.routes(prompt)
            # The engine reports rank order, the fixture ascending id.
            order = np.argsort(ids, axis=-1)
            np.testing.assert_array_equal(np.take_along_axis(ids, order, -1),
                                          oracle["router_ids"][:, rows])
            np.testing.assert_allclose(np.take_along_axis(weights, order, -1),
                                       oracle["router_weights"][:, rows], atol=2e-3)
            if not oracle["biased"]:
                assert (np.diff(weights, axis=-1) <= 0).all(), "rank order is by falling weight"


def test_routed_experts_of_generated_tokens(oracle, headrace):
    with headrace.Model(oracle["path"], ctx=128) as model:
        count = oracle["gen_ids"].shape[1]
        for p, prompt in enumerate(oracle["prompts"]):
            ids, _weights = model.routes([*prompt, *oracle["gen_ids"][p]])
            want = oracle["gen_router_ids"][:, p * count : (p + 1) * count]
            np.testing.assert_array_equal(np.sort(ids[:, len(prompt) :], axis=-1), want)
