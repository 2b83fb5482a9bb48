"""Cases of docs/cases.md about converting: options, widths, positions."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import IDS_ONLY, manifest, run
from headrace_tools.convert import cli
from headrace_tools.convert.options import EXPERT_CHOICES, Allocation, Options, differing
from tiny_checkpoint import random_weights, text_config, write_checkpoint

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.fixture
def without_engine(monkeypatch):
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


# ---- resuming ----

OTHER_OPTIONS = {
    "experts": ("nl4", "--experts"), "trunk": ("bf16", "--trunk"), "tokenizer": (False, "--no-tokenizer"),
    "allow_nonfinite": (True, "--allow-nonfinite"), "allow_rounding": (True, "--allow-rounding"),
    "allocation": (Allocation(1 << 30, "a", "b"), "--budget"), "effort": ("high", "--effort"),
    "feedback": ("0" * 64, "--feedback"), "activations": (22, "--activations"),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Options)])
def test_b06_every_option_that_decides_bytes_is_compared(field):
    """A resumed conversion names the option that differs, whichever it is: also one added later."""
    value, flag = OTHER_OPTIONS[field]
    base = Options(experts="rvq3")
    reasons = differing(base.as_dict(), dataclasses.replace(base, **{field: value}).as_dict())
    assert any(flag in reason for reason in reasons)


def test_b06_killed_at_4_bits_and_resumed_at_3(without_engine, tmp_path, capsys):
    source, target = write_checkpoint(tmp_path / "m"), tmp_path / "o"
    assert run(source, target, "--experts", "nl4", *IDS_ONLY) == 0
    log = {"kind": "start", "version": 1, "converter": manifest(target)["provenance"]["converter"]}
    (target / "conversion.log").write_text(json.dumps(log | {"options": Options("nl4", tokenizer=False).as_dict(),
                                                             "source": {}}) + "\n")
    (target / "manifest.json").unlink()
    before = sorted(p.name for p in target.iterdir())
    capsys.readouterr()
    assert run(source, target, "--experts", "rvq3", *IDS_ONLY) == 2
    assert "--experts was nl4, now rvq3" in capsys.readouterr().err
    assert sorted(p.name for p in target.iterdir()) == before


# ---- widths that are no multiple of anything ----


@pytest.fixture(scope="module")
def awkward(tmp_path_factory) -> Path:
    """Hidden 72, inner 40, head dim 24, vocabulary 97; groups and panels are 32 and 64. Every expert
    is chosen, so that rounding moves no token to another one."""
    config = text_config(num_experts_per_tok=5)
    weights = {name: values * np.float32(4) for name, values in random_weights(config).items()}
    return write_checkpoint(tmp_path_factory.mktemp("awkward") / "m", config, weights)


IDS = [1, 5, 9, 96, 0, 33]


@pytest.fixture(scope="module")
def exact(awkward, headrace, tmp_path_factory) -> np.ndarray:
    """Logits of the weights as they are."""
    target = tmp_path_factory.mktemp("exact") / "f32"
    assert run(awkward, target, "--experts", "f32", "--trunk", "f32", *IDS_ONLY) == 0
    with headrace.Model(target, ctx=32) as model:
        return model.logits(IDS).astype(np.float64)


#: codec -> relative error of the logits that its bits explain, against float32
TOLERANCE = {"bf16": 1e-6, "int8": 0.05, "mxfp4": 0.5, "int4": 0.4, "nl4": 0.4, "rvq3": 0.6, "rvq3x256": 0.6,
             "rvq2": 0.9}


def test_b11_no_codec_is_left_out():
    assert set(TOLERANCE) == set(EXPERT_CHOICES) - {"auto", "f32"}


@pytest.mark.parametrize("codec", TOLERANCE)
def test_b11_awkward_widths_in_every_codec(headrace, awkward, exact, tmp_path, codec, capsys):
    """Padding is a documented rule and counted; products over the padded tail are those of the weights."""
    options = ["--experts", codec, "--trunk", "f32", *(["--effort", "greedy"] if codec.startswith("rvq") else [])]
    assert run(awkward, tmp_path / "o", "--plan", "--no-tokenizer", *options) == 0
    assert "% of it padding" in capsys.readouterr().out
    assert run(awkward, tmp_path / "o", *options, *IDS_ONLY) == 0
    with headrace.Model(tmp_path / "o", ctx=32) as model:
        rows = model.logits(IDS)
    with headrace.Model(tmp_path / "o", ctx=32, isa="reference", threads=1) as model:
        assert np.array_equal(model.logits(IDS), rows)
    error = np.linalg.norm(rows - exact) / np.linalg.norm(exact)
    assert 0 <= error <= TOLERANCE[codec], error


# ---- positions ----


def rotating() -> list[str]:
    """Fixtures whose config has an entry about rotary positions."""
    out = []
    for folder in sorted(FIXTURES.iterdir()):
        if (folder / "config.json").exists():
            config = json.loads((folder / "config.json").read_text())
            text = config.get("text_config", config)
            if text.get("qk_rope_head_dim") or text.get("rope_theta") or text.get("rope_parameters"):
                out.append(folder.name)
    return out


@pytest.mark.parametrize("name", rotating())
def test_b57_unknown_kinds_of_rotation(without_engine, tmp_path, capsys, name):
    """In every family: a scaling nobody implemented is refused by name, not ignored."""
    source = tmp_path / "m"
    shutil.copytree(FIXTURES / name, source)
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            for kind in ("type", "rope_type"):
                text[key].pop(kind, None)
            text[key]["rope_type"] = "spiral"
            break
    else:
        text["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    (source / "config.json").write_text(json.dumps(config))
    assert run(source, tmp_path / "o", *IDS_ONLY) == 3
    message = capsys.readouterr().err
    assert "spiral" in message and not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3_eps", "kimi_k3_eps", "qwen3_5_moe_eps", "gpt_oss"])
def test_b57_the_order_of_two_turns_matters(headrace, fixture_models, name):
    """Two turns exchanged give other logits, and a turn later is not the turn at once."""
    one, two, question = [5, 9, 11, 7], [40, 3, 22, 31], [17]
    with headrace.Model(fixture_models(name), ctx=32) as model:
        def last(*turns: list[int]) -> np.ndarray:
            return model.logits([i for turn in turns for i in turn])[-1]

        straight, exchanged = last(one, two, question), last(two, one, question)
        assert np.abs(straight - exchanged).max() > 1e-3 * np.abs(straight).max()
        assert np.abs(straight - last(two, question)).max() > 1e-3 * np.abs(straight).max()
