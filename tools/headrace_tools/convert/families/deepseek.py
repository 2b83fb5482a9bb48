"""DeepSeek-V2, DeepSeek-V3 / R1 / V3.1, Kimi K2, Moonlight and GLM-4.7-Flash.

Latent attention; the first layers are dense, the others route to experts: V2 by softmax, greedily
or limited to groups; V3 by sigmoid with a bias that only selects. Layers behind the last
are multi-token prediction modules and skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, Family, ModelPlan, TensorSpec, common
from .common import matrix, vector
from .latent_attention import read_latent
from .quantised import Codings

HARMLESS = common.HARMLESS | frozenset(
    """
    aux_loss_alpha ep_size head_dim ignore_index media_placeholder_token_id seq_aux
    use_unified_vision_chunk video_placeholder
    """.split()
)
SKIPPED = {"vision": ("vision_tower.", "mm_projector.")}
INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a layer, their router and their shared expert.

    model: keys of the part that say how experts are chosen and computed; bias: the name of the
    bias that only selects, or "".
    """

    hidden: int
    experts: int
    top_k: int
    inner: int
    shared_inner: int
    model: dict[str, object]
    bias: str = ""

    def part(self) -> dict[str, object]:
        out = {
            "kind": "moe",
            "experts": self.experts,
            "top_k": self.top_k,
            "inner": self.inner,
            "shared_inner": self.shared_inner,
            "shared_gate": False,
            "activation": "silu_glu",
            **self.model,
        }
        if self.bias:
            out["select_bias"] = True
        return out

    def tensors(self, p: str, n: str) -> list[TensorSpec]:
        """p: source prefix of the feed-forward, ending in a dot; n: `layers.I.`."""
        n += "moe."
        out = [matrix(f"{n}router", f"{p}gate.weight", self.experts, self.hidden, "exact")]
        if self.bias:
            out.append(vector(f"{n}select_bias", p + self.bias, self.experts))
        if self.shared_inner:
            shared = f"{p}shared_experts."
            out += common.glu_tensors(shared, f"{n}shared.", self.hidden, self.shared_inner)
        return out


def require(text: ConfigReader, *keys: str) -> None:
    """Keys whose default differs between implementations must be there (null is a value)."""
    for key in keys:
        if key not in text.values:
            text.fault(f"{key} is missing")


def check_groups(text: ConfigReader, experts: int, top_k: int, groups: int, kept: int) -> None:
    """Groups must divide the experts, and those kept must hold enough of them."""
    if experts % groups:
        text.fault(f"{experts} experts do not divide into {groups} groups")
    elif kept > groups:
        text.fault(f"{kept} of {groups} groups of experts cannot be kept")
    elif experts // groups * kept < top_k:
        text.fault(
            f"{kept} groups of {experts // groups} experts hold fewer than the {top_k} to choose"
        )


def read_shared(text: ConfigReader, key: str, inner: int) -> int:
    """Several shared experts are one that is as wide as all of them."""
    return text.integer(key, 0, 1 << 10, 0) * inner


def routed_layers(text: ConfigReader, layers: int) -> list[bool]:
    """Which layers have experts: from first_k_dense_replace on, every moe_layer_freq-th."""
    listed = text.raw("mlp_layer_types")
    if listed is None:
        require(text, "first_k_dense_replace")
    first = text.integer("first_k_dense_replace", 0, layers, 0)
    every = text.integer("moe_layer_freq", 1, 1 << 16, 1)
    if listed is None:
        return [i >= first and i % every == 0 for i in range(layers)]
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(kind not in ("dense", "sparse") for kind in listed)
    ):
        text.fault(f"mlp_layer_types must say dense or sparse for each of the {layers} layers")
        return [False] * layers
    return [kind == "sparse" for kind in listed]


def _read_router(text: ConfigReader, old: bool, experts: int, top_k: int) -> dict[str, object]:
    """The routing keys of the part; `old`: V2's defaults."""
    scoring = text.raw("scoring_func", "softmax" if old else "sigmoid")
    method = text.raw("topk_method", "greedy" if old else "noaux_tc")
    groups = text.integer("n_group", 1, 256, 1)
    kept = text.integer("topk_group", 1, 256, 1)
    renormalize = text.flag("norm_topk_prob", not old)
    require(text, "routed_scaling_factor", "norm_topk_prob")
    if method != "greedy":
        require(text, "n_group", "topk_group")
    out: dict[str, object] = {
        "router": scoring,
        "renormalize": renormalize,
        "scaling": text.real("routed_scaling_factor", 0.0, 1e6, 1.0),
    }
    if scoring == "softmax" and method in ("greedy", "group_limited_greedy"):
        if renormalize:
            text.fault(
                "norm_topk_prob is True: what it means with scoring_func softmax differs between "
                "implementations of this family"
            )
        if method == "greedy":
            return out
        out["group_score"] = "max"
    elif scoring != "sigmoid" or method != "noaux_tc":
        text.fault(
            f"scoring_func {scoring!r} with topk_method {method!r} is not supported: softmax with "
            "greedy or group_limited_greedy, and sigmoid with noaux_tc are"
        )
        return {**out, "router": "sigmoid"}
    check_groups(text, experts, top_k, groups, kept)
    if groups > 1:
        out.update(groups=groups, top_groups=kept)
    return out


def _read_moe(text: ConfigReader, old: bool, hidden: int) -> RoutedExperts:
    experts = text.integer("n_routed_experts", 1, 1 << 16)
    top_k = text.integer("num_experts_per_tok", 1, min(experts, 256))
    inner = text.integer("moe_intermediate_size", 1, common.DIM_MAX)
    shared = read_shared(text, "n_shared_experts", inner)
    model = _read_router(text, old, experts, top_k)
    bias = "gate.e_score_correction_bias" if model["router"] == "sigmoid" else ""
    return RoutedExperts(hidden, experts, top_k, inner, shared, model, bias)


def skip_buffers(out: ModelPlan, names: Mapping[str, TensorEntry]) -> None:
    """Old checkpoints hold the rotation's frequencies, which follow from the config."""
    found = sorted(name for name in names if name.endswith(INVERSE_FREQUENCIES))
    if found:
        out.skipped["buffers"] = found


def plan(
    name: str,
    old: bool,
    text_types: tuple[str, ...],
    config: Mapping[str, object],
    names: Mapping[str, TensorEntry],
) -> ModelPlan:
    """See `families.Family`; `old`: V2."""
    out = ModelPlan(name)
    readers = common.open_config(config, out, text_types)
    if readers is None:
        return out
    text = readers.text
    size = common.read_sizes(text)
    attention = read_latent(text, size.hidden, size.max_position, rotated=True, theta=10000.0)
    routed = routed_layers(text, size.layers)
    inner = text.integer("intermediate_size", 1, common.DIM_MAX, None if not all(routed) else 1)
    moe = _read_moe(text, old, size.hidden)
    text.only("hidden_act", ("silu",), "the experts' activation is another")
    text.only("mlp_bias", (False,), "a feed-forward with bias is another model")
    drafts = text.integer("num_nextn_predict_layers", 0, 64, 0)
    codings = Codings.read(readers)
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out, HARMLESS)
    if not common.possible(out, text.where, size.layers, moe.experts, names):
        return out
    prefix = common.find_prefix(out, names, common.PREFIXES[1 if readers.nested else 2])
    common.skip_prefixed(out, names, SKIPPED if readers.nested else {})
    common.skip_draft_layers(out, names, prefix, size.layers, drafts)
    skip_buffers(out, names)

    common.add_outside(out, names, prefix, size.vocab, size.hidden, tied, head_name)
    if attention.rope is not None:
        common.add_rope(out, attention.rope)
    layers = []
    for layer in range(size.layers):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        out.tensors += common.layer_norms(p, n, size.hidden)
        out.tensors += attention.tensors(f"{p}self_attn.", n)
        if routed[layer]:
            out.tensors += moe.tensors(f"{p}mlp.", n)
            out.banks.append(_bank(f"{p}mlp.experts.", layer, moe))
            ffn = moe.part()
        else:
            out.tensors += common.glu_tensors(f"{p}mlp.", f"{n}ffn.", size.hidden, inner)
            ffn = common.dense_part(inner)
        layers.append((attention.part(), ffn))
    codings.apply(out, names)
    out.model = common.model_object(
        vocab=size.vocab, hidden=size.hidden, max_position=size.max_position, eps=size.eps,
        tied=tied, layers=layers,
    )  # fmt: skip
    return out


def _bank(p: str, layer: int, moe: RoutedExperts) -> BankSpec:
    return common.separate_bank(p, layer, moe.experts, moe.hidden, moe.inner)


def _planner(
    name: str, old: bool, text_types: tuple[str, ...] = ()
) -> Callable[[Mapping[str, object], Mapping[str, TensorEntry]], ModelPlan]:
    return lambda config, names: plan(name, old, text_types, config, names)


FAMILIES = (
    Family("deepseek_v2", ("deepseek_v2",), ("DeepseekV2ForCausalLM",), _planner("deepseek_v2", True)),
    Family(
        "deepseek_v3",
        ("deepseek_v3", "kimi_k2"),
        ("DeepseekV3ForCausalLM",),
        _planner("deepseek_v3", False),
    ),
    Family(
        "kimi_k25",
        ("kimi_k25",),
        ("KimiK25ForConditionalGeneration",),
        _planner("kimi_k25", False, ("kimi_k2", "deepseek_v3")),
    ),
    Family(
        "glm4_moe_lite",
        ("glm4_moe_lite",),
        ("Glm4MoeLiteForCausalLM",),
        _planner("glm4_moe_lite", False),
    ),
)  # fmt: skip
