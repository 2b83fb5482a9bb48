"""GLM-4.5/4.6/4.7-MoE and MiniMax-M2: plain attention, sigmoid router with a selection bias."""

from __future__ import annotations

from collections.abc import Mapping

from ..safetensors_source import TensorEntry
from . import Family, ModelPlan, common
from .common import Attention
from .quantised import Codings
from .rope import read_rope


def plan_glm4(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """GLM-4.x-MoE: first layers dense, ungated shared experts, layers behind the last are MTP."""
    out = ModelPlan("glm4_moe")
    readers = common.open_config(config, out)
    assert readers is not None
    text = readers.text
    size = common.read_sizes(text)
    h = size.hidden
    heads = common.read_heads(text, h)
    rope = read_rope(text, heads.head_dim, size.max_position, partial=0.5)
    attention = Attention(
        h, heads.heads, heads.kv_heads, heads.head_dim, rope,
        qk_norm="head" if text.flag("use_qk_norm", False) else "",
        bias=text.flag("attention_bias", False),
    )  # fmt: skip
    experts = text.integer("n_routed_experts", 1, 1 << 16)
    top_k = text.integer("num_experts_per_tok", 1, experts)
    inner = text.integer("moe_intermediate_size", 1, common.DIM_MAX)
    shared = text.integer("n_shared_experts", 0, 1 << 10, 1) * inner
    groups = text.integer("n_group", 1, 256, 1)
    top_groups = text.integer("topk_group", 1, groups, 1)
    if experts % groups:
        text.fault(f"n_routed_experts {experts} is not a multiple of n_group {groups}")
    elif experts // groups * top_groups < top_k:
        text.fault(
            f"topk_group {top_groups} of n_group {groups} leave {experts // groups * top_groups} "
            f"experts, num_experts_per_tok is {top_k}"
        )
    first = text.integer("first_k_dense_replace", 0, 9999, 1)
    dense = text.integer("intermediate_size", 1, common.DIM_MAX) if first else 0
    text.raw("intermediate_size")
    drafts = text.integer("num_nextn_predict_layers", 0, 64, 0)
    part = common.moe_part(
        experts, top_k, inner, router="sigmoid", select_bias=True,
        groups=groups, top_groups=top_groups, group_score="top2",
        renormalize=text.flag("norm_topk_prob", True),
        scaling=text.real("routed_scaling_factor", 0.0, 1e6, 1.0),
        shared_inner=shared,
    )  # fmt: skip
    text.only("hidden_act", ("silu",), "the experts' activation is another")
    text.only("scoring_func", ("sigmoid",), "the router is another")
    text.only("topk_method", ("noaux_tc",), "the router is another")
    text.only("sliding_window", (), "windowed attention is another model")
    codings = Codings.read(readers)
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out)
    common.skip_prefixed(out, names)
    if not common.possible(out, text.where, size.layers, experts, names):
        return out
    prefix = common.find_prefix(out, names)
    common.skip_draft_layers(out, names, prefix, size.layers, drafts)
    common.add_outside(out, names, prefix, size.vocab, h, tied, head_name)
    common.add_rope(out, rope)
    layers = []
    for layer in range(size.layers):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        out.tensors += common.layer_norms(p, n, h)
        out.tensors += attention.tensors(f"{p}self_attn.", n)
        if layer < first:
            out.tensors += common.glu_tensors(f"{p}mlp.", f"{n}ffn.", h, dense)
            layers.append((attention.part(), common.dense_part(dense)))
            continue
        router, bias = f"{p}mlp.gate.weight", f"{p}mlp.gate.e_score_correction_bias"
        out.tensors.append(common.matrix(f"{n}moe.router", router, experts, h, "exact"))
        out.tensors.append(common.vector(f"{n}moe.select_bias", bias, experts))
        if shared:
            source = f"{p}mlp.shared_experts."
            out.tensors += common.glu_tensors(source, f"{n}moe.shared.", h, shared)
        out.banks.append(
            common.either_bank(f"{p}mlp.experts.", layer, experts, h, inner, names)
        )
        layers.append((attention.part(), part))
    codings.apply(out, names)
    out.model = common.model_object(
        vocab=size.vocab, hidden=h, max_position=size.max_position, eps=size.eps,
        tied=tied, layers=layers,
    )  # fmt: skip
    return out


def plan_minimax(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """MiniMax-M2: q and k normalised over all heads together, `rotary_dim` given directly."""
    out = ModelPlan("minimax_m2")
    readers = common.open_config(config, out)
    assert readers is not None
    text = readers.text
    size = common.read_sizes(text)
    h = size.hidden
    heads = common.read_heads(text, h)
    rotary = text.integer("rotary_dim", 0, heads.head_dim, heads.head_dim)
    rope = read_rope(text, heads.head_dim, size.max_position, rotary=rotary)
    normed = text.flag("use_qk_norm", True)
    text.only("qk_norm_type", ("per_layer",), "q and k are normalised in another way")
    attention = Attention(
        h, heads.heads, heads.kv_heads, heads.head_dim, rope, qk_norm="vector" if normed else ""
    )
    experts = text.integer("num_local_experts", 1, 1 << 16)
    top_k = text.integer("num_experts_per_tok", 1, experts)
    inner = text.integer("intermediate_size", 1, common.DIM_MAX)
    text.only("hidden_act", ("silu",), "the experts' activation is another")
    text.only("scoring_func", ("sigmoid",), "the router is another")
    text.only("use_routing_bias", (True,), "the router is another")
    text.only("shared_intermediate_size", (0,), "a shared expert is another model")
    text.only("sliding_window", (), "windowed attention is another model")
    text.only("attention_bias", (False,), "projections with bias are another model")
    for key in ("full_attention", "linear_attention", "mlp"):
        text.only(f"layernorm_{key}_beta", (1, 1.0), "the residual is scaled")
    for key in ("mlp_intermediate_size", "shared_moe_mode"):  # of parts that are not used
        text.raw(key)
    listed = text.raw("attn_type_list", [1] * size.layers)
    if listed != [1] * size.layers:
        text.fault(f"attn_type_list is {listed!r}, only full attention (1) in every layer is known")
    draft = text.flag("use_mtp", False)
    modules = text.integer("num_mtp_modules", 0, 64, 0)
    text.raw("mtp_transformer_layers")
    codings = Codings.read(readers)
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out)
    common.skip_prefixed(out, names)
    if not common.possible(out, text.where, size.layers, experts, names):
        return out
    prefix = common.find_prefix(out, names)
    if draft:
        common.skip_draft_layers(out, names, prefix, size.layers, modules)
    common.add_outside(out, names, prefix, size.vocab, h, tied, head_name)
    common.add_rope(out, rope)
    part = common.moe_part(experts, top_k, inner, router="sigmoid", select_bias=True)
    for layer in range(size.layers):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        moe = f"{p}block_sparse_moe."
        out.tensors += common.layer_norms(p, n, h)
        out.tensors += attention.tensors(f"{p}self_attn.", n)
        router, bias = f"{moe}gate.weight", f"{moe}e_score_correction_bias"
        out.tensors.append(common.matrix(f"{n}moe.router", router, experts, h, "exact"))
        out.tensors.append(common.vector(f"{n}moe.select_bias", bias, experts))
        bank = common.separate_bank(
            f"{moe}experts.", layer, experts, h, inner, ("w1", "w3", "w2")
        )
        out.banks.append(bank)
    codings.apply(out, names)
    out.model = common.model_object(
        vocab=size.vocab, hidden=h, max_position=size.max_position, eps=size.eps,
        tied=tied, layers=[(attention.part(), part)] * size.layers,
    )  # fmt: skip
    return out


FAMILIES = (
    Family("glm4_moe", ("glm4_moe",), ("Glm4MoeForCausalLM",), plan_glm4),
    Family("minimax_m2", ("minimax_m2",), ("MiniMaxM2ForCausalLM",), plan_minimax),
)
