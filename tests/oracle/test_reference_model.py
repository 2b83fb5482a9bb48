"""The NumPy reference against the oracle fixtures, which another implementation made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from oracle.reference_model import ReferenceModel

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("qwen3_5_moe*"))


def test_all_fixtures_are_here():
    assert len(FIXTURES) == 6


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda p: p.name)
def test_float64_matches_the_oracle(directory):
    model = ReferenceModel(directory)
    oracle = np.load(directory / "oracle.npz")
    layer_out = np.load(directory / "trace.npz")["layer_out"]
    offsets = oracle["offsets"]
    for begin, end in zip(offsets[:-1], offsets[1:]):
        trace = model.forward(oracle["input_ids"][begin:end])
        assert np.abs(trace.logits - oracle["logits"][begin:end]).max() < 1e-9
        assert np.abs(trace.layer_out - layer_out[:, begin:end]).max() < 1e-4
        assert np.array_equal(trace.router_ids, oracle["router_ids"][:, begin:end])
        assert np.abs(trace.router_weights - oracle["router_weights"][:, begin:end]).max() < 1e-12


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda p: p.name)
def test_greedy_continuation_matches(directory):
    """The last prompt with its continuation in one pass: every next id is the arg max."""
    model = ReferenceModel(directory)
    oracle = np.load(directory / "oracle.npz")
    prompt = oracle["input_ids"][oracle["offsets"][-2] : oracle["offsets"][-1]]
    generated = oracle["gen_ids"][-1]
    trace = model.forward(np.concatenate([prompt, generated[:-1]]))
    rows = trace.logits[len(prompt) - 1 :]
    assert np.array_equal(rows.argmax(-1), generated)
    assert np.abs(rows - oracle["gen_logits"][-1]).max() < 1e-5


def test_float32_is_within_the_stated_tolerance():
    directory = next(p for p in FIXTURES if p.name == "qwen3_5_moe_long")
    tolerance = json.loads((directory / "oracle.json").read_text())["stats"][
        "suggested_abs_tol_f32"
    ]
    oracle = np.load(directory / "oracle.npz")
    model = ReferenceModel(directory, np.float32)
    begin, end = oracle["offsets"][-2:]
    logits = model.forward(oracle["input_ids"][begin:end]).logits
    assert logits.dtype == np.float32
    assert np.abs(logits - oracle["logits"][begin:end]).max() < tolerance
