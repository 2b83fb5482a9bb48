"""Small random checkpoints of the DeepSeek and Kimi families, with any hyper-parameters."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sparse_models import (
    deepseek_text_tensors,
    deepseek_v3_config,
    kimi_k3_config,
    kimi_linear_config,
    kimi_text_tensors,
)

Tensors = dict[str, tuple[str, np.ndarray]]
"""Name -> (dtype, stored numbers; bf16 as uint16 bits)."""

SMALL_DEEPSEEK = {
    "hidden_size": 40, "intermediate_size": 56, "kv_lora_rank": 20, "max_position_embeddings": 4096,
    "moe_intermediate_size": 24, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_attention_heads": 3, "num_experts_per_tok": 3, "num_hidden_layers": 3,
    "num_key_value_heads": 3, "num_nextn_predict_layers": 0, "q_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "topk_group": 1, "v_head_dim": 10,
    "vocab_size": 61, "first_k_dense_replace": 1, "quantization_config": None,
    "rope_scaling": None,
}  # fmt: skip
SMALL_KIMI = {
    "hidden_size": 40, "intermediate_size": 56, "kv_lora_rank": 20, "moe_intermediate_size": 24,
    "num_attention_heads": 3, "num_experts": 8, "num_experts_per_token": 3,
    "num_hidden_layers": 4, "num_key_value_heads": 3, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "vocab_size": 61, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SMALL_LINEAR = {
    "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 3,
    "short_conv_kernel_size": 4,
}  # fmt: skip


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16, truncated: the numbers are random anyway."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.normal(size=shape)
    if name.endswith(("norm.weight", "norm0.weight")):
        return 1 + 0.2 * noise
    if name.endswith("A_log"):
        return np.clip(noise, -0.5, 1)
    if name.endswith(("dt_bias", "embed_tokens.weight")):
        return 0.5 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.25 * noise
    if name.endswith("gate.weight"):
        return noise * 2.0 / np.sqrt(shape[-1])
    return noise * 1.3 / np.sqrt(shape[-1])


def random_tensors(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], seed: int, dtype: str | None = None
) -> Tensors:
    """`dtype` F32 or F16 instead of BF16. A_log beyond the shape's heads stays as given."""
    rng = np.random.default_rng(seed)
    out: Tensors = {}
    for name, stored, shape in entries:
        if stored == "U8":
            high = 128 if name.endswith("_scale") else 256
            out[name] = "U8", rng.integers(120 if high == 128 else 0, high, shape, dtype=np.uint8)
            continue
        values = _values(name, shape, rng).astype(np.float32)
        kind = dtype if dtype and stored == "BF16" else stored
        if kind == "BF16":
            out[name] = kind, bf16_bits(values)
        else:
            out[name] = kind, values.astype(np.float16 if kind == "F16" else np.float32)
    return out


def write_checkpoint(
    directory: Path, config: dict[str, object], tensors: Tensors, shards: int = 1
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        if shards == 1:
            file = "model.safetensors"
        header, data = {}, b""
        for name in names[number::shards]:
            dtype, values = tensors[name]
            raw = np.ascontiguousarray(values).tobytes()
            header[name] = {
                "dtype": dtype,
                "shape": list(values.shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
            weight_map[name] = file
        text = json.dumps(header).encode()
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def deepseek(seed: int, dtype: str | None = None, **changes: object) -> tuple[dict, Tensors]:
    """(config, tensors) of a small DeepSeek-V3; keywords replace keys of the config."""
    config = {**deepseek_v3_config(), **SMALL_DEEPSEEK, **changes}
    return config, random_tensors(deepseek_text_tensors(config, False), seed, dtype)


def kimi(
    seed: int, *, k3: bool = False, linear: dict | None = None, dtype: str | None = None,
    **changes: object,
) -> tuple[dict, Tensors]:  # fmt: skip
    """(config, tensors) of a small Kimi Linear, or K3 with its wrapper and MXFP4 experts."""
    config = copy.deepcopy(kimi_k3_config() if k3 else kimi_linear_config())
    text = config["text_config"] if k3 else config
    if k3:
        text.update(routed_expert_hidden_size=32, q_lora_rank=16, attn_res_block_size=2)
        text.update(num_experts_per_token=3)
    text.update({**SMALL_KIMI, **changes})
    lists = {**text["linear_attn_config"], **SMALL_LINEAR, **(linear or {})}
    text["linear_attn_config"] = {k: v for k, v in lists.items() if v is not None}
    if k3:
        config.update(eos_token_id=2, bos_token_id=1, pad_token_id=0)
    heads = text["linear_attn_config"]["num_heads"]
    prefix = "language_model." if k3 else ""
    entries = [(n, d, s) for n, d, s, _ in kimi_text_tensors(text, prefix, lambda layer: 1)]
    tensors = random_tensors(entries, seed, dtype)
    for name, (_, values) in tensors.items():
        if name.endswith("A_log"):
            values.reshape(-1)[heads:] = 0
    return config, tensors
