"""Real configs and tensor lists, header-only: parameter counts equal the published ones.

Counts in billions are those of the model cards, to two decimals; every key of the configs must
be understood.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import sparse_models
from convert_helpers import run
from oracle.random_checkpoints import shapes_of

_COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip


def _config(kind: str, sizes: str, **more: object) -> dict[str, object]:
    """sizes: hidden, layers, heads, key heads, vocabulary."""
    hidden, layers, heads, kv, vocab = map(int, sizes.split())
    return {**_COMMON, "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
            "eos_token_id": 2, **more}  # fmt: skip


def _qwen3(sizes: str, inner: int, **more: object) -> dict[str, object]:
    return _config(
        "qwen3_moe", sizes, moe_intermediate_size=inner, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        max_window_layers=48, sliding_window=None, use_sliding_window=False, attention_bias=False,
        rope_scaling=None, rope_theta=1e6, max_position_embeddings=40960, **more,
    )  # fmt: skip


def _glm(sizes: str, inner: int, **more: object) -> dict[str, object]:
    return _config(
        "glm4_moe", sizes, moe_intermediate_size=inner, head_dim=128, attention_bias=True,
        n_group=1, topk_group=1, n_shared_experts=1, num_experts_per_tok=8, norm_topk_prob=True,
        partial_rotary_factor=0.5, rope_theta=1e6, rope_scaling=None, num_nextn_predict_layers=1,
        max_position_embeddings=131072, **more,
    )  # fmt: skip


MODELS: dict[str, tuple[dict[str, object], float]] = {
    "Qwen3-30B-A3B": (_qwen3("2048 48 32 4 151936", 768, intermediate_size=6144), 30.53),
    "Qwen3-235B-A22B": (_qwen3("4096 94 64 4 151936", 1536, intermediate_size=12288), 235.09),
    "OLMoE-1B-7B": (
        _config("olmoe", "2048 16 16 16 50304", intermediate_size=1024, num_experts=64,
                num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None, attention_bias=False,
                rope_scaling=None, rope_theta=10000.0, max_position_embeddings=4096), 6.92),
    "Mixtral-8x7B": (
        _config("mixtral", "4096 32 32 8 32000", intermediate_size=14336, num_local_experts=8,
                num_experts_per_tok=2, sliding_window=None, rope_theta=1e6,
                max_position_embeddings=32768), 46.70),
    "GLM-4.5-Air": (
        _glm("4096 46 96 8 151552", 1408, intermediate_size=10944, n_routed_experts=128,
             first_k_dense_replace=1, use_qk_norm=False, routed_scaling_factor=1.0), 106.85),
    "GLM-4.5": (
        _glm("5120 92 96 8 151552", 1536, intermediate_size=12288, n_routed_experts=160,
             first_k_dense_replace=3, use_qk_norm=True, routed_scaling_factor=2.5), 352.80),
    "MiniMax-M2": (
        _config("minimax_m2", "3072 62 48 8 200064", intermediate_size=1536, head_dim=128,
                rotary_dim=64, num_local_experts=256, num_experts_per_tok=8, use_qk_norm=True,
                qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
                attn_type_list=[1] * 62, rope_theta=5e6, max_position_embeddings=196608,
                use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, mlp_intermediate_size=8192,
                shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None,
                layernorm_full_attention_beta=1.0, layernorm_mlp_beta=1.0,
                quantization_config={"quant_method": "fp8", "fmt": "float8_e4m3fn",
                                     "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                                     "modules_to_not_convert": ["gate", "lm_head"]}), 228.69),
    "Granite-3.1-3B-A800M": (
        _config("granitemoe", "1536 32 24 8 49155", intermediate_size=512, num_local_experts=40,
                num_experts_per_tok=8, attention_multiplier=0.015625, embedding_multiplier=12.0,
                residual_multiplier=0.22, logits_scaling=6.0, attention_bias=False,
                rope_theta=10000.0, rope_scaling=None, max_position_embeddings=131072)
        | {"tie_word_embeddings": True}, 3.30),
}  # fmt: skip


def tensors(config: dict[str, object]) -> Iterator[sparse_models.Entry]:
    """In FP8 where the config says so: every projection, with a scale for each block."""
    fp8 = "quantization_config" in config
    for index, (name, shape) in enumerate(shapes_of(config)[0].items()):
        shard = index // 2000 + 1
        if "correction_bias" in name:
            yield name, "F32", shape, shard
        elif fp8 and (".experts." in name or "self_attn" in name) and len(shape) == 2:
            yield name, "F8_E4M3", shape, shard
            blocks = tuple(-(-n // 128) for n in shape)
            yield f"{name}_scale_inv", "F32", blocks, shard
        else:
            yield name, "BF16", shape, shard


def planned(capsys, source) -> dict:
    assert run(source, "--plan", "--json", "--no-tokenizer") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", MODELS)
def test_parameters(tmp_path, capsys, name):
    config, billions = MODELS[name]
    source = sparse_models.write_sparse(config, tensors(config), tmp_path / name)
    plan = planned(capsys, source)
    assert round(plan["parameters"] / 1e9, 2) == billions
    declared = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    assert 0 < declared - sum(plan["source_bytes"].values()) < 40 << 20  # the headers


def gpt_oss(layers: int, experts: int) -> tuple[dict[str, object], list[sparse_models.Entry]]:
    h = i = 2880
    config = _config(
        "gpt_oss", f"{h} {layers} 64 8 201088", intermediate_size=i, head_dim=64,
        num_local_experts=experts, num_experts_per_tok=4, experts_per_token=4, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2), swiglu_limit=7.0,
        attention_bias=True, initial_context_length=4096, max_position_embeddings=131072,
        rope_theta=150000, rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096},
        quantization_config={"quant_method": "mxfp4",
                             "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    )  # fmt: skip
    out: list[sparse_models.Entry] = []

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        out.append((name, dtype, shape, 1))

    add("model.embed_tokens.weight", 201088, h)
    add("lm_head.weight", 201088, h)
    add("model.norm.weight", h)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{p}{name}.weight", h)
        for name, rows, cols in (("q", 4096, h), ("k", 512, h), ("v", 512, h), ("o", h, 4096)):
            add(f"{p}self_attn.{name}_proj.weight", rows, cols)
            add(f"{p}self_attn.{name}_proj.bias", rows)
        add(f"{p}self_attn.sinks", 64)
        add(f"{p}mlp.router.weight", experts, h)
        add(f"{p}mlp.router.bias", experts)
        for name, rows, cols in (("gate_up", 2 * i, h), ("down", h, i)):
            q = f"{p}mlp.experts.{name}_proj"
            add(f"{q}_blocks", experts, rows, cols // 32, 16, dtype="U8")
            add(f"{q}_scales", experts, rows, cols // 32, dtype="U8")
            add(f"{q}_bias", experts, rows)
    return config, out


@pytest.mark.parametrize(("layers", "experts", "billions"), [(24, 32, 20.91), (36, 128, 116.83)])
def test_gpt_oss(tmp_path, capsys, layers, experts, billions):
    config, entries = gpt_oss(layers, experts)
    plan = planned(capsys, sparse_models.write_sparse(config, entries, tmp_path / "m"))
    assert round(plan["parameters"] / 1e9, 2) == billions


def test_qwen3_next(tmp_path, capsys):
    """Interleaved projections and separate experts; with the draft module's names skipped."""
    h, e, i = 2048, 512, 512
    config = _config(
        "qwen3_next", f"{h} 48 16 2 151936", intermediate_size=5120, head_dim=256,
        moe_intermediate_size=i, shared_expert_intermediate_size=i, num_experts=e,
        num_experts_per_tok=10, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
        partial_rotary_factor=0.25, rope_theta=10000000, rope_scaling=None, attention_bias=False,
        use_sliding_window=False, max_position_embeddings=262144,
    )  # fmt: skip
    shapes = {"model.embed_tokens.weight": (151936, h), "lm_head.weight": (151936, h),
              "model.norm.weight": (h,), "mtp.fc.weight": (h, 2 * h)}  # fmt: skip
    for layer in range(48):
        p = f"model.layers.{layer}."
        shapes |= {f"{p}{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        if layer % 4 == 3:
            q = f"{p}self_attn."
            shapes |= {f"{q}q_proj.weight": (8192, h), f"{q}k_proj.weight": (512, h),
                       f"{q}v_proj.weight": (512, h), f"{q}o_proj.weight": (h, 4096),
                       f"{q}q_norm.weight": (256,), f"{q}k_norm.weight": (256,)}  # fmt: skip
        else:
            q = f"{p}linear_attn."
            shapes |= {f"{q}in_proj_qkvz.weight": (12288, h), f"{q}in_proj_ba.weight": (64, h),
                       f"{q}conv1d.weight": (8192, 1, 4), f"{q}A_log": (32,), f"{q}dt_bias": (32,),
                       f"{q}norm.weight": (128,), f"{q}out_proj.weight": (h, 4096)}  # fmt: skip
        shapes |= {f"{p}mlp.gate.weight": (e, h), f"{p}mlp.shared_expert_gate.weight": (1, h)}
        for base in [f"{p}mlp.shared_expert.", *(f"{p}mlp.experts.{x}." for x in range(e))]:
            shapes |= {f"{base}{n}_proj.weight": (i, h) for n in ("gate", "up")}
            shapes[f"{base}down_proj.weight"] = (h, i)
    entries = ((n, "BF16", s, k // 2000 + 1) for k, (n, s) in enumerate(shapes.items()))
    plan = planned(capsys, sparse_models.write_sparse(config, entries, tmp_path / "m"))
    assert round(plan["parameters"] / 1e9, 2) == 79.67
    assert plan["skipped"]["mtp"]["tensors"] == 1
