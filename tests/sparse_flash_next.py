"""A header-only checkpoint of Qwen3.8-Flash-Next: real config, names and shapes, data as holes.

1,658 tensors: 1,294 of the text model (128 of them the n-gram rows), 31 of the draft module, 333
of the vision tower.
    python tests/sparse_flash_next.py DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import sparse_checkpoint
import sparse_models

LAYERS, HIDDEN, WIDE, LOW = 48, 2560, 4 * 2560, 320
ROWS, ROW = 320_001_536, 160
SHARDS = 80
EXPERT_BYTES = LAYERS * 512 * 3 * 2560 * 640 * 2
NGRAM_BYTES = ROWS * ROW * 2 + (3 + 16 + 16) * 8


def config() -> dict[str, object]:
    whole = sparse_checkpoint.config()
    text = whole["text_config"]
    text.update(
        hidden_size=HIDDEN,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)],
        linear_num_value_heads=48,
        model_type="qwen4_exp_text",
        moe_intermediate_size=640,
        norm_topk_prob=True,
        num_attention_heads=24,
        num_experts=512,
        num_experts_per_tok=10,
        num_hidden_layers=LAYERS,
        output_gate_type="sigmoid",
        shared_expert_intermediate_size=640,
        hc_count=4,
        hc_lowrank=LOW,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        indexer_head_dim=128,
        indexer_kv_heads=1,
        indexer_n_heads=4,
        heads_per_ngram=8,
        make_ngram_vocab_size_divisible_by=128,
        ngram_size=3,
        ngram_vocab_size_base=20_000_000,
        ple_conv_kernel_size=4,
        ple_embed_dim=HIDDEN,
        ple_layer_ids=[2],
        split_ngram_parts=128,
        mtp={"hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1},
    )
    whole.update(
        architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp", text_config=text
    )
    whole["vision_config"].update(model_type="qwen4_exp", out_hidden_size=HIDDEN)
    return whole


Shaped = Iterator[tuple[str, tuple[int, ...]]]


def _site(p: str, inject: bool = True) -> Shaped:
    yield f"{p}hc_norm.weight", (WIDE,)
    yield f"{p}input_mix_weight_down.weight", (LOW, WIDE)
    yield f"{p}input_mix_weight_up.weight", (WIDE, LOW)
    if inject:
        yield f"{p}block_inject_weight.weight", (4, WIDE)


def _layer(p: str, full: bool) -> Shaped:
    yield from _site(f"{p}attn_hyper_connection.")
    yield from _site(f"{p}mlp_hyper_connection.")
    if full:
        q = f"{p}self_attn."
        yield f"{q}q_proj.weight", (2 * 24 * 256, HIDDEN)
        yield f"{q}k_proj.weight", (2 * 256, HIDDEN)
        yield f"{q}v_proj.weight", (2 * 256, HIDDEN)
        yield f"{q}o_proj.weight", (HIDDEN, 24 * 256)
        yield from ((f"{q}{n}_norm.weight", (256,)) for n in "qk")
        yield f"{q}indexer.index_qk_proj.weight", (5 * 128, HIDDEN)
        yield from ((f"{q}indexer.{n}_layernorm.weight", (128,)) for n in "qk")
    else:
        q = f"{p}linear_attn."
        yield f"{q}in_proj_qkv.weight", (10240, HIDDEN)
        yield f"{q}in_proj_z.weight", (6144, HIDDEN)
        yield from ((f"{q}in_proj_{n}.weight", (48, HIDDEN)) for n in "ab")
        yield f"{q}conv1d.weight", (10240, 1, 4)
        yield from ((f"{q}{n}", (48,)) for n in ("A_log", "dt_bias"))
        yield f"{q}norm.weight", (128,)
        yield f"{q}out_proj.weight", (HIDDEN, 6144)
    m = f"{p}mlp."
    yield f"{m}gate.weight", (512, HIDDEN)
    yield f"{m}experts.gate_up_proj", (512, 1280, HIDDEN)
    yield f"{m}experts.down_proj", (512, HIDDEN, 640)
    yield from ((f"{m}shared_expert.{n}_proj.weight", (640, HIDDEN)) for n in ("gate", "up"))
    yield f"{m}shared_expert.down_proj.weight", (HIDDEN, 640)
    yield f"{m}shared_expert_gate.weight", (1, HIDDEN)


def _ngram(p: str) -> Shaped:
    table = f"{p}ple_embedding."
    yield from (
        (f"{table}ngram_embedding.shard_{i}.weight", (ROWS // 128, ROW)) for i in range(128)
    )
    yield f"{table}layer_multipliers", (3,)
    yield from ((f"{table}ngram_heads_{n}", (16,)) for n in ("vocab_sizes", "offsets"))
    yield f"{p}key_proj.weight", (WIDE, HIDDEN)
    yield f"{p}value_proj.weight", (HIDDEN, HIDDEN)
    yield f"{p}conv1d.weight", (WIDE, 1, 4)
    yield from ((f"{p}norm_{n}.weight", (WIDE,)) for n in ("key", "query", "conv"))


def text_tensors() -> Shaped:
    p = "model.language_model."
    yield f"{p}embed_tokens.weight", (248320, HIDDEN)
    yield "lm_head.weight", (248320, HIDDEN)
    yield from _site(f"{p}hyper_connection_mixer.", False)
    yield from _ngram(f"{p}layers.1.ple.")
    for layer in range(LAYERS):
        yield from _layer(f"{p}layers.{layer}.", layer % 4 == 3)


def draft_tensors() -> Shaped:
    yield from ((f"mtp.fc_{n}.weight", (HIDDEN, HIDDEN)) for n in ("embedding", "hidden"))
    yield "mtp.pre_fc_norm_embedding.weight", (HIDDEN,)
    yield "mtp.pre_fc_norm_hidden.weight", (WIDE,)
    yield from _site("mtp.hyper_connection_mixer.", False)
    yield from _layer("mtp.layers.0.", True)


def vision_tensors() -> Shaped:
    for name, shape in sparse_checkpoint._vision().items():
        if name.endswith("merger.linear_fc2.weight"):
            shape = (HIDDEN, shape[1])
        elif name.endswith("merger.linear_fc2.bias"):
            shape = (HIDDEN,)
        yield name, shape


def tensors() -> Iterator[sparse_models.Entry]:
    listed = [*text_tensors(), *draft_tensors(), *vision_tensors()]
    for index, (name, shape) in enumerate(listed):
        dtype = "I64" if "multipliers" in name or "ngram_heads" in name else "BF16"
        yield name, dtype, shape, index * SHARDS // len(listed) + 1


def write(directory: Path) -> Path:
    return sparse_models.write_sparse(config(), tensors(), directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
