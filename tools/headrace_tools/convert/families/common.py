"""What most families share: names around the layers, attention, experts, the model object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, ModelPlan, Piece, TensorSpec, whole
from .rope import Rope

DIM_MAX = 1 << 20
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
SKIPPED = {"vision": ("model.visual.", "visual."), "mtp": ("mtp.", "model.mtp.")}

# Keys of training, generation defaults, serialisation and of the skipped parts.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
    architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label image_token_id initializer_range is_decoder is_encoder_decoder label2id
    language_model_only length_penalty max_length max_window_layers min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache video_token_id vision_config
    vision_end_token_id vision_start_token_id
    """.split()
)


@dataclass
class Readers:
    """The config, and its part for the text model (the same where the config is flat)."""

    top: ConfigReader
    text: ConfigReader
    nested: bool

    def all(self) -> tuple[ConfigReader, ...]:
        return (self.top, self.text) if self.nested else (self.top,)


def open_config(
    config: Mapping[str, object], out: ModelPlan, text_types: tuple[str, ...] = ()
) -> Readers | None:
    """The readers of a flat or (when `text_types` names some) nested config; None on a fault."""
    top = ConfigReader(config, "config.json", out.faults)
    if not text_types:
        return Readers(top, top, False)
    nested = top.raw("text_config")
    if nested is None:
        return Readers(top, top, False)
    if not isinstance(nested, dict):
        top.fault("text_config must be an object")
        return None
    text = ConfigReader(nested, "config.json: text_config", out.faults)
    text.only("model_type", text_types, "the wrapper holds another language model")
    return Readers(top, text, True)


def close_config(readers: Readers, out: ModelPlan, harmless: frozenset[str] = HARMLESS) -> None:
    """Refuses every key that nobody looked at; collects the eos ids."""
    for reader in readers.all():
        reader.refuse_unknown(harmless)
        out.eos.append(reader.values.get("eos_token_id"))


def refuse_other_maths(text: ConfigReader) -> None:
    """Keys that other families of the same ancestry have and whose maths is another."""
    text.only("hidden_act", ("silu",), "the experts' activation is another")
    text.only("mlp_bias", (False,), "a feed-forward with bias is another model")
    text.only("use_sliding_window", (False,), "windowed attention is another model")
    text.only("scoring_func", ("softmax",), "the router is another")
    text.only("n_group", (1,), "grouped routing is another model")
    text.only("topk_group", (1,), "grouped routing is another model")
    text.only("is_causal", (True,), "the attention mask is another")


def skip_prefixed(
    out: ModelPlan, names: Mapping[str, TensorEntry], kinds: Mapping[str, tuple[str, ...]] = SKIPPED
) -> None:
    for kind, prefixes in kinds.items():
        out.skipped[kind] = sorted(name for name in names if name.startswith(prefixes))


def skip_draft_layers(
    out: ModelPlan, names: Mapping[str, TensorEntry], prefix: str, first: int, count: int
) -> None:
    """Layers behind the last are multi-token prediction modules: not part of the model."""
    prefixes = tuple(f"{prefix}layers.{first + i}." for i in range(count))
    found = sorted(name for name in names if prefixes and name.startswith(prefixes))
    out.skipped["mtp"] = sorted({*out.skipped.get("mtp", []), *found})


def possible(
    out: ModelPlan, where: str, layers: int, experts: int, names: Mapping[str, TensorEntry]
) -> bool:
    """False, with a fault, for sizes that would make the expected tensors absurdly many."""
    if layers <= len(names) and 3 * experts <= 10000 + 10 * len(names):
        return True
    out.tensor_faults.append(
        f"{where}: {layers} layers with {experts} experts cannot be in a "
        f"checkpoint of {len(names)} tensors"
    )
    return False


def find_prefix(out: ModelPlan, names: Mapping[str, TensorEntry], otherwise: str = "model.") -> str:
    """What stands before the text model's tensor names."""
    found = [p for p in PREFIXES if f"{p}embed_tokens.weight" in names]
    if len(found) > 1:
        out.tensor_faults.append(f"tensors under both {found[0]} and {found[1]}")
    return found[0] if found else otherwise


def tied_head(
    readers: Readers, names: Mapping[str, TensorEntry], out: ModelPlan, default: bool = False
) -> tuple[bool, str]:
    """(tied, name of the output matrix's tensor)."""
    flags = {
        reader.flag("tie_word_embeddings", default)
        for reader in readers.all()
        if "tie_word_embeddings" in reader.values
    } or {default}
    present = [name for name in HEADS if name in names]
    if len(present) > 1:
        out.tensor_faults.append(f"both {present[0]} and {present[1]} are in the checkpoint")
    head = present[0] if present else HEADS[0]
    if len(flags) == 2:
        out.notes.append(
            "config.json contradicts itself about tie_word_embeddings; "
            f"{head} is {'present' if present else 'absent'} and decides"
        )
        return not present, head
    return flags == {True}, head


def vector(name: str, source: str, n: int, transform: str = "") -> TensorSpec:
    return TensorSpec(name, 0, n, "f32", whole(source, (n,)), transform)


def matrix(name: str, source: str, rows: int, cols: int, kind: str = "matrix") -> TensorSpec:
    return TensorSpec(name, rows, cols, kind, whole(source, (rows, cols)))


def add_outside(
    out: ModelPlan,
    names: Mapping[str, TensorEntry],
    prefix: str,
    vocab: int,
    hidden: int,
    tied: bool,
    head_name: str,
    *,
    final_norm: str | None = "norm.weight",
    transform: str = "",
) -> None:
    """Embedding, output matrix and final norm."""
    table = (vocab, hidden)
    embed = whole(f"{prefix}embed_tokens.weight", table)
    head = whole(head_name, table)
    same = head if tied and head_name in names else ()
    out.tensors.append(TensorSpec("embed", *table, "matrix", embed, same_as=same))
    if not tied:
        out.tensors.append(TensorSpec("head", *table, "matrix", head))
    if final_norm is not None:
        out.tensors.append(vector("final_norm", prefix + final_norm, hidden, transform))


def add_rope(out: ModelPlan, rope: Rope, name: str = "rope.0") -> None:
    if rope.rotary:
        out.tensors.append(
            TensorSpec(name, 0, rope.rotary // 2, "f64", constant=rope.frequencies)
        )


def layer_norms(p: str, n: str, hidden: int, transform: str = "") -> list[TensorSpec]:
    return [
        vector(f"{n}mixer_norm", f"{p}input_layernorm.weight", hidden, transform),
        vector(f"{n}ffn_norm", f"{p}post_attention_layernorm.weight", hidden, transform),
    ]


# -- attention -------------------------------------------------------------------------------


@dataclass
class Attention:
    """An attention part and where its tensors come from.

    qk_norm: "", "head" or "vector"; gated: each head's rows of q_proj are [query | gate];
    norm_transform: of the q and k norms.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: str = ""
    gated: bool = False
    bias: bool = False
    output_bias: bool = False
    norm_transform: str = ""
    extra: dict[str, object] = field(default_factory=dict)

    def part(self) -> dict[str, object]:
        out: dict[str, object] = {
            "kind": "attention",
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rope.rotary,
            "rope": "rope.0" if self.rope.rotary else None,
            "qk_norm": bool(self.qk_norm),
            "output_gate": self.gated,
        }
        if self.rope.scale != 1.0:
            out["rope_scale"] = self.rope.scale
        if self.qk_norm == "vector":
            out["qk_norm_width"] = "vector"
        if self.bias:
            out["bias"] = True
        if self.output_bias:
            out["output_bias"] = True
        return {**out, **self.extra}

    def tensors(self, p: str, n: str) -> list[TensorSpec]:
        """p: source prefix ending in `self_attn.`; n: `layers.I.`."""
        h, width, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        n += "attn."
        q_shape = (width * (2 if self.gated else 1), h)
        out = []
        for part, skip in (("q", 0), ("gate", self.head_dim)) if self.gated else (("q", 0),):
            per_head = q_shape[0] // self.heads
            piece = Piece(
                f"{p}q_proj.weight", q_shape, h, skip, self.head_dim, self.heads, per_head
            )
            out.append(TensorSpec(f"{n}{part}", width, h, "matrix", (piece,)))
        for part in ("k", "v"):
            out.append(matrix(f"{n}{part}", f"{p}{part}_proj.weight", kv, h))
        out.append(matrix(f"{n}o", f"{p}o_proj.weight", h, width))
        if self.qk_norm:
            for part, wide in (("q", width), ("k", kv)):
                size = wide if self.qk_norm == "vector" else self.head_dim
                source = f"{p}{part}_norm.weight"
                out.append(vector(f"{n}{part}_norm", source, size, self.norm_transform))
        if self.bias:
            for part, size in (("q", width), ("k", kv), ("v", kv)):
                out.append(vector(f"{n}{part}_bias", f"{p}{part}_proj.bias", size))
        if self.output_bias:
            out.append(vector(f"{n}o_bias", f"{p}o_proj.bias", h))
        return out


@dataclass(frozen=True)
class HeadSizes:
    heads: int
    kv_heads: int
    head_dim: int


def read_heads(text: ConfigReader, hidden: int, *, explicit: bool = False) -> HeadSizes:
    """Head counts and width; without `head_dim` it is hidden_size / num_attention_heads."""
    heads = text.integer("num_attention_heads", 1, 1 << 16)
    kv_heads = text.integer("num_key_value_heads", 1, 1 << 16, None if explicit else heads)
    if heads % kv_heads:
        text.fault(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if text.raw("head_dim") is None and not explicit and hidden % heads:
        text.fault(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = text.integer(
        "head_dim", 1, 1 << 16, None if explicit else max(1, hidden // heads)
    )
    return HeadSizes(heads, kv_heads, head_dim)


# -- feed-forward ----------------------------------------------------------------------------

GLU = ("gate_proj", "up_proj", "down_proj")


def glu_tensors(
    p: str, n: str, hidden: int, inner: int, parts: tuple[str, str, str] = GLU
) -> list[TensorSpec]:
    """Gate, up and down of a resident feed-forward: sources p + part + ".weight"."""
    gate, up, down = parts
    return [
        matrix(f"{n}gate", f"{p}{gate}.weight", inner, hidden),
        matrix(f"{n}up", f"{p}{up}.weight", inner, hidden),
        matrix(f"{n}down", f"{p}{down}.weight", hidden, inner),
    ]


def separate_bank(
    p: str, layer: int, experts: int, hidden: int, inner: int, parts: tuple[str, str, str] = GLU
) -> BankSpec:
    """One tensor for each expert and matrix: p + expert + "." + part + ".weight"."""

    def pieces(expert: int) -> tuple[Piece, Piece, Piece]:
        gate, up, down = (f"{p}{expert}.{part}.weight" for part in parts)
        return (
            *whole(gate, (inner, hidden)),
            *whole(up, (inner, hidden)),
            *whole(down, (hidden, inner)),
        )  # type: ignore[return-value]

    return BankSpec(layer, experts, hidden, inner, False, pieces)


def fused_bank(
    gate_up: str, down: str, layer: int, experts: int, hidden: int, inner: int
) -> BankSpec:
    """gate_up [experts, 2 inner, hidden], gate rows first, and down [experts, hidden, inner]."""

    def pieces(expert: int) -> tuple[Piece, Piece, Piece]:
        both = (experts, 2 * inner, hidden)
        return (
            Piece(gate_up, both, hidden, expert * 2 * inner, inner),
            Piece(gate_up, both, hidden, expert * 2 * inner + inner, inner),
            Piece(down, (experts, hidden, inner), inner, expert * hidden, hidden),
        )

    return BankSpec(layer, experts, hidden, inner, True, pieces)


def either_bank(
    p: str, layer: int, experts: int, hidden: int, inner: int, names: Mapping[str, TensorEntry]
) -> BankSpec:
    """Fused tensors when the layer has one, else one tensor for each expert and matrix."""

    def suffix(name: str) -> str:
        return name if name in names or f"{name}.weight" not in names else f"{name}.weight"

    gate_up, down = suffix(f"{p}gate_up_proj"), suffix(f"{p}down_proj")
    if gate_up in names or down in names:
        return fused_bank(gate_up, down, layer, experts, hidden, inner)
    return separate_bank(p, layer, experts, hidden, inner)


def moe_part(
    experts: int,
    top_k: int,
    inner: int,
    *,
    router: str = "softmax",
    renormalize: bool = True,
    scaling: float = 1.0,
    shared_inner: int = 0,
    shared_gate: bool = False,
    **extra: object,
) -> dict[str, object]:
    return {
        "kind": "moe",
        "experts": experts,
        "top_k": top_k,
        "inner": inner,
        "router": router,
        "renormalize": renormalize,
        "scaling": scaling,
        "activation": "silu_glu",
        "shared_inner": shared_inner,
        "shared_gate": shared_gate and shared_inner > 0,
        **extra,
    }


def dense_part(inner: int) -> dict[str, object]:
    return {"kind": "dense", "inner": inner, "activation": "silu_glu"}


def sparse_layers(text: ConfigReader, layers: int) -> list[bool]:
    """Which layers route to experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    step = text.integer("decoder_sparse_step", 1, 1 << 16, 1)
    listed = text.raw("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < layers for i in listed
    ):
        text.fault(f"mlp_only_layers is {listed!r}, must list layers from 0 to {layers - 1}")
        listed = []
    return [i not in listed and (i + 1) % step == 0 for i in range(layers)]


# -- the manifest's model object ---------------------------------------------------------------


def model_object(
    *,
    vocab: int,
    hidden: int,
    max_position: int,
    eps: float,
    tied: bool,
    layers: list[tuple[dict[str, object], dict[str, object]]],
    residual: dict[str, object] | None = None,
    **extra: object,
) -> dict[str, object]:
    """`layers`: the (mixer, ffn) of each; equal parts become one entry."""
    mixers: list[dict[str, object]] = []
    ffns: list[dict[str, object]] = []

    def index(parts: list[dict[str, object]], part: dict[str, object]) -> int:
        if part not in parts:
            parts.append(part)
        return parts.index(part)

    listed = [{"mixer": index(mixers, m), "ffn": index(ffns, f)} for m, f in layers]
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "max_position": max_position,
        "norm_eps": eps,
        "residual": residual or {"kind": "plain"},
        "head": "embed" if tied else "head",
        "mixers": mixers,
        "ffns": ffns,
        "layers": listed,
        **extra,
    }


@dataclass(frozen=True)
class Sizes:
    vocab: int
    hidden: int
    layers: int
    eps: float
    max_position: int


def read_sizes(text: ConfigReader, eps: str = "rms_norm_eps") -> Sizes:
    return Sizes(
        text.integer("vocab_size", 1, 1 << 24),
        text.integer("hidden_size", 1, DIM_MAX),
        text.integer("num_hidden_layers", 1, 9999),
        text.real(eps, 0.0, 1.0),
        text.integer("max_position_embeddings", 1, 1 << 30),
    )
