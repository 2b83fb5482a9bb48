"""Converting the DeepSeek and Kimi families: plans of the real models, quantised sources, faults."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import IDS_ONLY, data_files, manifest, run
from headrace_tools.convert import cli
from random_models import Tensors, bf16_bits, deepseek, kimi, write_checkpoint
from sparse_models import MODELS, size_of

from conftest import FIXTURES, ROOT, convert


@pytest.fixture
def without_engine(monkeypatch):
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


# -- plans of the published models -------------------------------------------------------------

PUBLISHED = {
    # Tensors, shards, text parameters without draft layers (and the unit they are stated in),
    # bytes of all tensors where the release's index states them.
    "kimi_k3": (497_220, 96, 2779.48e9, 0.01e9, 1_560_860_324_864),
    "deepseek_v3": (91_991, 163, 671.0e9, 0.1e9, None),
    "kimi_linear": (20_493, 20, 49.1e9, 0.1e9, None),
}


@dataclass
class Published:
    """A sparse checkpoint's plan: report, cost, number of shards, and a container of holes."""

    report: dict
    seconds: float
    peak_bytes: int
    shards: int
    container: Path


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Callable: name -> Published, planned once; each step in a process of its own, because a
    child's peak memory starts at what its parent holds."""
    done: dict[str, Published] = {}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}

    def plan(name: str) -> Published:
        if name not in done:
            base = tmp_path_factory.mktemp(name)
            source, container = base / "source", base / "container"
            writer = [sys.executable, str(ROOT / "tests" / "sparse_models.py"), name, str(source)]
            subprocess.run(writer, check=True)
            argv = [sys.executable, str(ROOT / "tests" / "plan_published.py"), source, container]
            ran = subprocess.run(argv, env=env, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
            seconds, peak = ran.stderr.split()[-2:]
            shards = len(list(source.glob("*.safetensors")))
            done[name] = Published(
                json.loads(ran.stdout), float(seconds), int(peak), shards, container
            )
        return done[name]

    return plan


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_of_a_published_model(name, plans):
    tensors, shards, parameters, unit, total_bytes = PUBLISHED[name]
    planned = plans(name)
    report = planned.report
    assert planned.seconds < 300 and planned.peak_bytes < 2 << 30, planned
    assert report["faults"] == []
    assert report["source_tensors"] == tensors and planned.shards == shards
    assert abs(report["parameters"] - parameters) <= unit / 2
    declared = sum(size_of(dtype, shape) for _, dtype, shape, _ in MODELS[name][1]())
    assert sum(report["source_bytes"].values()) == declared
    if total_bytes is not None:
        assert declared == total_bytes


def test_kimi_k3_numbers(plans):
    """Every figure against arithmetic from the config alone."""
    report = plans("kimi_k3").report
    expert = 3 * 3584 * 3072
    packed = 92 * 896 * expert * 17 // 32
    assert report["source_bytes"]["experts"] == packed
    vision = report["skipped"]["vision"]["bytes"] + report["skipped"]["projector"]["bytes"]
    # Two bytes a weight, and two more for each that the release keeps in float32. In the container
    # 187 pairs of norm and projection are one vector each, and the zeros behind A_log are gone.
    text = (1_560_860_324_864 - packed - vision - 22_244_864) // 2
    assert report["parameters"] == 92 * 896 * expert + text - 187 * 7168 - 69 * 32
    assert report["record_bytes"] == -(-(64 + expert * 17 // 32) // 4096) * 4096  # kept as MXFP4
    assert [n for n in report["files"] if n.startswith("experts-")] == [
        f"experts-{i:04d}.bin" for i in range(1, 93)
    ]


def test_deepseek_v3_numbers(plans):
    report = plans("deepseek_v3").report
    assert report["parameters"] == 671_026_419_200
    assert report["skipped"]["mtp"]["tensors"] == 1564
    assert len([n for n in report["files"] if n.startswith("experts-")]) == 58
    assert any("activations" in note for note in report["notes"])


STATES = {
    # Layers of latent attention, numbers they keep of a token, float32 numbers of the delta layers.
    "kimi_k3": (24, 512 + 64, 69 * (96 * 128 * 128 + 9 * 96 * 128)),
    "deepseek_v3": (61, 512 + 64, 0),
    "kimi_linear": (7, 512 + 64, 20 * (32 * 128 * 128 + 9 * 32 * 128)),
}


@pytest.mark.parametrize("name", STATES)
def test_engine_plans_the_state_of_long_contexts(name, plans, headrace):
    """What grows with the context and what does not, to the alignment of the pieces."""
    layers, width, fixed = STATES[name]
    published = plans(name)
    for ctx in (4096, 131072) + (() if name == "deepseek_v3" else (1 << 20,)):
        plan = headrace.plan(published.container, ctx=ctx)
        exact = 4 * (layers * width * ctx + fixed)
        assert 0 <= plan.state - exact <= 128 * 4096
        assert plan.trunk == published.report["files"]["trunk.bin"]
        assert plan.record_bytes == published.report["record_bytes"]
        parts = (plan.trunk, plan.state, plan.scratch, plan.io, plan.overhead, plan.cache)
        assert plan.total == sum(parts)


# -- quantised sources: the container equals the one of the decoded checkpoint ------------------


def _quantise(tensors: Tensors, chosen: str, encode) -> tuple[Tensors, Tensors]:
    """(quantised, decoded) checkpoints; `encode(name, shape)` gives the stored tensors and the
    values of those whose names match `chosen`."""
    quantised: Tensors = {}
    decoded: Tensors = {}
    for name, (dtype, values) in tensors.items():
        if re.search(chosen, name):
            stored, plain = encode(name, values.shape)
            quantised.update(stored)
            decoded[name] = "F32", plain
        else:
            quantised[name] = decoded[name] = dtype, values
    return quantised, decoded


def _same_container(tmp_path: Path, config: dict, plain: dict, pair: tuple[Tensors, Tensors]):
    sources = (
        write_checkpoint(tmp_path / "quantised", config, pair[0]),
        write_checkpoint(tmp_path / "decoded", plain, pair[1], shards=2),
    )
    for options in (("--experts", "int8", "--trunk", "bf16"), ("--experts", "f32", "--trunk", "int8")):
        made = []
        for source in sources:
            target = tmp_path / f"{source.name}-{options[1]}"
            assert run(source, target, *IDS_ONLY, *options) == 0
            made.append(data_files(target))
        assert made[0] == made[1] and len(made[0]) > 1


def test_fp8_blocks_to_the_bit(tmp_path, without_engine):
    """Blocks of 16 x 24, so that most matrices have partial ones at both edges."""
    rng = np.random.default_rng(1)
    config, tensors = deepseek(31, num_nextn_predict_layers=1)
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [16, 24],
    }  # fmt: skip

    def encode(name: str, shape: tuple[int, ...]):
        stored = rng.integers(0, 256, shape, dtype=np.uint8)
        stored[stored & 0x7F == 0x7F] = 0x38
        grid = math.ceil(shape[0] / 16), math.ceil(shape[1] / 24)
        scales = rng.uniform(0.001, 0.02, grid).astype(np.float32)
        exponent, fraction = (stored >> 3) & 15, (stored & 7) / 8
        value = np.where(
            exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent.astype(int) - 7)
        )
        value = np.where(stored & 128, -value, value).astype(np.float32)
        plain = value * np.kron(scales, np.ones((16, 24), np.float32))[: shape[0], : shape[1]]
        return {name: ("F8_E4M3", stored), f"{name}_scale_inv": ("F32", scales)}, plain

    chosen = r"layers.*(proj|a_proj_with_mqa)\.weight$"
    pair = _quantise(tensors, chosen, encode)
    _same_container(tmp_path, config, {**config, "quantization_config": None}, pair)


def test_int4_packed_to_the_bit(tmp_path, without_engine):
    rng = np.random.default_rng(2)
    config, tensors = deepseek(32, model_type="kimi_k2")
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 8, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
        "type": "int",
    }  # fmt: skip
    config["quantization_config"] = {
        "config_groups": {
            "group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip

    def encode(name: str, shape: tuple[int, ...]):
        rows, cols = shape
        codes = rng.integers(0, 16, (rows, cols), dtype=np.uint32)
        padded = np.full((rows, math.ceil(cols / 8) * 8), 8, np.uint32)
        padded[:, :cols] = codes
        words = np.zeros((rows, padded.shape[1] // 8), np.uint32)
        for k in range(8):
            words |= padded[:, k::8] << np.uint32(4 * k)
        bits = bf16_bits(rng.uniform(0.01, 0.1, (rows, math.ceil(cols / 8))))
        scales = np.repeat((bits.astype(np.uint32) << 16).view(np.float32), 8, axis=1)[:, :cols]
        plain = (codes.astype(np.float32) - 8) * scales
        stored = {
            f"{name}_packed": ("I32", words.view(np.int32)),
            f"{name}_scale": ("BF16", bits),
            f"{name}_shape": ("I32", np.array(shape, np.int32)),
        }
        return stored, plain

    pair = _quantise(tensors, r"experts\.\d+\.", encode)
    _same_container(tmp_path, config, {**config, "quantization_config": None}, pair)


def test_mxfp4_to_the_bit(tmp_path, without_engine):
    config, tensors = kimi(33, k3=True, routed_expert_hidden_size=48, moe_intermediate_size=40)
    lut = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    decoded: Tensors = {}
    for name, (dtype, values) in tensors.items():
        if name.endswith("_packed"):
            nibbles = np.empty((values.shape[0], 2 * values.shape[1]), np.uint8)
            nibbles[:, ::2], nibbles[:, 1::2] = values & 15, values >> 4
            scales = tensors[name.replace("_packed", "_scale")][1].astype(int) - 127
            powers = np.repeat(2.0**scales, 32, axis=1)[:, : nibbles.shape[1]]
            plain = (lut[nibbles] * powers).astype(np.float32)
            assert not (plain.view(np.uint32) & 0xFFFF).any()
            decoded[name.removesuffix("_packed")] = "BF16", bf16_bits(plain)
        elif not name.endswith("_scale"):
            decoded[name] = dtype, values
    plain_config = {**config, "text_config": {**config["text_config"], "quantization_config": None}}
    _same_container(tmp_path, config, plain_config, (tensors, decoded))


# -- int8 --------------------------------------------------------------------------------------


def test_int8_stacks_hold_each_head(tmp_path, without_engine):
    """The heads' matrices, decoded by hand from trunk.bin, are those of kv_b within half a step."""
    config, tensors = deepseek(34, qk_nope_head_dim=13, v_head_dim=9, kv_lora_rank=70)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    assert run(source, tmp_path / "model", *IDS_ONLY) == 0
    raw = (tmp_path / "model" / "trunk.bin").read_bytes()
    entries = {t["name"]: t for t in manifest(tmp_path / "model")["trunk"]["tensors"]}
    heads, dn, dv, rank = 3, 13, 9, 70
    bits = tensors["model.layers.1.self_attn.kv_b_proj.weight"][1]
    kv_b = (bits.astype(np.uint32) << 16).view(np.float32).reshape(heads, dn + dv, rank)
    for part, want in (("k_b", kv_b[:, :dn].transpose(0, 2, 1)), ("v_b", kv_b[:, dn:])):
        entry = entries[f"layers.1.mla.{part}"]
        assert entry["shape"] == list(want.shape) and entry["codec"] == "int8"
        rows, cols = want.shape[1:]
        padded = math.ceil(rows / 64) * 64, math.ceil(cols / 64) * 64
        one = 4 * padded[0] + padded[0] * padded[1]
        assert entry["bytes"] == heads * one
        for head in range(heads):
            blob = raw[entry["offset"] + head * one : entry["offset"] + (head + 1) * one]
            scales = np.frombuffer(blob[: 4 * padded[0]], "<f4")
            panels = np.frombuffer(blob[4 * padded[0] :], np.uint8).reshape(
                padded[0] // 64, padded[1] // 4, 64, 4
            )
            for r in range(rows):
                row = panels[r // 64, :, r % 64].reshape(-1)[:cols].astype(np.float32) - 128
                step = np.abs(want[head, r]).max() / 127
                assert abs(scales[r] - step) <= 1e-6 * step
                assert np.abs(scales[r] * row - want[head, r]).max() <= 0.5001 * step


@pytest.mark.parametrize(
    ("name", "trunk", "bound"),
    [
        ("deepseek_v2", "int8", 0.2),
        ("deepseek_v3", "int8", 0.12),
        ("kimi_k2", "int8", 0.2),
        ("kimi_linear", "int8", 0.25),
        ("kimi_k3", "bf16", 0.35),
    ],
)
def test_int8_logits_stay_close(name, trunk, bound, tmp_path, headrace):
    """Median over the tokens of |error| / |logits| (2-norms). Random weights are far more sensitive
    than trained ones: one expert chosen differently changes everything behind it."""
    container = convert(FIXTURES / name, tmp_path / "model", "--experts", "int8", "--trunk", trunk,
                        "--no-tokenizer")  # fmt: skip
    oracle = np.load(FIXTURES / name / "oracle.npz")
    offsets, errors = oracle["offsets"], []
    with headrace.Model(container, ctx=128) as model:
        for begin, end in zip(offsets, offsets[1:]):
            want = oracle["logits"][begin:end]
            got = model.logits(oracle["input_ids"][begin:end])
            errors.append(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1))
    assert 1e-4 < np.median(np.concatenate(errors)) < bound


# -- faults ------------------------------------------------------------------------------------


def refused(tmp_path: Path, capsys, config: dict, tensors: Tensors) -> str:
    """Converting fails with exit code 3, from headers, and leaves nothing; returns the message."""
    source = write_checkpoint(tmp_path / "bad", config, tensors)
    target = tmp_path / "refused"
    capsys.readouterr()
    assert run(source, target, *IDS_ONLY) == 3
    assert not target.exists()
    return capsys.readouterr().err


DEEPSEEK_FAULTS = {
    "rope": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_parameters: type is 'dynamic'",
    ),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
    "yarn key": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16,
                          "slope": 3}},
        "slope",
    ),
    "groups": ({"n_group": 3, "topk_group": 2}, "8 experts do not divide into 3 groups"),
    "kept": ({"n_group": 2, "topk_group": 3}, "3 of 2 groups"),
    "few": ({"n_group": 4, "topk_group": 1}, "fewer than the 3 to choose"),
    "bias": ({"attention_bias": True}, "attention_bias is True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "scoring": ({"scoring_func": "softmax"}, "scoring_func 'softmax' with topk_method 'noaux_tc'"),
    "renormalise": (
        {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"},
        "norm_topk_prob is True",
    ),
    "key heads": ({"num_key_value_heads": 1}, "num_key_value_heads 1 and num_attention_heads 3"),
    "key dim": ({"qk_head_dim": 20}, "qk_head_dim is 20, qk_nope_head_dim + qk_rope_head_dim 18"),
    "odd": ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
    "unknown": ({"router_temperature": 0.5}, "router_temperature"),
    "layer types": ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEPSEEK_FAULTS)
def test_config_fault(name, tmp_path, capsys, without_engine):
    changes, text = DEEPSEEK_FAULTS[name]
    config, tensors = deepseek(40)
    assert text in refused(tmp_path, capsys, {**config, **changes}, tensors)


KIMI_FAULTS = {
    "missing": ({"kda_layers": [1]}, "neither full_attn_layers nor kda_layers names layers [3]"),
    "twice": ({"kda_layers": [1, 2, 3]}, "name layers [2] more than once"),
    "from zero": ({"full_attn_layers": [1, 3], "kda_layers": [0, 2]}, "kda_layers names layers [0]"),
    "beyond": ({"kda_layers": [1, 3, 5]}, "kda_layers names layers [5]"),
    "no list": ({"full_attn_layers": None}, "full_attn_layers must be a list"),
    "bound": ({"gate_lower_bound": 5.0}, "gate_lower_bound is 5.0"),
    "unknown": ({"gate_upper_bound": 5.0}, "gate_upper_bound"),
}


@pytest.mark.parametrize("name", KIMI_FAULTS)
def test_layer_list_fault(name, tmp_path, capsys, without_engine):
    changes, text = KIMI_FAULTS[name]
    config, tensors = kimi(41)
    config["linear_attn_config"] = {**config["linear_attn_config"], **changes}
    assert text in refused(tmp_path, capsys, config, tensors)


@pytest.mark.parametrize("key", ["n_group", "topk_group", "routed_scaling_factor",
                                 "norm_topk_prob", "first_k_dense_replace", "kv_lora_rank"])  # fmt: skip
def test_keys_without_a_common_default_must_be_there(key, tmp_path, capsys, without_engine):
    config, tensors = deepseek(40)
    del config[key]
    assert f"{key} is missing" in refused(tmp_path, capsys, config, tensors)


def test_rotated_attention_is_another_model(tmp_path, capsys, without_engine):
    config, tensors = kimi(42, mla_use_nope=False)
    assert "mla_use_nope is False" in refused(tmp_path, capsys, config, tensors)


def test_all_faults_of_coded_tensors_at_once(tmp_path, capsys, without_engine):
    """Scales that are missing, too many, misshapen or of another type, each named with both sides."""
    config, tensors = kimi(43, k3=True)
    base = "language_model.model.layers.1.block_sparse_moe.experts."
    del tensors[f"{base}0.w1.weight_scale"]
    tensors["language_model.model.layers.1.self_attn.o_proj.weight_scale"] = (
        "U8", np.zeros((40, 1), np.uint8),
    )  # fmt: skip
    packed = tensors[f"{base}2.w2.weight_packed"][1]
    tensors[f"{base}2.w2.weight_packed"] = "U8", packed[:, 1:]
    scale = tensors[f"{base}3.w3.weight_scale"][1]
    tensors[f"{base}3.w3.weight_scale"] = "BF16", scale.astype(np.uint16)
    del tensors[f"{base}4.w1.weight_packed"]
    message = refused(tmp_path, capsys, config, tensors)
    for text in (
        f"tensor '{base}0.w1.weight_scale' is missing",
        "o_proj.weight_scale' (U8 [40, 1]) is unexpected",
        f"tensor '{base}2.w2.weight_packed' has shape [32, 11], config.json asks for [32, 12]",
        f"tensor '{base}3.w3.weight_scale' has dtype BF16, supported are U8, F8_E8M0",
        f"tensor '{base}4.w1.weight' is missing",
        f"tensor '{base}4.w1.weight_scale' (U8",
    ):
        assert text in message
    assert "6 faults" in message


def test_fp8_without_its_config(tmp_path, capsys, without_engine):
    """Blocks are never guessed from shapes."""
    config, tensors = deepseek(44)
    name = "model.layers.0.self_attn.o_proj.weight"
    shape = tensors[name][1].shape
    tensors[name] = "F8_E4M3", np.zeros(shape, np.uint8)
    tensors[f"{name}_scale_inv"] = "F32", np.ones((1, 1), np.float32)
    message = refused(tmp_path, capsys, config, tensors)
    assert f"{name!r} has dtype F8_E4M3" in message and f"{name}_scale_inv' (F32" in message


def test_draft_layer_nobody_announced(tmp_path, capsys, without_engine):
    config, tensors = deepseek(45, num_nextn_predict_layers=1)
    config["num_nextn_predict_layers"] = 0
    message = refused(tmp_path, capsys, config, tensors)
    assert "'model.layers.3.eh_proj.weight' (BF16 [40, 80]) is unexpected" in message


def test_draft_layer_is_listed_as_skipped(tmp_path, without_engine):
    config, tensors = deepseek(46, num_nextn_predict_layers=1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", np.ones(3, np.float32)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    assert run(source, tmp_path / "model", *IDS_ONLY) == 0
    made = manifest(tmp_path / "model")
    count = sum(name.startswith("model.layers.3.") for name in tensors)
    skipped = made["provenance"]["skipped"]
    assert skipped["mtp"]["tensors"] == count > 20
    assert skipped["buffers"]["tensors"] == 1
    assert len(made["model"]["layers"]) == 3 and [b["layer"] for b in made["experts"]] == [1, 2]


def test_numbers_behind_the_heads_must_be_zero(tmp_path, capsys, without_engine):
    config, tensors = kimi(47, k3=True)
    values = tensors["language_model.model.layers.0.self_attn.A_log"][1]
    assert values.shape == (128,) and not values[3:].any()
    values[77] = 0.5
    source = write_checkpoint(tmp_path / "bad", config, tensors)
    assert run(source, tmp_path / "model", *IDS_ONLY) == 3
    message = capsys.readouterr().err
    assert "layers.0.self_attn.A_log' [128]: 3 numbers are used" in message
    assert not (tmp_path / "model" / "manifest.sha256").exists()


def test_scale_byte_that_is_no_number(tmp_path, capsys, without_engine):
    config, tensors = kimi(48, k3=True)
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_scale"
    tensors[name][1][3, 0] = 255
    source = write_checkpoint(tmp_path / "bad", config, tensors)
    assert run(source, tmp_path / "model", *IDS_ONLY) == 3
    assert name in capsys.readouterr().err
