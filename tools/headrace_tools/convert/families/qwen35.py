"""Qwen3.5-MoE / Qwen3.6-MoE and Qwen3-Next: gated delta rule and gated attention, softmax experts.

Text class (flat config, names under `model.`) and multimodal wrapper (nested `text_config`,
names under `model.language_model.`). Qwen3-Next stores the delta rule's projections
interleaved by key head, and may have dense layers. Vision tower and draft module (`mtp.*`)
are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..safetensors_source import TensorEntry
from . import ConfigReader, Family, ModelPlan, TensorSpec, common
from .common import Attention
from .gated_delta import Delta, hybrid_layers, read_delta
from .quantised import Codings
from .rope import read_rope

HARMLESS = common.HARMLESS | frozenset(
    {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
)


@dataclass(frozen=True)
class HybridMoe:
    """The experts of a hybrid family: routed by softmax, with one gated shared expert."""

    hidden: int
    experts: int
    top_k: int
    inner: int
    shared_inner: int
    renormalize: bool
    scaling: float

    def part(self) -> dict[str, object]:
        return common.moe_part(
            self.experts,
            self.top_k,
            self.inner,
            renormalize=self.renormalize,
            scaling=self.scaling,
            shared_inner=self.shared_inner,
            shared_gate=True,
        )

    def tensors(self, p: str, n: str) -> list[TensorSpec]:
        """p: source prefix ending in `mlp.`; n: `layers.I.`."""
        n += "moe."
        out = [common.matrix(f"{n}router", f"{p}gate.weight", self.experts, self.hidden, "exact")]
        if self.shared_inner:
            shared = f"{p}shared_expert."
            out += common.glu_tensors(shared, f"{n}shared.", self.hidden, self.shared_inner)
            source = f"{p}shared_expert_gate.weight"
            out.append(common.matrix(f"{n}shared_gate", source, 1, self.hidden, "exact"))
        return out


def read_moe(text: ConfigReader, hidden: int) -> HybridMoe:
    experts = text.integer("num_experts", 1, 1 << 16)
    return HybridMoe(
        hidden,
        experts,
        text.integer("num_experts_per_tok", 1, experts),
        text.integer("moe_intermediate_size", 1, common.DIM_MAX),
        text.integer("shared_expert_intermediate_size", 0, common.DIM_MAX),
        text.flag("norm_topk_prob", True),
        text.real("routed_scaling_factor", 0.0, 1e6, 1.0),
    )


def refuse_other_maths(text: ConfigReader) -> None:
    common.refuse_other_maths(text)
    text.only("attention_bias", (False,), "projections with bias are another model")
    text.only("sliding_window", (), "windowed attention is another model")


def _dense_layers(text: ConfigReader, layers: int, allowed: bool) -> tuple[list[bool], int]:
    """(which layers route to experts, width of the dense ones)."""
    if allowed:
        routed = common.sparse_layers(text, layers)
        if not all(routed):
            return routed, text.integer("intermediate_size", 1, common.DIM_MAX)
    text.raw("intermediate_size")
    text.only("mlp_only_layers", ([],), "dense layers are not part of this family")
    text.only("decoder_sparse_step", (1,), "dense layers are not part of this family")
    return [True] * layers, 0


def _plan(
    name: str,
    text_types: tuple[str, ...],
    fused: bool,
    config: Mapping[str, object],
    names: Mapping[str, TensorEntry],
) -> ModelPlan:
    out = ModelPlan(name)
    readers = common.open_config(config, out, text_types)
    if readers is None:
        return out
    text = readers.text
    size = common.read_sizes(text)
    heads = common.read_heads(text, size.hidden, explicit=True)
    rope = read_rope(text, heads.head_dim, size.max_position, partial=0.25)
    attention = Attention(
        size.hidden, heads.heads, heads.kv_heads, heads.head_dim, rope,
        qk_norm="head", gated=text.flag("attn_output_gate", True), norm_transform="add_one",
    )  # fmt: skip
    delta: Delta = read_delta(text, size.hidden, size.eps, fused=fused)
    moe = read_moe(text, size.hidden)
    full = hybrid_layers(text, size.layers)
    routed, inner = _dense_layers(text, size.layers, fused)
    text.only("output_gate_type", ("swish", "silu"), "the delta rule's output gate is another")
    refuse_other_maths(text)
    codings = Codings.read(readers)
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out, HARMLESS)
    common.skip_prefixed(out, names)
    if not common.possible(out, text.where, size.layers, moe.experts, names):
        return out
    otherwise = common.PREFIXES[0 if readers.nested else 2]
    prefix = common.find_prefix(out, names, otherwise)

    common.add_outside(
        out, names, prefix, size.vocab, size.hidden, tied, head_name, transform="add_one"
    )
    if any(full):
        common.add_rope(out, rope)
    layers = []
    for layer, is_full in enumerate(full):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        out.tensors += common.layer_norms(p, n, size.hidden, "add_one")
        mixer = attention if is_full else delta
        out.tensors += mixer.tensors(p + ("self_attn." if is_full else "linear_attn."), n)
        if routed[layer]:
            out.tensors += moe.tensors(f"{p}mlp.", n)
            out.banks.append(
                common.either_bank(
                    f"{p}mlp.experts.", layer, moe.experts, size.hidden, moe.inner, names
                )
            )
            ffn = moe.part()
        else:
            out.tensors += common.glu_tensors(f"{p}mlp.", f"{n}ffn.", size.hidden, inner)
            ffn = common.dense_part(inner)
        layers.append((mixer.part(), ffn))
    codings.apply(out, names)
    out.model = common.model_object(
        vocab=size.vocab, hidden=size.hidden, max_position=size.max_position, eps=size.eps,
        tied=tied, layers=layers,
    )  # fmt: skip
    return out


def plan(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    return _plan("qwen3_5_moe", ("qwen3_5_moe_text",), False, config, names)


def plan_next(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    return _plan("qwen3_next", (), True, config, names)


FAMILIES = (
    Family(
        "qwen3_5_moe",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        plan,
    ),
    Family("qwen3_next", ("qwen3_next",), ("Qwen3NextForCausalLM",), plan_next),
)
