"""A header-only checkpoint of Qwen3.6-35B-A3B: real config, names and shapes, sparse data.

67 GB are declared and a few hundred kB written: for testing preflight and plans.
    python tests/sparse_checkpoint.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiny_checkpoint import shapes

TEXT_BYTES = 4_896_711_936
EXPERT_BYTES = 64_424_509_440
MTP_BYTES, MTP_TENSORS = 1_689_281_536, 19
VISION_BYTES, VISION_TENSORS = 893_142_496, 333
SHARDS = 26


def config() -> dict[str, object]:
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(40)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 2048,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "text_config": text,
        "vision_config": vision,
    }


def _mtp(c: dict[str, object]) -> dict[str, tuple[int, ...]]:
    one = shapes({**c, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, "mtp.")
    h = c["hidden_size"]
    layer = {name: shape for name, shape in one.items() if name.startswith("mtp.layers.")}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {"mtp.fc.weight": (h, 2 * h), **{f"mtp.{n}.weight": (h,) for n in norms}, **layer}


def _vision() -> dict[str, tuple[int, ...]]:
    v, m = 1152, 4304
    p = "model.visual."
    out = {
        p + "patch_embed.proj.weight": (v, 3, 2, 16, 16),
        p + "patch_embed.proj.bias": (v,),
        p + "pos_embed.weight": (2304, v),
    }
    for block in range(27):
        b = f"{p}blocks.{block}."
        linear = {
            "attn.qkv": (3 * v, v),
            "attn.proj": (v, v),
            "mlp.linear_fc1": (m, v),
            "mlp.linear_fc2": (v, m),
        }
        for name in ("norm1", "norm2"):
            out[f"{b}{name}.weight"] = out[f"{b}{name}.bias"] = (v,)
        for name, shape in linear.items():
            out[f"{b}{name}.weight"], out[f"{b}{name}.bias"] = shape, shape[:1]
    out[p + "merger.norm.weight"] = out[p + "merger.norm.bias"] = (v,)
    for name, shape in (("linear_fc1", (4 * v, 4 * v)), ("linear_fc2", (2048, 4 * v))):
        out[f"{p}merger.{name}.weight"], out[f"{p}merger.{name}.bias"] = shape, shape[:1]
    return out


def _bytes(shape: tuple[int, ...]) -> int:
    count = 2
    for dim in shape:
        count *= dim
    return count


def write_sparse_checkpoint(directory: Path, **changes: object) -> Path:
    """Keyword arguments replace keys of the text config: another size, the same names."""
    whole = config()
    text = whole["text_config"]
    text.update(changes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(whole, indent=1))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [248046, 248044]})
    )
    tensors = {**shapes(text, "model.language_model."), **_vision(), **_mtp(text)}
    target = sum(map(_bytes, tensors.values())) / SHARDS
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensors.items():
        if filled >= target and len(groups) < SHARDS:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += _bytes(shape)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header, offset = {}, 0
        for name, shape in group.items():
            header[name] = {
                "dtype": "BF16",
                "shape": list(shape),
                "data_offsets": [offset, offset + _bytes(shape)],
            }
            offset += _bytes(shape)
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + offset)
    index = {
        "metadata": {"total_size": sum(map(_bytes, tensors.values()))},
        "weight_map": weight_map,
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


if __name__ == "__main__":
    write_sparse_checkpoint(Path(sys.argv[1]))
