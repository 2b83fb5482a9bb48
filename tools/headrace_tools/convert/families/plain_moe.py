"""Plain attention and softmax-routed experts: Qwen3-MoE, OLMoE, Mixtral, Granite-MoE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, Family, ModelPlan, TensorSpec, common
from .common import Attention, Sizes
from .quantised import Codings
from .rope import read_rope


@dataclass(frozen=True)
class _Experts:
    """How a family names and routes its experts. `bank(prefix of the layer, layer)`."""

    part: dict[str, object]
    experts: int
    router: str
    bank: Callable[[str, int], BankSpec]


@dataclass
class _Open:
    """What every plan of this module has in hand after the config's common part."""

    out: ModelPlan
    readers: common.Readers
    text: ConfigReader
    size: Sizes
    attention: Attention
    codings: Codings


def _open(
    name: str,
    config: Mapping[str, object],
    *,
    qk_norm: str = "",
    explicit_head: bool = False,
    biased: bool = True,
) -> _Open:
    """biased: the family knows `attention_bias`, for q, k, v and o alike."""
    out = ModelPlan(name)
    readers = common.open_config(config, out)
    assert readers is not None  # only a nested config can be none
    text = readers.text
    size = common.read_sizes(text)
    heads = common.read_heads(text, size.hidden, explicit=explicit_head)
    rope = read_rope(text, heads.head_dim, size.max_position)
    bias = biased and text.flag("attention_bias", False)
    if not biased:
        text.only("attention_bias", (False,), "projections with bias are another model")
    attention = Attention(
        size.hidden, heads.heads, heads.kv_heads, heads.head_dim, rope,
        qk_norm=qk_norm, bias=bias, output_bias=bias,
    )  # fmt: skip
    common.refuse_other_maths(text)
    return _Open(out, readers, text, size, attention, Codings.read(readers))


def _finish(
    o: _Open,
    names: Mapping[str, TensorEntry],
    moe: _Experts,
    routed: list[bool] | None = None,
    inner: int = 0,
    *,
    tied_default: bool = False,
    residual: dict[str, object] | None = None,
    **extra: object,
) -> ModelPlan:
    """Tensors, banks and the model object. `inner`: width of the dense layers."""
    out, size = o.out, o.size
    tied, head_name = common.tied_head(o.readers, names, out, tied_default)
    common.close_config(o.readers, out)
    common.skip_prefixed(out, names)
    if not common.possible(out, o.text.where, size.layers, moe.experts, names):
        return out
    prefix = common.find_prefix(out, names)
    common.add_outside(out, names, prefix, size.vocab, size.hidden, tied, head_name)
    common.add_rope(out, o.attention.rope)
    layers = []
    for layer in range(size.layers):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        out.tensors += common.layer_norms(p, n, size.hidden)
        out.tensors += o.attention.tensors(f"{p}self_attn.", n)
        if routed is None or routed[layer]:
            out.tensors.append(_router(p, n, moe, size.hidden))
            out.banks.append(moe.bank(p, layer))
            ffn = moe.part
        else:
            out.tensors += common.glu_tensors(f"{p}mlp.", f"{n}ffn.", size.hidden, inner)
            ffn = common.dense_part(inner)
        layers.append((o.attention.part(), ffn))
    o.codings.apply(out, names)
    out.model = common.model_object(
        vocab=size.vocab, hidden=size.hidden, max_position=size.max_position, eps=size.eps,
        tied=tied, layers=layers, residual=residual, **extra,
    )  # fmt: skip
    return out


def _router(p: str, n: str, moe: _Experts, hidden: int) -> TensorSpec:
    return common.matrix(f"{n}moe.router", p + moe.router, moe.experts, hidden, "exact")


def _experts(text: ConfigReader, key: str) -> tuple[int, int]:
    experts = text.integer(key, 1, 1 << 16)
    return experts, text.integer("num_experts_per_tok", 1, experts)


def plan_qwen3(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """Qwen3-MoE: q and k normalised by head; some layers may be dense."""
    o = _open("qwen3_moe", config, qk_norm="head")
    text, h = o.text, o.size.hidden
    text.raw("sliding_window")  # counts only with use_sliding_window, which is refused
    experts, top_k = _experts(text, "num_experts")
    inner = text.integer("moe_intermediate_size", 1, common.DIM_MAX)
    routed, dense = common.sparse_layers(text, o.size.layers), 0
    if all(routed):
        text.raw("intermediate_size")
    else:
        dense = text.integer("intermediate_size", 1, common.DIM_MAX)
    part = common.moe_part(
        experts, top_k, inner, renormalize=text.flag("norm_topk_prob", False)
    )

    def bank(p: str, layer: int) -> BankSpec:
        return common.either_bank(f"{p}mlp.experts.", layer, experts, h, inner, names)

    return _finish(o, names, _Experts(part, experts, "mlp.gate.weight", bank), routed, dense)


def plan_olmoe(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """OLMoE: q and k normalised over all heads together."""
    o = _open("olmoe", config, qk_norm="vector")
    text, h = o.text, o.size.hidden
    text.only("clip_qkv", (), "clamped projections are another model")
    text.only("sliding_window", (), "windowed attention is another model")
    experts, top_k = _experts(text, "num_experts")
    inner = text.integer("intermediate_size", 1, common.DIM_MAX)
    part = common.moe_part(
        experts, top_k, inner, renormalize=text.flag("norm_topk_prob", False)
    )

    def bank(p: str, layer: int) -> BankSpec:
        return common.either_bank(f"{p}mlp.experts.", layer, experts, h, inner, names)

    return _finish(o, names, _Experts(part, experts, "mlp.gate.weight", bank))


def plan_mixtral(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """Mixtral: w1, w3, w2 are gate, up, down; always renormalised; maybe a window."""
    o = _open("mixtral", config, biased=False)
    text, h = o.text, o.size.hidden
    text.only("norm_topk_prob", (True,), "the router is another")
    if text.raw("sliding_window") is not None:
        o.attention.extra["window"] = text.integer("sliding_window", 1, 1 << 27)
    experts, top_k = _experts(text, "num_local_experts")
    inner = text.integer("intermediate_size", 1, common.DIM_MAX)

    def bank(p: str, layer: int) -> BankSpec:
        source = f"{p}block_sparse_moe.experts."
        return common.separate_bank(source, layer, experts, h, inner, ("w1", "w3", "w2"))

    moe = _Experts(
        common.moe_part(experts, top_k, inner), experts, "block_sparse_moe.gate.weight", bank
    )
    return _finish(o, names, moe)


def plan_granite(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """Granite-MoE: multipliers on embedding, residual, scores and logits; softmax of the chosen."""
    o = _open("granitemoe", config)
    text, h = o.text, o.size.hidden
    experts, top_k = _experts(text, "num_local_experts")
    inner = text.integer("intermediate_size", 1, common.DIM_MAX)
    o.attention.extra["scale"] = text.real("attention_multiplier", 0.0, 1e6, 1.0)
    embed = text.real("embedding_multiplier", 0.0, 1e6, 1.0)
    multiplier = text.real("residual_multiplier", 0.0, 1e6, 1.0)
    divisor = text.real("logits_scaling", 1e-6, 1e6, 1.0)
    part = common.moe_part(
        experts, top_k, inner, router="softmax_chosen", renormalize=False
    )

    def bank(p: str, layer: int) -> BankSpec:
        source = f"{p}block_sparse_moe."
        return common.fused_bank(
            f"{source}input_linear.weight", f"{source}output_linear.weight",
            layer, experts, h, inner,
        )  # fmt: skip

    moe = _Experts(part, experts, "block_sparse_moe.router.layer.weight", bank)
    return _finish(
        o, names, moe,
        residual={"kind": "plain", "multiplier": multiplier},
        embed_scale=embed, logit_scale=1.0 / divisor,
    )  # fmt: skip


FAMILIES = (
    Family("qwen3_moe", ("qwen3_moe",), ("Qwen3MoeForCausalLM",), plan_qwen3),
    Family("olmoe", ("olmoe",), ("OlmoeForCausalLM",), plan_olmoe),
    Family("mixtral", ("mixtral",), ("MixtralForCausalLM",), plan_mixtral),
    Family("granitemoe", ("granitemoe",), ("GraniteMoeForCausalLM",), plan_granite),
)
