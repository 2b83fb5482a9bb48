"""A config or tensor list that changes the maths is refused by name, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from convert_helpers import run

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def changed(name: str, target: Path, changes: dict[str, object]) -> Path:
    """The fixture with keys of its (text) config replaced, or removed where the value is ..."""
    target.mkdir()
    for file in (FIXTURES / name).glob("model*"):
        (target / file.name).symlink_to(file)
    config = json.loads((FIXTURES / name / "config.json").read_text())
    text = config.get("text_config", config)
    for key, value in changes.items():
        if value is ...:
            text.pop(key)
        else:
            text[key] = value
    (target / "config.json").write_text(json.dumps(config))
    return target


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = [
    ("qwen3_moe", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
    ("qwen3_moe", {"use_sliding_window": True}, ["use_sliding_window is True"]),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'"]),
    ("qwen3_moe", {"rope_scaling": {**YARN, "short_factor": [1]}}, ["short_factor"]),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "yarn"}}, ["factor is missing"]),
    ("qwen3_moe", {"rope_scaling": {"factor": 3.0}}, ["factor = 3.0 is not known"]),
    ("qwen3_moe", {"attention_bias": True}, ["'model.layers.2.self_attn.o_proj.bias' is missing"]),
    ("qwen3_moe", {"decoder_sparse_step": 2},
     ["'model.layers.0.mlp.gate_proj.weight' is missing", "experts.7.up_proj.weight' (BF16 [32, 64]"]),
    ("qwen3_moe", {"mlp_only_layers": [3]}, ["mlp_only_layers is [3]", "from 0 to 2"]),
    ("qwen3_moe", {"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
    ("qwen3_moe", {"num_experts": 9}, ["experts.8.up_proj.weight' is missing", "asks for [9, 64]"]),
    ("qwen3_moe", {"num_experts": 7}, ["experts.7.down_proj.weight'", "unexpected"]),
    ("qwen3_moe", {"head_dim": 18}, ["has shape [64, 64], config.json asks for [72, 64]"]),
    ("qwen3_moe", {"head_dim": 15}, ["15 rotary dimensions, must be even"]),
    ("qwen3_moe", {"router_z_scale": 0.5}, ["router_z_scale = 0.5 is not known"]),
    ("qwen3_moe", {"n_group": 2}, ["n_group is 2"]),
    ("qwen3_moe", {"quantization_config": {"quant_method": "gptq"}}, ["'gptq'"]),
    ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv is 8.0"]),
    ("olmoe", {"num_attention_heads": 5}, ["hidden_size 64 is not a multiple"]),
    ("mixtral", {"sliding_window": "all"}, ["sliding_window is 'all'"]),
    ("mixtral", {"attention_bias": True}, ["attention_bias is True"]),
    ("gpt_oss", {"quantization_config": ...}, ["quantization_config", "MXFP4 blocks"]),
    ("gpt_oss", {"layer_types": ["full_attention"]}, ["1 entries, num_hidden_layers is 4"]),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3 + ["chunked"]}, ["layer_types[3] is 'chunked'"]),
    ("gpt_oss", {"experts_per_token": 2}, ["experts_per_token is 2", "num_experts_per_tok is 3"]),
    ("gpt_oss", {"swiglu_limit": -1}, ["swiglu_limit is -1"]),
    ("gpt_oss", {"intermediate_size": 40}, ["intermediate_size 40 is not a multiple of 32"]),
    ("glm4_moe", {"n_group": 3}, ["n_routed_experts 8 is not a multiple of n_group 3"]),
    ("glm4_moe", {"n_group": 8, "topk_group": 2}, ["leave 2 experts", "num_experts_per_tok is 3"]),
    ("glm4_moe", {"topk_method": "greedy"}, ["topk_method is 'greedy'"]),
    ("glm4_moe", {"scoring_func": "softmax"}, ["scoring_func is 'softmax'"]),
    ("glm4_moe", {"num_nextn_predict_layers": 0}, ["'model.layers.3.eh_proj.weight'", "unexpected"]),
    ("glm4_moe", {"use_qk_norm": False}, ["self_attn.q_norm.weight'", "unexpected"]),
    ("qwen3_next", {"output_gate_type": "sigmoid"}, ["output_gate_type is 'sigmoid'"]),
    ("qwen3_next", {"linear_num_value_heads": 5}, ["linear_num_value_heads 5", "key_heads 2"]),
    ("qwen4_exp", {"output_gate_type": "relu"}, ["output_gate_type is 'relu'"]),
    ("qwen4_exp", {"indexer_budget": 15}, ["indexer_budget 15", "indexer_compress_ratio 4"]),
    ("qwen4_exp", {"indexer_kv_heads": 2}, ["indexer_kv_heads is 2"]),
    ("qwen4_exp", {"indexer_head_dim": ...}, ["indexer_head_dim is missing"]),
    ("qwen4_exp", {"ple_layer_ids": [0]}, ["ple_layer_ids is [0]"]),
    ("qwen4_exp", {"ple_layer_ids": [5]}, ["ple_layer_ids is [5]", "from 1 to 4"]),
    ("qwen4_exp", {"ple_layer_ids": [3]}, ["'model.layers.2.ple.key_proj.weight' is missing",
                                          "'model.layers.1.ple.key_proj.weight' (BF16"]),
    ("qwen4_exp", {"ple_embed_dim": 33}, ["ple_embed_dim 33 is not a multiple", "8"]),
    ("qwen4_exp", {"ngram_vocab_size_base": 60}, ["hold 552 rows, config.json makes"]),
    ("qwen4_exp", {"split_ngram_parts": 3}, ["ngram_embedding.shard_2.weight' is missing"]),
    ("qwen4_exp", {"eos_token_id": None}, ["eos_token_id is None"]),
    ("qwen4_exp", {"hc_count": 17}, ["hc_count is 17"]),
    ("qwen4_exp", {"layer_types": ["linear_attention"] * 3 + ["mamba"]}, ["layer_types[3] is 'mamba'"]),
    ("qwen4_exp_vl", {"model_type": "qwen3_5_moe_text"}, ["another language model"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "parts"), CASES, ids=[f"{n}-{'-'.join(c)}" for n, c, _ in CASES]
)
def test_refused_by_name(tmp_path, capsys, name, changes, parts):
    source = changed(name, tmp_path / "source", changes)
    assert run(source, tmp_path / "out", "--no-tokenizer") == 3
    error = capsys.readouterr().err
    for part in parts:
        assert part in error
    assert not (tmp_path / "out").exists()


def test_all_faults_at_once(tmp_path, capsys):
    changes = {"hidden_act": "gelu", "num_experts": 9, "router_z_scale": 1, "head_dim": 15}
    source = changed("qwen3_moe", tmp_path / "source", changes)
    assert run(source, "--plan", "--no-tokenizer") == 3
    error = capsys.readouterr().err
    for part in ("hidden_act", "experts.8.", "router_z_scale", "15 rotary", "faults:"):
        assert part in error


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe", "qwen4_exp"])
def test_harmless_differences_do_not_matter(tmp_path, name):
    changes = {"use_cache": False, "transformers_version": "9.9", "initializer_range": 1.0}
    source = changed(name, tmp_path / "source", changes)
    assert run(source, "--plan", "--no-tokenizer", "--quiet") == 0


def test_an_unused_mixer_tensor_is_skipped(tmp_path):
    """Some releases carry an inject matrix in the final mixer, which nothing reads."""
    source = changed("qwen4_exp", tmp_path / "source", {})
    (source / "model.safetensors").unlink()
    raw = (FIXTURES / "qwen4_exp" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    header["model.hyper_connection_mixer.block_inject_weight.weight"] = {
        "dtype": "BF16", "shape": [4, 128], "data_offsets": [len(data), len(data) + 1024],
    }  # fmt: skip
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + data + bytes(1024)
    )
    assert run(source, tmp_path / "out", "--no-tokenizer", "--quiet") == 0
