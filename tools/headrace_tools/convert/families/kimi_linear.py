"""Kimi Linear and Kimi K3: delta attention with a decay for each key channel, latent attention
without rotation, sigmoid-routed experts.

K3 adds attention residuals, output gates, experts that work on a narrower latent, another
activation and MXFP4 experts; its text model is nested under `text_config` and
`language_model.`, and its vision tower and projector are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, Family, ModelPlan, Piece, TensorSpec, common, whole
from .common import matrix, vector
from .deepseek import (
    RoutedExperts,
    check_groups,
    read_shared,
    require,
    routed_layers,
    skip_buffers,
)
from .gated_delta import QK_NORM_EPS
from .latent_attention import Latent, read_latent
from .quantised import Codings

HARMLESS = common.HARMLESS | frozenset(
    "head_dim ignore_index image_placeholder media_placeholder_token_id rope_theta".split()
)
SKIPPED = {"vision": ("vision_tower.",), "projector": ("mm_projector.",)}
_EXPERT_PARTS = ("w1", "w3", "w2")


@dataclass(frozen=True)
class ChannelDelta:
    """The delta rule with a decay for each key channel (KDA) and where its tensors come from.

    bound: of the decay's logarithm, or 0; full_gate: the output gate is one matrix.
    """

    hidden: int
    heads: int
    dim: int
    taps: int
    eps: float
    bound: float
    full_gate: bool

    def part(self) -> dict[str, object]:
        out: dict[str, object] = {
            "kind": "delta",
            "key_heads": self.heads,
            "value_heads": self.heads,
            "key_dim": self.dim,
            "value_dim": self.dim,
            "conv_taps": self.taps,
            "decay": "channel",
            "decay_rank": self.dim,
            "gate": "sigmoid",
            "qk_norm_eps": QK_NORM_EPS,
            "norm_eps": self.eps,
        }
        if self.bound:
            out.update(decay_gate="bounded", decay_bound=self.bound)
        if not self.full_gate:
            out["gate_rank"] = self.dim
        return out

    def tensors(self, p: str, n: str, names: Mapping[str, TensorEntry]) -> list[TensorSpec]:
        """p: source prefix ending in `self_attn.`; n: `layers.I.`."""
        n += "delta."
        h, d, width = self.hidden, self.dim, self.heads * self.dim
        qkv, conv = (), ()
        for part in "qkv":
            qkv += whole(f"{p}{part}_proj.weight", (width, h))
            conv += whole(f"{p}{part}_conv1d.weight", (width, 1, self.taps))
        out = [
            TensorSpec(f"{n}qkv", 3 * width, h, "matrix", qkv),
            TensorSpec(f"{n}conv", self.taps, 3 * width, "f32", conv, "transpose"),
            matrix(f"{n}a_down", f"{p}f_a_proj.weight", d, h, "exact"),
            matrix(f"{n}a_up", f"{p}f_b_proj.weight", width, d, "exact"),
            matrix(f"{n}b", f"{p}b_proj.weight", self.heads, h, "exact"),
            self._a_log(p, n, names),
            vector(f"{n}dt_bias", f"{p}dt_bias", width),
            vector(f"{n}norm", f"{p}o_norm.weight", d),
            matrix(f"{n}out", f"{p}o_proj.weight", h, width),
        ]
        if self.full_gate:
            out.append(matrix(f"{n}z", f"{p}g_proj.weight", width, h))
        else:
            out.append(matrix(f"{n}z_down", f"{p}g_a_proj.weight", d, h))
            out.append(matrix(f"{n}z_up", f"{p}g_b_proj.weight", width, d))
        return out

    def _a_log(self, p: str, n: str, names: Mapping[str, TensorEntry]) -> TensorSpec:
        """One number a head, in whatever shape, and possibly zeros behind them."""
        source = f"{p}A_log"
        entry = names.get(source)
        shape: tuple[int, ...] = (self.heads,)
        if entry is not None and max(entry.shape, default=0) == entry.elements >= self.heads:
            shape = entry.shape
        beyond = max(shape) - self.heads
        zeros = (Piece(source, shape, 1, self.heads, beyond),) if beyond else ()
        pieces = (Piece(source, shape, 1, 0, self.heads),)
        return TensorSpec(f"{n}a_log", 0, self.heads, "f32", pieces, zeros=zeros)


def _read_delta(text: ConfigReader, linear: ConfigReader, hidden: int, eps: float) -> ChannelDelta:
    bound = linear.raw("gate_lower_bound")
    if bound is not None and (
        not isinstance(bound, (int, float)) or isinstance(bound, bool) or not -1e6 < bound < 0
    ):
        linear.fault(f"gate_lower_bound is {bound!r}, must be a negative number")
        bound = -1.0
    return ChannelDelta(
        hidden,
        linear.integer("num_heads", 1, 1 << 16),
        linear.integer("head_dim", 1, common.DIM_MAX),
        linear.integer("short_conv_kernel_size", 1, 8),
        eps,
        float(bound or 0.0),
        linear.flag("use_full_rank_gate", False),
    )


def _attention_layers(linear: ConfigReader, layers: int) -> list[bool]:
    """Which layers are latent attention. The two lists count from 1 and name each layer once."""
    lists: dict[str, list[int]] = {}
    for key in ("full_attn_layers", "kda_layers"):
        value = linear.raw(key)
        if not isinstance(value, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) for i in value
        ):
            linear.fault(f"{key} must be a list of layer numbers, counted from 1")
            return []
        lists[key] = value
        if outside := sorted({i for i in value if not 1 <= i <= layers}):
            linear.fault(
                f"{key} names layers {outside}, which are not among 1 to {layers} "
                "(num_hidden_layers)"
            )
    both = [*lists["full_attn_layers"], *lists["kda_layers"]]
    if twice := sorted({i for i in both if both.count(i) > 1}):
        linear.fault(f"full_attn_layers and kda_layers name layers {twice} more than once")
    if missing := sorted(set(range(1, layers + 1)) - set(both)):
        linear.fault(f"neither full_attn_layers nor kda_layers names layers {missing}")
    full = set(lists["full_attn_layers"])
    return [i in full for i in range(1, layers + 1)]


def _read_activation(text: ConfigReader) -> dict[str, object]:
    text.only("hidden_act", ("silu", "situ"), "the experts' activation is another")
    beta = text.raw("activation_situ_beta")
    linear_beta = text.raw("activation_situ_linear_beta")
    if text.raw("hidden_act") != "situ":
        return {"activation": "silu_glu"}
    out: dict[str, object] = {"activation": "situ_glu", "linear_beta": 0.0}
    if beta is None:
        text.fault("activation_situ_beta is missing")
    out["beta"] = text.real("activation_situ_beta", 0.0, 1e6, 1.0)
    if linear_beta is not None:
        out["linear_beta"] = text.real("activation_situ_linear_beta", 0.0, 1e6)
    return out


@dataclass(frozen=True)
class LatentExperts(RoutedExperts):
    """Routed experts that may work on a latent of the hidden state (`latent` wide, or 0)."""

    latent: int = 0
    latent_norm: bool = False

    def part(self) -> dict[str, object]:
        out = super().part()
        if self.latent:
            out.update(latent=self.latent, latent_norm=self.latent_norm)
        return out

    def tensors(self, p: str, n: str) -> list[TensorSpec]:
        out = super().tensors(p, n)
        n += "moe."
        if self.latent:
            h = self.hidden
            out.append(
                matrix(f"{n}latent_down", f"{p}routed_expert_down_proj.weight", self.latent, h)
            )
            out.append(
                matrix(f"{n}latent_up", f"{p}routed_expert_up_proj.weight", h, self.latent)
            )
        if self.latent_norm:
            source = f"{p}routed_expert_norm.weight"
            out.append(vector(f"{n}latent_norm", source, self.latent))
        return out

    def bank(self, p: str, layer: int) -> BankSpec:
        """p: source prefix ending in `experts.`."""
        width = self.latent or self.hidden
        return common.separate_bank(p, layer, self.experts, width, self.inner, _EXPERT_PARTS)


def _read_moe(
    text: ConfigReader, hidden: int, activation: dict[str, object]
) -> LatentExperts:
    experts = text.integer("num_experts", 1, 1 << 16)
    top_k = text.integer("num_experts_per_token", 1, min(experts, 256))
    inner = text.integer("moe_intermediate_size", 1, common.DIM_MAX)
    shared = read_shared(text, "num_shared_experts", inner)
    text.only("moe_router_activation_func", ("sigmoid",), "the router is another")
    text.only("topk_method", ("noaux_tc",), "the router is another")
    require(text, "num_expert_group", "topk_group", "routed_scaling_factor", "moe_renormalize")
    groups = text.integer("num_expert_group", 1, 256, 1)
    kept = text.integer("topk_group", 1, 256, 1)
    model: dict[str, object] = {
        "router": "sigmoid",
        "renormalize": text.flag("moe_renormalize", True),
        "scaling": text.real("routed_scaling_factor", 0.0, 1e6, 1.0),
        **activation,
    }
    if text.flag("use_grouped_topk", True) and groups > 1:
        check_groups(text, experts, top_k, groups, kept)
        model.update(groups=groups, top_groups=kept)
    latent = text.integer("routed_expert_hidden_size", 1, common.DIM_MAX, hidden)
    has_latent = text.raw("routed_expert_hidden_size") is not None
    norm = text.flag("latent_moe_use_norm", False)
    return LatentExperts(
        hidden, experts, top_k, inner, shared, model, "gate.e_score_correction_bias",
        latent if has_latent else 0, norm and has_latent,
    )  # fmt: skip


def _residual_vector(name: str, source: str, hidden: int) -> TensorSpec:
    """Norm weight times projection of a site of the attention residuals."""
    return TensorSpec(
        name, 0, hidden, "f32", whole(f"{source}_norm.weight", (hidden,)),
        times=whole(f"{source}_proj.weight", (1, hidden)),
    )  # fmt: skip


def _read_attention(text: ConfigReader, hidden: int, max_position: int) -> Latent:
    if text.raw("mla_use_nope") is not True:
        text.fault(
            f"mla_use_nope is {text.raw('mla_use_nope')!r}, only True is supported: rotated "
            "attention is another model"
        )
    text.only("rope_scaling", (), "nothing is rotated in this family")
    text.raw("rope_parameters")
    gated = text.flag("mla_use_output_gate", False)
    return read_latent(text, hidden, max_position, rotated=False, gated=gated)


def _dense(p: str, names: Mapping[str, TensorEntry]) -> str:
    """The dense layers' feed-forward goes by its own name or by that of the routed ones."""
    routed = f"{p}block_sparse_moe."
    return routed if f"{routed}gate_proj.weight" in names else f"{p}mlp."


def _plan(
    name: str,
    text_types: tuple[str, ...],
    config: Mapping[str, object],
    names: Mapping[str, TensorEntry],
) -> ModelPlan:
    out = ModelPlan(name)
    readers = common.open_config(config, out, text_types)
    if readers is None:
        return out
    text = readers.text
    vocab = text.integer("vocab_size", 1, 1 << 24)
    hidden = text.integer("hidden_size", 1, common.DIM_MAX)
    count = text.integer("num_hidden_layers", 1, 9999)
    eps = text.real("rms_norm_eps", 0.0, 1.0)
    longest = text.raw("model_max_length")
    max_position = text.integer(
        "max_position_embeddings", 1, 1 << 30, longest if isinstance(longest, int) else None
    )
    nested = text.raw("linear_attn_config")
    if not isinstance(nested, dict):
        text.fault("linear_attn_config is missing or no object")
        return out
    linear = ConfigReader(nested, f"{text.where}: linear_attn_config", out.faults)
    delta = _read_delta(text, linear, hidden, eps)
    full = _attention_layers(linear, count)
    linear.refuse_unknown(frozenset())
    attention = _read_attention(text, hidden, max_position)
    activation = _read_activation(text)
    routed = routed_layers(text, count)
    moe = _read_moe(text, hidden, activation)
    inner = text.integer("intermediate_size", 1, common.DIM_MAX, 1 if all(routed) else None)
    block = text.integer("attn_res_block_size", 1, 9999, 9999)
    has_blocks = text.raw("attn_res_block_size") is not None
    drafts = text.integer("num_nextn_predict_layers", 0, 64, 0)
    codings = Codings.read(readers)
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out, HARMLESS)
    if not full or not common.possible(out, text.where, count, moe.experts, names):
        return out
    prefix = common.find_prefix(out, names, common.PREFIXES[1 if readers.nested else 2])
    common.skip_prefixed(out, names, SKIPPED if readers.nested else {})
    common.skip_draft_layers(out, names, prefix, count, drafts)
    skip_buffers(out, names)

    common.add_outside(out, names, prefix, vocab, hidden, tied, head_name)
    if has_blocks:
        out.tensors.append(_residual_vector("final_res", f"{prefix}output_attn_res", hidden))
    layers = []
    for layer in range(count):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        out.tensors += common.layer_norms(p, n, hidden)
        if has_blocks:
            out.tensors.append(
                _residual_vector(f"{n}mixer_res", f"{p}self_attention_res", hidden)
            )
            out.tensors.append(_residual_vector(f"{n}ffn_res", f"{p}mlp_res", hidden))
        if full[layer]:
            out.tensors += attention.tensors(f"{p}self_attn.", n)
        else:
            out.tensors += delta.tensors(f"{p}self_attn.", n, names)
        if routed[layer]:
            out.tensors += moe.tensors(f"{p}block_sparse_moe.", n)
            out.banks.append(moe.bank(f"{p}block_sparse_moe.experts.", layer))
            ffn = moe.part()
        else:
            out.tensors += common.glu_tensors(_dense(p, names), f"{n}ffn.", hidden, inner)
            ffn = {"kind": "dense", "inner": inner, **activation}
        layers.append((attention.part() if full[layer] else delta.part(), ffn))
    codings.apply(out, names)
    out.model = common.model_object(
        vocab=vocab, hidden=hidden, max_position=max_position, eps=eps, tied=tied, layers=layers,
        residual={"kind": "attn_res", "block": block} if has_blocks else None,
    )  # fmt: skip
    return out


def plan_linear(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    return _plan("kimi_linear", (), config, names)


def plan_k3(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    return _plan("kimi_k3", ("kimi_linear",), config, names)


FAMILIES = (
    Family("kimi_linear", ("kimi_linear",), ("KimiLinearForCausalLM",), plan_linear),
    Family("kimi_k3", ("kimi_k3",), ("KimiK3ForConditionalGeneration",), plan_k3),
)
