"""Qwen3.5-MoE / Qwen3.6-MoE: gated delta rule and gated attention, softmax-routed experts.

Text class (`qwen3_5_moe_text`, flat config, names under `model.`) and multimodal
wrapper (`qwen3_5_moe`, nested `text_config`, names under `model.language_model.`).
Vision tower and draft module (`mtp.*`) are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal

from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, Family, ModelPlan, Piece, TensorSpec, whole

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_SKIPPED = {"vision": ("model.visual.", "visual."), "mtp": ("mtp.", "model.mtp.")}
_DIM_MAX = 1 << 20
_QK_NORM_EPS = 1e-6

# Keys of training, generation defaults, serialisation and of the skipped parts.
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
    architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    full_attention_interval id2label image_token_id initializer_range intermediate_size
    is_decoder is_encoder_decoder label2id language_model_only length_penalty mamba_ssm_dtype
    max_length max_window_layers min_length model_type mtp_num_hidden_layers
    mtp_use_dedicated_embeddings no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    pad_token_id prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache video_token_id vision_config
    vision_end_token_id vision_start_token_id
    """.split()
)
_ROPE_HARMLESS = frozenset({"mrope_section", "mrope_interleaved"})


@dataclass
class _Dims:
    """The sizes of one checkpoint; names as in the manifest."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    output_gate: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    experts: int
    top_k: int
    inner: int
    shared_inner: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def rope_frequencies(theta: float, rotary: int) -> tuple[float, ...]:
    """theta^(-2i/rotary) for i in 0..rotary/2, each correctly rounded to float64."""
    context = Context(prec=60)
    log_theta = context.ln(Decimal(theta))
    return tuple(
        float(
            context.exp(
                context.divide(context.multiply(Decimal(-2 * i), log_theta), Decimal(rotary))
            )
        )
        for i in range(rotary // 2)
    )


def _rope(text: ConfigReader, head_dim: int) -> tuple[float, int]:
    """(theta, rotary dimensions) from `rope_parameters`, or the older flat keys."""
    flat_theta, flat_partial = text.raw("rope_theta"), text.raw("partial_rotary_factor")
    nested = text.raw("rope_parameters")
    scaling = text.raw("rope_scaling")
    merged: dict[str, object] = {"rope_theta": flat_theta, "partial_rotary_factor": flat_partial}
    for key, value in (("rope_scaling", scaling), ("rope_parameters", nested)):
        if value is None:
            continue
        if not isinstance(value, dict):
            text.fault(f"{key} must be an object")
            continue
        merged.update({k: v for k, v in value.items() if v is not None})
    rope = ConfigReader(merged, f"{text.where}: rope_parameters", text.faults)
    rope.only("rope_type", ("default",), "scaled rotary positions are another model")
    rope.only("type", ("default",), "scaled rotary positions are another model")
    theta = rope.real("rope_theta", 0.0, 1e30)
    partial = rope.real("partial_rotary_factor", 0.0, 1.0, 0.25)
    rope.refuse_unknown(_ROPE_HARMLESS)
    rotary = int(head_dim * partial)
    if rotary % 2:
        text.fault(
            f"head_dim {head_dim} x partial_rotary_factor {partial} gives {rotary} rotary "
            "dimensions, must be even"
        )
        rotary -= 1
    return theta, rotary


def _layer_types(text: ConfigReader, layers: int) -> list[str]:
    interval = text.integer("full_attention_interval", 1, 1 << 16, 4)
    listed = text.raw("layer_types")
    if listed is None:
        return [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
        ]
    if not isinstance(listed, list) or len(listed) != layers:
        count = len(listed) if isinstance(listed, list) else "no"
        text.fault(f"layer_types has {count} entries, num_hidden_layers is {layers}")
        return []
    for index, kind in enumerate(listed):
        if kind not in ("linear_attention", "full_attention"):
            text.fault(
                f"layer_types[{index}] is {kind!r}, must be linear_attention or full_attention"
            )
            return []
    return listed


def _dims(text: ConfigReader) -> _Dims:
    heads = text.integer("num_attention_heads", 1, 1 << 16)
    kv_heads = text.integer("num_key_value_heads", 1, 1 << 16)
    key_heads = text.integer("linear_num_key_heads", 1, 1 << 16)
    value_heads = text.integer("linear_num_value_heads", 1, 1 << 16)
    experts = text.integer("num_experts", 1, 1 << 16)
    if heads % kv_heads:
        text.fault(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if value_heads % key_heads:
        text.fault(
            f"linear_num_value_heads {value_heads} is not a multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    return _Dims(
        vocab=text.integer("vocab_size", 1, 1 << 24),
        hidden=text.integer("hidden_size", 1, _DIM_MAX),
        layers=text.integer("num_hidden_layers", 1, 9999),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=text.integer("head_dim", 1, 1 << 16),
        rotary=0,
        output_gate=text.flag("attn_output_gate", True),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim", 1, 1 << 16),
        value_dim=text.integer("linear_value_head_dim", 1, 1 << 16),
        taps=text.integer("linear_conv_kernel_dim", 1, 8),
        experts=experts,
        top_k=text.integer("num_experts_per_tok", 1, experts),
        inner=text.integer("moe_intermediate_size", 1, _DIM_MAX),
        shared_inner=text.integer("shared_expert_intermediate_size", 0, _DIM_MAX),
    )


def _refuse_other_maths(text: ConfigReader) -> None:
    text.only("hidden_act", ("silu",), "the experts' activation is another")
    text.only("attention_bias", (False,), "projections with bias are another model")
    text.only("output_gate_type", ("swish", "silu"), "the delta rule's output gate is another")
    text.only("mlp_only_layers", ([],), "dense layers are not part of this family")
    text.only("decoder_sparse_step", (1,), "dense layers are not part of this family")
    text.only("sliding_window", (), "windowed attention is another model")
    text.only("use_sliding_window", (False,), "windowed attention is another model")
    text.only("scoring_func", ("softmax",), "the router is another")
    text.only("n_group", (1,), "grouped routing is another model")
    text.only("topk_group", (1,), "grouped routing is another model")
    text.only("is_causal", (True,), "the attention mask is another")
    text.only("quantization_config", (), "take the unquantised checkpoint")


def _mixer_tensors(prefix: str, name: str, kind: str, d: _Dims) -> list[TensorSpec]:
    h = d.hidden
    if kind == "full_attention":
        p, n, width = f"{prefix}self_attn.", f"{name}attn.", d.heads * d.head_dim
        q_shape = (width * (2 if d.output_gate else 1), h)
        tensors = []
        for part, skip in (("q", 0), ("gate", d.head_dim)) if d.output_gate else (("q", 0),):
            # With the gate, each head's rows are [query | gate].
            per_head = q_shape[0] // d.heads
            piece = Piece(f"{p}q_proj.weight", q_shape, h, skip, d.head_dim, d.heads, per_head)
            tensors.append(TensorSpec(f"{n}{part}", width, h, "matrix", (piece,)))
        kv = d.kv_heads * d.head_dim
        for part in ("k", "v"):
            tensors.append(
                TensorSpec(f"{n}{part}", kv, h, "matrix", whole(f"{p}{part}_proj.weight", (kv, h)))
            )
        tensors.append(
            TensorSpec(f"{n}o", h, width, "matrix", whole(f"{p}o_proj.weight", (h, width)))
        )
        for part in ("q_norm", "k_norm"):
            pieces = whole(f"{p}{part}.weight", (d.head_dim,))
            tensors.append(TensorSpec(f"{n}{part}", 0, d.head_dim, "f32", pieces, "add_one"))
        return tensors
    p, n = f"{prefix}linear_attn.", f"{name}delta."
    c, vd, hv = d.channels, d.value_heads * d.value_dim, d.value_heads
    return [
        TensorSpec(f"{n}qkv", c, h, "matrix", whole(f"{p}in_proj_qkv.weight", (c, h))),
        TensorSpec(f"{n}z", vd, h, "matrix", whole(f"{p}in_proj_z.weight", (vd, h))),
        TensorSpec(f"{n}a", hv, h, "exact", whole(f"{p}in_proj_a.weight", (hv, h))),
        TensorSpec(f"{n}b", hv, h, "exact", whole(f"{p}in_proj_b.weight", (hv, h))),
        TensorSpec(
            f"{n}conv", d.taps, c, "f32", whole(f"{p}conv1d.weight", (c, 1, d.taps)), "transpose"
        ),
        TensorSpec(f"{n}a_log", 0, hv, "f32", whole(f"{p}A_log", (hv,))),
        TensorSpec(f"{n}dt_bias", 0, hv, "f32", whole(f"{p}dt_bias", (hv,))),
        TensorSpec(f"{n}norm", 0, d.value_dim, "f32", whole(f"{p}norm.weight", (d.value_dim,))),
        TensorSpec(f"{n}out", h, vd, "matrix", whole(f"{p}out_proj.weight", (h, vd))),
    ]


def _moe_tensors(prefix: str, name: str, d: _Dims) -> list[TensorSpec]:
    h, s = d.hidden, d.shared_inner
    p, n = f"{prefix}mlp.", f"{name}moe."
    tensors = [
        TensorSpec(f"{n}router", d.experts, h, "exact", whole(f"{p}gate.weight", (d.experts, h)))
    ]
    if s:
        for part in ("gate", "up"):
            pieces = whole(f"{p}shared_expert.{part}_proj.weight", (s, h))
            tensors.append(TensorSpec(f"{n}shared.{part}", s, h, "matrix", pieces))
        pieces = whole(f"{p}shared_expert.down_proj.weight", (h, s))
        tensors.append(TensorSpec(f"{n}shared.down", h, s, "matrix", pieces))
        pieces = whole(f"{p}shared_expert_gate.weight", (1, h))
        tensors.append(TensorSpec(f"{n}shared_gate", 1, h, "exact", pieces))
    return tensors


def _bank(prefix: str, layer: int, d: _Dims, names: Mapping[str, TensorEntry]) -> BankSpec:
    """Fused tensors when the layer has one, else one tensor for each expert and matrix."""
    p, e, h, i = f"{prefix}mlp.experts.", d.experts, d.hidden, d.inner

    def suffix(name: str) -> str:
        return name if name in names or f"{name}.weight" not in names else f"{name}.weight"

    fused_gate_up, fused_down = suffix(f"{p}gate_up_proj"), suffix(f"{p}down_proj")

    def fused(expert: int) -> tuple[Piece, Piece, Piece]:
        both = (e, 2 * i, h)
        return (
            Piece(fused_gate_up, both, h, expert * 2 * i, i),
            Piece(fused_gate_up, both, h, expert * 2 * i + i, i),
            Piece(fused_down, (e, h, i), i, expert * h, h),
        )

    def apart(expert: int) -> tuple[Piece, Piece, Piece]:
        q = f"{p}{expert}."
        return (
            *whole(f"{q}gate_proj.weight", (i, h)),
            *whole(f"{q}up_proj.weight", (i, h)),
            *whole(f"{q}down_proj.weight", (h, i)),
        )  # type: ignore[return-value]

    is_fused = fused_gate_up in names or fused_down in names
    parts: Callable[[int], tuple[Piece, Piece, Piece]] = fused if is_fused else apart
    return BankSpec(layer, e, h, i, is_fused, parts)


def _tied(
    top: ConfigReader, text: ConfigReader, names: Mapping[str, TensorEntry], plan: ModelPlan
) -> tuple[bool, str]:
    """(tied, name of the output matrix's tensor)."""
    flags = {
        reader.flag("tie_word_embeddings", False)
        for reader in (top, text)
        if "tie_word_embeddings" in reader.values
    }
    present = [name for name in _HEADS if name in names]
    if len(present) > 1:
        plan.tensor_faults.append(f"both {present[0]} and {present[1]} are in the checkpoint")
    head = present[0] if present else _HEADS[0]
    if len(flags) == 2:
        plan.notes.append(
            "config.json contradicts itself about tie_word_embeddings; "
            f"{head} is {'present' if present else 'absent'} and decides"
        )
        return not present, head
    return flags == {True}, head


def plan(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    out = ModelPlan("qwen3_5_moe")
    top = ConfigReader(config, "config.json", out.faults)
    nested = top.raw("text_config")
    if nested is not None and not isinstance(nested, dict):
        top.fault("text_config must be an object")
        return out
    text = top if nested is None else ConfigReader(nested, "config.json: text_config", out.faults)
    if nested is not None:
        text.only("model_type", ("qwen3_5_moe_text",), "the wrapper holds another language model")
        top.only("quantization_config", (), "take the unquantised checkpoint")

    d = _dims(text)
    theta, d.rotary = _rope(text, d.head_dim)
    kinds = _layer_types(text, d.layers)
    eps = text.real("rms_norm_eps", 0.0, 1.0)
    max_position = text.integer("max_position_embeddings", 1, 1 << 30)
    renormalize = text.flag("norm_topk_prob", True)
    scaling = text.real("routed_scaling_factor", 0.0, 1e6, 1.0)
    _refuse_other_maths(text)
    tied, head_name = _tied(top, text, names, out)
    for reader in (top, text) if text is not top else (top,):
        reader.refuse_unknown(_HARMLESS)
        out.eos.append(reader.values.get("eos_token_id"))
    for kind, prefixes in _SKIPPED.items():
        out.skipped[kind] = sorted(name for name in names if name.startswith(prefixes))

    if d.layers > len(names) or 3 * d.experts > 10000 + 10 * len(names):
        out.tensor_faults.append(
            f"{text.where}: {d.layers} layers with {d.experts} experts cannot be in a "
            f"checkpoint of {len(names)} tensors"
        )
        return out
    found = [p for p in _PREFIXES if f"{p}embed_tokens.weight" in names]
    if len(found) > 1:
        out.tensor_faults.append(f"tensors under both {found[0]} and {found[1]}")
    prefix = found[0] if found else _PREFIXES[0 if nested is not None else 2]

    table = (d.vocab, d.hidden)
    embed = whole(f"{prefix}embed_tokens.weight", table)
    head = whole(head_name, table)
    same = head if tied and head_name in names else ()
    out.tensors.append(TensorSpec("embed", *table, "matrix", embed, same_as=same))
    if not tied:
        out.tensors.append(TensorSpec("head", *table, "matrix", head))
    final = whole(f"{prefix}norm.weight", (d.hidden,))
    out.tensors.append(TensorSpec("final_norm", 0, d.hidden, "f32", final, "add_one"))
    if d.rotary and "full_attention" in kinds:
        out.tensors.append(
            TensorSpec(
                "rope.0", 0, d.rotary // 2, "f64", constant=rope_frequencies(theta, d.rotary)
            )
        )

    for layer, kind in enumerate(kinds):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        for part, source in (
            ("mixer_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            pieces = whole(f"{p}{source}.weight", (d.hidden,))
            out.tensors.append(TensorSpec(n + part, 0, d.hidden, "f32", pieces, "add_one"))
        out.tensors += _mixer_tensors(p, n, kind, d)
        out.tensors += _moe_tensors(p, n, d)
        out.banks.append(_bank(p, layer, d, names))
    out.model = _model(d, kinds, eps, max_position, renormalize, scaling, tied)
    return out


def _model(
    d: _Dims,
    kinds: list[str],
    eps: float,
    max_position: int,
    renormalize: bool,
    scaling: float,
    tied: bool,
) -> dict[str, object]:
    """The manifest's `model` object, without its name."""
    attention = {
        "kind": "attention",
        "heads": d.heads,
        "kv_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "rotary_dim": d.rotary,
        "rope": "rope.0" if d.rotary else None,
        "qk_norm": True,
        "output_gate": d.output_gate,
    }
    delta = {
        "kind": "delta",
        "key_heads": d.key_heads,
        "value_heads": d.value_heads,
        "key_dim": d.key_dim,
        "value_dim": d.value_dim,
        "conv_taps": d.taps,
        "decay": "head",
        "gate": "silu",
        "qk_norm_eps": _QK_NORM_EPS,
        "norm_eps": eps,
    }
    moe = {
        "kind": "moe",
        "experts": d.experts,
        "top_k": d.top_k,
        "inner": d.inner,
        "router": "softmax",
        "renormalize": renormalize,
        "scaling": scaling,
        "activation": "silu_glu",
        "shared_inner": d.shared_inner,
        "shared_gate": d.shared_inner > 0,
    }
    parts = {"linear_attention": delta, "full_attention": attention}
    used = list(dict.fromkeys(kinds))
    return {
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "max_position": max_position,
        "norm_eps": eps,
        "residual": {"kind": "plain"},
        "head": "embed" if tied else "head",
        "mixers": [parts[kind] for kind in used],
        "ffns": [moe],
        "layers": [{"mixer": used.index(kind), "ffn": 0} for kind in kinds],
    }


FAMILY = Family(
    "qwen3_5_moe",
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    plan,
)
