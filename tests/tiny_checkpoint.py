"""Writes small random checkpoints of the gated-delta MoE family in every layout met."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the upper 16 bits (truncated): exact values for a test's weights."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return bf16_bits(values).tobytes()
    return np.ascontiguousarray(values, {"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """tensors: name -> (dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, _, data in tensors.values():
            file.write(data)


def text_config(**changes: object) -> dict[str, object]:
    """A small text config, two linear layers and one full; keyword arguments replace keys."""
    config: dict[str, object] = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 7,
        "full_attention_interval": 4,
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": 72,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 12,
        "max_position_embeddings": 512,
        "moe_intermediate_size": 40,
        "num_attention_heads": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "shared_expert_intermediate_size": 24,
        "tie_word_embeddings": False,
        "vocab_size": 97,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def shapes(
    c: dict[str, object], prefix: str = "model.", fused: bool = True
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of the text model, in release order."""
    h, hd, heads, kv = (
        c["hidden_size"],
        c["head_dim"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
    )
    kh, vh = c["linear_num_key_heads"], c["linear_num_value_heads"]
    kd, vd = c["linear_key_head_dim"], c["linear_value_head_dim"]
    e, i, s = c["num_experts"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    channels = 2 * kh * kd + vh * vd
    out = {f"{prefix}embed_tokens.weight": (c["vocab_size"], h)}
    for layer in range(c["num_hidden_layers"]):
        p = f"{prefix}layers.{layer}."
        out[p + "input_layernorm.weight"] = (h,)
        if c["layer_types"][layer] == "linear_attention":
            out.update(
                {
                    p + "linear_attn.A_log": (vh,),
                    p + "linear_attn.conv1d.weight": (channels, 1, c["linear_conv_kernel_dim"]),
                    p + "linear_attn.dt_bias": (vh,),
                    p + "linear_attn.in_proj_a.weight": (vh, h),
                    p + "linear_attn.in_proj_b.weight": (vh, h),
                    p + "linear_attn.in_proj_qkv.weight": (channels, h),
                    p + "linear_attn.in_proj_z.weight": (vh * vd, h),
                    p + "linear_attn.norm.weight": (vd,),
                    p + "linear_attn.out_proj.weight": (h, vh * vd),
                }
            )
        else:
            out.update(
                {
                    p + "self_attn.q_proj.weight": (2 * heads * hd, h),
                    p + "self_attn.k_proj.weight": (kv * hd, h),
                    p + "self_attn.v_proj.weight": (kv * hd, h),
                    p + "self_attn.o_proj.weight": (h, heads * hd),
                    p + "self_attn.q_norm.weight": (hd,),
                    p + "self_attn.k_norm.weight": (hd,),
                }
            )
        if fused:
            out[p + "mlp.experts.gate_up_proj"] = (e, 2 * i, h)
            out[p + "mlp.experts.down_proj"] = (e, h, i)
        else:
            for expert in range(e):
                q = f"{p}mlp.experts.{expert}."
                out[q + "gate_proj.weight"] = out[q + "up_proj.weight"] = (i, h)
                out[q + "down_proj.weight"] = (h, i)
        out.update(
            {
                p + "mlp.gate.weight": (e, h),
                p + "mlp.shared_expert.gate_proj.weight": (s, h),
                p + "mlp.shared_expert.up_proj.weight": (s, h),
                p + "mlp.shared_expert.down_proj.weight": (h, s),
                p + "mlp.shared_expert_gate.weight": (1, h),
                p + "post_attention_layernorm.weight": (h,),
            }
        )
    out[f"{prefix}norm.weight"] = (h,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], h)
    return out


def random_weights(c: dict[str, object], seed: int = 1) -> dict[str, np.ndarray]:
    """Fused weights as float32 that bf16 holds exactly."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(c).items():
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)
        out[name] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return out


def split_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights with one tensor for each expert and matrix."""
    out = {}
    for name, values in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base, inner = name.removesuffix("gate_up_proj"), values.shape[1] // 2
            for expert, both in enumerate(values):
                out[f"{base}{expert}.gate_proj.weight"] = both[:inner]
                out[f"{base}{expert}.up_proj.weight"] = both[inner:]
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(values):
                out[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = one
        else:
            out[name] = values
    return out


def write_checkpoint(
    directory: Path,
    config: dict[str, object] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    *,
    dtype: str = "BF16",
    dtypes: dict[str, str] | None = None,
    extra: dict[str, tuple[str, tuple[int, ...], bytes]] | None = None,
    shards: int = 1,
    generation: dict[str, object] | None = None,
) -> Path:
    """Writes config.json, the shards, their index and generation_config.json."""
    config = config or text_config()
    weights = weights if weights is not None else random_weights(config.get("text_config", config))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": [6, 7]} if generation is None else generation
    (directory / "generation_config.json").write_text(json.dumps(generation))
    tensors = {
        name: (kind := (dtypes or {}).get(name, dtype), values.shape, encode(values, kind))
        for name, values in weights.items()
    }
    tensors.update(extra or {})
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    names, weight_map = list(tensors), {}
    step = -(-len(names) // shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * step : (shard + 1) * step]
        write_safetensors(directory / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
