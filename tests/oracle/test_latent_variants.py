"""Hyper-parameters that no fixture has, against the NumPy reference on random checkpoints.

The reference itself is checked against the fixtures of the released classes, at float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import convert
from oracle.reference_latent import LatentModel
from random_models import deepseek, kimi, write_checkpoint

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
COVERED = sorted(
    path.parent.name
    for pattern in ("deepseek_*", "kimi_*")
    for path in FIXTURES.glob(f"{pattern}/oracle.json")
    if path.parent.name != "deepseek_v3_fp8"  # decoded in tests/unit/test_decoders.py
)


def test_fixtures_are_there():
    assert len(COVERED) >= 13


@pytest.mark.parametrize("name", COVERED)
def test_reference_matches_the_released_classes(name):
    model = LatentModel(FIXTURES / name)
    oracle = np.load(FIXTURES / name / "oracle.npz")
    layer_out = np.load(FIXTURES / name / "trace.npz")["layer_out"]
    offsets = oracle["offsets"]
    for begin, end in zip(offsets[:-1], offsets[1:]):
        trace = model.forward(oracle["input_ids"][begin:end])
        assert np.abs(trace.logits - oracle["logits"][begin:end]).max() < 1e-9
        assert np.abs(trace.layer_out - layer_out[:, begin:end]).max() < 1e-4
        assert np.array_equal(trace.router_ids, oracle["router_ids"][:, begin:end])
        assert np.abs(trace.router_weights - oracle["router_weights"][:, begin:end]).max() < 1e-12


YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4,
        "beta_slow": 1}  # fmt: skip
V2 = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
      "scoring_func": "softmax", "norm_topk_prob": False}  # fmt: skip

VARIANTS = {
    "halves, unequal mscale, groups, tied": lambda: deepseek(
        1, rope_interleave=False, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        n_group=3, topk_group=2, n_routed_experts=9, num_experts_per_tok=5, qk_nope_head_dim=5,
        qk_rope_head_dim=2, v_head_dim=7, q_lora_rank=9, kv_lora_rank=11, hidden_size=33,
        tie_word_embeddings=True,
    ),
    "every expert, every second layer, nothing shared": lambda: deepseek(
        2, moe_layer_freq=2, first_k_dense_replace=0, n_shared_experts=None, n_routed_experts=5,
        num_experts_per_tok=5, q_lora_rank=None, num_hidden_layers=4,
    ),
    "yarn without mscale": lambda: deepseek(3, rope_scaling=YARN, norm_topk_prob=False),
    "yarn within integer corners": lambda: deepseek(
        4, rope_scaling={**YARN, "beta_fast": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        qk_rope_head_dim=16, rope_theta=50000,
    ),
    "all layers dense": lambda: deepseek(5, first_k_dense_replace=3),
    "one head, one wide layer": lambda: deepseek(
        6, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1,
        first_k_dense_replace=0, hidden_size=129, moe_intermediate_size=65, kv_lora_rank=67,
    ),
    "softmax limited to one group": lambda: deepseek(
        7, **V2, topk_method="group_limited_greedy", n_group=4, topk_group=1,
        num_experts_per_tok=2, routed_scaling_factor=3.0, n_shared_experts=3,
    ),
    "softmax greedy, one expert, new rope keys": lambda: deepseek(
        8, **V2, topk_method="greedy", n_group=None, topk_group=None, num_experts_per_tok=1,
        rope_theta=None,
        rope_parameters={**YARN, "type": None, "rope_type": "yarn", "rope_theta": 1e4},
    ),
    "draft layer of the GLM line": lambda: deepseek(
        9, model_type="glm4_moe_lite", num_nextn_predict_layers=1, rope_interleave=True,
    ),
    "nothing rotated at all": lambda: deepseek(10, qk_rope_head_dim=0),
    "delta: odd heads, groups, plain sum": lambda: kimi(
        11, num_expert_group=2, topk_group=1, num_shared_experts=0, moe_renormalize=False,
        num_hidden_layers=3, first_k_dense_replace=0, tie_word_embeddings=True,
        linear={"full_attn_layers": [3], "kda_layers": [2, 1], "head_dim": 7, "num_heads": 5,
                "short_conv_kernel_size": 3},
    ),
    "delta: only delta layers, one tap": lambda: kimi(
        12, num_hidden_layers=2, first_k_dense_replace=1,
        linear={"full_attn_layers": [], "kda_layers": [1, 2], "short_conv_kernel_size": 1},
    ),
    "delta: query rank, gated attention": lambda: kimi(
        13, q_lora_rank=14, mla_use_output_gate=True,
        linear={"gate_lower_bound": -3.5, "use_full_rank_gate": True},
    ),
    "K3: every layer seals, no linear beta": lambda: kimi(
        14, k3=True, attn_res_block_size=1, activation_situ_linear_beta=None,
        latent_moe_use_norm=False,
    ),
    "K3: no seal but the first, no latent": lambda: kimi(
        15, k3=True, attn_res_block_size=50, routed_expert_hidden_size=None, hidden_size=64,
        latent_moe_use_norm=False, q_lora_rank=None, mla_use_output_gate=False,
    ),
    "K3: groups of 32 that are not full": lambda: kimi(
        16, k3=True, routed_expert_hidden_size=48, moe_intermediate_size=40,
        linear={"gate_lower_bound": None, "use_full_rank_gate": False},
    ),
}  # fmt: skip


def compare(headrace, source: Path, container: Path, vocab: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, vocab, 23).astype(np.int32)
    want = LatentModel(source).forward(ids)
    with headrace.Model(container, ctx=64, chunk=7) as model:
        got = model.logits(ids)
        assert np.abs(got - want.logits).max() <= 5e-5 * np.abs(want.logits).max()
        if len(want.router_ids):
            chosen, weights = model.routes(ids)
            order = np.argsort(chosen, -1)
            assert np.array_equal(np.take_along_axis(chosen, order, -1), want.router_ids)
            np.testing.assert_allclose(
                np.take_along_axis(weights, order, -1), want.router_weights, atol=1e-3
            )


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, tmp_path, headrace):
    config, tensors = VARIANTS[name]()
    source = write_checkpoint(tmp_path / "source", config, tensors)
    container = convert(source, tmp_path / "model", "--experts", "bf16", "--trunk", "bf16",
                        "--no-tokenizer")  # fmt: skip
    compare(headrace, source, container, 61, 5)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("make", [deepseek, kimi], ids=["deepseek", "kimi"])
def test_wider_tensors_in_shards(make, dtype, tmp_path, headrace):
    config, tensors = make(20, dtype=dtype)
    source = write_checkpoint(tmp_path / "source", config, tensors, shards=3)
    container = convert(source, tmp_path / "model", "--experts", "f32", "--trunk", "f32",
                        "--no-tokenizer")  # fmt: skip
    compare(headrace, source, container, 61, 6)
